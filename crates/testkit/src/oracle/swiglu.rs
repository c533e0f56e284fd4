//! `SwiGlu` and its backward, naively.
//!
//! Masses: an fp32 exponential of an argument x is off by a few ulps plus |x| of them when it goes through 2^(x·log2 e).

use super::Run;
use drafthorse_graph::op::{SwiGlu, SwiGluBwd};

const TERMS: usize = 16;

fn sigmoid(x: f64) -> f64 {
    1.0 / (1.0 + (-x).exp())
}

pub(super) fn swiglu(run: &mut Run<'_>, op: &SwiGlu) {
    let gu = run.floats(op.gu);
    let (t, i) = (run.rows(op.y), run.cols(op.y));
    let (mut y, mut abs) = (Vec::new(), Vec::new());
    for r in 0..t {
        for c in 0..i {
            let (gate, up) = (gu[r * 2 * i + c], gu[r * 2 * i + i + c]);
            let v = gate * sigmoid(gate) * up;
            y.push(v);
            abs.push(v.abs() * (1.0 + gate.abs()));
        }
    }
    run.put(op.y, y, TERMS, abs);
}

pub(super) fn swiglu_bwd(run: &mut Run<'_>, op: &SwiGluBwd) {
    let (gu, dy) = (run.floats(op.gu), run.floats(op.dy));
    let (t, i) = (run.rows(op.dy), run.cols(op.dy));
    let (mut dgu, mut abs) = (vec![0.0; t * 2 * i], vec![0.0; t * 2 * i]);
    for r in 0..t {
        for c in 0..i {
            let (g, u) = (r * 2 * i + c, r * 2 * i + i + c);
            let (gate, up, d) = (gu[g], gu[u], dy[r * i + c]);
            let s = sigmoid(gate);
            dgu[g] = d * up * s * (1.0 + gate * (1.0 - s));
            // 1 - s of a large gate is a difference of near equals in fp32, hence the 1 beside it.
            abs[g] = (d * up).abs() * s * (1.0 + gate.abs()) * (1.0 + gate.abs() * (1.0 - s));
            dgu[u] = d * gate * s;
            abs[u] = dgu[u].abs() * (1.0 + gate.abs());
        }
    }
    run.put(op.dgu, dgu, TERMS, abs);
}
