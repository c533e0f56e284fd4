//! What a DFlash drafter is: its sizes, the target layers that it listens to, and the defaults that follow from a target.
//!
//! Job: hold and validate a [`DraftConfig`]. It refuses, by field, everything that cannot be trained or served: a width other
//! than the target's (embedding and head are shared), layer ids out of order or range, a partial rotary embedding, a block
//! without a slot to predict.
//! Invariants: a validated config has `rope.rotary_dim == head_dim` (a drafter never inherits the target's partial rotary or
//! scaling), strictly increasing layer ids within `0..=L-2`, and a window exactly if some layer slides.
//!
//! Sources: DFlash, arXiv 2602.06036; the rule for layer ids and the file formats follow the published drafters.

use serde::{Deserialize, Serialize};

use crate::hf_config::TargetConfig;
use crate::rope::{RopeScaling, RopeSpec};

/// Layers of a drafter unless told otherwise.
pub const DEFAULT_LAYERS: usize = 5;
/// Captured target layers unless told otherwise or the target is too shallow.
pub const DEFAULT_FEATURES: usize = 5;
/// B unless told otherwise.
pub const DEFAULT_BLOCK_SIZE: usize = 16;

/// Attention of one drafter layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum LayerKind {
    /// All context before the anchor; bidirectional inside the block.
    #[serde(rename = "full_attention")]
    Full,
    /// The last W positions; causal inside the block.
    #[serde(rename = "sliding_attention")]
    Sliding,
}

impl LayerKind {
    /// The word of `layer_types` in a config.json.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Full => "full_attention",
            Self::Sliding => "sliding_attention",
        }
    }
}

/// What a drafter needs to know of its target.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TargetDims {
    /// Width of the residual stream.
    pub hidden: usize,
    /// Decoder layers.
    pub layers: usize,
    /// Rows of the embedding table.
    pub vocab: usize,
}

impl From<&TargetConfig> for TargetDims {
    fn from(target: &TargetConfig) -> Self {
        Self { hidden: target.hidden, layers: target.layers, vocab: target.vocab }
    }
}

/// One DFlash drafter.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DraftConfig {
    /// H: width of the drafter, equal to the target's.
    pub hidden: usize,
    /// I: width of the MLP.
    pub intermediate: usize,
    /// Decoder layers.
    pub layers: usize,
    /// Query heads.
    pub heads: usize,
    /// Key and value heads; divides `heads`.
    pub kv_heads: usize,
    /// Width of one head.
    pub head_dim: usize,
    /// Width of the target's residual stream.
    pub target_hidden: usize,
    /// L: the target's decoder layers.
    pub target_layers: usize,
    /// Captured layers, 0-based: the residual stream *after* layer id. Strictly increasing, at most L-2.
    pub target_layer_ids: Vec<usize>,
    /// B: the anchor and B-1 mask slots.
    pub block_size: usize,
    /// Token whose embedding fills the mask slots.
    pub mask_token_id: u32,
    /// Added to the mean square in every RMS norm.
    pub rms_eps: f64,
    /// The drafter's own rotary embedding; always full.
    pub rope: RopeSpec,
    /// One entry per layer.
    pub layer_types: Vec<LayerKind>,
    /// W of the sliding layers, in tokens; none if no layer slides.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sliding_window: Option<usize>,
    /// Longest context, in tokens.
    pub max_positions: usize,
    /// V: rows of the target's embedding table.
    pub vocab: usize,
}

/// A drafter that cannot be. Two lines: which field and why, then what to do.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("drafter.{field} = {got}: {why}\n{advice}")]
pub struct DraftError {
    /// Field of [`DraftConfig`].
    pub field: &'static str,
    /// Its value.
    pub got: String,
    /// What is wrong with it.
    pub why: String,
    /// What to do.
    pub advice: String,
}

impl DraftError {
    fn new(field: &'static str, got: impl ToString, why: impl Into<String>, advice: impl Into<String>) -> Self {
        Self { field, got: got.to_string(), why: why.into(), advice: advice.into() }
    }
}

/// The layers that a drafter with `features` captured layers listens to in a target of `target_layers` layers:
/// `round(1 + i (L-4) / (n-1))`, halves to even, for i = 0..n-1; `L div 2` for n = 1.
///
/// # Errors
/// If the rule does not give strictly increasing ids within `0..=L-2`; small targets name their ids.
pub fn default_layer_ids(target_layers: usize, features: usize) -> Result<Vec<usize>, DraftError> {
    let ids = match features {
        0 => Vec::new(),
        1 => vec![target_layers / 2],
        n => (0..n).map(|i| 1 + div_round_half_even(i * target_layers.saturating_sub(4), n - 1)).collect(),
    };
    check_layer_ids(&ids, target_layers).map(|()| ids)
}

