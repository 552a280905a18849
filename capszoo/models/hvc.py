"""HVC: capsules without routing, by weights that are multiplied number by number.

Paper: Byerly, Kalganova, Dear, "No Routing Needed Between Capsules" (2020, arXiv:2001.09136). The public release
(Apache-2.0) was read for facts: the order of the layers, the norms without a factor, their epsilon, the initial values.

A homogeneous vector capsule of a class is the sum of all children, each of whose numbers is multiplied by a weight of
its own. No matrix mixes the dimensions of a pose, and no coupling weighs the children. Nine 3x3 convolutions without
padding lead to three branches, after the third, the sixth and the ninth. The children of a branch are the channel
vectors of its map, and its logits are the lengths of its class capsules. The logits of the branches are weighted,
normalised and added.

The normalisation behind the branch weights cancels their scale. They are kept for the published count of 1,513,686
parameters.

Our choices: the momentum of the norms is PyTorch's (the release's is 0.0003). The maps of the branches are channels of
one joint map, each at its place in the image, so that the network has a body and a head as the others do.
"""

from collections import OrderedDict
from functools import partial
from typing import Any, List, Optional, Sequence, Set, Tuple, Union

import torch
import torch.nn as nn
import torch.nn.functional as F
from timm.models import register_model
from torch import Tensor

from capszoo.layers import capsule_lengths, upcast_half
from capszoo.layers._forward_methods import ForwardMethods, forward_method

from ._base import CapsuleNet, CapsuleOutput, feature_levels
from ._builder import build_capsule_model, model_cfg, zoo_cfgs

__all__ = ["HVCapsNet"]

#: Epsilon of every norm, and standard deviation of the initial weights; both are the release's.
EPSILON, DEVIATION = 1e-3, 0.05


class ConvShiftAct(nn.Module):
    """3x3 convolution without padding, BatchNorm without a factor, ReLU: ``[b, in, h, w] -> [b, out, h-2, w-2]``."""

    def __init__(self, in_chans: int, out_chans: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(in_chans, out_chans, 3, bias=False)
        nn.init.normal_(self.conv.weight, std=DEVIATION)
        self.bn = nn.BatchNorm2d(out_chans, eps=EPSILON, affine=False)
        self.bias = nn.Parameter(torch.zeros(out_chans))

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.bn(self.conv(x)) + self.bias[:, None, None])


def _convolutions(in_chans: int, widths: Sequence[int]) -> nn.Sequential:
    return nn.Sequential(*map(ConvShiftAct, (in_chans, *widths[:-1]), widths))


class Place(nn.Module):
    """The place of a branch's map in the joint map; a module without weights that cuts it out.

    Args:
        start, chans: first channel, and number of channels.
        margin: rows and columns on each side that the joint map has and the branch's map has not.
        grid: rows and columns of the branch's map.
    """

    def __init__(self, start: int, chans: int, margin: int, grid: Tuple[int, int]) -> None:
        super().__init__()
        self.start, self.chans, self.margin, self.grid = start, chans, margin, grid
        self.num_children = grid[0] * grid[1]

    def forward(self, x: Tensor) -> Tensor:
        """Joint map ``[b, c, h, w]`` to the branch's map ``[b, chans, rows, columns]``."""
        m, (rows, columns) = self.margin, self.grid
        return x[:, self.start : self.start + self.chans, m : m + rows, m : m + columns]

    @torch.jit.ignore
    def put_back(self, values: Tensor) -> Tensor:
        """Values of the positions ``[b, n, rows * columns]`` to the joint map's grid, with zeros around them."""
        return F.pad(values.unflatten(2, self.grid), [self.margin] * 4)

    def extra_repr(self) -> str:
        return f"channels {self.start} to {self.start + self.chans - 1}, margin {self.margin}"


class Level(nn.Module):
    """Convolutions from a branch to the next, whose map joins the others: ``[b, c, h, w] -> [b, c + out, h, w]``.

    Args:
        before: place of the map that they read.
        widths: channels of the convolutions.
    """

    def __init__(self, before: Place, widths: Sequence[int]) -> None:
        super().__init__()
        self.before = before
        self.convs = _convolutions(before.chans, widths)
        self.margin = before.margin + len(widths)

    def forward(self, x: Tensor) -> Tensor:
        m = self.margin
        return torch.cat([x, F.pad(self.convs(self.before(x)), (m, m, m, m))], dim=1)


