"""What each iteration of routing changes: by hand from the naive routing, and on every family of the zoo."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from capszoo.errors import CapszooError
from capszoo.explain.convergence import ITERATIONS, iteration_changes
from capszoo.explain.routing_stats import canonical
from capszoo.layers.dynamic import dynamic_routing
from tests.support.errors import refuses
from tests.support.zoo import calibrate, has_capsules, images, names, small

QUICK = ("capsnet_em_norb_small", "capsnet6_em", "idpa_cnn", "cnn_routingpool", "resnet20_routingcaps")

#: networks with couplings that no iteration changes
WITHOUT_ITERATIONS = ("efficient_capsnet", "resnet20_selfrouting")


def logits(votes: Tensor, count: int) -> Tensor:
    """b_ij of Procedure 1 at the start of the last of so many iterations, [b, j, i]."""
    found = torch.zeros(votes.shape[:3])
    for _ in range(count - 1):
        couplings = found.softmax(1)
        total = (couplings.unsqueeze(-1) * votes).sum(2)
        square = total.square().sum(-1, keepdim=True)
        found = found + (votes * (total * square.sqrt() / (1 + square)).unsqueeze(2)).sum(-1)
    return found


def test_the_logits_of_dynamic_routing() -> None:
    model = small("capsnet_dynamic").eval()
    x = images(model)
    with torch.no_grad():
        votes = model.class_votes(x).votes * 8  # large enough for couplings to differ
    assert torch.allclose(logits(votes, 3).softmax(1), dynamic_routing(votes, 3)[1], atol=1e-5)
    with torch.no_grad():
        model.class_caps.weight.mul_(8)
        votes = model.class_votes(x).votes
    (changes,) = iteration_changes(model, [x])
    assert changes.own == model.routing_iters and len(changes.logits) == len(changes.couplings) == ITERATIONS
    assert changes.logits[0] == changes.couplings[0] == 0, "the first iteration's couplings are even"
    for t in range(2, ITERATIONS + 1):
        before, now = logits(votes, t - 1), logits(votes, t)
        step = (now - now.mean(1, keepdim=True)) - (before - before.mean(1, keepdim=True))
        assert changes.logits[t - 1] == pytest.approx(float(step.abs().mean()), rel=1e-3)
        change = (now.softmax(1) - before.softmax(1)).abs().mean() * votes.shape[1]
        assert changes.couplings[t - 1] == pytest.approx(float(change), rel=1e-3)
    assert len(iteration_changes(model, [x], iterations=2)[0].logits) == 2
    halves = iteration_changes(model, [x[:1], x[1:]])[0]
    assert halves.logits == pytest.approx(changes.logits, rel=1e-4)


def check(name: str) -> None:
    """The layer looked at makes other iterations, those below it their own; afterwards all is as it was."""
    model = small(name)
    calibrate(model)
    x = images(model)
    counts = [(m, getattr(m, "num_iters", None)) for m in model.modules()]
    model.train()
    changes = iteration_changes(model, [x])
    assert model.training and all(getattr(m, "num_iters", None) == count for m, count in counts)
    assert len(changes) == (0 if name in WITHOUT_ITERATIONS else len(model.coupling_layouts()))
    for layer in changes:
        assert len(layer.couplings) == ITERATIONS and layer.own in (2, 3) and max(layer.couplings) > 0
        # credit is no softmax of logits
        assert len(layer.logits) == (0 if name == "resnet20_heinsen" else ITERATIONS)
        assert all(math.isfinite(value) for value in (*layer.logits, *layer.couplings))


@pytest.mark.parametrize("name", QUICK)
def test_families(name: str) -> None:
    check(name)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in names() if has_capsules(name)])
def test_every_model(name: str) -> None:
    check(name)


def test_layers_below_make_their_own_rounds() -> None:
    """The second layer's couplings after its own number of iterations are those of the network."""
    model = small("capsnet6_dynamic").eval()
    calibrate(model)
    x = images(model)
    own = model.routing_iters
    first, second = iteration_changes(model, [x], iterations=2)
    for layer in (model.mid_caps, model.class_caps):
        layer.num_iters = 2
    with torch.no_grad():
        both = model.forward_capsules(x).couplings
        model.mid_caps.num_iters = own
        upper = model.forward_capsules(x).couplings[1]
    for changes, couplings, layout in zip(
        (first, second), (both[0], upper), model.coupling_layouts(), strict=True
    ):
        c = canonical(couplings, layout)
        even = 1 / c.shape[2 if layout.over == "parents" else 3]
        assert changes.own == own and changes.couplings[0] == 0
        assert changes.couplings[1] == pytest.approx(float((c - even).abs().mean() / even), rel=1e-3)
    assert not torch.allclose(both[1], upper, rtol=1e-6, atol=0), "the layer below does matter"


def test_what_cannot_be_measured() -> None:
    with refuses(CapszooError, names=["capsule", "network"]):
        iteration_changes(nn.Linear(2, 2), [torch.zeros(1, 2)])
    with refuses(CapszooError, names=["images"]):
        iteration_changes(small("cnn_routingpool"), [])
    assert iteration_changes(small("encapnet6"), []) == iteration_changes(small("cnn_sabour"), []) == ()


def test_the_change_of_credit_is_its_own() -> None:
    """Credit has no logits; before the first iteration there is none."""
    model = small("resnet20_heinsen").eval()
    x = images(model)
    changes = iteration_changes(model, [x], iterations=2)
    assert [layer.logits for layer in changes] == [()] * 3 and [layer.own for layer in changes] == [2] * 3
    with torch.no_grad():
        second = model.forward_capsules(x).couplings[2]
        model.head.classes.num_iters = 1
        first = model.forward_capsules(x).couplings[2]
    expected = float((second - first).abs().mean() / second.abs().mean())
    assert changes[2].couplings == pytest.approx((1.0, expected), rel=1e-4)
