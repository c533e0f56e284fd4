//! `Linear`, `LinearDx`, `LinearDw`, naively: three nested loops each.

use super::Run;
use drafthorse_graph::op::{Linear, LinearDw, LinearDx};

pub(super) fn linear(run: &mut Run<'_>, op: &Linear) {
    let (x, w) = (run.floats(op.x), run.floats(op.w));
    let bias = op.bias.map(|b| run.floats(b));
    let (t, k) = (run.rows(op.x), run.cols(op.x));
    let (mut y, mut abs) = (Vec::new(), Vec::new());
    for i in 0..t {
        for n in op.rows.clone() {
            let b = bias.as_ref().map_or(0.0, |b| b[n]);
            let (mut sum, mut mass) = (b, b.abs());
            for j in 0..k {
                let term = x[i * k + j] * w[n * k + j];
                sum += term;
                mass += term.abs();
            }
            y.push(sum);
            abs.push(mass);
        }
    }
    run.put(op.y, y, k + 1, abs);
}

pub(super) fn linear_dx(run: &mut Run<'_>, op: &LinearDx) {
    let (dy, w) = (run.floats(op.dy), run.floats(op.w));
    let (t, k, n) = (run.rows(op.dx), run.cols(op.dx), op.rows.len());
    let mut dx = if op.accumulate { run.floats(op.dx) } else { vec![0.0; t * k] };
    let mut abs: Vec<f64> = dx.iter().map(|v| v.abs()).collect();
    for i in 0..t {
        for (c, r) in op.rows.clone().enumerate() {
            for j in 0..k {
                let term = dy[i * n + c] * w[r * k + j];
                dx[i * k + j] += term;
                abs[i * k + j] += term.abs();
            }
        }
    }
    run.put(op.dx, dx, n + 1, abs);
}

pub(super) fn linear_dw(run: &mut Run<'_>, op: &LinearDw) {
    let (dy, x) = (run.floats(op.dy), run.floats(op.x));
    let (t, k, n) = (run.rows(op.x), run.cols(op.x), op.rows.len());
    let mut dw = run.floats(op.dw);
    let mut abs: Vec<f64> = dw.iter().map(|v| v.abs()).collect();
    for (c, r) in op.rows.clone().enumerate() {
        for j in 0..k {
            for i in 0..t {
                let term = dy[i * n + c] * x[i * k + j];
                dw[r * k + j] += term;
                abs[r * k + j] += term.abs();
            }
        }
    }
    run.put(op.dw, dw, t + 1, abs);
    if let Some(out) = op.db {
        let mut db = run.floats(out);
        let mut abs: Vec<f64> = db.iter().map(|v| v.abs()).collect();
        for (c, r) in op.rows.clone().enumerate() {
            for i in 0..t {
                db[r] += dy[i * n + c];
                abs[r] += dy[i * n + c].abs();
            }
        }
        run.put(out, db, t + 1, abs);
    }
}
