// Rotation of one head held by a group of lanes, 8 elements a lane.
//
// Job: the rotate-half form over the first 2*half elements, forward (sign 1) and back (sign -1). Refuses: half no multiple of 8.
#pragma once

#include "vec.cuh"

// LANES lanes hold a head; lane l of the group holds elements 8l..8l+7. All lanes of the warp call.
template <int LANES>
FN void rotate(float (&x)[8], const float *cos, const float *sin, int half, float sign) {
    const int lane = threadIdx.x % LANES, at = lane * 8, shift = half / 8;
    const bool low = at < half, high = !low && at < 2 * half;
    const int partner = low ? lane + shift : high ? lane - shift : lane;
    float other[8], c[8], s[8];
#pragma unroll
    for (int j = 0; j < 8; ++j) other[j] = __shfl_sync(0xffffffffu, x[j], partner, LANES);
    if (!low && !high) return;
    load<8>(cos + (low ? at : at - half), c);
    load<8>(sin + (low ? at : at - half), s);
    const float side = low ? -sign : sign;
#pragma unroll
    for (int j = 0; j < 8; ++j) x[j] = x[j] * c[j] + other[j] * (side * s[j]);
}
