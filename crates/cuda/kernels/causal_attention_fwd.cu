// CausalAttention: grouped-query causal attention over packed samples, forward only.
//
// Mathematics: crates/graph/src/op/causal_attention.rs. Row t of the sample cu[s] <= t < cu[s+1] attends rows cu[s]..=t:
// o = softmax(D^-1/2 q k^T) v per query head h with key head h / (hq/hk).
//
// Arguments and layout (row-major, contiguous, 16-byte aligned): q, o [T, hq*D] bf16; k, v [T, hk*D] bf16; cu_seqlens [S+1] i32,
// ascending; n_seqs [1] i32 on the device; tokens = T, max_seqs = S, hq, hk by value. G = hq/hk <= 64. Rows in no sample are written as
// zero; what q, k, v hold behind the last sample is never used.
//
// Launch, mma.sync: causal_attention_fwd_d{64,128,256}(q, k, v, cu_seqlens, n_seqs, o, tokens, max_seqs, hq, hk); M = 128 (D = 256: 64);
//   grid ceil(T / floor(M/G)) * hk, block 128, dynamic shared 49,664 / 98,816 / 98,816 bytes.
// Launch, Hopper: causal_attention_fwd_d{64,128,256}_wgmma(map_q, map_k, map_v, cu_seqlens, n_seqs, o, tokens, max_seqs, hq, hk); maps by
//   value, q {D, hq, T} box {64, G, floor(128/G)}, k, v {D, hk, T} box {64, 1, n}, n = 128 (D = 256: 64), see lib/forward_wgmma.cuh;
//   grid min(multiprocessors, ceil(T / floor(128/G)) * hk), block 384, dynamic shared 82,944 / 164,864 / 197,632 bytes.
//
// Numerics: as block_attention_fwd.cu. Bound: 2*hq*D*sum(len^2) FLOP: arithmetic.
// Reference: bench/lab/attention_check.py (float64 PyTorch); source arXiv 2307.08691.
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
