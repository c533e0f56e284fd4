//! Length buckets and the two batching rules: samples of similar length → lists of samples that fit the token budget.
//!
//! It refuses to pad: what the padded rule costs shows in the fill ratio, while device arrays hold real tokens only.
//! Invariants: every sample given is in exactly one batch; every batch keeps the budget of its rule and the maximum of rows;
//! the result is a function of the lengths, the settings, the seed and the epoch alone.

use std::collections::BTreeSet;

use serde::{Deserialize, Serialize};

use crate::error::{DataError, Result};
use crate::rng::{CounterRng, Stream};

/// How samples share a batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Batching {
    /// Samples lie behind one another: the sum of lengths keeps the budget.
    #[default]
    Packed,
    /// The older rule: rows × longest keeps the budget, with at most 64 rows.
    Padded,
}

/// Most rows of a padded batch.
pub const PADDED_ROWS: usize = 64;

/// Ranges of length, ascending: bucket b holds `edges[b] ≤ length < edges[b + 1]`; the last one has no upper bound.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Buckets {
    edges: Vec<u32>,
}

impl Buckets {
    /// Buckets between the given ascending edges. Samples below the first edge belong to the first bucket, samples at or
    /// above the last edge to the last.
    ///
    /// # Errors
    /// When there are fewer than two edges or they do not ascend.
    pub fn from_edges(edges: &[u32]) -> Result<Self> {
        if edges.len() < 2 || edges.windows(2).any(|w| w[0] >= w[1]) {
            return Err(DataError::Config {
                key: "batch.bucket_edges",
                what: format!("{edges:?} is not an ascending list of at least two lengths"),
                todo: "write e.g. [0, 770, 1216, 1728, 2432, 3296, 8193], or leave the key out".into(),
            });
        }
        Ok(Self { edges: edges.to_vec() })
    }

    /// At most `n` buckets that hold about equally many samples each.
    pub fn quantiles(mut lengths: Vec<u32>, n: usize) -> Self {
        lengths.sort_unstable();
        let top = lengths.last().map_or(1, |&l| l + 1);
        let mut edges = vec![0];
        for q in 1..n.max(1) {
            let edge = lengths.get(lengths.len() * q / n.max(1)).copied().unwrap_or(0);
            if edge > *edges.last().unwrap_or(&0) && edge < top {
                edges.push(edge);
            }
        }
        edges.push(top);
        Self { edges }
    }

    /// The edges, one more than buckets.
    pub fn edges(&self) -> &[u32] {
        &self.edges
    }

    /// Number of buckets.
    pub fn len(&self) -> usize {
        self.edges.len() - 1
    }

    /// There is always a bucket.
    pub fn is_empty(&self) -> bool {
        false
    }

    /// The bucket of a length.
    pub fn of(&self, length: u32) -> usize {
        self.edges[1..self.edges.len() - 1].partition_point(|&e| e <= length)
    }
}

/// Limits of a batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Tokens.
    pub budget: u32,
    /// Samples.
    pub max_rows: usize,
    /// The rule.
    pub batching: Batching,
}

/// The samples of one batch.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Group {
    /// Samples in packed order.
    pub samples: Vec<u32>,
    /// Real tokens.
    pub tokens: u32,
    /// Longest sample.
    pub longest: u32,
    /// The bucket of its first, longest-bucket sample.
    pub bucket: usize,
}

impl Group {
    fn push(&mut self, sample: u32, length: u32) {
        self.samples.push(sample);
        self.tokens += length;
        self.longest = self.longest.max(length);
    }
}

