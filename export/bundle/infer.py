"""Classify images with the exported model: numpy, pillow and onnxruntime are all it needs.

    python infer.py IMAGE... [--topk 3] [--json] [--provider CUDAExecutionProvider]

Reads model.onnx, preprocess.json and labels.txt beside this file. The steps from file to input are those the model was
trained with: upright, grey or RGB, shorter side resized, centre cropped, channels first, and normalised (or left as
uint8, where the graph normalises).
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageOps

HERE = Path(__file__).resolve().parent
RESAMPLING = {
    "nearest": Image.Resampling.NEAREST,
    "bilinear": Image.Resampling.BILINEAR,
    "bicubic": Image.Resampling.BICUBIC,
    "lanczos": Image.Resampling.LANCZOS,
}


def preprocess(path: str | Path, spec: dict[str, Any]) -> np.ndarray:
    """An image file to the model's input ``[c, h, w]``, by the rules of preprocess.json."""
    with Image.open(path) as file:
        file.load()
        image = ImageOps.exif_transpose(file)
    if image.mode.startswith("I") or image.mode == "F":  # 16 or 32 bits: Pillow's own conversion would clip
        values = np.asarray(image, dtype=np.float64)
        top = 65535.0 if image.mode.startswith("I") and values.max(initial=0) > 255 else 255.0
        image = Image.fromarray((values / top * 255).clip(0, 255).astype(np.uint8))
    image = image.convert("L" if spec["channels"] == 1 else "RGB")
    height, width = spec["size"]
    scale = max(height / image.height, width / image.width) / spec["crop_pct"]
    resized = (max(height, round(image.height * scale)), max(width, round(image.width * scale)))
    if resized != (image.height, image.width):
        image = image.resize((resized[1], resized[0]), RESAMPLING[spec["interpolation"]])
    top_edge, left = (image.height - height) // 2, (image.width - width) // 2
    image = image.crop((left, top_edge, left + width, top_edge + height))
    pixels = np.asarray(image, dtype=np.uint8).reshape(height, width, spec["channels"]).transpose(2, 0, 1)
    if spec["dtype"] == "uint8":
        return np.ascontiguousarray(pixels)
    column = (-1, 1, 1)
    mean = np.asarray(spec["mean"], np.float32).reshape(column)
    std = np.asarray(spec["std"], np.float32).reshape(column)
    return (pixels.astype(np.float32) / np.float32(255) - mean) / std


def probabilities(scores: np.ndarray, kind: str) -> np.ndarray:
    """Scores ``[b, n]`` to numbers in 0..1, by the kind of score that preprocess.json names."""
    if kind in ("logits", "log_probabilities"):
        powers = np.exp(scores - scores.max(axis=1, keepdims=True))
        return powers / powers.sum(axis=1, keepdims=True)
    if kind == "label_logits":
        return 1 / (1 + np.exp(-scores))
    if kind == "label_lengths":
        return scores.clip(0, 1)
    positive = scores.clip(0, None)
    return positive / positive.sum(axis=1, keepdims=True).clip(1e-12, None)


class Classifier:
    """The model of a bundle in ONNX Runtime.

    Args:
        folder: of the bundle.
        provider: ONNX Runtime's execution provider.
    """

    def __init__(self, folder: str | Path = HERE, provider: str = "CPUExecutionProvider") -> None:
        import onnxruntime

        folder = Path(folder)
        self.spec = json.loads((folder / "preprocess.json").read_text(encoding="utf-8"))
        self.labels = (folder / "labels.txt").read_text(encoding="utf-8").splitlines()
        self.session = onnxruntime.InferenceSession(str(folder / "model.onnx"), providers=[provider])
        self.smallest, self.largest = self.spec["batch"]["min"], self.spec["batch"]["max"]

    def __call__(self, images: list[np.ndarray]) -> np.ndarray:
        """Inputs ``[c, h, w]`` to scores ``[b, n]``, in batches that the model was built for."""
        scores = []
        for start in range(0, len(images), self.largest):
            chunk = images[start : start + self.largest]
            filled = chunk + chunk[-1:] * (self.smallest - len(chunk))
            output = self.session.run([self.spec["scores"]], {self.spec["input"]: np.stack(filled)})[0]
            scores.append(np.asarray(output)[: len(chunk)])
        return np.concatenate(scores)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Classify images with the exported model.")
    parser.add_argument("images", nargs="+", metavar="IMAGE")
    parser.add_argument("--topk", "-k", type=int, default=3, help="classes to show per image")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument(
        "--provider", default="CPUExecutionProvider", help="ONNX Runtime's execution provider"
    )
    options = parser.parse_args(arguments)
    if options.topk < 1:
        parser.error("--topk must be at least 1")
    classifier = Classifier(provider=options.provider)
    inputs, readable, results = [], [], []
    for image in options.images:
        results.append({"image": image})
        try:
            inputs.append(preprocess(image, classifier.spec))
            readable.append(results[-1])
        except (OSError, ValueError, SyntaxError) as error:
            results[-1]["error"] = f"{image}: cannot be read ({error})"
    kind = classifier.spec.get("score_kind", "logits")
    found = classifier(inputs).astype(np.float64) if inputs else np.zeros((0, len(classifier.labels)))
    for entry, scores, shares in zip(readable, found, probabilities(found, kind), strict=True):
        entry["predictions"] = [
            {
                "index": int(i),
                "label": classifier.labels[i],
                "score": float(scores[i]),
                "probability": float(shares[i]),
            }
            for i in np.argsort(-scores, kind="stable")[: options.topk]
        ]
    if options.json:
        print(json.dumps({"score_kind": kind, "results": results}, indent=1, ensure_ascii=False))
    else:
        for entry in results:
            for scored in entry.get("predictions", ()):
                print(
                    f"{entry['image']}  {scored['label']}  {scored['probability']:.4f}  ({scored['score']:.4f} {kind})"
                )
    failed = [entry["error"] for entry in results if "error" in entry]
    for line in failed:
        print(f"error: {line}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
