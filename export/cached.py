"""Cache of exported files for ``capszoo predict --runtime``, keyed by the sha256 of the weights; used without torch.

A cached file is a bundle (see ``capszoo.export.bundle``): its gate compared it with the model before it was written,
and its manifest has the sha256 of every file, which is checked before use. The cache is in ``$CAPSZOO_CACHE``, else in
``$XDG_CACHE_HOME/capszoo``, else in ``~/.cache/capszoo``; deleting it is safe.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import shutil
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from capszoo._pretrained.catalogue import architectures, checkpoints, exported_file
from capszoo._pretrained.info import default_weights, run_weights, stored_file
from capszoo._utils.choices import check_background
from capszoo._utils.files import PACKAGE_FOLDER, cache_folder, writable_cache
from capszoo._version import __version__
from capszoo.errors import CapszooError, UsageError
from capszoo.images import one_line_errors, open_image
from capszoo.scores import ImagePrediction, ScoredClass

from .bundle import infer


@cache
def _source_digest() -> str:
    """Digest of the code that determines a graph and its preprocessing: a checkout changes between versions."""
    package, digest = PACKAGE_FOLDER, hashlib.sha256()
    folders = (package / "layers", package / "models", Path(__file__).parent)
    files = [path for folder in folders for path in sorted(folder.rglob("*.py"))]
    for path in [*files, package / "_utils" / "pixels.py", package / "images.py", package / "preprocess.py"]:
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


def weights_file(model: str) -> Path | None:
    """The weights file of a MODEL argument on this machine; None if it must be downloaded or does not exist."""
    name = model
    if model in architectures():
        info = default_weights(checkpoints(), model)
        if info is None:
            return None  # not a folder of this name, which is ./NAME
        name = info.name
    if name in checkpoints():
        return stored_file(f"{checkpoints()[name].file_name}.safetensors")
    if exported_file(model) is not None:
        return None
    path = Path(model.removeprefix("local-dir:"))
    if path.is_dir():
        try:
            return None if (path / "config.json").is_file() else run_weights(path)
        except CapszooError:
            return None
    path = path.with_suffix(".safetensors")
    return path if path.is_file() and path.with_suffix(".json").is_file() else None


def _place(model: str, img_size: tuple[int, int] | None, routing_iters: int | None) -> Path | None:
    """Cache path of a model's exported file, from the bytes of its weights and its metadata, and the options."""
    weights = weights_file(model)
    if weights is None:
        return None
    key = hashlib.sha256(weights.read_bytes())
    # labels and normalisation become part of the bundle
    beside = weights.with_suffix(".json")
    metadata = beside if beside.is_file() else stored_file(beside.name)
    if metadata is None:
        return None
    key.update(metadata.read_bytes())
    name = key.hexdigest()
    if img_size is not None:
        name += f"-{img_size[0]}x{img_size[1]}"
    if routing_iters is not None:
        name += f"-iters{routing_iters}"
    return cache_folder() / "onnx" / f"{__version__}-{_source_digest()}" / name


def find_cached(
    model: str, img_size: tuple[int, int] | None = None, routing_iters: int | None = None
) -> Path | None:
    """The cached bundle of a model, with every file intact; None if there is none, or a damaged one.

    Args:
        model: a MODEL argument.
        img_size: height and width, if they differ from the model's.
        routing_iters: routing iterations, if they differ from the model's.
    """
    try:
        # if nothing was ever exported, the weights need not be hashed
        if importlib.util.find_spec("onnxruntime") is None or not (cache_folder() / "onnx").is_dir():
            return None
        entry = _place(model, img_size, routing_iters)
        if entry is None:
            return None
        digests = json.loads((entry / "manifest.json").read_text(encoding="utf-8"))["files"]
        for file in ("model.onnx", "preprocess.json", "labels.txt"):
            if digests[file] != hashlib.sha256((entry / file).read_bytes()).hexdigest():
                return None
    except (
        CapszooError,
        OSError,
        ValueError,
        KeyError,
        TypeError,
    ):  # no folder for the cache, a damaged file
        return None
    return entry


def export_to_cache(
    model: str, img_size: tuple[int, int] | None = None, routing_iters: int | None = None
) -> Path:
    """Export a model into the cache; see :func:`find_cached` for the arguments.

    Raises:
        UsageError: the model's weights are not a file on this machine.
        CapszooError: the export failed, or a library is missing.
    """
    entry = _place(model, img_size, routing_iters)
    if entry is None:
        raise UsageError(
            f"--runtime onnx takes the zoo's weights, runs and weights files, and {model} is none",
            "give --runtime torch, or export it: capszoo export",
        )
    writable_cache(entry.parent)  # before the model is loaded
    from capszoo.checkpoint import load_model

    from .bundle import export_bundle

    settings: dict[str, Any] = {"img_size": img_size, "routing_iters": routing_iters}
    net = load_model(
        model, device="cpu", **{key: value for key, value in settings.items() if value is not None}
    )
    if find_cached(model, img_size, routing_iters) is None:
        # damaged, or none: a user is not asked to delete a folder of the cache's own
        shutil.rmtree(entry, ignore_errors=True)
    export_bundle(net, entry, source=model, name=Path(model).name)
    return entry


class CachedModel:
    """An exported file in ONNX Runtime that classifies images like ``capszoo.inference.predict``, without torch.

    Args:
        folder: of a bundle; or a ``.onnx`` file.
        remedy: what to do about one that cannot be loaded.

    Attributes:
        spec: content of ``preprocess.json``.
        score_kind: kind of the scores, a key of ``capszoo.scores.SCORE_KINDS``.
    """

    def __init__(self, folder: Path, remedy: str = "delete it") -> None:
        try:
            self._classifier = infer.Classifier(folder)
        except Exception as error:  # ONNX Runtime raises many kinds of errors
            reason = infer.first_line(error)
            raise CapszooError(f"{folder}: the exported file cannot be loaded ({reason})", remedy) from None
        self.spec: dict[str, Any] = self._classifier.spec
        self.score_kind = str(self.spec.get("score_kind", "logits"))

    def predict(
        self,
        files: Sequence[Path],
        topk: int,
        batch_size: int | None = None,
        advance: Callable[[int], None] | None = None,
        **reading: Any,
    ) -> list[ImagePrediction]:
        """Classify image files; for one that cannot be read, the prediction states the error.

        Args:
            files: image files.
            topk: classes per image.
            batch_size: images per forward pass; None, or more than the file supports, uses the maximum.
            advance: called with the number of images done after each batch.
            **reading: ``background``, ``invert``, ``fit``, as for ``capszoo.preprocess.model_transform``.
        """
        check_background(reading.get("background"))
        sizes: dict[str, tuple[int, int]] = {}

        def read_image(file: str) -> tuple[np.ndarray, list[str]]:
            picture = open_image(file)
            sizes[file] = picture.size
            with one_line_errors(file):
                return infer.read_picture(picture, self.spec, **reading)

        results: list[ImagePrediction] = []
        step = min(batch_size or self._classifier.largest, self._classifier.largest)
        for start in range(0, len(files), step):
            chunk = [str(file) for file in files[start : start + step]]
            for found in infer.classify(self._classifier, chunk, topk, read_image):
                if "error" in found:
                    results.append(ImagePrediction(found["image"], error=found["error"]))
                    continue
                top = tuple(ScoredClass(**scored) for scored in found["predictions"])
                image, notes = found["image"], tuple(found.get("notes", ()))
                results.append(ImagePrediction(image, top, sizes[image], "", self.score_kind, notes))
            if advance:
                advance(len(chunk))
        return results
