"""Speculative decoding at temperature 0 with the tiny target qwen3_default and a tiny drafter, token by token.

The drafter is first trained here on the target's own greedy outputs, so that acceptance varies; `--weights FILE` takes plain
weights instead. Nothing is cached: every pass runs the target over the whole sequence again, float32, eager attention, which is
what a cache has to reproduce. Prompts are drawn until every decision has a clear margin between its two best tokens, so that
another order of summation gives the same tokens. The emitted tokens are asserted to be those of plain greedy decoding.

Writes infer/drafter/ (published form), infer/drafter-fused.safetensors, infer/decode.json, infer/decode.safetensors.
"""

import argparse
import pathlib

import torch
from safetensors.torch import load_file

import dflash_model as dm
import targets
from common import DATA, Source, i32, save, save_json, setup

TARGET, LAYER_IDS = "qwen3_default", [0, 2]
SLIDING, FULL = "sliding_attention", "full_attention"
CFG = dm.Config(hidden=40, target_hidden=40, captured=2, heads=4, kv_heads=2, head_dim=8, inter=40, vocab=128, block=8,
                mask_token=0, layer_types=(SLIDING, FULL), window=16)
TARGET_MARGIN, DRAFT_MARGIN = 1e-3, 5e-4
# Prompt length and max_new_tokens (the prefill's token counts). The last one also gets a stop token.
REQUESTS = [(1, 40), (3, 30), (7, 45), (12, 24), (19, 33), (5, 60)]
CANDIDATES = 4  # prompts drawn per request; the first with clear margins is used
STEPS, PER_STEP, ANCHORS, LR = 300, 6, 12, 4e-3


