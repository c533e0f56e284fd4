"""Tiny random targets of each supported kind, and what transformers computes with them.

Per target NAME: the Hugging Face folder targets/NAME/ (float32 weights) and targets/NAME-expected.safetensors with the
residual stream after every layer and the logits. Each packed sample is run alone, eager attention, float32.

transformers 5.17 does not honour `partial_rotary_factor` in Qwen3ForCausalLM, so `qwen3_partial` swaps in the
rotary module and rotation of transformers' own Qwen3Next, which has the factor.
"""

import json
import pathlib

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM
from transformers.utils import logging
from transformers.models.qwen3 import modeling_qwen3
from transformers.models.qwen3_next import modeling_qwen3_next

from common import Source, i32, out_dir, positions_of, save, save_json, setup

LENGTHS = [17, 1, 9]

COMMON = {
    "hidden_act": "silu", "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 97, "max_position_embeddings": 512, "rms_norm_eps": 1e-5,
    "initializer_range": 0.02, "attention_dropout": 0.0, "attention_bias": False, "tie_word_embeddings": False,
    "bos_token_id": 1, "eos_token_id": 2, "use_cache": True, "torch_dtype": "float32",
}
LLAMA = COMMON | {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "mlp_bias": False, "pretraining_tp": 1,
    "rope_theta": 10000.0, "rope_scaling": None,
}
QWEN3 = COMMON | {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "rms_norm_eps": 1e-6, "head_dim": 16,
    "use_sliding_window": False, "sliding_window": None, "max_window_layers": 4,
}

