//! `QkNormRope` and its backward, naively, head by head.
//!
//! Masses: as in `rms_norm`, with the two products of each rotation added.

use super::{Run, row};
use drafthorse_graph::op::{QkNormRope, QkNormRopeBwd};

/// One head of one row, normed: n = s·rstd (or s without a norm).
struct Normed {
    n: Vec<f64>,
    rstd: f64,
}

fn normed(s: &[f64], has_norm: bool, eps: f32) -> Normed {
    if !has_norm {
        return Normed { n: s.to_vec(), rstd: 1.0 };
    }
    let rstd = 1.0 / (s.iter().map(|v| v * v).sum::<f64>() / s.len() as f64 + f64::from(eps)).sqrt();
    Normed { n: s.iter().map(|v| v * rstd).collect(), rstd }
}

/// Rotates the first `2·cos.len()` elements by the angles, or back by them; gives the values and the mass of each.
fn rotated(x: &[f64], abs: &[f64], cos: &[f64], sin: &[f64], back: bool) -> (Vec<f64>, Vec<f64>) {
    let (mut y, mut mass) = (x.to_vec(), abs.to_vec());
    let half = cos.len();
    for i in 0..half {
        let (a, b) = (x[i], x[half + i]);
        let (c, s) = (cos[i], if back { -sin[i] } else { sin[i] });
        y[i] = a * c - b * s;
        y[half + i] = b * c + a * s;
        mass[i] = abs[i] * c.abs() + abs[half + i] * s.abs();
        mass[half + i] = abs[half + i] * c.abs() + abs[i] * s.abs();
    }
    (y, mass)
}

fn magnitudes(x: &[f64]) -> Vec<f64> {
    x.iter().map(|v| v.abs()).collect()
}

pub(super) fn qk_norm_rope(run: &mut Run<'_>, op: &QkNormRope) {
    let (src, positions) = (run.floats(op.src), run.ints(op.rotary.positions));
    let (cos, sin) = (run.floats(op.rotary.cos), run.floats(op.rotary.sin));
    let (table_rows, half) = (run.rows(op.rotary.cos), run.cols(op.rotary.cos));
    let (width, d) = (run.cols(op.src), op.dim);
    let parts = [(op.q, op.q_norm, 0, op.q_heads), (Some(op.k), op.k_norm, op.q_heads, op.kv_heads)];
    for (out, weight, first, heads) in parts {
        let Some(out) = out else { continue };
        let weight = weight.map(|w| run.floats(w));
        let (mut y, mut abs) = (Vec::new(), Vec::new());
        for (t, &p) in positions.iter().enumerate() {
            let p = row(p, table_rows, "position") * half;
            for h in first..first + heads {
                let at = t * width + h * d;
                let mut n = normed(&src[at..at + d], weight.is_some(), op.eps).n;
                if let Some(w) = &weight {
                    n.iter_mut().zip(w).for_each(|(n, w)| *n *= w);
                }
                let (v, m) = rotated(&n, &magnitudes(&n), &cos[p..p + half], &sin[p..p + half], false);
                y.extend(v);
                abs.extend(m);
            }
        }
        run.put(out, y, d + 8, abs);
    }
    let mut v = Vec::new();
    for t in 0..positions.len() {
        let at = t * width + (op.q_heads + op.kv_heads) * d;
        v.extend_from_slice(&src[at..at + op.kv_heads * d]);
    }
    run.put_copy(op.v, v);
}

pub(super) fn qk_norm_rope_bwd(run: &mut Run<'_>, op: &QkNormRopeBwd) {
    let f = &op.forward;
    let (src, positions) = (run.floats(f.src), run.ints(f.rotary.positions));
    let (cos, sin) = (run.floats(f.rotary.cos), run.floats(f.rotary.sin));
    let (table_rows, half) = (run.rows(f.rotary.cos), run.cols(f.rotary.cos));
    let (width, d, t) = (run.cols(f.src), f.dim, positions.len());
    let (mut dsrc, mut abs) = (vec![0.0; t * width], vec![0.0; t * width]);
    let parts = [(op.dq, f.q_norm, op.dq_norm, 0, f.q_heads), (Some(op.dk), f.k_norm, op.dk_norm, f.q_heads, f.kv_heads)];
    for (upstream, weight, weight_grad, first, heads) in parts {
        let Some(upstream) = upstream else { continue };
        let upstream = run.floats(upstream);
        let weight = weight.map(|w| run.floats(w));
        let (mut dw, mut dw_abs) = (vec![0.0; d], vec![0.0; d]);
        for i in 0..t {
            let p = row(positions[i], table_rows, "position") * half;
            for h in 0..heads {
                let at = i * width + (first + h) * d;
                let up = &upstream[(i * heads + h) * d..(i * heads + h + 1) * d];
                let (dn, dn_abs) = rotated(up, &magnitudes(up), &cos[p..p + half], &sin[p..p + half], true);
                let Some(w) = &weight else {
                    dsrc[at..at + d].copy_from_slice(&dn);
                    abs[at..at + d].copy_from_slice(&dn_abs);
                    continue;
                };
                let Normed { n, rstd } = normed(&src[at..at + d], true, f.eps);
                let (mut mean, mut mean_abs) = (0.0, 0.0);
                for j in 0..d {
                    dw[j] += dn[j] * n[j];
                    dw_abs[j] += dn_abs[j] * n[j].abs();
                    mean += dn[j] * w[j] * n[j] / d as f64;
                    mean_abs += (dn_abs[j] * w[j] * n[j]).abs() / d as f64;
                }
                for j in 0..d {
                    dsrc[at + j] = rstd * (dn[j] * w[j] - n[j] * mean);
                    abs[at + j] = rstd * (dn_abs[j] * w[j].abs() + n[j].abs() * mean_abs);
                }
            }
        }
        if let Some(out) = weight_grad {
            let old = run.floats(out);
            let sum = old.iter().zip(&dw).map(|(a, b)| a + b).collect();
            let mass = old.iter().zip(&dw_abs).map(|(a, b)| a.abs() + b).collect();
            run.put(out, sum, t * heads + d + 8, mass);
        }
    }
    let dv = run.floats(op.dv);
    let cols = f.kv_heads * d;
    for i in 0..t {
        let at = i * width + (f.q_heads + f.kv_heads) * d;
        dsrc[at..at + cols].copy_from_slice(&dv[i * cols..(i + 1) * cols]);
    }
    run.put(op.dsrc, dsrc, d + 8, abs);
}
