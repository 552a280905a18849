"""The error type of the data package."""

from __future__ import annotations

from capszoo.errors import CapszooError

__all__ = ["DataError"]


class DataError(CapszooError, ValueError):
    """A data set is missing, truncated or not the one that its name indicates; the message is one line with a
    remedy."""
