//! Builds batches: the index arrays that devices take, at shapes that the config fixes.
//!
//! Everything that depends on data is drawn here, on the CPU: tokens, positions, anchors, block → sample map, labels,
//! weights, and the compaction of supervised draft rows. It refuses a row that disagrees with the index, an id without an
//! embedding row, and a block size without a known decay. Invariants: batch i is the same whenever and wherever it is
//! built; blocks are sorted by (packed row, anchor); padding carries weight 0 and is never among `rows[..n_rows]`.

use std::sync::Arc;

use crate::anchors::{candidates, choose_anchors, decay_gamma, scale_requests, slot_weights};
use crate::buckets::Group;
use crate::dataset::{Dataset, Row};
use crate::error::{DataError, Result};
use crate::schedule::{HELD_OUT_EPOCH, Schedule};

/// Shapes and rules of draft blocks.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct BlockShape {
    /// B: tokens per block, the anchor included.
    pub block: usize,
    /// M: blocks per micro-batch.
    pub micro_blocks: usize,
    /// N: blocks per batch at most. DESIGN's default is [`default_max_blocks`].
    pub max_blocks: usize,
    /// Anchors per sample at most (512 by default).
    pub max_anchors: u32,
    /// γ; see [`decay_gamma`].
    pub gamma: Option<f64>,
    /// Token id of masked slots.
    pub mask_token: u32,
    /// Embedding rows of the target.
    pub vocab_size: u32,
}

/// N when the config names none: a sixth of the token budget, at least 1.
pub fn default_max_blocks(budget: u32) -> usize {
    (budget as usize / 6).max(1)
}

/// One batch. Tokens are packed: sample s occupies rows `cu_seqlens[s]..cu_seqlens[s + 1]`.
#[derive(Debug, Clone, PartialEq)]
pub struct Batch {
    /// Index over the run, or among the held-out batches.
    pub index: u64,
    /// Epoch (0 for held-out batches, which have none).
    pub epoch: u32,
    /// A held-out batch: forward only.
    pub held_out: bool,
    /// Token ids, `[budget]`, 0 after `n_tokens`.
    pub tokens: Vec<i32>,
    /// Position inside the sample, `[budget]`, 0 after `n_tokens`.
    pub positions: Vec<i32>,
    /// Borders of samples, `[max_rows + 1]`; entries after the last are `n_tokens`.
    pub cu_seqlens: Vec<i32>,
    /// Samples.
    pub n_seqs: usize,
    /// Real tokens.
    pub n_tokens: usize,
    /// Blocks over all micro-batches.
    pub n_blocks: usize,
    /// Supervised tokens in the packed samples.
    pub n_supervised: usize,
    /// Dataset rows, in packed order, `[n_seqs]`.
    pub sample_ids: Vec<u32>,
    /// Σ of all label weights.
    pub weight_sum: f64,
    /// ceil(n_blocks / M) micro-batches.
    pub micros: Vec<MicroBatch>,
}

/// M draft blocks. Draft row r = m·B + k is slot k of block m.
#[derive(Debug, Clone, PartialEq)]
pub struct MicroBatch {
    /// Real blocks; the rest is padding.
    pub n_blocks: usize,
    /// Input ids, `[M·B]`: the anchor's token, then mask tokens (mask tokens only in padded blocks).
    pub ids: Vec<i32>,
    /// Positions anchor + k, `[M·B]` (k in padded blocks).
    pub positions: Vec<i32>,
    /// Packed row of the first token of the block's sample, `[M]`.
    pub ctx_start: Vec<i32>,
    /// Anchor position, which is also the number of context rows that the block sees, `[M]`; 0 in padded blocks.
    pub anchor: Vec<i32>,
    /// Draft rows with weight > 0, ascending, `[M·(B-1)]`, 0 after `n_rows`.
    pub rows: Vec<i32>,
    /// Draft row → index into `rows`, or -1, `[M·B]`.
    pub inverse: Vec<i32>,
    /// Label token of draft row `rows[i]`, `[M·(B-1)]`, 0 after `n_rows`.
    pub labels: Vec<i32>,
    /// Weight of draft row `rows[i]`, `[M·(B-1)]`, 0 after `n_rows`.
    pub weights: Vec<f32>,
    /// Entries of `rows` that count.
    pub n_rows: usize,
}

impl MicroBatch {
    fn padded(shape: &BlockShape) -> Self {
        let (m, b) = (shape.micro_blocks, shape.block);
        Self {
            n_blocks: 0,
            ids: vec![shape.mask_token as i32; m * b],
            positions: (0..m * b).map(|r| (r % b) as i32).collect(),
            ctx_start: vec![0; m],
            anchor: vec![0; m],
            rows: vec![0; m * (b - 1)],
            inverse: vec![-1; m * b],
            labels: vec![0; m * (b - 1)],
            weights: vec![0.0; m * (b - 1)],
            n_rows: 0,
        }
    }

    /// Adds a block; returns the weights' sum.
    fn push(&mut self, shape: &BlockShape, slot_weights: &[f32], row: &Row, ctx_start: usize, anchor: usize) -> f64 {
        let (m, b) = (self.n_blocks, shape.block);
        self.ctx_start[m] = ctx_start as i32;
        self.anchor[m] = anchor as i32;
        self.ids[m * b] = row.ids[anchor];
        for k in 0..b {
            self.positions[m * b + k] = (anchor + k) as i32;
        }
        let mut sum = 0.0;
        for k in 1..b {
            if row.mask.get(anchor + k).is_none_or(|&mask| mask == 0) {
                continue;
            }
            self.labels[self.n_rows] = row.ids[anchor + k];
            self.weights[self.n_rows] = slot_weights[k - 1];
            sum += f64::from(slot_weights[k - 1]);
            self.rows[self.n_rows] = (m * b + k) as i32;
            self.inverse[m * b + k] = self.n_rows as i32;
            self.n_rows += 1;
        }
        self.n_blocks += 1;
        sum
    }
}

