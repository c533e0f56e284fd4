//! Names: which tensors of a file make up which tensor of the program.
//!
//! Job: the program stores projections that read the same input as one matrix (`qkv`, `gate_up`); files store them apart.
//! This file is the only place that knows both spellings, for targets (Hugging Face names) and drafters (plain names).
//! It refuses nothing: configs are validated before they get here.
//! Invariants: rows of a fused matrix follow one another without gaps, in the order q, k, v and gate, up; matrices are
//! `[out, in]` row-major; the parts of a fused tensor partition its rows.

use std::collections::HashSet;
use std::ops::Range;

use crate::draft_config::DraftConfig;
use crate::hf_config::TargetConfig;

/// One tensor of the program, and the file's tensors that are stacked along rows to make it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FusedTensor {
    /// The program's name, such as `layers.3.qkv`.
    pub name: String,
    /// `[rows, columns]`, or `[rows]` for norms and biases.
    pub shape: Vec<usize>,
    /// The file's tensors in row order.
    pub parts: Vec<Part>,
}

/// A tensor of a file, as part of a fused one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Part {
    /// Name in the file, such as `model.layers.3.self_attn.q_proj.weight`.
    pub name: String,
    /// Its own shape.
    pub shape: Vec<usize>,
}

/// A tensor of a plain drafter file, and where it lies in the program's tensors.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TensorSpec {
    /// Name in the file, such as `layers.0.self_attn.k_proj.weight`.
    pub name: String,
    /// Shape in the file.
    pub shape: Vec<usize>,
    /// The program's tensor and the rows of it that this one is.
    pub source: RowRange,
}

/// Rows of one of the program's tensors.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RowRange {
    /// The program's name.
    pub tensor: String,
    /// Rows, or elements if the tensor has one dimension.
    pub rows: Range<usize>,
}

impl FusedTensor {
    /// Elements of the whole tensor.
    pub fn elements(&self) -> usize {
        self.shape.iter().product()
    }

    fn new(name: impl Into<String>, parts: Vec<Part>) -> Self {
        let mut shape = parts[0].shape.clone();
        shape[0] = parts.iter().map(|part| part.shape[0]).sum();
        Self { name: name.into(), shape, parts }
    }
}

/// The sizes of a decoder layer that targets and drafters share.
struct LayerSizes {
    hidden: usize,
    intermediate: usize,
    q: usize,
    kv: usize,
    head_dim: usize,
    attention_bias: bool,
    mlp_bias: bool,
    qk_norm: bool,
}

/// The tensors of layer `i`; `prefix` is what stands before `layers` in the file.
fn layer(i: usize, prefix: &str, s: &LayerSizes) -> Vec<FusedTensor> {
    let file = |part: &str| format!("{prefix}layers.{i}.{part}");
    let own = |part: &str| format!("layers.{i}.{part}");
    let part = |name: String, shape: &[usize]| Part { name, shape: shape.to_vec() };
    let attention = |which: &str, kind: &str, shape: &[usize]| part(file(&format!("self_attn.{which}.{kind}")), shape);
    let mlp = |which: &str, kind: &str, shape: &[usize]| part(file(&format!("mlp.{which}.{kind}")), shape);
    let (h, inner) = (s.hidden, s.intermediate);
    let mut tensors = vec![
        FusedTensor::new(own("input_norm"), vec![part(file("input_layernorm.weight"), &[h])]),
        FusedTensor::new(
            own("qkv"),
            vec![
                attention("q_proj", "weight", &[s.q, h]),
                attention("k_proj", "weight", &[s.kv, h]),
                attention("v_proj", "weight", &[s.kv, h]),
            ],
        ),
    ];
    if s.attention_bias {
        let parts =
            vec![attention("q_proj", "bias", &[s.q]), attention("k_proj", "bias", &[s.kv]), attention("v_proj", "bias", &[s.kv])];
        tensors.push(FusedTensor::new(own("qkv_bias"), parts));
    }
    if s.qk_norm {
        tensors.push(FusedTensor::new(own("q_norm"), vec![attention("q_norm", "weight", &[s.head_dim])]));
        tensors.push(FusedTensor::new(own("k_norm"), vec![attention("k_norm", "weight", &[s.head_dim])]));
    }
    tensors.push(FusedTensor::new(own("o"), vec![attention("o_proj", "weight", &[h, s.q])]));
    if s.attention_bias {
        tensors.push(FusedTensor::new(own("o_bias"), vec![attention("o_proj", "bias", &[h])]));
    }
    tensors.push(FusedTensor::new(own("post_norm"), vec![part(file("post_attention_layernorm.weight"), &[h])]));
    let gate_up = vec![mlp("gate_proj", "weight", &[inner, h]), mlp("up_proj", "weight", &[inner, h])];
    tensors.push(FusedTensor::new(own("gate_up"), gate_up));
    if s.mlp_bias {
        let parts = vec![mlp("gate_proj", "bias", &[inner]), mlp("up_proj", "bias", &[inner])];
        tensors.push(FusedTensor::new(own("gate_up_bias"), parts));
    }
    tensors.push(FusedTensor::new(own("down"), vec![mlp("down_proj", "weight", &[h, inner])]));
    if s.mlp_bias {
        tensors.push(FusedTensor::new(own("down_bias"), vec![mlp("down_proj", "bias", &[h])]));
    }
    tensors
}

