//! Cases of `Linear`, `LinearDx`, `LinearDw`, `RmsNorm`, `RmsNormBwd`, `SwiGlu`, `SwiGluBwd`.

use super::build::Build;
use super::{Case, LastTerm};
use drafthorse_graph::op::rms_norm::Residual;
use drafthorse_graph::op::{Linear, LinearDw, LinearDx, PARTIALS, RmsNorm, RmsNormBwd, SwiGlu, SwiGluBwd};
use drafthorse_graph::{DType, Role, TensorId};
use std::ops::Range;

pub(super) fn cases(act: DType) -> Vec<Case> {
    let mut cases = Vec::new();
    for (name, t, k, rows, n_all, bias) in [
        ("ragged", 5, 13, 0..7, 7, false),
        ("bias", 33, 9, 0..17, 17, true),
        ("one_row", 1, 130, 0..3, 3, true),
        ("one_of_each", 1, 1, 0..1, 1, false),
        ("tiles", 70, 72, 0..65, 65, false),
        ("row_range", 9, 20, 7..19, 23, true),
    ] {
        cases.push(linear(&format!("linear_{name}"), act, act, t, k, rows.clone(), n_all, bias));
        cases.push(linear_dx(&format!("linear_dx_{name}"), act, t, k, rows.clone(), n_all, bias, 1.0));
        cases.push(linear_dw(&format!("linear_dw_{name}"), act, t, k, rows, n_all, bias, 1.0));
    }
    cases.push(linear("linear_real_vocabulary", act, DType::F32, 2, 8, 0..151_936, 151_936, false));
    cases.push(linear_dx("linear_dx_zero_upstream", act, 6, 9, 0..5, 5, true, 0.0));
    cases.push(linear_dw("linear_dw_zero_upstream", act, 6, 9, 0..5, 5, true, 0.0));
    for (name, t, h, residual) in [
        ("plain", 6, 24, false),
        ("one_row", 1, 130, false),
        ("one_column", 7, 1, false),
        ("add", 6, 24, true),
        ("add_wide", 3, 515, true),
    ] {
        cases.push(rms_norm(&format!("rms_norm_{name}"), act, t, h, residual));
    }
    let full = NormGrads { dres: true, dx: true, dw: true, upstream: 1.0 };
    for (name, t, h, grads) in [
        ("all", 6, 24, full),
        ("one_row", 1, 130, full),
        ("more_rows_than_partials", PARTIALS + 45, 5, full),
        ("no_residual", 6, 24, NormGrads { dres: false, ..full }),
        ("weight_only", 9, 24, NormGrads { dres: false, dx: false, ..full }),
        ("frozen_weight", 9, 24, NormGrads { dw: false, ..full }),
        ("zero_upstream", 6, 24, NormGrads { upstream: 0.0, ..full }),
    ] {
        cases.push(rms_norm_bwd(&format!("rms_norm_bwd_{name}"), act, t, h, grads));
    }
    for (name, t, i) in [("ragged", 5, 11), ("one", 1, 1), ("wide", 3, 515)] {
        cases.push(swiglu(&format!("swiglu_{name}"), act, t, i));
        cases.push(swiglu_bwd(&format!("swiglu_bwd_{name}"), act, t, i, 1.0));
    }
    cases.push(swiglu_bwd("swiglu_bwd_zero_upstream", act, 5, 11, 0.0));
    cases
}

#[expect(clippy::too_many_arguments, reason = "the sizes of a table row above")]
fn linear(name: &str, act: DType, out: DType, t: usize, k: usize, rows: Range<usize>, n_all: usize, bias: bool) -> Case {
    let mut b = Build::new(name, act);
    let x = b.input("x", &[t, k], 1.0);
    let w = b.random("w", &[n_all, k], act, if bias { Role::Weight } else { Role::Frozen }, 1.0);
    let bias = bias.then(|| b.random("bias", &[n_all], act, Role::Weight, 1.0));
    let y = b.output_of("y", &[t, rows.len()], out);
    b.last_term(LastTerm::Column(x));
    b.op(Linear { x, w, bias, rows, y })
}

#[expect(clippy::too_many_arguments, reason = "the sizes of a table row above")]
fn linear_dx(
    name: &str,
    act: DType,
    t: usize,
    k: usize,
    rows: Range<usize>,
    n_all: usize,
    accumulate: bool,
    upstream: f64,
) -> Case {
    let mut b = Build::new(name, act);
    let dy = b.input("dy", &[t, rows.len()], upstream);
    let w = b.random("w", &[n_all, k], act, Role::Weight, 1.0);
    let dx = if accumulate { b.random("dx", &[t, k], DType::F32, Role::Step, 1.0) } else { b.output("dx", &[t, k]) };
    if upstream > 0.0 {
        b.last_term(LastTerm::Column(dy));
    }
    b.op(LinearDx { dy, w, rows, dx, accumulate })
}

