//! Attention of the target on the CPU: causal over packed samples, and cached. Contracts: `graph::op::{causal_attention, cached_attention}`.
//!
//! Job: rows of queries against whole key ranges, as GEMMs over scratch of `rows × visible keys` (never S×S). Refuses nothing.
//! Invariants: every output row belongs to one task, so results do not depend on threads; masked scores never enter a maximum or a sum.

use crate::gemm::{self, Into, Rows, Threads};
use crate::math::{exp_sum, max, wide};
use crate::memory::Views;
use crate::scratch::{Need, Scratch, carve};
use drafthorse_graph::Program;
use drafthorse_graph::op::{CachedAttention, CausalAttention, Heads, KvAppend};
use rayon::prelude::*;
use std::ops::Range;

/// Query rows of one causal task: enough for an efficient GEMM, few enough to share among threads.
const QUERY_TILE: usize = 64;
/// Query rows of one decoding task: fixed, so that a row's result does not depend on how many rows there are.
const DECODE_TILE: usize = 4;
/// Scratch of causal attention: one task's scores over every row of the batch.
pub fn causal_need(op: &CausalAttention, program: &Program) -> Need {
    Need { per_thread: QUERY_TILE * (2 * op.heads.dim + program.get(op.k).rows()), shared: 0 }
}

/// Scratch of cached attention: one task's scores over the whole cache.
pub fn cached_need(op: &CachedAttention, program: &Program) -> Need {
    Need { per_thread: DECODE_TILE * (2 * op.heads.dim + program.get(op.cache.k).rows()), shared: 0 }
}

/// Columns of one head in a packed row of `heads`.
pub fn head(data: &[f32], rows: Range<usize>, index: usize, heads: usize, dim: usize) -> Rows<'_> {
    let stride = heads * dim;
    let end = if rows.is_empty() { rows.start * stride } else { (rows.end - 1) * stride + (index + 1) * dim };
    let start = (rows.start * stride + index * dim).min(end);
    Rows { data: &data[start..end], rows: rows.len(), cols: dim, stride }
}

/// Copies one head's columns out of packed rows into contiguous rows, scaled.
pub fn pack(to: &mut [f32], data: &[f32], rows: Range<usize>, index: usize, heads: usize, dim: usize, scale: f32) {
    for (to, row) in to.chunks_mut(dim).zip(rows) {
        let at = row * heads * dim + index * dim;
        to.iter_mut().zip(&data[at..at + dim]).for_each(|(t, s)| *t = s * scale);
    }
}

/// Softmax over the first `visible(r)` scores of each row; the rest of the row becomes zero.
fn softmax_rows(scores: &mut [f32], cols: usize, visible: impl Fn(usize) -> usize) {
    for (r, row) in scores.chunks_mut(cols).enumerate() {
        let (seen, hidden) = row.split_at_mut(visible(r));
        wide(
            #[inline(always)]
            || {
                let top = max(seen);
                let scale = 1.0 / exp_sum(seen, top);
                seen.iter_mut().for_each(|p| *p *= scale);
            },
        );
        hidden.fill(0.0);
    }
}

/// Queries `rows` of `q` over keys `keys`; query row r sees `keys.start..=last(r)`. `o` holds exactly the rows' output.
#[expect(clippy::too_many_arguments, reason = "private: one attention tile, shared by causal and cached attention")]
fn tile(
    scratch: &Scratch,
    o: &mut [f32],
    q: &[f32],
    rows: Range<usize>,
    k: &[f32],
    v: &[f32],
    keys: Range<usize>,
    heads: Heads,
    last: impl Fn(usize) -> usize + Copy,
) {
    let (d, n, len) = (heads.dim, rows.len(), keys.len());
    scratch.local(n * d * 2 + n * len, |scratch| {
        let [packed, scores, out] = carve(scratch, [n * d, n * len, n * d]);
        for h in 0..heads.q {
            let g = h / heads.group();
            pack(packed, q, rows.clone(), h, heads.q, d, heads.scale());
            gemm::x_wt(scores, Rows::new(packed, n, d), head(k, keys.clone(), g, heads.kv, d), Into::Write, Threads::One);
            softmax_rows(scores, len, |r| last(rows.start + r) + 1 - keys.start);
            gemm::x_w(out, Rows::new(scores, n, len), head(v, keys.clone(), g, heads.kv, d), Into::Write, Threads::One);
            for (o, out) in o.chunks_mut(heads.q_cols()).zip(out.chunks(d)) {
                o[h * d..(h + 1) * d].copy_from_slice(out);
            }
        }
    });
}

/// Causal attention over packed samples.
pub fn causal(op: &CausalAttention, _program: &Program, views: &mut Views<'_>) {
    let (o, scratch) = (views.take(op.o), views.scratch());
    let (q, k, v) = (views.read(op.q), views.read(op.k), views.read(op.v));
    let (cu, n) = (views.ints(op.packing.cu_seqlens), views.count(op.packing.n_seqs));
    let width = op.heads.q_cols();
    let mut tasks = Vec::new();
    let mut rest = o;
    let mut done = 0;
    for s in 0..n {
        let (start, end) = (cu[s] as usize, cu[s + 1] as usize);
        for first in (start..end).step_by(QUERY_TILE) {
            let rows = first..(first + QUERY_TILE).min(end);
            let (mine, tail) = rest.split_at_mut(rows.len() * width);
            rest = tail;
            done = rows.end;
            tasks.push((mine, rows, start));
        }
    }
    rest.fill(0.0);
    assert!(n == 0 || done == cu[n] as usize, "samples are contiguous from row 0");
    tasks.into_par_iter().for_each(|(o, rows, start)| {
        let keys = start..rows.end;
        tile(scratch, o, q, rows, k, v, keys, op.heads, |row| row);
    });
}

/// Appends rows to the caches.
pub fn kv_append(op: &KvAppend, program: &Program, views: &mut Views<'_>) {
    let (len, width) = (views.count(op.cache.len), program.get(op.k).cols());
    for (cache, src) in [(op.cache.k, op.k), (op.cache.v, op.v)] {
        let src = views.read(src);
        let cache = views.take(cache);
        assert!((len * width + src.len()) <= cache.len(), "the cache of {} rows is full at {len}", cache.len() / width);
        cache[len * width..len * width + src.len()].copy_from_slice(src);
    }
}

/// A few rows over a cache.
pub fn cached(op: &CachedAttention, _program: &Program, views: &mut Views<'_>) {
    let len = views.count(op.cache.len);
    let (o, scratch) = (views.take(op.o), views.scratch());
    let (q, k, v) = (views.read(op.q), views.read(op.cache.k), views.read(op.cache.v));
    let width = op.heads.q_cols();
    o.par_chunks_mut(DECODE_TILE * width).enumerate().for_each(|(t, o)| {
        let rows = t * DECODE_TILE..t * DECODE_TILE + o.len() / width;
        let keys = 0..len + rows.end;
        tile(scratch, o, q, rows, k, v, keys, op.heads, |row| len + row);
    });
}
