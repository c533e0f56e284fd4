// AdamW over all parameters in one launch.
//
// Mathematics: crates/graph/src/op/optim.rs. Arguments: chunks [n]: addresses of one piece (at most 2^16 elements, 16-byte aligned) of a parameter: bf16
// weight (null when the master is the weight), f32 master, moments, gradient, and its length; lr [1] f32, stats [8] f32 on the device.
// Launch: adamw(chunks, lr, stats, beta1, beta2, eps, weight_decay): grid n, block 256. Nothing is written when stats says that the step is not finite.
// Numerics: fp32; the bf16 weight is the rounded master. Bound: 30 bytes per parameter.
#include "common/vec.cuh"

struct Chunk {
    bf16 *w;
    float *master, *m, *v;
    const float *grad;
    int64_t len;
};

struct Adam {
    float beta1, beta2, scale, step, root2, eps, keep;
    FN void update(float &p, float &m, float &v, float g) const {
        g *= scale;
        m = beta1 * m + (1.0f - beta1) * g;
        v = beta2 * v + (1.0f - beta2) * g * g;
        p = p * keep - step * m / (sqrtf(v) / root2 + eps);
    }
};

extern "C" __global__ void __launch_bounds__(256)
    adamw(const Chunk *chunks, const float *lr, const float *stats, float beta1, float beta2, float eps, float weight_decay) {
    if (stats[3] != 1.0f) return;
    const Chunk c = chunks[blockIdx.x];
    const Adam adam = {beta1, beta2, stats[4], *lr / stats[5], sqrtf(stats[6]), eps, 1.0f - *lr * weight_decay};
    const int len = static_cast<int>(c.len), body = len / 4;
#pragma unroll 2
    for (int i = threadIdx.x; i < body; i += 256) {
        float4 p = reinterpret_cast<float4 *>(c.master)[i], m = reinterpret_cast<float4 *>(c.m)[i], v = reinterpret_cast<float4 *>(c.v)[i];
        const float4 g = reinterpret_cast<const float4 *>(c.grad)[i];
        adam.update(p.x, m.x, v.x, g.x);
        adam.update(p.y, m.y, v.y, g.y);
        adam.update(p.z, m.z, v.z, g.z);
        adam.update(p.w, m.w, v.w, g.w);
        reinterpret_cast<float4 *>(c.master)[i] = p;
        reinterpret_cast<float4 *>(c.m)[i] = m;
        reinterpret_cast<float4 *>(c.v)[i] = v;
        if (c.w != nullptr) reinterpret_cast<uint2 *>(c.w)[i] = make_uint2(pack2(p.x, p.y), pack2(p.z, p.w));
    }
    for (int i = 4 * body + threadIdx.x; i < len; i += 256) {
        adam.update(c.master[i], c.m[i], c.v[i], c.grad[i]);
        if (c.w != nullptr) c.w[i] = narrow(c.master[i]);
    }
}
