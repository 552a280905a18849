"""Accuracy on images that are rotated, sheared, scaled or shifted, and under attack; affNIST's protocol.

Sweeps: every image is transformed by one amount at a time (``SWEEPS``), bilinearly about its middle, with black pixels
where there is no source, and rounded to 8 bits; the neutral amount gives the clean accuracy exactly.

PGD (Madry et al. 2018), in the L-infinity norm, untargeted: from a random start in the ball of radius eps about the
image, ``steps`` steps of 2.5 eps / steps along the sign of the gradient of (the largest score of another class -
the score of the image's class), each projected into the ball and into [0, 1]. Pixels are in [0, 1], before
normalisation; the gradient is that of the whole model, including the routing. An image counts as recognised if the
model is right on the image itself, on the start and after every step; an image with a wrong answer is not attacked
further.

affNIST: the regenerated test set and the expanded (shifted) one of ``capszoo.data``, 40x40 pixels, one image for each
digit of MNIST's test set. The protocol trains on MNIST at random places on 40x40; other training is marked in results.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from capszoo.data import DataError, dataset_spec, keyed_generator, load_dataset
from capszoo.data.augment import affine_matrices, crop, warp
from capszoo.errors import CapszooError, UsageError

from .metrics import all_right, assess
from .target import EvalTarget, drawn

#: Unit and amounts of each sweep. Rotation is counter-clockwise; translations are rounded to whole pixels.
SWEEPS: dict[str, tuple[str, tuple[float, ...]]] = {
    "rotation": ("degrees", (-90, -60, -45, -30, -20, -10, 0, 10, 20, 30, 45, 60, 90)),
    "translation x": ("share of the width", (-0.3, -0.2, -0.1, -0.05, 0, 0.05, 0.1, 0.2, 0.3)),
    "translation y": ("share of the height", (-0.3, -0.2, -0.1, -0.05, 0, 0.05, 0.1, 0.2, 0.3)),
    "scale": ("factor", (0.5, 0.6, 0.7, 0.8, 0.9, 1, 1.1, 1.2, 1.4, 1.6)),
    "shear": ("pixels per row", (-0.6, -0.4, -0.2, -0.1, 0, 0.1, 0.2, 0.4, 0.6)),
}

#: Steps of PGD.
STEPS = 20

#: All steps together, in radii of the ball.
STEP_SHARE = 2.5


@dataclass(frozen=True)
class SweepResult:
    """Accuracy in per cent (``all_right``) for each amount."""

    name: str
    unit: str
    amounts: tuple[float, ...]
    accuracy: tuple[float, ...]


@dataclass(frozen=True)
class AttackResult:
    """Accuracy in per cent under PGD of radius ``eps`` on pixels in [0, 1]."""

    eps: float
    steps: int
    step_size: float
    accuracy: float


def move(pixels: Tensor, name: str, amount: float | Tensor) -> Tensor:
    """Transform uint8 [b, c, h, w] as in a sweep, to the same shape.

    Args:
        pixels: the images.
        name: a key of ``SWEEPS``.
        amount: in the sweep's unit; of rotation, scale and shear also one for each image, ``[b]``.
    """
    b, _, h, w = pixels.shape
    if name.startswith("translation"):
        amount = float(amount)
        across, down = (round(amount * w), 0) if name.endswith("x") else (0, round(amount * h))
        room = max(abs(across), abs(down))
        return crop(pixels, torch.full((b,), room - down), torch.full((b,), room - across), (h, w), room)

    def all_by(value: float | Tensor) -> Tensor:
        return torch.as_tensor(value, dtype=torch.float32).expand(b)

    factor = all_by(amount if name == "scale" else 1)
    matrices = affine_matrices(
        all_by(amount if name == "rotation" else 0), all_by(amount if name == "shear" else 0), factor, factor
    )
    return warp(pixels.float(), matrices).round_().clamp_(0, 255).to(torch.uint8)


@torch.no_grad()
def sweeps(
    target: EvalTarget, batch_size: int | None = None, progress: Callable[[int], None] | None = None
) -> tuple[SweepResult, ...]:
    """Accuracy for every amount of each sweep, with one view of each image."""
    target.require_one_view("robustness is measured")
    spec = target.images.spec
    right = {name: [0] * len(amounts) for name, (_, amounts) in SWEEPS.items()}
    for batch in target.batches(batch_size, progress):
        for name, (_, amounts) in SWEEPS.items():
            for index, amount in enumerate(amounts):
                scores = target.net(target.normalised(move(batch.pixels, name, amount)))
                hits = all_right(scores, batch.labels, spec.labels_per_image, target.threshold)
                right[name][index] += int(hits.sum())
    return tuple(
        SweepResult(name, unit, amounts, tuple(100 * count / target.n for count in right[name]))
        for name, (unit, amounts) in SWEEPS.items()
    )


def default_eps(channels: int) -> tuple[float, ...]:
    """Default radii: those customary for MNIST for grey images, else those for colour images."""
    return (0.0, 0.05, 0.1, 0.2, 0.3) if channels == 1 else (0.0, 1 / 255, 2 / 255, 4 / 255, 8 / 255)


def attack_loss(scores: Tensor, labels: Tensor) -> Tensor:
    """Largest score of another class minus that of the image's class, [b]; above 0 the image is not recognised."""
    own = scores.gather(1, labels[:, None])[:, 0]
    others = scores.scatter(1, labels[:, None], -torch.inf)
    return others.amax(1) - own


