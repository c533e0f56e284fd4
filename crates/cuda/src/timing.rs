//! Timing by device events, and filling memory, for choosing algorithms and for `bench`.
//!
//! Refuses host clocks. Invariant: what is timed runs on the executor's stream, behind everything before it.
#![allow(unsafe_code)]

use crate::driver::{Buffer, Event, Stream};
use crate::error::CudaError;
use crate::executor::CudaExecutor;
use crate::kernels::Kernels;
use crate::slot::CudaSlot;
use drafthorse_graph::{ExecError, PhaseId};
use std::ffi::c_void;

/// What one op of a phase took.
#[derive(Clone, Debug)]
pub struct OpTime {
    /// Its name.
    pub name: &'static str,
    /// Its name with its operands' shapes.
    pub described: String,
    /// Median milliseconds.
    pub ms: f32,
    /// Floating point operations that its contract counts.
    pub flops: u64,
    /// Bytes that must cross device memory.
    pub bytes: u64,
}

impl CudaExecutor {
    /// Milliseconds of device time between the work enqueued before `f` and the end of what `f` enqueues.
    ///
    /// # Errors
    /// `f`'s, or the device's.
    pub fn time(&mut self, f: impl FnOnce(&mut Self) -> Result<(), ExecError>) -> Result<f32, ExecError> {
        let failed = |e: CudaError| e.at("timing", "time");
        let (start, end) = (Event::new(self.device(), true).map_err(failed)?, Event::new(self.device(), true).map_err(failed)?);
        self.stream().record(&start).map_err(failed)?;
        f(self)?;
        self.stream().finish(&end, self.deadline(), "what is timed").map_err(failed)?;
        end.ms_since(&start).map_err(failed)
    }

    /// Runs a phase op by op `repeats` times and gives each op's median.
    ///
    /// # Errors
    /// The device's.
    pub fn time_ops(&mut self, phase: PhaseId, slot: Option<&CudaSlot>, repeats: usize) -> Result<Vec<OpTime>, ExecError> {
        let failed = |e: CudaError| e.at("timing", "time_ops");
        let nodes = self.nodes(phase);
        let events = (0..=nodes.len()).map(|_| Event::new(self.device(), true)).collect::<Result<Vec<_>, _>>().map_err(failed)?;
        let mut all: Vec<Vec<f32>> = vec![Vec::new(); nodes.len()];
        for _ in 0..repeats.max(1) {
            self.stream().record(&events[0]).map_err(failed)?;
            for (i, (_, range)) in nodes.iter().enumerate() {
                self.enqueue(phase, range.clone(), slot.map_or(0, CudaSlot::address))?;
                self.stream().record(&events[i + 1]).map_err(failed)?;
            }
            events[nodes.len()].wait(self.deadline(), "a timed phase").map_err(failed)?;
            for (i, ms) in all.iter_mut().enumerate() {
                ms.push(events[i + 1].ms_since(&events[i]).map_err(failed)?);
            }
        }
        let program = self.program();
        Ok(nodes
            .iter()
            .zip(all)
            .map(|((node, _), mut ms)| {
                ms.sort_by(f32::total_cmp);
                let op = &program.phase(phase).nodes[*node].op;
                let work = op.work(program);
                OpTime {
                    name: op.name(),
                    described: op.describe(program),
                    ms: ms[ms.len() / 2],
                    flops: work.flops,
                    bytes: work.bytes,
                }
            })
            .collect())
    }

    /// Fills a slot with random features.
    ///
    /// # Errors
    /// The device's.
    pub fn fill_slot(&mut self, slot: &mut CudaSlot, seed: u32) -> Result<(), ExecError> {
        let failed = |e: CudaError| e.at("fill", "fill_slot");
        let turn = slot.turn(self.stream()).map_err(failed)?;
        self.fill(slot.buffer(), seed).map_err(failed)?;
        turn.end(self.stream()).map_err(failed)
    }
}

/// Enqueues random bf16 values over a buffer.
pub(crate) fn fill(stream: &Stream, kernels: &Kernels, buffer: &Buffer, seed: u32) -> Result<(), CudaError> {
    let function = kernels.function("fill", "fill", 0)?;
    let (mut address, mut count, mut seed) = (buffer.address(), (buffer.bytes() / 2) as i64, seed);
    let mut args: [*mut c_void; 3] = [(&raw mut address).cast(), (&raw mut count).cast(), (&raw mut seed).cast()];
    // SAFETY: `fill(bf16 *, int64_t, uint32_t)` writes `count` elements from `address`, which is the whole buffer.
    unsafe { stream.launch(function, [1024, 1, 1], [256, 1, 1], 0, &mut args) }
}

/// Enqueues zeroing of a buffer.
pub(crate) fn zero(stream: &Stream, buffer: &Buffer) -> Result<(), CudaError> {
    // SAFETY: the whole buffer, on the stream of its only user.
    unsafe { stream.zero(buffer.address(), buffer.bytes()) }
}
