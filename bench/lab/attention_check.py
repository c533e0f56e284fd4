#!/usr/bin/env python3
"""Checks and times the CUDA attention kernels on the GPU at hand, without the Rust executor.

Compiles crates/cuda/kernels/*.cu with nvcc (sm_90a, in parallel), loads the cubins through the driver, launches on torch tensors.
Check: every output element against a float64 (small shapes) or float32 (the timed shape) reference, within a bound computed for that
element from the roundings the kernel is allowed: probabilities and score gradients rounded to bf16, results rounded to bf16, sums in
fp32. Outputs are poisoned with NaN before each run, rows behind the batch hold NaN, and each launch is repeated: the two results
must be equal bit for bit. Then median microseconds by CUDA events, inputs rotated, beside the public kernels' figures on an H200.
One line per kernel; exit code 1 if anything failed. Needs torch and nvcc, nothing else.
"""
import argparse, concurrent.futures, ctypes, faulthandler, math, os, pathlib, statistics, subprocess, sys, tempfile, time
import torch

ROOT = pathlib.Path(__file__).resolve().parents[2] / "crates/cuda/kernels"
FILES = ["block_attention_fwd", "block_attention_bwd", "causal_attention_fwd", "cached_attention", "kv_append"]
DEV, BF, U = "cuda", torch.bfloat16, 2.0**-8  # U: the relative error of rounding to bf16
FAILED = []


def nvcc():
    for c in (os.environ.get("NVCC"), "nvcc", "/usr/local/cuda/bin/nvcc"):
        if c and subprocess.run(["bash", "-c", f"command -v {c}"], capture_output=True).returncode == 0:
            return c
    sys.exit("no nvcc: set NVCC")


def build(file, flags, out):
    cmd = [nvcc(), "-std=c++17", "-O3", "-cubin", "-gencode=arch=compute_90a,code=sm_90a", *flags, "-o", out, str(ROOT / f"{file}.cu")]
    r = subprocess.run(cmd, capture_output=True, text=True)
    if r.returncode:
        sys.exit(r.stdout + r.stderr)
    return r.stdout + r.stderr


class Driver:
    """The few driver calls needed: modules, functions, tensor maps, launches."""

    def __init__(self):
        self.cu = ctypes.CDLL("libcuda.so.1")
        torch.zeros(1, device=DEV)
        self.functions = {}

    def call(self, name, *args):
        r = getattr(self.cu, name)(*args)
        if r:
            sys.exit(f"{name}: driver error {r}")

    def load(self, path, tag=""):
        module = ctypes.c_void_p()
        self.call("cuModuleLoad", ctypes.byref(module), path.encode())
        self.functions[tag, pathlib.Path(path).stem] = module

    def function(self, file, symbol, dynamic, tag=""):
        key = tag, file, symbol
        if key not in self.functions:
            f = ctypes.c_void_p()
            self.call("cuModuleGetFunction", ctypes.byref(f), self.functions[tag, file + tag], symbol.encode())
            self.functions[key] = f, -1
        f, allowed = self.functions[key]
        if dynamic > allowed:  # one symbol is launched with several sizes (blocks of up to 16 and up to 32 slots)
            self.call("cuFuncSetAttribute", f, 8, dynamic)
            self.functions[key] = f, dynamic
        return f

    def launch(self, file, symbol, grid, threads, dynamic, args, tag=""):
        f = self.function(file, symbol, dynamic, tag)
        values = []
        for a in args:
            if isinstance(a, torch.Tensor): values.append(ctypes.c_uint64(a.data_ptr()))
            elif isinstance(a, int): values.append(ctypes.c_int32(a))
            else: values.append(a)
        pointers = (ctypes.c_void_p * len(values))(*[ctypes.addressof(v) for v in values])
        gx, gy = grid if isinstance(grid, tuple) else (grid, 1)
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        r = self.cu.cuLaunchKernel(f, gx, gy, 1, threads, 1, 1, dynamic, stream, pointers, None)
        if r:
            sys.exit(f"{symbol}: driver error {r} at grid ({gx}, {gy}), {threads} threads, {dynamic} bytes of shared memory")

    def tensor_map(self, t, heads, d, box_heads, box_rows):
        """[rows, heads*d] bf16 as {d, heads, rows}, box {64, box_heads, box_rows}, 128-byte swizzle, zero fill."""
        raw = ctypes.create_string_buffer(128 + 64)
        at = (ctypes.addressof(raw) + 63) & ~63
        dims = (ctypes.c_uint64 * 3)(d, heads, t.shape[0])
        strides = (ctypes.c_uint64 * 2)(d * 2, heads * d * 2)
        box, step = (ctypes.c_uint32 * 3)(64, box_heads, box_rows), (ctypes.c_uint32 * 3)(1, 1, 1)
        # data type 9 = bfloat16, interleave none, swizzle 3 = 128 bytes, L2 promotion 3 = 256 bytes, out of bounds 0 = zeros
        self.call("cuTensorMapEncodeTiled", ctypes.c_void_p(at), 9, 3, ctypes.c_void_p(t.data_ptr()), dims, strides, box, step, 0, 3, 3, 0)
        value = (ctypes.c_uint8 * 128).from_address(at)
        value.keep = raw
        return value


