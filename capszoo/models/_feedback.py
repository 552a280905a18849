"""Feedback agreement on any backbone: a training loss between named feature levels, absent at inference.

Paper: Li, Guo, Dai, Ouyang, Wang, "Neural Network Encapsulation" (2018), section 3.2. The units themselves are in
``capszoo/layers/sinkhorn.py``; this file determines the shapes, records the model's outputs with forward hooks and
adds up the units' losses::

    feedback = FeedbackAgreement(model, [("layer1", "layer2"), ("layer2", "layer3")])
    optimizer = torch.optim.Adam([*model.parameters(), *feedback.parameters()])
    scores = model(images)                       # training mode: the named outputs are recorded
    loss = criterion(scores, labels) + feedback()
    ...
    feedback.remove()                            # restores the model

The model's parameters, buffers and state dict never change. Copies of the model (deepcopy, pickle; an
averaged model) contain no recording hooks. Remove the feedback before scripting, tracing or exporting.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from capszoo._pretrained.facts import model_input_size
from capszoo.errors import unknown_name
from capszoo.layers._modules import non_negative
from capszoo.layers.sinkhorn import SinkhornUnit
from capszoo.models._inspect import evaluating


class _Silent:
    """Replaces a hook in a copy of the model; does nothing."""

    def __call__(self, *args: Any) -> None:
        return None


class _Hook:
    """A hook that is not copied with its model."""

    def __init__(self, store: dict[str, Tensor], name: str) -> None:
        self.store = store
        self.name = name

    def __reduce__(self) -> tuple[type, tuple]:
        return (_Silent, ())


class _Begin(_Hook):
    """Before the model's forward: clear the previous features and start recording.

    Inputs on the meta device are skipped: ``engine_report`` must not replace the features of a training step.
    """

    def __call__(self, module: nn.Module, args: Any) -> None:
        if not module.training or (args and isinstance(args[0], Tensor) and args[0].is_meta):
            return
        self.store.clear()
        self.store[_LISTENING] = torch.empty(0)


class _End(_Hook):
    """After the model's forward: stop recording (recomputation by gradient checkpointing must not be recorded)."""

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        self.store.pop(_LISTENING, None)


class _Keep(_Hook):
    """After a named module: record its output."""

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        if _LISTENING in self.store:
            self.store[self.name] = output


_LISTENING = "(listening)"


