//! `drafthorse generate`: one prompt, decoded speculatively, with accepted drafts in colour.
//!
//! Refuses a prompt that does not fit the target's positions. Invariant: the text is what plain decoding would give (greedy) or draws from the same
//! distribution.

use crate::device::{self, Device, on};
use crate::exit::{Exit, Failure};
use crate::format::{parse_count, parse_threads};
use crate::prompts::prompt_of;
use crate::screen::Screen;
use crate::signals::Signals;
use crate::slots_text::{legend, shown};
use crate::speculation::{Pair, check_temperature, decoder};
use clap::Args;
use drafthorse_data::chat::Conversation;
use drafthorse_train::decode::{Origin, Request};
use drafthorse_train::frozen::Backend;
use drafthorse_train::pipeline::cancel::Cancel;
use serde_json::json;
use std::path::PathBuf;
use std::time::Instant;

/// Decode one prompt, with accepted drafts in colour
///
/// Tokens that the drafter proposed and the target accepted are coloured by the slot they were drafted in (between ⟦ and ⟧ where there is no
/// colour); the target's own tokens are plain.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  drafthorse generate runs/q8 \"Why is the sky blue?\"
  drafthorse generate runs/q8/export --target ./qwen3 \"Write a haiku\" --temperature 0.8 --seed 3
  drafthorse generate runs/q8 --raw \"def fibonacci(n):\"")]
pub struct Generate {
    /// Run folder, checkpoint, or drafter folder
    #[arg(value_name = "RUN_OR_DRAFTER")]
    drafter: PathBuf,
    /// The prompt: a user message
    prompt: String,
    /// Folder of the target [default: the one that the run recorded]
    #[arg(long, value_name = "DIR")]
    target: Option<PathBuf>,
    /// System message
    #[arg(long, value_name = "TEXT")]
    system: Option<String>,
    /// Feed the prompt as it is, without the chat template
    #[arg(long, conflicts_with = "system")]
    raw: bool,
    /// Sampling temperature; 0 is greedy
    #[arg(long, value_name = "T", default_value_t = 0.0)]
    temperature: f32,
    /// Tokens at most
    #[arg(long, value_name = "N", default_value_t = 256, value_parser = parse_count)]
    max_new_tokens: usize,
    /// Seeds the draws above temperature 0
    #[arg(long, value_name = "N", default_value_t = 0)]
    seed: u64,
    /// Where to compute: cpu (f32), cuda or cuda:N (bf16)
    #[arg(long, value_name = "DEVICE", default_value = "cpu")]
    device: Device,
    /// CPU threads [default: all cores]
    #[arg(long, value_name = "N", value_parser = parse_threads)]
    threads: Option<usize>,
}

/// Runs the command.
pub fn run(args: &Generate, screen: Screen) -> Result<Exit, Failure> {
    check_temperature(args.temperature)?;
    on!(device::open(args.device, args.threads, device::DEADLINE)?, backend => run_on(args, &backend, screen))
}

fn run_on<B: Backend>(args: &Generate, backend: &B, screen: Screen) -> Result<Exit, Failure> {
    let Pair { target, tokenizer, drafter } = Pair::open(args.target.as_deref(), &args.drafter, screen)?;
    let prompt = if args.raw {
        tokenizer.encode(&args.prompt)?.into_iter().map(|t| t as u32).collect()
    } else {
        let mut pairs = Vec::new();
        pairs.extend(args.system.as_deref().map(|s| ("system", s)));
        pairs.push(("user", args.prompt.as_str()));
        prompt_of(Conversation::from_pairs(&pairs), &tokenizer)?.expect("there is a user message")
    };
    let most = target.config.max_positions;
    if prompt.is_empty() || prompt.len() + args.max_new_tokens + drafter.config.block_size > most {
        let what =
            format!("a prompt of {} tokens and {} new ones on a target of {most} positions", prompt.len(), args.max_new_tokens);
        return Err(Failure::new(Exit::Usage, what, "give a prompt, shorten it, or lower --max-new-tokens"));
    }
    let cancel = Cancel::new();
    let signals = Signals::listen(&cancel, screen, "ending after this pass")?;
    let on = (backend, args.device.index());
    let mut decoder = decoder(&target, &drafter.config, &drafter.weights, prompt.len() + args.max_new_tokens, on, screen)?;
    let stop: Vec<u32> = tokenizer.stop_ids().iter().copied().collect();
    let request = Request {
        prompt: &prompt,
        max_new_tokens: args.max_new_tokens,
        temperature: args.temperature,
        stop: &stop,
        seed: args.seed,
        number: 0,
    };
    let begun = Instant::now();
    let completion = decoder.speculate_until(&request, &|| cancel.stop_requested().is_some())?;
    signals.end();
    let elapsed_s = begun.elapsed().as_secs_f64();
    screen.say(shown(&completion, &tokenizer, screen)?)?;
    let tau = completion.verified_tokens() as f64 / completion.passes().max(1) as f64;
    if let Some(line) = legend(completion.accepted.len(), screen) {
        screen.note(format!("\n{line}"));
    }
    let n = completion.emitted.len();
    screen.note(format!(
        "{n} tokens in {} target passes after the prefill: tau {tau:.2}, {:.1} tokens/s{}",
        completion.passes(),
        n as f64 / elapsed_s.max(1e-6),
        match (completion.stopped, cancel.stop_requested()) {
            (true, _) => String::new(),
            (false, Some(signal)) => format!(" (cut by {signal})"),
            (false, None) => " (cut at --max-new-tokens)".to_owned(),
        }
    ));
    let ids: Vec<i32> = completion.emitted.iter().map(|e| e.token as i32).collect();
    let slots: Vec<usize> =
        completion.emitted.iter().map(|e| if let Origin::Draft(slot) = e.origin { slot } else { 0 }).collect();
    screen.json(&json!({
        "text": tokenizer.decode(&ids)?, "tokens": ids, "slots": slots, "per_pass": completion.per_pass, "accepted": completion.accepted,
        "tau": tau, "stopped": completion.stopped, "elapsed_s": elapsed_s, "other_target": drafter.other_target,
    }))?;
    let cut = cancel.stop_requested().is_some() && !completion.stopped;
    Ok(if cut { Exit::Stopped } else { Exit::Done })
}
