// QkNormRopeBwd: gradients of the packed row and of the head norms.
//
// Mathematics: crates/graph/src/op/qk_norm_rope.rs. With dn the gradient turned back, n = s * rstd, g = dn * w: ds = rstd * (g - n * mean(g * n)),
// dw += sum of dn * n. Arguments as in qk_norm_rope.cu; dq [T, hq*D] (null when hq = 0), dk, dv [T, hk*D] bf16 or f32 by their flags; dsrc bf16;
// partials [256, 2*D] f32 (q's columns, then k's); dq_norm, dk_norm [D] f32, added to.
// Launch: qk_norm_rope_bwd_d{64,128,256}(src, q_norm, k_norm, positions, cos, sin, dq, dq_is_f32, dk, dk_is_f32, dv, dv_is_f32, dsrc, partials,
//   rows, hq, hk, half, eps): half a multiple of 8; grid 256, block 512, 32 KiB static shared memory. qk_norm_rope_bwd_any(..., dim before half): any
//   D <= 256, grid 256, block 256. Then qk_norm_rope_bwd_weight(partials, dw, first column, dim): grid 1, block 256.
// Numerics: fp32; row ranges, heads within them, groups and partial sums are added in an order fixed by shapes.
// Bound: 6*T*(hq+2hk)*D bytes with bf16 gradients.
#include "common/rope.cuh"

static constexpr int PARTIALS = 256;

template <int D>
FN void qk_norm_rope_bwd_rows(const bf16 *src, const bf16 *q_norm, const bf16 *k_norm, const int *positions, const float *cos,
                              const float *sin, const void *dq, int dq_is_f32, const void *dk, int dk_is_f32, const void *dv, int dv_is_f32,
                              bf16 *dsrc, float *partials, int rows, int hq, int hk, int half, float eps) {
    constexpr int THREADS = 512, LANES = D / 8, GROUPS = THREADS / LANES;
    __shared__ float sums[GROUPS][2 * D];
    const int per = (rows + PARTIALS - 1) / PARTIALS, heads = hq + 2 * hk;
    const int first = min(static_cast<int>(blockIdx.x) * per, rows), count = min(per, rows - first);
    const int lane = threadIdx.x % LANES, group = threadIdx.x / LANES, units = count * heads;
    float wq[8], wk[8], dwq[8], dwk[8];
#pragma unroll
    for (int j = 0; j < 8; ++j) wq[j] = wk[j] = 1.0f, dwq[j] = dwk[j] = 0.0f;
    if (q_norm != nullptr) load<8>(q_norm + lane * 8, wq);
    if (k_norm != nullptr) load<8>(k_norm + lane * 8, wk);
    for (int base = 0; base < units; base += GROUPS) {
        // Groups past the end repeat the last head without storing or adding it: shuffles want every lane of the warp.
        const int unit = min(base + group, units - 1);
        const bool real = base + group < units;
        const int64_t row = first + unit / heads;
        const int head = unit % heads;
        const bool is_q = head < hq, is_k = !is_q && head < hq + hk;
        const int64_t at = (row * heads + head) * D + lane * 8;
        float g[8], s[8];
        if (is_q) load_either<8>(dq, (row * hq + head) * D + lane * 8, dq_is_f32, g);
        else if (is_k) load_either<8>(dk, (row * hk + head - hq) * D + lane * 8, dk_is_f32, g);
        else load_either<8>(dv, (row * hk + head - hq - hk) * D + lane * 8, dv_is_f32, g);
        load<8>(src + at, s);
        float turned[8], square = 0.0f, dot = 0.0f;
#pragma unroll
        for (int j = 0; j < 8; ++j) turned[j] = g[j];
        const int64_t table = static_cast<int64_t>(positions[row]) * half;
        rotate<LANES>(turned, cos + table, sin + table, half, -1.0f);
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            square = fmaf(s[j], s[j], square);
            dot = fmaf(turned[j] * (is_q ? wq[j] : wk[j]), s[j], dot);
        }
        square = group_sum<LANES>(square);
        dot = group_sum<LANES>(dot);
        const bool normed = is_q ? q_norm != nullptr : is_k && k_norm != nullptr;
        if (normed) {
            const float r = rsqrtf(square / D + eps), mean = dot * r / D;
#pragma unroll
            for (int j = 0; j < 8; ++j) {
                const float n = s[j] * r, add = real ? turned[j] * n : 0.0f;
                if (is_q) dwq[j] += add;
                else dwk[j] += add;
                g[j] = r * (turned[j] * (is_q ? wq[j] : wk[j]) - n * mean);
            }
        } else if (is_q || is_k) {
#pragma unroll
            for (int j = 0; j < 8; ++j) g[j] = turned[j];
        }
        if (real) store<8>(dsrc + at, g);
    }
