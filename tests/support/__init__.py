"""What tests of several folders (and benchmarks) use: packed real images, models that saw noise, scripts as modules."""

from __future__ import annotations

import functools
import importlib.util
import io
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn
from torch._library.custom_ops import OPDEFS
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from capszoo.data import ImageSet, dataset_spec
from capszoo.data.sources import compose

#: Files of the first 1,000 images of a test set, in tests/fixtures.
PACKED = {name: f"{name}_test_1000.npz" for name in ("mnist", "fashion_mnist", "cifar10", "cifar100")}


def is_packed(name: str) -> bool:
    """Whether a data set, or the one that it is composed from, is among the packed ones."""
    return name in PACKED or dataset_spec(name).base in PACKED


@functools.cache
def packed(root: Path, name: str) -> ImageSet:
    """The first 1,000 images of a test set, out of the checkout `root`; or 1,000 composed from them."""
    spec = dataset_spec(name)
    if name not in PACKED:
        return compose(spec, "test", packed(root, spec.base))
    arrays = np.load(root / "tests" / "fixtures" / PACKED[name])
    channels, rows, cols = spec.input_size
    if "webp" in arrays:  # a mosaic of all images, without loss
        mosaic = torch.from_numpy(np.asarray(Image.open(io.BytesIO(arrays["webp"].tobytes()))).copy())
        tiles = mosaic.unflatten(0, (-1, rows)).unflatten(2, (-1, cols))  # [down, h, across, w, c]
        images = tiles.permute(0, 2, 4, 1, 3).flatten(0, 1).contiguous()
    else:
        images = torch.from_numpy(arrays["images"]).reshape(-1, channels, rows, cols)
    return ImageSet(spec, "test", images, torch.from_numpy(arrays["labels"]).long())


def warm(model: nn.Module, images: Tensor, damping: float = 1.0) -> None:
    """Give every BatchNorm the statistics of these images, as training would; the model is in eval mode then.

    With the initial ones a deep ResNet's numbers double with each block, and leave float16 behind; a deep EncapNet's
    scores are all but zero, and equal.

    Args:
        model: changed in place; its BatchNorms follow the last batch from now on.
        images: ``[b, c, h, w]``, noise will do.
        damping: the variances are those of the images times this.
    """
    norms = [module for module in model.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]
    for norm in norms:
        norm.momentum = 1.0
    if norms:
        with torch.no_grad():
            model.train()(images)
    for norm in norms:
        if norm.running_var is not None:
            norm.running_var *= damping
    model.eval()


def no_home(monkeypatch: pytest.MonkeyPatch) -> None:
    """A user without a home folder, as a container may have, and without a named cache."""
    for name in ("CAPSZOO_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)

    def refuse() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", refuse)


def load_script(path: Path) -> ModuleType:
    """A script as a module."""
    spec = importlib.util.spec_from_file_location(f"script_{path.stem}", path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


class LargestTensor(TorchDispatchMode):
    """Counts the elements of the largest tensor's storage; what our own operators call inside is seen, too."""

    numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "capszoo":
            with self:
                return OPDEFS[func._schema.name]._init_fn(*args, **(kwargs or {}))
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor):
                self.numel = max(self.numel, leaf.untyped_storage().nbytes() // leaf.element_size())
        return out
