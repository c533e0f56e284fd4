//! The run's configuration: one TOML file, every key overridable on the command line.
//!
//! Job: read, override, check and write back [`RunConfig`]. Refuses unknown keys (naming the nearest one) and values that cannot work.
//! Invariants: a resolved config written out and read again is equal; a default is stated once, here.

use crate::config_checks::{checked, value};
use crate::config_text::{apply, key_error, syntax_error};
use drafthorse_data::buckets::Batching;
use drafthorse_data::schedule::HeldOut;
use drafthorse_models::draft_config::{DEFAULT_BLOCK_SIZE, DEFAULT_LAYERS};
use serde::{Deserialize, Serialize};
use std::path::{Path, PathBuf};

/// Errors of a config file or an override.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// The file cannot be read.
    #[error("cannot read the config {path}: {source}\n  check the path; `drafthorse init` prints a config")]
    Read {
        /// The file.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// The file or an override is not TOML, has an unknown key, or a value of another type.
    #[error("{origin}: {what}\n  {todo}")]
    Parse {
        /// File, or the override.
        origin: String,
        /// What is wrong, with the line where there is one.
        what: String,
        /// What to do.
        todo: String,
    },
    /// A value cannot work.
    #[error("config key `{key}`: {what}\n  {todo}")]
    Value {
        /// The key, dotted.
        key: &'static str,
        /// What is wrong.
        what: String,
        /// What to do.
        todo: String,
    },
}

/// A whole run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RunConfig {
    /// The target's HF folder.
    pub target: PathBuf,
    /// The prepared dataset.
    pub data: PathBuf,
    /// Where run folders are made.
    #[serde(default = "default_out")]
    pub out: PathBuf,
    /// Name of the run folder; derived from the target and the time when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// Seeds initial weights, order, anchors.
    #[serde(default)]
    pub seed: u64,
    /// The drafter.
    #[serde(default)]
    pub drafter: DrafterSection,
    /// What a batch is.
    #[serde(default)]
    pub batch: BatchSection,
    /// Learning.
    #[serde(default)]
    pub optimizer: OptimizerSection,
    /// Who runs where.
    #[serde(default)]
    pub pipeline: PipelineSection,
    /// Held-out measurements.
    #[serde(default)]
    pub eval: EvalSection,
    /// What is saved when.
    #[serde(default)]
    pub checkpoint: CheckpointSection,
    /// Several drafters on the same features; replaces data parallelism.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub sweep: Vec<Variant>,
}

/// One drafter of a sweep: what differs from the sections above.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Variant {
    /// Folder name of the variant.
    pub name: String,
    /// Keys of `[drafter]` that differ.
    #[serde(default)]
    pub drafter: toml::Table,
    /// Keys of `[optimizer]` that differ (not `epochs`, `steps` or `global_batch`: all variants see the same batches).
    #[serde(default)]
    pub optimizer: toml::Table,
}

/// `[drafter]`: shape of the drafter. What is absent comes from the target.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct DrafterSection {
    /// Decoder layers.
    pub layers: usize,
    /// B: tokens per block, the anchor included.
    pub block_size: usize,
    /// Captured target layers (0-based, the state after them); spread evenly when absent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub target_layer_ids: Option<Vec<usize>>,
    /// How many layers to capture when ids are absent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub features: Option<usize>,
    /// Query heads.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub heads: Option<usize>,
    /// Key/value heads.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub kv_heads: Option<usize>,
    /// Elements of a head.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub head_dim: Option<usize>,
    /// MLP width.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub intermediate: Option<usize>,
    /// RoPE base.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rope_theta: Option<f64>,
    /// Window of sliding layers, in tokens.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub sliding_window: Option<usize>,
    /// Layers that slide (0-based); needs `sliding_window`. All but the last when only the window is given.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub sliding_layers: Option<Vec<usize>>,
    /// Token id of masked slots; see the README for how one is chosen when absent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mask_token_id: Option<u32>,
    /// Decay of the slot weights; known for block sizes 16, 10 and 8.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub gamma: Option<f64>,
    /// Standard deviation of the initial linears; 0.02 fits hidden sizes of 500 and more, narrow targets want about 1/√hidden.
    pub init_std: f32,
    /// An exported drafter to start from instead of random weights.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub init_from: Option<PathBuf>,
}

