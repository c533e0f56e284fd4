//! Target models as programs: the frozen decoder stack that captures its residual stream, and the passes of decoding.
//!
//! Job: compose ops into phases from a [`TargetConfig`]. llama and qwen3 differ in biases and head norms only, which the config says.
//! Refuses gradients (targets are frozen). Invariants: a captured feature is the residual stream *after* the named layer, before any later
//! norm; layers after the last captured one are not run when nothing needs them; every frozen tensor is named `target.<internal name>`.

use crate::draft::dflash::Shared;
use crate::hf_config::TargetConfig;
use crate::tensor_names::target_sources;
use drafthorse_graph::op::Heads;
use drafthorse_graph::op::cached_attention::KvCache;
use drafthorse_graph::op::causal_attention::Packing;
use drafthorse_graph::op::pick_tokens::Picks;
use drafthorse_graph::op::qk_norm_rope::{HeadNorms, Rotary};
use drafthorse_graph::{DType, PhaseBuilder, PhaseId, Program, Role, TensorId};

/// The frozen tensors of a target inside one program.
pub struct Target {
    config: TargetConfig,
    /// `[V, H]`.
    pub embed: TensorId,
    layers: Vec<Layer>,
    norm: TensorId,
    /// `[V, H]`.
    pub head: TensorId,
    cos: TensorId,
    sin: TensorId,
}

/// The residual stream between two layers.
struct Stream {
    /// What was added up so far.
    x: TensorId,
    /// A branch not yet added.
    pending: Option<TensorId>,
    /// The next norm's output, where the stream had to be materialised before its layer.
    normed: Option<TensorId>,
}

struct Layer {
    input_norm: TensorId,
    qkv: TensorId,
    qkv_bias: Option<TensorId>,
    norms: HeadNorms,
    o: TensorId,
    o_bias: Option<TensorId>,
    post_norm: TensorId,
    gate_up: TensorId,
    gate_up_bias: Option<TensorId>,
    down: TensorId,
    down_bias: Option<TensorId>,
}

/// Inputs of a packed forward pass.
#[derive(Clone, Copy, Debug)]
pub struct PackedInputs {
    /// `[T]` I32.
    pub tokens: TensorId,
    /// `[T]` I32.
    pub positions: TensorId,
    /// `[S+1]` I32.
    pub cu_seqlens: TensorId,
    /// `[1]` I32.
    pub n_seqs: TensorId,
}

/// The packed forward pass that fills a slot.
pub struct CapturePass {
    /// The phase; it writes the program's slot.
    pub phase: PhaseId,
    /// What the host writes.
    pub inputs: PackedInputs,
}

/// KV caches of a target and the passes over them.
pub struct DecodePasses {
    /// `[1]` I32: tokens the caches hold.
    pub len: TensorId,
    /// Rows of the caches.
    pub capacity: usize,
    /// Prompt chunks: fills the caches and captures features, no head.
    pub prefill: DecodePass,
    /// Verification: the head and the picks of every row.
    pub verify: DecodePass,
    /// `[1]` F32.
    pub temperature: TensorId,
    /// `[R]` F32, of the verify pass.
    pub uniform: TensorId,
    /// `[R]` I32, of the verify pass.
    pub probe: TensorId,
    /// Of the verify pass.
    pub picks: Picks,
}

/// One pass of decoding over a fixed number of rows.
pub struct DecodePass {
    /// The phase.
    pub phase: PhaseId,
    /// Rows R of the pass.
    pub rows: usize,
    /// `[R]` I32.
    pub tokens: TensorId,
    /// `[R]` I32.
    pub positions: TensorId,
    /// Captured residual streams, `[R, n·H]`, role `Step`.
    pub features: TensorId,
}

