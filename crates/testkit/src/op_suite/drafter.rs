//! A drafter in miniature: every differentiable op in the order a training step uses them.
//!
//! Job: phases `zero`, `context`, `blocks` (forward and backward), `context_backward` and `optimizer` over two or more layers, so that liveness,
//! promotion, accumulation over phases and recomputation are exercised together. It is a case of the suite and the subject of
//! the gradient checks. Refuses to be a model definition: those live in `drafthorse-models`, whose code this must not share.

use super::build::Build;
use super::{Case, Rule};
use crate::inputs::{compaction_arrays, draft_blocks, packed_samples, rotary_tables};
use crate::oracle::Value;
use drafthorse_graph::backward::{Differentiate, accumulators, differentiate};
use drafthorse_graph::op::block_attention::{BlockKv, Blocks};
use drafthorse_graph::op::gather::Compaction;
use drafthorse_graph::op::head_loss::{Labels, RowMetrics};
use drafthorse_graph::op::optim::{AdamConfig, AdamScalars};
use drafthorse_graph::op::qk_norm_rope::{HeadNorms, Rotary};
use drafthorse_graph::op::{AdamParam, Heads};
use drafthorse_graph::{DType, PhaseId, Role, TensorId};
use std::collections::HashMap;

/// Heads of the drafter, and their width unless the options say otherwise.
const HEADS: Heads = Heads { q: 4, kv: 2, dim: 4 };
const HIDDEN: usize = 12;
const INTER: usize = 10;
const VOCAB: usize = 29;
const FEATURES: usize = 2 * HIDDEN;
const BLOCK: usize = 4;
const LENGTHS: [usize; 3] = [9, 1, 6];
const CONTEXT: usize = 18;
const CAPACITY: usize = 6;
const REAL: usize = 5;
const EPS: f32 = 1e-6;
/// Learning rate.
const RATE: f32 = 1e-3;

/// What may vary.
#[derive(Clone, Copy, Debug)]
pub struct MiniDrafterOptions {
    /// Activation dtype.
    pub act: DType,
    /// Drafter layers.
    pub layers: usize,
    /// Sliding window of every layer.
    pub window: Option<usize>,
    /// Repeat layers in the backward.
    pub recompute: bool,
    /// Elements of a head; 4 when absent.
    pub head_dim: Option<usize>,
}

/// The program with its inputs.
#[derive(Clone, Debug)]
pub struct MiniDrafter {
    /// All phases, all inputs.
    pub case: Case,
    /// Phases that compute the loss and every gradient, in order (without the optimizer).
    pub step: Vec<PhaseId>,
    /// F32 `[2]`: Σ w·ce, Σ w.
    pub sums: TensorId,
    /// Every trainable weight and its gradient.
    pub weights: Vec<(TensorId, TensorId)>,
}

struct Layer {
    input_norm: TensorId,
    qkv: TensorId,
    q_norm: TensorId,
    k_norm: TensorId,
    o: TensorId,
    post_norm: TensorId,
    gate_up: TensorId,
    down: TensorId,
    k_ctx: TensorId,
    v_ctx: TensorId,
}

pub(super) fn cases(act: DType, head_dim: Option<usize>) -> Vec<Case> {
    let usual = MiniDrafterOptions { act, layers: 3, window: None, recompute: false, head_dim };
    [usual, MiniDrafterOptions { recompute: true, window: Some(5), ..usual }].into_iter().map(|o| mini_drafter(o).case).collect()
}

