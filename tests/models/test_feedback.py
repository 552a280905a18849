"""The feedback agreement on networks of the zoo and of timm: places, sizes, gradients, and no trace left."""

from __future__ import annotations

import copy
import pickle

import pytest
import timm
import torch
from torch import nn

import capszoo  # noqa: F401  (registers the models)
from capszoo.layers import engine_report
from capszoo.layers.sinkhorn import SinkhornUnit
from capszoo.models._feedback import FeedbackAgreement, encapnet_feedback
from tests.support.errors import refuses

TINY = dict(groups=4, depths=(1, 2, 5), strides=(1, 2, 2), pose_dims=(2, 2, 4), stem_chans=(4,), img_size=9)


def tiny() -> nn.Module:
    return timm.create_model("encapnet_v1", **TINY, num_classes=3).train()


def images(model: nn.Module, batch: int = 4) -> torch.Tensor:
    return torch.randn(batch, model.in_chans, *model.img_size)


@pytest.fixture(scope="module")
def resnet() -> nn.Module:
    return timm.create_model("resnet18", num_classes=3)


RESNET = dict(input_size=(3, 33, 40))
LAYERS = [("layer1", "layer2"), ("layer2", "layer3")]


def hooks(model: nn.Module) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


def test_units_of_the_paper_on_encapnet_v1() -> None:
    model = timm.create_model("encapnet_v1", device="meta")
    feedback = encapnet_feedback(model, units=2)
    assert sum(p.numel() for p in feedback.parameters()) == 1_134_744
    assert len(feedback.units) == 8
    assert [unit.stride for unit in feedback.units[::2]] == [(1, 1), (2, 2), (2, 2), (2, 2)]
    assert all(unit.stride == (1, 1) and unit.groups == 32 for unit in feedback.units[1::2])
    # the release's places: a module's input from the middle of the stack, Type I from the whole stack
    assert feedback.pairs[2:4] == [
        ("stages.module1", "stages.module2.type2.0"),
        ("stages.module2.type1", "stages.module2.type2.2"),
    ]
    one = encapnet_feedback(timm.create_model("encapnet_v1", device="meta"))
    assert one.pairs == feedback.pairs[::2]


def test_places_follow_the_depths() -> None:
    assert tiny().feedback_pairs(2) == [
        ("stages.stem", "stages.module1.type1"),
        ("stages.module1", "stages.module2.type2.0"),
        ("stages.module2.type1", "stages.module2.type2.0"),
        ("stages.module2", "stages.module3.type2.1"),
        ("stages.module3.type1", "stages.module3.type2.3"),
    ]
    with pytest.raises(ValueError, match="1 or 2"):
        tiny().feedback_pairs(3)


@pytest.mark.parametrize("name", ["encapnet6", "resnet18_encap"])
def test_the_papers_other_networks(name) -> None:
    model = timm.create_model(name, device="meta")
    feedback = encapnet_feedback(model, units=2)
    if name == "resnet18_encap":
        assert feedback.pairs[:2] == [
            ("stages.stem", "stages.layer1"),
            ("stages.layer1.0", "stages.layer1.1"),
        ]
        assert len(feedback.units) == 8
    else:
        assert feedback.pairs == [("stages.conv4", "stages.module1.type1")]


def test_loss_is_the_sum_of_the_units() -> None:
    model = tiny()
    feedback = encapnet_feedback(model, units=2, groups=4, weight=3.0)
    kept: dict[str, torch.Tensor] = {}
    modules = dict(model.named_modules())
    for name in {n for pair in feedback.pairs for n in pair}:
        modules[name].register_forward_hook(lambda m, a, out, name=name: kept.__setitem__(name, out))
    model(images(model))
    want = sum(
        unit(kept[low], kept[high]) for unit, (low, high) in zip(feedback.units, feedback.pairs, strict=True)
    )
    loss = feedback()
    torch.testing.assert_close(loss, 3.0 * want)
    assert float(loss.detach()) != 0.0
    with refuses(RuntimeError, names=["training", "mode"]):  # it is used once, and dropped
        feedback()


