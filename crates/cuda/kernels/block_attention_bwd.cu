// BlockAttentionBwd: gradients of block-diffusion attention, in three kernels that run in this order.
//
// Mathematics: crates/graph/src/op/block_attention.rs. With P = exp(S - lse), delta = sum_d do*o: dv = P^T do,
// dS = P * (do v^T - delta), dq = D^-1/2 dS k, dk = D^-1/2 dS^T q; heads of a group add into their key head.
//   own  delta, dk_blk, dv_blk            (any order of blocks; memory-bound)
//   dq   dq over context and own keys     (query tiles outside, keys inside)
//   dkv  dk_ctx, dv_ctx += ...            (key tiles outside, the slots that see them inside, found by bisection)
// dq and dkv need own's delta; they do not need each other.
//
// Arguments and layout as in block_attention_fwd.cu; d_o, dq as q; delta as lse; dk_blk, dv_blk as k_blk, written (zero for blocks
// that are not real); dk_ctx, dv_ctx [T, hk*D] f32, added to (rows that no block sees are not touched). D is 64 or 128.
//
// Launch, all architectures (block 128):
//   block_attention_bwd_own_d{64,128}(q, k_blk, v_blk, o, d_o, lse, delta, dk_blk, dv_blk, n_blocks, max_blocks, size, window, hq, hk)
//     grid N*hk; dynamic shared 512 + 256*D + (64*D + 4096) * (size <= 16 ? 1 : 2): 25,088 or 33,280 (D 64), 45,568 or 57,856 (D 128).
//   block_attention_bwd_dq_d{64,128}(q, d_o, k_ctx, v_ctx, k_blk, v_blk, ctx_start, anchor, n_blocks, lse, delta, dq, max_blocks, size,
//     window, hq, hk)   grid ceil(N*B / floor(128/G)) * hk; dynamic shared 512 + 768*D: 49,664 / 98,816.
//   block_attention_bwd_dkv_d{64,128}(q, d_o, k_ctx, v_ctx, ctx_start, anchor, n_blocks, lse, delta, dk_ctx, dv_ctx, context = T,
//     max_blocks, size, window, hq, hk)   grid ceil(T/64) * hk; dynamic shared 512 + 768*D: 49,664 / 98,816.
// Launch, Hopper (block 384; maps by value as in block_attention_fwd.cu):
//   block_attention_bwd_dq_d{64,128}_wgmma(map_q, map_d_o, map_k_ctx, map_v_ctx, map_k_blk, map_v_blk, ctx_start, anchor, n_blocks, lse,
//     delta, dq, max_blocks, size, window, hq, hk)   q, d_o box {64, G, floor(128/G)}; ctx box {64, 1, 128}; blk box {64, 1, 64};
//     grid min(multiprocessors, ceil(N*B / floor(128/G)) * hk); dynamic shared 1024 + 1536*D: 99,328 / 197,632.
//   block_attention_bwd_dkv_d{64,128}_wgmma(map_q, map_d_o, map_k_ctx, map_v_ctx, ctx_start, anchor, n_blocks, lse, delta, dk_ctx,
//     dv_ctx, context = T, max_blocks, size, window, hq, hk)   q, d_o box {64, G, floor(64/G)}; ctx box {64, 1, 128};
//     grid min(multiprocessors, ceil(T/128) * hk); dynamic shared 1024 + 1536*D: 99,328 / 197,632.
//
// Numerics: recomputed scores fp32; P and dS rounded to bf16 before they multiply; every gradient element is summed in fp32 by one
// thread in an order fixed by shapes and indices: no float atomics, two runs agree bit for bit.
// Bound: 7 products of 2*N*B*(mean context + B)*hq*D FLOP, of which 5 are useful (scores and do v^T are formed twice: the price of
// having no atomics); own moves 2*(3*N*B*hq + 4*N*B*hk)*D bytes.
// Reference: bench/lab/attention_check.py (float64 PyTorch); source arXiv 2307.08691 algorithm 2, arXiv 2602.06036.
#include "lib/backward_mma.cuh"
#include "lib/backward_wgmma.cuh"

