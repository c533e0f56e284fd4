//! DFlash: the drafter's training phases and its decoding passes.
//!
//! Job: compose ops into phases from a [`DraftConfig`]. Refuses trainable embeddings and heads (both are the target's, frozen).
//! Invariants (DESIGN 5): the context is `rms_norm(fc(captured))`, computed once, used by every layer's K and V without further norm and never
//! updated; a block sees context strictly before its anchor and all of itself; slot k sits at position anchor + k; no biases.
//! Source: DFlash, arXiv 2602.06036; the Qwen3 layer layout of transformers `modeling_qwen3.py`.

use super::{Optimizer, Parameters};
use crate::draft_config::{DraftConfig, LayerKind};
use crate::tensor_names::draft_sources;
use drafthorse_graph::backward::{Differentiate, accumulators, differentiate};
use drafthorse_graph::op::Heads;
use drafthorse_graph::op::block_attention::{BlockKv, Blocks};
use drafthorse_graph::op::cached_attention::KvCache;
use drafthorse_graph::op::gather::Compaction;
use drafthorse_graph::op::head_loss::{Labels, RowMetrics};
use drafthorse_graph::op::optim::AdamConfig;
use drafthorse_graph::op::pick_tokens::Picks;
use drafthorse_graph::op::qk_norm_rope::{HeadNorms, Rotary};
use drafthorse_graph::{DType, PhaseBuilder, PhaseId, Program, Role, TensorId};

/// The target's frozen tables that a drafter shares.
#[derive(Clone, Copy, Debug)]
pub struct Shared {
    /// `[V, H]`.
    pub embed: TensorId,
    /// `[V, H]`.
    pub head: TensorId,
}

/// A drafter's tensors inside one program.
pub struct Dflash {
    config: DraftConfig,
    shared: Shared,
    /// Trainable tensors.
    pub parameters: Parameters,
    cos: TensorId,
    sin: TensorId,
}

/// Fixed extents of a training program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TrainShape {
    /// Context tokens of a batch, T.
    pub budget: usize,
    /// Blocks of a micro-batch, M.
    pub micro_blocks: usize,
    /// Rows of logits that exist at once.
    pub loss_chunk: usize,
    /// Repeat each layer's forward in the backward instead of keeping its activations.
    pub recompute: bool,
    /// Context rows a typical block sees, for FLOP counts only.
    pub mean_context: usize,
}

/// Inputs of one micro-batch; the arrays of `data::MicroBatch`.
#[derive(Clone, Copy, Debug)]
pub struct MicroInputs {
    /// `[M·B]` I32.
    pub ids: TensorId,
    /// `[M·B]` I32.
    pub positions: TensorId,
    /// `[M]` I32.
    pub ctx_start: TensorId,
    /// `[M]` I32.
    pub anchor: TensorId,
    /// `[1]` I32.
    pub n_blocks: TensorId,
    /// `[M·(B-1)]` I32.
    pub rows: TensorId,
    /// `[M·B]` I32.
    pub inverse: TensorId,
    /// `[M·(B-1)]` I32.
    pub labels: TensorId,
    /// `[M·(B-1)]` F32.
    pub weights: TensorId,
    /// `[1]` I32.
    pub n_rows: TensorId,
}

/// Everything a training loop runs.
pub struct TrainPasses {
    /// `[T]` I32: positions of the context rows.
    pub positions: TensorId,
    /// Inputs of the micro-batch phases.
    pub micro_inputs: MicroInputs,
    /// Slot → context K and V of every layer; zeroes their gradients. Reads the slot.
    pub context: PhaseId,
    /// Forward and backward of one micro-batch.
    pub micro: PhaseId,
    /// Forward only, for held-out batches: fills the row metrics.
    pub measure: PhaseId,
    /// Gradients of context K and V → gradients of the weights. Reads the slot.
    pub context_backward: PhaseId,
    /// Per-row results of `micro` and `measure`.
    pub metrics: RowMetrics,
    /// Optimizer tensors and phases.
    pub optimizer: Optimizer,
}

/// The drafter's passes of decoding.
pub struct DraftPasses {
    /// `[1]` I32: context tokens the caches hold, which is the next anchor's position.
    pub len: TensorId,
    /// Features of a prefill chunk → caches.
    pub prefill: ContextPass,
    /// Features of a verify pass → caches.
    pub verify: ContextPass,
    /// One block over the caches.
    pub block: BlockPass,
}

