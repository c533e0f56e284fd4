//! `drafthorse train`: a run from a config, with a live view, that saves when it is asked to stop.
//!
//! Refuses a run that does not fit memory or disk before anything is loaded. Invariants: what is shown comes from the events that the run folder
//! records; a reader of standard output that goes away does not end the run.

use super::plan::does_not_fit;
use crate::build_id::BUILD_ID;
use crate::device::on;
use crate::estimate::{Kind, Placement, Programs, available_memory};
use crate::exit::{Exit, Failure};
use crate::format::{bytes, count, seconds, si};
use crate::launch::{Launch, check_begin, config_hash, launch, load_config, open_backend};
use crate::progress::Progress;
use crate::run_folder::{Chosen, choose};
use crate::screen::Screen;
use crate::signals::Signals;
use clap::Args;
use drafthorse_data::mask_token::MaskToken;
use drafthorse_data::table::StartTable;
use drafthorse_models::draft_config::DraftConfig;
use drafthorse_telemetry::{Event, Step, Subscription};
use drafthorse_train::config::RunConfig;
use drafthorse_train::frozen::Backend;
use drafthorse_train::pipeline::cancel::Cancel;
use drafthorse_train::run::Outcome;
use drafthorse_train::setup::Setup;
use serde::Serialize;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Train a drafter
///
/// Shows the dataset and bucket table, then a bar (on a terminal) or a line per step. Everything is also recorded in the run folder
/// (events.jsonl, status.json, TensorBoard files). Ctrl-C, SIGTERM and SIGUSR1 finish the step, save a checkpoint and exit 8; a second
/// Ctrl-C aborts. With --json the events come to standard output, one a line.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  drafthorse train run.toml
  drafthorse train run.toml drafter.layers=3 optimizer.steps=2000 name=small
  drafthorse train run.toml --resume auto          # for schedulers: go on if there is something to go on from
  drafthorse train run.toml --resume runs/small
  drafthorse train run.toml --http 0               # with the live page; the address is printed
  drafthorse train run.toml --dry-run")]
pub struct Train {
    /// Run config
    config: PathBuf,
    /// Overrides, e.g. drafter.layers=3
    #[arg(value_name = "KEY=VALUE")]
    overrides: Vec<String>,
    /// Go on from a checkpoint: a run folder, a checkpoint folder, or `auto` (from the newest if there is one)
    #[arg(long, value_name = "auto|PATH")]
    resume: Option<String>,
    /// Serve the live page on 127.0.0.1 while the run lasts; 0 takes any free port
    #[arg(long, value_name = "PORT")]
    http: Option<u16>,
    /// Check everything and show what would run, then stop
    #[arg(long)]
    dry_run: bool,
}

/// Batches that are built to estimate coverage in the table.
const SAMPLED_BATCHES: u64 = 32;

/// Runs the command.
pub fn run(args: &Train, screen: Screen) -> Result<Exit, Failure> {
    let config = load_config(&args.config, &args.overrides)?;
    on!(open_backend(&config)?, backend => run_on(args, config, &backend, screen))
}

fn run_on<B: Backend>(args: &Train, config: RunConfig, backend: &B, screen: Screen) -> Result<Exit, Failure> {
    let stamp = chrono::Local::now().format("%Y%m%d-%H%M%S").to_string();
    let chosen = choose(&config, args.resume.as_deref(), &stamp)?;
    let progress = Progress::new(screen, "index");
    let setup = Setup::open(config, &|done, total| progress.update(done, total, || format!("{} bytes", count(done))))?;
    drop(progress);
    let table = StartTable::compute(&setup.builder, SAMPLED_BATCHES)?;
    match banner(&setup, &chosen.dir, chosen.step, &table, screen) {
        // Whoever read the output has gone; the run is wanted all the same, and the run folder tells it.
        Ok(()) | Err(Failure::ReaderGone) => {}
        Err(failure) => return Err(failure),
    }
    // A GPU refuses what does not fit when its arenas are allocated, before the gate.
    if setup.config.pipeline.device == "cpu" {
        check_memory(&setup)?;
    }
    std::fs::create_dir_all(&chosen.dir).map_err(|e| Failure::file("make", &chosen.dir, &e))?;
    check_disk(&setup, &chosen.dir)?;
    if args.dry_run {
        // Only the folder of a run that exists is kept.
        let _ = std::fs::remove_dir(&chosen.dir);
        return dry_run(&setup, &chosen, &table, screen);
    }
    let cancel = Cancel::new();
    let signals = Signals::listen(&cancel, screen, "finishing this step and saving")?;
    let run_id = format!("{stamp}-{}", std::process::id());
    let (total, dir, resumed_from) = (setup.total_steps, chosen.dir.clone(), chosen.step);
    let what = Launch { setup: &setup, run_dir: chosen.dir, resume: chosen.resume, resumed_from, run_id, http: args.http };
    let outcome = launch(what, backend, &cancel, screen, |events| follow(&events, total, screen))?;
    signals.end();
    finish(&outcome, &setup.config, &dir, screen)
}

