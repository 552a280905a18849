"""The error type of the data package."""

from __future__ import annotations

from capszoo.errors import CapszooError


class DataError(CapszooError, ValueError):
    """A data set is missing, truncated or does not match its name; the message is one line with a remedy."""


class UnknownDataset(DataError):
    """A name that is no data set's; the message suggests the nearest."""

    exit_code = 2