def test_gradients_reach_model_and_units() -> None:
    model = tiny()
    feedback = encapnet_feedback(model, units=2, groups=4)
    model(images(model))
    feedback().backward()
    assert model.stages.stem.conv.weight.grad.abs().sum() > 0
    assert model.head.weight.grad is None  # the class layer has no part in it
    assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in feedback.parameters())


@pytest.mark.parametrize("metric", ["sinkhorn", "kl"])
def test_a_step_lowers_it_on_timms_resnet18(resnet, metric) -> None:
    model = copy.deepcopy(resnet).train()
    feedback = FeedbackAgreement(model, LAYERS, metric=metric, **RESNET)
    assert [unit.stride for unit in feedback.units] == [(2, 2), (2, 2)]  # 9x10, 5x5, 3x3
    x = torch.randn(6, 3, 33, 40)
    optimizer = torch.optim.Adam([*model.parameters(), *feedback.parameters()], lr=1e-3)
    losses = []
    for _ in range(4):
        optimizer.zero_grad()
        model(x)
        loss = feedback()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert all(torch.isfinite(torch.tensor(losses))) and losses[-1] < losses[0]


def test_model_is_untouched(resnet) -> None:
    model = copy.deepcopy(resnet).eval()
    model.layer3.train()  # odd flags, to see them restored
    state = {k: v.clone() for k, v in model.state_dict().items()}
    flags = [m.training for m in model.modules()]
    probe = torch.randn(2, 3, 33, 40)
    feedback = FeedbackAgreement(model, LAYERS, **RESNET)
    assert [m.training for m in model.modules()] == flags
    assert all(torch.equal(v, state[k]) for k, v in model.state_dict().items())
    assert len(list(feedback.parameters())) and not set(feedback.parameters()) & set(model.parameters())
    model.eval()
    with torch.no_grad():
        want = model(probe)
        assert not feedback._features  # nothing is kept in evaluation
        with refuses(RuntimeError, names=["training", "mode"]):
            feedback()
        feedback.remove()
        assert hooks(model) == 0
        assert torch.equal(model(probe), want)
    model.train()
    model(probe)
    with pytest.raises(RuntimeError, match="removed"):
        feedback()
    torch.jit.script(model)  # refuses modules with hooks


def test_copies_do_not_listen(resnet) -> None:
    model = copy.deepcopy(resnet).train()
    feedback = FeedbackAgreement(model, LAYERS, **RESNET)
    x, other = torch.randn(2, 3, 33, 40), torch.randn(2, 3, 33, 40)
    model(x)
    kept = dict(feedback._features)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        twin.train()
        twin(other)
        assert all(feedback._features[name] is kept[name] for name in kept)


def test_a_forward_in_evaluation_mode_keeps_the_features() -> None:
    model = tiny()
    feedback, x = encapnet_feedback(model), images(model)
    model(x)
    model.eval()(x)
    assert feedback() > 0


def test_a_report_of_the_engines_does_not_replace_the_features() -> None:
    model = tiny()
    feedback = encapnet_feedback(model, groups=4)
    model(images(model))
    kept = dict(feedback._features)
    engine_report(model, training=True, input_size=(model.in_chans, *model.img_size))
    assert feedback._features.keys() == kept.keys()
    assert all(feedback._features[name] is kept[name] for name in kept)


def test_gradient_checkpointing_gives_the_same_loss_and_leaves_nothing() -> None:
    results = []
    for checkpointing in (False, True):
        torch.manual_seed(3)
        model = tiny()
        feedback = encapnet_feedback(model, units=2, groups=4)
        model.set_grad_checkpointing(checkpointing)
        torch.manual_seed(4)
        scores = model(images(model))
        loss = feedback() + scores.sum()
        loss.backward()
        results.append((loss.detach(), model.stages.stem.conv.weight.grad.clone()))
        assert not feedback._features
    torch.testing.assert_close(results[0], results[1], rtol=1e-4, atol=1e-5)


