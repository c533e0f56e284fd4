// BlockAttention, forward: block-diffusion attention of the drafter.
//
// Mathematics: crates/graph/src/op/block_attention.rs. For slot k of block n, with keys the context rows ctx_start + j, j < anchor
// (with a window W also j >= anchor + k - (W-1)), and the block's own rows (with a window j <= k):
// o = softmax(D^-1/2 q k^T) v, lse = log-sum-exp of the scaled scores, per query head h with key head h / (hq/hk).
//
// Arguments and layout (row-major, contiguous, 16-byte aligned): q, o [N*B, hq*D] bf16; k_ctx, v_ctx [T, hk*D] bf16; k_blk, v_blk
// [N*B, hk*D] bf16; lse [N*B, hq] f32; ctx_start, anchor [N] i32; n_blocks [1] i32 on the device; max_blocks = N, size = B <= 32,
// window = W or 0, hq, hk by value. G = hq/hk <= 64. Rows of blocks n >= n_blocks are written as zero; what q, k_blk, v_blk hold
// there and what k_ctx, v_ctx hold outside samples is never used.
//
// Launch, mma.sync: block_attention_fwd_d{64,128,256}(q, k_ctx, v_ctx, k_blk, v_blk, ctx_start, anchor, n_blocks, o, lse, max_blocks,
//   size, window, hq, hk); M = 128 (D = 256: 64) rows a tile; grid ceil(N*B / floor(M/G)) * hk, block 128,
//   dynamic shared ForwardMmaTiles::DYNAMIC_BYTES = 512 + 2*M*D + 8*n*D, n = 64 (D = 256: 32): 49,664 / 98,816 / 98,816 bytes.
// Launch, Hopper: block_attention_fwd_d{64,128,256}_wgmma(map_q, map_k_ctx, map_v_ctx, map_k_blk, map_v_blk, ctx_start, anchor,
//   n_blocks, o, lse, max_blocks, size, window, hq, hk); the maps are 128-byte CUtensorMaps by value, see lib/forward_wgmma.cuh:
//   q {D, hq, N*B} box {64, G, floor(128/G)}; ctx {D, hk, T} box {64, 1, n}; blk {D, hk, N*B} box {64, 1, 64}; n = 128 (D = 256: 64);
//   grid min(multiprocessors, ceil(N*B / floor(128/G)) * hk), block 384, dynamic shared 1024 + 256*D + 8*n*D: 82,944 / 164,864 /
//   197,632 bytes.
//
// Numerics: scores, maxima and sums fp32; probabilities rounded to bf16 before they multiply v, their sum is not. No atomics on
// floats; the order of every sum is fixed by shapes and indices, so two runs agree bit for bit. The two paths agree to rounding.
// Bound: 4*N*B*(mean context + B)*hq*D FLOP against 2*(2*N*B*hq + 2*(T + N*B)*hk)*D bytes: arithmetic, by far.
// Reference: bench/lab/attention_check.py (float64 PyTorch); source arXiv 2602.06036, online softmax arXiv 2307.08691.
#include "lib/forward_mma.cuh"
#include "lib/forward_wgmma.cuh"

#define BLOCK_FWD_MMA(D, N, STRIPS)                                                                                                       \
    extern "C" __global__ void __launch_bounds__(128, 2)                                                                                    \
        block_attention_fwd_d##D(const bf16 *q, const bf16 *k_ctx, const bf16 *v_ctx, const bf16 *k_blk, const bf16 *v_blk,              \
                                 const int *ctx_start, const int *anchor, const int *n_blocks, bf16 *o, float *lse, int max_blocks,      \
                                 int size, int window, int hq, int hk) {                                                                 \
        const BlockRows rows(ctx_start, anchor, n_blocks, max_blocks, size, window);                                                     \
        forward_mma_tile<D, N, STRIPS>(rows, q, k_ctx, v_ctx, k_blk, v_blk, o, lse, max_blocks * size, hq, hk);                          \
    }
BLOCK_FWD_MMA(64, 64, 2)
BLOCK_FWD_MMA(128, 64, 2)
BLOCK_FWD_MMA(256, 32, 1)

#if defined(HOPPER_KERNELS)
#define BLOCK_FWD_WGMMA(D, N)                                                                                                            \
    extern "C" __global__ void __launch_bounds__(384, 1) block_attention_fwd_d##D##_wgmma(                                               \
        const __grid_constant__ TensorMap q, const __grid_constant__ TensorMap k_ctx, const __grid_constant__ TensorMap v_ctx,           \
        const __grid_constant__ TensorMap k_blk, const __grid_constant__ TensorMap v_blk, const int *ctx_start, const int *anchor,       \
        const int *n_blocks, bf16 *o, float *lse, int max_blocks, int size, int window, int hq, int hk) {                                \
        const BlockRows rows(ctx_start, anchor, n_blocks, max_blocks, size, window);                                                     \
        forward_wgmma<D, N, 2>(rows, &q, &k_ctx, &v_ctx, &k_blk, &v_blk, o, lse, max_blocks * size, hq, hk);                             \
    }
BLOCK_FWD_WGMMA(64, 128)
BLOCK_FWD_WGMMA(128, 128)
BLOCK_FWD_WGMMA(256, 64)
#endif