class HomogeneousCaps(ForwardMethods):
    """Joint map ``[b, c, h, w]`` to scores ``[b, n]`` and the class capsules of all branches in a row, ``[b, n, c]``.

    Args:
        places: of the branches' maps. Together they have the channels of the joint map.
        num_classes: class capsules of each branch.
    """

    def __init__(self, places: Sequence[Place], num_classes: int) -> None:
        super().__init__()
        self.places: Any = nn.ModuleList(places)
        chans, sizes = (
            [place.chans for place in places],
            [place.chans * place.num_children for place in places],
        )
        self.sizes = sizes
        self.starts = [sum(sizes[:k]) for k in range(len(sizes))]
        self.weight = nn.Parameter(
            torch.empty(sum(sizes), num_classes)
        )  # [d * i, n], one branch after the other
        nn.init.normal_(self.weight, std=DEVIATION)
        self.bn = nn.BatchNorm1d(sum(chans), eps=EPSILON, affine=False)  # over images and classes
        self.bias = nn.Parameter(torch.zeros(sum(chans)))
        self.branch_weight = nn.Parameter(torch.ones(len(places)))
        self.merge_bn = nn.BatchNorm1d(len(places), eps=EPSILON, affine=False)  # over images and classes
        self.merge_bias = nn.Parameter(torch.zeros(len(places)))

    def forward(self, x: Tensor) -> Tuple[Tensor, Tensor]:
        poses, lengths = self._capsules(x)
        poses = poses.transpose(1, 2)  # before the scores, which timm takes for the result of an FX graph
        merged = self.merge_bn(lengths * self.branch_weight[:, None]) + self.merge_bias[:, None]
        return merged.sum(dim=1), poses

    def _capsules(self, x: Tensor) -> Tuple[Tensor, Tensor]:
        """Class capsules ``[b, c, n]``, and the lengths of each branch's ``[b, branches, n]``."""
        sums: List[Tensor] = []
        for k, place in enumerate(self.places):
            weight = self.weight[self.starts[k] : self.starts[k] + self.sizes[k]]
            weight = weight.unflatten(0, (place.chans, place.num_children))
            sums.append(torch.matmul(place(x).flatten(2).transpose(0, 1), weight))  # [d, b, n]
        poses = F.relu(self.bn(torch.cat(sums).transpose(0, 1)) + self.bias[:, None])
        lengths: List[Tensor] = []
        for place in self.places:
            lengths.append(capsule_lengths(poses[:, place.start : place.start + place.chans], dim=1))
        return poses, torch.stack(lengths, dim=1)

    @torch.jit.ignore
    @forward_method
    def contributions(self, x: Tensor) -> Tensor:
        """How much each position of the joint map adds to each class, ``[b, n, h, w]``, summing to 1.

        A branch's logit is the length of a class capsule. It is the sum over the positions of their votes' components
        along the capsule, and of a constant, since the norms are linear in evaluation. Negative components are clamped
        at zero. A class to which no position adds anything has an even map.

        Args:
            x: joint map ``[b, c, h, w]``.
        """
        variances: Any = (self.bn.running_var, self.merge_bn.running_var)
        scale, factors = ((variance + EPSILON).rsqrt() for variance in variances)
        poses, lengths = self._capsules(x)
        factors = self.branch_weight * factors
        total = upcast_half(x.new_zeros(()))
        parts = (poses * scale[:, None]).split([place.chans for place in self.places], dim=1)
        weights = self.weight.split(self.sizes)
        for k, place in enumerate(self.places):
            along = parts[k] * (factors[k] / lengths[:, k, None])  # [b, d, n]
            weight = weights[k].unflatten(0, (place.chans, place.num_children))
            votes = torch.einsum("bdi,din,bdn->bni", place(x).flatten(2), weight, along)
            total = total + upcast_half(place.put_back(votes)).clamp_min(0)
        whole = total.sum(dim=(2, 3), keepdim=True)
        even = torch.full_like(total, 1 / (total.shape[2] * total.shape[3]))
        return torch.where(whole > 1e-12, total / whole.clamp_min(1e-12), even)


