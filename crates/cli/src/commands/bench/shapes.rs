//! Real shapes with random content: the targets and drafters that people train, without their weights.
//!
//! Job: the config of each named shape, random frozen tensors on a GPU, and a batch of packed random samples with sorted random anchors. Refuses to be a
//! model: nothing here decodes to text. Invariant: equal arguments give equal content, so that two builds are timed on the same numbers.

use crate::exit::{Exit, Failure};
use drafthorse_cuda::{CudaError, FrozenStore};
use drafthorse_data::batch::{Batch, MicroBatch};
use drafthorse_graph::{DType, Program, Role};
use drafthorse_models::draft_config::DraftConfig;
use drafthorse_models::hf_config::TargetConfig;
use drafthorse_models::rope::RopeSpec;
use rayon::prelude::*;
use serde_json::{Map, Value, json};
use std::path::Path;

/// Names of all shapes.
pub const NAMES: [&str; 5] = ["qwen3-4b", "qwen3-8b", "llama-3.1-8b", "qwen3.6-27b", "smollm2-135m"];

/// Standard deviation of random weights.
const STD: f32 = 0.02;

/// The target's config, and whether its own forward is what this program computes (the 27B target has layers of another kind; its drafter has not).
pub fn target(name: &str, positions: usize) -> Result<(TargetConfig, bool), Failure> {
    let qwen3 = |hidden: usize, inter: usize, layers: usize, vocab: usize, tied: bool| {
        json!({
            "model_type": "qwen3", "hidden_size": hidden, "intermediate_size": inter, "num_hidden_layers": layers, "num_attention_heads": 32,
            "num_key_value_heads": 8, "head_dim": 128, "vocab_size": vocab, "rms_norm_eps": 1e-6, "rope_theta": 1e6, "tie_word_embeddings": tied,
        })
    };
    let (mut config, own) = match name {
        "qwen3-4b" => (qwen3(2560, 9728, 36, 151_936, true), true),
        "qwen3-8b" => (qwen3(4096, 12_288, 36, 151_936, false), true),
        "qwen3.6-27b" => (qwen3(5120, 17_408, 64, 248_320, false), false),
        "llama-3.1-8b" => (
            json!({
                "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14_336, "num_hidden_layers": 32, "num_attention_heads": 32,
                "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 128_256, "rms_norm_eps": 1e-5, "rope_theta": 5e5, "tie_word_embeddings": false,
                "rope_scaling": {
                    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
                },
            }),
            true,
        ),
        "smollm2-135m" => (
            json!({
                "model_type": "llama", "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9,
                "num_key_value_heads": 3, "head_dim": 64, "vocab_size": 49_152, "rms_norm_eps": 1e-5, "rope_theta": 1e5, "tie_word_embeddings": true,
            }),
            true,
        ),
        _ => {
            return Err(Failure::new(
                Exit::Usage,
                format!("--shape {name} is not known"),
                format!("known shapes are {}", NAMES.join(", ")),
            ));
        }
    };
    config["hidden_act"] = "silu".into();
    config["max_position_embeddings"] = positions.max(8192).into();
    let map: Map<String, Value> = config.as_object().expect("written as an object above").clone();
    Ok((TargetConfig::parse(Path::new(name), &map)?, own))
}

/// Whether the target of this shape can be timed.
pub fn has_target(name: &str) -> bool {
    target(name, 0).is_ok_and(|(_, own)| own)
}

/// SplitMix64, one stream per key.
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

    /// Uniform in -1..1.
    fn signed(&mut self) -> f32 {
        (self.bits() >> 40) as f32 / (1u64 << 23) as f32 - 1.0
    }
}

/// `len` bf16 values with the standard deviation of weights, around 1 for norms.
fn random_bf16(key: u64, len: usize, norm: bool) -> Vec<u16> {
    const PIECE: usize = 1 << 16;
    let mut out = vec![0u16; len];
    out.par_chunks_mut(PIECE).enumerate().for_each(|(i, piece)| {
        let mut rng = Rng(key ^ (i as u64).wrapping_mul(0xd1b5_4a32_d192_ed03));
        let centre = if norm { 1.0 } else { 0.0 };
        // A uniform of half-width √3·σ has standard deviation σ.
        piece.iter_mut().for_each(|x| *x = ((centre + 1.732 * STD * rng.signed()).to_bits() >> 16) as u16);
    });
    out
}

