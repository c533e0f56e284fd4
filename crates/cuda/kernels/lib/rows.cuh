// Which keys a query row sees: the three kinds of attention as intervals.
//
// Every mask of this program is, for one query, an interval of context rows and (in a draft block) an interval of block rows.
// A "slot" is one token of q; its `group` query heads that share a key head are neighbouring rows of one tile, so a tile of M rows
// holds floor(M / group) slots in order: row m is head m % group of slot m / group.
// Refuses: values; only index arithmetic on the op's own index arrays.
// Invariant: intervals of a tile's rows lie inside the tile's interval; empty intervals have hi <= lo.
#pragma once

#include "ptx.cuh"

struct Interval {
    int lo, hi;  // lo <= key < hi
};

// Blocks of `size` slots; contract in op/block_attention.rs. `window` 0 means none.
struct BlockRows {
    static constexpr bool HAS_OWN = true;
    const int *ctx_start, *anchor;
    int blocks;  // real ones
    int size, window;

    __device__ BlockRows(const int *ctx_start, const int *anchor, const int *n_blocks, int max_blocks, int size, int window)
        : ctx_start(ctx_start), anchor(anchor), blocks(max(0, min(*n_blocks, max_blocks))), size(size), window(window) {}

    // Slots that are real.
    __device__ Interval real() const { return {0, blocks * size}; }
    __device__ int hint(int) const { return 0; }
    __device__ Interval keys_of(int block, int k) const {
        int lo = ctx_start[block], hi = lo + anchor[block];
        if (window > 0) lo = min(max(lo, hi + k - (window - 1)), hi);
        return {lo, hi};
    }
    __device__ Interval keys(int slot, int) const {
        int block = slot / size;
        return keys_of(block, slot - block * size);
    }
    // The same in two steps: what must be loaded, and what is made of it once it has arrived.
    struct Loaded {
        int start, anchor;
    };
    __device__ Loaded load(int slot, int) const { return {ctx_start[slot / size], anchor[slot / size]}; }
    __device__ Interval keys(int slot, Loaded from) const {
        int lo = from.start, hi = lo + from.anchor;
        if (window > 0) lo = min(max(lo, hi + slot % size - (window - 1)), hi);
        return {lo, hi};
    }
    // Rows of k_blk that a slot sees.
    __device__ Interval own(int slot) const {
        int first = slot / size * size;
        return {first, window > 0 ? slot + 1 : first + size};
    }
    // Bounds over real slots s0..s1-1. Both bounds ascend from block to block, and lo within a block, so the ends suffice.
    __device__ Interval tile_keys(int s0, int s1, int) const {
        return {keys_of(s0 / size, 0).lo, keys_of((s1 - 1) / size, 0).hi};
    }
    // Blocks with a slot that sees a context row of j0..j1-1, by bisection: hi and lo both ascend from block to block.
    __device__ Interval blocks_that_see(int j0, int j1) const {
        const int first = first_block([&](Interval keys) { return keys.hi > j0; });
        const int end = first_block([&](Interval keys) { return keys.lo >= j1; });
        return {first, max(first, end)};
    }
    template <class Test>
    __device__ int first_block(Test test) const {
        int lo = 0, hi = blocks;  // the first block that passes lies in lo..=hi
        while (lo < hi) {
            const int mid = (lo + hi) / 2;
            if (test(keys_of(mid, 0))) hi = mid;
            else lo = mid + 1;
        }
        return lo;
    }
    __device__ Interval tile_own(int s0, int s1) const { return {s0 / size * size, (s1 - 1) / size * size + size}; }
};

// Packed samples; contract in op/causal_attention.rs.
struct CausalRows {
    static constexpr bool HAS_OWN = false;
    const int *cu;
    int samples;

    __device__ CausalRows(const int *cu_seqlens, const int *n_seqs, int max_seqs)
        : cu(cu_seqlens), samples(max(0, min(*n_seqs, max_seqs))) {}

    __device__ Interval real() const { return {cu[0], cu[samples]}; }
    // The sample of a slot inside real().
    __device__ int hint(int slot) const {
        int lo = 0, hi = samples - 1;  // the last sample that starts at or before the slot
        while (lo < hi) {
            int mid = (lo + hi + 1) / 2;
            if (cu[mid] <= slot) lo = mid;
            else hi = mid - 1;
        }
        return lo;
    }
    // `hint`: the sample of a slot at or before this one.
    __device__ Interval keys(int slot, int hint) const {
        while (hint + 1 < samples && cu[hint + 1] <= slot) ++hint;
        return {cu[hint], slot + 1};
    }
    // The same in two steps: what must be loaded, and what is made of it once it has arrived.
    struct Loaded {
        int hint, start, end;
    };
    __device__ Loaded load(int, int hint) const { return {hint, cu[hint], cu[hint + 1]}; }
    __device__ Interval keys(int slot, Loaded from) const {
        return slot < from.end ? Interval{from.start, slot + 1} : keys(slot, from.hint);
    }
    __device__ Interval own(int) const { return {0, 0}; }
    __device__ Interval tile_keys(int, int s1, int hint) const { return {cu[hint], s1}; }
    __device__ Interval tile_own(int, int) const { return {0, 0}; }
};

// Slots s0..s1-1 that are real, of the tile that starts at slot `first` and holds `count` of `slots`.
__device__ __forceinline__ Interval clip_tile(Interval real, int first, int count) {
    return {max(first, real.lo), min(first + count, real.hi)};
}

// Rows appended to a cache; contract in op/cached_attention.rs. One CTA sees the cache rows of one chunk. Chunks and key tiles lie at
// fixed rows of the cache, whatever `len` is, so a token's result does not depend on which pass computes it, bit for bit.
struct CachedRows {
    static constexpr bool HAS_OWN = false;
    int len, count;
    Interval chunk;

    __device__ CachedRows(int len, int count, Interval chunk) : len(len), count(count), chunk(chunk) {}
    __device__ Interval real() const { return {0, count}; }
    __device__ int hint(int) const { return 0; }
    __device__ Interval keys(int slot, int) const { return {chunk.lo, min(chunk.hi, len + slot + 1)}; }
    __device__ Interval own(int) const { return {0, 0}; }
    __device__ Interval tile_keys(int, int s1, int) const { return {chunk.lo, min(chunk.hi, len + s1)}; }
    __device__ Interval tile_own(int, int) const { return {0, 0}; }
};
