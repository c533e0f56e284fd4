//! `RmsNorm`: `s = x (+ delta)`, `y = s · rstd · w`, `rstd = (mean(s²) + eps)^-1/2`, and its backward.
//!
//! x, delta, s, y `[T, H]`; w `[H]`; rstd `[T]` F32. With a delta, s is written out (it is the residual stream that goes on) and
//! rounded to its dtype before it is normed, so that the stream and the norm see the same numbers.
//! Backward, per row, with g = dy ⊙ w and ŝ = s·rstd: `ds = dres + rstd · (g - ŝ · mean(g ⊙ ŝ))`, `dw += Σ_t dy ⊙ ŝ`.
//! ds is the gradient of x and of delta alike. All sums fp32; dw goes through [`PARTIALS`] fixed partial sums.
//! Bound: memory. Source: Zhang & Sennrich 2019, arXiv 1910.07467, eq. 4; HF `Qwen3RMSNorm`.

use super::{Access, Contract, PARTIALS};
use crate::backward::Backward;
use crate::dtype::DType;
use crate::program::{PhaseBuilder, Program, TensorId};

/// See the module.
#[derive(Clone, Debug)]
pub struct RmsNorm {
    /// `[T, H]`.
    pub x: TensorId,
    /// `[T, H]`, added to `x` first, with the stream it makes.
    pub residual: Option<Residual>,
    /// `[H]`.
    pub w: TensorId,
    /// Added to the mean square.
    pub eps: f32,
    /// `[T, H]`.
    pub y: TensorId,
    /// `[T]` F32.
    pub rstd: TensorId,
}

/// The branch that is added and the sum that goes on.
#[derive(Clone, Copy, Debug)]
pub struct Residual {
    /// `[T, H]`.
    pub delta: TensorId,
    /// `[T, H]`: `x + delta`.
    pub sum: TensorId,
}

impl RmsNorm {
    /// The tensor that is normed: the sum if there is a residual branch, x otherwise.
    pub fn stream(&self) -> TensorId {
        self.residual.map_or(self.x, |r| r.sum)
    }
}

/// See the module.
#[derive(Clone, Debug)]
pub struct RmsNormBwd {
    /// What was normed, `[T, H]`.
    pub stream: TensorId,
    /// `[H]`.
    pub w: TensorId,
    /// `[T]` F32.
    pub rstd: TensorId,
    /// Gradient of y, `[T, H]`, activation dtype or F32.
    pub dy: TensorId,
    /// Gradient that reaches the stream from later, `[T, H]`, activation dtype or F32.
    pub dres: Option<TensorId>,
    /// Gradient of the stream, `[T, H]`; absent when nothing before needs it.
    pub dx: Option<TensorId>,
    /// F32 `[H]`, added to; absent when w is frozen.
    pub dw: Option<TensorId>,
    /// F32 `[PARTIALS, H]`.
    pub partials: TensorId,
}

impl Contract for RmsNorm {
    fn visit(&mut self, f: &mut dyn FnMut(Access, &mut TensorId)) {
        f(Access::Read, &mut self.x);
        if let Some(r) = &mut self.residual {
            f(Access::Read, &mut r.delta);
            f(Access::Write, &mut r.sum);
        }
        f(Access::Read, &mut self.w);
        f(Access::Write, &mut self.y);
        f(Access::Write, &mut self.rstd);
    }

    fn flops(&self, program: &Program) -> u64 {
        4 * program.get(self.x).len() as u64
    }

    fn vjp(&self, backward: &mut Backward<'_, '_>) {
        let stream = self.stream();
        let Some(dy) = backward.grad(self.y) else {
            // Only the stream goes on: its gradient passes through the addition unchanged.
            if let (Some(r), Some(g)) = (self.residual, backward.grad(stream)) {
                backward.share_grad(g, &[self.x, r.delta]);
            }
            return;
        };
        let dres = backward.grad(stream);
        let dw = backward.accumulator(self.w);
        let wanted = match self.residual {
            Some(r) => backward.wants(self.x) || backward.wants(r.delta),
            None => backward.wants(self.x),
        };
        if !wanted && dw.is_none() {
            return;
        }
        let shape = backward.shape(stream);
        let dx = wanted.then(|| backward.act("d_stream", &shape));
        let partials = backward.temp("norm_partials", &[PARTIALS, shape[1]], DType::F32);
        backward.push(RmsNormBwd { stream, w: self.w, rstd: self.rstd, dy, dres, dx, dw, partials });
        if let Some(dx) = dx {
            match self.residual {
                Some(r) => backward.share_grad(dx, &[self.x, r.delta]),
                // `dres` is x's gradient so far, and dx takes it in.
                None => backward.supersede_grad(self.x, dx),
            }
        }
    }
}

impl Contract for RmsNormBwd {
    fn visit(&mut self, f: &mut dyn FnMut(Access, &mut TensorId)) {
        f(Access::Read, &mut self.stream);
        f(Access::Read, &mut self.w);
        f(Access::Read, &mut self.rstd);
        f(Access::Read, &mut self.dy);
        if let Some(t) = &mut self.dres {
            f(Access::Read, t);
        }
        if let Some(t) = &mut self.dx {
            f(Access::Write, t);
        }
        if let Some(t) = &mut self.dw {
            f(Access::Update, t);
        }
        f(Access::Scratch, &mut self.partials);
    }

    fn flops(&self, program: &Program) -> u64 {
        8 * program.get(self.stream).len() as u64
    }
}

impl PhaseBuilder<'_> {
    /// Appends `y = rms_norm(x)`.
    pub fn rms_norm(&mut self, x: TensorId, w: TensorId, eps: f32) -> TensorId {
        let shape = self.norm_shape(x, w);
        let y = self.act("norm", &shape);
        let rstd = self.temp("rstd", &shape[..1], DType::F32);
        self.push(RmsNorm { x, residual: None, w, eps, y, rstd }.into());
        y
    }

    /// Appends `s = x + delta, y = rms_norm(s)` and returns `(s, y)`.
    pub fn add_rms_norm(&mut self, x: TensorId, delta: TensorId, w: TensorId, eps: f32) -> (TensorId, TensorId) {
        let shape = self.norm_shape(x, w);
        assert_eq!(shape, self.shape(delta), "the residual branch has another shape");
        let sum = self.act("stream", &shape);
        let y = self.act("norm", &shape);
        let rstd = self.temp("rstd", &shape[..1], DType::F32);
        self.push(RmsNorm { x, residual: Some(Residual { delta, sum }), w, eps, y, rstd }.into());
        (sum, y)
    }

    fn norm_shape(&self, x: TensorId, w: TensorId) -> Vec<usize> {
        let shape = self.shape(x);
        assert_eq!(shape.len(), 2, "rms_norm takes [T, H]");
        assert_eq!(self.program.get(w).len(), shape[1], "norm weight `{}`", self.program.get(w).name);
        shape
    }
}