/// `[batch]`: what the devices see at once.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct BatchSection {
    /// Context tokens of a batch.
    pub token_budget: u32,
    /// `packed` or `padded`.
    pub batching: Batching,
    /// Samples of a batch at most; sizes the border array only.
    pub max_rows: usize,
    /// Length bucket edges; quantiles when absent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bucket_edges: Option<Vec<u32>>,
    /// Buckets when edges are absent.
    pub buckets: usize,
    /// Cut samples to this many tokens.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_length: Option<u32>,
    /// Cut samples longer than the budget instead of refusing them.
    pub cut_long: bool,
    /// Anchors per sample and epoch at most.
    pub anchors: u32,
    /// Blocks of a batch at most; a sixth of the budget when absent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_blocks: Option<usize>,
    /// Blocks of a micro-batch.
    pub micro_blocks: usize,
    /// Rows of logits that exist at once.
    pub loss_chunk: usize,
    /// Repeat each layer's forward in its backward: less memory, more time.
    pub recompute: bool,
}

/// `[optimizer]`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct OptimizerSection {
    /// Peak learning rate.
    pub lr: f64,
    /// `cosine` or `constant`, after warm-up.
    pub schedule: Decay,
    /// Share of all steps over which the rate rises linearly.
    pub warmup: f64,
    /// Adam's β.
    pub betas: [f32; 2],
    /// Adam's ε.
    pub eps: f32,
    /// Decoupled weight decay.
    pub weight_decay: f32,
    /// Clip threshold of the global gradient norm.
    pub clip: f32,
    /// Passes over the data.
    pub epochs: u32,
    /// Optimizer steps of the whole run; overrides `epochs`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub steps: Option<u64>,
    /// Batches per optimizer step.
    pub global_batch: u64,
    /// Non-finite steps in a row that stop the run.
    pub max_skipped: u32,
}

/// Shape of the learning rate after warm-up.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Decay {
    /// Half a cosine down to 0 at the last step.
    Cosine,
    /// Flat.
    Constant,
}

/// `[pipeline]`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct PipelineSection {
    /// `cpu`, or `cuda` where the build has it. `cuda:3` is short for `cuda` with target and drafter on GPU 3.
    pub device: String,
    /// One target loop per entry; the entry is a GPU index (any number on `cpu`).
    pub targets: Vec<u32>,
    /// One drafter loop per entry.
    pub drafters: Vec<u32>,
    /// Batches that may wait for a target.
    pub queue_depth: usize,
    /// CPU threads for compute and data; all cores when absent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub threads: Option<usize>,
    /// Seconds without progress after which the run is stopped as stalled.
    pub stall_s: u64,
}

/// `[eval]`: held-out measurements while training.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct EvalSection {
    /// Steps between measurements; 0 turns them off.
    pub every: u64,
    /// Held-out rows: `"none"`, `{ rows = 64 }` or `{ share = 0.01 }`.
    pub held_out: HeldOut,
}

/// `[checkpoint]`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct CheckpointSection {
    /// Steps between checkpoints; the last step and every stop are saved anyway. 0 saves only those.
    pub every: u64,
    /// Checkpoints kept, besides the best by held-out loss.
    pub keep_last: usize,
}

fn default_out() -> PathBuf {
    "runs".into()
}

impl Default for DrafterSection {
    fn default() -> Self {
        DrafterSection {
            layers: DEFAULT_LAYERS,
            block_size: DEFAULT_BLOCK_SIZE,
            target_layer_ids: None,
            features: None,
            heads: None,
            kv_heads: None,
            head_dim: None,
            intermediate: None,
            rope_theta: None,
            sliding_window: None,
            sliding_layers: None,
            mask_token_id: None,
            gamma: None,
            init_std: 0.02,
            init_from: None,
        }
    }
}

impl Default for BatchSection {
    fn default() -> Self {
        BatchSection {
            token_budget: 12_288,
            batching: Batching::Packed,
            max_rows: 1024,
            bucket_edges: None,
            buckets: 6,
            max_length: None,
            cut_long: false,
            anchors: 512,
            max_blocks: None,
            micro_blocks: 256,
            loss_chunk: 1024,
            recompute: false,
        }
    }
}

