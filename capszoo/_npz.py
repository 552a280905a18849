"""Read arrays of an ``.npz`` file. Sizes are checked before anything is unpacked; nothing is ever unpickled."""

from __future__ import annotations

import zipfile
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from .errors import CapszooError

__all__ = ["read_npz"]

#: Total bytes that the arrays of a file may have, unless the caller sets another limit.
MAX_BYTES = 256 * 2**20


def read_npz(path: str | Path, names: Iterable[str], max_bytes: int = MAX_BYTES) -> dict[str, np.ndarray]:
    """Read some arrays of an ``.npz`` file.

    Args:
        path: the file; zeros compress a thousandfold, so the size of the file is no limit.
        names: names of the arrays.
        max_bytes: largest total unpacked size.

    Raises:
        CapszooError: the file is missing, damaged or too large, or an array is missing or not numeric.
    """
    path, names = Path(path), tuple(names)
    try:
        with zipfile.ZipFile(path) as archive:
            unpacked = sum(entry.file_size for entry in archive.infolist())
        if unpacked > max_bytes:
            raise CapszooError(
                f"{path}: unpacks to {unpacked / 2**20:.0f} MiB, more than {max_bytes / 2**20:.0f} MiB",
                "it is none of ours; remove it",
            )
        with np.load(path, allow_pickle=False) as stored:
            if missing := [name for name in names if name not in stored.files]:
                raise CapszooError(f"{path}: lacks the array '{missing[0]}'", "write it again, or remove it")
            arrays = {name: np.asarray(stored[name]) for name in names}
    except CapszooError:
        raise
    except FileNotFoundError:
        raise CapszooError(f"{path}: no such file", "check the path") from None
    # BadZipFile, zlib.error, KeyError, NotImplementedError, ValueError of an object array, …
    except Exception as e:
        reason = " ".join(str(e).split())[:200] or type(e).__name__
        raise CapszooError(f"{path}: not readable ({reason})", "the file is damaged; write it again") from e
    for name, array in arrays.items():
        if array.dtype.kind not in "biuf":
            raise CapszooError(f"{path}: the array '{name}' holds no numbers", "write it again, or remove it")
    return arrays
