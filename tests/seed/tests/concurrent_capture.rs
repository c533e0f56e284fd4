//! Eight threads captured on one device and corrupted each other.
//!
//! Held to: five threads in a target's place and three in a drafter's prepare, capture and replay together, a hundred steps each, and every one ends with
//! the bits of the step that was never captured.

use drafthorse_cuda::Options;
use drafthorse_graph::Executor;
use drafthorse_seed::gpu::{drafter, executor, fill, store, train, weights};

#[test]
fn threads_that_capture_together_end_with_the_bits_of_the_uncaptured_step() {
    let Some(store) = store("concurrent_capture") else { return };
    let case = drafter();
    // One table of algorithms, as a run has.
    let options = Options::default();
    let run = |options: &Options| {
        let mut exec = executor(&case, &store, options).unwrap();
        exec.prepare().unwrap();
        fill(&mut exec, &case);
        train(&mut exec, &case, 100);
        weights(&mut exec, &case)
    };
    let uncaptured = run(&Options { capture: false, ..options.clone() });
    std::thread::scope(|scope| {
        let together: Vec<_> = (0..5 + 3).map(|_| scope.spawn(|| run(&options))).collect();
        for thread in together {
            assert!(thread.join().unwrap() == uncaptured, "a thread's weights differ");
        }
    });
}
