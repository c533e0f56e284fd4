//! Times a drafter's training step, and its ops one by one, at real shapes on GPU 0.
//!
//! `bench [--shape NAME] [--batch N] [--seq N] [--anchors N] [--micro N] [--chunk N] [--steps N] [--mma] [--table FILE]`
//!
//! Job: random weights and features, sorted random anchors, the whole step with clip and AdamW through captured graphs, medians by device events, useful
//! TFLOP/s counted as the PyTorch yardstick counts them, memory planned and seen. Refuses to judge: it prints. The loss must fall on the repeated batch,
//! which shows that the step computes something.

use drafthorse_cuda::{AlgorithmTable, CudaError, CudaExecutor, Device, FrozenStore, Libraries, OpTime, Options, SearchPaths};
use drafthorse_graph::op::optim::AdamConfig;
use drafthorse_graph::plan::Region;
use drafthorse_graph::{DType, Executor, HostMut, HostRef, Program, Role, SlotArg};
use drafthorse_models::draft::dflash::{Dflash, Shared, TrainPasses, TrainShape};
use drafthorse_models::draft_config::{DraftConfig, LayerKind, default_layer_ids};
use drafthorse_models::rope::RopeSpec;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Instant;

type Failure = Box<dyn std::error::Error>;

const BLOCK: usize = 16;
const GIB: f64 = (1u64 << 30) as f64;

struct Shape {
    name: &'static str,
    hidden: usize,
    intermediate: usize,
    heads: usize,
    kv_heads: usize,
    vocab: usize,
    target_layers: usize,
}

const SHAPES: [Shape; 4] = [
    Shape { name: "qwen3-4b", hidden: 2560, intermediate: 9728, heads: 32, kv_heads: 8, vocab: 151_936, target_layers: 36 },
    Shape { name: "qwen3-8b", hidden: 4096, intermediate: 12_288, heads: 32, kv_heads: 8, vocab: 151_936, target_layers: 36 },
    Shape { name: "qwen3.6-27b", hidden: 5120, intermediate: 17_408, heads: 32, kv_heads: 8, vocab: 248_320, target_layers: 64 },
    Shape { name: "tiny", hidden: 512, intermediate: 1024, heads: 4, kv_heads: 2, vocab: 4096, target_layers: 12 },
];
const LAYERS: usize = 5;
const FEATURES: usize = 5;
const DIM: usize = 128;

struct Args(BTreeMap<String, String>);

impl Args {
    fn number(&self, key: &str, default: usize) -> Result<usize, Failure> {
        self.0.get(key).map_or(Ok(default), |v| v.parse().map_err(|_| format!("--{key} {v}: not a number").into()))
    }
}

/// SplitMix64.
struct Rng(u64);

impl Rng {
    fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn below(&mut self, n: usize) -> usize {
        (self.bits() % n as u64) as usize
    }

    /// Uniform with standard deviation `std`.
    fn values(&mut self, n: usize, std: f32) -> Vec<f32> {
        (0..n).map(|_| ((self.bits() >> 40) as f32 / (1u64 << 23) as f32 - 1.0) * 1.732 * std).collect()
    }
}

/// The yardstick's count: forward, dX, dW of the draft tokens, fusion without dX, context K and V, frozen head with dX, attention 3.5 times forward.
fn useful_flops(s: &Shape, batch: usize, seq: usize, anchors: usize) -> f64 {
    let (h, i, hq, hk, v) = (s.hidden as f64, s.intermediate as f64, s.heads as f64, s.kv_heads as f64, s.vocab as f64);
    let (l, d, b, n) = (LAYERS as f64, DIM as f64, BLOCK as f64, FEATURES as f64);
    let (q, c) = ((batch * anchors * BLOCK) as f64, (batch * seq) as f64);
    let layer = 2.0 * h * hq * d * 2.0 + 2.0 * h * hk * d * 2.0 + 3.0 * 2.0 * h * i;
    let context = 2.0 * c * 2.0 * n * h * h + 3.0 * l * c * 2.0 * 2.0 * h * hk * d;
    let attention = 3.5 * 4.0 * l * q * (seq as f64 / 2.0 + b) * hq * d;
    3.0 * l * q * layer + context + 2.0 * 2.0 * q * h * v + attention
}

/// Host arrays of one micro-batch.
struct Micro {
    ids: Vec<i32>,
    positions: Vec<i32>,
    ctx_start: Vec<i32>,
    anchor: Vec<i32>,
    n_blocks: [i32; 1],
    rows: Vec<i32>,
    inverse: Vec<i32>,
    labels: Vec<i32>,
    weights: Vec<f32>,
    n_rows: [i32; 1],
}

