"""A complete evaluation: the requested measurements, collected in one document."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

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
            tree["routing_iters"] = rounded([asdict(entry) for entry in self.by_iterations])
        if self.corruptions:
            tree["corruptions"] = {
                "mean": rounded(mean_accuracy(self.corruptions)),
                "corruptions": [rounded(asdict(entry)) for entry in self.corruptions],
            }
        for name in ("calibration", "pose", "outliers", "adversarial"):
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
    n, size, few = target.n, batch_size or target.batch_size, min(ITERATION_IMAGES, target.n)
    tried = radii or default_eps(target.images.spec.input_size[0])
    if specificity is None:
        specificity = SPECIFICITY if can_rank() else None
    # what cannot be measured is refused here, before hours of work
    todo: dict[str, tuple[str, int, Callable[[Advance], Any]]] = {}
    if probes.pose:
        check_pose(target)
        todo["pose"] = "pose", 2 * n, partial(pose_probe, target, seed, size)
    if probes.deletion:
        check_deletion(target)
        todo["deletions"] = "deletion", min(n, DELETION_IMAGES), partial(deletions, target, seed)
    if probes.other is not None:
        require_auroc()
        apart = other_images(target, probes.other, data, limit, seed)
        todo["outliers"] = "outliers", n, partial(outliers, target, apart, size)
    if probes.attacks:
        check_attack(target)
        attacking = partial(adversarial, target, tried, probes.attacks, steps, seed, min(size, 250))
        todo["adversarial"] = "attacks", len(tried) * n, attacking
    if robustness:
        todo["sweeps"] = "sweeps", n, partial(sweeps, target, size)
        if not target.images.spec.multi_label:
            todo["attacks"] = "PGD", n, partial(attack, target, tried, steps, seed, min(size, 250))
        todo["affnist"] = "affNIST", 0, lambda advance: affnist(target, data, limit, seed, batch_size)
    if routing:
        target.require_one_view("routing is measured")
        some = target.on(target.images.fixed().subset(torch.arange(few)))
        one = next(some.batches(1))
        routing_stats(target.net, [(one.images, one.labels)])
        todo["routing"] = "routing", n, partial(_routing, target, min(size, 50))
        todo["iterations"] = "changes by iteration", few, partial(_changes, some, min(size, 50))
    if counts:
        check_iterations(target)
        passes = len(counts) + 1
        todo["by_iterations"] = (
            "routing iterations",
            passes * n,
            partial(accuracy_by_iterations, target, counts, size),
        )
    if corrupted:
        corruption_set(target)
        todo["corruptions"] = "corruptions", n, partial(corruptions, target, seed, size)
    if held_out is not None:
        check_calibration(target)
        todo["calibration"] = "calibration", n, partial(calibrate, target, held_out, size)

    def run(what: str, images: int, measurement: Callable[[Advance], Any]) -> Any:
        with progress(what, images) if progress else nullcontext(lambda count: None) as advance:
            return measurement(advance)

    result = run("evaluating", n, partial(assess, target, size, specificity=specificity))
    parts = {name: run(*measurement) for name, measurement in todo.items()}
    if routing:  # with several labels an image has several answers
        never = tuple(k for k, figures in enumerate(result.per_class) if figures.precision is None)
        parts["routing"] = replace(parts["routing"], never_predicted=never)
    return Report(target, result, seed, limit, stated_top1(target), **parts)


def _routing(target: EvalTarget, size: int, advance: Advance) -> RoutingStats:
    return routing_stats(target.net, ((b.images, b.labels) for b in target.batches(size, advance)))


def _changes(target: EvalTarget, size: int, advance: Advance) -> tuple[IterationChanges, ...]:
    return iteration_changes(target.net, (b.images for b in target.batches(size, advance)))
