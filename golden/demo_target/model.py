"""A compact Qwen3 in PyTorch with the parameter names of `transformers`: what the demo target is trained and sampled with.

`export.py` checks its logits against `transformers`' own Qwen3ForCausalLM.
"""

import torch
import torch.nn as nn
import torch.nn.functional as F


class RMSNorm(nn.Module):
    def __init__(self, n, eps):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(n))
        self.eps = eps

    def forward(self, x):
        return F.rms_norm(x.float(), self.weight.shape, self.weight, self.eps)


def rope_tables(positions, head_dim, theta):
    """cos and sin of shape positions.shape + [head_dim], rotate-half form."""
    inv = theta ** (-torch.arange(0, head_dim, 2, dtype=torch.float32, device=positions.device) / head_dim)
    angle = positions.float()[..., None] * inv
    angle = torch.cat([angle, angle], -1)
    return angle.cos(), angle.sin()


def rope(x, cos, sin):
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat([-b, a], -1) * sin


class Attention(nn.Module):
    def __init__(self, c):
        super().__init__()
        h, d = c["hidden_size"], c["head_dim"]
        self.heads, self.kv_heads, self.d = c["num_attention_heads"], c["num_key_value_heads"], d
        self.q_proj = nn.Linear(h, self.heads * d, bias=False)
        self.k_proj = nn.Linear(h, self.kv_heads * d, bias=False)
        self.v_proj = nn.Linear(h, self.kv_heads * d, bias=False)
        self.o_proj = nn.Linear(self.heads * d, h, bias=False)
        self.q_norm = RMSNorm(d, c["rms_norm_eps"])
        self.k_norm = RMSNorm(d, c["rms_norm_eps"])

    def qkv(self, x, cos, sin):
        """x [B, T, H] -> q [B, heads, T, d], k and v [B, kv_heads, T, d], q and k normed and rotated."""
        b, t, _ = x.shape
        q = self.q_norm(self.q_proj(x).view(b, t, self.heads, self.d)).transpose(1, 2)
        k = self.k_norm(self.k_proj(x).view(b, t, self.kv_heads, self.d)).transpose(1, 2)
        v = self.v_proj(x).view(b, t, self.kv_heads, self.d).transpose(1, 2)
        return rope(q, cos, sin), rope(k, cos, sin), v

    def attend(self, q, k, v, mask):
        rep = self.heads // self.kv_heads
        k, v = k.repeat_interleave(rep, 1), v.repeat_interleave(rep, 1)
        y = F.scaled_dot_product_attention(q.to(v.dtype), k.to(v.dtype), v, attn_mask=mask, is_causal=mask is None)
        return self.o_proj(y.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self, c):
        super().__init__()
        h, i = c["hidden_size"], c["intermediate_size"]
        self.gate_proj = nn.Linear(h, i, bias=False)
        self.up_proj = nn.Linear(h, i, bias=False)
        self.down_proj = nn.Linear(i, h, bias=False)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.self_attn = Attention(c)
        self.mlp = MLP(c)
        self.input_layernorm = RMSNorm(c["hidden_size"], c["rms_norm_eps"])
        self.post_attention_layernorm = RMSNorm(c["hidden_size"], c["rms_norm_eps"])


class Cache:
    """Keys and values of every layer, [layers, B, kv_heads, max_len, d], written at per-row positions."""

    def __init__(self, c, rows, max_len):
        shape = (c["num_hidden_layers"], rows, c["num_key_value_heads"], max_len, c["head_dim"])
        self.k, self.v = torch.zeros(shape), torch.zeros(shape)


class Qwen3(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.c = c
        self.embed_tokens = nn.Embedding(c["vocab_size"], c["hidden_size"])
        self.layers = nn.ModuleList(Layer(c) for _ in range(c["num_hidden_layers"]))
        self.norm = RMSNorm(c["hidden_size"], c["rms_norm_eps"])
        for name, p in self.named_parameters():
            if name.endswith("q_norm.weight"):
                nn.init.constant_(p, 2.0)  # sharper attention from the start: scores reach 2 sqrt(d)
            elif p.dim() == 2:
                out = name.endswith(("o_proj.weight", "down_proj.weight"))
                nn.init.normal_(p, std=0.04 / ((2 * c["num_hidden_layers"]) ** 0.5 if out else 1.0))

    def head(self, x):
        return F.linear(self.norm(x), self.embed_tokens.weight)

    def forward(self, ids, capture=(), cache=None, start=None):
        """Residual stream after the last layer [B, T, H], and after each layer of `capture`.

        With a cache, row b's tokens take positions start[b] .. start[b]+T-1 and see the cached positions before them.
        """
        b, t = ids.shape
        pos = torch.arange(t) if cache is None else start[:, None] + torch.arange(t)
        cos, sin = rope_tables(pos, self.c["head_dim"], self.c["rope_theta"])
        mask = None
        if cache is not None:
            cos, sin = cos[:, None], sin[:, None]
            keys = int(pos.max()) + 1
            mask = (torch.arange(keys) <= pos[..., None])[:, None]
            at = pos.clamp(max=cache.k.shape[3] - 1)[:, None, :, None].expand(-1, self.c["num_key_value_heads"], -1, self.c["head_dim"])
        x, kept = self.embed_tokens(ids), []
        for i, layer in enumerate(self.layers):
            q, k, v = layer.self_attn.qkv(layer.input_layernorm(x), cos, sin)
            if cache is not None:
                cache.k[i].scatter_(2, at, k)
                cache.v[i].scatter_(2, at, v)
                k, v = cache.k[i, :, :, :keys], cache.v[i, :, :, :keys]
            x = x + layer.self_attn.attend(q, k, v, mask)
            x = x + layer.mlp(layer.post_attention_layernorm(x))
            if i in capture:
                kept.append(x)
        return (x, kept) if capture else x


@torch.no_grad()
def generate(model, prompts, stop, max_new, temperature, generator=None):
    """Completions (token lists, the stop token included) and whether each ended by itself. One batch; prompts may differ in length."""
    n, longest = len(prompts), max(map(len, prompts))
    ids = torch.zeros(n, longest, dtype=torch.long)
    for i, p in enumerate(prompts):
        ids[i, : len(p)] = torch.tensor(p)
    length = torch.tensor([len(p) for p in prompts])
    cache = Cache(model.c, n, longest + max_new)
    x = model(ids, cache=cache, start=torch.zeros(n, dtype=torch.long))
    last = x[torch.arange(n), length - 1]
    out, rows = [[] for _ in range(n)], torch.arange(n)
    for _ in range(max_new):
        logits = model.head(last)
        if temperature == 0:
            nxt = logits.argmax(-1)
        else:
            nxt = torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator)[:, 0]
        for r, tok in zip(rows.tolist(), nxt.tolist()):
            out[r].append(tok)
        alive = torch.tensor([t not in stop for t in nxt.tolist()])
        if not alive.any():
            break
        if not alive.all():
            cache.k, cache.v = cache.k[:, alive], cache.v[:, alive]
            rows, length, nxt = rows[alive], length[alive], nxt[alive]
        last = model(nxt[:, None], cache=cache, start=length)[:, 0]
        length = length + 1
    return out, [o[-1] in stop for o in out]
