"""Capsule networks with inverted dot-product attention (IDPA) routing.

Paper: Tsai, Srivastava, Goh, Salakhutdinov, "Capsules with Inverted Dot-Product Attention Routing" (ICLR 2020,
arXiv:2002.04764): Tables 8 and 9, the text's ResNet backbone (appendix A.1), Tables 10 and 11. The authors' release
was read for facts (scale of the agreement, initial values of the capsule layers, primary convolution without bias).

A backbone, primary capsules with LayerNorm (these are the features), convolutional and fully connected capsule layers
routed together, and one Linear that maps every class capsule to its logit, shared by all classes.

The scores need only the dependency cone of the class capsules (see :mod:`capszoo.layers.idpa`): at two iterations,
one iteration of every layer but the last. ``forward`` computes the cone, ``forward_capsules`` everything; the scores
are equal.

Our choices, where the paper is silent: the backbone's convolutions start as He normal; with ``activations`` (ablation
C), those of the primary capsules are a 1x1 convolution of the primary capsules and a sigmoid, and a class
capsule's pose is multiplied by its activation before the Linear. The paper gives no layout for its matrix-pose network
"with 42M parameters": ``idpa_multimnist(pose="matrix", num_caps=64)`` has 41.6M.
"""

from collections import OrderedDict
from functools import partial
from typing import Any, Dict, Iterable, Optional, Sequence, Tuple, Union

import torch
import torch.nn as nn
import torch.nn.functional as F
from timm.models import register_model
from torch import Tensor

from capszoo.layers import FCIDPA, CapsuleNorm, ConvIDPA, IDPAStack
from capszoo.layers._layout import split_axis
from capszoo.layers._modules import at_least

from ._base import CapsuleNet, CapsuleOutput, CouplingLayout, Votes, feature_levels
from ._blocks import idpa_backbone_stages, init_conv_weights
from ._builder import build_capsule_model, model_cfg, zoo_cfgs

__all__ = ["IdpaNet"]

torch.fx.wrap("split_axis")

_CIFAR100 = dict(mean=(0.5071, 0.4865, 0.4409), std=(0.2673, 0.2564, 0.2762))


class ConvReLU(nn.Module):
    """The plain backbone: 3x3 convolution of stride 2 with bias, ReLU. ``[b, in, h, w] -> [b, out, h/2, w/2]``"""

    def __init__(self, in_chans: int, out_chans: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(in_chans, out_chans, 3, 2, 1)
        self.act = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.conv(x))


