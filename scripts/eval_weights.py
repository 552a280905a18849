"""Evaluate the bundled checkpoints on their test sets, and compare with their metadata: ``make eval-weights``.

Arguments are passed to ``python -m capszoo.recipes.evaluate``: ``make eval-weights ARGS="--data FOLDER"``. The data
sets are searched in the folder given by ``CAPSZOO_DATA``.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a plain checkout works too

import capszoo
from capszoo.recipes.evaluate import main as evaluate


def main(arguments: list[str]) -> int:
    names = capszoo.list_pretrained()
    if not names:
        print("there are no weights to evaluate", file=sys.stderr)
        return 1
    return max(evaluate([name, "--require-stated", *arguments]) for name in names)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
