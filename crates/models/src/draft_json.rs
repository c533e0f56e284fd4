//! The two spellings of a drafter's `config.json`: "plain" (z-lab, SGLang, vLLM) and "speculators" (vLLM).
//!
//! Job: write and read both. Reading refuses relatives of DFlash that need other mathematics (Domino, DSpark, pruned
//! vocabularies, causal blocks) by the key that says so; unknown keys become warnings. Writing leaves no key that a reader
//! must guess, writes both forms of the rotary parameters, and never writes `null`.
//! Invariants: plain layer ids mean "after layer id"; speculators ids mean "entering layer id" and are one higher.

use std::path::Path;

use serde_json::{Map, Value, json};

use crate::config_fields::{ConfigError, Fields};
use crate::config_keys::check_keys;
use crate::draft_config::{DraftConfig, LayerKind, TargetDims};
use crate::hf_config::rms_eps;
use crate::rope::{self, RopeScaling};

/// How a drafter's folder is written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Format {
    /// Keys at the top level, `dflash_config` beside them.
    Plain,
    /// `speculators_model_type` and a nested `transformer_layer_config`.
    Speculators,
}

impl Format {
    /// The word by which users choose it.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Plain => "plain",
            Self::Speculators => "speculators",
        }
    }
}

/// The target, as a speculators config names it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Verifier {
    /// Hub name or path.
    pub name_or_path: String,
    /// `architectures` of its config.
    pub architectures: Vec<String>,
}

/// The architecture name that vLLM and SGLang register.
pub(crate) const ARCHITECTURE: &str = "DFlashDraftModel";
/// Names that other trainers write for the same tensors and mathematics.
const KNOWN_ARCHITECTURES: [&str; 3] = [ARCHITECTURE, "Qwen3DFlashDraftModel", "DFlashSpeculator"];
/// Release of the speculators package whose config class the written file follows.
const SPECULATORS_VERSION: &str = "0.9.0";

/// The object that config.json holds.
pub(crate) fn write(config: &DraftConfig, format: Format, verifier: &Verifier) -> Map<String, Value> {
    let value = match format {
        Format::Plain => plain(config),
        Format::Speculators => speculators(config, verifier),
    };
    match value {
        Value::Object(map) => map,
        other => unreachable!("a config is an object, not {other}"),
    }
}

/// The keys of the transformer layers, common to both spellings.
fn layer_keys(config: &DraftConfig) -> Map<String, Value> {
    let words: Vec<&str> = config.layer_types.iter().map(|kind| kind.as_str()).collect();
    let mut map = Map::new();
    let mut put = |key: &str, value: Value| {
        map.insert(key.to_owned(), value);
    };
    put("model_type", "qwen3".into());
    put("hidden_size", config.hidden.into());
    put("intermediate_size", config.intermediate.into());
    put("num_hidden_layers", config.layers.into());
    put("num_attention_heads", config.heads.into());
    put("num_key_value_heads", config.kv_heads.into());
    put("head_dim", config.head_dim.into());
    put("hidden_act", "silu".into());
    put("attention_bias", false.into());
    put("attention_dropout", 0.0.into());
    put("initializer_range", 0.02.into());
    put("rms_norm_eps", config.rms_eps.into());
    put("max_position_embeddings", config.max_positions.into());
    put("vocab_size", config.vocab.into());
    put("tie_word_embeddings", false.into());
    put("layer_types", words.into());
    put("use_sliding_window", config.sliding_window.is_some().into());
    if let Some(window) = config.sliding_window {
        put("sliding_window", window.into());
    }
    put("max_window_layers", config.layers.into());
    put("rope_parameters", config.rope.to_rope_parameters().into());
    map
}

