"""The two forms of a data set: stored in memory as one tensor, or read from files by workers."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from .augment import resize
from .errors import DataError
from .generate import ByClass, Composed, Composer
from .specs import DatasetSpec, Side, both_sides, shown_sides

#: Images of the buffer out of which those of shards are drawn.
SHUFFLE_BUFFER = 10_000


def keyed_generator(*key: int | str) -> torch.Generator:
    """A CPU generator seeded with a hash of the key, so that similar keys give unrelated streams."""
    digest = hashlib.blake2b("/".join(map(str, key)).encode(), digest_size=7).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "big"))


@dataclass(frozen=True)
class Origin:
    """What the files of a split tell, and its tensors no longer do.

    Attributes:
        left_out: number of files that are not read because of their suffix, by that suffix.
        folders: number of images in folders that are not read, by the folder.
        notes: sentences about the folders, for the user.
    """

    left_out: Mapping[str, int] = field(default_factory=dict)
    folders: Mapping[str, int] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class ImageSet:
    """A data set in memory.

    Attributes:
        spec, split: specification of the data set, and name of the split.
        images: uint8 [n, c, h, w].
        labels: int64 [n] classes, or float [n, classes] of zeros and ones.
        composer: composes new images from these (which are then digits, with their classes) for every batch.
        parts: uint8 [n, k, c, h, w], each object of an image alone, if the set has them.
        part_labels: int64 [n, k], their classes, -1 for none.
        origin: what was read, of a set given by a path.
    """

    spec: DatasetSpec
    split: str
    images: Tensor
    labels: Tensor
    composer: Composer | None = None
    parts: Tensor | None = None
    part_labels: Tensor | None = None
    origin: Origin = Origin()

    def __len__(self) -> int:
        return self.images.shape[0]

    @property
    def device(self) -> torch.device:
        return self.images.device

    @property
    def size(self) -> tuple[int, int]:
        """Rows and columns of the images before they are cropped to the model's input."""
        if self.composer:
            return self.composer.size, self.composer.size
        return self.images.shape[2], self.images.shape[3]

    def order(self, generator: torch.Generator) -> Tensor:
        """Indices [n] of the images in random order."""
        return torch.randperm(len(self), generator=generator)

    def _changed(self, change: Callable[[Tensor], Tensor]) -> ImageSet:
        tensors = {name: getattr(self, name) for name in ("images", "labels", "parts", "part_labels")}
        changed: dict[str, Any] = {name: change(one) for name, one in tensors.items() if one is not None}
        return replace(self, **changed)

    def subset(self, indices: Tensor, split: str | None = None) -> ImageSet:
        """The images at ``indices`` [m] as a new set."""
        return replace(self._changed(lambda tensor: tensor[indices]), split=split or self.split)

    def to(self, device: torch.device | str) -> ImageSet:
        return self._changed(lambda tensor: tensor.to(device))

    def resized(self, side: int) -> ImageSet:
        """The same set with square images of another side."""
        if self.composer or self.parts is not None:
            raise DataError(f"{self.spec.title} is composed at its own size and cannot be resized")
        return replace(self, images=resize(self.images, (side, side)))

    def fixed(self, seed: int = 0, chunk: int = 1000) -> ImageSet:
        """One image per digit, composed once with a seed, instead of new ones; unchanged without a composer.

        The images depend only on the digits and the seed, not on the number of threads or the batches.
        """
        if self.composer is None:
            return self
        index = ByClass.of(self.labels, self.spec.num_classes)
        made = []
        for number, picked in enumerate(torch.arange(len(self)).split(chunk)):
            draws = self.composer.draw(index, picked, keyed_generator(seed, number))
            made.append(self.composer.compose(self.images, self.labels, picked, draws))
        columns: dict[str, Any] = {
            name: torch.cat(column)
            for name, column in zip(Composed._fields, zip(*made, strict=True), strict=True)
            if column[0] is not None
        }
        return replace(self, composer=None, **columns)

    def fingerprint(self) -> str:
        """sha256 over the pixels and labels in order: equal for every lossless copy of the data set."""
        digest = hashlib.sha256()
        digest.update(self.images.cpu().contiguous().numpy().data)  # no copy: the set may fill the memory
        small = self.spec.num_classes <= 256
        digest.update(self.labels.to("cpu", torch.uint8 if small else torch.int64).numpy().tobytes())
        if self.composer:
            digest.update(repr(self.composer).encode())
        return digest.hexdigest()


