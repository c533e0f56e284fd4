// The block attention backward on mma.sync: delta and block gradients, dq, context dk and dv. One CTA of 4 warps per unit of work.
//
// Scores are recomputed in each kernel, so that none needs atomics: every gradient element is summed by one thread in one order.
// Where keys are the rows of a product (dk, dv), scores are formed transposed. Rows and keys that do not count are zero in shared
// memory, have lse = +inf or are masked by selection, so that whatever lies behind a batch never reaches a sum.
#pragma once

#include "fragments.cuh"
#include "shared_tiles.cuh"

// ---- delta, dk_blk, dv_blk ---------------------------------------------------------------------------------------------------------

// KEY_TILES * 16 >= block size. A block's rows of one key head (slot k, head g: row k * group + g) pass in chunks of 64.
template <int D, int KEY_TILES>
struct OwnTiles {
    static constexpr int ROWS = 64, KEYS = 16 * KEY_TILES, THREADS = 128;
    static constexpr int ROW_BYTES = ROWS * D * 2, KEY_BYTES = KEYS * D * 2, PROB_BYTES = KEYS * ROWS * 2;
    static constexpr int DYNAMIC_BYTES = SharedTileSlack + 2 * ROW_BYTES + 2 * KEY_BYTES + 2 * PROB_BYTES;
    static_assert(DYNAMIC_BYTES + 4096 <= 99 * 1024, "tiles fit every architecture from sm_80 on");
};