/// Builds the drafter.
pub fn mini_drafter(options: MiniDrafterOptions) -> MiniDrafter {
    let MiniDrafterOptions { act, layers, window, recompute, head_dim } = options;
    let heads = Heads { dim: head_dim.unwrap_or(HEADS.dim), ..HEADS };
    let width = head_dim.map_or_else(String::new, |d| format!("_d{d}"));
    let suffix = if recompute { "_recompute" } else { "" };
    let mut b = Build::new(&format!("mini_drafter{suffix}{width}"), act);
    // Weights must not depend on `recompute`, so that the two can be compared.
    b.rng = crate::inputs::Rng::new(11);
    let weight = |b: &mut Build, name: &str, rows: usize, cols: usize| {
        b.random(name, &[rows, cols], act, Role::Weight, (cols as f64).powf(-0.5))
    };
    let (q_cols, kv_cols) = (heads.q_cols(), heads.kv_cols());
    let fc = weight(&mut b, "fc", HIDDEN, FEATURES);
    let hidden_norm = b.norm_weight("hidden_norm", HIDDEN);
    let list: Vec<Layer> = (0..layers)
        .map(|l| Layer {
            input_norm: b.norm_weight(&format!("layers.{l}.input_norm"), HIDDEN),
            qkv: weight(&mut b, &format!("layers.{l}.qkv"), q_cols + 2 * kv_cols, HIDDEN),
            q_norm: b.norm_weight(&format!("layers.{l}.q_norm"), heads.dim),
            k_norm: b.norm_weight(&format!("layers.{l}.k_norm"), heads.dim),
            o: weight(&mut b, &format!("layers.{l}.o"), HIDDEN, q_cols),
            post_norm: b.norm_weight(&format!("layers.{l}.post_norm"), HIDDEN),
            gate_up: weight(&mut b, &format!("layers.{l}.gate_up"), 2 * INTER, HIDDEN),
            down: weight(&mut b, &format!("layers.{l}.down"), HIDDEN, INTER),
            k_ctx: b.program.tensor(format!("layers.{l}.k_ctx"), &[CONTEXT, kv_cols], act, Role::Step),
            v_ctx: b.program.tensor(format!("layers.{l}.v_ctx"), &[CONTEXT, kv_cols], act, Role::Step),
        })
        .collect();
    let norm = b.norm_weight("norm", HIDDEN);
    let table = b.random("embed", &[VOCAB, HIDDEN], act, Role::Frozen, 1.0);
    let head = b.random("head", &[VOCAB, HIDDEN], act, Role::Frozen, 0.5);
    let (cos, sin) = rotary_tables(CONTEXT + BLOCK, heads.dim, 1e4);
    let cos = b.given("cos", &[CONTEXT + BLOCK, heads.dim / 2], DType::F32, Role::Frozen, cos);
    let sin = b.given("sin", &[CONTEXT + BLOCK, heads.dim / 2], DType::F32, Role::Frozen, sin);

    let features = b.input("features", &[CONTEXT, FEATURES], 1.0);
    let samples = packed_samples(&LENGTHS, LENGTHS.len(), CONTEXT);
    let arrays = draft_blocks(&mut b.rng, &samples, CAPACITY, REAL);
    let rows = CAPACITY * BLOCK;
    let positions = arrays.positions(BLOCK);
    let ctx_rotary = Rotary { positions: b.ints("positions_ctx", samples.positions), cos, sin };
    let blk_rotary = Rotary { positions: b.ints("positions_blk", positions), cos, sin };
    let blocks = Blocks {
        ctx_start: b.ints("ctx_start", arrays.ctx_start),
        anchor: b.ints("anchor", arrays.anchor),
        n_blocks: b.ints("n_blocks", arrays.n_blocks),
        size: BLOCK,
        mean_context: 5,
    };
    let ids = b.rng.indices(rows, VOCAB);
    let ids = b.ints("ids", ids);
    let chosen: Vec<usize> = (0..REAL * BLOCK).filter(|r| r % BLOCK != 0).collect();
    let room = chosen.len() + 3;
    let arrays = compaction_arrays(&chosen, rows, room);
    let label_data = b.rng.indices(room, VOCAB);
    let weight_data = b.rng.uniforms(room, 0.1, 1.0);
    let labels = Labels {
        labels: b.ints("labels", label_data),
        weights: b.given("weights", &[room], DType::F32, Role::Input, weight_data),
        count: b.ints("count", arrays.count.clone()),
    };
    let compaction =
        Compaction { rows: b.ints("rows", arrays.rows), inverse: b.ints("inverse", arrays.inverse), count: labels.count };

    let trained = b.program.of_role(Role::Weight);
    let grads = accumulators(&mut b.program, &trained, Role::Grad);
    let context_kv: Vec<TensorId> = list.iter().flat_map(|l| [l.k_ctx, l.v_ctx]).collect();
    let kv_grads = accumulators(&mut b.program, &context_kv, Role::Step);
    let mut sinks: HashMap<TensorId, TensorId> = grads.clone();
    sinks.extend(&kv_grads);
    let sums = b.program.tensor("sums", &[2], DType::F32, Role::Grad);
    let metrics = RowMetrics {
        ce: b.output_of("ce", &[room], DType::F32),
        prob: b.output_of("prob", &[room], DType::F32),
        hit: b.output_of("hit", &[room], DType::I32),
    };

    let mut phase = b.program.begin("zero");
    let mut cleared: Vec<TensorId> = sinks.values().copied().chain([sums]).collect();
    cleared.sort_unstable();
    phase.zero(cleared);
    let mut step = vec![phase.id()];

    let mut phase = b.program.begin("context");
    let fused = phase.linear(features, fc, None);
    let ctx = phase.rms_norm(fused, hidden_norm, EPS);
    for l in &list {
        let kv = phase.linear_rows(ctx, l.qkv, None, q_cols..q_cols + 2 * kv_cols, act);
        phase.kv_heads(kv, heads, HeadNorms { q: None, k: Some(l.k_norm), eps: EPS }, ctx_rotary, l.k_ctx, l.v_ctx);
    }
    let context = phase.id();
    step.push(context);

    let mut phase = b.program.begin("blocks");
    let mut x = phase.embed(ids, table);
    let mut delta = None;
    for (i, l) in list.iter().enumerate() {
        phase.set_layer(Some(i as u32));
        let (stream, y) = match delta {
            None => (x, phase.rms_norm(x, l.input_norm, EPS)),
            Some(d) => phase.add_rms_norm(x, d, l.input_norm, EPS),
        };
        let qkv = phase.linear(y, l.qkv, None);
        let norms = HeadNorms { q: Some(l.q_norm), k: Some(l.k_norm), eps: EPS };
        let (q, k_blk, v_blk) = phase.qkv_heads(qkv, heads, norms, blk_rotary);
        let kv = BlockKv { k_ctx: l.k_ctx, v_ctx: l.v_ctx, k_blk, v_blk };
        let a = phase.block_attention(q, kv, blocks, heads, window);
        let a = phase.linear(a, l.o, None);
        let (stream, y) = phase.add_rms_norm(stream, a, l.post_norm, EPS);
        let gu = phase.linear(y, l.gate_up, None);
        let s = phase.swiglu(gu);
        delta = Some(phase.linear(s, l.down, None));
        x = stream;
    }
    phase.set_layer(None);
    let (_, y) = phase.add_rms_norm(x, delta.expect("a layer"), norm, EPS);
    let picked = phase.gather_rows(y, compaction);
    let dx = phase.head_loss(picked, head, labels, sums, metrics, 4, true).expect("a gradient");
    let forward = phase.id();
    differentiate(&mut phase, Differentiate { forward, seeds: &[(picked, dx)], accumulators: &sinks, recompute });
    step.push(forward);

    let mut phase = b.program.begin("context_backward");
    let seeds: Vec<(TensorId, TensorId)> = context_kv.iter().map(|&t| (t, kv_grads[&t])).collect();
    differentiate(&mut phase, Differentiate { forward: context, seeds: &seeds, accumulators: &grads, recompute: false });
    step.push(phase.id());

    optimizer(&mut b, &trained, &grads, sums);
    near_rules(&mut b, act);
    let weights = trained.iter().map(|&w| (w, grads[&w])).collect();
    MiniDrafter { case: b.finish(), step, sums, weights }
}