/// Puts random content under every frozen tensor of `program`, and the real tables of rotary embeddings.
///
/// # Errors
/// When the device has no room.
pub fn load_random(
    store: &FrozenStore,
    program: &Program,
    target: &TargetConfig,
    draft: Option<&DraftConfig>,
) -> Result<(), CudaError> {
    let table = |rope: &RopeSpec, rows: usize, which: &str| {
        let (cos, sin) = rope.tables(rows);
        if which == "cos" { cos } else { sin }
    };
    for (i, t) in program.of_role(Role::Frozen).into_iter().enumerate() {
        let tensor = program.get(t);
        let len = tensor.len();
        let rope = match (tensor.name.strip_prefix("draft.rope."), tensor.name.strip_prefix("target.rope.")) {
            (Some(which), _) => draft.map(|d| (&d.rope, which)),
            (_, Some(which)) => Some((&target.rope, which)),
            _ => None,
        };
        match rope {
            Some((rope, which)) => store.load_f32::<CudaError>(&tensor.name, len, || Ok(table(rope, tensor.rows(), which)))?,
            None if tensor.dtype == DType::BF16 => {
                let norm = tensor.name.contains("norm");
                store.load_bf16::<CudaError>(&tensor.name, len, || Ok(random_bf16(1 + i as u64, len, norm)))?;
            }
            None => unreachable!("a frozen F32 tensor that is no table: {}", tensor.name),
        }
    }
    Ok(())
}

/// A packed batch of `rows` samples of `len` tokens with `anchors` blocks each, every token supervised.
pub fn batch(draft: &DraftConfig, [rows, len, anchors, per_micro]: [usize; 4]) -> Batch {
    let (size, mask) = (draft.block_size, draft.mask_token_id as i32);
    let mut rng = Rng(7);
    let tokens: Vec<i32> = (0..rows * len).map(|_| rng.below(draft.vocab - 1) as i32).collect();
    let mut blocks = Vec::new();
    for row in 0..rows {
        let mut all: Vec<usize> = (0..len - 1).collect();
        let n = anchors.min(all.len());
        for i in 0..n {
            let j = i + rng.below(all.len() - i);
            all.swap(i, j);
        }
        all.truncate(n);
        all.sort_unstable();
        blocks.extend(all.into_iter().map(|anchor| (row * len, anchor)));
    }
    // γ of DESIGN 5 for blocks of 16.
    let weight = |k: usize| (-((k - 1) as f32) / 7.0).exp();
    let micro = |chunk: &[(usize, usize)]| {
        let mut m = MicroBatch {
            n_blocks: chunk.len(),
            ids: vec![mask; per_micro * size],
            positions: (0..per_micro * size).map(|r| (r % size) as i32).collect(),
            ctx_start: vec![0; per_micro],
            anchor: vec![0; per_micro],
            rows: vec![0; per_micro * (size - 1)],
            inverse: vec![-1; per_micro * size],
            labels: vec![0; per_micro * (size - 1)],
            weights: vec![0.0; per_micro * (size - 1)],
            n_rows: 0,
        };
        for (n, &(start, anchor)) in chunk.iter().enumerate() {
            (m.ctx_start[n], m.anchor[n]) = (start as i32, anchor as i32);
            m.ids[n * size] = tokens[start + anchor];
            for k in 0..size {
                let row = n * size + k;
                m.positions[row] = (anchor + k) as i32;
                if k > 0 && anchor + k < len {
                    let i = m.n_rows;
                    (m.rows[i], m.inverse[row]) = (row as i32, i as i32);
                    (m.labels[i], m.weights[i]) = (tokens[start + anchor + k], weight(k));
                    m.n_rows += 1;
                }
            }
        }
        m
    };
    let micros: Vec<MicroBatch> = blocks.chunks(per_micro).map(micro).collect();
    let weight_sum = micros.iter().flat_map(|m| &m.weights).map(|&w| f64::from(w)).sum();
    Batch {
        index: 0,
        epoch: 0,
        held_out: false,
        positions: (0..rows * len).map(|i| (i % len) as i32).collect(),
        cu_seqlens: (0..=rows).map(|r| (r * len) as i32).collect(),
        n_seqs: rows,
        n_tokens: rows * len,
        n_blocks: blocks.len(),
        n_supervised: rows * len,
        sample_ids: (0..rows as u32).collect(),
        weight_sum,
        micros,
        tokens,
    }
}
