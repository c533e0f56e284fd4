//! Counter-based random numbers: the value at (seed, stream, a, b, counter) is a pure function of those five numbers.
//!
//! The generator is Philox4x32-10 (Salmon, Moraes, Dror, Shaw: "Parallel random numbers: as easy as 1, 2, 3", SC 2011,
//! section 4.3; constants as in Random123). There is no hidden state to save for resume: whoever knows the key can redraw.
//! It refuses to draw from the operating system. Invariant: integers, uniforms and normals are the same bits on every
//! platform (normals use the pure-Rust `libm`, never the platform's).

const MULTIPLIER_0: u32 = 0xD251_1F53;
const MULTIPLIER_1: u32 = 0xCD9E_8D57;
const WEYL_0: u32 = 0x9E37_79B9;
const WEYL_1: u32 = 0xBB67_AE85;

/// What the numbers are for. Two purposes never share numbers, whatever their other keys are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub enum Stream {
    /// Initial weights of a drafter.
    Weights = 1,
    /// The order of samples inside a length bucket, keyed by (epoch, bucket).
    SampleOrder = 2,
    /// The order of batches inside an epoch, keyed by epoch.
    BatchOrder = 3,
    /// Which rows are held out, keyed by row.
    HeldOut = 4,
    /// The anchors of a sample, keyed by (epoch, sample).
    Anchors = 5,
    /// Sampling tokens while decoding, keyed by (request, position).
    Decoding = 6,
    /// Choosing what a report samples.
    Report = 7,
    /// Inputs of tests and benchmarks.
    Test = 8,
}

/// One Philox4x32-10 block: 128 bits from a 128-bit counter and a 64-bit key.
pub fn philox4x32(counter: [u32; 4], key: [u32; 2]) -> [u32; 4] {
    let [mut c0, mut c1, mut c2, mut c3] = counter;
    let [mut k0, mut k1] = key;
    for _ in 0..10 {
        let p0 = u64::from(MULTIPLIER_0) * u64::from(c0);
        let p1 = u64::from(MULTIPLIER_1) * u64::from(c2);
        (c0, c1, c2, c3) = ((p1 >> 32) as u32 ^ c1 ^ k0, p1 as u32, (p0 >> 32) as u32 ^ c3 ^ k1, p0 as u32);
        k0 = k0.wrapping_add(WEYL_0);
        k1 = k1.wrapping_add(WEYL_1);
    }
    [c0, c1, c2, c3]
}

/// A sequence of numbers keyed by (seed, stream, a, b).
///
/// The key of the sequence is `philox((stream, a), seed)`; its counter is (block, b). `a` is 32 bits wide, `b` 64.
#[derive(Debug, Clone)]
pub struct CounterRng {
    key: [u32; 2],
    b: u64,
    block: u64,
    buffer: [u32; 4],
    used: usize,
}

impl CounterRng {
    /// The sequence of (seed, stream, a, b), at its beginning.
    pub fn new(seed: u64, stream: Stream, a: u32, b: u64) -> Self {
        let key = philox4x32([stream as u32, a, 0, 0], [seed as u32, (seed >> 32) as u32]);
        Self { key: [key[0], key[1]], b, block: 0, buffer: [0; 4], used: 4 }
    }

    fn block_at(&self, block: u64) -> [u32; 4] {
        philox4x32([block as u32, (block >> 32) as u32, self.b as u32, (self.b >> 32) as u32], self.key)
    }

    /// The next 32 bits.
    pub fn next_u32(&mut self) -> u32 {
        if self.used == 4 {
            self.buffer = self.block_at(self.block);
            self.block += 1;
            self.used = 0;
        }
        self.used += 1;
        self.buffer[self.used - 1]
    }

    /// The next 64 bits (two 32-bit draws, low half first).
    pub fn next_u64(&mut self) -> u64 {
        let low = u64::from(self.next_u32());
        low | u64::from(self.next_u32()) << 32
    }

    /// A uniform integer in `0..n`, without bias (Lemire, "Fast random integer generation in an interval", 2019).
    ///
    /// # Panics
    /// When `n` is 0: there is no such integer.
    pub fn below(&mut self, n: u64) -> u64 {
        assert!(n > 0, "no integer lies below 0");
        let threshold = n.wrapping_neg() % n;
        loop {
            let wide = u128::from(self.next_u64()) * u128::from(n);
            if wide as u64 >= threshold {
                return (wide >> 64) as u64;
            }
        }
    }

    /// A uniform number in `[0, 1)` with 24 random bits.
    pub fn uniform_f32(&mut self) -> f32 {
        (self.next_u32() >> 8) as f32 * (1.0 / 16_777_216.0)
    }

