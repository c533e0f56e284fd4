//! `drafthorse bench`: how fast a drafter step is on this machine, beside what its matrix products alone allow.
//!
//! On the CPU, target, data and drafter are a run config's; on a GPU they may also be a named shape with random content (`bench/gpu.rs`). Refuses to mix the
//! two. Invariants: useful FLOPs count what the mathematics needs (no recompute, no padding, the head only for supervised rows); the ceiling is measured
//! in the same run, before and after the steps, as the FLOP-weighted harmonic mean over the step's own products.

#[cfg(feature = "cuda")]
mod gpu;
#[cfg(feature = "cuda")]
mod shapes;

use crate::device::{self, Device, Opened};
use crate::exit::{Exit, Failure};
use crate::format::{bytes, seconds};
use crate::launch::{cpu_backend, load_config};
use crate::progress::Progress;
use crate::screen::Screen;
use clap::{Args, Subcommand};
use drafthorse_cpu::{CpuExecutor, measure_gflops};
use drafthorse_data::batch::Batch;
use drafthorse_graph::op::{Heads, Op};
use drafthorse_graph::{Executor, Plan, Program, Storage};
use drafthorse_train::capture::{capture, capture_program};
use drafthorse_train::drafter::{Drafter, drafter_program};
use drafthorse_train::frozen::{Backend, FrozenSource};
use drafthorse_train::setup::{Setup, adam_config};
use serde::Serialize;
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

/// Measure speed on this machine
///
/// Times the step or the target's forward and says what share of the matrix products' own rate the whole reaches.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  drafthorse bench step run.toml
  drafthorse bench step run.toml batch.token_budget=4096 --repeats 5 --json
  drafthorse bench step --shape qwen3-8b --device cuda:0
  drafthorse bench target --shape llama-3.1-8b --device cuda:0
  drafthorse bench op --shape qwen3-4b --device cuda:0 --json")]
pub struct Bench {
    #[command(subcommand)]
    what: What,
}

#[derive(Debug, Subcommand)]
enum What {
    /// One target forward and one drafter step (forward, backward, clip, AdamW) over real batches
    Step(Step),
    /// A target's forward at a named shape on a GPU, with its layers captured
    Target(Shaped),
    /// Every op of a named shape's target and drafter by itself on a GPU
    Op(Shaped),
}

/// A named shape with random weights and a packed batch of random samples.
#[derive(Debug, Args)]
struct Shaped {
    /// qwen3-4b, qwen3-8b, llama-3.1-8b, qwen3.6-27b (its drafter only) or smollm2-135m
    #[arg(long, value_name = "NAME")]
    shape: Option<String>,
    /// Where: cuda or cuda:N for named shapes
    #[arg(long, value_name = "DEVICE", default_value = "cpu")]
    device: Device,
    /// Samples of the batch
    #[arg(long, value_name = "N", default_value_t = 4, value_parser = at_least_one)]
    rows: usize,
    /// Tokens of a sample
    #[arg(long, value_name = "N", default_value_t = 3072, value_parser = at_least_two)]
    len: usize,
    /// Blocks of a sample
    #[arg(long, value_name = "N", default_value_t = 512, value_parser = at_least_one)]
    anchors: usize,
    /// Blocks of a micro-batch
    #[arg(long, value_name = "N", default_value_t = 344, value_parser = at_least_one)]
    micro_blocks: usize,
    /// Rows of logits that exist at once
    #[arg(long, value_name = "N", default_value_t = 1024, value_parser = at_least_one)]
    loss_chunk: usize,
    /// Timed repeats after those that warm up
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..))]
    repeats: u32,
}

/// What of a named shape is timed.
enum Part {
    Step,
    Target,
    Ops,
}

fn at_least(text: &str, least: usize) -> Result<usize, String> {
    match text.parse() {
        Ok(n) if (least..=1 << 30).contains(&n) => Ok(n),
        _ => Err(format!("a number from {least} to 2^30 is wanted")),
    }
}

fn at_least_one(text: &str) -> Result<usize, String> {
    at_least(text, 1)
}

fn at_least_two(text: &str) -> Result<usize, String> {
    at_least(text, 2)
}

/// One target forward and one drafter step over real batches
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  drafthorse bench step run.toml
  drafthorse bench step run.toml batch.token_budget=4096 --repeats 5 --json")]
