// Random bf16 values for timing: GEMMs on zeros run faster than on data.
//
// Arguments: data [n] bf16, seed. Launch: fill(data, n, seed): grid 1024, block 256.
// Numerics: uniform in [-1, 1) with 8 significant bits, from a hash of seed and index; read as f32 the bits are finite too.
#include "common/vec.cuh"

extern "C" __global__ void __launch_bounds__(256) fill(bf16 *data, int64_t n, uint32_t seed) {
    for (int64_t i = static_cast<int64_t>(blockIdx.x) * 256 + threadIdx.x; i < n; i += static_cast<int64_t>(gridDim.x) * 256) {
        uint32_t h = static_cast<uint32_t>(i) * 0x9e3779b1u ^ static_cast<uint32_t>(i >> 32) ^ seed;
        h = (h ^ (h >> 16)) * 0x85ebca6bu;
        h = (h ^ (h >> 13)) * 0xc2b2ae35u;
        data[i] = narrow(static_cast<float>((h >> 8) & 0xffff) / 32768.0f - 1.0f);
    }
}