def test_a_forward_that_fails_leaves_nothing_listening() -> None:
    model = tiny()
    feedback = encapnet_feedback(model, groups=4)
    with pytest.raises(AssertionError):
        model(torch.randn(2, 3, 20, 20))
    model.forward(images(model))  # not a call of the model: no hook of its own says when to listen
    with refuses(RuntimeError, names=["training", "mode"]):
        feedback()


@pytest.mark.parametrize(
    "options", [dict(generator="cnn"), dict(critic=False), dict(cost="l2"), dict(bias_fix=False)]
)
def test_options_reach_the_units(options) -> None:
    model = tiny()
    feedback = encapnet_feedback(model, groups=4, **options)
    unit = feedback.units[0]
    plain = SinkhornUnit(4, 8, 1, groups=4, **options)
    assert repr(unit) == repr(plain)
    model(images(model))
    assert torch.isfinite(feedback())


def test_groups_shrink_to_what_the_channels_allow() -> None:
    model = nn.Sequential(nn.Conv2d(3, 6, 3, padding=1), nn.Conv2d(6, 9, 3, 2, padding=1))
    feedback = FeedbackAgreement(model, [("0", "1")], input_size=(3, 8, 8))
    assert feedback.units[0].groups == 1
    assert FeedbackAgreement(model, [("0", "1")], groups=3, input_size=(3, 8, 8)).units[0].groups == 3


class ChannelsLast(nn.Module):
    """Features in Swin's layout."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.second = nn.Linear(8, 8)

    def forward(self, x):
        return self.second(self.first(x.permute(0, 2, 3, 1))).mean((1, 2))


def test_layouts() -> None:
    model = ChannelsLast().train()
    feedback = FeedbackAgreement(model, [("first", "second")], layout="nhwc", groups=4, input_size=(4, 6, 5))
    model(torch.randn(3, 4, 6, 5))
    assert torch.isfinite(feedback()) and feedback.units[0].deconv.weight.shape[0] == 8

    vit = timm.create_model("vit_tiny_patch16_224", depth=2, embed_dim=32, num_heads=2, img_size=32).train()
    feedback = FeedbackAgreement(vit, [("blocks.0", "blocks.1")], layout="nlc", input_size=(3, 32, 32))
    assert feedback.prefix == 1
    vit(torch.randn(3, 3, 32, 32))
    assert torch.isfinite(feedback())


@pytest.mark.parametrize(
    "pairs, options, message",
    [
        ([("layr1", "layer2")], {}, "'layer1'"),
        ([("layer1", "fc")], {}, "no feature map"),
        ([("layer2", "layer1")], {}, "divided by a whole number"),
        ([], {}, "at least one"),
        ([("layer1", "layer2")], dict(layout="cnhw"), "'nchw', 'nhwc' or 'nlc'"),
        ([("layer1", "layer2")], dict(metric="js"), "'sinkhorn' or 'kl'"),
    ],
)
def test_wrong_arguments_say_what_is_right(resnet, pairs, options, message) -> None:
    model = copy.deepcopy(resnet)
    with pytest.raises(ValueError, match=message):
        FeedbackAgreement(model, pairs, **options, **RESNET)
    assert hooks(model) == 0


def test_a_module_that_is_not_called_is_named() -> None:
    model = ChannelsLast()
    model.spare = nn.Conv2d(3, 3, 1)
    with refuses(ValueError, names=["spare"]):
        FeedbackAgreement(model, [("first", "spare")], layout="nhwc", input_size=(4, 6, 5))
    with pytest.raises(TypeError, match="FeedbackAgreement"):
        encapnet_feedback(model)
    with pytest.raises(ValueError, match="input_size="):
        FeedbackAgreement(model, [("first", "second")], layout="nhwc")
