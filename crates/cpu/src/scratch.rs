//! Working memory of ops beside the plan's regions: scores of attention, per thread and shared.
//!
//! Job: know from a program alone how much its ops need, and hold it. Refuses to grow: an op that asks for more than its own account is a bug.
//! Invariants: allocated once, when the executor is made; a thread's part is used by one task at a time, because no task inside it waits for another.

use drafthorse_graph::Program;
use drafthorse_graph::op::Op;
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::{attention, block_attention};

/// Floats that an op needs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Need {
    /// On each thread.
    pub per_thread: usize,
    /// Once.
    pub shared: usize,
}

impl Need {
    /// What the ops of `program` need, one after the other.
    pub fn of(program: &Program) -> Need {
        let mut all = Need::default();
        for node in program.phases().flat_map(|(_, phase)| &phase.nodes) {
            let need = match &node.op {
                Op::CausalAttention(op) => attention::causal_need(op, program),
                Op::CachedAttention(op) => attention::cached_need(op, program),
                Op::BlockAttention(op) => block_attention::need(op, program),
                Op::BlockAttentionBwd(op) => block_attention::need_bwd(op, program),
                _ => Need::default(),
            };
            all = Need { per_thread: all.per_thread.max(need.per_thread), shared: all.shared.max(need.shared) };
        }
        all
    }

    /// Bytes with `threads` threads.
    pub fn bytes(self, threads: usize) -> u64 {
        4 * (self.shared + threads * self.per_thread) as u64
    }
}

/// The memory.
pub struct Scratch {
    threads: Vec<Mutex<Vec<f32>>>,
    shared: Mutex<Vec<f32>>,
}

impl Scratch {
    /// Allocates `need` for a pool of `threads` threads.
    pub fn new(need: Need, threads: usize) -> Scratch {
        let floats = |n: usize| Mutex::new(vec![0.0f32; n]);
        Scratch { threads: (0..threads).map(|_| floats(need.per_thread)).collect(), shared: floats(need.shared) }
    }

    /// Runs `f` on `len` floats of the calling thread's part, whose content is arbitrary. `f` must neither call this nor wait for other tasks.
    pub fn local<R>(&self, len: usize, f: impl FnOnce(&mut [f32]) -> R) -> R {
        let index = rayon::current_thread_index().expect("ops run on the executor's pool");
        f(&mut self.threads[index].lock().unwrap_or_else(PoisonError::into_inner)[..len])
    }

    /// The shared part, whose content is arbitrary.
    pub fn shared(&self) -> MutexGuard<'_, Vec<f32>> {
        self.shared.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Bytes held, by what was allocated.
    pub fn held_bytes(&self) -> u64 {
        let len = |m: &Mutex<Vec<f32>>| m.lock().unwrap_or_else(PoisonError::into_inner).len();
        4 * (len(&self.shared) + self.threads.iter().map(len).sum::<usize>()) as u64
    }
}

/// Cuts `scratch` into pieces of the given sizes.
pub fn carve<const N: usize>(mut scratch: &mut [f32], sizes: [usize; N]) -> [&mut [f32]; N] {
    sizes.map(|n| {
        let (head, tail) = std::mem::take(&mut scratch).split_at_mut(n);
        scratch = tail;
        head
    })
}
