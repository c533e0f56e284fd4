//! `bench step --shape` and `bench target --shape`: the training step and the target's forward at real shapes on a GPU, through the calls that a run makes.
//!
//! Job: medians of wall time, useful TFLOP/s, share of the ceiling, memory planned and seen, and where the time goes, op by op. Refuses to judge: it prints.
//! Invariants: useful FLOPs are counted as the PyTorch yardstick counts them (no recompute, no padding); the ceiling is the FLOP-weighted harmonic mean
//! of the rates of the pass's own matrix products, measured in the same process; the step's loss must fall on its repeated batch.

use super::shapes::{batch, load_random, target};
use crate::exit::{Exit, Failure};
use crate::format::{bytes, seconds};
use crate::progress::Progress;
use crate::screen::Screen;
use drafthorse_cuda::{CudaExecutor, CudaSlot, OpTime};
use drafthorse_graph::op::optim::AdamConfig;
use drafthorse_graph::plan::Region;
use drafthorse_graph::{DType, ExecError, Executor, PhaseId, Program};
use drafthorse_models::draft::dflash::TrainShape;
use drafthorse_models::draft_config::DraftConfig;
use drafthorse_models::hf_config::TargetConfig;
use drafthorse_train::capture::{capture, capture_program};
use drafthorse_train::cuda::CudaBackend;
use drafthorse_train::drafter::{Drafter, drafter_program};
use serde::Serialize;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Instant;

/// What is timed.
#[derive(Clone, Copy, Debug)]
pub struct Size<'a> {
    /// Name of the shape.
    pub shape: &'a str,
    /// Samples.
    pub rows: usize,
    /// Tokens of a sample.
    pub len: usize,
    /// Blocks of a sample.
    pub anchors: usize,
    /// Blocks of a micro-batch.
    pub micro_blocks: usize,
    /// Rows of logits at once.
    pub loss_chunk: usize,
    /// Timed repeats after three that warm up.
    pub repeats: u32,
    /// The GPU.
    pub gpu: u32,
}

/// What was measured.
#[derive(Debug, Serialize)]
pub struct Report {
    what: String,
    shape: String,
    gpu: String,
    median_ms: f64,
    min_ms: f64,
    max_ms: f64,
    tokens_per_s: f64,
    useful_tflop_per_s: f64,
    product_tflop_per_s: f64,
    share_of_ceiling: f64,
    first_s: f64,
    load_s: f64,
    products_timed: usize,
    planned_bytes: u64,
    slot_bytes: u64,
    extra_bytes: u64,
    seen_bytes: u64,
    regions: BTreeMap<&'static str, u64>,
    losses: Vec<f32>,
    ops: Vec<OpGroup>,
}

/// Ops of one name and shape.
#[derive(Clone, Debug, Serialize)]
struct OpGroup {
    phase: String,
    op: String,
    times: usize,
    us: f64,
    tflop_per_s: f64,
    tbyte_per_s: f64,
}

/// Times the drafter's step.
///
/// # Errors
/// When the shape is unknown or the device fails.
pub fn step(backend: &CudaBackend, size: Size<'_>, screen: Screen) -> Result<Report, Failure> {
    let begun = Instant::now();
    let (config, _) = target(size.shape, size.len + 64)?;
    let draft = DraftConfig::default_for(&config, config.vocab as u32 - 1)?;
    let captured = draft.target_layer_ids.clone();
    let shape = TrainShape {
        budget: size.rows * size.len,
        micro_blocks: size.micro_blocks,
        loss_chunk: size.loss_chunk,
        recompute: false,
        mean_context: size.len / 2,
    };
    let adam = AdamConfig { betas: [0.9, 0.999], eps: 1e-8, weight_decay: 0.0, clip: 1.0 };
    let program = drafter_program(DType::BF16, &config, &draft, &captured, shape, adam);
    let store = backend.store(size.gpu)?;
    let before = store.device().memory()?;
    let loading = Instant::now();
    load_random(&store, &program.program, &config, Some(&draft))?;
    let exec = backend.loaded(size.gpu, Arc::clone(&program.program))?;
    let micro = program.passes.micro;
    let mut drafter = Drafter::new(exec, program);
    drafter.initialise(1, 0.02)?;
    let mut slot = drafter.exec().new_slot()?;
    drafter.exec().fill_slot(&mut slot, 3)?;
    let load_s = loading.elapsed().as_secs_f64();
    drafter.exec().prepare()?;
    let after = store.device().memory()?;
    let batch = Arc::new(batch(&draft, [size.rows, size.len, size.anchors, size.micro_blocks]));
    let progress = Progress::new(screen, "bench");
    let (mut times, mut losses, mut first_s) = (Vec::new(), Vec::new(), 0.0);
    for i in 0..size.repeats + 3 {
        let from = Instant::now();
        drafter.begin_step()?;
        drafter.train_batch(&batch, &slot, &mut || {})?;
        let report = drafter.optimize(1e-4)?;
        let ms = from.elapsed().as_secs_f64() * 1e3;
        drafter.tally()?;
        losses.push(report.loss);
        match i {
            0 => first_s = begun.elapsed().as_secs_f64(),
            1 | 2 => {}
            _ => times.push(ms),
        }
        progress.update(u64::from(i) + 1, u64::from(size.repeats) + 3, || format!("{ms:.1} ms, loss {:.4}", report.loss));
    }
    drop(progress);
    let micros = batch.micros.len();
    let times_of = |phase: PhaseId| if phase == micro { micros } else { 1 };
    let what = format!(
        "step, {} x {} context, {} blocks a sample, {} a micro-batch",
        size.rows, size.len, size.anchors, size.micro_blocks
    );
    let useful = step_flops(&config, &draft, size);
    let program = Arc::clone(&drafter.program().program);
    let run = Timed { what, size, times, losses, first_s, load_s, useful, seen: before.free - after.free };
    report(drafter.exec(), &program, &slot, &times_of, run)
}

