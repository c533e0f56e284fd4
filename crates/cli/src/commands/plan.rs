//! `drafthorse plan`: bytes, FLOPs, batches and steps of a run, before it is started.
//!
//! Refuses a run that does not fit the memory given, naming the keys that make it fit. Invariant: no GPU is needed to plan for GPUs, and no speed is
//! printed that was neither measured nor given.

use crate::estimate::{
    BatchFlops, DeviceMemory, Kind, Placement, Programs, available_memory, best_split, bottleneck, knobs, layout,
};
use crate::exit::{Exit, Failure};
use crate::format::{bytes, count, parse_bytes, parse_rate, seconds, si};
use crate::launch::{cpu_backend, load_config};
use crate::progress::Progress;
use crate::screen::Screen;
use clap::Args;
use drafthorse_data::table::StartTable;
use drafthorse_train::setup::Setup;
use serde::Serialize;
use std::path::PathBuf;

/// Show what a run needs: bytes per device, FLOPs per step, batches, steps
///
/// Memory is known to the byte from the plan that the run will allocate. On CPU a quick measurement of this machine's GEMM rate gives the
/// shortest possible time per step. With --gpus the plan is made for GPUs (bf16), and the split over targets and drafters is chosen by
/// their FLOPs. A run that does not fit is refused (exit code 4) with the keys that make it fit.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  drafthorse plan run.toml
  drafthorse plan q8.toml --gpus 8 --memory 80GiB
  drafthorse plan q8.toml --gpus 8 --tflops 400 batch.micro_blocks=128
  drafthorse plan run.toml --json | jq '.devices[].total_bytes'")]
pub struct Plan {
    /// Run config
    config: PathBuf,
    /// Overrides, e.g. drafter.layers=3
    #[arg(value_name = "KEY=VALUE")]
    overrides: Vec<String>,
    /// Plan for this many GPUs of one machine, split over targets and drafters
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=64))]
    gpus: Option<u32>,
    /// Memory of one device, e.g. 24GiB [default on cpu: what the machine has free]
    #[arg(long, value_name = "BYTES", value_parser = parse_bytes)]
    memory: Option<u64>,
    /// Sustained TFLOP/s of one GPU, to turn FLOPs into time
    #[arg(long, value_name = "RATE", value_parser = parse_rate)]
    tflops: Option<f64>,
}

/// Batches that are built to estimate coverage and blocks.
const SAMPLED_BATCHES: u64 = 32;

#[derive(Debug, Serialize)]
struct Report {
    batches: StartTable,
    epochs: f64,
    total_steps: u64,
    placement: Placement,
    slots_per_pool: usize,
    slot_bytes: u64,
    checkpoint_bytes: u64,
    devices: Vec<DeviceMemory>,
    memory_limit_bytes: Option<u64>,
    batch_flops: BatchFlops,
    step_useful_flops: f64,
    /// Rate that `step_s` assumes, FLOP/s per device.
    rate: Option<f64>,
    /// Seconds per step if every FLOP ran at `rate`.
    step_s: Option<f64>,
}

/// Runs the command.
pub fn run(args: &Plan, screen: Screen) -> Result<Exit, Failure> {
    let config = load_config(&args.config, &args.overrides)?;
    let kind = if args.gpus.is_some() || config.pipeline.device == "cuda" { Kind::Gpu } else { Kind::Cpu };
    let progress = Progress::new(screen, "index");
    let setup = Setup::open(config, &|done, total| progress.update(done, total, || format!("{} bytes", count(done))))?;
    drop(progress);
    setup.notices.iter().for_each(|n| screen.note(format!("note: {n}")));
    let sweep = setup.variants[0].name.is_some();
    let table = StartTable::compute(&setup.builder, SAMPLED_BATCHES)?;
    let programs = Programs::new(&setup, &setup.config.batch, kind);
    let flops = programs.flops(&table, setup.config.batch.micro_blocks);
    let placement = match args.gpus {
        Some(n) if sweep => {
            let d = setup.variants.len() as u32;
            if n <= d {
                let what = format!("a sweep of {d} drafters on {n} GPUs leaves none for a target");
                return Err(Failure::new(Exit::Usage, what, format!("plan for at least {} GPUs", d + 1)));
            }
            Placement { targets: (0..n - d).collect(), drafters: (n - d..n).collect() }
        }
        Some(n) => best_split(n, &flops),
        None => Placement { targets: setup.config.pipeline.targets.clone(), drafters: setup.config.pipeline.drafters.clone() },
    };
    let devices = programs.memory(&placement, sweep);
    let limit = args.memory.or_else(|| if kind == Kind::Cpu { available_memory() } else { None });
    let rate = match kind {
        Kind::Cpu => Some(1e9 * gemm_rate(&setup)?),
        Kind::Gpu => args.tflops.map(|t| 1e12 * t),
    };
    let batches = setup.config.optimizer.global_batch as f64;
    let report = Report {
        epochs: setup.total_steps as f64 / (table.batches as f64 / batches).ceil(),
        total_steps: setup.total_steps,
        slots_per_pool: layout(&placement, sweep).slots_per_pool(),
        slot_bytes: programs.slot_bytes(),
        checkpoint_bytes: programs.checkpoint_bytes(),
        memory_limit_bytes: limit,
        step_useful_flops: batches * (flops.target + flops.drafter),
        rate,
        step_s: rate.map(|r| batches * bottleneck(&placement, &flops, kind) / r),
        batch_flops: flops,
        batches: table,
        placement,
        devices,
    };
    screen.say(text(&report, &setup, kind, screen))?;
    screen.json(&report)?;
    let largest = report.devices.iter().max_by_key(|d| d.total_bytes).expect("a plan has a device");
    match limit {
        Some(limit) if largest.total_bytes > limit => Err(does_not_fit(&setup, kind, &report.placement, largest, limit)),
        Some(_) => Ok(Exit::Done),
        None => {
            screen.note("note: whether it fits is not checked; pass --memory, e.g. --memory 80GiB");
            Ok(Exit::Done)
        }
    }
}