impl Target {
    /// Declares every frozen tensor of the target: weights in the program's activation dtype, RoPE tables F32 for `positions` positions.
    pub fn declare(program: &mut Program, config: &TargetConfig, positions: usize) -> Target {
        // A tied head is the embedding itself, not a second copy of it.
        let tied = config.tie_embeddings;
        for fused in target_sources(config).into_iter().filter(|f| !(tied && f.name == "head")) {
            let dtype = program.act;
            program.tensor(format!("target.{}", fused.name), &fused.shape, dtype, Role::Frozen);
        }
        let half = config.rope.rotary_dim / 2;
        let cos = program.tensor("target.rope.cos", &[positions, half], DType::F32, Role::Frozen);
        let sin = program.tensor("target.rope.sin", &[positions, half], DType::F32, Role::Frozen);
        let find = |name: String| program.find(&format!("target.{name}"));
        let need = |name: String| find(name.clone()).unwrap_or_else(|| panic!("target tensor `{name}` was declared above"));
        let layers = (0..config.layers)
            .map(|i| {
                let need = |part: &str| need(format!("layers.{i}.{part}"));
                let maybe = |part: &str| find(format!("layers.{i}.{part}"));
                Layer {
                    input_norm: need("input_norm"),
                    qkv: need("qkv"),
                    qkv_bias: maybe("qkv_bias"),
                    norms: HeadNorms { q: maybe("q_norm"), k: maybe("k_norm"), eps: config.rms_eps as f32 },
                    o: need("o"),
                    o_bias: maybe("o_bias"),
                    post_norm: need("post_norm"),
                    gate_up: need("gate_up"),
                    gate_up_bias: maybe("gate_up_bias"),
                    down: need("down"),
                    down_bias: maybe("down_bias"),
                }
            })
            .collect();
        let (embed, norm) = (need("embed".into()), need("norm".into()));
        let head = if tied { embed } else { need("head".into()) };
        Target { config: config.clone(), embed, layers, norm, head, cos, sin }
    }

    /// Declares only the embedding table and the head: what a drafter on another device than the target needs.
    pub fn declare_tables(program: &mut Program, config: &TargetConfig) -> Shared {
        let (shape, act) = ([config.vocab, config.hidden], program.act);
        let embed = program.tensor("target.embed", &shape, act, Role::Frozen);
        let head = if config.tie_embeddings { embed } else { program.tensor("target.head", &shape, act, Role::Frozen) };
        Shared { embed, head }
    }

    /// The tables that a drafter shares with this target.
    pub fn shared(&self) -> Shared {
        Shared { embed: self.embed, head: self.head }
    }

    /// The target's attention geometry.
    pub fn heads(config: &TargetConfig) -> Heads {
        Heads { q: config.heads, kv: config.kv_heads, dim: config.head_dim }
    }

    /// Declares the packed forward pass over `budget` tokens of at most `max_rows` samples. It runs up to the last of `layer_ids` (ascending)
    /// and captures after each of them into `slot` `[budget, n·H]`.
    pub fn capture_pass(
        &self,
        program: &mut Program,
        budget: usize,
        max_rows: usize,
        layer_ids: &[usize],
        slot: TensorId,
    ) -> CapturePass {
        let mean_len = budget.div_ceil(8);
        let (mut b, inputs, packing, rotary) = self.begin_packed(program, "target.capture", budget, max_rows, mean_len);
        let mut stream = self.embedded(&mut b, inputs.tokens);
        let (h, last) = (self.config.hidden, *layer_ids.last().expect("at least one captured layer"));
        for l in 0..=last {
            stream = self
                .layer(&mut b, l, stream, rotary, |b, q, k, v| b.causal_attention(q, k, v, packing, Target::heads(&self.config)));
            if let Some(at) = layer_ids.iter().position(|&id| id == l) {
                stream = self.materialized(&mut b, l, stream);
                b.capture(stream.x, 0, slot, at * h, h);
            }
        }
        CapturePass { phase: b.id(), inputs }
    }

