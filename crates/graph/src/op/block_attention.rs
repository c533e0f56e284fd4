//! `BlockAttention`: the drafter's block-diffusion attention, and its backward.
//!
//! N blocks of B slots. Block n belongs to the sample whose first packed context row is `ctx_start[n]` and starts at position
//! `anchor[n]`. Slot k of block n (row `n·B + k` of q) attends
//!  - context rows `ctx_start + j` for `j < anchor` (strictly), and with a sliding window W only `j ≥ anchor + k - (W-1)`;
//!  - its own block's slots j: all B of them, or with a sliding window only `j ≤ k`.
//!
//! q `[N·B, hq·D]`, k_ctx, v_ctx `[T, hk·D]`, k_blk, v_blk `[N·B, hk·D]`, o `[N·B, hq·D]`, lse `[N·B, hq]` F32 (log-sum-exp of the scaled
//! scores). `n_blocks` `[1]` I32 blocks are real; rows of the others are written as zero. Blocks are sorted by (sample, anchor), so
//! `ctx_start + anchor` ascends: executors may binary-search the blocks that see a context row.
//! Backward with P = exp(S - lse), δ = Σ_d do·o: `dv = Pᵀ do`, `dS = P ⊙ (do vᵀ - δ)`, `dq = D^-1/2 dS k`, `dk = D^-1/2 dSᵀ q`;
//! heads of a group add into their shared k and v. dk_ctx, dv_ctx are F32 accumulators that are added to; block gradients are written.
//! All softmax arithmetic fp32; no float atomics; S×S never exists. FLOPs: forward `4·N·B·(mean_context + B)·hq·D`, backward 2.5 times that.
//! Source: DFlash, arXiv 2602.06036; flash-attention backward, arXiv 2307.08691 algorithm 2.

use super::{Access, Contract, Heads};
use crate::backward::Backward;
use crate::dtype::DType;
use crate::program::{PhaseBuilder, Program, TensorId};

/// Which blocks there are and what they see.
#[derive(Clone, Copy, Debug)]
pub struct Blocks {
    /// `[N]` I32: packed row of the first token of the block's sample.
    pub ctx_start: TensorId,
    /// `[N]` I32: the anchor's position, which is the number of context rows before it.
    pub anchor: TensorId,
    /// `[1]` I32: real blocks.
    pub n_blocks: TensorId,
    /// Slots per block, B.
    pub size: usize,
    /// Context rows a typical block sees, for the FLOP count of the plan only.
    pub mean_context: usize,
}

/// See the module.
#[derive(Clone, Debug)]
pub struct BlockAttention {
    /// `[N·B, hq·D]`.
    pub q: TensorId,
    /// `[T, hk·D]`.
    pub k_ctx: TensorId,
    /// `[T, hk·D]`.
    pub v_ctx: TensorId,
    /// `[N·B, hk·D]`.
    pub k_blk: TensorId,
    /// `[N·B, hk·D]`.
    pub v_blk: TensorId,
    /// Blocks.
    pub blocks: Blocks,
    /// Geometry.
    pub heads: Heads,
    /// Sliding window W; None attends everything before the anchor.
    pub window: Option<usize>,
    /// `[N·B, hq·D]`.
    pub o: TensorId,
    /// `[N·B, hq]` F32.
    pub lse: TensorId,
}

/// See the module.
#[derive(Clone, Debug)]
pub struct BlockAttentionBwd {
    /// The forward op; its o and lse are read.
    pub forward: BlockAttention,
    /// Gradient of o, `[N·B, hq·D]`.
    pub d_o: TensorId,
    /// `[N·B, hq]` F32: δ.
    pub delta: TensorId,
    /// `[N·B, hq·D]`.
    pub dq: TensorId,
    /// `[N·B, hk·D]`.
    pub dk_blk: TensorId,
    /// `[N·B, hk·D]`.
    pub dv_blk: TensorId,
    /// `[T, hk·D]` F32, added to.
    pub dk_ctx: TensorId,
    /// `[T, hk·D]` F32, added to.
    pub dv_ctx: TensorId,
}

impl BlockAttention {
    fn visit_inputs(&mut self, f: &mut dyn FnMut(Access, &mut TensorId)) {
        for t in [&mut self.q, &mut self.k_ctx, &mut self.v_ctx, &mut self.k_blk, &mut self.v_blk] {
            f(Access::Read, t);
        }
        for t in [&mut self.blocks.ctx_start, &mut self.blocks.anchor, &mut self.blocks.n_blocks] {
            f(Access::Read, t);
        }
    }

