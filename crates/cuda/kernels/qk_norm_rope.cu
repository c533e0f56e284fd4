// QkNormRope: packed rows [q heads | k heads | v heads] become q, k, v; q and k heads are normed (optional) and rotated.
//
// Mathematics: crates/graph/src/op/qk_norm_rope.rs. Arguments: src [T, (hq+2hk)*D] bf16; q_norm, k_norm [D] bf16, null when absent; positions [T]
// i32; cos, sin [P, half] f32; q [T, hq*D] (null when hq = 0), k, v [T, hk*D] bf16; rows = T.
// Launch: qk_norm_rope_d{64,128,256}(src, q_norm, k_norm, positions, cos, sin, q, k, v, rows, hq, hk, half, eps): half a multiple of 8; one group of
//   D/8 lanes a head, grid ceil(T*(hq+2hk) / (2048/D)), block 256. qk_norm_rope_any(..., dim before half): any D <= 256, one warp a head, grid
//   ceil(T*(hq+2hk)/8), block 256.
// Numerics: fp32 between load and store. Bound: 4*T*(hq+2hk)*D bytes.
#include "common/rope.cuh"

struct HeadAt {
    int64_t row;
    int head;      // among all heads of the packed row
    bool is_q, is_k;
};

FN HeadAt head_at(int64_t unit, int hq, int hk) {
    const int heads = hq + 2 * hk;
    const int64_t row = unit / heads;
    const int head = static_cast<int>(unit - row * heads);
    return {row, head, head < hq, head >= hq && head < hq + hk};
}

FN bf16 *destination(const HeadAt &at, bf16 *q, bf16 *k, bf16 *v, int hq, int hk, int dim) {
    if (at.is_q) return q + (at.row * hq + at.head) * dim;
    if (at.is_k) return k + (at.row * hk + at.head - hq) * dim;
    return v + (at.row * hk + at.head - hq - hk) * dim;
}

template <int D>
FN void qk_norm_rope_head(const bf16 *src, const bf16 *q_norm, const bf16 *k_norm, const int *positions, const float *cos, const float *sin,
                          bf16 *q, bf16 *k, bf16 *v, int rows, int hq, int hk, int half, float eps) {
    constexpr int LANES = D / 8, GROUPS = 256 / LANES;
    const int64_t units = static_cast<int64_t>(rows) * (hq + 2 * hk), mine = static_cast<int64_t>(blockIdx.x) * GROUPS + threadIdx.x / LANES;
    // Groups past the end repeat the last head without storing it: shuffles want every lane of the warp.
    const HeadAt at = head_at(min(mine, units - 1), hq, hk);
    const int lane = threadIdx.x % LANES;
    float x[8];
    load<8>(src + (at.row * (hq + 2 * hk) + at.head) * D + lane * 8, x);
    const bf16 *norm = at.is_q ? q_norm : at.is_k ? k_norm : nullptr;
    float square = 0.0f;
#pragma unroll
    for (int j = 0; j < 8; ++j) square = fmaf(x[j], x[j], square);
    square = group_sum<LANES>(square);
    if (norm != nullptr) {
        const float r = rsqrtf(square / D + eps);
        float w[8];
        load<8>(norm + lane * 8, w);
#pragma unroll
        for (int j = 0; j < 8; ++j) x[j] *= r * w[j];
    }
    const int64_t table = static_cast<int64_t>(positions[at.row]) * half;
    float turned[8];
#pragma unroll
    for (int j = 0; j < 8; ++j) turned[j] = x[j];
    rotate<LANES>(turned, cos + table, sin + table, half, 1.0f);
    if (mine >= units) return;
    bf16 *to = destination(at, q, k, v, hq, hk, D) + lane * 8;
    if (at.is_q || at.is_k) store<8>(to, turned);
    else store<8>(to, x);
}

#define QK_NORM_ROPE(D)                                                                                                                   \
    extern "C" __global__ void __launch_bounds__(256)                                                                                     \
        qk_norm_rope_d##D(const bf16 *src, const bf16 *q_norm, const bf16 *k_norm, const int *positions, const float *cos,                \
                          const float *sin, bf16 *q, bf16 *k, bf16 *v, int rows, int hq, int hk, int half, float eps) {                   \
        qk_norm_rope_head<D>(src, q_norm, k_norm, positions, cos, sin, q, k, v, rows, hq, hk, half, eps);                                 \
    }
QK_NORM_ROPE(64)
QK_NORM_ROPE(128)
QK_NORM_ROPE(256)

extern "C" __global__ void __launch_bounds__(256)
    qk_norm_rope_any(const bf16 *src, const bf16 *q_norm, const bf16 *k_norm, const int *positions, const float *cos, const float *sin, bf16 *q,
                     bf16 *k, bf16 *v, int rows, int hq, int hk, int dim, int half, float eps) {
    __shared__ float heads[8][256];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int64_t unit = static_cast<int64_t>(blockIdx.x) * 8 + warp;
    if (unit >= static_cast<int64_t>(rows) * (hq + 2 * hk)) return;
    const HeadAt at = head_at(unit, hq, hk);
    const bf16 *from = src + (at.row * (hq + 2 * hk) + at.head) * dim;
    bf16 *to = destination(at, q, k, v, hq, hk, dim);
    float *x = heads[warp], square = 0.0f;
    for (int i = lane; i < dim; i += 32) {
        x[i] = widen(from[i]);
        square = fmaf(x[i], x[i], square);
    }
    square = group_sum<32>(square);
    const bf16 *norm = at.is_q ? q_norm : at.is_k ? k_norm : nullptr;
    if (norm != nullptr) {
        const float r = rsqrtf(square / static_cast<float>(dim) + eps);
        for (int i = lane; i < dim; i += 32) x[i] *= r * widen(norm[i]);
    }
    __syncwarp();  // the whole head is normed before its halves are mixed
    const int64_t table = static_cast<int64_t>(positions[at.row]) * half;
    const bool turns = at.is_q || at.is_k;
    for (int i = lane; i < dim; i += 32) {
        float y = x[i];
        if (turns && i < half) y = x[i] * cos[table + i] - x[i + half] * sin[table + i];
        else if (turns && i < 2 * half) y = x[i] * cos[table + i - half] + x[i - half] * sin[table + i - half];
        to[i] = narrow(y);
    }
}
