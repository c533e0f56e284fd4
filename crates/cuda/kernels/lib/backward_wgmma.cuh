// The block attention backward on Hopper: dq with query tiles outside, context dk and dv with key tiles outside.
//
// Both kernels recompute the scores, so that neither needs atomics: every gradient element is summed by one thread in one order.
// 384 threads: warpgroup 0 feeds, warpgroups 1 and 2 compute 64 rows (dq) or 64 keys (dk, dv) each. In the second kernel scores are
// formed transposed (keys as rows), which leaves probabilities in registers exactly where the products for dv and dk want them.
// Loads run past no real row: context tiles (dq) and slot tiles (dk, dv) are laid from the end of their interval backwards, see
// forward_wgmma.cuh.
#pragma once

#include "fragments.cuh"
#include "schedule.cuh"

#if defined(HOPPER_KERNELS)

// ---- dq ------------------------------------------------------------------------------------------------------------------------

struct DqNote {
    int own_tiles, own_end;
    int ctx_tiles, ctx_end;
};

template <int D>
struct DqTiles {
    static constexpr int M = 128, N = 128, OWN_N = 64, PANELS = D / 64, STAGES = 2, THREADS = 384;
    static constexpr int Q_BYTES = M * D * 2, KV_BYTES = N * D * 2, Q_PANEL = M * 128, KV_PANEL = N * 128;
    // Slack to align, q, do, STAGES of k, STAGES of v.
    static constexpr int DYNAMIC_BYTES = 1024 + 2 * Q_BYTES + 2 * STAGES * KV_BYTES;
    static_assert(D == 64 || D == 128, "S, dP and dq of 64 rows fit one warpgroup's registers up to 128 columns");
    static_assert(DYNAMIC_BYTES + 12 * 1024 <= 227 * 1024, "tiles and the static schedule fit one Hopper CTA");
};

