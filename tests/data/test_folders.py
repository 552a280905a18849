"""Folders, parquet, idx files and repositories named by a path: in memory or streamed, with the same batches."""

from __future__ import annotations

import json
import os
import random
import shutil
import unicodedata
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from capszoo.data import Augment, Batches, DataError, ImageSet, StreamedSet, load_dataset, split_validation
from capszoo.data import folders as folders_module
from capszoo.data.augment import frame
from capszoo.data.commands import check_set
from capszoo.data.folders import find_splits
from capszoo.data.readers import look_at_set
from capszoo.data.specs import source_name
from capszoo.data.summary import summarise
from capszoo.images import Framing
from tests.support.command import succeeds
from tests.support.errors import assert_names, refuses
from tests.support.formats import write_idx, write_image, write_parquet


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    """Two classes, 12 training and 4 test images of several sizes and formats; each class has its own colour."""
    rng = np.random.default_rng(0)
    for split, count in (("train", 6), ("val", 2)):
        for number, name in enumerate(("cat", "dog")):
            for k in range(count):
                pixels = rng.integers(0, 60, (20 + 3 * k, 30 - k, 3), dtype=np.uint8)
                pixels[:, :, number] += 150
                write_image(tmp_path / split / name / f"{k}.{('png', 'jpg', 'bmp')[k % 3]}", pixels)
    (tmp_path / "train" / "cat" / "notes.txt").write_text("not an image")
    return tmp_path


def streamed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folders_module.common, "MEMORY_LIMIT", 1000)