struct Step {
    /// Run config
    #[arg(required_unless_present = "shape", conflicts_with = "shape")]
    config: Option<PathBuf>,
    /// Overrides, e.g. drafter.layers=3
    #[arg(value_name = "KEY=VALUE")]
    overrides: Vec<String>,
    #[command(flatten)]
    shaped: Shaped,
}

/// What was measured.
#[derive(Debug, Serialize)]
struct Report {
    tokens: usize,
    blocks: usize,
    supervised_rows: usize,
    target_forward_s: f64,
    drafter_step_s: f64,
    useful_gflop: f64,
    useful_gflop_per_s: f64,
    /// Mean of the two below.
    gemm_ceiling_gflop_per_s: f64,
    ceiling_before_gflop_per_s: f64,
    ceiling_after_gflop_per_s: f64,
    share_of_ceiling: f64,
    /// Milliseconds of a drafter step by kind of op, largest first; means over the timed repeats.
    ops: Vec<OpShare>,
    planned_bytes: u64,
    held_bytes: u64,
    peak_resident_bytes: Option<u64>,
}

/// Time of one kind of op.
#[derive(Debug, Serialize)]
struct OpShare {
    name: &'static str,
    ms: f64,
    /// Of all ops of a drafter step.
    share: f64,
}

/// Runs the command.
pub fn run(args: &Bench, screen: Screen) -> Result<Exit, Failure> {
    let args = match &args.what {
        What::Step(step) if step.shaped.shape.is_none() => step,
        What::Step(step) => return on_gpu(&step.shaped, Part::Step, screen),
        What::Target(shaped) => return on_gpu(shaped, Part::Target, screen),
        What::Op(shaped) => return on_gpu(shaped, Part::Ops, screen),
    };
    let config = load_config(args.config.as_deref().expect("required without --shape"), &args.overrides)?;
    let backend = cpu_backend(&config)?;
    let setup = Setup::open(config, &|_, _| {})?;
    let b = &setup.config.batch;
    let target = capture_program(backend.act(), &setup.target.config, b.token_budget as usize, b.max_rows, &setup.captured);
    let variant = &setup.variants[0];
    let adam = adam_config(&variant.config);
    let draft = drafter_program(backend.act(), &setup.target.config, &variant.draft, &setup.captured, setup.train_shape(), adam);
    let source = FrozenSource { target: &setup.target, draft: Some(&variant.draft) };
    let mut capturing = backend.executor(0, Arc::clone(&target.program), &source, &mut |_, _| {})?;
    let exec = backend.executor(0, Arc::clone(&draft.program), &source, &mut |_, _| {})?;
    let (program, held) = (Arc::clone(&draft.program), exec.held_bytes());
    let scratch = CpuExecutor::scratch_bytes(&program, backend.pool().current_num_threads());
    let planned = Plan::new(&program, Storage::Wide).total_bytes() as u64 + scratch;
    let mut slot = exec.new_slot()?;
    let mut drafter = Drafter::new(exec, draft);
    drafter.initialise(setup.config.seed, setup.config.drafter.init_std)?;
    let batch = Arc::new(setup.builder.build(0)?);
    let progress = Progress::new(screen, "bench");
    let (useful, products) = work(&program, &batch);
    let (mut forward_s, mut step_s) = (Vec::new(), Vec::new());
    let (mut peak_resident_bytes, mut before) = (None, 0.0);
    for repeat in 0..=args.shaped.repeats {
        let begun = Instant::now();
        capture(&mut capturing, &target.pass, &batch, &mut slot)?;
        let captured = begun.elapsed().as_secs_f64();
        drafter.begin_step()?;
        drafter.train_batch(&batch, &slot, &mut || {})?;
        drafter.optimize(setup.config.optimizer.lr)?;
        drafter.tally()?;
        if repeat > 0 {
            forward_s.push(captured);
            step_s.push(begun.elapsed().as_secs_f64() - captured);
        }
        if repeat == 0 {
            // One step has touched all of its memory; the ceiling's own buffers come after it.
            peak_resident_bytes = resident_bytes_at_most();
            before = backend.pool().install(|| ceiling(&products));
            drafter.exec().take_times();
        }
        progress.update(u64::from(repeat) + 1, u64::from(args.shaped.repeats) + 1, || seconds(begun.elapsed().as_secs_f64()));
    }
    let after = backend.pool().install(|| ceiling(&products));
    let ceiling = (before + after) / 2.0;
    let ops = op_shares(drafter.exec(), args.shaped.repeats);
    drop(progress);
    let step_s = median(step_s);
    let rate = useful / step_s / 1e9;
    let report = Report {
        tokens: batch.n_tokens,
        blocks: batch.n_blocks,
        supervised_rows: batch.micros.iter().map(|m| m.n_rows).sum(),
        target_forward_s: median(forward_s),
        drafter_step_s: step_s,
        useful_gflop: useful / 1e9,
        useful_gflop_per_s: rate,
        gemm_ceiling_gflop_per_s: ceiling,
        ceiling_before_gflop_per_s: before,
        ceiling_after_gflop_per_s: after,
        share_of_ceiling: rate / ceiling,
        ops,
        planned_bytes: planned,
        held_bytes: held,
        peak_resident_bytes,
    };
    screen.say(format!(
        "batch      {} tokens, {} blocks, {} supervised rows\ntarget     {} a forward\ndrafter    {} a step, {:.1} GFLOP/s useful\nceiling    {:.1} GFLOP/s: the step's own matrix products alone; share {:.1} %\nops        {}\nmemory     {} planned for the drafter, {} held; {} resident at most, target and files included",
        report.tokens,
        report.blocks,
        report.supervised_rows,
        seconds(report.target_forward_s),
        seconds(report.drafter_step_s),
        report.useful_gflop_per_s,
        report.gemm_ceiling_gflop_per_s,
        100.0 * report.share_of_ceiling,
        report.ops.iter().map(|o| format!("{} {:.1} %", o.name, 100.0 * o.share)).collect::<Vec<_>>().join(", "),
        bytes(report.planned_bytes),
        bytes(report.held_bytes),
        report.peak_resident_bytes.map_or_else(|| "unknown".to_owned(), bytes),
    ))?;
    screen.json(&report)?;
    Ok(Exit::Done)
}

