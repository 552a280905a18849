"""Ranges of a layer's sizes, checked before its parameters are made: torch accepts most of them, or fails unclearly."""

__all__ = ["at_least"]


def at_least(least: int, **sizes: int) -> None:
    """Raise ValueError that names the first of the ``sizes`` below ``least``."""
    for name, size in sizes.items():
        if size < least:
            raise ValueError(f"{name} must be at least {least}, not {size}")
