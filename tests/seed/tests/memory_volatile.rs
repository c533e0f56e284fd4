//! Device memory crept up until it ran out.
//!
//! Held to: once an executor is prepared, no step allocates on the device, and the driver shows the same free memory to the byte.

use drafthorse_cuda::Options;
use drafthorse_graph::Executor;
use drafthorse_seed::gpu::{drafter, executor, fill, store, train, weights};
use std::sync::Arc;

#[test]
fn device_memory_is_constant_to_the_byte_after_the_gate() {
    let Some(store) = store("memory_volatile") else { return };
    let case = drafter();
    let mut exec = executor(&case, &store, &Options::default()).unwrap();
    exec.prepare().unwrap();
    fill(&mut exec, &case);
    // The first read makes the pinned buffers that later ones use.
    weights(&mut exec, &case);
    let device = Arc::clone(store.device());
    let held = || (device.allocations(), device.allocated_bytes(), device.memory().unwrap().free);
    let before = held();
    for _ in 0..10 {
        train(&mut exec, &case, 20);
        weights(&mut exec, &case);
        assert_eq!(held(), before);
    }
}
