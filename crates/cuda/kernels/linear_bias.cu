// The bias of a linear where its GEMM cannot take it along, and the gradient of a bias.
//
// Mathematics: crates/graph/src/op/linear.rs. Arguments: bias [N] bf16, y [T, N] bf16 or f32, dy [T, N] bf16, db [N] f32.
// Launch: linear_bias_rows_{bf16,f32}(bias, y, cols = N): y = bias in every row, to which the GEMM then adds; grid (T, ceil(N/256)), block 256.
//   linear_bias_grad(dy, db, rows = T, cols = N): db += sum over rows; grid ceil(N/32), block (32, 16).
// Numerics: fp32; 16 fixed strands of rows, then the strands in order. Bound: 2*T*N bytes.
#include "common/vec.cuh"

extern "C" __global__ void __launch_bounds__(256) linear_bias_rows_bf16(const bf16 *bias, bf16 *y, int cols) {
    const int col = blockIdx.y * 256 + threadIdx.x;
    if (col < cols) y[static_cast<int64_t>(blockIdx.x) * cols + col] = bias[col];
}

extern "C" __global__ void __launch_bounds__(256) linear_bias_rows_f32(const bf16 *bias, float *y, int cols) {
    const int col = blockIdx.y * 256 + threadIdx.x;
    if (col < cols) y[static_cast<int64_t>(blockIdx.x) * cols + col] = widen(bias[col]);
}

extern "C" __global__ void __launch_bounds__(512) linear_bias_grad(const bf16 *dy, float *db, int rows, int cols) {
    __shared__ float strands[16][32];
    const int col = blockIdx.x * 32 + threadIdx.x;
    float sum = 0.0f;
    if (col < cols) {
#pragma unroll 8
        for (int row = threadIdx.y; row < rows; row += 16) sum += widen(dy[static_cast<int64_t>(row) * cols + col]);
    }
    strands[threadIdx.y][threadIdx.x] = sum;
    __syncthreads();  // every strand is complete before one thread adds them
    if (threadIdx.y != 0 || col >= cols) return;
    sum = 0.0f;
    for (int i = 0; i < 16; ++i) sum += strands[i][threadIdx.x];
    db[col] += sum;
}