// Maps: q, dout {D, hq, slots} box {64, group, 128/group}; k, v {D, hk, T} box {64, 1, 128}; own {D, hk, slots} box {64, 1, 64}.
template <int D>
__device__ __forceinline__ void block_dq_wgmma(const BlockRows &rows, const TensorMap *map_q, const TensorMap *map_dout,
                                               const TensorMap *map_k, const TensorMap *map_v, const TensorMap *map_own_k,
                                               const TensorMap *map_own_v, const float *lse, const float *delta, bf16 *dq, int slots,
                                               int hq, int hk) {
    using T = DqTiles<D>;
    __shared__ Schedule schedule;
    __shared__ DqNote note;
    __shared__ __align__(8) uint64_t barriers[2 + 4 * T::STAGES];

    const uint32_t base = (ptx::smem_address(dynamic_shared) + 1023) & ~1023u;
    const uint32_t q_at = base, dout_at = q_at + T::Q_BYTES, k_at = dout_at + T::Q_BYTES, v_at = k_at + T::STAGES * T::KV_BYTES;
    const uint32_t q_full = ptx::smem_address(barriers), q_empty = q_full + 8;
    const uint32_t k_full = q_full + 16, k_empty = k_full + 8 * T::STAGES, v_full = k_empty + 8 * T::STAGES,
                   v_empty = v_full + 8 * T::STAGES;

    const int group = hq / hk, per_tile = T::M / group;
    const int tiles = (slots + per_tile - 1) / per_tile, items = tiles * hk;
    const Interval real = rows.real();
    const int warpgroup = threadIdx.x / 128;

    if (threadIdx.x == 0) {
        constexpr int COMPUTE_WARPS = 8;
        ptx::mbarrier_init(q_full, 1);
        ptx::mbarrier_init(q_empty, COMPUTE_WARPS);
        for (int s = 0; s < T::STAGES; ++s) {
            ptx::mbarrier_init(k_full + 8 * s, 1);
            ptx::mbarrier_init(v_full + 8 * s, 1);
            ptx::mbarrier_init(k_empty + 8 * s, COMPUTE_WARPS);
            ptx::mbarrier_init(v_empty + 8 * s, COMPUTE_WARPS);
        }
        ptx::mbarrier_init_fence();
    }
    schedule.build(tiles, 2 * slots / T::N + 2 * T::M, T::THREADS, [&](int tile) {
        const Interval in = clip_tile(real, tile * per_tile, per_tile);
        if (in.hi <= in.lo) return 0;
        const Interval keys = rows.tile_keys(in.lo, in.hi, 0);
        return (keys.hi - keys.lo) / T::N + 1;
    });
    __syncthreads();  // barriers are initialised before anyone waits on or arrives at them

    if (warpgroup == 0) {
        ptx::fewer_registers<24>();
        if (threadIdx.x != 0) return;
        int fed = 0, turn = 0;
        for (int round = 0; round * gridDim.x < items; ++round) {
            const int item = item_of_round(round, items);
            if (item < 0) continue;
            const int head = item % hk, first = schedule.tile(item / hk, tiles) * per_tile;
            const Interval in = clip_tile(real, first, per_tile);
            DqNote next = {0, 0, 0, 0};
            if (in.hi > in.lo) {
                const Interval keys = rows.tile_keys(in.lo, in.hi, 0), own = rows.tile_own(in.lo, in.hi);
                next.own_end = own.hi;
                next.own_tiles = (own.hi - own.lo + T::OWN_N - 1) / T::OWN_N;
                next.ctx_end = keys.hi;
                next.ctx_tiles = max(0, (keys.hi - keys.lo + T::N - 1) / T::N);
            }
            ptx::mbarrier_wait(q_empty, turn & 1 ^ 1);  // stops replacing the note, q and do while they are read
            note = next;
            if (in.hi > in.lo) {
                ptx::mbarrier_arrive_expect(q_full, 2 * T::PANELS * per_tile * group * 128);
                for (int p = 0; p < T::PANELS; ++p) {
                    ptx::tma_load_3d(q_at + p * T::Q_PANEL, map_q, q_full, 64 * p, head * group, first);
                    ptx::tma_load_3d(dout_at + p * T::Q_PANEL, map_dout, q_full, 64 * p, head * group, first);
                }
            } else {
                ptx::mbarrier_arrive(q_full);
            }
            ++turn;
            for (int t = 0; t < next.own_tiles + next.ctx_tiles; ++t, ++fed) {
                const bool own = t < next.own_tiles;
                const int row = own ? next.own_end - (t + 1) * T::OWN_N : next.ctx_end - (t - next.own_tiles + 1) * T::N;
                const int stage = fed % T::STAGES, bytes = (own ? T::OWN_N : T::N) * D * 2;
                const uint32_t parity = fed / T::STAGES & 1 ^ 1;
                ptx::mbarrier_wait(k_empty + 8 * stage, parity);  // stops overwriting keys that a product still reads
                ptx::mbarrier_arrive_expect(k_full + 8 * stage, bytes);
                for (int p = 0; p < T::PANELS; ++p)
                    ptx::tma_load_3d(k_at + stage * T::KV_BYTES + p * T::KV_PANEL, own ? map_own_k : map_k, k_full + 8 * stage, 64 * p,
                                     head, row);
                ptx::mbarrier_wait(v_empty + 8 * stage, parity);  // likewise for values
                ptx::mbarrier_arrive_expect(v_full + 8 * stage, bytes);
                for (int p = 0; p < T::PANELS; ++p)
                    ptx::tma_load_3d(v_at + stage * T::KV_BYTES + p * T::KV_PANEL, own ? map_own_v : map_v, v_full + 8 * stage, 64 * p,
                                     head, row);
            }
        }
        return;
    }

    ptx::more_registers<240>();
    const int computing = warpgroup - 1, thread = threadIdx.x % 128, lane = thread % 32, quad = lane / 4, pair = lane % 4;
    const int row0 = 64 * computing + thread / 32 * 16 + quad;

    const uint64_t q_desc = ptx::matrix_descriptor(q_at + 64 * 128 * computing, 0);
    const uint64_t dout_desc = ptx::matrix_descriptor(dout_at + 64 * 128 * computing, 0);
    const uint64_t k_desc = ptx::matrix_descriptor(k_at, T::KV_PANEL), v_desc = ptx::matrix_descriptor(v_at, T::KV_PANEL);

    float acc[D / 2];
    int used = 0, turn = 0;
    for (int round = 0; round * gridDim.x < items; ++round) {
        const int item = item_of_round(round, items);
        if (item < 0) continue;
        const int head = item % hk, first = schedule.tile(item / hk, tiles) * per_tile;
        int slot[2];
#pragma unroll
        for (int r = 0; r < 2; ++r) slot[r] = row0 + 8 * r < per_tile * group ? first + (row0 + 8 * r) / group : slots;  // `slots`: no row
        auto is_real = [&](int r) { return slot[r] < real.hi; };
        auto row_at = [&](int r) { return static_cast<int64_t>(slot[r]) * hq + head * group + (row0 + 8 * r) % group; };
        BlockRows::Loaded loaded[2] = {};
        float row_lse[2], row_delta[2];
        // These loads are under way before the wait, so that their latency hides behind it.
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            if (is_real(r)) loaded[r] = rows.load(slot[r], 0);
            row_lse[r] = is_real(r) ? lse[row_at(r)] : INFINITY;  // +inf makes every probability 0
            row_delta[r] = is_real(r) ? delta[row_at(r)] : 0.0f;
        }
        ptx::mbarrier_wait(q_full, turn & 1);  // the note, q and do have arrived
        ++turn;
        const DqNote now = note;

        Interval keys[2];
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            keys[r] = is_real(r) ? rows.keys(slot[r], loaded[r]) : Interval{0, 0};
            row_lse[r] *= LOG2_E;
        }
