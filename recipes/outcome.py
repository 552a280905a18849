"""What a fine-tuned model's folder shows people: a confusion matrix and a model card."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path

import torch
import yaml
from torch import Tensor, nn

from capszoo.data import Batches, ImageSet, StreamedSet
from capszoo.models._pretrained import WeightsInfo

from .checkpoints import write_atomically

__all__ = ["confusion_matrix", "write_card", "write_confusion"]

NUMBERS_UP_TO = 20
"""Classes up to which the matrix's cells carry their numbers."""


@torch.no_grad()
def confusion_matrix(net: nn.Module, data: ImageSet | StreamedSet) -> Tensor:
    """How often images of each class (rows) are taken for each class (columns): int64 [n, n]."""
    count = data.spec.num_classes
    device = next(net.parameters()).device
    matrix = torch.zeros(count, count, dtype=torch.int64)
    for batch in Batches(data.to(device), 500).epoch():
        predicted = net.eval()(batch.images).argmax(1)
        matrix += (
            torch.bincount(batch.labels * count + predicted, minlength=count**2).view(count, count).cpu()
        )
    return matrix


def write_confusion(path: Path, matrix: Tensor, labels: Sequence[str], title: str) -> None:
    """Draw a confusion matrix [n, n] as a PNG; colours are shares of a row's images."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    count = len(matrix)
    side = min(max(4.0, 0.45 * count + 1.5), 24.0)
    figure = Figure(figsize=(side + 1, side), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    shares = matrix / matrix.sum(1, keepdim=True).clamp(min=1)
    picture = axes.imshow(shares.numpy(), vmin=0, vmax=1, cmap="Blues")
    if count <= 100:
        axes.set_xticks(range(count), labels, rotation=90)
        axes.set_yticks(range(count), labels)
    if count <= NUMBERS_UP_TO:
        for row in range(count):
            for column in range(count):
                colour = "white" if shares[row, column] > 0.5 else "black"
                number = str(int(matrix[row, column]))
                axes.text(column, row, number, ha="center", va="center", color=colour, fontsize=8)
    axes.set(xlabel="predicted", ylabel="true", title=title)
    figure.colorbar(picture, label="share of the true class")
    content = io.BytesIO()
    figure.savefig(content, format="png", dpi=120)
    write_atomically(path, content.getvalue())


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
