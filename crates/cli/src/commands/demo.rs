//! `drafthorse demo`: the whole way on a tiny real target that this program carries: prepare, train, decode, compare.
//!
//! Refuses to show numbers that it did not just measure. Invariants: the prompts of the table are held out from training; τ before is that of the same
//! drafter with its initial weights; a demo whose τ stays below 3 fails (exit 6).

use crate::drafter_source::DrafterSource;
use crate::exit::{Exit, Failure};
use crate::format::{count, parse_count, parse_threads, seconds, si};
use crate::launch::{Launch, cpu_backend, launch};
use crate::progress::Progress;
use crate::prompts;
use crate::screen::Screen;
use crate::signals::Signals;
use crate::slots_text::{legend, shown};
use crate::speculation::decoder;
use clap::Args;
use drafthorse_data::prepare::{PrepareOptions, prepare};
use drafthorse_data::tokenize::ChatTokenizer;
use drafthorse_telemetry::Event;
use drafthorse_train::config::RunConfig;
use drafthorse_train::decode::Completion;
use drafthorse_train::drafter::{Drafter, drafter_program};
use drafthorse_train::evaluate::{Report, Settings, evaluate};
use drafthorse_train::frozen::{Backend, CpuBackend, FrozenSource};
use drafthorse_train::pipeline::cancel::Cancel;
use drafthorse_train::setup::{Setup, adam_config, today};
use serde_json::{Map, json};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

include!(concat!(env!("OUT_DIR"), "/demo_files.rs"));

/// Train a drafter for a tiny target that is included: two minutes, any machine
///
/// Unpacks a small chat model with its own sampled completions, trains a DFlash drafter on the CPU, and decodes held-out prompts speculatively
/// before and after: tau, acceptance per slot, and a completion with its accepted tokens in colour.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  drafthorse demo
  drafthorse demo --keep demo-run      # keep target, data and run, to try the other commands on them")]
pub struct Demo {
    /// Keep target, data and run in this folder
    #[arg(long, value_name = "DIR")]
    keep: Option<PathBuf>,
    /// Optimizer steps
    #[arg(long, value_name = "N", default_value_t = 800)]
    steps: u64,
    /// Held-out prompts to decode
    #[arg(long, value_name = "N", default_value_t = 32, value_parser = parse_count)]
    prompts: usize,
    /// CPU threads [default: all cores]
    #[arg(long, value_name = "N", value_parser = parse_threads)]
    threads: Option<usize>,
}

/// τ that a trained demo drafter exceeds.
const WANTED_TAU: f64 = 3.0;
/// Tokens of a completion at most; the included completions were sampled with this limit.
const MAX_NEW_TOKENS: usize = 160;

