"""What a fine-tuned model's folder shows people: its model card."""

from __future__ import annotations

from pathlib import Path

import yaml
from torch import Tensor

from capszoo.models._pretrained import WeightsInfo

from .checkpoints import write_atomically

__all__ = ["write_card"]


def write_card(folder: Path, info: WeightsInfo, matrix: Tensor, split: str) -> Path:
    """Write the model card README.md of a fine-tuned model from its metadata."""
    raw, labels = info.raw, info.label_names or ()
    start = (raw["recipe"].get("init") or {}).get("weights")
    header = {"library_name": "capszoo", "license": info.license, "pipeline_tag": "image-classification"}
    origin = f"fine-tuned from `{start}`" if start else "trained from random weights"
    lines = [f"---\n{yaml.safe_dump(header).strip()}\n---\n", f"# {info.name}\n"]
    lines += [f"`{info.architecture}`, {origin}, on {raw['dataset']['name']}: {len(labels)} classes.\n"]
    chosen = " (chosen by it: an optimistic figure)" if raw["recipe"].get("early_stop") else ""
    for name, note in (("validation", chosen), ("test", "")):
        if figures := raw["metrics"].get(name):
            lines += [f"- {name}: top-1 {figures['top1']:.2f}% of {figures['n']} images{note}"]
    lines += [f"\n| class | images of {split} | right, % |", "|---|---:|---:|"]
    for label, row, right in zip(labels, matrix, matrix.diagonal(), strict=True):
        share = f"{100 * int(right) / int(row.sum()):.1f}" if row.sum() else ""
        lines += [f"| {label} | {int(row.sum())} | {share} |"]
    lines += ["\n![confusion matrix](confusion.png)\n", "```sh"]
    lines += [
        f"capszoo predict {folder.name} image.png",
        f"capszoo export {folder.name} --out bundle",
        "```\n",
    ]
    lines += [f"Input {'x'.join(map(str, info.input_size))}; every setting is in `recipe.yaml`."]
    path = folder / "README.md"
    write_atomically(path, "\n".join(lines) + "\n")
    return path
