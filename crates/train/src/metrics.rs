//! What a step's row results mean: accuracy and label probability per slot, expected acceptance, loss of a held-out pass.
//!
//! Job: fold per-row hits and probabilities of micro-batches into [`Tally`], which adds up over batches and ranks. Refuses devices.
//! Invariant: a tally depends on the rows alone; adding tallies in any order gives the same counts (sums of floats are taken in f64).

use drafthorse_data::batch::MicroBatch;

/// Counts and sums over blocks; the state of a mean.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Tally {
    /// Per slot 1..B-1: rows with a label.
    pub rows: Vec<u64>,
    /// Per slot: rows whose argmax was the label.
    pub hits: Vec<u64>,
    /// Per slot: Σ probability of the label.
    pub prob: Vec<f64>,
    /// Σ over blocks of the accepted prefix.
    pub accepted: u64,
    /// Blocks with at least one label.
    pub blocks: u64,
    /// Σ w·CE.
    pub loss_sum: f64,
    /// Σ w.
    pub weight_sum: f64,
}

/// Results of one micro-batch, `[M·(B-1)]` each, of which the batch's `n_rows` count.
pub struct RowResults<'a> {
    /// Cross-entropy.
    pub ce: &'a [f32],
    /// Probability of the label.
    pub prob: &'a [f32],
    /// 1 where the argmax is the label.
    pub hit: &'a [i32],
}

impl Tally {
    /// Empty, for blocks of `block` tokens.
    pub fn new(block: usize) -> Tally {
        Tally { rows: vec![0; block - 1], hits: vec![0; block - 1], prob: vec![0.0; block - 1], ..Tally::default() }
    }

    /// Adds one micro-batch.
    ///
    /// Expected acceptance (DESIGN 1): 1 + mean over blocks with a valid slot of Σ_k Π_{i≤k} (hit_i or not valid_i) · valid_k.
    pub fn add_micro(&mut self, micro: &MicroBatch, results: &RowResults<'_>) {
        let size = self.rows.len() + 1;
        let mut row = 0;
        while row < micro.n_rows {
            let block = micro.rows[row] as usize / size;
            let (mut open, mut accepted) = (true, 0);
            while row < micro.n_rows && micro.rows[row] as usize / size == block {
                let slot = micro.rows[row] as usize % size - 1;
                let hit = results.hit[row] == 1;
                self.rows[slot] += 1;
                self.hits[slot] += u64::from(hit);
                self.prob[slot] += f64::from(results.prob[row]);
                self.loss_sum += f64::from(micro.weights[row]) * f64::from(results.ce[row]);
                self.weight_sum += f64::from(micro.weights[row]);
                open &= hit;
                accepted += u64::from(open);
                row += 1;
            }
            self.blocks += 1;
            self.accepted += accepted;
        }
    }

    /// Adds another tally of the same block size.
    pub fn merge(&mut self, other: &Tally) {
        for i in 0..self.rows.len() {
            self.rows[i] += other.rows[i];
            self.hits[i] += other.hits[i];
            self.prob[i] += other.prob[i];
        }
        self.accepted += other.accepted;
        self.blocks += other.blocks;
        self.loss_sum += other.loss_sum;
        self.weight_sum += other.weight_sum;
    }

    /// Share of right argmaxes per slot; 0 for a slot without rows.
    pub fn accuracy(&self) -> Vec<f32> {
        self.rows.iter().zip(&self.hits).map(|(&n, &h)| if n == 0 { 0.0 } else { h as f32 / n as f32 }).collect()
    }

    /// Mean probability of the label per slot; 0 for a slot without rows.
    pub fn label_probability(&self) -> Vec<f32> {
        self.rows.iter().zip(&self.prob).map(|(&n, &p)| if n == 0 { 0.0 } else { (p / n as f64) as f32 }).collect()
    }

    /// 1 + mean accepted prefix; 1 without blocks.
    pub fn expected_acceptance(&self) -> f64 {
        if self.blocks == 0 { 1.0 } else { 1.0 + self.accepted as f64 / self.blocks as f64 }
    }

    /// Σ w·CE / Σ w; NaN without rows.
    pub fn loss(&self) -> f64 {
        self.loss_sum / self.weight_sum
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn micro(rows: &[i32]) -> MicroBatch {
        MicroBatch {
            n_blocks: 3,
            ids: vec![],
            positions: vec![],
            ctx_start: vec![],
            anchor: vec![],
            rows: rows.to_vec(),
            inverse: vec![],
            labels: vec![],
            weights: vec![1.0; rows.len()],
            n_rows: rows.len(),
        }
    }

    #[test]
    fn the_accepted_prefix_ignores_slots_without_label() {
        // Block 0 has slots 1, 2, 3; block 1 only slots 1 and 3 (slot 2 is unlabelled and breaks nothing); block 2 has none.
        let batch = micro(&[1, 2, 3, 5, 7]);
        let hit = [1, 0, 1, 1, 1];
        let (ce, prob) = ([0.5; 5], [0.25; 5]);
        let mut tally = Tally::new(4);
        tally.add_micro(&batch, &RowResults { ce: &ce, prob: &prob, hit: &hit });
        assert_eq!((tally.blocks, tally.accepted), (2, 1 + 2));
        assert_eq!(tally.expected_acceptance(), 2.5);
        assert_eq!(tally.accuracy(), [1.0, 0.0, 1.0]);
        assert_eq!(tally.loss(), 0.5);
        let mut twice = tally.clone();
        twice.merge(&tally);
        assert_eq!((twice.expected_acceptance(), twice.accuracy()), (2.5, tally.accuracy()));
    }
}
