"""The pictures of docs/pictures: drawn from the packed images, by the weights that they state."""

from __future__ import annotations

from pathlib import Path

import pytest
from PIL import Image

from capszoo._pretrained.catalogue import checkpoints
from scripts.pictures import FIRST, KINDS, drawings, kinds_of, picture_file, stale_drawings, write_drawing

#: one picture of each kind
QUICK = (("resnet20_routingcaps.mnist", "heat"), ("capsnet_dynamic.mnist", "decoded"))


def check(path: Path, docs: Path, stated: str) -> None:
    write_drawing(path, stale_drawings(docs)[path])
    with Image.open(path) as picture:
        assert picture.info["Description"].startswith(stated)
        assert len(set(picture.convert("L").get_flattened_data())) > 50, "next to nothing is drawn"
    assert path not in stale_drawings(docs)


@pytest.mark.parametrize(("name", "kind"), QUICK)
def test_a_picture_states_its_weights(name: str, kind: str, tmp_path: Path) -> None:
    assert len(QUICK) == len(KINDS)
    weights = checkpoints(aliases=False)[name].sha256[:16]
    check(picture_file(tmp_path, name, kind), tmp_path, f"{kind} of {name}, weights {weights}")


@pytest.mark.slow
def test_every_picture_states_its_weights(tmp_path: Path) -> None:
    quick = {picture_file(tmp_path, *one) for one in QUICK}
    for path, (about, _) in drawings(tmp_path).items():
        if path.suffix == ".png" and path not in quick:
            check(path, tmp_path, about)


def test_other_weights_and_lost_checkpoints_are_stale(tmp_path: Path) -> None:
    path, lost = picture_file(tmp_path, *QUICK[0]), picture_file(tmp_path, "no_net.mnist", "heat")
    path.parent.mkdir()
    for file in (path, lost):
        Image.new("L", (4, 4)).save(file)
    stale = stale_drawings(tmp_path)
    assert stale[path] is not None and stale[lost] is None
    write_drawing(lost, None)
    assert not lost.exists()
    first = tmp_path / "pictures" / FIRST
    check(first, tmp_path, "explain of ")


@pytest.mark.parametrize(
    "name", ["capsnet_em_norb_small.mnist", "resnet20_em.cifar10", "resnet20_routingpool.cifar10_avg"]
)
def test_maps_that_fail_the_deletion_test_or_route_nothing_are_not_shown(name: str) -> None:
    assert "heat" not in kinds_of(checkpoints(aliases=False)[name])
