"""Every registered model: the parameter table, sizes, dtypes, awkward inputs, timm's interface, ONNX.

The sweeps run over ``capszoo.list_models()`` in small configurations: ``make test`` takes all models where that is
cheap, else those that represent the others (``REPRESENTATIVES``); ``make test-slow`` takes the rest, the native
configurations and the full products.
"""

from __future__ import annotations

import gc
import logging
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import timm
import torch
from safetensors.torch import save_file
from torch import nn

import capszoo
from capszoo import CapsuleNet, CapsuleOutput
from capszoo.errors import NoCapsules, WeightsError
from capszoo.inference import NoWeights, label_names, load_model
from capszoo.layers import FCIDPA
from capszoo.models._base import to_2tuple
from capszoo.models._heads import create_head
from capszoo.preprocess import model_transform
from capszoo.scores import score_kind
from capszoo.summary import summarise
from tests.support.errors import refuses
from tests.support.zoo import (
    PER_ROUTING,
    REPRESENTATIVES,
    calibrate,
    each_family,
    has_capsules,
    images,
    names,
    native,
    relative_difference,
    signature,
    slow_unless,
    small,
    small_arguments,
)

NAMES = names()
each_model = pytest.mark.parametrize("name", NAMES)

# -- parameter counts: the papers' figures (the specification's table) --------------------------------------------

#: name, arguments, parameters
EXACT: list[tuple[str, dict[str, Any], int]] = [
    ("capsnet_dynamic", {}, 6_804_224),
    ("capsnet_dynamic", {"decoder": True}, 8_215_568),
    ("capsnet_dynamic", {"decoder": True, "img_size": 40}, 13_475_648),
    ("capsnet_dynamic_cifar", {}, 7_992_576),
    ("capsnet_dynamic_cifar", {"num_classes": 100}, 31_585_536),
    ("capsnet_dynamic_resnet", {}, 12_451_136),
    ("capsnet_dynamic_resnet", {"num_classes": 100}, 36_044_096),
    ("capsnet_em", {}, 453_044),
    ("capsnet_em", {"num_classes": 100}, 499_304),
    ("capsnet_em_resnet", {}, 1_710_580),
    ("capsnet_em_resnet", {"num_classes": 100}, 1_756_840),
    ("capsnet_em_norb", {}, 317_258),
    ("capsnet_em_norb_small", {}, 68_882),
    ("idpa_cnn", {}, 561_297),
    ("idpa_cnn_cifar100", {}, 1_462_989),
    ("idpa_resnet", {}, 1_828_817),
    ("idpa_resnet_cifar100", {}, 2_799_629),
    ("idpa_multimnist", {"pose": "vector"}, 42_478_017),
    ("idpa_multimnist", {"pose": "matrix"}, 9_963_969),
    ("idpa_multimnist", {"pose": "matrix", "num_caps": 64}, 41_593_281),
    # the papers round these four: 35.4, 42.48, 1.59 and 9.81 millions
    ("cnn_sabour", {}, 35_445_522),
    # idpa_multimnist's without three LayerNorms of 64 and the linear classifier
    ("capsnet_dynamic_multimnist", {}, 42_478_017 - 3 * 128 - 65),
    ("cnn6", {}, 1_590_058),
    ("cnn6_wide", {}, 9_811_930),
    ("cnn_multimnist", {}, 19_553_162),
    ("cnn_multimnist_fc", {}, 42_490_762),
    ("cnn_baseline", {}, 18_919_434),
    ("cnn_baseline", {"num_classes": 100}, 19_011_684),
    ("cnn_routingpool", {"pool": "routing"}, 312_906),
    ("cnn_routingpool", {"pool": "max"}, 312_906),
    ("cnn_routingpool", {"pool": "avg"}, 312_906),
    ("cnn_routingpool", {"in_chans": 1}, 309_706),
    ("resnet_routingpool", {}, 269_722),
    ("resnet20_routingpool", {}, 269_722),
    ("resnet20_routingpool", {"pool": "avg"}, 269_722),
    ("resnet32_routingpool", {}, 464_154),
    ("resnet44_routingpool", {}, 658_586),
    ("resnet56_routingpool", {}, 853_018),
    ("resnet20_routingcaps", {}, 279_024),
    ("resnet20_routingcaps", {"caps_dim": 32}, 279_024),
    ("resnet20_routingcaps", {"decoder": True, "img_size": 40}, 2_526_768),
    ("resnet20_routingcaps", {"decoder": True, "img_size": 36}, 2_215_168),
    ("encapnet_v1", {}, 36_544_064),
    ("encapnet_v1", {"num_classes": 100}, 37_281_344),
    ("encapnet_v1", {"coefficients": "own"}, 36_474_944),
    ("encapnet_v1", {"coefficients": "cross"}, 36_474_944),
    ("encapnet_v1", {"mode": "master"}, 1_743_680),
    ("encapnet_v1", {"aide": (False, False, False, False)}, 1_743_680),
    ("encapnet_v1", {"img_size": 128, "num_classes": 200}, 38_104_384),
    ("encapnet_v2", {}, 176_330_752),
    ("encapnet_v3", {}, 179_709_952),
    ("resnet18_encap", {}, 11_156_778),
    ("capsnet6_dynamic", {}, 9_913_600),
    ("capsnet6_em", {}, 9_991_540),
    ("efficient_capsnet", {}, 161_824),
    ("efficient_capsnet", {"decoder": True}, 161_824 + 1_411_344),
    (
        "efficient_capsnet",
        {"img_size": 36, "strides": (1, 1, 2, 2), "primary_kernel": 5, "primary_stride": 2},
        154_656,
    ),
    (
        "efficient_capsnet",
        {
            "img_size": 48,
            "in_chans": 2,
            "kernels": (7, 3, 3, 3),
            "strides": (2, 1, 1, 2),
            "norm": "instance",
            "num_classes": 5,
        },
        151_664,
    ),
    # the release's 8,441,856 and 8,444,160, which Keras counts with 256 running statistics of the norm
    ("deepcaps", {}, 8_441_856 - 256),
    ("deepcaps", {"img_size": 32, "in_chans": 3}, 8_444_160 - 256),
    ("hvc", {}, 1_513_686),
    ("resnet20_avg", {}, 269_722),
    ("resnet20_conv", {}, 893_210),
    ("resnet20_dynamic", {}, 5_807_888),
    ("resnet20_dynamic", {"depth": 2}, 4_236_048),
    ("resnet20_em", {}, 911_204),
    ("resnet20_em", {"depth": 2}, 813_988),
    # the trunk, the primary convolution and its LayerNorm, a 4x4 transform for each child and class, LayerNorm, Linear
    ("resnet20_idpa", {}, 269_072 + 9 * 64 * 512 + 32 + 2048 * 10 * 16 + 32 + 17),
    # the trunk, W and B, and three routings: of any number of tokens, of 64 capsules, and to the classes
    ("resnet20_heinsen", {}, 269_072 + 128 + 33_089 + 45_120 + 8_778),
    ("resnet20_selfrouting", {}, 931_664),
    ("resnet20_selfrouting", {"depth": 2}, 3_187_536),
    # ResNet-18 without its classifier, the projection to 64, and the head as above on 7x7 positions
    ("caps_head", {}, 11_176_512 + 512 * 64 + 128 + 9 * 64 * 512 + 32 + 1568 * 10 * 16 + 32 + 17),
    ("encapnet6_master", {}, 1_689_856),
    ("encapnet6", {}, 8_133_440),
]


