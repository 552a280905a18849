"""The one error the data package raises on purpose."""

from __future__ import annotations

from capszoo.errors import CapszooError

__all__ = ["DataError"]


class DataError(CapszooError, ValueError):
    """A data set is missing, truncated or not what its name says; the message is one line with a remedy."""
