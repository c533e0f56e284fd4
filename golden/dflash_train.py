"""A short training run from end to end: tiny target, dumped batches, tiny drafter, six optimizer steps.

Writes train/run.json and train/batch-*.safetensors in the dump format of twin_train.py, and train/expected.json with loss,
gradient norm and expected acceptance per step. The target is qwen3_default (float32, eager); the drafter starts from
infer/drafter, so that it hits now and then; its step is dflash_model.py in float64. Eleven batches with G = 2, so the last step
has one batch; three batches have padded rows and blocks.
"""

import torch
from safetensors.torch import load_file

import dflash_infer as infer
import dflash_model as dm
from common import Source, i32, out_dir, positions_of, save, save_json, setup

BATCHES, GLOBAL_BATCH, TOKENS, BLOCKS = 11, 2, 64, 10
LR = [4e-3 * f for f in (0.25, 0.5, 0.75, 1.0, 0.9, 0.5)]
BETAS, EPS, CLIP = (0.9, 0.999), 1e-8, 1.0
CFG = infer.CFG


def draw(src: Source, target: infer.Target, number: int) -> dict[str, torch.Tensor]:
    """One packed batch: prompts with the target's continuation supervised, anchors sorted by sample and position."""
    lengths = [[40, 24], [13, 1, 50], [30, 20]][number % 3]  # the third leaves 14 padded rows
    cu = [0]
    for n in lengths:
        cu.append(cu[-1] + n)
    tokens, mask = torch.zeros(TOKENS, dtype=torch.long), torch.zeros(TOKENS, dtype=torch.long)
    candidates = []
    for s, n in enumerate(lengths):
        prompt = src.ints(CFG.vocab, max(1, n // 4), low=1)
        tokens[cu[s] : cu[s + 1]] = target.greedy(prompt, n - prompt.numel())
        mask[cu[s] + prompt.numel() : cu[s + 1]] = 1
        mask[cu[s] + n // 2] = 0  # a hole
        sample_mask = mask[cu[s] : cu[s + 1]]
        candidates += [(s, i) for i in range(n - 1) if sample_mask[i] and sample_mask[i + 1]]
    wanted = BLOCKS - 2 if number % 3 == 2 else BLOCKS
    chosen = sorted(candidates[i] for i in src.rng.choice(len(candidates), wanted, replace=False))
    sample, anchor = torch.tensor([s for s, _ in chosen]), torch.tensor([a for _, a in chosen])
    start, length = torch.tensor(cu)[sample], torch.tensor(lengths)[sample]
    labels, weights = dm.labels_and_weights(tokens, mask, start, length, anchor, CFG.block, dm.GAMMA[CFG.block])
    pad = BLOCKS - wanted
    return {
        "tokens": i32(tokens), "cu_seqlens": i32(cu), "anchor": i32(torch.cat([anchor, torch.full((pad,), -1)])),
        "ctx_start": i32(torch.cat([start, torch.zeros(pad, dtype=torch.long)])),
        "labels": i32(torch.cat([labels, torch.zeros(pad, CFG.block, dtype=torch.long)])),
        "weights": torch.cat([weights, torch.zeros(pad, CFG.block)]),
    }


def main() -> None:
    out = out_dir(__doc__)
    setup()
    folder = out / "train"
    target = infer.Target(out / "targets" / infer.TARGET)
    src = Source(501)
    initial = dm.from_plain(CFG, load_file(out / "infer" / "drafter" / "model.safetensors"))
    batches = [draw(src, target, i) for i in range(BATCHES)]
    for i, b in enumerate(batches):
        save(folder / f"batch-{i:06d}.safetensors", b)
    save_json(folder / "run.json", {
        "lr": LR, "clip": CLIP, "betas": BETAS, "eps": EPS, "weight_decay": 0.0, "global_batch": GLOBAL_BATCH,
        "gamma": dm.GAMMA[CFG.block], "block": CFG.block, "mask_token": CFG.mask_token, "layer_ids": infer.LAYER_IDS,
    })

    w = {k: v.double().requires_grad_() for k, v in initial.items()}
    optimizer = torch.optim.AdamW(w.values(), betas=BETAS, eps=EPS, weight_decay=0.0)
    steps = []
    for step, lr in enumerate(LR):
        loss_sum, weight_sum, kept, blocks = 0.0, 0.0, 0.0, 0
        for b in batches[step * GLOBAL_BATCH : (step + 1) * GLOBAL_BATCH]:
            cu = b["cu_seqlens"].tolist()
            real = b["anchor"] >= 0
            tokens, labels, weights = b["tokens"][: cu[-1]].long(), b["labels"][real].long(), b["weights"][real]
            features = torch.cat([target.run(tokens[s:e])[0] for s, e in zip(cu, cu[1:])])
            result = dm.forward(CFG, w, features.double(), tokens, positions_of(cu), b["ctx_start"][real].long(),
                                b["anchor"][real].long(), target.embed.double(), target.head.double())
            part, part_weight = dm.loss_sums(result["logits"], labels, weights)
            loss_sum, weight_sum = loss_sum + part, weight_sum + part_weight
            counted = int((weights > 0).any(1).sum())
            kept += (dm.expected_acceptance(result["logits"], labels, weights) - 1.0) * counted
            blocks += counted
        optimizer.zero_grad()
        (loss_sum / weight_sum).backward()
        norm = torch.nn.utils.clip_grad_norm_(w.values(), CLIP).item()
        optimizer.param_groups[0]["lr"] = lr
        optimizer.step()
        steps.append({"lr": lr, "loss": (loss_sum / weight_sum).item(), "loss_sum": loss_sum.item(),
                      "weight_sum": weight_sum.item(),
                      "grad_norm": norm, "expected_acceptance": 1.0 + kept / blocks})
    totals = {k: v.detach().sum().item() for k, v in w.items()}
    squares = {k: v.detach().pow(2).sum().item() for k, v in w.items()}
    save_json(folder / "expected.json", {
        "target": infer.TARGET, "drafter": "infer/drafter", "steps": steps, "final_weight_sum": totals,
        "final_weight_sum_of_squares": squares,
    })


if __name__ == "__main__":
    main()
