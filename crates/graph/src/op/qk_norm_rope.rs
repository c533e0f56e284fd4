//! `QkNormRope`: a packed row `[q heads | k heads | v heads]` becomes q, k and v in attention layout.
//!
//! src `[T, (hq + 2·hk)·D]`; hq may be 0 (context rows have no query). For each q and k head: optional RMSNorm over D with weight
//! `q_norm`/`k_norm` `[D]`, then rotary embedding (rotate-half, NeoX) of the first R elements by the row's position:
//! with halves (a, b) of those R: `(a·cos - b·sin, b·cos + a·sin)`; cos, sin `[P, R/2]` F32 tables (any attention factor is in them).
//! v is copied. Outputs q `[T, hq·D]`, k, v `[T, hk·D]`.
//! Backward: rotate the gradient back (transpose: sin negated), then the norm's backward per head (rstd is recomputed from src):
//! with n = s·rstd, g = dn ⊙ w: `ds = rstd·(g - n·mean(g ⊙ n))`, `dw += Σ dn ⊙ n`. dv is copied. dq, dk, dv may be F32 or activation dtype.
//! Sums fp32; norm gradients through [`PARTIALS`] fixed partial sums. Bound: memory.
//! Source: Su et al. 2021, arXiv 2104.09864; HF `apply_rotary_pos_emb`, `Qwen3Attention`.

use super::{Access, Contract, Heads, PARTIALS};
use crate::backward::Backward;
use crate::dtype::DType;
use crate::program::{PhaseBuilder, Program, TensorId};

/// Rotary tables and the positions that index them.
#[derive(Clone, Copy, Debug)]
pub struct Rotary {
    /// `[T]` I32, each `< P`.
    pub positions: TensorId,
    /// `[P, R/2]` F32.
    pub cos: TensorId,
    /// `[P, R/2]` F32.
    pub sin: TensorId,
}

/// See the module. `heads.q` is 0 when there is no query part.
#[derive(Clone, Debug)]
pub struct QkNormRope {
    /// `[T, (hq + 2·hk)·D]`.
    pub src: TensorId,
    /// Query heads (0 for context rows).
    pub q_heads: usize,
    /// Key/value heads.
    pub kv_heads: usize,
    /// Elements of a head.
    pub dim: usize,
    /// `[D]`.
    pub q_norm: Option<TensorId>,
    /// `[D]`.
    pub k_norm: Option<TensorId>,
    /// Added to the mean square.
    pub eps: f32,
    /// Tables and positions.
    pub rotary: Rotary,
    /// `[T, hq·D]`, absent when hq is 0.
    pub q: Option<TensorId>,
    /// `[T, hk·D]`.
    pub k: TensorId,
    /// `[T, hk·D]`.
    pub v: TensorId,
}

/// See the module.
#[derive(Clone, Debug)]
pub struct QkNormRopeBwd {
    /// The forward op, whose outputs are not read.
    pub forward: QkNormRope,
    /// `[T, hq·D]`, absent when hq is 0.
    pub dq: Option<TensorId>,
    /// `[T, hk·D]`.
    pub dk: TensorId,
    /// `[T, hk·D]`.
    pub dv: TensorId,
    /// `[T, (hq + 2·hk)·D]`.
    pub dsrc: TensorId,
    /// F32 `[D]`, added to.
    pub dq_norm: Option<TensorId>,
    /// F32 `[D]`, added to.
    pub dk_norm: Option<TensorId>,
    /// F32 `[PARTIALS, 2·D]`.
    pub partials: TensorId,
}

impl QkNormRope {
    fn visit_inputs(&mut self, f: &mut dyn FnMut(Access, &mut TensorId)) {
        f(Access::Read, &mut self.src);
        for w in [&mut self.q_norm, &mut self.k_norm].into_iter().flatten() {
            f(Access::Read, w);
        }
        f(Access::Read, &mut self.rotary.positions);
        f(Access::Read, &mut self.rotary.cos);
        f(Access::Read, &mut self.rotary.sin);
    }
}

impl Contract for QkNormRope {
    fn visit(&mut self, f: &mut dyn FnMut(Access, &mut TensorId)) {
        self.visit_inputs(f);
        if let Some(q) = &mut self.q {
            f(Access::Write, q);
        }
        f(Access::Write, &mut self.k);
        f(Access::Write, &mut self.v);
    }

    fn flops(&self, program: &Program) -> u64 {
        8 * program.get(self.src).len() as u64
    }

