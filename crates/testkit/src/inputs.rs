//! Generators of typical and hostile inputs.
//!
//! Job: random values from a counter (the same on every machine), and the index arrays that ops take: packed samples, draft
//! blocks, compactions, rotary tables. Refuses files and clocks. Invariants: equal seeds give equal inputs; entries that a
//! valid count excludes hold garbage ([`GARBAGE`]), so that a kernel that reads them is found out.

use std::f64::consts::TAU;

/// Content of index entries past a valid count: out of range of every tensor.
pub const GARBAGE: i32 = i32::MAX / 4;

/// SplitMix64 (Steele, Lea, Flood 2014): a counter and a finaliser, which is all that test inputs need.
#[derive(Clone, Debug)]
pub struct Rng(u64);

impl Rng {
    /// A generator.
    pub fn new(seed: u64) -> Self {
        Rng(seed.wrapping_mul(0xd1b5_4a32_d192_ed03))
    }

    /// 64 bits.
    pub fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Uniform in [0, 1).
    pub fn uniform(&mut self) -> f64 {
        (self.bits() >> 11) as f64 / (1u64 << 53) as f64
    }

    /// Uniform in `0..n`.
    pub fn below(&mut self, n: usize) -> usize {
        assert!(n > 0, "nothing to choose from");
        ((self.uniform() * n as f64) as usize).min(n - 1)
    }

    /// Standard normal (Box and Muller).
    pub fn normal(&mut self) -> f64 {
        (-2.0 * (1.0 - self.uniform()).ln()).sqrt() * (TAU * self.uniform()).cos()
    }

    /// `n` normals of standard deviation `std`.
    pub fn normals(&mut self, n: usize, std: f64) -> Vec<f64> {
        (0..n).map(|_| std * self.normal()).collect()
    }

    /// `n` uniforms in `low..high`.
    pub fn uniforms(&mut self, n: usize, low: f64, high: f64) -> Vec<f64> {
        (0..n).map(|_| low + (high - low) * self.uniform()).collect()
    }

    /// `n` indices below `high`; the first and the last index occur where `n` allows it.
    pub fn indices(&mut self, n: usize, high: usize) -> Vec<i32> {
        let mut out: Vec<i32> = (0..n).map(|_| self.below(high) as i32).collect();
        if let [first, .., last] = out.as_mut_slice() {
            (*first, *last) = (high as i32 - 1, 0);
        }
        out
    }

    /// `k` different indices below `n`, ascending.
    pub fn choose(&mut self, n: usize, k: usize) -> Vec<usize> {
        assert!(k <= n, "cannot choose {k} of {n}");
        let mut all: Vec<usize> = (0..n).collect();
        for i in 0..k {
            all.swap(i, i + self.below(n - i));
        }
        all.truncate(k);
        all.sort_unstable();
        all
    }
}

/// Packed samples.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PackedSamples {
    /// `[S+1]`; entries after the last sample repeat the token count.
    pub cu_seqlens: Vec<i32>,
    /// `[1]`.
    pub n_seqs: Vec<i32>,
    /// Position of every row, `[rows]`; 0 on rows of no sample.
    pub positions: Vec<i32>,
    /// Length of each sample.
    pub lengths: Vec<usize>,
}

/// Packs samples of `lengths` into `rows` rows with room for `capacity` samples.
pub fn packed_samples(lengths: &[usize], capacity: usize, rows: usize) -> PackedSamples {
    assert!(lengths.len() <= capacity && lengths.iter().sum::<usize>() <= rows, "samples exceed their room");
    let mut cu_seqlens = vec![0];
    let mut positions = Vec::with_capacity(rows);
    for &n in lengths {
        positions.extend(0..n as i32);
        cu_seqlens.push(positions.len() as i32);
    }
    cu_seqlens.resize(capacity + 1, positions.len() as i32);
    positions.resize(rows, 0);
    PackedSamples { cu_seqlens, n_seqs: vec![lengths.len() as i32], positions, lengths: lengths.to_vec() }
}

/// Draft blocks over packed samples.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DraftBlocks {
    /// `[N]`, [`GARBAGE`] past the count.
    pub ctx_start: Vec<i32>,
    /// `[N]`, [`GARBAGE`] past the count.
    pub anchor: Vec<i32>,
    /// `[1]`.
    pub n_blocks: Vec<i32>,
}

impl DraftBlocks {
    /// Position of every slot, `[N·size]`: anchor + k, and 0 in blocks past the count.
    pub fn positions(&self, size: usize) -> Vec<i32> {
        let real = self.n_blocks[0] as usize;
        let of = |n: usize| move |k: usize| if n < real { self.anchor[n] + k as i32 } else { 0 };
        (0..self.anchor.len()).flat_map(|n| (0..size).map(of(n))).collect()
    }
}

