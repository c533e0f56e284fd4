#include "lib/ptx.cuh"

extern "C" __global__ void __launch_bounds__(256)
    kv_append(const uint4 *k, const uint4 *v, uint4 *k_cache, uint4 *v_cache, const int *len, int count, int capacity, int row_chunks) {
    const int64_t first = *len, at = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
    if (at >= static_cast<int64_t>(count) * row_chunks || first + at / row_chunks >= capacity) return;
    k_cache[first * row_chunks + at] = k[at];
    v_cache[first * row_chunks + at] = v[at];
}
