//! What each key of a Hugging Face `config.json` means to this program: handled, harmless, or refused.
//!
//! Job: one table for targets and drafters, so that no key is ever ignored in silence. A key that changes the mathematics and
//! is not implemented is refused by name; a key that only serves other software is passed over; a key in neither table
//! becomes a warning that the caller prints. It refuses nothing that leaves the computation as it is (`use_cache`).
//! Invariant: a refused key is accepted at the values that mean "not in use", so that exporters may write it.

use serde_json::Value;

use crate::config_fields::{ConfigError, Fields};

/// Keys that change nothing in a frozen forward pass: bookkeeping, training-only settings, generation defaults.
const HARMLESS: &[&str] = &[
    "_name_or_path",
    "_attn_implementation",
    "_attn_implementation_autoset",
    "architectures",
    "attention_dropout",
    "attn_implementation",
    "bos_token_id",
    "chunk_size_feed_forward",
    "decoder_start_token_id",
    "dtype",
    "embd_pdrop",
    "eos_token_id",
    "hidden_dropout",
    "id2label",
    "initializer_range",
    "is_llama_config",
    "keys_to_ignore_at_inference",
    "label2id",
    "max_length",
    "max_window_layers",
    "model_type",
    "name_or_path",
    "num_labels",
    "output_attentions",
    "output_hidden_states",
    "pad_token_id",
    "problem_type",
    "resid_pdrop",
    "return_dict",
    "sep_token_id",
    "task_specific_params",
    "temperature",
    "tf_legacy_loss",
    "tie_encoder_decoder",
    "tokenizer_class",
    "top_k",
    "top_p",
    "torch_dtype",
    "torchscript",
    "transformers.js_config",
    "transformers_version",
    "unsloth_fixed",
    "unsloth_version",
    "use_bfloat16",
    "use_cache",
];

/// When a refused key is nevertheless acceptable. `null` always is.
enum Idle {
    /// Never: any value asks for the feature.
    Never,
    /// `false`.
    False,
    /// A number equal to this, or `false`.
    Number(f64),
    /// 0, `false` or an empty list.
    Empty,
    /// One of these strings.
    Text(&'static [&'static str]),
}