/// `1 + round(num / den)` must round the *sum* half to even, so a half goes to the odd quotient: 1 + 6.5 is 8.
fn div_round_half_even(num: usize, den: usize) -> usize {
    let (quotient, rest) = (num / den, num % den);
    match (2 * rest).cmp(&den) {
        std::cmp::Ordering::Less => quotient,
        std::cmp::Ordering::Greater => quotient + 1,
        std::cmp::Ordering::Equal if (1 + quotient).is_multiple_of(2) => quotient,
        std::cmp::Ordering::Equal => quotient + 1,
    }
}

/// `min(5, L-3)`, the captured layers of a drafter unless told otherwise.
///
/// # Errors
/// If L is below 4: such a target names its ids.
pub fn default_features(target_layers: usize) -> Result<usize, DraftError> {
    match target_layers.saturating_sub(3) {
        0 => Err(DraftError::new(
            "target_layer_ids",
            "default",
            format!("the target has only {target_layers} layers, too few for the rule"),
            "name the ids, each at most L-2, such as target_layer_ids = [0]",
        )),
        room => Ok(room.min(DEFAULT_FEATURES)),
    }
}

fn check_layer_ids(ids: &[usize], target_layers: usize) -> Result<(), DraftError> {
    let error = |why: String, advice: String| Err(DraftError::new("target_layer_ids", format!("{ids:?}"), why, advice));
    if ids.is_empty() {
        return error("a drafter needs at least one captured layer".to_owned(), "name one or more ids".to_owned());
    }
    if !ids.is_sorted_by(|a, b| a < b) {
        let why = format!("they are not strictly increasing in a target of {target_layers} layers");
        return error(why, "name fewer layers, or the ids themselves in rising order".to_owned());
    }
    // The state after layer L-1 belongs to the head: servers hand out states up to the one entering the last layer.
    match (ids.last(), target_layers.checked_sub(2)) {
        (Some(last), Some(limit)) if *last <= limit => Ok(()),
        (_, Some(limit)) => error(
            format!("the target has {target_layers} layers, so ids go from 0 to {limit}"),
            "an id means the state after that layer, counted from 0".to_owned(),
        ),
        (_, None) => error("a target of one layer has no layer to capture".to_owned(), "use a deeper target".to_owned()),
    }
}

impl DraftConfig {
    /// The default drafter for a target that listens to `target_layer_ids`: 5 layers with the target's head layout, blocks of 16, and an unscaled full
    /// rotary embedding on the target's base. Not validated: callers change what they like first.
    pub fn from_target(target: &TargetConfig, target_layer_ids: Vec<usize>, mask_token_id: u32) -> Self {
        Self {
            hidden: target.hidden,
            intermediate: target.intermediate,
            layers: DEFAULT_LAYERS,
            heads: target.heads,
            kv_heads: target.kv_heads,
            head_dim: target.head_dim,
            target_hidden: target.hidden,
            target_layers: target.layers,
            target_layer_ids,
            block_size: DEFAULT_BLOCK_SIZE,
            mask_token_id,
            rms_eps: target.rms_eps,
            rope: RopeSpec::full(target.rope.theta, target.head_dim),
            layer_types: vec![LayerKind::Full; DEFAULT_LAYERS],
            sliding_window: None,
            max_positions: target.max_positions,
            vocab: target.vocab,
        }
    }

    /// [`DraftConfig::from_target`] with the default layer ids, validated.
    ///
    /// # Errors
    /// If the target is too shallow for the default ids, or does not admit a drafter of these sizes.
    pub fn default_for(target: &TargetConfig, mask_token_id: u32) -> Result<Self, DraftError> {
        let ids = default_layer_ids(target.layers, default_features(target.layers)?)?;
        let config = Self::from_target(target, ids, mask_token_id);
        config.validate()?;
        Ok(config)
    }

    /// Q: width of all query heads together.
    pub fn q_width(&self) -> usize {
        self.heads * self.head_dim
    }

    /// KV: width of all key (or value) heads together.
    pub fn kv_width(&self) -> usize {
        self.kv_heads * self.head_dim
    }

    /// n·H_target: width of the captured states side by side, the columns of `fc`.
    pub fn fc_columns(&self) -> usize {
        self.target_layer_ids.len() * self.target_hidden
    }

    /// B-1: the tokens that one pass drafts.
    pub fn draft_tokens(&self) -> usize {
        self.block_size - 1
    }

    /// The target that this drafter was made for.
    pub fn target_dims(&self) -> TargetDims {
        TargetDims { hidden: self.target_hidden, layers: self.target_layers, vocab: self.vocab }
    }