/// Exit 4, with the keys that make it fit.
pub fn does_not_fit(setup: &Setup, kind: Kind, placement: &Placement, device: &DeviceMemory, limit: u64) -> Failure {
    let what = format!("{} needs {}, there are {}", device.device, bytes(device.total_bytes), bytes(limit));
    let knobs = knobs(setup, kind, placement, limit);
    let todo = if knobs.is_empty() {
        "no batch setting makes it fit: use a device with more memory, fewer drafter.layers, or a smaller target".to_owned()
    } else {
        format!("it fits with {}", knobs.join(", or with "))
    };
    Failure::new(Exit::DoesNotFit, what, todo)
}

/// GFLOP/s of this machine at the target's MLP shape.
fn gemm_rate(setup: &Setup) -> Result<f64, Failure> {
    let target = &setup.target.config;
    let rows = (setup.config.batch.token_budget as usize).min(1024);
    let (n, k) = (target.intermediate.min(4096), target.hidden.min(4096));
    // On the pool that a run would have, so that pipeline.threads counts.
    Ok(cpu_backend(&setup.config)?.pool().install(|| drafthorse_cpu::measure_gflops(rows, n, k, 3)))
}

fn text(r: &Report, setup: &Setup, kind: Kind, screen: Screen) -> String {
    let bold = anstyle::Style::new().bold();
    let title = |t: &str| screen.paint(bold, t);
    let mut out = format!("{}\n{}\n", title("data"), r.batches);
    out.push_str(&format!(
        "steps      {} of {} batches each: {:.1} epochs\n\n",
        count(r.total_steps),
        setup.config.optimizer.global_batch,
        r.epochs
    ));
    out.push_str(&format!("{}\n", title("memory")));
    // Devices that need the same are shown once.
    for same in r.devices.chunk_by(|a, b| a.parts == b.parts) {
        let device = &same[0];
        let name = match same {
            [_] => device.device.clone(),
            [.., last] => format!("{} to {}, each", device.device, last.device.trim_start_matches("gpu ")),
            [] => unreachable!("chunks are not empty"),
        };
        let role = match kind {
            Kind::Cpu => String::new(),
            Kind::Gpu => {
                let index: u32 = device.device.trim_start_matches("gpu ").parse().unwrap_or(0);
                let roles =
                    [(r.placement.targets.contains(&index), "target"), (r.placement.drafters.contains(&index), "drafter")];
                format!(" ({})", roles.iter().filter(|(is, _)| *is).map(|(_, n)| *n).collect::<Vec<_>>().join(" and "))
            }
        };
        out.push_str(&format!("{name}{role}  {}\n", bytes(device.total_bytes)));
        for part in &device.parts {
            out.push_str(&format!("  {:<20} {:>10}  {:>15}\n", part.name, bytes(part.size_bytes), count(part.size_bytes)));
        }
    }
    out.push_str(&format!(
        "slots      {} per drafter pool, {} each\ncheckpoint {} on disk, {} kept\n",
        r.slots_per_pool,
        bytes(r.slot_bytes),
        bytes(r.checkpoint_bytes),
        setup.config.checkpoint.keep_last
    ));
    if let Some(limit) = r.memory_limit_bytes {
        out.push_str(&format!("there are  {} per device\n", bytes(limit)));
    }
    let f = &r.batch_flops;
    out.push_str(&format!("\n{}\n", title("work")));
    out.push_str(&format!(
        "useful     {}FLOP per step: {}FLOP target, {}FLOP drafter per batch, {} micro-batches of {} blocks\n",
        si(r.step_useful_flops),
        si(f.target),
        si(f.drafter),
        f.micro_batches,
        setup.config.batch.micro_blocks
    ));
    if kind == Kind::Gpu {
        out.push_str(&format!("split      targets {:?}, drafters {:?}\n", r.placement.targets, r.placement.drafters));
    }
    match (r.rate, r.step_s) {
        (Some(rate), Some(step_s)) => {
            let tokens = r.batches.fill * f64::from(setup.config.batch.token_budget) * setup.config.optimizer.global_batch as f64;
            let how = if kind == Kind::Cpu { "measured now on a GEMM" } else { "as given" };
            out.push_str(&format!(
                "time       at least {} per step, {} in all ({} tokens/s), if every FLOP ran at {}FLOP/s ({how})",
                seconds(step_s),
                seconds(step_s * r.total_steps as f64),
                si(tokens / step_s),
                si(rate)
            ));
        }
        _ => out.push_str("time       not predicted: pass --tflops with the rate that one GPU sustains"),
    }
    out
}
