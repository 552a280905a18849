"""Newer keys in the metadata of the bundled weights: maintainers run it when there is such a key.

``python scripts/complete_metadata.py`` adds ``canonical`` (which weights a bare name refers to) and the keys that
``capszoo.recipes.weights.reading_keys`` derives from the recipe and the data set. Existing keys are kept, except
``canonical``, which is determined again.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a plain checkout works too

from capszoo._pretrained.catalogue import checkpoints
from capszoo._pretrained.info import weights_folders
from capszoo.data import dataset_spec
from capszoo.recipes.weights import amend_metadata, canonical_keys, reading_keys


def main() -> int:
    known = checkpoints(aliases=False)
    for name, canonical in canonical_keys(known).items():
        raw = known[name].raw
        derived = reading_keys(dataset_spec(raw["dataset"]["name"]), raw["recipe"]["loss"]["name"])
        missing = {key: value for key, value in derived.items() if key not in raw}
        if missing or raw.get("canonical") is not canonical:
            amend_metadata(weights_folders()[0] / f"{name}.json", canonical=canonical, **missing)
            print(f"{name}: {', '.join(['canonical', *missing])}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
