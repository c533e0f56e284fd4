"""Value and gradients of every op on small hostile shapes, by float64 autograd from float32 inputs.

ops.safetensors holds `{case}.{tensor}`, ops.json the scalars of each case. In every case `d_y` (or `d_q`, `d_x_out` ...: the
name says of which output) is the upstream gradient, and `grad_x` the gradient of sum(d_y * y) for input x. Matrices of heads
are stored flat as [rows, heads*D], head-major; head h reads key head h // (hq/hk).
"""

import math

import torch
import torch.nn.functional as F

import dflash_model as dm
from common import Source, i32, out_dir, positions_of, save, save_json, setup

OUT: dict[str, torch.Tensor] = {}
SCALARS: dict[str, dict] = {}


def record(case: str, inputs: dict, outputs: dict, upstream: dict, ints: dict | None = None, **scalars) -> None:
    """Store a case: its inputs, outputs, upstream gradients, and the gradient of every input."""
    total = sum((upstream[f"d_{name}"].double() * y).sum() for name, y in outputs.items())
    grads = torch.autograd.grad(total, list(inputs.values()))
    for name, value in (inputs | outputs | upstream).items():
        OUT[f"{case}.{name}"] = value
    for name, g in zip(inputs, grads):
        OUT[f"{case}.grad_{name}"] = g
    for name, value in (ints or {}).items():
        OUT[f"{case}.{name}"] = i32(value)
    SCALARS[case] = scalars


def leaf(t: torch.Tensor) -> torch.Tensor:
    return t.double().requires_grad_()


def linears(src: Source) -> None:
    """y = x W^T + b with sizes that no tile divides, and one row."""
    for case, rows, cols, inner, bias in [("linear", 5, 7, 13, False), ("linear_bias", 33, 17, 9, True),
                                          ("linear_one_row", 1, 3, 130, True)]:
        x, w = leaf(src.normal(rows, inner)), leaf(src.normal(cols, inner))
        b = {"bias": leaf(src.normal(cols))} if bias else {}
        y = F.linear(x, w, b.get("bias"))
        record(case, {"x": x, "weight": w} | b, {"y": y}, {"d_y": src.normal(rows, cols)})


def rms_norms(src: Source) -> None:
    """x_out = x + delta, y = norm(x_out) * w. Rows: ordinary, huge, tiny (eps decides), all zero, one spike."""
    x, delta = src.normal(6, 24), src.normal(6, 24)
    for row, scale in [(1, 1e4), (2, 1e-4)]:
        x[row] *= scale
        delta[row] *= scale
    x[3], delta[3] = 0.0, 0.0
    x[4], delta[4] = 0.0, 0.0
    x[4, 5] = 300.0
    for case, eps, residual in [("rms_norm_add", 1e-6, True), ("rms_norm", 1e-5, False)]:
        a, d, w = leaf(x), leaf(delta), leaf(src.normal(24, std=0.3, mean=1.0))
        s = a + d if residual else a
        y = dm.rms_norm(s, w, eps)
        up = {"d_y": src.normal(6, 24)}
        if residual:
            record(case, {"x": a, "delta": d, "weight": w}, {"x_out": s, "y": y}, up | {"d_x_out": src.normal(6, 24)}, eps=eps)
        else:
            record(case, {"x": a, "weight": w}, {"y": y}, up, eps=eps)


def qk_norm_ropes(src: Source) -> None:
    """Packed [T, (hq+2*hk)*D] (q heads, k heads, v heads) to normed and rotated q, k and plain v; positions restart."""
    positions = torch.cat([positions_of([0, 5, 6, 11]), torch.tensor([700, 4095])])
    t = positions.numel()
    for case, hq, hk, d, rotary, norms, theta in [
        ("qk_norm_rope", 4, 2, 8, 8, True, 1e6), ("rope_only", 3, 1, 6, 6, False, 1e4),
        ("qk_norm_rope_partial", 2, 2, 16, 4, True, 1e4),
    ]:
        qkv = leaf(src.normal(t, (hq + 2 * hk) * d))
        w = {n: leaf(src.normal(d, std=0.3, mean=1.0)) for n in ("q_norm", "k_norm")} if norms else {}
        q, k, v = (x.unflatten(-1, (-1, d)) for x in qkv.split([hq * d, hk * d, hk * d], dim=-1))
        if norms:
            q, k = dm.rms_norm(q, w["q_norm"], 1e-6), dm.rms_norm(k, w["k_norm"], 1e-6)
        q, k = (dm.rope(x, positions, theta, rotary) for x in (q, k))
        outputs = {"q": q.flatten(1), "k": k.flatten(1), "v": v.flatten(1)}
        up = {f"d_{n}": src.normal(*y.shape) for n, y in outputs.items()}
        record(case, {"qkv": qkv} | w, outputs, up, {"positions": positions}, heads=hq, kv_heads=hk, head_dim=d,
               rotary_dim=rotary, theta=theta, eps=1e-6 if norms else None)


