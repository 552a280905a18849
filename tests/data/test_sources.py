"""Data sets by name: where they are found, what is checked, how validation is carved out."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from capszoo.data import DATASETS, DataError, ImageSet, dataset_spec, load_dataset, split_validation
from tests.data.formats import write_idx, write_parquet


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


def test_environment_names_several_folders(
    tmp_path: Path, digits: tuple[np.ndarray, np.ndarray], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_parquet(tmp_path / "test-00000-of-00001.parquet", digits[0][:3], [7, 2, 1])
    monkeypatch.setenv("CAPSZOO_DATA", f"{tmp_path / 'absent'}:{tmp_path}")
    assert load_dataset("mnist", "test", count=3).labels.tolist() == [7, 2, 1]


def test_errors_are_one_line_with_a_remedy(
    tmp_path: Path, digits: tuple[np.ndarray, np.ndarray], monkeypatch: pytest.MonkeyPatch
) -> None:
    def message(*args: object, **kwargs: object) -> str:
        with pytest.raises(DataError) as caught:
            load_dataset(*args, **kwargs)  # type: ignore[arg-type]
        assert "\n" not in str(caught.value)
        return str(caught.value)

    monkeypatch.delenv("CAPSZOO_DATA", raising=False)
    assert "did you mean 'mnist'" in message("mnits", "test")
    assert "there are train, test" in message("mnist", "validation")
    assert "--data or CAPSZOO_DATA" in message("mnist", "test")
    assert "does not exist" in message("mnist", "test", tmp_path / "absent")
    assert f"not in {tmp_path}" in message("mnist", "test", tmp_path)
    path = write_parquet(tmp_path / "test-00000-of-00001.parquet", digits[0][:5], [7, 2, 1, 0, 4])
    assert "5 images, expected 10000" in message("mnist", "test", tmp_path)
    assert "(3, 28, 28), not (3, 32, 32)" in message("cifar10", "test", tmp_path)
    write_parquet(path, digits[0][:2], [7, 12])
    assert "labels run from 7 to 12" in message("mnist", "test", tmp_path, count=2)
    path.unlink()
    write_idx(tmp_path / "t10k-images-idx3-ubyte", digits[0][:5])
    write_idx(tmp_path / "t10k-labels-idx1-ubyte", digits[1][:4])
    assert "5 images but 4 labels" in message("mnist", "test", tmp_path)


def test_cifar_binary_needs_all_batches(tmp_path: Path) -> None:
    record = bytes([3]) + bytes(3072)
    for k in range(1, 5):
        (tmp_path / f"data_batch_{k}.bin").write_bytes(record * 2)
    with pytest.raises(DataError, match="4 of the 5 batches"):
        load_dataset("cifar10", "train", tmp_path, count=10)
    (tmp_path / "data_batch_5.bin").write_bytes(record * 2)
    assert load_dataset("cifar10", "train", tmp_path, count=10).labels.tolist() == [3] * 10


def test_validation_split() -> None:
    spec = dataset_spec("mnist")
    images = torch.arange(100, dtype=torch.uint8).view(100, 1, 1, 1)
    whole = ImageSet(spec, "train", images, torch.arange(100) % 10)
    rest, held_out = split_validation(whole, 30, seed=0)
    assert (len(rest), len(held_out)) == (70, 30) and held_out.split == "validation"
    assert sorted(rest.images.flatten().tolist() + held_out.images.flatten().tolist()) == list(range(100))
    assert torch.equal(held_out.images, split_validation(whole, 30, seed=0)[1].images)
    assert not torch.equal(held_out.images, split_validation(whole, 30, seed=1)[1].images)
    assert torch.equal(rest.images.flatten() % 10, rest.labels)
    assert len(split_validation(whole, 0)[1]) == 0
    with pytest.raises(DataError, match="100 images cannot be carved out of 100"):
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
@pytest.mark.parametrize("name", ["mnist", "cifar10"])
def test_real_data_has_the_stated_statistics(name: str, data_dir: Path) -> None:
    whole = load_dataset(name, "train", data_dir)
    pixels = whole.images.double().transpose(0, 1).flatten(1) / 255
    assert pixels.mean(1).tolist() == pytest.approx(whole.spec.mean, abs=1e-4)
    assert pixels.std(1).tolist() == pytest.approx(whole.spec.std, abs=2e-4)