/// Packs `samples` (ids into `length_of`, each within the budget) for one epoch, in shuffled order.
pub fn pack(
    samples: &[u32],
    length_of: impl Fn(u32) -> u32,
    buckets: &Buckets,
    limits: Limits,
    seed: u64,
    epoch: u32,
) -> Vec<Group> {
    let mut members = vec![Vec::new(); buckets.len()];
    for &s in samples {
        members[buckets.of(length_of(s))].push(s);
    }
    let mut packer = Packer { limits, groups: Vec::new(), rooms: BTreeSet::new() };
    // From long to short, so that what a bucket leaves open is filled up by shorter samples.
    for (bucket, mut list) in members.into_iter().enumerate().rev() {
        CounterRng::new(seed, Stream::SampleOrder, epoch, bucket as u64).shuffle(&mut list);
        for sample in list {
            match limits.batching {
                Batching::Packed => packer.best_fit(sample, length_of(sample), bucket),
                Batching::Padded => packer.next_fit(sample, length_of(sample), bucket),
            }
        }
    }
    CounterRng::new(seed, Stream::BatchOrder, epoch, 0).shuffle(&mut packer.groups);
    packer.groups
}

struct Packer {
    limits: Limits,
    groups: Vec<Group>,
    /// (tokens left, group) of every group that takes more samples; packed rule only.
    rooms: BTreeSet<(u32, usize)>,
}

impl Packer {
    /// Puts the sample where it leaves the least room, which is a group of its own bucket as long as one of those takes it.
    fn best_fit(&mut self, sample: u32, length: u32, bucket: usize) {
        let (room, at) = match self.rooms.range((length, 0)..).next().copied() {
            Some(found) => {
                self.rooms.remove(&found);
                found
            }
            None => (self.limits.budget, self.open(bucket)),
        };
        self.groups[at].push(sample, length);
        if self.groups[at].samples.len() < self.limits.max_rows && room > length {
            self.rooms.insert((room - length, at));
        }
    }

    /// Puts the sample into the last group if rows × longest stays within the budget.
    fn next_fit(&mut self, sample: u32, length: u32, bucket: usize) {
        let takes = |g: &Group| {
            let rows = g.samples.len() + 1;
            rows <= self.limits.max_rows.min(PADDED_ROWS)
                && rows as u64 * u64::from(g.longest.max(length)) <= u64::from(self.limits.budget)
        };
        let at = if self.groups.last().is_some_and(takes) { self.groups.len() - 1 } else { self.open(bucket) };
        self.groups[at].push(sample, length);
    }

