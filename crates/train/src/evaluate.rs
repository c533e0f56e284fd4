//! Evaluation by real speculative decoding over prompts.
//!
//! Job: prompts → completions → one [`Report`]: τ pooled and mean, acceptance per slot, passes, looping share, lossless proof.
//! Refuses to render or tokenize (the caller gives token prompts). Invariants: τ is DESIGN 1's and nothing else: tokens emitted by verify passes over verify passes,
//! the prefill's own token excluded, pooled over prompts; a proof compares with plain decoding token by token.

use crate::decode::{Completion, Decoder, Request};
use crate::pipeline::cancel::Cancel;
use drafthorse_graph::dtype::round_bf16;
use drafthorse_graph::{ExecError, Executor};
use serde::{Deserialize, Serialize};
use std::time::Instant;

/// How to evaluate.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Settings {
    /// Tokens per completion at most.
    pub max_new_tokens: usize,
    /// 0 is greedy.
    pub temperature: f32,
    /// Seeds draws above temperature 0.
    pub seed: u64,
    /// Compare with plain decoding (temperature 0 only).
    pub prove: bool,
}

/// What one prompt gave.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct PromptReport {
    /// Its number.
    pub number: u64,
    /// Prompt tokens.
    pub prompt_tokens: usize,
    /// Emitted tokens, the prefill's own included.
    pub tokens: usize,
    /// Verify passes.
    pub passes: usize,
    /// τ of this prompt; absent when the prefill's token ended it.
    pub tau: Option<f64>,
    /// Ended by a stop token.
    pub stopped: bool,
    /// Looping: see [`is_looping`].
    pub looping: bool,
}

/// Outcome of the lossless proof.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Proof {
    /// Prompts whose tokens equal plain decoding's.
    pub equal: usize,
    /// Prompts whose first difference is a top-2 tie within 2 bf16 ulps.
    pub ties: usize,
    /// Numbers of prompts that differ otherwise: decoding is broken.
    pub different: Vec<u64>,
}

/// Everything an evaluation says.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Report {
    /// τ pooled over prompts.
    pub tau: f64,
    /// Mean of the prompts' τ.
    pub tau_mean: f64,
    /// Share of verify passes that accepted slot k (index k-1).
    pub slot_acceptance: Vec<f64>,
    /// Tokens emitted by verify passes.
    pub tokens: usize,
    /// Verify passes: target passes after the prefill.
    pub target_passes: usize,
    /// Share of completions that loop.
    pub looping_share: f64,
    /// Seconds.
    pub elapsed_s: f64,
    /// The proof, when it was asked for.
    pub proof: Option<Proof>,
    /// One entry per prompt.
    pub prompts: Vec<PromptReport>,
    /// What was asked.
    pub settings: Settings,
}

/// A completion loops when some sequence of at most 32 tokens repeats at its end at least 4 times in a row and over at least 16 tokens, or when the last
/// half of a completion that hit its limit is one repetition of period at most 64.
pub fn is_looping(tokens: &[u32], stopped: bool) -> bool {
    let n = tokens.len();
    let repeats = |period: usize, span: usize| span + period <= n && (n - span..n).all(|i| tokens[i] == tokens[i - period]);
    if (1..=32).any(|p| repeats(p, (3 * p).max(16 - p.min(15)))) {
        return true;
    }
    !stopped && n >= 64 && (1..=64).any(|p| repeats(p, n / 2))
}

