//! `Embed`, `Capture`, `GatherRows`, `ScatterRows`, `SwiGlu`, `SwiGluBwd`, `Zero`: rows in, rows out.
//!
//! Invariant: 16-byte pieces wherever widths and offsets allow, elements otherwise.

use super::{Lowering, warps};
use crate::command::{Arg, Pointer, Work};
use crate::error::CudaError;
use drafthorse_graph::op::{Capture, Embed, GatherRows, ScatterRows, SwiGlu, SwiGluBwd, Zero};
use drafthorse_graph::plan::{ALIGN, Region};

/// Suffix of the kernel and pieces of `cols` bf16 elements, given whether every offset is a multiple of 16 bytes.
fn pieces(cols: usize, aligned: bool) -> (&'static str, usize) {
    if aligned && cols.is_multiple_of(8) { ("wide", cols / 8) } else { ("narrow", cols) }
}

impl Lowering<'_> {
    pub(super) fn embed(&mut self, op: &Embed) -> Result<(), CudaError> {
        self.want_bf16(&[op.table, op.y])?;
        let (suffix, chunks) = pieces(self.cols(op.table), true);
        let args = vec![self.arg(op.ids)?, self.arg(op.table)?, self.arg(op.y)?, self.int(chunks)?];
        self.launch("embed", format!("embed_{suffix}"), [self.rows(op.y), 1], [warps(chunks).min(256), 1], 0, args)
    }

    pub(super) fn capture(&mut self, op: &Capture) -> Result<(), CudaError> {
        self.want_bf16(&[op.src, op.dst])?;
        let (src_width, dst_width) = (self.cols(op.src), self.cols(op.dst));
        let aligned = [src_width, dst_width, op.src_col, op.dst_col].iter().all(|n| n.is_multiple_of(8));
        let (suffix, chunks) = pieces(op.cols, aligned);
        let per = op.cols / chunks.max(1);
        let (src, dst) = (self.pointer(op.src).plus(2 * op.src_col), self.pointer(op.dst).plus(2 * op.dst_col));
        let strides = [self.int(src_width / per.max(1))?, self.int(dst_width / per.max(1))?];
        let args = vec![Arg::Pointer(src), Arg::Pointer(dst), strides[0], strides[1], self.int(chunks)?];
        self.launch("capture", format!("capture_{suffix}"), [self.rows(op.src), 1], [warps(chunks).min(256), 1], 0, args)
    }

    pub(super) fn gather_rows(&mut self, op: &GatherRows) -> Result<(), CudaError> {
        self.want_bf16(&[op.x, op.y])?;
        let (suffix, chunks) = pieces(self.cols(op.x), true);
        let c = &op.compaction;
        let args = vec![self.arg(op.x)?, self.arg(c.rows)?, self.arg(c.count)?, self.arg(op.y)?, self.int(chunks)?];
        self.launch("gather_rows", format!("gather_rows_{suffix}"), [self.rows(op.y), 1], [warps(chunks).min(256), 1], 0, args)
    }

    pub(super) fn scatter_rows(&mut self, op: &ScatterRows) -> Result<(), CudaError> {
        self.want_bf16(&[op.dy, op.dx])?;
        let (suffix, chunks) = pieces(self.cols(op.dy), true);
        let args = vec![self.arg(op.dy)?, self.arg(op.inverse)?, self.arg(op.dx)?, self.int(chunks)?];
        self.launch("scatter_rows", format!("scatter_rows_{suffix}"), [self.rows(op.dx), 1], [warps(chunks).min(256), 1], 0, args)
    }

    pub(super) fn swiglu(&mut self, op: &SwiGlu) -> Result<(), CudaError> {
        self.want_bf16(&[op.gu, op.y])?;
        let cols = self.cols(op.y);
        let (suffix, chunks) = pieces(cols, true);
        let args = vec![self.arg(op.gu)?, self.arg(op.y)?, self.int(cols)?];
        self.launch("swiglu", format!("swiglu_{suffix}"), [self.rows(op.y), chunks.div_ceil(256)], [256, 1], 0, args)
    }

    pub(super) fn swiglu_bwd(&mut self, op: &SwiGluBwd) -> Result<(), CudaError> {
        self.want_bf16(&[op.gu, op.dy, op.dgu])?;
        let cols = self.cols(op.dy);
        let (suffix, chunks) = pieces(cols, true);
        let args = vec![self.arg(op.gu)?, self.arg(op.dy)?, self.arg(op.dgu)?, self.int(cols)?];
        self.launch("swiglu_bwd", format!("swiglu_bwd_{suffix}"), [self.rows(op.dy), chunks.div_ceil(256)], [256, 1], 0, args)
    }

    /// Neighbouring tensors are zeroed together, the padding between them included: it belongs to no one.
    pub(super) fn zero(&mut self, op: &Zero) -> Result<(), CudaError> {
        let mut ranges: Vec<(Region, u64, usize)> = Vec::new();
        for &t in &op.tensors {
            let tensor = self.program.get(t);
            match self.pointer(t) {
                Pointer::At(at) => ranges.push((Region::of(tensor.role), at, tensor.len() * tensor.dtype.bytes())),
                Pointer::Slot(_) => return Err(self.refuse("a slot is not zeroed")),
            }
        }
        ranges.sort_unstable();
        let mut merged: Vec<(Region, u64, usize)> = Vec::new();
        for (region, at, bytes) in ranges {
            match merged.last_mut() {
                // Two regions may happen to be neighbours on the device, and are two allocations all the same.
                Some((r, start, len)) if *r == region && *start + (*len as u64).next_multiple_of(ALIGN as u64) == at => {
                    *len = (at - *start) as usize + bytes;
                }
                _ => merged.push((region, at, bytes)),
            }
        }
        for (_, at, bytes) in merged {
            self.push(Work::Zero { at, bytes });
        }
        Ok(())
    }
}
