"""DFlash training values: forward, loss, gradients and ten AdamW steps of dflash_model.py, computed in float64.

Per case CASE: dflash/CASE.safetensors and dflash/CASE.json (configuration, optimizer, losses and norms per step). The inputs
are float32 values, so a float32 implementation starts from the very same numbers.
"""

import dataclasses

import torch

import dflash_model as dm
from common import Source, i32, out_dir, positions_of, save, save_json, setup

LENGTHS = [30, 5, 22]
CU = [0, 30, 35, 57]
# (sample, anchor): no context at 0; one context row at 1; the same anchor twice and its neighbour; ends where some or all
# slots fall past the sample (29 has none left); the short sample, where every block overhangs.
ANCHORS = {
    8: [(0, 0), (0, 1), (0, 13), (0, 13), (0, 14), (0, 26), (0, 29), (1, 0), (1, 3), (2, 6), (2, 12), (2, 19)],
    16: [(0, 0), (0, 12), (0, 13), (0, 27), (1, 1), (2, 4), (2, 4), (2, 20), (2, 21)],
}
FULL, SLIDING = "full_attention", "sliding_attention"
# seed, block, layers, window, std of the head. The last is chosen so that the gradient norm crosses the clip limit during the
# ten steps of the first two cases and stays above it in the third.
CASES = {
    "full_b8": (101, 8, (FULL, FULL, FULL), None, 0.108),
    "sliding_b8": (102, 8, (SLIDING, SLIDING, FULL), 12, 0.086),
    "full_b16": (103, 16, (FULL,), None, 0.5),
}
STEPS = 10
LR = [1e-3 * min(1.0, (s + 1) / 4) for s in range(STEPS)]
BETAS, EPS, CLIP = (0.9, 0.999), 1e-8, 1.0


def batch(src: Source, cfg: dm.Config, head_std: float) -> dict[str, torch.Tensor]:
    pairs = ANCHORS[cfg.block]
    sample = torch.tensor([s for s, _ in pairs])
    anchor = torch.tensor([a for _, a in pairs])
    tokens = src.ints(cfg.vocab, CU[-1], low=1)
    loss_mask = (src.uniform(CU[-1]) < 0.75).long()
    ctx_start, length = torch.tensor(CU)[sample], torch.tensor(LENGTHS)[sample]
    labels, weights = dm.labels_and_weights(tokens, loss_mask, ctx_start, length, anchor, cfg.block, dm.GAMMA[cfg.block])
    return {
        "features": src.normal(CU[-1], cfg.captured * cfg.target_hidden), "token_ids": tokens,
        "positions": positions_of(CU), "cu_seqlens": torch.tensor(CU), "loss_mask": loss_mask, "anchor": anchor,
        "ctx_start": ctx_start, "labels": labels, "weights": weights,
        "embed": src.normal(cfg.vocab, cfg.hidden), "head": src.normal(cfg.vocab, cfg.hidden, std=head_std),
    }


def run(name: str, out) -> None:
    seed, block, layer_types, window, head_std = CASES[name]
    cfg = dm.Config(hidden=32, target_hidden=32, captured=3, heads=4, kv_heads=2, head_dim=8, inter=48, vocab=64, block=block,
                    mask_token=0, layer_types=layer_types, window=window)
    src = Source(seed)
    b = batch(src, cfg, head_std)
    initial = dm.initial_weights(cfg, src, std=0.12, norm_std=0.2)
    w = {k: v.double().requires_grad_() for k, v in initial.items()}

    def evaluate():
        result = dm.forward(cfg, w, b["features"].double(), b["token_ids"], b["positions"], b["ctx_start"], b["anchor"],
                            b["embed"].double(), b["head"].double())
        return result, *dm.loss_sums(result["logits"], b["labels"], b["weights"])

    tensors = {k: (v if v.is_floating_point() else i32(v)) for k, v in b.items()}
    tensors |= {f"w0.{k}": v for k, v in initial.items()}
    result, loss_sum, weight_sum = evaluate()
    first = {"loss_sum": loss_sum.item(), "weight_sum": weight_sum.item(), "loss": (loss_sum / weight_sum).item(),
             "expected_acceptance": dm.expected_acceptance(result["logits"], b["labels"], b["weights"])}
    keep = ["ctx", "k_ctx.0", "v_ctx.0", "hidden", "logits"] + [f"layer.{i}" for i in range(len(layer_types))]
    tensors |= {k: result[k] for k in keep}

    optimizer = torch.optim.AdamW(w.values(), lr=0.0, betas=BETAS, eps=EPS, weight_decay=0.0)
    trace = []
    for step in range(STEPS):
        _, loss_sum, weight_sum = evaluate()
        optimizer.zero_grad()
        (loss_sum / weight_sum).backward()
        if step == 0:
            tensors |= {f"grad.{k}": v.grad.clone() for k, v in w.items()}
            # Adam's first step is lr * sign(g) where |g| >> eps: rounding decides the sign of what is nearly 0.
            g = torch.cat([v.grad.flatten() for v in w.values()]).abs()
            first["gradient_entries_below_1e-6"] = int((g < 1e-6).sum())
            first["gradient_entries"] = g.numel()
        norm = torch.nn.utils.clip_grad_norm_(w.values(), CLIP).item()
        for group in optimizer.param_groups:
            group["lr"] = LR[step]
        optimizer.step()
        trace.append({"lr": LR[step], "loss": (loss_sum / weight_sum).item(), "grad_norm": norm,
                      "clip_coefficient": min(1.0, CLIP / (norm + 1e-6))})
        # The step-1 weights of every case would only repeat what full_b8 shows, and the folder is to stay small.
        if step == 0 and name == "full_b8":
            tensors |= {f"w1.{k}": v.detach().clone() for k, v in w.items()}
    tensors |= {f"w10.{k}": v for k, v in w.items()}
    result, loss_sum, weight_sum = evaluate()
    final = {"loss": (loss_sum / weight_sum).item(),
             "expected_acceptance": dm.expected_acceptance(result["logits"], b["labels"], b["weights"])}
    save(out / "dflash" / f"{name}.safetensors", tensors)
    save_json(out / "dflash" / f"{name}.json", {
        "config": dataclasses.asdict(cfg), "gamma": dm.GAMMA[block], "seed": seed, "computed_in": "float64",
        "initial": first, "steps": trace, "final": final,
        "optimizer": {"betas": BETAS, "eps": EPS, "weight_decay": 0.0, "clip": CLIP,
                      "clip_rule": "all gradients times min(1, clip / (norm + 1e-6)), as torch.nn.utils.clip_grad_norm_"},
    })


def main() -> None:
    out = out_dir(__doc__)
    setup()
    for name in CASES:
        run(name, out)


if __name__ == "__main__":
    main()