impl Default for OptimizerSection {
    fn default() -> Self {
        OptimizerSection {
            lr: 6e-4,
            schedule: Decay::Cosine,
            warmup: 0.04,
            betas: [0.9, 0.999],
            eps: 1e-8,
            weight_decay: 0.0,
            clip: 1.0,
            epochs: 6,
            steps: None,
            global_batch: 1,
            max_skipped: 10,
        }
    }
}

impl Default for PipelineSection {
    fn default() -> Self {
        PipelineSection { device: "cpu".into(), targets: vec![0], drafters: vec![0], queue_depth: 4, threads: None, stall_s: 600 }
    }
}

impl Default for EvalSection {
    fn default() -> Self {
        EvalSection { every: 200, held_out: HeldOut::Rows(64) }
    }
}

impl Default for CheckpointSection {
    fn default() -> Self {
        CheckpointSection { every: 500, keep_last: 2 }
    }
}

impl OptimizerSection {
    /// Learning rate of step `step` (0-based) of `total`.
    pub fn rate(&self, step: u64, total: u64) -> f64 {
        let warm = (self.warmup * total as f64).ceil().max(0.0);
        let at = step as f64;
        if at < warm {
            return self.lr * (at + 1.0) / warm;
        }
        match self.schedule {
            Decay::Constant => self.lr,
            Decay::Cosine => {
                let share = (at - warm) / (total as f64 - warm).max(1.0);
                self.lr * 0.5 * (1.0 + (std::f64::consts::PI * share).cos())
            }
        }
    }
}

impl RunConfig {
    /// Reads a file and applies `key=value` overrides in order.
    ///
    /// # Errors
    /// [`ConfigError`], naming file, line, key and the nearest known key.
    pub fn load(path: &Path, overrides: &[String]) -> Result<RunConfig, ConfigError> {
        let text = std::fs::read_to_string(path).map_err(|source| ConfigError::Read { path: path.into(), source })?;
        Self::parse(&text, &path.display().to_string(), overrides)
    }

    /// Parses TOML text and applies overrides.
    ///
    /// # Errors
    /// As [`RunConfig::load`].
    pub fn parse(text: &str, origin: &str, overrides: &[String]) -> Result<RunConfig, ConfigError> {
        let mut table: toml::Table = text.parse().map_err(|e: toml::de::Error| syntax_error(origin, text, &e))?;
        for item in overrides {
            apply(&mut table, item)?;
        }
        let config = table.clone().try_into::<RunConfig>().map_err(|e| key_error(origin, text, overrides, &e))?;
        checked(config)
    }

    /// The resolved config as TOML; reading it back gives an equal config.
    pub fn to_toml(&self) -> String {
        toml::to_string(self).expect("a config is writable")
    }

    /// The configs of a sweep's drafters; `(None, self)` alone without a sweep.
    ///
    /// # Errors
    /// When a variant has an unknown key or changes what all variants must share.
    pub fn variants(&self) -> Result<Vec<(Option<String>, RunConfig)>, ConfigError> {
        if self.sweep.is_empty() {
            return Ok(vec![(None, self.clone())]);
        }
        self.sweep
            .iter()
            .map(|v| {
                let mut merged = toml::Table::try_from(RunConfig { sweep: Vec::new(), ..self.clone() }).expect("a config is a table");
                for (section, changes) in [("drafter", &v.drafter), ("optimizer", &v.optimizer)] {
                    let into = merged.get_mut(section).and_then(toml::Value::as_table_mut).expect("sections are tables");
                    into.extend(changes.clone());
                }
                let text = toml::to_string(&merged).expect("a table is writable");
                let config = Self::parse(&text, &format!("sweep variant `{}`", v.name), &[])?;
                let shared = |c: &RunConfig| {
                    let (o, d) = (&c.optimizer, &c.drafter);
                    (o.epochs, o.steps, o.global_batch, d.block_size, d.gamma, d.mask_token_id)
                };
                if shared(&config) != shared(self) {
                    let todo = "variants see the same batches: keep epochs, steps, global_batch, block_size, gamma and mask_token_id out of them";
                    return Err(value("sweep", format!("variant `{}` changes what all variants share", v.name), todo));
                }
                Ok((Some(v.name.clone()), config))
            })
            .collect()
    }
}

#[cfg(test)]
#[path = "config_tests.rs"]
mod tests;
