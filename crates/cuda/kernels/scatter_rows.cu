// ScatterRows: dx[r] = dy[inverse[r]], zero where the inverse is negative.
//
// Mathematics: crates/graph/src/op/gather.rs. Arguments: dy [M, H], dx [R, H] in pieces of 16 bytes (`_wide`) or 2 bytes (`_narrow`);
// inverse [R] i32; chunks = pieces of a row.
// Launch: scatter_rows_{wide,narrow}(dy, inverse, dx, chunks): grid R, block min(256, chunks rounded up to 32).
// Numerics: a copy. Bound: 4*R*H bytes.
#include "common/vec.cuh"

#define SCATTER(NAME, P)                                                                                                               \
    extern "C" __global__ void __launch_bounds__(256) scatter_rows_##NAME(const P *dy, const int *inverse, P *dx, int chunks) {        \
        const int64_t row = blockIdx.x;                                                                                                \
        const int from = inverse[row];                                                                                                 \
        if (from >= 0) copy_row(dx + row * chunks, dy + static_cast<int64_t>(from) * chunks, chunks);                                  \
        else zero_row(dx + row * chunks, chunks);                                                                                      \
    }
SCATTER(wide, uint4)
SCATTER(narrow, uint16_t)
