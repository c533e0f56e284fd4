//! `Linear` and its gradients on the CPU. Contract: `graph::op::linear`. Refuses nothing the builder has not refused.
//! Invariant: a bias gradient is summed over rows in order, one thread per column range.

use crate::gemm::{self, Into, Rows, Threads};
use crate::memory::Views;
use drafthorse_graph::Program;
use drafthorse_graph::op::{Linear, LinearDw, LinearDx};
use rayon::prelude::*;

/// `y = x W[rows]ᵀ (+ b[rows])`.
pub fn forward(op: &Linear, program: &Program, views: &mut Views<'_>) {
    let x = program.get(op.x);
    let (t, k, n) = (x.rows(), x.cols(), op.rows.len());
    let y = views.take(op.y);
    let w = &views.read(op.w)[op.rows.start * k..op.rows.end * k];
    gemm::x_wt(y, Rows::new(views.read(op.x), t, k), Rows::new(w, n, k), Into::Write, Threads::All);
    if let Some(bias) = op.bias {
        let bias = &views.read(bias)[op.rows.clone()];
        y.par_chunks_mut(n).for_each(|row| row.iter_mut().zip(bias).for_each(|(y, b)| *y += b));
    }
}

/// `dx = dy W[rows]`, written or added.
pub fn dx(op: &LinearDx, program: &Program, views: &mut Views<'_>) {
    let (t, n, k) = (program.get(op.dy).rows(), op.rows.len(), program.get(op.dx).cols());
    let dx = views.take(op.dx);
    let w = &views.read(op.w)[op.rows.start * k..op.rows.end * k];
    let into = if op.accumulate { Into::Add } else { Into::Write };
    gemm::x_w(dx, Rows::new(views.read(op.dy), t, n), Rows::new(w, n, k), into, Threads::All);
}

/// `dw[rows] += dyᵀ x`, `db[rows] += Σ dy`.
pub fn dw(op: &LinearDw, program: &Program, views: &mut Views<'_>) {
    let (t, n, k) = (program.get(op.dy).rows(), op.rows.len(), program.get(op.x).cols());
    let dw = &mut views.take(op.dw)[op.rows.start * k..op.rows.end * k];
    let dy = views.read(op.dy);
    gemm::xt_w(dw, Rows::new(dy, t, n), Rows::new(views.read(op.x), t, k), Into::Add, Threads::All);
    if let Some(db) = op.db {
        let db = &mut views.take(db)[op.rows.clone()];
        db.par_iter_mut().enumerate().for_each(|(j, db)| *db += (0..t).map(|i| dy[i * n + j]).sum::<f32>());
    }
}