class PrimaryConv(nn.Module):
    """Convolution to the primary capsules, before their LayerNorm; channels-last, like the capsule layers."""

    def __init__(self, in_chans: int, out_chans: int, kernel_size: int, stride: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(in_chans, out_chans, kernel_size, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        if not torch.jit.is_scripting():
            if torch._C._are_functorch_transforms_active():  # vmap knows no memory formats
                return self.conv(x)
        return self.conv(x.contiguous(memory_format=torch.channels_last))


class IdpaNet(CapsuleNet):
    """Capsule network with IDPA routing.

    ``couplings`` of :meth:`forward_capsules`: ``[b, h', w', j, k*l, i]`` of each convolutional layer, then
    ``[b, j, i]`` of each fully connected one; they sum to 1 over the parents ``j``.

    Args:
        num_classes: class capsules; 0 omits the class layer.
        in_chans, img_size: of the images. The first fully connected layer has weights for every grid position: other
            sizes are refused.
        backbone: ``"resnet"`` or ``"conv"`` (one 3x3 convolution of stride 2).
        backbone_chans: channels of the backbone's features.
        num_caps: capsule types of the primary and of every convolutional capsule layer.
        pose_dim: pose dimension.
        pose: ``"matrix"`` (a square number of entries, O(d) weights a pair of capsules) or ``"vector"`` (O(d^2)).
        primary_kernel, primary_stride: of the primary convolution, which does not pad.
        conv_strides: strides of the 3x3 convolutional capsule layers.
        fc_caps: number of capsules in each hidden fully connected layer.
        routing_iters: routing iterations t (1 to 5 in the paper).
        routing: ``"concurrent"`` (Procedure 2) or ``"sequential"`` (ablation B).
        scale_agreement: divide the agreement by sqrt(pose_dim), as in the release.
        parent_init: first parents, ``"zero"``, ``"random"`` or ``"learned"`` (footnote 1).
        layer_norm: LayerNorm of the routed poses; False is ablation A. (Primary capsules always have one.)
        activations: capsules have activations as in EM routing (ablation C).
        global_pool: ``"avg"``; ``""`` returns the feature map without a class layer.
        drop_rate: dropout of the sums of votes, before their LayerNorm.

    Raises:
        ValueError: an argument is out of range.
    """

    readout = ("score",)

    def __init__(
        self,
        num_classes: int = 10,
        in_chans: int = 3,
        img_size: Union[int, Tuple[int, int]] = 32,
        backbone: str = "resnet",
        backbone_chans: int = 128,
        num_caps: int = 32,
        pose_dim: int = 16,
        pose: str = "matrix",
        primary_kernel: int = 1,
        primary_stride: int = 1,
        conv_strides: Sequence[int] = (2, 1),
        fc_caps: Sequence[int] = (),
        routing_iters: int = 2,
        routing: str = "concurrent",
        scale_agreement: bool = True,
        parent_init: str = "zero",
        layer_norm: bool = True,
        activations: bool = False,
        global_pool: str = "avg",
        drop_rate: float = 0.0,
    ) -> None:
        super().__init__(num_classes, in_chans, img_size, global_pool, fixed_input_size=True)
        if backbone not in ("resnet", "conv"):
            raise ValueError(f"backbone must be 'resnet' or 'conv', not {backbone!r}")
        self.num_caps, self.pose_dim = num_caps, pose_dim
        self.activations = activations
        self.drop_rate = drop_rate
        self.num_features = num_caps * pose_dim

        if backbone == "resnet":
            stages = idpa_backbone_stages(in_chans, backbone_chans)
            levels = [("stem", 64, 1), ("layer1", 64, 1), ("layer2", backbone_chans, 2)]
        else:
            stages = OrderedDict(stem=ConvReLU(in_chans, backbone_chans))
            levels = [("stem", backbone_chans, 2)]
        at_least(1, primary_stride=primary_stride)
        stages["primary"] = PrimaryConv(backbone_chans, self.num_features, primary_kernel, primary_stride)
        stages["norm"] = CapsuleNorm(pose_dim)
        levels += [(name, self.num_features, 2 * primary_stride) for name in ("primary", "norm")]
        self.stages = nn.Sequential(stages)
        init_conv_weights(self.stages)
        self.feature_info = feature_levels(levels)

        self._options: Dict[str, Any] = dict(
            num_iters=routing_iters,
            pose=pose,
            scale_agreement=scale_agreement,
            parent_init=parent_init,
            layer_norm=layer_norm,
            activations=activations,
            drop=drop_rate,
        )
        self._primary = (primary_kernel, primary_stride)
        self.grid = self._feature_grid(self.img_size)
        layers: "OrderedDict[str, nn.Module]" = OrderedDict()
        for i, stride in enumerate(conv_strides):
            layers[f"conv{i + 1}"] = ConvIDPA(num_caps, num_caps, pose_dim, stride=stride, **self._options)
        height, width = self._grid_behind(layers.values(), self.grid)
        if min(height, width) < 1:
            raise ValueError(
                f"images of {self.img_size[0]}x{self.img_size[1]} leave no capsules: use larger ones"
            )
        self._children = height * width * num_caps  # children of the next fully connected layer
        for i, caps in enumerate(fc_caps):
            layers[f"fc{i + 1}"] = FCIDPA(self._children, caps, pose_dim, **self._options)
            self._children = caps
        self.hidden = len(layers)  # number of capsule layers below the classes
        self.hidden_on_grid = not fc_caps
        self.head_hidden_size = (fc_caps[-1] if fc_caps else num_caps) * pose_dim
        self.capsules = IDPAStack(layers, routing_iters, routing, depth=self.hidden + 1)
        self._make_head()
        self.primary_activation: nn.Module = (
            nn.Conv2d(self.num_features, num_caps, 1) if activations else nn.Identity()
        )
        self.score = self.make_readout(num_classes)

    def _feature_grid(self, img_size: Tuple[int, int]) -> Tuple[int, int]:
        """Grid of the primary capsules for a given image size."""
        kernel, stride = self._primary
        height, width = (((size + 1) // 2 - kernel) // stride + 1 for size in img_size)
        return height, width

    @staticmethod
    def _grid_behind(layers: Iterable[Any], grid: Tuple[int, int]) -> Tuple[int, int]:
        """Grid after the convolutional capsule layers among ``layers``."""
        height, width = grid
        for layer in layers:
            if isinstance(layer, ConvIDPA):
                height, width = layer.out_size(height), layer.out_size(width)
        return height, width

    @torch.jit.ignore
    def _resample(self, name: str, weight: Tensor, img_size: Tuple[int, int]) -> Optional[Tensor]:
        """Resample the first fully connected layer bilinearly between the transforms of neighbouring grid positions.

        The sum of votes runs over the positions, so the weights are scaled by the old number of positions over
        the new one.
        """
        layers = list(self.capsules.named_children())
        first = next((key for key, layer in layers if isinstance(layer, FCIDPA)), "")
        if name != f"capsules.{first}.weight":
            return None
        old = self._grid_behind(self.capsules.children(), self._feature_grid(img_size))
        new = self._grid_behind(self.capsules.children(), self.grid)
        if tuple(old) == tuple(new) or weight.shape[0] % (old[0] * old[1]):
            return None  # the same grid, or the stated size is not the weights'
        maps = weight.float().unflatten(0, (*old, -1)).flatten(2).permute(2, 0, 1)[None]  # [1, i*q*j*r, h, w]
        maps = F.interpolate(maps, new, mode="bilinear", align_corners=False)[0].permute(1, 2, 0)
        scale = old[0] * old[1] / (new[0] * new[1])
        return (maps * scale).reshape(-1, *weight.shape[1:]).to(weight.dtype)

    def _make_classifier(self) -> nn.Module:
        return FCIDPA(self._children, self.num_classes, self.pose_dim, **self._options)

    def _set_classifier(self, layer: nn.Module) -> None:
        if hasattr(self.capsules, "classes"):
            del self.capsules.classes
        if self.num_classes > 0:
            self.capsules.classes = layer

    @torch.jit.ignore
    def make_readout(self, num_classes: int) -> nn.Module:
        """A new Linear from a class pose to its logit, shared by the classes; an identity without classes."""
        return nn.Linear(self.pose_dim, 1) if num_classes else nn.Identity()

    def _primary_capsules(self, x: Tensor) -> Tuple[Tensor, Optional[Tensor]]:
        """Features ``[b, i*d, h, w]`` to poses ``[b, h, w, i, d]`` and, if the network has them, activations."""
        activation: Optional[Tensor] = None
        if self.activations:
            activation = torch.sigmoid(self.primary_activation(x)).permute(0, 2, 3, 1)  # [b, h, w, i]
        return split_axis(x.permute(0, 2, 3, 1), 3, [self.num_caps, self.pose_dim]), activation

    def _scores(self, poses: Tensor, activation: Optional[Tensor]) -> Tensor:
        """Class poses ``[b, n, e]`` to logits ``[b, n]``."""
        if activation is not None:
            poses = poses * activation.unsqueeze(-1)
        return self.score(poses).squeeze(-1)

    def _pooled(self, x: Tensor) -> Tensor:
        """The capsules below the class layer, averaged over their grid if they have one."""
        poses, activation = self._primary_capsules(x)
        hidden, _ = self.capsules.run(poses, activation, self.hidden)
        if self.hidden_on_grid:
            hidden = hidden.mean(dim=[1, 2])
        return hidden.flatten(1)

    def _class_capsules(self, x: Tensor) -> Tuple[Tensor, Tensor]:
        poses, activation = self._primary_capsules(x)
        classes, active = self.capsules.run(poses, activation, self.hidden + 1)
        return self._scores(classes, active), classes

    def forward_capsules(self, x: Tensor) -> CapsuleOutput:
        """Images to logits, class capsules ``[b, n, e]``, the logits as activations, and all couplings.

        Runs all iterations of all layers, including those that do not affect the scores.
        """
        self._require_classes()
        primary, activation = self._primary_capsules(self.forward_features(x))
        poses, active, couplings = self.capsules.run_full(primary, activation)
        scores = self._scores(poses[-1], active[-1] if active else None)
        return CapsuleOutput(scores, poses[-1], scores, tuple(couplings))

    def coupling_map(self, x: Tensor) -> Tensor:
        """Images to ``[b, n, h, w]``: how each position of the primary grid is coupled to each class; sums to 1.

        A class's share is divided among the children of each layer in proportion to their couplings, from the class
        layer down, and divided by the share from even couplings (more windows see inner positions). The
        couplings are those that affect the scores: a layer whose only iteration is a sum of votes (at two
        iterations, all but the last) divides evenly over its window. Positions that no window sees have 0.
        """
        self._require_classes()
        primary, activation = self._primary_capsules(self.forward_features(x))
        share = self.capsules.shares(primary, activation).sum(dim=-1)  # [b, n, h, w]
        even = self.capsules.shares(primary[:1], None if activation is None else activation[:1], even=True)
        relative = share / even.sum(dim=-1).clamp(min=1e-12)
        return relative / relative.sum(dim=(2, 3), keepdim=True)

    def covered_cells(self, x: Tensor) -> Tensor:
        """Images to the mask of primary grid positions that some window sees, ``[h, w]`` of bool."""
        primary, activation = self._primary_capsules(self.forward_features(x[:1]))
        return self.capsules.shares(primary, activation, even=True).sum(dim=-1)[0].sum(dim=0) > 0

    def coupling_layouts(self) -> Tuple[CouplingLayout, ...]:
        return tuple(
            CouplingLayout(3 if isinstance(layer, ConvIDPA) else 1, "parents") for layer in self.capsules
        )

    def class_votes(self, x: Tensor) -> Votes:
        self._require_classes()
        primary, activation = self._primary_capsules(self.forward_features(x))
        children, _ = self.capsules.run(primary, activation, self.hidden)
        poses, _ = self.capsules.run(primary, activation, self.hidden + 1)
        return Votes(self.capsules.classes.votes(children), poses, True)  # type: ignore[union-attr, operator]

    def get_classifier(self) -> nn.Module:
        """The class capsule layer. (The Linear after it, ``score``, works for any number of classes.)"""
        classifier = getattr(self.capsules, "classes", None)
        return classifier if isinstance(classifier, nn.Module) else nn.Identity()

    def _drop_head(self) -> None:
        super()._drop_head()
        self.capsules = IDPAStack(OrderedDict(), depth=self.hidden + 1)
        self.primary_activation = nn.Identity()


_cfg = partial(
    model_cfg,
    pool_size=(16, 16),
    fixed_input_size=True,
    first_conv="stages.stem.conv",
    classifier="capsules.classes",
    paper_name="Capsules with Inverted Dot-Product Attention Routing",
    paper_ids="arXiv:2002.04764",
)

default_cfgs = zoo_cfgs(
    {
        "idpa_cnn": _cfg(),
        "idpa_cnn_cifar100": _cfg(num_classes=100, **_CIFAR100),
        "idpa_resnet": _cfg(),
        "idpa_resnet_cifar100": _cfg(num_classes=100, **_CIFAR100),
        "idpa_multimnist": _cfg(input_size=(1, 36, 36), pool_size=(8, 8), mean=(0.0,), std=(1.0,)),
    }
)


_create_idpa = partial(build_capsule_model, IdpaNet)


@register_model
def idpa_cnn(pretrained: bool = False, **kwargs: Any) -> IdpaNet:
    """IDPA on a plain convolutional backbone (Table 8): CIFAR-10 accuracy 85.17."""
    args: Dict[str, Any] = dict(backbone="conv", backbone_chans=256)
    return _create_idpa("idpa_cnn", pretrained, defaults=args, **kwargs)


@register_model
def idpa_cnn_cifar100(pretrained: bool = False, **kwargs: Any) -> IdpaNet:
    """IDPA on a plain backbone, 6x6 poses, one more capsule layer (Table 9): CIFAR-100 accuracy 57.32."""
    args: Dict[str, Any] = dict(backbone="conv", backbone_chans=128, pose_dim=36, fc_caps=(20,))
    return _create_idpa("idpa_cnn_cifar100", pretrained, defaults=args, **kwargs)


@register_model
def idpa_resnet(pretrained: bool = False, **kwargs: Any) -> IdpaNet:
    """IDPA on a ResNet backbone: CIFAR-10 accuracy 95.14 (best test epoch, best of 1 to 5 iterations)."""
    args: Dict[str, Any] = dict(backbone="resnet", backbone_chans=128)
    return _create_idpa("idpa_resnet", pretrained, defaults=args, **kwargs)


@register_model
def idpa_resnet_cifar100(pretrained: bool = False, **kwargs: Any) -> IdpaNet:
    """IDPA on a ResNet, 6x6 poses, one more capsule layer: CIFAR-100 accuracy 78.02 (best of epochs and iterations)."""
    args: Dict[str, Any] = dict(backbone="resnet", backbone_chans=128, pose_dim=36, fc_caps=(20,))
    return _create_idpa("idpa_resnet_cifar100", pretrained, defaults=args, **kwargs)


@register_model
def idpa_multimnist(pretrained: bool = False, **kwargs: Any) -> IdpaNet:
    """DiverseMultiMNIST (Tables 10 and 11): accuracy 85.74 with vector poses, 80.59 with ``pose="matrix"``."""
    args: Dict[str, Any] = dict(
        backbone="conv",
        backbone_chans=1024,
        num_caps=16,
        pose_dim=64,
        pose="vector",
        primary_kernel=3,
        primary_stride=2,
        conv_strides=(1,),
    )
    return _create_idpa("idpa_multimnist", pretrained, defaults=args, **kwargs)
