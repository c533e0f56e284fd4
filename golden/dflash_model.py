"""The DFlash drafter in plain PyTorch, written to be read: dense masks, one tensor per idea, no cache.

Weights have the internal fused names. With H hidden, Ht target hidden, n captured layers, hq and hk heads, D head_dim, I
intermediate:

    fc [H, n*Ht]   hidden_norm [H]   norm [H]
    layers.{i}.input_norm [H]   layers.{i}.qkv [(hq+2*hk)*D, H] rows q, k, v   layers.{i}.q_norm [D]   layers.{i}.k_norm [D]
    layers.{i}.o [H, hq*D]   layers.{i}.post_norm [H]   layers.{i}.gate_up [2*I, H] rows gate, up   layers.{i}.down [H, I]

All linears are y = x @ W^T. Works in the dtype of the weights it is given.
"""

import dataclasses
import math

import torch
import torch.nn.functional as F

from common import Source

GAMMA = {16: 7.0, 10: 5.0, 8: 4.0}


@dataclasses.dataclass(frozen=True)
class Config:
    hidden: int
    target_hidden: int
    captured: int
    heads: int
    kv_heads: int
    head_dim: int
    inter: int
    vocab: int
    block: int
    mask_token: int
    layer_types: tuple[str, ...]  # "full_attention" or "sliding_attention"
    window: int | None
    rms_eps: float = 1e-6
    rope_theta: float = 10000.0

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Every weight's shape, in the order in which initial values are drawn."""
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        out = {"fc": (self.hidden, self.captured * self.target_hidden), "hidden_norm": (self.hidden,)}
        for i in range(len(self.layer_types)):
            p = f"layers.{i}."
            out |= {
                p + "input_norm": (self.hidden,), p + "qkv": (q + 2 * kv, self.hidden), p + "q_norm": (self.head_dim,),
                p + "k_norm": (self.head_dim,), p + "o": (self.hidden, q), p + "post_norm": (self.hidden,),
                p + "gate_up": (2 * self.inter, self.hidden), p + "down": (self.hidden, self.inter),
            }
        return out | {"norm": (self.hidden,)}


def initial_weights(cfg: Config, src: Source, std: float, norm_std: float) -> dict[str, torch.Tensor]:
    """Linears N(0, std), norms N(1, norm_std), float32."""
    return {
        name: src.normal(*shape, std=norm_std, mean=1.0) if len(shape) == 1 else src.normal(*shape, std=std)
        for name, shape in cfg.shapes().items()
    }


