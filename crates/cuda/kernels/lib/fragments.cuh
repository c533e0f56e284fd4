// Accumulator fragments: masks, online softmax, rounding to bf16, stores.
//
// Both tensor-core paths (mma.sync m16n8k16 and wgmma m64nNk16) hand a thread the same piece of a 16-row strip: with
// quad = lane / 4 and pair = lane % 4, element 4i + e of the flat array is row quad + 8 * (e / 2), column 8i + 2 * pair + e % 2.
// Refuses: shared and global layouts other than rows of contiguous bf16.
#pragma once

#include "rows.cuh"

static constexpr float LOG2_E = 1.4426950408889634f;
static constexpr float LN_2 = 0.6931471805599453f;

// D^-1/2, and the same for powers of two instead of e.
template <int D>
struct AttentionScale {
    static_assert(D == 64 || D == 128 || D == 256, "D^-1/2 is listed for these");
    static constexpr float VALUE = D == 64 ? 0.125f : D == 128 ? 0.08838834764831845f : 0.0625f;
    static constexpr float LOG2 = VALUE * LOG2_E;
};

// Sets scores of keys outside each row's interval to -inf. `key0` is the key of this thread's element 0.
template <int COUNT>
__device__ __forceinline__ void mask_scores(float (&s)[COUNT], int key0, Interval row0, Interval row8) {
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
        const int key = key0 + i / 4 * 8 + i % 2;
        const Interval row = i % 4 < 2 ? row0 : row8;
        if (key < row.lo || key >= row.hi) s[i] = -INFINITY;
    }
}

// Sets score gradients of keys outside each row's interval to zero, whatever they are.
template <int COUNT>
__device__ __forceinline__ void mask_gradients(float (&s)[COUNT], int key0, Interval row0, Interval row8) {
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
        const int key = key0 + i / 4 * 8 + i % 2;
        const Interval row = i % 4 < 2 ? row0 : row8;
        if (key < row.lo || key >= row.hi) s[i] = 0.0f;
    }
}

// Running maximum (raw scores) and this thread's share of the running sum, for the thread's two rows.
struct SoftmaxState {
    float maximum[2], sum[2];

    __device__ __forceinline__ void reset() {
#pragma unroll
        for (int r = 0; r < 2; ++r) maximum[r] = -INFINITY, sum[r] = 0.0f;
    }
    // Turns scores into exp2((s - max) * scale_log2) and gives the factor by which what was summed before must shrink.
    // A row that has seen no key yet keeps maximum -inf, sum 0 and probabilities 0. Tiles masked whole change nothing, bit for bit.
    template <int COUNT>
    __device__ __forceinline__ void step(float (&s)[COUNT], float (&rescale)[2], float scale_log2) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            float top = maximum[r];
#pragma unroll
            for (int i = 2 * r; i < COUNT; i += 4) top = fmaxf(top, fmaxf(s[i], s[i + 1]));
            top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 1));
            top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 2));
            const float base = top == -INFINITY ? 0.0f : top * scale_log2;
            rescale[r] = ptx::ex2(maximum[r] * scale_log2 - base);
            maximum[r] = top;
            float added = 0.0f;
#pragma unroll
            for (int i = 2 * r; i < COUNT; i += 4) {
                s[i] = ptx::ex2(fmaf(s[i], scale_log2, -base));
                s[i + 1] = ptx::ex2(fmaf(s[i + 1], scale_log2, -base));
                added += s[i] + s[i + 1];
            }
            sum[r] = sum[r] * rescale[r] + added;
        }
    }
    // Adds the four threads' shares of each row's sum.
    __device__ __forceinline__ void finish() {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            sum[r] += __shfl_xor_sync(0xffffffffu, sum[r], 1);
            sum[r] += __shfl_xor_sync(0xffffffffu, sum[r], 2);
        }
    }
};

template <int COUNT>
__device__ __forceinline__ void scale_rows(float (&o)[COUNT], const float (&factor)[2]) {
#pragma unroll
    for (int i = 0; i < COUNT; ++i) o[i] *= factor[i % 4 / 2];
}

// 16 columns of a strip as the A operand of the next product.
template <int COUNT>
__device__ __forceinline__ void pack_strip(uint32_t (&a)[4], const float (&s)[COUNT], int k16) {
#pragma unroll
    for (int i = 0; i < 4; ++i) a[i] = ptx::pack_bf16(s[8 * k16 + 2 * i], s[8 * k16 + 2 * i + 1]);
}

// Stores one of the thread's two rows as bf16, 16 bytes a lane. All 32 lanes must call; `row` null skips the store.
template <int COUNT>
__device__ __forceinline__ void store_row(bf16 *row, const float (&o)[COUNT], int which, float factor) {
    const int pair = threadIdx.x % 4;
#pragma unroll
    for (int c = 0; c < COUNT / 16; ++c) {
        uint32_t a[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const int i = 4 * (4 * c + j) + 2 * which;
            a[j] = ptx::pack_bf16(o[i] * factor, o[i + 1] * factor);
        }
        // Transposes the quad's 4x4 words, so that a lane holds 8 neighbouring columns: bit 0, then bit 1 of lane and index.
        uint32_t x = pair & 1 ? a[0] : a[1], y = pair & 1 ? a[2] : a[3];
        x = __shfl_xor_sync(0xffffffffu, x, 1), y = __shfl_xor_sync(0xffffffffu, y, 1);
        if (pair & 1) a[0] = x, a[2] = y;
        else a[1] = x, a[3] = y;
        x = pair & 2 ? a[0] : a[2], y = pair & 2 ? a[1] : a[3];
        x = __shfl_xor_sync(0xffffffffu, x, 2), y = __shfl_xor_sync(0xffffffffu, y, 2);
        if (pair & 2) a[0] = x, a[1] = y;
        else a[2] = x, a[3] = y;
        if (row) *reinterpret_cast<uint4 *>(row + 32 * c + 8 * pair) = make_uint4(a[0], a[1], a[2], a[3]);
    }
}

// Adds one of the thread's two rows into fp32 memory; `row` points at the thread's first column (2 * pair).
template <int COUNT>
__device__ __forceinline__ void add_row(float *row, const float (&x)[COUNT], int which, float factor) {
#pragma unroll
    for (int c = 0; c < COUNT / 4; ++c) {
        float2 *at = reinterpret_cast<float2 *>(row + 8 * c);
        float2 sum = *at;
        sum.x += x[4 * c + 2 * which] * factor;
        sum.y += x[4 * c + 2 * which + 1] * factor;
        *at = sum;
    }
}
