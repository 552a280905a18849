"""WebDataset shards: tar files of samples, indexed by reading their headers once and then read by position.

A sample consists of consecutive members with the same name up to the first dot: ``0001.jpg`` and ``0001.cls``. The
label is the number of a class or its name, in ``.cls`` or in ``.json`` under ``label`` or ``cls``. Other members are
never read; nothing is extracted or unpickled. The format: the WebDataset library's documentation, and POSIX tar.

The library itself is not used: its shuffle cannot resume at a given sample, and its default decoders unpickle.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import tarfile
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import BinaryIO, NamedTuple

import numpy as np

from capszoo._utils.files import cache_folder, read_npz, replacing
from capszoo.errors import CapszooError
from capszoo.images import IMAGE_SUFFIXES

from .errors import DataError
from .readers import MAX_LABEL

_BLOCK = 512  # block size of a tar file
_MAX_LABEL_BYTES = 2**20
_MAX_NAME = 200  # characters of a class name
_NUMBER = re.compile(r"[-+]?[\d.,]+([eE][-+]?\d+)?")  # no name, whatever its value
_SPELLED = {"training": "train", "testing": "test"}
_RANGE = re.compile(r"\{(\d+)\.\.(\d+)\}")
_MAX_SHARDS = 1_000_000
_COLUMNS = ("shards", "offsets", "sizes", "labels")


def expand_shards(name: str, folder: Path, pattern: str) -> list[Path]:
    """The files of a folder that match a pattern such as ``train-{000000..000009}.tar`` or ``*.tar``.

    Raises:
        DataError: a file of a numbered range does not exist, or no file matches.
    """
    numbered = _RANGE.search(pattern)
    if numbered is None:
        matching = (path for path in folder.glob(pattern) if not path.name.startswith("."))
        shards = sorted(path for path in matching if path.is_file())
        if not shards:
            raise DataError(f"{name}: {folder} has no file {pattern}")
        return shards
    first, last = int(numbered[1]), int(numbered[2])
    if not 0 <= last - first < _MAX_SHARDS:
        raise DataError(f"{name}: {numbered[0]} is no range of shards: give {{000000..000009}}")
    before, after = pattern[: numbered.start()], pattern[numbered.end() :]
    paths = [folder / f"{before}{k:0{len(numbered[1])}d}{after}" for k in range(first, last + 1)]
    missing = [path for path in paths if not path.is_file()]
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise DataError(f"{name}: {missing[0]}{more} of {len(paths)} shards are missing")
    return paths


def shards_of_split(paths: Sequence[Path], names: Sequence[str], split_words: Collection[str]) -> list[Path]:
    """The shards that belong to a split: ``train-000000.tar``, or ``000000.tar`` in a folder ``train``.

    The last word of a file's name that is a split's name counts, in upper or lower case:
    ``crash-test-Train-000000.tar`` is of "train".

    Args:
        paths: the shards.
        names: names of the split; the first that has shards is used. Shards without the name of a split are "train".
        split_words: the names of all splits.

    Raises:
        DataError: some shards name the training split and others none: these could be another split's.
    """

    def split_of(path: Path) -> str | None:
        words = [path.parent.name, *re.split(r"[-_.\d]+", path.name)]
        spelled = [_SPELLED.get(word.casefold(), word.casefold()) for word in words]
        return next((word for word in reversed(spelled) if word in split_words), None)

    splits = {path: split_of(path) for path in paths}
    nameless = next((path for path, split in splits.items() if split is None), None)
    if nameless and "train" in splits.values():
        raise DataError(
            f"{nameless} names no split, and other shards are named after train",
            "begin its name with its split",
        )
    return next(
        (mine for name in names if (mine := [p for p in paths if (splits[p] or "train") == name])), []
    )


@dataclass(frozen=True)
class ShardIndex:
    """Positions of the images in some shards.

    Attributes:
        paths: the shards.
        shards: int32 [n], the shard of each image.
        offsets, sizes: int64 [n], offset and number of the image's bytes.
        labels: int64 [n]: numbers of classes, or indices into ``names``.
        names: the labels, if any of them is no number, in alphabetical order.
    """

    paths: tuple[Path, ...]
    shards: np.ndarray
    offsets: np.ndarray
    sizes: np.ndarray
    labels: np.ndarray
    names: tuple[str, ...] = ()

    def kinds(self) -> list[int | str]:
        """The labels that occur, as they were written."""
        return [self.names[k] if self.names else int(k) for k in np.unique(self.labels)]

    def written(self) -> list[int | str]:
        """The label of each image, as it was written."""
        return [self.names[k] for k in self.labels] if self.names else self.labels.tolist()


class _Sample(NamedTuple):
    offset: int
    size: int
    label: int | str


def read_index(paths: Sequence[Path], threads: int = 1) -> ShardIndex:
    """Read the headers and labels of shards, or load them from the cache, whose keys are path, size and time.

    Raises:
        DataError: a shard is damaged, or has invalid content; one line that names it.
    """
    cached = _cache_file(paths)
    if cached is not None and (cached_index := _read_cached(cached, paths)) is not None:
        return cached_index
    with ThreadPoolExecutor(threads) as pool:
        tables = list(pool.map(_index_shard, paths))
    labels = [labels for _, labels in tables]
    names: list[str] = []
    if any(column.dtype.kind == "U" for column in labels):
        labels = [column.astype(str) for column in labels]
        names = sorted({str(name) for column in labels for name in np.unique(column)})
        labels = [np.searchsorted(names, column) for column in labels]
    counts = [len(column) for column in labels]
    offsets, sizes = np.concatenate([positions for positions, _ in tables]).T.copy()
    index = ShardIndex(
        tuple(paths),
        np.repeat(np.arange(len(paths), dtype=np.int32), counts),
        offsets,
        sizes,
        np.concatenate(labels).astype(np.int64),
        tuple(names),
    )
    columns = {key: getattr(index, key) for key in _COLUMNS}
    columns["names"] = np.frombuffer(json.dumps(names).encode(), np.uint8)
    if cached is None:
        return index
    try:
        with replacing(cached) as temporary, open(temporary, "wb") as file:
            np.savez(file, **columns)
    except CapszooError:  # the cache cannot be written: the headers are read again next time
        pass
    return index


def _cache_file(paths: Sequence[Path]) -> Path | None:
    """File of the cache for an index; None without a folder for the cache."""
    try:
        stats = [path.stat() for path in paths]
    except OSError as error:
        raise DataError(f"cannot read {error.filename}: {error.strerror}") from error
    rows = [
        f"{path.resolve()} {stat.st_size} {stat.st_mtime_ns}" for path, stat in zip(paths, stats, strict=True)
    ]
    key = hashlib.sha256("\n".join(rows).encode("utf-8", "surrogateescape")).hexdigest()
    try:
        return cache_folder() / "shards" / f"{key}.npz"
    except CapszooError:
        return None


def _read_cached(path: Path, paths: Sequence[Path]) -> ShardIndex | None:
    if not path.is_file():
        return None
    try:
        columns = read_npz(path, (*_COLUMNS, "names"), max_bytes=2**36)
        names = json.loads(columns["names"].tobytes())
    except (CapszooError, ValueError):
        return None
    shards, offsets, sizes, labels = (columns[key] for key in _COLUMNS)
    return ShardIndex(tuple(paths), shards, offsets, sizes, labels, tuple(names))


def _index_shard(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Offset and size of each sample of a shard, int64 [n, 2], and the labels [n]: numbers, or text if any is."""
    rows: list[_Sample] = []
    try:
        with open(path, "rb") as file:
            rows.extend(_samples(path, file))
    except DataError:
        raise
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror or error}") from error
    except Exception as error:  # tarfile raises many kinds of errors for broken headers
        reason = " ".join(str(error).split())[:100] or type(error).__name__
        raise DataError(f"{path} is no tar file, or a damaged one ({reason})", "write it again") from error
    if not rows:
        raise DataError(f"{path} holds no samples", "a shard is a plain tar file of NAME.jpg and NAME.cls")
    labels: list[int | str] = [row.label for row in rows]
    words = any(isinstance(label, str) for label in labels)
    return (
        np.array([row[:2] for row in rows], dtype=np.int64),
        np.array([str(label) for label in labels]) if words else np.array(labels, dtype=np.int64),
    )