/// Times the target's forward with its layers captured.
///
/// # Errors
/// When the shape is unknown or no target of this program, or the device fails.
pub fn target_forward(backend: &CudaBackend, size: Size<'_>) -> Result<Report, Failure> {
    let begun = Instant::now();
    let (config, own) = target(size.shape, size.len)?;
    if !own {
        let what = format!("the target of {} has layers that this program does not compute", size.shape);
        return Err(Failure::new(Exit::Usage, what, "use another --shape; its drafter's step can be timed with `bench step`"));
    }
    let draft = DraftConfig::default_for(&config, config.vocab as u32 - 1)?;
    let budget = size.rows * size.len;
    let program = capture_program(DType::BF16, &config, budget, size.rows, &draft.target_layer_ids);
    let store = backend.store(size.gpu)?;
    let before = store.device().memory()?;
    let loading = Instant::now();
    load_random(&store, &program.program, &config, None)?;
    let mut exec = backend.loaded(size.gpu, Arc::clone(&program.program))?;
    let mut slot = exec.new_slot()?;
    let load_s = loading.elapsed().as_secs_f64();
    exec.prepare()?;
    let after = store.device().memory()?;
    let batch = batch(&draft, [size.rows, size.len, 1, 1]);
    let (mut times, mut first_s) = (Vec::new(), 0.0);
    for i in 0..size.repeats + 3 {
        let ms = f64::from(exec.time(|exec| capture(exec, &program.pass, &batch, &mut slot))?);
        match i {
            0 => first_s = begun.elapsed().as_secs_f64(),
            1 | 2 => {}
            _ => times.push(ms),
        }
    }
    let what = format!("target forward, {} x {} tokens, {} layers captured", size.rows, size.len, draft.target_layer_ids.len());
    let useful = target_flops(&config, &draft, size);
    let run = Timed { what, size, times, losses: Vec::new(), first_s, load_s, useful, seen: before.free - after.free };
    report(&mut exec, &program.program, &slot, &|_| 1, run)
}

/// The yardstick's count: forward, dX, dW of the draft tokens, fusion without dX, context K and V, frozen head with dX, attention 3.5 times forward.
fn step_flops(target: &TargetConfig, draft: &DraftConfig, size: Size<'_>) -> f64 {
    let f = |x: usize| x as f64;
    let (h, i, v) = (f(draft.hidden), f(draft.intermediate), f(target.vocab));
    let (q_width, kv_width, layers) = (f(draft.q_width()), f(draft.kv_width()), f(draft.layers));
    let (q, c) = (f(size.rows * size.anchors * draft.block_size), f(size.rows * size.len));
    let layer = 4.0 * h * q_width + 4.0 * h * kv_width + 6.0 * h * i;
    let context = 4.0 * c * f(draft.fc_columns()) * h + 12.0 * layers * c * h * kv_width;
    let attention = 14.0 * layers * q * (f(size.len) / 2.0 + f(draft.block_size)) * q_width;
    3.0 * layers * q * layer + context + 4.0 * q * h * v + attention
}

/// 2 FLOPs for each weight of a linear and each token, as the yardstick counts, but only of the layers that the features need; attention is not counted.
fn target_flops(target: &TargetConfig, draft: &DraftConfig, size: Size<'_>) -> f64 {
    let (h, q, kv) = (target.hidden, target.q_width(), target.kv_width());
    let layer = h * (q + 2 * kv) + q * h + 3 * h * target.intermediate;
    let layers = draft.target_layer_ids.last().map_or(0, |l| l + 1);
    2.0 * (layers * layer) as f64 * (size.rows * size.len) as f64
}

/// A finished timing.
struct Timed<'a> {
    what: String,
    size: Size<'a>,
    times: Vec<f64>,
    losses: Vec<f32>,
    first_s: f64,
    load_s: f64,
    useful: f64,
    seen: u64,
}

