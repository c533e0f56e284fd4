// RmsNormBwd: with g = dy * w and n = s * rstd: dx = dres + rstd * (g - n * mean(g * n)); dw += sum over rows of dy * n.
//
// Mathematics: crates/graph/src/op/rms_norm.rs. Arguments: s [T, H] bf16; w [H] bf16; rstd [T] f32; dy, dres [T, H] bf16, or f32 where the flag
// says so, dres null when absent; dx [T, H] bf16, null when not wanted; partials [256, H] f32; dw [H] f32, added to.
// Launch: rms_norm_bwd_w1(s, w, rstd, dy, dy_is_f32, dres, dres_is_f32, dx, partials, rows = T, cols = H): H a multiple of 8, at most 5120;
//   rms_norm_bwd_w2: at most 8192; grid 256, block ceil(H / (8 * items)) rounded up to 32. rms_norm_bwd_narrow: any H <= 4096, block 1024.
//   Then rms_norm_bwd_weight(partials, dw, cols): grid ceil(H/32), block (32, 8).
// Numerics: fp32. Row ranges, the order inside them and the order of the 256 partial sums are fixed by T alone.
// Bound: 6*T*H bytes, 8*T*H with dres.
#include "common/vec.cuh"

static constexpr int PARTIALS = 256;

template <int V, int ITEMS, int ROWS>
FN void rms_norm_bwd_rows(const bf16 *s, const bf16 *w, const float *rstd, const void *dy, int dy_is_f32, const void *dres, int dres_is_f32,
                          bf16 *dx, float *partials, int rows, int cols) {
    __shared__ float scratch[2][ROWS * 32];
    const int per = (rows + PARTIALS - 1) / PARTIALS;
    const int first = min(static_cast<int>(blockIdx.x) * per, rows), end = min(first + per, rows);
    float weight[ITEMS][V], partial[ITEMS][V];
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
        const int col = (i * blockDim.x + threadIdx.x) * V;
#pragma unroll
        for (int j = 0; j < V; ++j) weight[i][j] = 0.0f, partial[i][j] = 0.0f;
        if (col < cols) load<V>(w + col, weight[i]);
    }
    // Several rows at a time: their loads are in flight together, and one barrier serves them all.
    for (int row = first, turn = 0; row < end; row += ROWS, turn ^= 1) {
        float n[ROWS][ITEMS][V], g[ROWS][ITEMS][V], sums[ROWS], r[ROWS];
#pragma unroll
        for (int k = 0; k < ROWS; ++k) {
            sums[k] = 0.0f;
            if (row + k >= end) continue;
            r[k] = rstd[row + k];
            const int64_t at = static_cast<int64_t>(row + k) * cols;
#pragma unroll
            for (int i = 0; i < ITEMS; ++i) {
                const int col = (i * blockDim.x + threadIdx.x) * V;
                if (col >= cols) continue;
                load<V>(s + at + col, n[k][i]);
                load_either<V>(dy, at + col, dy_is_f32, g[k][i]);
            }
        }
#pragma unroll
        for (int k = 0; k < ROWS; ++k) {
            if (row + k >= end) continue;
#pragma unroll
            for (int i = 0; i < ITEMS; ++i) {
                if ((i * static_cast<int>(blockDim.x) + static_cast<int>(threadIdx.x)) * V >= cols) continue;
#pragma unroll
                for (int j = 0; j < V; ++j) {
                    n[k][i][j] *= r[k];
                    partial[i][j] = fmaf(g[k][i][j], n[k][i][j], partial[i][j]);
                    g[k][i][j] *= weight[i][j];
                    sums[k] = fmaf(g[k][i][j], n[k][i][j], sums[k]);
                }
            }
        }
        if (dx == nullptr) continue;
        // Two scratch areas in turn: a warp may write the next sums while another still reads these.
        block_sums(sums, scratch[turn]);
#pragma unroll
        for (int k = 0; k < ROWS; ++k) {
            if (row + k >= end) continue;
            const float mean = sums[k] / static_cast<float>(cols);
            const int64_t at = static_cast<int64_t>(row + k) * cols;
#pragma unroll
            for (int i = 0; i < ITEMS; ++i) {
                const int col = (i * blockDim.x + threadIdx.x) * V;
                if (col >= cols) continue;
                float out[V];
#pragma unroll
                for (int j = 0; j < V; ++j) out[j] = 0.0f;
                if (dres != nullptr) load_either<V>(dres, at + col, dres_is_f32, out);
#pragma unroll
                for (int j = 0; j < V; ++j) out[j] += r[k] * (g[k][i][j] - n[k][i][j] * mean);
                store<V>(dx + at + col, out);
            }
        }
    }
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
        const int col = (i * blockDim.x + threadIdx.x) * V;
        if (col < cols) store<V>(partials + static_cast<int64_t>(blockIdx.x) * cols + col, partial[i]);
    }
}

#define RMS_NORM_BWD(NAME, V, ITEMS, ROWS)                                                                                               \
    extern "C" __global__ void __launch_bounds__(1024)                                                                                   \
        rms_norm_bwd_##NAME(const bf16 *s, const bf16 *w, const float *rstd, const void *dy, int dy_is_f32, const void *dres,            \
                            int dres_is_f32, bf16 *dx, float *partials, int rows, int cols) {                                            \
        rms_norm_bwd_rows<V, ITEMS, ROWS>(s, w, rstd, dy, dy_is_f32, dres, dres_is_f32, dx, partials, rows, cols);                       \
    }
RMS_NORM_BWD(narrow, 1, 4, 1)

// 64 registers a thread are all that 1024 threads may have; rows of up to 5120 columns need 640 threads and may have more.
extern "C" __global__ void __launch_bounds__(640, 1)
    rms_norm_bwd_w1(const bf16 *s, const bf16 *w, const float *rstd, const void *dy, int dy_is_f32, const void *dres, int dres_is_f32, bf16 *dx,
                    float *partials, int rows, int cols) {
    rms_norm_bwd_rows<8, 1, 2>(s, w, rstd, dy, dy_is_f32, dres, dres_is_f32, dx, partials, rows, cols);
}
extern "C" __global__ void __launch_bounds__(512, 1)
    rms_norm_bwd_w2(const bf16 *s, const bf16 *w, const float *rstd, const void *dy, int dy_is_f32, const void *dres, int dres_is_f32, bf16 *dx,
                    float *partials, int rows, int cols) {
    rms_norm_bwd_rows<8, 2, 1>(s, w, rstd, dy, dy_is_f32, dres, dres_is_f32, dx, partials, rows, cols);
}

// dw[j] += partials in ascending order: 8 strips of 32 partial sums, then the strips.
extern "C" __global__ void __launch_bounds__(256) rms_norm_bwd_weight(const float *partials, float *dw, int cols) {
    __shared__ float strips[8][32];
    const int col = blockIdx.x * 32 + threadIdx.x;
    float sum = 0.0f;
    if (col < cols) {
#pragma unroll 8
        for (int p = threadIdx.y * (PARTIALS / 8); p < (threadIdx.y + 1) * (PARTIALS / 8); ++p) sum += partials[static_cast<int64_t>(p) * cols + col];
    }
    strips[threadIdx.y][threadIdx.x] = sum;
    __syncthreads();  // all strips are complete before one thread adds them
    if (threadIdx.y != 0 || col >= cols) return;
    sum = 0.0f;
    for (int i = 0; i < 8; ++i) sum += strips[i][threadIdx.x];
    dw[col] += sum;
}
