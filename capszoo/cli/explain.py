"""``capszoo explain``: pictures of what a capsule network sees."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from .._catalogue import check_model_argument
from ..errors import UsageError
from .common import (
    BackgroundOption,
    DeviceOption,
    FitOption,
    InvertOption,
    ModelArgument,
    check_paths,
    stderr,
    stdout,
)

if TYPE_CHECKING:
    from torch import Tensor

KINDS = ("heat", "perturb", "reconstruct", "multi")


def explain_command(
    model: ModelArgument,
    image: Annotated[
        Path | None,
        typer.Argument(metavar="[IMAGE]", help="An image file, for heat and perturb.", show_default=False),
    ] = None,
    what: Annotated[
        str,
        typer.Option(
            help="heat: where the class capsule was routed from; perturb: one capsule dimension changed at a "
            "time; reconstruct: images of --data, recognised or not; multi: overlapping digits in red and green."
        ),
    ] = "heat",
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", "-o", help="Figure to write, .png, .pdf or .svg (default: WHAT.png).", show_default=False
        ),
    ] = None,
    target: Annotated[
        str | None,
        typer.Option("--class", help="Class to follow (name or number), if not the predicted one."),
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(
            "--data",
            help="reconstruct, multi: folder of the data set (default: $CAPSZOO_DATA), or imagefolder:PATH.",
        ),
    ] = None,
    dataset: Annotated[
        str | None, typer.Option("--dataset", help="Data set, if not the one the weights were trained on.")
    ] = None,
    count: Annotated[
        int, typer.Option("--count", min=1, help="reconstruct, multi: images of each kind, right and wrong.")
    ] = 4,
    invert: InvertOption = False,
    fit: FitOption = False,
    background: BackgroundOption = None,
    device: DeviceOption = None,
) -> None:
    """Draw from where a class capsule was routed, or what a decoder makes of capsules."""
    if what not in KINDS:
        from .._suggest import unknown_name

        raise UsageError(unknown_name("picture", what, KINDS))
    of_data = what in ("reconstruct", "multi")
    if of_data and (image is not None or target is not None):
        raise UsageError(f"--what {what} draws images of a data set", "give --data, no IMAGE and no --class")
    if not of_data and (data is not None or dataset is not None):
        raise UsageError(f"--what {what} draws one IMAGE", "leave --data and --dataset out")
    if not of_data and image is None:
        raise UsageError("Missing argument 'IMAGE'", "give an image file")
    check_model_argument(model)
    check_paths([] if image is None else [image])
    from ..explain.plotting import require_matplotlib

    require_matplotlib("explain")  # said before the model is loaded and run
    path = out or Path(f"{what}.png")
    if of_data:
        _draw_data(what, model, dataset, data, count, device, path)
    elif image is not None:
        reading = {"background": background, "invert": invert, "fit": fit}
        _draw_image(what, model, image, target, device, path, reading)


def _draw_image(
    what: str,
    name: str,
    image: Path,
    target: str | None,
    device: str | None,
    path: Path,
    reading: dict[str, Any],
) -> None:
    from ..explain import explain, save_figure
    from ..inference import load_model
    from ..preprocess import load_image, model_transform

    picture = load_image(image)
    model = load_model(name, device=device)
    transform = model_transform(model, **reading)
    view, notes = transform.read(picture)
    seen = transform.normalise(view)
    for said in notes:
        stderr().print(f"note: {escape(said)}", soft_wrap=True)
    if what == "perturb":
        from ..explain.reconstructions import perturb, save_perturbation

        changed = perturb(model, seen, target)
        written = save_perturbation(changed, path)
        line = f"capsule of {changed.label}, {changed.images.shape[0]} dimensions"
    else:
        explanation = explain(model, seen, target, name=Path(name).name)
        written = save_figure(explanation, path)
        share = float(explanation.probabilities[explanation.predicted])
        line = f"{explanation.labels[explanation.predicted]} (probability {share:.4f})"
        if explanation.is_even:
            stderr().print("note: the couplings are even within 10%: nothing to see")
    stdout().print(f"{escape(str(image))}: {escape(line)}; written: {escape(str(written))}", soft_wrap=True)


def _draw_data(
    what: str, name: str, dataset: str | None, data: str | None, count: int, device: str | None, path: Path
) -> None:
    from ..explain.reconstructions import answers, overlaps, save_answers, save_overlaps
    from ..recipes.evaluation.target import prepare

    target = prepare(name, dataset, data=data, device=device)

    def batches() -> Iterator[tuple[Tensor, Tensor]]:
        for batch in target.batches(100):
            yield batch.images, batch.labels

    if what == "multi":
        pairs = overlaps(target.net, batches(), count, count)
        right, written = sum(one.right for one in pairs), save_overlaps(pairs, path)
        drawn = len(pairs)
    else:
        found = answers(target.net, batches(), count, count)
        right, written = sum(one.right for one in found), save_answers(found, path)
        drawn = len(found)
    stdout().print(
        f"{escape(target.images.spec.name)}: {right} recognised, {drawn - right} not; "
        f"written: {escape(str(written))}",
        soft_wrap=True,
    )
