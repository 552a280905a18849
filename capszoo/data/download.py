"""Download public files into a folder that the caller specifies, with checksums; no other module here downloads."""

from __future__ import annotations

import shutil
import socket
import tarfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from .._utils.files import created_folder, expanded, not_writable, replacing
from .errors import DataError
from .medmnist import medmnist_set, medmnist_url

#: Seconds without an answer after which an address is given up.
SILENT_SECONDS = 60.0

_TORONTO = "https://www.cs.toronto.edu/~kriz"
_NYU = "https://cs.nyu.edu/~ylclab/data/norb-v1.0-small"


@dataclass(frozen=True)
class RemoteFile:
    """A file to download: its addresses, of which the first that responds is used, and its md5.

    ``members`` are the files to extract from a tar archive; () keeps the file unchanged.
    """

    urls: tuple[str, ...]
    md5: str
    members: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return self.urls[0].rsplit("/", 1)[1].partition("?")[0]


# md5 sums: CIFAR's from its page; smallNORB's from a public loader (not compared with the original files here).
_CIFAR10_BATCHES = [f"data_batch_{k}" for k in range(1, 6)]
_CIFAR = {
    "cifar10": RemoteFile(
        (f"{_TORONTO}/cifar-10-binary.tar.gz",),
        "c32a1d4ab5d03f1284b67883e8d87530",
        tuple(f"cifar-10-batches-bin/{name}.bin" for name in (*_CIFAR10_BATCHES, "test_batch")),
    ),
    "cifar100": RemoteFile(
        (f"{_TORONTO}/cifar-100-binary.tar.gz",),
        "03b5dce01913d631647c71ecec9e9cb8",
        ("cifar-100-binary/train.bin", "cifar-100-binary/test.bin"),
    ),
}
_NORB = {
    "train": (
        "smallnorb-5x46789x9x18x6x2x96x96-training",
        {
            "dat": "66054832f9accfe74a0f4c36a75bc0a2",
            "cat": "23c8b86101fbf0904a000b43d3ed2fd9",
            "info": "51dee1210a742582ff607dfd94e332e3",
        },
    ),
    "test": (
        "smallnorb-5x01235x9x18x6x2x96x96-testing",
        {
            "dat": "e4ad715691ed5a3a5f138751a4ceb071",
            "cat": "5aa791cd7e6016cf957ce9bdb93b8603",
            "info": "a9454f3864d7fd4bb3ea7fc3eb84924e",
        },
    ),
}


def remote_files(name: str, split: str) -> tuple[RemoteFile, ...]:
    """Files of a split of a named set; () if it cannot be downloaded."""
    if name in _CIFAR:
        return (_CIFAR[name],)
    if name.startswith("medmnist:"):
        one = name.removeprefix("medmnist:")
        return (RemoteFile((medmnist_url(one),), medmnist_set(one).md5),)
    if name == "smallnorb":
        stem, sums = _NORB["train" if split == "train" else "test"]
        return tuple(RemoteFile((f"{_NYU}/{stem}-{kind}.mat.gz",), md5) for kind, md5 in sums.items())
    if name not in ("mnist", "fashion_mnist", "svhn"):
        return ()
    from torchvision import datasets  # its tables of addresses and checksums

    if name == "svhn":
        url, _, md5 = datasets.SVHN.split_list[split]
        return (RemoteFile((url,), md5),)
    source = datasets.MNIST if name == "mnist" else datasets.FashionMNIST
    start = "train" if split == "train" else "t10k"
    return tuple(
        RemoteFile(tuple(mirror + file for mirror in source.mirrors), md5)
        for file, md5 in source.resources
        if file.startswith(start)
    )


def fetch(name: str, split: str, folder: str | Path) -> Path:
    """Download a split's files to ``folder``/``name``, except those that exist with the right checksum.

    Those of ``medmnist:NAME`` go to ``folder``/medmnist.

    Returns:
        That folder.

    Raises:
        DataError: no address responds, a checksum differs or the disk is full.
    """
    target = expanded(folder) / name.partition(":")[0]
    files = remote_files(name, split)
    if not files:
        raise DataError(f"{name} cannot be fetched")
    try:
        with created_folder(target):
            for file in files:
                _fetch_file(file, target)
                if file.members:
                    _extract(target / file.name, file.members, target)
    except OSError as error:
        raise DataError(not_writable(target, error)) from error
    return target


def _fetch_file(file: RemoteFile, target: Path) -> None:
    from http.client import HTTPException
    from urllib.error import URLError

    from torchvision.datasets.utils import check_integrity, download_url

    if check_integrity(str(target / file.name), file.md5):
        return
    reasons = []
    partial = target / f"{file.name}.part"
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(SILENT_SECONDS)  # torchvision's function has no such argument
    try:
        for url in file.urls:
            try:
                download_url(url, str(target), partial.name, file.md5)
                partial.replace(target / file.name)
                return
            except (URLError, TimeoutError, ConnectionError, HTTPException, RecursionError) as error:
                reasons.append(f"{url}: {getattr(error, 'reason', error)}")
            except RuntimeError:  # raised by torchvision for a wrong checksum
                reasons.append(f"what {url} sent has another md5 than {file.md5}; nothing was kept")
    finally:
        socket.setdefaulttimeout(before)
        partial.unlink(missing_ok=True)
    raise DataError(f"cannot fetch {file.name}: {'; '.join(reasons)}")


def _extract(archive: Path, members: Sequence[str], target: Path) -> None:
    """Extract members of a tar archive, and nothing else, to their places below the folder."""
    with tarfile.open(archive) as tar:
        for member in members:
            content = tar.extractfile(member)
            assert content is not None, "a plain file: the archive has the right checksum"
            with content, replacing(target / member) as partial, partial.open("wb") as out:
                shutil.copyfileobj(content, out)
