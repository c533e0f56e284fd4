// KvAppend: rows 0..R-1 of k, v go to rows len..len+R-1 of the caches, `len` a device scalar.
//
// Arguments and layout (row-major, contiguous, 16-byte aligned): k, v [R, hk*D] bf16; k_cache, v_cache [C, hk*D] bf16; len [1] i32;
// count = R, capacity = C, row_chunks = hk*D/8 by value. The executor asserts len + R <= C; rows past C are not written.
// Launch: kv_append(k, v, k_cache, v_cache, len, count, capacity, row_chunks): grid ceil(R * row_chunks / 256), block 256.
// Numerics: a copy. Bound: 8*R*hk*D bytes. Reference: bench/lab/attention_check.py.
#include "lib/ptx.cuh"

extern "C" __global__ void __launch_bounds__(256)
    kv_append(const uint4 *k, const uint4 *v, uint4 *k_cache, uint4 *v_cache, const int *len, int count, int capacity, int row_chunks) {
    const int64_t first = *len, at = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
    if (at >= static_cast<int64_t>(count) * row_chunks || first + at / row_chunks >= capacity) return;
    k_cache[first * row_chunks + at] = k[at];
    v_cache[first * row_chunks + at] = v[at];
}