/// The target's tensors in the program's naming, with the Hugging Face names that make them up: `embed`,
/// `layers.{i}.{input_norm, qkv, qkv_bias, q_norm, k_norm, o, o_bias, post_norm, gate_up, gate_up_bias, down, down_bias}`
/// (biases and q/k norms only where the config has them), `norm`, `head`. A tied head's part is the embedding.
pub fn target_sources(config: &TargetConfig) -> Vec<FusedTensor> {
    let sizes = LayerSizes {
        hidden: config.hidden,
        intermediate: config.intermediate,
        q: config.q_width(),
        kv: config.kv_width(),
        head_dim: config.head_dim,
        attention_bias: config.attention_bias,
        mlp_bias: config.mlp_bias,
        qk_norm: config.qk_norm,
    };
    let table = |name: &str| vec![Part { name: name.to_owned(), shape: vec![config.vocab, config.hidden] }];
    let mut tensors = vec![FusedTensor::new("embed", table(EMBEDDING))];
    tensors.extend((0..config.layers).flat_map(|i| layer(i, "model.", &sizes)));
    let norm = Part { name: "model.norm.weight".to_owned(), shape: vec![config.hidden] };
    tensors.push(FusedTensor::new("norm", vec![norm]));
    tensors.push(FusedTensor::new("head", table(if config.tie_embeddings { EMBEDDING } else { HEAD })));
    tensors
}

/// Canonical name of the embedding table.
pub const EMBEDDING: &str = "model.embed_tokens.weight";
/// Canonical name of an untied head.
pub const HEAD: &str = "lm_head.weight";

/// Names and shapes that a target's checkpoint must hold, in canonical Hugging Face naming; a tied head is not among them.
pub fn expected_tensors(config: &TargetConfig) -> Vec<(String, Vec<usize>)> {
    let mut named = HashSet::new();
    let parts = target_sources(config).into_iter().flat_map(|fused| fused.parts);
    parts.filter(|part| named.insert(part.name.clone())).map(|part| (part.name, part.shape)).collect()
}

/// The drafter's tensors in the program's naming, with the plain names that make them up: `fc`, `hidden_norm`,
/// `layers.{i}.{input_norm, qkv, q_norm, k_norm, o, post_norm, gate_up, down}`, `norm`.
pub fn draft_sources(config: &DraftConfig) -> Vec<FusedTensor> {
    let sizes = LayerSizes {
        hidden: config.hidden,
        intermediate: config.intermediate,
        q: config.q_width(),
        kv: config.kv_width(),
        head_dim: config.head_dim,
        attention_bias: false,
        mlp_bias: false,
        qk_norm: true,
    };
    let single = |own: &str, shape: Vec<usize>| FusedTensor::new(own, vec![Part { name: format!("{own}.weight"), shape }]);
    let mut tensors = vec![single("fc", vec![config.hidden, config.fc_columns()]), single("hidden_norm", vec![config.hidden])];
    tensors.extend((0..config.layers).flat_map(|i| layer(i, "", &sizes)));
    tensors.push(single("norm", vec![config.hidden]));
    tensors
}

/// The tensors of a plain drafter file (58 for 5 layers), each with the rows of the program's tensor that it is.
pub fn plain_tensors(config: &DraftConfig) -> Vec<TensorSpec> {
    let mut specs = Vec::new();
    for fused in draft_sources(config) {
        let mut start = 0;
        for part in fused.parts {
            let rows = start..start + part.shape[0];
            start = rows.end;
            specs.push(TensorSpec { name: part.name, shape: part.shape, source: RowRange { tensor: fused.name.clone(), rows } });
        }
    }
    specs
}
