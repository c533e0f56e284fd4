// Heaviest-first order of a persistent kernel's work, computed by every CTA for itself.
//
// Work item i is tile order[i / heads] of head i % heads. CTA b of P takes one item of every round of P, from the left in even rounds
// and from the right in odd ones, so that with descending costs every CTA gets nearly the same sum. The order is a function of the
// index arrays alone: the same in every CTA and every run.
// Refuses: more than MAX_TILES tiles get no sorting, only the reversed natural order (long samples end heavy).
#pragma once

#include "ptx.cuh"

struct Schedule {
    static constexpr int MAX_TILES = 2048;
    static constexpr int BUCKETS = 512;
    uint16_t order[MAX_TILES];
    uint16_t bucket_of[MAX_TILES];
    int place[BUCKETS];

    // All `threads` threads of the CTA call. `cost(tile)` is in 0..max_cost.
    template <class Cost>
    __device__ void build(int tiles, int max_cost, int threads, Cost cost) {
        if (tiles > MAX_TILES) return;
        for (int i = threadIdx.x; i < BUCKETS; i += threads) place[i] = 0;
        __syncthreads();  // counters are zero before anyone counts
        const float to_bucket = (BUCKETS - 1) / fmaxf(1.0f, static_cast<float>(max_cost));
        for (int i = threadIdx.x; i < tiles; i += threads) {
            const int bucket = BUCKETS - 1 - min(BUCKETS - 1, static_cast<int>(cost(i) * to_bucket));
            bucket_of[i] = static_cast<uint16_t>(bucket);
            atomicAdd(&place[bucket], 1);  // integers: the order of additions does not matter
        }
        __syncthreads();  // counts are complete before the prefix sum reads them
        if (threadIdx.x < 32) {
            constexpr int PER_LANE = BUCKETS / 32;
            const int lane = threadIdx.x;
            int mine = 0;
            for (int i = 0; i < PER_LANE; ++i) mine += place[lane * PER_LANE + i];
            int before = mine;
            for (int step = 1; step < 32; step *= 2) {
                const int other = __shfl_up_sync(0xffffffffu, before, step);
                if (lane >= step) before += other;
            }
            before -= mine;
            for (int i = 0; i < PER_LANE; ++i) {
                const int count = place[lane * PER_LANE + i];
                place[lane * PER_LANE + i] = before;
                before += count;
            }
            __syncwarp();
            // Stable placement, 32 tiles at a time.
            for (int base = 0; base < tiles; base += 32) {
                const int tile = base + lane;
                const int bucket = tile < tiles ? bucket_of[tile] : BUCKETS + lane;
                const uint32_t same = __match_any_sync(0xffffffffu, bucket);
                const int rank = __popc(same & ((1u << lane) - 1));
                const int start = tile < tiles ? place[bucket] : 0;
                __syncwarp();  // every lane has read its bucket's place before the first lane of the bucket moves it
                if (tile < tiles) {
                    order[start + rank] = static_cast<uint16_t>(tile);
                    if (rank == 0) place[bucket] = start + __popc(same);
                }
                __syncwarp();  // the moved places are visible to the next 32 tiles
            }
        }
        __syncthreads();  // the order is complete before anyone takes work
    }

    __device__ int tile(int index, int tiles) const { return tiles > MAX_TILES ? tiles - 1 - index : order[index]; }
};

// The item of round `round`, or -1 when this CTA has none in it; rounds end when round * gridDim.x >= items.
__device__ __forceinline__ int item_of_round(int round, int items) {
    const int turn = round % 2 ? gridDim.x - 1 - blockIdx.x : blockIdx.x;
    const int item = round * gridDim.x + turn;
    return item < items ? item : -1;
}