def swiglu(src: Source) -> None:
    """y = silu(gate) * up from [T, 2I], gate first; gates at +-30 and 0 included."""
    x = src.normal(5, 2 * 11, std=2.0)
    x[0, 0], x[0, 1], x[0, 2] = 30.0, -30.0, 0.0
    x = leaf(x)
    gate, up = x.chunk(2, dim=-1)
    record("swiglu", {"x": x}, {"y": F.silu(gate) * up}, {"d_y": src.normal(5, 11)})


def attend(q, k, v, mask, hq, hk):
    """Plain attention of flat [rows, heads*D] under a boolean mask [rows_q, rows_k]."""
    d = q.shape[1] // hq
    q, k, v = q.unflatten(1, (hq, d)), k.unflatten(1, (hk, d)), v.unflatten(1, (hk, d))
    k, v = k.repeat_interleave(hq // hk, 1), v.repeat_interleave(hq // hk, 1)
    scores = torch.einsum("qhd,khd->hqk", q, k) / math.sqrt(d)
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(~mask, float("-inf")).softmax(-1), v).flatten(1)


def causal(src: Source) -> None:
    """Packed causal attention: no row sees another segment. `sharp` has scores in the hundreds."""
    for case, hq, hk, d, lengths, std in [("causal", 4, 2, 8, [9, 1, 35, 3], 1.0), ("causal_sharp", 3, 1, 5, [1, 20, 1], 8.0)]:
        cu = [0]
        for n in lengths:
            cu.append(cu[-1] + n)
        t = cu[-1]
        segment = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
        mask = (segment[:, None] == segment[None]) & torch.ones(t, t, dtype=torch.bool).tril()
        q, k, v = leaf(src.normal(t, hq * d, std=std)), leaf(src.normal(t, hk * d, std=std)), leaf(src.normal(t, hk * d))
        record(case, {"q": q, "k": k, "v": v}, {"y": attend(q, k, v, mask, hq, hk)}, {"d_y": src.normal(t, hq * d)},
               {"cu_seqlens": cu}, heads=hq, kv_heads=hk, head_dim=d)


def cached(src: Source) -> None:
    """Query i stands at position offset + i and sees cache rows <= offset + i; rows past offset + Tq are stale and huge."""
    hq, hk, d, offset, rows, capacity = 4, 2, 8, 21, 8, 40
    q, k, v = src.normal(rows, hq * d), src.normal(capacity, hk * d), src.normal(capacity, hk * d)
    k[offset + rows:], v[offset + rows:] = 1e3, -1e3
    mask = torch.arange(capacity)[None] <= offset + torch.arange(rows)[:, None]
    y = attend(q.double(), k.double(), v.double(), mask, hq, hk)
    OUT.update({"cached.q": q, "cached.k": k, "cached.v": v, "cached.y": y})
    SCALARS["cached"] = {"heads": hq, "kv_heads": hk, "head_dim": d, "offset": offset, "rows": rows, "capacity": capacity}


def block_diffusion(src: Source) -> None:
    """DFlash's mask, see dflash_model.block_mask. Samples start at rows 0, 70, 71; blocks without context included."""
    starts, lengths = [0, 70, 71], [70, 1, 29]
    blocks = [(0, 0), (0, 1), (0, 33), (0, 33), (0, 69), (1, 0), (2, 2), (2, 28)]
    t = sum(lengths)
    for case, hq, hk, d, b, window, std in [
        ("block_full", 4, 2, 4, 8, None, 1.0), ("block_sliding", 2, 2, 8, 8, 12, 1.0),
        ("block_sliding_narrow", 2, 1, 4, 6, 3, 1.0), ("block_full_sharp", 3, 1, 2, 16, None, 4.0),
    ]:
        start, anchor = torch.tensor([starts[s] for s, _ in blocks]), torch.tensor([a for _, a in blocks])
        n = len(blocks)
        mask = dm.block_mask(t, start, anchor, b, window)
        inputs = {"q": leaf(src.normal(n * b, hq * d, std=std)), "k_ctx": leaf(src.normal(t, hk * d, std=std)),
                  "v_ctx": leaf(src.normal(t, hk * d)), "k_blk": leaf(src.normal(n * b, hk * d, std=std)),
                  "v_blk": leaf(src.normal(n * b, hk * d))}
        heads = [x.unflatten(1, (-1, d)) for x in inputs.values()]
        y = dm.block_attention(*heads, mask).flatten(1)
        record(case, inputs, {"y": y}, {"d_y": src.normal(n * b, hq * d)}, {"ctx_start": start, "anchor": anchor},
               heads=hq, kv_heads=hk, head_dim=d, block=b, window=window)