    fn vjp(&self, backward: &mut Backward<'_, '_>) {
        let dq = self.q.map(|q| backward.grad(q).expect("q has a gradient"));
        let (Some(dk), Some(dv)) = (backward.grad(self.k), backward.grad(self.v)) else { return };
        let shape = backward.shape(self.src);
        let dsrc = backward.act("d_qkv", &shape);
        let partials = backward.temp("qk_norm_partials", &[PARTIALS, 2 * self.dim], DType::F32);
        let dq_norm = self.q.and(self.q_norm).and_then(|w| backward.accumulator(w));
        let dk_norm = self.k_norm.and_then(|w| backward.accumulator(w));
        backward.push(QkNormRopeBwd { forward: self.clone(), dq, dk, dv, dsrc, dq_norm, dk_norm, partials });
        backward.replace_grad(self.src, dsrc);
    }
}

impl Contract for QkNormRopeBwd {
    fn visit(&mut self, f: &mut dyn FnMut(Access, &mut TensorId)) {
        self.forward.visit_inputs(f);
        if let Some(t) = &mut self.dq {
            f(Access::Read, t);
        }
        f(Access::Read, &mut self.dk);
        f(Access::Read, &mut self.dv);
        f(Access::Write, &mut self.dsrc);
        for t in [&mut self.dq_norm, &mut self.dk_norm].into_iter().flatten() {
            f(Access::Update, t);
        }
        f(Access::Scratch, &mut self.partials);
    }

    fn flops(&self, program: &Program) -> u64 {
        16 * program.get(self.forward.src).len() as u64
    }
}

/// The norms of a layer's heads; both absent in llama.
#[derive(Clone, Copy, Debug, Default)]
pub struct HeadNorms {
    /// `[D]`.
    pub q: Option<TensorId>,
    /// `[D]`.
    pub k: Option<TensorId>,
    /// Added to the mean square.
    pub eps: f32,
}

impl PhaseBuilder<'_> {
    /// Appends the split of `src` `[T, (hq + 2·hk)·D]` into q, k and v.
    pub fn qkv_heads(&mut self, src: TensorId, heads: Heads, norms: HeadNorms, rotary: Rotary) -> (TensorId, TensorId, TensorId) {
        heads.check();
        let rows = self.program.get(src).rows();
        let q = self.act("q", &[rows, heads.q_cols()]);
        let k = self.act("k", &[rows, heads.kv_cols()]);
        let v = self.act("v", &[rows, heads.kv_cols()]);
        self.push_heads(src, heads.q, heads, norms, rotary, Some(q), k, v);
        (q, k, v)
    }

    /// Appends the split of `src` `[T, 2·hk·D]` into k and v, which the caller declared (`[T, hk·D]` each).
    pub fn kv_heads(&mut self, src: TensorId, heads: Heads, norms: HeadNorms, rotary: Rotary, k: TensorId, v: TensorId) {
        self.push_heads(src, 0, heads, norms, rotary, None, k, v);
    }

    #[expect(clippy::too_many_arguments, reason = "private: the two public forms above are the interface")]
    fn push_heads(
        &mut self,
        src: TensorId,
        q_heads: usize,
        heads: Heads,
        norms: HeadNorms,
        rotary: Rotary,
        q: Option<TensorId>,
        k: TensorId,
        v: TensorId,
    ) {
        let st = self.program.get(src);
        let (rows, cols) = (st.rows(), (q_heads + 2 * heads.kv) * heads.dim);
        assert_eq!(st.cols(), cols, "packed heads `{}`", st.name);
        assert_eq!(self.program.get(rotary.positions).len(), rows, "one position per row of `{}`", st.name);
        assert_eq!(self.shape(rotary.cos), self.shape(rotary.sin), "rotary tables");
        let rot = 2 * self.program.get(rotary.cos).cols();
        assert!(rot <= heads.dim, "rotary width {rot} of head width {}", heads.dim);
        for t in [k, v] {
            assert_eq!(self.shape(t), [rows, heads.kv_cols()], "`{}`", self.program.get(t).name);
        }
        for w in [norms.q, norms.k].into_iter().flatten() {
            assert_eq!(self.program.get(w).len(), heads.dim, "head norm `{}`", self.program.get(w).name);
        }
        let op = QkNormRope {
            src,
            q_heads,
            kv_heads: heads.kv,
            dim: heads.dim,
            q_norm: if q_heads > 0 { norms.q } else { None },
            k_norm: norms.k,
            eps: norms.eps,
            rotary,
            q,
            k,
            v,
        };
        self.push(op.into());
    }
}