fn report(
    exec: &mut CudaExecutor,
    program: &Program,
    slot: &CudaSlot,
    times_of: &dyn Fn(PhaseId) -> usize,
    run: Timed<'_>,
) -> Result<Report, Failure> {
    let (ops, rate) = op_groups(exec, program, slot, times_of)?;
    let mut times = run.times;
    times.sort_by(f64::total_cmp);
    let median_ms = times[times.len() / 2];
    let useful_rate = run.useful / median_ms / 1e9;
    Ok(Report {
        what: run.what,
        shape: run.size.shape.to_owned(),
        gpu: exec.store().device().name.clone(),
        median_ms,
        min_ms: times[0],
        max_ms: times[times.len() - 1],
        tokens_per_s: (run.size.rows * run.size.len) as f64 / median_ms * 1e3,
        useful_tflop_per_s: useful_rate,
        product_tflop_per_s: rate,
        share_of_ceiling: useful_rate / rate,
        first_s: run.first_s,
        load_s: run.load_s,
        products_timed: exec.products_timed(),
        planned_bytes: exec.plan().total_bytes() as u64,
        slot_bytes: exec.plan().bytes(Region::Slot) as u64,
        extra_bytes: exec.extra_bytes(),
        seen_bytes: run.seen,
        regions: Region::ALL.into_iter().map(|r| (r.title(), exec.plan().bytes(r) as u64)).collect(),
        losses: run.losses,
        ops,
    })
}

/// Prints a report, with the longest `ops` ops.
///
/// # Errors
/// When the output is closed.
pub fn show(report: &Report, ops: usize, screen: Screen) -> Result<(), Failure> {
    screen.say(format!(
        "{} {} on {}\ntime       {:.1} ms (min {:.1}, max {:.1}), {:.0} tokens/s\nuseful     {:.0} TFLOP/s; its matrix products alone run at {:.0}; share {:.1} %\nstart      first ended {} after launch, {} of it loading; {} products timed\nmemory     {} planned, {} a slot, {} beside; {} seen",
        report.shape, report.what, report.gpu, report.median_ms, report.min_ms, report.max_ms, report.tokens_per_s,
        report.useful_tflop_per_s, report.product_tflop_per_s, 100.0 * report.share_of_ceiling,
        seconds(report.first_s), seconds(report.load_s), report.products_timed,
        bytes(report.planned_bytes), bytes(report.slot_bytes), bytes(report.extra_bytes), bytes(report.seen_bytes),
    ))?;
    if let (Some(first), Some(last)) = (report.losses.first(), report.losses.last()) {
        screen.say(format!("loss       {first:.4} to {last:.4} on the repeated batch"))?;
    }
    screen.say("        us  times   TFLOP/s  TB/s  op")?;
    for g in report.ops.iter().take(ops) {
        screen.say(format!(
            "{:>10.1} x {:>4} {:>9.0} {:>5.2}  {} {}",
            g.us, g.times, g.tflop_per_s, g.tbyte_per_s, g.phase, g.op
        ))?;
    }
    Ok(())
}

/// Every op by itself, grouped by name and shape, the longest first; and the rate of the matrix products, TFLOP/s.
fn op_groups(
    exec: &mut CudaExecutor,
    program: &Program,
    slot: &CudaSlot,
    times_of: &dyn Fn(PhaseId) -> usize,
) -> Result<(Vec<OpGroup>, f64), ExecError> {
    struct Sum {
        times: usize,
        ms: f64,
        flops: f64,
        bytes: f64,
    }
    let mut groups: BTreeMap<(String, String), Sum> = BTreeMap::new();
    let (mut product_ms, mut product_flops) = (0.0, 0.0);
    for (id, phase) in program.phases() {
        for OpTime { name, described, ms, flops, bytes } in exec.time_ops(id, Some(slot), 5)? {
            let (n, ms) = (times_of(id), f64::from(ms));
            let group = groups.entry((phase.name.clone(), shapes_only(&described))).or_insert(Sum {
                times: 0,
                ms: 0.0,
                flops: 0.0,
                bytes: 0.0,
            });
            group.times += n;
            group.ms += ms * n as f64;
            group.flops += flops as f64 * n as f64;
            group.bytes += bytes as f64 * n as f64;
            if name.starts_with("Linear") {
                product_ms += ms * n as f64;
                product_flops += flops as f64 * n as f64;
            }
        }
    }
    let mut list: Vec<((String, String), Sum)> = groups.into_iter().collect();
    list.sort_by(|a, b| b.1.ms.total_cmp(&a.1.ms));
    let groups = list
        .into_iter()
        .map(|((phase, op), s)| OpGroup {
            phase,
            op,
            times: s.times,
            us: s.ms / s.times as f64 * 1e3,
            tflop_per_s: s.flops / s.ms / 1e9,
            tbyte_per_s: s.bytes / s.ms / 1e9,
        })
        .collect();
    Ok((groups, product_flops / product_ms / 1e9))
}

/// An op's description without tensor names: ops of different layers fall together.
fn shapes_only(described: &str) -> String {
    let (name, operands) = described.split_once('(').unwrap_or((described, ""));
    let shapes: Vec<&str> = operands.split('[').skip(1).filter_map(|s| s.split(']').next()).take(4).collect();
    format!("{name} [{}]", shapes.join("] ["))
}