#pragma unroll
        for (int i = 0; i < D / 2; ++i) acc[i] = 0.0f;

        // scores -> P in place, then P and dP -> dS in place.
        auto probabilities = [&](auto &s) {
            constexpr int COUNT = sizeof(s) / sizeof(float);
#pragma unroll
            for (int i = 0; i < COUNT; ++i) s[i] = ptx::ex2(fmaf(s[i], AttentionScale<D>::LOG2, -row_lse[i % 4 / 2]));
        };
        auto score_gradients = [&](auto &s, const auto &dp) {
            constexpr int COUNT = sizeof(s) / sizeof(float);
#pragma unroll
            for (int i = 0; i < COUNT; ++i) s[i] *= dp[i] - row_delta[i % 4 / 2];
        };

        for (int t = 0; t < now.own_tiles; ++t, ++used) {
            const int stage = used % T::STAGES;
            const uint32_t parity = used / T::STAGES & 1;
            float s[T::OWN_N / 2], dp[T::OWN_N / 2];
            uint32_t ds[T::OWN_N / 16][4];
            ptx::mbarrier_wait(k_full + 8 * stage, parity);
            ptx::mbarrier_wait(v_full + 8 * stage, parity);
            ptx::wgmma_hold(s);
            ptx::wgmma_hold(dp);
            ptx::wgmma_fence();
#pragma unroll
            for (int k = 0; k < D / 16; ++k)
                ptx::wgmma_ss<0>(s, q_desc + (k / 4 * T::Q_PANEL + k % 4 * 32 >> 4),
                                 k_desc + (stage * T::KV_BYTES + k / 4 * T::KV_PANEL + k % 4 * 32 >> 4), k > 0);
#pragma unroll
            for (int k = 0; k < D / 16; ++k)
                ptx::wgmma_ss<0>(dp, dout_desc + (k / 4 * T::Q_PANEL + k % 4 * 32 >> 4),
                                 v_desc + (stage * T::KV_BYTES + k / 4 * T::KV_PANEL + k % 4 * 32 >> 4), k > 0);
            ptx::wgmma_commit();
            ptx::wgmma_wait<0>();
            ptx::wgmma_hold(s);
            ptx::wgmma_hold(dp);
            if (lane == 0) ptx::mbarrier_arrive(v_empty + 8 * stage);
            Interval own[2];
#pragma unroll
            for (int r = 0; r < 2; ++r)
                own[r] = is_real(r) ? rows.own(slot[r]) : Interval{0, 0};
            mask_scores(s, now.own_end - (t + 1) * T::OWN_N + 2 * pair, own[0], own[1]);
            probabilities(s);
            score_gradients(s, dp);
#pragma unroll
            for (int k = 0; k < T::OWN_N / 16; ++k) pack_strip(ds[k], s, k);
            ptx::wgmma_hold(ds);
            ptx::wgmma_hold(acc);
            ptx::wgmma_fence();
#pragma unroll
            for (int k = 0; k < T::OWN_N / 16; ++k)
                ptx::wgmma_rs<1>(acc, ds[k], k_desc + (stage * T::KV_BYTES + k * 2048 >> 4), 1);
            ptx::wgmma_commit();
            ptx::wgmma_wait<0>();
            ptx::wgmma_hold(acc);
            if (lane == 0) ptx::mbarrier_arrive(k_empty + 8 * stage);
        }

        if (now.ctx_tiles > 0) {
            int all_lo = max(keys[0].lo, keys[1].lo), all_hi = min(keys[0].hi, keys[1].hi);
#pragma unroll
            for (int step = 4; step < 32; step *= 2) {
                all_lo = max(all_lo, __shfl_xor_sync(0xffffffffu, all_lo, step));
                all_hi = min(all_hi, __shfl_xor_sync(0xffffffffu, all_hi, step));
            }
            float s[T::N / 2], dp[T::N / 2];
            uint32_t ds[T::N / 16][4];
            for (int t = 0; t < now.ctx_tiles; ++t, ++used) {
                const int stage = used % T::STAGES;
                const uint32_t parity = used / T::STAGES & 1;
                ptx::mbarrier_wait(k_full + 8 * stage, parity);
                ptx::wgmma_hold(s);
                ptx::wgmma_fence();
#pragma unroll
                for (int k = 0; k < D / 16; ++k)
                    ptx::wgmma_ss<0>(s, q_desc + (k / 4 * T::Q_PANEL + k % 4 * 32 >> 4),
                                     k_desc + (stage * T::KV_BYTES + k / 4 * T::KV_PANEL + k % 4 * 32 >> 4), k > 0);
                ptx::wgmma_commit();
                ptx::mbarrier_wait(v_full + 8 * stage, parity);
                ptx::wgmma_hold(dp);
                ptx::wgmma_fence();
#pragma unroll
                for (int k = 0; k < D / 16; ++k)
                    ptx::wgmma_ss<0>(dp, dout_desc + (k / 4 * T::Q_PANEL + k % 4 * 32 >> 4),
                                     v_desc + (stage * T::KV_BYTES + k / 4 * T::KV_PANEL + k % 4 * 32 >> 4), k > 0);
                ptx::wgmma_commit();
                ptx::wgmma_wait<1>();
                ptx::wgmma_hold(s);
                const int lo = now.ctx_end - (t + 1) * T::N;
                if (lo < all_lo || lo + T::N > all_hi) mask_scores(s, lo + 2 * pair, keys[0], keys[1]);
                probabilities(s);
                ptx::wgmma_wait<0>();
                ptx::wgmma_hold(dp);
                if (lane == 0) {
                    ptx::mbarrier_arrive(v_empty + 8 * stage);
                    if (t + 1 == now.ctx_tiles) ptx::mbarrier_arrive(q_empty);  // q, do and the note may be replaced
                }
                score_gradients(s, dp);
#pragma unroll
                for (int k = 0; k < T::N / 16; ++k) pack_strip(ds[k], s, k);
                ptx::wgmma_hold(ds);
                ptx::wgmma_hold(acc);
                ptx::wgmma_fence();
#pragma unroll
                for (int k = 0; k < T::N / 16; ++k)
                    ptx::wgmma_rs<1>(acc, ds[k], k_desc + (stage * T::KV_BYTES + k * 2048 >> 4), 1);
                ptx::wgmma_commit();
                ptx::wgmma_wait<0>();
                ptx::wgmma_hold(acc);
                if (lane == 0) ptx::mbarrier_arrive(k_empty + 8 * stage);
            }
        } else {
            __syncwarp();  // every lane has read the note before lane 0 gives it up
            if (lane == 0) ptx::mbarrier_arrive(q_empty);
        }

