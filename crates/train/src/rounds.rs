//! Which batches an optimizer step trains.
//!
//! Job: step → (epoch, first batch, count). Step s of an epoch trains G consecutive batches of it; an epoch's last step may be short, so no step
//! mixes epochs. Refuses nothing. Invariant: every batch of every epoch belongs to exactly one step, in order.

/// Where a step lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Round {
    /// Epoch, from 0.
    pub epoch: u32,
    /// First batch, by its index over the run.
    pub first: u64,
    /// Batches of the step: G, or fewer at an epoch's end.
    pub count: u64,
    /// Batch inside the epoch after this step.
    pub epoch_done: u64,
}

/// The steps of a run: epochs of possibly different numbers of batches, cut into steps of at most G.
pub struct Rounds<F> {
    epoch_batches: F,
    global_batch: u64,
    /// Per known epoch: its first step and first batch.
    starts: Vec<(u64, u64)>,
}

impl<F: Fn(u32) -> u64> Rounds<F> {
    /// `epoch_batches(e)` is the number of batches in epoch e, at least 1.
    pub fn new(epoch_batches: F, global_batch: u64) -> Self {
        assert!(global_batch > 0, "a step trains at least one batch");
        Rounds { epoch_batches, global_batch, starts: vec![(0, 0)] }
    }

    /// Steps of the first `epochs` epochs.
    pub fn total_steps(&mut self, epochs: u32) -> u64 {
        while self.starts.len() <= epochs as usize {
            self.extend();
        }
        self.starts[epochs as usize].0
    }

    /// The batches of step `step`.
    pub fn locate(&mut self, step: u64) -> Round {
        while self.starts.last().expect("never empty").0 <= step {
            self.extend();
        }
        let epoch = self.starts.partition_point(|&(s, _)| s <= step) - 1;
        let (first_step, first_batch) = self.starts[epoch];
        let offset = (step - first_step) * self.global_batch;
        let end = self.starts[epoch + 1].1 - first_batch;
        let count = self.global_batch.min(end - offset);
        Round { epoch: epoch as u32, first: first_batch + offset, count, epoch_done: offset + count }
    }

    fn extend(&mut self) {
        let epoch = self.starts.len() as u32 - 1;
        let &(step, batch) = self.starts.last().expect("never empty");
        let n = (self.epoch_batches)(epoch);
        assert!(n > 0, "epoch {epoch} has no batch");
        self.starts.push((step + n.div_ceil(self.global_batch), batch + n));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn every_batch_is_in_exactly_one_step(epochs in proptest::collection::vec(1u64..40, 1..6), g in 1u64..9) {
            let n = epochs.clone();
            let mut rounds = Rounds::new(move |e| n[e as usize % n.len()], g);
            let total: u64 = epochs.iter().sum();
            let steps = rounds.total_steps(epochs.len() as u32);
            let mut next = 0;
            for step in 0..steps {
                let r = rounds.locate(step);
                prop_assert_eq!(r.first, next);
                prop_assert!(r.count >= 1 && r.count <= g);
                next += r.count;
            }
            prop_assert_eq!(next, total);
            prop_assert_eq!(rounds.locate(steps).epoch as usize, epochs.len());
        }
    }
}
