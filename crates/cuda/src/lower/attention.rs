//! The attention ops. Geometry as the headers of `block_attention_*.cu`, `causal_attention_fwd.cu`, `cached_attention.cu`, `kv_append.cu` say.
//!
//! Refuses head widths other than 64, 128 and 256 (128 at most in the backward), blocks of more than 32 slots, groups of more than 64 heads.
//! Invariant: the wgmma kernels run on Hopper unless the executor was told otherwise; both forms have one contract.

use super::{CACHE_CHUNK, Lowering};
use crate::command::{Arg, Pointer};
use crate::driver::TensorMap;
use crate::error::CudaError;
use drafthorse_graph::op::{BlockAttention, BlockAttentionBwd, CachedAttention, CausalAttention, Heads, KvAppend, Op};
use drafthorse_graph::{Program, TensorId};

/// Bytes of scratch an op needs beside its tensors.
pub(super) fn scratch_bytes(program: &Program, op: &Op) -> usize {
    match op {
        Op::CachedAttention(op) => {
            let chunks = program.get(op.cache.k).rows().div_ceil(CACHE_CHUNK);
            4 * chunks * program.get(op.q).rows() * op.heads.q * (op.heads.dim + 2)
        }
        _ => 0,
    }
}

/// Rows of a tile and dynamic shared memory of the forward kernels.
struct Forward {
    rows: usize,
    shared: usize,
}

fn forward_mma(dim: usize) -> Forward {
    let (rows, keys) = if dim == 256 { (64, 32) } else { (128, 64) };
    Forward { rows, shared: 512 + 2 * rows * dim + 8 * keys * dim }
}

/// Keys of a tile of the Hopper forward kernels.
fn forward_keys(dim: usize) -> usize {
    if dim == 256 { 64 } else { 128 }
}

fn forward_wgmma(dim: usize) -> Forward {
    Forward { rows: 128, shared: 1024 + 256 * dim + 8 * forward_keys(dim) * dim }
}

