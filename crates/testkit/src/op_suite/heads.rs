//! Cases of `QkNormRope` and its backward.

use super::Case;
use super::build::Build;
use crate::inputs::{packed_samples, rotary_tables};
use drafthorse_graph::op::qk_norm_rope::Rotary;
use drafthorse_graph::op::{PARTIALS, QkNormRope, QkNormRopeBwd};
use drafthorse_graph::{DType, Role};

#[derive(Clone, Copy)]
struct Shape {
    q_heads: usize,
    kv_heads: usize,
    dim: usize,
    rotary: usize,
    norms: bool,
    lengths: &'static [usize],
}

pub(super) fn cases(act: DType) -> Vec<Case> {
    let usual = Shape { q_heads: 4, kv_heads: 2, dim: 8, rotary: 8, norms: true, lengths: &[5, 1, 0, 5] };
    let shapes = [
        ("normed", usual),
        ("bare", Shape { q_heads: 3, kv_heads: 1, dim: 6, rotary: 6, norms: false, ..usual }),
        ("partial", Shape { q_heads: 2, kv_heads: 2, dim: 16, rotary: 4, ..usual }),
        ("context", Shape { q_heads: 0, ..usual }),
        ("one_row", Shape { lengths: &[1], ..usual }),
        ("many_rows", Shape { q_heads: 1, kv_heads: 1, dim: 4, rotary: 4, lengths: &[200, 133], ..usual }),
    ];
    let mut cases = Vec::new();
    for (name, shape) in shapes {
        cases.push(forward(&format!("qk_norm_rope_{name}"), act, shape));
        cases.push(backward(&format!("qk_norm_rope_bwd_{name}"), act, shape, 1.0));
    }
    cases.push(backward("qk_norm_rope_bwd_zero_upstream", act, usual, 0.0));
    cases
}

/// The op with its inputs; outputs are declared by the caller's role.
fn op(b: &mut Build, s: Shape) -> QkNormRope {
    let act = b.act();
    let samples = packed_samples(s.lengths, s.lengths.len(), s.lengths.iter().sum());
    let rows = samples.positions.len();
    let mut positions = samples.positions;
    // The last row stands at the end of the table.
    *positions.last_mut().expect("a row") = 699;
    let (cos, sin) = rotary_tables(700, s.rotary, 1e4);
    let rotary = Rotary {
        positions: b.ints("positions", positions),
        cos: b.given("cos", &[700, s.rotary / 2], DType::F32, Role::Frozen, cos),
        sin: b.given("sin", &[700, s.rotary / 2], DType::F32, Role::Frozen, sin),
    };
    let src = b.input("src", &[rows, (s.q_heads + 2 * s.kv_heads) * s.dim], 1.0);
    let q_norm = (s.norms && s.q_heads > 0).then(|| b.norm_weight("q_norm", s.dim));
    let k_norm = s.norms.then(|| b.norm_weight("k_norm", s.dim));
    let q = (s.q_heads > 0).then(|| b.program.tensor("q", &[rows, s.q_heads * s.dim], act, Role::Output));
    let k = b.output("k", &[rows, s.kv_heads * s.dim]);
    let v = b.output("v", &[rows, s.kv_heads * s.dim]);
    QkNormRope { src, q_heads: s.q_heads, kv_heads: s.kv_heads, dim: s.dim, q_norm, k_norm, eps: 1e-6, rotary, q, k, v }
}

fn forward(name: &str, act: DType, shape: Shape) -> Case {
    let mut b = Build::new(name, act);
    let op = op(&mut b, shape);
    b.op(op)
}

fn backward(name: &str, act: DType, s: Shape, upstream: f64) -> Case {
    let mut b = Build::new(name, act);
    let forward = op(&mut b, s);
    let rows = b.program.get(forward.src).rows();
    // Context gradients arrive in F32 accumulators, block gradients in the activation dtype.
    let dtype = if s.q_heads == 0 { DType::F32 } else { act };
    let dq = (s.q_heads > 0).then(|| b.random("dq", &[rows, s.q_heads * s.dim], dtype, Role::Input, upstream));
    let dk = b.random("dk", &[rows, s.kv_heads * s.dim], dtype, Role::Input, upstream);
    let dv = b.random("dv", &[rows, s.kv_heads * s.dim], dtype, Role::Input, upstream);
    let width = b.program.get(forward.src).cols();
    let dsrc = b.output("dsrc", &[rows, width]);
    let dq_norm = forward.q_norm.map(|_| b.random("dq_norm", &[s.dim], DType::F32, Role::Grad, 1.0));
    let dk_norm = forward.k_norm.map(|_| b.random("dk_norm", &[s.dim], DType::F32, Role::Grad, 1.0));
    let partials = b.scratch("partials", &[PARTIALS, 2 * s.dim], DType::F32);
    b.op(QkNormRopeBwd { forward, dq, dk, dv, dsrc, dq_norm, dk_norm, partials })
}
