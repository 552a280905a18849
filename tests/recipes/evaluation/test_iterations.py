"""Accuracy by the number of routing iterations: that of networks built with as many iterations."""

from __future__ import annotations

import pytest
import torch
from torch.testing import assert_close

import capszoo
from capszoo.data import ImageSet, dataset_spec
from capszoo.recipes.evaluation.iterations import accuracy_by_iterations
from capszoo.recipes.evaluation.metrics import predicted
from capszoo.recipes.evaluation.report import measure
from capszoo.recipes.evaluation.target import EvalTarget, prepare
from capszoo.summary import routing_iterations


def _noise(name: str) -> ImageSet:
    """Forty images of noise with the labels of a data set."""
    spec = dataset_spec(name)
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(256, (40, *spec.input_size), dtype=torch.uint8, generator=generator)
    if spec.multi_label:
        labels = torch.zeros(40, 10).scatter_(
            1, torch.rand(40, 10, generator=generator).argsort(1)[:, :2], 1.0
        )
    else:
        labels = torch.randint(10, (40,), generator=generator)
    return ImageSet(spec, "test", images, labels)


def _target(name: str) -> EvalTarget:
    data = "multimnist" if name.endswith("multimnist") else "mnist"
    return prepare(name, _noise(data), device="cpu")


def test_classes_that_are_never_predicted_are_those_of_the_whole_answer() -> None:
    """Each image has two answers: the second of them counts, too."""
    target = _target("resnet20_routingcaps.multimnist")
    target = target.on(target.images.fixed().subset(torch.arange(3)))
    (batch,) = target.batches(3)
    with torch.no_grad():
        answers = target.net(batch.images).topk(2).indices.flatten().tolist()
    report = measure(target, routing=True)
    assert report.routing is not None
    assert report.routing.never_predicted == tuple(k for k in range(10) if k not in answers)


@pytest.mark.parametrize("name", ["idpa_cnn.mnist", "resnet20_routingcaps.multimnist"])
def test_accuracies_are_those_of_networks_built_with_as_many_iterations(name: str) -> None:
    target = _target(name)
    own = routing_iterations(target.net)
    seen: list[int] = []
    found = accuracy_by_iterations(target, (1, *own, 4), 16, seen.append)
    assert sum(seen) == 4 * target.n, "the network's own number takes one more pass"
    assert routing_iterations(target.net) == own
    assert [one.iterations for one in found] == [1, *own, 4] and found[1].changed == 0
    (batch,) = target.batches(40)
    per_image = target.images.spec.labels_per_image
    with torch.no_grad():
        usual = predicted(target.net(batch.images), batch.labels, per_image, target.threshold)
    for one in found:
        net = capszoo.create_model(name, pretrained=True, routing_iters=one.iterations).eval()
        with torch.no_grad():
            given = predicted(net(batch.images), batch.labels, per_image, target.threshold)
        truth = batch.labels[:, None] if batch.labels.dim() == 1 else batch.labels
        right = (given == truth).all(1).double().mean()
        assert_close(one.accuracy, float(100 * right))
        assert one.changed == int((given != usual).any(1).sum())
    assert found[0].changed > 0, "noise lies near the borders of classes"
