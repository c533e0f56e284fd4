// CachedAttention: a few query rows over a key/value cache whose length is a device scalar.
//
// Mathematics: crates/graph/src/op/cached_attention.rs. Row r attends cache rows 0..=len+r: o = softmax(D^-1/2 q k^T) v per head.
// The cache is split into chunks of fixed rows; a CTA sums one chunk, then one warp per row and head adds the chunks in order.
//
// Arguments and layout (row-major, contiguous, 16-byte aligned): q, o [R, hq*D] bf16; k_cache, v_cache [C, hk*D] bf16, already holding
// rows 0..len+R-1; len [1] i32 on the device, len + R <= C; partial: scratch of ceil(C/chunk) * R * hq * (D+2) f32, no content needed;
// count = R, capacity = C, chunk (a multiple of 64, the same in every plan whose results are compared: 256), hq, hk by value.
//
// Launch: cached_attention_d{64,128,256}(q, k_cache, v_cache, len, partial, count, capacity, chunk, hq, hk): grid (ceil(R / floor(64/G))
//   * hk, ceil(C/chunk)), block 128, dynamic shared 512 + 128*D + 8*n*D, n = 64 (D = 256: 32): 41,472 / 82,432 / 98,816 bytes; then
//   cached_attention_combine_d{64,128,256}(partial, len, o, count, chunk, chunks = ceil(C/chunk), hq): grid ceil(R*hq/4), block 128.
//
// Numerics: as block_attention_fwd.cu. Chunks and key tiles lie at fixed cache rows and masked keys add exactly nothing, so a token's
// result does not depend on len, R or its row in the pass, bit for bit: plain decoding and verification agree.
// Bound: (len + R)*hk*D*4 bytes of cache.
// Reference: bench/lab/attention_check.py (float64 PyTorch); source arXiv 2307.08691, split keys arXiv 2311.01282.
#include "lib/forward_mma.cuh"

// Partial results of one chunk: per row and head D unnormalised sums, then (all chunks' sums apart) maximum and sum of probabilities.
template <int D, int N>
__device__ __forceinline__ void cached_chunk(const bf16 *q, const bf16 *k, const bf16 *v, int len, float *partial, int count, int capacity,
                                             int chunk, int hq, int hk) {
    using T = ForwardMmaTiles<D, N, 1>;
    const int group = hq / hk, per_tile = T::M / group, head = blockIdx.x % hk, first = static_cast<int>(blockIdx.x) / hk * per_tile;
    const int lo = static_cast<int>(blockIdx.y) * chunk;
    const CachedRows rows(len, count, {lo, min(lo + chunk, capacity)});
    const Interval in = clip_tile(rows.real(), first, per_tile);
    if (in.hi <= in.lo || lo >= len + in.hi) return;
    const int64_t results = static_cast<int64_t>(count) * hq;
    float *sums = partial + blockIdx.y * results * D, *states = partial + gridDim.y * results * D + blockIdx.y * results * 2;
    forward_mma<D, N, 1>(rows, in, q, k, v, nullptr, nullptr, first, head, hq, hk, [&](int, const SoftmaxState &softmax, auto &o) {
        const int lane = threadIdx.x % 32, pair = lane % 4;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int row = threadIdx.x / 32 * 16 + lane / 4 + 8 * r, slot = first + row / group;
            if (row >= per_tile * group || slot >= in.hi) continue;
            const int64_t at = static_cast<int64_t>(slot) * hq + head * group + row % group;
#pragma unroll
            for (int c = 0; c < D / 8; ++c)
                *reinterpret_cast<float2 *>(sums + at * D + 8 * c + 2 * pair) = make_float2(o[4 * c + 2 * r], o[4 * c + 2 * r + 1]);
            if (pair == 0) *reinterpret_cast<float2 *>(states + 2 * at) = make_float2(softmax.maximum[r], softmax.sum[r]);
        }
    });
}

// One warp per row and head adds the chunks in ascending order.
template <int D>
__device__ __forceinline__ void cached_combine(const float *partial, int len, bf16 *o, int count, int chunk, int chunks, int hq) {
    constexpr int PER_LANE = D / 32;
    const int lane = threadIdx.x % 32;
    const int64_t results = static_cast<int64_t>(count) * hq, at = static_cast<int64_t>(blockIdx.x) * 4 + threadIdx.x / 32;
    if (at >= results) return;
    const float2 *states = reinterpret_cast<const float2 *>(partial + chunks * results * D);
    const int seen = min(chunks, (len + static_cast<int>(at / hq)) / chunk + 1);  // chunks with a key of this row
    float top = -INFINITY;
    for (int c = 0; c < seen; ++c) top = fmaxf(top, states[c * results + at].x);
    float total = 0.0f, x[PER_LANE];
#pragma unroll
    for (int j = 0; j < PER_LANE; ++j) x[j] = 0.0f;
    for (int c = 0; c < seen; ++c) {
        const float2 state = states[c * results + at];
        const float weight = ptx::ex2((state.x - top) * AttentionScale<D>::LOG2);
        const float *sums = partial + (c * results + at) * D + lane * PER_LANE;
        total = fmaf(state.y, weight, total);
#pragma unroll
        for (int j = 0; j < PER_LANE; ++j) x[j] = fmaf(sums[j], weight, x[j]);
    }
    const float inverse = 1.0f / total;
#pragma unroll
    for (int j = 0; j < PER_LANE; j += 2)
        *reinterpret_cast<uint32_t *>(o + at * D + lane * PER_LANE + j) = ptx::pack_bf16(x[j] * inverse, x[j + 1] * inverse);
}

#define CACHED_ATTENTION(D, N)                                                                                                           \
    extern "C" __global__ void __launch_bounds__(128, 2)                                                                                 \
        cached_attention_d##D(const bf16 *q, const bf16 *k_cache, const bf16 *v_cache, const int *len, float *partial, int count,        \
                              int capacity, int chunk, int hq, int hk) {                                                                 \
        cached_chunk<D, N>(q, k_cache, v_cache, *len, partial, count, capacity, chunk, hq, hk);                                          \
    }                                                                                                                                    \
    extern "C" __global__ void __launch_bounds__(128)                                                                                    \
        cached_attention_combine_d##D(const float *partial, const int *len, bf16 *o, int count, int chunk, int chunks, int hq) {         \
        cached_combine<D>(partial, *len, o, count, chunk, chunks, hq);                                                                   \
    }
CACHED_ATTENTION(64, 64)
CACHED_ATTENTION(128, 64)
CACHED_ATTENTION(256, 32)