/// Times a named shape.
#[cfg_attr(not(feature = "cuda"), expect(unused_variables, reason = "a build without GPUs times none"))]
fn on_gpu(args: &Shaped, part: Part, screen: Screen) -> Result<Exit, Failure> {
    let Some(shape) = &args.shape else {
        return Err(Failure::new(Exit::Usage, "--shape is missing", "e.g. --shape qwen3-8b --device cuda:0"));
    };
    let opened = device::open(args.device, None, device::DEADLINE)?;
    match opened {
        Opened::Cpu(_) => {
            let what = format!("--shape {shape} is timed on a GPU alone: its weights do not fit a CPU's patience");
            Err(Failure::new(Exit::Usage, what, "add --device cuda:0, or time a run config"))
        }
        #[cfg(feature = "cuda")]
        Opened::Cuda(backend) => {
            let &Shaped { rows, len, anchors, micro_blocks, loss_chunk, repeats, .. } = args;
            let gpu = args.device.index();
            let size = gpu::Size { shape, rows, len, anchors, micro_blocks, loss_chunk, repeats, gpu };
            let mut reports = Vec::new();
            if matches!(part, Part::Step | Part::Ops) {
                reports.push(gpu::step(&backend, size, screen)?);
            }
            // The ops of a target that this program does not compute are left out of `bench op`, aloud; `bench target` refuses it.
            if matches!(part, Part::Target) || matches!(part, Part::Ops) && shapes::has_target(shape) {
                reports.push(gpu::target_forward(&backend, size)?);
            } else if matches!(part, Part::Ops) {
                screen.note(format!("note: the target of {shape} is not computed by this program: its drafter's ops alone"));
            }
            for report in &reports {
                gpu::show(report, if matches!(part, Part::Ops) { usize::MAX } else { 24 }, screen)?;
            }
            match &reports[..] {
                [one] => screen.json(one)?,
                all => screen.json(&all)?,
            }
            Ok(Exit::Done)
        }
    }
}

/// (m, n, k) → FLOPs spent in products of that shape.
type Products = BTreeMap<(usize, usize, usize), f64>;

