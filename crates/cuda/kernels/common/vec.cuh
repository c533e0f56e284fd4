// Vectorised row access and block sums for the memory-bound kernels.
//
// Job: bf16 and f32 rows read and written V elements at a time (V = 8: 16-byte accesses; V = 1: rows whose width is no multiple of 8), and
// sums over a CTA in a fixed order. Refuses: arithmetic on bf16; everything is fp32 between load and store. Invariant: no float atomics.
#pragma once

#include <stdint.h>

typedef uint16_t bf16;

#define FN __device__ __forceinline__

FN float widen(bf16 x) { return __uint_as_float(static_cast<uint32_t>(x) << 16); }

// Two floats rounded to nearest even, `lo` in the lower half.
FN uint32_t pack2(float lo, float hi) {
    uint32_t packed;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(hi), "f"(lo));
    return packed;
}
FN bf16 narrow(float x) { return static_cast<bf16>(pack2(x, 0.0f)); }
FN float rounded(float x) { return __uint_as_float(pack2(x, 0.0f) << 16); }

template <int V>
FN void load(const bf16 *p, float (&x)[V]) {
    if constexpr (V == 8) {
        const uint4 raw = *reinterpret_cast<const uint4 *>(p);
        const uint32_t word[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            x[2 * i] = __uint_as_float(word[i] << 16);
            x[2 * i + 1] = __uint_as_float(word[i] & 0xffff0000u);
        }
    } else {
        static_assert(V == 1, "rows are read 8 elements or one element at a time");
        x[0] = widen(*p);
    }
}

template <int V>
FN void load(const float *p, float (&x)[V]) {
    if constexpr (V == 8) {
        const float4 a = reinterpret_cast<const float4 *>(p)[0], b = reinterpret_cast<const float4 *>(p)[1];
        x[0] = a.x, x[1] = a.y, x[2] = a.z, x[3] = a.w, x[4] = b.x, x[5] = b.y, x[6] = b.z, x[7] = b.w;
    } else {
        x[0] = *p;
    }
}

// A gradient that may have either dtype; the branch is uniform over the grid.
template <int V>
FN void load_either(const void *p, int64_t at, int is_f32, float (&x)[V]) {
    if (is_f32) load<V>(static_cast<const float *>(p) + at, x);
    else load<V>(static_cast<const bf16 *>(p) + at, x);
}

template <int V>
FN void store(bf16 *p, const float (&x)[V]) {
    if constexpr (V == 8) {
        *reinterpret_cast<uint4 *>(p) = make_uint4(pack2(x[0], x[1]), pack2(x[2], x[3]), pack2(x[4], x[5]), pack2(x[6], x[7]));
    } else {
        *p = narrow(x[0]);
    }
}

template <int V>
FN void store(float *p, const float (&x)[V]) {
    if constexpr (V == 8) {
        reinterpret_cast<float4 *>(p)[0] = make_float4(x[0], x[1], x[2], x[3]);
        reinterpret_cast<float4 *>(p)[1] = make_float4(x[4], x[5], x[6], x[7]);
    } else {
        *p = x[0];
    }
}

// Sum over the lanes of a group of W neighbouring lanes; every lane gets it.
template <int W>
FN float group_sum(float x) {
#pragma unroll
    for (int step = W / 2; step > 0; step /= 2) x += __shfl_xor_sync(0xffffffffu, x, step);
    return x;
}

// Sums of N values over the CTA. Every thread calls and gets all sums. `scratch` holds N * 32 floats and may be used again after the next barrier.
template <int N>
FN void block_sums(float (&x)[N], float *scratch) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = (blockDim.x + 31) / 32;
#pragma unroll
    for (int i = 0; i < N; ++i) {
        x[i] = group_sum<32>(x[i]);
        if (lane == 0) scratch[i * 32 + warp] = x[i];
    }
    __syncthreads();  // every warp's sums are in scratch before anyone adds them
#pragma unroll
    for (int i = 0; i < N; ++i) x[i] = group_sum<32>(lane < warps ? scratch[i * 32 + lane] : 0.0f);
}

// One row of `chunks` pieces of type P copied by the CTA.
template <class P>
FN void copy_row(P *to, const P *from, int chunks) {
    for (int c = threadIdx.x; c < chunks; c += blockDim.x) to[c] = from[c];
}
template <class P>
FN void zero_row(P *to, int chunks) {
    for (int c = threadIdx.x; c < chunks; c += blockDim.x) to[c] = P{};
}
