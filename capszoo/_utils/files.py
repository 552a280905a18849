"""Write files for users, completely or not at all; read arrays of ``.npz`` files."""

from __future__ import annotations

import csv
import errno
import os
import shutil
import tempfile
import threading
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import CapszooError

if TYPE_CHECKING:
    import numpy as np

__all__ = [
    "PACKAGE_FOLDER",
    "cache_folder",
    "check_numbers_file",
    "check_writable",
    "created_folder",
    "expanded",
    "not_writable",
    "read_npz",
    "replace_folder",
    "replacing",
    "writable_cache",
    "write_csv",
]

#: Folder of the package, with its weights and assets.
PACKAGE_FOLDER = Path(__file__).resolve().parents[1]


def expanded(path: str | Path) -> Path:
    """A path of a variable or an option, with ``~`` expanded; an unknown ``~user`` stays as it is."""
    return Path(os.path.expanduser(path))


def cache_folder() -> Path:
    """Folder for files that can be recomputed; it need not exist.

    Raises:
        CapszooError: no variable names one, and the user has no home folder (as in some containers).
    """
    stated = os.environ.get("CAPSZOO_CACHE")
    if stated:
        return expanded(stated)
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "capszoo"
    except RuntimeError:
        raise CapszooError("this user has no home folder for the cache", "set CAPSZOO_CACHE") from None


def writable_cache(folder: Path) -> Path:
    """A folder of the cache, created if it does not exist.

    Raises:
        CapszooError: it cannot be written; the remedy names the variable that moves the cache.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except OSError as e:
        raise CapszooError(
            f"cannot write to the cache, {folder}: {e.strerror or e}",
            "set CAPSZOO_CACHE to a folder that can be written",
        ) from None


def not_writable(place: Path, error: OSError) -> str:
    """The line about a place that cannot be written, with what to do about it."""
    full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    remedy = (
        "make room and run the same command" if full else "check its permissions, or choose another folder"
    )
    return f"cannot write to {place}: {error.strerror or error}: {remedy}"


@contextmanager
def created_folder(folder: Path) -> Iterator[None]:
    """Create a folder and its parents; at the end, those of them that are empty are removed again."""
    made = [one for one in (folder, *folder.parents) if not one.exists()]  # the innermost first
    try:
        folder.mkdir(parents=True, exist_ok=True)
        yield
    finally:
        with suppress(OSError):  # not empty
            for one in made:
                one.rmdir()


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary file beside `path`, with its suffix, that replaces it at the end or is deleted on error.

    Args:
        path: of the file; its folder is created.

    Raises:
        CapszooError: the file cannot be written.
    """
    with _temporary(path) as temporary:
        yield temporary
        temporary.replace(path)


def check_writable(path: Path) -> None:
    """Check that :func:`replacing` could write a file, before a long computation; its folder is created.

    Raises:
        CapszooError: the file cannot be written.
    """
    with _temporary(path) as temporary:
        temporary.touch()
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))


@contextmanager
def _temporary(path: Path) -> Iterator[Path]:
    """Yield a temporary name beside `path`, whose file is deleted; a failure names `path`."""
    temporary = path.with_name(f".{os.getpid()}.{threading.get_ident()}.{path.name}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield temporary
    except OSError as e:
        about_us = not e.filename or Path(e.filename) in (path, temporary, path.parent)
        if not about_us or not e.errno:  # of another file, or a library's own error
            raise
        raise CapszooError(f"{path}: cannot be written ({e.strerror})", "choose another place") from None
    finally:
        with suppress(OSError):
            temporary.unlink()


def replace_folder(new: Path, target: Path, old: Path) -> None:
    """Rename a complete folder to ``target``; an older one there is removed only after that.

    Args:
        new: the complete folder.
        target: its name from now on, on the same file system.
        old: name of the older folder in between. A process that is killed between the two renames leaves it there.

    Raises:
        OSError: a folder cannot be renamed; the older one has its name back.
    """
    if target.exists():
        os.replace(target, old)
    try:
        os.replace(new, target)
    except OSError:
        with suppress(OSError):  # there was none, or another process has put its own there
            os.replace(old, target)
        raise
    shutil.rmtree(old, ignore_errors=True)


def check_numbers_file(picture: str | Path, first: str) -> None:
    """Check that the ``.csv`` file beside a picture, for its data, is not another table.

    Args:
        picture: the picture's file.
        first: name of the first column of the picture's data.

    Raises:
        CapszooError: it exists, and its first column has another name.
    """
    table = Path(picture).with_suffix(".csv")
    if table.exists() and not _begins_with(table, first.encode()):
        raise CapszooError(
            f"{table} exists, and the picture's numbers would replace it",
            "choose another name for the picture",
        )


def _begins_with(path: Path, start: bytes) -> bool:
    """Whether a file can be read and begins with these bytes."""
    try:
        with path.open("rb") as file:
            return file.read(len(start)) == start
    except OSError:
        return False


def write_csv(path: Path, header: Sequence[str], rows: Iterable[Sequence[Any]]) -> Path:
    """Write a table; None is an empty cell.

    Args:
        path: of the file; its folder is created.
        header: names of the columns.
        rows: values of the rows.

    Raises:
        CapszooError: the file cannot be written.
    """
    with (
        replacing(path) as temporary,
        # names of files may hold bytes that are no UTF-8
        open(temporary, "w", newline="", encoding="utf-8", errors="backslashreplace") as file,
    ):
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(header)
        writer.writerows(rows)
    return path


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
    import numpy as np

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