template <int D, int KEY_TILES>
__device__ __forceinline__ void block_own_mma(const BlockRows &rows, const bf16 *q, const bf16 *k_blk, const bf16 *v_blk, const bf16 *o,
                                              const bf16 *dout, const float *lse, float *delta, bf16 *dk_blk, bf16 *dv_blk, int hq, int hk) {
    using T = OwnTiles<D, KEY_TILES>;
    __shared__ float row_lse[T::ROWS], row_delta[T::ROWS];
    const int block = blockIdx.x / hk, head = blockIdx.x % hk, group = hq / hk, all_rows = rows.size * group;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, quad = lane / 4, pair = lane % 4;
    const int64_t slot0 = static_cast<int64_t>(block) * rows.size, kv_stride = static_cast<int64_t>(hk) * D;

    if (block >= rows.blocks) {
        for (int i = threadIdx.x; i < rows.size * (D / 8); i += T::THREADS) {
            const int64_t at = (slot0 + i / (D / 8)) * kv_stride + head * D + i % (D / 8) * 8;
            *reinterpret_cast<uint4 *>(dk_blk + at) = make_uint4(0, 0, 0, 0);
            *reinterpret_cast<uint4 *>(dv_blk + at) = make_uint4(0, 0, 0, 0);
        }
        for (int i = threadIdx.x; i < all_rows; i += T::THREADS) delta[(slot0 + i / group) * hq + head * group + i % group] = 0.0f;
        return;
    }

    const uint32_t base = shared_tiles_base();
    const SharedTile<D> tq{base}, tdo{base + T::ROW_BYTES}, tk{base + 2 * T::ROW_BYTES}, tv{tk.base + T::KEY_BYTES};
    const SharedTile<64> tp{tv.base + T::KEY_BYTES}, tds{tp.base + T::PROB_BYTES};
    auto key_row = [&](const bf16 *from, int row) { return row < rows.size ? from + (slot0 + row) * kv_stride + head * D : nullptr; };
    tk.template load<T::KEYS, T::THREADS>(k_blk, [&](int row) { return key_row(k_blk, row); });
    tv.template load<T::KEYS, T::THREADS>(v_blk, [&](int row) { return key_row(v_blk, row); });

    constexpr int COLUMNS = D / 4;  // of dk and dv, per warp
    static_assert(COLUMNS % 16 == 0, "a warp's columns are whole transposed B operands");
    float acc_k[KEY_TILES][COLUMNS / 2], acc_v[KEY_TILES][COLUMNS / 2];
#pragma unroll
    for (int m = 0; m < KEY_TILES; ++m)
#pragma unroll
        for (int i = 0; i < COLUMNS / 2; ++i) acc_k[m][i] = acc_v[m][i] = 0.0f;

    for (int row0 = 0; row0 < all_rows; row0 += T::ROWS) {
        auto row_at = [&](int row) { return (slot0 + (row0 + row) / group) * hq + head * group + (row0 + row) % group; };
        tq.template load<T::ROWS, T::THREADS>(q, [&](int row) { return row0 + row < all_rows ? q + row_at(row) * D : nullptr; });
        tdo.template load<T::ROWS, T::THREADS>(dout, [&](int row) { return row0 + row < all_rows ? dout + row_at(row) * D : nullptr; });
        ptx::cp_async_commit();
        for (int i = threadIdx.x; i < T::ROWS; i += T::THREADS)
            row_lse[i] = row0 + i < all_rows ? lse[row_at(i)] * LOG2_E : INFINITY;
        ptx::cp_async_wait<0>();
        __syncthreads();  // rows, keys and lse have landed for all

        // delta = sum over d of do * o, by D/8 neighbouring lanes a row.
        for (int i = threadIdx.x; i < T::ROWS * (D / 8); i += T::THREADS) {
            const int row = i / (D / 8), chunk = i % (D / 8);
            float sum = 0.0f;
            if (row0 + row < all_rows) {
                const uint4 a = *shared_pointer<const uint4>(tdo.at(row, chunk));
                const uint4 b = *reinterpret_cast<const uint4 *>(o + row_at(row) * D + chunk * 8);
                const uint32_t x[4] = {a.x, a.y, a.z, a.w}, y[4] = {b.x, b.y, b.z, b.w};
#pragma unroll
                for (int j = 0; j < 4; ++j)
                    sum = fmaf(ptx::low_bf16(x[j]), ptx::low_bf16(y[j]), fmaf(ptx::high_bf16(x[j]), ptx::high_bf16(y[j]), sum));
            }
#pragma unroll
            for (int step = 1; step < D / 8; step *= 2) sum += __shfl_xor_sync(0xffffffffu, sum, step);
            if (chunk == 0) {
                row_delta[row] = sum;
                if (row0 + row < all_rows) delta[row_at(row)] = sum;
            }
        }
        __syncthreads();  // delta of all 64 rows is there before gradients of scores need it

        // Each warp forms scores of all keys with its 16 rows.
        float s[KEY_TILES][8], dp[KEY_TILES][8];
#pragma unroll
        for (int m = 0; m < KEY_TILES; ++m)
#pragma unroll
            for (int i = 0; i < 8; ++i) s[m][i] = dp[m][i] = 0.0f;
#pragma unroll
        for (int c = 0; c < D / 16; ++c) {
            uint32_t bq[4], bdo[4];
            tq.b(bq, 16 * warp, c);
            tdo.b(bdo, 16 * warp, c);
#pragma unroll
            for (int m = 0; m < KEY_TILES; ++m) {
                uint32_t a[4];
                tk.a(a, 16 * m, c);
                ptx::mma_bf16(&s[m][0], a, bq[0], bq[1]);
                ptx::mma_bf16(&s[m][4], a, bq[2], bq[3]);
                tv.a(a, 16 * m, c);
                ptx::mma_bf16(&dp[m][0], a, bdo[0], bdo[1]);
                ptx::mma_bf16(&dp[m][4], a, bdo[2], bdo[3]);
            }
        }
#pragma unroll
        for (int m = 0; m < KEY_TILES; ++m) {
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                const int column = 16 * warp + i / 4 * 8 + 2 * pair + i % 2, key = 16 * m + quad + i % 4 / 2 * 8;
                const int slot = (row0 + column) / group;  // within the block
                const bool sees = row0 + column < all_rows && key < rows.size && (rows.window == 0 || key <= slot);
                const float p = sees ? ptx::ex2(fmaf(s[m][i], AttentionScale<D>::LOG2, -row_lse[column])) : 0.0f;
                s[m][i] = p;
                dp[m][i] = sees ? p * (dp[m][i] - row_delta[column]) : 0.0f;
            }
#pragma unroll
            for (int i = 0; i < 8; i += 2) {
                const int key = 16 * m + quad + i % 4 / 2 * 8, chunk = 2 * warp + i / 4;
                *shared_pointer<uint32_t>(tp.at(key, chunk) + 4 * pair) = ptx::pack_bf16(s[m][i], s[m][i + 1]);
                *shared_pointer<uint32_t>(tds.at(key, chunk) + 4 * pair) = ptx::pack_bf16(dp[m][i], dp[m][i + 1]);
            }
        }
        __syncthreads();  // P and dS of all rows are there before every warp multiplies them

#pragma unroll
        for (int c = 0; c < T::ROWS / 16; ++c) {
            uint32_t ap[KEY_TILES][4], ads[KEY_TILES][4];
#pragma unroll
            for (int m = 0; m < KEY_TILES; ++m) {
                tp.a(ap[m], 16 * m, c);
                tds.a(ads[m], 16 * m, c);
            }
#pragma unroll
            for (int n = 0; n < COLUMNS / 16; ++n) {
                uint32_t b[4];
                tdo.b_transposed(b, 16 * c, warp * (COLUMNS / 16) + n);
#pragma unroll
                for (int m = 0; m < KEY_TILES; ++m) {
                    ptx::mma_bf16(&acc_v[m][8 * n], ap[m], b[0], b[1]);
                    ptx::mma_bf16(&acc_v[m][8 * n + 4], ap[m], b[2], b[3]);
                }
                tq.b_transposed(b, 16 * c, warp * (COLUMNS / 16) + n);
#pragma unroll
                for (int m = 0; m < KEY_TILES; ++m) {
                    ptx::mma_bf16(&acc_k[m][8 * n], ads[m], b[0], b[1]);
                    ptx::mma_bf16(&acc_k[m][8 * n + 4], ads[m], b[2], b[3]);
                }
            }
        }
        __syncthreads();  // nobody reads this chunk's rows, P or dS when the next chunk overwrites them
    }

