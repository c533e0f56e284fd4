//! `RmsNorm` and `QkNormRope` with their backwards.
//!
//! Invariant: rows whose width is a multiple of 8 take the 16-byte kernels.

use super::{Lowering, warps};
use crate::command::Arg;
use crate::error::CudaError;
use drafthorse_graph::op::{PARTIALS, QkNormRope, QkNormRopeBwd, RmsNorm, RmsNormBwd};

impl Lowering<'_> {
    pub(super) fn rms_norm(&mut self, op: &RmsNorm) -> Result<(), CudaError> {
        self.want_bf16(&[op.x, op.w, op.y])?;
        let cols = self.cols(op.x);
        let (delta, sum) = (op.residual.map(|r| r.delta), op.residual.map(|r| r.sum));
        let args = vec![
            self.arg(op.x)?,
            self.arg_or_null(delta)?,
            self.arg_or_null(sum)?,
            self.arg(op.w)?,
            self.arg(op.y)?,
            self.arg(op.rstd)?,
            self.int(cols)?,
            Arg::Float(op.eps),
        ];
        let (symbol, threads) = match cols {
            n if n.is_multiple_of(8) && n <= 4096 => ("rms_norm_w1", warps(n / 8)),
            n if n.is_multiple_of(8) && n <= 8192 => ("rms_norm_w2", warps(n.div_ceil(16))),
            n if n.is_multiple_of(8) && n <= 16_384 => ("rms_norm_w4", warps(n.div_ceil(32))),
            n if n <= 4096 => ("rms_norm_narrow", 1024),
            n => return Err(self.refuse(format!("rows of {n} columns: the norm takes 16384, or 4096 when no multiple of 8"))),
        };
        self.launch("rms_norm", symbol, [self.rows(op.x), 1], [threads, 1], 0, args)
    }

    pub(super) fn rms_norm_bwd(&mut self, op: &RmsNormBwd) -> Result<(), CudaError> {
        self.want_bf16(&[op.stream, op.w])?;
        if let Some(dx) = op.dx {
            self.want_bf16(&[dx])?;
        }
        let (rows, cols) = (self.rows(op.stream), self.cols(op.stream));
        let args = vec![
            self.arg(op.stream)?,
            self.arg(op.w)?,
            self.arg(op.rstd)?,
            self.arg(op.dy)?,
            self.is_f32(op.dy),
            self.arg_or_null(op.dres)?,
            op.dres.map_or(Arg::Int(0), |t| self.is_f32(t)),
            self.arg_or_null(op.dx)?,
            self.arg(op.partials)?,
            self.int(rows)?,
            self.int(cols)?,
        ];
        let (symbol, threads) = match cols {
            n if n.is_multiple_of(8) && n <= 5120 => ("rms_norm_bwd_w1", warps(n / 8)),
            n if n.is_multiple_of(8) && n <= 8192 => ("rms_norm_bwd_w2", warps(n.div_ceil(16))),
            n if n <= 4096 => ("rms_norm_bwd_narrow", 1024),
            n => {
                return Err(
                    self.refuse(format!("rows of {n} columns: the norm's backward takes 8192, or 4096 when no multiple of 8"))
                );
            }
        };
        self.launch("rms_norm_bwd", symbol, [PARTIALS, 1], [threads, 1], 0, args)?;
        if let Some(dw) = op.dw {
            let args = vec![self.arg(op.partials)?, self.arg(dw)?, self.int(cols)?];
            self.launch("rms_norm_bwd", "rms_norm_bwd_weight", [cols.div_ceil(32), 1], [32, 8], 0, args)?;
        }
        Ok(())
    }

    /// Whether a head of this width and rotation takes the 16-byte kernels; an error when it fits none.
    fn heads_are_wide(&self, dim: usize, half: usize) -> Result<bool, CudaError> {
        if dim > 256 {
            return Err(self.refuse(format!("heads of {dim} elements: at most 256")));
        }
        Ok([64, 128, 256].contains(&dim) && half.is_multiple_of(8))
    }

    pub(super) fn qk_norm_rope(&mut self, op: &QkNormRope) -> Result<(), CudaError> {
        self.want_bf16(&[op.src, op.k, op.v])?;
        let (rows, half) = (self.rows(op.src), self.cols(op.rotary.cos));
        let units = rows * (op.q_heads + 2 * op.kv_heads);
        let mut args = vec![
            self.arg(op.src)?,
            self.arg_or_null(op.q_norm)?,
            self.arg_or_null(op.k_norm)?,
            self.arg(op.rotary.positions)?,
            self.arg(op.rotary.cos)?,
            self.arg(op.rotary.sin)?,
            self.arg_or_null(op.q)?,
            self.arg(op.k)?,
            self.arg(op.v)?,
            self.int(rows)?,
            self.int(op.q_heads)?,
            self.int(op.kv_heads)?,
        ];
        let wide = self.heads_are_wide(op.dim, half)?;
        if !wide {
            args.push(self.int(op.dim)?);
        }
        args.extend([self.int(half)?, Arg::Float(op.eps)]);
        let (symbol, per) =
            if wide { (format!("qk_norm_rope_d{}", op.dim), 2048 / op.dim) } else { ("qk_norm_rope_any".to_owned(), 8) };
        self.launch("qk_norm_rope", symbol, [units.div_ceil(per), 1], [256, 1], 0, args)
    }

    pub(super) fn qk_norm_rope_bwd(&mut self, op: &QkNormRopeBwd) -> Result<(), CudaError> {
        let f = &op.forward;
        self.want_bf16(&[f.src, op.dsrc])?;
        let (rows, half) = (self.rows(f.src), self.cols(f.rotary.cos));
        let mut args = vec![
            self.arg(f.src)?,
            self.arg_or_null(f.q_norm)?,
            self.arg_or_null(f.k_norm)?,
            self.arg(f.rotary.positions)?,
            self.arg(f.rotary.cos)?,
            self.arg(f.rotary.sin)?,
            self.arg_or_null(op.dq)?,
            op.dq.map_or(Arg::Int(0), |t| self.is_f32(t)),
            self.arg(op.dk)?,
            self.is_f32(op.dk),
            self.arg(op.dv)?,
            self.is_f32(op.dv),
            self.arg(op.dsrc)?,
            self.arg(op.partials)?,
            self.int(rows)?,
            self.int(f.q_heads)?,
            self.int(f.kv_heads)?,
        ];
        let wide = self.heads_are_wide(f.dim, half)?;
        if !wide {
            args.push(self.int(f.dim)?);
        }
        args.extend([self.int(half)?, Arg::Float(f.eps)]);
        let (symbol, threads) =
            if wide { (format!("qk_norm_rope_bwd_d{}", f.dim), 512) } else { ("qk_norm_rope_bwd_any".to_owned(), 256) };
        self.launch("qk_norm_rope_bwd", symbol, [PARTIALS, 1], [threads, 1], 0, args)?;
        for (dw, first) in [(op.dq_norm, 0), (op.dk_norm, f.dim)] {
            if let Some(dw) = dw {
                let args = vec![self.arg(op.partials)?, self.arg(dw)?, self.int(first)?, self.int(f.dim)?];
                self.launch("qk_norm_rope_bwd", "qk_norm_rope_bwd_weight", [1, 1], [256, 1], 0, args)?;
            }
        }
        Ok(())
    }
}
