// PickTokens: argmax, two largest logits, probability of the probe, and a draw without the probe, per row.
//
// Mathematics: crates/graph/src/op/pick_tokens.rs. Arguments: logits [R, V] f32; temperature [1] f32, uniform [R] f32, probe [R] i32 on the device;
// argmax, drawn [R] i32, top2 [R, 2], prob [R] f32; vocab = V.
// Launch: pick_tokens(logits, temperature, uniform, probe, argmax, top2, prob, drawn, vocab): grid R, block 1024; V at most 2^20.
// Numerics: masses exp((z - m)/temperature), m the largest logit besides the probe, and their sums fp32: tiles of 1024 tokens summed by one warp each,
// tiles added in ascending order, so that the draw walks ids in ascending order and never ends on the probe. Bound: 12*R*V bytes.
#include "common/vec.cuh"

static constexpr int TILE = 1024, MAX_TILES = 1024;

struct Best {
    float first, second;
    int at;
};
FN Best better(Best a, Best b) {
    const bool a_wins = a.first > b.first || (a.first == b.first && a.at < b.at);
    const Best w = a_wins ? a : b, l = a_wins ? b : a;
    return {w.first, fmaxf(w.second, l.first), w.at};
}
FN Best best_of_warp(Best b) {
#pragma unroll
    for (int lanes = 16; lanes > 0; lanes /= 2)
        b = better(b, {__shfl_xor_sync(0xffffffffu, b.first, lanes), __shfl_xor_sync(0xffffffffu, b.second, lanes),
                       __shfl_xor_sync(0xffffffffu, b.at, lanes)});
    return b;
}

extern "C" __global__ void __launch_bounds__(1024)
    pick_tokens(const float *logits, const float *temperature, const float *uniform, const int *probe, int *argmax, float *top2, float *prob,
                int *drawn, int vocab) {
    __shared__ Best warps[32];
    __shared__ float tiles[MAX_TILES];
    __shared__ int chosen_tile;
    __shared__ float before_tile, threshold;
    const int row = blockIdx.x, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const float *z = logits + static_cast<int64_t>(row) * vocab;
    Best best = {-INFINITY, -INFINITY, 0x7fffffff};
    for (int v = threadIdx.x; v < vocab; v += 1024) best = better(best, {z[v], -INFINITY, v});
    best = best_of_warp(best);
    if (lane == 0) warps[warp] = best;
    __syncthreads();  // every warp's best is in shared memory
    best = best_of_warp(warps[lane]);
    const float heat = *temperature;
    const int tested = probe[row];
    if (threadIdx.x == 0) {
        argmax[row] = best.at;
        top2[2 * row] = best.first;
        top2[2 * row + 1] = best.second;
        if (heat == 0.0f) {
            prob[row] = tested == best.at ? 1.0f : 0.0f;
            drawn[row] = best.at;
        }
    }
    if (heat == 0.0f) return;
    const float top = tested == best.at ? best.second : best.first;
    auto mass = [&](int v) { return expf((z[v] - top) / heat); };
    const int count = (vocab + TILE - 1) / TILE;
    for (int tile = warp; tile < count; tile += 32) {
        float sum = 0.0f;
        for (int v = tile * TILE + lane; v < min(vocab, (tile + 1) * TILE); v += 32) sum += v == tested ? 0.0f : mass(v);
        sum = group_sum<32>(sum);
        if (lane == 0) tiles[tile] = sum;
    }
    __syncthreads();  // every tile's mass is known before the walk
    if (threadIdx.x == 0) {
        float open = 0.0f;
        for (int t = 0; t < count; ++t) open += tiles[t];
        // As a ratio to the probe's own mass, which may exceed every float.
        prob[row] = tested >= 0 ? 1.0f / (1.0f + open * expf((top - z[tested]) / heat)) : 0.0f;
        threshold = uniform[row] * open;
        float seen = 0.0f;
        chosen_tile = 0;
        // Some token besides the probe has mass 1. Rounding can leave the threshold above the last sum: the last tile with mass is then the one.
        for (int t = 0; t < count; ++t) {
            if (tiles[t] <= 0.0f) continue;
            chosen_tile = t;
            before_tile = seen;
            seen += tiles[t];
            if (seen > threshold) break;
        }
    }
    __syncthreads();  // the tile is chosen before a warp walks it
    if (warp != 0) return;
    float seen = before_tile;
    int last = -1;
    for (int base = chosen_tile * TILE; base < min(vocab, (chosen_tile + 1) * TILE); base += 32) {
        const int v = base + lane;
        const float m = v < vocab && v != tested ? mass(v) : 0.0f;
        float upto = m;
        for (int step = 1; step < 32; step *= 2) {
            const float other = __shfl_up_sync(0xffffffffu, upto, step);
            if (lane >= step) upto += other;
        }
        const uint32_t passed = __ballot_sync(0xffffffffu, m > 0.0f && seen + upto > threshold);
        const uint32_t with_mass = __ballot_sync(0xffffffffu, m > 0.0f);
        if (passed != 0) {
            last = base + __ffs(passed) - 1;
            break;
        }
        if (with_mass != 0) last = base + 31 - __clz(with_mass);
        seen += __shfl_sync(0xffffffffu, upto, 31);
    }
    if (lane == 0) drawn[row] = last;
}