#pragma unroll
    for (int m = 0; m < KEY_TILES; ++m) {
#pragma unroll
        for (int i = 0; i < COLUMNS / 2; i += 2) {
            const int key = 16 * m + quad + i % 4 / 2 * 8, column = warp * COLUMNS + i / 4 * 8 + 2 * pair;
            if (key < rows.size) {
                const int64_t at = (slot0 + key) * kv_stride + head * D + column;
                *reinterpret_cast<uint32_t *>(dv_blk + at) = ptx::pack_bf16(acc_v[m][i], acc_v[m][i + 1]);
                *reinterpret_cast<uint32_t *>(dk_blk + at) =
                    ptx::pack_bf16(acc_k[m][i] * AttentionScale<D>::VALUE, acc_k[m][i + 1] * AttentionScale<D>::VALUE);
            }
        }
    }
}

// ---- dq --------------------------------------------------------------------------------------------------------------------------

template <int D>
struct DqMmaTiles {
    static constexpr int STRIPS = 2, M = 128, N = 32, THREADS = 128;
    static constexpr int Q_BYTES = M * D * 2, KV_BYTES = N * D * 2;
    static constexpr int DYNAMIC_BYTES = SharedTileSlack + 2 * Q_BYTES + 4 * KV_BYTES;
    static_assert(D <= 128, "dq, scores and their gradient of two strips fit a warp's registers");
    static_assert(DYNAMIC_BYTES + 16 * M <= 99 * 1024, "tiles and row intervals fit every architecture from sm_80 on");
};

