//! `GradNorm` and `AdamW`: tables of fixed chunks, one launch for all parameters.
//!
//! Invariant: chunks are [`NORM_CHUNK`] elements of one tensor, in the op's order.

use super::Lowering;
use crate::command::{Arg, Pointer};
use crate::driver::Buffer;
use crate::error::CudaError;
use drafthorse_graph::op::optim::NORM_CHUNK;
use drafthorse_graph::op::{AdamW, GradNorm};

/// (first element, elements) of each chunk of a tensor.
fn chunks(len: usize) -> impl Iterator<Item = (usize, usize)> {
    (0..len).step_by(NORM_CHUNK).map(move |first| (first, NORM_CHUNK.min(len - first)))
}

impl Lowering<'_> {
    /// Allocates a device table of 8-byte words; the executor uploads it.
    fn table(&mut self, words: Vec<u64>, what: &str) -> Result<Arg, CudaError> {
        let bytes = bytemuck::cast_slice(&words).to_vec();
        let buffer = Buffer::new(self.device, bytes.len(), what)?;
        let address = buffer.address();
        self.tables.push((buffer, bytes));
        Ok(Arg::Pointer(Pointer::At(address)))
    }

    pub(super) fn grad_norm(&mut self, op: &GradNorm) -> Result<(), CudaError> {
        let mut words = Vec::new();
        for &g in &op.grads {
            let at = self.at(g)?;
            for (first, len) in chunks(self.program.get(g).len()) {
                words.extend([at + 4 * first as u64, len as u64]);
            }
        }
        let n = words.len() / 2;
        let table = self.table(words, "the gradient norm's table")?;
        let chunk_sums = self.arg(op.chunk_sums)?;
        self.launch("grad_norm", "grad_norm_chunks", [n, 1], [256, 1], 0, vec![table, chunk_sums])?;
        let args = vec![
            chunk_sums,
            self.int(n)?,
            self.arg(op.sums)?,
            self.arg(op.adam_t)?,
            self.arg(op.stats)?,
            Arg::Float(op.clip),
            Arg::Float(op.betas[0]),
            Arg::Float(op.betas[1]),
        ];
        self.launch("grad_norm", "grad_norm_final", [1, 1], [1024, 1], 0, args)
    }

    pub(super) fn adamw(&mut self, op: &AdamW) -> Result<(), CudaError> {
        let mut words = Vec::new();
        for p in &op.params {
            let (w, master) = match p.master {
                Some(master) => (Some(self.at(p.w)?), self.at(master)?),
                None => (None, self.at(p.w)?),
            };
            let (m, v, grad) = (self.at(p.m)?, self.at(p.v)?, self.at(p.grad)?);
            for (first, len) in chunks(self.program.get(p.w).len()) {
                let wide = 4 * first as u64;
                words.extend([w.map_or(0, |w| w + wide / 2), master + wide, m + wide, v + wide, grad + wide, len as u64]);
            }
        }
        let n = words.len() / 6;
        let table = self.table(words, "the optimizer's table")?;
        let args = vec![
            table,
            self.arg(op.lr)?,
            self.arg(op.stats)?,
            Arg::Float(op.betas[0]),
            Arg::Float(op.betas[1]),
            Arg::Float(op.eps),
            Arg::Float(op.weight_decay),
        ];
        self.launch("adamw", "adamw", [n, 1], [256, 1], 0, args)
    }
}
