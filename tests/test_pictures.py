"""The pictures of docs/pictures: drawn from the packed images, by the weights that they state."""

from __future__ import annotations

from pathlib import Path

import pytest
from PIL import Image

from capszoo._pretrained.catalogue import checkpoints
from scripts.pictures import FIRST, KINDS, kinds_of, picture_file, stale_pictures, write_picture

#: one picture of each kind
QUICK = (("resnet20_routingcaps.mnist", "heat"), ("capsnet_dynamic.mnist", "decoded"))


@pytest.mark.parametrize(("name", "kind"), QUICK)
def test_a_picture_states_its_weights(name: str, kind: str, tmp_path: Path) -> None:
    assert kind in kinds_of(checkpoints(aliases=False)[name]) and len(QUICK) == len(KINDS)
    _check(name, kind, tmp_path)


@pytest.mark.slow
def test_every_picture_states_its_weights(tmp_path: Path) -> None:
    for name, kind in _drawn():
        if (name, kind) not in QUICK:
            _check(name, kind, tmp_path)


def _drawn() -> list[tuple[str, str]]:
    """Every picture's checkpoint and kind; creates each network."""
    return [(name, kind) for name, info in checkpoints(aliases=False).items() for kind in kinds_of(info)]


def _check(name: str, kind: str, tmp_path: Path) -> None:
    path = picture_file(tmp_path, name, kind)
    assert path in stale_pictures(tmp_path), "it is missing"
    write_picture(path)
    with Image.open(path) as picture:
        assert picture.info["Description"].startswith(
            f"{kind} of {name}, weights {checkpoints(aliases=False)[name].sha256[:16]}"
        )
        assert len(set(picture.convert("L").get_flattened_data())) > 50, "next to nothing is drawn"
    assert path not in stale_pictures(tmp_path)


def test_other_weights_and_lost_checkpoints_are_stale(tmp_path: Path) -> None:
    name, kind = QUICK[0]
    path, lost = picture_file(tmp_path, name, kind), picture_file(tmp_path, "no_net.mnist", kind)
    path.parent.mkdir()
    for file in (path, lost):
        Image.new("L", (4, 4)).save(file)
    assert {path, lost} <= set(stale_pictures(tmp_path))
    write_picture(lost)
    assert not lost.exists()


def test_the_readme_s_picture_states_its_weights(tmp_path: Path) -> None:
    path = tmp_path / "pictures" / FIRST
    path.parent.mkdir()
    assert path in stale_pictures(tmp_path)
    write_picture(path)
    assert path not in stale_pictures(tmp_path)


@pytest.mark.parametrize(
    "name", ["capsnet_em_norb_small.mnist", "resnet20_em.cifar10", "resnet20_routingpool.cifar10_avg"]
)
def test_maps_that_fail_the_deletion_test_or_route_nothing_are_not_shown(name: str) -> None:
    assert "heat" not in kinds_of(checkpoints(aliases=False)[name])
