//! `KvAppend` and `CachedAttention`, naively. Refuses a cache that overflows.

use super::Run;
use super::softmax_row::softmax_row;
use drafthorse_graph::op::{CachedAttention, KvAppend};

pub(super) fn kv_append(run: &mut Run<'_>, op: &KvAppend) {
    let len = run.count(op.cache.len);
    for (new, cache) in [(op.k, op.cache.k), (op.v, op.cache.v)] {
        let (new, mut held, cols) = (run.floats(new), run.floats(cache), run.cols(cache));
        assert!(len * cols + new.len() <= held.len(), "the cache is full");
        held[len * cols..len * cols + new.len()].copy_from_slice(&new);
        run.put_copy(cache, held);
    }
}

pub(super) fn cached_attention(run: &mut Run<'_>, op: &CachedAttention) {
    let (q, k, v) = (run.floats(op.q), run.floats(op.cache.k), run.floats(op.cache.v));
    let (len, rows, d, group) = (run.count(op.cache.len), run.rows(op.q), op.heads.dim, op.heads.group());
    let (q_cols, kv_cols) = (op.heads.q_cols(), op.heads.kv_cols());
    assert!(len + rows <= run.rows(op.cache.k), "the cache is full");
    let scale = (d as f64).powf(-0.5);
    let (mut o, mut abs, mut rounded) = (Vec::new(), Vec::new(), Vec::new());
    for r in 0..rows {
        for h in 0..op.heads.q {
            let at = |j: usize| j * kv_cols + h / group * d;
            let keys: Vec<&[f64]> = (0..=len + r).map(|j| &k[at(j)..at(j) + d]).collect();
            let values: Vec<&[f64]> = (0..=len + r).map(|j| &v[at(j)..at(j) + d]).collect();
            let from = r * q_cols + h * d;
            let row = softmax_row(&q[from..from + d], &keys, &values, scale);
            o.extend(row.o);
            abs.extend(row.abs);
            rounded.extend(row.rounded);
        }
    }
    run.put_rounded(op.o, o, len + rows + d, abs, rounded);
}
