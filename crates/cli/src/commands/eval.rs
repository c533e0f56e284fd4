//! `drafthorse eval`: τ by real speculative decoding over prompt files.
//!
//! Refuses a proof above temperature 0, where drafted and plain decoding differ by chance. Invariants: τ is pooled over prompts, the mean stands beside it; a
//! proof that finds a real difference is a failure of the program (exit 70).

use crate::device::{self, Device, on};
use crate::exit::{Exit, Failure};
use crate::format::{count, parse_count, parse_threads, seconds};
use crate::progress::Progress;
use crate::prompts;
use crate::screen::Screen;
use crate::signals::Signals;
use crate::speculation::{Pair, check_temperature, decoder};
use clap::Args;
use drafthorse_train::evaluate::{Report, Settings, evaluate};
use drafthorse_train::frozen::Backend;
use drafthorse_train::pipeline::cancel::Cancel;
use serde_json::json;
use std::path::PathBuf;

/// Measure acceptance by real speculative decoding
///
/// Decodes completions for the prompts with target and drafter, and prints tau: tokens emitted by verify passes over verify passes, pooled
/// over prompts (the prefill's own token excluded), the mean of the prompts' values, and the share of passes that accepted each slot.
/// --prove decodes everything again without drafts and compares token by token.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  drafthorse eval runs/q8 --prompts gsm8k.jsonl
  drafthorse eval runs/q8/export --target ./qwen3 --prompts gsm8k.jsonl --limit 20 --prove
  drafthorse eval out/ --target ./qwen3 --prompts chats.jsonl --temperature 0.7 --json | jq .tau
  drafthorse eval runs/q8 --prompts gsm8k.jsonl --device cuda:0

Prompt files: JSON lines with messages, conversations, prompt, question, instruction or turns; or plain text, one prompt a line.")]
pub struct Eval {
    /// Run folder, checkpoint, or drafter folder
    #[arg(value_name = "RUN_OR_DRAFTER")]
    drafter: PathBuf,
    /// Folder of the target [default: the one that the run recorded]
    #[arg(long, value_name = "DIR")]
    target: Option<PathBuf>,
    /// Prompt files
    #[arg(long, required = true, num_args = 1.., value_name = "FILE")]
    prompts: Vec<PathBuf>,
    /// Sampling temperature; 0 is greedy
    #[arg(long, value_name = "T", default_value_t = 0.0)]
    temperature: f32,
    /// Tokens per completion at most
    #[arg(long, value_name = "N", default_value_t = 256, value_parser = parse_count)]
    max_new_tokens: usize,
    /// Use the first N prompts
    #[arg(long, value_name = "N", value_parser = parse_count)]
    limit: Option<usize>,
    /// Seeds the draws above temperature 0
    #[arg(long, value_name = "N", default_value_t = 0)]
    seed: u64,
    /// Decode again without drafts and compare token by token
    #[arg(long)]
    prove: bool,
    /// Where to compute: cpu (f32), cuda or cuda:N (bf16)
    #[arg(long, value_name = "DEVICE", default_value = "cpu")]
    device: Device,
    /// CPU threads [default: all cores]
    #[arg(long, value_name = "N", value_parser = parse_threads)]
    threads: Option<usize>,
}

/// Runs the command.
pub fn run(args: &Eval, screen: Screen) -> Result<Exit, Failure> {
    if args.prove && args.temperature != 0.0 {
        return Err(Failure::new(
            Exit::Usage,
            "--prove compares greedy decoding, but --temperature is above 0",
            "leave one of the two out",
        ));
    }
    check_temperature(args.temperature)?;
    on!(device::open(args.device, args.threads, device::DEADLINE)?, backend => run_on(args, &backend, screen))
}

fn run_on<B: Backend>(args: &Eval, backend: &B, screen: Screen) -> Result<Exit, Failure> {
    let Pair { target, tokenizer, drafter } = Pair::open(args.target.as_deref(), &args.drafter, screen)?;
    let room = target.config.max_positions.saturating_sub(args.max_new_tokens + drafter.config.block_size);
    let prompts = prompts::read(&args.prompts, args.limit, room, &tokenizer)?;
    for (reason, n) in &prompts.dropped {
        screen.note(format!("note: {n} prompts left out: {reason}"));
    }
    let longest = prompts.list.iter().map(|p| p.tokens.len()).max().unwrap_or(0);
    let on = (backend, args.device.index());
    let mut decoder = decoder(&target, &drafter.config, &drafter.weights, longest + args.max_new_tokens, on, screen)?;
    let settings =
        Settings { max_new_tokens: args.max_new_tokens, temperature: args.temperature, seed: args.seed, prove: args.prove };
    let stop: Vec<u32> = tokenizer.stop_ids().iter().copied().collect();
    let list: Vec<Vec<u32>> = prompts.list.iter().map(|p| p.tokens.clone()).collect();
    let cancel = Cancel::new();
    let signals = Signals::listen(&cancel, screen, "finishing this prompt")?;
    let progress = Progress::new(screen, "eval");
    let mut tokens = 0;
    let report = evaluate(&mut decoder, &list, &stop, &settings, &cancel, &mut |done, tau, completion| {
        tokens += completion.emitted.len();
        let rate = tokens as f64 / progress.elapsed_s().max(1e-3);
        progress.update(done as u64, list.len() as u64, || format!("tau {tau:.3}, {rate:.1} tokens/s"));
    })?;
    drop(progress);
    signals.end();
    screen.say(text(&report, screen))?;
    screen.json(&json!({
        "drafter": drafter.folder, "target": target.folder, "provenance": drafter.provenance,
        "other_target": drafter.other_target, "dropped_prompts": prompts.dropped, "report": report,
    }))?;
    if let Some(number) = report.proof.as_ref().and_then(|p| p.different.first()) {
        let what = format!("speculative and plain decoding differ on {}", prompts.list[*number as usize].source);
        return Err(Failure::new(Exit::Bug, what, crate::exit::BUG_ADVICE));
    }
    if let Some(reason) = cancel.stop_requested() {
        screen.note(format!("stopped after {} of {} prompts ({reason})", report.prompts.len(), list.len()));
        return Ok(Exit::Stopped);
    }
    Ok(Exit::Done)
}

/// The report as a table.
pub fn text(report: &Report, screen: Screen) -> String {
    let bold = anstyle::Style::new().bold();
    let mut out = format!(
        "{}   {} pooled, {:.3} mean of {} prompts\n",
        screen.paint(bold, "tau     "),
        screen.paint(bold, &format!("{:.3}", report.tau)),
        report.tau_mean,
        report.prompts.len()
    );
    out.push_str(&format!(
        "tokens     {} in {} target passes after the prefills, {}\n",
        count(report.tokens as u64),
        count(report.target_passes as u64),
        seconds(report.elapsed_s)
    ));
    out.push_str("slot       accepted\n");
    for (k, share) in report.slot_acceptance.iter().enumerate() {
        out.push_str(&format!("  {:>3}      {:>5.1} %  {}\n", k + 1, 100.0 * share, "▇".repeat((share * 40.0).round() as usize)));
    }
    out.push_str(&format!("looping    {:.1} % of completions", 100.0 * report.looping_share));
    if let Some(proof) = &report.proof {
        out.push_str(&format!(
            "\nlossless   {} completions equal plain decoding's, {} differ first at a top-2 tie, {} otherwise",
            proof.equal,
            proof.ties,
            proof.different.len()
        ));
    }
    out
}
