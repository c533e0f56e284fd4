// SwiGlu: y = silu(gate) * up over packed rows [gate | up].
//
// Mathematics: crates/graph/src/op/swiglu.rs. Arguments: gu [T, 2*I] bf16, y [T, I] bf16, cols = I.
// Launch: swiglu_{wide,narrow}(gu, y, cols): wide needs I a multiple of 8; grid (T, ceil(I / (8 or 1) / 256)), block 256.
// Numerics: fp32, the logistic function to about 2 ulp. Bound: 6*T*I bytes.
#include "common/vec.cuh"

template <int V>
FN void swiglu_chunk(const bf16 *gu, bf16 *y, int cols) {
    const int col = (blockIdx.y * 256 + threadIdx.x) * V;
    if (col >= cols) return;
    const int64_t row = blockIdx.x;
    float gate[V], up[V];
    load<V>(gu + row * 2 * cols + col, gate);
    load<V>(gu + row * 2 * cols + cols + col, up);
#pragma unroll
    for (int j = 0; j < V; ++j) gate[j] = gate[j] * __fdividef(1.0f, 1.0f + __expf(-gate[j])) * up[j];
    store<V>(y + row * cols + col, gate);
}

extern "C" __global__ void __launch_bounds__(256) swiglu_wide(const bf16 *gu, bf16 *y, int cols) { swiglu_chunk<8>(gu, y, cols); }
extern "C" __global__ void __launch_bounds__(256) swiglu_narrow(const bf16 *gu, bf16 *y, int cols) { swiglu_chunk<1>(gu, y, cols); }
