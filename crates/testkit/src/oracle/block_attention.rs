//! `BlockAttention` and its backward, naively: every slot lists the keys it sees, in order.
//!
//! Masses of the backward: P is off by P·e ulps of 1, e = 1 + S + |s| + |lse|; dS by P·(Σ|do·v| + Σ|do·o|)·(1 + e).

use super::Run;
use super::softmax_row::softmax_row;
use drafthorse_graph::op::{BlockAttention, BlockAttentionBwd};

/// Row of a key: in the packed context or in the block's own rows.
#[derive(Clone, Copy)]
enum Key {
    Context(usize),
    Block(usize),
}

/// Keys that slot k of block n sees.
fn seen(start: usize, anchor: usize, n: usize, k: usize, size: usize, window: Option<usize>) -> Vec<Key> {
    let mut keys = Vec::new();
    for j in 0..anchor {
        // j ≥ anchor + k - (W-1), kept free of negative numbers.
        if window.is_none_or(|w| j + w > anchor + k) {
            keys.push(Key::Context(start + j));
        }
    }
    for j in 0..size {
        if window.is_none() || j <= k {
            keys.push(Key::Block(n * size + j));
        }
    }
    keys
}

pub(super) fn block_attention(run: &mut Run<'_>, op: &BlockAttention) {
    let q = run.floats(op.q);
    let (k_ctx, v_ctx, k_blk, v_blk) = (run.floats(op.k_ctx), run.floats(op.v_ctx), run.floats(op.k_blk), run.floats(op.v_blk));
    let (start, anchor, real) = (run.ints(op.blocks.ctx_start), run.ints(op.blocks.anchor), run.count(op.blocks.n_blocks));
    let (d, group, size, rows) = (op.heads.dim, op.heads.group(), op.blocks.size, run.rows(op.q));
    let (q_cols, kv_cols) = (op.heads.q_cols(), op.heads.kv_cols());
    let scale = (d as f64).powf(-0.5);
    let (mut o, mut abs, mut rounded) = (vec![0.0; rows * q_cols], vec![0.0; rows * q_cols], vec![0.0; rows * q_cols]);
    let (mut lse, mut lse_abs) = (vec![0.0; rows * op.heads.q], vec![0.0; rows * op.heads.q]);
    for n in 0..real {
        for k in 0..size {
            let list = seen(start[n] as usize, anchor[n] as usize, n, k, size, op.window);
            for h in 0..op.heads.q {
                let at = |j: usize| j * kv_cols + h / group * d;
                let pick = |ctx: &'_ [f64], blk: &'_ [f64], key: Key| match key {
                    Key::Context(j) => ctx[at(j)..at(j) + d].to_vec(),
                    Key::Block(j) => blk[at(j)..at(j) + d].to_vec(),
                };
                let keys: Vec<Vec<f64>> = list.iter().map(|&j| pick(&k_ctx, &k_blk, j)).collect();
                let values: Vec<Vec<f64>> = list.iter().map(|&j| pick(&v_ctx, &v_blk, j)).collect();
                let keys: Vec<&[f64]> = keys.iter().map(Vec::as_slice).collect();
                let values: Vec<&[f64]> = values.iter().map(Vec::as_slice).collect();
                let slot = n * size + k;
                let to = slot * q_cols + h * d;
                let row = softmax_row(&q[to..to + d], &keys, &values, scale);
                o[to..to + d].copy_from_slice(&row.o);
                abs[to..to + d].copy_from_slice(&row.abs);
                rounded[to..to + d].copy_from_slice(&row.rounded);
                lse[slot * op.heads.q + h] = row.lse;
                lse_abs[slot * op.heads.q + h] = row.lse_abs;
            }
        }
    }
    let terms = run.rows(op.k_ctx) + size + d;
    run.put_rounded(op.o, o, terms, abs, rounded);
    run.put(op.lse, lse, terms, lse_abs);
}

/// A gradient under construction: value, mass, and squares of the terms with a rounded factor.
struct Gradient {
    sum: Vec<f64>,
    abs: Vec<f64>,
    squares: Vec<f64>,
}

impl Gradient {
    fn onto(old: Vec<f64>) -> Self {
        Gradient { abs: old.iter().map(|v| v.abs()).collect(), squares: vec![0.0; old.len()], sum: old }
    }