fn plain(config: &DraftConfig) -> Value {
    let mut map = Map::new();
    map.insert("architectures".to_owned(), json!([ARCHITECTURE]));
    map.extend(layer_keys(config));
    // Older readers know only the flat form; an absent `rope_scaling` means none, and null would break typed readers.
    map.insert("rope_theta".to_owned(), config.rope.theta.into());
    if config.rope.scaling != (RopeScaling::Default {}) {
        map.insert("rope_scaling".to_owned(), config.rope.to_rope_scaling().into());
    }
    map.insert("block_size".to_owned(), config.block_size.into());
    map.insert("num_target_layers".to_owned(), config.target_layers.into());
    let ids = &config.target_layer_ids;
    map.insert("dflash_config".to_owned(), json!({"mask_token_id": config.mask_token_id, "target_layer_ids": ids}));
    map.insert("dtype".to_owned(), "bfloat16".into());
    map.insert("torch_dtype".to_owned(), "bfloat16".into());
    Value::Object(map)
}

fn speculators(config: &DraftConfig, verifier: &Verifier) -> Value {
    let entering: Vec<usize> = config.target_layer_ids.iter().map(|id| id + 1).collect();
    json!({
        "architectures": [ARCHITECTURE],
        "speculators_model_type": "dflash",
        "speculators_version": SPECULATORS_VERSION,
        "dtype": "bfloat16",
        "aux_hidden_state_layer_ids": entering,
        "block_size": config.block_size,
        "draft_vocab_size": config.vocab,
        "mask_token_id": config.mask_token_id,
        "sample_from_anchor": false,
        "sliding_window_non_causal": false,
        "tie_word_embeddings": false,
        "speculators_config": {
            "algorithm": "dflash",
            "default_proposal_method": "greedy",
            "proposal_methods": [{
                "proposal_type": "greedy",
                "speculative_tokens": config.draft_tokens(),
                "verifier_accept_k": 1,
                "accept_tolerance": 0.0,
            }],
            "verifier": {"name_or_path": verifier.name_or_path, "architectures": verifier.architectures},
        },
        "transformer_layer_config": layer_keys(config),
    })
}

/// Reads either spelling. What a file does not say of its target (speculators files leave out the number of layers) is taken
/// from `target`. The result is not validated.
pub(crate) fn read(
    path: &Path,
    map: &Map<String, Value>,
    target: TargetDims,
    warnings: &mut Vec<String>,
) -> Result<(Format, DraftConfig), ConfigError> {
    let config = Fields::new(path, map);
    let architectures = config.opt_strings("architectures")?.unwrap_or_default();
    if !architectures.iter().any(|name| KNOWN_ARCHITECTURES.contains(&name.as_str())) {
        return Err(config.unsupported(
            "architectures",
            "another kind of drafter",
            format!("DFlash drafters are read: {}", KNOWN_ARCHITECTURES.join(", ")),
        ));
    }
    if config.get("speculators_model_type").is_some() {
        Ok((Format::Speculators, read_speculators(&config, target, warnings)?))
    } else {
        Ok((Format::Plain, read_plain(&config, target, warnings)?))
    }
}

