"""``capszoo explain``: pictures of a capsule network's couplings and reconstructions."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .._pretrained.catalogue import check_model_argument
from ..errors import UsageError, unknown_name
from .common import (
    BackgroundOption,
    DatasetOption,
    DeviceOption,
    DpiOption,
    FitOption,
    FormatOption,
    ImagesOption,
    InvertOption,
    ModelArgument,
    Picture,
    StyleOption,
    check_paths,
    note,
    picture,
    say,
)
from .group import Command

if TYPE_CHECKING:
    from torch import Tensor, nn

#: As in ``capszoo.explain.heat_map.METHODS`` (a test compares the two).
METHODS = ("couplings", "gradient", "occlusion")


def _methods(incomplete: str) -> list[str]:
    return [name for name in METHODS if name.startswith(incomplete)]


explain_app = typer.Typer(
    help="Draw heat maps of routing or of attributions, or decode class capsules to images.",
    no_args_is_help=True,
)

ImageArgument = Annotated[Path, typer.Argument(metavar="IMAGE", help="An image file.", show_default=False)]
OutOption = Annotated[
    Path | None,
    typer.Option(
        "--out",
        "-o",
        metavar="FILE",
        help="Picture to write, such as .png, .pdf or .svg (default: the sub-command's name, .png).",
    ),
]
ClassOption = Annotated[
    str | None,
    typer.Option(
        "--class", metavar="CLASS", help="Class to follow (name or number), if not the predicted one."
    ),
]
CountOption = Annotated[
    int, typer.Option("--num-images", min=1, metavar="N", help="Images of each kind: correct and wrong.")
]


def heatmap_command(
    model: ModelArgument,
    image: ImageArgument,
    out: OutOption = None,
    target: ClassOption = None,
    method: Annotated[
        str,
        typer.Option(
            metavar="METHOD",
            help="couplings: shares of the routing; gradient, occlusion (by captum): what the score depends on.",
            autocompletion=_methods,
        ),
    ] = "couplings",
    invert: InvertOption = False,
    fit: FitOption = False,
    background: BackgroundOption = None,
    format: FormatOption = None,
    style: StyleOption = "screen",
    dpi: DpiOption = None,
    device: DeviceOption = None,
) -> None:
    """Draw which positions of an image were routed to a class capsule, or on which tiles its score depends."""
    if method not in METHODS:
        raise UsageError(unknown_name("method", method, METHODS))
    file = picture(out, format, style, dpi, "heatmap", numbers="column 0")
    _check_image(model, image, file)
    if method != "couplings":
        from ..explain.attributions import require_captum

        require_captum(method)
    from ..explain import explain, save_figure

    net, seen = _load(model, image, device, background=background, invert=invert, fit=fit)
    explanation = explain(net, seen, target, name=Path(model).name, method=method)
    with file.drawn():
        written = save_figure(explanation, file.path)
    even = "the shares are even within 10%: nothing to see"
    note(even if explanation.is_even else explanation.meaning)
    best = explanation.predicted
    answer = f"{explanation.labels[best]} (probability {float(explanation.probabilities[best]):.4f})"
    say(f"{image}: {answer}; written: {written}")


def perturb_command(
    model: ModelArgument,
    image: ImageArgument,
    out: OutOption = None,
    target: ClassOption = None,
    dims: Annotated[
        str | None, typer.Option(metavar="N,N,…", help="Dimensions to change, from 0 (default: all).")
    ] = None,
    span: Annotated[
        float, typer.Option("--range", min=0.001, metavar="X", help="Largest change of a dimension.")
    ] = 0.25,
    invert: InvertOption = False,
    fit: FitOption = False,
    background: BackgroundOption = None,
    format: FormatOption = None,
    style: StyleOption = "screen",
    dpi: DpiOption = None,
    device: DeviceOption = None,
) -> None:
    """Change one dimension of the class capsule at a time and decode it (models with a decoder)."""
    numbers = _numbers(dims)
    if not math.isfinite(span):
        raise UsageError(f"--range {span} is no finite number", "give a number such as 0.25")
    file = picture(out, format, style, dpi, "perturb")
    _check_image(model, image, file)
    from ..explain.reconstructions import offsets_to, perturb, save_perturbation

    net, seen = _load(model, image, device, background=background, invert=invert, fit=fit)
    changed = perturb(net, seen, target, offsets_to(span), numbers)
    with file.drawn():
        written = save_perturbation(changed, file.path, f"{Path(model).name}, {image.name}")
    dimensions = f"{changed.images.shape[0]} dimensions"
    say(f"{image}: capsule of {changed.label}, {dimensions}; written: {written}")


def reconstruct_command(
    model: ModelArgument,
    data: ImagesOption = None,
    dataset: DatasetOption = None,
    count: CountOption = 4,
    out: OutOption = None,
    format: FormatOption = None,
    style: StyleOption = "screen",
    dpi: DpiOption = None,
    device: DeviceOption = None,
) -> None:
    """Reconstruct correctly and wrongly classified test images from their class capsules (models with a decoder)."""
    file = picture(out, format, style, dpi, "reconstruct")
    _draw_data("reconstruct", model, dataset, data, count, device, file)


def multi_command(
    model: ModelArgument,
    data: ImagesOption = None,
    dataset: DatasetOption = None,
    count: CountOption = 4,
    out: OutOption = None,
    format: FormatOption = None,
    style: StyleOption = "screen",
    dpi: DpiOption = None,
    device: DeviceOption = None,
) -> None:
    """Separate overlapping digits: each reconstruction in its own colour (MultiMNIST's models)."""
    file = picture(out, format, style, dpi, "multi")
    _draw_data("multi", model, dataset, data, count, device, file)


explain_app.command("heatmap", cls=Command)(heatmap_command)
explain_app.command("perturb", cls=Command)(perturb_command)
explain_app.command("reconstruct", cls=Command)(reconstruct_command)
explain_app.command("multi", cls=Command)(multi_command)


def _numbers(text: str | None) -> list[int] | None:
    """``0,3`` to a list of numbers."""
    if text is None:
        return None
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() for part in parts):
        raise UsageError(f"--dims {text} are no dimensions", "give numbers from 0, such as 0,3,5")
    return [int(part) for part in parts]


