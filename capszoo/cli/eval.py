"""``capszoo eval``: the metrics of the model cards."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .._pretrained.catalogue import check_model_argument, exported_file
from .._utils.files import expanded
from ..data.specs import check_name
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
    note,
    print_facts,
    print_json,
    print_table,
    progress_bar,
    refuse_unused,
    say,
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
    for name in filter(None, (dataset, ood)):
        check_name(name)
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
    _check_options(crops, one_view, out)
    radii = None if eps is None else parse_radii(eps)
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
        note(f"left out: {line}")
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
        radii=radii,
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
    # Training counts its validation images in its own precision and before the weights are stored; an exported file may
    # be of another precision, whose cost is what is measured.
    stated = report.stated if target.images.split == "test" and exported_file(model) is None else None
    if stated is not None and not reproduced(stated, accuracy, report.result.n):
        raise CapszooError(
            f"{target.images.spec.accuracy} is {accuracy:.2f}%, the weights' metadata state {stated:.2f}%",
            "check that the data set is the one they name",
        )


def _check_options(crops: str, of_one_view: list[bool], out: Path | None) -> None:
    """Refuse incompatible options, before the model is loaded."""
    from ..explain.plotting import require_matplotlib

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
    target, result = report.target, report.result
    part = f" of {target.whole:,}, drawn by seed {report.seed}" if result.n < target.whole else ""
    say(
        f"{target.name} on {target.images.spec.name} ({target.part}), "
        f"n = {result.n:,}{part}; crops: {target.crops or 'single'}"
    )
    shares = {"top-1": result.top1, "top-5": result.top5, "exact set": result.exact_set}
    figures = [(name, f"{value:.2f}%") for name, value in shares.items() if value is not None]
    figures.append(("wrong", f"{result.errors:,}"))
    if report.stated is not None:
        figures.append(("stated in the metadata", f"{report.stated:.2f}%"))
    print_facts(figures)
    _print_ranking(result)
    say()
    _print_classes(result)
    if report.sweeps or report.attacks:
        say()
        _print_robustness(report)
    if report.routing:
        say()
        _print_routing(report.routing, [figures.label for figures in result.per_class])
        _print_iterations(report)
    if report.by_iterations:
        say()
        columns = ("routing iterations", "accuracy %", "other predictions")
        counts = (
            (f"{one.iterations}", f"{one.accuracy:.2f}", f"{one.changed:,}") for one in report.by_iterations
        )
        print_table(columns, counts)
    if report.corruptions:
        _print_corruptions(report.corruptions)
    if report.calibration:
        _print_calibration(report.calibration)
    _print_probes(report)
    for file in files:
        say(f"written: {file}")


def _print_ranking(result: EvalResult) -> None:
    ranking = result.ranking
    if ranking is None:
        say("AUROC: not measured, torchmetrics is not installed")
        return
    over = f"of {ranking.per_class[0].label}" if ranking.kind == "binary" else f"{ranking.kind}, mean"
    figures = {
        "AUROC": ranking.auroc,
        "average precision": ranking.average_precision,
        f"sensitivity at specificity {ranking.specificity:g}": ranking.sensitivity,
    }
    shown = ", ".join(f"{name} {value:.4f}" for name, value in figures.items() if value is not None)
    say(f"{shown or 'AUROC: not defined, one class alone'} ({over})")


def _print_classes(result: EvalResult) -> None:
    rows = list(result.per_class)
    if len(rows) > MOST_CLASSES:
        rows = sorted(rows, key=lambda row: 101 if row.recall is None else row.recall)[:MOST_CLASSES]
        say(f"the {MOST_CLASSES} classes of {len(result.per_class)} with the lowest recall")
    figures = ((row, (row.recall, row.precision, row.f1)) for row in rows)
    print_table(
        ("class", "images", "recall %", "precision %", "F1 %"),
        (
            (row.label, f"{row.n:,}", *("" if value is None else f"{value:.2f}" for value in shares))
            for row, shares in figures
        ),
    )


def _print_robustness(report: Report) -> None:
    for sweep in report.sweeps:
        amounts = (f"{amount:g}" for amount in sweep.amounts)
        accuracy = (f"{value:.1f}" for value in sweep.accuracy)
        print_table((f"{sweep.name} ({sweep.unit})", *amounts), [("accuracy %", *accuracy)])
    if report.attacks:
        radii = (f"{attacked.eps:.4g}" for attacked in report.attacks)
        accuracy = (f"{attacked.accuracy:.1f}" for attacked in report.attacks)
        title = f"PGD, {report.attacks[0].steps} steps, L-infinity eps"
        print_table((title, *radii), [("accuracy %", *accuracy)])
    elif report.target.images.spec.multi_label:
        say("PGD: not run, images have several labels")
    result = report.affnist
    if result is None:
        return
    if result.regenerated is None:
        say(f"affNIST: not run, {result.reason}")
        return
    trained = "" if result.trained else "; the weights are not of the protocol's training set"
    both = f"regenerated {result.regenerated:.2f}%, expanded MNIST {result.expanded:.2f}%"
    say(f"affNIST, n = {result.n:,}: {both}{trained}")


def _print_corruptions(results: tuple[CorruptionResult, ...]) -> None:
    from ..recipes.evaluation.corruptions import mean_accuracy

    severities = len(results[0].accuracy)
    title, columns = "corruption (regenerated)", ["accuracy %"]
    if severities > 1:
        title += ", accuracy % by severity"
        columns = [*map(str, range(1, severities + 1)), "mean"]
    rows = [
        (f"{one.name} ({one.group})", *one.accuracy, *([one.mean] if severities > 1 else []))
        for one in results
    ]
    mean = (f"mean of the {len(results)}", *[""] * (len(columns) - 1), f"{mean_accuracy(results):.1f}")
    say()
    print_table((title, *columns), [*((name, *(f"{v:.1f}" for v in values)) for name, *values in rows), mean])


def _print_calibration(calibration: CalibrationResult) -> None:
    from ..recipes.evaluation.calibration import BINS

    rows = [(f"of the {calibration.kind}", calibration.raw)]
    if calibration.scaled is not None:
        rows.append((f"at temperature {calibration.temperature:.3f}", calibration.scaled))
    say()
    print_table(
        ("probabilities", f"expected calibration error %, {BINS} bins", "NLL", "mean confidence %"),
        ((name, f"{one.ece:.2f}", f"{one.nll:.4f}", f"{one.confidence:.2f}") for name, one in rows),
    )
    if calibration.fitted_on is not None:
        say(f"temperature: fitted on {calibration.fitted_on:,} validation images")
    else:
        say(f"no temperature: {calibration.reason}")


def _between(interval: tuple[float, float], digits: int = 2) -> str:
    return f"{interval[0]:.{digits}f} to {interval[1]:.{digits}f}"


def _print_probes(report: Report) -> None:
    """The tests of what is claimed of capsules, a table each."""
    if report.pose:
        say()
        print_table(
            ("linear map reads", "from", "features", "R²", "95% interval"),
            (
                (one.change, one.source, f"{one.width:,}", f"{one.r2:.2f}", _between(one.interval))
                for one in report.pose.scores
            ),
        )
        say(f"fitted on {report.pose.fitted:,} images, measured on {report.pose.n:,} others")
    if report.deletions:
        say()
        rows = []
        for test in report.deletions:
            if test.interval is None:
                rows.append((test.method, "", test.reason))
                continue
            values = (f"{value:.3f}" for value in (test.area, test.random, test.gain) if value is not None)
            rows.append((test.method, f"{test.n:,}", *values, _between(test.interval, 3)))
        measured = ("n", "area over the curve", "random order", "difference", "95% interval")
        print_table(("heat map", *measured), rows)
    if report.outliers:
        say()
        scores = (
            (one.score, f"{one.auroc:.3f}", _between(one.interval, 3)) for one in report.outliers.scores
        )
        print_table((f"against {report.outliers.dataset}", "AUROC", "95% interval"), scores)
        say(f"n = {report.outliers.n:,} and {report.outliers.others:,}")
    if report.adversarial:
        _print_adversarial(report.adversarial)


def _print_adversarial(result: Adversarial) -> None:
    rows = []
    for radius in result.radii:
        stand = ", ".join(f"{name} {count:,}" for name, count in radius.after.items())
        rows.append((f"{radius.eps:.4g}", f"{radius.accuracy:.1f}", _between(radius.interval, 1), stand))
    say()
    title = f"L-infinity eps, {result.steps} steps"
    print_table((title, "accuracy %", "95% interval", "images that stand"), rows)
    zero, rising = f"{100 * result.zero_gradient:.1f}%", f"{100 * result.not_rising:.1f}%"
    state = "likely" if result.masked else "no sign"
    say(f"masked gradients: {state} ({zero} of gradients zero, {rising} raise no loss)")


def _print_routing(stats: RoutingStats, labels: list[str]) -> None:
    if not stats.layers:
        say("nothing is routed by iterations: no couplings")
    else:
        rows = []
        for number, layer in enumerate(stats.layers, 1):
            sizes = (f"{number}", f"{layer.positions}", f"{layer.parents}", f"{layer.children}")
            shares = ("" if value is None else f"{value:.4f}" for value in (layer.entropy, layer.peak))
            dead = f"{layer.dead} of {layer.competing}"
            rows.append((*sizes, layer.over or "none: credit", *shares, dead))
        sizes = ("routing layer", "positions", "parents", "children")
        print_table((*sizes, "sum to 1 over", "entropy (0 to 1)", "mean largest coupling", "dead"), rows)
        for number, layer in enumerate(stats.layers, 1):
            if layer.negative is not None:
                say(f"layer {number}: {layer.negative:.1%} of the credit is negative")
    if stats.never_predicted:
        say(f"never predicted: {', '.join(labels[k] for k in stats.never_predicted[:MOST_CLASSES])}")
    if stats.curve:
        say()
        parent = "the class's capsule" if stats.curve.classes else "the pooled capsule"
        points = zip(stats.curve.cosine, stats.curve.share, stats.curve.length, strict=True)
        print_table(
            (f"cosine with {parent}", "votes %", "mean length"),
            (
                (f"{cosine:+.2f}", f"{share:.2f}", "" if length is None else f"{length:.4f}")
                for cosine, share, length in points
            ),
        )


def _print_iterations(report: Report) -> None:
    if not report.iterations:
        return
    from ..recipes.evaluation.report import ITERATION_IMAGES

    say()
    say(
        "mean absolute change in each iteration: routing logits (couplings, as a multiple of an even one; credit, "
        "which has no logits, as a multiple of its mean size); "
        f"n = {min(ITERATION_IMAGES, report.result.n)}; * beyond the network's own iterations"
    )
    most = len(report.iterations[0].couplings)
    rows = []
    for number, layer in enumerate(report.iterations, 1):
        shown = (
            (f"{layer.logits[t]:.3g} " if layer.logits else "")
            + f"({change:.3g}){'' if t < layer.own else '*'}"
            for t, change in enumerate(layer.couplings)
        )
        rows.append((str(number), *shown))
    print_table(("routing layer", *(f"iteration {t}" for t in range(1, most + 1))), rows)