    fn forward_flops(&self, program: &Program) -> u64 {
        let seen = match self.window {
            Some(w) => self.blocks.mean_context.min(w) + self.blocks.size / 2,
            None => self.blocks.mean_context + self.blocks.size,
        };
        4 * (program.get(self.q).rows() * seen * self.heads.q_cols()) as u64
    }
}

impl Contract for BlockAttention {
    fn visit(&mut self, f: &mut dyn FnMut(Access, &mut TensorId)) {
        self.visit_inputs(f);
        f(Access::Write, &mut self.o);
        f(Access::Write, &mut self.lse);
    }

    fn flops(&self, program: &Program) -> u64 {
        self.forward_flops(program)
    }

    fn vjp(&self, backward: &mut Backward<'_, '_>) {
        let Some(d_o) = backward.grad(self.o) else { return };
        let (q_shape, kv_shape, lse_shape) = (backward.shape(self.q), backward.shape(self.k_blk), backward.shape(self.lse));
        let dk_ctx = backward.accumulator(self.k_ctx).expect("context K has a named accumulator");
        let dv_ctx = backward.accumulator(self.v_ctx).expect("context V has a named accumulator");
        let delta = backward.temp("delta", &lse_shape, DType::F32);
        let dq = backward.act("dq", &q_shape);
        let dk_blk = backward.act("dk", &kv_shape);
        let dv_blk = backward.act("dv", &kv_shape);
        backward.push(BlockAttentionBwd { forward: self.clone(), d_o, delta, dq, dk_blk, dv_blk, dk_ctx, dv_ctx });
        backward.replace_grad(self.q, dq);
        backward.replace_grad(self.k_blk, dk_blk);
        backward.replace_grad(self.v_blk, dv_blk);
    }
}

impl Contract for BlockAttentionBwd {
    fn visit(&mut self, f: &mut dyn FnMut(Access, &mut TensorId)) {
        self.forward.visit_inputs(f);
        f(Access::Read, &mut self.forward.o);
        f(Access::Read, &mut self.forward.lse);
        f(Access::Read, &mut self.d_o);
        f(Access::Scratch, &mut self.delta);
        f(Access::Write, &mut self.dq);
        f(Access::Write, &mut self.dk_blk);
        f(Access::Write, &mut self.dv_blk);
        f(Access::Update, &mut self.dk_ctx);
        f(Access::Update, &mut self.dv_ctx);
    }

    fn flops(&self, program: &Program) -> u64 {
        self.forward.forward_flops(program) * 5 / 2
    }
}

/// Keys and values of context and block.
#[derive(Clone, Copy, Debug)]
pub struct BlockKv {
    /// `[T, hk·D]`.
    pub k_ctx: TensorId,
    /// `[T, hk·D]`.
    pub v_ctx: TensorId,
    /// `[N·B, hk·D]`.
    pub k_blk: TensorId,
    /// `[N·B, hk·D]`.
    pub v_blk: TensorId,
}

impl PhaseBuilder<'_> {
    /// Appends block-diffusion attention and returns o `[N·B, hq·D]`.
    pub fn block_attention(&mut self, q: TensorId, kv: BlockKv, blocks: Blocks, heads: Heads, window: Option<usize>) -> TensorId {
        heads.check();
        let rows = self.program.get(blocks.anchor).len() * blocks.size;
        assert_eq!(self.shape(q), [rows, heads.q_cols()], "q");
        for t in [kv.k_blk, kv.v_blk] {
            assert_eq!(self.shape(t), [rows, heads.kv_cols()], "`{}`", self.program.get(t).name);
        }
        for t in [kv.k_ctx, kv.v_ctx] {
            assert_eq!(self.program.get(t).cols(), heads.kv_cols(), "`{}`", self.program.get(t).name);
        }
        assert!(window != Some(0), "a sliding window sees at least its own position");
        let o = self.act("attention", &[rows, heads.q_cols()]);
        let lse = self.temp("lse", &[rows, heads.q], DType::F32);
        let BlockKv { k_ctx, v_ctx, k_blk, v_blk } = kv;
        self.push(BlockAttention { q, k_ctx, v_ctx, k_blk, v_blk, blocks, heads, window, o, lse }.into());
        o
    }
}
