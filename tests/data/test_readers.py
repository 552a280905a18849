"""Readers against tiny files written in the real formats."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from capszoo.data import DataError
from capszoo.data.readers import (
    decode_image,
    read_cifar_binary,
    read_idx,
    read_norb_matrix,
    read_parquet,
    read_svhn_mat,
)
from tests.support.errors import refuses
from tests.support.formats import write_idx, write_image, write_norb_matrix, write_parquet, write_svhn


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(0)


@pytest.mark.parametrize("compress", [False, True])
@pytest.mark.parametrize("shape", [(7,), (5, 4, 3)])
def test_idx_round_trip(
    tmp_path: Path, rng: np.random.Generator, shape: tuple[int, ...], compress: bool
) -> None:
    array = rng.integers(0, 256, shape, dtype=np.uint8)
    read = read_idx(write_idx(tmp_path / "some-idx-ubyte", array, compress))
    assert read.dtype == torch.uint8
    np.testing.assert_array_equal(read.numpy(), array)


def test_idx_damage_is_one_line(tmp_path: Path, rng: np.random.Generator) -> None:
    array, path = rng.integers(0, 256, (5, 4, 3), dtype=np.uint8), tmp_path / "x"
    plain, packed = (write_idx(path, array, compress).read_bytes() for compress in (False, True))
    for content, names in (
        (plain[:-1], ["75", "76", "truncated"]),
        (packed[:-6], ["damaged", "gzip"]),
        (b"<html>", ["idx", "file"]),
        (b"", ["idx", "file"]),
    ):
        path.write_bytes(content)
        with refuses(DataError, names=names):
            read_idx(path)
    with refuses(DataError, names=["read"]):
        read_idx(tmp_path / "absent")


@pytest.mark.parametrize(("channels", "fmt", "column"), [(1, "PNG", "image"), (3, "WEBP", "img")])
def test_parquet_round_trip(
    tmp_path: Path, rng: np.random.Generator, channels: int, fmt: str, column: str
) -> None:
    shape = (6, 5, 4) if channels == 1 else (6, 5, 4, 3)
    images = rng.integers(0, 256, shape, dtype=np.uint8)
    files = [
        write_parquet(tmp_path / "train-00000-of-00002.parquet", images[:4], [3, 1, 2, 0], column, fmt),
        write_parquet(tmp_path / "train-00001-of-00002.parquet", images[4:], [9, 5], column, fmt),
    ]
    read, labels = read_parquet(files[::-1], channels)
    assert read.shape == (6, channels, 5, 4) and read.is_contiguous()
    expected = images[:, None] if channels == 1 else images.transpose(0, 3, 1, 2)
    np.testing.assert_array_equal(read.numpy(), expected)
    assert labels.tolist() == [3, 1, 2, 0, 9, 5]
    with pytest.raises(DataError, match="1 of 2 shards"):
        read_parquet(files[:1], channels)


def test_parquet_damage_is_one_line(tmp_path: Path, rng: np.random.Generator) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    images = rng.integers(0, 256, (2, 5, 4), dtype=np.uint8)
    path = write_parquet(tmp_path / "test.parquet", images, [0, 1])
    path.write_bytes(path.read_bytes()[:-20])
    with refuses(DataError, names=["readable", "parquet"]):
        read_parquet([path], 1)
    for column, cell, names in (
        ("picture", "a", ["['picture', 'label']"]),
        ("image", {"bytes": b"not an image", "path": "x"}, ["row 0"]),
        ("image", {"path": "x.png"}, ["path"]),
    ):
        pq.write_table(pa.table({column: [cell], "label": [1]}), path)
        with refuses(DataError, names=names):
            read_parquet([path], 1)
    write_parquet(path, [*images, rng.integers(0, 256, (6, 4), dtype=np.uint8)], [0, 1, 0])
    with refuses(DataError, names=["size", "first"]):
        read_parquet([path], 1)


@pytest.mark.parametrize("label_bytes", [1, 2])
def test_cifar_binary(tmp_path: Path, rng: np.random.Generator, label_bytes: int) -> None:
    """Of CIFAR-100's two labels, the second is the fine class."""
    images, labels = rng.integers(0, 256, (3, 3, 32, 32), dtype=np.uint8), (7, 0, 99)
    records = [
        bytes([3, label])[-label_bytes:] + one.tobytes() for one, label in zip(images, labels, strict=True)
    ]
    path = tmp_path / "train.bin"
    path.write_bytes(b"".join(records))
    read, found = read_cifar_binary([path], label_bytes)
    np.testing.assert_array_equal(read.numpy(), images)
    assert found.tolist() == list(labels)
    path.write_bytes(path.read_bytes()[:-1])
    with refuses(DataError, names=["truncated", f"{3072 + label_bytes}"]):
        read_cifar_binary([path], label_bytes)


def test_svhn(tmp_path: Path, rng: np.random.Generator) -> None:
    from scipy.io import savemat

    images = rng.integers(0, 256, (5, 32, 32, 3), dtype=np.uint8)
    path = write_svhn(tmp_path / "train_32x32.mat", images, [1, 0, 9, 5, 0])
    read, labels = read_svhn_mat(path)
    np.testing.assert_array_equal(read.numpy(), images.transpose(0, 3, 1, 2))
    assert labels.tolist() == [1, 0, 9, 5, 0] and read.is_contiguous()
    path.write_bytes(path.read_bytes()[:-3])
    with refuses(DataError, names=["MATLAB", "5"]):
        read_svhn_mat(path)
    for wrong in (np.nan, np.inf, 1.5):
        savemat(path, {"X": images.transpose(1, 2, 3, 0), "y": np.array([[wrong]] * 5)})
        with refuses(DataError, names=["MATLAB", "5"]):
            read_svhn_mat(path)
    write_svhn(path, images[..., :2], [1, 0, 9, 5, 0])
    with pytest.raises(DataError, match=r"holds X uint8 \(32, 32, 2, 5\)"):
        read_svhn_mat(path)


@pytest.mark.parametrize("compress", [False, True])
@pytest.mark.parametrize(
    ("shape", "kind"), [((4,), np.int32), ((3, 4), np.int32), ((2, 2, 5, 6), np.uint8), ((2, 3, 4), np.uint8)]
)
def test_norb_matrix(
    tmp_path: Path, rng: np.random.Generator, shape: tuple[int, ...], kind: type, compress: bool
) -> None:
    array = rng.integers(0, 200, shape).astype(kind)
    read = read_norb_matrix(write_norb_matrix(tmp_path / "x.mat", array, compress))
    np.testing.assert_array_equal(read.numpy(), array)
    assert read.dtype == (torch.uint8 if kind is np.uint8 else torch.int32)


def test_norb_damage_is_one_line(tmp_path: Path) -> None:
    path = write_norb_matrix(tmp_path / "x.mat", np.zeros((3, 4), np.int32))
    for content, names in (
        (path.read_bytes()[:-1], ["67", "68", "truncated"]),
        (b"MATLAB 5.0 MAT-file", ["NORB"]),
        (b"", ["bytes", "missing"]),
    ):
        path.write_bytes(content)
        with refuses(DataError, names=names):
            read_norb_matrix(path)


def test_decode_to_a_square(tmp_path: Path) -> None:
    wide = np.zeros((40, 80, 3), np.uint8)
    wide[:, 20:60] = 200  # the middle square
    square = decode_image(write_image(tmp_path / "a.png", wide), "RGB", "a", 20)
    assert square.shape == (20, 20, 3) and square[:, 1:-1].min() == 200
    assert decode_image(tmp_path / "a.png", "L", "a").shape == (40, 80)
