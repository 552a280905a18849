"""The deletion test of every heat map of a network, on images of an evaluation: see :mod:`capszoo.explain.deletion`.

The area over the curve is the mean fall of the predicted class's probability over the steps in which an image's visible
tiles are blackened one after the other, those with the largest values of the map first. Random order is the yardstick,
and the same for each map. The gain is the difference to it, paired by image.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from capszoo.errors import CapszooError, UsageError
from capszoo.explain.attributions import ATTRIBUTIONS, require_captum
from capszoo.explain.deletion import deletion_by_method
from capszoo.explain.heat_map import METHODS, explain

from .target import EvalTarget

#: Images of the test, the first ones: each takes some 400 forward passes.
DELETION_IMAGES = 100


@dataclass(frozen=True)
class DeletionScore:
    """The test of one map.

    Attributes:
        method: of the map, one of ``capszoo.explain.heat_map.METHODS``.
        n: images with at least two tiles that are not black.
        area: area over the curve, in 0..1.
        random: that of random order.
        gain: their difference, and ``interval`` its 95% interval.
        correlation: mean rank correlation of the map with the fall if one tile alone is blackened.
        reason: why there is no such map, or no test of it; the numbers are then None.
    """

    method: str
    n: int = 0
    area: float | None = None
    random: float | None = None
    gain: float | None = None
    interval: tuple[float, float] | None = None
    correlation: float | None = None
    reason: str = ""


def check_deletion(target: EvalTarget) -> None:
    """Raise ``CapszooError`` if captum is missing, or for several crops or labels of an image."""
    target.require_one_view("deletion is measured")
    if target.images.spec.multi_label:
        raise UsageError("the deletion test needs images with one label", "leave --deletion out")
    require_captum("gradient")


def deletions(
    target: EvalTarget,
    seed: int = 0,
    progress: Callable[[int], None] | None = None,
    most: int | None = None,
) -> tuple[DeletionScore, ...]:
    """Test the maps of couplings, gradient × pixel and occlusion; ``progress`` is called for each image.

    Args:
        target: the model and the images.
        seed: of the random orders.
        progress: see above.
        most: largest number of images; None: ``DELETION_IMAGES``.

    Raises:
        CapszooError: as :func:`check_deletion`.
    """
    check_deletion(target)
    count = min(DELETION_IMAGES if most is None else most, target.n)
    first = target.on(target.images.fixed().subset(torch.arange(count)))
    images = [image for batch in first.batches(count) for image in batch.images.cpu()]

    methods, reason = METHODS, ""
    try:
        explain(target.net, images[0])
    except CapszooError as error:
        methods, reason = tuple(ATTRIBUTIONS), str(error)

    def counted() -> Iterator[Tensor]:
        for image in images:
            yield image
            if progress:
                progress(1)

    results = [DeletionScore("couplings", reason=reason)] if reason else []
    try:
        curves = deletion_by_method(target.net, counted(), methods, seed)
    except CapszooError as error:  # too few images, after the other measurements
        return (*results, *(DeletionScore(method, reason=str(error)) for method in methods))
    for method, curve in curves.items():
        gain, margin = curve.gain[0], curve.margin[0]
        interval = (gain - margin, gain + margin)
        results.append(
            DeletionScore(method, curve.n, curve.hottest, curve.random, gain, interval, curve.correlation)
        )
    return tuple(results)
