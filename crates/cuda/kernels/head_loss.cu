// HeadLoss, everything but its two GEMMs: a chunk of logits becomes weighted gradients of the logits, and rows their results.
//
// Mathematics: crates/graph/src/op/head_loss.rs. Arguments: logits [n, V] bf16 of rows first..first+n; labels [R] i32, weights [R] f32, count [1] i32
// on the device; ce, prob [R] f32, hit [R] i32; sums [2] f32, added to. Rows at or past the count get zero logits (so that their dx is zero) and zero
// results; their labels and weights are not read. A label outside the vocabulary in a valid row traps.
// Launch: head_loss_rows_{wide,narrow}(logits, labels, weights, count, ce, prob, hit, first, vocab, gradient): wide needs V a multiple of 8 and
//   16-byte aligned logits; grid n, block 1024. Then, after the last chunk, head_loss_sums(ce, weights, count, sums): grid 1, block 256.
// Numerics: logits bf16, everything else fp32; p - onehot is formed in fp32 and rounded once; the sums are f64, in 256 fixed strands of ascending rows.
// Bound: 6*n*V bytes (the second read comes from L2 where the rows in flight fit).
#include "common/vec.cuh"

struct Softmax {
    float top, sum;
};
FN Softmax merged(Softmax a, Softmax b) {
    const float top = fmaxf(a.top, b.top);
    if (top == -INFINITY) return {top, 0.0f};
    return {top, a.sum * __expf(a.top - top) + b.sum * __expf(b.top - top)};
}

template <int V>
FN void head_loss_row(bf16 *logits, const int *labels, const float *weights, const int *count, float *ce, float *prob, int *hit, int first,
                      int vocab, int gradient) {
    __shared__ Softmax warps[32];
    __shared__ int beaten_warps[32];
    const int64_t row = first + static_cast<int64_t>(blockIdx.x);
    bf16 *z = logits + static_cast<int64_t>(blockIdx.x) * vocab;
    const int step = blockDim.x * V;
    if (row >= *count) {
        const float zero[V] = {};
        for (int c = threadIdx.x * V; c < vocab; c += step) store<V>(z + c, zero);
        if (threadIdx.x == 0) ce[row] = 0.0f, prob[row] = 0.0f, hit[row] = 0;
        return;
    }
    const int label = labels[row];
    if (label < 0 || label >= vocab) __trap();
    const float target = widen(z[label]);
    Softmax mine = {-INFINITY, 0.0f};
    bool beaten = false;
#pragma unroll 4
    for (int c = threadIdx.x * V; c < vocab; c += step) {
        float x[V], top = mine.top;
        load<V>(z + c, x);
#pragma unroll
        for (int j = 0; j < V; ++j) {
            top = fmaxf(top, x[j]);
            beaten |= x[j] > target || (x[j] == target && c + j < label);
        }
        float sum = mine.sum * __expf(mine.top - top);
        if (mine.top == -INFINITY) sum = 0.0f;
#pragma unroll
        for (int j = 0; j < V; ++j) sum += __expf(x[j] - top);
        mine = {top, sum};
    }
#pragma unroll
    for (int lanes = 16; lanes > 0; lanes /= 2)
        mine = merged(mine, {__shfl_xor_sync(0xffffffffu, mine.top, lanes), __shfl_xor_sync(0xffffffffu, mine.sum, lanes)});
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const bool warp_beaten = __any_sync(0xffffffffu, beaten);
    if (lane == 0) warps[warp] = mine, beaten_warps[warp] = warp_beaten;
    __syncthreads();  // every warp's maximum and sum are in shared memory, and nobody reads logits of the first pass any more
    mine = warps[lane];
    const bool any_beaten = __any_sync(0xffffffffu, beaten_warps[lane]);
#pragma unroll
    for (int lanes = 16; lanes > 0; lanes /= 2)
        mine = merged(mine, {__shfl_xor_sync(0xffffffffu, mine.top, lanes), __shfl_xor_sync(0xffffffffu, mine.sum, lanes)});
    if (threadIdx.x == 0) {
        const float loss = (mine.top - target) + logf(mine.sum);
        ce[row] = loss;
        prob[row] = expf(-loss);
        hit[row] = !any_beaten && isfinite(loss);
    }
    if (!gradient) return;
    const float weight = weights[row], scale = weight / mine.sum;
#pragma unroll 4
    for (int c = threadIdx.x * V; c < vocab; c += step) {
        float x[V];
        load<V>(z + c, x);
#pragma unroll
        for (int j = 0; j < V; ++j) {
            x[j] = __expf(x[j] - mine.top) * scale;
            if (c + j == label) x[j] -= weight;
        }
        store<V>(z + c, x);
    }
}

#define HEAD_LOSS(NAME, V)                                                                                                                \
    extern "C" __global__ void __launch_bounds__(1024, 1)                                                                                 \
        head_loss_rows_##NAME(bf16 *logits, const int *labels, const float *weights, const int *count, float *ce, float *prob, int *hit,  \
                              int first, int vocab, int gradient) {                                                                       \
        head_loss_row<V>(logits, labels, weights, count, ce, prob, hit, first, vocab, gradient);                                          \
    }
HEAD_LOSS(wide, 8)
HEAD_LOSS(narrow, 1)

extern "C" __global__ void __launch_bounds__(256) head_loss_sums(const float *ce, const float *weights, const int *count, float *sums) {
    __shared__ double losses[256], totals[256];
    const int rows = *count;
    double loss = 0.0, total = 0.0;
    for (int row = threadIdx.x; row < rows; row += 256) {
        loss += static_cast<double>(weights[row]) * static_cast<double>(ce[row]);
        total += static_cast<double>(weights[row]);
    }
    losses[threadIdx.x] = loss;
    totals[threadIdx.x] = total;
    __syncthreads();  // every strand is complete before one thread adds them in order
    if (threadIdx.x != 0) return;
    loss = total = 0.0;
    for (int i = 0; i < 256; ++i) loss += losses[i], total += totals[i];
    sums[0] += static_cast<float>(loss);
    sums[1] += static_cast<float>(total);
}
