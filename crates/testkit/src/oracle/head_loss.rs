//! `HeadLoss`, naively: one row of logits at a time.
//!
//! Masses: with Z_v = Σ|x·head_v|, a logit is off by Z_v ulps of 1 in fp32, and by up to an ulp of itself where logits are stored as bf16
//! (two roundings of nearly equal values may fall to different sides). To first order ce moves by `Σ_v (p_v - onehot)·δz_v` and
//! dx by `w·Σ_v p_v·(head_v - Σ_u p_u·head_u)·δz_v`, so a saturated row, whose p is one-hot, is held to a narrow bound.

use super::{Run, row};
use drafthorse_graph::op::HeadLoss;

pub(super) fn head_loss(run: &mut Run<'_>, op: &HeadLoss) {
    let (x, head) = (run.floats(op.x), run.floats(op.head));
    let (labels, weights, count) = (run.ints(op.labels.labels), run.floats(op.labels.weights), run.count(op.labels.count));
    let (rows, h, vocab) = (run.rows(op.x), run.cols(op.x), run.rows(op.head));
    let mut sums = run.floats(op.sums);
    let mut sums_abs: Vec<f64> = sums.iter().map(|s| s.abs()).collect();
    let mut sums_squares = [0.0f64; 2];
    let (mut ce, mut ce_abs, mut ce_rounded) = (vec![0.0; rows], vec![0.0; rows], vec![0.0; rows]);
    let (mut prob, mut prob_abs, mut prob_rounded) = (vec![0.0; rows], vec![0.0; rows], vec![0.0; rows]);
    let mut hit = vec![0; rows];
    let (mut dx, mut dx_abs, mut dx_rounded) = (vec![0.0; rows * h], vec![0.0; rows * h], vec![0.0; rows * h]);
    for r in 0..count {
        let x = &x[r * h..(r + 1) * h];
        let label = row(labels[r], vocab, "label");
        let (mut z, mut z_abs) = (Vec::new(), Vec::new());
        for head in head.chunks(h) {
            let sum: f64 = x.iter().zip(head).map(|(a, b)| a * b).sum();
            z.push(run.rounded(op.logits, sum));
            z_abs.push(x.iter().zip(head).map(|(a, b)| (a * b).abs()).sum::<f64>());
        }
        let mut best = 0;
        for v in 0..vocab {
            if z[v] > z[best] {
                best = v;
            }
        }
        let lse = z[best] + z.iter().map(|z_v| (z_v - z[best]).exp()).sum::<f64>().ln();
        let p: Vec<f64> = z.iter().map(|z_v| (z_v - lse).exp()).collect();
        let lse_abs = 1.0 + lse.abs() + p.iter().zip(&z_abs).map(|(p, z)| p * z).sum::<f64>();
        let moves = |v: usize| if v == label { 1.0 - p[v] } else { p[v] };
        ce[r] = lse - z[label];
        ce_abs[r] = 1.0 + lse.abs() + z[label].abs() + (0..vocab).map(|v| moves(v) * z_abs[v]).sum::<f64>();
        ce_rounded[r] = (0..vocab).map(|v| (moves(v) * z[v]).powi(2)).sum::<f64>().sqrt();
        prob[r] = p[label];
        prob_abs[r] = p[label] * ce_abs[r];
        prob_rounded[r] = p[label] * ce_rounded[r];
        hit[r] = i32::from(best == label);
        let w = weights[r];
        sums[0] += w * ce[r];
        sums_abs[0] += w * ce_abs[r];
        sums_squares[0] += (w * ce_rounded[r]) * (w * ce_rounded[r]);
        sums[1] += w;
        sums_abs[1] += w.abs();

        for c in 0..h {
            let mean: f64 = (0..vocab).map(|v| p[v] * head[v * h + c]).sum();
            let (mut sum, mut abs, mut squares) = (0.0, 0.0, 0.0);
            for v in 0..vocab {
                let onehot = if v == label { 1.0 } else { 0.0 };
                let (dz, head) = (w * (p[v] - onehot), head[v * h + c]);
                sum += dz * head;
                abs += w * (p[v] * (1.0 + z_abs[v] + lse_abs + (z[v] - lse).abs()) + onehot) * head.abs();
                squares += (dz * head).powi(2) + (w * p[v] * z[v] * (head - mean)).powi(2);
            }
            dx[r * h + c] = sum;
            dx_abs[r * h + c] = abs;
            dx_rounded[r * h + c] = squares.sqrt();
        }
    }
    let terms = vocab + h + 8;
    run.put_rounded(op.sums, sums, terms + rows, sums_abs, sums_squares.iter().map(|s| s.sqrt()).collect());
    run.put_rounded(op.metrics.ce, ce, terms, ce_abs, ce_rounded);
    run.put_rounded(op.metrics.prob, prob, terms, prob_abs, prob_rounded);
    run.put_ints(op.metrics.hit, hit);
    if let Some(out) = op.dx {
        run.put_rounded(out, dx, terms, dx_abs, dx_rounded);
    }
}