const LAYER_KEYS: &[&str] = &[
    "attention_bias",
    "auto_map",
    "head_dim",
    "hidden_size",
    "intermediate_size",
    "layer_types",
    "max_position_embeddings",
    "max_window_layers",
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

fn read_plain(config: &Fields<'_>, target: TargetDims, warnings: &mut Vec<String>) -> Result<DraftConfig, ConfigError> {
    let own = ["block_size", "dflash_config", "num_target_layers"];
    let dflash = config.opt_object("dflash_config")?.ok_or_else(|| config.missing("dflash_config", "an object"))?;
    let dflash = config.nested("dflash_config", dflash);
    let mut draft = read_layers(config, &[LAYER_KEYS, &own].concat(), target, warnings)?;
    let known = ["mask_token_id", "target_layer_ids", "block_size", "causal", "use_aux_hidden_state"];
    if let Some(key) = dflash.map.keys().find(|key| !known.contains(&key.as_str()) && dflash.get(key).is_some()) {
        return Err(dflash.unsupported(key, "a variation of DFlash", format!("known keys are {}", known.join(", "))));
    }
    if dflash.opt_bool("use_aux_hidden_state")? == Some(false) {
        return Err(dflash.unsupported("use_aux_hidden_state", "a drafter without captured layers", RELATIVES));
    }
    let causal = draft.layer_types.contains(&LayerKind::Sliding);
    match dflash.opt_bool("causal")? {
        Some(true) if draft.layer_types.contains(&LayerKind::Full) => {
            return Err(dflash.unsupported("causal", "causal blocks in layers of full attention", RELATIVES));
        }
        Some(false) if causal => {
            return Err(dflash.unsupported("causal", "bidirectional blocks in sliding layers", RELATIVES));
        }
        _ => {}
    }
    draft.block_size = match config.opt_count("block_size")? {
        Some(size) => size,
        None => dflash.count("block_size")?,
    };
    draft.mask_token_id =
        dflash.opt_token("mask_token_id")?.ok_or_else(|| dflash.missing("mask_token_id", "the id of the mask token"))?;
    draft.target_layer_ids =
        dflash.opt_indices("target_layer_ids")?.ok_or_else(|| dflash.missing("target_layer_ids", "a list of layer ids"))?;
    if let Some(layers) = config.opt_count("num_target_layers")? {
        draft.target_layers = layers;
    }
    Ok(draft)
}

const RELATIVES: &str = "plain DFlash is read; this drafter needs mathematics that is not implemented";

fn read_speculators(config: &Fields<'_>, target: TargetDims, warnings: &mut Vec<String>) -> Result<DraftConfig, ConfigError> {
    let kind = config.opt_str("speculators_model_type")?.unwrap_or_default();
    if kind != "dflash" {
        return Err(config.unsupported("speculators_model_type", format!("a drafter of type `{kind}`"), RELATIVES));
    }
    let handled = [
        "aux_hidden_state_layer_ids",
        "auto_map",
        "block_size",
        "draft_vocab_size",
        "mask_token_id",
        "projector_type",
        "sample_from_anchor",
        "shift_label",
        "sliding_window_non_causal",
        "speculators_config",
        "speculators_model_type",
        "speculators_version",
        "target_hidden_size",
        "tie_word_embeddings",
        "transformer_layer_config",
        // Settings of other trainers that end with training, and of Domino's head, which projector_type rules out.
        "auf",
        "emb_dim",
        "gru_hidden_dim",
        "has_no_defaults_at_init",
        "lambda_base_decay_ratio",
        "lambda_base_start",
        "max_anchors",
        "pure_draft_prefix_len",
    ];
    warnings.extend(check_keys(config, &handled)?);
    for (key, meaning) in [("sample_from_anchor", "a prediction in the anchor's own slot"), ("shift_label", "shifted labels")] {
        if config.opt_bool(key)? == Some(true) {
            return Err(config.unsupported(key, meaning, RELATIVES));
        }
    }
    if let Some(projector) = config.opt_str("projector_type")?.filter(|projector| *projector != "dflash") {
        return Err(config.unsupported("projector_type", format!("a head of type `{projector}`"), RELATIVES));
    }
    let layers =
        config.opt_object("transformer_layer_config")?.ok_or_else(|| config.missing("transformer_layer_config", "an object"))?;
    let mut draft = read_layers(&config.nested("transformer_layer_config", layers), LAYER_KEYS, target, warnings)?;
    if config.opt_bool("sliding_window_non_causal")? == Some(true) && draft.layer_types.contains(&LayerKind::Sliding) {
        return Err(config.unsupported("sliding_window_non_causal", "bidirectional blocks in sliding layers", RELATIVES));
    }
    let draft_vocab = config.opt_count("draft_vocab_size")?.unwrap_or(draft.vocab);
    if draft_vocab != draft.vocab {
        let meaning = format!("a vocabulary pruned from {} to {draft_vocab}", draft.vocab);
        return Err(config.unsupported("draft_vocab_size", meaning, "use a drafter with the target's whole vocabulary"));
    }
    if let Some(width) = config.opt_count("target_hidden_size")? {
        draft.target_hidden = width;
    }
    draft.block_size = config.count("block_size")?;
    draft.mask_token_id =
        config.opt_token("mask_token_id")?.ok_or_else(|| config.missing("mask_token_id", "the id of the mask token"))?;
    let key = "aux_hidden_state_layer_ids";
    let entering = config.opt_indices(key)?.ok_or_else(|| config.missing(key, "a list of layer ids"))?;
    let after: Option<Vec<usize>> = entering.iter().map(|id| id.checked_sub(1)).collect();
    draft.target_layer_ids = after.ok_or_else(|| {
        config.unsupported(key, "the embedding as a captured layer", "ids here mean the state entering a layer, from 1")
    })?;
    Ok(draft)
}

/// The sizes and the rotary embedding; block, mask token and layer ids are left for the caller, who knows their place.
fn read_layers(
    config: &Fields<'_>,
    handled: &[&str],
    target: TargetDims,
    warnings: &mut Vec<String>,
) -> Result<DraftConfig, ConfigError> {
    match config.opt_str("model_type")? {
        Some("qwen3") => {}
        Some(other) => {
            return Err(config.unsupported("model_type", format!("drafter layers of type `{other}`"), "qwen3 layers are read"));
        }
        None => return Err(config.missing("model_type", "qwen3")),
    }
    warnings.extend(check_keys(config, handled)?);
    if config.opt_bool("attention_bias")? == Some(true) {
        return Err(config.unsupported("attention_bias", "biases in the drafter's attention", RELATIVES));
    }
    let layers = config.count("num_hidden_layers")?;
    let heads = config.count("num_attention_heads")?;
    let head_dim = config.count("head_dim")?;
    let hidden = config.count("hidden_size")?;
    let max_positions = config.count("max_position_embeddings")?;
    let layer_types = layer_types(config, layers)?;
    let slides = layer_types.contains(&LayerKind::Sliding);
    let mut in_use: Vec<&str> = layer_types.iter().map(|kind| kind.as_str()).collect();
    in_use.sort_unstable();
    in_use.dedup();
    Ok(DraftConfig {
        hidden,
        intermediate: config.count("intermediate_size")?,
        layers,
        heads,
        kv_heads: config.opt_count("num_key_value_heads")?.unwrap_or(heads),
        head_dim,
        target_hidden: hidden,
        target_layers: target.layers,
        target_layer_ids: Vec::new(),
        block_size: 0,
        mask_token_id: 0,
        rms_eps: rms_eps(config)?,
        rope: rope::parse(config, head_dim, max_positions, &in_use, warnings)?,
        sliding_window: if slides { Some(config.count("sliding_window")?) } else { None },
        layer_types,
        max_positions,
        vocab: config.count("vocab_size")?,
    })
}

/// `layer_types` as written; without it the rule of transformers: the layers from `max_window_layers` on slide if
/// `use_sliding_window` is set.
fn layer_types(config: &Fields<'_>, layers: usize) -> Result<Vec<LayerKind>, ConfigError> {
    let uses_window = config.opt_bool("use_sliding_window")?;
    let Some(words) = config.opt_strings("layer_types")? else {
        let first = match uses_window {
            Some(true) => {
                let wanted = "the index of the first sliding layer, or give layer_types";
                config.opt_index("max_window_layers")?.ok_or_else(|| config.missing("max_window_layers", wanted))?
            }
            _ => layers,
        };
        return Ok((0..layers).map(|i| if i >= first { LayerKind::Sliding } else { LayerKind::Full }).collect());
    };
    let kinds: Vec<LayerKind> = words
        .iter()
        .map(|word| match word.as_str() {
            "full_attention" => Ok(LayerKind::Full),
            "sliding_attention" => Ok(LayerKind::Sliding),
            other => {
                let advice = "full_attention and sliding_attention are read";
                Err(config.unsupported("layer_types", format!("drafter layers of type `{other}`"), advice))
            }
        })
        .collect::<Result<_, _>>()?;
    if uses_window == Some(false) && kinds.contains(&LayerKind::Sliding) {
        let why = "`layer_types` has sliding layers, so servers differ in what they compute";
        return Err(config.value("use_sliding_window", why, "set it to true, or make every layer full_attention"));
    }
    Ok(kinds)
}
