//! Row copies and SwiGLU. Contracts: `graph::op::{embed, capture, gather, swiglu}`.
//! Refuses ids and rows outside their tables (a panic: the batch builder checked them). Invariant: every output element is written.

use crate::math::{exp, wide};
use crate::memory::Views;
use drafthorse_graph::Program;
use drafthorse_graph::op::{Capture, Embed, GatherRows, ScatterRows, SwiGlu, SwiGluBwd};
use rayon::prelude::*;

/// `y[t] = table[ids[t]]`.
pub fn embed(op: &Embed, program: &Program, views: &mut Views<'_>) {
    let h = program.get(op.table).cols();
    let (y, ids, table) = (views.take(op.y), views.ints(op.ids), views.read(op.table));
    y.par_chunks_mut(h).zip(ids).for_each(|(y, &id)| {
        let id = usize::try_from(id).expect("token ids are not negative");
        y.copy_from_slice(&table[id * h..(id + 1) * h]);
    });
}

/// `dst[:, dst_col..] = src[:, src_col..]`.
pub fn capture(op: &Capture, program: &Program, views: &mut Views<'_>) {
    let (sw, dw) = (program.get(op.src).cols(), program.get(op.dst).cols());
    let (dst, src) = (views.take(op.dst), views.read(op.src));
    dst.par_chunks_mut(dw).zip(src.par_chunks(sw)).for_each(|(d, s)| {
        d[op.dst_col..op.dst_col + op.cols].copy_from_slice(&s[op.src_col..op.src_col + op.cols]);
    });
}

/// `y[m] = x[rows[m]]`, zero past the count.
pub fn gather_rows(op: &GatherRows, program: &Program, views: &mut Views<'_>) {
    let h = program.get(op.x).cols();
    let (y, x) = (views.take(op.y), views.read(op.x));
    let (rows, count) = (views.ints(op.compaction.rows), views.count(op.compaction.count));
    y.par_chunks_mut(h).enumerate().for_each(|(m, y)| {
        if m < count {
            let row = usize::try_from(rows[m]).expect("row indices are not negative");
            y.copy_from_slice(&x[row * h..(row + 1) * h]);
        } else {
            y.fill(0.0);
        }
    });
}

/// `dx[r] = dy[inverse[r]]`, zero where the inverse is negative.
pub fn scatter_rows(op: &ScatterRows, program: &Program, views: &mut Views<'_>) {
    let h = program.get(op.dy).cols();
    let (dx, dy, inverse) = (views.take(op.dx), views.read(op.dy), views.ints(op.inverse));
    dx.par_chunks_mut(h).zip(inverse).for_each(|(dx, &from)| match usize::try_from(from) {
        Ok(from) => dx.copy_from_slice(&dy[from * h..(from + 1) * h]),
        Err(_) => dx.fill(0.0),
    });
}

/// `silu(gate) ⊙ up`.
pub fn swiglu(op: &SwiGlu, program: &Program, views: &mut Views<'_>) {
    let i = program.get(op.y).cols();
    let (y, gu) = (views.take(op.y), views.read(op.gu));
    y.par_chunks_mut(i).zip(gu.par_chunks(2 * i)).for_each(|(y, gu)| {
        let (gate, up) = gu.split_at(i);
        wide(
            #[inline(always)]
            || {
                for ((y, &g), u) in y.iter_mut().zip(gate).zip(up) {
                    *y = g / (1.0 + exp(-g)) * u;
                }
            },
        );
    });
}

/// Gradients of gate and up.
pub fn swiglu_bwd(op: &SwiGluBwd, program: &Program, views: &mut Views<'_>) {
    let i = program.get(op.dy).cols();
    let (dgu, gu, dy) = (views.take(op.dgu), views.read(op.gu), views.read(op.dy));
    dgu.par_chunks_mut(2 * i).zip(gu.par_chunks(2 * i)).zip(dy.par_chunks(i)).for_each(|((dgu, gu), dy)| {
        let ((dg, du), (gate, up)) = (dgu.split_at_mut(i), gu.split_at(i));
        wide(
            #[inline(always)]
            || {
                for j in 0..i {
                    let sigma = 1.0 / (1.0 + exp(-gate[j]));
                    du[j] = dy[j] * gate[j] * sigma;
                    dg[j] = dy[j] * up[j] * sigma * (1.0 + gate[j] * (1.0 - sigma));
                }
            },
        );
    });
}
