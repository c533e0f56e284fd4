// Capture: dst[t, dst_col..dst_col+cols] = src[t, src_col..src_col+cols].
//
// Mathematics: crates/graph/src/op/capture.rs. Arguments: src, dst already moved to their first column; src_stride, dst_stride and chunks
// in pieces of 16 bytes (`_wide`: widths, columns and their offsets multiples of 8) or 2 bytes (`_narrow`).
// Launch: capture_{wide,narrow}(src, dst, src_stride, dst_stride, chunks): grid T, block min(256, chunks rounded up to 32).
// Numerics: a copy. Bound: 4*T*cols bytes.
#include "common/vec.cuh"

#define CAPTURE(NAME, P)                                                                                                              \
    extern "C" __global__ void __launch_bounds__(256)                                                                                 \
        capture_##NAME(const P *src, P *dst, int src_stride, int dst_stride, int chunks) {                                            \
        const int64_t row = blockIdx.x;                                                                                               \
        copy_row(dst + row * dst_stride, src + row * src_stride, chunks);                                                             \
    }
CAPTURE(wide, uint4)
CAPTURE(narrow, uint16_t)
