//! A target and a drafter, loaded and ready to decode.
//!
//! Job: what `eval`, `generate`, `overfit` and `demo` share: one decoder on a device, with progress while it loads; and how the first two open what the user
//! names. Refuses temperatures that are none.
//! Invariant: the decoder has room for the longest prompt and its completion.

use crate::drafter_source::{DrafterSource, target_of};
use crate::exit::{Exit, Failure};
use crate::format::bytes;
use crate::progress::Progress;
use crate::screen::Screen;
use drafthorse_data::tokenize::ChatTokenizer;
use drafthorse_models::draft_config::DraftConfig;
use drafthorse_train::decode::{Decoder, decode_program};
use drafthorse_train::frozen::{Backend, FrozenSource, TargetFiles};
use drafthorse_train::setup::today;
use serde_json::Map;
use std::path::Path;
use std::sync::Arc;

/// What a user names to decode with.
pub struct Pair {
    /// The target.
    pub target: TargetFiles,
    /// Its tokenizer and template.
    pub tokenizer: ChatTokenizer,
    /// The drafter.
    pub drafter: DrafterSource,
}

impl Pair {
    /// Opens the drafter at `path` with `target`, or with the target that its run recorded; tells the notices of both.
    ///
    /// # Errors
    /// When one of them is wrong, or they do not belong together.
    pub fn open(target: Option<&Path>, path: &Path, screen: Screen) -> Result<Pair, Failure> {
        let folder = target_of(target, path)?;
        let target = TargetFiles::open(&folder)?;
        let tokenizer = ChatTokenizer::load(&folder, &folder.display().to_string(), &Map::new(), today())?;
        let drafter = DrafterSource::open(path, &target)?;
        target.notices.iter().chain(&drafter.notices).for_each(|n| screen.note(format!("note: {n}")));
        if tokenizer.stop_ids().is_empty() {
            screen.note("note: the target declares no end-of-text token (eos_token_id), so completions end only at their limit");
        }
        drafter.other_target.iter().for_each(|n| screen.warn(n));
        Ok(Pair { target, tokenizer, drafter })
    }
}

/// Refuses what is no temperature.
///
/// # Errors
/// Naming the flag.
pub fn check_temperature(temperature: f32) -> Result<(), Failure> {
    if temperature.is_finite() && temperature >= 0.0 {
        return Ok(());
    }
    Err(Failure::new(Exit::Usage, format!("--temperature {temperature} is no temperature"), "use 0 (greedy) or more"))
}

/// A decoder on device `index` for requests of at most `max_tokens` tokens.
///
/// # Errors
/// When the target cannot be read or does not fit.
pub fn decoder<B: Backend>(
    target: &TargetFiles,
    draft: &DraftConfig,
    weights: &[(String, Vec<f32>)],
    max_tokens: usize,
    (backend, index): (&B, u32),
    screen: Screen,
) -> Result<Decoder<B::Exec>, Failure> {
    let program = decode_program(backend.act(), &target.config, draft, max_tokens);
    let progress = Progress::new(screen, "load");
    let source = FrozenSource { target, draft: Some(draft) };
    let exec = backend.executor(index, Arc::clone(&program.program), &source, &mut |done, total| {
        progress.update(done, total, || format!("{} of {}", bytes(done), bytes(total)));
    })?;
    drop(progress);
    let mut decoder = Decoder::new(exec, program)?;
    decoder.load_drafter(weights)?;
    Ok(decoder)
}
