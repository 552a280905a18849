"""Capsule heads on timm backbones: layouts, sizes, routings, freezing, errors, export. Nothing is downloaded."""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from safetensors.torch import save_file
from timm.models import save_for_hf
from timm.models._manipulate import group_parameters
from torch import nn

import capszoo
from capszoo._utils.choices import HEAD_ROUTINGS
from capszoo.models._backbones import BackboneFeatures, Unused, create_backbone, feature_levels_of
from capszoo.models._heads import HEADS, create_head
from capszoo.preprocess import model_transform
from capszoo.recipes.finetune import backbone_source
from tests.support.errors import refuses
from tests.support.zoo import calibrate, images, slow_unless

#: backbone, a small size, and another that is not square
BACKBONES: dict[str, tuple[int, tuple[int, int]]] = {
    "resnet18": (64, (64, 96)),
    "convnext_atto": (64, (96, 64)),
    "efficientnet_b0": (64, (64, 96)),
    "mobilenetv3_small_050": (64, (96, 64)),
    "swin_tiny_patch4_window7_224": (128, (128, 192)),
    "vit_tiny_patch16_224": (64, (64, 96)),
}
#: each backbone with another routing
PAIRS = list(
    zip(BACKBONES, ["idpa", "dynamic", "em", "self_routing", "self_attention", "routing_pool"], strict=True)
)
SCRIPTABLE = ("resnet18", "convnext_atto", "efficientnet_b0", "mobilenetv3_small_050")


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any attempt to reach the Hub is an error."""
    import socket

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("a test went to the network")

    monkeypatch.setattr(socket.socket, "connect", refuse)


def attached(backbone: str, routing: str, size: Any = None, classes: int = 5, **args: Any) -> Any:
    torch.manual_seed(0)
    size = BACKBONES[backbone][0] if size is None else size
    net = capszoo.attach_head(backbone, routing, num_classes=classes, img_size=size, **args).eval()
    calibrate(net)
    return net


def check(net: Any, routing: str) -> None:
    x = images(net, 2)
    with torch.no_grad():
        scores = net(x)
        assert scores.shape == (2, net.num_classes) and torch.isfinite(scores).all()
        if not HEADS[routing].has_capsules:
            return
        out, heat = net.forward_capsules(x), net.coupling_map(x)
    torch.testing.assert_close(out.scores, scores, rtol=1e-4, atol=1e-5)
    assert heat.shape == (2, net.num_classes, *net.head.grid)
    torch.testing.assert_close(heat.sum((2, 3)), torch.ones(2, net.num_classes))
    layout = net.coupling_layouts()[-1]
    if layout.over is None:  # credit
        return
    couplings = out.couplings[-1].flatten(layout.parents + 1)  # parents, then all children
    over = layout.parents if layout.over == "parents" else layout.parents + 1
    assert bool(((couplings.sum(over) - 1).abs() < 1e-4).all())


@pytest.mark.parametrize(("backbone", "routing"), PAIRS)
def test_every_backbone_at_two_sizes(backbone: str, routing: str) -> None:
    for size in BACKBONES[backbone]:
        net = attached(backbone, routing, size)
        check(net, routing)
        rows, columns = net.img_size
        grid = net.stages.backbone.grid
        assert rows / grid[0] == columns / grid[1], "the grid has the image's proportions"


def test_every_routing_is_named_where_users_look(root: Path) -> None:
    assert tuple(HEADS) == HEAD_ROUTINGS
    page = (root / "docs" / "fine-tune.md").read_text(encoding="utf-8")
    assert [name for name in HEADS if f"`{name}`" not in page] == []


@pytest.mark.parametrize("classes", [5, 0])
@pytest.mark.parametrize(
    ("backbone", "routing"),
    [*(("resnet18", name) for name in HEADS), *((name, "avg") for name in BACKBONES if name != "resnet18")],
)
def test_every_parameter_gets_a_gradient(backbone: str, routing: str, classes: int) -> None:
    """Nothing is left over of the backbone's own classifier. DistributedDataParallel refuses what has no gradient."""
    net = attached(backbone, routing, BACKBONES[backbone][1], classes)
    assert any(isinstance(module, Unused) for module in net.stages.backbone.model.children())
    if classes:
        check(net, routing)
    net.train()(images(net, 3)).square().mean().backward()
    missing = [key for key, p in net.named_parameters() if p.grad is None or not torch.isfinite(p.grad).all()]
    assert not missing