fn micros(s: &Shape, rng: &mut Rng, [batch, seq, anchors, per]: [usize; 4]) -> Vec<Micro> {
    let tokens: Vec<i32> = (0..batch * seq).map(|_| rng.below(s.vocab - 1) as i32).collect();
    let mut blocks = Vec::new();
    for b in 0..batch {
        let mut all: Vec<usize> = (0..seq - 1).collect();
        for i in 0..anchors {
            let j = i + rng.below(all.len() - i);
            all.swap(i, j);
        }
        all.truncate(anchors);
        all.sort_unstable();
        blocks.extend(all.into_iter().map(|a| (b * seq, a)));
    }
    let mask = s.vocab as i32 - 1;
    blocks
        .chunks(per)
        .map(|chunk| {
            let mut m = Micro {
                ids: vec![mask; per * BLOCK],
                positions: vec![0; per * BLOCK],
                ctx_start: vec![0; per],
                anchor: vec![0; per],
                n_blocks: [chunk.len() as i32],
                rows: vec![0; per * (BLOCK - 1)],
                inverse: vec![-1; per * BLOCK],
                labels: vec![0; per * (BLOCK - 1)],
                weights: vec![0.0; per * (BLOCK - 1)],
                n_rows: [0],
            };
            for (n, &(start, anchor)) in chunk.iter().enumerate() {
                (m.ctx_start[n], m.anchor[n]) = (start as i32, anchor as i32);
                m.ids[n * BLOCK] = tokens[start + anchor];
                for k in 0..BLOCK {
                    m.positions[n * BLOCK + k] = (anchor + k) as i32;
                    if k > 0 && anchor + k < seq {
                        let row = m.n_rows[0] as usize;
                        m.rows[row] = (n * BLOCK + k) as i32;
                        m.inverse[n * BLOCK + k] = row as i32;
                        m.labels[row] = tokens[start + anchor + k];
                        m.weights[row] = (-((k - 1) as f32) / 7.0).exp();
                        m.n_rows[0] += 1;
                    }
                }
            }
            m
        })
        .collect()
}

fn config(s: &Shape, seq: usize) -> Result<DraftConfig, Failure> {
    let config = DraftConfig {
        hidden: s.hidden,
        intermediate: s.intermediate,
        layers: LAYERS,
        heads: s.heads,
        kv_heads: s.kv_heads,
        head_dim: DIM,
        target_hidden: s.hidden,
        target_layers: s.target_layers,
        target_layer_ids: default_layer_ids(s.target_layers, FEATURES)?,
        block_size: BLOCK,
        mask_token_id: s.vocab as u32 - 1,
        rms_eps: 1e-6,
        rope: RopeSpec::full(1e6, DIM),
        layer_types: vec![LayerKind::Full; LAYERS],
        sliding_window: None,
        max_positions: seq + BLOCK,
        vocab: s.vocab,
    };
    config.validate()?;
    Ok(config)
}

fn load_frozen(store: &FrozenStore, program: &Program, config: &DraftConfig, rng: &mut Rng) -> Result<(), Failure> {
    for t in program.of_role(Role::Frozen) {
        let tensor = program.get(t);
        let len = tensor.len();
        match tensor.name.strip_prefix("draft.rope.") {
            Some(which) => {
                let (cos, sin) = config.rope.tables(tensor.rows());
                store.load_f32::<CudaError>(&tensor.name, len, || Ok(if which == "cos" { cos } else { sin }))?;
            }
            None => {
                let bits = rng.values(len, 0.02).into_iter().map(|x| (x.to_bits() >> 16) as u16).collect();
                store.load_bf16::<CudaError>(&tensor.name, len, || Ok(bits))?;
            }
        }
    }
    Ok(())
}

fn load_weights(exec: &mut CudaExecutor, program: &Program, passes: &TrainPasses, rng: &mut Rng) -> Result<(), Failure> {
    for p in &passes.optimizer.params {
        let tensor = program.get(p.w);
        let values = if tensor.shape.len() == 1 { vec![1.0; tensor.len()] } else { rng.values(tensor.len(), 0.02) };
        exec.write(p.w, HostRef::F32(&values))?;
        if let Some(master) = p.master {
            exec.write(master, HostRef::F32(&values))?;
        }
    }
    Ok(())
}

fn write_micro(exec: &mut CudaExecutor, passes: &TrainPasses, m: &Micro) -> Result<(), drafthorse_graph::ExecError> {
    let i = passes.micro_inputs;
    let ints: [(_, &[i32]); 9] = [
        (i.ids, &m.ids),
        (i.positions, &m.positions),
        (i.ctx_start, &m.ctx_start),
        (i.anchor, &m.anchor),
        (i.n_blocks, &m.n_blocks),
        (i.rows, &m.rows),
        (i.inverse, &m.inverse),
        (i.labels, &m.labels),
        (i.n_rows, &m.n_rows),
    ];
    for (t, data) in ints {
        exec.write(t, HostRef::I32(data))?;
    }
    exec.write(i.weights, HostRef::F32(&m.weights))
}

