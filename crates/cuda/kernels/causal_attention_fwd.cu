#include "lib/forward_mma.cuh"
#include "lib/forward_wgmma.cuh"

#define CAUSAL_FWD_MMA(D, N, STRIPS)                                                                                                     \
    extern "C" __global__ void __launch_bounds__(128, 2)                                                                                 \
        causal_attention_fwd_d##D(const bf16 *q, const bf16 *k, const bf16 *v, const int *cu_seqlens, const int *n_seqs, bf16 *o,        \
                                  int tokens, int max_seqs, int hq, int hk) {                                                            \
        const CausalRows rows(cu_seqlens, n_seqs, max_seqs);                                                                             \
        forward_mma_tile<D, N, STRIPS>(rows, q, k, v, nullptr, nullptr, o, nullptr, tokens, hq, hk);                                     \
    }
CAUSAL_FWD_MMA(64, 64, 2)
CAUSAL_FWD_MMA(128, 64, 2)
CAUSAL_FWD_MMA(256, 32, 1)

#if defined(HOPPER_KERNELS)
#define CAUSAL_FWD_WGMMA(D, N)                                                                                                           \
    extern "C" __global__ void __launch_bounds__(384, 1) causal_attention_fwd_d##D##_wgmma(                                              \
        const __grid_constant__ TensorMap q, const __grid_constant__ TensorMap k, const __grid_constant__ TensorMap v,                   \
        const int *cu_seqlens, const int *n_seqs, bf16 *o, int tokens, int max_seqs, int hq, int hk) {                                   \
        const CausalRows rows(cu_seqlens, n_seqs, max_seqs);                                                                             \
        forward_wgmma<D, N, 2>(rows, &q, &k, &v, nullptr, nullptr, o, nullptr, tokens, hq, hk);                                          \
    }
CAUSAL_FWD_WGMMA(64, 128)
CAUSAL_FWD_WGMMA(128, 128)
CAUSAL_FWD_WGMMA(256, 64)
#endif
