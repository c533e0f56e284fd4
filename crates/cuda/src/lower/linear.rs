//! `Linear`, `LinearDx`, `LinearDw`: matrix products by cuBLASLt, and what it cannot take along.
//!
//! Invariant: products accumulate in fp32; a bias is added before the one rounding of the output.

use super::Lowering;
use crate::blas::Product;
use crate::command::{Arg, Gemm, Pointer, Work};
use crate::error::CudaError;
use drafthorse_graph::op::{Linear, LinearDw, LinearDx};
use drafthorse_graph::{DType, TensorId};

fn fixed(p: Pointer) -> u64 {
    // A slot is allocated on at least 256 bytes, so an offset into it has the alignment of the sum.
    match p {
        Pointer::At(a) | Pointer::Slot(a) => a,
    }
}

impl Lowering<'_> {
    /// Appends a product whose operands are A, B, D.
    pub(super) fn gemm(&mut self, product: Product, a: Pointer, b: Pointer, d: Pointer, bias: Option<Pointer>) {
        let product = product.aligned([a, b, d].map(fixed));
        self.push(Work::Gemm(Gemm { product, a, b, d, bias }));
    }

    /// The rows of a weight from `first` on.
    fn weight_rows(&self, w: TensorId, first: usize, bytes: usize) -> Pointer {
        self.pointer(w).plus(first * self.cols(w) * bytes)
    }

    pub(super) fn linear(&mut self, op: &Linear) -> Result<(), CudaError> {
        self.want_bf16(&[op.x, op.w])?;
        let (t, k, n) = (self.rows(op.x), self.cols(op.x), op.rows.len());
        let out = self.program.get(op.y).dtype;
        let mut product = Product::x_wt(t, n, k, out);
        let (w, x, y) = (self.weight_rows(op.w, op.rows.start, 2), self.pointer(op.x), self.pointer(op.y));
        let mut epilogue = None;
        if let Some(bias) = op.bias {
            self.want_bf16(&[bias])?;
            let at = self.pointer(bias).plus(2 * op.rows.start);
            if fixed(at).is_multiple_of(16) && out == DType::BF16 {
                product.bias = true;
                epilogue = Some(at);
            } else {
                let symbol = if out == DType::F32 { "linear_bias_rows_f32" } else { "linear_bias_rows_bf16" };
                let args = vec![Arg::Pointer(at), Arg::Pointer(y), self.int(n)?];
                self.launch("linear_bias", symbol, [t, n.div_ceil(256)], [256, 1], 0, args)?;
                product.accumulate = true;
            }
        }
        self.gemm(product, w, x, y, epilogue);
        Ok(())
    }

    pub(super) fn linear_dx(&mut self, op: &LinearDx) -> Result<(), CudaError> {
        self.want_bf16(&[op.dy, op.w])?;
        let (t, n, k) = (self.rows(op.dy), op.rows.len(), self.cols(op.dx));
        let product = Product { accumulate: op.accumulate, ..Product::dy_w(t, n, k, self.program.get(op.dx).dtype) };
        self.gemm(product, self.weight_rows(op.w, op.rows.start, 2), self.pointer(op.dy), self.pointer(op.dx), None);
        Ok(())
    }

    pub(super) fn linear_dw(&mut self, op: &LinearDw) -> Result<(), CudaError> {
        self.want_bf16(&[op.dy, op.x])?;
        let (t, n, k) = (self.rows(op.dy), op.rows.len(), self.cols(op.x));
        let dw = self.weight_rows(op.dw, op.rows.start, 4);
        self.gemm(Product::dyt_x(t, n, k), self.pointer(op.x), self.pointer(op.dy), dw, None);
        if let Some(db) = op.db {
            let to = self.pointer(db).plus(4 * op.rows.start);
            let args = vec![self.arg(op.dy)?, Arg::Pointer(to), self.int(t)?, self.int(n)?];
            self.launch("linear_bias", "linear_bias_grad", [n.div_ceil(32), 1], [32, 16], 0, args)?;
        }
        Ok(())
    }
}