class HVCapsNet(CapsuleNet):
    """Nine convolutions, three branches of class capsules without routing. ``forward_capsules`` has no couplings.

    The feature map is the joint map of the branches: ``[b, 64 + 112 + 160, h - 6, w - 6]``, zeros around the smaller
    maps. A class capsule is that of the three branches in a row.

    Args:
        num_classes: classes; 0 omits the class capsules.
        in_chans, img_size: of the images; at least 19 pixels, and the class layer has weights for every position.
        widths: channels of the 3x3 convolutions, as many in each of the three levels.
        decoder: build the reconstruction decoder.
        global_pool: ``"avg"``; ``""`` returns the feature map without class capsules.
        drop_rate: dropout of single numbers of the children.

    Raises:
        ValueError: an argument is out of range.
    """

    map_quantity = "vote component"

    def __init__(
        self,
        num_classes: int = 10,
        in_chans: int = 1,
        img_size: Union[int, Tuple[int, int]] = 28,
        widths: Tuple[int, ...] = (32, 48, 64, 80, 96, 112, 128, 144, 160),
        decoder: Union[bool, str] = False,
        global_pool: str = "avg",
        drop_rate: float = 0.0,
    ) -> None:
        super().__init__(num_classes, in_chans, img_size, global_pool, fixed_input_size=True, decoder=decoder)
        depth = len(widths) // 3
        if not widths or len(widths) % 3:
            raise ValueError(f"widths must be a multiple of three numbers, not {widths}")
        h, w = (size - 2 * depth for size in self.img_size)
        if min(h, w) <= 4 * depth:
            raise ValueError(f"img_size={self.img_size} is too small for this network's convolutions")

        stages: "OrderedDict[str, nn.Module]" = OrderedDict(level1=_convolutions(in_chans, widths[:depth]))
        self.places = [Place(0, widths[depth - 1], 0, (h, w))]
        for level in (1, 2):
            before, margin = self.places[-1], level * depth
            own = widths[margin : margin + depth]
            stages[f"level{level + 1}"] = Level(before, own)
            grid = (h - 2 * margin, w - 2 * margin)
            self.places.append(Place(before.start + before.chans, own[-1], margin, grid))
        self.stages = nn.Sequential(stages)
        ends = [place.start + place.chans for place in self.places]
        self.num_features = self.head_hidden_size = self.class_dim = ends[-1]
        self.feature_info = feature_levels((name, chs, 1) for name, chs in zip(stages, ends, strict=True))
        self.head_drop = nn.Dropout(drop_rate)
        self._make_head()

    def _make_classifier(self) -> nn.Module:
        return HomogeneousCaps(self.places, self.num_classes)

    @torch.jit.ignore
    def no_weight_decay(self) -> Set[str]:
        return super().no_weight_decay() | {"class_caps.branch_weight"}

    def reconstruct(self, poses: Tensor, target: Optional[Tensor] = None) -> Tensor:
        """As in :class:`CapsuleNet`, but the class must be given: the length of its capsule is not its score.

        Raises:
            ValueError: ``target`` is None.
            RuntimeError: the model was created without ``decoder=True``.
        """
        if target is None and self.decoder is not None:
            raise ValueError("the longest capsule need not be the prediction: give target=scores.argmax(1)")
        return super().reconstruct(poses, target)

    def _class_capsules(self, x: Tensor) -> Tuple[Tensor, Tensor]:
        scores, poses = self.class_caps(self.head_drop(x))
        return scores, poses

    def forward_capsules(self, x: Tensor) -> CapsuleOutput:
        """Images to scores ``[b, n]`` and class capsules ``[b, n, e]``; ``couplings`` is empty (no routing)."""
        scores, poses = self.forward_poses(x)
        return CapsuleOutput(scores, poses, scores, ())

    def coupling_map(self, x: Tensor) -> Tensor:
        """Images to ``[b, n, h', w']``: share of each position of the joint map in each class, summing to 1.

        There are no couplings. The share is the component of the position's votes along the class capsules, clamped at
        zero and normalised (:meth:`HomogeneousCaps.contributions`).
        """
        self._require_classes()
        return self.class_caps.contributions(self.forward_features(x))


_cfg = partial(
    model_cfg,
    fixed_input_size=True,
    first_conv="stages.level1.0.conv",
    classifier="class_caps",
    paper_name="No Routing Needed Between Capsules",
    paper_ids="arXiv:2001.09136",
)

default_cfgs = zoo_cfgs(
    {
        # grey values in -1..1, as in the paper
        "hvc": _cfg(input_size=(1, 28, 28), pool_size=(22, 22), mean=(0.5,), std=(0.5,)),
    }
)

_create_hvc = partial(build_capsule_model, HVCapsNet)


@register_model
def hvc(pretrained: bool = False, **kwargs: Any) -> HVCapsNet:
    """Capsules without routing: nine convolutions, three branches, element-wise weights: MNIST accuracy 99.83"""
    return _create_hvc("hvc", pretrained, defaults={}, **kwargs)
