//! Softmax attention of one query head over an explicit list of keys, naively: what the three attention oracles share.
//!
//! Masses: with S_j = scale·Σ|q k_j| and the mean S̄ under p, a score's fp32 error is of the order of S_j ulps of 1, so p_j is off by
//! p_j·(S_j + S̄ + |s_j - max| + 1) of them.

/// What one query head sees and gives.
pub(super) struct SoftmaxRow {
    pub(super) o: Vec<f64>,
    pub(super) abs: Vec<f64>,
    pub(super) rounded: Vec<f64>,
    pub(super) lse: f64,
    pub(super) lse_abs: f64,
}

/// `q` `[D]`, `keys` and `values` one `[D]` slice for each key, at least one.
pub(super) fn softmax_row(q: &[f64], keys: &[&[f64]], values: &[&[f64]], scale: f64) -> SoftmaxRow {
    let dot = |k: &[f64]| -> f64 { scale * q.iter().zip(k).map(|(a, b)| a * b).sum::<f64>() };
    let dot_abs = |k: &[f64]| -> f64 { scale * q.iter().zip(k).map(|(a, b)| (a * b).abs()).sum::<f64>() };
    let scores: Vec<f64> = keys.iter().map(|k| dot(k)).collect();
    let max = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let lse = max + scores.iter().map(|s| (s - max).exp()).sum::<f64>().ln();
    let mean_abs: f64 = scores.iter().zip(keys).map(|(s, k)| (s - lse).exp() * dot_abs(k)).sum();
    let d = q.len();
    let (mut o, mut abs, mut squares) = (vec![0.0; d], vec![0.0; d], vec![0.0; d]);
    for ((s, k), v) in scores.iter().zip(keys).zip(values) {
        let p = (s - lse).exp();
        for i in 0..d {
            o[i] += p * v[i];
            abs[i] += p * v[i].abs() * (1.0 + dot_abs(k) + mean_abs + (max - s));
            squares[i] += (p * v[i]) * (p * v[i]);
        }
    }
    let rounded = squares.iter().map(|s| s.sqrt()).collect();
    SoftmaxRow { o, abs, rounded, lse, lse_abs: 1.0 + max.abs() + lse.abs() + mean_abs }
}