fn finish(outcome: &Outcome, config: &RunConfig, dir: &Path, screen: Screen) -> Result<Exit, Failure> {
    if let Some(tally) = &outcome.held_out {
        screen.say(format!("held out   loss {:.4}, expected acceptance {:.3}", tally.loss(), tally.expected_acceptance()))?;
    }
    if let Some(reason) = &outcome.stopped {
        let saved = outcome.checkpoint.as_ref().map_or_else(|| "no checkpoint".into(), |p| p.display().to_string());
        screen.note(format!(
            "stopped after step {} ({reason}); saved {saved}\n  go on with --resume {}",
            outcome.steps,
            dir.display()
        ));
        return Ok(Exit::Stopped);
    }
    screen.say(format!("done       {} steps", count(outcome.steps)))?;
    for export in &outcome.exports {
        screen.say(format!("export     {}", export.display()))?;
    }
    if let Some((name, error)) = outcome.diverged.first() {
        let names: Vec<&str> = outcome.diverged.iter().map(|(name, _)| name.as_str()).collect();
        let what = format!("of the sweep, {} diverged (`{name}`: {error}); the other variants are done", names.join(" and "));
        let todo = "lower optimizer.lr of what diverged, and run it alone or in a new sweep";
        return Err(Failure::new(Exit::Diverged, what, todo));
    }
    screen.tell(format!(
        "next: drafthorse eval {} --target {} --prompts prompts.jsonl",
        dir.display(),
        config.target.display()
    ))?;
    Ok(Exit::Done)
}

fn banner(setup: &Setup, dir: &Path, resumed: Option<u64>, table: &StartTable, screen: Screen) -> Result<(), Failure> {
    let config = &setup.config;
    let draft = &setup.variants[0].draft;
    let target = &setup.target.config;
    let command: Vec<String> = std::env::args().collect();
    screen.tell(format!("drafthorse {BUILD_ID}"))?;
    screen.tell(format!("command    {}", command.join(" ")))?;
    screen.tell(format!("config     {:.12}", config_hash(config)))?;
    screen.tell(format!(
        "target     {}: {} {} layers, hidden {}, vocabulary {}, {} parameters",
        config.target.display(),
        target.family.model_type(),
        target.layers,
        target.hidden,
        count(target.vocab as u64),
        si(setup.target.parameters() as f64)
    ))?;
    for v in &setup.variants {
        let parameters: u64 = drafthorse_models::tensor_names::draft_sources(&v.draft).iter().map(|t| t.elements() as u64).sum();
        screen.tell(format!(
            "{:<10} {} layers, block {}, listens to layers {:?}, {} parameters",
            v.name.as_deref().unwrap_or("drafter"),
            v.draft.layers,
            v.draft.block_size,
            v.draft.target_layer_ids,
            si(parameters as f64)
        ))?;
    }
    screen.tell(format!("mask token {} ({})", draft.mask_token_id, setup.mask_token.source))?;
    screen.tell(format!("data       {} ({:.12})", config.data.display(), setup.builder.dataset().fingerprint()))?;
    screen.tell(table)?;
    screen.tell(format!("run        {}", dir.display()))?;
    screen.tell(match resumed {
        Some(step) => format!(
            "steps      {} of {} left: resumed after step {step}",
            setup.total_steps.saturating_sub(step),
            setup.total_steps
        ),
        None => format!("steps      {}", count(setup.total_steps)),
    })?;
    setup.notices.iter().for_each(|n| screen.note(format!("note: {n}")));
    Ok(())
}

/// What a run would be, for programs.
#[derive(Debug, Serialize)]
struct DryRun<'a> {
    build_id: &'static str,
    config_hash: String,
    config: &'a RunConfig,
    run_dir: &'a Path,
    /// Step that it would go on after.
    resumed_from_step: Option<u64>,
    total_steps: u64,
    mask_token: MaskToken,
    dataset: &'a str,
    /// Target layers that are captured.
    captured: &'a [usize],
    /// Name and shape of every drafter.
    drafters: Vec<(Option<&'a str>, &'a DraftConfig)>,
    batches: &'a StartTable,
    notices: &'a [String],
}

