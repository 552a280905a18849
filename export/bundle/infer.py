"""Classify images with the exported model; requires only numpy, pillow and onnxruntime.

    python infer.py IMAGE... [--topk 3] [--json] [--invert] [--fit] [--background white]
                    [--provider CUDAExecutionProvider]

Reads model.onnx, preprocess.json and labels.txt beside this file. The steps from file to input are those of the model's
training: upright, 8 bits, transparency composited, grey or RGB, resized and cropped by the crop mode, padded if the
model was trained on a larger canvas, channels first, and normalised (or left as uint8 if the graph normalises).
"""

from __future__ import annotations

import argparse
import io
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from capszoo._utils.pixels import BACKGROUNDS, MAX_PIXELS, open_upright, view

HERE = Path(__file__).absolute().parent
if not (HERE / "model.onnx").is_file():  # this file alone is linked to, not each file of the bundle
    HERE = Path(__file__).resolve().parent


def preprocess(
    path: str | Path, spec: dict[str, Any], max_pixels: int = MAX_PIXELS, **options: Any
) -> np.ndarray:
    """An image file to the model's input ``[c, h, w]``, by the rules of preprocess.json; options as for ``read``."""
    return read(path, spec, max_pixels, **options)[0]


def read(
    path: str | Path, spec: dict[str, Any], max_pixels: int = MAX_PIXELS, **options: Any
) -> tuple[np.ndarray, list[str]]:
    """An image file to the model's input ``[c, h, w]``, and notes on how it was read.

    Args:
        path: of the file.
        spec: preprocess.json.
        max_pixels: an image with more is refused.
        **options: ``background``, ``invert``, ``fit``.
    """
    return read_picture(open_upright(path, max_pixels, "see --max-pixels"), spec, **options)


def read_picture(image: Image.Image, spec: dict[str, Any], **options: Any) -> tuple[np.ndarray, list[str]]:
    """Like :func:`read`, for a picture that is already open."""
    canvas = spec.get("background", "black")  # as in training, whatever the option `background` says
    stated = ("channels", "interpolation", "crop_pct", "crop_mode", "mean", "value_range", "inherited_mean")
    image, notes = view(
        image,
        **{key: spec[key] for key in stated if key in spec},
        size=tuple(spec["size"]),
        object_size=tuple(spec["object_size"]) if spec.get("object_size") else None,
        background=options.get("background") or canvas,
        canvas=canvas,
        invert=bool(options.get("invert")),
        fit=bool(options.get("fit")),
    )
    pixels = np.asarray(image, dtype=np.uint8).reshape(*spec["size"], spec["channels"]).transpose(2, 0, 1)
    if spec["dtype"] == "uint8":
        return np.ascontiguousarray(pixels), list(notes)
    column = (-1, 1, 1)
    mean = np.asarray(spec["mean"], np.float32).reshape(column)
    std = np.asarray(spec["std"], np.float32).reshape(column)
    return (pixels.astype(np.float32) / np.float32(255) - mean) / std, list(notes)


def probabilities(scores: np.ndarray, kind: str) -> np.ndarray:
    """Map scores ``[b, n]`` to values in 0..1, by the kind of score in preprocess.json."""
    alone = {"logits": "label_logits", "lengths": "label_lengths", "activations": "label_lengths"}
    if scores.shape[1] == 1:  # a share of one class is 1, whatever its score
        kind = alone.get(kind, kind)
    if kind in ("logits", "log_probabilities"):
        powers = np.exp(scores - scores.max(axis=1, keepdims=True))
        return powers / powers.sum(axis=1, keepdims=True)
    if kind == "label_logits":
        with np.errstate(over="ignore"):
            return 1 / (1 + np.exp(-scores))
    if kind == "label_lengths":
        return scores.clip(0, 1)
    positive = scores.clip(0, None)
    return positive / positive.sum(axis=1, keepdims=True).clip(1e-12, None)


