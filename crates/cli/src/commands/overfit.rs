//! `drafthorse overfit`: the first gate for a new target: one sample, learnt by heart, through the whole pipeline.
//!
//! Refuses to call a drafter good that does not get there (exit 6). Invariants: the sample's answer is the target's own greedy completion, so that a
//! drafter that knows it by heart must be accepted; what is measured is speculative decoding with the checkpoint that training saved.

use super::eval;
use crate::device::on;
use crate::drafter_source::DrafterSource;
use crate::exit::{Exit, Failure};
use crate::format::{parse_count, seconds};
use crate::launch::{Launch, decoding_device, launch, open_backend};
use crate::progress::Progress;
use crate::prompts::prompt_of;
use crate::screen::Screen;
use crate::signals::Signals;
use crate::slots_text::shown;
use crate::speculation::decoder;
use crate::target_folder::resolve;
use clap::Args;
use drafthorse_data::batch::default_max_blocks;
use drafthorse_data::chat::Conversation;
use drafthorse_data::dataset::{Dataset, OpenOptions, Row};
use drafthorse_data::prepare::{PrepareOptions, prepare};
use drafthorse_data::tokenize::ChatTokenizer;
use drafthorse_models::tensor_names::draft_sources;
use drafthorse_telemetry::Event;
use drafthorse_train::config::RunConfig;
use drafthorse_train::decode::Request;
use drafthorse_train::evaluate::{Settings, evaluate};
use drafthorse_train::frozen::{Backend, TargetFiles};
use drafthorse_train::pipeline::cancel::Cancel;
use drafthorse_train::setup::{Setup, draft_config, today};
use serde_json::{Map, json};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Learn one sample by heart: the first test of a new target
///
/// Lets the target answer one prompt, trains a drafter on that answer alone through the whole pipeline (capture, training, checkpoint), and
/// measures tau on the same prompt. It must come near the block size, else something between target, data and drafter is wrong (exit 6).
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  drafthorse overfit --target ./smollm2
  drafthorse overfit --target ./smollm2 --data data/ --row 17 --steps 400
  drafthorse overfit --target ./smollm2 drafter.layers=2 optimizer.lr=3e-3")]
pub struct Overfit {
    /// Folder of the target (or its hub name, if it is in the local cache)
    #[arg(long, value_name = "DIR")]
    target: PathBuf,
    /// Take the prompt of a row of this dataset
    #[arg(long, value_name = "DIR", requires = "row")]
    data: Option<PathBuf>,
    /// The row, from 0
    #[arg(long, value_name = "N", requires = "data")]
    row: Option<usize>,
    /// The prompt, when there is no dataset
    #[arg(
        long,
        value_name = "TEXT",
        default_value = "Tell me a short story about a horse and a river.",
        conflicts_with = "data"
    )]
    prompt: String,
    /// Tokens of the answer at most
    #[arg(long, value_name = "N", default_value_t = 128, value_parser = parse_count)]
    max_new_tokens: usize,
    /// Optimizer steps at most; fewer when every slot is right before
    #[arg(long, value_name = "N", default_value_t = 300)]
    steps: u64,
    /// Keep the run in this folder
    #[arg(long, value_name = "DIR")]
    keep: Option<PathBuf>,
    /// Overrides of the run config, e.g. drafter.layers=2
    #[arg(value_name = "KEY=VALUE")]
    overrides: Vec<String>,
}

/// Share of the possible τ that counts as near.
const NEAR: f64 = 0.9;
/// Steps in a row with every slot right after which training ends early.
const STEADY_STEPS: u32 = 5;

/// Runs the command.
pub fn run(args: &Overfit, screen: Screen) -> Result<Exit, Failure> {
    let folder = resolve(&args.target)?;
    let scratch = tempfile::tempdir().map_err(|e| Failure::file("make a folder in", &std::env::temp_dir(), &e))?;
    let work = args.keep.clone().unwrap_or_else(|| scratch.path().to_owned());
    std::fs::create_dir_all(&work).map_err(|e| Failure::file("make", &work, &e))?;
    let target = TargetFiles::open(&folder)?;
    let tokenizer = ChatTokenizer::load(&folder, &folder.display().to_string(), &Map::new(), today())?;
    let prompt = prompt(args, &tokenizer)?;
    let base = base_config(args, &folder, &work, prompt.len())?;
    on!(open_backend(&base)?, backend => run_on(args, &work, (&target, &tokenizer), &prompt, base, &backend, screen))
}

