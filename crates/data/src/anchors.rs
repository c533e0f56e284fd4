//! Anchors, labels and label weights of draft blocks.
//!
//! Rules of DESIGN section 5 (DFlash, Chen et al. 2026: random anchors, exponentially decaying weights): i is a candidate
//! when tokens i and i+1 are supervised; a sample's anchors are a uniform choice keyed by (seed, epoch, sample) alone.
//! It refuses a block size without a known decay. Invariant: when a batch asks for too many blocks, what a sample gets is
//! a prefix of its own choice, so neither the batch nor its neighbours change which anchors come first.

use crate::error::{DataError, Result};
use crate::rng::{CounterRng, Stream};

/// The decay γ of label weights for block size `block`: 7 for 16, 5 for 10, 4 for 8, otherwise `configured` is required.
///
/// # Errors
/// When the block size has no published γ and none is configured, or the configured one is not positive.
pub fn decay_gamma(block: usize, configured: Option<f64>) -> Result<f64> {
    match (configured, block) {
        (Some(gamma), _) if gamma > 0.0 && gamma.is_finite() => Ok(gamma),
        (Some(gamma), _) => Err(DataError::Config {
            key: "drafter.gamma",
            what: format!("{gamma} is not a positive number"),
            todo: "leave the key out for block sizes 8, 10 and 16".into(),
        }),
        (None, 16) => Ok(7.0),
        (None, 10) => Ok(5.0),
        (None, 8) => Ok(4.0),
        (None, other) => Err(DataError::Config {
            key: "drafter.gamma",
            what: format!("block size {other} has no published decay"),
            todo: "set it, e.g. to about 0.45 times the block size".into(),
        }),
    }
}

/// Weights exp(-(k-1)/γ) of slots k = 1..B-1, `[B-1]`.
pub fn slot_weights(block: usize, gamma: f64) -> Vec<f32> {
    (1..block).map(|k| libm::exp(-((k - 1) as f64) / gamma) as f32).collect()
}

/// All i with `mask[i]` and `mask[i+1]` set, ascending.
pub fn candidates(mask: &[i8]) -> Vec<u32> {
    mask.windows(2).enumerate().filter(|(_, w)| w[0] == 1 && w[1] == 1).map(|(i, _)| i as u32).collect()
}

/// `count` anchors of a sample, ascending: the first `count` of the random order that (seed, epoch, sample) gives.
pub fn choose_anchors(mut candidates: Vec<u32>, count: usize, seed: u64, epoch: u32, sample: u64) -> Vec<u32> {
    let count = count.min(candidates.len());
    CounterRng::new(seed, Stream::Anchors, epoch, sample).choose_prefix(&mut candidates, count);
    candidates.truncate(count);
    candidates.sort_unstable();
    candidates
}

/// Scales `requests` to sum to `limit` when they ask for more: request × limit / Σ, the remainder to the largest
/// fractions first (ties to the earlier sample).
pub fn scale_requests(requests: &mut [u32], limit: u32) {
    let sum: u64 = requests.iter().map(|&r| u64::from(r)).sum();
    if sum <= u64::from(limit) {
        return;
    }
    let mut order: Vec<(u64, usize)> = Vec::with_capacity(requests.len());
    let mut given = 0;
    for (i, request) in requests.iter_mut().enumerate() {
        let wide = u64::from(*request) * u64::from(limit);
        *request = (wide / sum) as u32;
        given += *request;
        order.push((wide % sum, i));
    }
    order.sort_unstable_by_key(|&(fraction, i)| (std::cmp::Reverse(fraction), i));
    for &(_, i) in order.iter().take((limit - given) as usize) {
        requests[i] += 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn scaled_requests_sum_to_the_limit(
            requests in prop::collection::vec(0u32..600, 1..100),
            limit in 1u32..9000,
        ) {
            let mut scaled = requests.clone();
            scale_requests(&mut scaled, limit);
            let (before, after) = (requests.iter().sum::<u32>(), scaled.iter().sum::<u32>());
            prop_assert_eq!(after, before.min(limit));
            for (s, r) in scaled.iter().zip(&requests) {
                let exact = f64::from(*r) * f64::from(limit.min(before)) / f64::from(before.max(1));
                prop_assert!((f64::from(*s) - exact).abs() <= 1.0 && s <= r);
            }
        }

        #[test]
        fn anchors_are_distinct_candidates_and_grow_by_prefix(
            mask in prop::collection::vec(0i8..2, 1..200),
            k in 0usize..100,
            seed: u64,
        ) {
            let all = candidates(&mask);
            let some = choose_anchors(all.clone(), k, seed, 1, 2);
            prop_assert_eq!(some.len(), k.min(all.len()));
            prop_assert!(some.windows(2).all(|w| w[0] < w[1]));
            prop_assert!(some.iter().all(|&i| mask[i as usize] == 1 && mask[i as usize + 1] == 1));
            let more = choose_anchors(all, k + 5, seed, 1, 2);
            prop_assert!(some.iter().all(|i| more.contains(i)));
        }
    }

    #[test]
    fn anchors_are_uniform_over_epochs() {
        let mut counts = [0u32; 50];
        for epoch in 0..2_000 {
            for a in choose_anchors((0..50).collect(), 10, 9, epoch, 3) {
                counts[a as usize] += 1;
            }
        }
        // Mean 400, standard deviation 18 per candidate.
        assert!(counts.iter().all(|c| c.abs_diff(400) < 110), "{counts:?}");
    }

    #[test]
    fn published_decays_and_weights() {
        assert_eq!(decay_gamma(16, None).unwrap(), 7.0);
        assert_eq!(decay_gamma(10, None).unwrap(), 5.0);
        assert_eq!(decay_gamma(8, None).unwrap(), 4.0);
        assert!(decay_gamma(12, None).is_err() && decay_gamma(16, Some(0.0)).is_err());
        let w = slot_weights(16, 7.0);
        assert_eq!((w.len(), w[0]), (15, 1.0));
        assert!((w[7] - (-1.0f32).exp()).abs() < 1e-7);
    }
}