def buffered_order(shards: Tensor, size: int, generator: torch.Generator) -> Tensor:
    """Shuffle the images' indices like a stream of shards with a shuffle buffer.

    The shards follow each other in random order, their images in file order. The first ``size`` images fill a
    buffer. Each further image replaces a random one of the buffer, which is the next in the order. At the end
    the buffer is emptied in random order. Nothing is read, so starting at any position of the order costs the same.

    Args:
        shards: integers [n], the shard of each image.
        size: images in the buffer; from n on, the order is a uniform permutation.
        generator: source of random numbers.
    """
    numbers, place = shards.unique(return_inverse=True)
    turn = torch.randperm(len(numbers), generator=generator)
    stream = torch.argsort(turn[place], stable=True).tolist()
    buffer, order = stream[:size], []
    draws = torch.randint(len(buffer), (len(stream) - len(buffer),), generator=generator).tolist()
    for image, draw in zip(stream[size:], draws, strict=True):
        order.append(buffer[draw])
        buffer[draw] = image
    rest = torch.randperm(len(buffer), generator=generator).tolist()
    return torch.tensor(order + [buffer[k] for k in rest], dtype=torch.int64)


class Decoder(Protocol):
    """Source of a streamed set's images."""

    def decode(self, index: int) -> Tensor:
        """Image number ``index`` as uint8 [c, rows, columns]; raises ``DataError`` if it is damaged."""

    def fingerprint(self) -> str:
        """A string that differs if the files do (from their names and sizes, without reading pixels)."""


class _Decoded(torch.utils.data.Dataset):
    def __init__(self, decoder: Decoder) -> None:
        self.decoder = decoder

    def __getitem__(self, index: int) -> Tensor | str:
        try:
            return self.decoder.decode(index)
        except DataError as error:  # returned as a value: a worker would raise it with a long traceback
            return str(error)


def _stack(shape: tuple[int, ...], images: list[Tensor | str]) -> Tensor | str:
    if not images:  # a last batch with fewer images than processes
        return torch.empty(0, *shape, dtype=torch.uint8)
    return next((image for image in images if isinstance(image, str)), None) or torch.stack(images)  # type: ignore[arg-type]


@dataclass(frozen=True)
class StreamedSet:
    """A data set too large for memory, whose images are decoded by worker processes as they are needed.

    Attributes:
        spec, split: specification of the data set, and name of the split.
        device: where batches are sent.
        decoder: reads one image.
        indices: int64 [n], indices of this set's images in the decoder.
        labels: int64 [n].
        side: rows and columns of the decoded images, or the side of squares.
        workers: number of decoding processes; 0 decodes in this process.
        shards: integers [n], the shard that contains each image; None: there are no shards.
        origin: what was read, of a set given by a path.
    """

    spec: DatasetSpec
    split: str
    decoder: Decoder
    indices: Tensor
    labels: Tensor
    side: Side
    workers: int = 0
    device: torch.device = torch.device("cpu")
    shards: Tensor | None = None
    origin: Origin = Origin()

    def __len__(self) -> int:
        return len(self.indices)

    @property
    def size(self) -> tuple[int, int]:
        return both_sides(self.side)

    def order(self, generator: torch.Generator) -> Tensor:
        """Indices [n] of the images in random order; for shards, an order that reads one shard after the other."""
        if self.shards is None:
            return torch.randperm(len(self), generator=generator)
        return buffered_order(self.shards, SHUFFLE_BUFFER, generator)

    def subset(self, indices: Tensor, split: str | None = None) -> StreamedSet:
        """The images at ``indices`` [m] as a new set."""
        return replace(
            self,
            split=split or self.split,
            indices=self.indices[indices],
            labels=self.labels[indices],
            shards=None if self.shards is None else self.shards[indices],
        )

    def to(self, device: torch.device | str) -> StreamedSet:
        return replace(self, device=torch.device(device), labels=self.labels.to(device))

    def fixed(self) -> StreamedSet:
        return self

    def fingerprint(self) -> str:
        """sha256 over the files' names and sizes, the images' indices and labels."""
        digest = hashlib.sha256(self.decoder.fingerprint().encode("utf-8", "surrogateescape"))
        digest.update(self.indices.numpy().tobytes())
        digest.update(self.labels.cpu().numpy().tobytes())
        return digest.hexdigest()

    def read(self, batches: Sequence[Tensor]) -> Iterator[Tensor]:
        """Images uint8 [b, c, h, w] of each batch of indices [b], on the device, prefetched by the workers."""
        loader = torch.utils.data.DataLoader(
            _Decoded(self.decoder),
            batch_sampler=[self.indices[batch].tolist() for batch in batches],
            num_workers=self.workers,
            collate_fn=partial(_stack, (self.spec.input_size[0], *self.size)),
            pin_memory=self.device.type == "cuda",
            generator=torch.Generator(),  # else it draws from the global one, which the model uses
        )
        for images in loader:
            if isinstance(images, str):
                raise DataError(
                    images,
                    "replace it (training then goes on with --accept-data), or leave such images out from the start "
                    "(--skip-bad; in a recipe data.skip_bad: true)",
                )
            yield images.to(self.device, non_blocking=True)


