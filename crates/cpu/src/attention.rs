//! All attention on the CPU: causal over packed samples, cached, and block-diffusion with its backward.
//! Contracts: `graph::op::{causal_attention, cached_attention, block_attention}`.
//!
//! Job: rows of queries against whole key ranges, as GEMMs over scratch of `rows × visible keys` (never S×S). Refuses nothing.
//! Invariants: every output row belongs to one task, so results do not depend on threads; masked scores never enter a maximum or a sum.

use crate::gemm::{self, Into, Rows, Threads};
use crate::math::{dot, exp, exp_sum, max, wide};
use crate::memory::Views;
use drafthorse_graph::Program;
use drafthorse_graph::op::{BlockAttention, BlockAttentionBwd, CachedAttention, CausalAttention, Heads, KvAppend};
use rayon::prelude::*;
use std::cell::RefCell;
use std::ops::Range;

/// Query rows of one causal task: enough for an efficient GEMM, few enough to share among threads.
const QUERY_TILE: usize = 64;
/// Query rows of one decoding task: fixed, so that a row's result does not depend on how many rows there are.
const DECODE_TILE: usize = 4;
/// Context rows of one task of the context-gradient pass.
const CONTEXT_TILE: usize = 128;

thread_local! {
    static SCRATCH: RefCell<Vec<f32>> = const { RefCell::new(Vec::new()) };
}

/// Runs `f` on `len` floats of this thread's scratch, whose content is arbitrary. Must not be nested.
fn with_scratch<R>(len: usize, f: impl FnOnce(&mut [f32]) -> R) -> R {
    SCRATCH.with_borrow_mut(|scratch| {
        if scratch.len() < len {
            scratch.resize(len, 0.0);
        }
        f(&mut scratch[..len])
    })
}

fn carve<const N: usize>(mut scratch: &mut [f32], sizes: [usize; N]) -> [&mut [f32]; N] {
    sizes.map(|n| {
        let (head, tail) = std::mem::take(&mut scratch).split_at_mut(n);
        scratch = tail;
        head
    })
}

/// Columns of one head in a packed row of `heads`.
fn head(data: &[f32], rows: Range<usize>, index: usize, heads: usize, dim: usize) -> Rows<'_> {
    let stride = heads * dim;
    let end = if rows.is_empty() { rows.start * stride } else { (rows.end - 1) * stride + (index + 1) * dim };
    let start = (rows.start * stride + index * dim).min(end);
    Rows { data: &data[start..end], rows: rows.len(), cols: dim, stride }
}

/// Copies one head's columns out of packed rows into contiguous rows, scaled.
fn pack(to: &mut [f32], data: &[f32], rows: Range<usize>, index: usize, heads: usize, dim: usize, scale: f32) {
    for (to, row) in to.chunks_mut(dim).zip(rows) {
        let at = row * heads * dim + index * dim;
        to.iter_mut().zip(&data[at..at + dim]).for_each(|(t, s)| *t = s * scale);
    }
}

/// Softmax over the first `visible(r)` scores of each row; the rest of the row becomes zero.
fn softmax_rows(scores: &mut [f32], cols: usize, visible: impl Fn(usize) -> usize) {
    for (r, row) in scores.chunks_mut(cols).enumerate() {
        let (seen, hidden) = row.split_at_mut(visible(r));
        wide(|| {
            let top = max(seen);
            let scale = 1.0 / exp_sum(seen, top);
            seen.iter_mut().for_each(|p| *p *= scale);
        });
        hidden.fill(0.0);
    }
}

