//! `KvAppend` and `CachedAttention`: decoding over a key/value cache whose length is a device scalar.
//!
//! Append: rows 0..R of k, v `[R, hk·D]` go to rows `len..len+R` of the caches `[C, hk·D]`, `len` `[1]` I32. Cropping a cache (rejected
//! tokens) is the host writing a smaller `len`; what lies beyond is overwritten by the next append and never read.
//! Attention: row r of q `[R, hq·D]` attends cache rows `0..=len+r`; `o` `[R, hq·D]`. Softmax fp32. `len + R ≤ C` is asserted by executors.
//! FLOPs counted with the plan's `mean_len`. Both forward only.

use super::{Access, Contract, Heads};
use crate::program::{PhaseBuilder, Program, TensorId};

/// Caches of one layer.
#[derive(Clone, Copy, Debug)]
pub struct KvCache {
    /// `[C, hk·D]`.
    pub k: TensorId,
    /// `[C, hk·D]`.
    pub v: TensorId,
    /// `[1]` I32: rows that hold tokens already.
    pub len: TensorId,
}

/// See the module.
#[derive(Clone, Debug)]
pub struct KvAppend {
    /// `[R, hk·D]`.
    pub k: TensorId,
    /// `[R, hk·D]`.
    pub v: TensorId,
    /// Where to.
    pub cache: KvCache,
}

/// See the module.
#[derive(Clone, Debug)]
pub struct CachedAttention {
    /// `[R, hq·D]`.
    pub q: TensorId,
    /// Read up to row `len + R - 1`.
    pub cache: KvCache,
    /// Geometry.
    pub heads: Heads,
    /// Cache rows a typical query sees, for the FLOP count of the plan only.
    pub mean_len: usize,
    /// `[R, hq·D]`.
    pub o: TensorId,
}

impl Contract for KvAppend {
    fn visit(&mut self, f: &mut dyn FnMut(Access, &mut TensorId)) {
        f(Access::Read, &mut self.k);
        f(Access::Read, &mut self.v);
        f(Access::Read, &mut self.cache.len);
        f(Access::Update, &mut self.cache.k);
        f(Access::Update, &mut self.cache.v);
    }

    fn flops(&self, _program: &Program) -> u64 {
        0
    }
}

impl Contract for CachedAttention {
    fn visit(&mut self, f: &mut dyn FnMut(Access, &mut TensorId)) {
        f(Access::Read, &mut self.q);
        f(Access::Read, &mut self.cache.k);
        f(Access::Read, &mut self.cache.v);
        f(Access::Read, &mut self.cache.len);
        f(Access::Write, &mut self.o);
    }

    fn flops(&self, program: &Program) -> u64 {
        4 * (program.get(self.q).rows() * self.mean_len * self.heads.q_cols()) as u64
    }
}

impl PhaseBuilder<'_> {
    /// Appends rows to a cache.
    pub fn kv_append(&mut self, k: TensorId, v: TensorId, cache: KvCache) {
        assert_eq!(self.program.get(k).cols(), self.program.get(cache.k).cols(), "cache width");
        self.push(KvAppend { k, v, cache }.into());
    }

    /// Appends attention of q's rows over a cache that already holds them.
    pub fn cached_attention(&mut self, q: TensorId, cache: KvCache, heads: Heads) -> TensorId {
        heads.check();
        let shape = self.shape(q);
        assert_eq!(shape[1], heads.q_cols(), "q");
        let mean_len = self.program.get(cache.k).rows() / 2;
        let o = self.act("attention", &shape);
        self.push(CachedAttention { q, cache, heads, mean_len, o }.into());
        o
    }
}