# The flat rope keys are those of published checkpoints; qwen3_yarn and qwen3_partial use only the transformers-5 form.
TARGETS = {
    "llama_default": (11, LLAMA),
    "llama_tied": (12, LLAMA | {"tie_word_embeddings": True, "vocab_size": 101, "num_hidden_layers": 2}),
    "llama_bias": (13, LLAMA | {"attention_bias": True, "num_hidden_layers": 2, "num_key_value_heads": 1}),
    # Wavelengths 6.3, 29.7, 140 and 664 against the limits 16 and 64: one kept, one blended, two divided.
    "llama_llama3": (14, LLAMA | {"num_hidden_layers": 2, "rope_theta": 500.0, "rope_scaling": {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64}}),
    "llama_linear": (15, LLAMA | {"num_hidden_layers": 2, "rope_scaling": {"type": "linear", "factor": 2.5}}),
    "qwen3_default": (16, QWEN3 | {"hidden_size": 40, "intermediate_size": 48, "vocab_size": 128, "rope_theta": 1e6,
                                   "rope_scaling": None}),
    "qwen3_yarn": (17, QWEN3 | {"num_hidden_layers": 2, "rope_parameters": {
        "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 128}}),
    "qwen3_partial": (18, QWEN3 | {"num_hidden_layers": 2, "rope_parameters": {
        "rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}}),
}
SHARDED = {"qwen3_default"}


def weights(seed: int, config: dict) -> dict[str, torch.Tensor]:
    """Linears N(0, 1/fan_in) so that attention is far from uniform, norms around 1, biases of order 0.3."""
    src = Source(seed)
    h, inter, v = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    heads, kv = config["num_attention_heads"], config["num_key_value_heads"]
    d = config.get("head_dim", h // heads)

    def linear(rows: int, cols: int) -> torch.Tensor:
        return src.normal(rows, cols, std=cols**-0.5)

    out = {"model.embed_tokens.weight": src.normal(v, h)}
    for i in range(config["num_hidden_layers"]):
        p = f"model.layers.{i}."
        out[p + "input_layernorm.weight"] = src.normal(h, std=0.2, mean=1.0)
        out[p + "post_attention_layernorm.weight"] = src.normal(h, std=0.2, mean=1.0)
        for name, rows, cols in [("q", heads * d, h), ("k", kv * d, h), ("v", kv * d, h), ("o", h, heads * d)]:
            out[p + f"self_attn.{name}_proj.weight"] = linear(rows, cols)
            if config["attention_bias"]:
                out[p + f"self_attn.{name}_proj.bias"] = src.normal(rows, std=0.3)
        if config["model_type"] == "qwen3":
            # Means above 1 sharpen attention, which makes the position matter.
            out[p + "self_attn.q_norm.weight"] = src.normal(d, std=0.2, mean=1.3)
            out[p + "self_attn.k_norm.weight"] = src.normal(d, std=0.2, mean=1.3)
        out[p + "mlp.gate_proj.weight"] = linear(inter, h)
        out[p + "mlp.up_proj.weight"] = linear(inter, h)
        out[p + "mlp.down_proj.weight"] = linear(h, inter)
    out["model.norm.weight"] = src.normal(h, std=0.2, mean=1.0)
    if not config["tie_word_embeddings"]:
        out["lm_head.weight"] = linear(v, h)
    return out


def write_folder(folder: pathlib.Path, name: str, seed: int, config: dict) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    save_json(folder / "config.json", config)
    tensors = weights(seed, config)
    if name not in SHARDED:
        save_file(tensors, str(folder / "model.safetensors"), metadata={"format": "pt"})
        return
    # The cut falls inside a layer, so a loader that takes a layer from one shard is found out.
    names = list(tensors)
    cut = len(names) // 2 + 1
    weight_map = {}
    for i, part in enumerate([names[:cut], names[cut:]], 1):
        shard = f"model-{i:05d}-of-00002.safetensors"
        save_file({n: tensors[n] for n in part}, str(folder / shard), metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, shard)
    total = sum(t.numel() * t.element_size() for t in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    save_json(folder / "model.safetensors.index.json", index)


logging.disable_progress_bar()


def load(folder: pathlib.Path):
    """The model as transformers reads it from the folder, eager attention, float32."""
    config = json.loads((folder / "config.json").read_text())
    partial = (config.get("rope_parameters") or {}).get("partial_rotary_factor", 1.0) != 1.0
    model, report = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"], report
    if partial:
        model.model.rotary_emb = modeling_qwen3_next.Qwen3NextRotaryEmbedding(config=model.config)
        assert model.model.rotary_emb.inv_freq.numel() * 4 == model.config.head_dim
    modeling_qwen3.apply_rotary_pos_emb = (
        modeling_qwen3_next.apply_rotary_pos_emb if partial else QWEN3_ROTATION)
    return model.eval()


QWEN3_ROTATION = modeling_qwen3.apply_rotary_pos_emb


@torch.no_grad()
def residuals(model, token_ids: torch.Tensor) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Residual stream after every layer, each [T, H], and logits [T, V] of one sample at positions 0.."""
    last = {}
    hook = model.model.norm.register_forward_pre_hook(lambda _m, args: last.update(x=args[0]))
    out = model(token_ids[None], output_hidden_states=True, use_cache=False)
    hook.remove()
    layers = len(model.model.layers)
    # hidden_states[layers] is already normed; the hook has the stream before the norm.
    streams = [out.hidden_states[i + 1][0] for i in range(layers - 1)] + [last["x"][0]]
    return streams, out.logits[0]


def main() -> None:
    out = out_dir(__doc__)
    setup()
    for name, (seed, config) in TARGETS.items():
        folder = out / "targets" / name
        write_folder(folder, name, seed, config)
        model = load(folder)
        src = Source(seed + 1000)
        samples = [src.ints(config["vocab_size"], n) for n in LENGTHS]
        cu = [0]
        for n in LENGTHS:
            cu.append(cu[-1] + n)
        parts = [residuals(model, s) for s in samples]
        tensors = {"token_ids": i32(torch.cat(samples)), "positions": i32(positions_of(cu)), "cu_seqlens": i32(cu)}
        for i in range(config["num_hidden_layers"]):
            tensors[f"hidden.{i}"] = torch.cat([streams[i] for streams, _ in parts])
        tensors["logits"] = torch.cat([logits for _, logits in parts])
        tensors["inv_freq"] = model.model.rotary_emb.inv_freq
        tensors["rope_scale"] = torch.tensor([model.model.rotary_emb.attention_scaling])
        save(out / "targets" / f"{name}-expected.safetensors", tensors)


if __name__ == "__main__":
    main()
