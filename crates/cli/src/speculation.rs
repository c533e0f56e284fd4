//! A target and a drafter, loaded and ready to decode.
//!
//! Job: what `eval`, `generate`, `overfit` and `demo` share: one decoder on the CPU, with progress while it loads. Refuses nothing of its own.
//! Invariant: the decoder has room for the longest prompt and its completion.

use crate::exit::Failure;
use crate::format::bytes;
use crate::progress::Progress;
use crate::screen::Screen;
use drafthorse_cpu::CpuExecutor;
use drafthorse_models::draft_config::DraftConfig;
use drafthorse_train::decode::{Decoder, decode_program};
use drafthorse_train::frozen::{Backend, CpuBackend, FrozenSource, TargetFiles};
use std::sync::Arc;

/// A decoder for requests of at most `max_tokens` tokens.
///
/// # Errors
/// When the target cannot be read or does not fit.
pub fn decoder(
    target: &TargetFiles,
    draft: &DraftConfig,
    weights: &[(String, Vec<f32>)],
    max_tokens: usize,
    backend: &CpuBackend,
    screen: Screen,
) -> Result<Decoder<CpuExecutor>, Failure> {
    let program = decode_program(backend.act(), &target.config, draft, max_tokens);
    let progress = Progress::new(screen, "load");
    let source = FrozenSource { target, draft: Some(draft) };
    let exec = backend.executor(0, Arc::clone(&program.program), &source, &mut |done, total| {
        progress.update(done, total, || format!("{} of {}", bytes(done), bytes(total)));
    })?;
    drop(progress);
    let mut decoder = Decoder::new(exec, program)?;
    decoder.load_drafter(weights)?;
    Ok(decoder)
}
