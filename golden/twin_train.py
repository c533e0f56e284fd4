"""A PyTorch twin of a training run: the same batches, the same start, the same schedule, so that two loss curves can be compared.

    python twin_train.py --dump DIR --target HF_FOLDER --drafter PLAIN_FOLDER [--device cuda] [--dtype bf16|fp32]
                         [--attention flex|dense] [--recompute] [--out FILE.jsonl] [--save FILE.safetensors]

It refuses to draw anything at random: anchors, labels and weights come from the dump.

The dump is one folder. run.json:

    lr            list of floats, one per optimizer step: the learning rate of that step
    clip          largest gradient norm; all gradients times min(1, clip / (norm + 1e-6))
    betas, eps, weight_decay    AdamW
    global_batch  G: batches per optimizer step. Step s trains the files s*G .. s*G+G-1; the last step may be short
    gamma         only informative: weights are already in the batches
    block, mask_token, layer_ids    block size B, mask token id, captured target layers (0-based, the stream after the layer)

batch-%06d.safetensors, numbered from 0:

    tokens      i32 [T]      packed tokens; rows from cu_seqlens[-1] on are padding and are cut off
    cu_seqlens  i32 [S+1]    first row of every sample, and the end; positions restart at each
    anchor      i32 [N]      position of the anchor within its sample; a negative one marks a padded block, which is dropped
    ctx_start   i32 [N]      row of the first token of the block's sample
    labels      i32 [N, B]   token anchor + k (slot 0 and slots past the end: any valid id)
    weights     f32 [N, B]   loss weight, 0 for slot 0 and for slots past the end

fp32: target, drafter and loss in float32 (TF32 off). bf16: target in bf16, drafter under bf16 autocast with fp32 masters,
norms, RoPE and loss in fp32. `--attention flex` is FlexAttention over block-sparse masks (CUDA, head_dim >= 16) and the default
there; `--attention dense` is a dense boolean mask, N*B rows by T + N*B columns, and the default elsewhere.
"""

import argparse
import contextlib
import functools
import json
import pathlib
import sys
import time

import torch
import torch.nn.attention.flex_attention
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM


class HeadLoss(torch.autograd.Function):
    """Sum of w * CE over rows through a frozen head, in chunks: full logits never exist. Gives loss sum and hits [rows]."""

    @staticmethod
    def forward(ctx, x, head, labels, weights, rows):
        grad, total = torch.empty_like(x), torch.zeros((), dtype=torch.float32, device=x.device)
        hit = torch.empty(x.shape[0], dtype=torch.bool, device=x.device)
        for s in range(0, x.shape[0], rows):
            c = slice(s, s + rows)
            logits = (x[c] @ head.T).float()
            log_z = logits.logsumexp(-1)
            label = labels[c, None]
            total += (weights[c] * (log_z - logits.gather(1, label)[:, 0])).sum()
            hit[c] = logits.argmax(-1) == labels[c]
            p = torch.exp(logits - log_z[:, None])
            p.scatter_add_(1, label, p.new_full(label.shape, -1.0))
            grad[c] = (p * weights[c, None]).to(head.dtype) @ head
        ctx.save_for_backward(grad)
        ctx.mark_non_differentiable(hit)
        return total, hit

    @staticmethod
    def backward(ctx, upstream, _hit):
        return ctx.saved_tensors[0] * upstream, None, None, None, None


def rms_norm(x, weight, eps):
    y = x.float()
    return (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + eps) * weight.float()).to(x.dtype)


def rope(x, positions, theta):
    """Rotate-half RoPE of x [rows, heads, D], fp32 tables."""
    d = x.shape[-1]
    freq = theta ** (-torch.arange(0, d, 2, dtype=torch.float32, device=x.device) / d)
    angle = positions[:, None].float() * freq
    cos, sin = angle.cos()[:, None], angle.sin()[:, None]
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1).to(x.dtype)


class Attention:
    """One batch's masks: query row r is slot r % B of block r // B; keys are the T context rows, then the N*B block rows."""

    def __init__(self, tokens: int, ctx_start, anchor, block: int, windows: set, flex: bool):
        self.flex, device = flex, anchor.device
        n = anchor.numel()

        def rule(window):
            def visible(_b, _h, q, kv):
                at, k = q // block, q % block
                position = kv - ctx_start[at]
                context = (kv < tokens) & (position >= 0) & (position < anchor[at])
                own = (kv >= tokens) & ((kv - tokens) // block == at)
                if window is not None:
                    context = context & (position >= anchor[at] + k - (window - 1))
                    own = own & ((kv - tokens) % block <= k)
                return context | own

            return visible

        self.masks = {}
        for w in windows:
            if self.flex:
                self.masks[w] = compiled("create_block_mask")(rule(w), None, None, n * block, tokens + n * block, device=device)
            else:
                q, kv = torch.arange(n * block, device=device), torch.arange(tokens + n * block, device=device)
                self.masks[w] = rule(w)(None, None, q[:, None], kv[None])

    def __call__(self, q, k, v, window):
        """q [rows, hq, D], k and v [T + N*B, hk, D]; gives [rows, hq*D]."""
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
        if self.flex:
            y = compiled("flex_attention")(q, k, v, block_mask=self.masks[window], enable_gqa=True)
        else:
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=self.masks[window], enable_gqa=True)
        return y[0].transpose(0, 1).flatten(1)


