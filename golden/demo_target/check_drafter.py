"""Proof that the demo works: trains a DFlash drafter on the shipped completions and decodes the held-out prompts with it.

    python check_drafter.py --demo ../../crates/cli/demo

DFlash as in arXiv 2602.06036: context features are the captured residual streams, concatenated, `rms_norm(fc(.))`; a block is the
anchor's embedding and B - 1 mask embeddings; queries see the context strictly before the anchor and their own block in both
directions; slot k is trained on token anchor + k with weight exp(-(k - 1) / gamma).
"""

import argparse
import json
import math
import pathlib
import time

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

from export import MAX_NEW, load, loops
from model import MLP, Attention, Cache, RMSNorm, rope, rope_tables
from train import CONFIG, render


class DraftLayer(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.self_attn, self.mlp = Attention(c), MLP(c)
        self.input_layernorm = RMSNorm(c["hidden_size"], c["rms_norm_eps"])
        self.post_attention_layernorm = RMSNorm(c["hidden_size"], c["rms_norm_eps"])


class Drafter(nn.Module):
    def __init__(self, c, captured, block, init_std):
        super().__init__()
        h = c["hidden_size"]
        self.c, self.block = c, block
        self.fc = nn.Linear(captured * h, h, bias=False)
        self.hidden_norm, self.norm = RMSNorm(h, c["rms_norm_eps"]), RMSNorm(h, c["rms_norm_eps"])
        self.layers = nn.ModuleList(DraftLayer(c) for _ in range(c["num_hidden_layers"]))
        for p in self.parameters():
            if p.dim() == 2:
                nn.init.normal_(p, std=init_std)

    def forward(self, features, anchors, x):
        """features [S, T, n·H], anchors [S, A] and block inputs x [S, A, B, H] -> states before the head [S, A, B, H].

        Samples are rows here, so a block's context is its own row before its anchor.
        """
        s, t, _ = features.shape
        n_blocks, b = x.shape[1], self.block
        heads, kv, d = self.c["num_attention_heads"], self.c["num_key_value_heads"], self.c["head_dim"]
        ctx = self.hidden_norm(self.fc(features))
        cos_c, sin_c = rope_tables(torch.arange(t), d, self.c["rope_theta"])
        cos_b, sin_b = rope_tables(anchors[..., None] + torch.arange(b), d, self.c["rope_theta"])
        cos_b, sin_b = cos_b[:, :, :, None], sin_b[:, :, :, None]
        seen = (torch.arange(t) < anchors[..., None])[:, None, None, :, None]  # [S, 1, 1, A, 1, T]
        for layer in self.layers:
            at, y = layer.self_attn, layer.input_layernorm(x)
            q = rope(at.q_norm(at.q_proj(y).view(s, n_blocks, b, heads, d)), cos_b, sin_b).view(s, n_blocks, b, kv, heads // kv, d)
            k = rope(at.k_norm(at.k_proj(y).view(s, n_blocks, b, kv, d)), cos_b, sin_b)
            v = at.v_proj(y).view(s, n_blocks, b, kv, d)
            kc = rope(at.k_norm(at.k_proj(ctx).view(s, t, kv, d)), cos_c[:, None], sin_c[:, None])
            vc = at.v_proj(ctx).view(s, t, kv, d)
            far = torch.einsum("sabkgd,stkd->skgabt", q, kc).masked_fill(~seen, float("-inf"))
            near = torch.einsum("sabkgd,sackd->skgabc", q, k)
            p = (torch.cat([far, near], -1) * d**-0.5).softmax(-1)
            o = torch.einsum("skgabt,stkd->sabkgd", p[..., :t], vc) + torch.einsum("skgabc,sackd->sabkgd", p[..., t:], v)
            x = x + at.o_proj(o.reshape(s, n_blocks, b, heads * d))
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        return self.norm(x)


def block_inputs(target, tok, token_ids, block):
    """[..., ] anchor tokens -> [..., B, H] embeddings of the anchor and B - 1 masks."""
    mask = torch.full((*token_ids.shape, block - 1), tok.token_to_id("<|mask|>"))
    return target.embed_tokens(torch.cat([token_ids[..., None], mask], -1))


@torch.no_grad()
def decode(target, drafter, tok, stop, prompts, layer_ids):
    """Speculative decoding at temperature 0. Answers, (emitted, passes) per prompt, accepted-through counts per slot."""
    b, n = drafter.block, len(prompts)
    ids = [tok.encode(render(p)).ids for p in prompts]
    length = torch.tensor([len(i) for i in ids])
    room = int(length.max()) + MAX_NEW + b
    first = torch.zeros(n, int(length.max()), dtype=torch.long)
    for r, i in enumerate(ids):
        first[r, : len(i)] = torch.tensor(i)
    cache, rows = Cache(target.c, n, room), torch.arange(n)
    x, kept = target(first, capture=layer_ids, cache=cache, start=torch.zeros(n, dtype=torch.long))
    feats = torch.zeros(n, room, len(layer_ids) * x.shape[-1])
    feats[:, : first.shape[1]] = torch.cat(kept, -1)
    anchor = target.head(x[rows, length - 1]).argmax(-1)
    out = [[t] for t in anchor.tolist()]
    emitted, passes, through = [0] * n, [0] * n, [0] * (b - 1)
    while True:
        live = torch.tensor([out[r][-1] not in stop and len(out[r]) < MAX_NEW for r in rows.tolist()])
        if not live.any():
            return out, list(zip(emitted, passes)), through
        if not live.all():
            rows, length, anchor, feats = rows[live], length[live], anchor[live], feats[live]
            cache.k, cache.v = cache.k[:, live], cache.v[:, live]
        top = int(length.max())
        x = block_inputs(target, tok, anchor[:, None], b)
        drafts = F.linear(drafter(feats[:, :top], length[:, None], x)[:, 0, 1:], target.embed_tokens.weight).argmax(-1)
        x, kept = target(torch.cat([anchor[:, None], drafts], 1), capture=layer_ids, cache=cache, start=length)
        truth, kept = target.head(x).argmax(-1), torch.cat(kept, -1)
        same = (truth[:, :-1] == drafts).long().cumprod(1).sum(1)
        for j, r in enumerate(rows.tolist()):
            took = int(same[j])
            new = truth[j, : took + 1].tolist()
            for i in range(took):
                through[i] += 1
            new = new[: next((i + 1 for i, t in enumerate(new) if t in stop), len(new))][: MAX_NEW - len(out[r])]
            out[r] += new
            emitted[r] += len(new)
            passes[r] += 1
            feats[j, int(length[j]) : int(length[j]) + b] = kept[j]
        anchor = truth[torch.arange(len(rows)), same]
        length = length + same + 1


def measure(target, drafter, tok, stop, prompts, layer_ids):
    out, counts, through = [], [], [0] * (drafter.block - 1)
    for at in range(0, len(prompts), 32):
        o, c, t = decode(target, drafter, tok, stop, prompts[at : at + 32], layer_ids)
        out, counts, through = out + o, counts + c, [x + y for x, y in zip(through, t)]
    passes = sum(p for _, p in counts)
    return out, dict(
        tau=round(sum(e for e, _ in counts) / passes, 3), mean_of_prompts=round(sum(e / p for e, p in counts if p) / sum(p > 0 for _, p in counts), 3),
        passes=passes, looping=sum(map(loops, out)), unfinished=sum(o[-1] not in stop for o in out),
        accepted_through_slot=[round(x / passes, 3) for x in through])


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--demo", type=pathlib.Path, required=True)
    ap.add_argument("--layers", type=int, default=2)
    ap.add_argument("--intermediate", type=int, default=256)
    ap.add_argument("--layer-ids", type=int, nargs="+", default=[1, 2, 3, 4])
    ap.add_argument("--heads", type=int, nargs=3, default=[4, 2, 64], metavar=("HEADS", "KV", "HEAD_DIM"))
    ap.add_argument("--init", type=float, default=0.08, help="standard deviation of the linears at the start")
    ap.add_argument("--block", type=int, default=16)
    ap.add_argument("--gamma", type=float, default=7.0)
    ap.add_argument("--lr", type=float, default=4e-3)
    ap.add_argument("--steps", type=int, default=600)
    ap.add_argument("--rows", type=int, default=6, help="samples per step")
    ap.add_argument("--anchors", type=int, default=16, help="blocks per sample")
    ap.add_argument("--every", type=int, default=0, help="also measure every so many steps")
    ap.add_argument("--prompts", type=int, default=96)
    ap.add_argument("--threads", type=int, default=2)
    a = ap.parse_args()
    torch.set_num_threads(a.threads)
    torch.manual_seed(4)
    target, tok, stop = load(a.demo)
    target.requires_grad_(False)
    drafter = Drafter(dict(
        CONFIG, num_hidden_layers=a.layers, intermediate_size=a.intermediate, num_attention_heads=a.heads[0], num_key_value_heads=a.heads[1],
        head_dim=a.heads[2]), len(a.layer_ids), a.block, a.init)
    prompts = [json.loads(line)["prompt"] for line in open(a.demo / "prompts.jsonl")][: a.prompts]
    samples = []
    for line in open(a.demo / "completions.jsonl"):
        user, assistant = json.loads(line)["messages"]
        p, q = tok.encode(render(user["content"])).ids, tok.encode(assistant["content"] + "<|im_end|>").ids
        samples.append((p, q))
    print(f"{len(samples)} samples, {sum(len(p) + len(q) for p, q in samples)} tokens, {sum(p.numel() for p in drafter.parameters())} drafter parameters")
    plain, before = measure(target, drafter, tok, stop, prompts, a.layer_ids)
    print("before", json.dumps(before), flush=True)

    adam = torch.optim.AdamW(drafter.parameters(), lr=a.lr, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0)
    weight = torch.exp(-(torch.arange(1, a.block) - 1) / a.gamma)
    start, log, queue, tflop = time.time(), [], [], 0.0

    def step():
        batch = [samples[queue.pop()] for _ in range(a.rows)]
        width = max(len(p) + len(q) for p, q in batch)
        ids, label = torch.zeros(len(batch), width, dtype=torch.long), torch.full((len(batch), width + a.block), -100)
        anchors = torch.zeros(len(batch), a.anchors, dtype=torch.long)
        for i, (p, q) in enumerate(batch):
            ids[i, : len(p) + len(q)] = torch.tensor(p + q)
            label[i, len(p) : len(p) + len(q)] = torch.tensor(q)
            candidates = torch.randperm(len(q) - 1)[: a.anchors]
            anchors[i] = len(p) + candidates.repeat(1 + a.anchors // len(candidates))[: a.anchors].sort().values
        with torch.no_grad():
            feats = torch.cat(target(ids, capture=a.layer_ids)[1], -1)
            x = block_inputs(target, tok, ids.gather(1, anchors), a.block)
        want = label.gather(1, (anchors[..., None] + torch.arange(1, a.block)).flatten(1)).view(len(batch), a.anchors, a.block - 1)
        y, keep = drafter(feats, anchors, x)[:, :, 1:], want != -100
        ce = F.cross_entropy(F.linear(y[keep], target.embed_tokens.weight), want[keep], reduction="none")
        w = weight.expand_as(want)[keep]
        loss = (ce * w).sum() / w.sum()
        loss.backward()
        return loss.item()

    for i in range(a.steps):
        if len(queue) < a.rows:
            queue = torch.randperm(len(samples)).tolist()
        if i == 0:
            with FlopCounterMode(display=False) as counter:
                log.append(step())
            tflop = counter.get_total_flops() * a.steps / 1e12
        else:
            log.append(step())
        nn.utils.clip_grad_norm_(drafter.parameters(), 1.0)
        for g in adam.param_groups:
            g["lr"] = a.lr * min(1, (i + 1) / (0.04 * a.steps)) * 0.5 * (1 + math.cos(math.pi * i / a.steps))
        adam.step()
        adam.zero_grad(set_to_none=True)
        if (i + 1) % 50 == 0:
            print(f"step {i + 1} loss {sum(log[-50:]) / 50:.3f} {time.time() - start:.0f} s", flush=True)
        if a.every and (i + 1) % a.every == 0:
            print(json.dumps(measure(target, drafter, tok, stop, prompts, a.layer_ids)[1]), flush=True)
    spent = time.time() - start
    out, after = measure(target, drafter, tok, stop, prompts, a.layer_ids)
    print("after", json.dumps(after))
    print(f"{tflop:.2f} TFLOP by torch's counter, {spent:.0f} s, answers equal to those decoded before: {sum(x == y for x, y in zip(out, plain))}/{len(out)}")


if __name__ == "__main__":
    main()