fn optimizer(b: &mut Build, trained: &[TensorId], grads: &HashMap<TensorId, TensorId>, sums: TensorId) {
    let mut params = Vec::new();
    for &w in trained {
        let (name, shape) = (b.program.get(w).name.clone(), b.program.get(w).shape.clone());
        let content = b.values[&w].floats().to_vec();
        let zeros = vec![0.0; content.len()];
        let master =
            (b.act() != DType::F32).then(|| b.given(&format!("{name}.master"), &shape, DType::F32, Role::State, content));
        let m = b.given(&format!("{name}.m"), &shape, DType::F32, Role::State, zeros.clone());
        let v = b.given(&format!("{name}.v"), &shape, DType::F32, Role::State, zeros);
        params.push(AdamParam { w, master, m, v, grad: grads[&w] });
    }
    let adam_t = b.program.tensor("adam_t", &[1], DType::I32, Role::State);
    b.values.insert(adam_t, Value::Int(vec![0]));
    let scalars = AdamScalars {
        sums,
        adam_t,
        stats: b.output_of("stats", &[8], DType::F32),
        lr: b.given("lr", &[1], DType::F32, Role::Input, vec![f64::from(RATE)]),
    };
    let config = AdamConfig { betas: [0.9, 0.999], eps: 1e-8, weight_decay: 0.0, clip: 1.0 };
    b.program.begin("optimizer").adamw(params, scalars, config);
}

/// Errors add up over some thirty ops, and some elements gather far more of them than others (differences of large numbers): in bf16 each element's share is
/// its own spread under jittered stores, beside a small floor.
/// The floors are calibrated, not derived; single-op cases hold each op to the error model.
fn near_rules(b: &mut Build, act: DType) {
    let (rel, rms) = if act == DType::BF16 { (0.01, 0.02) } else { (2e-5, 2e-5) };
    let weights: Vec<TensorId> =
        b.program.tensors().filter(|(_, t)| t.role == Role::Weight || t.name.ends_with(".master")).map(|(t, _)| t).collect();
    let all: Vec<(TensorId, bool)> = b.program.tensors().map(|(t, tensor)| (t, tensor.name.ends_with(".v"))).collect();
    for (t, root) in all {
        // Where a gradient is rounding alone its sign is, too, and Adam's first step is the rate in either direction.
        let abs = if weights.contains(&t) { 2.0 * f64::from(RATE) } else { 0.0 };
        b.rule(t, Rule::Near { abs, rel, rms, root });
    }
}
