//! `CausalAttention`: grouped-query causal attention over packed samples, forward only (targets are frozen).
//!
//! q `[T, hq·D]`, k, v `[T, hk·D]`, o `[T, hq·D]`; cu_seqlens `[S+1]` I32 with `n_seqs` `[1]` I32 valid samples: sample s is rows
//! `cu[s]..cu[s+1]`. Row t of sample s attends rows `cu[s]..=t`; `o = softmax(D^-1/2 · q kᵀ) v` per head, head h of q with head
//! `h / (hq/hk)` of k and v. Scores, maxima and sums fp32; no S×S matrix exists. Rows that belong to no sample are written as zero.
//! FLOPs counted: `4·hq·D · Σ_s len²/2`, with the plan's `mean_len`. Source: Dao 2023, arXiv 2307.08691 (online softmax).

use super::{Access, Contract, Heads};
use crate::program::{PhaseBuilder, Program, TensorId};

/// Packed samples: which rows belong together.
#[derive(Clone, Copy, Debug)]
pub struct Packing {
    /// `[S+1]` I32, ascending; entries after the last sample repeat the token count.
    pub cu_seqlens: TensorId,
    /// `[1]` I32.
    pub n_seqs: TensorId,
    /// Tokens of a typical sample, for the FLOP count of the plan only.
    pub mean_len: usize,
}

/// See the module.
#[derive(Clone, Debug)]
pub struct CausalAttention {
    /// `[T, hq·D]`.
    pub q: TensorId,
    /// `[T, hk·D]`.
    pub k: TensorId,
    /// `[T, hk·D]`.
    pub v: TensorId,
    /// Samples.
    pub packing: Packing,
    /// Geometry.
    pub heads: Heads,
    /// `[T, hq·D]`.
    pub o: TensorId,
}

impl Contract for CausalAttention {
    fn visit(&mut self, f: &mut dyn FnMut(Access, &mut TensorId)) {
        f(Access::Read, &mut self.q);
        f(Access::Read, &mut self.k);
        f(Access::Read, &mut self.v);
        f(Access::Read, &mut self.packing.cu_seqlens);
        f(Access::Read, &mut self.packing.n_seqs);
        f(Access::Write, &mut self.o);
    }

    fn flops(&self, program: &Program) -> u64 {
        let rows = program.get(self.q).rows() as u64;
        2 * rows * self.packing.mean_len as u64 * self.heads.q_cols() as u64
    }
}

impl PhaseBuilder<'_> {
    /// Appends causal attention over packed samples and returns o `[T, hq·D]`.
    pub fn causal_attention(&mut self, q: TensorId, k: TensorId, v: TensorId, packing: Packing, heads: Heads) -> TensorId {
        heads.check();
        let rows = self.program.get(q).rows();
        assert_eq!(self.shape(q), [rows, heads.q_cols()], "q");
        for t in [k, v] {
            assert_eq!(self.shape(t), [rows, heads.kv_cols()], "`{}`", self.program.get(t).name);
        }
        let o = self.act("attention", &[rows, heads.q_cols()]);
        self.push(CausalAttention { q, k, v, packing, heads, o }.into());
        o
    }
}
