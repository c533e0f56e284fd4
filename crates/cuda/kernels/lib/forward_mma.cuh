// The attention forward on mma.sync: one CTA of 4 warps per tile of query rows and key head. Used by all three kinds of attention.
//
// A tile is M = 64 * STRIPS rows, floor(M / group) slots of one key head; a warp owns 16 * STRIPS rows, so that with two strips every
// key fragment read from shared memory feeds two products. Keys stream in tiles of N through two buffers by cp.async.
// Key tiles begin at the low end of the tile's interval; rows outside the interval are not read but written as zero.
#pragma once

#include "fragments.cuh"
#include "shared_tiles.cuh"

template <int D, int N, int STRIPS>
struct ForwardMmaTiles {
    static constexpr int M = 64 * STRIPS, THREADS = 128;
    static constexpr int Q_BYTES = M * D * 2, KV_BYTES = N * D * 2;
    static constexpr int DYNAMIC_BYTES = SharedTileSlack + Q_BYTES + 4 * KV_BYTES;
    static_assert(N % 16 == 0, "probabilities feed the next product 16 keys at a time");
    static_assert(STRIPS * D <= 256, "the accumulators of a warp's strips fit its registers");
    static_assert(DYNAMIC_BYTES + 16 * M <= 99 * 1024, "tiles and row intervals fit every architecture from sm_80 on");
};

// `store(strip, softmax, o)` is called once per strip with the unnormalised sums; every thread calls.
template <int D, int N, int STRIPS, class Rows, class Store>
__device__ __forceinline__ void forward_mma(const Rows &rows, Interval in, const bf16 *q, const bf16 *k, const bf16 *v,
                                            const bf16 *own_k, const bf16 *own_v, int first, int head, int hq, int hk, Store store) {
    using T = ForwardMmaTiles<D, N, STRIPS>;
    __shared__ int4 limits[T::M];  // context and own interval of each row
    // The tile's intervals and, per warp, the keys that all its rows see: kept here, since accumulators fill the registers.
    __shared__ Interval keys, own, warp_sees[T::THREADS / 32];

    const int group = hq / hk, per_tile = T::M / group;
    const int lane = threadIdx.x % 32, pair = lane % 4, warp_row = threadIdx.x / 32 * 16 * STRIPS;
    const uint32_t base = shared_tiles_base();
    const SharedTile<D> tile_q{base};
    const int hint = rows.hint(in.lo);
    if (threadIdx.x == 0) keys = rows.tile_keys(in.lo, in.hi, hint), own = rows.tile_own(in.lo, in.hi);
    __syncthreads();  // the intervals are written before anyone plans loads by them
    const int own_tiles = (own.hi - own.lo + N - 1) / N, all_tiles = own_tiles + max(0, (keys.hi - keys.lo + N - 1) / N);
    const int64_t kv_stride = static_cast<int64_t>(hk) * D;

    auto tile_k = [&](int stage) { return SharedTile<D>{base + T::Q_BYTES + stage * 2 * T::KV_BYTES}; };
    auto tile_v = [&](int stage) { return SharedTile<D>{base + T::Q_BYTES + stage * 2 * T::KV_BYTES + T::KV_BYTES}; };
    auto load = [&](int t, int stage) {
        const bool is_own = t < own_tiles;
        const int start = is_own ? own.lo + t * N : keys.lo + (t - own_tiles) * N, end = is_own ? own.hi : keys.hi;
        const bf16 *from_k = (is_own ? own_k : k) + head * D, *from_v = (is_own ? own_v : v) + head * D;
        tile_k(stage).template load<N, T::THREADS>(
            k, [&](int row) { return start + row < end ? from_k + (start + row) * kv_stride : nullptr; });
        tile_v(stage).template load<N, T::THREADS>(
            v, [&](int row) { return start + row < end ? from_v + (start + row) * kv_stride : nullptr; });
        ptx::cp_async_commit();
    };

    tile_q.template load<T::M, T::THREADS>(q, [&](int row) {
        const int slot = first + row / group;
        const bool is_real = row < per_tile * group && slot >= in.lo && slot < in.hi;
        return is_real ? q + (static_cast<int64_t>(slot) * hq + head * group + row % group) * D : nullptr;
    });
    if (all_tiles > 0) load(0, 0);
    for (int row = threadIdx.x; row < T::M; row += T::THREADS) {
        const int slot = first + row / group;
        const bool is_real = row < per_tile * group && slot >= in.lo && slot < in.hi;
        const Interval c = is_real ? rows.keys(slot, hint) : Interval{0, 0}, o = is_real ? rows.own(slot) : Interval{0, 0};
        limits[row] = make_int4(c.lo, c.hi, o.lo, o.hi);
    }
    __syncthreads();  // intervals are written before warps reduce and use them

    int all_lo = limits[warp_row + lane % (16 * STRIPS)].x, all_hi = limits[warp_row + lane % (16 * STRIPS)].y;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
        all_lo = max(all_lo, __shfl_xor_sync(0xffffffffu, all_lo, step));
        all_hi = min(all_hi, __shfl_xor_sync(0xffffffffu, all_hi, step));
    }
    if (lane == 0) warp_sees[threadIdx.x / 32] = {all_lo, all_hi};  // read by this warp only, after the loop's barrier

    float o[STRIPS][D / 2];
    SoftmaxState softmax[STRIPS];