/// Features → K and V appended to the caches at `len`.
pub struct ContextPass {
    /// The phase.
    pub phase: PhaseId,
    /// `[R]` I32.
    pub positions: TensorId,
}

/// Anchor and masks → drafted tokens.
pub struct BlockPass {
    /// The phase.
    pub phase: PhaseId,
    /// `[B]` I32: anchor token, then mask tokens.
    pub ids: TensorId,
    /// `[B]` I32.
    pub positions: TensorId,
    /// `[1]` I32, always 0: the cache starts at row 0.
    pub ctx_start: TensorId,
    /// `[1]` I32, always 1.
    pub n_blocks: TensorId,
    /// `[1]` F32, always 0: drafts are the argmax.
    pub temperature: TensorId,
    /// `[B]` F32, unread at temperature 0.
    pub uniform: TensorId,
    /// `[B]` I32, always -1.
    pub probe: TensorId,
    /// `argmax[k]` for k ≥ 1 is the draft of slot k.
    pub picks: Picks,
}

struct ContextKv {
    k: TensorId,
    v: TensorId,
}

impl Dflash {
    /// Declares the drafter's tensors; RoPE tables for `positions` positions.
    pub fn declare(program: &mut Program, config: &DraftConfig, shared: Shared, positions: usize) -> Dflash {
        let parameters = Parameters::declare(program, &draft_sources(config));
        let half = config.rope.rotary_dim / 2;
        let cos = program.tensor("draft.rope.cos", &[positions, half], DType::F32, Role::Frozen);
        let sin = program.tensor("draft.rope.sin", &[positions, half], DType::F32, Role::Frozen);
        Dflash { config: config.clone(), shared, parameters, cos, sin }
    }

    fn heads(&self) -> Heads {
        Heads { q: self.config.heads, kv: self.config.kv_heads, dim: self.config.head_dim }
    }

    fn eps(&self) -> f32 {
        self.config.rms_eps as f32
    }

    fn weight(&self, layer: usize, part: &str) -> TensorId {
        self.parameters.get(&format!("layers.{layer}.{part}"))
    }

    fn window(&self, layer: usize) -> Option<usize> {
        match self.config.layer_types[layer] {
            LayerKind::Full => None,
            LayerKind::Sliding => self.config.sliding_window,
        }
    }

    /// Declares all training phases. `features` `[T, n·H]` is a slot, or a step tensor that a capture fills from one.
    pub fn train_passes(&self, program: &mut Program, features: TensorId, shape: TrainShape, adam: AdamConfig) -> TrainPasses {
        let config = &self.config;
        let (t, m, size) = (shape.budget, shape.micro_blocks, config.block_size);
        let kv_cols = config.kv_width();
        let act = program.act;
        let optimizer = Optimizer::declare(program, &self.parameters, adam);
        let positions = program.tensor("draft.context.positions", &[t], DType::I32, Role::Input);
        let kv: Vec<ContextKv> = (0..config.layers)
            .map(|l| ContextKv {
                k: program.tensor(format!("draft.context.{l}.k"), &[t, kv_cols], act, Role::Step),
                v: program.tensor(format!("draft.context.{l}.v"), &[t, kv_cols], act, Role::Step),
            })
            .collect();
        let kv_ids: Vec<TensorId> = kv.iter().flat_map(|c| [c.k, c.v]).collect();
        let kv_grads = accumulators(program, &kv_ids, Role::Step);

        let mut b = program.begin("draft.context");
        b.zero(kv_ids.iter().map(|t| kv_grads[t]).collect());
        self.context(&mut b, features, positions, |b, l, packed, rotary| {
            b.kv_heads(packed, self.heads(), self.head_norms(l), rotary, kv[l].k, kv[l].v);
        });
        let context = b.id();

        let micro_inputs = micro_inputs(program, m, size);
        let rows = m * (size - 1);
        let mut output = |what: &str, dtype| program.tensor(format!("draft.row.{what}"), &[rows], dtype, Role::Output);
        let metrics =
            RowMetrics { ce: output("ce", DType::F32), prob: output("prob", DType::F32), hit: output("hit", DType::I32) };
        let labels = Labels { labels: micro_inputs.labels, weights: micro_inputs.weights, count: micro_inputs.n_rows };

        let mut b = program.begin("draft.micro");
        let last = self.blocks(&mut b, &micro_inputs, &kv, shape);
        let seed = b.head_loss(last, self.shared.head, labels, optimizer.scalars.sums, metrics, shape.loss_chunk, true);
        let seed = seed.expect("a gradient was asked for");
        let micro = b.id();
        let mut into = optimizer.grads.clone();
        into.extend(&kv_grads);
        let what = Differentiate { forward: micro, seeds: &[(last, seed)], accumulators: &into, recompute: shape.recompute };
        differentiate(&mut b, what);

        let measured = program.tensor("draft.measure.sums", &[2], DType::F32, Role::Output);
        let mut b = program.begin("draft.measure");
        b.zero(vec![measured]);
        let last = self.blocks(&mut b, &micro_inputs, &kv, shape);
        b.head_loss(last, self.shared.head, labels, measured, metrics, shape.loss_chunk, false);
        let measure = b.id();

        let mut b = program.begin("draft.context_backward");
        let seeds: Vec<(TensorId, TensorId)> = kv_ids.iter().map(|&t| (t, kv_grads[&t])).collect();
        // Recomputing K and V before their norm costs one GEMM per layer and saves [T, 2·KV] per layer: the plan decides with the same switch.
        let what = Differentiate { forward: context, seeds: &seeds, accumulators: &optimizer.grads, recompute: shape.recompute };
        differentiate(&mut b, what);
        let context_backward = b.id();

        TrainPasses { positions, micro_inputs, context, micro, measure, context_backward, metrics, optimizer }
    }

