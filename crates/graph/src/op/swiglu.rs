//! `SwiGlu`: `y = silu(gate) ⊙ up` over a packed row `[gate | up]`, and its backward.
//!
//! gu `[T, 2·I]`, y `[T, I]`. With σ the logistic function: `d_up = dy · gate·σ(gate)`,
//! `d_gate = dy · up · σ(gate)·(1 + gate·(1 - σ(gate)))`. Arithmetic fp32. Bound: memory. Source: Shazeer 2020, arXiv 2002.05202.

use super::{Access, Contract};
use crate::backward::Backward;
use crate::program::{PhaseBuilder, Program, TensorId};

/// See the module.
#[derive(Clone, Debug)]
pub struct SwiGlu {
    /// `[T, 2·I]`.
    pub gu: TensorId,
    /// `[T, I]`.
    pub y: TensorId,
}

/// See the module.
#[derive(Clone, Debug)]
pub struct SwiGluBwd {
    /// `[T, 2·I]`.
    pub gu: TensorId,
    /// `[T, I]`.
    pub dy: TensorId,
    /// `[T, 2·I]`.
    pub dgu: TensorId,
}

impl Contract for SwiGlu {
    fn visit(&mut self, f: &mut dyn FnMut(Access, &mut TensorId)) {
        f(Access::Read, &mut self.gu);
        f(Access::Write, &mut self.y);
    }

    fn flops(&self, program: &Program) -> u64 {
        5 * program.get(self.y).len() as u64
    }

    fn vjp(&self, backward: &mut Backward<'_, '_>) {
        let Some(dy) = backward.grad(self.y) else { return };
        let shape = backward.shape(self.gu);
        let dgu = backward.act("d_gate_up", &shape);
        backward.push(SwiGluBwd { gu: self.gu, dy, dgu });
        backward.replace_grad(self.gu, dgu);
    }
}

impl Contract for SwiGluBwd {
    fn visit(&mut self, f: &mut dyn FnMut(Access, &mut TensorId)) {
        f(Access::Read, &mut self.gu);
        f(Access::Read, &mut self.dy);
        f(Access::Write, &mut self.dgu);
    }

    fn flops(&self, program: &Program) -> u64 {
        10 * program.get(self.dy).len() as u64
    }
}

impl PhaseBuilder<'_> {
    /// Appends `silu(gate) ⊙ up` of `gu` `[T, 2·I]` and returns `[T, I]`.
    pub fn swiglu(&mut self, gu: TensorId) -> TensorId {
        let shape = self.shape(gu);
        assert!(shape[1].is_multiple_of(2), "gate and up have equal width");
        let y = self.act("swiglu", &[shape[0], shape[1] / 2]);
        self.push(SwiGlu { gu, y }.into());
        y
    }
}
