//! `GatherRows` and `ScatterRows`, naively. Refuses valid indices outside their tensor; never looks past the count.

use super::{Run, row};
use drafthorse_graph::op::{GatherRows, ScatterRows};

pub(super) fn gather_rows(run: &mut Run<'_>, op: &GatherRows) {
    let (x, rows, count) = (run.floats(op.x), run.ints(op.compaction.rows), run.count(op.compaction.count));
    let (n, h) = (run.rows(op.x), run.cols(op.x));
    let mut y = vec![0.0; rows.len() * h];
    for m in 0..count {
        let r = row(rows[m], n, "gathered row");
        y[m * h..(m + 1) * h].copy_from_slice(&x[r * h..(r + 1) * h]);
    }
    run.put_copy(op.y, y);
}

pub(super) fn scatter_rows(run: &mut Run<'_>, op: &ScatterRows) {
    let (dy, inverse) = (run.floats(op.dy), run.ints(op.inverse));
    let (m, h) = (run.rows(op.dy), run.cols(op.dy));
    let mut dx = vec![0.0; inverse.len() * h];
    for (r, &i) in inverse.iter().enumerate().filter(|&(_, &i)| i >= 0) {
        let i = row(i, m, "scattered row");
        dx[r * h..(r + 1) * h].copy_from_slice(&dy[i * h..(i + 1) * h]);
    }
    run.put_copy(op.dx, dx);
}