#define BLOCK_BWD_MMA(D)                                                                                                                 \
    extern "C" __global__ void __launch_bounds__(128, 2) block_attention_bwd_own_d##D(                                                      \
        const bf16 *q, const bf16 *k_blk, const bf16 *v_blk, const bf16 *o, const bf16 *d_o, const float *lse, float *delta,             \
        bf16 *dk_blk, bf16 *dv_blk, const int *n_blocks, int max_blocks, int size, int window, int hq, int hk) {                         \
        const BlockRows rows(nullptr, nullptr, n_blocks, max_blocks, size, window);                                                      \
        if (size <= 16) block_own_mma<D, 1>(rows, q, k_blk, v_blk, o, d_o, lse, delta, dk_blk, dv_blk, hq, hk);                          \
        else block_own_mma<D, 2>(rows, q, k_blk, v_blk, o, d_o, lse, delta, dk_blk, dv_blk, hq, hk);                                     \
    }                                                                                                                                    \
    extern "C" __global__ void __launch_bounds__(128, 2) block_attention_bwd_dq_d##D(                                                       \
        const bf16 *q, const bf16 *d_o, const bf16 *k_ctx, const bf16 *v_ctx, const bf16 *k_blk, const bf16 *v_blk,                      \
        const int *ctx_start, const int *anchor, const int *n_blocks, const float *lse, const float *delta, bf16 *dq, int max_blocks,    \
        int size, int window, int hq, int hk) {                                                                                          \
        const BlockRows rows(ctx_start, anchor, n_blocks, max_blocks, size, window);                                                     \
        block_dq_mma<D>(rows, q, d_o, k_ctx, v_ctx, k_blk, v_blk, lse, delta, dq, max_blocks * size, hq, hk);                            \
    }                                                                                                                                    \
    extern "C" __global__ void __launch_bounds__(128, 2) block_attention_bwd_dkv_d##D(                                                      \
        const bf16 *q, const bf16 *d_o, const bf16 *k_ctx, const bf16 *v_ctx, const int *ctx_start, const int *anchor,                   \
        const int *n_blocks, const float *lse, const float *delta, float *dk_ctx, float *dv_ctx, int context, int max_blocks, int size,  \
        int window, int hq, int hk) {                                                                                                    \
        const BlockRows rows(ctx_start, anchor, n_blocks, max_blocks, size, window);                                                     \
        block_dkv_mma<D>(rows, q, d_o, k_ctx, v_ctx, lse, delta, dk_ctx, dv_ctx, context, hq, hk);                                       \
    }
BLOCK_BWD_MMA(64)
BLOCK_BWD_MMA(128)

#if defined(HOPPER_KERNELS)
#define BLOCK_BWD_WGMMA(D)                                                                                                               \
    extern "C" __global__ void __launch_bounds__(384, 1) block_attention_bwd_dq_d##D##_wgmma(                                            \
        const __grid_constant__ TensorMap q, const __grid_constant__ TensorMap d_o, const __grid_constant__ TensorMap k_ctx,             \
        const __grid_constant__ TensorMap v_ctx, const __grid_constant__ TensorMap k_blk, const __grid_constant__ TensorMap v_blk,       \
        const int *ctx_start, const int *anchor, const int *n_blocks, const float *lse, const float *delta, bf16 *dq, int max_blocks,    \
        int size, int window, int hq, int hk) {                                                                                          \
        const BlockRows rows(ctx_start, anchor, n_blocks, max_blocks, size, window);                                                     \
        block_dq_wgmma<D>(rows, &q, &d_o, &k_ctx, &v_ctx, &k_blk, &v_blk, lse, delta, dq, max_blocks * size, hq, hk);                    \
    }                                                                                                                                    \
    extern "C" __global__ void __launch_bounds__(384, 1) block_attention_bwd_dkv_d##D##_wgmma(                                           \
        const __grid_constant__ TensorMap q, const __grid_constant__ TensorMap d_o, const __grid_constant__ TensorMap k_ctx,             \
        const __grid_constant__ TensorMap v_ctx, const int *ctx_start, const int *anchor, const int *n_blocks, const float *lse,         \
        const float *delta, float *dk_ctx, float *dv_ctx, int context, int max_blocks, int size, int window, int hq, int hk) {           \
        const BlockRows rows(ctx_start, anchor, n_blocks, max_blocks, size, window);                                                     \
        block_dkv_wgmma<D>(rows, &q, &d_o, &k_ctx, &v_ctx, lse, delta, dk_ctx, dv_ctx, context, hq, hk);                                 \
    }
BLOCK_BWD_WGMMA(64)
BLOCK_BWD_WGMMA(128)
#endif
