//! RMSNorm and the per-head norm with rotary embedding, forward and backward. Contracts: `graph::op::{rms_norm, qk_norm_rope}`.
//!
//! Refuses nothing. Invariant: weight gradients go through PARTIALS fixed row ranges, summed in order, so that neither threads
//! nor machine change them.

use crate::math::{dot, wide};
use crate::memory::Views;
use drafthorse_graph::Program;
use drafthorse_graph::dtype::round_bf16;
use drafthorse_graph::op::{PARTIALS, QkNormRope, QkNormRopeBwd, RmsNorm, RmsNormBwd};
use rayon::prelude::*;

/// `y = rms_norm(x (+ delta))`.
pub fn rms_norm(op: &RmsNorm, program: &Program, views: &mut Views<'_>) {
    let h = program.get(op.x).cols();
    let (y, rstd, w, x) = (views.take(op.y), views.take(op.rstd), views.read(op.w), views.read(op.x));
    let eps = op.eps;
    let norm_row = move |s: &[f32], y: &mut [f32], rstd: &mut f32| {
        wide(
            #[inline(always)]
            || {
                *rstd = 1.0 / (dot(s, s) / h as f32 + eps).sqrt();
                for ((y, s), w) in y.iter_mut().zip(s).zip(w) {
                    *y = s * *rstd * w;
                }
            },
        );
    };
    match op.residual {
        Some(r) => {
            let (sum, delta) = (views.take(r.sum), views.read(r.delta));
            let round = views.rounds(program, r.sum);
            (y.par_chunks_mut(h), sum.par_chunks_mut(h), rstd, x.par_chunks(h), delta.par_chunks(h)).into_par_iter().for_each(
                |(y, sum, rstd, x, delta)| {
                    sum.iter_mut().zip(x.iter().zip(delta)).for_each(|(s, (x, d))| *s = x + d);
                    if round {
                        sum.iter_mut().for_each(|s| *s = round_bf16(*s));
                    }
                    norm_row(sum, y, rstd);
                },
            );
        }
        None => (y.par_chunks_mut(h), rstd, x.par_chunks(h)).into_par_iter().for_each(|(y, rstd, x)| norm_row(x, y, rstd)),
    }
}

/// Gradient of the stream and of the weight.
pub fn rms_norm_bwd(op: &RmsNormBwd, program: &Program, views: &mut Views<'_>) {
    let (t, h) = (program.get(op.stream).rows(), program.get(op.stream).cols());
    let rows = t.div_ceil(PARTIALS).max(1);
    let partials = views.take(op.partials);
    let (s, w, rstd, dy) = (views.read(op.stream), views.read(op.w), views.read(op.rstd), views.read(op.dy));
    let dres = op.dres.map(|d| views.read(d));
    let (mut none, dw) = (Vec::new(), op.dw.map(|d| views.take(d)));
    let has_dx = op.dx.is_some();
    let dx: &mut [f32] = match op.dx {
        Some(d) => views.take(d),
        None => {
            // Zero-width rows: the parallel walk below then has the same shape with and without dx.
            none.resize(1, 0.0);
            &mut none
        }
    };
    let range = |p: usize| (p * rows).min(t)..((p + 1) * rows).min(t);
    let mut dx_parts: Vec<&mut [f32]> = Vec::with_capacity(PARTIALS);
    let mut rest = dx;
    for p in 0..PARTIALS {
        let (part, tail) = rest.split_at_mut(if has_dx { range(p).len() * h } else { 0 });
        dx_parts.push(part);
        rest = tail;
    }
    (partials.par_chunks_mut(h), dx_parts).into_par_iter().enumerate().for_each(|(p, (partial, dx))| {
        partial.fill(0.0);
        for (i, row) in range(p).enumerate() {
            let at = row * h..(row + 1) * h;
            let (s, dy, r) = (&s[at.clone()], &dy[at.clone()], rstd[row]);
            wide(
                #[inline(always)]
                || {
                    for ((p, dy), s) in partial.iter_mut().zip(dy).zip(s) {
                        *p += dy * (s * r);
                    }
                    if has_dx {
                        let dx = &mut dx[i * h..(i + 1) * h];
                        for ((d, dy), w) in dx.iter_mut().zip(dy).zip(w) {
                            *d = dy * w;
                        }
                        let mean = dot(dx, s) * r / h as f32;
                        for (d, s) in dx.iter_mut().zip(s) {
                            *d = r * (*d - s * r * mean);
                        }
                        if let Some(dres) = dres {
                            dx.iter_mut().zip(&dres[at.clone()]).for_each(|(d, g)| *d += g);
                        }
                    }
                },
            );
        }
    });
    if let Some(dw) = dw {
        sum_partials(dw, partials, h, 0);
    }
}

/// `out[j] += Σ_p partials[p, from + j]`, p ascending.
fn sum_partials(out: &mut [f32], partials: &[f32], width: usize, from: usize) {
    for (j, out) in out.iter_mut().enumerate() {
        *out += partials.chunks(width).map(|p| p[from + j]).sum::<f32>();
    }
}

struct Tables<'a> {
    positions: &'a [i32],
    cos: &'a [f32],
    sin: &'a [f32],
    half: usize,
}

impl Tables<'_> {
    /// Rotates the first 2·half elements of a head; `sign` -1 rotates back.
    #[inline(always)]
    fn rotate(&self, head: &mut [f32], row: usize, sign: f32) {
        let at = self.positions[row] as usize * self.half;
        let (cos, sin) = (&self.cos[at..at + self.half], &self.sin[at..at + self.half]);
        let (a, b) = head[..2 * self.half].split_at_mut(self.half);
        for i in 0..self.half {
            let (x, y, s) = (a[i], b[i], sign * sin[i]);
            a[i] = x * cos[i] - y * s;
            b[i] = y * cos[i] + x * s;
        }
    }
}

