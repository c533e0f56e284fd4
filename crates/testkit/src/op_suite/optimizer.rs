//! Cases of `GradNorm` and `AdamW`.

use super::build::Build;
use super::{Case, Rule};
use drafthorse_graph::op::optim::{NORM_CHUNK, Stat};
use drafthorse_graph::op::{AdamParam, AdamW, GradNorm};
use drafthorse_graph::{DType, Role};

const BETAS: [f32; 2] = [0.9, 0.999];

pub(super) fn cases(act: DType) -> Vec<Case> {
    let mut cases = Vec::new();
    let plain = Norm { lengths: &[37, 1, 300], std: 1.0, sums: [7.0, 3.5], t: 4, plant: None };
    for (name, norm) in [
        ("clipped", plain),
        ("not_clipped", Norm { std: 1e-3, ..plain }),
        ("first_step", Norm { t: 0, ..plain }),
        ("many_chunks", Norm { lengths: &[5, 2 * NORM_CHUNK + 17], ..plain }),
        ("zero_gradients", Norm { std: 0.0, ..plain }),
        ("infinite_gradient", Norm { plant: Some(f64::INFINITY), ..plain }),
        ("nan_gradient", Norm { plant: Some(f64::NAN), ..plain }),
        ("infinite_loss", Norm { sums: [f64::INFINITY, 3.5], ..plain }),
        ("no_weight", Norm { sums: [0.0, 0.0], ..plain }),
    ] {
        cases.push(grad_norm(&format!("grad_norm_{name}"), act, norm));
    }
    for (name, finite, decay) in [("step", true, 0.0), ("decay", true, 0.1), ("skipped", false, 0.1)] {
        cases.push(adamw(&format!("adamw_{name}"), act, finite, decay));
    }
    cases
}

#[derive(Clone, Copy)]
struct Norm {
    lengths: &'static [usize],
    std: f64,
    sums: [f64; 2],
    t: i32,
    plant: Option<f64>,
}

fn grad_norm(name: &str, act: DType, n: Norm) -> Case {
    let mut b = Build::new(name, act);
    let mut grads = Vec::new();
    for (i, &len) in n.lengths.iter().enumerate() {
        let mut content = b.rng.normals(len, n.std);
        if let (Some(bad), 0) = (n.plant, i) {
            content[len / 2] = bad;
        }
        grads.push(b.given(&format!("grad.{i}"), &[len], DType::F32, Role::Grad, content));
    }
    let finite = n.plant.is_none() && n.sums[0].is_finite() && n.sums[1] > 0.0;
    let sums = b.given("sums", &[2], DType::F32, Role::Grad, n.sums.to_vec());
    let adam_t = b.program.tensor("adam_t", &[1], DType::I32, Role::State);
    b.values.insert(adam_t, crate::oracle::Value::Int(vec![n.t]));
    let stats = b.output_of("stats", &[8], DType::F32);
    if !finite {
        b.rule(stats, Rule::Only(vec![Stat::WeightSum as usize, Stat::Finite as usize, Stat::AdamT as usize]));
    }
    let chunks = n.lengths.iter().map(|len| len.div_ceil(NORM_CHUNK)).sum();
    let chunk_sums = b.scratch("chunk_sums", &[chunks], DType::F32);
    b.op(GradNorm { grads, sums, adam_t, stats, chunk_sums, clip: 1.0, betas: BETAS })
}

fn adamw(name: &str, act: DType, finite: bool, weight_decay: f32) -> Case {
    let mut b = Build::new(name, act);
    let mut params = Vec::new();
    let mut outputs = Vec::new();
    for (i, len) in [37, 1, 1030].into_iter().enumerate() {
        let content = b.rng.normals(len, 0.5);
        let state = |b: &mut Build, what: &str, content: Vec<f64>, role| {
            b.given(&format!("{what}.{i}"), &[len], DType::F32, role, content)
        };
        let master = (act != DType::F32).then(|| state(&mut b, "master", content.clone(), Role::State));
        let w = b.given(&format!("w.{i}"), &[len], act, Role::Weight, content);
        let m = b.rng.normals(len, 0.1);
        let m = state(&mut b, "m", m, Role::State);
        let v = b.rng.uniforms(len, 0.0, 0.02);
        let v = state(&mut b, "v", v, Role::State);
        let mut grad = b.rng.normals(len, 3.0);
        // Exactly zero gradients still decay the moments.
        grad[len / 2..].iter_mut().step_by(2).for_each(|g| *g = 0.0);
        if !finite {
            grad[0] = f64::NAN;
        }
        let grad = state(&mut b, "grad", grad, Role::Grad);
        params.push(AdamParam { w, master, m, v, grad });
        outputs.extend([Some(w), master, Some(m), Some(v)].into_iter().flatten());
    }
    if !finite {
        outputs.into_iter().for_each(|t| b.rule(t, Rule::Exact));
    }
    let lr = b.given("lr", &[1], DType::F32, Role::Input, vec![6e-4]);
    let mut stats = vec![0.0; 8];
    stats[Stat::Finite as usize] = f64::from(u8::from(finite));
    stats[Stat::Scale as usize] = 0.37;
    stats[Stat::Bias1 as usize] = 1.0 - 0.9f64.powi(3);
    stats[Stat::Bias2 as usize] = 1.0 - 0.999f64.powi(3);
    stats[Stat::AdamT as usize] = 3.0;
    let stats = b.given("stats", &[8], DType::F32, Role::Input, stats);
    b.op(AdamW { params, lr, stats, betas: BETAS, eps: 1e-8, weight_decay })
}