def gathers(src: Source) -> None:
    """y = x[index]; the same row several times, so the backward must add. `embedding` has no backward: the table is frozen."""
    x, index = leaf(src.normal(9, 5)), torch.tensor([8, 0, 3, 3, 3, 0, 7])
    record("gather", {"x": x}, {"y": x[index]}, {"d_y": src.normal(7, 5)}, {"index": index})
    table, ids = src.normal(13, 6), torch.tensor([12, 0, 0, 5, 12])
    OUT.update({"embedding.table": table, "embedding.ids": i32(ids), "embedding.y": table[ids]})


def head_loss(src: Source) -> None:
    """Frozen head: sum of w * CE, its gradient for x, argmax and label probability per row.

    Rows 0-3 have logits times 40 (saturated; row 0 and 1 on their label, row 2 on another), rows 4, 9 weight 0, rows 5 and 6
    x = 0: every logit ties and the lowest index wins, so row 5 (label 0) hits and row 6 (label 3) does not.
    """
    rows, h, v = 23, 16, 101
    x, head = src.normal(rows, h), src.normal(v, h)
    x[:4] *= 40.0
    x[5:7] = 0.0
    labels, weights = src.ints(v, rows), src.uniform(rows, low=0.05, high=1.0)
    best = (x.double() @ head.double().T).argmax(-1)
    labels[[0, 1, 12, 17]] = best[[0, 1, 12, 17]]
    labels[2] = (best[2] + 1) % v
    labels[5], labels[6] = 0, 3
    weights[[4, 9]] = 0.0
    xx = leaf(x)
    logits = xx @ head.double().T
    ce = F.cross_entropy(logits, labels, reduction="none")
    loss = (weights.double() * ce).sum()
    (grad,) = torch.autograd.grad(loss, xx)
    assert logits[5].argmax() == 0
    OUT.update({
        "head_loss.x": x, "head_loss.head": head, "head_loss.labels": i32(labels), "head_loss.weights": weights,
        "head_loss.ce": ce, "head_loss.loss_sum": loss.reshape(1), "head_loss.grad_x": grad,
        "head_loss.argmax": i32(logits.argmax(-1)), "head_loss.hit": i32(logits.argmax(-1) == labels),
        "head_loss.label_probability": torch.exp(-ce),
    })
    SCALARS["head_loss"] = {"loss_sum": loss.item(), "weight_sum": weights.double().sum().item()}


def acceptance(src: Source) -> None:
    """Expected acceptance from hits and valid slots; blocks without a valid slot do not enter the mean."""
    hit, valid = (src.uniform(9, 8) < 0.7).long(), (src.uniform(9, 8) < 0.7).long()
    valid[:, 0] = 0
    valid[3], valid[7] = 0, 0
    hit[1], valid[1, 1:] = 1, 1
    kept = ((hit > 0) | (valid == 0)).long().cumprod(1) * valid
    value = 1.0 + kept.sum(1)[valid.any(1)].double().mean().item()
    OUT.update({"expected_acceptance.hit": i32(hit), "expected_acceptance.valid": i32(valid)})
    SCALARS["expected_acceptance"] = {"value": value}


def adamw(src: Source) -> None:
    """Three steps of one tensor with clipping: step 0 is clipped, step 1 not, step 2 has zero gradients in its first half."""
    for case, decay in [("adamw", 0.0), ("adamw_decay", 0.1)]:
        w = torch.nn.Parameter(src.normal(37).double())
        grads = [src.normal(37, std=3.0), src.normal(37, std=0.05), src.normal(37, std=1.0)]
        grads[2][:18] = 0.0
        lrs, clip, norms = [1e-3, 2e-3, 5e-4], 1.0, []
        optimizer = torch.optim.AdamW([w], betas=(0.9, 0.999), eps=1e-8, weight_decay=decay)
        OUT[f"{case}.w0"] = w.detach().clone()
        for s, (g, lr) in enumerate(zip(grads, lrs)):
            w.grad = g.double()
            norms.append(torch.nn.utils.clip_grad_norm_([w], clip).item())
            optimizer.param_groups[0]["lr"] = lr
            optimizer.step()
            state = optimizer.state[w]
            OUT.update({f"{case}.grad{s}": g, f"{case}.w{s + 1}": w.detach().clone(),
                        f"{case}.m{s + 1}": state["exp_avg"].clone(), f"{case}.v{s + 1}": state["exp_avg_sq"].clone()})
        SCALARS[case] = {"lr": lrs, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": decay, "clip": clip, "grad_norm": norms}


def main() -> None:
    out = out_dir(__doc__)
    setup()
    for seed, op in enumerate([linears, rms_norms, qk_norm_ropes, swiglu, causal, cached, block_diffusion, gathers, head_loss,
                               acceptance, adamw], 301):
        op(Source(seed))
    save(out / "ops.safetensors", OUT)
    save_json(out / "ops.json", SCALARS)


if __name__ == "__main__":
    main()
