//! Cases of `CausalAttention`, `CachedAttention`, `BlockAttention` and its backward.

use super::Case;
use super::build::Build;
use crate::inputs::{draft_blocks, packed_samples};
use drafthorse_graph::op::block_attention::Blocks;
use drafthorse_graph::op::cached_attention::KvCache;
use drafthorse_graph::op::causal_attention::Packing;
use drafthorse_graph::op::{BlockAttention, BlockAttentionBwd, CachedAttention, CausalAttention, Heads};
use drafthorse_graph::{DType, Role};

/// `dim` takes the place of every case's own head width: GPU kernels exist for a few widths only.
pub(super) fn cases(act: DType, dim: Option<usize>) -> Vec<Case> {
    let mut cases = Vec::new();
    let of = |heads: Heads| Heads { dim: dim.unwrap_or(heads.dim), ..heads };
    let named = |name: String| dim.map_or(name.clone(), |dim| format!("{name}_d{dim}"));
    let gqa = Heads { q: 4, kv: 2, dim: 8 };
    for (name, heads, lengths, rows, std) in [
        ("packed", gqa, vec![9, 1, 35, 3], 48, 1.0),
        ("rows_of_no_sample", gqa, vec![9, 1, 0, 12], 29, 1.0),
        ("no_sample", gqa, vec![], 5, 1.0),
        ("one_row", gqa, vec![1], 1, 1.0),
        ("long", Heads { q: 2, kv: 1, dim: 16 }, vec![150, 67], 217, 1.0),
        ("saturated", Heads { q: 3, kv: 1, dim: 5 }, vec![1, 20, 1], 24, 8.0),
    ] {
        cases.push(causal(&named(format!("causal_attention_{name}")), act, of(heads), &lengths, rows, std));
    }
    for (name, len, rows, capacity, std) in
        [("middle", 21, 8, 40, 1.0), ("empty", 0, 3, 9, 1.0), ("full", 15, 1, 16, 1.0), ("saturated", 21, 8, 40, 8.0)]
    {
        cases.push(cached(&named(format!("cached_attention_{name}")), act, of(gqa), len, rows, capacity, std));
    }
    let usual = Shape { heads: gqa, size: 8, lengths: &[33, 1, 0, 29], capacity: 11, real: 9, window: None, std: 1.0 };
    for (name, shape) in [
        ("full_context", usual),
        ("no_padding", Shape { real: 11, ..usual }),
        ("no_block", Shape { real: 0, ..usual }),
        ("one_block", Shape { lengths: &[1], capacity: 1, real: 1, ..usual }),
        ("sliding", Shape { window: Some(12), heads: Heads { q: 2, kv: 2, dim: 8 }, ..usual }),
        ("sliding_narrow", Shape { window: Some(3), size: 6, heads: Heads { q: 2, kv: 1, dim: 4 }, ..usual }),
        ("sliding_one", Shape { window: Some(1), ..usual }),
        ("saturated", Shape { std: 4.0, size: 16, heads: Heads { q: 3, kv: 1, dim: 2 }, ..usual }),
        ("long", Shape { lengths: &[140, 71], size: 16, heads: Heads { q: 2, kv: 1, dim: 32 }, ..usual }),
    ] {
        let shape = Shape { heads: of(shape.heads), ..shape };
        cases.push(block(&named(format!("block_attention_{name}")), act, shape));
        cases.push(block_bwd(&named(format!("block_attention_bwd_{name}")), act, shape, 1.0));
    }
    let usual = Shape { heads: of(usual.heads), ..usual };
    cases.push(block_bwd(&named("block_attention_bwd_zero_upstream".into()), act, usual, 0.0));
    cases
}

fn causal(name: &str, act: DType, heads: Heads, lengths: &[usize], rows: usize, std: f64) -> Case {
    let mut b = Build::new(name, act);
    let samples = packed_samples(lengths, lengths.len() + 2, rows);
    let packing = Packing {
        cu_seqlens: b.ints("cu_seqlens", samples.cu_seqlens),
        n_seqs: b.ints("n_seqs", samples.n_seqs),
        mean_len: rows,
    };
    let q = b.input("q", &[rows, heads.q_cols()], std);
    let k = b.input("k", &[rows, heads.kv_cols()], std);
    let v = b.input("v", &[rows, heads.kv_cols()], 1.0);
    let o = b.output("o", &[rows, heads.q_cols()]);
    b.op(CausalAttention { q, k, v, packing, heads, o })
}

