"""Fetching, from a server on this machine: checksums, mirrors, archives, and nothing without a folder."""

from __future__ import annotations

import functools
import gzip
import hashlib
import socket
import threading
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest

from capszoo.data import DataError, load_dataset
from capszoo.data import download as download_module
from capszoo.data.download import RemoteFile, fetch, remote_files
from tests.support.command import fails, succeeds
from tests.support.errors import refuses
from tests.support.formats import write_idx, write_tar


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def served(tmp_path: Path) -> Iterator[tuple[Path, str]]:
    """A folder and the address under which it is served."""
    folder = tmp_path / "served"
    folder.mkdir()
    server = ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(_Quiet, directory=str(folder)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield folder, f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def md5(path: Path) -> str:
    return hashlib.md5(path.read_bytes()).hexdigest()


def offer_cifar100(served: tuple[Path, str], monkeypatch: pytest.MonkeyPatch, checksum: str = "") -> Path:
    folder, address = served
    archive = folder / "cifar-100-binary.tar.gz"
    members = tuple(f"cifar-100-binary/{name}.bin" for name in ("train", "test"))
    plain = write_tar(
        folder / "x.tar", {**dict.fromkeys(members, bytes([1, 42]) + bytes(3072)), "../evil": b""}
    )
    archive.write_bytes(gzip.compress(plain.read_bytes()))
    file = RemoteFile((f"{address}/{archive.name}",), checksum or md5(archive), members)
    monkeypatch.setitem(download_module._CIFAR, "cifar100", file)
    return archive


def test_fetched_only_when_told_where_to(
    served: tuple[Path, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    archive = offer_cifar100(served, monkeypatch)
    monkeypatch.delenv("CAPSZOO_DATA", raising=False)
    with refuses(DataError, names=["found"]):
        load_dataset("cifar100", "test", count=1)
    target = tmp_path / "here"
    assert load_dataset("cifar100", "test", count=1, download=target).labels.tolist() == [42]
    assert not (tmp_path / "evil").exists() and not (target / "evil").exists()
    (target / "cifar100" / "cifar-100-binary" / "train.bin").write_bytes(b"damaged")  # extracted again
    archive.unlink()  # nothing is fetched a second time
    fetch("cifar100", "train", target)
    assert load_dataset("cifar100", "train", target, count=1).labels.tolist() == [42]


def test_a_wrong_checksum_leaves_nothing(
    served: tuple[Path, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    offer_cifar100(served, monkeypatch, checksum="0" * 32)
    with refuses(DataError, names=["md5", "0" * 32]):
        fetch("cifar100", "train", tmp_path / "here")
    assert not (tmp_path / "here").exists(), "the folders neither"


def test_a_silent_address_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(download_module, "SILENT_SECONDS", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as silent:  # accepts connections and never answers
        file = RemoteFile((f"http://127.0.0.1:{silent.getsockname()[1]}/x.gz",), "0" * 32)
        monkeypatch.setattr(download_module, "remote_files", lambda name, split: (file,))
        with refuses(DataError, names=["x.gz"]):
            fetch("mnist", "test", tmp_path / "here")
    assert socket.getdefaulttimeout() is None and not (tmp_path / "here").exists()


def test_mirrors_and_truncated_files(
    served: tuple[Path, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, address = served
    path = write_idx(folder / "t10k-labels-idx1-ubyte.gz", np.arange(5), compress=True)
    file = RemoteFile((f"{address}/gone/{path.name}", f"{address}/{path.name}"), md5(path))
    monkeypatch.setattr(download_module, "remote_files", lambda name, split: (file,))
    target = fetch("mnist", "test", tmp_path / "here")
    (target / path.name).write_bytes(path.read_bytes()[:10])
    assert md5(fetch("mnist", "test", tmp_path / "here") / path.name) == md5(path), "mended"
    path.unlink()
    (target / path.name).unlink()
    with refuses(DataError, names=["t10k-labels-idx1-ubyte.gz"]):
        fetch("mnist", "test", tmp_path / "here")


@pytest.mark.parametrize(
    ("name", "split", "count"),
    [("mnist", "train", 2), ("fashion_mnist", "test", 2), ("svhn", "extra", 1), ("smallnorb", "test", 3)],
)
def test_what_is_fetched(name: str, split: str, count: int) -> None:
    files = remote_files(name, split)
    assert len(files) == count
    for file in files:
        assert len(file.md5) == 32 and all(
            url.startswith("http") and url.endswith(file.name) for url in file.urls
        )
    stems = {file.name[:3] for file in files}
    assert len(stems) == 1 and not remote_files("h_imagenet", "train")


def test_command_line(served: tuple[Path, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    offer_cifar100(served, monkeypatch)
    here = tmp_path / "here"
    assert f"check cifar100 --data {here}" in succeeds("data", "fetch", "cifar100", "--to", here)
    fails(1, "data", "check", "cifar100", "--data", here, names=["1", "50000", "expected"])
    fails(1, "data", "fetch", "h_imagenet", "--to", tmp_path, names=["capszoo", "h-imagenet"])
    fails(2, "data", "fetch", "cifar1000", "--to", tmp_path, names=["cifar100"])
    listed = succeeds("data", "list")
    assert "smallnorb_azimuth" in listed and "imagefolder:…" in listed
