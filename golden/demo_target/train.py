"""Trains the demo target's tokenizer and weights from the program in corpus.py, and writes them as a checkpoint for export.py.

    python train.py --out WORK --steps 800
"""

import argparse
import json
import math
import pathlib
import random
import time

import torch
import torch.nn.functional as F
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

import corpus
from model import Qwen3

SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|mask|>"]
CONFIG = dict(
    vocab_size=1280, hidden_size=128, intermediate_size=256, num_hidden_layers=6, num_attention_heads=4, num_key_value_heads=2,
    head_dim=32, rms_norm_eps=1e-6, rope_theta=10000.0, max_position_embeddings=512,
)
# Words and digits keep their leading space, digits stand alone, runs of spaces and newlines stay together.
SPLIT = r" ?\p{L}+| ?\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def train_tokenizer(texts, vocab_size):
    tok = Tokenizer(models.BPE())
    tok.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(SPLIT), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tok.decoder = decoders.ByteLevel()
    tok.train_from_iterator(texts, trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=SPECIALS, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False))
    return tok


def render(prompt):
    return f"<|im_start|>user\n{prompt}<|im_end|>\n<|im_start|>assistant\n"


def newton_schulz(g):
    """Muon's orthogonalisation of a stack of matrices (K. Jordan's quintic coefficients)."""
    a, b, c = 3.4445, -4.7750, 2.0315
    tall = g.shape[-2] > g.shape[-1]
    x = g.mT if tall else g
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        s = x @ x.mT
        x = a * x + (b * s + c * s @ s) @ x
    return x.mT if tall else x


class Muon:
    """Momentum, orthogonalised, for the layers' matrices; equal shapes are stacked."""

    def __init__(self, params, momentum=0.95):
        self.groups, self.momentum = {}, momentum
        for p in params:
            self.groups.setdefault(p.shape, []).append(p)
        self.state = {s: torch.zeros(len(ps), *s) for s, ps in self.groups.items()}

    @torch.no_grad()
    def step(self, lr):
        for shape, ps in self.groups.items():
            g, m = torch.stack([p.grad for p in ps]), self.state[shape]
            m.lerp_(g, 1 - self.momentum)
            u = newton_schulz(g.lerp(m, self.momentum)) * max(1, shape[0] / shape[1]) ** 0.5
            for p, d in zip(ps, u):
                p.add_(d, alpha=-lr)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--out", type=pathlib.Path, required=True)
    ap.add_argument("--steps", type=int, default=800)
    ap.add_argument("--families", choices=["first", "all"], default="all", help="first: the copying families alone")
    ap.add_argument("--init", type=pathlib.Path, help="an earlier --out: its tokenizer and weights are the start")
    ap.add_argument("--decay-from", type=float, default=0.4, help="share of the steps after which the learning rates fall (1: never)")
    ap.add_argument("--seed", type=int, default=1)
    ap.add_argument("--rows", type=int, default=32, help="chats per step")
    ap.add_argument("--threads", type=int, default=2)
    ap.add_argument("--lr-muon", type=float, default=0.02)
    ap.add_argument("--lr-adam", type=float, default=4e-3)
    a = ap.parse_args()
    torch.set_num_threads(a.threads)
    torch.manual_seed(a.seed)
    a.out.mkdir(parents=True, exist_ok=True)

    rng = random.Random(a.seed)
    if a.init:
        tok = Tokenizer.from_file(str(a.init / "tokenizer.json"))
    else:
        sample = [corpus.chat(rng) for _ in range(20000)]
        tok = train_tokenizer([t for _, _, p, ans, _ in sample for t in (p + "\n", ans)], CONFIG["vocab_size"])
    tok.save(str(a.out / "tokenizer.json"))

    def encode(count, families):
        chats = [corpus.chat(rng, family=rng.choice(families)) for _ in range(count)]
        ps = tok.encode_batch([render(c[2]) for c in chats])
        ans = tok.encode_batch([c[3] + "<|im_end|>" for c in chats])
        return [(p.ids, q.ids) for p, q in zip(ps, ans)]

    model = Qwen3(CONFIG)
    if a.init:
        model.load_state_dict(torch.load(a.init / "weights.pt"))
    matrices = [p for n, p in model.named_parameters() if p.dim() == 2 and n.startswith("layers")]
    rest = [p for n, p in model.named_parameters() if not (p.dim() == 2 and n.startswith("layers"))]
    muon, adam = Muon(matrices), torch.optim.AdamW(rest, lr=a.lr_adam, betas=(0.9, 0.98), weight_decay=0.0)
    print(f"{sum(p.numel() for p in model.parameters())} parameters", flush=True)

    pool, seen, start, log = [], 0, time.time(), []
    for step in range(a.steps):
        if not pool:
            # Rows of near-equal length share a batch; batches are then shuffled.
            families = corpus.FIRST if a.families == "first" else list(corpus.FAMILIES)
            chats = sorted(encode(a.rows * 20, families), key=lambda c: len(c[0]) + len(c[1]))
            pool = [chats[i : i + a.rows] for i in range(0, len(chats), a.rows)]
            rng.shuffle(pool)
        batch = pool.pop()
        width = max(len(p) + len(q) for p, q in batch)
        ids, label = torch.zeros(len(batch), width, dtype=torch.long), torch.full((len(batch), width), -100)
        for i, (p, q) in enumerate(batch):
            ids[i, : len(p) + len(q)] = torch.tensor(p + q)
            label[i, len(p) - 1 : len(p) + len(q) - 1] = torch.tensor(q)
        x = model(ids)
        keep = label != -100
        loss = F.cross_entropy(model.head(x[keep]), label[keep])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        done = max(0.0, (step / a.steps - a.decay_from) / (1 - a.decay_from)) if a.decay_from < 1 else 0.0
        scale = min(1, (step + 1) / 50) * 0.5 * (1 + math.cos(math.pi * done))
        for g in adam.param_groups:
            g["lr"] = a.lr_adam * scale
        muon.step(a.lr_muon * scale)
        adam.step()
        model.zero_grad(set_to_none=True)
        seen += ids.numel()
        log.append(loss.item())
        if (step + 1) % 25 == 0:
            dt = time.time() - start
            print(f"step {step + 1} loss {sum(log[-25:]) / 25:.4f} tokens {seen} {seen / dt:.0f} tok/s {dt:.0f} s", flush=True)
            torch.save(model.state_dict(), a.out / "weights.pt")
    torch.save(model.state_dict(), a.out / "weights.pt")
    (a.out / "train.json").write_text(json.dumps(
        dict(steps=a.steps, rows=a.rows, tokens=seen, seconds=round(time.time() - start), loss=sum(log[-100:]) / 100)))


if __name__ == "__main__":
    main()
