// The instructions that C++ has no word for, one function each: tensor-core products, asynchronous copies, barriers.
//
// Job: every inline PTX of the attention kernels is in this file, so that the kernels themselves read as plain code.
// Refuses: policy. Nothing here knows a tile size or a layout beyond what the instruction itself defines.
// Source: PTX ISA 9.0 (ldmatrix, mma.sync, cp.async, mbarrier, cp.async.bulk.tensor, wgmma and its matrix descriptors).
#pragma once

#include <stdint.h>

// bf16 travels as its 16 bits; arithmetic happens in fp32 only.
typedef uint16_t bf16;

// A CUtensorMap, encoded by the host with cuTensorMapEncodeTiled and passed by value.
struct alignas(64) TensorMap {
    uint64_t opaque[16];
};
static_assert(sizeof(TensorMap) == 128, "a tensor map is 128 bytes, as the driver defines it");

// The launch's dynamic shared memory, one declaration for all kernels.
extern __shared__ __align__(128) uint8_t dynamic_shared[];

// The accelerated Hopper instruction set (wgmma, setmaxnreg) exists only in code compiled for sm_90a.
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define HOPPER_KERNELS 1
#endif

namespace ptx {

#define PTX_FN __device__ __forceinline__

PTX_FN uint32_t smem_address(const void *pointer) { return static_cast<uint32_t>(__cvta_generic_to_shared(pointer)); }

// ---- arithmetic ------------------------------------------------------------------------------------------------------------

// Two floats rounded to nearest even, `lo` in the lower half.
PTX_FN uint32_t pack_bf16(float lo, float hi) {
    uint32_t packed;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(hi), "f"(lo));
    return packed;
}
PTX_FN float low_bf16(uint32_t packed) { return __uint_as_float(packed << 16); }
PTX_FN float high_bf16(uint32_t packed) { return __uint_as_float(packed & 0xffff0000u); }

// 2^x to about 2 ulp; ex2(-inf) is exactly 0 and ex2(0) exactly 1, which masking and rescaling rely on.
PTX_FN float ex2(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// Natural logarithm.
PTX_FN float ln(float x) { return __logf(x); }

// ---- warp-wide tensor-core path (sm_80 and later) ----------------------------------------------------------------------------

PTX_FN void ldmatrix_x4(uint32_t (&r)[4], uint32_t address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address)
                 : "memory");
}
PTX_FN void ldmatrix_x4_trans(uint32_t (&r)[4], uint32_t address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address)
                 : "memory");
}
// c[16x8] += a[16x16] b[16x8]; c is four neighbouring elements of a register array.
PTX_FN void mma_bf16(float *c, const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Copies 16 bytes to shared memory, or writes 16 zero bytes when `valid` is false (the source is then not read).
PTX_FN void cp_async_16(uint32_t destination, const void *source, bool valid) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(destination), "l"(source), "r"(valid ? 16 : 0)
                 : "memory");
}
PTX_FN void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int PENDING>
PTX_FN void cp_async_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

// Barrier `id` among `threads` threads; arrive does not wait.
PTX_FN void barrier_sync(int id, int threads) { asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory"); }
PTX_FN void barrier_arrive(int id, int threads) { asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory"); }

#if defined(HOPPER_KERNELS)
// ---- mbarriers and the bulk copy engine --------------------------------------------------------------------------------------

PTX_FN void mbarrier_init(uint32_t barrier, uint32_t arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
// Makes initialised barriers visible to the copy engine.
PTX_FN void mbarrier_init_fence() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
PTX_FN void mbarrier_arrive(uint32_t barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
PTX_FN void mbarrier_arrive_expect(uint32_t barrier, uint32_t bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
// Waits until the phase of the given parity has completed.
PTX_FN void mbarrier_wait(uint32_t barrier, uint32_t parity) {
    asm volatile("{\n"
                 ".reg .pred done;\n"
                 "again:\n"
                 "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1, 0x989680;\n"
                 "@done bra.uni out;\n"
                 "bra.uni again;\n"
                 "out:\n"
                 "}" ::"r"(barrier),
                 "r"(parity)
                 : "memory");
}
// Box of the map's shape at (c0, c1, c2), innermost first; coordinates outside the tensor (negative too) read as zero.
PTX_FN void tma_load_3d(uint32_t destination, const TensorMap *map, uint32_t barrier, int c0, int c1, int c2) {
    asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5}], [%2];" ::"r"(
                     destination),
                 "l"(map), "r"(barrier), "r"(c0), "r"(c1), "r"(c2)
                 : "memory");
}
PTX_FN void tma_prefetch_map(const TensorMap *map) { asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory"); }
// Orders this thread's ordinary shared-memory writes before later reads by tensor cores and copy engine.
PTX_FN void fence_async_proxy() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

template <int REGISTERS>
PTX_FN void more_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}
template <int REGISTERS>
PTX_FN void fewer_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}

// ---- warpgroup tensor-core path ----------------------------------------------------------------------------------------------