/// `(key, acceptable value, what it means, what to do)`.
type Refused = (&'static str, Idle, &'static str, &'static str);

const DENSE_ONLY: &str = "use a dense llama or qwen3 target";
const PLAIN_TARGET: &str = "use a target without it; computing on without it would give other hidden states than the server's";
const ROPE_SIDE: &str = "use a model with rotate-half rotary embeddings in every layer";

const REFUSED: &[Refused] = &[
    ("attention_chunk_size", Idle::Never, "chunked attention", PLAIN_TARGET),
    ("attention_multiplier", Idle::Never, "another attention scale than head_dim^-1/2", PLAIN_TARGET),
    ("attn_logit_softcapping", Idle::Never, "a soft cap on attention scores", PLAIN_TARGET),
    ("attn_output_gate", Idle::False, "a gate on the attention output", PLAIN_TARGET),
    ("clip_qkv", Idle::Never, "clipped queries, keys and values", PLAIN_TARGET),
    ("compression_config", Idle::Never, "compressed weights", "dequantise the target to bf16 first"),
    ("cross_attention_hidden_size", Idle::Never, "cross attention", "use a decoder-only target"),
    ("decoder_sparse_step", Idle::Number(1.0), "mixture-of-experts layers", DENSE_ONLY),
    ("dim_model_base", Idle::Never, "scaled logits", PLAIN_TARGET),
    ("embedding_multiplier", Idle::Number(1.0), "scaled embeddings", PLAIN_TARGET),
    ("embedding_scale", Idle::Number(1.0), "scaled embeddings", PLAIN_TARGET),
    ("final_logit_softcapping", Idle::Never, "a soft cap on the logits", PLAIN_TARGET),
    ("hidden_act", Idle::Text(&["silu", "swish"]), "another activation than SiLU", PLAIN_TARGET),
    ("hidden_activation", Idle::Text(&["silu", "swish"]), "another activation than SiLU", PLAIN_TARGET),
    ("is_decoder", Idle::False, "cross attention", "use a decoder-only target"),
    ("is_encoder_decoder", Idle::False, "an encoder", "use a decoder-only target"),
    ("linear_conv_kernel_dim", Idle::Never, "linear-attention layers", PLAIN_TARGET),
    ("logit_scale", Idle::Number(1.0), "scaled logits", PLAIN_TARGET),
    ("logits_scaling", Idle::Number(1.0), "scaled logits", PLAIN_TARGET),
    ("mlp_only_layers", Idle::Empty, "mixture-of-experts layers", DENSE_ONLY),
    ("moe_intermediate_size", Idle::Empty, "mixture-of-experts layers", DENSE_ONLY),
    ("n_routed_experts", Idle::Empty, "mixture-of-experts layers", DENSE_ONLY),
    ("n_shared_experts", Idle::Empty, "mixture-of-experts layers", DENSE_ONLY),
    ("no_rope_layer_interval", Idle::Empty, "layers without rotary embeddings", ROPE_SIDE),
    ("no_rope_layers", Idle::Empty, "layers without rotary embeddings", ROPE_SIDE),
    ("norm_topk_prob", Idle::False, "mixture-of-experts layers", DENSE_ONLY),
    ("num_experts", Idle::Empty, "mixture-of-experts layers", DENSE_ONLY),
    ("num_experts_per_tok", Idle::Empty, "mixture-of-experts layers", DENSE_ONLY),
    ("num_local_experts", Idle::Empty, "mixture-of-experts layers", DENSE_ONLY),
    (
        "pretraining_tp",
        Idle::Number(1.0),
        "sliced linear layers",
        "set it to 1 if the weights are ordinary; the results are the same",
    ),
    ("pruned_heads", Idle::Empty, "pruned heads", PLAIN_TARGET),
    ("qk_layernorm", Idle::False, "LayerNorm on queries and keys", PLAIN_TARGET),
    ("quantization_config", Idle::Never, "quantised weights", "dequantise the target to bf16 first"),
    ("query_pre_attn_scalar", Idle::Never, "another attention scale than head_dim^-1/2", PLAIN_TARGET),
    ("residual_multiplier", Idle::Number(1.0), "scaled residuals", PLAIN_TARGET),
    ("rope_interleaved", Idle::False, "interleaved rotary embeddings", ROPE_SIDE),
    ("scale_depth", Idle::Never, "scaled residuals", PLAIN_TARGET),
    ("scale_emb", Idle::Number(1.0), "scaled embeddings", PLAIN_TARGET),
    ("text_config", Idle::Never, "a multimodal model", "name the folder of its text model, with the keys at the top level"),
    ("use_bidirectional_attention", Idle::False, "bidirectional attention", "use a causal target"),
    ("use_mrope", Idle::False, "multimodal rotary embeddings", ROPE_SIDE),
    ("use_parallel_residual", Idle::False, "parallel residuals", PLAIN_TARGET),
    ("use_qk_norm", Idle::False, "normalised queries and keys under another name than qwen3's", PLAIN_TARGET),
    ("vision_config", Idle::Never, "a multimodal model", "name the folder of its text model"),
];

impl Idle {
    fn accepts(&self, value: &Value) -> bool {
        match self {
            Self::Never => false,
            Self::False => value == &Value::Bool(false),
            Self::Number(idle) => value == &Value::Bool(false) || value.as_f64() == Some(*idle),
            Self::Empty => match value {
                Value::Array(items) => items.is_empty(),
                Value::Object(map) => map.is_empty(),
                _ => value == &Value::Bool(false) || value.as_f64() == Some(0.0),
            },
            Self::Text(words) => value.as_str().is_some_and(|text| words.contains(&text)),
        }
    }
}

/// Refuses what changes the mathematics and is not implemented, and returns one warning for each key that no table knows.
/// `handled` are the keys that the calling reader takes itself.
pub(crate) fn check_keys(config: &Fields<'_>, handled: &[&str]) -> Result<Vec<String>, ConfigError> {
    for (key, idle, meaning, advice) in REFUSED {
        if !handled.contains(key) && config.get(key).is_some_and(|value| !idle.accepts(value)) {
            return Err(config.unsupported(key, *meaning, *advice));
        }
    }
    let known =
        |key: &str| handled.contains(&key) || HARMLESS.contains(&key) || REFUSED.iter().any(|(refused, ..)| *refused == key);
    let unknown = config.map.iter().filter(|(key, value)| !value.is_null() && !known(key));
    Ok(unknown
        .map(|(key, value)| {
            let mut text = value.to_string();
            if text.chars().count() > 60 {
                text = text.chars().take(57).chain("...".chars()).collect();
            }
            format!(
                "{}: key `{}` = {text} is not known and not used; if it changes the model's mathematics, results will be wrong",
                config.path.display(),
                config.dotted(key)
            )
        })
        .collect())
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    fn check(text: &str) -> Result<Vec<String>, ConfigError> {
        let Value::Object(map) = serde_json::from_str(text).unwrap() else { panic!("not an object") };
        check_keys(&Fields::new(Path::new("config.json"), &map), &["hidden_size"])
    }

    #[test]
    fn every_refused_key_is_refused_in_use_and_accepted_idle() {
        for (key, idle, ..) in REFUSED {
            let message = check(&format!(r#"{{"{key}": 7.5}}"#)).unwrap_err().to_string();
            assert!(message.contains(&format!("`{key}`")) && message.lines().count() == 2, "{message}");
            assert_eq!(check(&format!(r#"{{"{key}": null}}"#)).unwrap(), Vec::<String>::new(), "{key}");
            let value = match idle {
                Idle::Never => continue,
                Idle::False => "false".to_owned(),
                Idle::Number(number) => number.to_string(),
                Idle::Empty => "[]".to_owned(),
                Idle::Text(words) => format!("{:?}", words[0]),
            };
            assert_eq!(check(&format!(r#"{{"{key}": {value}}}"#)).unwrap(), Vec::<String>::new(), "{key} = {value}");
        }
    }

    #[test]
    fn an_unknown_key_becomes_a_warning_and_a_known_one_does_not() {
        let warnings = check(r#"{"hidden_size": 8, "use_cache": true, "frobnicate": [1, 2]}"#).unwrap();
        assert_eq!(warnings.len(), 1);
        assert!(warnings[0].contains("`frobnicate` = [1,2]"), "{warnings:?}");
    }

    #[test]
    fn no_key_is_both_harmless_and_refused() {
        for (key, ..) in REFUSED {
            assert!(!HARMLESS.contains(key), "{key}");
        }
    }
}