    fn open(&mut self, bucket: usize) -> usize {
        self.groups.push(Group { bucket, ..Group::default() });
        self.groups.len() - 1
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn check(lengths: &[u32], groups: &[Group], limits: Limits) {
        let mut seen = vec![0; lengths.len()];
        for g in groups {
            let longest = g.samples.iter().map(|&s| lengths[s as usize]).max().unwrap();
            let sum: u32 = g.samples.iter().map(|&s| lengths[s as usize]).sum();
            assert_eq!((g.tokens, g.longest), (sum, longest));
            let (cost, rows) = match limits.batching {
                Batching::Packed => (sum, limits.max_rows),
                Batching::Padded => (longest * g.samples.len() as u32, limits.max_rows.min(64)),
            };
            assert!(cost <= limits.budget && g.samples.len() <= rows, "{cost} tokens in {} rows", g.samples.len());
            g.samples.iter().for_each(|&s| seen[s as usize] += 1);
        }
        assert!(seen.iter().all(|&n| n == 1), "a sample is not in exactly one batch");
    }

    proptest! {
        #[test]
        fn every_sample_is_in_exactly_one_batch_within_its_limits(
            lengths in prop::collection::vec(1u32..500, 1..300),
            budget in 500u32..3000,
            max_rows in 1usize..90,
            n in 1usize..8,
            padded: bool,
            seed: u64,
            epoch in 0u32..3,
        ) {
            let batching = if padded { Batching::Padded } else { Batching::Packed };
            let limits = Limits { budget, max_rows, batching };
            let samples: Vec<u32> = (0..lengths.len() as u32).collect();
            let buckets = Buckets::quantiles(lengths.clone(), n);
            let groups = pack(&samples, |s| lengths[s as usize], &buckets, limits, seed, epoch);
            check(&lengths, &groups, limits);
            prop_assert_eq!(groups, pack(&samples, |s| lengths[s as usize], &buckets, limits, seed, epoch));
        }
    }

    /// Samples with the bucket edges of the design, equally many per bucket.
    fn design_lengths(n: u32) -> (Vec<u32>, Buckets) {
        let edges = [0, 770, 1216, 1728, 2432, 3296, 8193];
        let mut rng = CounterRng::new(5, Stream::Test, 0, 0);
        let lengths = (0..n)
            .map(|i| {
                let b = (i % 6) as usize;
                let low = edges[b].max(32);
                low + rng.below(u64::from(edges[b + 1] - low)) as u32
            })
            .collect();
        (lengths, Buckets::from_edges(&edges).unwrap())
    }

    #[test]
    fn packing_fills_at_least_97_percent_on_the_lengths_of_the_design() {
        let (lengths, buckets) = design_lengths(6_000);
        let samples: Vec<u32> = (0..6_000).collect();
        let limits = Limits { budget: 49_152, max_rows: 1024, batching: Batching::Packed };
        let groups = pack(&samples, |s| lengths[s as usize], &buckets, limits, 1, 0);
        check(&lengths, &groups, limits);
        let fill = f64::from(lengths.iter().sum::<u32>()) / (groups.len() as f64 * 49_152.0);
        assert!(fill >= 0.97, "fill {fill}");
        let padded = Limits { batching: Batching::Padded, ..limits };
        let groups = pack(&samples, |s| lengths[s as usize], &buckets, padded, 1, 0);
        check(&lengths, &groups, padded);
    }

    #[test]
    fn packing_fills_a_budget_of_three_samples_too() {
        let mut rng = CounterRng::new(6, Stream::Test, 0, 0);
        let lengths: Vec<u32> =
            (0..6_000).map(|i| if i % 3 == 0 { 30 + rng.below(1_500) } else { 1_500 + rng.below(2_597) } as u32).collect();
        let samples: Vec<u32> = (0..6_000).collect();
        let limits = Limits { budget: 12_288, max_rows: 1024, batching: Batching::Packed };
        let groups = pack(&samples, |s| lengths[s as usize], &Buckets::quantiles(lengths.clone(), 6), limits, 1, 0);
        check(&lengths, &groups, limits);
        let fill = f64::from(lengths.iter().sum::<u32>()) / (groups.len() as f64 * 12_288.0);
        assert!(fill >= 0.97, "fill {fill}");
    }

    #[test]
    fn epochs_and_seeds_differ_and_batches_of_all_buckets_mix() {
        let (lengths, buckets) = design_lengths(3_000);
        let samples: Vec<u32> = (0..3_000).collect();
        let limits = Limits { budget: 49_152, max_rows: 1024, batching: Batching::Packed };
        let run = |seed, epoch| pack(&samples, |s| lengths[s as usize], &buckets, limits, seed, epoch);
        let base = run(1, 0);
        assert_ne!(base, run(1, 1));
        assert_ne!(base, run(2, 0));
        let first: Vec<usize> = base.iter().take(base.len() / 2).map(|g| g.bucket).collect();
        assert!(first.contains(&5) && first.contains(&1), "the first half comes from buckets {first:?}");
    }

    #[test]
    fn edges_decide_buckets() {
        let b = Buckets::from_edges(&[0, 10, 20]).unwrap();
        assert_eq!([0, 9, 10, 19, 20, 99].map(|l| b.of(l)), [0, 0, 1, 1, 1, 1]);
        assert!(Buckets::from_edges(&[0, 5, 5]).is_err());
        let q = Buckets::quantiles((1..=100).collect(), 4);
        assert_eq!(q.edges(), [0, 26, 51, 76, 101]);
        assert_eq!(Buckets::quantiles(vec![7; 50], 4).edges(), [0, 7, 8]);
    }
}
