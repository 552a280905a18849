"""Base class of all capsule networks of the zoo, with timm's interface.

A network is a body and a head. The body, :attr:`CapsuleNet.stages`, is a sequence of modules that each map a
feature map ``[b, c, h, w]`` to the next; its last output is what ``forward_features`` returns. The head has the
routing layers, and each family implements it in ``_class_capsules``. The class layer and the decoder depend on the
number of classes; this base class creates and replaces them.
"""

import inspect
import math
import operator
from collections import OrderedDict
from numbers import Integral
from typing import (
    TYPE_CHECKING,
    Any,
    Callable,
    Dict,
    Iterable,
    List,
    Mapping,
    NamedTuple,
    Optional,
    Set,
    Tuple,
    Union,
)

import torch
import torch.nn as nn
from timm.models import checkpoint_seq
from timm.models._features import feature_take_indices
from torch import Tensor

from capszoo._pretrained.facts import for_new_classes, own_facts, set_own_facts
from capszoo.layers import capsule_lengths, capsules_from_map

from ..errors import NoCapsules
from ._blocks import Decoder, SharedDecoder

#: The decoders, by the values of ``decoder`` that name one.
DECODERS = {"dense": Decoder, "shared": SharedDecoder}

#: Names of no modules. (TorchScript would read the annotation of a class's attribute.)
NO_NAMES: Tuple[str, ...] = ()


class CapsuleOutput(NamedTuple):
    """Capsule outputs of a network for a batch.

    Attributes:
        scores: class scores ``[b, n]``, the same as ``forward`` returns; their argmax is the prediction.
        poses: class capsules ``[b, n, e]``.
        activations: presence of each class, ``[b, n]``: capsule length, EM activation or logit.
        couplings: one tensor per routing layer, in order: ``[b, positions…, parents, children…]``;
            ``coupling_layouts()`` gives the parents' axis and the axis that sums to 1, if any. Empty without routing.
    """

    scores: Tensor
    poses: Tensor
    activations: Tensor
    couplings: Tuple[Tensor, ...]


class CouplingLayout(NamedTuple):
    """Axes of one of a network's coupling tensors: ``[b, positions…, parents, children…]``.

    Attributes:
        parents: the axis of the parents. The axes before it (except the batch) are positions that are routed
            independently; the axes after it are the children.
        over: ``"parents"`` or ``"children"``: the axis over which the couplings sum to 1. None: they are credit, which
            is no share (Heinsen's routing): it has any sign and sums to no fixed number.
    """

    parents: int
    over: Optional[str]


class Votes(NamedTuple):
    """Votes of the children of the last capsule layer, and the resulting parents.

    Attributes:
        votes: transformed children ``[b, j, i, e]``.
        poses: parents ``[b, j, e]``.
        classes: whether the parents are the classes.
    """

    votes: Tensor
    poses: Tensor
    classes: bool


def to_2tuple(size: Union[int, Tuple[int, int], List[int]]) -> Tuple[int, int]:
    """``28 -> (28, 28)``, ``(28, 32) -> (28, 32)``; raise ValueError for anything else."""
    pair = tuple(size) if isinstance(size, (tuple, list)) else (size, size)
    whole = all(isinstance(s, Integral) and not isinstance(s, bool) for s in pair)
    if len(pair) != 2 or not whole or min(pair) < 1:
        raise ValueError(f"img_size must be a positive integer or a pair (height, width), not {size!r}")
    return int(pair[0]), int(pair[1])


def feature_levels(levels: Iterable[Tuple[str, int, int]]) -> List[dict]:
    """timm's ``feature_info`` of stages, each given as (name, channels, reduction)."""
    return [
        dict(num_chs=chs, reduction=reduction, module=f"stages.{name}") for name, chs, reduction in levels
    ]


def feature_levels_by_rows(rows: int, levels: Iterable[Tuple[str, int, int]]) -> List[dict]:
    """The same, each given as (name, channels, rows), for images of so many rows.

    Unpadded convolutions shrink the map too: the reduction is the largest power of two within the ratio.
    """
    return feature_levels((name, chs, 2 ** int(math.log2(rows / size))) for name, chs, size in levels)


