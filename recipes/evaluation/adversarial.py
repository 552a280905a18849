"""Accuracy under APGD and Square, by the Adversarial Robustness Toolbox (extra ``attack``), in the L-infinity norm.

For each radius, the images that the model recognises are attacked by APGD (Croce, Hein 2020, arXiv:2003.01690) on the
cross-entropy, those that stand on the margin (the difference of logits ratio), those that stand by Square
(Andriushchenko et al. 2020, arXiv:1912.00049), which reads no gradients. Pixels are in 0..1, before normalisation; the
gradient is that of the whole model, including the routing. Scores of every kind are taken for logits.

A model without useful gradients looks robust to APGD alone. Three signs of it are reported for each radius or model:
images that only Square changes; images whose gradient is zero; and images whose loss a small step along the gradient's
sign does not raise. :attr:`Adversarial.masked` states whether one of them exceeds ``MASKED``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from capszoo.errors import UsageError, require, unknown_name

from .metrics import share_interval
from .robustness import PixelScores, attack_loss, without_gradients
from .target import EvalTarget

#: Names that ``--attack`` takes, in the order in which they are run.
ATTACKS = ("apgd", "square")

#: Iterations of Square for each step of APGD.
QUERIES = 10

#: Share of the images from which a sign of masked gradients counts, and the step of that test, in pixels' units.
MASKED, SMALL_STEP = 0.05, 1e-3


@dataclass(frozen=True)
class RadiusResult:
    """One radius.

    Attributes:
        eps: the radius, on pixels in 0..1.
        accuracy: in per cent, after all attacks, and ``interval`` its 95% interval (Wilson).
        after: number of images that stand before the attacks and after each one, by name.
    """

    eps: float
    accuracy: float
    interval: tuple[float, float]
    after: dict[str, int]


@dataclass(frozen=True)
class Adversarial:
    """All radii.

    Attributes:
        n: images.
        steps: of each APGD; Square has ``QUERIES`` times as many.
        zero_gradient, not_rising: share of the images, in 0..1, of the two tests of the gradient.
        masked: whether there is a sign of masked gradients.
    """

    n: int
    seed: int
    steps: int
    attacks: tuple[str, ...]
    radii: tuple[RadiusResult, ...]
    zero_gradient: float
    not_rising: float
    masked: bool


def parse_attacks(text: str) -> tuple[str, ...]:
    """Parse names such as ``apgd,square``; raises ``UsageError`` for an unknown one."""
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name not in ATTACKS:
            raise UsageError(f"--attack: {unknown_name('attack', name, ATTACKS)}")
    return tuple(name for name in ATTACKS if name in names)


def check_attack(target: EvalTarget) -> None:
    """Raise ``CapszooError`` if the toolbox is missing, or for images with several crops or labels, or few classes."""
    require("--attack", ("art",), "attack")
    target.require_one_view("robustness is measured")
    spec = target.images.spec
    if spec.multi_label or spec.num_classes < 3:  # the margin needs three
        raise UsageError("--attack needs images with one label of three or more classes", "leave it out")


def adversarial(
    target: EvalTarget,
    radii: tuple[float, ...],
    attacks: tuple[str, ...] = ATTACKS,
    steps: int = 50,
    seed: int = 0,
    batch_size: int = 100,
    progress: Callable[[int], None] | None = None,
) -> Adversarial:
    """Attack a model; ``progress`` is called with the images, once for each radius.

    Args:
        target: the model and the images.
        radii: L-infinity radii on pixels in 0..1.
        attacks: names of ``ATTACKS``.
        steps: of each APGD.
        seed: of the random starts.
        batch_size: images per forward pass.

    Raises:
        CapszooError: as :func:`check_attack`.
    """
    check_attack(target)
    batches = [(batch.pixels.float() / 255, batch.labels) for batch in target.batches(batch_size)]
    pixels, labels = (torch.cat(part) for part in zip(*batches, strict=True))
    scores = PixelScores(target).eval()
    results = []
    with without_gradients(target.net), _seeded(seed):
        zero, flat = _gradient_signs(scores, pixels, labels, batch_size)
        for eps in radii:
            results.append(_attacked(scores, pixels, labels, eps, attacks, steps, batch_size))
            if progress:
                progress(len(labels))
    both = [one.after for one in results if {"margin", "square"} <= one.after.keys()]
    alone = max((after["margin"] - after["square"] for after in both), default=0)
    masked = max(zero, flat, alone / len(labels)) > MASKED
    return Adversarial(len(labels), seed, steps, attacks, tuple(results), zero, flat, masked)


def _attacked(
    scores: nn.Module,
    pixels: Tensor,
    labels: Tensor,
    eps: float,
    attacks: tuple[str, ...],
    steps: int,
    size: int,
) -> RadiusResult:
    """All attacks of one radius, each on the images that the ones before have left."""
    from art.attacks.evasion import AutoProjectedGradientDescent, SquareAttack
    from art.estimators.classification import PyTorchClassifier

    count, classes = len(labels), int(scores(pixels[:1]).shape[1])
    device = "cpu" if pixels.device.type == "cpu" else "gpu"
    estimator: Any = PyTorchClassifier(
        model=scores,
        loss=nn.CrossEntropyLoss(),
        input_shape=tuple(pixels.shape[1:]),
        nb_classes=classes,
        clip_values=(0.0, 1.0),
        device_type=device,
    )
    standing = _recognised(scores, pixels, labels, size)
    after = {"clean": int(standing.sum())}
    made: list[tuple[str, Any]] = []
    if eps > 0:
        options: dict[str, Any] = {"norm": np.inf, "eps": eps, "batch_size": size, "verbose": False}
        if "apgd" in attacks:
            for name, loss in (("cross-entropy", "cross_entropy"), ("margin", "difference_logits_ratio")):
                own = {"eps_step": 2 * eps, "max_iter": steps, "nb_random_init": 1, "loss_type": loss}
                made.append((name, AutoProjectedGradientDescent(estimator, **options, **own)))
        if "square" in attacks:
            made.append(("square", SquareAttack(estimator, max_iter=QUERIES * steps, **options)))
    for name, attack in made:
        rows = standing.nonzero().flatten()
        if len(rows):
            changed = attack.generate(pixels[rows].cpu().numpy(), labels[rows].cpu().numpy())
            moved = torch.from_numpy(changed).to(pixels)
            # rounding may leave the ball by some 1e-8
            moved = torch.minimum(torch.maximum(moved, pixels[rows] - eps), pixels[rows] + eps).clamp(0, 1)
            standing[rows] &= _recognised(scores, moved, labels[rows], size)
        after[name] = int(standing.sum())
    right = int(standing.sum())
    return RadiusResult(eps, 100 * right / count, share_interval(100 * right / count, count), after)


@torch.no_grad()
def _recognised(scores: nn.Module, pixels: Tensor, labels: Tensor, size: int) -> Tensor:
    return torch.cat([scores(part).argmax(1) for part in pixels.split(size)]) == labels


def _gradient_signs(scores: nn.Module, pixels: Tensor, labels: Tensor, size: int) -> tuple[float, float]:
    """Shares of the images with a gradient of zero, and whose loss does not rise by a small step along its sign."""
    zero = flat = 0
    for some, classes in zip(pixels.split(size), labels.split(size), strict=True):
        x = some.clone().requires_grad_()
        with torch.enable_grad():
            loss = attack_loss(scores(x), classes)
            (gradient,) = torch.autograd.grad(loss.sum(), x)
        dead = gradient.flatten(1).abs().amax(1) == 0
        with torch.no_grad():
            after = attack_loss(scores(some + SMALL_STEP * gradient.sign()), classes)
        zero += int(dead.sum())
        flat += int((after <= loss.detach()).sum())
    return zero / len(labels), flat / len(labels)


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """NumPy's global random numbers, which the toolbox draws from, with a seed; those of the caller come back."""
    state = np.random.get_state()
    np.random.seed(seed % 2**32)
    try:
        yield
    finally:
        np.random.set_state(state)
