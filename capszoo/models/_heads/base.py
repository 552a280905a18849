"""The table of heads, and the base of them all."""

import inspect
from typing import Any, Callable, ClassVar, Dict, List, NamedTuple, Optional, Set, Tuple, Type, TypeVar

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from capszoo.errors import unknown_name
from capszoo.layers._forward_methods import ForwardMethods, forward_method
from capszoo.layers._modules import at_least

from ...errors import NoCapsules
from .._base import NO_NAMES, CouplingLayout, Votes
from .._blocks import ConvBnAct, init_conv_weights

#: Routings available for a head, by name.
HEADS: Dict[str, Type["CapsuleHead"]] = {}

_Head = TypeVar("_Head", bound="Type[CapsuleHead]")


def register_head(routing: str) -> Callable[[_Head], _Head]:
    """Class decorator: enter a head into :data:`HEADS`."""

    def register(cls: _Head) -> _Head:
        HEADS[routing] = cls
        return cls

    return register


class HeadArgs(NamedTuple):
    """Arguments of every head, see :func:`create_head`."""

    in_chans: int
    grid: Tuple[int, int]
    num_classes: int
    routing: str
    proj_chans: int = 0
    max_grid: int = 0
    drop_rate: float = 0.0


#: Those of them that a user may give.
_COMMON = ("proj_chans", "max_grid", "drop_rate")


class HeadOutput(NamedTuple):
    """Capsule outputs of a head.

    Attributes:
        scores: ``[b, n]``, as ``forward`` returns them.
        poses: class capsules ``[b, n, e]``.
        activations: presence of each class, ``[b, n]``.
        couplings: of each routing layer, in order; see :meth:`CapsuleHead.coupling_layouts`.
        share: ``[b, n, i]``, contribution of each child of the class layer to each class; not normalised, and of any
            sign where the couplings are credit.
    """

    scores: Tensor
    poses: Tensor
    activations: Tensor
    couplings: Tuple[Tensor, ...]
    share: Tensor


def log_probabilities(probabilities: Tensor) -> Tensor:
    """``log(p + 1e-7)``."""
    return (probabilities + 1e-7).log()  # not a clamp, whose gradient would be zero


class ConvNorm(nn.Module):
    """3x3 convolution and BatchNorm, no activation."""

    def __init__(self, in_chans: int, out_chans: int, bias: bool = False) -> None:
        super().__init__()
        self.conv = nn.Conv2d(in_chans, out_chans, 3, 1, 1, bias=bias)
        self.bn = nn.BatchNorm2d(out_chans)

    def forward(self, x: Tensor) -> Tensor:
        return self.bn(self.conv(x))