fn run_on<B: Backend>(
    args: &Overfit,
    work: &Path,
    (target, tokenizer): (&TargetFiles, &ChatTokenizer),
    prompt: &[u32],
    base: RunConfig,
    backend: &B,
    screen: Screen,
) -> Result<Exit, Failure> {
    let on = (backend, decoding_device(&base).index());
    let stop: Vec<u32> = tokenizer.stop_ids().iter().copied().collect();
    let answer = answer(args, target, &base, prompt, &stop, on, screen)?;
    screen.note(format!("the target answers a prompt of {} tokens with {} tokens", prompt.len(), answer.len()));
    let data = dataset(work, tokenizer, prompt, &answer)?;
    let setup = Setup::open(RunConfig { data, ..base }, &|_, _| {})?;
    let run_dir = work.join("run");
    std::fs::create_dir_all(&run_dir).map_err(|e| Failure::file("make", &run_dir, &e))?;
    let cancel = Cancel::new();
    let signals = Signals::listen(&cancel, screen, "finishing this step and measuring")?;
    let what = Launch {
        setup: &setup,
        run_dir: run_dir.clone(),
        resume: Vec::new(),
        resumed_from: None,
        run_id: format!("overfit-{}", std::process::id()),
        http: None,
    };
    let total = setup.total_steps;
    let learnt = "every slot is right";
    let outcome = launch(what, backend, &cancel, screen, |events| {
        let progress = Progress::new(screen, "overfit");
        let mut steady = 0;
        while let Some(envelope) = events.next(Duration::MAX) {
            let Event::Step(step) = &envelope.event else { continue };
            progress.update(step.step, total, || format!("loss {:.4}, acceptance {:.2}", step.loss, step.expected_acceptance));
            steady = if step.accuracy.iter().all(|&a| a >= 0.999) { steady + 1 } else { 0 };
            if steady == STEADY_STEPS {
                cancel.request_stop(learnt);
            }
        }
    })?;
    signals.end();
    if outcome.stopped.as_deref().is_some_and(|reason| reason != learnt) {
        return Ok(Exit::Stopped);
    }
    let drafter = DrafterSource::open(&run_dir, target)?;
    let max_tokens = prompt.len() + args.max_new_tokens;
    let mut decoder = decoder(target, &drafter.config, &drafter.weights, max_tokens, on, screen)?;
    let settings = Settings { max_new_tokens: args.max_new_tokens, temperature: 0.0, seed: 0, prove: true };
    let mut text = String::new();
    let report = evaluate(&mut decoder, &[prompt.to_vec()], &stop, &settings, &Cancel::new(), &mut |_, _, completion| {
        text = shown(completion, tokenizer, screen).unwrap_or_default();
    })?;
    // The last pass is cut at the answer's end, and the prefill emits the first token.
    let possible = report.tokens as f64 / (report.tokens as f64 / drafter.config.block_size as f64).ceil().max(1.0);
    let reached = report.tau >= NEAR * possible;
    screen.say(&text)?;
    screen.say(eval::text(&report, screen))?;
    screen.say(format!("\ntau {:.2} of {possible:.2} possible after {} steps", report.tau, outcome.steps))?;
    screen
        .json(&json!({"tau": report.tau, "possible": possible, "reached": reached, "steps": outcome.steps, "report": report}))?;
    if reached {
        return Ok(Exit::Done);
    }
    let what = format!(
        "tau {:.2} after {} steps in {}, of {possible:.2} possible",
        report.tau,
        outcome.steps,
        seconds(report.elapsed_s)
    );
    let todo = "raise --steps or optimizer.lr; if the loss does not fall, check chat template, layer ids and mask token";
    Err(Failure::new(Exit::Diverged, what, todo))
}

