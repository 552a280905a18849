"""Data of strangers: tables that name files of this machine, labels of 10**9, archives that unpack to gigabytes."""

from __future__ import annotations

import gzip
import io
import json
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from capszoo._utils.files import read_npz
from capszoo.data import DataError, load_dataset, readers
from capszoo.data.readers import parquet_label_names, read_parquet
from capszoo.errors import CapszooError
from tests.support.errors import refuses
from tests.support.formats import write_idx

pa = pytest.importorskip("pyarrow", reason="parquet files need pyarrow")
pq = pytest.importorskip("pyarrow.parquet", reason="parquet files need pyarrow")


def _png(value: int = 0) -> bytes:
    buffer = io.BytesIO()
    Image.new("L", (4, 4), value).save(buffer, "PNG")
    return buffer.getvalue()


def _table(folder: Path, images: Any, labels: Any = None, metadata: bytes | None = None) -> Path:
    labels = list(range(len(images))) if labels is None else labels
    table = pa.table({"image": images, "label": labels})
    if metadata is not None:
        table = table.replace_schema_metadata({"huggingface": metadata})
    path = folder / "train-00000-of-00001.parquet"
    pq.write_table(table, path)
    return path


def test_a_table_does_not_read_files_of_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    secret, below, pipe = tmp_path / "secret.png", tmp_path / "images", tmp_path / "pipe"
    secret.write_bytes(_png(7))
    below.mkdir()
    (below / "own.png").write_bytes(_png(9))
    (below / "link.png").symlink_to(secret)
    os.mkfifo(pipe)
    with monkeypatch.context() as patched:
        patched.setattr(Image, "open", lambda *_, **__: pytest.fail("opened"))
        for cell in (str(secret), str(pipe), "/dev/zero", "x\0y"):
            for column in ([cell] * 6, [{"bytes": None, "path": cell}] * 6):
                _table(tmp_path, column)
                with refuses(DataError, names=["images", "machine"]):
                    load_dataset(f"parquet:{tmp_path}", "train")
        patched.setenv("CAPSZOO_IMAGE_PATHS", str(below))  # the option
        for cell in (str(secret), "../secret.png", "link.png", str(pipe), "absent.png", ".", "x\0y"):
            _table(tmp_path, [cell] * 6)
            with refuses(DataError, names=["file", "below"]):
                load_dataset(f"parquet:{tmp_path}", "train")
    monkeypatch.setenv("CAPSZOO_IMAGE_PATHS", str(below))
    _table(tmp_path, ["own.png"] * 2)
    assert int(load_dataset(f"parquet:{tmp_path}", "train").images.max()) == 9


@pytest.mark.parametrize(
    ("label", "split"), [(10**9, "train"), (2**62, "train"), (-1, "train"), (300_000, "test"), (-1, "test")]
)
def test_a_label_is_a_class_and_there_are_not_many(tmp_path: Path, label: int, split: str) -> None:
    """The training split states the number of classes, so its labels count for the others too."""
    _table(tmp_path, [_png()] * 2, [0, 1]).rename(tmp_path / "test.parquet")
    path = _table(tmp_path, [_png()] * 6, [0, 1, 2, 3, 4, label])
    start = time.monotonic()
    with refuses(DataError, names=["labels", "run"]):
        load_dataset(f"parquet:{tmp_path}", split)
    assert time.monotonic() - start < 5 and path.stat().st_size < 10_000


@pytest.mark.parametrize(
    "labels", [[0.5, 1.7], [[0], [1]], [b"0", b"1"], [0, None], [None, None], [True, False], ["0", "1"]]
)
def test_labels_of_a_named_set_are_whole_numbers(tmp_path: Path, labels: list[Any]) -> None:
    path = _table(tmp_path, [_png()] * 2, labels)
    with refuses(DataError, names=["numbers"]):
        read_parquet([path], 1)


@pytest.mark.parametrize(
    "stated",
    [b"null", b"{}", b'{"info": {}}', b"{", b"\xff", b'{"info": {"features": {"label": {"names": 5}}}}'],
)
def test_class_names_that_cannot_be_read_are_none(tmp_path: Path, stated: bytes) -> None:
    path = _table(tmp_path, [_png()] * 3, metadata=stated)
    assert parquet_label_names(path) == ()
    assert load_dataset(f"parquet:{tmp_path}", "train").spec.label_names == ("0", "1", "2")
    named = json.dumps({"info": {"features": {"label": {"names": ["a", "b", "c"]}}}}).encode()
    assert parquet_label_names(_table(tmp_path, [_png()] * 3, metadata=named)) == ("a", "b", "c")


def test_a_value_that_stands_in_every_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file has it once, and so has the size that its metadata state."""
    monkeypatch.setattr(readers, "MAX_FILE_BYTES", 4_000_000)
    values = pa.array([bytes(200_000)] * 500, pa.binary())
    path = tmp_path / "train-0.parquet"
    pq.write_table(pa.table({"image": values, "label": [0] * 500}), path, compression="zstd")
    assert path.stat().st_size < 2_000
    with refuses(DataError, names=["train-0.parquet", "unpacks", "memory"]):
        read_parquet([path], 1)


def test_an_empty_table_is_one_line(tmp_path: Path) -> None:
    path = _table(tmp_path, pa.array([], pa.binary()), pa.array([], pa.int64()))
    with refuses(DataError, names=["holds", "images"]):
        read_parquet([path], 1)


def test_a_packed_file_is_not_unpacked_beyond_its_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Known sizes are limits: MNIST's test set has 10,000 images, whatever the file says."""
    packed = tmp_path / "t10k-images-idx3-ubyte.gz"
    with gzip.open(packed, "wb", compresslevel=1) as file:
        file.write(bytes([0, 0, 8, 3]) + b"".join(size.to_bytes(4, "big") for size in (64, 1024, 1024)))
        for _ in range(64):
            file.write(bytes(2**20))
    write_idx(tmp_path / "t10k-labels-idx1-ubyte.gz", np.zeros(10_000), compress=True)
    assert packed.stat().st_size < 2**19
    taken: list[int] = []
    read = gzip.GzipFile.read
    monkeypatch.setattr(gzip.GzipFile, "read", lambda self, n=-1: (taken.append(n), read(self, n))[1])
    with refuses(DataError, names=["7,841,024", "holds", "bytes"]):
        load_dataset("mnist", "test", tmp_path)
    assert taken and all(0 < n < 8 * 2**20 for n in taken)


def test_arrays_of_zeros_are_not_unpacked(tmp_path: Path) -> None:
    path = tmp_path / "golden.npz"
    np.savez_compressed(path, pixels=np.zeros((2**22,), np.uint8), scores=np.zeros(3))
    assert path.stat().st_size < 10_000
    with refuses(CapszooError, names=["golden.npz", "4", "MiB", "1", "unpacks"]):
        read_npz(path, ("pixels",), max_bytes=2**20)
    assert read_npz(path, ("pixels",))["pixels"].shape == (2**22,)
    with refuses(CapszooError, names=["x", "lacks", "array"]):
        read_npz(path, ("x",))


def test_no_pickle_in_arrays(tmp_path: Path) -> None:
    class Canary:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(tmp_path / "ran"),)

    np.savez(tmp_path / "a.npz", pixels=np.array([Canary()], dtype=object), allow_pickle=True)
    with refuses(CapszooError, names=["a.npz", "readable"]):
        read_npz(tmp_path / "a.npz", ("pixels",))
    assert not (tmp_path / "ran").exists()
