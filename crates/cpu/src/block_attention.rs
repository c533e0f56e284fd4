//! Block-diffusion attention on the CPU and its backward. Contract: `graph::op::block_attention`.
//!
//! Job: a block's queries of one key head against all context rows that the block sees, as GEMMs over scratch of `rows × visible keys` (never S×S).
//! The backward forms scores and their gradients once (five products): a task owns a run of blocks and one key head, and adds what its blocks have to say
//! about the context into sums of its own while they are in its cache; the sums of all runs are then added in order. Refuses nothing.
//! Invariants: every output element belongs to one task, and runs follow from the batch alone, so results do not depend on threads; masked scores never
//! enter a maximum or a sum.

use crate::attention::{head, pack};
use crate::gemm::{self, Into, Rows, Threads};
use crate::math::{dot, exp, exp_sum, max, wide};
use crate::memory::Views;
use crate::scratch::{Need, carve};
use drafthorse_graph::Program;
use drafthorse_graph::op::{BlockAttention, BlockAttentionBwd, Heads};
use rayon::prelude::*;
use std::ops::Range;

/// Context rows of one task that adds up the runs.
const CONTEXT_TILE: usize = 128;
/// Runs of blocks in the backward: times the key heads, enough tasks for the threads of a small machine. Each costs room for a gradient of the context.
const RUNS: usize = 8;

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

/// Query rows of one key head in a block.
fn group_rows(op: &BlockAttention) -> usize {
    op.heads.group() * op.blocks.size
}

/// Scratch of the forward pass: one block's scores over all context rows.
pub fn need(op: &BlockAttention, program: &Program) -> Need {
    let context = program.get(op.k_ctx).rows();
    Need { per_thread: group_rows(op) * (2 * op.heads.dim + context + op.blocks.size), shared: 0 }
}

/// Scratch of the backward: one block's P and dS over all context rows, and the runs' sums of dk and dv.
pub fn need_bwd(op: &BlockAttentionBwd, program: &Program) -> Need {
    let f = &op.forward;
    let context = program.get(f.k_ctx).rows();
    let runs = RUNS.min(program.get(f.blocks.anchor).len());
    Need {
        per_thread: group_rows(f) * (3 * f.heads.dim + 2 * (context + f.blocks.size)),
        shared: runs * 2 * context * f.heads.kv_cols(),
    }
}

