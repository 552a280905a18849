"""A canary: pickles wherever a stranger's model may name weights, and what became of each. Run as a process.

    python -m tests.support.canary FOLDER [quick]

It serves the repositories itself, loads each of them in every way there is, and prints one JSON line a case: `case`,
`loaded` (whether a model came of it), `error`, `ran` (the canary's code was run), `opened` (torch.load was called) and
`fetched` (files other than config.json and model.safetensors that were asked of the Hub).
`tests/models/test_strangers.py` runs it with the installed libraries and with the oldest allowed ones.
"""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save

OURS = {"architecture": "idpa_cnn", "num_classes": 10}
TIMMS = {"architecture": "test_resnet", "num_classes": 1000}
PICKLES = ("evil.bin", "pytorch_model.bin", "pytorch_model.pth", "model.pth", "model.bin")


class Canary:
    """Unpickled, it makes a folder."""

    def __init__(self, flag: Path) -> None:
        self.flag = flag

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.flag),)


def sources(root: Path, url: str) -> dict[str, dict[str, Any]]:
    """Ways in which a configuration may name a pickle, as keys of `pretrained_cfg`."""
    pickled = str(root / "evil.bin")
    return {
        "none": {},
        "hf_hub_filename": {"hf_hub_filename": "evil.bin"},
        "hf_hub_id": {"hf_hub_id": "evil/pickles", "hf_hub_filename": "evil.bin"},
        "hf_hub_id alone": {"hf_hub_id": "evil/pickles"},
        "file": {"file": pickled},
        "url": {"url": f"{url}/evil/pickles/resolve/main/evil.bin"},
        "file url": {"url": f"file://{pickled}"},
        "state_dict": {"state_dict": {"a": 1}, "hf_hub_filename": "evil.bin"},
        "empty state_dict": {"state_dict": {}, "file": pickled},
        "custom_load": {"custom_load": True, "file": pickled, "url": f"file://{pickled}"},
        "custom_load hf": {"custom_load": "hf", "hf_hub_filename": "evil.bin"},
        "source": {"source": None, "file": pickled},
        "source file": {"source": "file", "file": pickled, "url": f"file://{pickled}"},
        "source local-dir": {"source": "local-dir", "file": str(root)},
    }


def arguments(root: Path) -> dict[str, dict[str, Any]]:
    """Ways in which a model's arguments may name one."""
    pickled = str(root / "evil.bin")
    return {
        "checkpoint_path": {"checkpoint_path": pickled},
        "pretrained_cfg": {"pretrained_cfg": {"file": pickled}},
        "pretrained_cfg_overlay": {"pretrained_cfg_overlay": {"file": pickled, "source": None}},
        "pretrained": {"pretrained": True},
        "cache_dir": {"cache_dir": str(root)},
        "device": {"device": "meta"},
        "nested": {"block_args": {"checkpoint_path": pickled}},
        "path": {"backbone": f"local-dir:{root}"},
    }


def configurations(root: Path, url: str) -> Iterator[tuple[str, dict[str, Any]]]:
    for base, size in ((OURS, [1, 28, 28]), (TIMMS, [3, 160, 160])):
        for name, keys in sources(root, url).items():
            cfg = {"input_size": size, "num_classes": base["num_classes"], **keys}
            yield f"{base['architecture']}: {name}", {**base, "pretrained_cfg": cfg}
            if name in ("hf_hub_filename", "file"):
                yield f"{base['architecture']}: flat {name}", {**base, **cfg}
        for name, args in arguments(root).items():
            cfg = {"input_size": size, "num_classes": base["num_classes"]}
            config = {**base, "pretrained_cfg": cfg, "model_args": args}
            yield f"{base['architecture']}: model_args {name}", config
    for name in (f"local-dir:{root}", "hf-hub:evil/pickles", "./evil", "idpa_cnn.mnist"):
        cfg = {"input_size": [1, 28, 28], "hf_hub_filename": "evil.bin"}
        yield f"architecture {name}", {"architecture": name, "pretrained_cfg": cfg}