    /// Refuses a drafter that was made for another target.
    ///
    /// # Errors
    /// Naming the first field that differs.
    pub fn check_target(&self, target: TargetDims) -> Result<(), DraftError> {
        let own = self.target_dims();
        for (field, mine, theirs) in [
            ("target_hidden", own.hidden, target.hidden),
            ("target_layers", own.layers, target.layers),
            ("vocab", own.vocab, target.vocab),
        ] {
            if mine != theirs {
                return Err(DraftError::new(
                    field,
                    mine,
                    format!("this target has {theirs}"),
                    "the drafter belongs to another target; use the one it was trained with",
                ));
            }
        }
        Ok(())
    }

    /// Refuses a drafter that cannot be trained or served.
    ///
    /// # Errors
    /// Naming the first field that is wrong.
    pub fn validate(&self) -> Result<(), DraftError> {
        let error = |field, got: String, why: String, advice: &str| Err(DraftError::new(field, got, why, advice));
        let positive = [
            ("hidden", self.hidden),
            ("intermediate", self.intermediate),
            ("layers", self.layers),
            ("heads", self.heads),
            ("kv_heads", self.kv_heads),
            ("head_dim", self.head_dim),
            ("vocab", self.vocab),
        ];
        if let Some((field, got)) = positive.into_iter().find(|(_, value)| *value == 0) {
            return error(field, got.to_string(), "it must be at least 1".to_owned(), "leave it out to take the default");
        }
        if self.hidden != self.target_hidden {
            let why = format!("the target's residual stream has {}", self.target_hidden);
            let advice = "a drafter shares the target's embedding and head, so both have one width; leave it out";
            return error("hidden", self.hidden.to_string(), why, advice);
        }
        if !self.heads.is_multiple_of(self.kv_heads) {
            let why = format!("it does not divide heads = {}", self.heads);
            return error("kv_heads", self.kv_heads.to_string(), why, "each key head serves the same number of query heads");
        }
        check_layer_ids(&self.target_layer_ids, self.target_layers)?;
        if self.block_size < 2 || self.block_size > self.max_positions {
            let why = format!("a block is an anchor and at least one slot, and at most max_positions = {}", self.max_positions);
            return error("block_size", self.block_size.to_string(), why, "16 is usual; 8 and 10 are in use");
        }
        if self.mask_token_id as usize >= self.vocab {
            let why = format!("the embedding table has {} rows", self.vocab);
            return error("mask_token_id", self.mask_token_id.to_string(), why, "name the id of a row that no text uses");
        }
        if !(self.rms_eps.is_finite() && self.rms_eps > 0.0) {
            return error("rms_eps", self.rms_eps.to_string(), "it must be above 0".to_owned(), "1e-6 is usual");
        }
        self.validate_rope()?;
        self.validate_layer_types()
    }

    fn validate_rope(&self) -> Result<(), DraftError> {
        let rope = &self.rope;
        let error = |got: String, why: &str, advice: &str| Err(DraftError::new("rope", got, why, advice));
        if rope.head_dim != self.head_dim || rope.rotary_dim != self.head_dim || !self.head_dim.is_multiple_of(2) {
            let got = format!("{} of {} dimensions rotated", rope.rotary_dim, rope.head_dim);
            let advice = "servers rotate a drafter's whole heads; leave partial rotary to the target and use an even head_dim";
            return error(got, &format!("a drafter rotates all {} dimensions of a head", self.head_dim), advice);
        }
        if !(rope.theta.is_finite() && rope.theta > 1.0) {
            return error(format!("theta {}", rope.theta), "the base must be a number above 1", "1e6 and 1e7 are in use");
        }
        let factor = match &rope.scaling {
            RopeScaling::Default {} => 1.0,
            RopeScaling::Linear { factor } | RopeScaling::Llama3 { factor, .. } | RopeScaling::Yarn { factor, .. } => *factor,
        };
        if !(factor.is_finite() && factor >= 1.0) {
            return error(format!("factor {factor}"), "a scaling factor is at least 1", "leave the scaling out");
        }
        Ok(())
    }

