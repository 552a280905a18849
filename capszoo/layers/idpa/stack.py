"""IDPA layers routed together (Procedure 2), limited to the dependency cone of the last one."""

from collections import OrderedDict
from typing import List, Optional, Tuple, Union

import torch
from torch import Tensor, nn

from .._forward_methods import ForwardMethods, forward_method
from .._modules import at_least
from .._precision import upcast_half
from .layers import FCIDPA, ConvIDPA

torch.fx.wrap("upcast_half")


class IDPAStack(ForwardMethods, nn.Sequential):
    """Capsule layers routed together (Procedure 2).

    Args:
        layers: :class:`ConvIDPA` layers, then :class:`FCIDPA` ones, by name, from the primary capsules' parents up.
        num_iters: routing iterations t.
        routing: ``"concurrent"`` (Procedure 2), or ``"sequential"``: each layer completes all its iterations before
            the next starts (ablation B).
        depth: number of layers of the whole network, which determines the iterations of every layer; defaults to the
            given layers. (A class layer may be missing now and added later, as a child module.)

    Raises:
        ValueError: an argument is out of range.
    """

    def __init__(
        self,
        layers: "OrderedDict[str, nn.Module]",
        num_iters: int = 2,
        routing: str = "concurrent",
        depth: Optional[int] = None,
    ) -> None:
        super().__init__(layers)
        at_least(1, num_iters=num_iters)
        if routing not in ("concurrent", "sequential"):
            raise ValueError(f"routing must be 'concurrent' or 'sequential', not {routing!r}")
        self.num_iters = num_iters
        self.routing = routing
        self.depth = len(layers) if depth is None else depth

    def iterations(self, level: int, full: bool = False) -> int:
        """Iterations of layer ``level`` (from 0): those in the last layer's dependency cone, or all with ``full``."""
        if full or self.routing == "sequential":
            return self.num_iters
        return max(1, self.num_iters - (self.depth - 1 - level))

    def forward(self, x: Tensor) -> Tensor:
        """Primary capsules ``[b, h, w, i, d]`` to the last layer's poses, ``[b, j, e]`` or ``[b, h', w', j, e]``."""
        poses, _ = self._run(x, None, self.depth)
        return poses

    @torch.jit.export
    @forward_method
    def run(self, x: Tensor, activation: Optional[Tensor], layers: int) -> Tuple[Tensor, Optional[Tensor]]:
        """Poses and activations of layer ``layers`` (from 1), after the iterations that the last layer depends on.

        Args:
            x: primary capsules, ``[b, h, w, i, d]``.
            activation: of the primary capsules, ``[b, h, w, i]``; None unless the layers have activations.
            layers: how many layers to run.
        """
        return self._run(x, activation, layers)

    def _run(self, x: Tensor, activation: Optional[Tensor], layers: int) -> Tuple[Tensor, Optional[Tensor]]:
        children = [x]
        activations: List[Tensor] = []
        if activation is not None:
            activations.append(activation)
        for level, layer in enumerate(self):
            if level < layers:
                children, activations, _ = layer.route(children, activations, self.iterations(level), False)  # type: ignore[operator]
                if self.routing == "sequential":
                    children = children[-1:]
                    activations = activations[-1:]
        last: Optional[Tensor] = None
        if len(activations) > 0:
            last = activations[-1]
        return children[-1], last

    @forward_method
    def run_full(
        self, x: Tensor, activation: Optional[Tensor] = None, full: bool = True
    ) -> Tuple[List[Tensor], List[Tensor], List[Tensor]]:
        """Last poses, activations and couplings of every layer.

        Args:
            x, activation: as in :meth:`run`.
            full: run all iterations of every layer; else those in the dependency cone of the last layer, whose
                poses and couplings are the same either way.

        Returns:
            Poses, activations (empty without activations) and couplings of each layer, as returned by its ``route()``;
            even couplings for a layer whose only iteration was a sum of votes.
        """
        return self._run_full(x, activation, full)

    def _run_full(
        self, x: Tensor, activation: Optional[Tensor], full: bool
    ) -> Tuple[List[Tensor], List[Tensor], List[Tensor]]:
        children, activations = [x], [] if activation is None else [activation]
        poses: List[Tensor] = []
        active: List[Tensor] = []
        couplings: List[Tensor] = []
        for level, layer in enumerate(self._typed()):
            children, activations, c = layer.route(children, activations, self.iterations(level, full))
            if self.routing == "sequential":
                children, activations = children[-1:], activations[-1:]
            poses.append(children[-1])
            active += activations[-1:]
            couplings.append(layer.even_couplings(children[-1]) if c is None else c)
        return poses, active, couplings

    @forward_method
    def shares(self, x: Tensor, activation: Optional[Tensor] = None, even: bool = False) -> Tensor:
        """Share of each primary capsule in each of the last layer's: ``[b, n, h, w, i]``, summing to 1 over h, w, i.

        A parent's share is divided among its children in proportion to their couplings with it, from the last layer
        down. The couplings are those that reach the last layer: if its dependency cone contains only one iteration of
        a layer, that layer divides evenly.

        Args:
            x, activation: as in :meth:`run`; the last layer is fully connected.
            even: return the shares for even couplings everywhere, ``[1, 1, h, w, i]``: how many windows see a capsule.
        """
        poses, _, couplings = self._run_full(x, activation, False)
        layers = self._typed()
        n = poses[-1].shape[1]
        share = torch.eye(n, dtype=upcast_half(x).dtype, device=x.device).expand(x.shape[0], n, n)
        if even:
            couplings = [layer.even_couplings(p[:1]) for layer, p in zip(layers, poses, strict=True)]
            share = share[:1, :1]
        for level in range(len(layers) - 1, -1, -1):
            layer, c = layers[level], upcast_half(couplings[level])
            if isinstance(layer, FCIDPA):
                share = layer.share_among_children(share, c)
            else:
                height, width = (poses[level - 1] if level > 0 else x).shape[1:3]
                share = layer.share_among_children(share, c, height, width)
        share = share.reshape(share.shape[0], share.shape[1], x.shape[1], x.shape[2], x.shape[3])
        return share / share.sum(dim=(2, 3, 4), keepdim=True)

    def _typed(self) -> "List[Union[ConvIDPA, FCIDPA]]":
        return [layer for layer in self if isinstance(layer, (ConvIDPA, FCIDPA))]

    def extra_repr(self) -> str:
        return f"num_iters={self.num_iters}, routing={self.routing}"
