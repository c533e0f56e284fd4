//! A target's `config.json`: from a Hugging Face folder to the numbers that define the forward pass.
//!
//! Job: read `config.json` of a llama or qwen3 folder, and the stop tokens that any folder declares. It refuses, by name, every other model type and every setting whose mathematics is not implemented, and it collects a warning for each key
//! that it does not know; the caller prints those.
//! Invariants: every field of a [`TargetConfig`] is explicit, with the defaults of transformers applied where a key may be
//! absent; `head_dim` comes from the config and only in its absence from hidden / heads; heads are a multiple of kv heads.

use std::collections::BTreeSet;
use std::path::Path;

use serde_json::{Map, Value};

use crate::config_fields::{ConfigError, Fields, read_object};
use crate::config_keys::check_keys;
use crate::rope::{self, RopeSpec};

/// Target architectures that this program computes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Family {
    /// `LlamaForCausalLM`: Llama 2 and 3, SmolLM2 and others with its keys.
    Llama,
    /// `Qwen3ForCausalLM`: as llama, with an RMS norm on each query and key head.
    Qwen3,
}

impl Family {
    /// The `model_type` of config.json.
    pub fn model_type(self) -> &'static str {
        match self {
            Self::Llama => "llama",
            Self::Qwen3 => "qwen3",
        }
    }
}

/// Everything that a target's forward pass and its decoding need from the folder, weights aside.
#[derive(Debug, Clone, PartialEq)]
pub struct TargetConfig {
    /// Architecture.
    pub family: Family,
    /// `architectures` of config.json, as servers name the verifier.
    pub architectures: Vec<String>,
    /// H: width of the residual stream.
    pub hidden: usize,
    /// I: width of the MLP.
    pub intermediate: usize,
    /// L: decoder layers.
    pub layers: usize,
    /// Query heads.
    pub heads: usize,
    /// Key and value heads; divides `heads`.
    pub kv_heads: usize,
    /// Width of one head.
    pub head_dim: usize,
    /// V: rows of the embedding table, which may exceed the tokenizer's ids.
    pub vocab: usize,
    /// Added to the mean square in every RMS norm.
    pub rms_eps: f64,
    /// Rotary embedding, partial factor and scaling applied.
    pub rope: RopeSpec,
    /// Whether the head is the embedding table.
    pub tie_embeddings: bool,
    /// Whether the q, k, v *and* o projections have biases (transformers gives all four or none).
    pub attention_bias: bool,
    /// Whether the three MLP projections have biases.
    pub mlp_bias: bool,
    /// Whether each query and key head goes through an RMS norm before the rotary embedding.
    pub qk_norm: bool,
    /// Longest context, in tokens.
    pub max_positions: usize,
    /// Beginning-of-text token.
    pub bos_id: Option<u32>,
    /// Padding token.
    pub pad_id: Option<u32>,
    /// One line for each key that is not known, and for each value that was overruled. The caller prints them.
    pub warnings: Vec<String>,
}

impl TargetConfig {
    /// Q: width of all query heads together.
    pub fn q_width(&self) -> usize {
        self.heads * self.head_dim
    }

    /// KV: width of all key (or value) heads together.
    pub fn kv_width(&self) -> usize {
        self.kv_heads * self.head_dim
    }

    /// Reads `config.json` from a model's folder.
    ///
    /// # Errors
    /// A [`ConfigError`] naming file and key for anything unreadable, missing, contradictory or not supported.
    pub fn open(folder: &Path) -> Result<Self, ConfigError> {
        Self::from_file(&folder.join("config.json"))
    }

    /// Reads one config file.
    ///
    /// # Errors
    /// As [`TargetConfig::open`].
    pub fn from_file(path: &Path) -> Result<Self, ConfigError> {
        Self::parse(path, &read_object(path)?)
    }

