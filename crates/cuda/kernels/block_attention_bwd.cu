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