#pragma unroll
        for (int r = 0; r < 2; ++r) {
            if (!is_real(r)) {
#pragma unroll
                for (int i = 2 * r; i < D / 2; i += 4) acc[i] = acc[i + 1] = 0.0f;
            }
            store_row(slot[r] < slots ? dq + row_at(r) * D : nullptr, acc, r, AttentionScale<D>::VALUE);
        }
    }
}

// ---- dk_ctx, dv_ctx --------------------------------------------------------------------------------------------------------------

template <int D>
struct DkvTiles {
    static constexpr int KEYS = 128, ROWS = 64, PANELS = D / 64, STAGES = 4, THREADS = 384;
    static constexpr int KV_BYTES = KEYS * D * 2, KV_PANEL = KEYS * 128;
    static constexpr int Q_BYTES = ROWS * D * 2, Q_PANEL = ROWS * 128;
    // Slack to align, k, v, STAGES of q, STAGES of do.
    static constexpr int DYNAMIC_BYTES = 1024 + 2 * KV_BYTES + 2 * STAGES * Q_BYTES;
    static_assert(D == 64 || D == 128, "dk and dv of 64 keys fit one warpgroup's registers up to 128 columns");
    static_assert(DYNAMIC_BYTES + 16 * 1024 <= 227 * 1024, "tiles, row notes and the static schedule fit one Hopper CTA");
};