def pgd(
    forward: Callable[[Tensor], Tensor],
    images: Tensor,
    labels: Tensor,
    eps: float,
    steps: int = STEPS,
    generator: torch.Generator | None = None,
) -> tuple[Tensor, Tensor]:
    """Attack images by projected gradient steps.

    Args:
        forward: from pixels in [0, 1] to scores [b, n]; differentiable.
        images: float [b, c, h, w] in [0, 1].
        labels: classes [b].
        eps: radius of the ball, at least 0; 0 disables the attack.
        steps: number of gradient steps.
        generator: for the random start, on the CPU.

    Returns:
        The attacked images, the first that fooled the model or else the last tried, and whether each image was
        recognised throughout, bool [b].
    """
    if not 0 <= eps <= 1:
        raise UsageError(f"eps is {eps}", "give a radius of 0 to 1, such as 8/255")
    if steps < 1:
        raise UsageError(f"{steps} steps of PGD make no sense", "give 1 or more")
    with torch.no_grad():
        standing = forward(images).argmax(1) == labels
    result = images.clone()
    if eps == 0:
        return result, standing
    low, high = (images - eps).clamp_(0, 1), (images + eps).clamp_(0, 1)
    start = torch.rand(images.shape, generator=generator).to(images) * (2 * eps) - eps
    tried = torch.minimum(torch.maximum(images + start, low), high)
    step = STEP_SHARE * eps / steps
    left = standing.nonzero()[:, 0]
    for number in range(steps + 1):
        if not len(left):
            break
        x = tried[left].requires_grad_(number < steps)
        with torch.set_grad_enabled(number < steps):
            scores = forward(x)
            fooled = scores.detach().argmax(1) != labels[left]
            if number < steps and not bool(fooled.all()):
                (gradient,) = torch.autograd.grad(attack_loss(scores, labels[left]).sum(), x)
        x = x.detach()
        result[left] = x
        if number < steps and not bool(fooled.all()):
            moved = x + step * gradient.sign()
            tried[left] = torch.minimum(torch.maximum(moved, low[left]), high[left])
        standing[left[fooled]] = False
        left = left[~fooled]
    return result, standing


@contextmanager
def without_gradients(net: nn.Module) -> Iterator[None]:
    """No gradients of a net's parameters within this context: only those of the pixels are needed."""
    parameters = [p for p in net.parameters() if p.requires_grad]
    net.requires_grad_(False)
    try:
        yield
    finally:
        for p in parameters:
            p.requires_grad_(True)