#pragma unroll
    for (int m = 0; m < STRIPS; ++m) {
        softmax[m].reset();
#pragma unroll
        for (int i = 0; i < D / 2; ++i) o[m][i] = 0.0f;
    }

    for (int t = 0; t < all_tiles; ++t) {
        ptx::cp_async_wait<0>();
        __syncthreads();  // tile t has landed for all, and nobody reads the buffer that tile t + 1 goes to
        if (t + 1 < all_tiles) load(t + 1, (t + 1) % 2);
        const SharedTile<D> kt = tile_k(t % 2), vt = tile_v(t % 2);

        float s[STRIPS][N / 2];
#pragma unroll
        for (int m = 0; m < STRIPS; ++m)
#pragma unroll
            for (int i = 0; i < N / 2; ++i) s[m][i] = 0.0f;
#pragma unroll
        for (int c = 0; c < D / 16; ++c) {
            uint32_t a[STRIPS][4];
#pragma unroll
            for (int m = 0; m < STRIPS; ++m) tile_q.a(a[m], warp_row + 16 * m, c);
#pragma unroll
            for (int n = 0; n < N / 16; ++n) {
                uint32_t b[4];
                kt.b(b, 16 * n, c);
#pragma unroll
                for (int m = 0; m < STRIPS; ++m) {
                    ptx::mma_bf16(&s[m][8 * n], a[m], b[0], b[1]);
                    ptx::mma_bf16(&s[m][8 * n + 4], a[m], b[2], b[3]);
                }
            }
        }

        const bool is_own = t < own_tiles;
        const int start = is_own ? own.lo + t * N : keys.lo + (t - own_tiles) * N;
        const Interval sees = warp_sees[threadIdx.x / 32];
        const bool ragged = is_own || start < sees.lo || start + N > sees.hi;
#pragma unroll
        for (int m = 0; m < STRIPS; ++m) {
            if (ragged) {
                const int4 low = limits[warp_row + 16 * m + lane / 4], high = limits[warp_row + 16 * m + lane / 4 + 8];
                mask_scores(s[m], start + 2 * pair, is_own ? Interval{low.z, low.w} : Interval{low.x, low.y},
                            is_own ? Interval{high.z, high.w} : Interval{high.x, high.y});
            }
            float rescale[2];
            softmax[m].step(s[m], rescale, AttentionScale<D>::LOG2);
            scale_rows(o[m], rescale);
        }
#pragma unroll
        for (int c = 0; c < N / 16; ++c) {
            uint32_t p[STRIPS][4];
#pragma unroll
            for (int m = 0; m < STRIPS; ++m) pack_strip(p[m], s[m], c);
#pragma unroll
            for (int n = 0; n < D / 16; ++n) {
                uint32_t b[4];
                vt.b_transposed(b, 16 * c, n);
#pragma unroll
                for (int m = 0; m < STRIPS; ++m) {
                    ptx::mma_bf16(&o[m][8 * n], p[m], b[0], b[1]);
                    ptx::mma_bf16(&o[m][8 * n + 4], p[m], b[2], b[3]);
                }
            }
        }
    }
    ptx::cp_async_wait<0>();  // no copy outlives the CTA when there was no key tile
#pragma unroll
    for (int m = 0; m < STRIPS; ++m) {
        softmax[m].finish();
        store(m, softmax[m], o[m]);
    }
}

// The forward of one tile with its result written: o as bf16, lse (natural, of scaled scores) where it is not null.
template <int D, int N, int STRIPS, class Rows>
__device__ __forceinline__ void forward_mma_tile(const Rows &rows, const bf16 *q, const bf16 *k, const bf16 *v, const bf16 *own_k,
                                                 const bf16 *own_v, bf16 *out, float *lse, int slots, int hq, int hk) {
    using T = ForwardMmaTiles<D, N, STRIPS>;
    const int group = hq / hk, per_tile = T::M / group, tiles = (slots + per_tile - 1) / per_tile;
    // Late tiles first: in a sample they see the most keys.
    const int head = blockIdx.x % hk, first = (tiles - 1 - static_cast<int>(blockIdx.x) / hk) * per_tile;
    const Interval in = clip_tile(rows.real(), first, per_tile);
    if (in.hi <= in.lo) {
        const int present = min(per_tile, slots - first) * group;
        for (int i = threadIdx.x; i < present * (D / 8); i += T::THREADS) {
            const int row = i / (D / 8);
            const int64_t at = static_cast<int64_t>(first + row / group) * hq + head * group + row % group;
            *reinterpret_cast<uint4 *>(out + at * D + i % (D / 8) * 8) = make_uint4(0, 0, 0, 0);
            if (lse != nullptr && i % (D / 8) == 0) lse[at] = 0.0f;
        }
        return;
    }
    forward_mma<D, N, STRIPS>(rows, in, q, k, v, own_k, own_v, first, head, hq, hk, [&](int m, const SoftmaxState &softmax, auto &o) {
        const int lane = threadIdx.x % 32;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int row = threadIdx.x / 32 * 16 * STRIPS + 16 * m + lane / 4 + 8 * r, slot = first + row / group;
            const bool exists = row < per_tile * group && slot < slots, is_real = exists && slot >= in.lo && slot < in.hi;
            const int64_t at = static_cast<int64_t>(slot) * hq + head * group + row % group;
            if (!is_real) {
#pragma unroll
                for (int i = 2 * r; i < D / 2; i += 4) o[i] = o[i + 1] = 0.0f;
            }
            store_row(exists ? out + at * D : nullptr, o, r, is_real ? 1.0f / softmax.sum[r] : 0.0f);
            if (lse != nullptr && exists && lane % 4 == 0) lse[at] = is_real ? softmax.maximum[r] * AttentionScale<D>::VALUE + ptx::ln(softmax.sum[r]) : 0.0f;
        }
    });
}