#pragma unroll
    for (int j = 0; j < 8; ++j) {
        sums[group][lane * 8 + j] = dwq[j];
        sums[group][D + lane * 8 + j] = dwk[j];
    }
    __syncthreads();  // every group's sums are in shared memory before they are added
    for (int c = threadIdx.x; c < 2 * D; c += THREADS) {
        float sum = 0.0f;
        for (int i = 0; i < GROUPS; ++i) sum += sums[i][c];
        partials[static_cast<int64_t>(blockIdx.x) * 2 * D + c] = sum;
    }
}

#define QK_NORM_ROPE_BWD(D)                                                                                                               \
    extern "C" __global__ void __launch_bounds__(512)                                                                                     \
        qk_norm_rope_bwd_d##D(const bf16 *src, const bf16 *q_norm, const bf16 *k_norm, const int *positions, const float *cos,            \
                              const float *sin, const void *dq, int dq_is_f32, const void *dk, int dk_is_f32, const void *dv,             \
                              int dv_is_f32, bf16 *dsrc, float *partials, int rows, int hq, int hk, int half, float eps) {                \
        qk_norm_rope_bwd_rows<D>(src, q_norm, k_norm, positions, cos, sin, dq, dq_is_f32, dk, dk_is_f32, dv, dv_is_f32, dsrc, partials,   \
                                 rows, hq, hk, half, eps);                                                                                \
    }
QK_NORM_ROPE_BWD(64)
QK_NORM_ROPE_BWD(128)
QK_NORM_ROPE_BWD(256)

extern "C" __global__ void __launch_bounds__(256)
    qk_norm_rope_bwd_any(const bf16 *src, const bf16 *q_norm, const bf16 *k_norm, const int *positions, const float *cos, const float *sin,
                         const void *dq, int dq_is_f32, const void *dk, int dk_is_f32, const void *dv, int dv_is_f32, bf16 *dsrc,
                         float *partials, int rows, int hq, int hk, int dim, int half, float eps) {
    __shared__ float grads[8][256], sums[8][512];
    const int per = (rows + PARTIALS - 1) / PARTIALS, heads = hq + 2 * hk;
    const int first = min(static_cast<int>(blockIdx.x) * per, rows), count = min(per, rows - first);
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    float *turned = grads[warp], *sum = sums[warp];
    for (int i = lane; i < 2 * dim; i += 32) sum[i] = 0.0f;
    for (int unit = warp; unit < count * heads; unit += 8) {
        const int64_t row = first + unit / heads;
        const int head = unit % heads;
        const bool is_q = head < hq, is_k = !is_q && head < hq + hk;
        const void *grad = is_q ? dq : is_k ? dk : dv;
        const int is_f32 = is_q ? dq_is_f32 : is_k ? dk_is_f32 : dv_is_f32;
        const int64_t from = is_q ? (row * hq + head) * dim : (row * hk + (is_k ? head - hq : head - hq - hk)) * dim;
        const int64_t at = (row * heads + head) * dim, table = static_cast<int64_t>(positions[row]) * half;
        const bf16 *norm = is_q ? q_norm : is_k ? k_norm : nullptr;
        auto g = [&](int i) {
            float x[1];
            load_either<1>(grad, from + i, is_f32, x);
            return x[0];
        };
        float square = 0.0f, dot = 0.0f;
        for (int i = lane; i < dim; i += 32) {
            float y = g(i);
            if ((is_q || is_k) && i < half) y = g(i) * cos[table + i] + g(i + half) * sin[table + i];
            else if ((is_q || is_k) && i < 2 * half) y = g(i) * cos[table + i - half] - g(i - half) * sin[table + i - half];
            turned[i] = y;
            const float s = widen(src[at + i]);
            square = fmaf(s, s, square);
            dot = fmaf(norm != nullptr ? y * widen(norm[i]) : 0.0f, s, dot);
        }
        square = group_sum<32>(square);
        dot = group_sum<32>(dot);
        const float r = rsqrtf(square / static_cast<float>(dim) + eps), mean = dot * r / static_cast<float>(dim);
        for (int i = lane; i < dim; i += 32) {
            float y = turned[i];
            if (norm != nullptr) {
                const float n = widen(src[at + i]) * r;
                sum[(is_q ? 0 : dim) + i] += y * n;
                y = r * (y * widen(norm[i]) - n * mean);
            }
            dsrc[at + i] = narrow(y);
        }
    }
    __syncthreads();  // every warp's sums are complete before they are added
    for (int c = threadIdx.x; c < 2 * dim; c += 256) {
        float total = 0.0f;
        for (int i = 0; i < 8; ++i) total += sums[i][c];
        partials[static_cast<int64_t>(blockIdx.x) * 2 * dim + c] = total;
    }
}

// dw[i] += partials[p, first + i], p ascending.
extern "C" __global__ void __launch_bounds__(256) qk_norm_rope_bwd_weight(const float *partials, float *dw, int first, int dim) {
    const int i = threadIdx.x;
    if (i >= dim) return;
    float sum = 0.0f;
#pragma unroll 16
    for (int p = 0; p < PARTIALS; ++p) sum += partials[p * 2 * dim + first + i];
    dw[i] += sum;
}
