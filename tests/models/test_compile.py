"""torch.compile takes every model as one graph, routing included, and changes nothing."""

from __future__ import annotations

import pytest
import torch

from tests.support.zoo import images, names, slow_unless, small


#: The others are swept by ``make test-slow``; tests/layers/test_engines.py compiles every routing by itself.
@pytest.mark.parametrize("name", slow_unless(("idpa_cnn",), names()))
def test_compiles_as_one_graph(name: str) -> None:
    torch._dynamo.reset()
    model = small(name)
    x = images(model)
    # The graph is made ahead of time, with its backward, and run as it is: what is compiled must be one graph.
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    for train in (False, True):
        model.train(train)
        torch.manual_seed(0)  # dropout
        expected = model(x)
        torch.manual_seed(0)
        found = compiled(x)
        torch.testing.assert_close(
            found, expected, rtol=1e-4, atol=1e-4 * float(expected.detach().abs().max())
        )
    found.float().square().mean().backward()
    for key, parameter in model.named_parameters():
        assert parameter.grad is not None and torch.isfinite(parameter.grad).all(), key
