"""Write files for users, completely or not at all; read JSON, and arrays of ``.npz`` files."""

from __future__ import annotations

import csv
import errno
import hashlib
import json
import os
import re
import shutil
import tempfile
import time
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

try:
    import fcntl
except ModuleNotFoundError:  # Windows has no such locks
    fcntl = None  # type: ignore[assignment]

from ..errors import CapszooError, WeightsError, first_line

if TYPE_CHECKING:
    import numpy as np

#: Folder of the package, with its weights and assets.
PACKAGE_FOLDER = Path(__file__).resolve().parents[1]

#: Largest JSON file that is read, in bytes: a thousand times the size of the zoo's files.
MAX_JSON_BYTES = 32 * 2**20


def expanded(path: str | Path) -> Path:
    """A path of a variable or an option, with ``~`` expanded; an unknown ``~user`` stays as it is."""
    return Path(os.path.expanduser(path))


def cache_folder() -> Path:
    """Folder for files that can be recomputed; it need not exist.

    Raises:
        CapszooError: no variable names one, and the user has no home folder (as in some containers).
    """
    folder = os.environ.get("CAPSZOO_CACHE")
    if folder:
        return expanded(folder)
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


#: Errors of a disk without room.
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class NotWritable(CapszooError, OSError):
    """A file or folder cannot be written.

    Args:
        target: the file or folder.
        error: the system's error; its ``errno`` is kept.
    """

    def __init__(self, target: Path, error: OSError) -> None:
        full = error.errno in _FULL
        super().__init__(
            f"cannot write to {target}: {error.strerror or error}",
            "make room and run the same command"
            if full
            else "check its permissions, or choose another place",
        )
        self.errno, self.strerror, self.filename = error.errno, error.strerror, str(target)


def not_writable(target: Path, error: OSError) -> str:
    """The line about a file or folder that cannot be written, with its remedy."""
    return str(error if isinstance(error, NotWritable) else NotWritable(target, error))


@contextmanager
def created_folder(folder: Path) -> Iterator[None]:
    """Create a folder and its parents; at the end, those of them that are empty are removed again."""
    made = [parent for parent in (folder, *folder.parents) if not parent.exists()]  # the innermost first
    try:
        folder.mkdir(parents=True, exist_ok=True)
        yield
    finally:
        with suppress(OSError):  # not empty
            for parent in made:
                parent.rmdir()


#: Hidden name beside a target: the target's name or its hash, a random number, and what it holds.
_HIDDEN = re.compile(r"\.(?P<name>.+)\.capszoo\.[0-9a-f]+\.(?P<kind>tmp|old)", re.DOTALL)

#: Seconds for which a new hidden name is left alone, because it is created a moment before it is locked.
_YOUNG = 60.0


@contextmanager
def workplace(target: Path, folder: bool = False) -> Iterator[Path]:
    """Yield an empty file or folder under a hidden name beside ``target``; what remains of it at the end is removed.

    It is locked while it is in use. The system releases the lock when the process ends for any reason, so that
    :func:`remove_stale`, which is called first, can distinguish remains from work in progress.

    Args:
        target: the file or folder that it is to become; its parents are created, and removed again if they stay empty.
        folder: whether it is a folder.

    Raises:
        NotWritable: nothing can be written there.
    """
    # random, because a process in another container may have the same number
    work = target.with_name(f".{_short(target)}.capszoo.{os.urandom(8).hex()}.tmp")
    try:
        with created_folder(target.parent):
            remove_stale(target.parent, target)
            try:
                work.mkdir() if folder else work.touch(exist_ok=False)
                with _locked(work):
                    yield work
            finally:
                _remove(work)
    except OSError as e:
        named = Path(os.fsdecode(e.filename)) if isinstance(e.filename, (str, bytes)) else None
        ours = named and (named in (target, *target.parents) or work in (named, *named.parents))
        if not ours and (
            named or e.errno not in _FULL
        ):  # of another file, of a connection, or a library's own
            raise
        raise NotWritable(target, e) from None


