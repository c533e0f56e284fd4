//! `Zero`, `GradNorm`, `AdamW`, naively, in f64.

use super::Run;
use drafthorse_graph::op::optim::{NORM_CHUNK, Stat};
use drafthorse_graph::op::{AdamW, GradNorm, Zero};

pub(super) fn zero(run: &mut Run<'_>, op: &Zero) {
    for &t in &op.tensors {
        let tensor = run.program.get(t);
        if tensor.dtype.is_float() {
            run.put_copy(t, vec![0.0; tensor.len()]);
        } else {
            run.put_ints(t, vec![0; tensor.len()]);
        }
    }
}

pub(super) fn grad_norm(run: &mut Run<'_>, op: &GradNorm) {
    let squares: f64 = op.grads.iter().map(|&g| run.floats(g).iter().map(|v| v * v).sum::<f64>()).sum();
    let sums = run.floats(op.sums);
    let mut t = run.value(op.adam_t).ints()[0];
    let (loss, norm) = (sums[0] / sums[1], squares.sqrt() / sums[1]);
    let finite = loss.is_finite() && norm.is_finite() && sums[1] > 0.0;
    if finite {
        t += 1;
    }
    let scale = (f64::from(op.clip) / (norm + 1e-6)).min(1.0) / sums[1];
    let bias = |beta: f32| 1.0 - f64::from(beta).powi(t);
    let mut stats = vec![0.0; 8];
    stats[Stat::Loss as usize] = loss;
    stats[Stat::WeightSum as usize] = sums[1];
    stats[Stat::Norm as usize] = norm;
    stats[Stat::Finite as usize] = f64::from(u8::from(finite));
    stats[Stat::Scale as usize] = scale;
    stats[Stat::Bias1 as usize] = bias(op.betas[0]);
    stats[Stat::Bias2 as usize] = bias(op.betas[1]);
    stats[Stat::AdamT as usize] = f64::from(t);
    let mut abs: Vec<f64> = stats.iter().map(|s| s.abs()).collect();
    for exact in [Stat::WeightSum, Stat::Finite, Stat::AdamT] {
        abs[exact as usize] = 0.0;
    }
    let longest = op.grads.iter().map(|&g| run.value(g).len()).max().unwrap_or(0);
    run.put(op.stats, stats, longest.min(NORM_CHUNK) + 8, abs);
    run.put_ints(op.adam_t, vec![t]);
}

pub(super) fn adamw(run: &mut Run<'_>, op: &AdamW) {
    let (lr, stats) = (run.floats(op.lr)[0], run.floats(op.stats));
    let stat = |s: Stat| stats[s as usize];
    let (b1, b2) = (f64::from(op.betas[0]), f64::from(op.betas[1]));
    let (eps, decay) = (f64::from(op.eps), f64::from(op.weight_decay));
    for p in &op.params {
        let source = p.master.unwrap_or(p.w);
        let (mut w, mut m, mut v, grad) = (run.floats(source), run.floats(p.m), run.floats(p.v), run.floats(p.grad));
        let (mut w_abs, mut m_abs, mut v_abs) = (vec![0.0; w.len()], vec![0.0; w.len()], vec![0.0; w.len()]);
        if stat(Stat::Finite) == 1.0 {
            for i in 0..w.len() {
                let g = stat(Stat::Scale) * grad[i];
                m_abs[i] = (b1 * m[i]).abs() + ((1.0 - b1) * g).abs();
                v_abs[i] = b2 * v[i] + (1.0 - b2) * g * g;
                m[i] = b1 * m[i] + (1.0 - b1) * g;
                v[i] = b2 * v[i] + (1.0 - b2) * g * g;
                let denominator = v[i].sqrt() / stat(Stat::Bias2).sqrt() + eps;
                let step = lr / stat(Stat::Bias1) / denominator;
                // m may be a difference of larger numbers, so its mass counts, not its value.
                w_abs[i] = w[i].abs() + 4.0 * step * m_abs[i];
                w[i] = w[i] * (1.0 - lr * decay) - step * m[i];
            }
        }
        run.put(p.m, m, 4, m_abs);
        run.put(p.v, v, 6, v_abs);
        if p.master.is_some() {
            run.put(p.w, w.clone(), 8, w_abs.clone());
        }
        run.put(source, w, 8, w_abs);
    }
}