#: The heads that can hold their couplings even, with two layers where they have them.
EVEN = [
    (name, depth)
    for name in HEADS
    if HEADS[name].even
    for depth in (1, 2)
    if depth == 1 or name in "dynamic em"
]


@pytest.mark.parametrize(("routing", "depth"), EVEN)
def test_even_couplings_are_exactly_even(routing: str, depth: int) -> None:
    """The twin that tells what routing buys: the same parameters, and couplings that no image changes."""
    args: dict[str, Any] = {} if routing == "routing_pool" else {"caps_types": 2}
    args |= {"depth": depth} if depth > 1 else {}
    torch.manual_seed(0)
    routed = create_head(16, (4, 4), 3, routing, **args)
    even = create_head(16, (4, 4), 3, routing, even_couplings=True, **args)
    sizes = [{key: p.shape for key, p in head.named_parameters()} for head in (routed, even)]
    assert sizes[0] == sizes[1]
    even.load_state_dict(routed.state_dict())
    x = torch.randn(5, 16, 4, 4)
    with torch.no_grad():
        first, second = routed.eval().route(x), even.eval().route(x)
    for couplings, layout in zip(second.couplings, even.coupling_layouts(), strict=True):
        # over the parents, or in routing_pool over the positions
        parts = couplings.shape[layout.parents] if layout.over == "parents" else 16
        assert torch.equal(couplings, torch.full_like(couplings, 1 / parts))
    assert not torch.equal(first.scores, second.scores)
    if routing == "routing_pool":
        torch.testing.assert_close(second.scores, even.classes(x.mean((2, 3))))  # average pooling
    torch.nn.functional.cross_entropy(even.train()(x), torch.arange(5) % 3).backward()
    assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in even.parameters())


@pytest.mark.parametrize("routing", ["self_routing", "heinsen", "avg", "conv"])
def test_heads_without_an_even_twin_are_refused(routing: str) -> None:
    """Self-routing's activations are its couplings: held even, all classes have one score."""
    with refuses(ValueError, names=[routing, "even_couplings", "dynamic"]):
        create_head(16, (4, 4), 3, routing, even_couplings=True)


def test_a_module_has_a_size_of_its_own() -> None:
    with torch.device("meta"):
        grey = capszoo.attach_head(timm.create_model("resnet18", in_chans=1), "avg", num_classes=3)
        large = capszoo.attach_head(
            capszoo.create_model("resnet20_routingpool", img_size=64), "idpa", num_classes=3
        )
    assert grey.in_chans == 1 and large.img_size == (64, 64)
    assert large.stages.backbone.grid == (16, 16)


def test_native_size_is_the_default() -> None:
    with torch.device("meta"):
        net = capszoo.attach_head("resnet18", "avg", num_classes=3)
    assert net.img_size == (224, 224) and net.stages.backbone.grid == (7, 7)
    with torch.device("meta"):
        net = capszoo.attach_head("vit_tiny_patch16_224", "idpa", num_classes=3)
    assert net.stages.backbone.grid == (14, 14) and net.head.grid == (7, 7), "pooled to at most 8 x 8"
    assert net.default_cfg["pool_size"] == (14, 14) and net.default_cfg["mean"] == (0.5, 0.5, 0.5)


def test_a_module_is_taken_as_it_is() -> None:
    class Tiny(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.head = nn.Conv2d(2, 7, 3, 4, 1), nn.Linear(7, 9)

        def forward_features(self, x: torch.Tensor) -> torch.Tensor:
            return self.conv(x)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.forward_features(x).mean((2, 3)))

    backbone = Tiny()
    net = capszoo.attach_head(backbone, "dynamic", num_classes=3, img_size=(16, 24), in_chans=2, num_iters=2)
    assert net.stages.backbone.model is backbone and net.stages.backbone.grid == (4, 6)
    check(net.eval(), "dynamic")
    assert net.head.classes.num_iters == 2
    # without the methods of timm's models, it has one level and is recomputed as a whole
    x = images(net, 2)
    with torch.no_grad():
        expected, (final, levels) = net.forward_features(x), net.forward_intermediates(x)
    assert torch.equal(final, expected) and [level.shape for level in levels] == [(2, 7, 4, 6)]
    scores = net(x)
    net.set_grad_checkpointing()
    assert torch.equal(net(x), scores)
    net.prune_intermediate_layers(1)
    assert torch.equal(net(x), expected)


