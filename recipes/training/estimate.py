"""Estimate the duration of a recipe on this machine: time a few updates on random images, times the run's updates.

The first update of a run is estimated from a few images, since nothing else can be said before it is over.
"""

from __future__ import annotations

import copy
import time
from contextlib import nullcontext
from dataclasses import dataclass, replace

import torch
from torch import nn

from capszoo._utils.devices import default_device
from capszoo._utils.process import keep_freed_memory
from capszoo.data import DataError, DatasetSpec, dataset_spec
from capszoo.data.specs import both_sides

from ..config import Recipe, RecipeError
from .setup import create_feedback, create_net, create_optimizer, memory_layout
from .step import TrainStep, create_step

#: Number of timed updates, after one untimed update.
TIMED = 2
#: Images that the first update is estimated from: its duration grows linearly with them.
FEW = (2, 4)
#: Seconds of an update from which its duration is worth a line.
SLOW = 10.0


@dataclass(frozen=True)
class Estimate:
    """Estimated cost of a run.

    Attributes:
        device: device of the timed updates.
        parameters: of the network, including parts used only in training.
        images: training images per epoch; None if the data set does not state their number.
        updates: of the whole run; None in the same case.
        seconds_per_update: measured, on random images, without reading, augmentation, compilation and evaluation.
    """

    device: str
    parameters: int
    images: int | None
    updates: int | None
    seconds_per_update: float

    @property
    def seconds(self) -> float | None:
        """Duration of the whole run."""
        return None if self.updates is None else self.updates * self.seconds_per_update


def estimate(recipe: Recipe, cpu: bool = False, threads: int | None = None) -> Estimate:
    """Time a few updates of a recipe.

    Args:
        recipe: a recipe for a data set whose specification is known by its name.
        cpu: do not use an accelerator.
        threads: CPU threads; None: PyTorch's number.

    Raises:
        DataError: a data set that is known only after reading its files (a folder of images).
        RecipeError: a model or loss that cannot be created.
    """
    threads_before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads or threads_before)
        return _estimate(recipe, torch.device("cpu") if cpu else default_device())
    finally:
        torch.set_num_threads(threads_before)


def _estimate(recipe: Recipe, device: torch.device) -> Estimate:
    if device.type == "cpu":
        keep_freed_memory()
    spec = dataset_spec(recipe.data.name)
    if not spec.num_classes:
        raise DataError(f"the number of classes of {recipe.data.name} is known once its files are read")
    if recipe.data.size:
        spec = replace(spec, input_size=(spec.input_size[0], *both_sides(recipe.data.size)))
    count = spec.counts.get("train") or None  # 0: depends on the copy
    carved = 0 if recipe.data.validation == "own" else recipe.data.val_size
    if count is not None and carved >= count:
        raise RecipeError(
            f"{recipe.name}: data.val_size {carved:,} leaves none of {count:,} images to train on"
        )
    torch.manual_seed(recipe.seed)
    net = create_net(recipe, spec).to(device).to(memory_format=memory_layout(recipe))  # type: ignore[call-overload]
    feedback = create_feedback(recipe, net)
    plain = recipe.model_copy(update={"compile": False})
    step = create_step(plain, net, feedback, spec.multi_label).train()
    optimizer = create_optimizer(recipe, net, feedback)
    part = recipe.batch_size // recipe.accumulate
    seconds = 0.0
    for number in range(1 + TIMED):
        start = time.perf_counter()
        for _ in range(recipe.accumulate):
            _gradients(recipe, step, spec, part, device)
        optimizer.step()
        optimizer.zero_grad()
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds += (time.perf_counter() - start) if number else 0.0
    images_of_epoch = None if count is None else min(recipe.data.limit or count, count - carved)
    updates = None if images_of_epoch is None else images_of_epoch // recipe.batch_size * recipe.epochs
    parameters = sum(p.numel() for p in net.parameters())
    return Estimate(str(device), parameters, images_of_epoch, updates, seconds / TIMED)


def first_update(recipe: Recipe, net: nn.Module, spec: DatasetSpec) -> float | None:
    """Seconds of an update on a CPU, by a few images; None if it is short.

    The network and the random numbers of the run stay as they are.

    Args:
        recipe: of the run.
        net: its network; a copy computes.
        spec: of its images, with the size that it is trained at.
    """
    if recipe.batch_size <= max(FEW):
        return None
    with torch.random.fork_rng(devices=[]):
        net = copy.deepcopy(net)
        step = create_step(recipe, net, create_feedback(recipe, net), spec.multi_label).train()

        def seconds(images: int) -> float:
            start = time.perf_counter()
            _gradients(recipe, step, spec, images, torch.device("cpu"))
            return time.perf_counter() - start

        seconds(FEW[0])  # an engine's first call may compile it
        few = seconds(FEW[0])
        # what all updates cost alike is counted for each image here
        if few / FEW[0] * recipe.batch_size < SLOW:
            return None
        a_image = max(0.0, seconds(FEW[1]) - few) / (FEW[1] - FEW[0])
    total = few + a_image * (recipe.batch_size - FEW[0])
    return total if total >= SLOW else None


def _gradients(recipe: Recipe, step: TrainStep, spec: DatasetSpec, count: int, device: torch.device) -> None:
    """A forward and a backward pass on random images."""
    images, *others = _random_batch(spec, count, device)
    half = recipe.precision in ("bf16", "fp16")
    with torch.autocast(device.type, torch.bfloat16) if half else nullcontext():
        loss, _ = step(images.contiguous(memory_format=memory_layout(recipe)), *others)
    loss.backward()


def _random_batch(spec: DatasetSpec, count: int, device: torch.device) -> tuple[torch.Tensor, ...]:
    """Inputs of ``TrainStep``: images, labels, pixels; for images with several labels also images of each object."""
    images = torch.randn(count, *spec.input_size, device=device)
    pixels = torch.randint(0, 256, images.shape, device=device, dtype=torch.uint8)
    classes = torch.arange(count, device=device) % spec.num_classes
    if not spec.multi_label:
        return images, classes, pixels
    both = torch.stack([classes, (classes + 1) % spec.num_classes], 1)  # [b, 2]
    labels = torch.zeros(count, spec.num_classes, device=device).scatter_(1, both, 1.0)
    return images, labels, pixels, torch.stack([pixels, pixels], 1), both
