"""Training losses of capsule networks: pure functions, and :func:`create_loss` to create one by name.

Sources: margin and reconstruction, Sabour et al. 2017 (section 3, Eq. 4, and section 4.1); spread, Hinton et al. 2018
(Eq. 3); schedules and ablations, Li et al. 2018 (appendix A.ii, Table 5). Each function is averaged over the batch. The
feedback agreement (Sinkhorn, KL), which uses hidden features of the model, is in ``capszoo.models._feedback``.

Letters: ``b`` batch, ``n`` classes, ``c h w`` image. Targets are class indices ``[b]``, or where a function accepts
it, ``[b, n]`` with a one for each class that is present (MultiMNIST).
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from capszoo.errors import unknown_name
from capszoo.layers import upcast_half

__all__ = [
    "LOSSES",
    "BceLoss",
    "CrossEntropyLoss",
    "MarginLoss",
    "ReconstructionLoss",
    "SpreadLoss",
    "bce_loss",
    "create_loss",
    "cross_entropy_loss",
    "margin_loss",
    "reconstruction_loss",
    "spread_loss",
    "spread_margin",
]


#: No label has this value, so that none is ignored.
_NO_LABEL = torch.iinfo(torch.int64).min

#: How far a share of a class may leave 0..1 by rounding, for example in bfloat16.
_ROUNDING = 0.01


def _checked(scores: Tensor, target: Tensor, presences: bool = True) -> Tensor:
    """Targets that fit the scores: class indices ``[b]`` as int64, or presences ``[b, n]`` as they are.

    Values are compared on the CPU alone: elsewhere the comparison would wait for the device, which has assertions of
    its own, and within a transform or a compiled function there are none.

    Raises:
        ValueError: the target is no class index of each image and, where these are allowed, no presence of each class.
    """
    dtype = str(target.dtype).removeprefix("torch.")
    whole = not (target.is_floating_point() or target.is_complex() or target.dtype == torch.bool)
    indices = target.dim() == 1
    kinds = "[b] class indices" + (" or [b, n] presences" if presences else "")
    if not (
        (indices and scores.dim() == 2 and len(target) == len(scores))  # a length of 1 would be broadcast
        or (presences and not indices and target.shape == scores.shape)
    ):
        raise ValueError(
            f"target must be {kinds} for scores {tuple(scores.shape)}, not {tuple(target.shape)} of {dtype}"
        )
    if indices and (not whole or scores.shape[1] == 1):  # [b] of zeros and ones is no class index
        raise ValueError(
            f"a target [b] must be class indices of two classes or more, as integers, not {dtype} for "
            f"{scores.shape[1]} {'class' if scores.shape[1] == 1 else 'classes'}"
            + (": give [b, n] presences" if presences else "")
        )
    if _has_values(target) and target.numel():
        low, high = float(target.min()), float(target.max())
        if indices and not (low >= 0 and high < scores.shape[1]):
            raise ValueError(
                f"class indices must lie between 0 and {scores.shape[1] - 1} for {scores.shape[1]} classes, "
                f"not between {low:g} and {high:g}: no label is left out"
            )
        if not indices and not (low >= -_ROUNDING and high <= 1 + _ROUNDING):
            raise ValueError(f"presences [b, n] must lie between 0 and 1, not between {low:g} and {high:g}")
    return target.long() if indices else target


def _has_values(target: Tensor) -> bool:
    """Whether Python may look at the values: a plain tensor in memory, outside of transforms and compilation."""
    plain = type(target) is Tensor and target.device.type == "cpu"
    return plain and not torch.compiler.is_compiling() and not torch._C._are_functorch_transforms_active()


def _presence(target: Tensor, scores: Tensor) -> Tensor:
    """Targets ``[b]`` or ``[b, n]`` as ``[b, n]`` of zeros and ones, in the dtype of the scores."""
    target = _checked(scores, target)
    return (F.one_hot(target, scores.shape[1]) if target.dim() == 1 else target).to(scores.dtype)


def margin_loss(
    scores: Tensor, target: Tensor, m_plus: float = 0.9, m_minus: float = 0.1, down_weight: float = 0.5
) -> Tensor:
    """``T max(0, m+ - |v|)^2 + lambda (1 - T) max(0, |v| - m-)^2``, summed over classes.

    Args:
        scores: capsule lengths ``[b, n]``.
        target: ``[b]`` or ``[b, n]``.
        m_plus: length from which a present class has no loss.
        m_minus: length below which an absent class has no loss.
        down_weight: lambda, weight of the absent classes.

    Raises:
        ValueError: the target is neither class indices of two classes or more nor presences of the scores' shape.
    """
    scores = upcast_half(scores)
    present = _presence(target, scores)
    missed = F.relu(m_plus - scores).square()
    invented = F.relu(scores - m_minus).square()
    return (present * missed + down_weight * (1.0 - present) * invented).sum(dim=1).mean()


def spread_loss(scores: Tensor, target: Tensor, margin: float = 0.9) -> Tensor:
    """``sum over i != t of max(0, m - (a_t - a_i))^2``.

    Args:
        scores: activations ``[b, n]``.
        target: class indices ``[b]``.
        margin: required lead of the labelled class.

    Raises:
        ValueError: the target is no class index of two classes or more for each image.
    """
    target = _checked(scores, target, presences=False)
    scores = upcast_half(scores)
    others = 1.0 - F.one_hot(target, scores.shape[1]).to(scores.dtype)
    labelled = scores.gather(1, target[:, None])  # [b, 1]
    short = F.relu(margin - (labelled - scores)).square()
    return (short * others).sum(dim=1).mean()


def spread_margin(progress: float, low: float = 0.2, high: float = 0.9) -> float:
    """Margin of the spread loss after a share ``progress`` (0 to 1) of the training; linear."""
    return low + (high - low) * min(max(progress, 0.0), 1.0)


def cross_entropy_loss(scores: Tensor, target: Tensor, label_smoothing: float = 0.0) -> Tensor:
    """Softmax cross-entropy.

    Args:
        scores: logits ``[b, n]``.
        target: class indices ``[b]``, or class probabilities ``[b, n]``.
        label_smoothing: 0 to 1.

    Raises:
        ValueError: the target is neither class indices of two classes or more nor probabilities of the scores' shape.
    """
    scores, target = upcast_half(scores), _checked(scores, target)
    if target.dim() > 1:
        return F.cross_entropy(scores, target.to(scores.dtype), label_smoothing=label_smoothing)
    # PyTorch's default would leave out labels of -100 without a word
    return F.cross_entropy(scores, target, ignore_index=_NO_LABEL, label_smoothing=label_smoothing)


def bce_loss(scores: Tensor, target: Tensor) -> Tensor:
    """Binary cross-entropy on logits, mean over batch and classes (multi-label).

    Args:
        scores: logits ``[b, n]``.
        target: ``[b]`` or ``[b, n]``.

    Raises:
        ValueError: the target is neither class indices of two classes or more nor presences of the scores' shape.
    """
    scores = upcast_half(scores)
    return F.binary_cross_entropy_with_logits(scores, _presence(target, scores))


def reconstruction_loss(reconstruction: Tensor, image: Tensor, weight: float = 0.0005) -> Tensor:
    """Sum of squared pixel errors of an image, averaged over the batch, times ``weight``.

    Args:
        reconstruction, image: ``[b, c, h, w]``, pixels in 0 to 1.
        weight: 0.0005, so that the reconstruction does not dominate the margin loss.

    Raises:
        ValueError: the two differ in shape.
    """
    if reconstruction.shape != image.shape:
        raise ValueError(
            f"reconstruction {tuple(reconstruction.shape)} and image {tuple(image.shape)} differ in shape"
        )
    error = upcast_half(reconstruction) - upcast_half(image)
    return weight * error.square().flatten(1).sum(dim=1).mean()


class MarginLoss(nn.Module):
    """:func:`margin_loss` as a module."""

    def __init__(self, m_plus: float = 0.9, m_minus: float = 0.1, down_weight: float = 0.5) -> None:
        super().__init__()
        self.m_plus = m_plus
        self.m_minus = m_minus
        self.down_weight = down_weight

    def forward(self, scores: Tensor, target: Tensor) -> Tensor:
        return margin_loss(scores, target, self.m_plus, self.m_minus, self.down_weight)

    def extra_repr(self) -> str:
        return f"m_plus={self.m_plus:g}, m_minus={self.m_minus:g}, down_weight={self.down_weight:g}"


class SpreadLoss(nn.Module):
    """:func:`spread_loss` with a margin that rises from ``margin_low`` to ``margin`` during training.

    Call :meth:`set_progress` with the completed share of the training, e.g. once an epoch; the linear schedule is
    our choice. ``margin_low=None`` keeps the margin fixed ("fix_m" in Li et al. 2018, Table 5).

    Raises:
        ValueError: ``margin_low`` exceeds ``margin``.
    """

    def __init__(self, margin: float = 0.9, margin_low: float | None = 0.2) -> None:
        super().__init__()
        if margin_low is not None and margin_low > margin:
            raise ValueError(f"margin_low ({margin_low}) must not exceed margin ({margin})")
        self.margin = margin
        self.margin_low = margin_low
        self.current = margin if margin_low is None else margin_low

    def set_progress(self, progress: float) -> None:
        """``progress``: 0 at the start of the training, 1 at its end."""
        if self.margin_low is not None:
            self.current = spread_margin(progress, self.margin_low, self.margin)

    def forward(self, scores: Tensor, target: Tensor) -> Tensor:
        return spread_loss(scores, target, self.current)

    def extra_repr(self) -> str:
        return f"margin={self.margin:g}, margin_low={self.margin_low}, current={self.current:g}"


class CrossEntropyLoss(nn.Module):
    """:func:`cross_entropy_loss` as a module.

    Raises:
        ValueError: ``label_smoothing`` is not between 0 and 1.
    """

    def __init__(self, label_smoothing: float = 0.0) -> None:
        super().__init__()
        if not 0.0 <= label_smoothing <= 1.0:
            raise ValueError(f"label_smoothing must lie between 0 and 1, not {label_smoothing}")
        self.label_smoothing = label_smoothing

    def forward(self, scores: Tensor, target: Tensor) -> Tensor:
        return cross_entropy_loss(scores, target, self.label_smoothing)

    def extra_repr(self) -> str:
        return f"label_smoothing={self.label_smoothing:g}"


class BceLoss(nn.Module):
    """:func:`bce_loss` as a module."""

    def forward(self, scores: Tensor, target: Tensor) -> Tensor:
        return bce_loss(scores, target)


class ReconstructionLoss(nn.Module):
    """:func:`reconstruction_loss` as a module."""

    def __init__(self, weight: float = 0.0005) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, reconstruction: Tensor, image: Tensor) -> Tensor:
        return reconstruction_loss(reconstruction, image, self.weight)

    def extra_repr(self) -> str:
        return f"weight={self.weight:g}"


#: Losses of class scores and targets, by their names in recipes; reconstruction compares images.
LOSSES: dict[str, Callable[..., nn.Module]] = {
    "bce": BceLoss,
    "cross_entropy": CrossEntropyLoss,
    "margin": MarginLoss,
    "reconstruction": ReconstructionLoss,
    "spread": SpreadLoss,
}


def create_loss(name: str, **options: Any) -> nn.Module:
    """Create a loss by name.

    Args:
        name: one of ``LOSSES``.
        **options: arguments of its class.

    Raises:
        ValueError: unknown name; TypeError: unknown option, or one that is no number. The first two suggest the nearest
            valid name.
    """
    if name not in LOSSES:
        raise ValueError(unknown_name("loss", name, LOSSES))
    parameters = inspect.signature(LOSSES[name]).parameters.values()
    valid = [p.name for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    for option, value in options.items():
        if option not in valid:
            raise TypeError(unknown_name(f"option of loss '{name}'", option, valid))
        number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        # None is a value of margin_low alone: a fixed margin
        if not number and not (value is None and option == "margin_low"):
            raise TypeError(f"option {option} of loss '{name}' must be a finite number, not {value!r}")
    return LOSSES[name](**options)