class CapsuleHead(ForwardMethods):
    """Base of the heads: a feature map ``[b, in_chans, h, w]`` to class scores ``[b, n]``.

    :func:`create_head` creates one.
    """

    #: whether weights depend on ``grid``
    fixed_grid = True
    #: whether there are capsules; the twins have none
    has_capsules = True
    #: what :meth:`coupling_map` normalises
    map_quantity = "coupling"
    #: arguments with which the couplings are even for every image; None if there are none, or nothing else is left
    even: ClassVar[Optional[Dict[str, Any]]] = None
    #: why a head with couplings has no ``even`` arguments
    never_even = "scores classes by its couplings alone"
    #: whether the scores are normalised over the classes, so that a single class would have a constant one
    relative = False
    #: modules behind the class layer that serve any number of classes, and are identities without classes
    readout = NO_NAMES

    def __init__(self, common: HeadArgs) -> None:
        super().__init__()
        in_chans, grid, _, self.routing, proj_chans, max_grid, drop_rate = common
        if in_chans < 1 or min(grid) < 1:
            raise ValueError(f"in_chans and grid must be positive, not {in_chans} and {grid}")
        at_least(0, proj_chans=proj_chans, max_grid=max_grid)
        self.shrink = -(-max(grid) // max_grid) if max_grid else 1
        self.grid = (-(-grid[0] // self.shrink), -(-grid[1] // self.shrink))
        self.project: nn.Module = ConvBnAct(in_chans, proj_chans, 1) if proj_chans else nn.Identity()
        self.chans = proj_chans or in_chans
        self.head_drop = nn.Dropout(drop_rate)

    def _ready(self, num_classes: int) -> None:
        """Last call of every ``__init__``: initialise the convolutions, create the class layer."""
        init_conv_weights(self)
        self.classes: Any = self.make_classes(num_classes)

    def make_classes(self, num_classes: int) -> nn.Module:
        """A new class layer; an identity for 0 classes.

        Raises:
            ValueError: one class, whose score would always be the same (``relative``).
        """
        if num_classes == 1 and self.relative:
            raise ValueError(
                f"the {self.routing} head normalises its scores over the classes, so that one class has a constant "
                "score: use num_classes=2, or a network with another head, such as one with routing='idpa'"
            )
        return self._class_layer(num_classes) if num_classes else nn.Identity()

    def _class_layer(self, num_classes: int) -> nn.Module:
        raise NotImplementedError(f"{type(self).__name__} has no _class_layer")

    @property
    def hidden_size(self) -> int:
        """Width of :meth:`pooled`."""
        return self.chans

    def _map(self, x: Tensor) -> Tensor:
        """The feature map, pooled to at most ``max_grid`` and projected."""
        if self.shrink > 1:
            x = F.avg_pool2d(x, self.shrink, ceil_mode=True)
        return self.project(x)

    @forward_method
    def pooled(self, x: Tensor) -> Tensor:
        """Feature map to ``[b, hidden_size]``: the class layer's input, averaged over the grid."""
        return self._pooled(x)

    def _pooled(self, x: Tensor) -> Tensor:
        return self._map(x).mean(dim=(2, 3))

    def forward(self, x: Tensor) -> Tensor:
        """Feature map ``[b, in_chans, h, w]`` to class scores ``[b, n]``."""
        return self._class_capsules(x)[0]

    @forward_method
    def class_capsules(self, x: Tensor) -> Tuple[Tensor, Tensor]:
        """Feature map to scores ``[b, n]`` and class capsules ``[b, n, e]``."""
        return self._class_capsules(x)

    def _class_capsules(self, x: Tensor) -> Tuple[Tensor, Tensor]:
        raise NotImplementedError(f"the {self.routing} head has no class capsules")

    @torch.jit.ignore
    @forward_method
    def route(self, x: Tensor) -> HeadOutput:
        """Feature map to all outputs of the head."""
        return self._route(x)

    @torch.jit.ignore
    def _route(self, x: Tensor) -> HeadOutput:
        raise NoCapsules(f"the {self.routing} head has no capsules")

    @torch.jit.ignore
    def coupling_layouts(self) -> Tuple[CouplingLayout, ...]:
        """Layout of each of the couplings of :meth:`route`."""
        return ()

    @torch.jit.ignore
    @forward_method
    def class_votes(self, x: Tensor) -> Votes:
        """Feature map to the votes for the class capsules."""
        if not self.has_capsules:
            raise NoCapsules(f"the {self.routing} head has no capsules")
        raise NotImplementedError(f"the class layer of the {self.routing} head forms no votes")

    @torch.jit.ignore
    @forward_method
    def coupling_map(self, x: Tensor) -> Tensor:
        """Feature map to ``[b, n, h', w']``: the share of each grid position in each class, summing to 1."""
        out = self._route(x)
        share = self._hand_down(out.share.float(), out).clamp_min(0.0)
        # not `self.grid`: a head without weights of positions takes maps of other sizes
        grid = [-(-side // self.shrink) for side in x.shape[2:]]
        heat = share.unflatten(2, (*grid, -1)).sum(dim=4) + 1e-12  # [b, n, h, w]
        return heat / heat.sum(dim=(2, 3), keepdim=True)

    def _hand_down(self, share: Tensor, out: HeadOutput) -> Tensor:
        """``[b, n, children of the class layer]`` to ``[b, n, h*w*types]``."""
        return share


def create_head(
    in_chans: int,
    grid: Tuple[int, int],
    num_classes: int,
    routing: str = "idpa",
    even_couplings: bool = False,
    **options: Any,
) -> CapsuleHead:
    """A head with new weights.

    Args:
        in_chans: channels of the map.
        grid: rows and columns of the map.
        num_classes: classes; 0 omits the class layer, and leaves ``pooled`` alone to call.
        routing: a name of :data:`HEADS`.
        even_couplings: do not route: each child votes evenly, with couplings of 1 over the number of parents (of
            children, in ``routing_pool``) in one iteration, whatever ``num_iters`` is. The parameters are those of the
            routed head, so that the two differ in the routing alone.
        options: of every head: ``proj_chans``, channels of a 1x1 convolution (BatchNorm, ReLU) before the head, which
            makes its cost independent of the width of the map (0 omits it); ``max_grid``, to which a map with more
            rows or columns is average-pooled first (0 disables this); ``drop_rate``, dropout of the class layer's
            input in single entries, not whole capsules. Further ones are those of the head's class.

    Raises:
        ValueError: an unknown routing or argument, sizes that do not fit, or ``even_couplings`` for a head without
            couplings or whose scores are its couplings; one line.
    """
    head_arguments(routing, set(options) - {"lower_chans"})
    if even_couplings:
        options.update(_even_arguments(routing))
    common = {name: options.pop(name) for name in _COMMON if name in options}
    return HEADS[routing](HeadArgs(in_chans, grid, num_classes, routing, **common), **options)


def _even_arguments(routing: str) -> Dict[str, Any]:
    """Arguments with which a head's couplings are even."""
    head = HEADS[routing]
    if head.even is None:
        why = head.never_even if head.has_capsules else "has no couplings"
        able = ", ".join(name for name, other in HEADS.items() if other.even is not None)
        raise ValueError(f"the {routing} head {why}: even_couplings is for {able}")
    return head.even


def unknown_routing(name: str) -> ValueError:
    """The error for a routing that is not in :data:`HEADS`."""
    return ValueError(unknown_name("routing", str(name), HEADS))


def head_arguments(routing: str, options: Optional[Set[str]] = None) -> List[str]:
    """Names of the arguments specific to a routing.

    Raises:
        ValueError: an unknown routing, or one of ``options`` is no argument of it; the message suggests the nearest.
    """
    if routing not in HEADS:
        raise unknown_routing(routing)
    parameters = inspect.signature(HEADS[routing]).parameters
    own = (name for name in parameters if name not in ("common", "lower_chans"))
    names = [*_COMMON, *own, "even_couplings"]
    for name in sorted(options or ()):
        if name not in names:
            raise ValueError(unknown_name(f"argument of the {routing} head", name, names))
    return names
