// Shared-memory tiles of the mma.sync kernels: rows of D bf16, 16-byte chunks swizzled so that ldmatrix meets no bank conflict.
//
// Chunk c of row r lies at chunk c ^ (r % 8) of its row. `base` is a multiple of the row's length.
// Refuses: anything asynchronous beyond cp.async; waits and barriers are the kernels'.
#pragma once

#include "ptx.cuh"

template <int D>
struct SharedTile {
    static constexpr int CHUNKS = D / 8, ROW_BYTES = D * 2;
    static_assert(D % 64 == 0, "the swizzle permutes 8 chunks of 16 bytes");
    uint32_t base;

    __device__ __forceinline__ uint32_t at(int row, int chunk) const { return base + row * ROW_BYTES + ((chunk ^ (row & 7)) << 4); }

    // Rows 0..ROWS-1 from `row_pointer(row)`, zero where it gives null. `fallback` is any readable address.
    template <int ROWS, int THREADS, class RowPointer>
    __device__ __forceinline__ void load(const bf16 *fallback, RowPointer row_pointer) const {
        static_assert(ROWS * CHUNKS % THREADS == 0, "every thread copies the same number of chunks");
#pragma unroll 2  // unrolled whole, its addresses would crowd accumulators out of the registers
        for (int i = 0; i < ROWS * CHUNKS / THREADS; ++i) {
            const int index = i * THREADS + threadIdx.x, row = index / CHUNKS, chunk = index % CHUNKS;
            const bf16 *from = row_pointer(row);
            ptx::cp_async_16(at(row, chunk), from ? from + 8 * chunk : fallback, from != nullptr);
        }
    }

    // A operand: rows row0..row0+15, columns 16*k16... Rows begin at multiples of their length, so a step along k is one XOR.
    __device__ __forceinline__ void a(uint32_t (&r)[4], int row0, int k16) const {
        const int lane = threadIdx.x % 32;
        ptx::ldmatrix_x4(r, at(row0 + lane % 16, lane / 16) ^ (k16 << 5));
    }
    // B operand of two n8 tiles, n = rows row0..row0+15, k = columns: words 0, 1 for the first tile, 2, 3 for the second.
    __device__ __forceinline__ void b(uint32_t (&r)[4], int row0, int k16) const {
        const int lane = threadIdx.x % 32;
        ptx::ldmatrix_x4(r, at(row0 + lane / 16 * 8 + lane % 8, lane / 8 % 2) ^ (k16 << 5));
    }
    // B operand of two n8 tiles, k = rows row0..row0+15, n = columns 16*n16...
    __device__ __forceinline__ void b_transposed(uint32_t (&r)[4], int row0, int n16) const {
        const int lane = threadIdx.x % 32;
        ptx::ldmatrix_x4_trans(r, at(row0 + lane % 16, lane / 16) ^ (n16 << 5));
    }
};

// Start of the tiles in dynamic shared memory: a multiple of the longest row, which costs at most SharedTileSlack bytes.
static constexpr int SharedTileSlack = 512;
__device__ __forceinline__ uint32_t shared_tiles_base() {
    return (ptx::smem_address(dynamic_shared) + SharedTileSlack - 1) & ~(SharedTileSlack - 1u);
}
// A generic pointer to an address inside dynamic shared memory.
template <class Word>
__device__ __forceinline__ Word *shared_pointer(uint32_t address) {
    return reinterpret_cast<Word *>(dynamic_shared + (address - ptx::smem_address(dynamic_shared)));
}