/// `--dry-run`: the last checks, and under `--json` what passed them.
fn dry_run(setup: &Setup, chosen: &Chosen, table: &StartTable, screen: Screen) -> Result<Exit, Failure> {
    let notices = check_begin(setup, &chosen.dir, &chosen.resume)?;
    notices.iter().for_each(|n| screen.note(format!("note: {n}")));
    let notices: Vec<String> = setup.notices.iter().cloned().chain(notices).collect();
    screen.json(&DryRun {
        build_id: BUILD_ID,
        config_hash: config_hash(&setup.config),
        config: &setup.config,
        run_dir: &chosen.dir,
        resumed_from_step: chosen.step,
        total_steps: setup.total_steps,
        mask_token: setup.mask_token,
        dataset: setup.builder.dataset().fingerprint(),
        captured: &setup.captured,
        drafters: setup.variants.iter().map(|v| (v.name.as_deref(), &v.draft)).collect(),
        batches: table,
        notices: &notices,
    })?;
    Ok(Exit::Done)
}

/// Exit 4 before anything is loaded, where the kernel says what is free.
fn check_memory(setup: &Setup) -> Result<(), Failure> {
    let Some(limit) = available_memory() else { return Ok(()) };
    let p = &setup.config.pipeline;
    let placement = Placement { targets: p.targets.clone(), drafters: p.drafters.clone() };
    let memory = Programs::new(setup, &setup.config.batch, Kind::Cpu).memory(&placement, setup.variants[0].name.is_some());
    match memory.iter().find(|d| d.total_bytes > limit) {
        Some(device) => Err(does_not_fit(setup, Kind::Cpu, &placement, device, limit)),
        None => Ok(()),
    }
}

/// Checkpoints that exist at the same time: those kept, the best one, and one being written; and the exports, smaller than one more.
fn check_disk(setup: &Setup, dir: &Path) -> Result<(), Failure> {
    let need = drafthorse_train::run::checkpoint_bytes(setup) * (setup.config.checkpoint.keep_last as u64 + 3);
    let stat = rustix::fs::statvfs(dir).map_err(|e| Failure::file("look at", dir, &e.into()))?;
    let free = stat.f_bavail * stat.f_frsize;
    if free >= need {
        return Ok(());
    }
    let what = format!("{} has {} free, checkpoints and export need {}", dir.display(), bytes(free), bytes(need));
    Err(Failure::new(Exit::DoesNotFit, what, "free space, set out to another disk, or lower checkpoint.keep_last"))
}

/// Shows events until they end.
fn follow(events: &Subscription, total: u64, screen: Screen) {
    let progress = Progress::new(screen, "train");
    let live = screen.live && !screen.quiet;
    while let Some(envelope) = events.next(Duration::MAX) {
        if screen.json {
            // A reader that has gone away does not end the run; the run folder has everything.
            let _ = screen.json_line(&*envelope);
            continue;
        }
        match &envelope.event {
            Event::Step(step) if live => progress.update(step.step, total, || step_text(step)),
            Event::Step(step) => {
                let variant = step.variant.as_deref().map(|v| format!("{v} ")).unwrap_or_default();
                let _ = screen.tell(format!("{variant}step {}/{total}  {}  {:.0} ms", step.step, step_text(step), step.step_ms));
            }
            Event::Phase(p) => progress.update(p.progress, p.total.unwrap_or(0), || format!("{}: {}", p.worker, p.name)),
            Event::Gate(g) => progress.line(&format!("ready after {}", seconds(g.startup_ms as f64 / 1000.0))),
            Event::HeldOut(h) => {
                let variant = h.variant.as_deref().map(|v| format!("{v} ")).unwrap_or_default();
                progress.line(&format!(
                    "{variant}held out after step {}: loss {:.4}, expected acceptance {:.3}",
                    h.step, h.loss, h.expected_acceptance
                ));
            }
            Event::Checkpoint(c) => {
                progress.line(&format!("checkpoint {} ({}, {})", c.path, bytes(c.size_bytes), seconds(c.elapsed_s)));
            }
            Event::Warning(w) => progress.line(&format!("warning: {}", w.text)),
            _ => {}
        }
    }
}

fn step_text(step: &Step) -> String {
    let skipped = if step.skipped { "  SKIPPED: not finite" } else { "" };
    format!("loss {:.4}  acceptance {:.3}  {} tokens/s{skipped}", step.loss, step.expected_acceptance, si(step.tokens_per_s))
}
