//! `Linear`: `y = x Wᵀ (+ b)`, over a range of W's rows, and its two gradients.
//!
//! x `[T, K]`, W `[N_all, K]` of which rows `rows` (N of them) take part, b `[N_all]` likewise, y `[T, N]`.
//! Backward: `dx = dy W[rows]` (written, or added to what is there), `dW[rows] += dyᵀ x`, `db[rows] += Σ_t dy`.
//! Accumulation is fp32 whatever the dtypes; accumulators of weights are F32. FLOPs `2·T·N·K` each.
//! The row range exists because q, k and v are one weight: the draft rows use all of it, the context only k and v.

use super::{Access, Contract};
use crate::backward::Backward;
use crate::dtype::DType;
use crate::program::{PhaseBuilder, Program, TensorId};
use std::ops::Range;

/// `y = x W[rows]ᵀ (+ b[rows])`.
#[derive(Clone, Debug)]
pub struct Linear {
    /// `[T, K]`.
    pub x: TensorId,
    /// `[N_all, K]`.
    pub w: TensorId,
    /// `[N_all]`, optional.
    pub bias: Option<TensorId>,
    /// Rows of `w` that take part.
    pub rows: Range<usize>,
    /// `[T, N]`.
    pub y: TensorId,
}

/// `dx = dy W[rows]`, or `dx += …`.
#[derive(Clone, Debug)]
pub struct LinearDx {
    /// `[T, N]`.
    pub dy: TensorId,
    /// `[N_all, K]`.
    pub w: TensorId,
    /// Rows of `w` that took part.
    pub rows: Range<usize>,
    /// `[T, K]`.
    pub dx: TensorId,
    /// Add to `dx` instead of overwriting it.
    pub accumulate: bool,
}

/// `dw[rows] += dyᵀ x`, `db[rows] += Σ_t dy`.
#[derive(Clone, Debug)]
pub struct LinearDw {
    /// `[T, N]`.
    pub dy: TensorId,
    /// `[T, K]`.
    pub x: TensorId,
    /// Rows of the accumulator that take part.
    pub rows: Range<usize>,
    /// `[N_all, K]` F32.
    pub dw: TensorId,
    /// `[N_all]` F32, optional.
    pub db: Option<TensorId>,
}

fn gemm_flops(program: &Program, tall: TensorId, rows: &Range<usize>, k: usize) -> u64 {
    2 * (program.get(tall).rows() * rows.len() * k) as u64
}

impl Contract for Linear {
    fn visit(&mut self, f: &mut dyn FnMut(Access, &mut TensorId)) {
        f(Access::Read, &mut self.x);
        f(Access::Read, &mut self.w);
        if let Some(b) = &mut self.bias {
            f(Access::Read, b);
        }
        f(Access::Write, &mut self.y);
    }

    fn flops(&self, program: &Program) -> u64 {
        gemm_flops(program, self.x, &self.rows, program.get(self.x).cols())
    }

    fn vjp(&self, backward: &mut Backward<'_, '_>) {
        let Some(dy) = backward.grad(self.y) else { return };
        let dw = backward.accumulator(self.w);
        let db = self.bias.and_then(|b| backward.accumulator(b));
        if let Some(dw) = dw {
            backward.push(LinearDw { dy, x: self.x, rows: self.rows.clone(), dw, db });
        }
        if backward.wants(self.x) {
            let (dx, accumulate) = backward.grad_to_add(self.x);
            backward.push(LinearDx { dy, w: self.w, rows: self.rows.clone(), dx, accumulate });
        }
    }
}

impl Contract for LinearDx {
    fn visit(&mut self, f: &mut dyn FnMut(Access, &mut TensorId)) {
        f(Access::Read, &mut self.dy);
        f(Access::Read, &mut self.w);
        f(if self.accumulate { Access::Update } else { Access::Write }, &mut self.dx);
    }

    fn flops(&self, program: &Program) -> u64 {
        gemm_flops(program, self.dy, &self.rows, program.get(self.dx).cols())
    }
}

impl Contract for LinearDw {
    fn visit(&mut self, f: &mut dyn FnMut(Access, &mut TensorId)) {
        f(Access::Read, &mut self.dy);
        f(Access::Read, &mut self.x);
        f(Access::Update, &mut self.dw);
        if let Some(db) = &mut self.db {
            f(Access::Update, db);
        }
    }

    fn flops(&self, program: &Program) -> u64 {
        gemm_flops(program, self.dy, &self.rows, program.get(self.x).cols())
    }
}

impl PhaseBuilder<'_> {
    /// Appends `y = x Wᵀ` over all rows of `w`; y has the activation dtype.
    pub fn linear(&mut self, x: TensorId, w: TensorId, bias: Option<TensorId>) -> TensorId {
        let all = 0..self.program.get(w).rows();
        let dtype = self.program.act;
        self.linear_rows(x, w, bias, all, dtype)
    }

    /// Appends `y = x W[rows]ᵀ` with y stored as `dtype` (F32 logits, say).
    ///
    /// # Panics
    /// When the inner extents differ or the range leaves the weight.
    pub fn linear_rows(
        &mut self,
        x: TensorId,
        w: TensorId,
        bias: Option<TensorId>,
        rows: Range<usize>,
        dtype: DType,
    ) -> TensorId {
        let (xt, wt) = (self.program.get(x), self.program.get(w));
        assert_eq!(xt.cols(), wt.cols(), "linear `{}`: x `{}` has another inner extent", wt.name, xt.name);
        assert!(rows.end <= wt.rows() && !rows.is_empty(), "linear `{}`: rows {rows:?} of {}", wt.name, wt.rows());
        if let Some(b) = bias {
            assert_eq!(self.program.get(b).len(), wt.rows(), "linear `{}`: bias extent", wt.name);
        }
        let shape = [xt.rows(), rows.len()];
        let y = self.temp("linear", &shape, dtype);
        self.push(Linear { x, w, bias, rows, y }.into());
        y
    }
}
