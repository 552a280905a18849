"""IDPA routing against the naive procedures, in float64, values and gradients; its invariants; its dependency cone."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch import Tensor, library

from capszoo.layers import FCIDPA, CapsuleNorm, ConvIDPA, IDPAStack, idpa_routing
from capszoo.layers.engine_choice import record_engines, use_engines
from capszoo.layers.idpa import blocked
from capszoo.layers.tuning import tuned
from tests.reference import idpa as naive
from tests.support import LargestTensor
from tests.support.layers import assert_same, describe, shaken

F64 = torch.float64


def small_stack(
    num_iters: int, routing: str = "concurrent", pose: str = "matrix", **options: Any
) -> IDPAStack:
    """Two convolutional and two fully connected layers, on 5x4 children."""
    first = {"in_dim": 4, "pose": pose, **options}
    dims = (4, 4, 4) if pose == "matrix" else (3, 2, 4)
    return shaken(
        IDPAStack(
            OrderedDict(
                conv1=ConvIDPA(2, 3, out_dim=dims[0], kernel_size=2, stride=2, **first),
                conv2=ConvIDPA(3, 2, out_dim=dims[1], kernel_size=2, **{**first, "in_dim": dims[0]}),
                hidden=FCIDPA(2, 3, out_dim=dims[2], **{**first, "in_dim": dims[1]}),
                classes=FCIDPA(3, 2, out_dim=dims[2], **{**first, "in_dim": dims[2]}),
            ),
            num_iters,
            routing,
        )
    )


def primary(batch: int = 1, size: tuple[int, int] = (5, 4), caps: int = 2, dim: int = 4) -> Tensor:
    return torch.randn(batch, *size, caps, dim, dtype=F64, requires_grad=True)


# -- the pure function --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_iters", [1, 2, 3, 4])
@pytest.mark.parametrize("options", [{}, {"scale_agreement": False}, {"layer_norm": False}])
def test_pure_function(num_iters: int, options: dict[str, bool]) -> None:
    votes = torch.randn(2, 3, 5, 4, dtype=F64, requires_grad=True)  # [b, j, i, e]
    weight, bias = (torch.randn(4, dtype=F64, requires_grad=True) for _ in range(2))
    poses, couplings = idpa_routing(votes, num_iters, norm_weight=weight, norm_bias=bias, **options)
    layer = naive.Layer(
        torch.zeros(5, 1, 3, 4),
        1,
        scale=options.get("scale_agreement", True),
        norm_weight=weight,
        norm_bias=bias,
        layer_norm=options.get("layer_norm", True),
    )
    for b in range(2):
        listed = [list(votes[b, :, i]) for i in range(5)]
        p = list(torch.zeros(3, 4, dtype=F64))
        for _ in range(num_iters):
            p, c, _ = naive.route_position(listed, p, layer)
        inputs = [votes] + ([weight, bias] if layer.layer_norm else [])
        assert_same(poses[b], naive.stack(p), inputs)
        torch.testing.assert_close(couplings[b], naive.stack(c).t())
    torch.testing.assert_close(couplings.sum(dim=1), torch.ones(2, 5, dtype=F64))


def test_pure_function_takes_a_start() -> None:
    votes, start = torch.randn(2, 3, 5, 4, dtype=F64), torch.randn(2, 3, 4, dtype=F64)
    once, c = idpa_routing(votes, 1, parents=start)
    assert not torch.allclose(c, torch.full_like(c, 1 / 3))
    first, _ = idpa_routing(votes, 1)
    torch.testing.assert_close(idpa_routing(votes, 1, parents=first)[0], idpa_routing(votes, 2)[0])


# -- single layers ------------------------------------------------------------------------------------------------

CONVS = [
    dict(in_caps=2, out_caps=3, in_dim=4, kernel_size=3),
    dict(in_caps=3, out_caps=2, in_dim=4, kernel_size=3, stride=2),
    dict(in_caps=2, out_caps=4, in_dim=9, kernel_size=2, stride=2),
    dict(in_caps=2, out_caps=3, in_dim=4, kernel_size=3, stride=2, padding=1),
    dict(in_caps=4, out_caps=2, in_dim=4, kernel_size=1),
    dict(in_caps=2, out_caps=3, in_dim=3, out_dim=5, kernel_size=2, pose="vector"),
]


@pytest.mark.parametrize("num_iters", [1, 2, 3, 4])
@pytest.mark.parametrize("case", range(len(CONVS)))
def test_conv_layer(case: int, num_iters: int) -> None:
    layer = shaken(ConvIDPA(**CONVS[case], num_iters=num_iters))
    caps, dim = layer.in_caps, layer.in_dim
    x = torch.randn(1, caps * dim, 4, 3, dtype=F64, requires_grad=True)
    poses = layer(x)
    described = describe(layer)
    children = naive.grid(x[0].reshape(caps, dim, 4, 3).permute(2, 3, 0, 1))
    expected, couplings, _ = naive.inference(children, [described], num_iters)
    expected = naive.stack(expected[0])  # [h, w, j, e]
    assert poses.shape == (1, layer.out_caps * layer.out_dim, *expected.shape[:2])
    assert (layer.out_size(4), layer.out_size(3)) == tuple(poses.shape[2:])
    poses = poses[0].unflatten(0, (layer.out_caps, layer.out_dim)).permute(2, 3, 0, 1)
    assert_same(poses, expected, [x, layer.weight, layer.norm.weight, layer.norm.bias])

    _, _, given = layer.route([x.permute(0, 2, 3, 1).unflatten(3, (caps, dim))], [], num_iters)
    if num_iters == 1:
        assert given is None
    else:  # naive: [h, w, (k l i), j]
        torch.testing.assert_close(given[0].flatten(3), naive.stack(couplings[0]).transpose(2, 3))
        torch.testing.assert_close(given.sum(dim=3), torch.ones_like(given[:, :, :, 0]))


@pytest.mark.parametrize("num_iters", [1, 2, 3])
@pytest.mark.parametrize("out_caps", [1, 5])
@pytest.mark.parametrize("pose", ["matrix", "vector"])
def test_fc_layer(out_caps: int, num_iters: int, pose: str) -> None:
    layer = shaken(FCIDPA(3, out_caps, 4, 4 if pose == "matrix" else 2, num_iters, pose))
    x = torch.randn(2, 3, 4, dtype=F64, requires_grad=True)
    poses = layer(x)
    _, _, given = layer.route([x], [], num_iters)
    for b in range(2):
        expected, couplings, _ = naive.inference(list(x[b]), [describe(layer)], num_iters)
        assert_same(poses[b], naive.stack(expected[0]), [x, layer.weight, layer.norm.weight, layer.norm.bias])
        if num_iters > 1:
            torch.testing.assert_close(given[b], naive.stack(couplings[0]).t())


@pytest.mark.parametrize("num_iters", [1, 2, 3])
@pytest.mark.parametrize("parent_init", ["random", "learned"])
@pytest.mark.parametrize("kind", ["conv", "fc"])
def test_other_starts(kind: str, parent_init: str, num_iters: int) -> None:
    options = {"num_iters": num_iters, "parent_init": parent_init}
    layer = ConvIDPA(2, 3, 4, kernel_size=2, **options) if kind == "conv" else FCIDPA(12, 18, 4, **options)
    shaken(layer)
    x = primary(1, (2, 3))
    poses, _, _ = layer.route([x], [], num_iters)
    expected, _, _ = naive.inference(naive.grid(x[0]), [describe(layer)], num_iters)
    inputs = [x, layer.weight] + ([layer.start] if parent_init == "learned" else [])
    assert_same(poses[-1][0], naive.stack(expected[0]), inputs)
    assert ("start" in layer.state_dict()) and ("start" not in FCIDPA(2, 3).state_dict())


# -- Procedure 2 --------------------------------------------------------------------------------------------------


def full_reference(stack: IDPAStack, x: Tensor, activation: Tensor | None = None) -> tuple[Any, Any, Any]:
    acts = None if activation is None else naive.grid(activation[0])
    layers = [describe(layer) for layer in stack]
    return naive.inference(naive.grid(x[0]), layers, stack.num_iters, stack.routing, acts)


def assert_couplings(given: list[Tensor], expected: Any) -> None:
    """Every layer's couplings of the first image equal the reference's nested lists."""
    for c, nested in zip(given, expected, strict=True):
        wanted = naive.stack(nested).transpose(-1, -2)
        torch.testing.assert_close(c[0].reshape(wanted.shape), wanted)


def parameters_but_starts(stack: IDPAStack) -> list[Tensor]:
    return [p for p in stack.parameters() if p.requires_grad]


@pytest.mark.parametrize("num_iters", [1, 2, 3, 4])
@pytest.mark.parametrize("routing", ["concurrent", "sequential"])
@pytest.mark.parametrize("pose", ["matrix", "vector"])
def test_stack_is_procedure_2(num_iters: int, routing: str, pose: str) -> None:
    """What the cone computes equals the full procedure, gradients included; and so does everything, when asked."""
    stack = small_stack(num_iters, routing, pose)
    x = primary()
    expected, couplings, _ = full_reference(stack, x)
    scores = stack(x)
    assert_same(scores[0], naive.stack(expected[-1]), [x, *parameters_but_starts(stack)])

    poses, _, given = stack.run_full(x)
    for level in range(4):
        torch.testing.assert_close(poses[level][0], naive.stack(expected[level]), atol=1e-10, rtol=1e-9)
    assert_couplings(given, couplings)


def test_no_vote_outside_of_the_cone() -> None:
    """At two iterations only the class layer forms votes; at one, none does. Sequential routing forms them all."""
    layers = OrderedDict(conv=ConvIDPA(8, 16, 16, kernel_size=3), classes=FCIDPA(4 * 4 * 16, 3, 16))
    stack = IDPAStack(layers, 2)
    x = torch.randn(2, 6, 6, 8, 16)
    conv_votes, class_votes = 2 * 16 * 72 * 16 * 16, 2 * 256 * 3 * 16
    largest = {}
    for routing, t in [("concurrent", 1), ("concurrent", 2), ("concurrent", 3), ("sequential", 2)]:
        stack.routing, stack.num_iters = routing, t
        with torch.no_grad(), LargestTensor() as made:
            stack(x)
        largest[routing, t] = made.numel
    assert largest["concurrent", 1] < class_votes
    assert class_votes <= largest["concurrent", 2] < conv_votes
    assert largest["concurrent", 3] >= conv_votes and largest["sequential", 2] >= conv_votes


def test_votes_are_shared_while_the_children_stay() -> None:
    layer = FCIDPA(6, 3, 4, num_iters=5)
    calls = []
    layer._votes = lambda children: calls.append(children) or FCIDPA._votes(layer, children)
    layer(torch.randn(2, 6, 4))
    assert len(calls) == 1
    kids = [torch.randn(2, 6, 4) for _ in range(4)]
    layer.route(kids, [], 5)
    assert [next(k for k in range(4) if c is kids[k]) for c in calls[1:]] == [0, 1, 2, 3]


# -- in blocks (see test_engines.py) ---------------------------------------------------------------------------------


def test_blocks_under_autocast() -> None:
    """The operator takes half poses and float32 weights; gradients have the types of what they are for."""
    layer = shaken(ConvIDPA(4, 18, 16)).float()
    x = torch.randn(2, 4, 4, 4, 16, requires_grad=True)
    given = []
    for autocast in (False, True):
        name = "blocked" if autocast else "reference"
        with (
            use_engines(name),
            record_engines() as choices,
            torch.autocast("cpu", torch.bfloat16, enabled=autocast),
        ):
            children = x.bfloat16() if autocast else x
            poses = layer.route([children], [], 2)[0][-1]
        assert [choice.engine.name for choice in choices] == [name]
        grads = torch.autograd.grad(poses.float().square().sum(), [x, *layer.parameters()])
        assert all(grad.dtype == torch.float32 for grad in grads)
        given.append([poses.float(), *grads])
    for exact, found in zip(*given, strict=True):
        assert (found - exact).abs().max() <= 0.03 * exact.abs().max()


def test_the_operator_is_sound() -> None:
    """Schema, fake kernel, autograd registration and AOT tracing, as PyTorch checks them."""
    for j, want in ((3, True), (5, False)):
        tensors = [
            torch.randn(s, dtype=F64, requires_grad=True) for s in ((4, 6, 2, 2), (6, 2, j, 2), (4, j, 4))
        ]
        with tuned(idpa_block_votes=150):
            library.opcheck(blocked.idpa_pass, (*tensors, True, want))
            torch.autograd.gradcheck(
                lambda *t, want=want: blocked.idpa_pass(*t, True, want)[: 1 + want], tensors
            )


def test_activations_under_autocast() -> None:
    """A variance is a difference of sums: these stay float32."""
    torch.manual_seed(0)
    layer = ConvIDPA(4, 3, 4, activations=True)
    x, a = torch.randn(2, 4, 4, 4, 4) + 3, torch.rand(2, 4, 4, 4)
    expected = layer.route([x], [a], 1)[1][0]
    with torch.autocast("cpu", torch.bfloat16):
        found = layer.route([x], [a], 1)[1][0]
    torch.testing.assert_close(found.float(), expected, atol=0.02, rtol=0)


@pytest.mark.parametrize("num_iters", [1, 2, 3])
@pytest.mark.parametrize("routing", ["concurrent", "sequential"])
@pytest.mark.parametrize("parent_init", ["zero", "learned"])
def test_activations(num_iters: int, routing: str, parent_init: str) -> None:
    """Ablation C, and that an absent child has no say."""
    stack = small_stack(num_iters, routing, activations=True, parent_init=parent_init)
    x = primary()
    a = torch.rand(x.shape[:-1], dtype=F64).requires_grad_()
    expected, _, active = full_reference(stack, x, a)
    poses, last = stack.run(x, a, 4)
    inputs = [x, a, *stack[:3].parameters()]
    assert_same(poses[0], naive.stack(expected[-1]), inputs)
    assert_same(last[0], naive.stack(active[-1]), inputs + [stack.classes.beta_v, stack.classes.beta_a])
    full = stack.run_full(x, a)
    for level in range(4):
        torch.testing.assert_close(full[1][level][0], naive.stack(active[level]), atol=1e-9, rtol=1e-8)

    with torch.no_grad():
        a[0, 0, 0, 0] = 0.0
        moved = x.clone()
        moved[0, 0, 0, 0] += 100.0
        torch.testing.assert_close(stack.run(moved, a, 4)[0], stack.run(x, a, 4)[0])
    with pytest.raises(AssertionError, match="route"):
        stack.classes(torch.randn(1, 3, 4, dtype=F64))


@pytest.mark.parametrize("num_iters", [1, 3])
@pytest.mark.parametrize("option", ["layer_norm", "scale_agreement"])
def test_without(option: str, num_iters: int) -> None:
    """Ablation A; and the text's agreement, without a scale."""
    stack = small_stack(num_iters, **{option: False})
    x = primary()
    expected, _, _ = full_reference(stack, x)
    assert_same(stack(x)[0], naive.stack(expected[-1]), [x, *stack.parameters()])