fn main() -> std::process::ExitCode {
    match run() {
        Ok(()) => std::process::ExitCode::SUCCESS,
        Err(e) => {
            eprintln!("bench: {e}");
            std::process::ExitCode::FAILURE
        }
    }
}

fn run() -> Result<(), Failure> {
    let mut args = Args(BTreeMap::new());
    let mut words = std::env::args().skip(1);
    while let Some(word) = words.next() {
        let key = word.strip_prefix("--").ok_or_else(|| format!("`{word}` is no option"))?.to_owned();
        let value = if key == "mma" { "1".into() } else { words.next().ok_or_else(|| format!("--{key} wants a value"))? };
        args.0.insert(key, value);
    }
    let name = args.0.get("shape").map_or("qwen3-8b", String::as_str).to_owned();
    let shape = SHAPES
        .iter()
        .find(|s| s.name == name)
        .ok_or_else(|| format!("--shape {name}: known are qwen3-4b, qwen3-8b, qwen3.6-27b, tiny"))?;
    let (batch, seq, anchors) = (args.number("batch", 4)?, args.number("seq", 3072)?, args.number("anchors", 512)?);
    let (micro, chunk, steps) = (args.number("micro", 512)?, args.number("chunk", 1024)?, args.number("steps", 8)?);

    let begun = Instant::now();
    let libraries = Libraries::load(&SearchPaths::usual(|name| std::env::var_os(name)))?;
    let device = Device::open(&libraries, 0)?;
    let before = device.memory()?;
    let at_start = begun.elapsed();
    let config = config(shape, seq)?;
    let mut program = Program::new(DType::BF16);
    let tables = [shape.vocab, shape.hidden];
    let embed = program.tensor("target.embed", &tables, DType::BF16, Role::Frozen);
    let head = program.tensor("target.head", &tables, DType::BF16, Role::Frozen);
    let slot = program.tensor("slot", &[batch * seq, config.fc_columns()], DType::BF16, Role::Slot);
    let drafter = Dflash::declare(&mut program, &config, Shared { embed, head }, seq + BLOCK);
    let train =
        TrainShape { budget: batch * seq, micro_blocks: micro, loss_chunk: chunk, recompute: false, mean_context: seq / 2 };
    let adam = AdamConfig { betas: [0.9, 0.999], eps: 1e-8, weight_decay: 0.0, clip: 1.0 };
    let passes = drafter.train_passes(&mut program, slot, train, adam);
    let program = Arc::new(program);

    let mut rng = Rng(7);
    let store = Arc::new(FrozenStore::new(Arc::clone(&device))?);
    let loading = Instant::now();
    load_frozen(&store, &program, &config, &mut rng)?;
    let mut loaded = loading.elapsed();
    let table = args
        .0
        .get("table")
        .and_then(|f| std::fs::read_to_string(f).ok())
        .map_or(Ok(AlgorithmTable::default()), |t| AlgorithmTable::from_text(&t))?;
    let options = Options { hopper: !args.0.contains_key("mma"), algorithms: Arc::new(table), ..Options::default() };
    let mut exec = CudaExecutor::new(Arc::clone(&program), &store, options.clone())?;
    let loading = Instant::now();
    load_weights(&mut exec, &program, &passes, &mut rng)?;
    loaded += loading.elapsed();
    let mut features = exec.new_slot()?;
    exec.fill_slot(&mut features, 3)?;
    let preparing = Instant::now();
    exec.prepare()?;
    let prepared = preparing.elapsed();
    let after = device.memory()?;

    let micros = micros(shape, &mut rng, [batch, seq, anchors, micro]);
    let positions: Vec<i32> = (0..batch * seq).map(|i| (i % seq) as i32).collect();
    let step = |exec: &mut CudaExecutor| {
        exec.run(passes.optimizer.begin, SlotArg::None)?;
        exec.write(passes.positions, HostRef::I32(&positions))?;
        exec.run(passes.context, SlotArg::Read(&features))?;
        for m in &micros {
            write_micro(exec, &passes, m)?;
            exec.run(passes.micro, SlotArg::None)?;
        }
        exec.run(passes.context_backward, SlotArg::Read(&features))?;
        exec.write(passes.optimizer.scalars.lr, HostRef::F32(&[1e-4]))?;
        exec.run(passes.optimizer.step, SlotArg::None)
    };
    let (mut times, mut stats) = (Vec::new(), Vec::new());
    let mut first_ms = 0.0;
    for i in 0..steps + 3 {
        let ms = exec.time(step)?;
        if i == 0 {
            first_ms = begun.elapsed().as_secs_f64() * 1e3;
        } else if i >= 3 {
            times.push(ms);
        }
        let mut s = [0.0f32; 8];
        exec.read(passes.optimizer.scalars.stats, HostMut::F32(&mut s))?;
        stats.push((s[0], s[2], s[3]));
    }
    times.sort_by(f32::total_cmp);
    let median = f64::from(times[times.len() / 2]);
    let useful = useful_flops(shape, batch, seq, anchors);
    println!(
        "step {name} B={batch} S={seq} A={anchors} M={micro} chunk={chunk}: {median:.1} ms (min {:.1}, max {:.1}), useful {:.0} TFLOP/s, {:.0} context tok/s",
        times[0],
        times[times.len() - 1],
        useful / median / 1e9,
        (batch * seq) as f64 / median * 1e3
    );
    println!(
        "start: driver {:.1} s, weights {:.1} s, prepare {:.1} s ({} products timed), first step ended {:.1} s after launch",
        at_start.as_secs_f64(),
        loaded.as_secs_f64(),
        prepared.as_secs_f64(),
        exec.products_timed(),
        first_ms / 1e3
    );
    let slot_bytes = exec.plan().bytes(Region::Slot) as f64;
    println!(
        "memory: planned {:.2} GiB + slot {:.2} + extra {:.2}, held {:.2} GiB by us, {:.2} GiB by cuMemGetInfo",
        exec.plan().total_bytes() as f64 / GIB,
        slot_bytes / GIB,
        exec.extra_bytes() as f64 / GIB,
        (exec.held_bytes() as f64 + slot_bytes) / GIB,
        (before.free - after.free) as f64 / GIB
    );
    for region in Region::ALL {
        println!("  {:<16} {:>8.3} GiB", region.title(), exec.plan().bytes(region) as f64 / GIB);
    }
    let shown: Vec<String> = stats
        .iter()
        .map(|(loss, norm, finite)| format!("{loss:.4}/{norm:.3}{}", if *finite == 1.0 { "" } else { " SKIPPED" }))
        .collect();
    println!("loss/norm by step: {}", shown.join(" "));

    let count = micros.len();
    write_micro(&mut exec, &passes, &micros[0])?;
    let phases = [
        ("begin", passes.optimizer.begin, 1),
        ("context", passes.context, 1),
        ("micro", passes.micro, count),
        ("context_backward", passes.context_backward, 1),
        ("optimizer", passes.optimizer.step, 1),
    ];
    let (mut gemm_ms, mut gemm_flops) = (0.0, 0.0);
    let mut total = BTreeMap::<&str, f64>::new();
    for (title, phase, times) in phases {
        let ops = exec.time_ops(phase, Some(&features), 5)?;
        let sum: f64 = ops.iter().map(|o| f64::from(o.ms)).sum();
        println!("phase {title} x{times}: {:.2} ms op by op", sum * times as f64);
        let mut groups: BTreeMap<String, (usize, f64, u64, u64, &'static str)> = BTreeMap::new();
        for OpTime { name, described, ms, flops, bytes } in ops {
            let group = groups.entry(shapes_only(&described)).or_insert((0, 0.0, 0, 0, name));
            (group.0, group.1, group.2, group.3) = (group.0 + 1, group.1 + f64::from(ms), group.2 + flops, group.3 + bytes);
            *total.entry(name).or_default() += f64::from(ms) * times as f64;
            if name.starts_with("Linear") {
                gemm_ms += f64::from(ms) * times as f64;
                gemm_flops += flops as f64 * times as f64;
            }
        }
        let mut rows: Vec<_> = groups.into_iter().collect();
        rows.sort_by(|a, b| b.1.1.total_cmp(&a.1.1));
        for (shapes, (n, ms, flops, bytes, _)) in rows.into_iter().take(14) {
            println!(
                "  {n:>3} x {:>9.1} us {:>6.0} TFLOP/s {:>5.2} TB/s  {shapes}",
                ms / n as f64 * 1e3,
                flops as f64 / ms / 1e9,
                bytes as f64 / ms / 1e9
            );
        }
    }
    println!("all products: {:.1} ms, {:.0} TFLOP/s", gemm_ms, gemm_flops / gemm_ms / 1e9);
    let mut total: Vec<_> = total.into_iter().collect();
    total.sort_by(|a, b| b.1.total_cmp(&a.1));
    println!("by op: {}", total.iter().map(|(n, ms)| format!("{n} {ms:.1}")).collect::<Vec<_>>().join(", "));
    if let Some(file) = args.0.get("table") {
        std::fs::write(file, options.algorithms.to_text())?;
    }
    Ok(())
}

/// An op's description without tensor names: ops of different layers fall together.
fn shapes_only(described: &str) -> String {
    let (name, operands) = described.split_once('(').unwrap_or((described, ""));
    let shapes: Vec<&str> = operands.split('[').skip(1).filter_map(|s| s.split(']').next()).take(4).collect();
    format!("{name} [{}]", shapes.join("] ["))
}
