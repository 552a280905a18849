"""Stages of the input size: a run that begins on smaller images and ends at the network's full size.

Progressive resizing (Howard et al. 2018, fast.ai's DAWNBench entry; Touvron et al. 2019, arXiv:1906.06423, on why
networks distinguish sizes): early epochs on small images cost less. Between two stages

- weights that depend on grid positions are resampled by the network's rule (``CapsuleNet.fit_to_size``), all others
  stay;
- the momentum (and any other optimiser state) of the resampled tensors is reset, that of the others stays;
- the statistics of BatchNorm and the moving average of the weights are reset.

A change of stage is a function of the checkpoint at its first update, so a run that was killed there resumes exactly.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from capszoo.data import DatasetSpec, ImageSet, StreamedSet
from capszoo.data.specs import Side, both_sides
from capszoo.models._inspect import frozen_modules

from ..config import Recipe, RecipeError
from .setup import RunData


@dataclass(frozen=True)
class Stage:
    """A part of a run on images of one size.

    Attributes:
        number: counted from 0.
        size: side, or rows and columns, of the images in pixels; None: the data set's.
        first_epoch, end_epoch: first epoch, and the one after the last, counted from 0.
        cutout: side of the cutout square in pixels; None: the recipe's.
    """

    number: int
    size: Side | None
    first_epoch: int
    end_epoch: int
    cutout: int | None = None


def all_stages(recipe: Recipe) -> list[Stage]:
    """The stages of a recipe in order; the last is at the full size."""
    stages: list[Stage] = []
    begin = 0
    for number, stage in enumerate(recipe.stages):
        stages.append(Stage(number, stage.size, begin, begin + stage.epochs, stage.cutout))
        begin += stage.epochs
    return [*stages, Stage(len(stages), recipe.data.size, begin, recipe.epochs)]


def stage_at(recipe: Recipe, epoch: int) -> Stage:
    """The stage of an epoch, counted from 0; that of the last epoch for any later one."""
    return next((stage for stage in all_stages(recipe) if epoch < stage.end_epoch), all_stages(recipe)[-1])


def stage_spec(spec: DatasetSpec, stage: Stage) -> DatasetSpec:
    """Specification of the network's input in a stage."""
    if stage.size is None:
        return spec
    return replace(spec, input_size=(spec.input_size[0], *both_sides(stage.size)))


def staged_data(recipe: Recipe, data: RunData, stage: Stage) -> tuple[Any, Any]:
    """Training and validation images of a stage.

    Raises:
        RecipeError: these images cannot be resized.
    """
    if not recipe.stages or stage.number == len(recipe.stages):
        return data.training, data.validation

    def resized(images: ImageSet | StreamedSet) -> ImageSet | StreamedSet:
        cropped = recipe.data.augment.resize or images.size != tuple(images.spec.input_size[1:])
        if isinstance(images, StreamedSet) or images.composer or cropped:
            raise RecipeError(
                f"{recipe.name}: stages resize whole images that are held in memory, so they do not work with "
                "streamed, composed or cropped images (data.augment.resize, smallNORB): leave stages out"
            )
        assert stage.size is not None
        return replace(images.resized(both_sides(stage.size)[0]), spec=stage_spec(images.spec, stage))

    return resized(data.training), resized(data.validation) if len(data.validation) else data.validation


def fit_weights(
    recipe: Recipe, net: nn.Module, weights: Mapping[str, Tensor], size: tuple[int, int]
) -> tuple[dict[str, Tensor], tuple[str, ...]]:
    """Adapt weights of the network at another image size to this network.

    Args:
        recipe: the recipe.
        net: the network at the new size.
        weights: its state dict at the old size.
        size: old height and width of the images in pixels.

    Returns:
        The state dict for ``net``, and the names of the tensors that were resampled.

    Raises:
        RecipeError: the network has weights that depend on the size, and no rule to resample them.
    """
    try:
        if hasattr(net, "fit_to_size"):
            fitted: tuple[dict[str, Tensor], tuple[str, ...]] = net.fit_to_size(weights, size)  # type: ignore[operator]
            return fitted
        state = net.state_dict()
        unfit = [name for name, value in weights.items() if state[name].shape != value.shape]
        if unfit:
            raise ValueError(
                f"{unfit[0]} depends on the image size, and {type(net).__name__} has no rule for it"
            )
    except ValueError as error:
        raise RecipeError(f"{recipe.name}: stages: {error}: leave stages out") from error
    return dict(weights), ()


def reset_batch_norm(net: nn.Module) -> None:
    """Reset the running statistics of BatchNorm, except in frozen modules, which would not collect new ones."""
    kept = {part for module in frozen_modules(net) for part in module.modules()}
    for module in net.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module not in kept:
            module.reset_running_stats()


def optimizer_state_without(
    optimizer: Any, net: nn.Module, state: Mapping[str, Any], names: tuple[str, ...]
) -> dict[str, Any]:
    """An optimiser's state dict without the state of some parameters (momentum, moments).

    Args:
        optimizer: the new optimiser, whose groups have the parameters in the order of ``state``.
        net: the net with its parameters.
        state: the state dict.
        names: names of the parameters to omit.
    """
    left_out = {id(parameter) for name, parameter in net.named_parameters() if name in names}
    numbers: dict[int, Any] = {}
    for group, saved in zip(optimizer.param_groups, state["param_groups"], strict=True):
        numbers.update(zip(saved["params"], group["params"], strict=True))
    kept = {number: value for number, value in state["state"].items() if id(numbers[number]) not in left_out}
    return {**state, "state": kept}