    /// Reads the object of a config; `path` is only named in errors.
    ///
    /// # Errors
    /// As [`TargetConfig::open`].
    pub fn parse(path: &Path, map: &Map<String, Value>) -> Result<Self, ConfigError> {
        let config = Fields::new(path, map);
        let family = family(&config)?;
        let mut warnings = check_keys(&config, HANDLED)?;
        if config.get("auto_map").is_some() {
            warnings.push(format!(
                "{}: `auto_map` names code in the folder that replaces `{}`; that code is not run or looked at",
                path.display(),
                family.model_type()
            ));
        }
        refuse_sliding_window(&config, family)?;
        let hidden = config.count("hidden_size")?;
        let layers = config.count("num_hidden_layers")?;
        let heads = config.count("num_attention_heads")?;
        let kv_heads = config.opt_count("num_key_value_heads")?.unwrap_or(heads);
        if !heads.is_multiple_of(kv_heads) {
            let why = format!("it does not divide num_attention_heads = {heads}");
            return Err(config.value("num_key_value_heads", why, "each key head serves the same number of query heads"));
        }
        let head_dim = match config.opt_count("head_dim")? {
            Some(head_dim) => head_dim,
            None if hidden.is_multiple_of(heads) => hidden / heads,
            None => return Err(config.missing("head_dim", "a count; hidden_size is not a multiple of num_attention_heads")),
        };
        let max_positions = config.count("max_position_embeddings")?;
        let rope = rope::parse(&config, head_dim, max_positions, &["full_attention"], &mut warnings)?;
        let vocab = config.count("vocab_size")?;
        let eos_ids = config.tokens("eos_token_id")?;
        if let Some(id) = eos_ids.iter().find(|id| **id as usize >= vocab) {
            let why = format!("token {id} is outside the vocabulary of {vocab}");
            return Err(config.value("eos_token_id", why, "the config and the tokenizer belong to different models"));
        }
        Ok(Self {
            family,
            architectures: config.opt_strings("architectures")?.unwrap_or_default(),
            hidden,
            intermediate: config.count("intermediate_size")?,
            layers,
            heads,
            kv_heads,
            head_dim,
            vocab,
            rms_eps: rms_eps(&config)?,
            rope,
            tie_embeddings: config.opt_bool("tie_word_embeddings")?.unwrap_or(false),
            attention_bias: config.opt_bool("attention_bias")?.unwrap_or(false),
            mlp_bias: family == Family::Llama && config.opt_bool("mlp_bias")?.unwrap_or(false),
            qk_norm: family == Family::Qwen3,
            max_positions,
            bos_id: config.opt_token("bos_token_id")?,
            pad_id: config.opt_token("pad_token_id")?,
            warnings,
        })
    }
}

/// Tokens that a folder's `generation_config.json` and `config.json` declare to end a text (`eos_token_id`, one or several; for a multimodal model also that of
/// its text model), together: what is an end in one of them is no ordinary token in the other. A file that is absent declares none.
///
/// # Errors
/// A [`ConfigError`] for a file that cannot be read or a value that is no token id.
pub fn declared_stop_ids(folder: &Path) -> Result<BTreeSet<u32>, ConfigError> {
    let mut ids = BTreeSet::new();
    for name in ["generation_config.json", "config.json"] {
        let path = folder.join(name);
        if !path.try_exists().map_err(|source| ConfigError::Read { path: path.clone(), source })? {
            continue;
        }
        let map = read_object(&path)?;
        let fields = Fields::new(&path, &map);
        ids.extend(fields.tokens("eos_token_id")?);
        if let Some(text) = fields.opt_object("text_config")? {
            ids.extend(fields.nested("text_config", text).tokens("eos_token_id")?);
        }
    }
    Ok(ids)
}

/// Keys that [`TargetConfig::parse`] takes itself.
const HANDLED: &[&str] = &[
    "attention_bias",
    "auto_map",
    "head_dim",
    "hidden_size",
    "intermediate_size",
    "layer_types",
    "max_position_embeddings",
    "mlp_bias",
    "num_attention_heads",
    "num_hidden_layers",
    "num_key_value_heads",
    "original_max_position_embeddings",
    "partial_rotary_factor",
    "rms_norm_eps",
    "rope_parameters",
    "rope_scaling",
    "rope_theta",
    "sliding_window",
    "tie_word_embeddings",
    "use_sliding_window",
    "vocab_size",
];

fn family(config: &Fields<'_>) -> Result<Family, ConfigError> {
    match config.opt_str("model_type")? {
        Some("llama") => Ok(Family::Llama),
        Some("qwen3") => Ok(Family::Qwen3),
        Some(other) => Err(config.unsupported(
            "model_type",
            format!("the architecture `{other}`"),
            "supported targets are model_type llama and qwen3",
        )),
        None => Err(config.missing("model_type", "llama or qwen3")),
    }
}

/// The epsilon inside the norms. Shared with the drafter's reader.
pub(crate) fn rms_eps(config: &Fields<'_>) -> Result<f64, ConfigError> {
    let eps = config.f64("rms_norm_eps")?;
    if eps <= 0.0 || eps >= 1.0 {
        return Err(config.value("rms_norm_eps", "it must lie between 0 and 1", "qwen3 has 1e-6, llama 3 has 1e-5"));
    }
    Ok(eps)
}

