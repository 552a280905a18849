"""Files and folders are written completely or not at all; what a killed process leaves is removed, and nothing else."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from capszoo._utils.devices import check_device
from capszoo._utils.files import (
    NotWritable,
    cache_folder,
    remove_stale,
    replacing,
    workplace,
    write_atomically,
)
from capszoo.errors import CapszooError, UsageError
from tests.support.errors import refuses


def test_an_error_of_another_file_is_not_blamed_on_the_target(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError), replacing(tmp_path / "x.txt"):
        (tmp_path / "absent").read_text()
    with refuses(OSError, names=["RGBA"]), replacing(tmp_path / "x.txt"):
        raise OSError("cannot write mode RGBA as JPEG")
    (tmp_path / "file").touch()
    with (
        pytest.raises(NotWritable, match=r"x\.txt"),
        replacing(tmp_path / "file" / "x.txt") as temporary,
    ):
        temporary.touch()
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_threads_may_write_the_same_file(tmp_path: Path) -> None:
    def write(number: int) -> None:
        with replacing(tmp_path / "x.txt") as temporary:
            temporary.write_text(f"{number}" * 100)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(write, range(10)))
    assert len(set((tmp_path / "x.txt").read_text())) == 1 and len(list(tmp_path.iterdir())) == 1


def test_an_error_of_a_connection_is_no_matter_of_the_disk(tmp_path: Path) -> None:
    with pytest.raises(ConnectionRefusedError), replacing(tmp_path / "x", folder=True):
        raise ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused")
    with pytest.raises(NotWritable) as full, replacing(tmp_path / "x", folder=True) as work:
        write_atomically(work / "absent" / "y", "")
        raise OSError(errno.ENOSPC, "No space left on device")
    assert isinstance(full.value, CapszooError) and full.value.errno == errno.ENOSPC
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("older", [False, True])
def test_a_folder_is_replaced_or_stays(older: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target, replace = tmp_path / "target", os.replace
    if older:
        target.mkdir()
        (target / "first").touch()

    def refused(source: Path, to: Path) -> None:
        if source.suffix == ".tmp":
            raise PermissionError(errno.EACCES, "Permission denied", str(source))
        replace(source, to)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", refused)
        with pytest.raises(NotWritable, match="target"), replacing(target, folder=True):
            pass
    assert [path.name for path in tmp_path.rglob("*")] == ["target", "first"] * older
    with replacing(target, folder=True) as work:
        (work / "second").touch()
    assert [path.name for path in tmp_path.rglob("*")] == ["target", "second"]


def test_a_link_stays_and_its_target_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "x.txt").symlink_to(tmp_path / "there" / "y.txt")
    write_atomically(tmp_path / "x.txt", "\u00e4")
    assert (tmp_path / "x.txt").is_symlink() and (tmp_path / "there" / "y.txt").read_bytes() == b"\xc3\xa4"


def test_the_cache_may_lie_in_the_home_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("CAPSZOO_CACHE", "~/capsules")
    assert cache_folder() == tmp_path / "capsules"


@pytest.mark.parametrize("name", ["auto:1", "cpu:3", "cuda:²", "cuda:", "gpu"])
def test_no_machine_has_these_devices(name: str) -> None:
    with refuses(UsageError, names=["unknown", "device"]):
        check_device(name)
    assert check_device("cuda:1") == "cuda:1" and check_device(None) is None


HOLD = """
import sys, time
from pathlib import Path
from capszoo._utils.files import workplace
with workplace(Path(sys.argv[1]), folder=sys.argv[2] == "folder") as place:
    (place / "model.onnx" if place.is_dir() else place).write_text("half")
    print(place, flush=True)
    time.sleep(100)
"""


def aged(path: Path) -> Path:
    """As if it had been made an hour ago."""
    os.utime(path, (time.time() - 3600,) * 2)
    return path


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_a_killed_export_is_cleaned_up_by_the_next(kind: str, root: Path, tmp_path: Path) -> None:
    target = tmp_path / "digits"
    command = [sys.executable, "-c", HOLD, str(target), kind]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=root) as process:
        assert process.stdout is not None
        left = aged(Path(process.stdout.readline().strip()))
        assert (
            left.exists() and remove_stale(tmp_path, target) == [] and left.exists()
        )  # at work: not touched
        process.send_signal(signal.SIGKILL)
    assert left.exists()
    with workplace(target, folder=True) as place:
        assert not left.exists() and place.is_dir()
    assert list(tmp_path.iterdir()) == []


def test_what_was_made_a_moment_ago_is_left(tmp_path: Path) -> None:
    """Between making a folder and locking it lies an instant."""
    young = tmp_path / ".digits.capszoo.1.tmp"
    young.mkdir()
    assert remove_stale(tmp_path, tmp_path / "digits") == [] and young.exists()
    assert remove_stale(tmp_path, aged(young).with_name("digits")) == [young] and not young.exists()


def test_files_of_others_are_never_touched(tmp_path: Path) -> None:
    mine = ("digits.onnx", ".digits.tmp", ".digits.1.tmp", ".digits.capszoo.tmp", ".digits.capszoo.1.tmp.png")
    mine += (".digits.capszoo.x.tmp", "digits.capszoo.1.tmp", ".digitsXcapszoo.1.tmp", ".other.capszoo.1.tmp")
    for name in mine:
        (tmp_path / name).write_text("mine")
        aged(tmp_path / name)
    (folder := tmp_path / "folder").mkdir()
    (folder / "photo.png").write_text("x")
    aged(folder)
    (link := tmp_path / ".digits.capszoo.7.tmp").symlink_to(folder)
    assert remove_stale(tmp_path, tmp_path / "digits") == [link]  # which is not followed
    assert (folder / "photo.png").exists() and not link.is_symlink()
    assert {path.name for path in tmp_path.iterdir()} == {*mine, "folder"}
    assert remove_stale(tmp_path, owned=True) == [tmp_path / ".other.capszoo.1.tmp"]
    assert remove_stale(tmp_path / "nowhere", tmp_path / "nowhere" / "digits") == []


def test_an_older_bundle_gets_its_name_back(tmp_path: Path) -> None:
    """Killed between the two renames: the old bundle waits under a hidden name, the new one is not in place."""
    target, work = tmp_path / "digits", tmp_path / ".digits.capszoo.1.tmp"
    old = work.with_suffix(".old")
    for folder in (work, old):
        folder.mkdir()
        (folder / "manifest.json").write_text(folder.suffix)
        aged(folder)
    remove_stale(tmp_path, target)
    assert (target / "manifest.json").read_text() == ".old" and list(tmp_path.iterdir()) == [target]


def test_folders_that_a_failure_leaves_empty_are_removed(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    with pytest.raises(ValueError, match="no"), replacing(tmp_path / "mine" / "a" / "b" / "x"):
        raise ValueError("no")
    assert list(tmp_path.rglob("*")) == [tmp_path / "mine"]
    with replacing(tmp_path / "mine" / "a" / "b" / "x"):
        pass
    assert (tmp_path / "mine" / "a" / "b" / "x").is_file()


def test_a_name_may_be_as_long_as_the_system_allows(tmp_path: Path) -> None:
    with replacing(tmp_path / ("x" * 255)) as one, workplace(tmp_path / ("x" * 255), folder=True) as two:
        assert one != two and two.is_dir(), "two exports to one target do not meet"
    assert (tmp_path / ("x" * 255)).is_file()
