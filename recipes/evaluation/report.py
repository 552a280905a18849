"""A complete evaluation: the requested measurements, collected in one document."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from capszoo.data import ImageSet
from capszoo.explain.convergence import IterationChanges, iteration_changes
from capszoo.explain.routing_stats import DEAD, RoutingStats, routing_stats

from .adversarial import Adversarial, adversarial, check_attack
from .calibration import CalibrationResult, calibrate, check_calibration
from .corruptions import CorruptionResult, corruption_set, corruptions, mean_accuracy
from .deletions import DELETION_IMAGES, DeletionScore, check_deletion, deletions
from .iterations import IterationAccuracy, accuracy_by_iterations, check_iterations
from .metrics import EvalResult, assess, stated_top1
from .outliers import OutlierResult, other_images, outliers, require_auroc
from .pose import PoseResult, check_pose, pose_probe
from .ranking import SPECIFICITY, can_rank
from .robustness import (
    STEPS,
    AffnistResult,
    AttackResult,
    SweepResult,
    affnist,
    attack,
    default_eps,
    sweeps,
)
from .target import EvalTarget, in_float32

__all__ = ["Probes", "Report", "measure", "rounded"]

#: Images on which each iteration of routing is measured, the first ones: each iteration takes a forward pass.
ITERATION_IMAGES = 100

Advance = Callable[[int], None]
#: From what is done and how many images it takes, a bar and the function that advances it.
Progress = Callable[[str, int], AbstractContextManager[Advance]]


@dataclass(frozen=True)
class Probes:
    """Which claims about capsules are tested.

    Attributes:
        pose: what a linear map reads of rotation and shift.
        deletion: the deletion test, on the first ``DELETION_IMAGES``.
        other: name of a data set whose images are to be told from the evaluated ones.
        attacks: those of ``adversarial``, at the radii of PGD.
    """

    pose: bool = False
    deletion: bool = False
    other: str | None = None
    attacks: tuple[str, ...] = ()


@dataclass(frozen=True)
class Report:
    """Results of the measurements; None or empty for those not requested.

    Attributes:
        seed: seed of the sample drawn by a limit, of PGD's start and of the corruptions.
        limit: requested number of images, None for all.
        stated: top-1 of the weights' metadata for these images, if it states one.
        iterations: changes per iteration of the routing layers, on the first ``ITERATION_IMAGES``.
        by_iterations: accuracy with other numbers of routing iterations.
        corruptions: accuracy on corrupted images.
        calibration: agreement of probabilities and accuracy.
        pose: what a linear map reads of rotation and shift.
        deletions: the deletion test of every heat map.
        outliers: images of another data set told from these.
        adversarial: accuracy under APGD and Square.
    """

    target: EvalTarget
    result: EvalResult
    seed: int
    limit: int | None
    stated: float | None
    sweeps: tuple[SweepResult, ...] = ()
    attacks: tuple[AttackResult, ...] = ()
    affnist: AffnistResult | None = None
    routing: RoutingStats | None = None
    iterations: tuple[IterationChanges, ...] = ()
    by_iterations: tuple[IterationAccuracy, ...] = ()
    corruptions: tuple[CorruptionResult, ...] = ()
    calibration: CalibrationResult | None = None
    pose: PoseResult | None = None
    deletions: tuple[DeletionScore, ...] = ()
    outliers: OutlierResult | None = None
    adversarial: Adversarial | None = None

    def to_dict(self) -> dict[str, Any]:
        """For JSON: in per cent, except the ranking, in shares, and the confusion matrix, whose rows are labels and
        columns answers."""
        target, result = self.target, self.result
        tree: dict[str, Any] = {
            "model": target.name,
            "dataset": target.images.spec.name,
            "split": target.images.split,
            "n": result.n,
            "of": target.whole,
            "skipped": list(target.skipped),
            "notes": list(target.notes),
            "left_out": dict(target.left_out),
            "seed": self.seed,
            "crops": str(target.crops) if target.crops else "single",
            "threshold": target.threshold if target.images.spec.labels_per_image is None else None,
            "errors": result.errors,
            "top1": rounded(result.top1),
            "top5": rounded(result.top5),
            "exact_set": rounded(result.exact_set),
            "stated": self.stated,
            "per_class": [rounded(asdict(figures)) for figures in result.per_class],
            "confusion": None if result.confusion is None else result.confusion.tolist(),
            "ranking": rounded(asdict(result.ranking)) if result.ranking else None,
        }
        if self.sweeps or self.attacks:
            tree["robustness"] = {
                "sweeps": [rounded(asdict(sweep)) for sweep in self.sweeps],
                "pgd": [asdict(entry) | {"accuracy": rounded(entry.accuracy)} for entry in self.attacks],
                "affnist": rounded(asdict(self.affnist)) if self.affnist else None,
            }
        if self.routing:
            tree["routing"] = asdict(self.routing) | {"dead_below": DEAD}
            tree["routing"]["iterations"] = [asdict(layer) for layer in self.iterations]
            tree["routing"]["iterations_n"] = min(ITERATION_IMAGES, result.n)
        if self.by_iterations:
            tree["routing_iters"] = [rounded(asdict(entry)) for entry in self.by_iterations]
        if self.corruptions:
            tree["corruptions"] = {
                "mean": rounded(mean_accuracy(self.corruptions)),
                "corruptions": [rounded(asdict(entry)) for entry in self.corruptions],
            }
        if self.calibration:
            tree["calibration"] = rounded(asdict(self.calibration))
        for name in ("pose", "outliers", "adversarial"):
            if getattr(self, name):
                tree[name] = rounded(asdict(getattr(self, name)))
        if self.deletions:
            tree["deletion"] = rounded(
                {"seed": self.seed, "methods": [asdict(entry) for entry in self.deletions]}
            )
        return tree


def rounded(value: Any) -> Any:
    """The same value, with the floats in it rounded to four decimals."""
    if isinstance(value, float):
        return round(value, 4)
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [rounded(item) for item in value]
    return value


@in_float32
def measure(
    target: EvalTarget,
    *,
    batch_size: int | None = None,
    robustness: bool = False,
    routing: bool = False,
    counts: tuple[int, ...] = (),
    corrupted: bool = False,
    held_out: EvalTarget | str | None = None,
    probes: Probes = Probes(),
    radii: tuple[float, ...] | None = None,
    steps: int = STEPS,
    data: str | Path | None = None,
    limit: int | None = None,
    seed: int = 0,
    specificity: float | None = None,
    progress: Progress | None = None,
) -> Report:
    """Run the requested measurements.

    Args:
        target: the model and its images.
        batch_size: images per forward pass; None: the target's.
        robustness: sweeps, affNIST's protocol and PGD at ``radii`` (None: ``default_eps``) in ``steps`` steps.
        routing: routing statistics.
        counts: numbers of routing iterations, with each of which the accuracy is measured too.
        corrupted: accuracy on corrupted images.
        held_out: for calibration, the images for the temperature or why there are none; None: not measured.
        probes: tests of what is claimed of capsules.
        radii, steps: of PGD, and of the attacks of ``probes``.
        data: folder of MNIST, for affNIST's protocol, and of the other data set; None uses ``CAPSZOO_DATA``.
        limit: use this many of affNIST's images (the target's images are already limited).
        seed: of PGD's start, the corruptions and that sample.
        specificity: of the ranking's sensitivity; None: its usual one, or no ranking where torchmetrics is missing.
        progress: displays the progress.
    """

    def bar(what: str, passes: int = 1, images: int | None = None) -> AbstractContextManager[Advance]:
        total = passes * (target.n if images is None else images)
        return progress(what, total) if progress else nullcontext(lambda count: None)

    size = batch_size or target.batch_size
    if counts:
        check_iterations(target)
    if corrupted:
        corruption_set(target)
    if held_out is not None:
        check_calibration(target)
    _check_probes(target, probes)
    if specificity is None:
        specificity = SPECIFICITY if can_rank() else None
    if routing:
        # of one image, so that a model without capsules is refused before hours of work
        target.require_one_view("routing is measured")
        single_image = target.on(target.images.fixed().subset(torch.arange(1)))
        routing_stats(target.net, ((b.images, b.labels) for b in single_image.batches(1)))
    apart = None if probes.other is None else other_images(target, probes.other, data, limit, seed)
    with bar("evaluating") as advance:
        result = assess(target, size, advance, specificity)
    parts = _probed(target, probes, apart, radii, steps, seed, size, bar)
    if robustness:
        with bar("sweeps") as advance:
            parts["sweeps"] = sweeps(target, batch_size=size, progress=advance)
        if not target.images.spec.multi_label:
            tried = radii or default_eps(target.images.spec.input_size[0])
            with bar("PGD") as advance:
                parts["attacks"] = attack(target, tried, steps, seed, min(size, 250), advance)
        parts["affnist"] = affnist(target, data, limit, seed, batch_size)
    if routing:
        with bar("routing") as advance:
            parts["routing"], parts["iterations"] = _routing(target, result, min(size, 50), advance)
    if counts:
        with bar("routing iterations", len(counts) + 1) as advance:
            parts["by_iterations"] = accuracy_by_iterations(target, counts, size, advance)
    if corrupted:
        with bar("corruptions") as advance:
            parts["corruptions"] = corruptions(target, seed, size, advance)
    if held_out is not None:
        with bar("calibration") as advance:
            parts["calibration"] = calibrate(target, held_out, size, advance)
    return Report(target, result, seed, limit, stated_top1(target), **parts)


def _check_probes(target: EvalTarget, probes: Probes) -> None:
    """Refuse what a probe cannot measure, before hours of work."""
    if probes.pose:
        check_pose(target)
    if probes.deletion:
        check_deletion(target)
    if probes.attacks:
        check_attack(target)
    if probes.other is not None:
        require_auroc()


def _probed(
    target: EvalTarget,
    probes: Probes,
    apart: ImageSet | None,
    radii: tuple[float, ...] | None,
    steps: int,
    seed: int,
    size: int,
    bar: Callable[..., AbstractContextManager[Advance]],
) -> dict[str, Any]:
    """The requested probes, by their fields of the report; ``apart`` are the images of the other data set."""
    parts: dict[str, Any] = {}
    if probes.pose:
        with bar("pose", 2) as advance:
            parts["pose"] = pose_probe(target, seed, size, advance)
    if probes.deletion:
        with bar("deletion", images=min(target.n, DELETION_IMAGES)) as advance:
            parts["deletions"] = deletions(target, seed, advance)
    if apart is not None:
        with bar("outliers") as advance:
            parts["outliers"] = outliers(target, apart, size, advance)
    if probes.attacks:
        tried = radii or default_eps(target.images.spec.input_size[0])
        with bar("attacks", len(tried)) as advance:
            parts["adversarial"] = adversarial(
                target, tried, probes.attacks, steps, seed, min(size, 250), advance
            )
    return parts


def _routing(
    target: EvalTarget, result: EvalResult, size: int, advance: Advance
) -> tuple[RoutingStats, tuple[IterationChanges, ...]]:
    """Routing statistics of all images, and the changes by iteration on the first ones."""
    batches = ((b.images, b.labels) for b in target.batches(size, advance))
    stats = routing_stats(target.net, batches)
    # with several labels an image has several answers
    never = tuple(k for k, figures in enumerate(result.per_class) if figures.precision is None)
    few = target.on(target.images.fixed().subset(torch.arange(min(ITERATION_IMAGES, target.n))))
    changes = iteration_changes(target.net, (b.images for b in few.batches(size)))
    return replace(stats, never_predicted=never), changes
