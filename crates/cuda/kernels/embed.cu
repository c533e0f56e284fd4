// Embed: y[t] = table[ids[t]].
//
// Mathematics: crates/graph/src/op/embed.rs. Arguments: ids [T] i32 in 0..V (the host checks them when it writes them); table [V, H], y
// [T, H] as pieces of 16 bytes (`_wide`, H a multiple of 8) or 2 bytes (`_narrow`); chunks = pieces of a row.
// Launch: embed_{wide,narrow}(ids, table, y, chunks): grid T, block min(256, chunks rounded up to 32).
// Numerics: a copy. Bound: 4*T*H bytes.
#include "common/vec.cuh"

#define EMBED(NAME, P)                                                                                                  \
    extern "C" __global__ void __launch_bounds__(256) embed_##NAME(const int *ids, const P *table, P *y, int chunks) {  \
        const int64_t row = blockIdx.x;                                                                                 \
        copy_row(y + row * chunks, table + static_cast<int64_t>(ids[row]) * chunks, chunks);                           \
    }
EMBED(wide, uint4)
EMBED(narrow, uint16_t)