    /// Declares a packed forward pass that keeps every layer's stream and the logits: for comparison with reference implementations.
    /// Returns the inputs, the stream after each layer and the logits `[T, V]`, all of role `Step`, and the phase.
    pub fn inspection_pass(
        &self,
        program: &mut Program,
        budget: usize,
        max_rows: usize,
    ) -> (PhaseId, PackedInputs, Vec<TensorId>, TensorId) {
        let h = self.config.hidden;
        let kept: Vec<TensorId> = (0..self.config.layers)
            .map(|l| program.tensor(format!("target.inspect.{l}"), &[budget, h], program.act, Role::Step))
            .collect();
        let logits = program.tensor("target.inspect.logits", &[budget, self.config.vocab], DType::F32, Role::Step);
        let (mut b, inputs, packing, rotary) = self.begin_packed(program, "target.inspect", budget, max_rows, budget);
        let mut stream = self.embedded(&mut b, inputs.tokens);
        for (l, &keep) in kept.iter().enumerate() {
            stream = self
                .layer(&mut b, l, stream, rotary, |b, q, k, v| b.causal_attention(q, k, v, packing, Target::heads(&self.config)));
            stream = self.materialized(&mut b, l, stream);
            b.capture(stream.x, 0, keep, 0, h);
        }
        let y = self.final_norm(&mut b, stream);
        let z = b.linear_rows(y, self.head, None, 0..self.config.vocab, DType::F32);
        b.capture(z, 0, logits, 0, self.config.vocab);
        (b.id(), inputs, kept, logits)
    }

