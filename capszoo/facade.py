"""A model in three lines: load it, classify, explain, export.

>>> import capszoo
>>> model = capszoo.load("resnet20_routingcaps.mnist", device="cpu")
>>> model
LoadedModel('resnet20_routingcaps.mnist', input=1x28x28, classes=10)
>>> model.predict("digit_3.png").label
'3'
>>> model.explain("digit_3.png").save("heat.png").name
'heat.png'
>>> model.export("model.onnx", gate="quick").passed
True
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, overload

from torch import nn

from ._utils.choices import names_onnx_file
from .errors import UnknownArgument, UsageError, unknown_name
from .explain import Explanation, explain
from .inference import ImagePrediction, label_names, load_model, predict
from .preprocess import ImageLike, ImageTransform, as_image, is_image_like, model_input_size, model_transform
from .scores import score_kind


@dataclass(frozen=True)
class ExportedModel:
    """Result of :meth:`LoadedModel.export`.

    Attributes:
        path: the ONNX file, or the folder of the bundle.
        passed: whether checks were run and none failed; False with ``check=False``. Nothing is written if one fails.
        report: the export's full report, the output of ``capszoo export --json``.
    """

    path: Path
    passed: bool
    report: dict[str, Any]


class LoadedModel:
    """A model with its weights, ready for inference.

    Attributes:
        name: the name that it was loaded by.
        net: the PyTorch module, in eval mode.
        labels: names of the classes.
        input_size: channels, height and width of the network's input, in pixels.
        score_kind: kind of the scores, a key of ``capszoo.scores.SCORE_KINDS``.
    """

    def __init__(self, name: str, net: nn.Module) -> None:
        self.name, self.net = name, net.eval()
        self.labels = label_names(net)
        self.input_size = model_input_size(net)
        self.score_kind = score_kind(net)

    def __repr__(self) -> str:
        size = "x".join(map(str, self.input_size))
        return f"{type(self).__name__}({self.name!r}, input={size}, classes={len(self.labels)})"

    @overload  # to the type checker a path is an iterable of characters; here it is one image
    def predict(  # type: ignore[overload-overlap]
        self, images: ImageLike, topk: int = 5, batch_size: int = 32, **reading: Any
    ) -> ImagePrediction: ...
    @overload
    def predict(
        self, images: Iterable[ImageLike], topk: int = 5, batch_size: int = 32, **reading: Any
    ) -> list[ImagePrediction]: ...
    def predict(
        self, images: ImageLike | Iterable[ImageLike], topk: int = 5, batch_size: int = 32, **reading: Any
    ) -> ImagePrediction | list[ImagePrediction]:
        """Classify one image, or each of several images.

        Args:
            images: a path, a PIL image or an array (``[h, w, c]`` uint8, or ``[c, h, w]`` float in 0..1); or an
                iterable of these.
            topk: classes per image.
            batch_size: images per forward pass.
            **reading: ``background="black"`` or ``"white"`` for transparent pixels, ``invert=True`` for dark digits on
                white, ``fit=True`` to centre and scale a drawing.

        Returns:
            One prediction for one image, a list for several. A file that cannot be read has its ``error`` set.

        Raises:
            UsageError: an array that is no image, or ``topk`` or ``batch_size`` below 1.

        Examples:
            >>> import capszoo
            >>> model = capszoo.load("resnet20_routingcaps.mnist")
            >>> [found.label for found in model.predict(["digit_3.png", "digit_7.png"])]
            ['3', '7']
        """
        predictions = predict(
            self.net, images, topk, batch_size, transform=self._transform(reading, "topk", "batch_size")
        )
        return predictions[0] if is_image_like(images) else predictions

    def explain(
        self, image: ImageLike, target: int | str | None = None, method: str = "couplings", **reading: Any
    ) -> Explanation:
        """Show from which image positions a class capsule was routed, or on which tiles its score depends.

        The result's ``meaning`` states in one sentence what the map shows and what it does not.

        Args:
            image: as for :meth:`predict`.
            target: class (index or name) to follow; None for the predicted one.
            method: ``couplings``, or by captum ``gradient`` or ``occlusion``, for any network.
            **reading: as for :meth:`predict`.

        Raises:
            CapszooError: the file cannot be read, the model has no couplings, or captum is not installed.
            UsageError: no such class or method, or an array that is no image.
        """
        transform = self._transform(reading, "target", "method")
        return explain(self.net, transform(as_image(image)), target, name=self.name, method=method)

    def _transform(self, reading: dict[str, Any], *others: str) -> ImageTransform:
        names = ("background", "invert", "fit")
        for name in reading:
            if name not in names:
                raise UnknownArgument(unknown_name("argument", name, (*others, *names)))
        return model_transform(self.net, **reading)

    def export(self, path: str | Path, **options: Any) -> ExportedModel:
        """Write the model as an ONNX file, or as a bundle with everything needed for serving.

        Args:
            path: ``FILE.onnx``, or a folder for a bundle.
            **options: of ``capszoo.export.to_onnx.export``, or of ``capszoo.export.bundle.export_bundle`` for a folder:
                ``precision``, ``batch``, ``opset``, ``routing_iters``, …

        Raises:
            CapszooError: a library is missing, or a check failed; then nothing is written.
        """
        from .export import bundle, to_onnx

        path = Path(path)
        alone = names_onnx_file(path)
        # an exported file has no parameters
        device = next((parameter.device for parameter in self.net.parameters()), "cpu")
        try:
            net = self.net.cpu()
            if alone:
                written = to_onnx.export(net, path, **{**self._about(options, "name"), **options})
                return ExportedModel(path, written.passed, written.to_dict())
            manifest = bundle.export_bundle(
                net, path, **{**self._about(options, "name", "source"), **options}
            )
        finally:
            self.net.to(device)
        return ExportedModel(path, all(step["passed"] is not False for step in manifest["gates"]), manifest)

    def _about(self, options: Mapping[str, Any], *keys: str) -> dict[str, str]:
        """Options that state the model; those of an options object have priority."""
        own = {"name": Path(self.name).name, "source": self.name}
        return {key: own[key] for key in keys if not getattr(options.get("options"), key, "")}


def load(name: str | Path, device: str | None = None, **kwargs: Any) -> LoadedModel:
    """Load a model with its weights.

    Args:
        name: ``name.tag`` or ``name`` of the zoo, ``hf-hub:USER/NAME``, the folder of a training run, a folder with a
            ``config.json``, or a ``.safetensors`` file.
        device: device of the model; None selects CUDA if available, else the CPU.
        **kwargs: as for :func:`capszoo.create_model`, such as ``routing_iters``.

    Raises:
        UnknownModel: no such name.
        UnknownArgument: a keyword that the architecture does not accept.
        WeightsError: the weights are damaged, do not fit, or lack their metadata.
        CapszooError: there are no weights, or nothing that can be loaded.
    """
    if not isinstance(name, (str, Path)):
        raise UsageError(
            f"{type(name).__name__} is no name", "for a network of yours: LoadedModel(NAME, net)"
        )
    return LoadedModel(str(name), load_model(str(name), device=device, **kwargs))