template <int D>
__device__ __forceinline__ void block_dq_mma(const BlockRows &rows, const bf16 *q, const bf16 *dout, const bf16 *k, const bf16 *v,
                                             const bf16 *own_k, const bf16 *own_v, const float *lse, const float *delta, bf16 *dq,
                                             int slots, int hq, int hk) {
    using T = DqMmaTiles<D>;
    __shared__ int4 limits[T::M];
    const int group = hq / hk, per_tile = T::M / group, tiles = (slots + per_tile - 1) / per_tile;
    const int head = blockIdx.x % hk, first = (tiles - 1 - static_cast<int>(blockIdx.x) / hk) * per_tile;
    const Interval in = clip_tile(rows.real(), first, per_tile);
    if (in.hi <= in.lo) {
        const int present = min(per_tile, slots - first) * group;
        for (int i = threadIdx.x; i < present * (D / 8); i += T::THREADS) {
            const int row = i / (D / 8);
            const int64_t at = static_cast<int64_t>(first + row / group) * hq + head * group + row % group;
            *reinterpret_cast<uint4 *>(dq + at * D + i % (D / 8) * 8) = make_uint4(0, 0, 0, 0);
        }
        return;
    }
    const int lane = threadIdx.x % 32, quad = lane / 4, pair = lane % 4, warp_row = threadIdx.x / 32 * 16 * T::STRIPS;
    const uint32_t base = shared_tiles_base();
    const SharedTile<D> tq{base}, tdo{base + T::Q_BYTES};
    // The tile's intervals and, per warp, the keys that all its rows see: kept here, since accumulators fill the registers.
    __shared__ Interval keys, own, warp_sees[T::THREADS / 32];
    if (threadIdx.x == 0) keys = rows.tile_keys(in.lo, in.hi, 0), own = rows.tile_own(in.lo, in.hi);
    __syncthreads();  // the intervals are written before anyone plans loads by them
    const int own_tiles = (own.hi - own.lo + T::N - 1) / T::N, all_tiles = own_tiles + max(0, (keys.hi - keys.lo + T::N - 1) / T::N);
    const int64_t kv_stride = static_cast<int64_t>(hk) * D;

    auto tile_k = [&](int stage) { return SharedTile<D>{base + 2 * T::Q_BYTES + stage * 2 * T::KV_BYTES}; };
    auto tile_v = [&](int stage) { return SharedTile<D>{base + 2 * T::Q_BYTES + stage * 2 * T::KV_BYTES + T::KV_BYTES}; };
    auto load = [&](int t, int stage) {
        const bool is_own = t < own_tiles;
        const int start = is_own ? own.lo + t * T::N : keys.lo + (t - own_tiles) * T::N, end = is_own ? own.hi : keys.hi;
        const bf16 *from_k = (is_own ? own_k : k) + head * D, *from_v = (is_own ? own_v : v) + head * D;
        tile_k(stage).template load<T::N, T::THREADS>(
            k, [&](int row) { return start + row < end ? from_k + (start + row) * kv_stride : nullptr; });
        tile_v(stage).template load<T::N, T::THREADS>(
            v, [&](int row) { return start + row < end ? from_v + (start + row) * kv_stride : nullptr; });
        ptx::cp_async_commit();
    };
    auto is_real = [&](int row) {
        const int slot = first + row / group;
        return row < per_tile * group && slot >= in.lo && slot < in.hi;
    };
    auto row_at = [&](int row) { return static_cast<int64_t>(first + row / group) * hq + head * group + row % group; };

    tq.template load<T::M, T::THREADS>(q, [&](int row) { return is_real(row) ? q + row_at(row) * D : nullptr; });
    tdo.template load<T::M, T::THREADS>(dout, [&](int row) { return is_real(row) ? dout + row_at(row) * D : nullptr; });
    load(0, 0);
    for (int row = threadIdx.x; row < T::M; row += T::THREADS) {
        const int slot = first + row / group;
        const Interval c = is_real(row) ? rows.keys(slot, 0) : Interval{0, 0}, o = is_real(row) ? rows.own(slot) : Interval{0, 0};
        limits[row] = make_int4(c.lo, c.hi, o.lo, o.hi);
    }
    float row_lse[T::STRIPS][2], row_delta[T::STRIPS][2];
#pragma unroll
    for (int i = 0; i < 2 * T::STRIPS; ++i) {
        const int row = warp_row + i / 2 * 16 + i % 2 * 8 + quad;
        row_lse[i / 2][i % 2] = is_real(row) ? lse[row_at(row)] * LOG2_E : INFINITY;
        row_delta[i / 2][i % 2] = is_real(row) ? delta[row_at(row)] : 0.0f;
    }
    __syncthreads();  // intervals are written before warps reduce and use them

    int all_lo = limits[warp_row + lane].x, all_hi = limits[warp_row + lane].y;
    static_assert(T::STRIPS == 2, "one lane per row of the warp");
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
        all_lo = max(all_lo, __shfl_xor_sync(0xffffffffu, all_lo, step));
        all_hi = min(all_hi, __shfl_xor_sync(0xffffffffu, all_hi, step));
    }
    if (lane == 0) warp_sees[threadIdx.x / 32] = {all_lo, all_hi};  // read by this warp only, after the loop's barrier

    float acc[T::STRIPS][D / 2];
