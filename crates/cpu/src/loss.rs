//! Head loss and token picks. Contracts: `graph::op::{head_loss, pick_tokens}`.
//! Refuses labels outside the vocabulary (a panic). Invariants: only one chunk of logits exists; sums over rows are in row order.

use crate::gemm::{self, Into, Rows, Threads};
use crate::math::{exp, exp_sum, max, wide};
use crate::memory::Views;
use drafthorse_graph::Program;
use drafthorse_graph::dtype::round_bf16;
use drafthorse_graph::op::{HeadLoss, PickTokens};
use rayon::prelude::*;

/// Weighted cross-entropy, its gradient and per-row metrics.
pub fn head_loss(op: &HeadLoss, program: &Program, views: &mut Views<'_>) {
    let (rows, h) = (program.get(op.x).rows(), program.get(op.x).cols());
    let vocab = program.get(op.head).rows();
    let round = views.rounds(program, op.logits);
    let (logits, sums) = (views.take(op.logits), views.take(op.sums));
    let (ce, prob, hit) = (views.take(op.metrics.ce), views.take(op.metrics.prob), views.take_ints(op.metrics.hit));
    let mut dx = op.dx.map(|d| views.take(d));
    let (x, head) = (views.read(op.x), views.read(op.head));
    let (labels, weights, count) = (views.ints(op.labels.labels), views.read(op.labels.weights), views.count(op.labels.count));
    for first in (0..count).step_by(op.chunk) {
        let n = op.chunk.min(count - first);
        let z = &mut logits[..n * vocab];
        gemm::x_wt(z, Rows::new(&x[first * h..], n, h), Rows::new(head, vocab, h), Into::Write, Threads::All);
        let at = first..first + n;
        (
            z.par_chunks_mut(vocab),
            &mut ce[at.clone()],
            &mut prob[at.clone()],
            &mut hit[at.clone()],
            &labels[at.clone()],
            &weights[at.clone()],
        )
            .into_par_iter()
            .for_each(|(z, ce, prob, hit, &label, &weight)| {
                let label = usize::try_from(label).expect("labels are token ids");
                if round {
                    z.iter_mut().for_each(|v| *v = round_bf16(*v));
                }
                wide(
                    #[inline(always)]
                    || {
                        let target = z[label];
                        let top = max(z);
                        // The argmax is the label when nothing before it reaches its logit and nothing after exceeds it.
                        *hit = i32::from(target == top && z[..label].iter().all(|&v| v < target));
                        let sum = exp_sum(z, top);
                        *ce = top + sum.ln() - target;
                        *prob = exp(-*ce);
                        let scale = weight / sum;
                        for p in z.iter_mut() {
                            *p *= scale;
                        }
                        z[label] -= weight;
                    },
                );
                if round {
                    z.iter_mut().for_each(|v| *v = round_bf16(*v));
                }
            });
        if let Some(dx) = &mut dx {
            gemm::x_w(
                &mut dx[first * h..(first + n) * h],
                Rows::new(z, n, vocab),
                Rows::new(head, vocab, h),
                Into::Write,
                Threads::All,
            );
        }
    }
    ce[count..].fill(0.0);
    prob[count..].fill(0.0);
    hit[count..].fill(0);
    if let Some(dx) = dx {
        dx[count * h..rows * h].fill(0.0);
    }
    let (mut loss, mut weight) = (0.0f64, 0.0f64);
    for (ce, &w) in ce.iter().zip(weights).take(count) {
        loss += f64::from(w) * f64::from(*ce);
        weight += f64::from(w);
    }
    sums[0] += loss as f32;
    sums[1] += weight as f32;
}

/// Argmax, top-2, probe probability and a draw.
pub fn pick_tokens(op: &PickTokens, program: &Program, views: &mut Views<'_>) {
    let vocab = program.get(op.logits).cols();
    let p = &op.picks;
    let (argmax, top2) = (views.take_ints(p.argmax), views.take(p.top2));
    let (prob, drawn) = (views.take(p.prob), views.take_ints(p.drawn));
    let (logits, temperature) = (views.read(op.logits), views.read(op.temperature)[0]);
    let (uniform, probe) = (views.read(op.uniform), views.ints(op.probe));
    (argmax, top2.par_chunks_mut(2), prob, drawn, logits.par_chunks(vocab), uniform, probe).into_par_iter().for_each(
        |(argmax, top2, prob, drawn, z, &uniform, &probe)| {
            let (best, first, second) = two_largest(z);
            *argmax = best as i32;
            top2.copy_from_slice(&[first, second]);
            let probe = usize::try_from(probe).ok();
            if temperature == 0.0 {
                *prob = if probe == Some(best) { 1.0 } else { 0.0 };
                *drawn = best as i32;
                return;
            }
            // Masses of the rest are relative to the rest's own largest logit. Relative to a probe that holds nearly everything they would
            // be lost to rounding, as a difference from the whole, or below the smallest float.
            let base = if probe == Some(best) { second } else { first };
            let mass = |v: usize| exp((z[v] - base) / temperature);
            let open: f32 = (0..vocab).filter(|&v| Some(v) != probe).map(mass).sum();
            *prob = probe.map_or(0.0, |v| {
                let own = exp((z[v] - first) / temperature);
                own / (own + open * exp((base - first) / temperature))
            });
            let threshold = uniform * open;
            let mut seen = 0.0;
            // Rounding can leave the threshold above the last partial sum: the last token with mass is then the draw.
            let mut choice = best;
            for v in (0..vocab).filter(|&v| Some(v) != probe) {
                let m = mass(v);
                if m > 0.0 {
                    choice = v;
                    seen += m;
                    if seen > threshold {
                        break;
                    }
                }
            }
            *drawn = choice as i32;
        },
    );
}

/// Index of the largest element (the lowest on a tie), its value, and the second largest value.
fn two_largest(z: &[f32]) -> (usize, f32, f32) {
    let (mut best, mut first, mut second) = (0, f32::NEG_INFINITY, f32::NEG_INFINITY);
    for (i, &v) in z.iter().enumerate() {
        if v > first {
            second = first;
            first = v;
            best = i;
        } else if v > second {
            second = v;
        }
    }
    (best, first, second)
}
