"""Routing statistics: entropy, dead capsules and votes, on couplings made by hand and on every family of the zoo."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from capszoo.errors import CapszooError
from capszoo.explain.routing_stats import BINS, coupling_entropy, routing_stats
from capszoo.layers.squash import squash
from capszoo.models import CapsuleOutput
from capszoo.models._base import CouplingLayout, Votes
from tests.support.errors import refuses
from tests.support.zoo import calibrate, has_capsules, images, names, slow_unless, small

FAMILIES = (
    "capsnet_dynamic",
    "capsnet_dynamic_multimnist",
    "capsnet6_dynamic",
    "capsnet_em_norb_small",
    "capsnet6_em",
    "idpa_cnn",
    "idpa_cnn_cifar100",
    "cnn_routingpool",
    "resnet20_routingcaps",
    "encapnet6",
)


#: of layers that others of the list have: in the slow suite
REPEATED = ("capsnet_dynamic_multimnist", "capsnet6_em", "idpa_cnn_cifar100")


def test_entropy_of_even_and_of_single_couplings() -> None:
    assert coupling_entropy(torch.full((2, 5, 3), 1 / 5), 1) == pytest.approx(torch.ones(2, 3))
    single = torch.zeros(2, 5, 3)
    single[:, 2] = 1
    assert torch.equal(coupling_entropy(single, 1), torch.zeros(2, 3))
    half = torch.tensor([[0.5, 0.5, 0.0, 0.0]])
    assert float(coupling_entropy(half, 1)) == pytest.approx(0.5)
    assert torch.isnan(coupling_entropy(torch.ones(2, 1, 3), 1)).all(), "nothing to choose from"


class ByHand(nn.Module):
    """Couplings, votes and scores as given, the same for every image."""

    def __init__(self, couplings: Tensor, over: str | None, votes: Tensor | None = None) -> None:
        super().__init__()
        self.couplings, self.over, self.votes = couplings, over, votes
        self.poses = torch.tensor([[1.0, 0.0], [0.0, 2.0]])

    def coupling_layouts(self) -> tuple[CouplingLayout, ...]:
        return (CouplingLayout(1, self.over),)

    def forward_capsules(self, images: Tensor) -> CapsuleOutput:
        b = len(images)
        scores = torch.tensor([[0.1, 0.7, 0.2]]).expand(b, -1)
        return CapsuleOutput(
            scores, self.poses.expand(b, -1, -1), scores, (self.couplings.expand(b, -1, -1),)
        )

    def class_votes(self, images: Tensor) -> Votes:
        if self.votes is None:
            raise NotImplementedError
        b = len(images)
        return Votes(self.votes.expand(b, -1, -1, -1), self.poses.expand(b, -1, -1), True)


def test_dead_parents_and_dead_children() -> None:
    batches = [(torch.zeros(2, 1), None), (torch.zeros(3, 1), None)]
    # [j, i]: the third gets 1.5 of 33 per cent
    over_parents = torch.tensor([[0.6, 0.5], [0.38, 0.49], [0.02, 0.01]])
    found = routing_stats(ByHand(over_parents[None], "parents"), batches)
    (layer,) = found.layers
    assert (found.n, layer.positions, layer.parents, layer.children, layer.dead) == (5, 1, 3, 2, 1)
    assert layer.competing == 3 and layer.peak == pytest.approx(0.55)
    entropy = -sum(c * math.log(c) for c in over_parents.flatten().tolist()) / 2 / math.log(3)
    assert layer.entropy == pytest.approx(entropy)
    assert found.never_predicted == (0, 2) and found.curve is None
    over_children = torch.tensor([[0.97, 0.02, 0.01], [0.98, 0.01, 0.01]])
    (layer,) = routing_stats(ByHand(over_children[None], "children"), batches).layers
    assert (layer.dead, layer.competing) == (2, 3)
    with refuses(CapszooError, names=["1", "children"]):
        routing_stats(ByHand(over_parents[None], "children"), batches)


def test_votes_are_sorted_by_their_cosine_with_the_own_class() -> None:
    votes = torch.zeros(1, 2, 4, 2)
    # along, against, along, across
    votes[0, 0] = torch.tensor([[3.0, 0.0], [-0.5, 0.0], [5.0, 0.1], [0.0, 2.0]])
    batches = [(torch.zeros(3, 1), torch.zeros(3, dtype=torch.long))]
    curve = routing_stats(ByHand(torch.full((1, 2, 4), 0.5), "parents", votes), batches).curve
    assert curve is not None and curve.classes and sum(curve.share) == pytest.approx(100)
    assert curve.share[0] == curve.share[BINS // 2] == 25 and curve.share[-1] == 50
    assert curve.length[0] == pytest.approx(0.5) and curve.length[-1] == pytest.approx(4.0, abs=1e-3)
    assert curve.length[1] is None and curve.cosine[-1] == pytest.approx(0.95)


@pytest.mark.parametrize("name", slow_unless(set(FAMILIES) - set(REPEATED), FAMILIES))
def test_every_family(name: str) -> None:
    model = small(name).eval()
    calibrate(model)
    x = images(model)
    found = routing_stats(model, [(x, None)])
    with torch.no_grad():
        output = model.forward_capsules(x)
        votes, poses, classes = model.class_votes(x)
    assert len(found.layers) == len(output.couplings) == len(model.coupling_layouts())
    assert all(layer.entropy is not None and -1e-6 < layer.entropy < 1 + 1e-5 for layer in found.layers)
    assert votes.shape[:2] == poses.shape[:2] and votes.shape[3] == poses.shape[2]
    assert found.curve is not None and found.curve.classes == classes
    if classes:
        torch.testing.assert_close(poses, output.poses, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "name",
    [
        "capsnet_dynamic",
        "capsnet_dynamic_multimnist",
        "capsnet6_dynamic",
        "resnet20_routingcaps",
        "encapnet6",
        "cnn_routingpool",
        "idpa_cnn",
        "capsnet_em_norb_small",
        "capsnet6_em",
    ],
)
@torch.no_grad()
def test_votes_are_those_that_are_routed(name: str) -> None:
    """The coupled sum of the votes is the parent before its activation."""
    model = small(name).eval()
    x = images(model)
    votes, poses, _ = model.class_votes(x)
    couplings = torch.ones(1)
    if name != "encapnet6":
        couplings = model.forward_capsules(x).couplings[-1].flatten(2).unsqueeze(-1)  # [b, j, i, 1]
    total = (couplings * votes).sum(2)
    if "_em" in name:
        features = model.forward_features(x)
        if name == "capsnet6_em":
            present = model._mid(features)[1].flatten(1)
        else:
            present = model.class_caps.votes(model._children(features))[1]
        weight = couplings * present[:, None, :, None] + model.class_caps.eps / couplings.shape[1]
        total = (weight * votes).sum(2) / weight.sum(2)
    elif name == "idpa_cnn":
        total = model.capsules.classes.norm(total)
    elif name != "cnn_routingpool":
        total = squash(total)
    torch.testing.assert_close(total, poses, rtol=1e-3, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in names() if has_capsules(name)])
def test_layouts_of_every_model(name: str) -> None:
    model = small(name).eval()
    found = routing_stats(model, [(images(model), None)])  # raises where couplings do not sum to 1 as stated
    assert len(found.layers) == len(model.coupling_layouts())


def test_plain_networks_are_refused() -> None:
    with refuses(CapszooError, names=["capsule", "network"]):
        routing_stats(nn.Linear(2, 2), [(torch.zeros(1, 2), None)])
    plain = small("cnn_sabour")
    with pytest.raises(CapszooError, match="without capsules|no capsule"):
        routing_stats(plain, [(images(plain), None)])
    with refuses(CapszooError, names=["images"]):
        routing_stats(small("cnn_routingpool"), [])


def test_credit_has_no_entropy_but_a_negative_share() -> None:
    credit = torch.tensor([[[3.0, -1.0], [0.0, 0.1], [-2.0, 4.0]]])  # [b, parents, children]
    (layer,) = routing_stats(ByHand(credit, None), [(torch.zeros(1, 3, 4, 4), None)]).layers
    assert layer.over is layer.entropy is layer.peak is None
    assert layer.negative == pytest.approx(3 / 10.1) and (layer.dead, layer.competing) == (1, 3)
    with refuses(CapszooError, names=["credit", "finite"]):
        routing_stats(ByHand(credit * torch.nan, None), [(torch.zeros(1, 3, 4, 4), None)])