    /// Declares caches of `capacity` rows and the three passes of drafting. `prefill` and `verify` are the target's captured features.
    pub fn draft_passes(&self, program: &mut Program, capacity: usize, prefill: TensorId, verify: TensorId) -> DraftPasses {
        let config = &self.config;
        let (size, act, vocab) = (config.block_size, program.act, program.get(self.shared.head).rows());
        let len = program.tensor("draft.cache.len", &[1], DType::I32, Role::Input);
        let caches: Vec<KvCache> = (0..config.layers)
            .map(|l| KvCache {
                k: program.tensor(format!("draft.cache.{l}.k"), &[capacity, config.kv_width()], act, Role::Step),
                v: program.tensor(format!("draft.cache.{l}.v"), &[capacity, config.kv_width()], act, Role::Step),
                len,
            })
            .collect();
        let context = |program: &mut Program, name: &str, features: TensorId| {
            let rows = program.get(features).rows();
            let positions = program.tensor(format!("{name}.positions"), &[rows], DType::I32, Role::Input);
            let mut b = program.begin(name);
            self.context(&mut b, features, positions, |b, l, packed, rotary| {
                let k = b.act("k", &[rows, config.kv_width()]);
                let v = b.act("v", &[rows, config.kv_width()]);
                b.kv_heads(packed, self.heads(), self.head_norms(l), rotary, k, v);
                b.kv_append(k, v, caches[l]);
            });
            ContextPass { phase: b.id(), positions }
        };
        let prefill = context(program, "draft.prefill", prefill);
        let verify = context(program, "draft.extend", verify);
        let mut input = |what: &str, len: usize, dtype| program.tensor(format!("draft.block.{what}"), &[len], dtype, Role::Input);
        let ids = input("ids", size, DType::I32);
        let positions = input("positions", size, DType::I32);
        let (ctx_start, n_blocks) = (input("ctx_start", 1, DType::I32), input("n_blocks", 1, DType::I32));
        let (temperature, uniform, probe) =
            (input("temperature", 1, DType::F32), input("uniform", size, DType::F32), input("probe", size, DType::I32));
        let mut out =
            |what: &str, shape: &[usize], dtype| program.tensor(format!("draft.block.{what}"), shape, dtype, Role::Output);
        let picks = Picks {
            argmax: out("argmax", &[size], DType::I32),
            top2: out("top2", &[size, 2], DType::F32),
            prob: out("prob", &[size], DType::F32),
            drawn: out("drawn", &[size], DType::I32),
        };
        let kv: Vec<ContextKv> = caches.iter().map(|c| ContextKv { k: c.k, v: c.v }).collect();
        let mut b = program.begin("draft.block");
        let blocks = Blocks { ctx_start, anchor: len, n_blocks, size, mean_context: capacity / 2 };
        let y = self.layers(&mut b, ids, positions, blocks, &kv);
        let logits = b.linear_rows(y, self.shared.head, None, 0..vocab, DType::F32);
        b.pick_tokens(logits, temperature, uniform, probe, picks);
        let block = BlockPass { phase: b.id(), ids, positions, ctx_start, n_blocks, temperature, uniform, probe, picks };
        DraftPasses { len, prefill, verify, block }
    }

