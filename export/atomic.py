"""Temporary names beside a target, and clean-up after killed exports."""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import shutil
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

try:
    import fcntl
except ModuleNotFoundError:  # Windows has no such locks
    fcntl = None  # type: ignore[assignment]

from capszoo._utils.files import created_folder
from capszoo.errors import CapszooError

__all__ = ["old_name", "remove_stale", "workplace"]

_MARK = "capszoo-export"

#: Seconds for which a new name is left alone, because it is created a moment before it is locked.
_YOUNG = 60.0


@contextmanager
def workplace(target: Path, folder: bool) -> Iterator[Path]:
    """An empty file or folder under a hidden name beside ``target``; what remains of it at the end is removed.

    It is locked while it is in use. The system releases the lock when the process ends for any reason, so that
    :func:`remove_stale`, which is called first, can distinguish remains from work in progress.

    Raises:
        CapszooError: nothing can be written there.
    """
    # random, because a process in another container may have the same number
    place = target.with_name(f".{_short(target)}.{_MARK}.{secrets.token_hex(8)}.tmp")
    with ExitStack() as stack:
        try:
            stack.enter_context(created_folder(target.parent))
            remove_stale(target)
            if folder:
                place.mkdir()
            else:
                place.touch(exist_ok=False)
        except OSError as e:
            raise CapszooError(
                f"{target}: cannot be written ({e.strerror})", "choose another place"
            ) from None
        try:
            with _held(place):
                yield place
        finally:
            _remove(place)


def _short(target: Path) -> str:
    """The target's name; for a long one its hash, so that the hidden name is no longer than the system allows."""
    name = os.fsencode(target.name)
    return target.name if len(name) <= 200 else hashlib.sha256(name).hexdigest()


def old_name(work: Path) -> Path:
    """Temporary name of an older target while the new one, at ``work``, takes its name."""
    return work.with_suffix(".old")


def remove_stale(target: Path) -> list[Path]:
    """Remove remains of killed exports to the same target beside it; return the removed paths.

    Removes only names from :func:`workplace` that are neither locked nor very new. An older target that was moved to
    such a name when its export was killed gets its name back, if that is free.
    """
    # without locks (no fcntl: Windows) remains cannot be detected
    pattern = re.compile(rf"\.{re.escape(_short(target))}\.{_MARK}\.[0-9a-f]+\.(tmp|old)")
    with suppress(OSError):
        found = sorted(p for p in target.parent.iterdir() if pattern.fullmatch(p.name))
        stale = [p for p in found if not _in_use(p.with_suffix(".tmp")) and not _in_use(p)]
        for path in stale:
            if path.suffix == ".old" and not target.exists():
                os.replace(path, target)
            else:
                _remove(path)
        return stale
    return []


@contextmanager
def _held(place: Path) -> Iterator[None]:
    """Lock a file or folder for this process while the block runs, where the system has such locks."""
    if fcntl is None:  # Windows opens no folders, and renames no open file
        yield
        return
    handle = os.open(place, os.O_RDONLY)
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
