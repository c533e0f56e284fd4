"""Golden RoPE numbers: inverse frequencies, attention factors and a few table rows, from transformers itself.

Job: write golden/data/rope.json, which crates/models/src/rope.rs is tested against.
Pinned: torch 2.8, transformers 5.17 (another version stops the script). Run: python golden/rope.py
"""

import json
import pathlib

import torch
import transformers
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding
from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5TextRotaryEmbedding

assert torch.__version__.startswith("2.8."), torch.__version__
assert transformers.__version__.startswith("5.17."), transformers.__version__

POSITIONS = [1, 1000, 40000]

LLAMA31 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
           "original_max_position_embeddings": 8192}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}

# name, head_dim, max_position_embeddings, flat rope_theta, rope_parameters
CASES = [
    ("default_1e4", 16, 2048, 1e4, {}),
    ("default_1e6", 64, 40960, 1e6, {}),
    ("default_1e5_hd64", 64, 8192, 1e5, {}),
    ("linear", 32, 8192, 1e4, {"rope_type": "linear", "factor": 2.5}),
    ("linear_partial", 64, 8192, 1e4, {"rope_type": "linear", "factor": 2.0, "partial_rotary_factor": 0.5}),
    ("llama31", 64, 131072, 5e5, LLAMA31),
    ("llama32", 64, 131072, 5e5, LLAMA31 | {"factor": 32.0}),
    ("yarn", 64, 131072, 1e6, YARN),
    ("yarn_original_defaults_to_max", 32, 4096, 1e4, {"rope_type": "yarn", "factor": 4.0}),
    ("yarn_attention_factor", 32, 131072, 1e6, YARN | {"attention_factor": 0.75}),
    ("yarn_betas_untruncated", 64, 131072, 1e6, YARN | {"beta_fast": 24.0, "beta_slow": 2.0, "truncate": False}),
    ("yarn_mscale", 64, 163840, 1e4,
     {"rope_type": "yarn", "factor": 40.0, "original_max_position_embeddings": 4096, "mscale": 1.0, "mscale_all_dim": 0.5}),
    ("yarn_mscale_alone", 64, 163840, 1e4,
     {"rope_type": "yarn", "factor": 40.0, "original_max_position_embeddings": 4096, "mscale": 0.7}),
    ("yarn_partial", 64, 131072, 1e6, YARN | {"partial_rotary_factor": 0.25}),
]


def table_rows(rotary):
    ids = torch.tensor([POSITIONS])
    cos, sin = rotary(torch.zeros(1, dtype=torch.float32), ids)
    half = cos.shape[-1] // 2
    return cos[0, :, :half].tolist(), sin[0, :, :half].tolist()


def case(name, head_dim, max_positions, theta, parameters):
    config = Qwen3Config(hidden_size=head_dim * 2, num_attention_heads=2, num_key_value_heads=1, head_dim=head_dim,
                         max_position_embeddings=max_positions, rope_parameters={"rope_theta": theta} | parameters)
    rotary = Qwen3RotaryEmbedding(config)
    cos, sin = table_rows(rotary)
    return {"name": name, "head_dim": head_dim, "max_position_embeddings": max_positions,
            "rope_parameters": {"rope_theta": theta} | parameters, "attention_factor": float(rotary.attention_scaling),
            "inv_freq": rotary.inv_freq.tolist(), "cos": cos, "sin": sin}


def partial_default_case():
    parameters = {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25}
    config = Qwen3_5TextConfig(hidden_size=512, num_attention_heads=2, num_key_value_heads=1, head_dim=256,
                               max_position_embeddings=262144,
                               rope_parameters=parameters | {"mrope_section": [11, 11, 10], "mrope_interleaved": True})
    inv_freq, factor = Qwen3_5TextRotaryEmbedding.compute_default_rope_parameters(config)
    freqs = torch.tensor(POSITIONS, dtype=torch.float32)[:, None] * inv_freq[None, :]
    return {"name": "default_partial_qwen3_5", "head_dim": 256, "max_position_embeddings": 262144,
            "rope_parameters": parameters, "attention_factor": float(factor), "inv_freq": inv_freq.tolist(),
            "cos": freqs.cos().tolist(), "sin": freqs.sin().tolist()}


out = {"torch": torch.__version__, "transformers": transformers.__version__, "positions": POSITIONS,
       "cases": [case(*c) for c in CASES] + [partial_default_case()]}
path = pathlib.Path(__file__).parent / "data" / "rope.json"
path.parent.mkdir(exist_ok=True)
path.write_text(json.dumps(out, indent=None, separators=(",", ":")) + "\n")
print(path, path.stat().st_size, "bytes,", len(out["cases"]), "cases")