#pragma unroll
    for (int m = 0; m < T::STRIPS; ++m)
#pragma unroll
        for (int i = 0; i < D / 2; ++i) acc[m][i] = 0.0f;

    for (int t = 0; t < all_tiles; ++t) {
        ptx::cp_async_wait<0>();
        __syncthreads();  // tile t has landed for all, and nobody reads the buffer that tile t + 1 goes to
        if (t + 1 < all_tiles) load(t + 1, (t + 1) % 2);
        const SharedTile<D> kt = tile_k(t % 2), vt = tile_v(t % 2);

        float s[T::STRIPS][T::N / 2], dp[T::STRIPS][T::N / 2];
#pragma unroll
        for (int m = 0; m < T::STRIPS; ++m)
#pragma unroll
            for (int i = 0; i < T::N / 2; ++i) s[m][i] = dp[m][i] = 0.0f;
#pragma unroll
        for (int c = 0; c < D / 16; ++c) {
            uint32_t a[T::STRIPS][4], b[4];
#pragma unroll
            for (int m = 0; m < T::STRIPS; ++m) tq.a(a[m], warp_row + 16 * m, c);
#pragma unroll
            for (int n = 0; n < T::N / 16; ++n) {
                kt.b(b, 16 * n, c);
#pragma unroll
                for (int m = 0; m < T::STRIPS; ++m) {
                    ptx::mma_bf16(&s[m][8 * n], a[m], b[0], b[1]);
                    ptx::mma_bf16(&s[m][8 * n + 4], a[m], b[2], b[3]);
                }
            }
#pragma unroll
            for (int m = 0; m < T::STRIPS; ++m) tdo.a(a[m], warp_row + 16 * m, c);
#pragma unroll
            for (int n = 0; n < T::N / 16; ++n) {
                vt.b(b, 16 * n, c);
#pragma unroll
                for (int m = 0; m < T::STRIPS; ++m) {
                    ptx::mma_bf16(&dp[m][8 * n], a[m], b[0], b[1]);
                    ptx::mma_bf16(&dp[m][8 * n + 4], a[m], b[2], b[3]);
                }
            }
        }
        const bool is_own = t < own_tiles;
        const int start = is_own ? own.lo + t * T::N : keys.lo + (t - own_tiles) * T::N;
        const Interval sees = warp_sees[threadIdx.x / 32];
        const bool ragged = is_own || start < sees.lo || start + T::N > sees.hi;
#pragma unroll
        for (int m = 0; m < T::STRIPS; ++m) {
#pragma unroll
            for (int i = 0; i < T::N / 2; ++i)
                s[m][i] = ptx::ex2(fmaf(s[m][i], AttentionScale<D>::LOG2, -row_lse[m][i % 4 / 2])) * (dp[m][i] - row_delta[m][i % 4 / 2]);
            if (ragged) {
                const int4 low = limits[warp_row + 16 * m + quad], high = limits[warp_row + 16 * m + quad + 8];
                mask_gradients(s[m], start + 2 * pair, is_own ? Interval{low.z, low.w} : Interval{low.x, low.y},
                               is_own ? Interval{high.z, high.w} : Interval{high.x, high.y});
            }
        }
#pragma unroll
        for (int c = 0; c < T::N / 16; ++c) {
            uint32_t ds[T::STRIPS][4];
#pragma unroll
            for (int m = 0; m < T::STRIPS; ++m) pack_strip(ds[m], s[m], c);
#pragma unroll
            for (int n = 0; n < D / 16; ++n) {
                uint32_t b[4];
                kt.b_transposed(b, 16 * c, n);
#pragma unroll
                for (int m = 0; m < T::STRIPS; ++m) {
                    ptx::mma_bf16(&acc[m][8 * n], ds[m], b[0], b[1]);
                    ptx::mma_bf16(&acc[m][8 * n + 4], ds[m], b[2], b[3]);
                }
            }
        }
    }
