"""Speed of the input pipeline, alone and in training: developers run it when capszoo/data changes.

    python benchmarks/data.py                       # every setting, resnet20_routingpool, batch 128
    python benchmarks/data.py --only shift --steps 20 --threads 1
    python benchmarks/data.py --kornia              # the same augmentations by kornia, where it is installed
    python benchmarks/data.py --folder              # JPEG files through worker processes

Each iteration of a row times in turn a batch from the pipeline alone, a training step on an existing batch, and both
together; medians over the iterations are printed. ``share`` is the pipeline's part of both. Pixels are
random: the cost does not depend on them. On a GPU every time ends with a synchronisation.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a plain checkout works too

import torch
from torch import Tensor, nn

import capszoo
from benchmarks.models import in_turns, timed
from capszoo.data import Augment, Batch, Batches, ImageSet, StreamedSet, dataset_spec, load_dataset
from capszoo.data import folders as folders_module
from capszoo.data.augment import jitter, warp
from capszoo.data.sources import compose
from capszoo.data.specs import both_sides
from capszoo.losses import margin_loss

JITTER = {"brightness": 0.2, "contrast": 0.2, "saturation": 0.2, "hue": 0.2}
AFFINE = {"rotation": 15.0, "shear": 0.1, "scale": (0.9, 1.1)}


@dataclass(frozen=True)
class Setting:
    """A row: a data set and its augmentation."""

    title: str
    data: str
    augment: Augment = Augment()


SETTINGS = (
    Setting("nothing", "cifar10"),
    Setting("shift 4, flip", "cifar10", Augment(shift=4, flip=True)),
    Setting("resize 34, crop 32", "cifar10", Augment(resize=34)),
    Setting("resize 34, crop 32, flip, colour 0.2", "cifar10", Augment(resize=34, flip=True, **JITTER)),  # type: ignore[arg-type]
    Setting("affine, shift 4, flip", "cifar10", Augment(shift=4, flip=True, **AFFINE)),  # type: ignore[arg-type]
    Setting("affine, shift 4, flip, colour 0.2", "cifar10", Augment(shift=4, flip=True, **AFFINE, **JITTER)),  # type: ignore[arg-type]
    Setting("crop 32 of 48, brightness, contrast", "smallnorb", Augment(brightness=0.2, contrast=0.2)),
    Setting("digit at a random place", "affnist"),
    Setting("two digits", "multimnist"),
    Setting("one or two digits", "diverse_multimnist"),
)


def make(setting: Setting, count: int, device: str) -> ImageSet:
    """Random pixels in the shape of the data set."""
    spec = dataset_spec(setting.data)
    generator = torch.Generator().manual_seed(0)
    base = dataset_spec(spec.base) if spec.base else spec
    c, h, w = base.input_size
    side = both_sides(setting.augment.resize or base.side or h)
    images = torch.randint(0, 256, (count, c, *side), dtype=torch.uint8, generator=generator)
    labels = torch.arange(count) % base.num_classes
    data = ImageSet(base, "train", images, labels)
    return (compose(spec, "train", data) if spec.base else data).to(device)


def forever(batches: Batches) -> Iterator[Batch]:
    epoch = 0
    while True:
        yield from batches.epoch(epoch)
        epoch += 1


def make_step(name: str, batch: Batch, device: str) -> Callable[[Batch], None]:
    """A training step of the model: forward, margin loss, backward, SGD."""
    c, h, w = batch.images.shape[1:]
    torch.manual_seed(0)
    classes = batch.labels.shape[1] if batch.labels.dim() == 2 else int(batch.labels.max()) + 1
    net: nn.Module = capszoo.create_model(name, in_chans=c, img_size=(h, w), num_classes=max(classes, 10))
    net = net.to(device).to(memory_format=torch.channels_last).train()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)

    def step(batch: Batch) -> None:
        loss = margin_loss(net(batch.images.contiguous(memory_format=torch.channels_last)), batch.labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def pipeline_rows(args: Namespace, chosen: list[Setting]) -> Iterator[str]:
    """Median times of a batch alone, of a step alone, of both."""
    for setting in chosen:
        data = make(setting, 20 * args.batch, args.device)
        stream = forever(Batches(data, args.batch, train=True, augment=setting.augment))
        kept = next(stream)
        step = make_step(args.model, kept, args.device)
        for _ in range(3):
            step(next(stream))
        runs = (partial(next, stream), partial(step, kept), lambda: step(next(stream)))  # noqa: B023
        alone, without, both = map(statistics.median, in_turns(runs, args.steps, 0, args.device))
        yield (
            f"| {setting.data}: {setting.title} | {1000 * alone:.2f} | {args.batch / alone:,.0f} "
            f"| {1000 * without:.1f} | {args.batch / both:,.0f} | {100 * alone / (alone + without):.1f}% |"
        )


def write_folder(root: Path, count: int, side: int) -> None:
    """Write a folder of JPEG files in ten classes."""
    from PIL import Image

    generator = torch.Generator().manual_seed(0)
    for number in range(count):
        small = torch.randint(0, 256, (side // 8, side // 8, 3), dtype=torch.uint8, generator=generator)
        image = Image.fromarray(small.numpy()).resize((side, side))
        path = root / "train" / str(number % 10) / f"{number}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        image.save(path, quality=90)


def folder_rows(args: Namespace) -> Iterator[str]:
    folders_module.common.MEMORY_LIMIT = 0  # stream, however small
    with tempfile.TemporaryDirectory() as root:
        write_folder(Path(root), 20 * args.batch, 256)
        for workers in sorted({0, 1, folders_module.available_workers()}):
            found = load_dataset(f"imagefolder:{root}", "train", size=128, resize=156)
            assert isinstance(found, StreamedSet)
            data = replace(found, workers=workers).to(args.device)
            stream = Batches(data, args.batch, train=True, augment=Augment(flip=True)).epoch()
            next(stream)  # the workers have started
            seconds = timed(partial(list, islice(stream, 12))) / 12
            stream.close()  # type: ignore[attr-defined]
            yield f"| {workers} | {1000 * seconds:.1f} | {args.batch / seconds:,.0f} |"


def kornia_rows(args: Namespace) -> Iterator[str]:
    """The same augmentation with kornia: random affine maps and colour jitter of a float batch on the device."""
    import kornia.augmentation as K

    images = torch.rand(args.batch, 3, 32, 32, device=args.device)
    augment = Augment(**AFFINE, **JITTER)  # type: ignore[arg-type]
    colours = ("brightness", "contrast", "saturation", "hue")

    def ours_affine() -> Tensor:
        return warp(images, augment.draw(args.batch, (0, 0), torch.Generator())["matrix"])

    def ours_jitter() -> Tensor:
        draws = augment.draw(args.batch, (0, 0), torch.Generator())
        return jitter(images, **{name: draws[name] for name in colours})

    affine = K.RandomAffine(15.0, scale=(0.9, 1.1), shear=5.7, p=1.0)
    colour = K.ColorJitter(0.2, 0.2, 0.2, 0.2, p=1.0)
    for title, ours, theirs in (("affine", ours_affine, affine), ("colour 0.2", ours_jitter, colour)):
        times = in_turns((ours, partial(theirs, images)), args.steps, 1, args.device)
        mine, other = (1000 * statistics.median(each) for each in times)
        yield f"| {title} | {mine:.2f} | {other:.2f} | {other / mine:.2f} |"


def main(argv: list[str] | None = None) -> int:
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="resnet20_routingpool")
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--steps", type=int, default=15, help="passes per row")
    parser.add_argument("--only", default="", help="rows whose title or data set contains this")
    parser.add_argument("--threads", type=int, help="threads of torch")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--kornia", action="store_true")
    parser.add_argument("--folder", action="store_true")
    args = parser.parse_args(argv)
    if args.threads:
        torch.set_num_threads(args.threads)
    chosen = [s for s in SETTINGS if args.only in s.title or args.only in s.data]
    if not chosen:
        print(f"error: no row contains '{args.only}'", file=sys.stderr)
        return 2
    where = torch.cuda.get_device_name() if args.device != "cpu" else f"{torch.get_num_threads()} threads"
    print(f"{args.model}, batch {args.batch}, {where}, torch {torch.__version__}, median of {args.steps}\n")
    if args.folder:
        head, rows = "workers | batch, ms | images/s", folder_rows(args)
    elif args.kornia:
        head, rows = "augmentation of 3x32x32 | here, ms | kornia, ms | ratio", kornia_rows(args)
    else:
        head = (
            "data set: augmentation | batch, ms | images/s alone | step, ms | images/s with the model | share"
        )
        rows = pipeline_rows(args, chosen)
    print(f"| {head} |\n" + "|---" * (head.count("|") + 1) + "|")
    for row in rows:
        print(row, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
