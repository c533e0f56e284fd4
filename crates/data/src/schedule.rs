//! Which samples are in batch i of the run, for every i, without any state to save.
//!
//! Epoch e is a list of batches computed from (dataset lengths, settings, seed, e); batch indices run on over epochs.
//! It refuses samples longer than the budget (by row, unless they are to be cut) and datasets without an anchor.
//! Invariants: held-out rows are in no training batch; rows without an anchor candidate are in no batch, and are counted;
//! the answer for an index is the same whoever asks, in whatever order.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use serde::{Deserialize, Serialize};

use crate::buckets::{Batching, Buckets, Group, Limits, pack};
use crate::error::{DataError, Result};
use crate::index::Index;
use crate::rng::{CounterRng, Stream};

/// The epoch number that keys held-out batches and their anchors, which are the same in every epoch.
pub const HELD_OUT_EPOCH: u32 = u32::MAX;
/// Epoch lists kept in memory: the current one, its neighbours, and the held-out one.
const EPOCHS_KEPT: usize = 4;

/// How many rows are held out.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum HeldOut {
    /// None.
    None,
    /// So many rows.
    Rows(usize),
    /// This share of rows, rounded up.
    Share(f64),
}

/// Settings of a [`Schedule`].
#[derive(Debug, Clone, PartialEq)]
pub struct ScheduleConfig {
    /// The run's seed.
    pub seed: u64,
    /// Tokens per batch.
    pub budget: u32,
    /// Samples per batch at most.
    pub max_rows: usize,
    /// The rule.
    pub batching: Batching,
    /// Bucket edges; quantiles of the lengths when absent.
    pub bucket_edges: Option<Vec<u32>>,
    /// Buckets when edges are absent.
    pub n_buckets: usize,
    /// Held-out rows.
    pub held_out: HeldOut,
    /// Cut samples to this many tokens.
    pub max_len: Option<u32>,
    /// Cut samples longer than the budget instead of refusing them.
    pub cut_long: bool,
}

impl ScheduleConfig {
    /// Defaults for a token budget: packed, 1,024 rows, six quantile buckets, nothing held out.
    pub fn new(seed: u64, budget: u32) -> Self {
        Self {
            seed,
            budget,
            max_rows: 1024,
            batching: Batching::Packed,
            bucket_edges: None,
            n_buckets: 6,
            held_out: HeldOut::None,
            max_len: None,
            cut_long: false,
        }
    }
}

/// Where a batch index of the run lies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Location {
    /// Epoch, from 0.
    pub epoch: u32,
    /// Index inside the epoch.
    pub index: u64,
    /// Batches in that epoch.
    pub epoch_batches: u64,
}

/// The order of the run. Shared by threads.
#[derive(Debug)]
pub struct Schedule {
    config: ScheduleConfig,
    lengths: Vec<u32>,
    buckets: Buckets,
    train: Vec<u32>,
    held_out: Vec<u32>,
    without_anchor: usize,
    cut: usize,
    cache: Mutex<Cache>,
}

#[derive(Debug, Default)]
struct Cache {
    /// Number of batches of epochs 0, 1, 2 …
    counts: Vec<u64>,
    /// Epoch → its batches.
    epochs: BTreeMap<u32, Arc<Vec<Group>>>,
}