class Classifier:
    """The model of a bundle, or of a file ``capszoo export --out FILE.onnx``, in ONNX Runtime.

    Args:
        folder: of the bundle; or the file, which states its preprocessing and its classes itself.
        provider: ONNX Runtime's execution provider.
    """

    def __init__(self, folder: str | Path = HERE, provider: str = "CPUExecutionProvider") -> None:
        import onnxruntime

        folder = Path(folder)
        if provider.startswith(("CUDA", "Tensorrt")) and hasattr(onnxruntime, "preload_dlls"):
            onnxruntime.preload_dlls()  # finds the CUDA libraries that pip installed
        # float32 means float32 on a GPU too
        settings = {"use_tf32": "0"} if provider == "CUDAExecutionProvider" else {}
        file = folder / "model.onnx" if folder.is_dir() else folder
        self.session = onnxruntime.InferenceSession(file.read_bytes(), providers=[(provider, settings)])
        if folder.is_dir():
            self.spec = json.loads((folder / "preprocess.json").read_text(encoding="utf-8"))
            self.labels = (folder / "labels.txt").read_text(encoding="utf-8").splitlines()
        else:
            properties = self.session.get_modelmeta().custom_metadata_map
            self.spec, labels = (json.loads(properties.get(key) or "{}") for key in ("preprocess", "labels"))
            self.labels = [" ".join(label.splitlines()) for label in labels]
        needed = ("channels", "size", "crop_pct", "interpolation", "dtype", "batch")
        if not all(key in self.spec for key in needed):
            raise ValueError("it does not state how images are read, as files of `capszoo export` do")
        if provider not in self.session.get_providers():  # ONNX Runtime only warns and takes the CPU
            raise ValueError(f"ONNX Runtime cannot start {provider}: it has {self.session.get_providers()}")
        classes = self.session.get_outputs()[0].shape[-1]
        if isinstance(classes, int) and self.spec["scores"] == self.session.get_outputs()[0].name:
            if len(self.labels) != classes:
                raise ValueError(f"labels.txt has {len(self.labels)} lines, the model {classes} classes")
        self.smallest, self.largest = self.spec["batch"]["min"], self.spec["batch"]["max"]

    def __call__(self, images: list[np.ndarray]) -> np.ndarray:
        """Inputs ``[c, h, w]`` to scores ``[b, n]``, in batch sizes that the model supports."""
        scores = []
        for start in range(0, len(images), self.largest):
            chunk = images[start : start + self.largest]
            filled = chunk + chunk[-1:] * (self.smallest - len(chunk))
            output = self.session.run([self.spec["scores"]], {self.spec["input"]: np.stack(filled)})[0]
            scores.append(np.asarray(output)[: len(chunk)])
        return np.concatenate(scores)


def first_line(error: BaseException) -> str:
    """The message of an error, in one line without control characters."""
    text = " ".join(str(error).split()) or type(error).__name__
    return "".join(c for c in text if c.isprintable())[:300]


def printable(text: str) -> str:
    """Replace control characters, which could steer the terminal; surrogates are bytes of a file's name."""
    return "".join(
        c if c.isprintable() or "\ud800" <= c <= "\udfff" else "\N{REPLACEMENT CHARACTER}" for c in text
    )


