// The attention forward on Hopper: persistent CTAs, copy engine, wgmma. Used by block and causal attention.
//
// 384 threads: warpgroup 0 only feeds (one thread issues every copy), warpgroups 1 and 2 compute 64 rows each of a 128-row tile
// (floor(128 / group) slots of one key head). Keys stream in tiles of N through STAGES buffers. Scores of tile t+1 are computed
// while the probabilities of tile t multiply V, and the two warpgroups take turns at issuing, so that one's exponentials run under the
// other's products. Context tiles are laid from the end of the tile's interval backwards: no row beyond it is ever read, so that
// unwritten rows behind a batch cannot reach a sum; rows before it are other samples' and masked, and negative rows read as zero.
// Tensor maps (all bf16, 128-byte swizzle, 3 dimensions, zero fill): q {D, hq, slots} box {64, group, 128/group};
// k, v {D, hk, rows} box {64, 1, N}; own k, v the same with box {64, 1, 64}.
#pragma once

#include "fragments.cuh"
#include "schedule.cuh"

#if defined(HOPPER_KERNELS)

// What the feeding thread tells the computing ones about a tile.
struct TileNote {
    int hint;
    int own_tiles, own_end;   // tile t covers block rows own_end - 64(t+1) .. own_end - 64t
    int ctx_tiles, ctx_end;   // tile t covers keys ctx_end - (t+1)N .. ctx_end - tN
    int real_lo, real_hi;     // real slots of the tile
};

template <int D, int N, int STAGES>
struct ForwardTiles {
    static constexpr int M = 128, OWN_N = 64, PANELS = D / 64;
    static constexpr int Q_BYTES = M * D * 2, KV_BYTES = N * D * 2;
    static constexpr int KV_PANEL = N * 128, Q_PANEL = M * 128;
    static constexpr int THREADS = 384;
    // Dynamic shared memory: 1,024 bytes of slack to align, q, STAGES of k, STAGES of v.
    static constexpr int DYNAMIC_BYTES = 1024 + Q_BYTES + 2 * STAGES * KV_BYTES;
    static_assert(D % 64 == 0, "a panel is 64 columns: 128 bytes, the swizzle's row");
    static_assert(N % 16 == 0 && N >= OWN_N, "probabilities feed the next product 16 keys at a time, and an own tile fits a stage");
    static_assert(DYNAMIC_BYTES + 12 * 1024 <= 227 * 1024, "tiles and the static schedule fit one Hopper CTA");
};

