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
from capszoo.data.readers import image_below, parquet_label_names, read_idx, read_parquet, read_svhn_mat
from capszoo.errors import CapszooError
from tests.support.errors import refuses

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
    secret, below = tmp_path / "secret.png", tmp_path / "images"
    secret.write_bytes(_png(7))
    below.mkdir()
    (below / "own.png").write_bytes(_png(9))
    os.mkfifo(tmp_path / "pipe")
    opened: list[Any] = []
    whole = Image.open
    monkeypatch.setattr(
        Image, "open", lambda source, **rest: (opened.append(source), whole(source, **rest))[1]
    )
    for cell in (str(secret), str(tmp_path / "pipe"), "/dev/zero", "x\0y"):
        for column in ([cell] * 6, [{"bytes": None, "path": cell}] * 6):
            _table(tmp_path, column)
            with refuses(DataError, names=["images", "machine"]):
                load_dataset(f"parquet:{tmp_path}", "train")
    assert not opened
    monkeypatch.setenv("CAPSZOO_IMAGE_PATHS", str(below))  # the option
    for cell in (str(secret), "../secret.png", str(tmp_path / "pipe"), "absent.png", ".", "x\0y"):
        _table(tmp_path, [cell] * 6)
        with refuses(DataError, names=["file", "below"]):
            load_dataset(f"parquet:{tmp_path}", "train")
    assert not opened
    _table(tmp_path, ["own.png"] * 2)
    assert int(load_dataset(f"parquet:{tmp_path}", "train").images.max()) == 9


def test_a_link_out_of_the_folder_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "out.png").write_bytes(_png())
    (tmp_path / "in" / "link.png").symlink_to(tmp_path / "out.png")
    with refuses(DataError, names=["file", "below"]):
        image_below(tmp_path / "in", "link.png", "a table")


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
    "labels", [[0.5, 1.7], [[0], [1]], [b"0", b"1"], [0, None], [None, None], [True, False]]
)
def test_labels_are_whole_numbers_or_text(tmp_path: Path, labels: list[Any]) -> None:
    path = _table(tmp_path, [_png()] * 2, labels)
    with refuses(DataError, names=["label", "column", "numbers"]):
        read_parquet([path], 1)


def test_the_labels_of_a_named_data_set_are_numbers(tmp_path: Path) -> None:
    with refuses(DataError, names=["labels", "text"]):
        read_parquet([_table(tmp_path, [_png()] * 2, ["0", "1"])], 1)


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


def test_damaged_tables_are_one_line(tmp_path: Path) -> None:
    path = _table(tmp_path, [_png()] * 6)
    content = path.read_bytes()
    for cut in range(0, len(content), 97):
        path.write_bytes(content[:cut])
        with pytest.raises(DataError):
            read_parquet([path], 1)
    _table(tmp_path, pa.array([], pa.binary()), pa.array([], pa.int64()))
    with refuses(DataError, names=["holds", "images"]):
        read_parquet([path], 1)


def _idx(shape: tuple[int, ...]) -> bytes:
    return bytes([0, 0, 8, len(shape)]) + b"".join(size.to_bytes(4, "big") for size in shape)


def test_a_packed_file_is_not_unpacked_beyond_its_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Known sizes are limits: MNIST's test set has 10,000 images, whatever the file says."""
    block = b"\0" * 2**20
    for name, shape in (
        ("t10k-images-idx3-ubyte.gz", (64, 1024, 1024)),
        ("t10k-labels-idx1-ubyte.gz", (10_000,)),
    ):
        with gzip.open(tmp_path / name, "wb", compresslevel=1) as file:
            file.write(_idx(shape))
            for _ in range(64 if len(shape) == 3 else 0):
                file.write(block)
            if len(shape) == 1:
                file.write(b"\0" * 10_000)
    assert (tmp_path / "t10k-images-idx3-ubyte.gz").stat().st_size < 2**19
    taken: list[int] = []
    read = gzip.GzipFile.read
    monkeypatch.setattr(gzip.GzipFile, "read", lambda self, n=-1: (taken.append(n), read(self, n))[1])
    with refuses(DataError, names=["7,841,024", "holds", "bytes"]):
        load_dataset("mnist", "test", tmp_path)
    assert taken and all(0 < n < 8 * 2**20 for n in taken)
    monkeypatch.setattr(readers, "MAX_FILE_BYTES", 2**20)
    with refuses(DataError, names=["1,048,576", "holds", "bytes"]):
        read_idx(tmp_path / "t10k-images-idx3-ubyte.gz", readers.MAX_FILE_BYTES)


def test_svhn_labels_are_whole_numbers_and_sizes_are_looked_at_first(tmp_path: Path) -> None:
    savemat = pytest.importorskip("scipy.io", reason="needs scipy").savemat
    images = np.zeros((32, 32, 3, 2), np.uint8)
    savemat(tmp_path / "a.mat", {"X": images, "y": np.array([[1.0], [10.0]])})
    assert read_svhn_mat(tmp_path / "a.mat")[1].tolist() == [1, 0]
    for wrong in (np.array([[1.0], [np.nan]]), np.array([[1.5], [2.0]])):
        savemat(tmp_path / "b.mat", {"X": images, "y": wrong})
        with pytest.raises(DataError, match="not a MATLAB 5 file"):
            read_svhn_mat(tmp_path / "b.mat")


def test_arrays_of_zeros_are_not_unpacked(tmp_path: Path) -> None:
    path = tmp_path / "golden.npz"
    np.savez_compressed(path, pixels=np.zeros((2**22,), np.uint8), scores=np.zeros(3))
    assert path.stat().st_size < 10_000
    with refuses(CapszooError, names=["golden.npz", "4", "MiB", "1", "unpacks"]):
        read_npz(path, ("pixels",), max_bytes=2**20)
    assert read_npz(path, ("pixels",))["pixels"].shape == (2**22,)
    with refuses(CapszooError, names=["x", "lacks", "array"]):
        read_npz(path, ("x",))
    content = path.read_bytes()
    for cut in (0, 1, 30, len(content) // 2, len(content) - 5):
        path.write_bytes(content[:cut])
        with refuses(CapszooError, names=["golden.npz", "readable"]):
            read_npz(path, ("pixels",))


def test_no_pickle_in_arrays(tmp_path: Path) -> None:
    class Canary:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(tmp_path / "ran"),)

    np.savez(tmp_path / "a.npz", pixels=np.array([Canary()], dtype=object), allow_pickle=True)
    with refuses(CapszooError, names=["a.npz", "readable"]):
        read_npz(tmp_path / "a.npz", ("pixels",))
    assert not (tmp_path / "ran").exists()
