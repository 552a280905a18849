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
from PIL import Image, ImageChops, ImageOps

BACKGROUNDS = {"black": 0, "white": 255}
STATED, LOST = "capszoo value range", "capszoo lost"  # keys of info: what a file states, what is not read
VANISHES_BELOW = 32  # of 255: mean difference from the background
FITTED = 20 / 28  # ratio of the size of MNIST's digits to the side of the frame
# Pillow's other formats open further files, run programs, or decode before their size can be refused. EPS is refused.
FORMATS = "PNG JPEG MPO BMP DIB GIF WEBP TIFF PPM JPEG2000 AVIF TGA PCX SGI EPS".split()
HERE = Path(__file__).absolute().parent
if not (HERE / "model.onnx").is_file():  # this file alone is linked to, not each file of the bundle
    HERE = Path(__file__).resolve().parent
MAX_PIXELS = 64_000_000
RESAMPLING = {
    "nearest": Image.Resampling.NEAREST,
    "bilinear": Image.Resampling.BILINEAR,
    "bicubic": Image.Resampling.BICUBIC,
    "lanczos": Image.Resampling.LANCZOS,
    "box": Image.Resampling.BOX,
    "hamming": Image.Resampling.HAMMING,
}


def open_image(path: str | Path, max_pixels: int = MAX_PIXELS) -> Image.Image:
    """An image file, upright; refused before it is decoded if it has too many pixels."""
    if max_pixels > (Image.MAX_IMAGE_PIXELS or max_pixels):
        Image.MAX_IMAGE_PIXELS = max_pixels
    Image.init()
    with Image.open(path, formats=[name for name in FORMATS if name in Image.OPEN]) as file:
        if file.format == "EPS":  # Pillow would run Ghostscript
            raise ValueError("in PostScript: save it as PNG")
        if file.width * file.height > max_pixels:
            raise ValueError(
                f"{file.width}x{file.height} are more than {max_pixels:,} pixels: see --max-pixels"
            )
        tags = getattr(file, "tag_v2", None) or {}  # a TIFF's tile is decoded as a whole
        if int(tags.get(322) or 0) * int(tags.get(323) or 0) > max_pixels:
            raise ValueError(f"tiles of more than {max_pixels:,} pixels: see --max-pixels")
        if file.mode == "LAB":
            raise ValueError("in LAB colours: save it in grey or RGB")
        lost = "; ".join(lost_of(file))
        file.load()
        try:
            image = ImageOps.exif_transpose(file)
        except Exception:  # EXIF data that cannot be read state no orientation
            image = file.copy()
        image.info |= {STATED: None, LOST: lost}
        if (declared := stated_range(file)) is not None:  # a copy has no tags
            image.info[STATED] = declared
    return image


def lost_of(image: Image.Image) -> list[str]:
    """What of an opened file is not read: further pages, and where it matters half of the bits of a colour."""
    lost = []
    if image.format != "MPO" and getattr(image, "is_animated", False):  # a camera's MPO has a preview
        lost.append("the first of its pages alone is read")
    raw = [args if isinstance(args, str) else str(args[:1]) for *_, args in getattr(image, "tile", ())]
    if image.mode.startswith("RGB") and any(";16" in mode for mode in raw):
        if max(high for _, high in image.getextrema()[:3]) < 8192 // 256:  # type: ignore[misc]
            lost.append("the upper 8 of its 16 bits are read, and its values end below 8192: dark")
    return lost


def is_deep(image: Image.Image) -> bool:
    """True for integers or floats of more than 8 bits."""
    return image.mode.startswith("I") or image.mode == "F"


def stated_range(image: Image.Image) -> tuple[float, float] | None:
    """Black and white as a TIFF states them (MinSampleValue and MaxSampleValue); None if it does not."""
    tags = getattr(image, "tag_v2", None) or {}
    if not is_deep(image):
        return None

    def number(*names: int) -> float | None:
        held = next((tags[name] for name in names if name in tags), None)
        held = held[0] if isinstance(held, tuple) and held else held
        return float(held) if isinstance(held, (int, float)) and np.isfinite(held) else None

    highest, lowest = number(281, 341), number(280, 340)
    return (lowest or 0.0, highest) if highest is not None and highest > (lowest or 0.0) else None


