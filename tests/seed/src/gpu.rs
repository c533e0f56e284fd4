//! The drafter in miniature on GPU 0, for the failures that only a device can show.
//!
//! Job: open the GPU or say loudly that there is none, make executors of one program, fill them with one content. Refuses to judge. Invariant: two
//! executors that were filled here and run the same phases hold the same bits, unless something is wrong.

use drafthorse_cuda::{CudaError, CudaExecutor, Device, FrozenStore, Libraries, Options, SearchPaths};
use drafthorse_graph::{DType, Executor, HostMut, HostRef, Role, SlotArg};
use drafthorse_testkit::device_gate::require_device;
use drafthorse_testkit::op_suite::{Case, FrozenData, MiniDrafterOptions, mini_drafter};
use drafthorse_testkit::oracle::Value;
use std::sync::Arc;

/// GPU 0 with its kernels, or `None` after a loud line; a missing one is a failure where DRAFTHORSE_DEVICE_REQUIRED=1.
pub fn store(test: &str) -> Option<Arc<FrozenStore>> {
    let open = || -> Result<Arc<FrozenStore>, CudaError> {
        let libraries = Libraries::load(&SearchPaths::usual(|name| std::env::var_os(name)))?;
        Ok(Arc::new(FrozenStore::new(Device::open(&libraries, 0)?)?))
    };
    require_device(test, open())
}

/// A drafter of three small layers with all phases of a training step.
pub fn drafter() -> Case {
    mini_drafter(MiniDrafterOptions { act: DType::BF16, layers: 3, window: None, recompute: false, head_dim: Some(64) }).case
}

/// An executor of a case, not prepared.
///
/// # Errors
/// The executor's.
pub fn executor(case: &Case, store: &FrozenStore, options: &Options) -> Result<CudaExecutor, CudaError> {
    let frozen = case.frozen();
    let content = frozen.iter().map(|(&t, FrozenData::F32(data))| (t, data.as_slice()));
    let own = Arc::new(store.sibling_with(&case.program, content)?);
    CudaExecutor::new(Arc::clone(&case.program), &own, options.clone())
}

/// Writes the case's content.
///
/// # Panics
/// When the device fails.
pub fn fill(exec: &mut CudaExecutor, case: &Case) {
    for (t, value) in &case.values {
        match (case.program.get(*t).role, value) {
            (Role::Frozen | Role::Slot | Role::Phase, _) => {}
            (_, Value::Float(v)) => {
                let v: Vec<f32> = v.iter().map(|&x| x as f32).collect();
                exec.write(*t, HostRef::F32(&v)).expect("the device takes the content");
            }
            (_, Value::Int(v)) => exec.write(*t, HostRef::I32(v)).expect("the device takes the content"),
        }
    }
}

/// Runs all phases `steps` times.
///
/// # Panics
/// When the device fails.
pub fn train(exec: &mut CudaExecutor, case: &Case, steps: usize) {
    for _ in 0..steps {
        for &phase in &case.phases {
            exec.run(phase, SlotArg::None).expect("the device runs the phase");
        }
    }
}

/// Bits of every weight, in the program's order.
///
/// # Panics
/// When the device fails.
pub fn weights(exec: &mut CudaExecutor, case: &Case) -> Vec<Vec<u32>> {
    let read = |t| {
        let mut v = vec![0.0f32; case.program.get(t).len()];
        exec.read(t, HostMut::F32(&mut v)).expect("the device gives the weights");
        v.iter().map(|x| x.to_bits()).collect()
    };
    case.program.of_role(Role::Weight).into_iter().map(read).collect()
}