/// Runs the command.
pub fn run(args: &Demo, screen: Screen) -> Result<Exit, Failure> {
    let begun = Instant::now();
    if DEMO_FILES.is_empty() {
        let what = "this build carries no demo target";
        return Err(Failure::new(Exit::Device, what, "build it from a complete checkout, where crates/cli/demo holds the files"));
    }
    let scratch = tempfile::tempdir().map_err(|e| Failure::file("make a folder in", &std::env::temp_dir(), &e))?;
    let work = args.keep.clone().unwrap_or_else(|| scratch.path().to_owned());
    unpack(&work)?;
    let folder = work.join("target");
    let tokenizer = ChatTokenizer::load(&folder, "demo", &Map::new(), today())?;
    let options =
        PrepareOptions { overwrite: true, ..PrepareOptions::new(vec![work.join("completions.jsonl")], work.join("data")) };
    let card = prepare(&tokenizer, &options, &|_| {})?;
    screen.tell(format!("data       {} chats sampled from the target, {} tokens", count(card.rows), count(card.tokens)))?;
    let config = config(args, &work)?;
    let backend = cpu_backend(&config)?;
    let setup = Setup::open(config, &|_, _| {})?;
    screen.tell(format!(
        "target     {} layers, hidden {}, {} parameters; drafter: {} layers, block {}",
        setup.target.config.layers,
        setup.target.config.hidden,
        si(setup.target.parameters() as f64),
        setup.variants[0].draft.layers,
        setup.variants[0].draft.block_size
    ))?;
    let prompts = prompts::read(&[work.join("prompts.jsonl")], Some(args.prompts), MAX_NEW_TOKENS, &tokenizer)?;
    let prompts: Vec<Vec<u32>> = prompts.list.into_iter().map(|p| p.tokens).collect();
    let cancel = Cancel::new();
    let signals = Signals::listen(&cancel, screen, "stopping")?;
    let bench = Bench { setup: &setup, tokenizer: &tokenizer, backend: &backend, prompts: &prompts, cancel: &cancel, screen };
    let (before, _) = bench.measure("before", &initial_weights(&setup, &backend)?)?;
    let run_dir = work.join("run");
    train(&setup, &backend, &run_dir, &cancel, screen)?;
    if cancel.stop_requested().is_some() {
        return Ok(Exit::Stopped);
    }
    let drafter = DrafterSource::open(&run_dir, &setup.target)?;
    let (after, sample) = bench.measure("after", &drafter.weights)?;
    signals.end();
    screen.say(table(&before, &after, screen))?;
    if let Some(sample) = sample {
        screen.say(format!("\n{}", shown(&sample, &tokenizer, screen)?))?;
        if let Some(line) = legend(sample.accepted.len(), screen) {
            screen.say(line)?;
        }
    }
    let elapsed_s = begun.elapsed().as_secs_f64();
    screen.tell(format!("\n{} in all", seconds(elapsed_s)))?;
    if let Some(keep) = &args.keep {
        let k = keep.display();
        screen.tell(format!("kept in {k}: try `drafthorse generate {k}/run \"Count from 3 in steps of 4, 5 numbers.\"`"))?;
    }
    screen.json(&json!({"before": before, "after": after, "elapsed_s": elapsed_s}))?;
    if cancel.stop_requested().is_some() {
        return Ok(Exit::Stopped);
    }
    if after.tau <= WANTED_TAU {
        let what = format!("tau {:.2} after {} steps, {WANTED_TAU} was expected", after.tau, args.steps);
        return Err(Failure::new(Exit::Diverged, what, "raise --steps; with the default number this is a bug"));
    }
    Ok(Exit::Done)
}

/// Writes the included files.
fn unpack(work: &Path) -> Result<(), Failure> {
    for (name, content) in DEMO_FILES {
        let path = work.join(name);
        if let Some(parent) = path.parent() {
            std::fs::create_dir_all(parent).map_err(|e| Failure::file("make", parent, &e))?;
        }
        std::fs::write(&path, content).map_err(|e| Failure::file("write", &path, &e))?;
    }
    Ok(())
}

fn config(args: &Demo, work: &Path) -> Result<RunConfig, Failure> {
    let path = |name: &str| toml::Value::String(work.join(name).display().to_string());
    let required = toml::Table::from_iter([
        ("target".to_owned(), path("target")),
        ("data".to_owned(), path("data")),
        ("out".to_owned(), toml::Value::String(work.display().to_string())),
        ("name".to_owned(), "run".into()),
    ]);
    let mut overrides: Vec<String> = [
        "drafter.layers=2",
        "drafter.init_std=0.08",
        "drafter.target_layer_ids=[1, 2, 3, 4]",
        "batch.token_budget=1536",
        "batch.anchors=20",
        "batch.max_blocks=160",
        "batch.micro_blocks=80",
        "drafter.head_dim=64",
        "optimizer.lr=4e-3",
        "eval.every=200",
        "eval.held_out={ rows = 32 }",
        "checkpoint.every=0",
    ]
    .map(str::to_owned)
    .into();
    overrides.push(format!("optimizer.steps={}", args.steps));
    overrides.extend(args.threads.map(|n| format!("pipeline.threads={n}")));
    Ok(RunConfig::parse(&required.to_string(), "demo", &overrides)?)
}

/// The weights that training starts from.
fn initial_weights(setup: &Setup, backend: &CpuBackend) -> Result<Vec<(String, Vec<f32>)>, Failure> {
    let variant = &setup.variants[0];
    let adam = adam_config(&variant.config);
    let program =
        drafter_program(backend.act(), &setup.target.config, &variant.draft, &setup.captured, setup.train_shape(), adam);
    let source = FrozenSource { target: &setup.target, draft: Some(&variant.draft) };
    let exec = backend.executor(0, Arc::clone(&program.program), &source, &mut |_, _| {})?;
    let mut drafter = Drafter::new(exec, program);
    drafter.initialise(setup.config.seed, setup.config.drafter.init_std)?;
    Ok(drafter.weights()?)
}

