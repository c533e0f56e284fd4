//! `RmsNorm` and its backward, naively.
//!
//! Masses: a normed element carries the error of its row's mean square (a sum of positive terms, so relative) beside its own
//! products; a gradient carries `|g| + |ŝ|·mean|g·ŝ|`, the operands of its subtraction.

use super::Run;
use drafthorse_graph::op::{RmsNorm, RmsNormBwd};

pub(super) fn rms_norm(run: &mut Run<'_>, op: &RmsNorm) {
    let (x, w) = (run.floats(op.x), run.floats(op.w));
    let h = run.cols(op.x);
    let stream: Vec<f64> = match op.residual {
        None => x,
        Some(r) => {
            let delta = run.floats(r.delta);
            let sum: Vec<f64> = x.iter().zip(&delta).map(|(a, b)| a + b).collect();
            let abs = sum.iter().map(|v| v.abs()).collect();
            run.put(r.sum, sum.clone(), 1, abs);
            sum.iter().map(|&s| run.rounded(r.sum, s)).collect()
        }
    };
    let (mut y, mut rstd) = (Vec::new(), Vec::new());
    for row in stream.chunks(h) {
        let mean_square = row.iter().map(|s| s * s).sum::<f64>() / h as f64;
        let r = 1.0 / (mean_square + f64::from(op.eps)).sqrt();
        rstd.push(r);
        y.extend(row.iter().zip(&w).map(|(s, w)| s * r * w));
    }
    let abs = y.iter().map(|v| v.abs()).collect();
    run.put(op.y, y, h + 4, abs);
    let abs = rstd.clone();
    run.put(op.rstd, rstd, h + 4, abs);
}

pub(super) fn rms_norm_bwd(run: &mut Run<'_>, op: &RmsNormBwd) {
    let (s, w, rstd, dy) = (run.floats(op.stream), run.floats(op.w), run.floats(op.rstd), run.floats(op.dy));
    let dres = op.dres.map(|t| run.floats(t));
    let (t, h) = (run.rows(op.stream), run.cols(op.stream));
    if let Some(out) = op.dx {
        let (mut dx, mut abs) = (vec![0.0; t * h], vec![0.0; t * h]);
        for (i, &rstd) in rstd.iter().enumerate() {
            let at = |j: usize| i * h + j;
            let (mut mean, mut mean_abs) = (0.0, 0.0);
            for j in 0..h {
                let term = dy[at(j)] * w[j] * s[at(j)] * rstd / h as f64;
                mean += term;
                mean_abs += term.abs();
            }
            for j in 0..h {
                let (g, n) = (dy[at(j)] * w[j], s[at(j)] * rstd);
                let from_later = dres.as_ref().map_or(0.0, |d| d[at(j)]);
                dx[at(j)] = from_later + rstd * (g - n * mean);
                abs[at(j)] = from_later.abs() + rstd * (g.abs() + n.abs() * mean_abs);
            }
        }
        run.put(out, dx, h + 6, abs);
    }
    if let Some(out) = op.dw {
        let mut dw = run.floats(out);
        let mut abs: Vec<f64> = dw.iter().map(|v| v.abs()).collect();
        for i in 0..t {
            for j in 0..h {
                let term = dy[i * h + j] * s[i * h + j] * rstd[i];
                dw[j] += term;
                abs[j] += term.abs();
            }
        }
        run.put(out, dw, t + 4, abs);
    }
}