    fn head_norms(&self, layer: usize) -> HeadNorms {
        HeadNorms { q: Some(self.weight(layer, "q_norm")), k: Some(self.weight(layer, "k_norm")), eps: self.eps() }
    }

    /// `ctx = rms_norm(fc(features))`, then per layer its packed K and V.
    fn context(
        &self,
        b: &mut PhaseBuilder<'_>,
        features: TensorId,
        positions: TensorId,
        mut store: impl FnMut(&mut PhaseBuilder<'_>, usize, TensorId, Rotary),
    ) {
        let rotary = Rotary { positions, cos: self.cos, sin: self.sin };
        let fused = b.linear(features, self.parameters.get("fc"), None);
        let ctx = b.rms_norm(fused, self.parameters.get("hidden_norm"), self.eps());
        let act = b.program.act;
        let (q, kv) = (self.config.q_width(), self.config.kv_width());
        for l in 0..self.config.layers {
            b.set_layer(Some(l as u32));
            // Rows of the packed projection: q first, then k and v.
            let packed = b.linear_rows(ctx, self.weight(l, "qkv"), None, q..q + 2 * kv, act);
            store(b, l, packed, rotary);
        }
        b.set_layer(None);
    }

    /// One micro-batch up to the compacted, normed rows `[M·(B-1), H]`.
    fn blocks(&self, b: &mut PhaseBuilder<'_>, inputs: &MicroInputs, kv: &[ContextKv], shape: TrainShape) -> TensorId {
        let blocks = Blocks {
            ctx_start: inputs.ctx_start,
            anchor: inputs.anchor,
            n_blocks: inputs.n_blocks,
            size: self.config.block_size,
            mean_context: shape.mean_context,
        };
        let y = self.layers(b, inputs.ids, inputs.positions, blocks, kv);
        b.gather_rows(y, Compaction { rows: inputs.rows, inverse: inputs.inverse, count: inputs.n_rows })
    }

    /// Embedding, all layers and the final norm over blocks: `[N·B, H]`.
    fn layers(&self, b: &mut PhaseBuilder<'_>, ids: TensorId, positions: TensorId, blocks: Blocks, kv: &[ContextKv]) -> TensorId {
        let rotary = Rotary { positions, cos: self.cos, sin: self.sin };
        let eps = self.eps();
        let mut x = b.embed(ids, self.shared.embed);
        let mut delta = None;
        for (l, ctx) in kv.iter().enumerate() {
            b.set_layer(Some(l as u32));
            let w = |part: &str| self.weight(l, part);
            let y;
            (x, y) = match delta {
                Some(d) => b.add_rms_norm(x, d, w("input_norm"), eps),
                None => (x, b.rms_norm(x, w("input_norm"), eps)),
            };
            let packed = b.linear(y, w("qkv"), None);
            let (q, k_blk, v_blk) = b.qkv_heads(packed, self.heads(), self.head_norms(l), rotary);
            let all = BlockKv { k_ctx: ctx.k, v_ctx: ctx.v, k_blk, v_blk };
            let a = b.block_attention(q, all, blocks, self.heads(), self.window(l));
            let o = b.linear(a, w("o"), None);
            let y;
            (x, y) = b.add_rms_norm(x, o, w("post_norm"), eps);
            let gate_up = b.linear(y, w("gate_up"), None);
            let act = b.swiglu(gate_up);
            delta = Some(b.linear(act, w("down"), None));
        }
        b.set_layer(None);
        let delta = delta.expect("a drafter has at least one layer");
        b.add_rms_norm(x, delta, self.parameters.get("norm"), eps).1
    }
}

fn micro_inputs(program: &mut Program, m: usize, size: usize) -> MicroInputs {
    let mut input = |what: &str, len: usize, dtype| program.tensor(format!("draft.micro.{what}"), &[len], dtype, Role::Input);
    let (slots, rows) = (m * size, m * (size - 1));
    MicroInputs {
        ids: input("ids", slots, DType::I32),
        positions: input("positions", slots, DType::I32),
        ctx_start: input("ctx_start", m, DType::I32),
        anchor: input("anchor", m, DType::I32),
        n_blocks: input("n_blocks", 1, DType::I32),
        rows: input("rows", rows, DType::I32),
        inverse: input("inverse", slots, DType::I32),
        labels: input("labels", rows, DType::I32),
        weights: input("weights", rows, DType::F32),
        n_rows: input("n_rows", 1, DType::I32),
    }
}
