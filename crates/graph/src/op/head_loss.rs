//! `HeadLoss`: frozen language-model head, weighted cross-entropy and its gradient, in one walk over the vocabulary.
//!
//! x `[R, H]` of which `count` `[1]` I32 rows are valid, head `[V, H]`, labels `[R]` I32, weights `[R]` F32. Per valid row:
//! `z = x headᵀ`, `lse = log Σ exp z` (fp32), `ce = lse - z[label]`, `prob = exp(-ce)`, `hit = argmax z == label` (lowest index wins a tie).
//! `sums[0] += Σ w·ce`, `sums[1] += Σ w`; `dx = w · (softmax(z) - onehot(label)) head`, the gradient of the *unnormalised* Σ w·ce.
//! Rows past the count: dx, ce, prob, hit are zero. Rows are walked in chunks of `chunk`; only one chunk's logits `[chunk, V]` exist.
//! `p - onehot` is formed in fp32 and then rounded to the logits' dtype (in bf16 the gradient would be 3-31 % off as the drafter converges).
//! FLOPs: `2·R·V·H`, doubled when dx is wanted. The two sums are taken in f64 in an order that the shapes fix: deterministic.

use super::{Access, Contract};
use crate::dtype::DType;
use crate::program::{PhaseBuilder, Program, TensorId};

/// What the loss is taken against.
#[derive(Clone, Copy, Debug)]
pub struct Labels {
    /// `[R]` I32.
    pub labels: TensorId,
    /// `[R]` F32.
    pub weights: TensorId,
    /// `[1]` I32.
    pub count: TensorId,
}

/// Per-row results, all `[R]`.
#[derive(Clone, Copy, Debug)]
pub struct RowMetrics {
    /// F32: cross-entropy.
    pub ce: TensorId,
    /// F32: probability of the label.
    pub prob: TensorId,
    /// I32: 1 where the argmax is the label.
    pub hit: TensorId,
}

/// See the module.
#[derive(Clone, Debug)]
pub struct HeadLoss {
    /// `[R, H]`.
    pub x: TensorId,
    /// `[V, H]`.
    pub head: TensorId,
    /// Labels and weights.
    pub labels: Labels,
    /// Rows per chunk.
    pub chunk: usize,
    /// `[chunk, V]` in the activation dtype.
    pub logits: TensorId,
    /// F32 `[2]`, added to: Σ w·ce, Σ w.
    pub sums: TensorId,
    /// Per-row results.
    pub metrics: RowMetrics,
    /// `[R, H]`; absent for a forward-only pass.
    pub dx: Option<TensorId>,
}

impl Contract for HeadLoss {
    fn visit(&mut self, f: &mut dyn FnMut(Access, &mut TensorId)) {
        f(Access::Read, &mut self.x);
        f(Access::Read, &mut self.head);
        f(Access::Read, &mut self.labels.labels);
        f(Access::Read, &mut self.labels.weights);
        f(Access::Read, &mut self.labels.count);
        f(Access::Scratch, &mut self.logits);
        f(Access::Update, &mut self.sums);
        f(Access::Write, &mut self.metrics.ce);
        f(Access::Write, &mut self.metrics.prob);
        f(Access::Write, &mut self.metrics.hit);
        if let Some(dx) = &mut self.dx {
            f(Access::Write, dx);
        }
    }

    fn flops(&self, program: &Program) -> u64 {
        let gemm = 2 * (program.get(self.x).len() * program.get(self.head).rows()) as u64;
        if self.dx.is_some() { 2 * gemm } else { gemm }
    }
}

impl PhaseBuilder<'_> {
    /// Appends the loss over x's rows; returns dx when `with_gradient`.
    #[expect(clippy::too_many_arguments, reason = "operands of different kinds, each named at the only call of a model")]
    pub fn head_loss(
        &mut self,
        x: TensorId,
        head: TensorId,
        labels: Labels,
        sums: TensorId,
        metrics: RowMetrics,
        chunk: usize,
        with_gradient: bool,
    ) -> Option<TensorId> {
        let shape = self.shape(x);
        let chunk = chunk.min(shape[0]).max(1);
        assert_eq!(self.program.get(head).cols(), shape[1], "head width");
        for t in [labels.labels, labels.weights, metrics.ce, metrics.prob, metrics.hit] {
            assert_eq!(self.program.get(t).len(), shape[0], "`{}` has one entry per row", self.program.get(t).name);
        }
        assert_eq!((self.program.get(sums).len(), self.program.get(sums).dtype), (2, DType::F32), "loss sums");
        let vocab = self.program.get(head).rows();
        let logits = self.act("logits", &[chunk, vocab]);
        let dx = with_gradient.then(|| self.act("d_final", &shape));
        self.push(HeadLoss { x, head, labels, chunk, logits, sums, metrics, dx }.into());
        dx
    }
}
