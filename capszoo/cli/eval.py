"""``capszoo eval``: the metrics of the model cards."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape
from rich.table import Table

from .._pretrained.catalogue import check_model_argument, exported_file
from .._utils.files import expanded
from ..errors import CapszooError, UsageError
from .common import (
    DatasetOption,
    DeviceOption,
    DpiOption,
    ExportedArgument,
    FormatOption,
    ImagesOption,
    JsonOption,
    SkipBadOption,
    StyleOption,
    check_picture_options,
    image_option,
    print_json,
    printable,
    progress_bar,
    refuse_unused,
    stderr,
    stdout,
)

if TYPE_CHECKING:
    from ..explain.routing_stats import RoutingStats
    from ..recipes.evaluation.adversarial import Adversarial
    from ..recipes.evaluation.calibration import CalibrationResult
    from ..recipes.evaluation.corruptions import CorruptionResult
    from ..recipes.evaluation.metrics import EvalResult
    from ..recipes.evaluation.report import Report

#: Measurements that need gradients or couplings.
_OF_THE_NETWORK = ("robustness", "routing", "routing_iters", "pose", "deletion", "ood", "attack")

#: Rows of the per-class table; of more classes those with the lowest recall are shown.
MOST_CLASSES = 20


_measurement = partial(typer.Option, rich_help_panel="Measurements")


def eval_command(
    context: typer.Context,
    model: ExportedArgument,
    data: ImagesOption = None,
    dataset: DatasetOption = None,
    split: Annotated[
        str, image_option(help="test, train, or val: what the recipe held out.", metavar="NAME")
    ] = "test",
    specificity: Annotated[
        float | None,
        _measurement(
            metavar="X", help="Specificity at which the sensitivity is stated, beside AUROC (default: 0.95)."
        ),
    ] = None,
    crops: Annotated[
        str,
        _measurement(
            help="single, or multi: mean scores of five crops (corners and middle), ten with mirror images if training "
            "mirrored.",
            metavar="NAME",
        ),
    ] = "single",
    robustness: Annotated[
        bool, _measurement("--robustness", help="Sweeps of affine changes, affNIST's protocol, PGD.")
    ] = False,
    routing: Annotated[
        bool, _measurement("--routing", help="Coupling entropy, dead capsules, agreement of the votes.")
    ] = False,
    routing_iters: Annotated[
        str | None,
        _measurement(
            metavar="N,…",
            help="Accuracy for other iteration counts, such as 1,2,3.",
        ),
    ] = None,
    corruptions: Annotated[
        bool,
        _measurement(
            "--corruptions",
            help="Accuracy on noisy, blurred and otherwise corrupted images (CIFAR-10-C, MNIST-C, regenerated).",
        ),
    ] = False,
    calibration: Annotated[
        bool,
        _measurement(
            "--calibration", help="Calibration error of the probabilities, also after temperature scaling."
        ),
    ] = False,
    pose: Annotated[
        bool,
        _measurement(
            "--pose",
            help="How much of a rotation and a shift a linear map reads from poses, activations, features.",
        ),
    ] = False,
    deletion: Annotated[
        bool,
        _measurement(
            "--deletion",
            help="Whether blackening what a heat map marks lowers the score more than random order.",
        ),
    ] = False,
    ood: Annotated[
        str | None,
        _measurement(
            "--ood", metavar="DATASET", help="AUROC of images of this data set against the model's."
        ),
    ] = None,
    attack: Annotated[
        str | None,
        _measurement(
            "--attack",
            metavar="NAME,…",
            help="Accuracy under apgd, square or both, at the radii of --pgd-eps.",
        ),
    ] = None,
    eps: Annotated[
        str | None,
        _measurement(
            "--pgd-eps",
            metavar="R,…",
            help="L-infinity radii of PGD and --attack on pixels in 0..1 (default: 0,0.05,0.1,0.2,0.3 for one channel, "
            "else 0,1/255,2/255,4/255,8/255).",
        ),
    ] = None,
    steps: Annotated[
        int, _measurement("--pgd-steps", min=1, help="Steps of PGD, and of --attack.", metavar="N")
    ] = 20,
    limit: Annotated[
        int | None,
        image_option(min=1, help="Evaluate a random sample of N images (default: all).", metavar="N"),
    ] = None,
    seed: Annotated[
        int,
        image_option(
            min=0,
            help="Seed of the --limit sample and of all random numbers of the measurements.",
            metavar="N",
        ),
    ] = 0,
    batch_size: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            help="Images per forward pass (default: 500, less for large images and on a GPU).",
        ),
    ] = None,
    skip_bad: SkipBadOption = False,
    skip_unknown: Annotated[
        bool, image_option("--skip-unknown", help="Leave out images of classes that the model lacks.")
    ] = False,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", "-o", help="Folder for eval.json, pictures and their numbers (csv).", metavar="PATH"
        ),
    ] = None,
    format: FormatOption = None,
    style: StyleOption = "screen",
    dpi: DpiOption = None,
    device: DeviceOption = None,
    as_json: JsonOption = False,
) -> None:
    """Measure a model on a data set: accuracy, classes, robustness, calibration, routing."""
    if not robustness:
        if attack is None:
            refuse_unused(context, ["eps", "steps"], "without --robustness", "add --robustness or --attack")
        if limit is None and not (corruptions or pose or deletion or attack):
            refuse_unused(context, ["seed"], "on all images", "add --limit N")
    if out is None:
        refuse_unused(context, ["format", "style", "dpi"], "without --out", "add --out FOLDER")
    check_model_argument(model, exported=True)
    if exported_file(model) is not None:
        refuse_unused(context, _OF_THE_NETWORK, f"on {model}, an exported file", "give the model")
    check_picture_options(format, style)
    _check_names(dataset, ood)
    from capszoo.recipes.evaluation.report import Probes, measure
    from capszoo.recipes.evaluation.report_plots import write

    from ..explain.plotting import style as drawn_in
    from ..recipes.evaluation.adversarial import parse_attacks
    from ..recipes.evaluation.calibration import held_out_images
    from ..recipes.evaluation.iterations import parse_iterations
    from ..recipes.evaluation.metrics import reproduced
    from ..recipes.evaluation.ranking import check_specificity
    from ..recipes.evaluation.robustness import parse_radii
    from ..recipes.evaluation.target import data_set_of, prepare

    if specificity is not None:
        check_specificity(specificity)
    probes = Probes(pose, deletion, ood, () if attack is None else parse_attacks(attack))
    one_view = [robustness, routing, corruptions, calibration, probes != Probes()]
    _check_options(eps, crops, one_view, out)
    counts = () if routing_iters is None else parse_iterations(routing_iters)
    target = prepare(
        model,
        dataset,
        split,
        data,
        limit=limit,
        seed=seed,
        crops=crops,
        device=device,
        skip_bad=skip_bad,
        skip_unknown=skip_unknown,
    )
    for line in target.skipped:
        stderr().print(f"note: left out: {escape(line)}", soft_wrap=True)
    if target.images.spec.multi_label:
        why = "on images with several labels: PGD is defined for one"
        refuse_unused(context, ["eps", "steps"], why, "leave it out")
    report = measure(
        target,
        batch_size=batch_size,
        robustness=robustness,
        routing=routing,
        counts=counts,
        corrupted=corruptions,
        held_out=held_out_images(target, model, dataset, data, skip_bad, skip_unknown)
        if calibration
        else None,
        probes=probes,
        radii=None if eps is None else parse_radii(eps),
        steps=steps,
        data=data if data and expanded(data).is_dir() and data_set_of(data) is None else None,
        limit=limit,
        seed=seed,
        specificity=specificity,
        progress=progress_bar,
    )
    files: list[Path] = []
    unwritten: CapszooError | None = None
    try:
        with drawn_in(dpi, style):
            files = write(report, out, format or "png") if out is not None else []
    except CapszooError as error:  # what was measured is printed all the same
        unwritten = error
    if as_json:
        print_json(report.to_dict() | {"files": [str(file) for file in files]})
    else:
        _print(report, files)
    if unwritten is not None:
        raise unwritten
    accuracy = report.result.accuracy
    # training counts its validation images in its own precision and before the weights are stored
    on_test = target.images.split == "test"
    # an exported file may be of another precision, whose cost is what is measured
    exact = exported_file(model) is None
    if (
        on_test
        and exact
        and report.stated is not None
        and not reproduced(report.stated, accuracy, report.result.n)
    ):
        raise CapszooError(
            f"{target.images.spec.accuracy} is {accuracy:.2f}%, the weights' metadata state {report.stated:.2f}%",
            "check that the data set is the one they name",
        )


def _check_names(*names: str | None) -> None:
    """Refuse unknown names of data sets, before torch is imported."""
    from ..data.specs import check_name

    for name in names:
        if name is not None:
            check_name(name)


def _check_options(eps: str | None, crops: str, of_one_view: list[bool], out: Path | None) -> None:
    """Refuse incompatible options, before the model is loaded."""
    from ..explain.plotting import require_matplotlib
    from ..recipes.evaluation.robustness import parse_radii

    if eps is not None:
        parse_radii(eps)
    if crops == "multi" and any(of_one_view):
        raise UsageError(
            "--robustness, --routing, --corruptions, --calibration, --pose, --deletion, --ood and --attack are "
            "measured on one view of each image",
            "leave --crops multi out",
        )
    if out is not None:
        require_matplotlib("--out")
        if out.exists() and not out.is_dir():
            raise CapszooError(f"{out} is a file", "--out takes a folder")


def _print(report: Report, files: list[Path]) -> None:
    out = stdout()
    target, result = report.target, report.result
    part = f" of {target.whole:,}, drawn by seed {report.seed}" if result.n < target.whole else ""
    out.print(
        f"{escape(target.name)} on {escape(target.images.spec.name)} ({target.part}), "
        f"n = {result.n:,}{part}; crops: {target.crops or 'single'}",
        soft_wrap=True,
    )
    figures = Table.grid(padding=(0, 2))
    for name, value in (("top-1", result.top1), ("top-5", result.top5), ("exact set", result.exact_set)):
        if value is not None:
            figures.add_row(name, f"{value:.2f}%")
    figures.add_row("wrong", f"{result.errors:,}")
    if report.stated is not None:
        figures.add_row("stated in the metadata", f"{report.stated:.2f}%")
    out.print(figures)
    _print_ranking(result)
    out.print()
    _print_classes(result)
    if report.sweeps or report.attacks:
        out.print()
        _print_robustness(report)
    if report.routing:
        out.print()
        _print_routing(report.routing, [figures.label for figures in result.per_class])
        _print_iterations(report)
    if report.by_iterations:
        out.print()
        table = Table("routing iterations", "accuracy %", "other predictions", box=None, pad_edge=False)
        for by_count in report.by_iterations:
            table.add_row(str(by_count.iterations), f"{by_count.accuracy:.2f}", f"{by_count.changed:,}")
        out.print(table)
    if report.corruptions:
        _print_corruptions(report.corruptions)
    if report.calibration:
        _print_calibration(report.calibration)
    _print_probes(report)
    for file in files:
        out.print(f"written: {escape(str(file))}", soft_wrap=True)


def _share(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def _print_ranking(result: EvalResult) -> None:
    ranking = result.ranking
    if ranking is None:
        stdout().print("AUROC: not measured, torchmetrics is not installed")
        return
    over = f"of {ranking.per_class[0].label}" if ranking.kind == "binary" else f"{ranking.kind}, mean"
    figures = (
        ("AUROC", ranking.auroc),
        ("average precision", ranking.average_precision),
        (f"sensitivity at specificity {ranking.specificity:g}", ranking.sensitivity),
    )
    shown = ", ".join(f"{name} {value:.4f}" for name, value in figures if value is not None)
    stdout().print(
        f"{shown or 'AUROC: not defined, one class alone'} ({escape(printable(over))})", soft_wrap=True
    )


def _print_classes(result: EvalResult) -> None:
    rows = list(result.per_class)
    if len(rows) > MOST_CLASSES:
        rows = sorted(rows, key=lambda row: 101 if row.recall is None else row.recall)[:MOST_CLASSES]
        stdout().print(f"the {MOST_CLASSES} classes of {len(result.per_class)} with the lowest recall")
    table = Table("class", "images", "recall %", "precision %", "F1 %", box=None, pad_edge=False)
    for row in rows:
        values = (_share(row.recall), _share(row.precision), _share(row.f1))
        table.add_row(escape(printable(row.label)), f"{row.n:,}", *values)
    stdout().print(table)


def _print_robustness(report: Report) -> None:
    out = stdout()
    for sweep in report.sweeps:
        amounts = (f"{amount:g}" for amount in sweep.amounts)
        table = Table(f"{sweep.name} ({sweep.unit})", *amounts, box=None, pad_edge=False)
        table.add_row("accuracy %", *(f"{accuracy:.1f}" for accuracy in sweep.accuracy))
        out.print(table)
    if report.attacks:
        title = f"PGD, {report.attacks[0].steps} steps, L-infinity eps"
        table = Table(
            title, *(f"{attacked.eps:.4g}" for attacked in report.attacks), box=None, pad_edge=False
        )
        table.add_row("accuracy %", *(f"{attacked.accuracy:.1f}" for attacked in report.attacks))
        out.print(table)
    elif report.target.images.spec.multi_label:
        out.print("PGD: not run, images have several labels")
    result = report.affnist
    if result is None:
        return
    if result.regenerated is None:
        out.print(f"affNIST: not run, {escape(result.reason)}", soft_wrap=True)
        return
    trained = "" if result.trained else "; the weights are not of the protocol's training set"
    both = f"regenerated {result.regenerated:.2f}%, expanded MNIST {result.expanded:.2f}%"
    out.print(f"affNIST, n = {result.n:,}: {both}{trained}", soft_wrap=True)


def _print_corruptions(results: tuple[CorruptionResult, ...]) -> None:
    from ..recipes.evaluation.corruptions import mean_accuracy

    out = stdout()
    out.print()
    severities = len(results[0].accuracy)
    many = severities > 1
    columns = [*map(str, range(1, severities + 1)), "mean"] if many else ["accuracy %"]
    title = "corruption (regenerated), accuracy % by severity" if many else "corruption (regenerated)"
    table = Table(title, *columns, box=None, pad_edge=False)
    for corruption in results:
        values = [*corruption.accuracy, corruption.mean] if many else corruption.accuracy
        table.add_row(f"{corruption.name} ({corruption.group})", *(f"{value:.1f}" for value in values))
    table.add_row(f"mean of the {len(results)}", *[""] * (len(columns) - 1), f"{mean_accuracy(results):.1f}")
    out.print(table)


def _print_calibration(calibration: CalibrationResult) -> None:
    from ..recipes.evaluation.calibration import BINS

    out = stdout()
    out.print()
    columns = (f"expected calibration error %, {BINS} bins", "NLL", "mean confidence %")
    table = Table("probabilities", *columns, box=None, pad_edge=False)
    rows = [(f"of the {calibration.kind}", calibration.raw)]
    if calibration.scaled is not None:
        rows.append((f"at temperature {calibration.temperature:.3f}", calibration.scaled))
    for name, reliability in rows:
        table.add_row(
            name, f"{reliability.ece:.2f}", f"{reliability.nll:.4f}", f"{reliability.confidence:.2f}"
        )
    out.print(table)
    if calibration.fitted_on is not None:
        out.print(f"temperature: fitted on {calibration.fitted_on:,} validation images")
    else:
        out.print(f"no temperature: {escape(calibration.reason)}", soft_wrap=True)


def _between(interval: tuple[float, float], digits: int = 2) -> str:
    return f"{interval[0]:.{digits}f} to {interval[1]:.{digits}f}"


def _print_probes(report: Report) -> None:
    """The tests of what is claimed of capsules, a table each."""
    out = stdout()
    if report.pose:
        out.print()
        table = Table("linear map reads", "from", "features", "R²", "95% interval", box=None, pad_edge=False)
        for one in report.pose.scores:
            table.add_row(one.change, one.source, f"{one.width:,}", f"{one.r2:.2f}", _between(one.interval))
        out.print(table)
        out.print(f"fitted on {report.pose.fitted:,} images, measured on {report.pose.n:,} others")
    if report.deletions:
        out.print()
        columns = ("heat map", "n", "area over the curve", "random order", "difference", "95% interval")
        table = Table(*columns, box=None, pad_edge=False)
        for test in report.deletions:
            if test.interval is None:
                table.add_row(test.method, "", escape(test.reason))
                continue
            values = (f"{value:.3f}" for value in (test.area, test.random, test.gain) if value is not None)
            table.add_row(test.method, f"{test.n:,}", *values, _between(test.interval, 3))
        out.print(table)
    if report.outliers:
        out.print()
        table = Table(f"against {report.outliers.dataset}", "AUROC", "95% interval", box=None, pad_edge=False)
        for score in report.outliers.scores:
            table.add_row(score.score, f"{score.auroc:.3f}", _between(score.interval, 3))
        out.print(table)
        out.print(f"n = {report.outliers.n:,} and {report.outliers.others:,}")
    if report.adversarial:
        _print_adversarial(report.adversarial)


def _print_adversarial(result: Adversarial) -> None:
    out = stdout()
    out.print()
    title = f"L-infinity eps, {result.steps} steps"
    table = Table(title, "accuracy %", "95% interval", "images that stand", box=None, pad_edge=False)
    for radius in result.radii:
        stand = ", ".join(f"{name} {count:,}" for name, count in radius.after.items())
        table.add_row(f"{radius.eps:.4g}", f"{radius.accuracy:.1f}", _between(radius.interval, 1), stand)
    out.print(table)
    signs = (
        f"{100 * result.zero_gradient:.1f}% of gradients zero, {100 * result.not_rising:.1f}% raise no loss"
    )
    out.print(f"masked gradients: {'likely' if result.masked else 'no sign'} ({signs})", soft_wrap=True)


def _print_routing(stats: RoutingStats, labels: list[str]) -> None:
    out = stdout()
    if not stats.layers:
        out.print("nothing is routed by iterations: no couplings")
    else:
        columns = ("routing layer", "positions", "parents", "children", "sum to 1 over", "entropy (0 to 1)")
        table = Table(*columns, "mean largest coupling", "dead", box=None, pad_edge=False)
        for number, layer in enumerate(stats.layers, 1):
            sizes = (f"{layer.positions}", f"{layer.parents}", f"{layer.children}")
            entropy, peak = ("" if value is None else f"{value:.4f}" for value in (layer.entropy, layer.peak))
            dead = f"{layer.dead} of {layer.competing}"
            table.add_row(str(number), *sizes, layer.over or "none: credit", entropy, peak, dead)
        out.print(table)
        for number, layer in enumerate(stats.layers, 1):
            if layer.negative is not None:
                out.print(f"layer {number}: {layer.negative:.1%} of the credit is negative")
    if stats.never_predicted:
        never = ", ".join(labels[k] for k in stats.never_predicted[:MOST_CLASSES])
        out.print(f"never predicted: {escape(never)}", soft_wrap=True)
    if stats.curve:
        out.print()
        parent = "the class's capsule" if stats.curve.classes else "the pooled capsule"
        table = Table(f"cosine with {parent}", "votes %", "mean length", box=None, pad_edge=False)
        for cosine, share, length in zip(
            stats.curve.cosine, stats.curve.share, stats.curve.length, strict=True
        ):
            table.add_row(f"{cosine:+.2f}", f"{share:.2f}", "" if length is None else f"{length:.4f}")
        out.print(table)


def _print_iterations(report: Report) -> None:
    if not report.iterations:
        return
    from ..recipes.evaluation.report import ITERATION_IMAGES

    out = stdout()
    out.print()
    out.print(
        "mean absolute change in each iteration: routing logits (couplings, as a multiple of an even one; credit, "
        "which has no logits, as a multiple of its mean size); "
        f"n = {min(ITERATION_IMAGES, report.result.n)}; * beyond the network's own iterations",
        soft_wrap=True,
    )
    most = len(report.iterations[0].couplings)
    table = Table("routing layer", *(f"iteration {t}" for t in range(1, most + 1)), box=None, pad_edge=False)
    for number, layer in enumerate(report.iterations, 1):
        shown = (
            (f"{layer.logits[t]:.3g} " if layer.logits else "")
            + f"({change:.3g}){'' if t < layer.own else '*'}"
            for t, change in enumerate(layer.couplings)
        )
        table.add_row(str(number), *shown)
    out.print(table)