/// Cache rows past the length are stale and huge.
fn cached(name: &str, act: DType, heads: Heads, len: usize, rows: usize, capacity: usize, std: f64) -> Case {
    let mut b = Build::new(name, act);
    let q = b.input("q", &[rows, heads.q_cols()], std);
    let mut cache = |name: &str, std: f64, stale: f64| {
        let mut content = b.rng.normals(capacity * heads.kv_cols(), std);
        content[(len + rows) * heads.kv_cols()..].fill(stale);
        b.given(name, &[capacity, heads.kv_cols()], act, Role::Step, content)
    };
    let (k, v) = (cache("cache.k", std, 1e3), cache("cache.v", 1.0, -1e3));
    let cache = KvCache { k, v, len: b.ints("cache.len", vec![len as i32]) };
    let o = b.output("o", &[rows, heads.q_cols()]);
    b.op(CachedAttention { q, cache, heads, mean_len: len + rows, o })
}

#[derive(Clone, Copy)]
struct Shape {
    heads: Heads,
    size: usize,
    lengths: &'static [usize],
    capacity: usize,
    real: usize,
    window: Option<usize>,
    std: f64,
}

/// The op with its inputs; `role` is that of o and lse.
fn op(b: &mut Build, s: Shape, role: Role) -> BlockAttention {
    let act = b.act();
    // Three rows behind the last sample belong to nobody.
    let context = s.lengths.iter().sum::<usize>() + 3;
    let samples = packed_samples(s.lengths, s.lengths.len(), context);
    let arrays = draft_blocks(&mut b.rng, &samples, s.capacity, s.real);
    let blocks = Blocks {
        ctx_start: b.ints("ctx_start", arrays.ctx_start),
        anchor: b.ints("anchor", arrays.anchor),
        n_blocks: b.ints("n_blocks", arrays.n_blocks),
        size: s.size,
        mean_context: context / 2,
    };
    let rows = s.capacity * s.size;
    let (q_cols, kv_cols) = (s.heads.q_cols(), s.heads.kv_cols());
    BlockAttention {
        q: b.input("q", &[rows, q_cols], s.std),
        k_ctx: b.input("k_ctx", &[context, kv_cols], s.std),
        v_ctx: b.input("v_ctx", &[context, kv_cols], 1.0),
        k_blk: b.input("k_blk", &[rows, kv_cols], s.std),
        v_blk: b.input("v_blk", &[rows, kv_cols], 1.0),
        blocks,
        heads: s.heads,
        window: s.window,
        o: b.program.tensor("o", &[rows, q_cols], act, role),
        lse: b.program.tensor("lse", &[rows, s.heads.q], DType::F32, role),
    }
}

fn block(name: &str, act: DType, shape: Shape) -> Case {
    let mut b = Build::new(name, act);
    let op = op(&mut b, shape, Role::Output);
    b.op(op)
}

fn block_bwd(name: &str, act: DType, s: Shape, upstream: f64) -> Case {
    let mut b = Build::new(name, act);
    let forward = op(&mut b, s, Role::Input);
    b.precompute(forward.clone());
    let (q_shape, blk_shape) = (b.program.get(forward.q).shape.clone(), b.program.get(forward.k_blk).shape.clone());
    let ctx_shape = b.program.get(forward.k_ctx).shape.clone();
    let lse_shape = b.program.get(forward.lse).shape.clone();
    let op = BlockAttentionBwd {
        d_o: b.input("d_o", &q_shape, upstream),
        delta: b.scratch("delta", &lse_shape, DType::F32),
        dq: b.output("dq", &q_shape),
        dk_blk: b.output("dk_blk", &blk_shape),
        dv_blk: b.output("dv_blk", &blk_shape),
        dk_ctx: b.random("dk_ctx", &ctx_shape, DType::F32, Role::Step, 1.0),
        dv_ctx: b.random("dv_ctx", &ctx_shape, DType::F32, Role::Step, 1.0),
        forward,
    };
    b.op(op)
}
