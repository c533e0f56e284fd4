//! The run's configuration: one TOML file, every key overridable on the command line.
//!
//! Job: read, override, check and write back [`RunConfig`]. Refuses unknown keys (naming the nearest one) and values that cannot work.
//! Invariants: a resolved config written out and read again is equal; a default is stated once, here.

use drafthorse_data::buckets::Batching;
use drafthorse_data::schedule::HeldOut;
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
            layers: 5,
            block_size: 16,
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
        let mut table: toml::Table = text.parse().map_err(|e: toml::de::Error| parse_error(origin, &e))?;
        if overrides.is_empty() {
            let config: RunConfig = toml::from_str(text).map_err(|e| parse_error(origin, &e))?;
            return config.checked();
        }
        for item in overrides {
            apply(&mut table, item)?;
        }
        let config: RunConfig = toml::from_str(&toml::to_string(&table).expect("a parsed table is writable")).map_err(|e| {
            let mut error = parse_error(origin, &e);
            if let ConfigError::Parse { origin, what, .. } = &mut error {
                // Lines of the merged table are not lines of the file.
                *origin = format!("{origin} with overrides {}", overrides.join(" "));
                *what = e.message().to_owned();
            }
            error
        })?;
        config.checked()
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

    fn checked(mut self) -> Result<RunConfig, ConfigError> {
        if let Some(index) = self.pipeline.device.strip_prefix("cuda:") {
            let gpu: u32 =
                index.parse().map_err(|_| value("pipeline.device", format!("`cuda:{index}` names no GPU"), "write cuda:0"))?;
            (self.pipeline.targets, self.pipeline.drafters) = (vec![gpu], vec![gpu]);
            self.pipeline.device = "cuda".into();
        }
        if !["cpu", "cuda"].contains(&self.pipeline.device.as_str()) {
            return Err(value("pipeline.device", format!("`{}` is no device", self.pipeline.device), "use cpu, cuda or cuda:N"));
        }
        let (b, o, p) = (&self.batch, &self.optimizer, &self.pipeline);
        let at_least_one = [
            ("drafter.layers", self.drafter.layers as u64),
            ("batch.token_budget", u64::from(b.token_budget)),
            ("batch.max_rows", b.max_rows as u64),
            ("batch.anchors", u64::from(b.anchors)),
            ("batch.micro_blocks", b.micro_blocks as u64),
            ("batch.loss_chunk", b.loss_chunk as u64),
            ("optimizer.global_batch", o.global_batch),
            ("optimizer.epochs", u64::from(o.epochs)),
            ("pipeline.queue_depth", p.queue_depth as u64),
            ("pipeline.stall_s", p.stall_s),
            ("checkpoint.keep_last", self.checkpoint.keep_last as u64),
        ];
        if let Some((key, _)) = at_least_one.into_iter().find(|(_, v)| *v == 0) {
            return Err(value(key, "0 cannot work".into(), "set it to at least 1"));
        }
        let d = &self.drafter;
        if let Some(layer) = d.sliding_layers.iter().flatten().find(|l| **l >= d.layers) {
            return Err(value(
                "drafter.sliding_layers",
                format!("there is no layer {layer} of {}", d.layers),
                "layers count from 0",
            ));
        }
        if d.features.is_some() && d.target_layer_ids.is_some() {
            return Err(value("drafter.features", "target_layer_ids says it already".into(), "keep one of the two"));
        }
        if o.steps == Some(0) {
            return Err(value(
                "optimizer.steps",
                "0 steps train nothing".into(),
                "set at least 1, or leave it out and set epochs",
            ));
        }
        let positive = |x: f32| x.is_finite() && x > 0.0;
        let betas = o.betas.iter().all(|b| (0.0..1.0).contains(b));
        let decay = o.weight_decay.is_finite() && o.weight_decay >= 0.0;
        if !(betas && decay && positive(o.eps) && positive(o.clip)) {
            let what = format!("betas {:?}, eps {}, clip {}, weight_decay {}", o.betas, o.eps, o.clip, o.weight_decay);
            return Err(value("optimizer", what, "betas lie in [0, 1), eps and clip are above 0, weight_decay is not negative"));
        }
        if p.targets.is_empty() || p.drafters.is_empty() {
            return Err(value(
                "pipeline.targets",
                "a run needs a target and a drafter".into(),
                "e.g. targets = [0], drafters = [0]",
            ));
        }
        if !(o.lr.is_finite() && o.lr > 0.0) {
            return Err(value("optimizer.lr", format!("{} is no learning rate", o.lr), "6e-4 is usual"));
        }
        if !(self.drafter.init_std.is_finite() && self.drafter.init_std > 0.0) {
            return Err(value("drafter.init_std", format!("{} is no deviation", self.drafter.init_std), "0.02 is usual"));
        }
        if !(0.0..=1.0).contains(&o.warmup) {
            return Err(value("optimizer.warmup", format!("{} is no share of the run", o.warmup), "0.04 is usual"));
        }
        let names: std::collections::BTreeSet<&str> = self.sweep.iter().map(|v| v.name.as_str()).collect();
        let plain = |n: &str| {
            n.starts_with(|c: char| c.is_ascii_alphanumeric())
                && n.chars().all(|c| c.is_ascii_alphanumeric() || "-_.".contains(c))
        };
        if names.len() != self.sweep.len() || !names.iter().all(|n| plain(n)) {
            let todo = "each variant has its own folder: give every one a name of its own, of letters, digits, `-`, `_` and `.`";
            return Err(value("sweep.name", format!("{:?}", self.sweep.iter().map(|v| &v.name).collect::<Vec<_>>()), todo));
        }
        if self.name.as_deref().is_some_and(|n| !plain(n)) {
            let what = format!("{:?} is no folder name", self.name.as_deref().unwrap_or_default());
            return Err(value("name", what, "the run's folder lies in `out`: use letters, digits, `-`, `_` and `.`"));
        }
        if !self.sweep.is_empty() && self.sweep.len() != p.drafters.len() {
            let what = format!("{} variants for {} drafter loops", self.sweep.len(), p.drafters.len());
            return Err(value("pipeline.drafters", what, "a sweep trains one variant per drafter loop"));
        }
        Ok(self)
    }
}