def _check_image(model: str, image: Path, file: Picture) -> None:
    """Refuse arguments before the model is loaded and run."""
    check_model_argument(model)
    check_paths([image])
    if file.path.exists() and file.path.samefile(image):
        raise UsageError(f"the picture would replace {image}", "give another file as --out")
    from ..explain.plotting import require_matplotlib

    require_matplotlib("explain")


def _load(name: str, image: Path, device: str | None, **reading: Any) -> tuple[nn.Module, Tensor]:
    """The model, and its input of an image."""
    from ..inference import load_model
    from ..preprocess import load_image, model_transform

    picture = load_image(image)
    model = load_model(name, device=device)
    transform = model_transform(model, **reading)
    view, notes = transform.read(picture, image)
    for remark in notes:
        note(remark)
    return model, transform.normalise(view)


def _draw_data(
    what: str,
    name: str,
    dataset: str | None,
    data: str | None,
    count: int,
    device: str | None,
    file: Picture,
) -> None:
    check_model_argument(name)
    from ..explain.plotting import require_matplotlib

    require_matplotlib("explain")
    from ..explain.reconstructions import answers, overlaps, save_answers, save_overlaps
    from ..recipes.evaluation.target import prepare

    target = prepare(name, dataset, data=data, device=device)

    def batches() -> Iterator[tuple[Tensor, Tensor]]:
        for batch in target.batches(100):
            yield batch.images, batch.labels

    draw: Any
    save: Any
    draw, save = (overlaps, save_overlaps) if what == "multi" else (answers, save_answers)
    drawings = draw(target.net, batches(), count, count)
    with file.drawn():
        written = save(drawings, file.path)
    right = sum(drawing.right for drawing in drawings)
    wrong = len(drawings) - right
    say(f"{target.images.spec.name}: {right} correct, {wrong} wrong; written: {written}")