def _samples(path: Path, file: BinaryIO) -> Iterator[_Sample]:
    key = ""
    parts: dict[str, tarfile.TarInfo] = {}
    for member in _members(path, file):
        stem, _, suffix = member.name.rpartition("/")[2].partition(".")
        own = f"{member.name.rpartition('/')[0]}/{stem}"
        if own != key and parts:
            yield _sample(path, file, parts)
            parts = {}
        key = own
        suffix = suffix.lower()
        if suffix in parts:
            raise DataError(f"{path}: {_shown(member.name)} is there twice")
        parts[suffix] = member
    if parts:
        yield _sample(path, file, parts)


def _members(path: Path, file: BinaryIO) -> Iterator[tarfile.TarInfo]:
    """The regular files of a tar file, checked. Names are never used as paths, but invalid ones reveal a bad file."""
    size = os.fstat(file.fileno()).st_size
    end = 0
    with tarfile.open(fileobj=file, mode="r:") as tar:
        while (member := tar.next()) is not None:
            tar.members.clear()  # type: ignore[attr-defined]  # else all of them stay in memory
            # A negative size would make the reader go back.
            if member.size < 0 or member.offset < end or member.offset_data <= member.offset:
                raise DataError(f"{path} is damaged: a header states an impossible size")
            end = member.offset_data
            if member.isdir():
                continue
            if not member.isreg() or member.issparse():
                raise DataError(f"{path}: {_shown(member.name)} is a link or a device, no plain file")
            parts = PurePosixPath(member.name).parts
            if member.name.startswith("/") or ".." in parts or "\0" in member.name:
                raise DataError(f"{path}: the name {_shown(member.name)} leads out of the archive")
            end += member.size
            if end > size:
                raise DataError(f"{path} is truncated in {_shown(member.name)}: fetch or write it again")
            if not member.name.rpartition("/")[2].startswith("__"):  # metadata of the library
                yield member
    # Without checking the end marker, a file truncated between two samples would look complete.
    file.seek(-(-end // _BLOCK) * _BLOCK)
    if file.read(_BLOCK) != bytes(_BLOCK):
        raise DataError(f"{path} is truncated: it lacks the mark of its end; fetch or write it again")


def _sample(path: Path, file: BinaryIO, parts: dict[str, tarfile.TarInfo]) -> _Sample:
    first = next(iter(parts.values())).name
    images = [member for suffix, member in parts.items() if f".{suffix}" in IMAGE_SUFFIXES]
    if len(images) != 1:
        raise DataError(f"{path}: the sample of {_shown(first)} has {len(images)} images, not one")
    kind = next((kind for kind in ("cls", "json") if kind in parts), None)
    if kind is None:
        raise DataError(f"{path}: {_shown(images[0].name)} has no label, as .cls or .json beside it")
    member = parts[kind]
    if member.size > _MAX_LABEL_BYTES:
        raise DataError(f"{path}: {_shown(member.name)} has {member.size:,} bytes, which no label has")
    position = file.tell()
    file.seek(member.offset_data)
    label = _label(kind, file.read(member.size))
    file.seek(position)  # where tarfile continues
    if label is None:
        raise DataError(
            f"{path}: {_shown(member.name)} holds no class number from 0 to {MAX_LABEL:,}, and no class name",
            "write .cls with the number or name, or .json with it under label",
        )
    return _Sample(images[0].offset_data, images[0].size, label)


def _label(kind: str, raw: bytes) -> int | str | None:
    """The number or name of a class; None for anything else."""
    label: object = None
    try:
        if kind == "cls":
            label = raw.decode("utf-8").strip()
        else:
            tree = json.loads(raw)
            label = tree.get("label", tree.get("cls")) if isinstance(tree, dict) else None
    except (ValueError, RecursionError):  # also bytes that are no text
        return None
    if isinstance(label, str):
        label = label.strip()
        if label.isdecimal() and label.isascii() and len(label) < 10:
            label = int(label)
    if isinstance(label, int) and not isinstance(label, bool):
        return label if 0 <= label <= MAX_LABEL else None
    named = isinstance(label, str) and label and len(label) <= _MAX_NAME and label.isprintable()
    return label if named and not _NUMBER.fullmatch(str(label)) else None  # type: ignore[return-value]


def read_member(path: Path, offset: int, size: int) -> tuple[str, bytes]:
    """Name (at most 100 characters, from the header) and bytes of the member that begins at ``offset``.

    Raises:
        DataError: the file cannot be read, or has been truncated.
    """
    try:
        with open(path, "rb", buffering=0) as file:
            file.seek(offset - _BLOCK)
            raw = file.read(_BLOCK + size)
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror or error}") from error
    if len(raw) != _BLOCK + size:
        raise DataError(f"{path} has become shorter since it was indexed")
    return _shown(raw[:100].partition(b"\0")[0].decode(errors="replace")), raw[_BLOCK:]


def _shown(name: str) -> str:
    """A name from an archive, sanitised for one line of text."""
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in name[:100])