    /// Adds `factor·other`, where the factor has mass `factor_abs`.
    fn add(&mut self, i: usize, factor: f64, factor_abs: f64, other: f64) {
        self.sum[i] += factor * other;
        self.abs[i] += factor_abs * other.abs();
        self.squares[i] += factor * other * factor * other;
    }
}

pub(super) fn block_attention_bwd(run: &mut Run<'_>, op: &BlockAttentionBwd) {
    let f = &op.forward;
    let (q, o, lse, d_o) = (run.floats(f.q), run.floats(f.o), run.floats(f.lse), run.floats(op.d_o));
    let (k_ctx, v_ctx, k_blk, v_blk) = (run.floats(f.k_ctx), run.floats(f.v_ctx), run.floats(f.k_blk), run.floats(f.v_blk));
    let (start, anchor, real) = (run.ints(f.blocks.ctx_start), run.ints(f.blocks.anchor), run.count(f.blocks.n_blocks));
    let (d, group, size) = (f.heads.dim, f.heads.group(), f.blocks.size);
    let (q_cols, kv_cols) = (f.heads.q_cols(), f.heads.kv_cols());
    let scale = (d as f64).powf(-0.5);
    let mut dq = Gradient::onto(vec![0.0; q.len()]);
    let (mut dk_blk, mut dv_blk) = (Gradient::onto(vec![0.0; k_blk.len()]), Gradient::onto(vec![0.0; k_blk.len()]));
    let (mut dk_ctx, mut dv_ctx) = (Gradient::onto(run.floats(op.dk_ctx)), Gradient::onto(run.floats(op.dv_ctx)));
    for n in 0..real {
        for slot in 0..size {
            let list = seen(start[n] as usize, anchor[n] as usize, n, slot, size, f.window);
            for h in 0..f.heads.q {
                let i = (n * size + slot) * q_cols + h * d;
                let lse = lse[(n * size + slot) * f.heads.q + h];
                let (mut delta, mut delta_abs) = (0.0, 0.0);
                for c in 0..d {
                    delta += d_o[i + c] * o[i + c];
                    delta_abs += (d_o[i + c] * o[i + c]).abs();
                }
                for &key in &list {
                    let (k, v, dk, dv, j) = match key {
                        Key::Context(j) => (&k_ctx, &v_ctx, &mut dk_ctx, &mut dv_ctx, j * kv_cols + h / group * d),
                        Key::Block(j) => (&k_blk, &v_blk, &mut dk_blk, &mut dv_blk, j * kv_cols + h / group * d),
                    };
                    let (mut s, mut s_abs, mut dp, mut dp_abs) = (0.0, 0.0, 0.0, 0.0);
                    for c in 0..d {
                        s += scale * q[i + c] * k[j + c];
                        s_abs += scale * (q[i + c] * k[j + c]).abs();
                        dp += d_o[i + c] * v[j + c];
                        dp_abs += (d_o[i + c] * v[j + c]).abs();
                    }
                    let p = (s - lse).exp();
                    let p_abs = p * (1.0 + s_abs + s.abs() + lse.abs());
                    let ds = p * (dp - delta);
                    let ds_abs = p_abs * (dp - delta).abs() + p * (dp_abs + delta_abs);
                    for c in 0..d {
                        dv.add(j + c, p, p_abs, d_o[i + c]);
                        dk.add(j + c, scale * ds, scale * ds_abs, q[i + c]);
                        dq.add(i + c, scale * ds, scale * ds_abs, k[j + c]);
                    }
                }
            }
        }
    }
    let terms_q = run.rows(f.k_ctx) + size + d;
    let terms_kv = real * size * group + d + 1;
    let outputs = [
        (op.dq, dq, terms_q),
        (op.dk_blk, dk_blk, terms_kv),
        (op.dv_blk, dv_blk, terms_kv),
        (op.dk_ctx, dk_ctx, terms_kv),
        (op.dv_ctx, dv_ctx, terms_kv),
    ];
    for (t, g, terms) in outputs {
        let rounded = g.squares.iter().map(|s| s.sqrt()).collect();
        run.put_rounded(t, g.sum, terms, g.abs, rounded);
    }
}