    fn begin_packed<'p>(
        &self,
        program: &'p mut Program,
        name: &str,
        budget: usize,
        max_rows: usize,
        mean_len: usize,
    ) -> (PhaseBuilder<'p>, PackedInputs, Packing, Rotary) {
        let mut input = |what: &str, len: usize| program.tensor(format!("{name}.{what}"), &[len], DType::I32, Role::Input);
        let inputs = PackedInputs {
            tokens: input("tokens", budget),
            positions: input("positions", budget),
            cu_seqlens: input("cu_seqlens", max_rows + 1),
            n_seqs: input("n_seqs", 1),
        };
        let packing = Packing { cu_seqlens: inputs.cu_seqlens, n_seqs: inputs.n_seqs, mean_len };
        let rotary = Rotary { positions: inputs.positions, cos: self.cos, sin: self.sin };
        (program.begin(name), inputs, packing, rotary)
    }

    /// Declares caches of `capacity` rows and the two passes of decoding, capturing after `layer_ids`.
    pub fn decode_passes(
        &self,
        program: &mut Program,
        capacity: usize,
        prefill_rows: usize,
        verify_rows: usize,
        layer_ids: &[usize],
    ) -> DecodePasses {
        let heads = Target::heads(&self.config);
        let act = program.act;
        let len = program.tensor("target.cache.len", &[1], DType::I32, Role::Input);
        let caches: Vec<KvCache> = (0..self.config.layers)
            .map(|l| KvCache {
                k: program.tensor(format!("target.cache.{l}.k"), &[capacity, heads.kv_cols()], act, Role::Step),
                v: program.tensor(format!("target.cache.{l}.v"), &[capacity, heads.kv_cols()], act, Role::Step),
                len,
            })
            .collect();
        let temperature = program.tensor("target.verify.temperature", &[1], DType::F32, Role::Input);
        let uniform = program.tensor("target.verify.uniform", &[verify_rows], DType::F32, Role::Input);
        let probe = program.tensor("target.verify.probe", &[verify_rows], DType::I32, Role::Input);
        let mut out =
            |what: &str, shape: &[usize], dtype| program.tensor(format!("target.verify.{what}"), shape, dtype, Role::Output);
        let picks = Picks {
            argmax: out("argmax", &[verify_rows], DType::I32),
            top2: out("top2", &[verify_rows, 2], DType::F32),
            prob: out("prob", &[verify_rows], DType::F32),
            drawn: out("drawn", &[verify_rows], DType::I32),
        };
        let pass = |program: &mut Program, name: &str, rows: usize, with_head: bool| {
            let tokens = program.tensor(format!("{name}.tokens"), &[rows], DType::I32, Role::Input);
            let positions = program.tensor(format!("{name}.positions"), &[rows], DType::I32, Role::Input);
            let features =
                program.tensor(format!("{name}.features"), &[rows, layer_ids.len() * self.config.hidden], act, Role::Step);
            let rotary = Rotary { positions, cos: self.cos, sin: self.sin };
            let mut b = program.begin(name);
            let mut stream = self.embedded(&mut b, tokens);
            // Every layer's cache must be filled, so all layers run even without a head; the last MLP alone could be spared.
            for (l, &cache) in caches.iter().enumerate() {
                stream = self.layer(&mut b, l, stream, rotary, |b, q, k, v| {
                    b.kv_append(k, v, cache);
                    b.cached_attention(q, cache, heads)
                });
                if let Some(at) = layer_ids.iter().position(|&id| id == l) {
                    stream = self.materialized(&mut b, l, stream);
                    b.capture(stream.x, 0, features, at * self.config.hidden, self.config.hidden);
                }
            }
            if with_head {
                let y = self.final_norm(&mut b, stream);
                let logits = b.linear_rows(y, self.head, None, 0..self.config.vocab, DType::F32);
                b.pick_tokens(logits, temperature, uniform, probe, picks);
            }
            DecodePass { phase: b.id(), rows, tokens, positions, features }
        };
        let prefill = pass(program, "target.prefill", prefill_rows, false);
        let verify = pass(program, "target.verify", verify_rows, true);
        DecodePasses { len, capacity, prefill, verify, temperature, uniform, probe, picks }
    }

    fn embedded(&self, b: &mut PhaseBuilder<'_>, tokens: TensorId) -> Stream {
        Stream { x: b.embed(tokens, self.embed), pending: None, normed: None }
    }

    /// Appends one decoder layer.
    fn layer(
        &self,
        b: &mut PhaseBuilder<'_>,
        index: usize,
        stream: Stream,
        rotary: Rotary,
        attend: impl FnOnce(&mut PhaseBuilder<'_>, TensorId, TensorId, TensorId) -> TensorId,
    ) -> Stream {
        let w = &self.layers[index];
        b.set_layer(Some(index as u32));
        let (x, y) = self.normed(b, stream, w.input_norm);
        let packed = b.linear(y, w.qkv, w.qkv_bias);
        let (q, k, v) = b.qkv_heads(packed, Target::heads(&self.config), w.norms, rotary);
        let a = attend(b, q, k, v);
        let o = b.linear(a, w.o, w.o_bias);
        let (x, y) = b.add_rms_norm(x, o, w.post_norm, self.config.rms_eps as f32);
        let gate_up = b.linear(y, w.gate_up, w.gate_up_bias);
        let act = b.swiglu(gate_up);
        let out = b.linear(act, w.down, w.down_bias);
        b.set_layer(None);
        Stream { x, pending: Some(out), normed: None }
    }

    /// The stream after layer `l` with nothing pending, and the norm of the layer that follows already taken.
    fn materialized(&self, b: &mut PhaseBuilder<'_>, l: usize, stream: Stream) -> Stream {
        let next = self.layers.get(l + 1).map_or(self.norm, |next| next.input_norm);
        let (x, y) = self.normed(b, stream, next);
        Stream { x, pending: None, normed: Some(y) }
    }

    /// Adds what is pending and norms; returns the stream and the normed rows.
    fn normed(&self, b: &mut PhaseBuilder<'_>, stream: Stream, w: TensorId) -> (TensorId, TensorId) {
        let eps = self.config.rms_eps as f32;
        match stream {
            Stream { x, normed: Some(y), .. } => (x, y),
            Stream { x, pending: Some(d), .. } => b.add_rms_norm(x, d, w, eps),
            Stream { x, .. } => (x, b.rms_norm(x, w, eps)),
        }
    }

    fn final_norm(&self, b: &mut PhaseBuilder<'_>, stream: Stream) -> TensorId {
        self.normed(b, stream, self.norm).1
    }
}
