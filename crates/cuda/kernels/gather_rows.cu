// GatherRows: y[m] = x[rows[m]] for m < count, zero behind.
//
// Mathematics: crates/graph/src/op/gather.rs. Arguments: x [R, H], y [M, H] in pieces of 16 bytes (`_wide`) or 2 bytes (`_narrow`); rows [M]
// i32, count [1] i32 on the device; chunks = pieces of a row. rows behind the count are not read.
// Launch: gather_rows_{wide,narrow}(x, rows, count, y, chunks): grid M, block min(256, chunks rounded up to 32).
// Numerics: a copy. Bound: 4*M*H bytes.
#include "common/vec.cuh"

#define GATHER(NAME, P)                                                                                                                 \
    extern "C" __global__ void __launch_bounds__(256)                                                                                   \
        gather_rows_##NAME(const P *x, const int *rows, const int *count, P *y, int chunks) {                                           \
        const int64_t row = blockIdx.x;                                                                                                 \
        if (row < *count) copy_row(y + row * chunks, x + static_cast<int64_t>(rows[row]) * chunks, chunks);                             \
        else zero_row(y + row * chunks, chunks);                                                                                        \
    }
GATHER(wide, uint4)
GATHER(narrow, uint16_t)
