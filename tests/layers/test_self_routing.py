"""Self-routing against the naive equations, in float64, values and gradients; and its invariants."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from capszoo.layers import ConvSelfRouting, SelfRouting
from tests.reference import self_routing as naive

F64 = torch.float64


def randomised(layer: SelfRouting) -> tuple[Tensor, Tensor, Tensor | None]:
    """Weights that are not zero, as the reference has them: ``[i, j, d]``, ``[i, j]``, ``[i, j, e, d]``."""
    torch.nn.init.normal_(layer.weight)
    torch.nn.init.normal_(layer.bias)
    pose = layer.pose_weight
    if pose is not None:
        pose = pose.unflatten(2, (layer.out_caps, layer.out_dim)).permute(0, 2, 3, 1)
    return layer.weight.transpose(1, 2), layer.bias, pose


@pytest.mark.parametrize("out_dim", [0, 3])
@pytest.mark.parametrize("shape", [(1, 6, 3, 4), (2, 5, 1, 3), (3, 1, 4, 2)])
def test_layer_equals_the_equations(shape: tuple[int, ...], out_dim: int) -> None:
    b, i, j, d = shape
    layer = SelfRouting(i, d, j, out_dim).to(F64)
    weights = randomised(layer)
    poses = torch.randn(b, i, d, dtype=F64, requires_grad=True)
    active = (torch.rand(b, i, dtype=F64) + 0.1).requires_grad_()
    expected = [naive.route_image(p, a, *weights) for p, a in zip(poses, active, strict=True)]
    activations, parents, couplings = layer.route(poses, active)
    want = [torch.stack([r[0] for r in expected])]
    if out_dim:
        want.append(torch.stack([r[1] for r in expected]))
    got = [t for t in (activations, parents) if t is not None]
    close = dict(atol=1e-5, rtol=1e-5)  # 1e-7 in the denominators, and masses of 0.01
    torch.testing.assert_close(got, want, **close)
    torch.testing.assert_close(couplings, torch.stack([r[2].t() for r in expected]))
    functionals = [torch.randn(t.shape, dtype=F64) for t in want]
    inputs = [poses, active, *layer.parameters()]
    grads, expected_grads = (
        torch.autograd.grad(sum((t * f).sum() for t, f in zip(out, functionals, strict=True)), inputs)
        for out in (got, want)
    )
    torch.testing.assert_close(grads, expected_grads, **close)


@pytest.mark.parametrize(("stride", "padding"), [(1, 0), (2, 1)])
def test_conv_equals_the_windows(stride: int, padding: int) -> None:
    layer = ConvSelfRouting(2, 3, 4, 5, 3, stride, padding).to(F64)
    weights = randomised(layer.window)
    x = torch.randn(2, 8, 5, 4, dtype=F64)
    x[:, 6:].abs_()
    out, couplings = layer.route(x)
    assert out.shape[2:] == layer.grid_size(5, 4) == couplings.shape[1:3]
    for image, got in zip(x, out, strict=True):
        poses = image[:6].unflatten(0, (2, 3)).permute(2, 3, 0, 1)
        parents, active = naive.conv_route(poses, image[6:].permute(1, 2, 0), *weights, 3, stride, padding)
        torch.testing.assert_close(got[:20].permute(1, 2, 0), parents.flatten(2), atol=1e-6, rtol=1e-6)
        torch.testing.assert_close(got[20:].permute(1, 2, 0), active, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(couplings.sum(3), torch.ones_like(couplings.sum(3)))


def test_starts_even_and_its_activations_sum_to_one() -> None:
    layer = SelfRouting(7, 3, 5)
    poses, active = torch.randn(2, 7, 3), torch.rand(2, 7)
    torch.testing.assert_close(layer(poses, active)[0], torch.full((2, 5), 0.2))
    randomised(layer)
    torch.testing.assert_close(layer(poses, active)[0].sum(1), torch.ones(2))