impl Schedule {
    /// Plans the order over the rows of `index`.
    ///
    /// # Errors
    /// When a sample is longer than the budget, nothing has an anchor, or the held-out rows leave nothing to train on.
    pub fn new(index: &Index, config: ScheduleConfig) -> Result<Self> {
        if config.budget == 0 || config.max_rows == 0 {
            return Err(DataError::Config {
                key: "batch.token_budget",
                what: "a batch must have room for a token and a row".into(),
                todo: "set batch.token_budget and batch.max_rows to at least 1".into(),
            });
        }
        let mut lengths = index.lengths.clone();
        let limit = config.max_len.unwrap_or(u32::MAX).min(if config.cut_long { config.budget } else { u32::MAX });
        let mut cut = 0;
        for length in &mut lengths {
            cut += usize::from(*length > limit);
            *length = (*length).min(limit);
        }
        if let Some(row) = lengths.iter().position(|&l| l > config.budget) {
            let n = lengths.iter().filter(|&&l| l > config.budget).count();
            return Err(DataError::Config {
                key: "batch.token_budget",
                what: format!(
                    "row {row} has {} tokens, the budget is {} ({n} such {})",
                    lengths[row],
                    config.budget,
                    if n == 1 { "row" } else { "rows" }
                ),
                todo: "raise the budget, prepare with a smaller --max-length, or set batch.cut_long = true".into(),
            });
        }
        let mut eligible: Vec<u32> = (0..lengths.len() as u32).filter(|&s| index.candidates[s as usize] > 0).collect();
        let without_anchor = lengths.len() - eligible.len();
        if eligible.is_empty() {
            return Err(DataError::Refused {
                what: format!("no row has an anchor: none of {} rows has two supervised tokens in a row", lengths.len()),
                todo: "use chats with longer answers".into(),
            });
        }
        let n_held = match config.held_out {
            HeldOut::None => 0,
            HeldOut::Rows(n) => n,
            HeldOut::Share(share) if (0.0..1.0).contains(&share) => (share * eligible.len() as f64).ceil() as usize,
            HeldOut::Share(share) => {
                return Err(DataError::Config {
                    key: "eval.held_out",
                    what: format!("{share} is not a share below 1"),
                    todo: "write a number of rows, or a share such as 0.01".into(),
                });
            }
        };
        if n_held >= eligible.len() {
            return Err(DataError::Config {
                key: "eval.held_out",
                what: format!("{n_held} rows held out of {} leave nothing to train on", eligible.len()),
                todo: "hold out fewer rows".into(),
            });
        }
        // Each row draws a number keyed by itself; the smallest are held out.
        let mut ranked: Vec<(u64, u32)> =
            eligible.iter().map(|&s| (CounterRng::new(config.seed, Stream::HeldOut, 0, u64::from(s)).next_u64(), s)).collect();
        ranked.sort_unstable();
        let mut held_out: Vec<u32> = ranked[..n_held].iter().map(|&(_, s)| s).collect();
        held_out.sort_unstable();
        eligible.retain(|s| held_out.binary_search(s).is_err());
        let buckets = match &config.bucket_edges {
            Some(edges) => Buckets::from_edges(edges)?,
            None => Buckets::quantiles(eligible.iter().map(|&s| lengths[s as usize]).collect(), config.n_buckets),
        };
        Ok(Self { config, lengths, buckets, train: eligible, held_out, without_anchor, cut, cache: Mutex::new(Cache::default()) })
    }

    /// The settings.
    pub fn config(&self) -> &ScheduleConfig {
        &self.config
    }

    /// The buckets.
    pub fn buckets(&self) -> &Buckets {
        &self.buckets
    }

    /// Rows that are trained on, ascending.
    pub fn train_rows(&self) -> &[u32] {
        &self.train
    }

    /// Rows that are held out, ascending.
    pub fn held_out_rows(&self) -> &[u32] {
        &self.held_out
    }

    /// Rows left out because they have no anchor candidate.
    pub fn rows_without_anchor(&self) -> usize {
        self.without_anchor
    }

    /// Rows that are cut.
    pub fn rows_cut(&self) -> usize {
        self.cut
    }

    /// Tokens of a sample after cutting.
    pub fn length(&self, sample: u32) -> u32 {
        self.lengths[sample as usize]
    }

    /// The batches of an epoch, in order.
    pub fn epoch(&self, epoch: u32) -> Arc<Vec<Group>> {
        if let Some(list) = self.lock().epochs.get(&epoch) {
            return list.clone();
        }
        let c = &self.config;
        let limits = Limits { budget: c.budget, max_rows: c.max_rows, batching: c.batching };
        let samples = if epoch == HELD_OUT_EPOCH { &self.held_out } else { &self.train };
        let list = Arc::new(pack(samples, |s| self.lengths[s as usize], &self.buckets, limits, c.seed, epoch));
        let mut cache = self.lock();
        cache.epochs.insert(epoch, list.clone());
        while cache.epochs.len() > EPOCHS_KEPT {
            // Runs move forward, so the oldest epoch goes; the held-out one has the largest number and stays.
            cache.epochs.pop_first();
        }
        list
    }

    /// The held-out batches.
    pub fn held_out(&self) -> Arc<Vec<Group>> {
        self.epoch(HELD_OUT_EPOCH)
    }

    /// Number of batches in epoch `epoch`.
    pub fn epoch_batches(&self, epoch: u32) -> u64 {
        loop {
            let next = {
                let cache = self.lock();
                if let Some(&n) = cache.counts.get(epoch as usize) {
                    return n;
                }
                cache.counts.len() as u32
            };
            let n = self.epoch(next).len() as u64;
            let mut cache = self.lock();
            if cache.counts.len() == next as usize {
                cache.counts.push(n);
            }
        }
    }

    /// Number of batches in the first `epochs` epochs.
    pub fn total_batches(&self, epochs: u32) -> u64 {
        (0..epochs).map(|e| self.epoch_batches(e)).sum()
    }

    /// Where batch `i` of the run lies.
    pub fn locate(&self, i: u64) -> Location {
        let (mut epoch, mut index) = (0, i);
        loop {
            let epoch_batches = self.epoch_batches(epoch);
            if index < epoch_batches {
                return Location { epoch, index, epoch_batches };
            }
            index -= epoch_batches;
            epoch += 1;
        }
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Cache> {
        // The cache holds only values that any thread would compute alike, so a panic elsewhere leaves it usable.
        self.cache.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }
}