fn prompt(args: &Overfit, tokenizer: &ChatTokenizer) -> Result<Vec<u32>, Failure> {
    let (Some(data), Some(number)) = (&args.data, args.row) else {
        let asked = prompt_of(Conversation::from_pairs(&[("user", &args.prompt)]), tokenizer)?;
        return Ok(asked.expect("there is a user message"));
    };
    let dataset = Dataset::open(data, &OpenOptions::default(), &|_, _| {})?;
    dataset.check_tokenizer(tokenizer.tokenizer_hash())?;
    let mut row = Row::default();
    dataset.read_row(number, &mut row)?;
    let end = row.mask.iter().position(|&m| m == 1).unwrap_or(row.ids.len());
    if end == 0 {
        let what = format!("row {number} of {} begins with supervised tokens, so it has no prompt", data.display());
        return Err(Failure::new(Exit::BadInput, what, "choose another row"));
    }
    Ok(row.ids[..end].iter().map(|&t| t as u32).collect())
}

/// The run's config but for its data, which does not exist yet.
fn base_config(args: &Overfit, target: &Path, work: &Path, prompt_tokens: usize) -> Result<RunConfig, Failure> {
    let required = toml::Table::from_iter([
        ("target".to_owned(), target.display().to_string().into()),
        ("data".to_owned(), work.join("data").display().to_string().into()),
        ("out".to_owned(), work.display().to_string().into()),
    ]);
    let budget = ((prompt_tokens + args.max_new_tokens) as u32).next_multiple_of(64);
    let mut overrides = vec![
        format!("batch.token_budget={budget}"),
        format!("batch.max_blocks={}", args.max_new_tokens),
        format!("batch.micro_blocks={}", args.max_new_tokens.min(default_max_blocks(4096)).min(64)),
        "batch.max_rows=1".into(),
        "eval.every=0".into(),
        "eval.held_out=\"none\"".into(),
        "checkpoint.every=0".into(),
        format!("optimizer.steps={}", args.steps),
        "optimizer.lr=1e-3".into(),
        "optimizer.schedule=constant".into(),
    ];
    overrides.extend(args.overrides.iter().cloned());
    Ok(RunConfig::parse(&required.to_string(), "overfit", &overrides)?)
}

/// The target's greedy completion. It needs no drafter; one of zeros fills the decoder's place for one.
fn answer<B: Backend>(
    args: &Overfit,
    target: &TargetFiles,
    config: &RunConfig,
    prompt: &[u32],
    stop: &[u32],
    on: (&B, u32),
    screen: Screen,
) -> Result<Vec<u32>, Failure> {
    let draft = draft_config(config, &target.config, config.drafter.mask_token_id.unwrap_or(0))?;
    let zeros: Vec<(String, Vec<f32>)> =
        draft_sources(&draft).iter().map(|t| (t.name.clone(), vec![0.0; t.elements()])).collect();
    let mut decoder = decoder(target, &draft, &zeros, prompt.len() + args.max_new_tokens, on, screen)?;
    let request = Request { prompt, max_new_tokens: args.max_new_tokens, temperature: 0.0, stop, seed: 0, number: 0 };
    let tokens = decoder.plain(&request)?.tokens();
    if tokens.len() < 4 {
        let what = format!("the target answers with {} tokens, too few to draft", tokens.len());
        return Err(Failure::new(Exit::BadInput, what, "choose another --prompt or --row"));
    }
    Ok(tokens)
}

/// A dataset of one row: the prompt, and the answer supervised.
fn dataset(work: &Path, tokenizer: &ChatTokenizer, prompt: &[u32], answer: &[u32]) -> Result<PathBuf, Failure> {
    let ids: Vec<u32> = prompt.iter().chain(answer).copied().collect();
    let mask: Vec<u8> = prompt.iter().map(|_| 0).chain(answer.iter().map(|_| 1)).collect();
    let file = work.join("sample.jsonl");
    let line = json!({"input_ids": ids, "loss_mask": mask}).to_string();
    std::fs::write(&file, line + "\n").map_err(|e| Failure::file("write", &file, &e))?;
    let data = work.join("data");
    let options = PrepareOptions { overwrite: true, max_len: ids.len(), ..PrepareOptions::new(vec![file], data.clone()) };
    prepare(tokenizer, &options, &|_| {})?;
    Ok(data)
}
