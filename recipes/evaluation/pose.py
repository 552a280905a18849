"""How much of a known rotation or shift a linear map reads from class poses, class activations and pooled features.

Every image is moved once by an amount of its own: rotated by an angle within ±``MOST_DEGREES``, and separately shifted
by whole pixels within ±``MOST_SHIFT`` of each side, black pixels coming in. A ridge regression from the features of
half of the images predicts sine and cosine of the angle, or the shift. R² is measured on the other half, which are
other images, jointly over the two targets: 1 minus the squared error over the squared deviation from the targets'
mean. It is 0 for a constant answer and may be negative. Features are standardised, and the penalty is the one of
``PENALTIES`` with the smallest error in ``FOLDS``-fold cross-validation of the first half, so that vectors of different
widths are comparable. The intervals are percentiles of ``RESAMPLES`` bootstrap samples of the held-out images.

The pixels themselves are a source too: what a linear map reads from them needed no network.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from capszoo.data import keyed_generator, normalize
from capszoo.data.augment import crop
from capszoo.errors import CapszooError, NoCapsules

from .robustness import move
from .target import EvalTarget

#: Largest angle either way, in degrees, and largest shift either way, as a share of the side.
MOST_DEGREES, MOST_SHIFT = 60.0, 0.15

#: Factors of the mean squared singular value of the features.
PENALTIES = tuple(10.0**power for power in range(-4, 5))

#: Parts of the first half, each of which judges the penalties once.
FOLDS = 5

#: Least deviation of a feature, as a share of the mean one: pixels at the edge are nearly constant.
LEAST_SPREAD = 0.1

#: Bootstrap samples of an interval.
RESAMPLES = 500

#: Fewest images: half of them fit the regression.
FEWEST = 20


@dataclass(frozen=True)
class SourceScore:
    """R² of one change read from one source.

    Attributes:
        change: "rotation" or "shift".
        source: "class poses", "class activations", "pooled features" or "pixels".
        width: number of features.
        r2: on the held-out images.
        interval: its 95% interval.
    """

    change: str
    source: str
    width: int
    r2: float
    interval: tuple[float, float]


@dataclass(frozen=True)
class PoseResult:
    """Scores of every change and source; ``fitted`` images for the regression, ``n`` held out."""

    n: int
    fitted: int
    seed: int
    scores: tuple[SourceScore, ...]


def ridge_scores(
    inputs: Tensor, targets: Tensor, fitted: int, seed: int = 0
) -> tuple[float, tuple[float, float]]:
    """R² of a ridge regression on the rows behind the first ``fitted`` ones, and its 95% bootstrap interval.

    Args:
        inputs: features ``[n, d]``.
        targets: what is predicted ``[n, k]``.
        fitted: rows that fit the regression and choose its penalty.
        seed: of the bootstrap.
    """
    x, y = inputs.double().cpu(), targets.double().cpu()
    folds = torch.arange(fitted) % FOLDS
    lost = torch.zeros(len(PENALTIES), dtype=torch.float64)
    for fold in range(FOLDS):
        kept, out = (folds != fold).nonzero()[:, 0], (folds == fold).nonzero()[:, 0]
        predicted = _ridge(x[kept], y[kept], x[out], PENALTIES)
        lost += (predicted - y[out]).square().sum((1, 2))
    best = PENALTIES[int(lost.argmin())]
    held = y[fitted:]
    errors = (held - _ridge(x[:fitted], y[:fitted], x[fitted:], (best,))[0]).square().sum(1)

    def r2(rows: Tensor) -> Tensor:
        """Of the rows ``[..., m]``."""
        some = held[rows]
        spread = (some - some.mean(-2, keepdim=True)).square().sum((-1, -2))
        return 1 - errors[rows].sum(-1) / spread.clamp_min(1e-12)

    count = len(held)
    drawn = torch.randint(0, count, (RESAMPLES, count), generator=keyed_generator(seed, "bootstrap"))
    low, high = r2(drawn).quantile(torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    return float(r2(torch.arange(count))), (low, high)


def _ridge(x: Tensor, y: Tensor, where: Tensor, penalties: Sequence[float]) -> Tensor:
    """Answers ``[p, m, k]`` at ``where`` ``[m, d]`` of the regressions of ``y`` ``[n, k]`` on ``x`` ``[n, d]``."""
    mean, std, middle = x.mean(0), x.std(0), y.mean(0)
    std = std.clamp_min(LEAST_SPREAD * float(std.mean()) + 1e-12)
    u, s, vt = torch.linalg.svd((x - mean) / std, full_matrices=False)
    inside, outside = u.mT @ (y - middle), ((where - mean) / std) @ vt.mT
    scale = float((s**2).mean())
    shrink = [s / (s**2 + penalty * scale + 1e-12) for penalty in penalties]
    return torch.stack([middle + (outside * some) @ inside for some in shrink])


@torch.no_grad()
def features(target: EvalTarget, pixels: Tensor) -> dict[str, Tensor]:
    """Features ``[b, d]`` of each source for uint8 images; a network has some or all of them."""
    net: Any = target.net
    x = normalize(pixels, target.mean, target.std).contiguous(memory_format=torch.channels_last)
    by_name: dict[str, Tensor] = {}
    try:
        out = net.forward_capsules(x)
        by_name = {"class poses": out.poses.flatten(1), "class activations": out.activations.flatten(1)}
    except (AttributeError, NotImplementedError, NoCapsules):  # a network without capsules has its scores
        by_name = {"class activations": net(x)}
    if hasattr(net, "forward_head"):
        by_name["pooled features"] = net.forward_head(net.forward_features(x), pre_logits=True).flatten(1)
    return by_name | {"pixels": x.flatten(1)}


def check_pose(target: EvalTarget) -> None:
    """Raise ``CapszooError`` for several crops of each image, or fewer than ``FEWEST`` images."""
    target.require_one_view("poses are measured")
    if target.n < FEWEST:
        raise CapszooError(
            f"{target.n} images are too few for a regression", f"measure {FEWEST} or more (--limit)"
        )


def pose_probe(
    target: EvalTarget,
    seed: int = 0,
    batch_size: int | None = None,
    progress: Callable[[int], None] | None = None,
) -> PoseResult:
    """Measure what the sources say of rotation and shift; ``progress`` is called with images, twice for each.

    Raises:
        CapszooError: as :func:`check_pose`.
    """
    check_pose(target)
    n, fitted = target.n, target.n // 2
    generator = keyed_generator(seed, "pose")
    order = torch.randperm(n, generator=generator)
    degrees = (2 * torch.rand(n, generator=generator) - 1) * MOST_DEGREES
    sides = torch.tensor(target.images.spec.input_size[1:])
    most = (MOST_SHIFT * sides).round()
    shifts = ((2 * torch.rand(n, 2, generator=generator) - 1) * (most + 0.5)).round().clamp(-most, most)
    radians = torch.deg2rad(degrees)
    targets = {"rotation": torch.stack([radians.sin(), radians.cos()], 1), "shift": shifts}
    scores = []
    for change, wanted in targets.items():
        parts: dict[str, list[Tensor]] = {}
        start = 0
        for batch in target.batches(batch_size, progress):
            rows = slice(start, start + len(batch.labels))
            start = rows.stop
            moved = _moved(batch.pixels, change, degrees[rows], shifts[rows].long())
            for source, values in features(target, moved).items():
                parts.setdefault(source, []).append(values.float().cpu())
        for source, pieces in parts.items():
            inputs = torch.cat(pieces)
            r2, interval = ridge_scores(inputs[order], wanted[order], fitted, seed)
            scores.append(SourceScore(change, source, inputs.shape[1], r2, interval))
    return PoseResult(n - fitted, fitted, seed, tuple(scores))


def _moved(pixels: Tensor, change: str, degrees: Tensor, shifts: Tensor) -> Tensor:
    """uint8 ``[b, c, h, w]`` rotated counter-clockwise by degrees ``[b]``, or shifted by (down, right) ``[b, 2]``."""
    if change == "shift":
        room = int(shifts.abs().max())
        rows, columns = pixels.shape[2:]
        return crop(pixels, room - shifts[:, 0], room - shifts[:, 1], (rows, columns), room)
    return move(pixels, "rotation", degrees)