/// Builds any batch of a run; shared by prefetching threads.
#[derive(Debug, Clone)]
pub struct BatchBuilder {
    dataset: Arc<Dataset>,
    schedule: Arc<Schedule>,
    shape: BlockShape,
    slot_weights: Arc<[f32]>,
}

impl BatchBuilder {
    /// Prepares to build batches of `schedule` over `dataset`.
    ///
    /// # Errors
    /// When the shape cannot work, γ is required, or the dataset has ids without an embedding row.
    pub fn new(dataset: Arc<Dataset>, schedule: Arc<Schedule>, shape: BlockShape) -> Result<Self> {
        let positive = [("drafter.block_size", shape.block, 2), ("batch.micro_blocks", shape.micro_blocks, 1)];
        for (key, value, least) in positive.into_iter().chain([("batch.max_blocks", shape.max_blocks, 1)]) {
            if value < least {
                return Err(DataError::Config {
                    key,
                    what: format!("{value} is too small"),
                    todo: format!("set it to at least {least}"),
                });
            }
        }
        if shape.mask_token >= shape.vocab_size {
            return Err(DataError::Config {
                key: "drafter.mask_token_id",
                what: format!("{} has no embedding row; the target has {}", shape.mask_token, shape.vocab_size),
                todo: "choose a smaller id".into(),
            });
        }
        dataset.check_vocab(shape.vocab_size)?;
        let gamma = decay_gamma(shape.block, shape.gamma)?;
        Ok(Self { dataset, schedule, shape, slot_weights: slot_weights(shape.block, gamma).into() })
    }

    /// The order of the run.
    pub fn schedule(&self) -> &Schedule {
        &self.schedule
    }

    /// The dataset.
    pub fn dataset(&self) -> &Dataset {
        &self.dataset
    }

    /// Shapes and rules of draft blocks.
    pub fn shape(&self) -> &BlockShape {
        &self.shape
    }

    /// Batch `i` of the run.
    ///
    /// # Errors
    /// When a row cannot be read.
    pub fn build(&self, i: u64) -> Result<Batch> {
        let at = self.schedule.locate(i);
        let list = self.schedule.epoch(at.epoch);
        self.assemble(&list[at.index as usize], i, at.epoch, false)
    }

    /// Held-out batch `j` (there are `schedule().held_out().len()`), with the same anchors each time.
    ///
    /// # Errors
    /// When there is no such batch or a row cannot be read.
    pub fn build_held_out(&self, j: u64) -> Result<Batch> {
        let list = self.schedule.held_out();
        let group = list.get(j as usize).ok_or_else(|| DataError::Config {
            key: "eval.held_out",
            what: format!("there is no held-out batch {j}; there are {}", list.len()),
            todo: "hold out rows, e.g. eval.held_out = { share = 0.01 }".into(),
        })?;
        self.assemble(group, j, HELD_OUT_EPOCH, true)
    }

    fn assemble(&self, group: &Group, index: u64, epoch: u32, held_out: bool) -> Result<Batch> {
        let config = self.schedule.config();
        let shape = &self.shape;
        let mut batch = Batch {
            index,
            epoch: if held_out { 0 } else { epoch },
            held_out,
            tokens: vec![0; config.budget as usize],
            positions: vec![0; config.budget as usize],
            cu_seqlens: vec![0; config.max_rows + 1],
            n_seqs: group.samples.len(),
            n_tokens: 0,
            n_blocks: 0,
            n_supervised: 0,
            sample_ids: group.samples.clone(),
            weight_sum: 0.0,
            micros: Vec::new(),
        };
        let mut rows = Vec::with_capacity(group.samples.len());
        let mut found = Vec::with_capacity(group.samples.len());
        for (s, &sample) in group.samples.iter().enumerate() {
            let mut row = Row::default();
            self.dataset.read_row(sample as usize, &mut row)?;
            let length = self.schedule.length(sample) as usize;
            row.ids.truncate(length);
            row.mask.truncate(length);
            let at = batch.n_tokens;
            batch.tokens[at..at + length].copy_from_slice(&row.ids);
            for (position, to) in batch.positions[at..at + length].iter_mut().enumerate() {
                *to = position as i32;
            }
            batch.n_tokens += length;
            batch.cu_seqlens[s + 1] = batch.n_tokens as i32;
            batch.n_supervised += row.mask.iter().filter(|&&m| m == 1).count();
            found.push(candidates(&row.mask));
            rows.push(row);
        }
        batch.cu_seqlens[group.samples.len() + 1..].fill(batch.n_tokens as i32);
        let mut requests: Vec<u32> = found.iter().map(|c| (c.len() as u32).min(shape.max_anchors)).collect();
        scale_requests(&mut requests, shape.max_blocks as u32);
        let per_sample = found.into_iter().zip(&requests).zip(&group.samples).zip(&rows);
        for (s, (((candidates, &count), &sample), row)) in per_sample.enumerate() {
            let start = batch.cu_seqlens[s] as usize;
            for anchor in choose_anchors(candidates, count as usize, config.seed, epoch, u64::from(sample)) {
                let micro = match batch.micros.last_mut() {
                    Some(micro) if micro.n_blocks < shape.micro_blocks => micro,
                    _ => {
                        batch.micros.push(MicroBatch::padded(shape));
                        let last = batch.micros.len() - 1;
                        &mut batch.micros[last]
                    }
                };
                batch.weight_sum += micro.push(shape, &self.slot_weights, row, start, anchor as usize);
                batch.n_blocks += 1;
            }
        }
        Ok(batch)
    }
}
