//! The target's forward pass over packed batches, as training runs it.
//!
//! Job: the program that fills a slot, and the call that does it. Refuses gradients. Invariant: what is captured for a batch depends on the batch alone.

use drafthorse_data::batch::Batch;
use drafthorse_graph::{DType, ExecError, Executor, HostRef, Program, Role, SlotArg};
use drafthorse_models::hf_config::TargetConfig;
use drafthorse_models::target::{CapturePass, Target};
use std::sync::Arc;

/// A target loop's program.
pub struct CaptureProgram {
    /// The program.
    pub program: Arc<Program>,
    /// Its phase and inputs.
    pub pass: CapturePass,
}

/// A program that holds only the target's capture pass over `budget` tokens.
pub fn capture_program(act: DType, config: &TargetConfig, budget: usize, max_rows: usize, captured: &[usize]) -> CaptureProgram {
    let mut program = Program::new(act);
    let target = Target::declare(&mut program, config, budget);
    let slot = program.tensor("slot", &[budget, captured.len() * config.hidden], act, Role::Slot);
    let pass = target.capture_pass(&mut program, budget, max_rows, captured, slot);
    CaptureProgram { program: Arc::new(program), pass }
}

/// Runs the target over `batch` and fills `slot` with its captured layers.
///
/// # Errors
/// When the device fails.
pub fn capture<E: Executor>(exec: &mut E, pass: &CapturePass, batch: &Batch, slot: &mut E::Slot) -> Result<(), ExecError> {
    let i = pass.inputs;
    exec.write(i.tokens, HostRef::I32(&batch.tokens))?;
    exec.write(i.positions, HostRef::I32(&batch.positions))?;
    exec.write(i.cu_seqlens, HostRef::I32(&batch.cu_seqlens))?;
    exec.write(i.n_seqs, HostRef::I32(&[batch.n_seqs as i32]))?;
    exec.run(pass.phase, SlotArg::Write(slot))
}