fn tables<'a>(op: &QkNormRope, program: &Program, views: &Views<'a>) -> Tables<'a> {
    Tables {
        positions: views.ints(op.rotary.positions),
        cos: views.read(op.rotary.cos),
        sin: views.read(op.rotary.sin),
        half: program.get(op.rotary.cos).cols(),
    }
}

/// Packed heads → q, k, v.
pub fn qk_norm_rope(op: &QkNormRope, program: &Program, views: &mut Views<'_>) {
    let (d, hq, hk) = (op.dim, op.q_heads, op.kv_heads);
    let width = (hq + 2 * hk) * d;
    let table = tables(op, program, views);
    let src = views.read(op.src);
    let norm_of = |w: Option<_>| w.map(|w| views.read(w));
    let (q_norm, k_norm) = (norm_of(op.q_norm), norm_of(op.k_norm));
    let eps = op.eps;
    let one = |row: usize, from: &[f32], to: &mut [f32], w: Option<&[f32]>| {
        wide(
            #[inline(always)]
            || {
                match w {
                    Some(w) => {
                        let rstd = 1.0 / (dot(from, from) / d as f32 + eps).sqrt();
                        to.iter_mut().zip(from.iter().zip(w)).for_each(|(t, (f, w))| *t = f * rstd * w);
                    }
                    None => to.copy_from_slice(from),
                }
                table.rotate(to, row, 1.0);
            },
        );
    };
    if let Some(q) = op.q {
        let q = views.take(q);
        q.par_chunks_mut(hq * d).enumerate().for_each(|(row, q)| {
            for (q, from) in q.chunks_mut(d).zip(src[row * width..].chunks(d)) {
                one(row, from, q, q_norm);
            }
        });
    }
    let (k, v) = (views.take(op.k), views.take(op.v));
    (k.par_chunks_mut(hk * d), v.par_chunks_mut(hk * d)).into_par_iter().enumerate().for_each(|(row, (k, v))| {
        let src = &src[row * width + hq * d..(row + 1) * width];
        for (k, from) in k.chunks_mut(d).zip(src.chunks(d)) {
            one(row, from, k, k_norm);
        }
        v.copy_from_slice(&src[hk * d..]);
    });
}

/// Gradients of the packed row and of the head norms.
pub fn qk_norm_rope_bwd(op: &QkNormRopeBwd, program: &Program, views: &mut Views<'_>) {
    let f = &op.forward;
    let (d, hq, hk) = (f.dim, f.q_heads, f.kv_heads);
    let (t, width) = (program.get(f.src).rows(), (hq + 2 * hk) * d);
    let rows = t.div_ceil(PARTIALS).max(1);
    let table = tables(f, program, views);
    let (partials, dsrc) = (views.take(op.partials), views.take(op.dsrc));
    let src = views.read(f.src);
    let (q_norm, k_norm) = (f.q_norm.map(|w| views.read(w)), f.k_norm.map(|w| views.read(w)));
    let dq = op.dq.map(|g| views.read(g));
    let (dk, dv) = (views.read(op.dk), views.read(op.dv));
    let eps = f.eps;
    let one = |row: usize, from: &[f32], g: &[f32], out: &mut [f32], w: Option<&[f32]>, dw: &mut [f32]| {
        wide(
            #[inline(always)]
            || {
                out.copy_from_slice(g);
                table.rotate(out, row, -1.0);
                if let Some(w) = w {
                    let rstd = 1.0 / (dot(from, from) / d as f32 + eps).sqrt();
                    for i in 0..d {
                        dw[i] += out[i] * from[i] * rstd;
                        out[i] *= w[i];
                    }
                    let mean = dot(out, from) * rstd / d as f32;
                    for i in 0..d {
                        out[i] = rstd * (out[i] - from[i] * rstd * mean);
                    }
                }
            },
        );
    };
    (partials.par_chunks_mut(2 * d), dsrc.par_chunks_mut(rows * width)).into_par_iter().enumerate().for_each(
        |(p, (partial, dsrc))| {
            partial.fill(0.0);
            let (dwq, dwk) = partial.split_at_mut(d);
            for (i, out) in dsrc.chunks_mut(width).enumerate() {
                let row = p * rows + i;
                let from = &src[row * width..(row + 1) * width];
                let (out_q, out_kv) = out.split_at_mut(hq * d);
                if let Some(dq) = dq {
                    let g = &dq[row * hq * d..(row + 1) * hq * d];
                    for h in 0..hq {
                        let at = h * d..(h + 1) * d;
                        one(row, &from[at.clone()], &g[at.clone()], &mut out_q[at], q_norm, dwq);
                    }
                }
                let g = &dk[row * hk * d..(row + 1) * hk * d];
                for h in 0..hk {
                    let at = h * d..(h + 1) * d;
                    one(row, &from[hq * d..][at.clone()], &g[at.clone()], &mut out_kv[at], k_norm, dwk);
                }
                out_kv[hk * d..].copy_from_slice(&dv[row * hk * d..(row + 1) * hk * d]);
            }
        },
    );
    // Row ranges past the last row were not visited above; their partials must not hold an old value.
    partials[dsrc.len().div_ceil(rows * width) * 2 * d..].fill(0.0);
    if let Some(dw) = op.dq_norm {
        sum_partials(views.take(dw), partials, 2 * d, 0);
    }
    if let Some(dw) = op.dk_norm {
        sum_partials(views.take(dw), partials, 2 * d, d);
    }
}
