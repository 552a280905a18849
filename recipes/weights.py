"""From a finished run to a checkpoint of the zoo: weights, metadata and golden outputs side by side.

`python -m capszoo.recipes.weights RUN` copies a finished run's files into the package's `weights/` folder.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import capszoo
from capszoo.data import DatasetSpec, normalize
from capszoo.models._pretrained import WeightsError, sha256_of

from .checkpoints import write_atomically, write_safetensors
from .evaluate import model_from_file

__all__ = ["bundle", "golden_outputs", "hardware", "source_commit", "write_weights"]

SUFFIXES = (".safetensors", ".golden.npz", ".json")  # the metadata comes last: it makes the tag exist


def source_commit() -> str | None:
    """The commit of the checkout this package runs from ("+changes" where a file in use differs); None outside one."""
    root = Path(capszoo.__file__).resolve().parent.parent

    def git(*args: str) -> str:
        done = subprocess.run(["git", "-C", str(root), *args], capture_output=True, text=True, check=True)
        return done.stdout.strip()

    try:
        loaded = {getattr(module, "__file__", None) for module in list(sys.modules.values())}
        ours = [name for name in loaded if name and Path(name).resolve().is_relative_to(root)]
        changed = git("status", "--porcelain", "--", *(name for name in ours if "site-packages" not in name))
        return git("rev-parse", "HEAD") + ("+changes" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def hardware(device: torch.device) -> str:
    """The accelerator's name, or the processor's with the number of threads used."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    name = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        models = [line for line in cpuinfo.read_text().splitlines() if line.startswith("model name")]
        name = models[0].split(":", 1)[1].strip() if models else name
    threads = torch.get_num_threads()
    return f"{name}, {threads} CPU thread{'s' if threads > 1 else ''}"


def golden_outputs(
    net: nn.Module, pixels: Tensor, mean: tuple[float, ...], std: tuple[float, ...]
) -> np.ndarray:
    """Scores [b, n] in float32 for raw images `pixels` uint8 [b, c, h, w]."""
    with torch.no_grad():
        return net.eval()(normalize(pixels, mean, std)).float().cpu().numpy()


def _feature_grid(net: nn.Module, input_size: tuple[int, int, int]) -> list[int] | None:
    """Height and width of the net's last feature map at this input size; None where it has none."""
    forward_features: Any = getattr(net.eval(), "forward_features", None)
    if forward_features is None:
        return None
    like = next(net.parameters())
    with torch.no_grad():
        features = forward_features(torch.zeros(1, *input_size, device=like.device, dtype=like.dtype))
    return list(features.shape[-2:]) if features.ndim == 4 else None


def write_weights(
    folder: Path,
    net: nn.Module,
    *,
    architecture: str,
    tag: str,
    model_args: Mapping[str, Any],
    spec: DatasetSpec,
    golden_pixels: Tensor,
    details: Mapping[str, Any],
) -> Path:
    """Write `<architecture>.<tag>` as safetensors, json and golden.npz into `folder`; returns the safetensors' path.

    Arguments:
        net: the trained net.
        model_args: what `create_model` needs beside classes, channels and size.
        golden_pixels: a few raw images [b, c, h, w] uint8 whose scores are kept as golden outputs.
        details: further metadata: recipe, seed, commit, metrics, hardware, …
    """
    stem = f"{architecture}.{tag}"
    weights = folder / f"{stem}.safetensors"
    write_safetensors(weights, net.state_dict())
    metadata = {
        "architecture": architecture,
        "tag": tag,
        "license": "apache-2.0",
        "sha256": sha256_of(weights),
        "num_params": sum(p.numel() for p in net.parameters()),
        "num_classes": spec.num_classes,
        "input_size": spec.input_size,
        "mean": spec.mean,
        "std": spec.std,
        "pool_size": _feature_grid(net, spec.input_size),
        "label_names": spec.label_names,
        "model_args": dict(model_args),
        **details,
    }
    write_atomically(folder / f"{stem}.json", json.dumps(metadata, indent=1, ensure_ascii=False) + "\n")
    # Golden outputs come from the file just written, not from the net in memory.
    reread, _ = model_from_file(weights)
    buffer = io.BytesIO()
    scores = golden_outputs(reread, golden_pixels.cpu(), spec.mean, spec.std)
    np.savez_compressed(buffer, pixels=golden_pixels.cpu().numpy(), scores=scores)
    write_atomically(folder / f"{stem}.golden.npz", buffer.getvalue())
    return weights


def bundle(run: str | Path, folder: str | Path | None = None) -> list[Path]:
    """Copy a finished run's weights, metadata and golden outputs into `folder` (the package's `weights/`)."""
    source = Path(run)
    found = sorted(source.glob("*.*.json"))
    if len(found) != 1 or "test" not in json.loads(found[0].read_text()).get("metrics", {}):
        raise WeightsError(f"{source} is not a finished run: run its recipe to the end first")
    model_from_file(found[0])  # checks the pair
    target = Path(folder) if folder else Path(capszoo.__file__).resolve().parent / "weights"
    target.mkdir(parents=True, exist_ok=True)
    copied = []
    for suffix in SUFFIXES:
        file = found[0].with_name(found[0].stem + suffix)
        temporary = target / f".{file.name}.{os.getpid()}.tmp"
        shutil.copyfile(file, temporary)
        copied.append(temporary.replace(target / file.name))
    return copied


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m capszoo.recipes.weights", description=__doc__)
    parser.add_argument("run", help="folder of a finished run")
    parser.add_argument("--to", help="default: the package's weights/ folder")
    args = parser.parse_args(argv)
    try:
        for path in bundle(args.run, args.to):
            print(f"{path} ({path.stat().st_size:,} bytes)")
    except (WeightsError, OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
