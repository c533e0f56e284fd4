//! `Capture`: a strided copy of columns, `dst[t, dst_col..dst_col+cols] = src[t, src_col..src_col+cols]`.
//!
//! The target captures its residual stream `[T, H]` into a slot `[T, n·H]`; a drafter of a sweep that uses fewer layers than the slot
//! holds copies its own out. Only the named columns of `dst` are written, so one slot is filled by n captures. FLOPs 0. Not differentiable.

use super::{Access, Contract};
use crate::backward::Backward;
use crate::program::{PhaseBuilder, Program, TensorId};

/// See the module.
#[derive(Clone, Debug)]
pub struct Capture {
    /// `[T, W_src]`.
    pub src: TensorId,
    /// First column read.
    pub src_col: usize,
    /// `[T, W_dst]`.
    pub dst: TensorId,
    /// First column written.
    pub dst_col: usize,
    /// Columns copied.
    pub cols: usize,
}

impl Contract for Capture {
    fn visit(&mut self, f: &mut dyn FnMut(Access, &mut TensorId)) {
        f(Access::Read, &mut self.src);
        f(Access::Write, &mut self.dst);
    }

    fn flops(&self, _program: &Program) -> u64 {
        0
    }

    fn vjp(&self, _backward: &mut Backward<'_, '_>) {}
}

impl PhaseBuilder<'_> {
    /// Appends a column copy.
    ///
    /// # Panics
    /// When rows differ or a range leaves its tensor.
    pub fn capture(&mut self, src: TensorId, src_col: usize, dst: TensorId, dst_col: usize, cols: usize) {
        let (s, d) = (self.program.get(src), self.program.get(dst));
        assert_eq!(s.rows(), d.rows(), "capture of `{}` into `{}`: rows", s.name, d.name);
        assert!(src_col + cols <= s.cols() && dst_col + cols <= d.cols(), "capture of `{}` into `{}`: columns", s.name, d.name);
        self.push(Capture { src, src_col, dst, dst_col, cols }.into());
    }
}