impl Lowering<'_> {
    fn check_heads(&self, heads: Heads, widest: usize) -> Result<(), CudaError> {
        if ![64, 128, 256].contains(&heads.dim) || heads.dim > widest {
            return Err(self.refuse(format!(
                "heads of {} elements: the attention kernels take 64, 128 and 256, {widest} at most here",
                heads.dim
            )));
        }
        if heads.group() > 64 {
            return Err(self.refuse(format!("{} query heads to a key head: at most 64", heads.group())));
        }
        Ok(())
    }

    fn check_block(&self, size: usize) -> Result<(), CudaError> {
        if size > 32 { Err(self.refuse(format!("blocks of {size} slots: at most 32"))) } else { Ok(()) }
    }

    /// The map of a tensor `[rows, heads·dim]`.
    fn map(&self, t: TensorId, heads: usize, dim: usize, boxes: [usize; 2]) -> Result<Arg, CudaError> {
        Ok(Arg::Map(TensorMap::new(self.at(t)?, [dim, heads, self.rows(t)], boxes)?))
    }

    fn ints(&self, values: &[usize]) -> Result<Vec<Arg>, CudaError> {
        values.iter().map(|&v| self.int(v)).collect()
    }

    fn args(&self, tensors: &[TensorId]) -> Result<Vec<Arg>, CudaError> {
        tensors.iter().map(|&t| self.arg(t)).collect()
    }

    /// CTAs of a persistent kernel over `items` pieces of work.
    fn persistent(&self, items: usize) -> usize {
        items.min(self.device.multiprocessors as usize)
    }

    pub(super) fn causal_attention(&mut self, op: &CausalAttention) -> Result<(), CudaError> {
        self.check_heads(op.heads, 256)?;
        self.want_bf16(&[op.q, op.k, op.v, op.o])?;
        let Heads { q: hq, kv: hk, dim } = op.heads;
        let (tokens, samples) = (self.rows(op.q), self.program.get(op.packing.cu_seqlens).len() - 1);
        let mut tail = self.args(&[op.packing.cu_seqlens, op.packing.n_seqs, op.o])?;
        tail.extend(self.ints(&[tokens, samples, hq, hk])?);
        let group = op.heads.group();
        if self.hopper {
            let Forward { rows, shared } = forward_wgmma(dim);
            let keys = forward_keys(dim);
            let mut args = vec![
                self.map(op.q, hq, dim, [group, rows / group])?,
                self.map(op.k, hk, dim, [1, keys])?,
                self.map(op.v, hk, dim, [1, keys])?,
            ];
            args.extend(tail);
            let grid = self.persistent(tokens.div_ceil(rows / group) * hk);
            return self.launch(
                "causal_attention_fwd",
                format!("causal_attention_fwd_d{dim}_wgmma"),
                [grid, 1],
                [384, 1],
                shared,
                args,
            );
        }
        let Forward { rows, shared } = forward_mma(dim);
        let mut args = self.args(&[op.q, op.k, op.v])?;
        args.extend(tail);
        let grid = tokens.div_ceil(rows / group) * hk;
        self.launch("causal_attention_fwd", format!("causal_attention_fwd_d{dim}"), [grid, 1], [128, 1], shared, args)
    }

    pub(super) fn kv_append(&mut self, op: &KvAppend) -> Result<(), CudaError> {
        self.want_bf16(&[op.k, op.v, op.cache.k, op.cache.v])?;
        let (rows, cols) = (self.rows(op.k), self.cols(op.k));
        if !cols.is_multiple_of(8) {
            return Err(self.refuse(format!("cache rows of {cols} elements: a multiple of 8 is needed")));
        }
        let mut args = self.args(&[op.k, op.v, op.cache.k, op.cache.v, op.cache.len])?;
        args.extend(self.ints(&[rows, self.rows(op.cache.k), cols / 8])?);
        self.launch("kv_append", "kv_append", [(rows * cols / 8).div_ceil(256), 1], [256, 1], 0, args)
    }

    pub(super) fn cached_attention(&mut self, op: &CachedAttention) -> Result<(), CudaError> {
        self.check_heads(op.heads, 256)?;
        self.want_bf16(&[op.q, op.cache.k, op.cache.v, op.o])?;
        let Heads { q: hq, kv: hk, dim } = op.heads;
        let (rows, capacity) = (self.rows(op.q), self.rows(op.cache.k));
        let chunks = capacity.div_ceil(CACHE_CHUNK);
        let partial = Arg::Pointer(Pointer::At(self.scratch));
        let mut args = self.args(&[op.q, op.cache.k, op.cache.v, op.cache.len])?;
        args.push(partial);
        args.extend(self.ints(&[rows, capacity, CACHE_CHUNK, hq, hk])?);
        let keys = if dim == 256 { 32 } else { 64 };
        let grid = [rows.div_ceil(64 / op.heads.group()) * hk, chunks];
        self.launch(
            "cached_attention",
            format!("cached_attention_d{dim}"),
            grid,
            [128, 1],
            512 + 128 * dim + 8 * keys * dim,
            args,
        )?;
        let mut args = vec![partial, self.arg(op.cache.len)?, self.arg(op.o)?];
        args.extend(self.ints(&[rows, CACHE_CHUNK, chunks, hq])?);
        self.launch(
            "cached_attention",
            format!("cached_attention_combine_d{dim}"),
            [(rows * hq).div_ceil(4), 1],
            [128, 1],
            0,
            args,
        )
    }

    /// `max_blocks, size, window, hq, hk`.
    fn block_extents(&self, op: &BlockAttention) -> Result<Vec<Arg>, CudaError> {
        let blocks = self.program.get(op.blocks.anchor).len();
        self.ints(&[blocks, op.blocks.size, op.window.unwrap_or(0), op.heads.q, op.heads.kv])
    }

    pub(super) fn block_attention(&mut self, op: &BlockAttention) -> Result<(), CudaError> {
        self.check_heads(op.heads, 256)?;
        self.check_block(op.blocks.size)?;
        self.want_bf16(&[op.q, op.k_ctx, op.v_ctx, op.k_blk, op.v_blk, op.o])?;
        let Heads { q: hq, kv: hk, dim } = op.heads;
        let (slots, group) = (self.rows(op.q), op.heads.group());
        let mut tail = self.args(&[op.blocks.ctx_start, op.blocks.anchor, op.blocks.n_blocks, op.o, op.lse])?;
        tail.extend(self.block_extents(op)?);
        if self.hopper {
            let Forward { rows, shared } = forward_wgmma(dim);
            let keys = forward_keys(dim);
            let mut args = vec![
                self.map(op.q, hq, dim, [group, rows / group])?,
                self.map(op.k_ctx, hk, dim, [1, keys])?,
                self.map(op.v_ctx, hk, dim, [1, keys])?,
                self.map(op.k_blk, hk, dim, [1, 64])?,
                self.map(op.v_blk, hk, dim, [1, 64])?,
            ];
            args.extend(tail);
            let grid = self.persistent(slots.div_ceil(rows / group) * hk);
            return self.launch(
                "block_attention_fwd",
                format!("block_attention_fwd_d{dim}_wgmma"),
                [grid, 1],
                [384, 1],
                shared,
                args,
            );
        }
        let Forward { rows, shared } = forward_mma(dim);
        let mut args = self.args(&[op.q, op.k_ctx, op.v_ctx, op.k_blk, op.v_blk])?;
        args.extend(tail);
        let grid = slots.div_ceil(rows / group) * hk;
        self.launch("block_attention_fwd", format!("block_attention_fwd_d{dim}"), [grid, 1], [128, 1], shared, args)
    }

    pub(super) fn block_attention_bwd(&mut self, op: &BlockAttentionBwd) -> Result<(), CudaError> {
        let f = &op.forward;
        self.check_heads(f.heads, 128)?;
        self.check_block(f.blocks.size)?;
        self.want_bf16(&[f.q, f.k_ctx, f.v_ctx, f.k_blk, f.v_blk, f.o, op.d_o, op.dq, op.dk_blk, op.dv_blk])?;
        let Heads { q: hq, kv: hk, dim } = f.heads;
        let (slots, context, group) = (self.rows(f.q), self.rows(f.k_ctx), f.heads.group());
        let (b, extents) = (f.blocks, self.block_extents(f)?);
        const FILE: &str = "block_attention_bwd";

        let mut args = self.args(&[f.q, f.k_blk, f.v_blk, f.o, op.d_o, f.lse, op.delta, op.dk_blk, op.dv_blk, b.n_blocks])?;
        args.extend(&extents);
        let shared = 512 + 256 * dim + (64 * dim + 4096) * if b.size <= 16 { 1 } else { 2 };
        let blocks = self.program.get(b.anchor).len();
        self.launch(FILE, format!("{FILE}_own_d{dim}"), [blocks * hk, 1], [128, 1], shared, args)?;

        let mut dq_tail = self.args(&[b.ctx_start, b.anchor, b.n_blocks, f.lse, op.delta, op.dq])?;
        dq_tail.extend(&extents);
        let mut dkv_tail = self.args(&[b.ctx_start, b.anchor, b.n_blocks, f.lse, op.delta, op.dk_ctx, op.dv_ctx])?;
        dkv_tail.push(self.int(context)?);
        dkv_tail.extend(&extents);
        if self.hopper {
            let shared = 1024 + 1536 * dim;
            let query = |t| self.map(t, hq, dim, [group, 128 / group]);
            let key = |t, rows| self.map(t, hk, dim, [1, rows]);
            let mut args =
                vec![query(f.q)?, query(op.d_o)?, key(f.k_ctx, 128)?, key(f.v_ctx, 128)?, key(f.k_blk, 64)?, key(f.v_blk, 64)?];
            args.extend(dq_tail);
            let grid = self.persistent(slots.div_ceil(128 / group) * hk);
            self.launch(FILE, format!("{FILE}_dq_d{dim}_wgmma"), [grid, 1], [384, 1], shared, args)?;
            let query = |t| self.map(t, hq, dim, [group, 64 / group]);
            let mut args =
                vec![query(f.q)?, query(op.d_o)?, self.map(f.k_ctx, hk, dim, [1, 128])?, self.map(f.v_ctx, hk, dim, [1, 128])?];
            args.extend(dkv_tail);
            let grid = self.persistent(context.div_ceil(128) * hk);
            return self.launch(FILE, format!("{FILE}_dkv_d{dim}_wgmma"), [grid, 1], [384, 1], shared, args);
        }
        let shared = 512 + 768 * dim;
        let mut args = self.args(&[f.q, op.d_o, f.k_ctx, f.v_ctx, f.k_blk, f.v_blk])?;
        args.extend(dq_tail);
        let grid = slots.div_ceil(128 / group) * hk;
        self.launch(FILE, format!("{FILE}_dq_d{dim}"), [grid, 1], [128, 1], shared, args)?;
        let mut args = self.args(&[f.q, op.d_o, f.k_ctx, f.v_ctx])?;
        args.extend(dkv_tail);
        self.launch(FILE, format!("{FILE}_dkv_d{dim}"), [context.div_ceil(64) * hk, 1], [128, 1], shared, args)
    }
}