fn train(setup: &Setup, backend: &CpuBackend, run_dir: &Path, cancel: &Cancel, screen: Screen) -> Result<(), Failure> {
    // An earlier demo's run in a kept folder is replaced: its seed and data are the same.
    if run_dir.exists() {
        std::fs::remove_dir_all(run_dir).map_err(|e| Failure::file("remove", run_dir, &e))?;
    }
    std::fs::create_dir_all(run_dir).map_err(|e| Failure::file("make", run_dir, &e))?;
    let what = Launch {
        setup,
        run_dir: run_dir.to_owned(),
        resume: Vec::new(),
        resumed_from: None,
        run_id: format!("demo-{}", std::process::id()),
        http: None,
    };
    let total = setup.total_steps;
    launch(what, backend, cancel, screen, |events| {
        let progress = Progress::new(screen, "train");
        while let Some(envelope) = events.next(Duration::MAX) {
            match &envelope.event {
                Event::Step(step) => progress.update(step.step, total, || {
                    format!(
                        "loss {:.3}, acceptance {:.2}, {} tokens/s",
                        step.loss,
                        step.expected_acceptance,
                        si(step.tokens_per_s)
                    )
                }),
                Event::HeldOut(h) => progress.line(&format!(
                    "held out   after step {}: loss {:.3}, expected acceptance {:.2}",
                    h.step, h.loss, h.expected_acceptance
                )),
                Event::Warning(w) => progress.line(&format!("warning: {}", w.text)),
                _ => {}
            }
        }
    })?;
    Ok(())
}

/// What both measurements share.
struct Bench<'a> {
    setup: &'a Setup,
    tokenizer: &'a ChatTokenizer,
    backend: &'a CpuBackend,
    prompts: &'a [Vec<u32>],
    cancel: &'a Cancel,
    screen: Screen,
}

impl Bench<'_> {
    /// Decodes all prompts with a drafter's weights; also gives the completion with the most accepted drafts.
    fn measure(&self, what: &str, weights: &[(String, Vec<f32>)]) -> Result<(Report, Option<Completion>), Failure> {
        let longest = self.prompts.iter().map(Vec::len).max().unwrap_or(0);
        let draft = &self.setup.variants[0].draft;
        let mut decoder = decoder(&self.setup.target, draft, weights, longest + MAX_NEW_TOKENS, (self.backend, 0), self.screen)?;
        let stop: Vec<u32> = self.tokenizer.stop_ids().iter().copied().collect();
        let settings = Settings { max_new_tokens: MAX_NEW_TOKENS, temperature: 0.0, seed: 0, prove: false };
        let progress = Progress::new(self.screen, what);
        let mut best: Option<Completion> = None;
        let total = self.prompts.len() as u64;
        let report = evaluate(&mut decoder, self.prompts, &stop, &settings, self.cancel, &mut |done, tau, completion| {
            progress.update(done as u64, total, || format!("tau {tau:.2}"));
            let accepted = |c: &Completion| c.accepted.iter().sum::<u64>();
            if completion.stopped && best.as_ref().is_none_or(|b| accepted(completion) > accepted(b)) {
                best = Some(completion.clone());
            }
        })?;
        Ok((report, best))
    }
}

fn table(before: &Report, after: &Report, screen: Screen) -> String {
    let bold = anstyle::Style::new().bold();
    let mut out = format!("\n{} held-out prompts     before     after\n", after.prompts.len());
    let row = |name: &str, a: String, b: String| format!("{name:<22}  {a:>8}  {b:>8}\n");
    out.push_str(&screen.paint(bold, &row("tau", format!("{:.2}", before.tau), format!("{:.2}", after.tau))));
    out.push_str(&row("tau, mean of prompts", format!("{:.2}", before.tau_mean), format!("{:.2}", after.tau_mean)));
    for (k, (a, b)) in before.slot_acceptance.iter().zip(&after.slot_acceptance).enumerate() {
        let percent = |share: f64| format!("{:.1} %", 100.0 * share);
        out.push_str(&row(&format!("slot {} accepted", k + 1), percent(*a), percent(*b)));
    }
    out.push_str(&row("target passes", count(before.target_passes as u64), count(after.target_passes as u64)));
    let looping = |r: &Report| format!("{:.1} %", 100.0 * r.looping_share);
    out.push_str(&row("looping completions", looping(before), looping(after)));
    out.trim_end().to_owned()
}
