//! The cheap checks of a run: everything that can be wrong before a byte of weights is read.
//!
//! Job: from a [`RunConfig`] to opened target, dataset, schedule, drafter configs and shapes. Refuses what does not fit together, naming file, key or row.
//! Invariant: nothing here touches a device or reads a weight.

use crate::config::{ConfigError, RunConfig};
use crate::frozen::{FrozenError, TargetFiles};
use crate::rounds::Rounds;
use drafthorse_data::batch::{BatchBuilder, BlockShape, default_max_blocks};
use drafthorse_data::dataset::{Dataset, OpenOptions};
use drafthorse_data::error::DataError;
use drafthorse_data::mask_token::{MaskToken, choose_mask_token};
use drafthorse_data::schedule::{Schedule, ScheduleConfig};
use drafthorse_data::tokenize::ChatTokenizer;
use drafthorse_graph::op::optim::AdamConfig;
use drafthorse_models::draft::dflash::TrainShape;
use drafthorse_models::draft_config::{DraftConfig, DraftError, LayerKind, default_layer_ids};
use drafthorse_models::hf_config::TargetConfig;
use drafthorse_models::rope::RopeSpec;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

/// Errors of setting a run up; all are the user's to mend.
#[derive(Debug, thiserror::Error)]
pub enum SetupError {
    /// The config.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// The target.
    #[error(transparent)]
    Target(#[from] FrozenError),
    /// The dataset.
    #[error(transparent)]
    Data(#[from] DataError),
    /// The drafter's shape.
    #[error(transparent)]
    Draft(#[from] DraftError),
}

/// One drafter of the run.
#[derive(Clone, Debug)]
pub struct Variant {
    /// Name in a sweep; none with replicas.
    pub name: Option<String>,
    /// The config with the variant's changes.
    pub config: RunConfig,
    /// Its shape.
    pub draft: DraftConfig,
}

/// A run that passed its checks.
pub struct Setup {
    /// The resolved config.
    pub config: RunConfig,
    /// The target.
    pub target: TargetFiles,
    /// Batches.
    pub builder: BatchBuilder,
    /// The drafters: one, or the sweep's.
    pub variants: Vec<Variant>,
    /// Captured layers: the union over variants, ascending.
    pub captured: Vec<usize>,
    /// Optimizer steps of the whole run.
    pub total_steps: u64,
    /// The mask token and where it came from.
    pub mask_token: MaskToken,
    /// Lines a person should see.
    pub notices: Vec<String>,
}

impl Setup {
    /// Opens and checks everything. `progress` gets (rows, rows in all) while a foreign dataset is indexed.
    ///
    /// # Errors
    /// [`SetupError`].
    pub fn open(config: RunConfig, progress: &dyn Fn(u64, u64)) -> Result<Setup, SetupError> {
        let target = TargetFiles::open(&config.target)?;
        let tokenizer =
            ChatTokenizer::load(&config.target, &config.target.display().to_string(), &serde_json::Map::new(), today())?;
        let dataset = Arc::new(Dataset::open(&config.data, &OpenOptions::default(), progress)?);
        let mut notices = target.notices.clone();
        notices.extend(dataset.notices().iter().cloned());
        if !dataset.check_tokenizer(tokenizer.tokenizer_hash())? {
            notices.push("the dataset has no card: that it was made with this target's tokenizer is not proven".into());
        }
        let mask_token = choose_mask_token(
            config.drafter.mask_token_id,
            target.config.vocab as u32,
            &tokenizer,
            Some(&dataset.index().header.unused_ids),
        )?;
        let variants: Vec<Variant> = config
            .variants()?
            .into_iter()
            .map(|(name, config)| {
                let draft = draft_config(&config, &target.config, mask_token.id)?;
                Ok(Variant { name, config, draft })
            })
            .collect::<Result<_, SetupError>>()?;
        let captured: BTreeSet<usize> = variants.iter().flat_map(|v| v.draft.target_layer_ids.iter().copied()).collect();
        let schedule = Arc::new(Schedule::new(&dataset, schedule_config(&config))?);
        check_positions(&schedule, target.config.max_positions)?;
        let builder = BatchBuilder::new(dataset, Arc::clone(&schedule), block_shape(&config, &target.config, mask_token.id))?;
        let mut rounds = Rounds::new(|e| schedule.epoch_batches(e), config.optimizer.global_batch);
        let total_steps = config.optimizer.steps.unwrap_or_else(|| rounds.total_steps(config.optimizer.epochs));
        let captured = captured.into_iter().collect();
        Ok(Setup { config, target, builder, variants, captured, total_steps, mask_token, notices })
    }

    /// Config keys that decide which batch comes next, with their values: a resumed run must have the same.
    pub fn batch_keys(&self) -> BTreeMap<String, serde_json::Value> {
        let c = &self.config;
        let table = serde_json::to_value(c).expect("a config is writable");
        let keys = [
            "token_budget",
            "batching",
            "max_rows",
            "bucket_edges",
            "buckets",
            "max_length",
            "cut_long",
            "anchors",
            "max_blocks",
        ];
        let mut found: BTreeMap<String, serde_json::Value> =
            keys.iter().filter_map(|k| Some((format!("batch.{k}"), table["batch"].get(k)?.clone()))).collect();
        found.insert("drafter.gamma".into(), table["drafter"].get("gamma").cloned().unwrap_or_default());
        found.insert("eval.held_out".into(), table["eval"]["held_out"].clone());
        found
    }

    /// Fixed extents of the training programs.
    pub fn train_shape(&self) -> TrainShape {
        let b = &self.config.batch;
        let index = self.builder.dataset().index();
        let mean_len = (index.header.tokens / index.header.rows.max(1)) as usize;
        TrainShape {
            budget: b.token_budget as usize,
            micro_blocks: b.micro_blocks,
            loss_chunk: b.loss_chunk,
            recompute: b.recompute,
            mean_context: mean_len.div_ceil(2),
        }
    }
}

/// Refuses samples that reach beyond the positions that the target was made for: its hidden states there are not what it was trained to have.
fn check_positions(schedule: &Schedule, most: usize) -> Result<(), DataError> {
    let rows = || schedule.train_rows().iter().chain(schedule.held_out_rows()).copied();
    let long = |row: &u32| schedule.length(*row) as usize > most;
    let Some(first) = rows().filter(long).min() else { return Ok(()) };
    Err(DataError::Config {
        key: "batch.max_length",
        what: format!(
            "row {first} has {} tokens, the target has {most} positions ({} such rows)",
            schedule.length(first),
            rows().filter(long).count()
        ),
        todo: format!("set batch.max_length = {most}, or prepare with --max-length {most}"),
    })
}

/// Adam's constants.
pub fn adam_config(config: &RunConfig) -> AdamConfig {
    let o = &config.optimizer;
    AdamConfig { betas: o.betas, eps: o.eps, weight_decay: o.weight_decay, clip: o.clip }
}

/// The wall clock, for templates that print a date.
pub fn today() -> chrono::NaiveDateTime {
    chrono::Local::now().naive_local()
}

fn schedule_config(config: &RunConfig) -> ScheduleConfig {
    let b = &config.batch;
    ScheduleConfig {
        max_rows: b.max_rows,
        batching: b.batching,
        bucket_edges: b.bucket_edges.clone(),
        n_buckets: b.buckets,
        held_out: config.eval.held_out,
        max_len: b.max_length,
        cut_long: b.cut_long,
        ..ScheduleConfig::new(config.seed, b.token_budget)
    }
}

fn block_shape(config: &RunConfig, target: &TargetConfig, mask_token: u32) -> BlockShape {
    let b = &config.batch;
    BlockShape {
        block: config.drafter.block_size,
        micro_blocks: b.micro_blocks,
        max_blocks: b.max_blocks.unwrap_or_else(|| default_max_blocks(b.token_budget)),
        max_anchors: b.anchors,
        gamma: config.drafter.gamma,
        mask_token,
        vocab_size: target.vocab as u32,
    }
}

/// The drafter that `[drafter]` describes for this target.
///
/// # Errors
/// [`DraftError`], naming the field.
pub fn draft_config(config: &RunConfig, target: &TargetConfig, mask_token: u32) -> Result<DraftConfig, DraftError> {
    let d = &config.drafter;
    let ids = match (&d.target_layer_ids, d.features) {
        (Some(ids), _) => ids.clone(),
        (None, Some(n)) => default_layer_ids(target.layers, n)?,
        (None, None) => default_layer_ids(target.layers, drafthorse_models::draft_config::default_features(target.layers)?)?,
    };
    let sliding = d.sliding_layers.clone().unwrap_or_else(|| match d.sliding_window {
        Some(_) => (0..d.layers.saturating_sub(1)).collect(),
        None => Vec::new(),
    });
    let base = DraftConfig::from_target(target, ids, mask_token);
    let head_dim = d.head_dim.unwrap_or(base.head_dim);
    let draft = DraftConfig {
        intermediate: d.intermediate.unwrap_or(base.intermediate),
        layers: d.layers,
        heads: d.heads.unwrap_or(base.heads),
        kv_heads: d.kv_heads.unwrap_or(base.kv_heads),
        head_dim,
        block_size: d.block_size,
        rope: RopeSpec::full(d.rope_theta.unwrap_or(base.rope.theta), head_dim),
        layer_types: (0..d.layers).map(|l| if sliding.contains(&l) { LayerKind::Sliding } else { LayerKind::Full }).collect(),
        sliding_window: if sliding.is_empty() { None } else { d.sliding_window },
        ..base
    };
    draft.validate()?;
    Ok(draft)
}