def test_a_backbone_that_asserts_against_checkpointing_is_recomputed_as_a_whole() -> None:
    net, calls = attached("vgg11", "avg", 64), []
    first = next(module for module in net.modules() if isinstance(module, nn.Conv2d))
    first.register_forward_pre_hook(lambda *_: calls.append(1))
    for enable, times in ((True, 2), (False, 1)):
        net.set_grad_checkpointing(enable)
        calls.clear()
        net(images(net, 2)).sum().backward()
        assert len(calls) == times


@pytest.mark.parametrize("backbone", SCRIPTABLE)
def test_torchscript(backbone: str) -> None:
    net = attached(backbone, "idpa")
    x = images(net)
    with torch.no_grad():
        torch.testing.assert_close(torch.jit.script(net)(x), net(x), rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("backbone", "routing", "args"),
    [
        *((*pair, {}) for pair in PAIRS),
        ("resnet18", "heinsen", {"levels": 3}),
        ("resnet18", "em", {"even_couplings": True}),
        ("resnet18", "self_attention", {"even_couplings": True}),
    ],
)
def test_exported_file_agrees(backbone: str, routing: str, args: dict[str, Any], tmp_path: Path) -> None:
    pytest.importorskip("onnxscript")
    from capszoo.export.to_onnx import export

    net = attached(backbone, routing, **args)
    outputs = ("scores", "couplings") if "levels" in args else ("scores",)
    report = export(net, tmp_path / "model.onnx", gate="quick", batch=(1, 2, 3), outputs=outputs)
    assert report.passed and report.max_rel_diff <= report.tolerance


def saved(folder: Path, state: dict[str, torch.Tensor], **config: Any) -> str:
    """A folder as timm's save_for_hf writes it."""
    save_file(state, folder / "model.safetensors")
    about = {"num_classes": 10, "classifier": "fc", "first_conv": "conv1"}
    whole = {"architecture": "resnet18", "num_classes": 10, "pretrained_cfg": about, **config}
    (folder / "config.json").write_text(json.dumps(whole))
    return f"local-dir:{folder}"


def test_weights_of_a_backbone_are_whole_and_the_stated_ones(tmp_path: Path) -> None:
    state = timm.create_model("resnet18", num_classes=10).state_dict()
    name = saved(tmp_path, {key: value for key, value in state.items() if not key.startswith("layer1.")})
    with refuses(capszoo.WeightsError, names=["fit", "Missing"]):
        create_backbone(name, pretrained=True)
    name = saved(tmp_path, {f"model.{key}": value for key, value in state.items()})
    with refuses(capszoo.WeightsError, names=["fit", "Missing"]):
        create_backbone(name, pretrained=True)
    deeper = {**state, "layer1.2.conv1.weight": state["layer1.1.conv1.weight"].clone()}
    with refuses(capszoo.WeightsError, names=["fit", "layer1.2.conv1.weight"]):
        create_backbone(saved(tmp_path, deeper), pretrained=True)
    name = saved(tmp_path, state, sha256="0" * 64)
    with refuses(capszoo.WeightsError, names=["sha256", "config.json"]):
        create_backbone(name, pretrained=True)
    about = {"num_classes": 9, "classifier": "fc", "first_conv": "conv1", "label_offset": 1}
    create_backbone(saved(tmp_path, state, pretrained_cfg=about), pretrained=True)
    name = saved(tmp_path, {**state, "of.a.teacher": torch.zeros(1)})  # more than is needed
    one = create_backbone(name, pretrained=True, in_chans=1)
    assert torch.allclose(one.conv1.weight, state["conv1.weight"].sum(1, keepdim=True))


def test_the_network_of_a_backbone_s_folder_is_kept(tmp_path: Path) -> None:
    source = timm.create_model("resnet18", num_classes=10, act_layer="silu").eval()
    name = saved(tmp_path, source.state_dict(), model_args={"act_layer": "silu", "num_classes": 10})
    net = capszoo.attach_head(name, "avg", num_classes=3, img_size=64, pretrained=True).eval()
    assert isinstance(net.stages.backbone.model.act1, nn.SiLU)
    save_for_hf(net, str(tmp_path / "whole"), safe_serialization=True)
    again = capszoo.create_model(f"local-dir:{tmp_path / 'whole'}", pretrained=True).eval()
    x = torch.rand(2, 3, 64, 64)
    with torch.no_grad():
        assert torch.equal(again(x), net(x))
    # timm's factory records the caller's arguments afterwards
    net = capszoo.create_model(
        "caps_head", backbone=name, backbone_pretrained=True, routing="avg", num_classes=3, img_size=64
    )
    save_for_hf(net, str(tmp_path / "other"), safe_serialization=True)
    assert str(tmp_path) not in (tmp_path / "other" / "config.json").read_text()
    again = capszoo.create_model(f"local-dir:{tmp_path / 'other'}", pretrained=True)
    assert isinstance(again.stages.backbone.model.act1, nn.SiLU)
    found = backbone_source(name, "avg")
    assert found.model_args == {
        "backbone": "resnet18",
        "routing": "avg",
        "backbone_args": {"act_layer": "silu"},
    }