/// Useful FLOPs of one step over `batch`, and the shapes of its matrix products.
fn work(program: &Program, batch: &Batch) -> (f64, Products) {
    let (mut useful, mut products) = (0.0, Products::new());
    for (_, phase) in program.phases() {
        // Phase → (times it runs, share of its rows that are real).
        let runs: Vec<(f64, Option<usize>)> = match phase.name.as_str() {
            "draft.micro" => batch.micros.iter().enumerate().map(|(i, m)| (m.n_blocks as f64, Some(i))).collect(),
            "draft.context" | "draft.context_backward" => vec![(batch.n_tokens as f64, None)],
            _ => continue,
        };
        for (real, micro) in runs {
            for node in phase.nodes.iter().filter(|n| !n.recomputed) {
                let flops = node.op.work(program).flops as f64;
                let share = |rows: usize| real / rows as f64;
                useful += match &node.op {
                    Op::HeadLoss(op) => {
                        let m = &batch.micros[micro.expect("the head is in the micro-batch phase")];
                        flops * m.n_rows as f64 / program.get(op.x).rows() as f64
                    }
                    Op::BlockAttention(op) => attention(batch, micro, op.heads, op.blocks.size, op.window),
                    Op::BlockAttentionBwd(op) => {
                        2.5 * attention(batch, micro, op.forward.heads, op.forward.blocks.size, op.forward.window)
                    }
                    _ => match micro {
                        Some(_) => flops * share(blocks_of(program)),
                        None => flops * share(batch.tokens.len()),
                    },
                };
                for (shape, times) in gemms(program, &node.op) {
                    *products.entry(shape).or_default() += times * 2.0 * (shape.0 * shape.1 * shape.2) as f64;
                }
            }
        }
    }
    (useful, products)
}

fn blocks_of(program: &Program) -> usize {
    program.find("draft.micro.anchor").map_or(1, |t| program.get(t).len())
}

/// FLOPs of the scores and values that the micro-batch's blocks see.
fn attention(batch: &Batch, micro: Option<usize>, heads: Heads, size: usize, window: Option<usize>) -> f64 {
    let m = &batch.micros[micro.expect("attention is in the micro-batch phase")];
    let seen: usize = m.anchor[..m.n_blocks].iter().map(|&a| window.map_or(a as usize, |w| w.min(a as usize)) + size).sum();
    4.0 * (seen * size * heads.q_cols()) as f64
}

/// The matrix products of an op, with how often each runs.
fn gemms(program: &Program, op: &Op) -> Vec<((usize, usize, usize), f64)> {
    match op {
        Op::Linear(op) => vec![((program.get(op.x).rows(), op.rows.len(), program.get(op.x).cols()), 1.0)],
        Op::LinearDx(op) => vec![((program.get(op.dy).rows(), program.get(op.dx).cols(), op.rows.len()), 1.0)],
        Op::LinearDw(op) => vec![((op.rows.len(), program.get(op.x).cols(), program.get(op.dy).rows()), 1.0)],
        Op::HeadLoss(op) => {
            let (x, vocab) = (program.get(op.x), program.get(op.head).rows());
            let chunks = x.rows() as f64 / op.chunk as f64;
            vec![((op.chunk, vocab, x.cols()), chunks), ((op.chunk, x.cols(), vocab), chunks)]
        }
        _ => Vec::new(),
    }
}

/// FLOP-weighted harmonic mean of the measured rates, GFLOP/s.
fn ceiling(products: &Products) -> f64 {
    let total: f64 = products.values().sum();
    let time: f64 = products.iter().map(|(&(m, n, k), flops)| flops / measure_gflops(m, n, k, 3)).sum();
    total / time
}

fn op_shares(exec: &mut CpuExecutor, repeats: u32) -> Vec<OpShare> {
    let times = exec.take_times();
    let all: f64 = times.values().map(std::time::Duration::as_secs_f64).sum();
    let ms = |s: f64| 1e3 * s / f64::from(repeats);
    let mut ops: Vec<OpShare> =
        times.into_iter().map(|(name, t)| OpShare { name, ms: ms(t.as_secs_f64()), share: t.as_secs_f64() / all }).collect();
    ops.sort_by(|a, b| b.ms.total_cmp(&a.ms));
    ops
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// The high-water mark of this process, from the kernel.
fn resident_bytes_at_most() -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find(|l| l.starts_with("VmHWM:"))?;
    line.split_whitespace().nth(1)?.parse::<u64>().ok().map(|kib| kib * 1024)
}
