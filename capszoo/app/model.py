"""A model for the page: its answer, couplings, reconstructions, and couplings by iteration.

Scores and class capsules come from the model's exported ONNX file, run by ONNX Runtime; that file passed the export's
gate before it was loaded. Couplings come from ``capszoo.explain``, reconstructions from the network's decoder.
"""

from __future__ import annotations

import base64
import threading
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from .._pretrained.exported import OnnxModel
from ..errors import CapszooError, UsageError
from ..explain import Explanation, explain
from ..explain.convergence import all_iterations
from ..images import open_image
from ..inference import label_names, load_model
from ..preprocess import model_transform
from ..scores import probabilities, score_kind
from ..summary import routing_iterations

#: For networks in PyTorch: an export chooses engines for the whole process, and ``settle`` changes its network
#: meanwhile.
_TORCH = threading.Lock()

#: Pixels of the largest image that the page reads.
MAX_PIXELS = 16_000_000

#: Size of the largest file that the page accepts, in MB.
MAX_FILE_MB = 10

#: Length of the largest drawing that the page sends, in characters.
MAX_DRAWING = 2**20

#: Largest number of routing iterations that the page offers.
MAX_ITERATIONS = 8


@dataclass(frozen=True)
class Answer:
    """A model's answer for an image.

    Attributes:
        model: name of the model.
        labels: names of the classes.
        probabilities: of the classes ``[n]``, as ``capszoo.scores`` defines them.
        scores: of the classes ``[n]``, from the exported file.
        poses: class capsules ``[n, e]``; None for a network without class capsules.
        predicted: class with the highest score.
        explanation: couplings of the predicted class; None if not requested, or for a network without routing.
        seen: the normalised input ``[c, h, w]``.
        view: the model's input as a picture.
        notes: how the image was read.
        milliseconds: from the picture to this answer.
    """

    model: str
    labels: tuple[str, ...]
    probabilities: np.ndarray
    scores: np.ndarray
    poses: np.ndarray | None
    predicted: int
    explanation: Explanation | None
    seen: torch.Tensor
    view: Image.Image
    notes: tuple[str, ...]
    milliseconds: float

    @property
    def label(self) -> str:
        """Name of the predicted class."""
        return self.labels[self.predicted]

    def top(self, count: int = 5) -> dict[str, float]:
        """The classes with the highest scores and their probabilities; names of several classes with their numbers."""

        def name(i: int) -> str:
            label = self.labels[i]
            return label if self.labels.count(label) == 1 else f"{label} ({i})"

        order = np.argsort(-self.scores)[:count].tolist()
        return {name(i): float(self.probabilities[i]) for i in order}

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for a file."""
        answer: dict[str, Any] = {
            "predicted": self.label,
            "labels": list(self.labels),
            "probabilities": self.probabilities.tolist(),
            "scores": self.scores.tolist(),
        }
        if self.explanation is not None:
            answer["share_of"] = self.explanation.quantity
            answer["share_meaning"] = self.explanation.meaning
            answer["share_relative_to_even"] = self.explanation.relative.nan_to_num(0).tolist()
        return answer


class AppModel:
    """A model for the page. Creating one exports it, which takes some seconds, unless it is an exported file.

    Args:
        name: a name for ``capszoo predict``.
        folder: where the exported file is written; it is read into memory and deleted.

    Attributes:
        name: as given.
        net: the network, in eval mode on the CPU.
        labels: names of the classes.
        dims: dimensions of a class capsule that a decoder reads; 0 without a decoder.
        routes: whether it has couplings.
        iterations: the network's number of routing iterations; 0 without any.

    Raises:
        CapszooError: no such model, or its export failed.
    """

    def __init__(self, name: str, folder: str | Path) -> None:
        self.name = name
        self.net = load_model(name, device="cpu")
        self.labels = tuple(label_names(self.net))
        if not self.labels:
            raise UsageError(
                f"{name} has no classes", "choose a model with weights: `capszoo list --pretrained`"
            )
        self.transform = model_transform(self.net)
        self.drawing_transform = model_transform(self.net, fit=True)
        self.inverted_transform = replace(self.transform, invert=True)
        self.has_decoder = getattr(self.net, "decoder", None) is not None
        counts = routing_iterations(self.net)
        self.iterations = max(counts) if counts else 0
        self._session: Any = None
        self.outputs: tuple[str, ...] = ("scores",)
        if not isinstance(self.net, OnnxModel):
            self._session, self.outputs = self._export(Path(folder))
        self.dims = self._pose_dims() if self.has_decoder else 0
        first = self.answer(Image.new("L", self.transform.size[::-1]))  # the first call of a session is slow
        self.routes = first.explanation is not None

    def _export(self, folder: Path) -> tuple[Any, tuple[str, ...]]:
        import onnxruntime

        from ..export import to_onnx

        outputs = ("scores", "poses") if self.has_decoder else ("scores",)
        path = folder / f"{abs(hash(self.name)):x}.onnx"
        with _TORCH:
            to_onnx.export(self.net, path, name=Path(self.name).name, outputs=outputs, batch=1, gate="quick")
        try:
            options = onnxruntime.SessionOptions()
            options.log_severity_level = 3
            session = onnxruntime.InferenceSession(
                path.read_bytes(), options, providers=["CPUExecutionProvider"]
            )
        finally:
            path.unlink()
        return session, outputs

    def _pose_dims(self) -> int:
        shape = self._run(torch.zeros(self.transform.channels, *self.transform.size))["poses"].shape
        return int(shape[-1])

    def _run(self, seen: torch.Tensor) -> dict[str, np.ndarray]:
        """The outputs of the exported file for a normalised image, without the batch axis."""
        if self._session is None:
            return {"scores": self.net(seen[None])[0].numpy()}
        feed = {self._session.get_inputs()[0].name: seen[None].numpy()}
        return {name: out[0] for name, out in zip(self.outputs, self._session.run(None, feed), strict=True)}

    def answer(
        self, image: Image.Image, drawn: bool = False, explained: bool = True, swap: bool = True
    ) -> Answer:
        """Classify an image and explain the answer.

        Args:
            image: of any mode and size.
            drawn: centre and scale the image like MNIST's digits.
            explained: compute the couplings as well.
            swap: read an image that looks inverted with dark and bright swapped.
        """
        start = time.perf_counter()
        transform = self.drawing_transform if drawn else self.transform
        view, notes = transform.read(image)
        if swap and not drawn and any("--invert" in note for note in notes):
            view, notes = self.inverted_transform.read(image)
            notes = (*notes, "dark on bright: read with dark and bright swapped")
        seen = transform.normalise(view)
        outputs = self._run(seen)
        scores = outputs["scores"]
        shares = probabilities(torch.from_numpy(scores), score_kind(self.net)).numpy()
        predicted = int(scores.argmax())
        return Answer(
            model=self.name,
            labels=self.labels,
            probabilities=shares,
            scores=scores,
            poses=outputs.get("poses"),
            predicted=predicted,
            explanation=self._explain(seen, predicted, None) if explained else None,
            seen=seen,
            view=view,
            notes=notes,
            milliseconds=1000 * (time.perf_counter() - start),
        )

    def _explain(self, seen: torch.Tensor, target: int, iterations: int | None) -> Explanation | None:
        with _TORCH, all_iterations(self.net, iterations) if iterations else nullcontext():
            try:
                return explain(self.net, seen, target, name=self.name)
            except CapszooError:  # a network without routing has no couplings
                return None

    def reconstruct(self, answer: Answer, offsets: Sequence[float] = ()) -> Image.Image:
        """Reconstruct the predicted class's capsule with the decoder.

        Args:
            answer: of this model.
            offsets: added to the capsule's dimensions, from the first on.

        Raises:
            CapszooError: the model has no decoder.
        """
        if answer.poses is None:
            raise CapszooError(
                f"{self.name} has no decoder", "choose a model with one, such as capsnet_dynamic"
            )
        pose = torch.from_numpy(answer.poses.copy())
        shift = torch.tensor(list(offsets)[: self.dims], dtype=pose.dtype)
        pose[answer.predicted, : len(shift)] += shift
        with torch.inference_mode():
            drawn = self.net.reconstruct(pose[None], torch.tensor([answer.predicted]))[0]  # type: ignore[operator]
        pixels = (drawn.clamp(0, 1).permute(1, 2, 0).numpy() * 255).round().astype(np.uint8)
        return Image.fromarray(pixels[..., 0] if pixels.shape[2] == 1 else pixels)

    @property
    def max_iterations(self) -> int:
        """Largest number of routing iterations that the page offers."""
        return max(MAX_ITERATIONS, self.iterations)

    def settle(self, answer: Answer, iterations: int) -> Explanation | None:
        """The couplings of the predicted class after another number of routing iterations.

        Raises:
            UsageError: fewer than 1 iteration, or more than ``max_iterations``.
        """
        if not 1 <= iterations <= self.max_iterations:
            raise UsageError(f"{iterations} routing iterations", f"give 1 to {self.max_iterations}")
        if not self.iterations:
            return answer.explanation
        if iterations == self.iterations and answer.explanation is not None:
            return answer.explanation
        return self._explain(answer.seen, answer.predicted, iterations)


def read_drawing(url: str | None) -> Image.Image | None:
    """Read the drawing of a canvas, white on black; None if nothing was drawn.

    Args:
        url: a PNG file as a ``data:`` URL.

    Raises:
        CapszooError: not such a URL, or too long.
    """
    if not url:
        return None
    head, _, body = str(url)[:MAX_DRAWING].partition(",")
    if head != "data:image/png;base64" or len(url) > MAX_DRAWING:
        raise CapszooError("this is no drawing of the page", "draw on its canvas")
    try:
        data = base64.b64decode(body, validate=True)
    except ValueError:
        raise CapszooError("this is no drawing of the page", "draw on its canvas") from None
    image = open_image(data, 1, name="the drawing", max_pixels=2**20)
    return image if image.getextrema() != (0, 0) else None


def read_upload(path: str | Path) -> Image.Image:
    """Open an uploaded file.

    Raises:
        CapszooError: not an image, a damaged one, or more than ``MAX_PIXELS`` pixels. The message does not name the
            server's folder of the file.
    """
    return open_image(path, name=Path(path).name, max_pixels=MAX_PIXELS)