def main(root: Path, quick: bool) -> None:  # noqa: C901 - a list of attacks
    from tests.support.hub import Hub

    hub = Hub()
    os.environ.update(
        HF_ENDPOINT=hub.url,
        HF_HOME=str(root / "home"),
        TORCH_HOME=str(root / "torch"),
        HF_HUB_DISABLE_XET="1",
    )
    import timm
    import torch

    import capszoo
    from capszoo.inference import load_model

    flag, opened = root / "ran", []
    pickled = pickle.dumps(Canary(flag))
    torch_load = torch.load
    torch.load = lambda *args, **kwargs: (opened.append(str(args[0])), torch_load(*args, **kwargs))[1]
    for name in PICKLES:
        (root / name).write_bytes(pickled)
    (root / "config.json").write_text(json.dumps(OURS))
    empty, odd = save({}), save({"a": np.zeros(3, np.float32)})
    pickles = {name.replace(".", "__"): pickled for name in PICKLES}
    hub.add("evil/pickles", config__json=json.dumps(OURS).encode(), **pickles)

    def attempt(case: str, create: Any) -> None:
        hub.calls.clear()
        opened.clear()
        error = ""
        try:
            create()
        except Exception as e:
            error = f"{type(e).__name__}: {e}"
        asked = {path.rsplit("/", 1)[-1] for _, path in hub.calls if "/resolve/" in path}
        fetched = sorted(asked - {"config.json", "model.safetensors"})
        ran = flag.exists()
        if ran:
            flag.rmdir()
        line = dict(case=case, loaded=not error, error=error, ran=ran, opened=list(opened), fetched=fetched)
        print(json.dumps({**line, "asked": len(hub.calls)}), flush=True)

    attempt("control", lambda: torch.load(root / "evil.bin", weights_only=False))

    for k, (case, config) in enumerate(configurations(root, hub.url)):
        for kind, weights in (("empty", empty), ("odd", odd), ("absent", None), ("a pickle", pickled)):
            if kind == "a pickle" and not case.endswith(": none"):
                continue
            if quick and kind != ("empty" if k else "a pickle"):
                continue
            folder = root / f"local{k}{kind[-1]}"
            folder.mkdir()
            files = {"config__json": json.dumps(config).encode(), **pickles}
            if weights is not None:
                files["model__safetensors"] = weights
            for name, content in files.items():
                (folder / name.replace("__", ".")).write_bytes(content)
            repo = f"evil/net{k}{kind[-1]}"
            hub.add(repo, **files)
            for name in (f"hf-hub:{repo}", f"local-dir:{folder}"):
                what = f"{case}, weights {kind}, {name.partition(':')[0]}"
                attempt(f"capszoo, {what}", lambda name=name: capszoo.create_model(name, pretrained=True))
                if not (quick and k):
                    attempt(f"load_model, {what}", lambda name=name: load_model(name))
                if config["architecture"] == "idpa_cnn":  # ours, which timm gives to us
                    attempt(f"timm, {what}", lambda name=name: timm.create_model(name, pretrained=True))
    for base in (OURS, TIMMS):
        size = [1, 28, 28] if base is OURS else [3, 160, 160]
        real = capszoo.create_model(base["architecture"], num_classes=base["num_classes"]).state_dict()
        from safetensors.torch import save as save_torch

        for name, args in arguments(root).items():
            for kind, weights in (("empty", empty), ("right", save_torch(real))):
                path = root / f"{base['architecture']}.{name}.{kind}.safetensors"
                path.write_bytes(weights)
                info = dict(base, tag="x", sha256=hashlib.sha256(weights).hexdigest(), input_size=size)
                info |= dict(mean=[0.5], std=[0.5], model_args=args)
                path.with_suffix(".json").write_text(json.dumps(info))
                attempt(
                    f"metadata of {base['architecture']}: {name}, weights {kind}",
                    lambda path=path: load_model(str(path)),
                )
    for name in (f"local-dir:{root}", "hf-hub:evil/pickles", "../evil", "idpa_cnn.mnist"):
        path = root / "named.safetensors"
        path.write_bytes(odd)
        info = dict(architecture=name, tag="x", sha256=hashlib.sha256(odd).hexdigest(), num_classes=10)
        info |= dict(input_size=[1, 28, 28], mean=[0.5], std=[0.5])
        path.with_suffix(".json").write_text(json.dumps(info))
        attempt(f"metadata: architecture {name}", lambda path=path: load_model(str(path)))


if __name__ == "__main__":
    main(Path(sys.argv[1]), "quick" in sys.argv[2:])
