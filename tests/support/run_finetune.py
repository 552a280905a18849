"""Fine-tune in a process of its own: `python -m tests.support.run_finetune MODEL DATA OUT NOTES`.

Several of these under a launcher train together. Each leaves in NOTES, by its rank, the state of the net at every
validation (`RANK-EPOCH.safetensors`) and the files that it opened for writing in OUT (`RANK.json`).
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from capszoo.recipes import train as train_module
from capszoo.recipes.finetune import finetune


def main(model: str, data: str, out: str, notes: str) -> None:
    rank, folder = os.environ.get("RANK", "0"), Path(notes)
    folder.mkdir(exist_ok=True)
    opened: set[str] = set()
    counted, epochs = train_module.count_correct, iter(range(1, 1000))

    def note(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" and str(arguments[0]).startswith(out) and set(str(arguments[1])) & set("wax+"):
            opened.add(str(arguments[0]))

    def count_correct(net: torch.nn.Module, *rest: Any) -> torch.Tensor:
        state = {key: value.clone().contiguous() for key, value in net.state_dict().items()}
        save_file(state, folder / f"{rank}-{next(epochs)}.safetensors")
        return counted(net, *rest)

    sys.addaudithook(note)
    train_module.count_correct = count_correct
    finetune(model, data, out, epochs=3, cpu=True)
    (folder / f"{rank}.json").write_text(json.dumps(sorted(opened)))


if __name__ == "__main__":
    main(*sys.argv[1:])