@pytest.mark.parametrize(
    "routing, options",
    [("idpa", {"num_iters": 1}), ("avg", {}), ("em", {"caps_types": 4, "even_couplings": True})],
)
def test_a_saved_network_is_the_same_network(tmp_path: Path, routing: str, options: dict[str, Any]) -> None:
    net = attached("resnet18", routing, **options)
    save_for_hf(net, str(tmp_path), safe_serialization=True)
    x = images(net)
    for create in (capszoo.create_model, timm.create_model):
        again = create(f"local-dir:{tmp_path}", pretrained=True).eval()
        with torch.no_grad():
            assert torch.equal(again(x), net(x))


def test_images_are_normalised_as_the_weights_state(tmp_path: Path) -> None:
    net = attached("efficientnet_b0", "avg")
    assert net.pretrained_cfg["crop_pct"] == 0.875  # the backbone's
    net.pretrained_cfg.update(mean=(0.1, 0.2, 0.3), std=(0.4, 0.5, 0.6), crop_pct=1.0)
    save_for_hf(net, str(tmp_path), safe_serialization=True)
    for create in (capszoo.create_model, timm.create_model):
        for pretrained in (True, False):
            transform = model_transform(create(f"local-dir:{tmp_path}", pretrained=pretrained))
            assert (transform.mean, transform.std) == ((0.1, 0.2, 0.3), (0.4, 0.5, 0.6))
            assert transform.crop_pct == 1.0
    levels = capszoo.create_model("caps_head", backbone="resnet18", features_only=True, img_size=64)
    assert levels.pretrained_cfg["mean"] == timm.create_model("resnet18").pretrained_cfg["mean"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "has no config.json: save the backbone with timm's save_for_hf"),
        ("{", "not readable as JSON"),
        ("[]", "no JSON object"),
        ("{}", "architecture is wrong"),
        ('{"architecture": 5}', "architecture is wrong"),
        ('{"architectures": ["ResNetForImageClassification"]}', "names no model of timm"),
        ('{"architecture": "resnt18"}', "unknown architecture 'resnt18': did you mean 'resnet18'"),
        ('{"architecture": "resnet18", "pretrained_cfg": 5}', "pretrained_cfg must be an object"),
    ],
)
def test_a_damaged_folder_of_a_backbone_is_one_line(
    tmp_path: Path, content: str | None, message: str
) -> None:
    save_file({"conv1.weight": torch.zeros(1)}, tmp_path / "model.safetensors")
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(capszoo.WeightsError, match=re.escape(message)) as caught:
        create_backbone(f"local-dir:{tmp_path}")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("pretrained", (True, False))
def test_a_backbone_without_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pretrained: bool
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with refuses(capszoo.WeightsError, names=["me/none"]) as caught:
        create_backbone("hf-hub:me/none", pretrained, cache_dir=str(tmp_path))
    assert "\n" not in str(caught.value)


def test_weights_of_the_zoo_are_a_backbone_offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    name = "resnet20_routingpool.cifar10"
    net = capszoo.attach_head(name, "dynamic", num_classes=3, img_size=32, pretrained=True).eval()
    own = capszoo.create_model(name, pretrained=True).eval()
    x = torch.rand(1, 3, 32, 32)
    with torch.no_grad():
        torch.testing.assert_close(net.stages(x), own.forward_features(x))


