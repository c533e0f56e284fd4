//! Zeroing, the global norm and AdamW. Contract: `graph::op::optim`.
//! Refuses nothing. Invariant: the norm is summed over fixed chunks in order; a non-finite step changes no state.

use crate::math::wide;
use crate::memory::Views;
use drafthorse_graph::op::optim::{NORM_CHUNK, Stat};
use drafthorse_graph::op::{AdamW, GradNorm, Zero};
use rayon::prelude::*;

/// Sets tensors to zero (also right for integers: the bit pattern is the same).
pub fn zero(op: &Zero, views: &mut Views<'_>) {
    for &t in &op.tensors {
        views.take(t).par_chunks_mut(1 << 16).for_each(|c| c.fill(0.0));
    }
}

/// Norm, finiteness, scale and bias corrections.
pub fn grad_norm(op: &GradNorm, views: &mut Views<'_>) {
    let mut squares = 0.0f64;
    let chunk_sums = views.take(op.chunk_sums);
    let mut slot = 0;
    for &g in &op.grads {
        let g = views.read(g);
        let n = g.len().div_ceil(NORM_CHUNK);
        let sums = &mut chunk_sums[slot..slot + n];
        g.par_chunks(NORM_CHUNK).zip(sums.par_iter_mut()).for_each(|(g, out)| {
            *out = wide(
                #[inline(always)]
                || {
                    let mut lanes = [0.0f64; 8];
                    let (body, tail) = g.as_chunks::<8>();
                    for chunk in body {
                        for i in 0..8 {
                            lanes[i] += f64::from(chunk[i]) * f64::from(chunk[i]);
                        }
                    }
                    (lanes.iter().sum::<f64>() + tail.iter().map(|&x| f64::from(x) * f64::from(x)).sum::<f64>()) as f32
                },
            );
        });
        squares += sums.iter().map(|&s| f64::from(s)).sum::<f64>();
        slot += n;
    }
    let sums = views.read(op.sums);
    let (loss_sum, weight_sum) = (f64::from(sums[0]), f64::from(sums[1]));
    let loss = loss_sum / weight_sum;
    let norm = squares.sqrt() / weight_sum;
    let finite = loss.is_finite() && norm.is_finite() && weight_sum > 0.0;
    let t = views.take_ints(op.adam_t);
    if finite {
        t[0] += 1;
    }
    let stats = views.take(op.stats);
    stats[Stat::Loss as usize] = loss as f32;
    stats[Stat::WeightSum as usize] = weight_sum as f32;
    stats[Stat::Norm as usize] = norm as f32;
    stats[Stat::Finite as usize] = f32::from(u8::from(finite));
    stats[Stat::Scale as usize] = ((f64::from(op.clip) / (norm + 1e-6)).min(1.0) / weight_sum) as f32;
    stats[Stat::Bias1 as usize] = (1.0 - f64::from(op.betas[0]).powi(t[0])) as f32;
    stats[Stat::Bias2 as usize] = (1.0 - f64::from(op.betas[1]).powi(t[0])) as f32;
    stats[Stat::AdamT as usize] = t[0] as f32;
}

/// The update of every parameter.
pub fn adamw(op: &AdamW, views: &mut Views<'_>) {
    let stats = views.read(op.stats);
    if stats[Stat::Finite as usize] != 1.0 {
        return;
    }
    let lr = views.read(op.lr)[0];
    let [b1, b2] = op.betas;
    let scale = stats[Stat::Scale as usize];
    let (step, root2) = (lr / stats[Stat::Bias1 as usize], stats[Stat::Bias2 as usize].sqrt());
    let (eps, keep) = (op.eps, 1.0 - lr * op.weight_decay);
    const CHUNK: usize = 1 << 14;
    for p in &op.params {
        let (m, v, grad) = (views.take(p.m), views.take(p.v), views.read(p.grad));
        let w = views.take(p.w);
        let update = |p: &mut [f32], m: &mut [f32], v: &mut [f32], g: &[f32]| {
            wide(
                #[inline(always)]
                || {
                    for i in 0..p.len() {
                        let g = g[i] * scale;
                        m[i] = b1 * m[i] + (1.0 - b1) * g;
                        v[i] = b2 * v[i] + (1.0 - b2) * g * g;
                        p[i] = p[i] * keep - step * m[i] / (v[i].sqrt() / root2 + eps);
                    }
                },
            );
        };
        let all = |p: &mut [f32], m: &mut [f32], v: &mut [f32]| {
            (p.par_chunks_mut(CHUNK), m.par_chunks_mut(CHUNK), v.par_chunks_mut(CHUNK), grad.par_chunks(CHUNK))
                .into_par_iter()
                .for_each(|(p, m, v, g)| update(p, m, v, g));
        };
        match p.master {
            Some(master) => {
                let master = views.take(master);
                all(master, m, v);
                w.copy_from_slice(master);
            }
            None => all(w, m, v),
        }
    }
}