/// Block-diffusion attention.
pub fn forward(op: &BlockAttention, program: &Program, views: &mut Views<'_>) {
    let (size, heads, scratch) = (op.blocks.size, op.heads, views.scratch());
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
            scratch.local(rows * (2 * d + len + size), |scratch| {
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
                        wide(
                            #[inline(always)]
                            || {
                                let (a, b) = (max(c), max(p));
                                let top = if c.is_empty() { b } else { a.max(b) + a * 0.0 };
                                let sum = exp_sum(c, top) + exp_sum(p, top);
                                let scale = 1.0 / sum;
                                c.iter_mut().for_each(|x| *x *= scale);
                                p.iter_mut().for_each(|x| *x *= scale);
                                lse[k * heads.q + g * group + r / size] = top + sum.ln();
                            },
                        );
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
struct Grad<'a> {
    size: usize,
    heads: Heads,
    starts: &'a [i32],
    anchors: &'a [i32],
    window: Option<usize>,
    q: &'a [f32],
    d_o: &'a [f32],
    lse: &'a [f32],
    delta: &'a [f32],
    kc: &'a [f32],
    vc: &'a [f32],
    kb: &'a [f32],
    vb: &'a [f32],
}

/// Consecutive blocks and the context rows that some of them see.
struct Run {
    blocks: Range<usize>,
    ctx: Range<usize>,
}

/// A run's share of the gradients for one key head.
struct Task<'a> {
    run: usize,
    head: usize,
    /// Query gradients by (row, head of the group).
    dq: Vec<&'a mut [f32]>,
    /// Key and value gradients of the blocks' own rows.
    own: [Vec<&'a mut [f32]>; 2],
    /// Sums for the context's keys and values, `[ctx, D]` each.
    ctx: [&'a mut [f32]; 2],
}

impl Grad<'_> {
    fn seen(&self, b: usize) -> Seen {
        Seen::new(self.starts[b] as usize, self.anchors[b] as usize, self.window)
    }

    /// Cuts the first `n` blocks into runs of about equal work.
    fn runs(&self, n: usize) -> Vec<Run> {
        let work = |b: usize| self.seen(b).ctx.len() + self.size;
        let all: usize = (0..n).map(work).sum();
        let (mut runs, mut done): (Vec<Run>, usize) = (Vec::with_capacity(RUNS), 0);
        for b in 0..n {
            // Blocks ascend by (sample, anchor), so a run's rows end with its last block's, and begin with its first block's unless a window moves.
            let ctx = self.seen(b).ctx;
            let cut = runs.len() * all;
            match runs.last_mut() {
                Some(run) if done * RUNS < cut => {
                    run.blocks.end = b + 1;
                    run.ctx = run.ctx.start.min(ctx.start)..run.ctx.end.max(ctx.end);
                }
                _ => runs.push(Run { blocks: b..b + 1, ctx }),
            }
            done += work(b);
        }
        runs
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

    /// Scores → P and dP → dS = P ⊙ (dP - δ), both in place, of block `b` and key head `g`; `visible(k)` of each row are not masked.
    fn softmax_bwd(
        &self,
        p: &mut [f32],
        ds: &mut [f32],
        cols: usize,
        (b, g): (usize, usize),
        visible: impl Fn(usize) -> Range<usize>,
    ) {
        if cols == 0 {
            return;
        }
        for (r, (p, ds)) in p.chunks_mut(cols).zip(ds.chunks_mut(cols)).enumerate() {
            let (k, h) = (r % self.size, g * self.heads.group() + r / self.size);
            let at = (b * self.size + k) * self.heads.q + h;
            let (lse, delta, range) = (self.lse[at], self.delta[at], visible(k));
            for hidden in [0..range.start, range.end..cols] {
                p[hidden.clone()].fill(0.0);
                ds[hidden].fill(0.0);
            }
            let (p, ds) = (&mut p[range.clone()], &mut ds[range]);
            wide(
                #[inline(always)]
                || {
                    for (p, ds) in p.iter_mut().zip(ds) {
                        *p = exp(*p - lse);
                        *ds = *p * (*ds - delta);
                    }
                },
            );
        }
    }

    /// All gradients of a run for one key head.
    fn run(&self, run: &Run, mut task: Task<'_>, scratch: &mut [f32]) {
        let Heads { dim: d, kv, .. } = self.heads;
        let (size, group, g) = (self.size, self.heads.group(), task.head);
        let (rows, scale) = (group * size, self.heads.scale());
        task.ctx.iter_mut().for_each(|sum| sum.fill(0.0));
        for b in run.blocks.clone() {
            let seen = self.seen(b);
            let (len, mine, first) = (seen.ctx.len(), b * size..(b + 1) * size, (b - run.blocks.start) * size);
            let sizes = [rows * d, rows * d, rows * d, rows * size, rows * size, rows * len, rows * len];
            let [q, d_o, out, p_own, ds_own, p, ds] = carve(scratch, sizes);
            self.pack(q, d_o, b, g);
            let (q, d_o) = (Rows::new(q, rows, d), Rows::new(d_o, rows, d));
            let (kc, vc) = (head(self.kc, seen.ctx.clone(), g, kv, d), head(self.vc, seen.ctx.clone(), g, kv, d));
            let (kb, vb) = (head(self.kb, mine.clone(), g, kv, d), head(self.vb, mine.clone(), g, kv, d));
            gemm::x_wt(p, q, kc, Into::Write, Threads::One);
            gemm::x_wt(ds, d_o, vc, Into::Write, Threads::One);
            self.softmax_bwd(p, ds, len, (b, g), |k| seen.first(k)..len);
            gemm::x_wt(p_own, q, kb, Into::Write, Threads::One);
            gemm::x_wt(ds_own, d_o, vb, Into::Write, Threads::One);
            self.softmax_bwd(p_own, ds_own, size, (b, g), |k| 0..seen.own(k, size));
            gemm::x_w(out, Rows::new(ds_own, rows, size), kb, Into::Write, Threads::One);
            gemm::x_w(out, Rows::new(ds, rows, len), kc, Into::Add, Threads::One);
            for (i, to) in task.dq[first * group..][..rows].iter_mut().enumerate() {
                let from = (i % group * size + i / group) * d;
                to.iter_mut().zip(&out[from..]).for_each(|(t, x)| *t = x * scale);
            }
            // q is scaled already, so dSᵀ q is the whole gradient of k.
            let at = (seen.ctx.start - run.ctx.start) * d..(seen.ctx.end - run.ctx.start) * d;
            for (side, (own, ctx, by)) in [(&*ds_own, &*ds, q), (&*p_own, &*p, d_o)].into_iter().enumerate() {
                gemm::xt_w(&mut task.ctx[side][at.clone()], Rows::new(ctx, rows, len), by, Into::Add, Threads::One);
                let own_sum = &mut out[..size * d];
                gemm::xt_w(own_sum, Rows::new(own, rows, size), by, Into::Write, Threads::One);
                task.own[side][first..][..size].iter_mut().zip(own_sum.chunks(d)).for_each(|(to, from)| to.copy_from_slice(from));
            }
        }
    }
}

/// Backward of block-diffusion attention.
pub fn backward(op: &BlockAttentionBwd, program: &Program, views: &mut Views<'_>) {
    let f = &op.forward;
    let (size, heads, scratch) = (f.blocks.size, f.heads, views.scratch());
    let (d, width, group) = (heads.dim, heads.kv_cols(), heads.group());
    let n = views.count(f.blocks.n_blocks);
    let (delta, dq) = (views.take(op.delta), views.take(op.dq));
    let (dk, dv) = (views.take(op.dk_blk), views.take(op.dv_blk));
    let (dkc, dvc) = (views.take(op.dk_ctx), views.take(op.dv_ctx));
    let (o, d_o) = (views.read(f.o), views.read(op.d_o));
    delta
        .par_chunks_mut(size * heads.q)
        .zip(o.par_chunks(size * heads.q_cols()).zip(d_o.par_chunks(size * heads.q_cols())))
        .for_each(|(delta, (o, d_o))| {
            wide(
                #[inline(always)]
                || {
                    for (delta, (o, d_o)) in delta.iter_mut().zip(o.chunks(d).zip(d_o.chunks(d))) {
                        *delta = dot(d_o, o);
                    }
                },
            );
        });
    let grad = Grad {
        size,
        heads,
        starts: views.ints(f.blocks.ctx_start),
        anchors: views.ints(f.blocks.anchor),
        window: f.window,
        q: views.read(f.q),
        d_o,
        lse: views.read(f.lse),
        delta,
        kc: views.read(f.k_ctx),
        vc: views.read(f.v_ctx),
        kb: views.read(f.k_blk),
        vb: views.read(f.v_blk),
    };
    let runs = grad.runs(n);
    let mut shared = scratch.shared();
    let mut room = shared.as_mut_slice();
    let mut tasks: Vec<Task<'_>> = Vec::with_capacity(runs.len() * heads.kv);
    for (i, run) in runs.iter().enumerate() {
        for head in 0..heads.kv {
            let ctx = [(); 2].map(|()| front(&mut room, run.ctx.len() * d));
            tasks.push(Task { run: i, head, dq: Vec::new(), own: [Vec::new(), Vec::new()], ctx });
        }
    }
    // Hands every task its columns of its rows; rows past the last block are zero.
    let run_of = |row: usize| runs.iter().position(|run| run.blocks.contains(&(row / size)));
    for (row, (dq, (dk, dv))) in dq.chunks_mut(heads.q_cols()).zip(dk.chunks_mut(width).zip(dv.chunks_mut(width))).enumerate() {
        let Some(run) = run_of(row) else {
            [dq, dk, dv].into_iter().for_each(|x| x.fill(0.0));
            continue;
        };
        let mine = &mut tasks[run * heads.kv..(run + 1) * heads.kv];
        dq.chunks_mut(d).enumerate().for_each(|(h, part)| mine[h / group].dq.push(part));
        for (side, x) in [dk, dv].into_iter().enumerate() {
            x.chunks_mut(d).zip(&mut *mine).for_each(|(part, task)| task.own[side].push(part));
        }
    }
    let per_thread = need_bwd(op, program).per_thread;
    tasks.into_par_iter().for_each(|task| scratch.local(per_thread, |scratch| grad.run(&runs[task.run], task, scratch)));
    // Where each run's sums lie: for every key head its keys' and then its values'.
    let ends = runs.iter().scan(0, |end, run| {
        *end += 2 * heads.kv * run.ctx.len() * d;
        Some(*end)
    });
    let sums: Vec<(&Run, &[f32])> =
        runs.iter().zip(ends).map(|(r, end)| (r, &shared[end - 2 * width * r.ctx.len()..end])).collect();
    (dkc.par_chunks_mut(CONTEXT_TILE * width), dvc.par_chunks_mut(CONTEXT_TILE * width)).into_par_iter().enumerate().for_each(
        |(t, (dk, dv))| {
            let tile = t * CONTEXT_TILE..t * CONTEXT_TILE + dk.len() / width;
            for (run, sums) in &sums {
                let rows = run.ctx.start.max(tile.start)..run.ctx.end.min(tile.end);
                for (g, sums) in sums.chunks((2 * run.ctx.len() * d).max(1)).enumerate() {
                    let (k, v) = sums.split_at(run.ctx.len() * d);
                    for row in rows.clone() {
                        let (to, from) = ((row - tile.start) * width + g * d, (row - run.ctx.start) * d);
                        dk[to..to + d].iter_mut().zip(&k[from..from + d]).for_each(|(t, x)| *t += x);
                        dv[to..to + d].iter_mut().zip(&v[from..from + d]).for_each(|(t, x)| *t += x);
                    }
                }
            }
        },
    );
}

/// Takes the first `n` floats off `rest`.
fn front<'a>(rest: &mut &'a mut [f32], n: usize) -> &'a mut [f32] {
    let (head, tail) = std::mem::take(rest).split_at_mut(n);
    *rest = tail;
    head
}