    /// A uniform number in `[0, 1)` with 53 random bits.
    pub fn uniform_f64(&mut self) -> f64 {
        (self.next_u64() >> 11) as f64 * (1.0 / 9_007_199_254_740_992.0)
    }

    /// A standard normal number (Box and Muller 1958, the cosine branch, computed in f64).
    pub fn normal_f32(&mut self) -> f32 {
        let (u, v) = (self.next_u64(), self.next_u64());
        normal_from_bits(u, v)
    }

    /// The standard normal number at index `i` of this sequence, whatever was drawn before: one block per number, so that
    /// many threads fill one tensor and the result does not depend on how they share it.
    pub fn normal_at(&self, i: u64) -> f32 {
        let [a, b, c, d] = self.block_at(i);
        normal_from_bits(u64::from(a) | u64::from(b) << 32, u64::from(c) | u64::from(d) << 32)
    }

    /// Puts `items` into a uniformly random order (Fisher and Yates).
    pub fn shuffle<T>(&mut self, items: &mut [T]) {
        for i in (1..items.len()).rev() {
            items.swap(i, self.below(i as u64 + 1) as usize);
        }
    }

    /// Moves `k` uniformly chosen items to the front, in random order; a smaller `k` yields a prefix of a larger one.
    pub fn choose_prefix<T>(&mut self, items: &mut [T], k: usize) {
        for i in 0..k.min(items.len()) {
            let j = i + self.below((items.len() - i) as u64) as usize;
            items.swap(i, j);
        }
    }
}

fn normal_from_bits(u: u64, v: u64) -> f32 {
    let scale = 1.0 / 9_007_199_254_740_992.0;
    // `u` is moved into (0, 1], where the logarithm is finite.
    let u = ((u >> 11) + 1) as f64 * scale;
    let v = (v >> 11) as f64 * scale;
    (libm::sqrt(-2.0 * libm::log(u)) * libm::cos(std::f64::consts::TAU * v)) as f32
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn philox_matches_the_published_vectors() {
        // The three known-answer vectors for philox4x32-10 of Random123's kat_vectors.
        assert_eq!(philox4x32([0; 4], [0; 2]), [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8]);
        assert_eq!(philox4x32([u32::MAX; 4], [u32::MAX; 2]), [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd]);
        assert_eq!(
            philox4x32([0x243f_6a88, 0x85a3_08d3, 0x1319_8a2e, 0x0370_7344], [0xa409_3822, 0x299f_31d0]),
            [0xd16c_fe09, 0x94fd_cceb, 0x5001_e420, 0x2412_6ea1]
        );
    }

    #[test]
    fn below_is_uniform_and_normals_have_their_moments() {
        let mut rng = CounterRng::new(7, Stream::Test, 0, 0);
        let mut counts = [0u32; 7];
        for _ in 0..70_000 {
            counts[rng.below(7) as usize] += 1;
        }
        // Standard deviation of a count is 93; six of them make a false alarm rarer than 1e-8.
        assert!(counts.iter().all(|&c| c.abs_diff(10_000) < 560), "{counts:?}");
        let (mut sum, mut squares) = (0.0, 0.0);
        for i in 0..100_000 {
            let x = f64::from(rng.normal_at(i));
            sum += x;
            squares += x * x;
        }
        assert!((sum / 1e5).abs() < 0.02 && (squares / 1e5 - 1.0).abs() < 0.03, "{sum} {squares}");
    }

    #[test]
    fn streams_and_keys_differ_and_repeat() {
        let draw = |seed, stream, a, b| CounterRng::new(seed, stream, a, b).next_u64();
        let base = draw(1, Stream::Anchors, 2, 3);
        assert_eq!(base, draw(1, Stream::Anchors, 2, 3));
        for other in [
            draw(2, Stream::Anchors, 2, 3),
            draw(1, Stream::HeldOut, 2, 3),
            draw(1, Stream::Anchors, 3, 3),
            draw(1, Stream::Anchors, 2, 4),
            draw(1 << 40, Stream::Anchors, 2, 3),
        ] {
            assert_ne!(base, other);
        }
    }

    #[test]
    fn a_smaller_choice_is_a_prefix_of_a_larger_one() {
        let choose = |k| {
            let mut items: Vec<u32> = (0..50).collect();
            CounterRng::new(3, Stream::Test, 0, 0).choose_prefix(&mut items, k);
            items[..k].to_vec()
        };
        assert_eq!(choose(10), choose(30)[..10]);
    }
}