@contextmanager
def replacing(target: Path, folder: bool = False) -> Iterator[Path]:
    """Yield an empty file or folder that takes the name of ``target`` at the end; after an error nothing has changed.

    Args:
        target: a file or folder, which may exist; of a link, the file that it leads to. Its parents are created.
        folder: whether it is a folder. An older one is removed when the new one has its name.

    Raises:
        NotWritable: it cannot be written.
    """
    target = Path(os.path.realpath(target))
    with workplace(target, folder) as work:
        yield work
        sync(work)
        old = work.with_suffix(".old")
        if folder and target.is_dir():
            os.replace(target, old)
        try:
            os.replace(work, target)
        except OSError:
            with suppress(OSError):  # there was none, or another process has put its own there
                os.replace(old, target)
            raise
        if folder:
            sync(target.parent)
            shutil.rmtree(old, ignore_errors=True)


def write_atomically(path: Path, content: str | bytes) -> None:
    """Write a file completely or not at all; text is UTF-8.

    Raises:
        NotWritable: it cannot be written.
    """
    with replacing(path) as work:
        work.write_bytes(content.encode() if isinstance(content, str) else content)


def check_writable(path: Path) -> None:
    """Check that :func:`replacing` could write a file, before a long computation.

    Raises:
        NotWritable: it cannot be written, or is a folder.
    """
    path = Path(os.path.realpath(path))
    with workplace(path):
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))


def sync(path: Path) -> None:
    """Have the system write a file or a folder to the disk."""
    windows = os.name == "nt"
    if windows and path.is_dir():
        return  # Windows opens no folders, and syncs what is open for writing
    handle = os.open(path, os.O_RDWR if windows else os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        # some network and shared file systems sync files, but no folders
        if not path.is_dir() or error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(handle)


def remove_stale(folder: Path, target: Path | None = None, owned: bool = False) -> list[Path]:
    """Remove what killed processes left under names of :func:`workplace` in a folder; return the removed paths.

    What is locked or very new stays. An older folder that was moved to such a name when its process was killed gets
    its name back, if that is free.

    Args:
        folder: where to look; it need not exist.
        target: whose remains to remove; None for those of every target.
        owned: whether no other process writes there, so that all of it is left over.
    """
    with suppress(OSError):
        names = [
            (path, match) for path in sorted(folder.iterdir()) if (match := _HIDDEN.fullmatch(path.name))
        ]
        stale = [
            (path, match)
            for path, match in names
            if (target is None or match["name"] == _short(target))
            and (owned or not (_in_use(path.with_suffix(".tmp")) or _in_use(path)))
        ]
        for path, match in stale:
            home = target or folder / match["name"]
            if match["kind"] == "old" and not home.exists():
                os.replace(path, home)
            else:
                _remove(path)
        return [path for path, _ in stale]
    return []


def _short(target: Path) -> str:
    """The target's name; for a long one its hash, so that the hidden name is no longer than the system allows."""
    name = os.fsencode(target.name)
    return target.name if len(name) <= 200 else hashlib.sha256(name).hexdigest()


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Lock a file or folder for this process while the block runs, where the system has such locks."""
    if fcntl is None:  # Windows opens no folders, and renames no open file
        yield
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        _lock(handle)
        yield
    finally:
        os.close(handle)


def _lock(handle: int) -> bool:
    """Lock an open file or folder for this process; False if another process has it, or without locks."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _in_use(path: Path) -> bool:
    if fcntl is None:
        return True  # it cannot be known
    try:
        if path.suffix == ".tmp" and time.time() - path.stat().st_mtime < _YOUNG:
            return True
        handle = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return False
    except OSError:
        return True
    try:
        return not _lock(handle)
    finally:
        os.close(handle)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):
            path.unlink()


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


def read_json_object(path: str | Path) -> dict[str, Any]:
    """Read a JSON file that contains an object.

    Raises:
        WeightsError: the file is missing, not readable, too large, not JSON, or no object.
    """
    path = Path(path)
    try:
        if path.stat().st_size > MAX_JSON_BYTES:
            raise WeightsError(f"{path}: larger than {MAX_JSON_BYTES // 2**20} MiB, which no metadata are")
        raw = json.loads(path.read_text(encoding="utf-8"))
    except OSError as e:
        raise WeightsError(f"{path}: cannot be read ({e.strerror or e})") from e
    except (ValueError, RecursionError) as e:  # JSONDecodeError, UnicodeDecodeError, a number of 5,000 digits
        raise WeightsError(f"{path}: not readable as JSON ({first_line(e)})", "the file is damaged") from e
    if not isinstance(raw, dict):
        raise WeightsError(f"{path}: holds no JSON object", "the file is damaged")
    return raw