def to_plain(cfg: Config, w: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Fused internal names to the published checkpoint's names."""
    q, kv = cfg.heads * cfg.head_dim, cfg.kv_heads * cfg.head_dim
    out = {"fc.weight": w["fc"], "hidden_norm.weight": w["hidden_norm"], "norm.weight": w["norm"]}
    for i in range(len(cfg.layer_types)):
        a, p = f"layers.{i}.", f"layers.{i}."
        parts = w[a + "qkv"].split([q, kv, kv])
        gate, up = w[a + "gate_up"].chunk(2)
        out |= {
            p + "input_layernorm.weight": w[a + "input_norm"], p + "post_attention_layernorm.weight": w[a + "post_norm"],
            p + "self_attn.q_proj.weight": parts[0], p + "self_attn.k_proj.weight": parts[1],
            p + "self_attn.v_proj.weight": parts[2], p + "self_attn.o_proj.weight": w[a + "o"],
            p + "self_attn.q_norm.weight": w[a + "q_norm"], p + "self_attn.k_norm.weight": w[a + "k_norm"],
            p + "mlp.gate_proj.weight": gate, p + "mlp.up_proj.weight": up, p + "mlp.down_proj.weight": w[a + "down"],
        }
    return out


def from_plain(cfg: Config, w: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The published checkpoint's names to fused internal names."""
    out = {"fc": w["fc.weight"], "hidden_norm": w["hidden_norm.weight"], "norm": w["norm.weight"]}
    for i in range(len(cfg.layer_types)):
        p = f"layers.{i}."
        attn, mlp = p + "self_attn.", p + "mlp."
        out |= {
            p + "input_norm": w[p + "input_layernorm.weight"], p + "post_norm": w[p + "post_attention_layernorm.weight"],
            p + "qkv": torch.cat([w[attn + f"{x}_proj.weight"] for x in "qkv"]), p + "o": w[attn + "o_proj.weight"],
            p + "q_norm": w[attn + "q_norm.weight"], p + "k_norm": w[attn + "k_norm.weight"],
            p + "gate_up": torch.cat([w[mlp + "gate_proj.weight"], w[mlp + "up_proj.weight"]]),
            p + "down": w[mlp + "down_proj.weight"],
        }
    assert {k: tuple(v.shape) for k, v in out.items()} == cfg.shapes()
    return out


def plain_config(cfg: Config, target_layers: int, layer_ids: list[int], max_positions: int) -> dict:
    """config.json of the published form for these weights."""
    sliding = cfg.window is not None
    return {
        "architectures": ["DFlashDraftModel"], "model_type": "qwen3", "block_size": cfg.block,
        "num_target_layers": target_layers,
        "dflash_config": {"mask_token_id": cfg.mask_token, "target_layer_ids": layer_ids},
        "hidden_size": cfg.hidden, "intermediate_size": cfg.inter, "num_hidden_layers": len(cfg.layer_types),
        "num_attention_heads": cfg.heads, "num_key_value_heads": cfg.kv_heads, "head_dim": cfg.head_dim,
        "hidden_act": "silu", "layer_types": list(cfg.layer_types), "use_sliding_window": sliding,
        **({"sliding_window": cfg.window} if sliding else {}), "max_window_layers": len(cfg.layer_types),
        "max_position_embeddings": max_positions, "rms_norm_eps": cfg.rms_eps, "rope_theta": cfg.rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": cfg.rope_theta}, "vocab_size": cfg.vocab,
        "tie_word_embeddings": False, "attention_bias": False, "attention_dropout": 0.0, "dtype": "float32",
    }


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


def rope(x: torch.Tensor, positions: torch.Tensor, theta: float, rotary: int | None = None) -> torch.Tensor:
    """Rotate-half (NeoX) RoPE of x [T, heads, D] over its first `rotary` dimensions (all of them by default)."""
    rotary = x.shape[-1] if rotary is None else rotary
    freq = theta ** (-torch.arange(0, rotary, 2, dtype=x.dtype) / rotary)
    angle = positions[:, None].to(x.dtype) * freq  # [T, rotary / 2]
    cos, sin = angle.cos()[:, None], angle.sin()[:, None]
    a, b, rest = x[..., : rotary // 2], x[..., rotary // 2 : rotary], x[..., rotary:]
    return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], dim=-1)


def block_mask(tokens: int, ctx_start: torch.Tensor, anchor: torch.Tensor, block: int, window: int | None) -> torch.Tensor:
    """True where a query may look: [N, B, T + B], context rows first, then the block's own slots.

    Context: rows of the same sample at positions strictly before the anchor. As row r of the sample that starts at row s has
    position r - s, these are the rows s <= r < s + anchor. With a window W also position >= anchor + k - (W - 1), and the
    block itself is causal.
    """
    row = torch.arange(tokens)[None, None]
    k = torch.arange(block)[None, :, None]
    position = row - ctx_start[:, None, None]
    context = (position >= 0) & (position < anchor[:, None, None])
    own = torch.ones(block, block, dtype=torch.bool)
    if window is not None:
        context = context & (position >= anchor[:, None, None] + k - (window - 1))
        own = own.tril()
    return torch.cat([context.expand(-1, block, -1), own.expand(anchor.numel(), -1, -1)], dim=-1)


def block_attention(q, k_ctx, v_ctx, k_blk, v_blk, mask):
    """q [N*B, hq, D]; k_ctx, v_ctx [T, hk, D]; k_blk, v_blk [N*B, hk, D]; mask [N, B, T + B]. Gives [N*B, hq, D].

    Head h reads key head h // (hq / hk).
    """
    n, b, _ = mask.shape
    hq, hk, d = q.shape[1], k_ctx.shape[1], q.shape[2]
    k_ctx, v_ctx, k_blk, v_blk = (x.repeat_interleave(hq // hk, dim=1) for x in (k_ctx, v_ctx, k_blk, v_blk))
    q, k_blk, v_blk = (x.unflatten(0, (n, b)) for x in (q, k_blk, v_blk))
    scores = torch.cat([torch.einsum("nqhd,khd->nhqk", q, k_ctx), torch.einsum("nqhd,nkhd->nhqk", q, k_blk)], dim=-1)
    p = (scores / math.sqrt(d)).masked_fill(~mask[:, None], float("-inf")).softmax(-1)
    t = k_ctx.shape[0]
    y = torch.einsum("nhqk,khd->nqhd", p[..., :t], v_ctx) + torch.einsum("nhqk,nkhd->nqhd", p[..., t:], v_blk)
    return y.flatten(0, 1)


def forward(cfg: Config, w, features, tokens, positions, ctx_start, anchor, embed, head) -> dict[str, torch.Tensor]:
    """The draft of every block.

    features [T, n*Ht]; positions [T]; tokens [T, or more: when decoding, the anchor itself has no features yet]; ctx_start (row
    of the sample's first token), anchor (position) [N];
    embed, head [V, H]. Gives ctx [T, H], k_ctx.{i}, v_ctx.{i} [T, hk*D], layer.{i} [N*B, H] (residual stream after layer i),
    hidden [N*B, H] (after the last norm) and logits [N*B, V].
    """
    b, d, hq, hk = cfg.block, cfg.head_dim, cfg.heads, cfg.kv_heads
    slot = torch.arange(b)
    slot_pos = (anchor[:, None] + slot).reshape(-1)
    ids = torch.full((anchor.numel(), b), cfg.mask_token)
    ids[:, 0] = tokens[ctx_start + anchor]
    x = embed[ids.reshape(-1)]
    out = {}
    ctx = out["ctx"] = rms_norm(features @ w["fc"].T, w["hidden_norm"], cfg.rms_eps)
    for i, kind in enumerate(cfg.layer_types):
        p = f"layers.{i}."
        wq, wk, wv = w[p + "qkv"].split([hq * d, hk * d, hk * d])

        def keys(source, pos):
            return rope(rms_norm((source @ wk.T).unflatten(-1, (hk, d)), w[p + "k_norm"], cfg.rms_eps), pos, cfg.rope_theta)

        y = rms_norm(x, w[p + "input_norm"], cfg.rms_eps)
        q = rope(rms_norm((y @ wq.T).unflatten(-1, (hq, d)), w[p + "q_norm"], cfg.rms_eps), slot_pos, cfg.rope_theta)
        k_ctx, v_ctx = keys(ctx, positions), (ctx @ wv.T).unflatten(-1, (hk, d))
        k_blk, v_blk = keys(y, slot_pos), (y @ wv.T).unflatten(-1, (hk, d))
        mask = block_mask(features.shape[0], ctx_start, anchor, b, cfg.window if kind == "sliding_attention" else None)
        x = x + block_attention(q, k_ctx, v_ctx, k_blk, v_blk, mask).flatten(1) @ w[p + "o"].T
        gate, up = (rms_norm(x, w[p + "post_norm"], cfg.rms_eps) @ w[p + "gate_up"].T).chunk(2, dim=-1)
        x = x + (F.silu(gate) * up) @ w[p + "down"].T
        out |= {f"k_ctx.{i}": k_ctx.flatten(1), f"v_ctx.{i}": v_ctx.flatten(1), f"layer.{i}": x}
    out["hidden"] = rms_norm(x, w["norm"], cfg.rms_eps)
    out["logits"] = out["hidden"] @ head.T
    return out


def labels_and_weights(tokens, loss_mask, ctx_start, length, anchor, block, gamma):
    """Label of slot k is token anchor + k; weight = in bounds * loss_mask * exp(-(k-1)/gamma), 0 for slot 0. Both [N, B].

    `length` [N] is the length of each block's sample. A label with no token behind it is stored as 0, with weight 0.
    """
    k = torch.arange(block)
    target = anchor[:, None] + k
    inside = target < length[:, None]
    row = ctx_start[:, None] + torch.where(inside, target, 0)
    labels = torch.where(inside, tokens[row], 0)
    weights = inside * loss_mask[row] * torch.exp(-(k - 1).double() / gamma) * (k > 0)
    return labels, weights.to(torch.float32)


def loss_sums(logits, labels, weights) -> tuple[torch.Tensor, torch.Tensor]:
    """(sum of w * CE, sum of w) over all slots."""
    ce = F.cross_entropy(logits, labels.reshape(-1), reduction="none")
    w = weights.reshape(-1).to(logits.dtype)
    return (w * ce).sum(), w.sum()


def expected_acceptance(logits, labels, weights) -> float:
    """1 + mean over blocks with a valid slot of sum_k prod_{i<=k}(hit_i or not valid_i) * valid_k."""
    n, b = labels.shape
    valid = weights > 0
    hit = logits.argmax(-1).view(n, b) == labels
    kept = (hit | ~valid).cumprod(1) * valid
    blocks = valid.any(1)
    return 1.0 + (kept.sum(1)[blocks].double().mean().item() if blocks.any() else 0.0)


def clip_(grads: list[torch.Tensor], limit: float) -> float:
    """torch.nn.utils.clip_grad_norm_ in the open: all gradients times min(1, limit / (norm + 1e-6)). Gives the norm before."""
    norm = torch.sqrt(sum(g.pow(2).sum() for g in grads))
    scale = torch.clamp(limit / (norm + 1e-6), max=1.0)
    for g in grads:
        g.mul_(scale)
    return norm.item()
