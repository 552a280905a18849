"""Data sets by name: where they are found, what is checked, how validation is carved out."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from capszoo.data import (
    DATASETS,
    Batches,
    DataError,
    ImageSet,
    check_name,
    dataset_spec,
    load_dataset,
    split_validation,
)
from tests.support.errors import refuses
from tests.support.formats import write_idx, write_parquet, write_smallnorb, write_svhn


@pytest.fixture
def digits(root: Path) -> tuple[np.ndarray, np.ndarray]:
    """1,000 real images [n, 28, 28] with labels [n]."""
    packed = np.load(root / "tests" / "fixtures" / "mnist_test_1000.npz")
    return packed["images"], packed["labels"]


@pytest.mark.parametrize("where", ["", "mnist", "MNIST/raw", "mnist/mnist"])
def test_found_in_known_layouts(tmp_path: Path, digits: tuple[np.ndarray, np.ndarray], where: str) -> None:
    images, labels = digits[0][:20], digits[1][:20]
    folder = tmp_path / where
    folder.mkdir(parents=True, exist_ok=True)
    if where == "mnist/mnist":
        write_parquet(folder / "test-00000-of-00001.parquet", images, labels.tolist())
    else:
        write_idx(folder / "t10k-images-idx3-ubyte", images, compress=where == "")
        name = "t10k-labels.idx1-ubyte" if where == "mnist" else "t10k-labels-idx1-ubyte"
        write_idx(folder / name, labels)
    found = load_dataset("mnist", "test", tmp_path, count=20)
    np.testing.assert_array_equal(found.images[:, 0].numpy(), images)
    assert found.labels.tolist() == labels.tolist() and found.labels.dtype == torch.int64
    assert found.split == "test" and len(found) == 20


def test_fashion_mnist_is_not_mnist(tmp_path: Path) -> None:
    """Their files have the same names, shapes and counts."""
    write_idx(tmp_path / "t10k-images-idx3-ubyte", np.zeros((8, 28, 28), np.uint8))
    write_idx(tmp_path / "t10k-labels-idx1-ubyte", np.array([9, 2, 1, 1, 6, 1, 4, 6]))
    with pytest.raises(DataError, match="its labels are those of Fashion-MNIST"):
        load_dataset("mnist", "test", tmp_path, count=8)
    assert len(load_dataset("fashion_mnist", "test", tmp_path, count=8)) == 8


def test_environment_names_several_folders(
    tmp_path: Path, digits: tuple[np.ndarray, np.ndarray], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_parquet(tmp_path / "test-00000-of-00001.parquet", digits[0][:3], [7, 2, 1])
    monkeypatch.setenv("CAPSZOO_DATA", f"{tmp_path / 'absent'}:{tmp_path}")
    assert load_dataset("mnist", "test", count=3).labels.tolist() == [7, 2, 1]


def test_errors_are_one_line_with_a_remedy(
    tmp_path: Path, digits: tuple[np.ndarray, np.ndarray], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(name: str, split: str, *folder: Path, names: list[object], count: int | None = None) -> None:
        with refuses(DataError, names=names):
            load_dataset(name, split, *folder, count=count)

    monkeypatch.delenv("CAPSZOO_DATA", raising=False)
    fails("mnits", "test", names=["mnist"])
    fails("mnist", "validation", names=["train", "test"])
    fails("mnist", "test", names=["CAPSZOO_DATA"])
    fails("mnist", "test", tmp_path / "absent", names=["--data"])
    fails("mnist", "test", tmp_path, names=[tmp_path])
    path = write_parquet(tmp_path / "test-00000-of-00001.parquet", digits[0][:5], [7, 2, 1, 0, 4])
    fails("mnist", "test", tmp_path, names=["5", "10000", "expected"])
    fails("cifar10", "test", tmp_path, names=["(3, 28, 28), not (3, 32, 32)"])
    write_parquet(path, digits[0][:2], [7, 12])
    fails("mnist", "test", tmp_path, count=2, names=["7", "12", "labels"])
    path.unlink()
    write_idx(tmp_path / "t10k-images-idx3-ubyte", digits[0][:5])
    write_idx(tmp_path / "t10k-labels-idx1-ubyte", digits[1][:4])
    fails("mnist", "test", tmp_path, names=["5", "4", "images"])


def test_validation_split() -> None:
    images = torch.arange(100, dtype=torch.uint8).view(100, 1, 1, 1)
    whole = ImageSet(dataset_spec("mnist"), "train", images, torch.arange(100) % 10)
    (rest, held_out), again, other = (split_validation(whole, 30, seed=seed) for seed in (0, 0, 1))
    assert (len(rest), len(held_out)) == (70, 30) and held_out.split == "validation"
    assert sorted(torch.cat((rest.images, held_out.images)).flatten().tolist()) == list(range(100))
    assert torch.equal(held_out.images, again[1].images) and not torch.equal(held_out.images, other[1].images)
    assert torch.equal(rest.images.flatten() % 10, rest.labels)
    assert len(split_validation(whole, 0)[1]) == 0
    with refuses(DataError, names=["100", "carved"]):
        split_validation(whole, 100)


def test_fingerprint_follows_content(digits: tuple[np.ndarray, np.ndarray]) -> None:
    images, labels = torch.from_numpy(digits[0][:4]).unsqueeze(1), torch.from_numpy(digits[1][:4]).long()
    one = ImageSet(dataset_spec("mnist"), "test", images, labels)
    assert one.fingerprint() == replace(one, images=images.clone(), split="other").fingerprint()
    assert one.fingerprint() != one.subset(torch.tensor([1, 0, 2, 3])).fingerprint()
    assert one.fingerprint() != replace(one, labels=labels.flip(0)).fingerprint()


def test_specs_are_consistent() -> None:
    for name, spec in DATASETS.items():
        assert spec.name == name and len(spec.mean) == len(spec.std) == spec.input_size[0]
        classes = {"cifar100": 100, "h_imagenet": 0}.get(name, 5 if name.startswith("smallnorb") else 10)
        assert len(set(spec.label_names)) == spec.num_classes == classes
        assert (spec.side or spec.input_size[1]) >= spec.input_size[1] == spec.input_size[2]
        assert not spec.base or spec.base in DATASETS


@pytest.mark.slow
@pytest.mark.usefixtures("full_data")
@pytest.mark.parametrize("name", ["mnist", "cifar10"])
def test_real_data_has_the_stated_statistics(name: str) -> None:
    whole = load_dataset(name, "train")
    pixels = whole.images.double().transpose(0, 1).flatten(1) / 255
    assert pixels.mean(1).tolist() == pytest.approx(whole.spec.mean, abs=1e-4)
    assert pixels.std(1).tolist() == pytest.approx(whole.spec.std, abs=2e-4)


def write_norb(folder: Path, rng: np.random.Generator) -> np.ndarray:
    """12 images of every azimuth of two elevations in both splits; returns info [n, 4]."""
    info = np.array([(4, e, 2 * a, 0) for e in (1, 5) for a in range(18)])
    images = rng.integers(0, 256, (len(info), 2, 96, 96), dtype=np.uint8)
    images[:, 0, 0, 0] = np.arange(len(info))
    for split in ("train", "test"):
        write_smallnorb(folder, split, images, [k % 5 for k in range(len(info))], info)
    return info


def test_smallnorb(tmp_path: Path) -> None:
    info = write_norb(tmp_path, np.random.default_rng(0))
    found = load_dataset("smallnorb", "train", tmp_path, count=36)
    assert isinstance(found, ImageSet)
    assert found.images.shape == (36, 2, 48, 48) and found.spec.input_size == (2, 32, 32)
    assert found.labels.tolist() == [k % 5 for k in range(36)]
    train = next(Batches(found, 36, train=True).epoch())
    middle = next(Batches(found, 36).epoch())
    assert train.pixels.shape == (36, 2, 32, 32)
    assert torch.equal(middle.pixels, found.images[:, :, 8:40, 8:40])
    azimuth = info[:, 2] * 10
    near = np.isin(azimuth, (300, 320, 340, 0, 20, 40))
    for name, familiar in (("smallnorb_azimuth", near), ("smallnorb_elevation", info[:, 1] < 3)):
        for split, chosen in (("train", familiar), ("familiar", familiar), ("test", ~familiar)):
            some = load_dataset(name, split, tmp_path, count=int(chosen.sum()))
            assert some.labels.tolist() == [k % 5 for k in np.flatnonzero(chosen)], (name, split)
    assert load_dataset("smallnorb", "test", tmp_path, count=36, size=64).size == (96, 96)


def test_smallnorb_files_must_belong_together(tmp_path: Path) -> None:
    write_norb(tmp_path, np.random.default_rng(0))
    with refuses(DataError, names=["36", "24300", "expected"]):
        load_dataset("smallnorb", "test", tmp_path)
    next(tmp_path.glob("*testing-info*")).unlink()
    with refuses(DataError, names=["smallnorb-…-testing-info.mat"]):
        load_dataset("smallnorb", "test", tmp_path, count=36)


def test_cifar_and_svhn(tmp_path: Path) -> None:
    record = bytes([3]) + bytes(3072)
    for k in range(1, 6):
        if k == 5:
            with refuses(DataError, names=["4", "5", "batches"]):
                load_dataset("cifar10", "train", tmp_path, count=10)
        (tmp_path / f"data_batch_{k}.bin").write_bytes(record * 2)
    assert load_dataset("cifar10", "train", tmp_path, count=10).labels.tolist() == [3] * 10
    (tmp_path / "cifar-100-binary").mkdir()
    path = tmp_path / "cifar-100-binary" / "test.bin"
    path.write_bytes(b"".join(bytes([1, fine]) + bytes(3072) for fine in (0, 99, 50)))
    assert load_dataset("cifar100", "test", tmp_path, count=3).labels.tolist() == [0, 99, 50]
    path.write_bytes(bytes([1, 100]) + bytes(3072))
    with refuses(DataError, names=["100", "labels"]):
        load_dataset("cifar100", "test", tmp_path, count=1)
    images = np.random.default_rng(0).integers(0, 256, (4, 32, 32, 3), dtype=np.uint8)
    for split in ("train", "test", "extra"):
        write_svhn(tmp_path / f"{split}_32x32.mat", images, [3, 0, 1, 9])
        found = load_dataset("svhn", split, tmp_path, count=4)
        assert found.labels.tolist() == [3, 0, 1, 9] and found.spec.num_classes == 10


@pytest.mark.parametrize(
    ("name", "where"), [("cifar10", "cifar-10-batches-py"), ("cifar100", "cifar-100-python")]
)
def test_pickles_are_not_read(tmp_path: Path, name: str, where: str) -> None:
    (tmp_path / where).mkdir()
    (tmp_path / where / "train").write_bytes(b"\x80\x04.")
    with refuses(DataError, names=["holds", "pickles"]):
        load_dataset(name, "train", tmp_path)


def test_resized_before_the_crop(tmp_path: Path) -> None:
    images = np.random.default_rng(0).integers(0, 256, (3, 32, 32, 3), dtype=np.uint8)
    write_parquet(tmp_path / "test.parquet", images, [1, 2, 3], "img")
    found = load_dataset("cifar10", "test", tmp_path, count=3, resize=34)
    assert found.size == (34, 34) and found.spec.input_size == (3, 32, 32)
    assert next(Batches(found, 3).epoch()).pixels.shape == (3, 3, 32, 32)
    larger = load_dataset("cifar10", "test", tmp_path, count=3, size=48)
    assert larger.size == (48, 48) and larger.spec.input_size == (3, 48, 48)
    with refuses(DataError, names=["30", "32", "resized"]):
        load_dataset("cifar10", "test", tmp_path, count=3, resize=30)


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("multi_mnist", "multimnist"),
        ("small_norb", "smallnorb"),
        ("CIFAR100", "cifar100"),
        ("imagefolder:", ("followed", "folder")),
    ],
)
def test_the_nearest_name(name: str, hint: str) -> None:
    with refuses(DataError, names=hint):
        check_name(name)
    assert check_name("imagefolder:x") == "imagefolder:x" and check_name("svhn") == "svhn"
