"""What a killed export leaves beside its target is removed by the next one, and nothing else ever."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from capszoo.export.atomic import old_name, remove_stale, workplace

HOLD = """
import sys, time
from pathlib import Path
from capszoo.export.atomic import workplace
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
        assert left.exists() and remove_stale(target) == [] and left.exists()  # at work: not touched
        process.send_signal(signal.SIGKILL)
    assert left.exists()
    with workplace(target, folder=True) as place:
        assert not left.exists() and place.is_dir()
    assert list(tmp_path.iterdir()) == []


def test_what_was_made_a_moment_ago_is_left(tmp_path: Path) -> None:
    """Between making a folder and locking it lies an instant."""
    young = tmp_path / ".digits.capszoo-export.1.tmp"
    young.mkdir()
    assert remove_stale(tmp_path / "digits") == [] and young.exists()
    assert remove_stale(aged(young).with_name("digits")) == [young] and not young.exists()


def test_files_of_others_are_never_touched(tmp_path: Path) -> None:
    names = (
        "digits.onnx",
        ".digits.tmp",
        ".digits.1.tmp",
        ".digits.capszoo-export.tmp",
        ".digits.capszoo-export.1.tmp.png",
        ".digits.capszoo-export.x.tmp",
        "digits.capszoo-export.1.tmp",
        ".other.capszoo-export.1.tmp",
        ".digitsXcapszoo-export.1.tmp",
    )
    for name in names:
        aged_file = tmp_path / name
        aged_file.write_text("mine")
        aged(aged_file)
    assert remove_stale(tmp_path / "digits") == []
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(names)
    assert remove_stale(tmp_path / "nowhere" / "digits") == []


def test_an_older_bundle_gets_its_name_back(tmp_path: Path) -> None:
    """Killed between the two renames: the old bundle waits under a hidden name, the new one is not in place."""
    target, work = tmp_path / "digits", tmp_path / ".digits.capszoo-export.1.tmp"
    old = old_name(work)
    for folder in (work, old):
        folder.mkdir()
        (folder / "manifest.json").write_text(folder.suffix)
        aged(folder)
    remove_stale(target)
    assert (target / "manifest.json").read_text() == ".old" and list(tmp_path.iterdir()) == [target]


def test_a_link_is_removed_and_not_followed(tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "photo.png").write_text("x")
    aged(mine)
    link = tmp_path / ".digits.capszoo-export.7.tmp"
    link.symlink_to(mine)
    remove_stale(tmp_path / "digits")
    assert (mine / "photo.png").exists() and not link.is_symlink()


def test_folders_that_a_failure_leaves_empty_are_removed(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    with pytest.raises(ValueError, match="no"), workplace(tmp_path / "mine" / "a" / "b" / "x", folder=False):
        raise ValueError("no")
    assert list(tmp_path.rglob("*")) == [tmp_path / "mine"]
    with workplace(tmp_path / "mine" / "a" / "b" / "x", folder=False) as place:
        os.replace(place, tmp_path / "mine" / "a" / "b" / "x")
    assert (tmp_path / "mine" / "a" / "b" / "x").is_file()


def test_a_name_may_be_as_long_as_the_system_allows(tmp_path: Path) -> None:
    target = tmp_path / ("x" * 255)
    with workplace(target, folder=False) as place:
        os.replace(place, target)
    assert target.is_file()


def test_two_exports_to_one_target_do_not_meet(tmp_path: Path) -> None:
    with workplace(tmp_path / "x", folder=True) as one, workplace(tmp_path / "x", folder=True) as two:
        assert one != two and one.is_dir() and two.is_dir()
