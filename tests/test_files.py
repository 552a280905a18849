"""Files are written completely or not at all, and an error names the file that it is about."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from capszoo._utils.devices import check_device
from capszoo._utils.files import cache_folder, replace_folder, replacing
from capszoo.errors import CapszooError, UsageError


def test_an_error_of_another_file_is_not_blamed_on_the_target(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError), replacing(tmp_path / "x.txt"):
        (tmp_path / "absent").read_text()
    with pytest.raises(OSError, match="^cannot write mode RGBA"), replacing(tmp_path / "x.txt"):
        raise OSError("cannot write mode RGBA as JPEG")
    (tmp_path / "file").touch()
    with (
        pytest.raises(CapszooError, match="cannot be written"),
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


@pytest.mark.parametrize("older", [False, True])
def test_a_folder_is_replaced_or_stays(older: bool, tmp_path: Path) -> None:
    new, target, old = (tmp_path / name for name in ("new", "target", "old"))
    if older:
        target.mkdir()
        (target / "first").touch()
    with pytest.raises(FileNotFoundError):
        replace_folder(new, target, old)
    assert [path.name for path in tmp_path.rglob("*")] == ["target", "first"] * older
    new.mkdir()
    (new / "second").touch()
    replace_folder(new, target, old)
    assert [path.name for path in tmp_path.rglob("*")] == ["target", "second"]


def test_the_cache_may_lie_in_the_home_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("CAPSZOO_CACHE", "~/capsules")
    assert cache_folder() == tmp_path / "capsules"


@pytest.mark.parametrize("name", ["auto:1", "cpu:3", "cuda:²", "cuda:", "gpu"])
def test_no_machine_has_these_devices(name: str) -> None:
    with pytest.raises(UsageError, match="unknown device"):
        check_device(name)
    assert check_device("cuda:1") == "cuda:1" and check_device(None) is None
