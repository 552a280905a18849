"""Writers of tiny files in the real formats."""

from __future__ import annotations

import gzip
import io
from pathlib import Path

import numpy as np
from PIL import Image


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
