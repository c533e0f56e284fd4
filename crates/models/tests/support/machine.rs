//! A CPU executor with its program, and reads and writes that panic instead of returning errors.

use drafthorse_cpu::{CpuExecutor, FrozenSet, Options};
use drafthorse_graph::{Executor, HostMut, HostRef, PhaseId, Program, SlotArg, TensorId};
use std::sync::Arc;

/// See the module.
pub struct Machine {
    pub program: Arc<Program>,
    pub exec: CpuExecutor,
}

impl Machine {
    /// An executor on two threads.
    pub fn new(program: Program, frozen: &FrozenSet) -> Machine {
        let pool = Arc::new(rayon::ThreadPoolBuilder::new().num_threads(2).build().unwrap());
        let program = Arc::new(program);
        let exec = CpuExecutor::new(Arc::clone(&program), frozen, Options { pool, round: false }).unwrap();
        Machine { program, exec }
    }

    pub fn set(&mut self, t: TensorId, data: &[f32]) {
        self.exec.write(t, HostRef::F32(data)).unwrap();
    }

    pub fn set_ints(&mut self, t: TensorId, data: &[i32]) {
        self.exec.write(t, HostRef::I32(data)).unwrap();
    }

    pub fn get(&mut self, t: TensorId) -> Vec<f32> {
        let mut out = vec![f32::NAN; self.program.get(t).len()];
        self.exec.read(t, HostMut::F32(&mut out)).unwrap();
        out
    }

    pub fn run(&mut self, phase: PhaseId) {
        self.exec.run(phase, SlotArg::None).unwrap();
    }
}