/// Queries `rows` of `q` over keys `keys`; query row r sees `keys.start..=last(r)`. `o` holds exactly the rows' output.
#[expect(clippy::too_many_arguments, reason = "private: one attention tile, shared by causal and cached attention")]
fn tile(
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
    with_scratch(n * d * 2 + n * len, |scratch| {
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
    let o = views.take(op.o);
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
        tile(o, q, rows, k, v, keys, op.heads, |row| row);
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
    let o = views.take(op.o);
    let (q, k, v) = (views.read(op.q), views.read(op.cache.k), views.read(op.cache.v));
    let width = op.heads.q_cols();
    o.par_chunks_mut(DECODE_TILE * width).enumerate().for_each(|(t, o)| {
        let rows = t * DECODE_TILE..t * DECODE_TILE + o.len() / width;
        let keys = 0..len + rows.end;
        tile(o, q, rows, k, v, keys, op.heads, |row| len + row);
    });
}

/// What one block sees.
struct Seen {
    /// Packed context rows that some slot of the block sees.
    ctx: Range<usize>,
    /// Context rows at the front of `ctx` hidden from slot k: grows with k under a sliding window.
    window: Option<(usize, usize)>,
}

impl Seen {
    fn new(start: usize, anchor: usize, window: Option<usize>) -> Seen {
        let low = window.map_or(0, |w| (anchor + 1).saturating_sub(w));
        Seen { ctx: start + low..start + anchor.max(low), window: window.map(|w| (anchor, w)) }
    }

    /// First visible entry of `ctx` for slot k.
    fn first(&self, k: usize) -> usize {
        self.window
            .map_or(0, |(anchor, w)| {
                let low = (anchor + 1).saturating_sub(w);
                ((anchor + k + 1).saturating_sub(w)).max(low) - low
            })
            .min(self.ctx.len())
    }

    /// Visible slots of the own block for slot k of B.
    fn own(&self, k: usize, size: usize) -> usize {
        if self.window.is_some() { k + 1 } else { size }
    }
}

/// Block-diffusion attention.
pub fn block(op: &BlockAttention, program: &Program, views: &mut Views<'_>) {
    let (size, heads) = (op.blocks.size, op.heads);
    let (o, lse) = (views.take(op.o), views.take(op.lse));
    let (q, kc, vc) = (views.read(op.q), views.read(op.k_ctx), views.read(op.v_ctx));
    let (kb, vb) = (views.read(op.k_blk), views.read(op.v_blk));
    let (starts, anchors, n) = (views.ints(op.blocks.ctx_start), views.ints(op.blocks.anchor), views.count(op.blocks.n_blocks));
    let (d, group) = (heads.dim, heads.group());
    let blocks = program.get(op.blocks.anchor).len();
    assert!(n <= blocks, "{n} blocks of {blocks}");
    (o.par_chunks_mut(size * heads.q_cols()), lse.par_chunks_mut(size * heads.q)).into_par_iter().enumerate().for_each(
        |(b, (o, lse))| {
            if b >= n {
                o.fill(0.0);
                lse.fill(0.0);
                return;
            }
            let seen = Seen::new(starts[b] as usize, anchors[b] as usize, op.window);
            let (len, rows) = (seen.ctx.len(), group * size);
            let mine = b * size..(b + 1) * size;
            with_scratch(rows * (2 * d + len + size), |scratch| {
                let [packed, ctx, own, out] = carve(scratch, [rows * d, rows * len, rows * size, rows * d]);
                for g in 0..heads.kv {
                    for j in 0..group {
                        pack(&mut packed[j * size * d..], q, mine.clone(), g * group + j, heads.q, d, heads.scale());
                    }
                    let packed = Rows::new(packed, rows, d);
                    gemm::x_wt(ctx, packed, head(kc, seen.ctx.clone(), g, heads.kv, d), Into::Write, Threads::One);
                    gemm::x_wt(own, packed, head(kb, mine.clone(), g, heads.kv, d), Into::Write, Threads::One);
                    for r in 0..rows {
                        let k = r % size;
                        let (hidden, c) = ctx[r * len..(r + 1) * len].split_at_mut(seen.first(k));
                        let (p, beyond) = own[r * size..(r + 1) * size].split_at_mut(seen.own(k, size));
                        hidden.fill(0.0);
                        beyond.fill(0.0);
                        wide(|| {
                            let (a, b) = (max(c), max(p));
                            let top = if c.is_empty() { b } else { a.max(b) + a * 0.0 };
                            let sum = exp_sum(c, top) + exp_sum(p, top);
                            let scale = 1.0 / sum;
                            c.iter_mut().for_each(|x| *x *= scale);
                            p.iter_mut().for_each(|x| *x *= scale);
                            lse[k * heads.q + g * group + r / size] = top + sum.ln();
                        });
                    }
                    gemm::x_w(out, Rows::new(own, rows, size), head(vb, mine.clone(), g, heads.kv, d), Into::Write, Threads::One);
                    gemm::x_w(
                        out,
                        Rows::new(ctx, rows, len),
                        head(vc, seen.ctx.clone(), g, heads.kv, d),
                        Into::Add,
                        Threads::One,
                    );
                    for r in 0..rows {
                        let (k, h) = (r % size, g * group + r / size);
                        o[k * heads.q_cols() + h * d..][..d].copy_from_slice(&out[r * d..(r + 1) * d]);
                    }
                }
            });
        },
    );
}

/// The operands of a backward pass over blocks.
struct BlockGrad<'a> {
    size: usize,
    heads: Heads,
    q: &'a [f32],
    d_o: &'a [f32],
    lse: &'a [f32],
    starts: &'a [i32],
    anchors: &'a [i32],
    window: Option<usize>,
}

impl BlockGrad<'_> {
    fn seen(&self, b: usize) -> Seen {
        Seen::new(self.starts[b] as usize, self.anchors[b] as usize, self.window)
    }

    /// Packs scaled queries and output gradients of block `b` for key head `g`: rows (head of the group, slot).
    fn pack(&self, q: &mut [f32], d_o: &mut [f32], b: usize, g: usize) {
        let (d, group) = (self.heads.dim, self.heads.group());
        let mine = b * self.size..(b + 1) * self.size;
        for j in 0..group {
            let (at, h) = (j * self.size * d, g * group + j);
            pack(&mut q[at..at + self.size * d], self.q, mine.clone(), h, self.heads.q, d, self.heads.scale());
            pack(&mut d_o[at..at + self.size * d], self.d_o, mine.clone(), h, self.heads.q, d, 1.0);
        }
    }

    /// Scores → probabilities, in place; `first..` of each row is visible.
    fn probabilities(&self, scores: &mut [f32], cols: usize, b: usize, g: usize, visible: impl Fn(usize) -> Range<usize>) {
        if cols == 0 {
            return;
        }
        for (r, row) in scores.chunks_mut(cols).enumerate() {
            let (k, h) = (r % self.size, g * self.heads.group() + r / self.size);
            let lse = self.lse[(b * self.size + k) * self.heads.q + h];
            let range = visible(k);
            wide(|| {
                row[range.clone()].iter_mut().for_each(|s| *s = exp(*s - lse));
            });
            row[..range.start].fill(0.0);
            row[range.end..].fill(0.0);
        }
    }

    /// dP → dS, in place: `dS = P ⊙ (dP - δ)`.
    fn score_gradients(&self, d_scores: &mut [f32], p: &[f32], cols: usize, delta: impl Fn(usize, usize) -> f32) {
        if cols == 0 {
            return;
        }
        for (r, (ds, p)) in d_scores.chunks_mut(cols).zip(p.chunks(cols)).enumerate() {
            let delta = delta(r % self.size, r / self.size);
            wide(|| ds.iter_mut().zip(p).for_each(|(ds, p)| *ds = p * (*ds - delta)));
        }
    }
}

