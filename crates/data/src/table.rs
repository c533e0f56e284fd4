//! The start-up table: what the run will see, per bucket and in all, before a single batch is trained.
//!
//! Coverage (the share of supervised tokens that are the label of some block) needs the batches themselves; it is exact for
//! small runs and otherwise estimated from evenly spread batches, and the table says which.

use std::collections::HashSet;
use std::fmt;

use serde::Serialize;

use crate::batch::BatchBuilder;
use crate::error::Result;

/// One bucket of the table.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct BucketLine {
    /// Smallest length, tokens.
    pub from: u32,
    /// First length beyond, tokens.
    pub to: u32,
    /// Batches of epoch 0 that were begun in this bucket.
    pub batches: u64,
    /// Their share of all batches.
    pub share: f64,
}

/// What epoch 0 holds.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct StartTable {
    /// Samples trained on.
    pub samples: usize,
    /// Samples held out.
    pub held_out: usize,
    /// Held-out batches.
    pub held_out_batches: usize,
    /// Samples without an anchor, left out.
    pub without_anchor: usize,
    /// Samples that are cut.
    pub cut: usize,
    /// Batches.
    pub batches: u64,
    /// Fewest rows in a batch.
    pub rows_min: usize,
    /// Most rows in a batch.
    pub rows_max: usize,
    /// Rows per batch on average.
    pub rows_mean: f64,
    /// Real tokens over batches × budget.
    pub fill: f64,
    /// Share of supervised tokens that are the label of at least one block in the epoch.
    pub coverage: f64,
    /// Blocks per batch on average.
    pub blocks_mean: f64,
    /// Batches that coverage and blocks were computed from; equal to `batches` when exact.
    pub sampled: u64,
    /// Per bucket.
    pub buckets: Vec<BucketLine>,
}

impl StartTable {
    /// Computes the table from epoch 0. At most `sample_batches` batches are built for coverage, spread evenly.
    ///
    /// # Errors
    /// When a batch cannot be built.
    pub fn compute(builder: &BatchBuilder, sample_batches: u64) -> Result<Self> {
        let schedule = builder.schedule();
        let list = schedule.epoch(0);
        let batches = list.len() as u64;
        let sampled = sample_batches.clamp(1, batches);
        let (mut covered, mut supervised, mut blocks) = (0u64, 0u64, 0u64);
        for j in 0..sampled {
            let batch = builder.build(j * batches / sampled)?;
            let b = builder.shape().block;
            let mut labels: HashSet<i32> = HashSet::new();
            for micro in &batch.micros {
                for &row in &micro.rows[..micro.n_rows] {
                    let (m, k) = (row as usize / b, row % b as i32);
                    labels.insert(micro.ctx_start[m] + micro.anchor[m] + k);
                }
            }
            covered += labels.len() as u64;
            supervised += batch.n_supervised as u64;
            blocks += batch.n_blocks as u64;
        }
        let rows = |f: fn(usize, usize) -> usize| list.iter().map(|g| g.samples.len()).reduce(f).unwrap_or(0);
        let tokens: u64 = list.iter().map(|g| u64::from(g.tokens)).sum();
        let edges = schedule.buckets().edges();
        let lines = (0..schedule.buckets().len())
            .map(|b| {
                let n = list.iter().filter(|g| g.bucket == b).count() as u64;
                BucketLine { from: edges[b], to: edges[b + 1], batches: n, share: n as f64 / batches.max(1) as f64 }
            })
            .collect();
        Ok(Self {
            samples: schedule.train_rows().len(),
            held_out: schedule.held_out_rows().len(),
            held_out_batches: schedule.held_out().len(),
            without_anchor: schedule.rows_without_anchor(),
            cut: schedule.rows_cut(),
            batches,
            rows_min: rows(usize::min),
            rows_max: rows(usize::max),
            rows_mean: schedule.train_rows().len() as f64 / batches.max(1) as f64,
            fill: tokens as f64 / (batches.max(1) * u64::from(schedule.config().budget)) as f64,
            coverage: covered as f64 / supervised.max(1) as f64,
            blocks_mean: blocks as f64 / sampled as f64,
            sampled,
            buckets: lines,
        })
    }
}

impl fmt::Display for StartTable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "samples    {} (Arrow-backed, lazy), {} held out in {} batches",
            self.samples, self.held_out, self.held_out_batches
        )?;
        if self.without_anchor > 0 {
            writeln!(f, "left out   {} samples without an anchor", self.without_anchor)?;
        }
        if self.cut > 0 {
            writeln!(f, "cut        {} samples", self.cut)?;
        }
        writeln!(
            f,
            "batches    {} per epoch, {} to {} rows, {:.1} on average",
            self.batches, self.rows_min, self.rows_max, self.rows_mean
        )?;
        for b in &self.buckets {
            writeln!(f, "  {:>6} to {:>6} tokens  {:>8} batches  {:>5.1} %", b.from, b.to - 1, b.batches, 100.0 * b.share)?;
        }
        writeln!(f, "fill       {:.2} %", 100.0 * self.fill)?;
        let how = if self.sampled == self.batches {
            "exact".to_owned()
        } else {
            format!("estimated from {} of {} batches", self.sampled, self.batches)
        };
        write!(
            f,
            "coverage   {:.1} % of supervised tokens are a label in one epoch, {:.0} blocks per batch ({how})",
            100.0 * self.coverage,
            self.blocks_mean
        )
    }
}