def to_8_bits(image: Image.Image, value_range: Any = None) -> tuple[Image.Image, str]:
    """16 or 32 bits per channel to 8, and a note; Pillow's conversion would clip.

    Black and white are those of training (``value_range``), or those that a TIFF states, else 0 and 65535 for integers,
    0 and 1 or 255 for floats; an image with other values is refused.
    """
    lost = image.info.get(LOST, "")
    if not is_deep(image):
        return image, lost
    rows = max(1, 2**20 // image.width)  # a strip at a time
    tops = range(0, image.height, rows)
    boxes = [(0, top, image.width, min(top + rows, image.height)) for top in tops]
    strips = [np.asarray(image.crop(box)) for box in boxes]
    lowest, highest = np.inf, -np.inf
    for strip in strips:
        if (finite := strip[np.isfinite(strip)]).size:
            lowest, highest = min(lowest, float(finite.min())), max(highest, float(finite.max()))
    lowest, highest = (lowest, highest) if lowest <= highest else (0, 0)
    declared, note = value_range or image.info.get(STATED), ""
    if declared:
        black, white = declared
        if lowest < black or highest > white:
            note = f"values outside of {black:g} to {white:g} are clipped"
    elif image.mode != "F" and 0 <= lowest and highest <= 65535:
        black, white = 0, 65535
        if highest < 8192:
            note = "16 bits are read as 0 to 65535, and its values end below 8192: dark"
    elif image.mode == "F" and 0 <= lowest and highest <= 1:
        black, white = 0, 1
    elif image.mode == "F" and 0 <= lowest and 2 <= highest <= 255:
        black, white, note = 0, 255, "floats above 1 are read as 0 to 255"
    else:
        raise ValueError(
            f"its values run from {lowest:g} to {highest:g}, and which are black and white is not known: "
            "save it with 8 bits"
        )
    scaled = [
        np.rint((np.nan_to_num(strip.astype(np.float64), nan=black) - black) / (white - black) * 255)
        .clip(0, 255)
        .astype(np.uint8)
        for strip in strips
    ]
    return Image.fromarray(np.concatenate(scaled)), "; ".join(said for said in (lost, note) if said)


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
    return read_picture(open_image(path, max_pixels), spec, **options)


def read_picture(image: Image.Image, spec: dict[str, Any], **options: Any) -> tuple[np.ndarray, list[str]]:
    """Like :func:`read`, for a picture that is already open."""
    image, depth = to_8_bits(image, spec.get("value_range"))
    background = options.get("background") or spec.get("background", "black")
    image, note = flatten(image, background, spec["channels"])
    image = image.convert("L" if spec["channels"] == 1 else "RGB")
    image = ImageChops.invert(image) if options.get("invert") else image
    frame = tuple(spec["size"])
    whole = (image.height, image.width) == frame and not options.get("fit")
    size = frame if whole or not spec.get("object_size") else tuple(spec["object_size"])
    cropped = resize_and_crop(image, size, spec)
    # judged before it is fitted, which puts it on black; with another set's mean there is nothing to compare with
    unknown = options.get("invert") or spec.get("inherited_mean")
    bright = "" if unknown else looks_inverted(cropped, spec["mean"])
    image = fit_drawing(image, size) if options.get("fit") else cropped
    notes = [remark for remark in (depth, note, bright) if remark]
    if size != frame:
        value = BACKGROUNDS[spec.get("background", "black")]  # as in training, whatever `background` says
        canvas = Image.new(image.mode, frame[::-1], value if image.mode == "L" else (value,) * 3)
        canvas.paste(image, ((frame[1] - image.width) // 2, (frame[0] - image.height) // 2))
        image = canvas
    pixels = np.asarray(image, dtype=np.uint8).reshape(*frame, spec["channels"]).transpose(2, 0, 1)
    if spec["dtype"] == "uint8":
        return np.ascontiguousarray(pixels), notes
    column = (-1, 1, 1)
    mean = np.asarray(spec["mean"], np.float32).reshape(column)
    std = np.asarray(spec["std"], np.float32).reshape(column)
    return (pixels.astype(np.float32) / np.float32(255) - mean) / std, notes


def flatten(image: Image.Image, background: str, channels: int) -> tuple[Image.Image, str]:
    """Composite transparent pixels; with a note, on the opposite background if opaque ones would be invisible."""
    if not image.has_transparency_data:
        return image, ""
    if image.mode in ("La", "RGBa"):  # premultiplied, which Pillow converts to no other mode
        image = image.convert(image.mode.upper())
    key = image.info.get("transparency")
    if isinstance(key, tuple) and max(key) > 255:  # of 16 bits, while the pixels have 8
        image = image.copy()
        image.info["transparency"] = tuple(value >> 8 for value in key)
    rgba = image.convert("RGBA")
    # a sample of about a million pixels is enough
    step = max(1, round((rgba.width * rgba.height / 1e6) ** 0.5))
    opacity = np.asarray(rgba.getchannel("A"))[::step, ::step].astype(np.float64)
    grey = np.asarray(rgba.convert("RGB").convert("L"))[::step, ::step].astype(np.float64)
    total = opacity.sum()
    differs = np.abs(grey - BACKGROUNDS[background])
    vanishes = opacity.min() < 255 and total > 0 and (differs * opacity).sum() / total < VANISHES_BELOW
    chosen, note = background, ""
    if vanishes:
        chosen = "white" if background == "black" else "black"
        note = f"transparent, and its opaque pixels are {background}: composited on {chosen}"
    canvas = Image.new("RGBA", rgba.size, (BACKGROUNDS[chosen],) * 3 + (255,))
    flat = Image.alpha_composite(canvas, rgba).convert("RGB" if channels == 3 else "L")
    if vanishes and channels == 1:
        return ImageChops.invert(flat), f"{note} and inverted"
    return flat, note


def looks_inverted(image: Image.Image, mean: list[float]) -> str:
    """A note if a grey picture is bright with a bright edge, but training images are dark; else empty."""
    if len(mean) != 1 or mean[0] > 0.35 or image.mode != "L":
        return ""
    pixels = np.asarray(image, dtype=np.float64) / 255
    edge = np.concatenate([pixels[0], pixels[-1], pixels[:, 0], pixels[:, -1]])
    if pixels.mean() < 0.6 or edge.mean() < 0.6:
        return ""
    return f"mean {pixels.mean():.1f}, trained on {mean[0]:.2f}: inverted? --invert swaps dark and bright"


def fit_drawing(image: Image.Image, size: tuple[int, int]) -> Image.Image:
    """Centre and scale a drawing like the makers of MNIST: 20 of 28 pixels, its centre of mass in the middle."""
    height, width = size
    grey = np.asarray(image.convert("L"))
    darkest, brightest = float(grey.min()), float(grey.max())
    ink = grey > darkest + 0.2 * (brightest - darkest)
    if not ink.any() or ink.all():  # nothing is drawn
        return image.resize((width, height))
    rows, cols = np.flatnonzero(ink.any(axis=1)), np.flatnonzero(ink.any(axis=0))
    drawing = image.crop((int(cols[0]), int(rows[0]), int(cols[-1]) + 1, int(rows[-1]) + 1))
    scale = FITTED * min(height / drawing.height, width / drawing.width)
    small = (max(1, round(drawing.width * scale)), max(1, round(drawing.height * scale)))
    drawing = drawing.resize(small, Image.Resampling.LANCZOS)
    weight = np.asarray(drawing.convert("L"), dtype=np.float64) + 1e-9
    down = (weight.sum(axis=1) @ np.arange(small[1])) / weight.sum()
    across = (weight.sum(axis=0) @ np.arange(small[0])) / weight.sum()
    top = min(max(round(height / 2 - down), 0), height - small[1])
    left = min(max(round(width / 2 - across), 0), width - small[0])
    framed = Image.new(image.mode, (width, height))
    framed.paste(drawing, (left, top))
    return framed


def resize_and_crop(image: Image.Image, size: tuple[int, int], spec: dict[str, Any]) -> Image.Image:
    """An image at a size, by the crop mode; only the region that is seen is scaled."""
    height, width = size
    mode = spec.get("crop_mode", "center")
    down, across = height / image.height, width / image.width
    if mode != "squash":
        down = across = max(down, across) if mode == "center" else min(down, across)
    down, across = down / spec["crop_pct"], across / spec["crop_pct"]
    rows, cols = max(1, round(image.height * down)), max(1, round(image.width * across))
    if mode != "border":
        rows, cols = max(height, rows), max(width, cols)
    tall, wide = min(height, rows), min(width, cols)  # of the part that is seen
    if (rows, cols) == (image.height, image.width):
        x, y = (cols - wide) // 2, (rows - tall) // 2
        seen = image.crop((x, y, x + wide, y + tall))
    else:
        region = min(height / down, image.height), min(width / across, image.width)
        top, left = (image.height - region[0]) / 2, (image.width - region[1]) / 2
        box = (left, top, min(left + region[1], image.width), min(top + region[0], image.height))
        seen = image.resize((wide, tall), RESAMPLING[spec["interpolation"]], box=box)
    if (tall, wide) == tuple(size):
        return seen
    fill = tuple(min(max(round(255 * value), 0), 255) for value in spec["mean"])
    canvas = Image.new(image.mode, (width, height), fill * spec["channels"] if len(fill) == 1 else fill)
    canvas.paste(seen, ((width - wide) // 2, (height - tall) // 2))
    return canvas


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
    text = json.dumps(document, indent=1, ensure_ascii=False)
    try:
        text.encode(sys.stdout.encoding or "utf-8")
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
