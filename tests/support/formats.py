"""Writers of tiny files in the real formats."""

from __future__ import annotations

import gzip
import io
import tarfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from PIL import Image

from capszoo.data import Augment


def write_idx(path: Path, array: np.ndarray, compress: bool = False) -> Path:
    header = bytes([0, 0, 8, array.ndim]) + b"".join(size.to_bytes(4, "big") for size in array.shape)
    raw = header + array.astype(np.uint8).tobytes()
    path.write_bytes(gzip.compress(raw) if compress else raw)
    return path


def write_parquet(
    path: Path, images: np.ndarray, labels: list[int], column: str = "image", fmt: str = "PNG"
) -> Path:
    import pyarrow as pa
    import pyarrow.parquet as pq

    cells = []
    for image in images:
        buffer = io.BytesIO()
        Image.fromarray(image).save(buffer, fmt, **({"lossless": True} if fmt == "WEBP" else {}))
        cells.append({"bytes": buffer.getvalue(), "path": None})
    pq.write_table(pa.table({column: cells, "label": labels}), path)
    return path


def write_svhn(path: Path, images: np.ndarray, labels: list[int]) -> Path:
    """`images` [n, h, w, 3]; MATLAB 5 as the official files: X [h, w, 3, n], y [n, 1] with 10 for the digit 0."""
    from scipy.io import savemat

    y = np.array([10 if label == 0 else label for label in labels], np.uint8)[:, None]
    savemat(path, {"X": images.transpose(1, 2, 3, 0), "y": y}, do_compression=True)
    return path


def write_norb_matrix(path: Path, array: np.ndarray, compress: bool = False) -> Path:
    magic = {np.dtype(np.uint8): 0x1E3D4C55, np.dtype(np.int32): 0x1E3D4C54}[array.dtype]
    sizes = [*array.shape, 1, 1][: max(array.ndim, 3)]
    raw = b"".join(int(number).to_bytes(4, "little") for number in (magic, array.ndim, *sizes))
    raw += array.astype(array.dtype.newbyteorder("<")).tobytes()
    path.write_bytes(gzip.compress(raw) if compress else raw)
    return path


def write_smallnorb(
    folder: Path, split: str, images: np.ndarray, labels: list[int], info: np.ndarray
) -> None:
    stem = {
        "train": "smallnorb-5x46789x9x18x6x2x96x96-training",
        "test": "smallnorb-5x01235x9x18x6x2x96x96-testing",
    }
    parts = {"dat": images, "cat": np.array(labels, np.int32), "info": info.astype(np.int32)}
    for kind, array in parts.items():
        write_norb_matrix(folder / f"{stem[split]}-{kind}.mat.gz", array, compress=True)


def write_image(path: Path, pixels: np.ndarray) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path, quality=95)
    return path


def write_tar(path: Path, members: Mapping[str, bytes], format: int = tarfile.USTAR_FORMAT) -> Path:
    """A tar file of plain members, in their order."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w", format=format) as tar:
        for name, content in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return path


def write_shards(
    folder: Path,
    images: np.ndarray,
    labels: list[int],
    per_shard: int,
    split: str = "train",
    fmt: str = "PNG",
) -> list[Path]:
    """WebDataset shards of images [n, h, w] or [n, h, w, 3], `SPLIT-000000.tar` and so on."""
    paths = []
    for first in range(0, len(images), per_shard):
        members = {}
        for k in range(first, min(first + per_shard, len(images))):
            buffer = io.BytesIO()
            Image.fromarray(images[k]).save(buffer, fmt)
            members[f"{split}/{k:06d}.{fmt.lower()}"] = buffer.getvalue()
            members[f"{split}/{k:06d}.cls"] = str(labels[k]).encode()
        paths.append(write_tar(folder / f"{split}-{first // per_shard:06d}.tar", members))
    return paths


#: Every change of an image at once.
STRONG = Augment(
    shift=3,
    flip=True,
    rotation=20,
    shear=0.2,
    scale=(0.8, 1.2),
    brightness=0.2,
    contrast=0.2,
    saturation=0.2,
    hue=0.2,
    tilt=30,
    squeeze=0.25,
    shift_in_margin=True,
    erase=4,
)