def classify(
    classifier: Classifier,
    images: Sequence[str],
    topk: int,
    read_image: Callable[[str], tuple[np.ndarray, list[str]]],
) -> list[dict[str, Any]]:
    """The classes of image files with notes on how they were read, or the error of one that cannot be read.

    Args:
        classifier: the model.
        images: paths; a batch of them is in memory at a time.
        topk: classes per image.
        read_image: a path to an input and notes, as by :func:`read`; the message of its error is that of the image.
    """
    results: list[dict[str, Any]] = []
    for start in range(0, len(images), classifier.largest):
        inputs, readable = [], []
        for image in images[start : start + classifier.largest]:
            results.append({"image": image})
            try:
                pixels, notes = read_image(image)
            except Exception as error:  # of any kind, MemoryError too
                results[-1]["error"] = str(error)
                continue
            if notes:
                results[-1]["notes"] = notes
            inputs.append(pixels)
            readable.append(results[-1])
        if not inputs:
            continue
        outputs = classifier(inputs).astype(np.float64)
        shares = probabilities(outputs, classifier.spec.get("score_kind", "logits"))
        for entry, scores, share in zip(readable, outputs, shares, strict=True):
            entry["predictions"] = [
                {
                    "index": int(i),
                    "label": classifier.labels[i],
                    "score": float(scores[i]),
                    "probability": float(share[i]),
                }
                for i in np.argsort(-scores, kind="stable")[:topk]
            ]
    return results


def show(results: list[dict[str, Any]], kind: str, as_json: bool) -> None:
    """Print the results; characters that stdout's encoding lacks are escaped."""
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")
    if not as_json:
        for entry in results:
            for scored in entry.get("predictions", ()):
                shown = f"{scored['probability']:.4f}  ({scored['score']:.4f} {kind})"
                print(printable(f"{entry['image']}  {scored['label']}  {shown}"))
        return
    document = {"score_kind": kind, "results": results}
    other = (sys.stdout.encoding or "utf-8").lower().replace("-", "") != "utf8"  # JSON files are UTF-8
    text = json.dumps(document, indent=1, ensure_ascii=other)
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        text = json.dumps(document, indent=1)
    print(text)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Classify images with the exported model.")
    parser.add_argument("images", nargs="+", metavar="IMAGE")
    parser.add_argument("--topk", "-k", type=int, default=3, help="classes to show per image")
    parser.add_argument(
        "--max-pixels", type=int, default=MAX_PIXELS, help=f"refuse larger images (default: {MAX_PIXELS:,})"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument(
        "--provider", default="CPUExecutionProvider", help="ONNX Runtime's execution provider"
    )
    parser.add_argument("--invert", action="store_true", help="swap dark and bright")
    parser.add_argument(
        "--fit", action="store_true", help="centre and scale a drawing as MNIST's digits were"
    )
    parser.add_argument("--background", choices=sorted(BACKGROUNDS), help="of transparent pixels")
    options = parser.parse_args(arguments)
    if options.topk < 1 or options.max_pixels < 1:
        parser.error("--topk and --max-pixels must be at least 1")
    try:
        classifier = Classifier(provider=options.provider)
    except Exception as error:  # a damaged file of the bundle or a missing provider: many kinds
        print(f"error: {HERE}: the bundle cannot be loaded ({first_line(error)})", file=sys.stderr)
        return 1
    reading = {"background": options.background, "invert": options.invert, "fit": options.fit}

    def read_image(path: str) -> tuple[np.ndarray, list[str]]:
        try:
            pixels, notes = read(path, classifier.spec, options.max_pixels, **reading)
        except Exception as error:  # Pillow's errors for broken files
            raise ValueError(f"{path}: cannot be read ({first_line(error)})") from error
        for note in notes:
            print(printable(f"note: {path}: {note}"), file=sys.stderr)
        return pixels, notes

    try:
        results = classify(classifier, options.images, options.topk, read_image)
    except Exception as error:  # ONNX Runtime raises many kinds of errors
        print(f"error: {HERE}: the model does not run ({first_line(error)})", file=sys.stderr)
        return 1
    try:
        show(results, classifier.spec.get("score_kind", "logits"), options.json)
        sys.stdout.flush()
    except OSError as error:
        if not isinstance(error, BrokenPipeError):  # `| head` has read enough
            print(f"error: the results cannot be written ({first_line(error)})", file=sys.stderr)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # nothing more is written at exit
        return 1
    failed = [entry["error"] for entry in results if "error" in entry]
    for line in failed:
        print(printable(f"error: {line}"), file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