def _count(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize(("name", "arguments", "expected"), EXACT)
def test_parameter_count(name: str, arguments: dict[str, Any], expected: int) -> None:
    assert _count(capszoo.create_model(name, device="meta", **arguments)) == expected


def test_table_and_registry_hold_the_same_names() -> None:
    assert {name for name, *_ in EXACT} == set(NAMES)


def test_the_quick_sweeps_see_every_class_and_layer() -> None:
    """All but some whose own files test them: each costs a minute in the sweeps."""

    def kinds(names: Sequence[str]) -> set[str]:
        models = [capszoo.create_model(name, device="meta") for name in names]
        classes = {type(m) for model in models for m in model.modules()}
        return {kind.__name__ for kind in classes if kind.__module__.startswith("capszoo")}

    elsewhere = {"BaselineCNN", "MultiMnistCNN", "ConvDynamicRouting", "DynamicHead"}
    assert kinds(NAMES) - kinds(REPRESENTATIVES) == elsewhere


# -- sizes, channels, classes -------------------------------------------------------------------------------------


def _check_forward(model: CapsuleNet, x: torch.Tensor, classes: int) -> None:
    scores = model(x)
    assert scores.shape == (x.shape[0], classes)
    assert scores.dtype == x.dtype
    assert torch.isfinite(scores).all()


#: batch, image size, channels, classes
QUICK_SHAPES = [(1, (36, 32), 3, 2), (3, (32, 36), 1, 200)]
SLOW_SHAPES = [
    (batch, size, channels, classes)
    for batch, size in [(1, None), (5, None), (2, (36, 48)), (3, (40, 40)), (1, (44, 32))]
    for channels in (1, 3)
    for classes in (2, 10, 200)
]


@pytest.mark.parametrize(
    ("name", "batch", "size", "channels", "classes"),
    [
        pytest.param(name, *shape, marks=() if quick else pytest.mark.slow)
        for index, name in enumerate(NAMES)
        for number, shape in enumerate(QUICK_SHAPES + SLOW_SHAPES)
        for quick in [name in REPRESENTATIVES and index % len(QUICK_SHAPES) == number]
    ],
)
def test_sizes(name: str, batch: int, size: tuple[int, int] | None, channels: int, classes: int) -> None:
    arguments: dict[str, Any] = {} if size is None else {"img_size": size}
    wanted = small_arguments(name) | {"in_chans": channels, "num_classes": classes} | arguments
    if _count(capszoo.create_model(name, device="meta", **wanted)) > 5e7:
        # poses of 64 numbers, a transform from each capsule of the grid to each class: gigabytes at 200 classes
        classes = min(classes, 20)
    model = small(name, in_chans=channels, num_classes=classes, **arguments)
    if size is not None:
        assert model.img_size == size
    with torch.no_grad():
        _check_forward(model.eval(), images(model, batch), classes)
        # BatchNorm has no statistics of a single value; the nets' last maps are larger than one position
        _check_forward(model.train(), images(model, max(batch, 2)), classes)


def kept_by_a_step(model: nn.Module, x: torch.Tensor) -> float:
    """MB of what a forward pass saves for its backward pass, without the parameters."""
    sizes: dict[int, int] = {}

    def pack(t: torch.Tensor) -> torch.Tensor:
        sizes[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        _ = model(x)
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    return sum(size for key, size in sizes.items() if key not in own) / 2**20


def training_growth(name: str, batch: int = 4, steps: int = 8) -> float:
    """MB by which the process grows in so many training steps at the native size.

    By the least of the steps after and of those before, since memory that was freed may stay with the process a while.
    The first step is left out: what it frees is what later ones use.
    """
    model = capszoo.create_model(name).train()
    # eight steps that are kept are then twice the limit
    x = images(model, max(batch, math.ceil(6 * batch / kept_by_a_step(model, images(model, batch)))))
    process = psutil.Process()
    sizes = []
    for _ in range(2 * steps + 1):
        model.zero_grad(set_to_none=False)
        model(x).float().square().mean().backward()
        gc.collect()
        sizes.append(process.memory_info().rss)
    return float(min(sizes[steps + 1 :]) - min(sizes[1 : steps + 1])) / 2**20


#: Each with a way of its own to keep what the backward pass needs.
KEEPERS = ("capsnet_dynamic", "capsnet_em_norb_small", "cnn_routingpool", "encapnet6_master", "idpa_cnn")


#: Not EncapNets of 180 M parameters, whose layers are v1's: a dozen training steps of theirs take a quarter of an hour,
#: and half precision minutes on a CPU without its units.
LIGHTER = [name for name in NAMES if name not in ("encapnet_v2", "encapnet_v3")]


@pytest.mark.parametrize("name", slow_unless(("idpa_cnn",), LIGHTER))
def test_training_keeps_nothing(name: str) -> None:
    assert training_growth(name, batch=4 if name in KEEPERS else 2) < 24


@each_family()
def test_wrong_image_size_is_refused_or_works(name: str) -> None:
    """A net whose weights depend on the image size says so; any other takes the size."""
    model = small(name).eval()
    h, w = model.img_size
    x = torch.randn(1, model.in_chans, h + 8, w + 8)
    if model.fixed_input_size:
        with pytest.raises(AssertionError, match=f"{h}x{w}"):
            model(x)
    else:
        with torch.no_grad():
            _check_forward(model, x, model.num_classes)


@each_family()
def test_routing_iters(name: str) -> None:
    if "routing_iters" not in signature(name):
        with pytest.raises(TypeError, match="routing_iters"):
            capszoo.create_model(name, device="meta", routing_iters=2)
        return
    scores = []
    for iters in (1, 3):
        model = small(name, routing_iters=iters).eval()
        with torch.no_grad():
            scores.append(model(images(model)))
    assert torch.isfinite(torch.stack(scores)).all()
    assert not torch.equal(scores[0], scores[1]), "routing iterations change nothing"


# -- dtypes and awkward inputs ------------------------------------------------------------------------------------


def _inputs(kind: str, model: CapsuleNet, dtype: torch.dtype) -> torch.Tensor:
    x = images(model, 2)
    if kind == "zero":
        x = torch.zeros_like(x)
    elif kind == "constant":
        x = torch.full_like(x, 0.5)
    elif kind != "random":
        x = x * float(kind)
    return x.to(dtype)


def _check_finite(model: CapsuleNet, kind: str, dtype: torch.dtype, train: bool) -> None:
    model = model.to(dtype).train(train)
    scores = model(_inputs(kind, model, dtype))
    assert scores.dtype == dtype
    assert torch.isfinite(scores).all(), f"scores for {kind} input in {dtype}, train={train}"
    # a gradient through every score; float16 overflows at 65,504, so its loss may be scaled down, as a GradScaler does
    loss = scores.float().square().mean()
    for scale in (1.0, 2.0**-6, 2.0**-12) if dtype == torch.float16 else (1.0,):
        model.zero_grad(set_to_none=True)
        (loss * scale).backward(retain_graph=True)
        gradients = {key: parameter.grad for key, parameter in model.named_parameters()}
        missing = [key for key, gradient in gradients.items() if gradient is None]
        assert not missing, f"no gradient for {missing}"
        bad = [key for key, g in gradients.items() if g is not None and not torch.isfinite(g).all()]
        if not bad:
            break
    assert not bad, f"gradients of {bad} for {kind} input in {dtype}, train={train}"


HUGE = ("1e4", "1e6")


@each_family()
@pytest.mark.parametrize(
    "train", [pytest.param(False, id="eval", marks=pytest.mark.slow), pytest.param(True, id="train")]
)
def test_finite_float32(name: str, train: bool) -> None:
    model = small(name)
    for kind in ("random", "zero", "constant", *HUGE):
        _check_finite(model, kind, torch.float32, train)


@pytest.mark.parametrize("name", slow_unless(PER_ROUTING, LIGHTER))
@pytest.mark.parametrize(
    ("dtype", "kinds"),
    [
        (torch.bfloat16, ("random", "zero", HUGE[-1])),
        pytest.param(torch.float16, ("random", "zero", "constant"), marks=pytest.mark.slow),
    ],
)
def test_finite_in_half_precision(name: str, dtype: torch.dtype, kinds: tuple[str, ...]) -> None:
    model = small(name).to(dtype)
    for kind in kinds:
        with torch.no_grad():
            scores = model.eval()(_inputs(kind, model, dtype))
        assert scores.dtype == dtype and torch.isfinite(scores).all(), kind
        _check_finite(model, kind, dtype, train=True)


@pytest.mark.parametrize("name", slow_unless(PER_ROUTING, NAMES))
def test_autocast(name: str) -> None:
    """bfloat16 autocast, as training uses it: finite scores and float32 gradients."""
    model = small(name).train()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = model(images(model)).float().square().mean()
    loss.backward()
    for key, parameter in model.named_parameters():
        assert parameter.grad is not None and torch.isfinite(parameter.grad).all(), key


@each_family()
def test_each_image_has_scores_of_its_own(name: str) -> None:
    """The same each time, alone or in a batch; a batch of no images, as a filter may leave it, has none."""
    model = small(name).eval()
    calibrate(model)
    x = images(model, 3)
    with torch.no_grad():
        together, again, other = model(x), model(x), model(images(model, 3, seed=2))
        alone = torch.cat([model(x[i : i + 1]) for i in range(3)])
    assert torch.equal(together, again)
    rounding = relative_difference(together, alone)
    assert rounding < 1e-4
    # an untrained EncapNet's scores differ in the fifth digit alone
    assert relative_difference(together, other) > max(10 * rounding, 1e-5)
    assert model(x[:0]).shape == (0, model.num_classes)
    with torch.inference_mode():
        assert model(x[:0]).shape == (0, model.num_classes)


def test_a_large_constant_image_is_finite() -> None:
    """The costs of EM routing are normalised: their spread must not overflow."""
    model = small("capsnet6_em").eval()
    with torch.inference_mode():
        assert model(torch.full_like(images(model), 1e6)).isfinite().all()


# -- keywords -----------------------------------------------------------------------------------------------------


@each_family()
def test_unknown_keyword_names_the_nearest(name: str) -> None:
    with pytest.raises(TypeError, match="num_classes") as caught:
        capszoo.create_model(name, device="meta", num_clases=3)
    assert "num_clases" in str(caught.value) and "\n" not in str(caught.value)


@each_model
def test_arguments_are_explicit(name: str) -> None:
    kinds = {p.kind.name for p in signature(name).values()}
    assert not kinds & {"VAR_KEYWORD", "VAR_POSITIONAL"}
    assert {"num_classes", "in_chans", "img_size"} <= set(signature(name))


# -- capsules -----------------------------------------------------------------------------------------------------


@each_family()
def test_forward_capsules(name: str) -> None:
    model = small(name).eval()
    calibrate(model)
    x = images(model, 2)
    if not has_capsules(name):
        for method in (model.forward_capsules, model.coupling_map):
            with pytest.raises(RuntimeError, match="capsule"):
                method(x)
        return
    x[1] = 0
    with torch.no_grad():
        out = model.forward_capsules(x)
        scores = model(x)
        heat = model.coupling_map(x)
        assert model.coupling_map(x[:0]).shape == (0, *heat.shape[1:])
    assert heat.ndim == 4 and heat.shape[:2] == (2, model.num_classes)
    assert torch.isfinite(heat).all() and heat.min() >= 0
    torch.testing.assert_close(heat.sum((2, 3)), torch.ones(2, model.num_classes), rtol=1e-4, atol=1e-4)
    assert isinstance(out, CapsuleOutput)
    torch.testing.assert_close(out.scores, scores, rtol=1e-5, atol=1e-6)
    assert out.poses.ndim == 3 and out.poses.shape[:2] == (2, model.num_classes)
    assert out.activations.shape == (2, model.num_classes)
    are_lengths = torch.allclose(scores, out.poses.norm(dim=-1), atol=1e-3)
    assert (model.score_kind == "lengths") == are_lengths
    assert isinstance(out.couplings, tuple)
    if "routing_iters" in signature(name):
        assert out.couplings, "a net that routes returns its couplings"
    for tensor in (out.poses, out.activations, *out.couplings):
        assert torch.isfinite(tensor).all()
    for coupling, layout in zip(out.couplings, model.coupling_layouts(), strict=True):
        assert coupling.shape[0] == 2, "couplings keep the batch first"
        assert coupling.min() >= 0 or layout.over is None


@each_family()
def test_forward_poses(name: str) -> None:
    model = small(name).eval()
    calibrate(model)
    x = images(model, 2)
    heads = ("idpa", "caps_head", "resnet20_dynamic", "resnet20_em", "resnet20_heinsen", "resnet20_idpa")
    if "decoder" not in signature(name) and not name.startswith(heads):  # plain nets, and pooled features
        with refuses(NotImplementedError, names=["class", "capsules"]):
            model.forward_poses(x)
        return
    with torch.no_grad():
        scores, poses = model.forward_poses(x)
        assert torch.equal(scores, model(x))
        torch.testing.assert_close(poses, model.forward_capsules(x).poses, rtol=1e-5, atol=1e-6)


@each_family()
def test_decoder(name: str) -> None:
    if "decoder" not in signature(name):
        return
    plain, model = small(name), small(name, decoder=True)
    own = {key for key in model.state_dict() if key.startswith("decoder.")}
    assert own and set(model.state_dict()) - own == set(plain.state_dict())
    model.eval()
    out = model.forward_capsules(images(model, 2))
    given = torch.tensor([0, model.num_classes - 1])
    longest = () if model.score_kind != "lengths" else (None,)
    for target in (*longest, given, given.int()):
        picture = model.reconstruct(out.poses, target)
        assert picture.shape == (2, model.in_chans, *model.img_size)
        assert 0 <= picture.min() and picture.max() <= 1
    for target in (given / 2, given > 0):
        with refuses(ValueError, names=["target", "integers"]):
            model.reconstruct(out.poses, target)
    with pytest.raises(RuntimeError, match="decoder=True"):
        plain.reconstruct(out.poses)


# -- pretrained weights for another purpose -----------------------------------------------------------------------


def _saved(name: str, folder: Path, **arguments: Any) -> tuple[CapsuleNet, dict[str, Any]]:
    """A model with a safetensors file of its weights, and the timm overlay that names the file."""
    source = small(name, seed=5, **arguments)
    path = folder / "weights.safetensors"
    save_file({k: v.contiguous().clone() for k, v in source.state_dict().items()}, path)
    size = (source.in_chans, *source.img_size)
    return source, {"file": str(path), "input_size": size, "num_classes": source.num_classes}


def _taken(model: nn.Module, source: nn.Module) -> tuple[set[str], set[str]]:
    """Keys whose values are the source's, and the others."""
    theirs = source.state_dict()
    taken = {k for k, v in model.state_dict().items() if k in theirs and torch.equal(v, theirs[k])}
    return taken, set(model.state_dict()) - taken


@each_family()
def test_pretrained_at_another_image_size(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source, overlay = _saved(name, tmp_path)
    h, w = source.img_size
    with caplog.at_level(logging.WARNING):
        model = small(name, pretrained=True, pretrained_cfg_overlay=overlay, img_size=(h + 8, w + 4))
    _, fresh = _taken(model, source)
    same_shape = {k for k, v in source.state_dict().items() if model.state_dict()[k].shape == v.shape}
    assert not fresh & same_shape, "what does not depend on the image size is taken over"
    for key in fresh:
        assert key in caplog.text, f"{key} was re-initialised without a word"
    if not fresh:
        assert "re-initialised" not in caplog.text
    with torch.no_grad():
        _check_forward(model.eval(), images(model), model.num_classes)


@pytest.mark.parametrize("other", [(28, 24), (22, 31)], ids=str)
def test_a_grid_of_as_many_positions_is_another_grid(other: tuple[int, int], tmp_path: Path) -> None:
    """Grids of 4x6, 6x4 and 3x8: the shapes fit, the positions do not."""
    path = tmp_path / "weights.safetensors"
    source = capszoo.create_model("capsnet_dynamic", img_size=(24, 28))
    save_file({k: v.contiguous().clone() for k, v in source.state_dict().items()}, path)
    overlay = {"file": str(path), "input_size": (1, 24, 28), "num_classes": 10}
    with refuses(WeightsError, names=["24x28", f"{other[0]}x{other[1]}"]):
        capszoo.create_model("capsnet_dynamic", True, pretrained_cfg_overlay=overlay, img_size=other)


def test_a_rule_resamples_a_grid_of_as_many_positions(tmp_path: Path) -> None:
    path = tmp_path / "weights.safetensors"
    source = capszoo.create_model("idpa_cnn", img_size=(24, 32))  # class transforms of 3x5 positions
    save_file({k: v.contiguous().clone() for k, v in source.state_dict().items()}, path)
    overlay = {"file": str(path), "input_size": (3, 24, 32), "num_classes": 10}
    model = capszoo.create_model("idpa_cnn", True, pretrained_cfg_overlay=overlay, img_size=(32, 24))
    weights, key = source.state_dict(), "capsules.classes.weight"
    old = weights[key].reshape(3, 5, 32, -1)
    new = model.state_dict()[key].reshape(5, 3, 32, -1)
    assert torch.allclose(new[2, 1], old[1, 2])
    assert torch.allclose(new[0, 1], old[0, 2])  # the middle of the first row
    assert not source.resampled(weights, (24, 32)), "the same grid"


def test_twins_without_routing_state_no_iterations() -> None:
    twins = ("cnn_routingpool.fashion_mnist_avg", "resnet20_routingcaps.mnist_uniform")
    assert [summarise(name).routing_iters for name in twins] == [(), ()]
    assert summarise("resnet20_routingcaps.mnist").routing_iters == (3,)


@each_family()
def test_pretrained_with_other_classes_and_channels(name: str, tmp_path: Path) -> None:
    source, overlay = _saved(name, tmp_path)
    channels = 3 if source.in_chans == 1 else 1
    arguments = {"in_chans": channels, "num_classes": source.num_classes + 2}
    model = small(name, pretrained=True, pretrained_cfg_overlay=overlay, **arguments)
    _, fresh = _taken(model, source)
    cfg = model.default_cfg
    classifiers = (cfg["classifier"],) if isinstance(cfg["classifier"], str) else tuple(cfg["classifier"])
    for key in fresh:
        assert key == f"{cfg['first_conv']}.weight" or key.startswith(tuple(f"{c}." for c in classifiers)), (
            key
        )
    with torch.no_grad():
        _check_forward(model.eval(), images(model), model.num_classes)


# -- timm's interface (the rest is in test_timm_contract.py) -------------------------------------------------------


@each_family()
def test_weights_bring_their_classes_and_channels(name: str) -> None:
    """A configuration with others, as that of weights for another data set has, builds them."""
    _, height, width = native(name)
    other = {"num_classes": 7, "input_size": (4, height, width)}
    model = timm.create_model(name, pretrained_cfg_overlay=other, device="meta")
    assert (model.num_classes, model.in_chans) == (7, 4)


@each_model
def test_default_cfg_is_complete(name: str) -> None:
    model = capszoo.create_model(name, device="meta")
    cfg = model.default_cfg
    assert tuple(cfg["input_size"]) == native(name)
    assert cfg["num_classes"] == model.num_classes
    assert len(cfg["mean"]) == len(cfg["std"]) == model.in_chans
    assert all(0 <= m <= 1 for m in cfg["mean"]) and all(0 < s <= 1 for s in cfg["std"])
    assert bool(cfg["fixed_input_size"]) == model.fixed_input_size
    assert cfg["paper_ids"]
    assert "." not in name and cfg["architecture"] == name


@each_family()
def test_grad_checkpointing_gives_the_same_gradients(name: str) -> None:
    gradients, runs = [], []
    for enable in (False, True):
        model, calls = (
            small(name).eval(),
            [],
        )  # eval: BatchNorm's statistics do not move between the two passes
        for module in model.modules():
            if isinstance(module, nn.Conv2d):
                module.register_forward_pre_hook(lambda *_, calls=calls: calls.append(1))
        model.set_grad_checkpointing(enable)
        model(images(model)).square().mean().backward()
        gradients.append([p.grad for p in model.parameters()])
        runs.append(len(calls))
    assert runs[1] > runs[0], "nothing is recomputed"
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b)


@each_family()
def test_group_matcher_orders_the_depth(name: str) -> None:
    model = capszoo.create_model(name, device="meta")
    depth_of = model.group_matcher()
    depths = {key: depth_of(key) for key, _ in model.named_parameters()}
    stages = [depth for key, depth in depths.items() if key.startswith("stages.")]
    assert stages == sorted(stages), "stages are not in order of depth"
    heads = [depth for key, depth in depths.items() if not key.startswith("stages.")]
    assert heads and all(math.isinf(depth[0]) for depth in heads)
    assert set(model.no_weight_decay()) <= set(depths)


def test_layers_of_an_encapnet_module_have_their_own_depth() -> None:
    model = capszoo.create_model("encapnet_v1", device="meta")
    fine, coarse = model.group_matcher(), model.group_matcher(coarse=True)
    assert fine("stages.module2.skip.weight") == fine("stages.module2.type1.bn.bias") == (2, 0)
    assert [fine(f"stages.module2.type2.{layer}.bn.bias") for layer in range(3)] == [(2, 1), (2, 2), (2, 3)]
    assert coarse("stages.module2.type2.1.bn.bias") == (2, 0)


# -- bundled weights ----------------------------------------------------------------------------------------------


def test_bare_name_is_the_architecture_and_finds_weights() -> None:
    """Weights for 28x28 digits neither change what ``idpa_cnn`` is nor hide from ``pretrained=True``."""
    assert capszoo.create_model("idpa_cnn", device="meta").in_chans == 3
    bare, tagged = (capszoo.create_model(n, pretrained=True) for n in ("idpa_cnn", "idpa_cnn.mnist"))
    assert bare.default_cfg["tag"] == "mnist" and bare.img_size == tagged.img_size == (28, 28)
    assert not _taken(bare, tagged)[1]
    with pytest.raises(capszoo.WeightsError, match="pretrained=False"):
        capszoo.create_model("encapnet_v2", pretrained=True, device="meta")


# -- ONNX ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "full_size"),
    [
        # those whose graphs `tests/export/test_zoo.py` does not write in the quick suite; the others it sweeps
        ("capsnet6_dynamic", False),
        ("resnet20_selfrouting", False),
        *(pytest.param(name, True, marks=pytest.mark.slow) for name in NAMES),
    ],
)
def test_onnx(name: str, full_size: bool, tmp_path: Path) -> None:
    pytest.importorskip("onnxscript")
    from capszoo.export.to_onnx import export

    model = (capszoo.create_model(name) if full_size else small(name)).eval()
    calibrate(model)
    assert export(model, tmp_path / "model.onnx", gate="quick").passed


@pytest.mark.parametrize("name", ["resnet20_routingpool.cifar10_avg", "capsnet_dynamic.mnist"])
def test_a_name_with_a_tag_is_one_network(name: str) -> None:
    trained = capszoo.create_model(name, pretrained=True).eval()
    for create in (capszoo.create_model, timm.create_model):
        empty = create(name).eval()
        empty.load_state_dict(trained.state_dict())
        x = torch.rand(2, trained.in_chans, *trained.img_size)
        with torch.no_grad():
            assert torch.equal(empty(x), trained(x))


def test_weights_of_another_size_are_resampled_or_refused(caplog: pytest.LogCaptureFixture) -> None:
    net = load_model("idpa_cnn.mnist", device="cpu", img_size=36)
    assert "resampled for another img_size: capsules" in caplog.text and "re-initialised" not in caplog.text
    assert net.img_size == (36, 36) and not hasattr(net, "untrained")
    with refuses(NoWeights, names=["capsnet_dynamic.mnist", "40x40", "class_caps"]):
        load_model("capsnet_dynamic.mnist", device="cpu", img_size=40)
    # for fine-tuning, new weights are what is asked for
    made = capszoo.create_model("capsnet_dynamic.mnist", pretrained=True, img_size=40)
    assert "class_caps.weight" in made.untrained


def test_new_classes_do_not_keep_the_names_of_the_old() -> None:
    net, other = (capszoo.create_model("cnn_routingpool.fashion_mnist", pretrained=True) for _ in range(2))
    net.reset_classifier(10)
    assert label_names(net) == [str(k) for k in range(10)]
    assert label_names(other)[0] == "T-shirt/top", "each model has its own"


def test_new_classes_do_not_keep_the_task_of_the_old() -> None:
    """MultiMNIST: several labels an image, digits of 28x28 on a canvas of 36x36."""
    name = "resnet20_routingcaps.multimnist"
    trained = capszoo.create_model(name, pretrained=True)
    assert score_kind(trained) == "label_lengths" and model_transform(trained).object_size == (28, 28)
    trained.reset_classifier(10)
    for net in (trained, capszoo.create_model(name, pretrained=True, num_classes=4, in_chans=3)):
        assert score_kind(net) == "lengths" and model_transform(net).object_size is None
    features = capszoo.create_model(name, pretrained=True, num_classes=0)
    assert model_transform(features).object_size == (28, 28)


def test_another_size_excuses_no_other_argument() -> None:
    name = "resnet20_routingcaps.mnist"  # none of its weights depends on the size
    for size in ({}, {"img_size": 40}):
        with refuses(WeightsError, names=["class_caps.weight"]):
            capszoo.create_model(name, pretrained=True, pose_dim=8, **size)
    assert not hasattr(capszoo.create_model(name, pretrained=True, img_size=40), "untrained")


def test_what_a_missing_decoder_says_can_be_done() -> None:
    for name, options, message in (
        ("capsnet_dynamic", {}, "decoder=True"),
        (
            "capsnet_dynamic",
            {"decoder": True, "num_classes": 0},
            "decoder=True",
        ),
        ("resnet20_avg", {}, ("networks", "architecture")),
    ):
        with refuses(RuntimeError, names=message):
            capszoo.create_model(name, device="meta", **options).reconstruct(torch.zeros(1, 10, 16))


def test_a_head_with_weights_per_position_takes_its_own_grid_alone() -> None:
    head = create_head(8, (4, 4), 3, "conv", caps_types=2, caps_dim=2)
    assert head(torch.zeros(1, 8, 4, 4)).shape == (1, 3)
    with refuses(AssertionError, names=["grid"]):
        head(torch.zeros(1, 8, 6, 6))


@pytest.mark.parametrize(
    "size", [True, 28.5, 28.0, None, "28", 0, (28,), (28, 28, 1), (28, 28.0), (28, -1), (28, True)]
)
def test_an_image_size_is_one_whole_number_or_two(size: Any) -> None:
    with refuses(ValueError, names=["img_size"]):
        to_2tuple(size)


def test_image_sizes_of_any_integer_type() -> None:
    assert to_2tuple(np.int64(28)) == to_2tuple([28, np.int32(28)]) == (28, 28)  # type: ignore[arg-type]


def test_weights_of_another_network_are_named() -> None:
    net = capszoo.create_model("cnn_routingpool", img_size=8)
    weights = {**net.state_dict(), "no.such": torch.zeros(1)}
    with refuses(ValueError, names=["RoutingPoolCNN", "no.such"]):
        net.fit_to_size(weights, 8)


def test_networks_without_votes_say_so() -> None:
    for name in ("cnn_baseline", "resnet18_encap"):
        with refuses(NotImplementedError, names=["forms", "votes"]):
            capszoo.create_model(name, device="meta").class_votes(torch.zeros(1))
    for routing, error in (("avg", NoCapsules), ("self_routing", NotImplementedError)):
        with pytest.raises(error, match=f"the .*{routing} head"):
            create_head(8, (4, 4), 3, routing).class_votes(torch.zeros(1))


def test_the_decoder_sees_the_target_capsule_alone() -> None:
    torch.manual_seed(0)
    model = capszoo.create_model("capsnet_dynamic", decoder=True).eval()
    poses, target, rows = torch.rand(2, 10, 16), torch.tensor([0, 7]), [0, 1]
    with torch.no_grad():
        picture = model.reconstruct(poses, target)
        others = torch.rand_like(poses)
        others[rows, target] = poses[rows, target]
        assert torch.equal(model.reconstruct(others, target), picture)
        own = poses.clone()
        own[rows, target] += 1
        assert not torch.allclose(model.reconstruct(own, target), picture)
        assert torch.equal(model.reconstruct(poses), model.reconstruct(poses, poses.norm(dim=-1).argmax(1)))


@pytest.mark.parametrize(
    "name",
    (
        "efficient_capsnet",
        "capsnet_dynamic",
        "cnn6",
        "resnet20_dynamic",
        "cnn_routingpool",
        "resnet20_routingcaps",
        "cnn_sabour",
        "cnn_baseline",
        "resnet18_encap",
        "encapnet6",
    ),
)
def test_drop_rate_has_an_effect_in_training_only(name: str) -> None:
    model = small(name, drop_rate=0.5).eval()
    with torch.no_grad():
        features = model.forward_features(images(model, 2))
        assert torch.equal(model.forward_head(features), model.forward_head(features))
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.train()
        found = []
        for seed in (0, 1):
            torch.manual_seed(seed)
            found.append(model.forward_head(features))
        assert not torch.allclose(*found)


def test_weights_of_another_size_keep_their_places() -> None:
    net = capszoo.create_model("idpa_cnn", img_size=36)  # grid 6x6, from 4x4 at 28
    name, layer = next(
        (f"capsules.{k}", m) for k, m in net.capsules.named_children() if isinstance(m, FCIDPA)
    )
    types = layer.weight.shape[0] // 36
    ramp = torch.arange(4.0)[:, None] + 10 * torch.arange(4.0)  # rows +1, columns +10
    flat = ramp[:, :, None].expand(4, 4, types).reshape(-1, 1, 1, 1).expand(-1, *layer.weight.shape[1:])
    found = (
        net._resample(f"{name}.weight", flat, (28, 28)).unflatten(0, (6, 6, types))[:, :, 0, 0, 0, 0]
        * 36
        / 16
    )
    inner = found[1:-1, 1:-1]
    torch.testing.assert_close(inner.diff(dim=0), torch.full((3, 4), 4 / 6))
    torch.testing.assert_close(inner.diff(dim=1), torch.full((4, 3), 40 / 6))