PTX_FN void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
PTX_FN void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int PENDING>
PTX_FN void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}
// Keeps the compiler from moving reads or writes of an accumulator across the asynchronous product that owns it.
template <int COUNT>
PTX_FN void wgmma_hold(float (&d)[COUNT]) {
#pragma unroll
    for (int i = 0; i < COUNT; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

// The same for A operands in registers: they are complete before the fence that follows.
template <int COUNT>
PTX_FN void wgmma_hold(uint32_t (&a)[COUNT][4]) {
#pragma unroll
    for (int i = 0; i < 4 * COUNT; ++i) asm volatile("" : "+r"(a[i / 4][i % 4])::"memory");
}

#define ACC4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define ACC16(i) ACC4(i), ACC4(i + 4), ACC4(i + 8), ACC4(i + 12)
#define ACC32(i) ACC16(i), ACC16(i + 16)
#define ACC64(i) ACC32(i), ACC32(i + 32)
#define ACC88(i) ACC64(i), ACC16(i + 64), ACC4(i + 80), ACC4(i + 84)
#define ACC128(i) ACC64(i), ACC64(i + 64)
#define NAMES_0_31 \
    "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define NAMES_32_63 \
    "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
#define NAMES_64_87 \
    "%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79,%80,%81,%82,%83,%84,%85,%86,%87"
#define NAMES_64_127                                                                                                              \
    "%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79,%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94," \
    "%95,%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111,%112,%113,%114,%115,%116,%117,%118,%119,"   \
    "%120,%121,%122,%123,%124,%125,%126,%127"

// d[64xN] (+)= a[64x16] b[16xN]. Both operands by descriptor; TRANSPOSED_B reads b from rows of k (N contiguous).
#define WGMMA_SS(SHAPE, COUNT, NAMES, DA, DB, P, T)                                                                                 \
    template <int TRANSPOSED_B>                                                                                                     \
    PTX_FN void wgmma_ss(float (&d)[COUNT], uint64_t a, uint64_t b, int accumulate) {                                               \
        asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " P ", 0;\nwgmma.mma_async.sync.aligned." SHAPE                              \
                     ".f32.bf16.bf16 {" NAMES "}, " DA ", " DB ", p, 1, 1, 0, " T ";\n}"                                            \
                     : ACC##COUNT(0)                                                                                                \
                     : "l"(a), "l"(b), "r"(accumulate), "n"(TRANSPOSED_B));                                                         \
    }
WGMMA_SS("m64n64k16", 32, NAMES_0_31, "%32", "%33", "%34", "%35")
WGMMA_SS("m64n128k16", 64, NAMES_0_31 "," NAMES_32_63, "%64", "%65", "%66", "%67")
WGMMA_SS("m64n176k16", 88, NAMES_0_31 "," NAMES_32_63 "," NAMES_64_87, "%88", "%89", "%90", "%91")
WGMMA_SS("m64n256k16", 128, NAMES_0_31 "," NAMES_32_63 "," NAMES_64_127, "%128", "%129", "%130", "%131")

// The same with a in registers, in the layout of an accumulator's 16 columns packed to bf16.
#define WGMMA_RS(SHAPE, COUNT, NAMES, A0, A1, A2, A3, DB, P, T)                                                                     \
    template <int TRANSPOSED_B>                                                                                                     \
    PTX_FN void wgmma_rs(float (&d)[COUNT], const uint32_t (&a)[4], uint64_t b, int accumulate) {                                   \
        asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " P ", 0;\nwgmma.mma_async.sync.aligned." SHAPE                              \
                     ".f32.bf16.bf16 {" NAMES "}, {" A0 "," A1 "," A2 "," A3 "}, " DB ", p, 1, 1, " T ";\n}"                        \
                     : ACC##COUNT(0)                                                                                                \
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate), "n"(TRANSPOSED_B));                     \
    }
WGMMA_RS("m64n64k16", 32, NAMES_0_31, "%32", "%33", "%34", "%35", "%36", "%37", "%38")
WGMMA_RS("m64n128k16", 64, NAMES_0_31 "," NAMES_32_63, "%64", "%65", "%66", "%67", "%68", "%69", "%70")
WGMMA_RS("m64n256k16", 128, NAMES_0_31 "," NAMES_32_63 "," NAMES_64_127, "%128", "%129", "%130", "%131", "%132", "%133", "%134")

// Descriptor of a shared-memory matrix in 128-byte swizzle. `address` is a byte address inside a 1,024-byte aligned panel of
// rows of 128 bytes; `panel_bytes` is the distance between neighbouring panels of 64 columns and only matters to transposed
// operands. Groups of 8 rows are 1,024 bytes apart. Layout field 1 = SWIZZLE_128B.
PTX_FN uint64_t matrix_descriptor(uint32_t address, uint32_t panel_bytes) {
    return static_cast<uint64_t>((address & 0x3ffff) >> 4) | static_cast<uint64_t>(panel_bytes >> 4) << 16 |
           static_cast<uint64_t>(1024 >> 4) << 32 | 1ull << 62;
}
#endif  // HOPPER_KERNELS

}  // namespace ptx