class FeedbackAgreement(nn.Module):
    """Units between pairs of feature levels of a model; calling it returns the loss of the last training forward.

    Under autocast, call it inside the same autocast block as the model: its weights are float32, the features are not.

    Args:
        model: any network. Only its outputs are recorded: its parameters are not part of this module.
        pairs: names of (lower, higher) modules, as in ``model.named_modules()``; their outputs are compared.
        weight: factor of the sum of all units: 10 in the paper, 1 by default in its release.
        groups: capsule channels of the generators; the greatest common divisor with a pair's channels is used.
        generator, critic, metric, num_iters, epsilon, cost, bias_fix, backprop_plan: of
            :class:`~capszoo.layers.sinkhorn.SinkhornUnit`.
        input_size: ``(c, h, w)`` of the dry run that determines the shapes; defaults to the model's.
        layout: of the features: ``"nchw"``, ``"nhwc"`` (Swin), or ``"nlc"``, tokens of a square grid without the first
            ``model.num_prefix_tokens`` (ViT).

    Raises:
        ValueError: an unknown name, an output that is no feature map, or a pair whose grid sizes do not match; an
            argument out of range; or a model that states no input size, without ``input_size``.
    """

    def __init__(
        self,
        model: nn.Module,
        pairs: Sequence[tuple[str, str]],
        weight: float = 10.0,
        groups: int = 32,
        generator: str = "capsule",
        critic: bool = True,
        metric: str = "sinkhorn",
        num_iters: int = 10,
        epsilon: float = 1.0,
        cost: str = "cosine",
        bias_fix: bool = True,
        backprop_plan: bool = False,
        input_size: tuple[int, int, int] | None = None,
        layout: str = "nchw",
    ) -> None:
        super().__init__()
        if layout not in ("nchw", "nhwc", "nlc"):
            raise ValueError(f"layout must be 'nchw', 'nhwc' or 'nlc', not {layout!r}")
        if not pairs:
            raise ValueError("pairs must name at least one (lower, higher) pair of modules")
        non_negative(weight=weight)
        self.pairs = [(str(low), str(high)) for low, high in pairs]
        self.weight = weight
        self.layout = layout
        self.prefix = int(getattr(model, "num_prefix_tokens", 0)) if layout == "nlc" else 0
        self._features: dict[str, Tensor] = {}
        self._handles: list[RemovableHandle] = []

        modules = dict(model.named_modules())
        for name in dict.fromkeys(name for pair in self.pairs for name in pair):
            if name not in modules or not name:
                raise ValueError(unknown_name("module", name, (n for n in modules if n)))
        self._listen(model, modules)
        try:
            shapes = self._dry_run(model, input_size)
            self.units = nn.ModuleList()
            like = next(model.parameters())
            for low, high in self.pairs:
                low_chans, *low_grid = shapes[low]
                high_chans, *high_grid = shapes[high]
                unit = SinkhornUnit(
                    low_chans,
                    high_chans,
                    _stride(low, low_grid, high, high_grid),
                    math.gcd(groups, low_chans, high_chans),
                    generator,
                    critic,
                    metric,
                    num_iters,
                    epsilon,
                    cost,
                    bias_fix,
                    backprop_plan,
                )
                self.units.append(unit.to(device=like.device, dtype=like.dtype))
        except BaseException:
            self.remove()
            raise

    def _listen(self, model: nn.Module, modules: dict[str, nn.Module]) -> None:
        store = self._features
        self._handles.append(model.register_forward_pre_hook(_Begin(store, "")))
        for name in dict.fromkeys(name for pair in self.pairs for name in pair):
            self._handles.append(modules[name].register_forward_hook(_Keep(store, name)))
        # even if the forward raises, the hooks must be removed
        self._handles.append(model.register_forward_hook(_End(store, ""), always_call=True))

    def _dry_run(
        self, model: nn.Module, input_size: tuple[int, int, int] | None
    ) -> dict[str, tuple[int, ...]]:
        """Shape ``(c, h, w)`` of every named feature, from one forward pass without side effects on the model."""
        like = next(model.parameters())
        size = input_size or model_input_size(model)
        self._features[_LISTENING] = torch.empty(0)
        try:
            with evaluating(model), torch.no_grad():
                # bypass the model's hooks: its pre-hook would see evaluation mode and not record
                model.forward(torch.zeros(1, *size, device=like.device, dtype=like.dtype))
            taken = {name: tuple(feature.shape[1:]) for name, feature in self._maps().items()}
        finally:
            self._features.clear()
        for low, high in self.pairs:
            for name in (low, high):
                if name not in taken:
                    raise ValueError(f"module '{name}' was not called in the forward: name one that is")
        return taken

    def _maps(self) -> dict[str, Tensor]:
        """The recorded outputs as feature maps."""
        return {name: self._as_map(name, f) for name, f in self._features.items() if name != _LISTENING}

    def _as_map(self, name: str, feature: Any) -> Tensor:
        """A recorded output as a feature map ``[b, c, h, w]``."""
        rank = 3 if self.layout == "nlc" else 4
        if not isinstance(feature, Tensor) or feature.dim() != rank:
            kind = f"shape {tuple(feature.shape)}" if isinstance(feature, Tensor) else type(feature).__name__
            raise ValueError(
                f"the output of '{name}' ({kind}) is no feature map in layout '{self.layout}': "
                "name another module, or set layout"
            )
        if self.layout == "nhwc":
            return feature.permute(0, 3, 1, 2)
        if self.layout == "nlc":
            tokens = feature[:, self.prefix :]
            side = math.isqrt(tokens.shape[1])
            if side * side != tokens.shape[1]:
                raise ValueError(f"the {tokens.shape[1]} tokens of '{name}' are no square grid")
            return tokens.transpose(1, 2).unflatten(2, (side, side))
        return feature

    def losses(self) -> list[Tensor]:
        """The loss of each pair, unweighted, of the model's last forward in training mode.

        Raises:
            RuntimeError: no forward in training mode since the last call, or the feedback was removed.
        """
        missing = [name for pair in self.pairs for name in pair if name not in self._features]
        if missing:
            raise RuntimeError(
                "nothing to compare: call the model in training mode first"
                + ("" if self._handles else " (this feedback was removed from its model)")
            )
        features = self._maps()
        self._features.clear()
        return [
            unit(features[low], features[high])
            for unit, (low, high) in zip(self.units, self.pairs, strict=True)
        ]

    def forward(self) -> Tensor:
        """The weighted sum over all pairs, a scalar to add to the criterion; available once per forward."""
        return self.weight * torch.stack(self.losses()).sum()

    def remove(self) -> None:
        """Remove every hook from the model."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._features.clear()

    def extra_repr(self) -> str:
        return f"weight={self.weight:g}, " + ", ".join(f"{low} <- {high}" for low, high in self.pairs)


def _stride(low: str, low_grid: Sequence[int], high: str, high_grid: Sequence[int]) -> tuple[int, int]:
    """Ratio of the lower to the higher grid size, per axis."""
    strides = []
    for a, b in zip(low_grid, high_grid, strict=True):
        stride = math.ceil(a / b)
        if b > a or math.ceil(a / stride) != b:
            raise ValueError(
                f"'{high}' has a grid of {high_grid[0]}x{high_grid[1]}, which is not that of '{low}' "
                f"({low_grid[0]}x{low_grid[1]}) divided by a whole number: name another pair"
            )
        strides.append(stride)
    return strides[0], strides[1]


def encapnet_feedback(model: nn.Module, units: int = 1, **options: Any) -> FeedbackAgreement:
    """The paper's units on an ``encapnet_*`` model; on ``resnet18_encap``, whose places it does not state, our choice.

    Args:
        model: a model with ``feedback_pairs``.
        units: 1 (Table 3, row c) or 2 per module (row 8; at 32x32 pixels the second one of the last module, whose
            maps have 4x4 positions, has no gradient: see :class:`capszoo.layers.SinkhornUnit`).
        **options: arguments of :class:`FeedbackAgreement`.

    Raises:
        TypeError: the model has no ``feedback_pairs``.
        ValueError: ``units`` is neither 1 nor 2, or as for :class:`FeedbackAgreement`.
    """
    pairs = getattr(model, "feedback_pairs", None)
    if pairs is None:
        raise TypeError(
            f"{type(model).__name__} has no feedback_pairs: use FeedbackAgreement(model, pairs=[(lower, higher), …])"
        )
    return FeedbackAgreement(model, pairs(units), **options)