# -- invariants ---------------------------------------------------------------------------------------------------


def test_a_child_turns_to_the_parent_that_agrees_with_it() -> None:
    """One child disagrees with the others in its votes for parent 0: it goes to parent 1."""
    # [b, j, i, e]
    votes = torch.ones(1, 2, 8, 4, dtype=F64) * torch.tensor([1.0, -1.0, 2.0, -2.0], dtype=F64)
    votes[0, 0, 0] *= -1
    _, couplings = idpa_routing(votes, 3)
    assert couplings[0, 1, 0] > 0.9
    torch.testing.assert_close(couplings[0, :, 1:], torch.full((2, 7), 0.5, dtype=F64), atol=0.05, rtol=0)


def test_dropout_is_for_training_only() -> None:
    layer = FCIDPA(6, 5, 16, drop=0.5)
    x = torch.randn(2, 6, 16)
    assert not torch.equal(layer(x), layer(x))
    layer.eval()
    torch.testing.assert_close(layer(x), layer(x))


def test_capsule_norm() -> None:
    norm = shaken(CapsuleNorm(4))
    x = torch.randn(2, 12, 3, 5, dtype=F64)
    given = norm(x)
    assert given.shape == x.shape and given.is_contiguous(memory_format=torch.channels_last)
    for cap in range(3):
        one = naive.layer_norm(x[1, cap * 4 : cap * 4 + 4, 2, 3], norm.norm.weight, norm.norm.bias, 1e-5)
        torch.testing.assert_close(given[1, cap * 4 : cap * 4 + 4, 2, 3], one)


