"""What every golden script shares: one random source, one way to write a file, one thread.

Random numbers come from numpy's PCG64, never from torch, because its stream does not depend on vector width.
Tensors are written sorted by name and without metadata (safetensors orders metadata at random), so equal values give
equal bytes. Integers are int32, floating-point values float32 whatever they were computed in.
"""

import argparse
import json
import pathlib

import numpy as np
import torch
from safetensors.torch import save_file

DATA = pathlib.Path(__file__).resolve().parent / "data"


def setup() -> None:
    """One thread and no vendor autotuning: sums are then taken in the same order in every run."""
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)


class Source:
    """Seeded values. Everything is rounded to float32 first, so a float64 computation starts from what is stored."""

    def __init__(self, seed: int):
        self.rng = np.random.Generator(np.random.PCG64(seed))

    def normal(self, *shape: int, std: float = 1.0, mean: float = 0.0) -> torch.Tensor:
        return torch.from_numpy((mean + std * self.rng.standard_normal(shape)).astype(np.float32))

    def uniform(self, *shape: int, low: float = 0.0, high: float = 1.0) -> torch.Tensor:
        return torch.from_numpy(self.rng.uniform(low, high, shape).astype(np.float32))

    def ints(self, high: int, *shape: int, low: int = 0) -> torch.Tensor:
        return torch.from_numpy(self.rng.integers(low, high, shape, dtype=np.int64))


def i32(values) -> torch.Tensor:
    """A contiguous int32 tensor of a list or tensor."""
    return torch.as_tensor(values).to(torch.int32).contiguous()


def save(path: pathlib.Path, tensors: dict[str, torch.Tensor], metadata: dict[str, str] | None = None) -> None:
    """Write tensors as float32 or int32. `metadata` may hold one key at most, see the top of this file."""
    assert metadata is None or len(metadata) <= 1
    out = {}
    for name in sorted(tensors):
        t = tensors[name].detach()
        t = t.to(torch.float32) if t.is_floating_point() else t.to(torch.int32)
        assert not t.is_floating_point() or torch.isfinite(t).all(), f"{path.name}: {name} is not finite"
        out[name] = t.contiguous().clone()
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(out, str(path), metadata=metadata)


def save_json(path: pathlib.Path, value) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value, indent=1) + "\n")


def out_dir(description: str) -> pathlib.Path:
    """The folder the script writes to: `--out`, by default golden/data."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--out", type=pathlib.Path, default=DATA, help="folder of the outputs (default golden/data)")
    return parser.parse_args().out


def positions_of(cu_seqlens: list[int]) -> torch.Tensor:
    """Positions that restart at 0 with every sample."""
    return torch.cat([torch.arange(b - a) for a, b in zip(cu_seqlens, cu_seqlens[1:])])