def test_imagefolder_in_memory(pictures: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = load_dataset(f"imagefolder:{pictures}", "train", size=14)
    assert isinstance(found, ImageSet)
    assert found.spec.label_names == ("cat", "dog") and found.spec.input_size == (3, 14, 14)
    assert found.images.shape == (12, 3, 16, 16) and found.labels.tolist() == [0] * 6 + [1] * 6
    colour = found.images.double().mean((2, 3)).argmax(1)
    assert torch.equal(colour, found.labels)
    test = load_dataset(f"imagefolder:{pictures}", "test", size=14, resize=14)
    assert isinstance(test, ImageSet) and test.images.shape == (4, 3, 14, 14)
    monkeypatch.setenv("CAPSZOO_DATA", str(pictures.parent))
    assert len(load_dataset(f"imagefolder:{pictures.name}", "train", size=14)) == 12
    assert load_dataset(f"imagefolder:{pictures}", "test").size == (256, 256)


@pytest.mark.parametrize("workers", [0, 2])
def test_streamed_batches_are_those_in_memory(
    pictures: Path, monkeypatch: pytest.MonkeyPatch, workers: int
) -> None:
    augment = Augment(shift=1, flip=True, brightness=0.2)
    held = load_dataset(f"imagefolder:{pictures}", "train", size=14)
    streamed(monkeypatch)
    read = load_dataset(f"imagefolder:{pictures}", "train", size=14)
    assert isinstance(read, StreamedSet)
    read = replace(read, workers=workers)
    before = torch.get_rng_state()
    for train in (True, False):
        one, other = (Batches(data, 4, train=train, augment=augment, seed=2) for data in (held, read))
        whole = list(one.epoch(3))
        for a, b in zip(whole, other.epoch(3), strict=True):
            assert torch.equal(a.images, b.images) and torch.equal(a.labels, b.labels)
        for a, b in zip(whole[1:], other.epoch(3, start=1), strict=True):
            assert torch.equal(a.images, b.images), "goes on from any position"
    assert torch.equal(before, torch.get_rng_state()), "the global random numbers are the model's"
    shares = [next(Batches(read, 4, train=True, seed=2, rank=rank, world=2).epoch(3)) for rank in (0, 1)]
    alone = next(Batches(read, 4, train=True, seed=2).epoch(3))
    assert all(torch.equal(alone.pixels[rank::2], shares[rank].pixels) for rank in (0, 1))
    # 12 images in batches of 11: of the last image, the second process has no share
    last = [[*Batches(read, 11, rank=rank, world=2).epoch()][-1].images.shape for rank in (0, 1)]
    assert last == [(1, 3, 14, 14), (0, 3, 14, 14)]


def test_streamed_sets_split_and_tell_their_files(pictures: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    streamed(monkeypatch)
    read = load_dataset(f"imagefolder:{pictures}", "train", size=14)
    rest, validation = split_validation(read, 4)
    assert isinstance(validation, StreamedSet) and (len(rest), len(validation)) == (8, 4)
    labels = torch.cat([batch.labels for batch in Batches(validation, 3).epoch()])
    assert torch.equal(labels, validation.labels) and validation.split == "validation"
    assert read.fingerprint() == load_dataset(f"imagefolder:{pictures}", "train", size=14).fingerprint()
    before = read.fingerprint()
    assert before != rest.fingerprint()
    (pictures / "train" / "dog" / "0.png").write_bytes(b"other")
    assert before != load_dataset(f"imagefolder:{pictures}", "train", size=14).fingerprint()


@pytest.mark.parametrize("workers", [0, 1])
def test_a_damaged_image_is_one_line(pictures: Path, monkeypatch: pytest.MonkeyPatch, workers: int) -> None:
    path = pictures / "train" / "dog" / "1.jpg"
    path.write_bytes(path.read_bytes()[:100])
    streamed(monkeypatch)
    read = load_dataset(f"imagefolder:{pictures}", "train", size=14)
    assert isinstance(read, StreamedSet)
    with refuses(DataError, names=["1.jpg", "--accept-data"]):
        list(Batches(replace(read, workers=workers), 12).epoch())
    with refuses(DataError, names=["dog/1.jpg"]):
        list(check_set(f"imagefolder:{pictures}"))


def test_a_folder_has_one_name(pictures: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(pictures.parent)
    names = [source_name(text) for text in (pictures.name, f"{pictures.name}/", f"./{pictures.name}")]
    assert set(names) == {f"imagefolder:{pictures.name}"}
    other = Path(os.fsdecode(b"not-\xff-utf8"))
    other.mkdir()
    with refuses(DataError, names=["UTF-8"]):
        source_name(other)
    (other / "\U0001f600").mkdir()  # a character above the bytes that are no text hid them
    with refuses(DataError, names=["UTF-8"]):
        source_name(other / "\U0001f600")


def test_an_unknown_home_folder_is_a_folder_that_is_missing(
    pictures: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with refuses(DataError, names=["~nobody-here/x", "--data"]):
        load_dataset(f"imagefolder:{pictures.name}", "train", "~nobody-here/x")
    monkeypatch.setenv("CAPSZOO_DATA", os.pathsep.join(("~nobody-here", str(pictures.parent))))
    assert len(load_dataset(f"imagefolder:{pictures.name}", "train", size=8))
    monkeypatch.chdir(pictures.parent)
    put(pictures / "below", f"{pictures.name}/x", f"{pictures.name}/y")
    below = load_dataset(f"imagefolder:{pictures.name}", "train", pictures / "below", size=8)
    assert below.spec.label_names == ("x", "y"), "a given data folder goes before the current one"


def test_imagefolder_mistakes(pictures: Path) -> None:
    def fails(name: str, split: str, names: list[str], **options: int) -> None:
        with refuses(DataError, names=names):
            load_dataset(f"imagefolder:{name}", split, **options)

    fails("nowhere", "train", ["folder", "nowhere"])
    fails(str(pictures), "extra", ["extra"])
    fails(str(pictures), "train", ["10", "14", "resized"], size=14, resize=10)
    write_image(pictures / "val" / "cow" / "0.png", np.zeros((5, 5, 3), np.uint8))
    fails(str(pictures), "test", ["class", "lacks"])
    (pictures / "train" / "ant").mkdir()
    fails(str(pictures), "train", ["images", "folder"])
    fails(str(pictures / "train"), "test", ["sub-folder", "test"])
    fails(str(pictures / "train" / "dog"), "train", ["images", "folders"])


def test_parquet_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import pyarrow.parquet as pq

    name = f"parquet:{tmp_path}"
    images = np.random.default_rng(0).integers(0, 256, (4, 12, 10, 3), dtype=np.uint8)
    path = write_parquet(tmp_path / "train-00000-of-00001.parquet", images, [0, 2, 1, 2])
    other = write_parquet(tmp_path / "validation-00000-of-00001.parquet", images[:2, ..., 0], [1, 0])
    found = load_dataset(name, "train")
    assert isinstance(found, ImageSet)
    np.testing.assert_array_equal(found.images.numpy(), images.transpose(0, 3, 1, 2))
    for split in ("train", "test"):  # colour and classes are those of the training images
        spec = load_dataset(name, split).spec
        assert spec.label_names == ("0", "1", "2") and spec.input_size == (3, 12, 10)
    assert load_dataset(name, "train", size=8, resize=9).size == (9, 9)
    # What the Hub writes into its files: names of the classes.
    stated = {"info": {"features": {"label": {"names": ["a", "b", "c"], "_type": "ClassLabel"}}}}
    pq.write_table(pq.read_table(other).replace_schema_metadata({"huggingface": json.dumps(stated)}), other)
    assert load_dataset(name, "test").spec.label_names == ("a", "b", "c")
    with monkeypatch.context() as patched:
        streamed(patched)
        with refuses(DataError, names=[f"hf:{tmp_path}"]):
            load_dataset(name, "train")
    path.unlink()
    with refuses(DataError, names=["parquet", "files"]):
        load_dataset(name, "train")


def test_idx_folder(tmp_path: Path) -> None:
    images = np.random.default_rng(0).integers(0, 256, (6, 10, 10), dtype=np.uint8)
    for stem, labels in (("train", [0, 1, 2, 3, 0, 1]), ("t10k", [1, 0, 1, 0, 1, 0])):
        write_idx(tmp_path / f"{stem}-images-idx3-ubyte.gz", images, compress=True)
        write_idx(tmp_path / f"{stem}-labels-idx1-ubyte", np.array(labels))
    test = load_dataset(f"idx:{tmp_path}", "test")
    assert test.spec.num_classes == 4, "the training split knows them all"
    assert test.spec.input_size == (1, 10, 10) and load_dataset(f"idx:{tmp_path}", "train", size=12).size == (
        12,
        12,
    )
    with refuses(DataError, names=["files", "split"]):
        load_dataset(f"idx:{tmp_path.parent}", "train")


def test_check_reads_the_splits_that_exist(
    pictures: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    def found(folder: Path) -> list[str]:
        *lines, read = check_set(f"imagefolder:{folder}")
        assert read.startswith("read: 2 classes (cat: ")
        return [line.split(" ", 1)[1].partition(" images")[0] for line in lines]

    assert found(pictures) == ["train: 12", "val: 4"]
    copies = tmp_path_factory.mktemp("copies")
    shutil.copytree(pictures, copies / "three")
    shutil.copytree(pictures / "val", copies / "three" / "test")
    assert found(copies / "three") == ["train: 12", "val: 4", "test: 4"]
    shutil.copytree(pictures / "train", copies / "classes")  # no splits: folders of classes alone
    assert found(copies / "classes") == ["train: 12"]
    monkeypatch.chdir(copies)  # as finetune, eval and export take it
    assert list(check_set("classes")) == list(check_set("imagefolder:classes"))


@pytest.fixture
def write_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Writes a split of a copy of a repository, which is read through the real library; nothing is fetched."""
    import datasets  # takes a second

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    features = datasets.Features(
        {
            "camera": datasets.ClassLabel(names=["phone", "scanner"]),
            "picture": datasets.Image(),
            "label": datasets.ClassLabel(names=["x", "y"]),  # a usual name goes before another
        }
    )
    (tmp_path / "repository" / "data").mkdir(parents=True)

    def write(split: str, pixels: list[np.ndarray | None], labels: list[int | None]) -> Path:
        cells = []
        for array in pixels:
            content = None if array is None else write_image(tmp_path / "raw.png", array).read_bytes()
            cells.append(content and {"bytes": content, "path": None})
        rows = {"camera": [0] * len(cells), "picture": cells, "label": labels}
        path = tmp_path / "repository" / "data" / f"{split}-0.parquet"
        datasets.Dataset.from_dict(rows, features=features).to_parquet(path)
        return path

    return write


GREY = np.random.default_rng(0).integers(0, 256, (6, 16, 16), dtype=np.uint8)


def test_repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write_rows: Callable[..., Path]) -> None:
    write_rows("train", GREY, [0, 1] * 3)
    write_rows("test", GREY[:3], [0, 1, 0])
    repository = tmp_path / "repository"
    name = f"hf:{repository}"
    held = load_dataset(name, "train", size=16, resize=16)
    assert isinstance(held, ImageSet) and held.spec.label_names == ("x", "y")
    np.testing.assert_array_equal(held.images[:, 0].numpy(), GREY)
    assert held.labels.tolist() == [0, 1] * 3
    streamed(monkeypatch)
    read = load_dataset(name, "train", size=16, resize=16)
    assert isinstance(read, StreamedSet)
    for a, b in zip(Batches(held, 2, train=True).epoch(), Batches(read, 2, train=True).epoch(), strict=True):
        assert torch.equal(a.pixels, b.pixels) and torch.equal(a.labels, b.labels)
    assert len(load_dataset(name, "test", size=16)) == 3
    assert [path.name for path in repository.iterdir()] == ["data"], "the folder may be read-only"
    shutil.copytree(repository, tmp_path / "copy")
    (tmp_path / "copy" / ".cache").mkdir(exist_ok=True)
    (tmp_path / "copy" / ".cache" / "note").write_text("of the Hub's client")
    os.utime(tmp_path / "copy" / "data" / "train-0.parquet", (1, 1))
    copied = load_dataset(f"hf:{tmp_path / 'copy'}", "train", size=16, resize=16)
    assert copied.fingerprint() == read.fingerprint(), "neither the folder nor the files' times"
    smaller = load_dataset(f"hf:{tmp_path / 'copy'}", "train", size=8, resize=8)
    assert smaller.fingerprint() != read.fingerprint()

    # Fetched to a folder, it is found below it.
    def copy(repository: str, repo_type: str, local_dir: Path) -> None:
        assert (repository, repo_type) == ("someone/something", "dataset")
        shutil.copytree(tmp_path / "repository", local_dir, dirs_exist_ok=True)

    monkeypatch.setattr("huggingface_hub.snapshot_download", copy)
    succeeds("data", "fetch", "hf:someone/something", "--to", tmp_path / "here")
    again = load_dataset("hf:someone/something", "train", tmp_path / "here", size=16, resize=16)
    assert isinstance(again, StreamedSet) and torch.equal(again.labels, read.labels)
    assert torch.equal(again.decoder.decode(3), read.decoder.decode(3))
    assert len(load_dataset("hf:someone/something", "test", size=16, download=tmp_path / "there")) == 3


def test_rows_without_images_or_labels(tmp_path: Path, write_rows: Callable[..., Path]) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    name, grey = f"hf:{tmp_path / 'repository'}", GREY[:3]
    write_rows("train", GREY, [0, 1] * 3)

    def fails(*names: str) -> None:
        with refuses(DataError, names=names):
            load_dataset(name, "test", size=16)

    write_rows("test", [grey[0], None, grey[2]], [0, 1, 1])
    fails("1", "picture")
    skipped: list[str] = []
    assert len(load_dataset(name, "test", size=16, skipped=skipped)) == 2
    assert skipped == ["row 1 of picture: no image"]
    for unlabelled in ([-1, -1, -1], [None, None, None]):  # competitions publish test images so
        write_rows("test", grey, unlabelled)
        assert find_splits(name) == {"train"}
        fails("splits", "train")
    write_rows("test", grey, [0, -1, 1])
    fails("images", "label")
    path = write_rows("test", grey, [0, 1, 1])
    table = pq.read_table(path)  # the library reads labels beyond the class names
    place, field = table.schema.get_field_index("label"), table.schema.field("label")
    pq.write_table(table.set_column(place, field, pa.array([0, 7, 1], field.type)), path)
    fails("7", "2", "class")


def test_a_repository_is_fetched_only_to_a_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def unreachable(*args: object, **kwargs: object) -> None:
        raise OSError("no route to the Hub\nand much more")

    monkeypatch.setattr("huggingface_hub.snapshot_download", unreachable)
    with refuses(DataError, names=["hf:some/thing", "--to", "FOLDER", "--data"]):
        load_dataset("hf:some/thing", "train")
    with refuses(DataError, names=["hf:some/thing"]):
        load_dataset("hf:some/thing", "train", download=tmp_path)


def test_which_modes_have_colour(tmp_path: Path) -> None:
    path = tmp_path / "x.tif"
    modes = {"1": 1, "L": 1, "LA": 1, "I;16": 1, "F": 1, "P": 3, "RGB": 3, "RGBA": 3, "CMYK": 3}
    for mode, channels in modes.items():
        Image.new(mode, (9, 9)).save(path)
        assert look_at_set(lambda _: (path, path), 1).channels == channels, mode


@pytest.mark.parametrize("in_memory", [True, False])
def test_unreadable_images_are_left_out(
    pictures: Path, monkeypatch: pytest.MonkeyPatch, in_memory: bool
) -> None:
    name = f"imagefolder:{pictures}"
    whole = load_dataset(name, "train", size=14)
    for path in ("cat/1.jpg", "dog/0.png"):
        (pictures / "train" / path).write_bytes(b"nothing")
    link = pictures / "train" / "dog" / "5.bmp"
    link.unlink()
    link.symlink_to(pictures / "gone.bmp")
    with refuses(DataError, names=["1.jpg", "2", "0.png", "5.bmp", "skip_bad"]):
        load_dataset(name, "train", size=14)
    if not in_memory:
        streamed(monkeypatch)
    skipped: list[str] = []
    found = load_dataset(name, "train", size=14, skipped=skipped)
    assert len(found.fingerprint()) == 64
    bad = [line.partition(": ")[0].rpartition("train/")[2] for line in skipped]
    assert bad == ["cat/1.jpg", "dog/0.png", "dog/5.bmp"]
    rest = whole.subset(torch.tensor([0, 2, 3, 4, 5, *range(7, 11)]))
    for batch, expected in zip(Batches(found, 5).epoch(), Batches(rest, 5).epoch(), strict=True):
        assert torch.equal(batch.pixels, expected.pixels) and torch.equal(batch.labels, expected.labels)


def test_splits_by_name(pictures: Path) -> None:
    name, flat = f"imagefolder:{pictures}", pictures / "train"
    assert find_splits(name) == {"train", "val"} and len(read(pictures, "val")) == 4
    (pictures / "val").rename(pictures / "test")
    assert find_splits(name) == {"train", "test"}
    with refuses(DataError, names=["sub-folder", "validation"]):
        read(pictures, "val")
    assert find_splits(f"imagefolder:{flat}") == {"train"} and len(read(flat)) == 12


@pytest.mark.parametrize("names", [("Train", "Val"), ("Training", "Testing"), ("fit", "dev")])
def test_splits_under_other_names_are_no_classes(tmp_path: Path, names: tuple[str, str]) -> None:
    put(tmp_path, *(f"{name}/{kind}" for name in names for kind in "ab"))
    with refuses(DataError, names=[names[1], "split"]):
        read(tmp_path)
    if names[0] != "fit":
        (tmp_path / names[0]).rename(tmp_path / "train")  # the other one would be ignored
        with refuses(DataError, names=[names[1], "split"]):
            read(tmp_path)
        (tmp_path / "train").rename(tmp_path / names[0])
        (tmp_path / names[1]).rename(tmp_path / "bus")  # a class of its name
        assert read(tmp_path).spec.label_names == tuple(sorted(("bus", names[0])))


def test_a_class_name_that_is_no_text_is_refused_before_training(tmp_path: Path) -> None:
    try:
        put(tmp_path, *map(os.fsdecode, (b"a", b"Caf\xe9")))
    except OSError:
        pytest.skip("the file system refuses names that are no UTF-8")
    with refuses(DataError, names=["name", "rename"]):
        read(tmp_path)


def test_parquet_reads_two_columns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    from capszoo.data import readers

    images = np.random.default_rng(0).integers(0, 255, (4, 30, 30, 3), dtype=np.uint8)
    path = write_parquet(tmp_path / "train.parquet", images, [1, 0, 1, 0])
    table = pq.read_table(path)
    features = {"info": {"features": {"label": {}, "fine_label": {"names": ["x", "y"]}}}}
    wide = table.append_column("fine_label", pa.array([0, 0, 1, 1])).append_column(
        "embedding", pa.array([bytes(200_000)] * 4)
    )
    pq.write_table(wide.replace_schema_metadata({"huggingface": json.dumps(features)}), path)
    monkeypatch.setattr(readers, "MAX_FILE_BYTES", 100_000)
    found = load_dataset(f"parquet:{tmp_path}", "train")
    assert found.labels.tolist() == [1, 0, 1, 0]
    assert found.spec.label_names == ("0", "1"), "the names belong to the other column of labels"
    monkeypatch.setattr(readers, "MAX_FILE_BYTES", 10_000)  # 10,800 decoded
    with refuses(DataError, names=["much", "memory"]):
        load_dataset(f"parquet:{tmp_path}", "train")


def test_a_missing_file_of_a_repository_is_named_without_this_machine_s_folder(tmp_path: Path) -> None:
    with pytest.raises(DataError) as caught:
        folders_module.hub._cell({"bytes": None, "path": "gone.png"}, tmp_path, "row 3 of image")
    assert_names(str(caught.value), ["row 3", "gone.png"])


def _deep(folder: Path, *levels: int, kind: type = np.uint16, size: tuple[int, int] = (16, 16)) -> Path:
    """Two classes; each image has one value, and 0 at its first pixel."""
    for number, level in enumerate(levels):
        values = np.full(size, level, kind)
        values[0, 0] = 0
        place = folder / "train" / "ab"[number % 2]
        place.mkdir(parents=True, exist_ok=True)
        Image.fromarray(values).save(place / f"{number}.tif")
    return folder


@pytest.mark.parametrize(
    ("kind", "levels", "expected"),
    [
        (np.uint16, (200, 300, 4000), (0, 4095)),  # 12 bits
        (np.uint16, (200, 100, 255), (0, 255)),
        (np.int32, (5, 70_000, 9), (0, 2**17 - 1)),
        (np.int32, (-1000, 2000, 3), (-1000, 2000)),
        (np.float32, (0.5, 0.25, 1.0), (0, 1)),
        (np.float32, (0.5, 2.0, 5000.0), (0, 5000)),
        (np.float32, (-2.0, 1.0, 3.0), (-2, 3)),
    ],
)
def test_a_set_has_one_range_of_values(tmp_path: Path, kind: type, levels: tuple, expected: tuple) -> None:
    """Black and white come from the training images together, and hold for every split and image."""
    _deep(tmp_path, *levels, kind=kind)
    test = tmp_path / "test" / "a"
    test.mkdir(parents=True)
    Image.fromarray(np.full((16, 16), levels[0], kind)).save(test / "x.tif")
    black, white = expected
    for split, given in (("train", [levels[0], levels[2], levels[1]]), ("test", [levels[0]])):
        found = load_dataset(f"imagefolder:{tmp_path}", split, size=8, resize=8)
        assert found.spec.value_range == expected
        pixels = found.images[:, 0, 4, 4].tolist()
        assert pixels == [round((level - black) / (white - black) * 255) for level in given]
    known = Framing(value_range=(0.0, 10_000.0))
    assert load_dataset(f"imagefolder:{tmp_path}", "test", size=8, framing=known).spec.value_range == (
        0,
        10_000,
    )


def test_a_stated_range_holds_and_8_bits_have_none(tmp_path: Path) -> None:
    paths = sorted(_deep(tmp_path, 100, 200, 300).rglob("*.tif"))
    for path in paths:
        Image.open(path).save(path, tiffinfo={281: 1000})
    assert read(tmp_path).spec.value_range == (0, 1000)
    for path in paths:
        Image.new("L", (16, 16)).save(path)
    assert read(tmp_path).spec.value_range is None


@pytest.mark.parametrize("size", [16, (16, 16), (8, 32)])
@pytest.mark.parametrize("crop_mode", ["center", "squash", "border"])
def test_images_of_another_shape_are_framed(tmp_path: Path, size: Any, crop_mode: str) -> None:
    """A strip with its object at the left end: only the middle loses it."""
    strip = np.zeros((16, 64), np.uint8)
    strip[:, :16] = 200
    for kind in "ab":
        (tmp_path / "train" / kind).mkdir(parents=True)
        Image.fromarray(strip).save(tmp_path / "train" / kind / "x.png")
    framing = Framing(crop_mode, (0.5,), "set")
    found = load_dataset(f"imagefolder:{tmp_path}", "train", size=size, resize=size, framing=framing)
    rows, columns = (size, size) if isinstance(size, int) else size
    assert found.images.shape == (2, 1, rows, columns) and found.spec.input_size == (1, rows, columns)
    cropped = crop_mode == "center" and rows == columns
    assert bool((found.images == 200).any()) != cropped
    assert found.spec.cropped == (0.75 if cropped else 0)
    if crop_mode == "border" and rows == columns:
        assert found.images[0, 0, 0].unique().tolist() == [128], "padded with the mean"
    stored = ImageSet(found.spec, "train", torch.from_numpy(strip)[None, None], torch.zeros(1))
    from_memory = frame(stored.images, (rows, columns), crop_mode, (0.5,))
    assert (from_memory.int() - found.images[:1].int()).abs().max() <= 1
    torch.testing.assert_close(frame(stored.images, (rows, columns), crop_mode, (0.4, 0.5, 0.6)), from_memory)


def put(folder: Path, *places: str, shape: tuple[int, ...] = (9, 9, 3), count: int = 2) -> Path:
    """Images of a shape in some sub-folders."""
    pixels = np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)
    for place in places:
        for k in range(count):
            write_image(folder / place / (f"{k:02}.png" if count > 9 else f"{k}.png"), pixels)
    return folder


def read(folder: Path | str, split: str = "train", **options: Any) -> ImageSet:
    found = load_dataset(
        f"imagefolder:{folder}" if isinstance(folder, Path) else folder, split, size=8, **options
    )
    assert isinstance(found, ImageSet)
    return found


@pytest.mark.parametrize(
    "names",
    [("invalid", "valid"), ("Control", "Test"), ("bus", "car", "train"), ("cat", "dog", "test", "val")],
)
def test_classes_may_have_the_name_of_a_split(tmp_path: Path, names: tuple[str, ...]) -> None:
    found = read(put(tmp_path, *names))
    assert found.spec.label_names == names and len(found) == 2 * len(names)
    assert find_splits(f"imagefolder:{tmp_path}") == {"train"}


def test_splits_without_classes_are_no_classes(tmp_path: Path) -> None:
    put(tmp_path, "train", "test")
    with refuses(DataError, names=["class", "folders"]):
        read(tmp_path)


@pytest.mark.parametrize("beside", [("bus", "car"), ("dev/a", "dev/b"), ("eval/a",), ("validation_set/b",)])
def test_folders_beside_the_splits_are_named(tmp_path: Path, beside: tuple[str, ...]) -> None:
    found = read(put(tmp_path, "train/a", "train/b", "val/a", *beside))
    places = {place.partition("/")[0] for place in beside}
    assert found.origin.folders == {place: 2 * len(beside) // len(places) for place in places}
    assert all(place in summarise({"train": found}).sentence() for place in places)


def test_hidden_and_loose_images_and_splits_below_classes_are_told(tmp_path: Path) -> None:
    put(tmp_path, "a/train", "a/val", "a/.thumbnails/small", "b/train", ".cut", ".")
    write_image(tmp_path / "a" / "._0.png", np.zeros((9, 9), np.uint8))
    found = read(tmp_path)
    assert found.spec.label_names == ("a", "b") and len(found) == 6
    assert found.origin.folders == {".cut": 2, "*": 2}
    (note,) = found.origin.notes
    assert "train and val below the classes" in note


def test_files_of_other_suffixes_are_counted(tmp_path: Path) -> None:
    put(tmp_path, "a", "b")
    for name in ("0.HEIC", "1.heic", "2", "3.jpg.1", "4.jpg?w=300", ".hidden.heic"):
        (tmp_path / "a" / name).write_bytes(b"x")
    found = read(tmp_path)
    assert found.origin.left_out == {".heic": 2, "": 1, ".jpg.1": 1, ".jpg?…": 1}
    sentence = summarise({"train": found}).sentence()
    assert sentence.startswith("2 classes (a: 2, b: 2), 4 training images, in colour")
    assert "left out: 2 .heic, 1 without a suffix" in sentence
    for file in (tmp_path / "b").iterdir():
        file.rename(file.with_suffix(".heic"))
    with refuses(DataError, names=[".heic", "PNG"]):
        read(tmp_path)


def test_pages_that_are_not_read_are_said(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    pq = pytest.importorskip("pyarrow.parquet")
    put(tmp_path, "a", "b")
    pages = [Image.new("L", (9, 9), 60 * k) for k in range(4)]
    pages[0].save(tmp_path / "a" / "stack.tif", save_all=True, append_images=pages[1:])
    summary, said = summarise({"train": read(tmp_path)}), "; stack.tif: the first of its pages alone is read"
    assert summary.sentence().endswith(said) and said not in summary.sentence(private=True)
    cells = [{"bytes": (tmp_path / "a" / "stack.tif").read_bytes(), "path": None}] * 2
    pq.write_table(pa.table({"image": cells, "label": [0, 1]}), tmp_path / "train.parquet")
    packed = load_dataset(f"parquet:{tmp_path}", "train")
    assert packed.spec.notes == ("train.parquet and 1 more: the first of its pages alone is read",)


def test_all_images_decide_whether_a_set_has_colour(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("capszoo.data.readers._LOOKED_AT", 4)
    sampled = random.Random(0).sample(range(16), 4)
    put(tmp_path, "a", shape=(9, 9), count=16)
    last = max(set(range(16)) - set(sampled))
    write_image(tmp_path / "a" / f"{last:02}.png", np.full((9, 9, 3), (80, 0, 0), np.uint8))
    found = read(tmp_path)
    assert found.spec.input_size[0] == 3 and "in colour" in summarise({"train": found}).sentence()
    grey = read(tmp_path, channels=1)
    assert grey.spec.mean == (0.5,) and "in grey" in summarise({"train": grey}).sentence()


@pytest.mark.parametrize("deep", [False, True])
def test_headers_are_read_once_and_images_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, deep: bool
) -> None:
    for k in range(8):
        write_image(tmp_path / "a" / f"{k}.png", np.full((9, 9), 20 * k, np.uint16 if deep else np.uint8))
    monkeypatch.setattr("capszoo.data.readers._LOOKED_AT", 4)
    opened: Counter[str] = Counter()
    real = Image.open

    def count(file: Any, **options: Any) -> Any:
        opened[str(file)] += 1
        return real(file, **options)

    monkeypatch.setattr(Image, "open", count)
    assert (read(tmp_path).spec.value_range is not None) == deep
    # values need the pixels: one more
    assert len(opened) == 8 and set(opened.values()) == {3 if deep else 2}


def test_the_share_of_the_images_that_is_seen(tmp_path: Path) -> None:
    put(tmp_path, "a", shape=(20, 80, 3))
    put(tmp_path, "b", shape=(40, 20, 3))
    found = summarise({"train": read(tmp_path, resize=8)})
    assert found.area == pytest.approx((0.25 + 0.5) / 2)
    assert "cropped to 38% of their area" in found.sentence()
    assert summarise({"train": read(tmp_path, resize=16)}).area == pytest.approx(0.375 / 4)
    squashed = summarise({"train": read(tmp_path, resize=8, framing=Framing("squash", value_range="set"))})
    assert "cropped" not in squashed.sentence()
    images = np.zeros((2, 20, 40), dtype=np.uint8)
    write_idx(tmp_path / "train-images-idx3-ubyte", images)
    write_idx(tmp_path / "train-labels-idx1-ubyte", np.arange(2))
    assert summarise({"train": load_dataset(f"idx:{tmp_path}", "train", size=20)}).area == 0.5


def test_the_summary_of_several_splits_and_many_classes(tmp_path: Path) -> None:
    put(tmp_path, *(f"train/{k:02}" for k in range(10)), "test/03")
    write_image(tmp_path / "train" / "03" / "more.png", np.zeros((9, 9, 3), np.uint8))
    (tmp_path / "test" / "03" / "x.txt").write_text("")
    (tmp_path / "train" / "03" / "x.txt").write_text("")
    training, validation = split_validation(read(tmp_path, resize=8), 5)
    found = summarise({"train": training, "val": validation, "test": read(tmp_path, "test", resize=8)}, 3)
    assert found.images == {"train": 16, "val": 5, "test": 2} and found.left_out == {".txt": 2}
    assert found.sentence() == (
        "10 classes (00, 01, …, 09: 2 to 5 images each), 16 training, 5 validation and 2 test images, in colour, "
        "8x8 pixels; left out: 2 .txt, 3 that cannot be read"
    )
    stored = found.to_dict()
    assert stored["per_class"]["test"] == [0, 0, 0, 2, 0, 0, 0, 0, 0, 0] and stored["unreadable"] == 3


def test_names_of_left_out_folders_stay_on_the_machine(tmp_path: Path) -> None:
    found = summarise({"train": read(put(tmp_path, "train/a", "train/b", "patients_smith"))})
    assert "patients_smith" in found.sentence() and "patients_smith" not in json.dumps(found.to_dict())
    assert found.to_dict()["folders"] == 2


def test_class_names_in_two_forms_of_unicode_are_one(tmp_path: Path) -> None:
    composed, apart = (unicodedata.normalize(form, "caf\u00e9") for form in ("NFC", "NFD"))
    put(tmp_path, f"train/{composed}", "train/Cats", f"test/{apart}")
    assert read(tmp_path, "test").spec.label_names == ("Cats", composed)
    for other in ("cats", "Cats ", "C ats"):
        (place,) = (put(tmp_path, f"test/{other}") / "test" / other,)
        with refuses(DataError, names=[f"'{other}'", "'Cats'"]):
            read(tmp_path, "test")
        shutil.rmtree(place)
    put(tmp_path, f"train/{apart}")
    if len(os.listdir(tmp_path / "train")) == 3:  # else the file system has one form
        with refuses(DataError, names=["folders", "name"]):
            read(tmp_path)


@pytest.mark.parametrize(
    ("table", "text", "classes"),
    [
        ("t.csv", "file_name,label\nin/0.png,dog\nin/1.png,cat\nin/2.png,cat\n", ("cat", "dog")),
        ("t.csv", "\ufeffx,id,target\n0,0,10\n0,1,9\n0,2,9\n", ("9", "10")),
        ("t.tsv", "in/0.png\tdog\nin/1.png\tcat\nin/2.png\tcat\n", ("cat", "dog")),
        ("t.txt", "in/0.png dog\nin/1.png cat\nin/2.png cat\n", ("cat", "dog")),
        ("t.csv", "0;dog\n1;cat\n2;cat\n", ("cat", "dog")),
        ("t.csv", 'name,label\n"in/0.png","a, b"\n"1.png",c\n2,c\n', ("a, b", "c")),
        ("t.tsv", "in/0.png\ta, b\nin/1.png\tc\nin/2.png\tc\n", ("a, b", "c")),
    ],
)
def test_a_table_beside_its_images(tmp_path: Path, table: str, text: str, classes: tuple[str, ...]) -> None:
    put(tmp_path, "in", count=4)
    (tmp_path / table).write_text(text, encoding="utf-8")
    name = source_name(tmp_path / table)
    found = read(name)
    assert name == f"csv:{tmp_path / table}" and found.spec.label_names == classes
    assert sorted(found.labels.bincount().tolist()) == [1, 2] and len(found) == 3
    assert any("1 images are not in the table" in note for note in found.origin.notes)
    assert find_splits(name) == {"train"}


def test_a_table_has_splits(tmp_path: Path) -> None:
    put(tmp_path, ".", count=5)
    rows = ["0,a,train", "1,b,Training", "2,a,valid", "3,b,test", "4,a,spare"]
    table = tmp_path / "all.csv"
    table.write_text("\n".join(["image_id,label,split", *rows]))
    assert find_splits(f"csv:{table}") == {"train", "val", "test"}
    assert [len(read(f"csv:{table}", split)) for split in ("train", "val", "test")] == [2, 1, 1]
    assert any("split spare" in note for note in read(f"csv:{table}").origin.notes)
    with refuses(DataError, names=["c"]):
        table.write_text("\n".join(["image_id,label,split", *rows[:3], "3,c,test"]))
        read(f"csv:{table}", "test")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "empty"),
        ("file_name,label\n0.png,a\n/etc/hostname,a\n", "/etc/hostname"),
        ("file_name,label\n0.png,a\n../0.png,a\n", "../0.png"),
        ("file_name,label\n0.png,a\n0.png,b\n", "0.png"),
        ("file_name,label\n0.png,\n1.png,a\n", ("empty", "label")),
        ("file_name,label,x\n0.png,a\n", ("2", "cells")),
        ("gone.heic,a\n0.png,a\n1.png,b\n", "gone.heic"),
        ("file_name,label\n", "rows"),
        ("file_name,MEL,NV\n0.png,1,0\n", ("file_name", "MEL", "NV")),
    ],
)
def test_mistakes_in_a_table(tmp_path: Path, text: str, message: str) -> None:
    put(tmp_path, ".")
    (tmp_path / "t.csv").write_text(text)
    with refuses(DataError, names=message):
        read(f"csv:{tmp_path / 't.csv'}")
    with refuses(DataError, names=["file"]):
        read(f"csv:{tmp_path / 'gone.csv'}")


def test_images_that_a_table_names_may_be_missing(tmp_path: Path) -> None:
    put(tmp_path, ".")
    (tmp_path / "t.csv").write_text("file_name,label\n0.png,a\n1.png,b\n2.png,b\n")
    skipped: list[str] = []
    assert len(read(f"csv:{tmp_path / 't.csv'}", skipped=skipped)) == 2 and "2.png" in skipped[0]


def test_parquet_and_idx_labels_need_not_be_indices(tmp_path: Path) -> None:
    images = np.random.default_rng(0).integers(0, 256, (4, 9, 9), dtype=np.uint8)
    for labels, names in (
        ([1, 3, 3, 10], ("1", "3", "10")),
        (["b", "a", "a", "a"], ("a", "b")),
    ):
        write_parquet(tmp_path / "train.parquet", images, labels)
        write_parquet(tmp_path / "test.parquet", images[:2], labels[1:3])
        found = load_dataset(f"parquet:{tmp_path}", "train")
        assert found.spec.label_names == names
        assert [names[k] for k in found.labels] == list(map(str, labels))
        assert load_dataset(f"parquet:{tmp_path}", "test").spec.label_names == names
    write_parquet(tmp_path / "test.parquet", images[:1], ["A"])
    with refuses(DataError, names=["A", "a"]):
        load_dataset(f"parquet:{tmp_path}", "test")
    write_idx(tmp_path / "train-images-idx3-ubyte", images)
    write_idx(tmp_path / "train-labels-idx1-ubyte", np.arange(1, 5))
    assert load_dataset(f"idx:{tmp_path}", "train").labels.tolist() == [0, 1, 2, 3]


def test_parquet_images_of_different_sizes_are_read_as_those_of_a_repository(tmp_path: Path) -> None:
    sides = (9, 12, 15)
    images = [np.full((side, side), 90, np.uint8) for side in sides]
    write_parquet(tmp_path / "train.parquet", images, [0, 1, 1])
    write_parquet(tmp_path / "test.parquet", images[:1], [0])
    for split in ("train", "test"):
        found = load_dataset(f"parquet:{tmp_path}", split)
        assert found.spec.input_size == (1, 224, 224) and found.size == (256, 256)


@pytest.mark.parametrize("labels", [["cat", "dog", "cat"], [3, 7, 3]])
def test_a_repository_with_text_or_numbers_as_labels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, labels: list[Any]
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    put(tmp_path / "set", "train", count=3)
    rows = "".join(f"{k}.png,{label}\n" for k, label in enumerate(labels))
    (tmp_path / "set" / "train" / "metadata.csv").write_text(f"file_name,label\n{rows}")
    before = sorted(tmp_path.rglob("*"))
    found = read(f"hf:{tmp_path / 'set'}")
    assert found.spec.label_names == tuple(sorted(set(map(str, labels))))
    assert found.labels.tolist() == [0, 1, 0]
    assert sorted(tmp_path.rglob("*")) == before, "nothing is written beside the data"
    (tmp_path / "set" / "train" / "metadata.csv").write_text(f"file_name,weight\n{rows}")
    with refuses(DataError, names=["weight"]):
        read(f"hf:{tmp_path / 'set'}")
    monkeypatch.setenv("CAPSZOO_CACHE", str(tmp_path / "set" / "train" / "0.png"))
    with pytest.raises(DataError, match="CAPSZOO_CACHE"):
        read(f"hf:{tmp_path / 'set'}")