class CapsuleNet(nn.Module):
    """Base of the zoo's networks: feature stages, timm's feature and head interface, capsule outputs.

    A subclass sets, in its ``__init__``: ``stages`` (an ``nn.Sequential`` with named children), ``feature_info``
    (at least three :func:`feature_levels`), ``num_features`` (channels of ``forward_features``), ``head_hidden_size``
    (width of ``forward_head(pre_logits=True)``) and, for a decoder, ``class_dim`` (dimension of a class capsule). Its
    last call is :meth:`_make_head`. It implements ``_make_classifier``, ``_class_capsules`` (or ``forward_head``)
    and, if it has capsules, ``forward_capsules`` and ``coupling_map``.

    Args:
        num_classes: number of classes; 0 omits the class layer, and ``forward`` returns the pooled features.
        in_chans: channels of the input images.
        img_size: height and width of the input images, in pixels.
        global_pool: pooling of the features without a class layer; ``""`` returns the feature map itself.
        fixed_input_size: whether weights depend on ``img_size``; other sizes then raise an error that says so.
        decoder: whether to add a decoder for class capsules (see :meth:`reconstruct`): False, True for the network's
            own (``own_decoder``), ``"dense"`` (Sabour et al. 2017) or ``"shared"`` (with the same weights for all
            classes, Rajasegaran et al. 2019).
        pools: valid values of ``global_pool``, besides ``""``.
    """

    #: Attribute that holds the class layer: ``classifier`` of the configuration.
    classifier_name = "class_caps"

    #: Modules behind the class layer that serve any number of classes, and are identities without classes.
    readout = NO_NAMES

    #: The decoder of ``decoder=True``.
    own_decoder = "dense"

    #: Kind of the scores if the metadata do not state it (see ``capszoo.scores``).
    score_kind = "logits"

    #: What stands in place of the class layer in a network without classes.
    no_classifier = nn.Identity

    #: True once :meth:`prune_intermediate_layers` has dropped the head.
    head_pruned = False

    #: What :meth:`coupling_map` normalises: the couplings, or a product with them.
    map_quantity = "coupling"

    if TYPE_CHECKING:  # not at run time: TorchScript would read annotations of the class
        feature_info: List[dict]
        stages: nn.Sequential
        num_features: int
        head_hidden_size: int
        class_dim: int
        decoder: Any
        pretrained_cfg: Dict[str, Any]
        class_caps: Any
        head: Any
        fc: Any

    def __init__(
        self,
        num_classes: int,
        in_chans: int,
        img_size: Union[int, Tuple[int, int]],
        global_pool: str = "avg",
        fixed_input_size: bool = False,
        decoder: Union[bool, str] = False,
        pools: Tuple[str, ...] = ("avg",),
    ) -> None:
        super().__init__()
        if num_classes < 0:
            raise ValueError(f"num_classes must be 0 (no classifier) or more, not {num_classes}")
        if in_chans < 1:
            raise ValueError(f"in_chans must be at least 1, not {in_chans}")
        self.num_classes = num_classes
        self.in_chans = in_chans
        self.img_size = to_2tuple(img_size)
        self.pools = pools
        self._check_pool(global_pool)
        self.global_pool = global_pool
        self.fixed_input_size = fixed_input_size
        self.grad_checkpointing = False
        if decoder not in (False, True, *DECODERS):
            raise ValueError(
                f"decoder must be False, True, {' or '.join(map(repr, DECODERS))}, not {decoder!r}"
            )
        self.with_decoder = decoder if isinstance(decoder, str) else self.own_decoder if decoder else ""
        self.decoder = None
        h, w = self.img_size
        self._size_message = (
            f"this model was built for {h}x{w} images: resize them, or create it with img_size=(h, w)"
        )
        # the zoo adapts the first convolution itself, for any number of channels (_pretrained.adapt_state_dict)
        self._traits: Any = {"first_conv": None, "fixed_input_size": fixed_input_size}

    # -- body ---------------------------------------------------------------------------------------------------

    def forward_features(self, x: Tensor) -> Tensor:
        """Images ``[b, in_chans, h, w]`` to the last feature map ``[b, num_features, h', w']``."""
        if self.fixed_input_size:
            torch._assert(x.shape[-2] == self.img_size[0], self._size_message)
            torch._assert(x.shape[-1] == self.img_size[1], self._size_message)
        if self.grad_checkpointing and not torch.jit.is_scripting():
            x = checkpoint_seq(self.stages, x)
        else:
            x = self.stages(x)
        return x

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        """Feature map to class scores ``[b, n]``; without classes or with ``pre_logits`` to ``[b, head_hidden_size]``.

        With neither classes nor a ``global_pool``, the map itself.
        """
        if self.num_classes == 0 and self.global_pool == "":
            return x
        if pre_logits or self.num_classes == 0:
            return self._pooled(x)
        return self._class_capsules(x)[0]

    def _pooled(self, x: Tensor) -> Tensor:
        """Feature map to ``[b, head_hidden_size]``: its mean over the grid, unless a network states another pooling."""
        return x.mean(dim=(2, 3))

    def forward(self, x: Tensor) -> Tensor:
        """Images ``[b, in_chans, h, w]`` to class scores ``[b, n]``; the argmax is the prediction."""
        x = self.forward_features(x)
        return self.forward_head(x)

    def forward_poses(self, x: Tensor) -> Tuple[Tensor, Tensor]:
        """Images ``[b, in_chans, h, w]`` to scores ``[b, n]`` and class capsules ``[b, n, e]``, at ``forward``'s cost.

        For losses with a decoder: it computes no couplings, which :meth:`forward_capsules` must.

        Raises:
            NotImplementedError: the network has no class capsules.
            RuntimeError: it was created with ``num_classes=0``.
        """
        self._require_classes()
        x = self.forward_features(x)
        scores, poses = self._class_capsules(x)
        return scores, poses.to(x.dtype)

    def _class_capsules(self, x: Tensor) -> Tuple[Tensor, Tensor]:
        """Feature map to scores ``[b, n]`` and class capsules ``[b, n, e]``, in any dtype.

        No operation may follow the scores here: timm treats the last operation of an FX graph as the model's result.
        """
        raise NotImplementedError(f"{type(self).__name__} has no class capsules")

    def forward_capsules(self, x: Tensor) -> CapsuleOutput:
        """Images ``[b, in_chans, h, w]`` to scores, class capsules, activations and all couplings.

        Raises:
            NoCapsules: a network without capsules.
            RuntimeError: it was created with ``num_classes=0``.
        """
        raise NoCapsules(f"{type(self).__name__} is a network without capsules: use forward")

    def coupling_map(self, x: Tensor) -> Tensor:
        """Images to ``[b, n, h', w']``: share of each grid position in each class capsule; sums to 1.

        Raises:
            NoCapsules: a network without capsules.
            RuntimeError: it was created with ``num_classes=0``.
        """
        raise NoCapsules(f"{type(self).__name__} is a network without capsules: it routes nothing")

    def coupling_layouts(self) -> Tuple[CouplingLayout, ...]:
        """Layout of each of the couplings that :meth:`forward_capsules` returns; empty without routing."""
        return ()

    def class_votes(self, x: Tensor) -> Votes:
        """Images to the votes of the last capsule layer and its parents.

        Raises:
            NotImplementedError: a network that forms no votes.
            NoCapsules: a head or pooling without capsules.
            RuntimeError: it was created with ``num_classes=0``.
        """
        raise NotImplementedError(f"{type(self).__name__} forms no votes")

    def reconstruct(self, poses: Tensor, target: Optional[Tensor] = None) -> Tensor:
        """Class capsules ``[b, n, e]`` to images ``[b, in_chans, h, w]`` in 0..1, through the decoder.

        Args:
            poses: class capsules, from :meth:`forward_capsules`.
            target: ``[b]`` class whose capsule is kept; defaults to the longest capsule. EM networks require it.

        Raises:
            RuntimeError: the model was created without ``decoder=True``, its architecture has no decoder, or it has no
                such class.
            ValueError: the target is no class index for each image.
        """
        if self.decoder is None:
            raise RuntimeError(self._why_no_decoder())
        if target is not None and (
            target.shape != poses.shape[:1] or target.is_floating_point() or target.dtype == torch.bool
        ):
            raise ValueError("target must be class indices [b], as integers")
        return self.decoder(poses, target)

    @torch.jit.unused
    def _why_no_decoder(self) -> str:
        if "decoder" not in inspect.signature(type(self).__init__).parameters:
            return "networks of this architecture have no decoder"
        classes = "" if self.num_classes else "classes and with "
        return f"this model has no decoder: create it with {classes}decoder=True"

    # -- another image size ---------------------------------------------------------------------------------------

    @torch.jit.ignore
    def fit_to_size(
        self, weights: Mapping[str, Tensor], img_size: Union[int, Tuple[int, int]]
    ) -> Tuple[Dict[str, Tensor], Tuple[str, ...]]:
        """Adapt weights of this network for another image size to its size.

        Weights that do not depend on the size are copied. For the others, the network needs a rule
        (:meth:`_resample`).

        Args:
            weights: state dict of the same network, created with ``img_size``.
            img_size: height and width of its images, in pixels.

        Returns:
            A state dict for this network, and the names of the tensors that were resampled.

        Raises:
            ValueError: a weight depends on the size and the network has no rule for it, or is not the network's.
        """
        own, resampled = self.state_dict(), self.resampled(weights, img_size)
        unknown = sorted(set(weights).difference(own))
        if unknown:
            raise ValueError(
                f"{type(self).__name__} has no {', '.join(unknown)}: give weights of this network"
            )
        for name, value in weights.items():
            if own[name].shape != value.shape and name not in resampled:
                raise ValueError(
                    f"{name} depends on the image size, and {type(self).__name__} has no rule for another size"
                )
        return {**weights, **resampled}, tuple(resampled)

    @torch.jit.ignore
    def resampled(
        self, weights: Mapping[str, Tensor], img_size: Union[int, Tuple[int, int]]
    ) -> Dict[str, Tensor]:
        """Those weights of another image size that depend on its grid and have a rule, resampled to this network's.

        Args:
            weights: state dict, or a part of one, of the same network created with ``img_size``.
            img_size: height and width of its images, in pixels.
        """
        own, tensors = self.state_dict(), {}
        for name, value in weights.items():
            if name in own:
                changed = self._resample(name, value, to_2tuple(img_size))
                if changed is not None and changed.shape == own[name].shape:
                    tensors[name] = changed
        return tensors

    @torch.jit.ignore
    def _resample(self, name: str, weight: Tensor, img_size: Tuple[int, int]) -> Optional[Tensor]:
        """A weight of this network from another image size, resampled to its grid; None: no rule, or the same grid."""
        return None

    # -- class layer and decoder --------------------------------------------------------------------------------

    def get_classifier(self) -> nn.Module:
        """The class layer; an identity without classes."""
        return getattr(self, self.classifier_name)

    def reset_classifier(self, num_classes: int, global_pool: Optional[str] = None) -> None:
        """Replace the class layer (and the decoder, if there is one) for other classes; their names are forgotten.

        Args:
            num_classes: number of classes; 0 omits both.
            global_pool: new pooling; None keeps the current one.

        Raises:
            ValueError: a number that is negative or too small for the head, or a pooling that the model does not have.
            TypeError: no whole number. Nothing is changed then.
            RuntimeError: :meth:`prune_intermediate_layers` dropped the head.
        """
        if self.head_pruned:
            if num_classes or global_pool:
                raise RuntimeError("the head was pruned: create the network anew")
            return
        num_classes = operator.index(num_classes)  # of numpy's integers too, which could not be saved
        if num_classes < 0:
            raise ValueError(f"num_classes must be 0 or more, not {num_classes}")
        self._check_pool(global_pool)
        before, self.num_classes = self.num_classes, num_classes
        try:
            self._make_head()
        except Exception:
            self.num_classes = before
            raise
        self._set_pool(global_pool)
        cfg: Any = getattr(self, "pretrained_cfg", None)
        if num_classes and isinstance(cfg, dict):
            cfg.pop("label_names", None)  # the names of the new classes are not known
            set_own_facts(cfg, for_new_classes(own_facts(cfg)))

    def _make_classifier(self) -> nn.Module:
        """A new class layer for ``num_classes``, which is at least 1."""
        raise NotImplementedError(f"{type(self).__name__} has no _make_classifier")

    def _set_classifier(self, layer: nn.Module) -> None:
        setattr(self, self.classifier_name, layer)

    def _make_head(self) -> None:
        """Set a new class layer and, for a model with a decoder, a new decoder."""
        layer = self._make_classifier() if self.num_classes else self.no_classifier()
        self._set_classifier(self._like_parameters(layer))
        for name in self.readout:
            path, _, leaf = name.rpartition(".")
            owner: Any = self.get_submodule(path)
            present = getattr(owner, leaf, None)  # None: the network is being created
            if present is not None and isinstance(present, nn.Identity) == (self.num_classes > 0):
                setattr(owner, leaf, self._like_parameters(owner.make_readout(self.num_classes)))
        self.decoder = None
        if self.with_decoder and self.num_classes:
            build = DECODERS[self.with_decoder]
            decoder = build(self.num_classes, self.class_dim, self.in_chans, self.img_size)
            self.decoder = self._like_parameters(decoder)

    def _check_pool(self, kind: Optional[str]) -> None:
        if kind is not None and kind != "" and kind not in self.pools:
            valid = ", ".join(map(repr, self.pools))
            raise ValueError(f"global_pool must be {valid} or '' (none), not {kind!r}")

    def _set_pool(self, kind: Optional[str]) -> None:
        """Set another pooling for the current number of classes; None keeps it."""
        if kind is not None:
            self.global_pool = kind

    def _require_classes(self) -> None:
        if self.num_classes == 0:
            raise RuntimeError("this model has no classes: create it with num_classes of at least 1")

    # -- timm's interface ---------------------------------------------------------------------------------------

    def _like_parameters(self, module: nn.Module) -> nn.Module:
        """Move a new module to the device, dtype and train/eval mode of the model's parameters."""
        like = next(self.parameters())
        return module.to(device=like.device, dtype=like.dtype).train(self.training)

    @torch.jit.ignore
    def set_grad_checkpointing(self, enable: bool = True) -> None:
        self.grad_checkpointing = enable

    @torch.jit.ignore
    def no_weight_decay(self) -> Set[str]:
        """The learned first logits or parents, ``start``, and the scalars of EM's costs, ``beta_v`` and ``beta_a``."""
        own = ("start", "beta_v", "beta_a")
        return {name for name, _ in self.named_parameters() if name.split(".")[-1] in own}

    @torch.jit.ignore
    def group_matcher(self, coarse: bool = False) -> Callable[[str], Tuple[float, ...]]:
        """Map a parameter name to its depth (timm's convention): by stage and numbered block, the head last.

        The blocks of a stage are its own numbered children, or those of one of its children, which follow the others.
        """
        order = {name: depth for depth, (name, _) in enumerate(self.stages.named_children())}

        def depth_of(name: str) -> Tuple[float, ...]:
            parts = name.split(".")
            if parts[0] != "stages":
                return (math.inf,)
            block = 0
            if not coarse:
                numbered = next((part for part in parts[2:4] if part.isdigit()), None)
                block = 0 if numbered is None else int(numbered) + (not parts[2].isdigit())
            return (order[parts[1]], block)

        return depth_of

    @torch.jit.ignore
    def forward_intermediates(
        self,
        x: Tensor,
        indices: Optional[Union[int, List[int]]] = None,
        norm: bool = False,
        stop_early: bool = False,
        output_fmt: str = "NCHW",
        intermediates_only: bool = False,
    ) -> Union[List[Tensor], Tuple[Tensor, List[Tensor]]]:
        """Feature maps of the levels in ``feature_info`` (timm's signature).

        Args:
            x: images ``[b, in_chans, h, w]``.
            indices: levels to take: None for all, n for the last n, or a list.
            norm: accepted for compatibility with timm; there is no final norm.
            stop_early: stop after the last requested level.
            output_fmt: only ``"NCHW"``.
            intermediates_only: return only the list, without the final features.
        """
        if output_fmt != "NCHW":
            raise ValueError(f"output_fmt must be 'NCHW', not {output_fmt!r}")
        take, last = feature_take_indices(len(self.feature_info), indices)
        level_of = {info["module"].split(".", 1)[1]: i for i, info in enumerate(self.feature_info)}
        intermediates: List[Tensor] = []
        for name, stage in self.stages.named_children():
            if self.grad_checkpointing:
                x = checkpoint_seq([stage], x)
            else:
                x = stage(x)
            level = level_of.get(name)
            if level in take:
                intermediates.append(x)
            if stop_early and level == last:
                break
        if intermediates_only:
            return intermediates
        return x, intermediates

    @torch.jit.ignore
    def prune_intermediate_layers(
        self, indices: Union[int, List[int]] = 1, prune_norm: bool = False, prune_head: bool = True
    ) -> List[int]:
        """Drop the stages after the last requested level (and the head); return the levels' indices."""
        take, last = feature_take_indices(len(self.feature_info), indices)
        end = self.feature_info[last]["module"].split(".", 1)[1]
        kept: "OrderedDict[str, nn.Module]" = OrderedDict()
        for name, stage in self.stages.named_children():
            kept[name] = stage
            if name == end:
                break
        if prune_head:
            self._drop_head()
        self.stages = nn.Sequential(kept)
        return take

    def _drop_head(self) -> None:
        """Drop what follows the stages for good; networks with more there than a class layer add it."""
        self.reset_classifier(0, "")
        self.head_pruned = True


