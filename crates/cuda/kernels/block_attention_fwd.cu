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