fn refuse_sliding_window(config: &Fields<'_>, family: Family) -> Result<(), ConfigError> {
    let advice = "use a target with full attention in every layer";
    let used = config.opt_bool("use_sliding_window")?;
    if used == Some(true) {
        return Err(config.unsupported("use_sliding_window", "sliding-window attention in the target", advice));
    }
    // Qwen3 configs carry a window that `use_sliding_window` (false by default) switches off. A llama config has no such
    // switch, so a window in one means another model.
    if family == Family::Llama && used.is_none() && config.get("sliding_window").is_some() {
        let advice = "set it to null if the model was trained with full attention, else use another target";
        return Err(config.unsupported("sliding_window", "sliding-window attention in the target", advice));
    }
    let types = config.opt_strings("layer_types")?.unwrap_or_default();
    if let Some(other) = types.iter().find(|layer_type| *layer_type != "full_attention") {
        return Err(config.unsupported("layer_types", format!("layers of type `{other}` in the target"), advice));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    const TINY: &str = r#"{"model_type": "qwen3", "hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 4,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 4, "vocab_size": 64, "max_position_embeddings": 128,
        "rms_norm_eps": 1e-6, "rope_theta": 1e4, "eos_token_id": 2}"#;

    fn with(key: &str, value: &str) -> Result<TargetConfig, ConfigError> {
        let Value::Object(mut map) = serde_json::from_str(TINY).unwrap() else { panic!("not an object") };
        map.insert(key.to_owned(), serde_json::from_str(value).unwrap());
        TargetConfig::parse(Path::new("config.json"), &map)
    }

    #[test]
    fn defaults_are_those_of_transformers() {
        let config = with("use_cache", "true").unwrap();
        assert!(config.qk_norm && !config.tie_embeddings && !config.attention_bias && !config.mlp_bias);
        assert_eq!((config.q_width(), config.kv_width()), (8, 4));
        assert!(config.warnings.is_empty(), "{:?}", config.warnings);
        let llama = with("model_type", r#""llama""#).unwrap();
        assert!(!llama.qk_norm);
        assert_eq!(with("num_key_value_heads", "null").unwrap().kv_heads, 2);
        assert_eq!(with("head_dim", "null").unwrap().head_dim, 4);
    }

    #[test]
    fn each_refusal_names_its_key() {
        for (key, value) in [
            ("model_type", r#""mixtral""#),
            ("model_type", "null"),
            ("use_sliding_window", "true"),
            ("layer_types", r#"["full_attention", "sliding_attention"]"#),
            ("layer_types", r#"["linear_attention"]"#),
            ("hidden_act", r#""gelu""#),
            ("quantization_config", r#"{"bits": 4}"#),
            ("final_logit_softcapping", "30.0"),
            ("num_experts", "8"),
            ("pretraining_tp", "2"),
            ("hidden_size", "0"),
            ("hidden_size", "8.5"),
            ("hidden_size", "1e30"),
            ("num_hidden_layers", "4294967296"),
            ("intermediate_size", "9223372036854775808"),
            ("intermediate_size", "100000000000000000000000"),
            ("vocab_size", "-1"),
            ("max_position_embeddings", "18446744073709551615"),
            ("head_dim", "4611686018427387904"),
            ("hidden_size", "null"),
            ("vocab_size", r#""64""#),
            ("num_key_value_heads", "3"),
            ("rms_norm_eps", "0"),
            ("rms_norm_eps", "1e30"),
            ("rope_theta", "0"),
            ("rope_theta", "1e308"),
            ("rms_norm_eps", "null"),
            ("eos_token_id", "64"),
            ("eos_token_id", r#"["</s>"]"#),
            ("tie_word_embeddings", "1"),
        ] {
            let message = with(key, value).unwrap_err().to_string();
            assert!(message.contains(&format!("`{key}`")), "{key} = {value}: {message}");
            assert!(message.starts_with("config.json") && message.lines().count() == 2, "{message}");
        }
        let Value::Object(mut map) = serde_json::from_str(TINY).unwrap() else { panic!("not an object") };
        map.insert("model_type".to_owned(), "llama".into());
        map.insert("sliding_window".to_owned(), 4096.into());
        let message = TargetConfig::parse(Path::new("config.json"), &map).unwrap_err().to_string();
        assert!(message.contains("`sliding_window`"), "{message}");
    }

    #[test]
    fn qwen3_configs_may_carry_a_window_that_is_switched_off() {
        assert!(with("sliding_window", "4096").is_ok());
        assert!(with("use_sliding_window", "false").is_ok());
        assert!(with("layer_types", r#"["full_attention"]"#).is_ok());
    }

    #[test]
    fn stop_tokens_are_those_of_both_files() {
        let dir = tempfile::tempdir().unwrap();
        let declared = || declared_stop_ids(dir.path()).map(|ids| ids.into_iter().collect::<Vec<u32>>());
        assert!(declared().unwrap().is_empty());
        std::fs::write(dir.path().join("config.json"), TINY).unwrap();
        assert_eq!(declared().unwrap(), [2]);
        std::fs::write(dir.path().join("generation_config.json"), r#"{"eos_token_id": [5, 7]}"#).unwrap();
        assert_eq!(declared().unwrap(), [2, 5, 7]);
        std::fs::write(dir.path().join("generation_config.json"), r#"{"eos_token_id": "x"}"#).unwrap();
        let message = declared().unwrap_err().to_string();
        assert!(message.contains("generation_config.json") && message.contains("`eos_token_id`"), "{message}");
        std::fs::write(dir.path().join("generation_config.json"), r#"{"text_config": {"eos_token_id": 9}}"#).unwrap();
        assert_eq!(declared().unwrap(), [2, 9]);
    }
}