class LengthCapsNet(CapsuleNet):
    """Base of the networks whose scores are the lengths of class capsules, which a layer ``class_caps`` routes.

    A subclass sets ``caps_dim`` and ``head_drop``, or implements ``_children``; ``_routed_children`` if it has further
    routing layers.
    """

    score_kind = "lengths"
    map_quantity = "coupling × vote length"

    if TYPE_CHECKING:  # not at run time: TorchScript would read annotations of the class
        caps_dim: int
        head_drop: Any

    def _children(self, x: Tensor) -> Tensor:
        """Feature map to the class layer's children: ``[b, types * d, h, w]`` to ``[b, h * w * types, d]``."""
        return self.head_drop(capsules_from_map(x, self.caps_dim))

    def _routed_children(self, x: Tensor) -> Tuple[Tensor, Tuple[Tensor, ...]]:
        """Images to the class layer's children, and the couplings of the routing layers below it."""
        return self._children(self.forward_features(x)), ()

    def _lengths(self, poses: Tensor) -> Tensor:
        return capsule_lengths(poses)

    def _class_capsules(self, x: Tensor) -> Tuple[Tensor, Tensor]:
        poses = self.class_caps(self._children(x))
        return self._lengths(poses), poses

    @torch.jit.ignore
    def forward_capsules(self, x: Tensor) -> CapsuleOutput:
        """Images to lengths ``[b, n]``, class capsules ``[b, n, e]`` and the couplings of each routing layer."""
        self._require_classes()
        children, below = self._routed_children(x)
        poses, couplings = self.class_caps.route(children)
        lengths = self._lengths(poses)
        return CapsuleOutput(lengths, poses, lengths, (*below, couplings))

    @torch.jit.ignore
    def class_votes(self, x: Tensor) -> Votes:
        self._require_classes()
        children = self._children(self.forward_features(x))
        return Votes(self.class_caps.votes(children), self.class_caps(children), True)