def ceil(a, b): return (a + b - 1) // b


class Kernels:
    """Launch rules of the .cu headers."""

    def __init__(self, driver, tag="", keys=128):
        self.d, self.tag, self.keys = driver, tag, keys
        self.sms = torch.cuda.get_device_properties(0).multi_processor_count

    def go(self, file, symbol, grid, threads, dynamic, args):
        self.d.launch(file, symbol, grid, threads, dynamic, args, self.tag)

    def forward_bytes_mma(self, D): return 512 + {64: 128, 128: 128, 256: 64}[D] * D * 2 + 4 * {64: 64, 128: 64, 256: 32}[D] * D * 2
    def forward_keys(self, D): return {64: 128, 128: self.keys, 256: 64}[D]
    def forward_bytes_wgmma(self, D): return 1024 + 128 * D * 2 + 4 * self.forward_keys(D) * D * 2

    def block_fwd(self, c, o, lse, wg):
        tail = [c.start, c.anchor, c.n, o, lse, c.N, c.B, c.W, c.hq, c.hk]
        S, G, D = c.N * c.B, c.hq // c.hk, c.D
        if wg:
            n, m = self.forward_keys(D), self.d.tensor_map
            maps = [m(c.q, c.hq, D, G, 128 // G), m(c.k, c.hk, D, 1, n), m(c.v, c.hk, D, 1, n), m(c.kb, c.hk, D, 1, 64), m(c.vb, c.hk, D, 1, 64)]
            return lambda: self.go("block_attention_fwd", f"block_attention_fwd_d{D}_wgmma", min(self.sms, ceil(S, 128 // G) * c.hk), 384,
                                   self.forward_bytes_wgmma(D), maps + tail)
        M = 64 if D == 256 else 128
        return lambda: self.go("block_attention_fwd", f"block_attention_fwd_d{D}", ceil(S, M // G) * c.hk, 128, self.forward_bytes_mma(D),
                               [c.q, c.k, c.v, c.kb, c.vb] + tail)

    def block_own(self, c, o, lse, delta, dkb, dvb):
        D, kt = c.D, 1 if c.B <= 16 else 2
        dyn = 512 + 2 * 64 * D * 2 + 2 * 16 * kt * D * 2 + 2 * 16 * kt * 128
        return lambda: self.go("block_attention_bwd", f"block_attention_bwd_own_d{D}", c.N * c.hk, 128, dyn,
                               [c.q, c.kb, c.vb, o, c.do, lse, delta, dkb, dvb, c.n, c.N, c.B, c.W, c.hq, c.hk])

    def block_dq(self, c, lse, delta, dq, wg):
        D, G, S = c.D, c.hq // c.hk, c.N * c.B
        tail = [c.start, c.anchor, c.n, lse, delta, dq, c.N, c.B, c.W, c.hq, c.hk]
        if wg:
            m = self.d.tensor_map
            maps = [m(c.q, c.hq, D, G, 128 // G), m(c.do, c.hq, D, G, 128 // G), m(c.k, c.hk, D, 1, 128), m(c.v, c.hk, D, 1, 128),
                    m(c.kb, c.hk, D, 1, 64), m(c.vb, c.hk, D, 1, 64)]
            return lambda: self.go("block_attention_bwd", f"block_attention_bwd_dq_d{D}_wgmma", min(self.sms, ceil(S, 128 // G) * c.hk), 384,
                                   1024 + 2 * 128 * D * 2 + 4 * 128 * D * 2, maps + tail)
        return lambda: self.go("block_attention_bwd", f"block_attention_bwd_dq_d{D}", ceil(S, 128 // G) * c.hk, 128,
                               512 + 2 * 128 * D * 2 + 4 * 32 * D * 2, [c.q, c.do, c.k, c.v, c.kb, c.vb] + tail)

    def block_dkv(self, c, lse, delta, dk, dv, wg):
        D, G, T = c.D, c.hq // c.hk, c.k.shape[0]
        tail = [c.start, c.anchor, c.n, lse, delta, dk, dv, T, c.N, c.B, c.W, c.hq, c.hk]
        if wg:
            m = self.d.tensor_map
            maps = [m(c.q, c.hq, D, G, 64 // G), m(c.do, c.hq, D, G, 64 // G), m(c.k, c.hk, D, 1, 128), m(c.v, c.hk, D, 1, 128)]
            return lambda: self.go("block_attention_bwd", f"block_attention_bwd_dkv_d{D}_wgmma", min(self.sms, ceil(T, 128) * c.hk), 384,
                                   1024 + 2 * 128 * D * 2 + 8 * 64 * D * 2, maps + tail)
        return lambda: self.go("block_attention_bwd", f"block_attention_bwd_dkv_d{D}", ceil(T, 64) * c.hk, 128,
                               512 + 2 * 64 * D * 2 + 4 * 64 * D * 2, [c.q, c.do, c.k, c.v] + tail)

    def causal(self, q, k, v, cu, n, o, hq, hk, D, wg):
        T, G = q.shape[0], hq // hk
        tail = [cu, n, o, T, cu.numel() - 1, hq, hk]
        if wg:
            m, keys = self.d.tensor_map, self.forward_keys(D)
            maps = [m(q, hq, D, G, 128 // G), m(k, hk, D, 1, keys), m(v, hk, D, 1, keys)]
            return lambda: self.go("causal_attention_fwd", f"causal_attention_fwd_d{D}_wgmma", min(self.sms, ceil(T, 128 // G) * hk), 384,
                                   self.forward_bytes_wgmma(D), maps + tail)
        M = 64 if D == 256 else 128
        return lambda: self.go("causal_attention_fwd", f"causal_attention_fwd_d{D}", ceil(T, M // G) * hk, 128, self.forward_bytes_mma(D),
                               [q, k, v] + tail)

    def cached(self, q, k, v, length, o, partial, chunk, hq, hk, D):
        R, C, n = q.shape[0], k.shape[0], 32 if D == 256 else 64
        chunks = ceil(C, chunk)
        def run():
            self.go("cached_attention", f"cached_attention_d{D}", (ceil(R, 64 // (hq // hk)) * hk, chunks), 128, 512 + 64 * D * 2 + 4 * n * D * 2,
                    [q, k, v, length, partial, R, C, chunk, hq, hk])
            self.go("cached_attention", f"cached_attention_combine_d{D}", ceil(R * hq, 4), 128, 0, [partial, length, o, R, chunk, chunks, hq])
        return run

    def append(self, k, v, kc, vc, length):
        R, row = k.shape[0], k.shape[1] // 8
        return lambda: self.go("kv_append", "kv_append", ceil(R * row, 256), 256, 0, [k, v, kc, vc, length, R, kc.shape[0], row])


class Blocks:
    """Inputs of block attention: packed samples of the given lengths, `per` sorted anchors each, extra unreal blocks and rows."""

    def __init__(self, D, hq, hk, B, lens, per, W=0, extra_blocks=0, extra_rows=0, scale=1.0, seed=0, edges=False, poison=True):
        g = torch.Generator(device=DEV).manual_seed(seed)
        r = lambda *s: torch.randn(*s, device=DEV, generator=g).to(BF)
        self.D, self.hq, self.hk, self.B, self.W, self.lens = D, hq, hk, B, W, lens
        self.first = [sum(lens[:i]) for i in range(len(lens))]
        cpu = torch.Generator().manual_seed(seed)
        self.anchors = []
        for i, length in enumerate(lens):
            a = torch.randint(0, length, (per if isinstance(per, int) else per[i],), generator=cpu).sort().values
            if edges and len(a) > 1: a[0], a[-1] = 0, length - 1
            self.anchors.append(a)
        self.real = sum(len(a) for a in self.anchors)
        self.N = self.real + extra_blocks
        T, S, R = sum(lens) + extra_rows, self.N * B, self.real * B
        start = [f for f, a in zip(self.first, self.anchors) for _ in a] + [2**30] * extra_blocks
        anchor = [int(x) for a in self.anchors for x in a] + [2**29] * extra_blocks
        self.start, self.anchor = (torch.tensor(x, dtype=torch.int32, device=DEV) for x in (start, anchor))
        self.n = torch.tensor([self.real], dtype=torch.int32, device=DEV)
        self.q, self.do = r(S, hq * D) * scale, r(S, hq * D)
        self.k, self.v, self.kb, self.vb = r(T, hk * D), r(T, hk * D), r(S, hk * D), r(S, hk * D)
        if poison:
            for t, n in ((self.q, R), (self.do, R), (self.kb, R), (self.vb, R), (self.k, sum(lens)), (self.v, sum(lens))): t[n:] = math.nan

    def flops(self):
        return 4 * sum((a.sum().item() + len(a) * self.B) * self.B for a in self.anchors) * self.hq * self.D

    def units(self, heads, dtype):
        """Per sample and key head: q, do [n, B*G, D], k, v [L, D], own k, v [n, B, D], context mask [n, B*G, L], own mask, slices."""
        B, D, G, n0 = self.B, self.D, self.hq // self.hk, 0
        for first, L, a in zip(self.first, self.lens, self.anchors):
            n = len(a)
            rows = slice(n0 * B, (n0 + n) * B)
            n0 += n
            if n == 0: continue
            j, slot = torch.arange(L, device=DEV), torch.arange(B, device=DEV)
            at = a.to(DEV)[:, None, None]
            ctx = (j < at).expand(n, B, L)
            own = torch.ones(B, B, dtype=torch.bool, device=DEV)
            if self.W:
                ctx = ctx & (j >= at + slot[:, None] - (self.W - 1))
                own = slot[None, :] <= slot[:, None]
            ctx, own = ctx.repeat_interleave(G, 1), own.repeat_interleave(G, 0)
            for h in heads:
                take = lambda t: t[rows, h * G * D:(h + 1) * G * D].to(dtype).reshape(n, B * G, D)
                one = lambda t, s: t[s, h * D:(h + 1) * D].to(dtype)
                c = slice(first, first + L)
                yield (h, rows, c, take(self.q), take(self.do), one(self.k, c), one(self.v, c), one(self.kb, rows).reshape(n, B, D),
                       one(self.vb, rows).reshape(n, B, D), ctx, own)


PATIENCE = 45


def alive():
    """Ends the process with a traceback unless called again in time: a kernel that hangs must not hold the GPU."""
    faulthandler.dump_traceback_later(PATIENCE, exit=True)


def judge(name, results):
    """results: (tensor name, got, want, bound). The worst |got - want| / bound must not pass 1; NaN and infinities fail."""
    worst, bad, note = 0.0, False, ""
    for what, got, want, bound in results:
        got = got.to(want.dtype)
        if not torch.isfinite(got).all():
            bad, note = True, note + f" {what}: {(~torch.isfinite(got)).sum().item()} of {got.numel()} not finite"
            continue
        ratio = ((got - want).abs() / bound).max().item() if got.numel() else 0.0
        worst = max(worst, ratio)
        if not ratio <= 1: bad, note = True, note + f" {what}: {ratio:.2f} of its bound"
    if bad: FAILED.append(name + note)
    return f"{worst:.2f}" + note


def check_block(kn, c, wg, heads=None, dtype=torch.float64):
    D, hq, hk, B, G = c.D, c.hq, c.hk, c.B, c.hq // c.hk
    S, T, R, scale = c.N * B, c.k.shape[0], c.real * B, D**-0.5
    nan = lambda *s, t=BF: torch.full(s, math.nan, dtype=t, device=DEV)
    base_k, base_v = torch.randn(T, hk * D, device=DEV), torch.randn(T, hk * D, device=DEV)
    outs = []
    alive()
    for _ in range(2):
        o, lse, delta, dq, dkb, dvb = nan(S, hq * D), nan(S, hq, t=torch.float32), nan(S, hq, t=torch.float32), nan(S, hq * D), nan(S, hk * D), nan(S, hk * D)
        dk, dv = base_k.clone(), base_v.clone()
        kn.block_fwd(c, o, lse, wg)()
        if D != 256:
            kn.block_own(c, o, lse, delta, dkb, dvb)()
            kn.block_dq(c, lse, delta, dq, wg)()
            kn.block_dkv(c, lse, delta, dk, dv, wg)()
        torch.cuda.synchronize()
        outs.append((o, lse) if D == 256 else (o, lse, delta, dq, dkb, dvb, dk, dv))
    same = all(torch.equal(a.view(torch.int16 if a.dtype == BF else torch.int32), b.view(torch.int16 if b.dtype == BF else torch.int32)) for a, b in zip(*outs))
    res = []
    zero = lambda what, t: res.append((what, t.float(), torch.zeros_like(t, dtype=torch.float32), torch.full_like(t, 1e-30, dtype=torch.float32)))
    for what, t in zip(("o pad", "lse pad", "delta pad", "dq pad", "dkb pad", "dvb pad"), outs[0][:6]): zero(what, t[R:])
    if D != 256:
        for what, t, b in (("dk pad", outs[0][6], base_k), ("dv pad", outs[0][7], base_v)):
            zero(what, (t - b)[sum(c.lens):])
    eps = 1e-30
    for h, rows, ctx_rows, q, do, k, v, kb, vb, ctx, own in c.units(range(hk) if heads is None else heads, dtype):
        n = q.shape[0]
        cols = slice(h * G * D, (h + 1) * G * D)
        mine = lambda t: t[rows, cols].reshape(n, B * G, D)
        keys = slice(h * D, (h + 1) * D)
        s = torch.cat([(q @ k.T).masked_fill(~ctx, -math.inf), (q @ kb.mT).masked_fill(~own, -math.inf)], -1) * scale
        lse = s.logsumexp(-1, keepdim=True)
        p = (s - lse).exp()
        L = k.shape[0]
        pc, po = p[..., :L], p[..., L:]
        o = pc @ v + po @ vb
        bound_o = 1.1 * U * (pc @ v.abs() + po @ vb.abs() + o.abs()) + 1e-6
        res += [("o", mine(outs[0][0]), o, bound_o), ("lse", outs[0][1][rows, h * G:(h + 1) * G].reshape(n, B * G, 1), lse, 1e-4 + 1e-5 * lse.abs())]
        if D == 256: continue
        delta = (do * o).sum(-1, keepdim=True)
        delta_err = (do.abs() * bound_o).sum(-1, keepdim=True) + 1e-5 * (do * o).abs().sum(-1, keepdim=True)
        res.append(("delta", outs[0][2][rows, h * G:(h + 1) * G].reshape(n, B * G, 1), delta, delta_err))
        dp = torch.cat([do @ v.T, do @ vb.mT], -1)
        ds = p * (dp - delta)
        ds_err = 1.1 * U * ds.abs() + p * delta_err + 1e-4 * p * (dp.abs() + delta.abs())
        dsc, dso, ec, eo = ds[..., :L], ds[..., L:], ds_err[..., :L], ds_err[..., L:]
        dq = scale * (dsc @ k + dso @ kb)
        res.append(("dq", mine(outs[0][3]), dq, scale * (ec @ k.abs() + eo @ kb.abs()) + 1.1 * U * dq.abs() + 1e-6))
        dkb, dvb = scale * dso.mT @ q, po.mT @ do
        res.append(("dk_blk", outs[0][4][rows, keys].reshape(n, B, D), dkb, scale * eo.mT @ q.abs() + 1.1 * U * dkb.abs() + 1e-6))
        res.append(("dv_blk", outs[0][5][rows, keys].reshape(n, B, D), dvb, 1.1 * U * (po.mT @ do.abs() + dvb.abs()) + 1e-4 * (po.mT @ do.abs()) + 1e-6))
        f = lambda t: t.reshape(n * B * G, -1)
        dk, dv = scale * f(dsc).T @ f(q), f(pc).T @ f(do)
        gk, gv = outs[0][6] - base_k, outs[0][7] - base_v
        res.append(("dk_ctx", gk[ctx_rows, keys], dk, scale * f(ec).T @ f(q).abs() + 1e-5 * (1 + base_k[ctx_rows, keys].abs())))
        res.append(("dv_ctx", gv[ctx_rows, keys], dv, (1.1 * U + 1e-4) * (f(pc).T @ f(do).abs()) + 1e-5 * (1 + base_v[ctx_rows, keys].abs())))
    return res, same


def block_checks(kn, small):
    shapes = [dict(D=128, hq=8, hk=2, B=16, lens=[700, 61, 300], per=[20, 4, 9], extra_blocks=3, extra_rows=70, edges=True),
              dict(D=128, hq=4, hk=1, B=16, lens=[1500], per=90, extra_blocks=1, scale=6.0),
              dict(D=128, hq=6, hk=1, B=16, lens=[333, 1, 50], per=[7, 1, 3], extra_rows=3, edges=True),
              dict(D=128, hq=2, hk=2, B=7, lens=[400, 260], per=25, extra_blocks=2, W=100),
              dict(D=128, hq=8, hk=1, B=32, lens=[129, 128, 127], per=5, W=16, edges=True, extra_rows=1),
              dict(D=128, hq=16, hk=1, B=3, lens=[90, 300], per=6, extra_blocks=9),
              dict(D=128, hq=10, hk=2, B=1, lens=[257] * 5, per=11, extra_rows=300),
              dict(D=128, hq=4, hk=1, B=16, lens=[17] * 40, per=1, W=1),
              dict(D=128, hq=4, hk=2, B=16, lens=[40], per=0, extra_blocks=4, extra_rows=9),
              dict(D=64, hq=6, hk=2, B=16, lens=[640, 200], per=30, extra_blocks=5, extra_rows=40, edges=True),
              dict(D=64, hq=4, hk=1, B=10, lens=[300, 77], per=12, W=64, scale=4.0),
              dict(D=64, hq=9, hk=3, B=16, lens=[500], per=33, extra_rows=12),
              dict(D=256, hq=8, hk=2, B=16, lens=[500, 90], per=14, extra_blocks=2, extra_rows=30, edges=True),
              dict(D=256, hq=6, hk=1, B=16, lens=[300], per=9, W=50)]
    for wg in (False, True):
        worst, ok, where = {}, True, ""
        for i, shape in enumerate(shapes[:3] if small else shapes):
            c = Blocks(seed=i, **shape)
            res, same = check_block(kn, c, wg)
            name = f"block attention {'wgmma' if wg else 'mma'} {shape}"
            note = judge(name, [r for r in res if r[1].numel()])
            if not same: FAILED.append(name + " differs between two runs"); note += " NOT DETERMINISTIC"
            for what, got, want, bound in res:
                if got.numel(): worst[what] = max(worst.get(what, 0), ((got.to(want.dtype) - want).abs() / bound).max().item())
            if not same or len(note) > 6: where += f"\n    {shape}: {note}"
        print(f"check block attention {'wgmma' if wg else 'mma  '}: worst share of bound " + " ".join(f"{k.replace(' ', '_')} {v:.2f}" for k, v in worst.items() if "pad" not in k) + where, flush=True)


def causal_checks(kn, small):
    shapes = [(128, 8, 2, [700, 0, 1, 129, 500], 0, 90), (128, 6, 1, [300, 64], 5, 0), (64, 6, 2, [513, 130], 0, 3), (64, 2, 2, [1] * 40, 0, 7),
              (256, 6, 1, [400, 33], 0, 50), (256, 4, 4, [257], 3, 0), (128, 4, 1, [], 0, 60), (128, 16, 1, [1100], 0, 0)]
    for wg in (False, True):
        worst, where = 0.0, ""
        for i, (D, hq, hk, lens, before, after) in enumerate(shapes[:2] if small else shapes):
            g = torch.Generator(device=DEV).manual_seed(i)
            T, G = before + sum(lens) + after, hq // hk
            q, k, v = (torch.randn(T, h * D, device=DEV, generator=g).to(BF) for h in (hq, hk, hk))
            edges = [before]
            for n in lens: edges.append(edges[-1] + n)
            for t in (q, k, v): t[edges[-1]:] = math.nan
            q[:before] = math.nan
            cu = torch.tensor(edges + [edges[-1]] * 3, dtype=torch.int32, device=DEV)
            n = torch.tensor([len(lens)], dtype=torch.int32, device=DEV)
            outs = []
            alive()
            for _ in range(2):
                o = torch.full_like(q, math.nan)
                kn.causal(q, k, v, cu, n, o, hq, hk, D, wg)()
                torch.cuda.synchronize(); outs.append(o)
            want, bound = torch.zeros(T, hq * D, dtype=torch.float64, device=DEV), torch.full((T, hq * D), 1e-30, dtype=torch.float64, device=DEV)
            for a, b in zip(edges, edges[1:]):
                if a == b: continue
                heads = lambda t, h: t[a:b].double().reshape(b - a, h, D).transpose(0, 1)
                Q, K, V = heads(q, hq), heads(k, hk).repeat_interleave(G, 0), heads(v, hk).repeat_interleave(G, 0)
                p = (Q @ K.mT * D**-0.5).masked_fill(torch.ones(b - a, b - a, device=DEV).triu(1).bool(), -math.inf).softmax(-1)
                x, e = p @ V, 1.1 * U * (p @ V.abs() + (p @ V).abs()) + 1e-6
                want[a:b], bound[a:b] = x.transpose(0, 1).reshape(b - a, -1), e.transpose(0, 1).reshape(b - a, -1)
            name = f"causal {'wgmma' if wg else 'mma'} D{D} {hq}/{hk} {lens}"
            note = judge(name, [("o", outs[0], want, bound)])
            if not torch.equal(outs[0].view(torch.int16), outs[1].view(torch.int16)): FAILED.append(name + " differs between two runs"); note += " NOT DETERMINISTIC"
            worst = max(worst, ((outs[0].double() - want).abs() / bound).max().item())
            if len(note) > 4: where += f"\n    {name}: {note}"
        print(f"check causal attention {'wgmma' if wg else 'mma  '}: worst share of bound o {worst:.2f}" + where, flush=True)


def cached_checks(kn, small):
    worst, where = 0.0, ""
    for D, hq, hk, C, chunk in [(128, 8, 2, 900, 256), (64, 6, 2, 500, 128), (256, 4, 1, 400, 64), (128, 16, 1, 300, 64)][:1 if small else 4]:
        G = hq // hk
        K, V, Q = (torch.randn(C, h * D, device=DEV).to(BF) for h in (hk, hk, hq))
        rows = {}
        alive()
        for length, R in [(0, 1), (0, 32), (255, 17), (256, 16), (C - 20, 20), (260, 12)]:
            k, v = K.clone(), V.clone()
            k[length:], v[length:] = math.nan, math.nan
            n = torch.tensor([length], dtype=torch.int32, device=DEV)
            kn.append(K[length:length + R].contiguous(), V[length:length + R].contiguous(), k, v, n)()
            exact = torch.equal(k[:length + R], K[:length + R]) and torch.equal(v[:length + R], V[:length + R]) and k[length + R:].isnan().all().item()
            q = Q[length:length + R].contiguous()
            partial = torch.full((ceil(C, chunk) * R * hq * (D + 2),), math.nan, device=DEV)
            o = torch.full_like(q, math.nan)
            kn.cached(q, k, v, n, o, partial, chunk, hq, hk, D)()
            torch.cuda.synchronize()
            seen = length + R
            Kd, Vd = (t[:seen].double().reshape(seen, hk, D).transpose(0, 1).repeat_interleave(G, 0) for t in (K, V))
            mask = torch.arange(seen, device=DEV)[None, :] > torch.arange(length, seen, device=DEV)[:, None]
            p = (q.double().reshape(R, hq, D).transpose(0, 1) @ Kd.mT * D**-0.5).masked_fill(mask, -math.inf).softmax(-1)
            x, e = p @ Vd, 1.1 * U * (p @ Vd.abs() + (p @ Vd).abs()) + 1e-6
            x, e = x.transpose(0, 1).reshape(R, -1), e.transpose(0, 1).reshape(R, -1)
            name = f"cached D{D} {hq}/{hk} len {length} rows {R}"
            note = judge(name, [("o", o, x, e)])
            if not exact: FAILED.append(name + ": append"); note += " APPEND"
            for r in range(R):  # one token's result must not depend on the pass that computes it
                if length + r in rows and not torch.equal(rows[length + r], o[r]): FAILED.append(name + f": row {r} differs from another pass"); note += " PASS-DEPENDENT"; break
                rows[length + r] = o[r].clone()
            worst = max(worst, ((o.double() - x).abs() / e).max().item())
            if len(note) > 4: where += f"\n    {name}: {note}"
    print(f"check cached attention, append: worst share of bound o {worst:.2f}" + where, flush=True)


def timed(runs, n=20):
    for r in runs: r()
    torch.cuda.synchronize()
    torch.cuda._sleep(20_000_000)  # the host runs ahead meanwhile, so that its launch gaps stay out of the events
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(n)]
    alive()
    for i, (a, b) in enumerate(events):
        a.record(); runs[i % len(runs)](); b.record()
    torch.cuda.synchronize()
    return statistics.median(a.elapsed_time(b) for a, b in events) * 1e3


def bench(variants, parts):
    e = lambda *s, t=BF: torch.empty(*s, dtype=t, device=DEV)
    f32 = torch.float32
    if "block" in parts:
        sets = [Blocks(128, 32, 8, 16, [3072] * 4, 512, seed=s, poison=False) for s in range(3)]
        flops = statistics.mean(c.flops() for c in sets)
        S, T = sets[0].N * 16, 12288
        for tag, kn in variants.items():
            bufs = [dict(o=e(S, 4096), lse=e(S, 32, t=f32), delta=e(S, 32, t=f32), dq=e(S, 4096), dkb=e(S, 1024), dvb=e(S, 1024),
                         dk=torch.zeros(T, 1024, device=DEV), dv=torch.zeros(T, 1024, device=DEV)) for _ in sets]
            for wg in (True, False) if tag == "" else (True,):
                path = ("wgmma" if wg else "mma") + tag
                line = lambda what, us, f: print(f"time  block {what} {path}: {us:.0f} us" + (f", {f/us/1e6:.0f} TFLOP/s" if f else ""), flush=True)
                fwd = timed([kn.block_fwd(c, b["o"], b["lse"], wg) for c, b in zip(sets, bufs)])
                line("fwd (flex 2638)", fwd, flops)
                if "FORWARD" in tag: continue
                own = timed([kn.block_own(c, b["o"], b["lse"], b["delta"], b["dkb"], b["dvb"]) for c, b in zip(sets, bufs)])
                dq = timed([kn.block_dq(c, b["lse"], b["delta"], b["dq"], wg) for c, b in zip(sets, bufs)])
                dkv = timed([kn.block_dkv(c, b["lse"], b["delta"], b["dk"], b["dv"], wg) for c, b in zip(sets, bufs)])
                line("bwd own", own, 0); line("bwd dq (3 products)", dq, 1.5 * flops); line("bwd dkv (4 products)", dkv, 2 * flops)
                line("bwd (flex 8189)", own + dq + dkv, 2.5 * flops)
        del sets
    if "large" in parts:
        c = Blocks(128, 32, 8, 16, [3072] * 4, 512, seed=9)
        for tag, kn in variants.items():
            res, same = check_block(kn, c, True, heads=[5], dtype=torch.float32)
            note = judge("block attention at the timed shape " + tag, res)
            if not same: FAILED.append("timed shape differs between two runs"); note += " NOT DETERMINISTIC"
            print(f"check block attention wgmma{tag} at the timed shape, one key head: worst share of bound {note}", flush=True)
            del res
    if "causal" in parts:
        for name, D, hq, hk, lens in [("4x3072 32/8 of 128 (cuDNN 620)", 128, 32, 8, [3072] * 4), ("2x8192 32/8 of 128 (cuDNN 606 TFLOP/s)", 128, 32, 8, [8192] * 2),
                                      ("4x3072 24/4 of 256 (cuDNN 572 TFLOP/s)", 256, 24, 4, [3072] * 4), ("4x3072 32/8 of 64", 64, 32, 8, [3072] * 4)]:
            T, flops = sum(lens), sum(2 * n * (n + 1) for n in lens) * hq * D
            cu = torch.tensor([sum(lens[:i]) for i in range(len(lens) + 1)], dtype=torch.int32, device=DEV)
            n = torch.tensor([len(lens)], dtype=torch.int32, device=DEV)
            qkv = [[torch.randn(T, h * D, device=DEV).to(BF) for h in (hq, hk, hk)] for _ in range(3)]
            o = e(T, hq * D)
            for tag, kn in variants.items():
                if tag and (D != 128 or "FORWARD" not in tag): continue
                for wg in (True, False) if tag == "" else (True,):
                    us = timed([kn.causal(*x, cu, n, o, hq, hk, D, wg) for x in qkv])
                    print(f"time  causal {name} {'wgmma' if wg else 'mma'}{tag}: {us:.0f} us, {flops/us/1e6:.0f} TFLOP/s", flush=True)
    if "cached" in parts:
        for name, D, hq, hk, C, length, R in [("len 4000, 16 rows, 32/8 of 128", 128, 32, 8, 8192, 4000, 16), ("len 500, 16 rows, 9/3 of 64", 64, 9, 3, 2048, 500, 16)]:
            kn = variants[""]
            sets = [[torch.randn(r, h * D, device=DEV).to(BF) for r, h in ((R, hq), (C, hk), (C, hk))] for _ in range(8)]
            n, o = torch.tensor([length], dtype=torch.int32, device=DEV), e(R, hq * D)
            part = e(ceil(C, 256) * R * hq * (D + 2), t=f32)
            us = timed([kn.cached(*x, n, o, part, 256, hq, hk, D) for x in sets], 40)
            print(f"time  cached {name}: {us:.1f} us, {2*(length+R)*hk*D*2/us/1e6:.2f} TB/s of cache", flush=True)


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--parts", default="check,large,block,causal,cached")
    p.add_argument("--small", action="store_true", help="few small shapes, for compute-sanitizer")
    p.add_argument("--variants", default="", help="comma-separated sets of macros to build and time beside the default")
    p.add_argument("--patience", type=int, default=45, help="seconds without progress that end the run; more under compute-sanitizer")
    a = p.parse_args()
    global PATIENCE
    PATIENCE = a.patience
    t0 = time.time()
    out = tempfile.mkdtemp()
    tags = [""] + ["+" + v for v in a.variants.split(",") if v]
    jobs = [(f, t) for t in tags for f in FILES]
    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        logs = list(pool.map(lambda j: build(j[0], [f"-D{d}" for d in j[1].strip("+").split("+") if d], f"{out}/{j[0]}{j[1]}.cubin"), jobs))
    for text in {x for x in logs if x.strip()}: print(text)
    print(f"compiled in {time.time()-t0:.0f} s on {torch.cuda.get_device_name()}", flush=True)
    d, variants = Driver(), {}
    for tag in tags:
        for f in FILES: d.load(f"{out}/{f}{tag}.cubin", tag)
        variants[tag] = Kernels(d, tag, 128)
    parts = a.parts.split(",")
    torch.backends.cuda.matmul.allow_tf32 = False
    if "check" in parts:
        block_checks(variants[""], a.small); causal_checks(variants[""], a.small); cached_checks(variants[""], a.small)
    bench(variants, parts)
    print(f"{len(FAILED)} failures in {time.time()-t0:.0f} s" + "".join("\n  " + f for f in FAILED[:20]), flush=True)
    sys.exit(1 if FAILED else 0)


if __name__ == "__main__":
    main()
