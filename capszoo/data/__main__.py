"""`python -m capszoo.data`: list the data sets, check a copy, fetch one to a folder, build h-ImageNet."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from capszoo.errors import CapszooError

from . import DATASETS, PREFIXES, dataset_spec, load_dataset
from .download import fetch, remote_files


def main(argv: list[str] | None = None) -> int:
    """Command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m capszoo.data", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("list", help="every data set by name")
    check = commands.add_parser("check", help="read a data set whole and state what it holds")
    check.add_argument("name")
    check.add_argument("--data", help="folder of the data set; default: CAPSZOO_DATA")
    get = commands.add_parser("fetch", help="download a data set's files, with checksums")
    get.add_argument("name", help="a name, or hf:OWNER/NAME")
    get.add_argument("--to", required=True, help="the folder that receives them (give it as --data later)")
    hard = commands.add_parser("h_imagenet", help="build h-ImageNet from a copy of ILSVRC 2012")
    hard.add_argument("ilsvrc", help="folder with Data/CLS-LOC and Annotations/CLS-LOC")
    hard.add_argument("out", help="folder that receives it")
    judge = hard.add_mutually_exclusive_group(required=True)
    judge.add_argument("--accuracies", help="JSON file: top-1 accuracy by class (n01440764: 0.84, …)")
    judge.add_argument(
        "--weights", help="file of torchvision's ResNet-18 weights: measure the accuracies first"
    )
    hard.add_argument("--device", default="cpu")
    args = parser.parse_args(argv)
    try:
        return {"list": _list, "check": _check, "fetch": _fetch, "h_imagenet": _build}[args.command](args)
    except (CapszooError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


def _list(args: argparse.Namespace) -> int:
    for name, spec in DATASETS.items():
        size = "x".join(map(str, spec.input_size))
        print(f"{name:20} {size:10} {', '.join(spec.counts):24} {spec.title}")
    for prefix, what in PREFIXES.items():
        print(f"{prefix + '…':20} {what}")
    return 0


def _check(args: argparse.Namespace) -> int:
    splits = DATASETS[args.name].counts if args.name in DATASETS else ("train", "test")
    for split in splits:
        if (args.name, split) == ("svhn", "extra"):
            continue
        found = load_dataset(args.name, split, args.data)
        c, h, w = found.spec.input_size
        print(
            f"{args.name} {split}: {len(found)} images, {c}x{h}x{w} out of {found.size[0]}x{found.size[1]}, "
            f"{found.spec.num_classes} classes, sha256 {found.fingerprint()}"
        )
    return 0


def _fetch(args: argparse.Namespace) -> int:
    if args.name.startswith("hf:"):
        from .folders import fetch_repository

        folder = fetch_repository(args.name.removeprefix("hf:"), args.to)
        print(f"{args.name} is in {folder}: train and evaluate with --data {args.to}")
        return 0
    spec = dataset_spec(args.name)
    name = spec.base or ("smallnorb" if spec.name.startswith("smallnorb") else spec.name)
    for split in ("train", "test"):
        if not remote_files(name, split):
            print(f"error: {spec.title} cannot be fetched: {spec.remedy}", file=sys.stderr)
            return 1
        folder = fetch(name, split, args.to)
    print(
        f"{spec.title} is in {folder}; check it with: python -m capszoo.data check {args.name} --data {args.to}"
    )
    return 0


def _build(args: argparse.Namespace) -> int:
    from .imagenet import Ilsvrc, build, class_accuracies, load_judge

    if args.accuracies:
        accuracies = json.loads(Path(args.accuracies).read_text(encoding="utf-8"))
    else:
        accuracies = class_accuracies(Ilsvrc(args.ilsvrc), load_judge(args.weights), args.device)
    manifest = build(args.ilsvrc, args.out, accuracies)
    for part, count in manifest["counts"].items():
        same = (
            "as in the paper"
            if count == manifest["paper"][part]
            else f"the paper has {manifest['paper'][part]:,}"
        )
        print(f"{part}: {count:,} images ({same})")
    return 0


if __name__ == "__main__":
    sys.exit(main())
