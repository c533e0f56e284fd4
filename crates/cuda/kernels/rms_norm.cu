// RmsNorm: s = x (+ delta), y = s * rstd * w, rstd = (mean(s^2) + eps)^-1/2.
//
// Mathematics: crates/graph/src/op/rms_norm.rs. Arguments: x, delta, sum, y [T, H] bf16; w [H] bf16; rstd [T] f32; delta and sum are null when
// there is no residual branch. The sum is rounded to bf16 before it is normed.
// Launch: rms_norm_w{1,2,4}(x, delta, sum, w, y, rstd, cols = H, eps): H a multiple of 8, at most 4096 * {1,2,4}; grid T,
//   block ceil(H / (8 * items)) rounded up to 32. rms_norm_narrow: any H <= 4096, block 1024.
// Numerics: fp32 between load and store, one fixed order. Bound: 4*T*H bytes, 8*T*H with a residual.
#include "common/vec.cuh"

template <int V, int ITEMS>
FN void rms_norm_row(const bf16 *x, const bf16 *delta, bf16 *sum, const bf16 *w, bf16 *y, float *rstd, int cols, float eps) {
    __shared__ float scratch[32];
    const int64_t at = static_cast<int64_t>(blockIdx.x) * cols;
    float s[ITEMS][V], total[1] = {0.0f};
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
        const int col = (i * blockDim.x + threadIdx.x) * V;
        if (col >= cols) continue;
        load<V>(x + at + col, s[i]);
        if (delta != nullptr) {
            float d[V];
            load<V>(delta + at + col, d);
#pragma unroll
            for (int j = 0; j < V; ++j) s[i][j] = rounded(s[i][j] + d[j]);
            store<V>(sum + at + col, s[i]);
        }
#pragma unroll
        for (int j = 0; j < V; ++j) total[0] = fmaf(s[i][j], s[i][j], total[0]);
    }
    block_sums(total, scratch);
    const float r = rsqrtf(total[0] / static_cast<float>(cols) + eps);
    if (threadIdx.x == 0) rstd[blockIdx.x] = r;
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
        const int col = (i * blockDim.x + threadIdx.x) * V;
        if (col >= cols) continue;
        float weight[V];
        load<V>(w + col, weight);
#pragma unroll
        for (int j = 0; j < V; ++j) weight[j] *= s[i][j] * r;
        store<V>(y + at + col, weight);
    }
}

#define RMS_NORM(NAME, THREADS, V, ITEMS)                                                                                            \
    extern "C" __global__ void __launch_bounds__(THREADS) rms_norm_##NAME(const bf16 *x, const bf16 *delta, bf16 *sum, const bf16 *w, \
                                                                          bf16 *y, float *rstd, int cols, float eps) {               \
        rms_norm_row<V, ITEMS>(x, delta, sum, w, y, rstd, cols, eps);                                                                \
    }
RMS_NORM(w1, 512, 8, 1)
RMS_NORM(w2, 512, 8, 2)
RMS_NORM(w4, 512, 8, 4)
RMS_NORM(narrow, 1024, 1, 4)
