"""Train the tests' tiny recipes in a process of its own: `python -m tests.support.run_tiny OUT DATA JSON [MODE]`.

Several of these under a launcher train together. MODE `double` works in float64, which tells an error from rounding;
`full-disk:BYTES` lets no file grow beyond so many bytes; `nan:RANK` spoils the loss of one process at its third update;
`crash:RANK` ends one process without a word then; `stop:N` ends the run after N updates; `pace:SECONDS` sleeps in each.
`streamed,` before any of them (or alone) holds no images in memory.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from capszoo.data import DATASETS, batches, folders
from capszoo.errors import CapszooError
from capszoo.recipes import train as train_module
from capszoo.recipes.config import Recipe
from capszoo.recipes.training import step


def main(out: str, data: str, tree: str, mode: str = "") -> int:
    counts = json.loads((Path(data) / "counts.json").read_text())
    DATASETS["mnist"] = replace(DATASETS["mnist"], counts=counts)
    options: dict[str, Any] = {}
    if mode.startswith("streamed,"):
        folders.common.MEMORY_LIMIT, mode = 0, mode.removeprefix("streamed,")
    if mode == "double":
        torch.set_default_dtype(torch.float64)
        normalize = batches.normalize
        batches.normalize = lambda *args: normalize(*args).double()
    elif mode.startswith("full-disk:"):
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # a write beyond the limit is then an error
        resource.setrlimit(resource.RLIMIT_FSIZE, (int(mode.partition(":")[2]),) * 2)
    elif mode.startswith("stop:"):
        options["stop_after"] = int(mode.partition(":")[2])
    elif mode.startswith("pace:"):
        made = step.create_loss

        def create_paced(name: str, **kwargs: Any) -> Any:
            loss = made(name, **kwargs)
            loss.register_forward_pre_hook(lambda *_: time.sleep(float(mode.partition(":")[2])))
            return loss

        step.create_loss = create_paced
    elif mode.startswith(("nan:", "crash:")) and os.environ["RANK"] == mode.partition(":")[2]:
        original = step.create_loss

        def create_loss(name: str, **kwargs: Any) -> Any:
            loss = original(name, **kwargs)
            # Each update seeds the random numbers by its number: so the third is known, when it is made anew too.
            step.seed_update(0, 2, int(os.environ["RANK"]))
            third = torch.initial_seed()

            def spoil(_: Any, __: Any, output: torch.Tensor) -> torch.Tensor:
                if torch.initial_seed() != third:
                    return output
                if mode.startswith("crash:"):
                    os._exit(3)
                return output * float("nan")

            loss.register_forward_hook(spoil)
            return loss

        step.create_loss = create_loss
    recipe = Recipe.model_validate(json.loads(tree))
    try:
        train_module.train(recipe, out=out, data=data, cpu=True, **options)
    except CapszooError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