def split_validation(
    data: ImageSet | StreamedSet, size: int, seed: int = 0, stratified: bool = False
) -> tuple[ImageSet | StreamedSet, ImageSet | StreamedSet]:
    """Split ``size`` images off a training set with a fixed seed: (the rest, the validation set).

    ``stratified``: from each class its share of ``size``, rounded, but at least one image if the class has two, and
    never all of them; so the number of images may differ slightly from ``size``.

    Composed images of the validation set are composed once, only from held-out digits.
    """
    if not 0 <= size < len(data):
        raise DataError(
            f"a validation split of {size} images cannot be carved out of {len(data)}: set data.val_size below that"
        )
    order = torch.randperm(len(data), generator=torch.Generator().manual_seed(seed))
    chosen = torch.zeros(len(data), dtype=torch.bool)
    if stratified and size:
        if data.spec.multi_label:
            raise DataError(f"{data.spec.title}: images with several labels cannot be split class by class")
        labels = data.labels.cpu()[order]
        for kind in labels.unique():
            mine = order[labels == kind]
            share = min(max(round(size * len(mine) / len(data)), 1), len(mine) - 1)
            chosen[mine[:share]] = True
    else:
        chosen[order[:size]] = True
    held_out, rest = chosen.nonzero().flatten(), (~chosen).nonzero().flatten()
    validation = data.subset(held_out, split="validation")
    return data.subset(rest), validation.fixed() if size else validation


def stratified_folds(
    data: ImageSet | StreamedSet, folds: int, seed: int = 0
) -> list[tuple[ImageSet | StreamedSet, ImageSet | StreamedSet]]:
    """Split a set into folds with a fixed seed: for each, (the images of the others, its own).

    The images of a class are dealt to the folds in turn, each class beginning where the one before it ended, so that
    the folds differ by one image at most, in each class and in all.

    Raises:
        DataError: there are fewer images of a class than folds, or images have several labels.
    """
    if data.spec.multi_label:
        raise DataError(f"{data.spec.title}: images with several labels cannot be split class by class")
    labels = data.labels.cpu()
    counts = labels.bincount(minlength=data.spec.num_classes)
    if int(counts.min()) < folds:
        rare = int(counts.argmin())
        raise DataError(
            f"{data.spec.title}: {folds} folds need {folds} images of each class, and {data.spec.label_names[rare]} "
            f"has {int(counts[rare])}: use fewer folds, or add images"
        )
    order = torch.randperm(len(data), generator=torch.Generator().manual_seed(seed))
    order = order[labels[order].argsort(stable=True)]
    fold = torch.empty(len(data), dtype=torch.int64)
    fold[order] = torch.arange(len(data)) % folds

    def part(chosen: Tensor, split: str) -> ImageSet | StreamedSet:
        return data.subset(chosen.nonzero().flatten(), split=split)

    return [(part(fold != k, "train"), part(fold == k, "test")) for k in range(folds)]


def sized(spec: DatasetSpec, size: Side | None, resize: Side | None) -> tuple[DatasetSpec, tuple[int, int]]:
    """A specification with another input size, and rows and columns of the stored images, from which it is cropped."""
    native = spec.input_size[1]
    seen, stored = stored_sides(size or native, resize, (spec.side or native) / native)
    return replace(spec, input_size=(spec.input_size[0], *seen)), stored


def stored_sides(size: Side, resize: Side | None, margin: float) -> tuple[tuple[int, int], tuple[int, int]]:
    """Rows and columns of the model's input, and of the stored images: ``resize``, by default ``margin`` times the
    input.

    Raises:
        DataError: the stored images would be smaller than the input.
    """
    seen = both_sides(size)
    stored = both_sides(resize) if resize else (round(seen[0] * margin), round(seen[1] * margin))
    if stored[0] < seen[0] or stored[1] < seen[1]:
        raise DataError(
            f"images resized to {shown_sides(stored)} pixels are smaller than the {shown_sides(seen)} that the model "
            "sees"
        )
    if abs(stored[0] / seen[0] - stored[1] / seen[1]) > 1 / min(
        seen
    ):  # prediction has one factor for both sides
        raise DataError(
            f"images resized to {shown_sides(stored)} have another shape than {shown_sides(seen)}"
        )
    return seen, stored
