"""One update of the weights: the net and its loss as one module, gradients, optimiser."""

from __future__ import annotations

import hashlib
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from capszoo._utils.devices import inductor_options
from capszoo.data import Batch
from capszoo.losses import create_loss, reconstruction_loss
from capszoo.models._feedback import FeedbackAgreement

from ..config import Recipe, RecipeError
from ..evaluation.metrics import all_right
from ..evaluation.target import score_threshold
from .state import Run, TrainState


def create_step(
    recipe: Recipe, net: nn.Module, feedback: FeedbackAgreement | None, multi_label: bool
) -> TrainStep:
    """The step of a recipe.

    Raises:
        RecipeError: the loss does not exist, or does not fit its options, the network or the labels.
    """
    decodes = getattr(net, "decoder", None) is not None
    if recipe.loss.reconstruction and not decodes:
        raise RecipeError(
            f"{recipe.name}: loss.reconstruction needs a decoder: set model_args.decoder, or leave it out"
        )
    if decodes and not recipe.loss.reconstruction and recipe.init is None:
        raise RecipeError(
            f"{recipe.name}: model_args.decoder is not trained without loss.reconstruction: set its weight (the "
            "papers': 0.0005), or leave the decoder out"
        )
    if multi_label and recipe.loss.name == "spread":
        raise RecipeError(
            f"{recipe.name}: loss.name: spread is for images with one label: use margin, bce or cross_entropy"
        )
    try:
        return TrainStep(net, recipe, feedback)
    except (TypeError, ValueError) as error:
        raise RecipeError(f"{recipe.name}: loss {recipe.loss.name}: {error}") from error


def one_value_error(error: ValueError) -> ValueError:
    """The error for the user if a BatchNorm had one value per channel, else the same error."""
    if "more than 1 value per channel" not in str(error):  # of torch's batch_norm
        return error
    return RecipeError(
        "BatchNorm has no variance of one value: raise batch_size, so that each part of a batch has two images"
    )


class TrainStep(nn.Module):
    """The net and its loss as one module, so that Accelerate's precision and processes wrap the whole step."""

    net: Any
    reconstruct: Any
    forward_poses: Any

    def __init__(self, net: Any, recipe: Recipe, feedback: FeedbackAgreement | None = None) -> None:
        super().__init__()
        self.use(net)
        if recipe.compile:
            how = _compile_options(recipe, net)
            self.net = torch.compile(net, **how)
            if recipe.loss.reconstruction:
                # a compiled net compiles only its `forward`
                self.forward_poses = torch.compile(self.forward_poses, **how)
        self.feedback = feedback
        self.criterion: Any = create_loss(recipe.loss.name, **recipe.loss.options)
        self.reconstruction = recipe.loss.reconstruction

    def use(self, net: Any) -> None:
        """Run ``net`` as it is, without compilation."""
        self.net = net
        self.reconstruct = getattr(net, "reconstruct", None)
        self.forward_poses = getattr(net, "forward_poses", None)

    def set_progress(self, progress: float) -> None:
        """Set the completed share of the training, for a loss that depends on it."""
        if hasattr(self.criterion, "set_progress"):
            self.criterion.set_progress(progress)

    def forward(
        self,
        images: Tensor,
        labels: Tensor,
        pixels: Tensor,
        parts: Tensor | None = None,
        part_labels: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return the loss (mean over the batch, a scalar) and the scores [b, n]. Arguments as in ``Batch``."""
        try:
            scores, poses = self.forward_poses(images) if self.reconstruction else (self.net(images), None)
        except ValueError as error:
            raise one_value_error(error) from error
        loss: Tensor = self.criterion(scores.float(), labels)
        if self.feedback is not None:  # of the forward pass that computed the scores
            loss = loss + self.feedback()
        if poses is None:
            return loss, scores
        if parts is None or part_labels is None:
            return loss + self._rebuilding(poses, labels, pixels), scores
        # Several objects: the decoder runs once for each, with that object alone as its target.
        for part, label in zip(parts.unbind(1), part_labels.unbind(1), strict=True):
            loss = loss + self._rebuilding(poses, label, part)
        return loss, scores

    def _rebuilding(self, poses: Tensor, labels: Tensor, pixels: Tensor) -> Tensor:
        """Reconstruction loss of images [b, c, h, w] from the capsules of ``labels`` [b]; -1 contributes nothing."""
        rebuilt = self.reconstruct(poses, labels.clamp(min=0)).float()
        rebuilt = torch.where((labels >= 0)[:, None, None, None], rebuilt, 0.0)  # -1: black pixels
        return reconstruction_loss(rebuilt, pixels.float() / 255, self.reconstruction)


def _compile_options(recipe: Recipe, net: nn.Module) -> dict[str, Any]:
    """Arguments of torch.compile for a recipe's network."""
    if isinstance(recipe.compile, str):
        return {"mode": recipe.compile}
    device_type = next(net.parameters()).device.type
    return {"options": inductor_options(device_type, channels_last=recipe.channels_last)}


def seed_update(seed: int, step: int, rank: int) -> None:
    """Seed the net's random numbers (dropout) for one update, so that they are not part of the checkpoint."""
    digest = hashlib.sha256(f"update/{seed}/{step}/{rank}".encode()).digest()
    torch.manual_seed(int.from_bytes(digest[:8], "big") >> 1)


def train_step(run: Run, state: TrainState, batch: Batch) -> Tensor:
    """Perform update number ``state.step``, counted from 0, and return its loss."""
    seed_update(run.recipe.seed, state.step, run.accelerator.process_index)
    if state.scheduler:
        state.scheduler.step_update(state.step)
    state.step_module.set_progress(state.step / run.total)
    loss = _update(run, state, batch)
    if state.ema:
        state.ema.update(state.net, step=state.step - state.first_step(run))
    return loss


def _update(run: Run, state: TrainState, batch: Batch) -> Tensor:
    """Update the weights once from one batch, in parts; add to ``state.sums`` and return the mean loss (a scalar)."""
    recipe, accelerator = run.recipe, run.accelerator
    mean_loss = torch.zeros((), device=run.device)
    labels_per_image = run.data.training.spec.labels_per_image
    threshold = score_threshold(recipe.loss.name)
    for number, part in enumerate(batch.chunk(recipe.accumulate), start=1):
        share = len(part.labels) / len(batch.labels)
        # Gradients are synchronised between processes only with the last part.
        unsynced = number < recipe.accumulate
        with accelerator.no_sync(state.ddp_module) if unsynced else nullcontext():
            images = part.images.contiguous(memory_format=run.layout)
            loss, scores = state.ddp_module(images, *part[1:])
            accelerator.backward(loss * share)
        mean_loss += loss.detach() * share
        state.sums[1] += all_right(scores.detach(), part.labels, labels_per_image, threshold).sum()
    if recipe.clip_grad:
        accelerator.clip_grad_norm_(state.ddp_module.parameters(), recipe.clip_grad)
    state.optimizer.step()
    state.optimizer.zero_grad()
    state.sums[0] += mean_loss * len(batch.labels)
    state.sums[2] += len(batch.labels)
    return mean_loss


def learning_rate(optimizer: torch.optim.Optimizer) -> float:
    """The learning rate; the highest one if layers have different rates."""
    return max(group["lr"] for group in optimizer.param_groups)
