// SwiGluBwd: d_up = dy * gate * sigma(gate), d_gate = dy * up * sigma(gate) * (1 + gate * (1 - sigma(gate))).
//
// Mathematics: crates/graph/src/op/swiglu.rs. Arguments: gu, dgu [T, 2*I] bf16, dy [T, I] bf16, cols = I.
// Launch: swiglu_bwd_{wide,narrow}(gu, dy, dgu, cols): wide needs I a multiple of 8; grid (T, ceil(I / (8 or 1) / 256)), block 256.
// Numerics: fp32, the logistic function to about 2 ulp. Bound: 10*T*I bytes.
#include "common/vec.cuh"

template <int V>
FN void swiglu_bwd_chunk(const bf16 *gu, const bf16 *dy, bf16 *dgu, int cols) {
    const int col = (blockIdx.y * 256 + threadIdx.x) * V;
    if (col >= cols) return;
    const int64_t row = blockIdx.x;
    float gate[V], up[V], d[V], dgate[V], dup[V];
    load<V>(gu + row * 2 * cols + col, gate);
    load<V>(gu + row * 2 * cols + cols + col, up);
    load<V>(dy + row * cols + col, d);
#pragma unroll
    for (int j = 0; j < V; ++j) {
        const float sigma = __fdividef(1.0f, 1.0f + __expf(-gate[j]));
        dup[j] = d[j] * gate[j] * sigma;
        dgate[j] = d[j] * up[j] * sigma * (1.0f + gate[j] * (1.0f - sigma));
    }
    store<V>(dgu + row * 2 * cols + col, dgate);
    store<V>(dgu + row * 2 * cols + cols + col, dup);
}

extern "C" __global__ void __launch_bounds__(256) swiglu_bwd_wide(const bf16 *gu, const bf16 *dy, bf16 *dgu, int cols) {
    swiglu_bwd_chunk<8>(gu, dy, dgu, cols);
}
extern "C" __global__ void __launch_bounds__(256) swiglu_bwd_narrow(const bf16 *gu, const bf16 *dy, bf16 *dgu, int cols) {
    swiglu_bwd_chunk<1>(gu, dy, dgu, cols);
}