template <int D, int N, int STAGES, class Rows>
__device__ __forceinline__ void forward_wgmma(const Rows &rows, const TensorMap *map_q, const TensorMap *map_k, const TensorMap *map_v,
                                              const TensorMap *map_own_k, const TensorMap *map_own_v, bf16 *out, float *lse,
                                              int slots, int hq, int hk) {
    using T = ForwardTiles<D, N, STAGES>;
    __shared__ Schedule schedule;
    __shared__ TileNote note;
    __shared__ __align__(8) uint64_t barriers[2 + 4 * STAGES];

    const uint32_t base = (ptx::smem_address(dynamic_shared) + 1023) & ~1023u;
    const uint32_t q_at = base, k_at = q_at + T::Q_BYTES, v_at = k_at + STAGES * T::KV_BYTES;
    const uint32_t q_full = ptx::smem_address(barriers), q_empty = q_full + 8;
    const uint32_t k_full = q_full + 16, k_empty = k_full + 8 * STAGES, v_full = k_empty + 8 * STAGES, v_empty = v_full + 8 * STAGES;

    const int group = hq / hk, per_tile = T::M / group;
    const int tiles = (slots + per_tile - 1) / per_tile, items = tiles * hk;
    const Interval real = rows.real();
    const int warpgroup = threadIdx.x / 128;

    if (threadIdx.x == 0) {
        constexpr int COMPUTE_WARPS = 8;
        ptx::mbarrier_init(q_full, 1);
        ptx::mbarrier_init(q_empty, COMPUTE_WARPS);
        for (int s = 0; s < STAGES; ++s) {
            ptx::mbarrier_init(k_full + 8 * s, 1);
            ptx::mbarrier_init(v_full + 8 * s, 1);
            ptx::mbarrier_init(k_empty + 8 * s, COMPUTE_WARPS);
            ptx::mbarrier_init(v_empty + 8 * s, COMPUTE_WARPS);
        }
        ptx::mbarrier_init_fence();
    }
    schedule.build(tiles, slots / N + 2 * T::M, T::THREADS, [&](int tile) {
        const Interval in = clip_tile(real, tile * per_tile, per_tile);
        if (in.hi <= in.lo) return 0;
        const Interval keys = rows.tile_keys(in.lo, in.hi, rows.hint(in.lo));
        return (keys.hi - keys.lo) / N + 1;
    });
    __syncthreads();  // barriers are initialised before anyone waits on or arrives at them

    if (warpgroup == 0) {
        ptx::fewer_registers<24>();
        if (threadIdx.x != 0) return;
        int fed = 0, turn = 0;  // key tiles and query tiles fed so far: they give stage and parity
        for (int round = 0; round * gridDim.x < items; ++round) {
            const int item = item_of_round(round, items);
            if (item < 0) continue;
            const int head = item % hk, first = schedule.tile(item / hk, tiles) * per_tile;
            const Interval in = clip_tile(real, first, per_tile);
            TileNote next = {0, 0, 0, 0, 0, in.lo, in.hi};
            if (in.hi > in.lo) {
                next.hint = rows.hint(in.lo);
                const Interval keys = rows.tile_keys(in.lo, in.hi, next.hint), own = rows.tile_own(in.lo, in.hi);
                next.own_end = own.hi;
                next.own_tiles = (own.hi - own.lo + T::OWN_N - 1) / T::OWN_N;
                next.ctx_end = keys.hi;
                next.ctx_tiles = max(0, (keys.hi - keys.lo + N - 1) / N);
            }
            // The note and q of the tile before are no longer read once all computing warps have arrived here.
            ptx::mbarrier_wait(q_empty, turn & 1 ^ 1);
            note = next;
            if (in.hi > in.lo) {
                ptx::mbarrier_arrive_expect(q_full, T::PANELS * per_tile * group * 128);
                for (int p = 0; p < T::PANELS; ++p)
                    ptx::tma_load_3d(q_at + p * T::Q_PANEL, map_q, q_full, 64 * p, head * group, first);
            } else {
                ptx::mbarrier_arrive(q_full);
            }
            ++turn;
            for (int t = 0; t < next.own_tiles + next.ctx_tiles; ++t, ++fed) {
                const bool own = t < next.own_tiles;
                const int row = own ? next.own_end - (t + 1) * T::OWN_N : next.ctx_end - (t - next.own_tiles + 1) * N;
                const int stage = fed % STAGES, bytes = (own ? T::OWN_N : N) * D * 2;
                const uint32_t parity = fed / STAGES & 1 ^ 1;
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
    const int row0 = 64 * computing + thread / 32 * 16 + quad;  // the thread's rows of the tile: row0 and row0 + 8
    constexpr int TURN = 2;                                     // named barriers TURN and TURN + 1 pass the right to issue
    if (computing == 1) ptx::barrier_arrive(TURN, 256);         // warpgroup 1 lets warpgroup 0 begin

    const uint64_t q_desc = ptx::matrix_descriptor(q_at + 64 * 128 * computing, 0);
    const uint64_t k_desc = ptx::matrix_descriptor(k_at, 0), v_desc = ptx::matrix_descriptor(v_at, T::KV_PANEL);

    float o[D / 2];
    int used = 0, turn = 0;
    for (int round = 0; round * gridDim.x < items; ++round) {
        const int item = item_of_round(round, items);
        if (item < 0) continue;
        const int head = item % hk, first = schedule.tile(item / hk, tiles) * per_tile;
        ptx::mbarrier_wait(q_full, turn & 1);  // the note and q have arrived
        ++turn;
        const TileNote now = note;

        int slot[2];
        typename Rows::Loaded loaded[2];  // used only after the own tiles, so that their latency hides behind those
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int row = row0 + 8 * r;
            slot[r] = row < per_tile * group ? first + row / group : slots;  // `slots` marks a row that no tensor has
            if (now.real_hi > now.real_lo) loaded[r] = rows.load(min(max(slot[r], now.real_lo), now.real_hi - 1), now.hint);
        }
        auto is_real = [&](int r) { return slot[r] >= now.real_lo && slot[r] < now.real_hi; };
        SoftmaxState softmax;
        softmax.reset();
        float rescale[2];
#pragma unroll
        for (int i = 0; i < D / 2; ++i) o[i] = 0.0f;

        if constexpr (Rows::HAS_OWN) {
            for (int t = 0; t < now.own_tiles; ++t, ++used) {
                const int stage = used % STAGES;
                const uint32_t parity = used / STAGES & 1;
                float s[T::OWN_N / 2];
                uint32_t p[T::OWN_N / 16][4];
                ptx::mbarrier_wait(k_full + 8 * stage, parity);
                ptx::wgmma_hold(s);
                ptx::wgmma_fence();
#pragma unroll
                for (int k = 0; k < D / 16; ++k)
                    ptx::wgmma_ss<0>(s, q_desc + (k / 4 * T::Q_PANEL + k % 4 * 32 >> 4),
                                     k_desc + (stage * T::KV_BYTES + k / 4 * T::KV_PANEL + k % 4 * 32 >> 4), k > 0);
                ptx::wgmma_commit();
                ptx::wgmma_wait<0>();
                ptx::wgmma_hold(s);
                if (lane == 0) ptx::mbarrier_arrive(k_empty + 8 * stage);
                Interval own[2];
#pragma unroll
                for (int r = 0; r < 2; ++r)
                    own[r] = is_real(r) ? rows.own(slot[r]) : Interval{0, 0};
                mask_scores(s, now.own_end - (t + 1) * T::OWN_N + 2 * pair, own[0], own[1]);
                softmax.step(s, rescale, AttentionScale<D>::LOG2);
                scale_rows(o, rescale);
#pragma unroll
                for (int k = 0; k < T::OWN_N / 16; ++k) pack_strip(p[k], s, k);
                ptx::mbarrier_wait(v_full + 8 * stage, parity);
                ptx::wgmma_hold(o);
                ptx::wgmma_fence();
#pragma unroll
                for (int k = 0; k < T::OWN_N / 16; ++k)
                    ptx::wgmma_rs<1>(o, p[k], v_desc + (stage * T::KV_BYTES + k * 2048 >> 4), 1);
                ptx::wgmma_commit();
                ptx::wgmma_wait<0>();
                ptx::wgmma_hold(o);
                if (lane == 0) ptx::mbarrier_arrive(v_empty + 8 * stage);
            }
        }

        if (now.ctx_tiles > 0) {
            Interval keys[2];
#pragma unroll
            for (int r = 0; r < 2; ++r) keys[r] = is_real(r) ? rows.keys(slot[r], loaded[r]) : Interval{0, 0};
            // Keys that every row of the warp sees: tiles inside need no mask.
            int all_lo = max(keys[0].lo, keys[1].lo), all_hi = min(keys[0].hi, keys[1].hi);
#pragma unroll
            for (int step = 4; step < 32; step *= 2) {
                all_lo = max(all_lo, __shfl_xor_sync(0xffffffffu, all_lo, step));
                all_hi = min(all_hi, __shfl_xor_sync(0xffffffffu, all_hi, step));
            }
            float s[N / 2];
            uint32_t p[N / 16][4];
            auto scores = [&](int stage) {
                ptx::wgmma_hold(s);
                ptx::wgmma_fence();
#pragma unroll
                for (int k = 0; k < D / 16; ++k)
                    ptx::wgmma_ss<0>(s, q_desc + (k / 4 * T::Q_PANEL + k % 4 * 32 >> 4),
                                     k_desc + (stage * T::KV_BYTES + k / 4 * T::KV_PANEL + k % 4 * 32 >> 4), k > 0);
                ptx::wgmma_commit();
            };
            auto values = [&](int stage) {
                ptx::wgmma_hold(o);
                ptx::wgmma_fence();
#pragma unroll
                for (int k = 0; k < N / 16; ++k) ptx::wgmma_rs<1>(o, p[k], v_desc + (stage * T::KV_BYTES + k * 2048 >> 4), 1);
                ptx::wgmma_commit();
            };
            auto mask = [&](int t) {
                const int lo = now.ctx_end - (t + 1) * N;
                if (lo < all_lo || lo + N > all_hi) mask_scores(s, lo + 2 * pair, keys[0], keys[1]);
            };

            ptx::mbarrier_wait(k_full + 8 * (used % STAGES), used / STAGES & 1);
            scores(used % STAGES);
            ptx::wgmma_wait<0>();
            ptx::wgmma_hold(s);
            if (lane == 0) {
                ptx::mbarrier_arrive(k_empty + 8 * (used % STAGES));
                if (now.ctx_tiles == 1) ptx::mbarrier_arrive(q_empty);  // after the last scores q and the note may be replaced
            }
            mask(0);
            softmax.step(s, rescale, AttentionScale<D>::LOG2);
            scale_rows(o, rescale);
#pragma unroll
            for (int k = 0; k < N / 16; ++k) pack_strip(p[k], s, k);

            for (int t = 1; t < now.ctx_tiles; ++t) {
                const int v_stage = used % STAGES;
                const uint32_t v_parity = used / STAGES & 1;
                ++used;
                const int k_stage = used % STAGES;
                ptx::mbarrier_wait(k_full + 8 * k_stage, used / STAGES & 1);
                ptx::barrier_sync(TURN + computing, 256);  // waits until the other warpgroup has issued: products of one, softmax of the other
                scores(k_stage);
                ptx::mbarrier_wait(v_full + 8 * v_stage, v_parity);
                values(v_stage);
                ptx::barrier_arrive(TURN + 1 - computing, 256);  // the other warpgroup may issue
                ptx::wgmma_wait<1>();
                ptx::wgmma_hold(s);
                if (lane == 0) {
                    ptx::mbarrier_arrive(k_empty + 8 * k_stage);
                    if (t + 1 == now.ctx_tiles) ptx::mbarrier_arrive(q_empty);
                }
                mask(t);
                softmax.step(s, rescale, AttentionScale<D>::LOG2);
                ptx::wgmma_wait<0>();
                ptx::wgmma_hold(o);
                if (lane == 0) ptx::mbarrier_arrive(v_empty + 8 * v_stage);
                scale_rows(o, rescale);
#pragma unroll
                for (int k = 0; k < N / 16; ++k) pack_strip(p[k], s, k);
            }
            ptx::mbarrier_wait(v_full + 8 * (used % STAGES), used / STAGES & 1);
            values(used % STAGES);
            ptx::wgmma_wait<0>();
            ptx::wgmma_hold(o);
            if (lane == 0) ptx::mbarrier_arrive(v_empty + 8 * (used % STAGES));
            ++used;
        } else {
            __syncwarp();  // every lane has read the note before lane 0 gives it up
            if (lane == 0) ptx::mbarrier_arrive(q_empty);
        }

        softmax.finish();
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int row = row0 + 8 * r;
            const bool exists = slot[r] < slots, real_row = is_real(r);
            const int64_t at = static_cast<int64_t>(slot[r]) * hq + head * group + row % group;
            const float sum = softmax.sum[r];
            // Rows that are not real are written as zero whatever was computed for them.
            if (!real_row) {
#pragma unroll
                for (int i = 2 * r; i < D / 2; i += 4) o[i] = o[i + 1] = 0.0f;
            }
            store_row(exists ? out + at * D : nullptr, o, r, real_row ? 1.0f / sum : 0.0f);
            if (lse != nullptr && exists && pair == 0) lse[at] = real_row ? softmax.maximum[r] * AttentionScale<D>::VALUE + ptx::ln(sum) : 0.0f;
        }
    }
}

#endif  // HOPPER_KERNELS
