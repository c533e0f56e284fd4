//! `HeadLoss` and `PickTokens`.
//!
//! Invariant: of a head loss only one chunk's logits exist; its last chunk is as short as the rows that are left.

use super::Lowering;
use crate::blas::Product;
use crate::command::{Arg, Pointer};
use crate::error::CudaError;
use drafthorse_graph::DType;
use drafthorse_graph::op::{HeadLoss, PickTokens};

impl Lowering<'_> {
    pub(super) fn head_loss(&mut self, op: &HeadLoss) -> Result<(), CudaError> {
        self.want_bf16(&[op.x, op.head, op.logits])?;
        let (rows, h, vocab) = (self.rows(op.x), self.cols(op.x), self.rows(op.head));
        let (x, head, logits) = (self.at(op.x)?, self.pointer(op.head), self.pointer(op.logits));
        let suffix = if vocab.is_multiple_of(8) { "wide" } else { "narrow" };
        for first in (0..rows).step_by(op.chunk) {
            let n = op.chunk.min(rows - first);
            let of_rows = |at: u64| Pointer::At(at + (2 * first * h) as u64);
            self.gemm(Product::x_wt(n, vocab, h, DType::BF16), head, of_rows(x), logits, None);
            let args = vec![
                Arg::Pointer(logits),
                self.arg(op.labels.labels)?,
                self.arg(op.labels.weights)?,
                self.arg(op.labels.count)?,
                self.arg(op.metrics.ce)?,
                self.arg(op.metrics.prob)?,
                self.arg(op.metrics.hit)?,
                self.int(first)?,
                self.int(vocab)?,
                Arg::Int(i32::from(op.dx.is_some())),
            ];
            self.launch("head_loss", format!("head_loss_rows_{suffix}"), [n, 1], [1024, 1], 0, args)?;
            if let Some(dx) = op.dx {
                let dx = of_rows(self.at(dx)?);
                self.gemm(Product::dy_w(n, vocab, h, DType::BF16), head, logits, dx, None);
            }
        }
        let args = vec![self.arg(op.metrics.ce)?, self.arg(op.labels.weights)?, self.arg(op.labels.count)?, self.arg(op.sums)?];
        self.launch("head_loss", "head_loss_sums", [1, 1], [256, 1], 0, args)
    }

    pub(super) fn pick_tokens(&mut self, op: &PickTokens) -> Result<(), CudaError> {
        let (rows, vocab) = (self.rows(op.logits), self.cols(op.logits));
        if vocab > 1 << 20 {
            return Err(self.refuse(format!("a vocabulary of {vocab}: at most 2^20")));
        }
        let p = &op.picks;
        let mut args = Vec::new();
        for t in [op.logits, op.temperature, op.uniform, op.probe, p.argmax, p.top2, p.prob, p.drawn] {
            args.push(self.arg(t)?);
        }
        args.push(self.int(vocab)?);
        self.launch("pick_tokens", "pick_tokens", [rows, 1], [1024, 1], 0, args)
    }
}