// What a tile of query rows needs beside q and do; row r is head r % group of slot first + r / group.
struct alignas(8) RowNotes {
    float lse_log2[64];  // +inf for rows that do not count
    float delta[64];
    int lo[64], hi[64];  // context rows that the row sees
    int ragged;          // some row does not see the whole key tile
};

// Maps: k, v {D, hk, T} box {64, 1, 128}; q, dout {D, hq, slots} box {64, group, 64/group}.
template <int D>
__device__ __forceinline__ void block_dkv_wgmma(const BlockRows &rows, const TensorMap *map_q, const TensorMap *map_dout,
                                                const TensorMap *map_k, const TensorMap *map_v, const float *lse, const float *delta,
                                                float *dk, float *dv, int context, int hq, int hk) {
    using T = DkvTiles<D>;
    __shared__ Schedule schedule;
    __shared__ RowNotes notes[T::STAGES];
    __shared__ int row_tiles_note;
    __shared__ __align__(8) uint64_t barriers[2 + 2 * T::STAGES];

    const uint32_t base = (ptx::smem_address(dynamic_shared) + 1023) & ~1023u;
    const uint32_t k_at = base, v_at = k_at + T::KV_BYTES, q_at = v_at + T::KV_BYTES, dout_at = q_at + T::STAGES * T::Q_BYTES;
    const uint32_t kv_full = ptx::smem_address(barriers), kv_empty = kv_full + 8, q_full = kv_full + 16, q_empty = q_full + 8 * T::STAGES;

    const int group = hq / hk, per_tile = T::ROWS / group;
    const int tiles = (context + T::KEYS - 1) / T::KEYS, items = tiles * hk;
    const int warpgroup = threadIdx.x / 128, lane = threadIdx.x % 32;

    if (threadIdx.x == 0) {
        constexpr int COMPUTE_WARPS = 8;
        ptx::mbarrier_init(kv_full, 1);
        ptx::mbarrier_init(kv_empty, COMPUTE_WARPS);
        for (int s = 0; s < T::STAGES; ++s) {
            ptx::mbarrier_init(q_full + 8 * s, 1);
            ptx::mbarrier_init(q_empty + 8 * s, COMPUTE_WARPS);
        }
        ptx::mbarrier_init_fence();
    }
    // Rows that no copy fills (group does not divide 64) take part in sums over rows: they must hold finite numbers.
    uint8_t *aligned = dynamic_shared + (base - ptx::smem_address(dynamic_shared));
    for (int i = threadIdx.x; i < 2 * T::STAGES * T::Q_BYTES / 16; i += T::THREADS)
        reinterpret_cast<uint4 *>(aligned + 2 * T::KV_BYTES)[i] = make_uint4(0, 0, 0, 0);
    ptx::fence_async_proxy();
    schedule.build(tiles, rows.blocks, T::THREADS, [&](int tile) {
        const Interval seen = rows.blocks_that_see(tile * T::KEYS, tile * T::KEYS + T::KEYS);
        return max(0, seen.hi - seen.lo);
    });
    __syncthreads();  // barriers are initialised and rows zeroed before anyone waits or copies

    if (warpgroup == 0) {
        ptx::fewer_registers<24>();
        if (threadIdx.x >= 32) return;
        int fed = 0, turn = 0;
        for (int round = 0; round * gridDim.x < items; ++round) {
            const int item = item_of_round(round, items);
            if (item < 0) continue;
            const int head = item % hk, j0 = schedule.tile(item / hk, tiles) * T::KEYS;
            const Interval seen = rows.blocks_that_see(j0, j0 + T::KEYS);
            const int first_slot = seen.lo * rows.size, end_slot = seen.hi * rows.size;
            const int row_tiles = max(0, (end_slot - first_slot + per_tile - 1) / per_tile);
            ptx::mbarrier_wait(kv_empty, turn & 1 ^ 1);  // stops replacing k, v and the count while they are read
            ++turn;
            if (lane == 0) {
                row_tiles_note = row_tiles;
                if (row_tiles > 0) {
                    ptx::mbarrier_arrive_expect(kv_full, 2 * T::KV_BYTES);
                    for (int p = 0; p < T::PANELS; ++p) {
                        ptx::tma_load_3d(k_at + p * T::KV_PANEL, map_k, kv_full, 64 * p, head, j0);
                        ptx::tma_load_3d(v_at + p * T::KV_PANEL, map_v, kv_full, 64 * p, head, j0);
                    }
                } else {
                    ptx::mbarrier_arrive(kv_full);
                }
            }
            for (int t = 0; t < row_tiles; ++t, ++fed) {
                const int stage = fed % T::STAGES, first = end_slot - (t + 1) * per_tile;
                float row_lse[2], row_delta[2];
                Interval keys[2];
                bool ragged = false;
                // These loads are under way before the wait, so that their latency hides behind it.
#pragma unroll
                for (int r = 0; r < 2; ++r) {
                    const int row = lane + 32 * r, slot = first + row / group;
                    const bool counts = row < per_tile * group && slot >= first_slot;
                    const int64_t at = static_cast<int64_t>(slot) * hq + head * group + row % group;
                    row_lse[r] = counts ? lse[at] * LOG2_E : INFINITY;
                    row_delta[r] = counts ? delta[at] : 0.0f;
                    keys[r] = counts ? rows.keys(slot, 0) : Interval{0, 0};
                    ragged |= counts && (keys[r].lo > j0 || keys[r].hi < j0 + T::KEYS);
                }
                ragged = __any_sync(0xffffffffu, ragged);
                ptx::mbarrier_wait(q_empty + 8 * stage, fed / T::STAGES & 1 ^ 1);  // stops replacing rows that products still read
                RowNotes &to = notes[stage];
#pragma unroll
                for (int r = 0; r < 2; ++r) {
                    const int row = lane + 32 * r;
                    to.lse_log2[row] = row_lse[r];
                    to.delta[row] = row_delta[r];
                    to.lo[row] = keys[r].lo;
                    to.hi[row] = keys[r].hi;
                }
                if (lane == 0) to.ragged = ragged;
                __syncwarp();  // all lanes' notes come before lane 0's arrival
                if (lane == 0) {
                    ptx::mbarrier_arrive_expect(q_full + 8 * stage, 2 * T::PANELS * per_tile * group * 128);
                    for (int p = 0; p < T::PANELS; ++p) {
                        ptx::tma_load_3d(q_at + stage * T::Q_BYTES + p * T::Q_PANEL, map_q, q_full + 8 * stage, 64 * p, head * group, first);
                        ptx::tma_load_3d(dout_at + stage * T::Q_BYTES + p * T::Q_PANEL, map_dout, q_full + 8 * stage, 64 * p, head * group,
                                         first);
                    }
                }
            }
        }
        return;
    }

    ptx::more_registers<240>();
    const int computing = warpgroup - 1, warp = threadIdx.x % 128 / 32, quad = lane / 4, pair = lane % 4;
    const int key0 = 64 * computing + warp * 16 + quad;  // the thread's keys of the tile: key0 and key0 + 8

    const uint64_t k_desc = ptx::matrix_descriptor(k_at + 64 * 128 * computing, 0);
    const uint64_t v_desc = ptx::matrix_descriptor(v_at + 64 * 128 * computing, 0);
    const uint64_t q_desc = ptx::matrix_descriptor(q_at, T::Q_PANEL), dout_desc = ptx::matrix_descriptor(dout_at, T::Q_PANEL);

    float acc_k[D / 2], acc_v[D / 2];
    int used = 0, turn = 0;
    for (int round = 0; round * gridDim.x < items; ++round) {
        const int item = item_of_round(round, items);
        if (item < 0) continue;
        const int head = item % hk, j0 = schedule.tile(item / hk, tiles) * T::KEYS;
        ptx::mbarrier_wait(kv_full, turn & 1);  // k, v and the count have arrived
        ++turn;
        const int row_tiles = row_tiles_note;
        if (row_tiles == 0) {
            __syncwarp();  // every lane has read the count before lane 0 gives it up
            if (lane == 0) ptx::mbarrier_arrive(kv_empty);
            continue;
        }
#pragma unroll
        for (int i = 0; i < D / 2; ++i) acc_k[i] = acc_v[i] = 0.0f;

        float s[T::ROWS / 2], dp[T::ROWS / 2];
        uint32_t p[T::ROWS / 16][4], ds[T::ROWS / 16][4];
        int last_stage = 0;
        for (int t = 0; t < row_tiles; ++t, ++used) {
            const int stage = used % T::STAGES;
            ptx::mbarrier_wait(q_full + 8 * stage, used / T::STAGES & 1);
            const RowNotes &row = notes[stage];
            ptx::wgmma_hold(s);
            ptx::wgmma_fence();
#pragma unroll
            for (int k = 0; k < D / 16; ++k)
                ptx::wgmma_ss<0>(s, k_desc + (k / 4 * T::KV_PANEL + k % 4 * 32 >> 4),
                                 q_desc + (stage * T::Q_BYTES + k / 4 * T::Q_PANEL + k % 4 * 32 >> 4), k > 0);
            ptx::wgmma_commit();
            ptx::wgmma_wait<1>();  // dv and dk products of the tile before have retired: their registers and rows are free
            ptx::wgmma_hold(acc_k);
            ptx::wgmma_hold(acc_v);
            if (t > 0 && lane == 0) ptx::mbarrier_arrive(q_empty + 8 * last_stage);
            ptx::wgmma_hold(dp);
            ptx::wgmma_fence();
#pragma unroll
            for (int k = 0; k < D / 16; ++k)
                ptx::wgmma_ss<0>(dp, v_desc + (k / 4 * T::KV_PANEL + k % 4 * 32 >> 4),
                                 dout_desc + (stage * T::Q_BYTES + k / 4 * T::Q_PANEL + k % 4 * 32 >> 4), k > 0);
            ptx::wgmma_commit();
            ptx::wgmma_wait<1>();
            ptx::wgmma_hold(s);
#pragma unroll
            for (int c = 0; c < T::ROWS / 8; ++c) {
                const float2 l = *reinterpret_cast<const float2 *>(&row.lse_log2[8 * c + 2 * pair]);
                s[4 * c] = ptx::ex2(fmaf(s[4 * c], AttentionScale<D>::LOG2, -l.x));
                s[4 * c + 1] = ptx::ex2(fmaf(s[4 * c + 1], AttentionScale<D>::LOG2, -l.y));
                s[4 * c + 2] = ptx::ex2(fmaf(s[4 * c + 2], AttentionScale<D>::LOG2, -l.x));
                s[4 * c + 3] = ptx::ex2(fmaf(s[4 * c + 3], AttentionScale<D>::LOG2, -l.y));
            }
            const bool ragged = row.ragged;
            auto sees = [&](int i) {
                const int column = i / 4 * 8 + 2 * pair + i % 2, key = j0 + key0 + i % 4 / 2 * 8;
                return key >= row.lo[column] && key < row.hi[column];
            };
            if (ragged) {
#pragma unroll
                for (int i = 0; i < T::ROWS / 2; ++i) s[i] = sees(i) ? s[i] : 0.0f;
            }
#pragma unroll
            for (int k = 0; k < T::ROWS / 16; ++k) pack_strip(p[k], s, k);
            ptx::wgmma_wait<0>();
            ptx::wgmma_hold(dp);
#pragma unroll
            for (int c = 0; c < T::ROWS / 8; ++c) {
                const float2 d = *reinterpret_cast<const float2 *>(&row.delta[8 * c + 2 * pair]);
                s[4 * c] *= dp[4 * c] - d.x;
                s[4 * c + 1] *= dp[4 * c + 1] - d.y;
                s[4 * c + 2] *= dp[4 * c + 2] - d.x;
                s[4 * c + 3] *= dp[4 * c + 3] - d.y;
            }
            if (ragged) {
                // A key behind its sample may hold anything: 0 * NaN must not reach dk.
#pragma unroll
                for (int i = 0; i < T::ROWS / 2; ++i) s[i] = sees(i) ? s[i] : 0.0f;
            }
#pragma unroll
            for (int k = 0; k < T::ROWS / 16; ++k) pack_strip(ds[k], s, k);
            ptx::wgmma_hold(p);
            ptx::wgmma_hold(ds);
            ptx::wgmma_hold(acc_v);
            ptx::wgmma_hold(acc_k);
            ptx::wgmma_fence();
#pragma unroll
            for (int k = 0; k < T::ROWS / 16; ++k)
                ptx::wgmma_rs<1>(acc_v, p[k], dout_desc + (stage * T::Q_BYTES + k * 2048 >> 4), 1);
#pragma unroll
            for (int k = 0; k < T::ROWS / 16; ++k)
                ptx::wgmma_rs<1>(acc_k, ds[k], q_desc + (stage * T::Q_BYTES + k * 2048 >> 4), 1);
            ptx::wgmma_commit();
            last_stage = stage;
        }
        ptx::wgmma_wait<0>();
        ptx::wgmma_hold(acc_k);
        ptx::wgmma_hold(acc_v);
        if (lane == 0) {
            ptx::mbarrier_arrive(q_empty + 8 * last_stage);
            ptx::mbarrier_arrive(kv_empty);  // k, v and the count are no longer read
        }
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int key = j0 + key0 + 8 * r;
            if (key < context) {
                const int64_t at = (static_cast<int64_t>(key) * hk + head) * D + 2 * pair;
                add_row(dk + at, acc_k, r, AttentionScale<D>::VALUE);
                add_row(dv + at, acc_v, r, 1.0f);
            }
        }
    }
}

#endif  // HOPPER_KERNELS