fn value(key: &'static str, what: String, todo: &str) -> ConfigError {
    ConfigError::Value { key, what, todo: todo.into() }
}

/// Sets one dotted key from `key=value`; the value is TOML, or a bare string.
fn apply(table: &mut toml::Table, item: &str) -> Result<(), ConfigError> {
    let bad = |what: &str| ConfigError::Parse {
        origin: format!("override `{item}`"),
        what: what.into(),
        todo: "write section.key=value, e.g. drafter.layers=5".into(),
    };
    let (key, text) = item.split_once('=').ok_or_else(|| bad("there is no `=`"))?;
    let parsed = format!("v = {text}").parse::<toml::Table>().ok().and_then(|mut t| t.remove("v"));
    let new = parsed.unwrap_or_else(|| toml::Value::String(text.to_owned()));
    let mut at = table;
    let parts: Vec<&str> = key.trim().split('.').collect();
    let (last, sections) = parts.split_last().expect("split gives at least one part");
    for section in sections {
        let entry = at.entry((*section).to_owned()).or_insert_with(|| toml::Value::Table(toml::Table::new()));
        at = entry.as_table_mut().ok_or_else(|| bad(&format!("`{section}` is a value, not a section")))?;
    }
    at.insert((*last).to_owned(), new);
    Ok(())
}

/// Turns serde's "unknown field `x`, expected one of …" into the nearest known key.
fn parse_error(origin: &str, error: &toml::de::Error) -> ConfigError {
    let message = error.message();
    let quoted: Vec<&str> = message.split('`').skip(1).step_by(2).collect();
    let todo = match quoted.split_first() {
        Some((unknown, known)) if message.starts_with("unknown field") => known
            .iter()
            .max_by(|a, b| strsim::jaro_winkler(unknown, a).total_cmp(&strsim::jaro_winkler(unknown, b)))
            .map_or_else(|| "remove it".to_owned(), |near| format!("did you mean `{near}`? known here: {}", known.join(", "))),
        _ => "correct it; `drafthorse init` prints a commented config".to_owned(),
    };
    ConfigError::Parse { origin: origin.into(), what: error.to_string().trim_end().to_owned(), todo }
}

#[cfg(test)]
#[path = "config_tests.rs"]
mod tests;