#pragma unroll
    for (int i = 0; i < 2 * T::STRIPS; ++i) {
        const int m = i / 2, r = i % 2, row = warp_row + 16 * m + 8 * r + quad;
        const bool exists = row < per_tile * group && first + row / group < slots;
        if (!is_real(row)) {
#pragma unroll
            for (int j = 2 * r; j < D / 2; j += 4) acc[m][j] = acc[m][j + 1] = 0.0f;
        }
        store_row(exists ? dq + row_at(row) * D : nullptr, acc[m], r, AttentionScale<D>::VALUE);
    }
}

// ---- dk_ctx, dv_ctx ----------------------------------------------------------------------------------------------------------------

template <int D>
struct DkvMmaTiles {
    static constexpr int KEYS = 64, ROWS = 64, THREADS = 128;
    static constexpr int KV_BYTES = KEYS * D * 2, Q_BYTES = ROWS * D * 2;
    static constexpr int DYNAMIC_BYTES = SharedTileSlack + 2 * KV_BYTES + 4 * Q_BYTES;
    static_assert(D <= 128, "dk and dv of 16 keys, scores and their gradient of 64 rows fit a warp's registers");
    static_assert(DYNAMIC_BYTES + 2048 + 256 <= 99 * 1024, "tiles and row notes fit every architecture from sm_80 on");
};

