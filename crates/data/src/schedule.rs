//! Which samples are in batch i of the run, for every i, without any state to save.
//!
//! Epoch e is a list of batches computed from (dataset lengths, settings, seed, e); batch indices run on over epochs.
//! It refuses samples longer than the budget (by row, unless they are to be cut) and datasets without an anchor.
//! Invariants: held-out rows are in no training batch; rows that have no anchor candidate once they are cut are in no
//! batch, and are counted; the answer for an index is the same whoever asks, in whatever order.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, OnceLock};

use rayon::prelude::*;
use serde::{Deserialize, Serialize};

use crate::buckets::{Batching, Buckets, Group, Limits, pack};
use crate::dataset::{Dataset, Row};
use crate::error::{DataError, Result};
use crate::index::count_candidates;
use crate::rng::{CounterRng, Stream};

/// The epoch number that keys held-out batches and their anchors, which are the same in every epoch.
pub const HELD_OUT_EPOCH: u32 = u32::MAX;
/// Epoch lists kept in memory: the current one and its neighbours, which threads at an epoch's end ask for in turn.
const EPOCHS_KEPT: usize = 3;

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
    held_out_batches: OnceLock<Arc<Vec<Group>>>,
    cache: Mutex<Cache>,
}

/// The batches of an epoch, packed by the first thread that asks while the others wait.
type Packed = Arc<OnceLock<Arc<Vec<Group>>>>;

#[derive(Debug, Default)]
struct Cache {
    /// Number of batches of epochs 0, 1, 2 …
    counts: Vec<u64>,
    /// Epoch → its batches.
    epochs: BTreeMap<u32, Packed>,
}

impl Schedule {
    /// Plans the order over the rows of `dataset`. Only rows that are cut are read, to see which anchors are left of them.
    ///
    /// # Errors
    /// When a sample is longer than the budget, nothing has an anchor, the held-out rows leave nothing to train on, or a
    /// row that is cut cannot be read.
    pub fn new(dataset: &Dataset, config: ScheduleConfig) -> Result<Self> {
        if config.budget == 0 || config.max_rows == 0 {
            return Err(DataError::Config {
                key: "batch.token_budget",
                what: "a batch must have room for a token and a row".into(),
                todo: "set batch.token_budget and batch.max_rows to at least 1".into(),
            });
        }
        let mut lengths = dataset.index().lengths.clone();
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
        let candidates = candidates_after_cut(dataset, &lengths)?;
        let mut eligible: Vec<u32> = (0..lengths.len() as u32).filter(|&s| candidates[s as usize] > 0).collect();
        let without_anchor = lengths.len() - eligible.len();
        if eligible.is_empty() {
            let what = format!("no row has an anchor: none of {} rows has two supervised tokens in a row", lengths.len());
            return Err(match cut {
                0 => DataError::Refused { what, todo: "use chats with longer answers".into() },
                _ => DataError::Refused {
                    what: format!("{what} ({cut} of them after being cut to {limit} tokens)"),
                    todo: "cut less, with a larger batch.max_length or batch.token_budget, or use chats with longer answers"
                        .into(),
                },
            });
        }
        let n_held = held_out_count(config.held_out, eligible.len(), lengths.len())?;
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
        Ok(Self {
            config,
            lengths,
            buckets,
            train: eligible,
            held_out,
            without_anchor,
            cut,
            held_out_batches: OnceLock::new(),
            cache: Mutex::default(),
        })
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

    /// Rows left out because they have no anchor candidate, be it that they were cut before their answer.
    pub fn rows_without_anchor(&self) -> usize {
        self.without_anchor
    }

    /// Rows that are cut, those that are left out for it included.
    pub fn rows_cut(&self) -> usize {
        self.cut
    }

    /// Tokens of a sample after cutting.
    pub fn length(&self, sample: u32) -> u32 {
        self.lengths[sample as usize]
    }

    /// The batches of an epoch, in order.
    pub fn epoch(&self, epoch: u32) -> Arc<Vec<Group>> {
        if epoch == HELD_OUT_EPOCH {
            return self.held_out();
        }
        let packed = {
            let epochs = &mut self.lock().epochs;
            let packed = epochs.entry(epoch).or_default().clone();
            while epochs.len() > EPOCHS_KEPT {
                // Counting the batches of a run leaves its last epochs here, and the threads that prefetch ask for
                // neighbours: what lies farthest from the epoch asked for is needed last, the earlier one never.
                let Some(&far) = epochs.keys().max_by_key(|&&e| (e.abs_diff(epoch), Reverse(e))) else { break };
                epochs.remove(&far);
            }
            packed
        };
        packed.get_or_init(|| self.pack(&self.train, epoch)).clone()
    }

    /// The held-out batches.
    pub fn held_out(&self) -> Arc<Vec<Group>> {
        self.held_out_batches.get_or_init(|| self.pack(&self.held_out, HELD_OUT_EPOCH)).clone()
    }

    fn pack(&self, samples: &[u32], epoch: u32) -> Arc<Vec<Group>> {
        let c = &self.config;
        let limits = Limits { budget: c.budget, max_rows: c.max_rows, batching: c.batching };
        Arc::new(pack(samples, |s| self.lengths[s as usize], &self.buckets, limits, c.seed, epoch))
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

/// Anchor candidates of every row at its length in the run, `[rows]`. The index knows those of whole rows only.
fn candidates_after_cut(dataset: &Dataset, lengths: &[u32]) -> Result<Vec<u32>> {
    let index = dataset.index();
    let count = |row: &mut Row, s: usize| {
        let (length, whole) = (lengths[s], index.candidates[s]);
        if length == index.lengths[s] || whole == 0 {
            return Ok(whole);
        }
        dataset.read_row(s, row)?;
        Ok(count_candidates(&row.mask[..length as usize]) as u32)
    };
    (0..lengths.len()).into_par_iter().map_init(Row::default, count).collect()
}

/// How many of `usable` rows (those with an anchor, of `rows`) are held out; at least one is left to train on.
fn held_out_count(held_out: HeldOut, usable: usize, rows: usize) -> Result<usize> {
    let refuse = |what, todo: &str| Err(DataError::Config { key: "eval.held_out", what, todo: todo.into() });
    let n = match held_out {
        HeldOut::None => 0,
        HeldOut::Rows(n) => n,
        HeldOut::Share(share) if (0.0..1.0).contains(&share) => (share * usable as f64).ceil() as usize,
        HeldOut::Share(share) => {
            return refuse(format!("{share} is not a share below 1"), "write a number of rows, or a share such as 0.01");
        }
    };
    if n < usable {
        return Ok(n);
    }
    if usable == 1 {
        return refuse(
            format!("the dataset has one row with an anchor (of {rows} in all), so none can be held out"),
            "prepare more chats, or set eval.held_out = \"none\"",
        );
    }
    refuse(
        format!(
            "{n} rows are to be held out, but the dataset has {usable} with an anchor (of {rows} in all): nothing to train on"
        ),
        "hold out fewer rows, e.g. eval.held_out = { share = 0.05 }, or prepare more chats",
    )
}