def attack(
    target: EvalTarget,
    radii: Sequence[float],
    steps: int = STEPS,
    seed: int = 0,
    batch_size: int = 250,
    progress: Callable[[int], None] | None = None,
) -> tuple[AttackResult, ...]:
    """Accuracy under PGD for each radius; the random start depends on (seed, batch), so on the batch size too."""
    if target.images.spec.multi_label:
        raise CapszooError("PGD is defined here for one label an image", "choose another data set")
    target.require_one_view("robustness is measured")
    pixels_of = PixelScores(target)
    right = [0] * len(radii)
    with without_gradients(target.net):
        for number, batch in enumerate(target.batches(batch_size, progress)):
            images = batch.pixels.float() / 255
            for index, eps in enumerate(radii):
                generator = keyed_generator(seed, number)
                _, standing = pgd(pixels_of, images, batch.labels, eps, steps, generator)
                right[index] += int(standing.sum())
    return tuple(
        AttackResult(eps, steps, STEP_SHARE * eps / steps, 100 * count / target.n)
        for eps, count in zip(radii, right, strict=True)
    )


class PixelScores(nn.Module):
    """Scores of pixels in 0..1, float [b, c, h, w]: normalisation, then the target's network, in float32."""

    def __init__(self, target: EvalTarget) -> None:
        super().__init__()
        self.net = target.net
        self.mean, self.std = (torch.tensor(values).view(1, -1, 1, 1) for values in (target.mean, target.std))

    def forward(self, pixels: Tensor) -> Tensor:
        x = (pixels - self.mean.to(pixels.device)) / self.std.to(pixels.device)
        return self.net(x.contiguous(memory_format=torch.channels_last)).float()


@dataclass(frozen=True)
class AffnistResult:
    """Accuracy in per cent on affNIST's two test sets; None and a reason if the model cannot process them.

    Attributes:
        trained: whether the weights were trained on the protocol's training set.
    """

    n: int
    regenerated: float | None
    expanded: float | None
    trained: bool
    reason: str = ""


def affnist(
    target: EvalTarget,
    data: str | Path | None,
    limit: int | None = None,
    seed: int = 0,
    batch_size: int | None = None,
) -> AffnistResult:
    """The protocol's test, for models of digits (trained on MNIST or a set composed from it).

    Args:
        target: the model.
        data: folder of MNIST; None uses ``CAPSZOO_DATA``.
        limit, seed: number of images of each set, and seed of the sample.
        batch_size: images per forward pass; None: the target's.
    """
    spec = dataset_spec("affnist")
    name = target.recipe.data.name or target.images.spec.name
    trained = target.recipe.data.name == "affnist"  # a model without a recipe may be untrained
    reason = ""
    size = tuple(getattr(target.net, "img_size", ()))
    if name not in ("mnist", "affnist") or target.images.spec.multi_label:
        reason = f"the protocol is of MNIST's digits, the model is of {name}"
    elif getattr(target.net, "fixed_input_size", True) and size != spec.input_size[1:]:
        reason = f"the model was built for {'x'.join(map(str, size))} pixels, the protocol has 40x40"
    if reason:
        return AffnistResult(0, None, None, trained, reason)
    accuracy = []
    n = 0
    for split in ("test", "expanded"):
        try:
            images = drawn(load_dataset("affnist", split, data), limit, seed)
        except DataError as error:  # earlier measurements must not be lost
            return AffnistResult(0, None, None, trained, str(error))
        n = len(images)
        accuracy.append(assess(target.on(images), batch_size).accuracy)
    return AffnistResult(n, accuracy[0], accuracy[1], trained)


def parse_radii(text: str) -> tuple[float, ...]:
    """Parse radii such as ``0.1,8/255``; raises ``UsageError`` for one that is not a number from 0 to 1."""
    radii = []
    for word in text.split(","):
        top, _, bottom = word.partition("/")
        try:
            radius = float(top) / (float(bottom) if bottom else 1)
        except (ValueError, ZeroDivisionError):
            radius = -1.0
        if not 0 <= radius <= 1:
            raise UsageError(
                f"--pgd-eps {text} is invalid", "give radii of 0 to 1, such as 0.1 or 2/255,8/255"
            )
        radii.append(radius)
    return tuple(radii)