#[expect(clippy::too_many_arguments, reason = "the sizes of a table row above")]
fn linear_dw(name: &str, act: DType, t: usize, k: usize, rows: Range<usize>, n_all: usize, bias: bool, upstream: f64) -> Case {
    let mut b = Build::new(name, act);
    let dy = b.input("dy", &[t, rows.len()], upstream);
    let x = b.input("x", &[t, k], 1.0);
    let dw = b.random("dw", &[n_all, k], DType::F32, Role::Grad, 1.0);
    let db = bias.then(|| b.random("db", &[n_all], DType::F32, Role::Grad, 1.0));
    if upstream > 0.0 {
        b.last_term(LastTerm::Row(x));
    }
    b.op(LinearDw { dy, x, rows, dw, db })
}

/// Rows: ordinary, huge, tiny (eps decides), all zero, one spike, ordinary again.
fn hostile_rows(b: &mut Build, t: usize, h: usize) -> Vec<f64> {
    let mut x = b.rng.normals(t * h, 1.0);
    for (i, row) in x.chunks_mut(h).enumerate() {
        match i {
            1 => row.iter_mut().for_each(|v| *v *= 1e4),
            2 => row.iter_mut().for_each(|v| *v *= 1e-4),
            3 => row.fill(0.0),
            4 => {
                row.fill(0.0);
                row[h / 2] = 300.0;
            }
            _ => {}
        }
    }
    x
}

fn rms_norm(name: &str, act: DType, t: usize, h: usize, residual: bool) -> Case {
    let mut b = Build::new(name, act);
    let content = hostile_rows(&mut b, t, h);
    let x = b.given("x", &[t, h], act, Role::Input, content);
    let residual = residual.then(|| {
        let content = hostile_rows(&mut b, t, h);
        Residual { delta: b.given("delta", &[t, h], act, Role::Input, content), sum: b.output("sum", &[t, h]) }
    });
    let w = b.norm_weight("w", h);
    let y = b.output("y", &[t, h]);
    let rstd = b.output_of("rstd", &[t], DType::F32);
    b.op(RmsNorm { x, residual, w, eps: 1e-6, y, rstd })
}

#[derive(Clone, Copy)]
struct NormGrads {
    dres: bool,
    dx: bool,
    dw: bool,
    upstream: f64,
}

fn rms_norm_bwd(name: &str, act: DType, t: usize, h: usize, grads: NormGrads) -> Case {
    let mut b = Build::new(name, act);
    let content = hostile_rows(&mut b, t, h);
    let stream = b.given("stream", &[t, h], act, Role::Input, content);
    let w = b.norm_weight("w", h);
    let (y, rstd) = (b.precomputed("y", &[t, h], act), b.precomputed("rstd", &[t], DType::F32));
    b.precompute(RmsNorm { x: stream, residual: None, w, eps: 1e-6, y, rstd });
    // Both dtypes that a gradient may have.
    let dy = b.random("dy", &[t, h], if grads.dres { DType::F32 } else { act }, Role::Input, grads.upstream);
    let dres = grads.dres.then(|| b.input("dres", &[t, h], grads.upstream));
    let dx = grads.dx.then(|| b.output("dx", &[t, h]));
    let dw = grads.dw.then(|| b.random("dw", &[h], DType::F32, Role::Grad, 1.0));
    let partials = b.scratch("partials", &[PARTIALS, h], DType::F32);
    b.op(RmsNormBwd { stream, w, rstd, dy, dres, dx, dw, partials })
}

/// `[gate | up]` with saturated and exactly zero gates.
fn gate_up(b: &mut Build, t: usize, i: usize) -> TensorId {
    let mut gu = b.rng.normals(t * 2 * i, 2.0);
    for (at, gate) in [30.0, -30.0, 0.0, 80.0, -80.0].into_iter().enumerate().take(i) {
        gu[at] = gate;
    }
    let act = b.act();
    b.given("gu", &[t, 2 * i], act, Role::Input, gu)
}

fn swiglu(name: &str, act: DType, t: usize, i: usize) -> Case {
    let mut b = Build::new(name, act);
    let gu = gate_up(&mut b, t, i);
    let y = b.output("y", &[t, i]);
    b.op(SwiGlu { gu, y })
}

fn swiglu_bwd(name: &str, act: DType, t: usize, i: usize, upstream: f64) -> Case {
    let mut b = Build::new(name, act);
    let gu = gate_up(&mut b, t, i);
    let dy = b.input("dy", &[t, i], upstream);
    let dgu = b.output("dgu", &[t, 2 * i]);
    b.op(SwiGluBwd { gu, dy, dgu })
}