class Target:
    """The target and what the drafter sees of it."""

    def __init__(self, folder: pathlib.Path):
        self.model = targets.load(folder)
        self.embed = self.model.model.embed_tokens.weight.detach()
        self.head = self.model.lm_head.weight.detach()

    def run(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Captured features [T, n*H] and logits [T, V] of one sequence."""
        streams, logits = targets.residuals(self.model, tokens)
        return torch.cat([streams[i] for i in LAYER_IDS], dim=-1), logits

    def greedy(self, prompt: torch.Tensor, count: int) -> torch.Tensor:
        tokens = prompt
        for _ in range(count):
            tokens = torch.cat([tokens, self.run(tokens)[1][-1].argmax().reshape(1)])
        return tokens


def train(target: Target, prompts: list[torch.Tensor], limits: list[int]) -> dict[str, torch.Tensor]:
    """A drafter trained on the target's greedy continuations of these prompts, float32, AdamW.

    A random target has no language to learn, so the drafter learns the continuations it will be asked for.
    """
    src = Source(401)
    data = []
    for prompt, limit in zip(prompts, limits):
        tokens = target.greedy(prompt, limit + CFG.block)
        mask = (torch.arange(tokens.numel()) >= prompt.numel()).long()
        data.append((tokens, mask, target.run(tokens)[0]))
    w = {k: v.requires_grad_() for k, v in dm.initial_weights(CFG, src, std=0.1, norm_std=0.0).items()}
    optimizer = torch.optim.AdamW(w.values(), lr=LR, weight_decay=0.0)
    for step in range(STEPS):
        picked = [data[i] for i in src.ints(len(data), PER_STEP).tolist()]
        tokens, mask, features = (torch.cat(x) for x in zip(*picked))
        start, length, anchor, row = [], [], [], 0
        for t, m, _ in picked:
            first = int(m.argmax())
            anchor += (first + src.ints(t.numel() - 1 - first, ANCHORS)).tolist()
            start += [row] * ANCHORS
            length += [t.numel()] * ANCHORS
            row += t.numel()
        positions = torch.cat([torch.arange(t.numel()) for t, _, _ in picked])
        start, length, anchor = torch.tensor(start), torch.tensor(length), torch.tensor(anchor)
        labels, weights = dm.labels_and_weights(tokens, mask, start, length, anchor, CFG.block, dm.GAMMA[CFG.block])
        out = dm.forward(CFG, w, features, tokens, positions, start, anchor, target.embed, target.head)
        loss_sum, weight_sum = dm.loss_sums(out["logits"], labels, weights)
        optimizer.zero_grad()
        (loss_sum / weight_sum).backward()
        torch.nn.utils.clip_grad_norm_(w.values(), 1.0)
        optimizer.param_groups[0]["lr"] = LR * min(1.0, (step + 1) / 20, 2 * (STEPS - step) / STEPS)
        optimizer.step()
        if step % 100 == 0 or step == STEPS - 1:
            accepted = dm.expected_acceptance(out["logits"], labels, weights)
            print(f"step {step} loss {(loss_sum / weight_sum).item():.3f} expected acceptance {accepted:.2f}", flush=True)
    return {k: v.detach() for k, v in w.items()}


def margin(logits: torch.Tensor) -> float:
    top = logits.topk(2).values
    return (top[..., 0] - top[..., 1]).min().item()


@torch.no_grad()
def decode(target: Target, w, prompt: torch.Tensor, limit: int, stop: int | None) -> dict:
    """One prompt. A pass: draft a block after the anchor (the last emitted token), run the target over anchor and drafts, accept
    the longest prefix of drafts that the target would have chosen, emit it and the target's next token; cut after the stop token
    or the limit.
    """
    target_margin, draft_margin = float("inf"), float("inf")
    features, logits = target.run(prompt)
    target_margin = min(target_margin, margin(logits[-1]))
    emitted, passes = [int(logits[-1].argmax())], []
    first = {"features": features, "target_logits": logits}
    while len(emitted) < limit and emitted[-1] != stop:
        sequence = torch.cat([prompt, torch.tensor(emitted)])
        at = sequence.numel() - 1  # the anchor's position; the context is everything before it
        out = dm.forward(CFG, w, features[:at], sequence, torch.arange(at), torch.tensor([0]), torch.tensor([at]), target.embed,
                         target.head)
        draft = out["logits"][1:].argmax(-1)
        draft_margin = min(draft_margin, margin(out["logits"][1:]))
        if not passes:
            first |= {"draft_hidden": out["hidden"], "draft_logits": out["logits"]}
        features, logits = target.run(torch.cat([sequence, draft]))
        choice = logits[at:].argmax(-1)  # after the anchor, after each draft
        accepted = int((choice[:-1] == draft).long().cumprod(0).sum())
        target_margin = min(target_margin, margin(logits[at : at + accepted + 1]))
        new = choice[: accepted + 1].tolist()[: limit - len(emitted)]
        if stop in new:
            new = new[: new.index(stop) + 1]
        emitted += new
        passes.append({"anchor_position": at, "draft": draft.tolist(), "accepted": accepted, "emitted": len(new)})
    by_passes = sum(p["emitted"] for p in passes)
    assert by_passes == len(emitted) - 1
    return {
        "request": {"prompt": prompt.tolist(), "max_new_tokens": limit, "stop_token": stop, "emitted": emitted,
                    "finish": "stop" if emitted[-1] == stop else "length", "passes": passes,
                    "tau": by_passes / max(1, len(passes)),
                    "smallest_target_margin": target_margin, "smallest_draft_margin": draft_margin},
        "first": first, "clear": target_margin > TARGET_MARGIN and draft_margin > DRAFT_MARGIN,
    }


def stop_inside_a_pass(request: dict) -> int:
    """A token that first occurs in the middle of what a later pass emits, so that stopping there cuts the pass."""
    at = 1
    for i, p in enumerate(request["passes"]):
        for j in range(at, at + p["emitted"] - 1):
            if i >= 2 and request["emitted"].index(request["emitted"][j]) == j:
                return request["emitted"][j]
        at += p["emitted"]
    raise ValueError("no pass to stop in")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=pathlib.Path, default=DATA)
    parser.add_argument("--weights", type=pathlib.Path, help="plain drafter weights to decode with, instead of training them")
    args = parser.parse_args()
    setup()
    target = Target(args.out / "targets" / TARGET)
    src = Source(402)
    candidates = [[src.ints(CFG.vocab, n, low=1) for _ in range(CANDIDATES)] for n, _ in REQUESTS]
    if args.weights:
        w = dm.from_plain(CFG, load_file(args.weights))
    else:
        w = train(target, sum(candidates, []), [limit for _, limit in REQUESTS for _ in range(CANDIDATES)])
    folder = args.out / "infer"
    save(folder / "drafter" / "model.safetensors", dm.to_plain(CFG, w))
    save_json(folder / "drafter" / "config.json", dm.plain_config(CFG, 4, LAYER_IDS, 512))
    save(folder / "drafter-fused.safetensors", w)

    requests, first = [], None
    for number, (length, limit) in enumerate(REQUESTS):
        for prompt in candidates[number]:
            result = decode(target, w, prompt, limit, None)
            if number == len(REQUESTS) - 1:
                result = decode(target, w, prompt, limit, stop_inside_a_pass(result["request"]))
            if result["clear"]:
                break
        assert result["clear"], f"no candidate of request {number} has clear margins: take another seed"
        request = result["request"]
        plain = target.greedy(prompt, len(request["emitted"]))[length:].tolist()
        assert plain == request["emitted"], "speculative and plain greedy decoding differ"
        requests.append(request)
        if number == 2:
            first = result["first"]
    passes = sum(len(r["passes"]) for r in requests)
    save_json(folder / "decode.json", {
        "target": TARGET, "target_layer_ids": LAYER_IDS, "block": CFG.block, "requests": requests,
        "tau_pooled": sum(len(r["emitted"]) - 1 for r in requests) / passes,
        "tau_mean": sum(r["tau"] for r in requests) / len(requests),
        "tau_definition": "tokens emitted by verify passes (stop token included, the prefill's token excluded) / verify passes",
    })
    save(folder / "decode.safetensors", {"prompt": i32(requests[2]["prompt"])} | first)


if __name__ == "__main__":
    main()