@functools.cache
def compiled(name: str):
    """A compiled function of torch.nn.attention.flex_attention; the attention itself is compiled once for all shapes."""
    return torch.compile(getattr(torch.nn.attention.flex_attention, name), dynamic=True if name == "flex_attention" else None)


class Drafter:
    """The plain checkpoint's tensors as fp32 masters, and the DFlash forward pass over them."""

    def __init__(self, folder: pathlib.Path, device: torch.device, attention: str | None):
        self.config = json.loads((folder / "config.json").read_text())
        self.flex = (attention or ("flex" if device.type == "cuda" and self.config["head_dim"] >= 16 else "dense")) == "flex"
        self.w = {k: v.to(device, torch.float32).requires_grad_() for k, v in load_file(folder / "model.safetensors").items()}
        # Sorted, so that the order of the gradient norm's sum does not depend on the file.
        self.parameters = [self.w[k] for k in sorted(self.w)]

    def windows(self) -> list:
        c = self.config
        return [c["sliding_window"] if kind == "sliding_attention" else None for kind in c["layer_types"]]

    def hidden(self, captured, tokens, positions, ctx_start, anchor, embed, mask_token, recompute: bool):
        """Final normed hidden states [N*B, H]."""
        c, w = self.config, self.w
        b, d, eps, theta = c["block_size"], c["head_dim"], c["rms_norm_eps"], c["rope_theta"]
        slot_pos = (anchor[:, None] + torch.arange(b, device=anchor.device)).flatten()
        ids = torch.full((anchor.numel(), b), mask_token, device=anchor.device)
        ids[:, 0] = tokens[ctx_start + anchor]
        x = embed[ids.flatten()]
        attention = Attention(tokens.numel(), ctx_start, anchor, b, set(self.windows()), self.flex)
        ctx = rms_norm(F.linear(captured, w["fc.weight"]), w["hidden_norm.weight"], eps)
        key_pos = torch.cat([positions, slot_pos])

        def layer(x, ctx, i, window):
            p = f"layers.{i}."
            y = rms_norm(x, w[p + "input_layernorm.weight"], eps)
            both = torch.cat([ctx.to(y.dtype), y])
            q, k, v = (F.linear(s, w[p + f"self_attn.{n}_proj.weight"]).unflatten(-1, (-1, d))
                       for n, s in (("q", y), ("k", both), ("v", both)))
            q = rope(rms_norm(q, w[p + "self_attn.q_norm.weight"], eps), slot_pos, theta)
            k = rope(rms_norm(k, w[p + "self_attn.k_norm.weight"], eps), key_pos, theta)
            x = x + F.linear(attention(q, k, v, window), w[p + "self_attn.o_proj.weight"])
            y = rms_norm(x, w[p + "post_attention_layernorm.weight"], eps)
            y = F.silu(F.linear(y, w[p + "mlp.gate_proj.weight"])) * F.linear(y, w[p + "mlp.up_proj.weight"])
            return x + F.linear(y, w[p + "mlp.down_proj.weight"])

        for i, window in enumerate(self.windows()):
            x = checkpoint(layer, x, ctx, i, window, use_reentrant=False) if recompute else layer(x, ctx, i, window)
        return rms_norm(x, w["norm.weight"], eps)


class Target:
    """The frozen target: captured residual streams, embedding and head."""

    def __init__(self, folder: pathlib.Path, device: torch.device, dtype: torch.dtype, layer_ids: list[int]):
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="sdpa").to(device).eval()
        self.model.requires_grad_(False)
        self.embed, self.head = self.model.get_input_embeddings().weight, self.model.get_output_embeddings().weight
        self.layer_ids = layer_ids

    @torch.no_grad()
    def captured(self, tokens, cu: list[int]):
        """[T, n*H], every sample run alone."""
        layers, rows = self.model.model.layers, []
        for a, b in zip(cu, cu[1:]):
            seen = {}
            hooks = [layers[i].register_forward_hook(
                lambda _m, _in, out, i=i: seen.__setitem__(i, out[0] if isinstance(out, tuple) else out)) for i in self.layer_ids]
            self.model.model(tokens[a:b][None], use_cache=False)
            for h in hooks:
                h.remove()
            rows.append(torch.cat([seen[i][0] for i in self.layer_ids], dim=-1))
        return torch.cat(rows)