/// Evaluates `prompts` (token ids) one after another. `progress` gets (prompts done, τ so far).
///
/// # Errors
/// When the device fails. A cancelled run returns what it has.
pub fn evaluate<E: Executor>(
    decoder: &mut Decoder<E>,
    prompts: &[Vec<u32>],
    stop: &[u32],
    settings: &Settings,
    cancel: &Cancel,
    progress: &mut dyn FnMut(usize, f64, &Completion),
) -> Result<Report, ExecError> {
    let begun = Instant::now();
    let mut reports = Vec::new();
    let mut accepted: Vec<u64> = Vec::new();
    let (mut tokens, mut passes) = (0, 0);
    let mut proof = (settings.prove && settings.temperature == 0.0).then(Proof::default);
    for (number, prompt) in prompts.iter().enumerate() {
        if cancel.is_cancelled() || cancel.stop_requested().is_some() {
            break;
        }
        let request = Request {
            prompt,
            max_new_tokens: settings.max_new_tokens,
            temperature: settings.temperature,
            stop,
            seed: settings.seed,
            number: number as u64,
        };
        let completion = decoder.speculate(&request)?;
        if let Some(proof) = &mut proof {
            let plain = decoder.plain(&request)?;
            match compare(&completion, &plain) {
                Difference::None => proof.equal += 1,
                Difference::Tie => proof.ties += 1,
                Difference::Real => proof.different.push(number as u64),
            }
        }
        accepted.resize(completion.accepted.len(), 0);
        accepted.iter_mut().zip(&completion.accepted).for_each(|(a, c)| *a += c);
        tokens += completion.verified_tokens();
        passes += completion.passes();
        reports.push(PromptReport {
            number: number as u64,
            prompt_tokens: prompt.len(),
            tokens: completion.emitted.len(),
            passes: completion.passes(),
            tau: (completion.passes() > 0).then(|| completion.verified_tokens() as f64 / completion.passes() as f64),
            stopped: completion.stopped,
            looping: is_looping(&completion.tokens(), completion.stopped),
        });
        progress(number + 1, tokens as f64 / passes.max(1) as f64, &completion);
    }
    let taus: Vec<f64> = reports.iter().filter_map(|r| r.tau).collect();
    let share = |n: usize, of: usize| if of == 0 { 0.0 } else { n as f64 / of as f64 };
    Ok(Report {
        tau: share(tokens, passes),
        tau_mean: if taus.is_empty() { 0.0 } else { taus.iter().sum::<f64>() / taus.len() as f64 },
        slot_acceptance: accepted.iter().map(|&a| share(a as usize, passes)).collect(),
        tokens,
        target_passes: passes,
        looping_share: share(reports.iter().filter(|r| r.looping).count(), reports.len()),
        elapsed_s: begun.elapsed().as_secs_f64(),
        proof,
        prompts: reports,
        settings: settings.clone(),
    })
}

enum Difference {
    None,
    Tie,
    Real,
}

fn compare(a: &Completion, b: &Completion) -> Difference {
    let Some(at) = (0..a.emitted.len().max(b.emitted.len()))
        .find(|&i| a.emitted.get(i).map(|e| e.token) != b.emitted.get(i).map(|e| e.token))
    else {
        return Difference::None;
    };
    let tie = |e: Option<&crate::decode::Emitted>| e.is_some_and(|e| is_tie(e.top2));
    if tie(a.emitted.get(at)) || tie(b.emitted.get(at)) { Difference::Tie } else { Difference::Real }
}

/// The two largest logits are within 2 bf16 ulps of the larger one.
fn is_tie(top2: [f32; 2]) -> bool {
    let magnitude = round_bf16(top2[0].abs());
    let ulp = f32::from_bits(magnitude.to_bits() + 0x1_0000) - magnitude;
    top2[0] - top2[1] <= 2.0 * ulp
}

#[cfg(all(test, not(shuttle)))]
mod tests {
    use super::*;

    #[test]
    fn loops_are_found_and_prose_is_not() {
        let prose: Vec<u32> = (0..200).map(|i| (i * i * 7 + i) % 97).collect();
        assert!(!is_looping(&prose, false));
        let mut looped = prose.clone();
        for _ in 0..6 {
            looped.extend([5, 6, 7, 8]);
        }
        assert!(is_looping(&looped, false));
        let mut stutter = prose.clone();
        stutter.extend([3; 20]);
        assert!(is_looping(&stutter, true));
        let long_period: Vec<u32> = (0..256).map(|i| i % 50).collect();
        assert!(is_looping(&long_period, false));
        assert!(!is_looping(&[1, 2, 1, 2, 1, 2], true), "three short repeats are no loop");
    }

    #[test]
    fn a_tie_is_two_bf16_ulps() {
        assert!(is_tie([1.0, 1.0]));
        assert!(is_tie([1.0, 1.0 - 2.0 / 128.0]));
        assert!(!is_tie([1.0, 1.0 - 3.0 / 128.0]));
    }
}