    fn validate_layer_types(&self) -> Result<(), DraftError> {
        let words: Vec<&str> = self.layer_types.iter().map(|kind| kind.as_str()).collect();
        if words.len() != self.layers {
            let why = format!("there are {} entries for {} layers", words.len(), self.layers);
            return Err(DraftError::new("layer_types", format!("{words:?}"), why, "give one entry per layer"));
        }
        let slides = self.layer_types.contains(&LayerKind::Sliding);
        match self.sliding_window {
            None if slides => {
                Err(DraftError::new("sliding_window", "absent", "some layers slide", "give the window in tokens, such as 2048"))
            }
            Some(window) if !slides => Err(DraftError::new(
                "sliding_window",
                window,
                "no layer slides",
                "leave it out, or mark layers as sliding_attention in layer_types",
            )),
            // SGLang refuses a window below the block; a window that cuts the block has no published meaning either.
            Some(window) if window < self.block_size => Err(DraftError::new(
                "sliding_window",
                window,
                format!("it is shorter than a block of {}", self.block_size),
                "give a window of at least block_size tokens, such as 2048",
            )),
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// The rule in floating point, with Rust's own rounding half to even.
    fn rule(layers: usize, n: usize) -> Vec<usize> {
        (0..n).map(|i| (1.0 + i as f64 * (layers as f64 - 4.0) / (n as f64 - 1.0)).round_ties_even() as usize).collect()
    }

    #[test]
    fn layer_ids_are_those_of_the_published_drafters() {
        assert_eq!(default_layer_ids(36, 5).unwrap(), [1, 9, 17, 25, 33]);
        assert_eq!(default_layer_ids(64, 5).unwrap(), [1, 16, 31, 46, 61]);
        assert_eq!(default_layer_ids(30, 5).unwrap(), [1, 8, 14, 20, 27]);
        assert_eq!(default_layer_ids(30, 1).unwrap(), [15]);
        assert_eq!(default_features(30).unwrap(), 5);
        assert_eq!(default_features(6).unwrap(), 3);
        assert_eq!(default_layer_ids(4, default_features(4).unwrap()).unwrap(), [2]);
        assert!(default_features(3).unwrap_err().to_string().contains("target_layer_ids"));
        assert!(default_layer_ids(6, 5).is_err(), "five ids in 1..=3 repeat");
        assert!(default_layer_ids(30, 0).is_err());
        assert!(default_layer_ids(1, 1).is_err());
    }

    proptest! {
        #[test]
        fn default_ids_follow_the_rule_and_fit(layers in 4usize..200) {
            let n = default_features(layers).unwrap();
            let ids = default_layer_ids(layers, n).unwrap();
            prop_assert_eq!(ids.len(), n);
            prop_assert!(ids.is_sorted_by(|a, b| a < b) && ids[n - 1] <= layers - 2);
            if n > 1 {
                prop_assert_eq!(ids, rule(layers, n));
            }
        }
    }

    fn valid() -> DraftConfig {
        DraftConfig {
            hidden: 8,
            intermediate: 16,
            layers: 2,
            heads: 2,
            kv_heads: 1,
            head_dim: 4,
            target_hidden: 8,
            target_layers: 6,
            target_layer_ids: vec![1, 4],
            block_size: 8,
            mask_token_id: 63,
            rms_eps: 1e-6,
            rope: RopeSpec::full(1e6, 4),
            layer_types: vec![LayerKind::Sliding, LayerKind::Full],
            sliding_window: Some(32),
            max_positions: 128,
            vocab: 64,
        }
    }

    #[test]
    fn each_refusal_names_its_field() {
        assert_eq!(valid().validate(), Ok(()));
        type Change = fn(&mut DraftConfig);
        let changes: [(&str, Change); 17] = [
            ("hidden", |c| c.hidden = 16),
            ("intermediate", |c| c.intermediate = 0),
            ("kv_heads", |c| c.kv_heads = 4),
            ("target_layer_ids", |c| c.target_layer_ids = vec![1, 5]),
            ("target_layer_ids", |c| c.target_layer_ids = vec![4, 1]),
            ("target_layer_ids", |c| c.target_layer_ids = vec![1, 1]),
            ("target_layer_ids", |c| c.target_layer_ids = vec![]),
            ("block_size", |c| c.block_size = 1),
            ("block_size", |c| c.block_size = 129),
            ("mask_token_id", |c| c.mask_token_id = 64),
            ("rms_eps", |c| c.rms_eps = 0.0),
            ("rope", |c| c.rope.rotary_dim = 2),
            ("rope", |c| c.rope.theta = f64::NAN),
            ("layer_types", |c| c.layer_types = vec![LayerKind::Sliding]),
            ("sliding_window", |c| c.sliding_window = None),
            ("sliding_window", |c| c.layer_types = vec![LayerKind::Full; 2]),
            ("sliding_window", |c| c.sliding_window = Some(7)),
        ];
        for (field, change) in changes {
            let mut config = valid();
            change(&mut config);
            let error = config.validate().unwrap_err();
            assert_eq!(error.field, field, "{error}");
            assert_eq!(error.to_string().lines().count(), 2, "{error}");
        }
        let dims = valid().target_dims();
        assert_eq!(valid().check_target(dims), Ok(()));
        let other = TargetDims { vocab: 65, ..dims };
        assert_eq!(valid().check_target(other).unwrap_err().field, "vocab");
    }
}