template <int D>
__device__ __forceinline__ void block_dkv_mma(const BlockRows &rows, const bf16 *q, const bf16 *dout, const bf16 *k, const bf16 *v,
                                              const float *lse, const float *delta, float *dk, float *dv, int context, int hq, int hk) {
    using T = DkvMmaTiles<D>;
    __shared__ __align__(8) float row_lse[2][T::ROWS], row_delta[2][T::ROWS];
    __shared__ __align__(8) int row_lo[2][T::ROWS], row_hi[2][T::ROWS];
    const int group = hq / hk, per_tile = T::ROWS / group;
    const int head = blockIdx.x % hk, j0 = static_cast<int>(blockIdx.x) / hk * T::KEYS;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, quad = lane / 4, pair = lane % 4;
    __shared__ Interval slots;  // that see the tile; kept here, since accumulators fill the registers
    if (threadIdx.x == 0) {
        const Interval seen = rows.blocks_that_see(j0, j0 + T::KEYS);
        slots = {seen.lo * rows.size, seen.hi * rows.size};
    }
    __syncthreads();  // the interval is written before anyone plans loads by it
    const int first_slot = slots.lo, end_slot = slots.hi;
    if (end_slot <= first_slot) return;
    const int row_tiles = (end_slot - first_slot + per_tile - 1) / per_tile;
    const int64_t kv_stride = static_cast<int64_t>(hk) * D;

    const uint32_t base = shared_tiles_base();
    const SharedTile<D> tk{base}, tv{base + T::KV_BYTES};
    auto tile_q = [&](int stage) { return SharedTile<D>{base + 2 * T::KV_BYTES + stage * 2 * T::Q_BYTES}; };
    auto tile_do = [&](int stage) { return SharedTile<D>{base + 2 * T::KV_BYTES + stage * 2 * T::Q_BYTES + T::Q_BYTES}; };
    auto load = [&](int t, int stage) {
        const int first = slots.lo + t * per_tile, end_slot = slots.hi;
        auto counts = [&](int row) { return row < per_tile * group && first + row / group < end_slot; };
        auto row_at = [&](int row) { return static_cast<int64_t>(first + row / group) * hq + head * group + row % group; };
        tile_q(stage).template load<T::ROWS, T::THREADS>(q, [&](int row) { return counts(row) ? q + row_at(row) * D : nullptr; });
        tile_do(stage).template load<T::ROWS, T::THREADS>(dout, [&](int row) { return counts(row) ? dout + row_at(row) * D : nullptr; });
        ptx::cp_async_commit();
        for (int row = threadIdx.x; row < T::ROWS; row += T::THREADS) {
            const Interval keys = counts(row) ? rows.keys(first + row / group, 0) : Interval{0, 0};
            row_lse[stage][row] = counts(row) ? lse[row_at(row)] * LOG2_E : INFINITY;
            row_delta[stage][row] = counts(row) ? delta[row_at(row)] : 0.0f;
            row_lo[stage][row] = keys.lo;
            row_hi[stage][row] = keys.hi;
        }
    };
    auto key_row = [&](const bf16 *from, int row) { return j0 + row < context ? from + (j0 + row) * kv_stride + head * D : nullptr; };
    tk.template load<T::KEYS, T::THREADS>(k, [&](int row) { return key_row(k, row); });
    tv.template load<T::KEYS, T::THREADS>(v, [&](int row) { return key_row(v, row); });
    load(0, 0);

    float acc_k[D / 2], acc_v[D / 2];
#pragma unroll
    for (int i = 0; i < D / 2; ++i) acc_k[i] = acc_v[i] = 0.0f;

    for (int t = 0; t < row_tiles; ++t) {
        ptx::cp_async_wait<0>();
        __syncthreads();  // rows t and their notes have landed for all, and nobody reads the buffer that rows t + 1 go to
        if (t + 1 < row_tiles) load(t + 1, (t + 1) % 2);
        const int stage = t % 2;
        const SharedTile<D> tq = tile_q(stage), tdo = tile_do(stage);

        float s[T::ROWS / 2], dp[T::ROWS / 2];
#pragma unroll
        for (int i = 0; i < T::ROWS / 2; ++i) s[i] = dp[i] = 0.0f;
#pragma unroll
        for (int c = 0; c < D / 16; ++c) {
            uint32_t a[4], b[4];
            tk.a(a, 16 * warp, c);
#pragma unroll
            for (int n = 0; n < T::ROWS / 16; ++n) {
                tq.b(b, 16 * n, c);
                ptx::mma_bf16(&s[8 * n], a, b[0], b[1]);
                ptx::mma_bf16(&s[8 * n + 4], a, b[2], b[3]);
            }
            tv.a(a, 16 * warp, c);
#pragma unroll
            for (int n = 0; n < T::ROWS / 16; ++n) {
                tdo.b(b, 16 * n, c);
                ptx::mma_bf16(&dp[8 * n], a, b[0], b[1]);
                ptx::mma_bf16(&dp[8 * n + 4], a, b[2], b[3]);
            }
        }
        const int key = j0 + 16 * warp + quad;
#pragma unroll
        for (int c = 0; c < T::ROWS / 8; ++c) {
            const int column = 8 * c + 2 * pair;
            const float2 l = *reinterpret_cast<const float2 *>(&row_lse[stage][column]);
            const float2 d = *reinterpret_cast<const float2 *>(&row_delta[stage][column]);
            const int2 lo = *reinterpret_cast<const int2 *>(&row_lo[stage][column]);
            const int2 hi = *reinterpret_cast<const int2 *>(&row_hi[stage][column]);
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                const int i = 4 * c + e, at = key + e / 2 * 8;
                const bool sees = at >= (e % 2 ? lo.y : lo.x) && at < (e % 2 ? hi.y : hi.x);
                const float p = sees ? ptx::ex2(fmaf(s[i], AttentionScale<D>::LOG2, -(e % 2 ? l.y : l.x))) : 0.0f;
                s[i] = p;
                dp[i] = sees ? p * (dp[i] - (e % 2 ? d.y : d.x)) : 0.0f;
            }
        }
#pragma unroll
        for (int c = 0; c < T::ROWS / 16; ++c) {
            uint32_t p[4], ds[4];
            pack_strip(p, s, c);
            pack_strip(ds, dp, c);
#pragma unroll
            for (int n = 0; n < D / 16; ++n) {
                uint32_t b[4];
                tdo.b_transposed(b, 16 * c, n);
                ptx::mma_bf16(&acc_v[8 * n], p, b[0], b[1]);
                ptx::mma_bf16(&acc_v[8 * n + 4], p, b[2], b[3]);
                tq.b_transposed(b, 16 * c, n);
                ptx::mma_bf16(&acc_k[8 * n], ds, b[0], b[1]);
                ptx::mma_bf16(&acc_k[8 * n + 4], ds, b[2], b[3]);
            }
        }
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const int key = j0 + 16 * warp + quad + 8 * r;
        if (key < context) {
            const int64_t at = (static_cast<int64_t>(key) * hk + head) * D + 2 * pair;
            add_row(dk + at, acc_k, r, AttentionScale<D>::VALUE);
            add_row(dv + at, acc_v, r, 1.0f);
        }
    }
}