/// Backward of block-diffusion attention: one pass over blocks for δ, dq and the blocks' own dk, dv; one over context tiles.
pub fn block_bwd(op: &BlockAttentionBwd, program: &Program, views: &mut Views<'_>) {
    let f = &op.forward;
    let (size, heads) = (f.blocks.size, f.heads);
    let (d, group, rows) = (heads.dim, heads.group(), heads.group() * size);
    let n = views.count(f.blocks.n_blocks);
    let (delta, dq, dkb, dvb) = (views.take(op.delta), views.take(op.dq), views.take(op.dk_blk), views.take(op.dv_blk));
    let (dkc, dvc) = (views.take(op.dk_ctx), views.take(op.dv_ctx));
    let (kc, vc, kb, vb) = (views.read(f.k_ctx), views.read(f.v_ctx), views.read(f.k_blk), views.read(f.v_blk));
    let o = views.read(f.o);
    let grad = BlockGrad {
        size,
        heads,
        q: views.read(f.q),
        d_o: views.read(op.d_o),
        lse: views.read(f.lse),
        starts: views.ints(f.blocks.ctx_start),
        anchors: views.ints(f.blocks.anchor),
        window: f.window,
    };
    let (scale, kv_row) = (heads.scale(), size * heads.kv_cols());
    (
        delta.par_chunks_mut(size * heads.q),
        dq.par_chunks_mut(size * heads.q_cols()),
        dkb.par_chunks_mut(kv_row),
        dvb.par_chunks_mut(kv_row),
    )
        .into_par_iter()
        .enumerate()
        .for_each(|(b, (delta, dq, dkb, dvb))| {
            if b >= n {
                [delta, dq, dkb, dvb].into_iter().for_each(|x| x.fill(0.0));
                return;
            }
            for (i, delta) in delta.iter_mut().enumerate() {
                let at = b * size * heads.q_cols() + i * d;
                *delta = dot(&grad.d_o[at..at + d], &o[at..at + d]);
            }
            let seen = grad.seen(b);
            let len = seen.ctx.len();
            let mine = b * size..(b + 1) * size;
            with_scratch(rows * (3 * d + 2 * len + 2 * size) + size * d, |scratch| {
                let sizes = [rows * d, rows * d, rows * len, rows * len, rows * size, rows * size, rows * d, size * d];
                let [q, d_o, p_ctx, ds_ctx, p_own, ds_own, out, kv] = carve(scratch, sizes);
                for g in 0..heads.kv {
                    grad.pack(q, d_o, b, g);
                    let (q, d_o) = (Rows::new(q, rows, d), Rows::new(d_o, rows, d));
                    let (kc, vc) = (head(kc, seen.ctx.clone(), g, heads.kv, d), head(vc, seen.ctx.clone(), g, heads.kv, d));
                    let (kb, vb) = (head(kb, mine.clone(), g, heads.kv, d), head(vb, mine.clone(), g, heads.kv, d));
                    gemm::x_wt(p_ctx, q, kc, Into::Write, Threads::One);
                    gemm::x_wt(p_own, q, kb, Into::Write, Threads::One);
                    grad.probabilities(p_ctx, len, b, g, |k| seen.first(k)..len);
                    grad.probabilities(p_own, size, b, g, |k| 0..seen.own(k, size));
                    gemm::x_wt(ds_ctx, d_o, vc, Into::Write, Threads::One);
                    gemm::x_wt(ds_own, d_o, vb, Into::Write, Threads::One);
                    let delta_of = |k: usize, j: usize| delta[k * heads.q + g * group + j];
                    grad.score_gradients(ds_ctx, p_ctx, len, delta_of);
                    grad.score_gradients(ds_own, p_own, size, delta_of);
                    gemm::x_w(out, Rows::new(ds_own, rows, size), kb, Into::Write, Threads::One);
                    gemm::x_w(out, Rows::new(ds_ctx, rows, len), kc, Into::Add, Threads::One);
                    for r in 0..rows {
                        let (k, h) = (r % size, g * group + r / size);
                        let to = &mut dq[k * heads.q_cols() + h * d..][..d];
                        to.iter_mut().zip(&out[r * d..]).for_each(|(t, x)| *t = x * scale);
                    }
                    // q is scaled already, so dSᵀ q is the whole gradient of k.
                    for (to, a, b) in [(&mut *dkb, &*ds_own, q), (&mut *dvb, &*p_own, d_o)] {
                        gemm::xt_w(kv, Rows::new(a, rows, size), b, Into::Write, Threads::One);
                        for (to, from) in to.chunks_mut(heads.kv_cols()).zip(kv.chunks(d)) {
                            to[g * d..(g + 1) * d].copy_from_slice(from);
                        }
                    }
                }
            });
        });
    let delta = &*delta;
    let width = heads.kv_cols();
    let context_rows = program.get(f.k_ctx).rows();
    // ctx_start + anchor ascends over blocks, so the blocks that see a row range are contiguous.
    let end_of = |b: usize| (grad.starts[b] + grad.anchors[b]) as usize;
    (dkc.par_chunks_mut(CONTEXT_TILE * width), dvc.par_chunks_mut(CONTEXT_TILE * width)).into_par_iter().enumerate().for_each(
        |(t, (dkc, dvc))| {
            let tile = t * CONTEXT_TILE..((t + 1) * CONTEXT_TILE).min(context_rows);
            let first = partition_point(n, |b| end_of(b) <= tile.start);
            with_scratch(rows * (2 * d + 2 * CONTEXT_TILE) + CONTEXT_TILE * d, |scratch| {
                for b in (first..n).take_while(|&b| (grad.starts[b] as usize) < tile.end) {
                    let seen = grad.seen(b);
                    let keys = seen.ctx.start.max(tile.start)..seen.ctx.end.min(tile.end);
                    if keys.is_empty() {
                        continue;
                    }
                    let len = keys.len();
                    let sizes = [rows * d, rows * d, rows * len, rows * len, len * d];
                    let [q, d_o, p, ds, kv] = carve(scratch, sizes);
                    for g in 0..heads.kv {
                        grad.pack(q, d_o, b, g);
                        let (q, d_o) = (Rows::new(q, rows, d), Rows::new(d_o, rows, d));
                        gemm::x_wt(p, q, head(kc, keys.clone(), g, heads.kv, d), Into::Write, Threads::One);
                        let offset = keys.start - seen.ctx.start;
                        grad.probabilities(p, len, b, g, |k| seen.first(k).saturating_sub(offset).min(len)..len);
                        gemm::x_wt(ds, d_o, head(vc, keys.clone(), g, heads.kv, d), Into::Write, Threads::One);
                        grad.score_gradients(ds, p, len, |k, j| delta[(b * size + k) * heads.q + g * group + j]);
                        for (to, a, b) in [(&mut *dkc, &*ds, q), (&mut *dvc, &*p, d_o)] {
                            gemm::xt_w(kv, Rows::new(a, rows, len), b, Into::Write, Threads::One);
                            let to = &mut to[(keys.start - tile.start) * width..];
                            for (to, from) in to.chunks_mut(width).zip(kv.chunks(d)) {
                                to[g * d..(g + 1) * d].iter_mut().zip(from).for_each(|(t, x)| *t += x);
                            }
                        }
                    }
                }
            });
        },
    );
}

/// The first of `0..n` for which `before` is false; `before` is monotone.
fn partition_point(n: usize, before: impl Fn(usize) -> bool) -> usize {
    let (mut low, mut high) = (0, n);
    while low < high {
        let mid = (low + high) / 2;
        if before(mid) { low = mid + 1 } else { high = mid }
    }
    low
}