def batch_loss(target: Target, drafter: Drafter, run: dict, path: pathlib.Path, device, bf16: bool, recompute: bool, rows: int):
    """(sum of w*CE with gradient, sum of w, expected acceptance's (sum over blocks, blocks)) of one batch file."""
    b = {k: v.to(device) for k, v in load_file(path).items()}
    cu = b["cu_seqlens"].tolist()
    tokens, real = b["tokens"][: cu[-1]].long(), b["anchor"] >= 0
    anchor, ctx_start = b["anchor"][real].long(), b["ctx_start"][real].long()
    labels, weights = b["labels"][real].long(), b["weights"][real].float()
    positions = torch.cat([torch.arange(e - s, device=device) for s, e in zip(cu, cu[1:])])
    captured = target.captured(tokens, cu)
    cast = torch.autocast(device.type, torch.bfloat16) if bf16 else contextlib.nullcontext()
    with cast:
        hidden = drafter.hidden(captured, tokens, positions, ctx_start, anchor, target.embed, run["mask_token"], recompute)
    supervised = weights.flatten() > 0
    loss_sum, hit_rows = HeadLoss.apply(hidden.to(target.head.dtype)[supervised], target.head, labels.flatten()[supervised],
                                        weights.flatten()[supervised], rows)
    valid = weights > 0
    hit = torch.zeros_like(supervised)
    hit[supervised] = hit_rows
    kept = (hit.view_as(valid) | ~valid).long().cumprod(1) * valid
    blocks = valid.any(1)
    return loss_sum, weights.double().sum().item(), kept.sum(1)[blocks].sum().item(), int(blocks.sum())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dump", type=pathlib.Path, required=True)
    parser.add_argument("--target", type=pathlib.Path, required=True)
    parser.add_argument("--drafter", type=pathlib.Path, required=True, help="plain folder with the initial weights")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", choices=["bf16", "fp32"], default="fp32")
    parser.add_argument("--attention", choices=["flex", "dense"])
    parser.add_argument("--out", type=pathlib.Path, help="JSON lines, one per step (standard output otherwise)")
    parser.add_argument("--save", type=pathlib.Path, help="write the trained weights (plain names, fp32) here")
    parser.add_argument("--recompute", action="store_true", help="recompute layers in the backward pass, to save memory")
    parser.add_argument("--head-rows", type=int, default=1024)
    args = parser.parse_args()
    device, bf16 = torch.device(args.device), args.dtype == "bf16"
    torch.backends.cuda.matmul.allow_tf32 = False
    run = json.loads((args.dump / "run.json").read_text())
    files = sorted(args.dump.glob("batch-*.safetensors"))
    if [p.name for p in files] != [f"batch-{i:06d}.safetensors" for i in range(len(files))] or not files:
        raise SystemExit(f"{args.dump}: batch files are not numbered 0.. without a gap")
    groups = [files[i : i + run["global_batch"]] for i in range(0, len(files), run["global_batch"])]
    if len(groups) < len(run["lr"]):
        print(f"{args.dump}: {len(run['lr'])} learning rates but batches for {len(groups)} steps; stops there", file=sys.stderr)
    target = Target(args.target, device, torch.bfloat16 if bf16 else torch.float32, run["layer_ids"])
    drafter = Drafter(args.drafter, device, args.attention)
    if drafter.config["block_size"] != run["block"]:
        raise SystemExit(f"block size {drafter.config['block_size']} of the drafter, {run['block']} of the dump")
    optimizer = torch.optim.AdamW(drafter.parameters, betas=tuple(run["betas"]), eps=run["eps"], weight_decay=run["weight_decay"])
    with open(args.out, "w") if args.out else contextlib.nullcontext(sys.stdout) as out:
        for step, (lr, group) in enumerate(zip(run["lr"], groups)):
            began = time.perf_counter()
            optimizer.zero_grad()
            loss_sum = weight_sum = kept = blocks = 0.0
            for path in group:
                part, w, a, n = batch_loss(target, drafter, run, path, device, bf16, args.recompute, args.head_rows)
                part.backward()
                loss_sum, weight_sum, kept, blocks = loss_sum + part.item(), weight_sum + w, kept + a, blocks + n
            for p in drafter.parameters:
                p.grad.div_(weight_sum)
            norm = torch.nn.utils.clip_grad_norm_(drafter.parameters, run["clip"]).item()
            optimizer.param_groups[0]["lr"] = lr
            optimizer.step()
            line = {"step": step, "lr": lr, "loss": loss_sum / weight_sum, "loss_sum": loss_sum, "weight_sum": weight_sum,
                    "grad_norm": norm, "expected_acceptance": 1.0 + kept / max(1, blocks),
                    "step_ms": round((time.perf_counter() - began) * 1e3, 3)}
            print(json.dumps(line), file=out, flush=True)
    if args.save:
        save_file({k: v.detach().cpu().contiguous() for k, v in drafter.w.items()}, args.save)
    return 0


if __name__ == "__main__":
    sys.exit(main())
