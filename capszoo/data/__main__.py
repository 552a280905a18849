"""`python -m capszoo.data`: what `capszoo data` does, where the command line's libraries are not installed."""

from __future__ import annotations

import argparse
import sys

from capszoo.errors import CapszooError

from .commands import build_h_imagenet, check_set, fetch_set
from .specs import list_sets


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
        if args.command == "list":
            for row in list_sets():
                print(f"{row['name']:20} {row['input']:10} {row['splits']:36} {row['title']}")
        elif args.command == "check":
            for line in check_set(args.name, args.data):
                print(line)
        elif args.command == "fetch":
            print(fetch_set(args.name, args.to))
        else:
            for line in build_h_imagenet(args.ilsvrc, args.out, args.accuracies, args.weights, args.device):
                print(line)
    except (CapszooError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
