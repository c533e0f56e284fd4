"""Makes all golden values again, or compares what is committed with what the scripts make here.

    python golden/make.py            remake golden/data and golden/MANIFEST.json
    python golden/make.py --check    remake into a temporary folder and compare; exit 1 on any difference

--check wants equal bytes and says so. Another processor may sum in another order, so a safetensors file or JSON that differs in
bytes passes if names, shapes and integers are equal and every float is within 1e-4 * (1 + largest of its tensor); the line then
says how far apart they are. The drafter of infer/ is not trained again by --check (a training run on
another processor ends elsewhere); what it decodes is. Last, twin_train.py must give the losses of train/expected.json within 1e-5.
"""

import argparse
import hashlib
import json
import pathlib
import platform
import shutil
import subprocess
import sys
import tempfile

import numpy
import safetensors
import torch
import transformers
from safetensors.torch import load_file

HERE = pathlib.Path(__file__).resolve().parent
DATA, MANIFEST = HERE / "data", HERE / "MANIFEST.json"
# Script, what it writes under golden/data (a prefix), the seeds it uses. In order: later scripts read what earlier ones wrote.
SCRIPTS = [
    ("targets.py", "targets/", "11-18, 1011-1018"),
    ("dflash.py", "dflash/", "101-103"),
    ("ops.py", "ops.", "301-311"),
    ("dflash_infer.py", "infer/", "401, 402"),
    ("dflash_train.py", "train/", "501"),
    ("rope.py", "rope.json", "none"),
]
TOLERANCE = 1e-4


def sha256(path: pathlib.Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def files(folder: pathlib.Path) -> list[str]:
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file())


def make(folder: pathlib.Path, extra: dict[str, list[str]]) -> None:
    for script, _, _ in SCRIPTS:
        print(f"making {script}", flush=True)
        if script == "rope.py":  # takes no --out: it writes data/ beside itself, so it is run from beside `folder`
            if folder != DATA:
                shutil.copy(HERE / script, folder.parent / script)
            subprocess.run([sys.executable, folder.parent / script], check=True)
        else:
            subprocess.run([sys.executable, HERE / script, "--out", folder, *extra.get(script, [])], check=True)


def manifest(folder: pathlib.Path) -> dict:
    owner = {}
    for name in files(folder):
        makers = [(s, seeds) for s, prefix, seeds in SCRIPTS if name.startswith(prefix)]
        if len(makers) != 1:
            raise SystemExit(f"golden/data/{name}: made by no script of SCRIPTS in make.py\nadd its script there, or delete it")
        [(script, seeds)] = makers
        owner[name] = {"sha256": sha256(folder / name), "script": script, "seeds": seeds}
    versions = {"numpy": numpy.__version__, "safetensors": safetensors.__version__, "torch": torch.__version__.split("+")[0],
                "transformers": transformers.__version__}
    return {"versions": versions, "python": platform.python_version(), "machine": platform.machine(), "files": owner}


def distance(a, b) -> float | None:
    """Largest difference over 1 + largest magnitude; None when a name, shape, type or integer differs."""
    if isinstance(a, torch.Tensor):
        if not isinstance(b, torch.Tensor) or a.shape != b.shape or a.dtype != b.dtype:
            return None
        if not a.is_floating_point():
            return 0.0 if torch.equal(a, b) else None
        worst = (a - b).abs().max().item() if a.numel() else 0.0
        scale = 1.0 + (a.abs().max().item() if a.numel() else 0.0)
        return worst / scale if worst == worst else None
    if isinstance(a, float) and isinstance(b, float):
        return abs(a - b) / (1.0 + abs(a)) if a == a and b == b else None
    if isinstance(a, dict):
        pairs = [(a[k], b[k]) for k in a] if isinstance(b, dict) and a.keys() == b.keys() else None
    elif isinstance(a, list):
        pairs = list(zip(a, b)) if isinstance(b, list) and len(a) == len(b) else None
    else:
        return 0.0 if type(a) is type(b) and a == b else None
    if pairs is None:
        return None
    parts = [distance(x, y) for x, y in pairs]
    return None if None in parts else max(parts, default=0.0)


def read(path: pathlib.Path):
    return load_file(path) if path.suffix == ".safetensors" else json.loads(path.read_text())


def check_twin(tmp: pathlib.Path) -> int:
    """The twin, run on the dump of train/, against the float64 reference; the number of steps that differ."""
    lines = tmp / "twin.jsonl"
    subprocess.run([sys.executable, HERE / "twin_train.py", "--dump", DATA / "train", "--target",
                    DATA / "targets" / "qwen3_default", "--drafter", DATA / "infer" / "drafter", "--device", "cpu",
                    "--dtype", "fp32", "--out", lines], check=True)
    got = [json.loads(line) for line in lines.read_text().splitlines()]
    want = json.loads((DATA / "train" / "expected.json").read_text())["steps"]
    keys = ("loss", "weight_sum", "grad_norm", "expected_acceptance")
    off = [s for s, (g, w) in enumerate(zip(got, want, strict=True))
           if not all(abs(g[k] - w[k]) <= 1e-5 * (1 + abs(w[k])) for k in keys)]
    print(f"{'FAIL' if off else 'near'} twin_train.py: {len(want) - len(off)} of {len(want)} steps agree")
    return len(off)


def check() -> int:
    bad = 0
    listed = json.loads(MANIFEST.read_text())["files"]
    for name in sorted(set(listed) | set(files(DATA))):
        if name not in listed or not (DATA / name).exists() or sha256(DATA / name) != listed[name]["sha256"]:
            print(f"FAIL {name}: not the file of MANIFEST.json")
            bad += 1
    with tempfile.TemporaryDirectory() as tmp:
        fresh = pathlib.Path(tmp) / "data"
        fresh.mkdir()
        make(fresh, {"dflash_infer.py": ["--weights", str(DATA / "infer" / "drafter" / "model.safetensors")]})
        for name in sorted(set(files(fresh)) | set(files(DATA))):
            old, new = DATA / name, fresh / name
            if not old.exists() or not new.exists():
                print(f"FAIL {name}: only in {'the new' if new.exists() else 'the committed'} set")
                bad += 1
            elif old.read_bytes() != new.read_bytes():
                d = distance(read(old), read(new))
                ok = d is not None and d <= TOLERANCE
                bad += not ok
                why = "names, shapes or integers differ" if d is None else f"{d:.1e} apart"
                print(f"{'near' if ok else 'FAIL'} {name}: {why}")
            else:
                print(f"same {name}")
        bad += check_twin(pathlib.Path(tmp))
    print("all golden values hold" if not bad else f"{bad} differences")
    return 1 if bad else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare instead of writing")
    args = parser.parse_args()
    if args.check:
        return check()
    make(DATA, {})
    MANIFEST.write_text(json.dumps(manifest(DATA), indent=1) + "\n")
    total = sum((DATA / f).stat().st_size for f in files(DATA))
    print(f"{len(files(DATA))} files, {total} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
