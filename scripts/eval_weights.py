"""Accuracy of the bundled weights against their metadata: maintainers run it when weights or models change.

``make eval-weights``. The data sets are searched in the folder given by ``CAPSZOO_DATA``, or by
``make eval-weights ARGS="--data FOLDER"``.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a plain checkout works too

import capszoo
from capszoo.errors import CapszooError
from capszoo.recipes.evaluate import evaluate
from capszoo.recipes.evaluation.metrics import reproduced


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", help="folder of the data sets")
    parser.add_argument("--device", help="default: CUDA if there is one, else CPU")
    args = parser.parse_args(arguments)
    same = []
    for name in capszoo.list_pretrained():
        try:
            result = evaluate(name, data=args.data, device=args.device)
        except CapszooError as error:  # such as a data set that is not there
            print(f"error: {error}", file=sys.stderr)
            return 2
        stated, top1, n = result["stated"], result["top1"], result["n"]
        same.append(stated is not None and reproduced(stated, top1, n))
        print(
            f"{name}: {top1:.2f}% of {n} images, stated {stated}: {'reproduced' if same[-1] else 'DIFFERS'}"
        )
    return 0 if same and all(same) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
