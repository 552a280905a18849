"""Ranges of a layer's sizes and settings, checked before its parameters are made.

torch accepts most of them, or fails unclearly. A setting out of range shows as NaN, often after hours of training.
"""

import math

__all__ = ["at_least", "finite", "non_negative", "positive"]


def at_least(least: int, **sizes: int) -> None:
    """Raise ValueError that names the first of the ``sizes`` below ``least``."""
    for name, size in sizes.items():
        if size < least:
            raise ValueError(f"{name} must be at least {least}, not {size}")


def positive(**settings: float) -> None:
    """Raise ValueError that names the first of the ``settings`` that is not a finite number above 0."""
    for name, value in settings.items():
        if not 0.0 < value < math.inf:  # also true of NaN
            raise ValueError(f"{name} must be positive and finite, not {value}")


def non_negative(**settings: float) -> None:
    """Raise ValueError that names the first of the ``settings`` that is not a finite number of 0 or more."""
    for name, value in settings.items():
        if not 0.0 <= value < math.inf:
            raise ValueError(f"{name} must be 0 or more and finite, not {value}")


def finite(**settings: float) -> None:
    """Raise ValueError that names the first of the ``settings`` that is infinite or NaN."""
    for name, value in settings.items():
        if not math.isfinite(value):
            raise ValueError(f"{name} must be finite, not {value}")