class NoMap(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(3, 4)

    def forward_features(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(x.mean((2, 3)))


class Tokens(NoMap):
    def forward_features(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward_features(x)[:, None].expand(-1, 7, -1)


def test_iterations_of_a_routing_without_any_are_refused() -> None:
    with refuses(ValueError, names=["self_routing"]):
        capszoo.create_model("caps_head", routing="self_routing", routing_iters=2, img_size=64, device="meta")
    for name in ("routing_iters", "num_iters"):
        net = capszoo.attach_head("resnet18", "dynamic", img_size=64, **{name: 2})
        assert net.head.classes.num_iters == 2


class NoLevels(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, 4, 1)

    def forward_features(self, x: torch.Tensor) -> torch.Tensor:
        return self.conv(x)


class Foreign(nn.Module):
    """A backbone of somebody else; its parts have a classifier's names, the worst case."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, 4, 1, bias=False)
        self.fc = nn.Conv2d(8, 8, 1, bias=False)
        self.classifier = nn.Linear(8, 9)
        self.drop = nn.Dropout2d(0.9)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.classifier(self.forward_features(x).mean((2, 3)))


class ReadThroughWeight(Foreign):
    def forward_features(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.conv2d(self.conv(x), self.fc.weight)


class InTrainingOnly(Foreign):
    def forward_features(self, x: torch.Tensor) -> torch.Tensor:
        x = self.conv(x)
        return self.drop(self.fc(x)) if self.training else x


class ThroughAnotherMethod(Foreign):
    @property
    def last(self) -> nn.Module:
        return self.fc

    def neck(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(x) if x.abs().sum() > 0 else x

    @torch.no_grad()
    def forward_features(self, x: torch.Tensor) -> torch.Tensor:
        return self.neck(self.conv(x))


class OfAScriptedChild(Foreign):
    def __init__(self) -> None:
        super().__init__()
        self.fc: Any = torch.jit.script(nn.Sequential(self.fc, nn.ReLU()))

    def forward_features(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(self.conv(x))


@pytest.mark.filterwarnings("ignore:.*is deprecated")
@pytest.mark.parametrize(
    "kind",
    [
        ReadThroughWeight,
        InTrainingOnly,
        ThroughAnotherMethod,
        OfAScriptedChild,
    ],
)
def test_a_foreign_backbone_gives_its_own_features(
    kind: type[Foreign], caplog: pytest.LogCaptureFixture
) -> None:
    backbone = kind()
    x = torch.randn(2, 3, 16, 16)
    expected = {}
    for mode in (False, True):
        torch.manual_seed(1)
        expected[mode] = backbone.train(mode).forward_features(x)
    with caplog.at_level("INFO", "capszoo"):
        net = capszoo.attach_head(backbone, "avg", num_classes=3, img_size=16)
    for mode in (False, True):
        torch.manual_seed(1)
        assert torch.equal(net.train(mode).stages(x), expected[mode])
        assert expected[mode].abs().max() > 0
    assert isinstance(backbone.classifier, Unused) and "classifier (81 weights)" in caplog.text


def test_what_was_removed_is_logged_and_never_an_identity(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "capszoo"):
        net = attached("mobilenetv3_small_050", "avg")
    assert "MobileNetV3" in caplog.text and "conv_head (" in caplog.text
    with refuses(RuntimeError, names=["removed"]):
        net.stages.backbone.model.conv_head(torch.zeros(1, 1))


#: One model of every family whose tokens timm does not state by the size of a patch.
TOKENS = (
    "levit_128s",
    "efficientformer_l1",
    "hiera_tiny_224",
    "mvitv2_tiny",
    "twins_svt_small",
    "tnt_s_patch16_224",
)
TOKENS += (
    "volo_d1_224",
    "vitamin_small_224",
    "vit_tiny_r_s16_p8_224",
    "naflexvit_base_patch16_gap",
    "coat_lite_tiny",
)


def last_level(model: Any, x: torch.Tensor, norm: bool) -> torch.Tensor:
    return model.forward_intermediates(x, indices=1, norm=norm, intermediates_only=True)[-1]


@pytest.mark.parametrize("name", slow_unless(("levit_128s", "efficientformer_l1"), TOKENS))
def test_tokens_stand_where_timm_puts_them(name: str) -> None:
    torch.manual_seed(0)
    model = create_backbone(name)
    size = model.pretrained_cfg["input_size"]  # type: ignore[index]
    features = BackboneFeatures(model, size[0], size[1:]).eval()
    x = torch.randn(1, *size)
    with torch.no_grad():
        found = features(x)
        expected = last_level(model, x, norm=not name.startswith("hiera"))  # its norm is in the head
    assert torch.equal(found, expected)


def families() -> dict[str, str]:
    """The shortest name of every family: timm's module and the letters with which the name begins."""
    found: dict[str, list[str]] = {}
    for name in timm.list_models():
        module = timm.models.model_entrypoint(name).__module__
        if module.startswith("timm."):
            begin = re.match("[a-z]+", name)
            assert begin is not None
            found.setdefault(f"{module.rpartition('.')[2]}-{begin[0]}", []).append(name)
    return {family: min(names, key=lambda name: (len(name), name)) for family, names in found.items()}


#: Families without a map of features, and the reason in the message.
REFUSED = {
    "coat-coat": "gives list as features",
    "crossvit-crossvit": "gives list as features",
    "efficientvim-efficientvim": "gives list as features",
    "pit-pit": "gives 1 tokens, 1 of them before those of the image, and states another grid .31x31 by its patch_embed",
}
FAMILIES = families()
MOST_WEIGHTS = 30e6
QUICK = ("hiera-hiera", "twins-twins", "mvitv2-mvitv", "volo-volo", "pit-pit", "efficientvim-efficientvim")


@pytest.mark.parametrize("family", slow_unless(QUICK, FAMILIES))
def test_every_family_of_timm_is_a_backbone(family: str) -> None:
    """On the meta device: the grid is what timm states, and what is refused gets the true reason.

    With values, where they take seconds: a model has the same features before and after it loses its classifier.
    """
    name = FAMILIES[family]
    with torch.device("meta"):
        model = create_backbone(name)
        size = (model.pretrained_cfg or {}).get("input_size") or (3, 224, 224)
        if family in REFUSED:
            with pytest.raises(ValueError, match=REFUSED[family]):
                BackboneFeatures(model, size[0], size[1:])
            return
        features = BackboneFeatures(model, size[0], size[1:]).eval()
        found = features(torch.zeros(2, *size))
    assert found.shape == (2, features.chans, *features.grid)
    if (
        features.layout == "tokens"
    ):  # a map has its own shape, which a fusion or unpadded convolutions may change
        levels = feature_levels_of(model, "x.y", features.chans, size[1:], features.grid)
        assert features.grid[0] in (
            size[1] // levels[-1]["reduction"],
            -(-size[1] // levels[-1]["reduction"]),
        )
    if sum(p.numel() for p in model.parameters()) > MOST_WEIGHTS:
        return
    torch.manual_seed(0)
    whole = timm.create_model(name)
    features, x = BackboneFeatures(copy.deepcopy(whole), size[0], size[1:]), torch.randn(2, *size)
    for mode in (False, True):
        with torch.no_grad():
            torch.manual_seed(1)
            expected = whole.train(mode).forward_features(x)
            torch.manual_seed(1)
            assert torch.equal(features.train(mode).model.forward_features(x), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_head_has_the_dtype_of_the_module(dtype: torch.dtype) -> None:
    model = timm.create_model("test_resnet").to(dtype)
    net = capszoo.attach_head(model, "idpa", num_classes=3, img_size=64, proj_chans=8).eval()
    assert {p.dtype for p in net.parameters()} == {dtype}
    assert net(torch.zeros(2, 3, 64, 64, dtype=dtype)).dtype == dtype


def test_coupling_map_has_the_grid_of_the_images() -> None:
    net = attached("test_resnet", "routing_pool", (64, 96))
    x = torch.randn(2, 3, 96, 64)
    with torch.no_grad():
        assert net.coupling_map(x).shape[2:] == net.forward_features(x).shape[2:] == (3, 2)


def test_layer_decay_has_a_group_for_each_layer_of_the_backbone() -> None:
    net = attached("resnet18", "avg", 32)
    backbone = net.stages.backbone.model
    theirs = group_parameters(backbone, backbone.group_matcher(), reverse=True)
    groups = group_parameters(net, net.group_matcher(), reverse=True)
    assert len(set(theirs.values())) > 5
    assert len(set(groups.values())) == len(set(theirs.values())) + 1, "and one for the head"
    for name, group in theirs.items():
        assert groups[f"stages.backbone.model.{name}"] == group


@pytest.mark.parametrize("freeze", [True, False])
def test_frozen_norms_keep_their_statistics(freeze: bool) -> None:
    net = capszoo.attach_head("resnet18", "avg", num_classes=2, img_size=32, freeze=freeze)
    assert net.training and net.head.training
    for start in (lambda: None, net.eval, net.train):
        start()
    assert all(m.training != freeze for m in net.stages.modules() if isinstance(m, nn.BatchNorm2d))
    trainable = {key.split(".")[0] for key, p in net.named_parameters() if p.requires_grad}
    assert trainable == ({"head"} if freeze else {"head", "stages"})
    before = copy.deepcopy(net.stages.state_dict())
    net(images(net, 4))
    moved = [key for key, value in net.stages.state_dict().items() if not torch.equal(value, before[key])]
    assert bool(moved) != freeze
    net.stages.requires_grad_(True)
    assert all(module.training for module in net.train().modules())


def test_head_args_reach_the_head() -> None:
    made = dict(backbone="resnet18", img_size=64, device="meta")
    net: Any = capszoo.create_model(
        "caps_head", **made, head_args=dict(proj_chans=16, max_grid=1, drop_rate=0.5)
    )
    assert (net.head.chans, net.head.grid, net.head.head_drop.p) == (16, (1, 1), 0.5)
    with refuses(ValueError, names=["routing"]):
        capszoo.create_model("caps_head", **made, head_args={"routing": "em"})


#: levels of each backbone
LEVELS = {"resnet18": 3, "vit_tiny_patch16_224": 4, "swin_tiny_patch4_window7_224": 2, "efficientnet_b0": 3}


@pytest.mark.parametrize("backbone", slow_unless(("vit_tiny_patch16_224", "efficientnet_b0"), LEVELS))
def test_a_head_takes_the_maps_of_several_levels(backbone: str) -> None:
    levels = LEVELS[backbone]
    net = attached(backbone, "heinsen", levels=levels)
    check(net, "heinsen")
    x, features = images(net, 2), net.stages.backbone
    with torch.no_grad():
        joined = net.forward_features(x)
        final, found = net.forward_intermediates(x, indices=levels)
        last = features.to_map(features.model.forward_features(x))
        assert torch.equal(joined, final) and joined.shape[1] == net.num_features
        *lower, own = torch.split(joined, net.head.level_chans, dim=1)
        assert torch.equal(own, last)
        for part, level in zip(lower, found[:-1], strict=True):
            assert torch.equal(part, nn.functional.adaptive_avg_pool2d(level, features.grid))
        credit = net.forward_capsules(x).couplings[0]
    assert credit.shape == (2, net.head.num_caps, levels * net.head.grid[0] * net.head.grid[1])
    net.train()(images(net, 3)).square().mean().backward()
    assert not [key for key, p in net.named_parameters() if p.grad is None]


def test_levels_are_part_of_a_saved_network(tmp_path: Path) -> None:
    net = attached("test_resnet", "heinsen", 64, levels=2, proj_chans=8)
    save_for_hf(net, str(tmp_path), safe_serialization=True)
    x = images(net)
    for create in (capszoo.create_model, timm.create_model):
        again = create(f"local-dir:{tmp_path}", pretrained=True).eval()
        with torch.no_grad():
            assert torch.equal(again(x), net(x))
    with torch.no_grad():
        torch.testing.assert_close(torch.fx.symbolic_trace(net)(x), net(x))
        expected = net.stages.backbone.model.forward_features(x)
        net.prune_intermediate_layers(1)
        assert torch.equal(net(x), expected), "what remains is the last map"


@pytest.mark.parametrize("backbone", slow_unless(("vit_tiny_patch16_224", "resnet18"), LEVELS))
def test_a_head_takes_an_earlier_map(backbone: str, tmp_path: Path) -> None:
    whole = attached(backbone, "idpa").stages.backbone.model
    net = attached(backbone, "idpa", out_index=-2)
    check(net, "idpa")
    inner = net.stages.backbone.model
    assert len(net.feature_info) == len(whole.feature_info) - 1
    assert sum(p.numel() for p in inner.parameters()) < sum(p.numel() for p in whole.parameters())
    whole.load_state_dict({**whole.state_dict(), **inner.state_dict()})
    x = images(net, 2)
    save_for_hf(net, str(tmp_path), safe_serialization=True)
    again = capszoo.create_model(f"local-dir:{tmp_path}", pretrained=True).eval()
    with torch.no_grad():
        (expected,) = whole.forward_intermediates(x, indices=[-2], norm=True, intermediates_only=True)
        torch.testing.assert_close(net.stages(x), expected)
        assert torch.equal(again(x), net(x))
        levels = whole.forward_intermediates(x, intermediates_only=True)[:-1]
        torch.testing.assert_close(net.forward_intermediates(x, intermediates_only=True), levels)
        joint = attached(backbone, "heinsen", out_index=-2, levels=2)
        joint.stages.backbone.model.load_state_dict(inner.state_dict())
        lower, _ = torch.split(joint.stages(x), joint.head.level_chans, dim=1)
        torch.testing.assert_close(lower, nn.functional.adaptive_avg_pool2d(levels[-2], lower.shape[2:]))
    net.train()(images(net, 3)).square().mean().backward()
    assert not [key for key, p in net.named_parameters() if p.grad is None]


@pytest.mark.parametrize(
    ("backbone", "head", "options", "names"),
    [
        ("resnet18", "ipda", {}, ["ipda", "idpa"]),
        ("resnt18", "idpa", {}, ["resnt18", "resnet18"]),
        ("resnet18.a1_in1", "idpa", {}, ["resnet18.a1_in1", "resnet18.a1_in1k"]),
        ("resnet18", "idpa", {"out_index": 9}, ["out_index", "9", "4"]),
        ("resnet18", "idpa", {"out_index": "x"}, ["out_index", "integer"]),
        (NoMap(), "idpa", {"out_index": 0}, ["NoMap", "out_index"]),
        (NoMap(), "idpa", {}, ["NoMap", "1", "4"]),
        (nn.Linear(3, 4), "idpa", {}, ["forward_features"]),
        (Tokens(), "idpa", {}, ["7", "Tokens"]),
        ("test_resnet", "idpa", {"num_iter": 2}, ["num_iter", "num_iters"]),
        ("test_resnet", "idpa", {"depth": 2}, ["depth"]),
        ("test_resnet", "idpa", {"caps_dim": 15}, ["matrix", "square"]),
        ("test_resnet", "idpa", {"levels": 2}, ["levels", "idpa"]),
        ("test_resnet", "routing_pool", {"caps_dim": 0}, ["caps_dim=0", "64", "1", "2", "4"]),
        (NoLevels(), "heinsen", {"levels": 2}, ["NoLevels", "forward_intermediates", "levels=2"]),
        ("test_resnet", "heinsen", {"levels": 9}, ["ResNet", "levels=9", "5"]),
        ("test_resnet", "heinsen", {"levels": 3, "out_index": 1}, ["ResNet", "out_index=1", "levels=3"]),
        ("test_resnet", "heinsen", {"levels": 0}, ["levels"]),
        ("test_resnet", "heinsen", {"levels": 2, "proj_chans": 0}, ["channels", "proj_chans"]),
        ("test_resnet", "heinsen", {"lower_chans": (8,)}, ["lower_chans"]),
    ],
)
def test_what_cannot_be_attached_gets_one_line(
    backbone: Any, head: str, options: dict[str, Any], names: list[str]
) -> None:
    with refuses(ValueError, names=names) as caught:
        capszoo.attach_head(backbone, head, num_classes=3, img_size=64, **options)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("routing", ["dynamic", "em", "self_routing", "self_attention"])
def test_one_class_of_normalised_scores_is_refused(routing: str) -> None:
    message = f"the {routing} head normalises its scores over the classes"
    with pytest.raises(ValueError, match=message):
        capszoo.attach_head("resnet18", routing, num_classes=1, img_size=64)
    net = capszoo.attach_head("resnet18", routing, num_classes=2, img_size=64)
    with pytest.raises(ValueError, match=message):
        net.reset_classifier(1)


@pytest.mark.parametrize(
    ("backbone", "args", "size"),
    [
        ("vit_tiny_patch16_224", {"depth": 1, "embed_dim": 32, "num_heads": 2}, 96),
        ("mobilenetv3_small_050", {}, 64),
    ],
)
def test_saved_weights_at_other_channels_and_sizes(
    backbone: str, args: dict[str, Any], size: int, tmp_path: Path
) -> None:
    net = capszoo.create_model(
        "caps_head", backbone=backbone, backbone_args=args, routing="avg", img_size=64, num_classes=3
    )
    save_for_hf(net, str(tmp_path), safe_serialization=True)
    grey = capszoo.create_model(f"local-dir:{tmp_path}", pretrained=True, in_chans=1)
    first = grey.default_cfg["first_conv"]
    weight = net.state_dict()[f"{first}.weight"]
    torch.testing.assert_close(grey.state_dict()[f"{first}.weight"], weight.sum(1, keepdim=True))
    other = capszoo.create_model(f"local-dir:{tmp_path}", pretrained=True, img_size=size)
    assert getattr(grey, "untrained", None) is getattr(other, "untrained", None) is None
    if args:
        position, theirs = (net.state_dict()["stages.backbone.model.pos_embed"] for net in (net, other))
        assert (position.shape[1], theirs.shape[1]) == (1 + 4 * 4, 1 + 6 * 6)
        assert torch.equal(theirs[:, 0], position[:, 0]), "the class token's has no place in the image"


def test_a_module_brings_its_own_weights() -> None:
    with refuses(ValueError, names=["module"]):
        capszoo.attach_head(timm.create_model("resnet18"), pretrained=True)