# -- tracing ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("routing", ["concurrent", "sequential"])
@pytest.mark.filterwarnings("ignore:.*torch.jit")
def test_scripts_with_activations(routing: str) -> None:
    stack, x = small_stack(3, routing, activations=True, parent_init="random"), primary(2)
    a = torch.rand(x.shape[:-1], dtype=F64)
    torch.testing.assert_close(torch.jit.script(stack).run(x, a, 4)[1], stack.run(x, a, 4)[1])


@pytest.mark.parametrize("pose", ["matrix", "vector"])
@pytest.mark.parametrize(("stride", "padding"), [(1, 0), (2, 1)])
def test_sum_of_votes_in_planes(stride: int, padding: int, pose: str) -> None:
    """As a graph makes it, on a map that is not square."""
    layer = ConvIDPA(3, 5, 4, stride=stride, padding=padding, pose=pose).double()
    children = torch.randn(2, 6, 5, 3, 4, dtype=F64)
    expected = layer._sum_of_votes(children)
    torch.testing.assert_close(layer._sum_of_votes_in_planes(children), expected, atol=1e-12, rtol=0)


def test_exports_to_plain_operators(tmp_path: Any) -> None:
    """Three iterations: sums of votes, votes of one layer shared between passes, votes of windows."""
    onnx = pytest.importorskip("onnx")
    layers = OrderedDict(conv=ConvIDPA(4, 18, 16, stride=2), classes=FCIDPA(18 * 2 * 3, 10, 16))
    stack = IDPAStack(layers, 3).eval()
    x = torch.randn(3, 5, 7, 4, 16)
    path = tmp_path / "stack.onnx"
    batch = torch.export.Dim("batch", min=1, max=64)
    torch.onnx.export(
        stack, (x,), path, dynamo=True, dynamic_shapes=({0: batch},), external_data=False, verbose=False
    )
    model = onnx.shape_inference.infer_shapes(onnx.load(path), strict_mode=True)
    operators = {node.op_type for node in model.graph.node}
    assert not operators & {"Gather", "GatherND", "Loop", "If", "Scan", "Einsum", "ScatterND"}, operators
    tensors = [*model.graph.input, *model.graph.output, *model.graph.value_info]
    assert max(len(t.type.tensor_type.shape.dim) for t in tensors) <= 6
    runtime = pytest.importorskip("onnxruntime")
    session = runtime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    for sample in (x, torch.zeros_like(x[:1])):
        (given,) = session.run(None, {session.get_inputs()[0].name: sample.numpy()})
        with torch.no_grad():
            torch.testing.assert_close(torch.from_numpy(given), stack(sample), atol=1e-5, rtol=1e-4)


def test_initial_values_are_the_release_s() -> None:
    torch.manual_seed(0)
    conv = ConvIDPA(32, 32, 16, kernel_size=3)
    assert conv.weight.std().item() == pytest.approx((32 / (4 * 32 * 9)) ** 0.5, rel=0.02)
    fc = FCIDPA(800, 10, 16)
    assert fc.weight.std().item() == pytest.approx((10 / (4 * 800)) ** 0.5, rel=0.02)
    vector = FCIDPA(800, 10, 16, pose="vector")
    assert vector.weight.std().item() == pytest.approx((10 / (16 * 800)) ** 0.5, rel=0.02)


@pytest.mark.parametrize("shape", [(4, 5, 16), (2, 20, 16), (2, 5, 32)])
def test_children_of_two_images_are_never_routed_together(shape: tuple[int, ...]) -> None:
    layer = FCIDPA(10, 3, 16)
    with pytest.raises(AssertionError, match="wrong (number of child capsules|pose dimension)"):
        layer(torch.zeros(shape))
    assert layer(torch.zeros(2, 2, 5, 1, 16)).shape == (2, 3, 16), "a grid is read position by position"