/// `real` blocks of `capacity`, sorted by (sample, anchor): every sample's first and last token is an anchor where `real` allows
/// it, the others are drawn, and an anchor may occur twice.
pub fn draft_blocks(rng: &mut Rng, samples: &PackedSamples, capacity: usize, real: usize) -> DraftBlocks {
    let mut ends: Vec<(i32, i32)> = Vec::new();
    for (s, &n) in samples.lengths.iter().enumerate().filter(|&(_, &n)| n > 0) {
        ends.extend([(samples.cu_seqlens[s], 0), (samples.cu_seqlens[s], n as i32 - 1)]);
    }
    assert!(real <= capacity && (real == 0 || !ends.is_empty()), "no token to anchor a block at");
    ends.truncate(real);
    while ends.len() < real {
        let s = rng.below(samples.lengths.len());
        if samples.lengths[s] > 0 {
            ends.push((samples.cu_seqlens[s], rng.below(samples.lengths[s]) as i32));
        }
    }
    ends.sort_unstable();
    let mut ctx_start: Vec<i32> = ends.iter().map(|e| e.0).collect();
    let mut anchor: Vec<i32> = ends.iter().map(|e| e.1).collect();
    ctx_start.resize(capacity, GARBAGE);
    anchor.resize(capacity, GARBAGE);
    DraftBlocks { ctx_start, anchor, n_blocks: vec![real as i32] }
}

/// Rotary tables (cos, sin), each `[positions, rotary/2]`: angle = position · theta^(-2i/rotary), taken in f64.
pub fn rotary_tables(positions: usize, rotary: usize, theta: f64) -> (Vec<f64>, Vec<f64>) {
    let angle = |p: usize, i: usize| p as f64 * theta.powf(-2.0 * i as f64 / rotary as f64);
    let table = |f: fn(f64) -> f64| (0..positions).flat_map(|p| (0..rotary / 2).map(move |i| f(angle(p, i)))).collect();
    (table(f64::cos), table(f64::sin))
}

/// Index arrays of a row compaction, inverse to each other.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CompactionArrays {
    /// `[M]`, [`GARBAGE`] past the count.
    pub rows: Vec<i32>,
    /// `[R]`, -1 where a row is not gathered.
    pub inverse: Vec<i32>,
    /// `[1]`.
    pub count: Vec<i32>,
}

/// Compacts the ascending row numbers `chosen` of `rows` rows into room for `capacity`.
pub fn compaction_arrays(chosen: &[usize], rows: usize, capacity: usize) -> CompactionArrays {
    assert!(chosen.len() <= capacity, "more rows than room");
    let mut inverse = vec![-1; rows];
    for (m, &r) in chosen.iter().enumerate() {
        inverse[r] = m as i32;
    }
    let mut list: Vec<i32> = chosen.iter().map(|&r| r as i32).collect();
    list.resize(capacity, GARBAGE);
    CompactionArrays { rows: list, inverse, count: vec![chosen.len() as i32] }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_are_sorted_and_reach_both_ends_of_a_sample() {
        let mut rng = Rng::new(1);
        let samples = packed_samples(&[7, 0, 1, 12], 6, 25);
        assert_eq!(samples.cu_seqlens, [0, 7, 7, 8, 20, 20, 20]);
        let blocks = draft_blocks(&mut rng, &samples, 12, 9);
        let keys: Vec<(i32, i32)> = (0..9).map(|n| (blocks.ctx_start[n], blocks.anchor[n])).collect();
        assert!(keys.is_sorted());
        for end in [(0, 0), (0, 6), (7, 0), (8, 0), (8, 11)] {
            assert!(keys.contains(&end), "{end:?}");
        }
        assert!(blocks.anchor[9..].iter().all(|&a| a == GARBAGE));
        assert_eq!(blocks.positions(3)[..3], [keys[0].1, keys[0].1 + 1, keys[0].1 + 2]);
    }

    #[test]
    fn compaction_arrays_are_inverse() {
        let mut rng = Rng::new(2);
        let chosen = rng.choose(20, 11);
        assert!(chosen.windows(2).all(|w| w[0] < w[1]));
        let arrays = compaction_arrays(&chosen, 20, 13);
        for (r, &m) in arrays.inverse.iter().enumerate() {
            assert_eq!(chosen.contains(&r), m >= 0);
            assert!(m < 0 || arrays.rows[m as usize] == r as i32);
        }
    }

    #[test]
    fn normals_have_the_right_moments() {
        let x = Rng::new(3).normals(20_000, 2.0);
        let mean = x.iter().sum::<f64>() / x.len() as f64;
        let var = x.iter().map(|v| (v - mean) * (v - mean)).sum::<f64>() / x.len() as f64;
        assert!(mean.abs() < 0.06 && (var - 4.0).abs() < 0.2, "mean {mean}, variance {var}");
    }
}
