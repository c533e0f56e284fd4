// GradNorm: the global norm of all gradients and the scalars of an optimizer step.
//
// Mathematics: crates/graph/src/op/optim.rs. Arguments: chunks [n]: address and length (at most 2^16) of every piece of every gradient, in order;
// chunk_sums [n] f32; sums [2] f32; adam_t [1] i32, stepped when finite; stats [8] f32.
// Launch: grad_norm_chunks(chunks, chunk_sums): grid n, block 256. Then grad_norm_final(chunk_sums, n, sums, adam_t, stats, clip, beta1, beta2): grid 1,
//   block 1024.
// Numerics: squares fp32 in 256 fixed strands of a chunk, strands and chunks in f64 in a fixed order. Bound: 4 bytes per parameter.
#include "common/vec.cuh"

struct Chunk {
    const float *data;
    int64_t len;
};

extern "C" __global__ void __launch_bounds__(256) grad_norm_chunks(const Chunk *chunks, float *chunk_sums) {
    __shared__ double strands[256];
    const Chunk chunk = chunks[blockIdx.x];
    const int len = static_cast<int>(chunk.len), body = len / 4;
    float sum[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    const float4 *data = reinterpret_cast<const float4 *>(chunk.data);
#pragma unroll 4
    for (int i = threadIdx.x; i < body; i += 256) {
        const float4 g = data[i];
        sum[0] = fmaf(g.x, g.x, sum[0]), sum[1] = fmaf(g.y, g.y, sum[1]), sum[2] = fmaf(g.z, g.z, sum[2]), sum[3] = fmaf(g.w, g.w, sum[3]);
    }
    for (int i = 4 * body + threadIdx.x; i < len; i += 256) sum[0] = fmaf(chunk.data[i], chunk.data[i], sum[0]);
    strands[threadIdx.x] = (static_cast<double>(sum[0]) + sum[1]) + (static_cast<double>(sum[2]) + sum[3]);
    for (int half = 128; half > 0; half /= 2) {
        __syncthreads();  // the strands of the last level are complete
        if (threadIdx.x < half) strands[threadIdx.x] += strands[threadIdx.x + half];
    }
    if (threadIdx.x == 0) chunk_sums[blockIdx.x] = static_cast<float>(strands[0]);
}

extern "C" __global__ void __launch_bounds__(1024)
    grad_norm_final(const float *chunk_sums, int n, const float *sums, int *adam_t, float *stats, float clip, float beta1, float beta2) {
    __shared__ double strands[1024];
    double sum = 0.0;
    for (int i = threadIdx.x; i < n; i += 1024) sum += chunk_sums[i];
    strands[threadIdx.x] = sum;
    for (int half = 512; half > 0; half /= 2) {
        __syncthreads();  // the strands of the last level are complete
        if (threadIdx.x < half) strands[threadIdx.x] += strands[threadIdx.x + half];
    }
    if (threadIdx.x != 0) return;
    const double weight = sums[1], loss = sums[0] / weight, norm = sqrt(strands[0]) / weight;
    const bool finite = isfinite(loss) && isfinite(norm) && weight > 0.0;
    const int t = *adam_t + (finite ? 1 : 0);
    if (finite) *adam_t = t;
    stats[0] = static_cast<float>(loss);
    stats[1] = static_cast<float>(weight);
    stats[2] = static_cast<float>(norm);
    stats[3] = finite ? 1.0f : 0.0f;
    stats[4] = static_cast<float>(fmin(clip / (norm + 1e-6), 1.0) / weight);
    stats[5] = static_cast<float>(1.0 - pow(static_cast<double>(beta1), static_cast<double>(t)));
    stats[6] = static_cast<float>(1.0 - pow(static_cast<double>(beta2), static_cast<double>(t)));
    stats[7] = static_cast<float>(t);
}
