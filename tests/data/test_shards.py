"""WebDataset shards: read by position, shuffled by rule, resumed anywhere, and refused in one line where hostile."""

from __future__ import annotations

import io
import json
import os
import pickle
import tarfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from capszoo.data import Augment, Batches, DataError, ImageSet, StreamedSet, load_dataset, split_validation
from capszoo.data import folders as folders_module
from capszoo.data import shards as shards_module
from capszoo.data.folders import find_splits
from capszoo.data.sets import buffered_order, keyed_generator
from tests.support import no_home
from tests.support.errors import refuses
from tests.support.formats import write_shards, write_tar

COUNT, PER_SHARD = 50, 8


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of the test's own, and a limit of memory that streams every set."""
    monkeypatch.setenv("CAPSZOO_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(folders_module.common, "MEMORY_LIMIT", 0)
    return tmp_path / "cache" / "shards"


@pytest.fixture
def pictures() -> np.ndarray:
    """Grey images whose mean is their number."""
    noise = np.random.default_rng(0).integers(-2, 3, (COUNT, 12, 12))
    return (np.arange(COUNT)[:, None, None] * 4 + 20 + noise).astype(np.uint8)


@pytest.fixture
def folder(tmp_path: Path, pictures: np.ndarray) -> Path:
    labels = [k % 3 for k in range(COUNT)]
    write_shards(tmp_path / "set", pictures, labels, PER_SHARD)
    write_shards(tmp_path / "set", pictures[:6], labels[:6], 6, "val")
    return tmp_path / "set"


def opened(folder: Path, split: str = "train") -> StreamedSet:
    found = load_dataset(f"wds:{folder}", split, size=12, resize=12)
    assert isinstance(found, StreamedSet)
    return replace(found, workers=0)


def png(value: int = 9) -> bytes:
    buffer = io.BytesIO()
    Image.new("L", (6, 6), value).save(buffer, "PNG")
    return buffer.getvalue()


def numbers(batches: Batches, epoch: int, start: int = 0) -> list[list[int]]:
    """The numbers of the images of each batch, by what they show."""
    shown = [batch.pixels.double().mean((1, 2, 3)) for batch in batches.epoch(epoch, start)]
    return [((means - 20) / 4).round().int().tolist() for means in shown]


def test_images_and_labels_are_those_that_were_written(
    folder: Path, pictures: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = opened(folder)
    assert data.spec.label_names == ("0", "1", "2") and data.spec.input_size == (1, 12, 12)
    assert len(data) == COUNT and data.labels.tolist() == [k % 3 for k in range(COUNT)]
    (whole,) = data.read([torch.arange(COUNT)])
    np.testing.assert_array_equal(whole[:, 0].numpy(), pictures)
    (folder.parent / "classes.txt").write_text("apple\npear\nplum\n")
    assert opened(folder).spec.label_names == ("0", "1", "2"), "names beside the folder are another set's"
    assert len(opened(folder, "test")) == 6, "what validation is called is also the test split"
    assert find_splits(f"wds:{folder}") == {"train", "val"}
    monkeypatch.setattr(folders_module.common, "MEMORY_LIMIT", 2**20)
    held = load_dataset(f"wds:{folder}", "train", size=12, resize=12)
    assert isinstance(held, ImageSet) and torch.equal(whole, held.images)


def test_a_pattern_and_class_names(folder: Path) -> None:
    (folder / "classes.txt").write_text("ant\nbee\ncat\n")
    found = load_dataset(f"wds:{folder}/train-{{000001..000003}}.tar", "train", size=12)
    assert len(found) == 3 * PER_SHARD and found.spec.label_names == ("ant", "bee", "cat")
    assert len(load_dataset(f"wds:{folder}/*-000000.tar", "val", size=12)) == 6
    for pattern, message in (
        ("train-{000005..000009}.tar", ("train-000007.tar", "2", "5")),
        ("train-{9..1}.tar", ("range", "shards")),
        ("other-*.tar", ("file", "other-")),
        ("train-*.tar", ("shards", "split")),
    ):
        with refuses(DataError, names=message):
            load_dataset(f"wds:{folder}/{pattern}", "val", size=12)
    (folder / "._train-000000.tar").write_bytes(b"macOS writes these beside files on foreign file systems")
    assert len(opened(folder)) == COUNT
    assert len(load_dataset(f"wds:{folder}/*.tar", "train", size=12)) == COUNT
    for names in ("ant\n\nbee\n", "ant\nbee\n\n"):
        (folder / "classes.txt").write_text(names)
        with refuses(DataError, names=["classes.txt", "2"]):
            opened(folder)


def test_folders_of_splits_json_labels_and_colour(tmp_path: Path) -> None:
    jpeg = io.BytesIO()
    Image.new("RGB", (9, 9), (200, 30, 30)).save(jpeg, "JPEG")
    members = {
        "deep/a.b/2.jpg": jpeg.getvalue(),
        "deep/a.b/2.json": b'{"label": 1}',
        "deep/a.b/3.JPEG": jpeg.getvalue(),
        "deep/a.b/3.json": b'{"cls": 0, "label": 0}',
        "deep/a.b/3.pyd": pickle.dumps(print),
        "__meta__": b"",
    }
    write_tar(tmp_path / "set" / "train" / "000000.tar", members, tarfile.PAX_FORMAT)
    write_tar(tmp_path / "set" / "val" / "000000.tar", {"1.png": png(), "1.cls": b" 1\n"})
    assert opened(tmp_path / "set").spec.input_size == (3, 12, 12)
    assert opened(tmp_path / "set").labels.tolist() == [1, 0]
    assert opened(tmp_path / "set", "test").spec.input_size == (3, 12, 12), "as the training split"


def test_an_epoch_reads_shard_after_shard(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("capszoo.data.sets.SHUFFLE_BUFFER", 4)
    batches = Batches(opened(folder), 5, train=True, seed=3)
    epochs = [sum(numbers(batches, epoch), []) for epoch in (0, 1, 1)]
    assert epochs[0] != epochs[1] == epochs[2], "a function of seed and epoch"
    for order in epochs:
        assert sorted(order) == list(range(COUNT)) and order != sorted(order)
        shards = [number // PER_SHARD for number in order]
        assert shards != sorted(shards)
        assert all(len(set(shards[:k])) <= (k + 1) // PER_SHARD + 2 for k in range(1, COUNT + 1)), (
            "no further shard before the buffer of 4 needs it"
        )


def test_the_order_is_that_of_a_shuffle_buffer() -> None:
    shards = torch.arange(60) // 10
    order = buffered_order(shards, 7, keyed_generator(1)).tolist()
    assert sorted(order) == list(range(60))
    # An image leaves the buffer no sooner than it enters: among the first k there are but k + 7 of the stream.
    turns = list(dict.fromkeys((number // 10) for number in order))
    stream = [10 * shard + k for shard in turns for k in range(10)]
    assert all(set(order[:k]) <= set(stream[: k + 7]) for k in range(60))
    assert buffered_order(shards, 1, keyed_generator(1)).diff().eq(1).sum() == 54, "no buffer: whole shards"
    whole = [tuple(buffered_order(torch.zeros(3), 5, keyed_generator(k)).tolist()) for k in range(200)]
    assert len(set(whole)) == 6, "a buffer for all of them: any permutation"


@pytest.mark.parametrize("start", [1, 4, 9])
def test_a_resumed_epoch_sees_what_it_would_have_seen_and_decodes_nothing_else(
    folder: Path, monkeypatch: pytest.MonkeyPatch, start: int
) -> None:
    batches = Batches(opened(folder), 5, train=True, augment=Augment(shift=1, brightness=0.3), seed=2)
    whole = list(batches.epoch(1))
    reads: list[int] = []
    read = folders_module.webdataset.read_member
    monkeypatch.setattr(
        folders_module.webdataset, "read_member", lambda *args: (reads.append(args[1]), read(*args))[1]
    )
    rest = list(batches.epoch(1, start))
    assert len(rest) == 10 - start and len(reads) == 5 * len(rest)
    for one, other in zip(whole[start:], rest, strict=True):
        assert torch.equal(one.images, other.images) and torch.equal(one.labels, other.labels)


def test_validation_is_carved_and_the_rest_keeps_its_shards(folder: Path) -> None:
    rest, held_out = split_validation(opened(folder), 10)
    assert isinstance(rest, StreamedSet) and rest.shards is not None
    assert len(held_out) == 10 and torch.equal(rest.shards, (rest.indices // PER_SHARD).int())
    seen = sum(numbers(Batches(rest, 5, train=True), 0), [])
    assert sorted(seen) == rest.indices.tolist()


def test_the_index_is_cached_until_a_shard_changes(
    folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = opened(folder)
    assert len(list(cache.iterdir())) == 1
    with monkeypatch.context() as patched:
        patched.setattr(shards_module, "_index_shard", lambda _: pytest.fail("read again"))
        assert opened(folder).fingerprint() == before.fingerprint()
    (file,) = cache.iterdir()
    file.write_bytes(b"damaged")
    assert opened(folder).fingerprint() == before.fingerprint(), "a damaged cache is not trusted"
    write_tar(folder / "train-000000.tar", {"0.png": png(), "0.cls": b"1"})
    assert len(opened(folder)) == COUNT - PER_SHARD + 1
    assert opened(folder).fingerprint() != before.fingerprint()
    monkeypatch.setenv("CAPSZOO_CACHE", str(file / "no folder"))
    assert len(opened(folder)) == COUNT - PER_SHARD + 1, "no place for a cache is no error"
    no_home(monkeypatch)
    assert len(opened(folder)) == COUNT - PER_SHARD + 1, "neither is a user without a home folder"


GOOD = {"0.png": png(), "0.cls": b"0"}


@pytest.mark.parametrize(
    ("members", "message"),
    [
        ({"../0.png": png(), "../0.cls": b"0"}, "../0.png"),
        ({"/etc/0.png": png(), "/etc/0.cls": b"0"}, ("leads", "archive")),
        ({**GOOD, "1.png": png()}, "1.png"),
        ({**GOOD, "1.cls": b"1"}, ("1.cls", "0")),
        ({**GOOD, "0.jpg": png()}, ("0.png", "2")),
        ({**GOOD, "0.PNG": png()}, "0.PNG"),
        ({**GOOD, "1.png": png(), "1.cls": b"\xff"}, "1.cls"),
        ({**GOOD, "1.png": png(), "1.cls": b"-1"}, ("class", "number")),
        ({**GOOD, "1.png": png(), "1.cls": b"999999999"}, ("class", "number")),
        ({**GOOD, "1.png": png(), "1.cls": b"1" * 2_000_000}, ("bytes", "label")),
        ({**GOOD, "1.png": png(), "1.json": b'{"label": true}'}, ("class", "number")),
        ({**GOOD, "1.png": png(), "1.json": b"[" * 100_000}, ("class", "number")),
        ({**GOOD, "1.png": png(), "1.json": b'{"name": "dog"}'}, "1.json"),
        ({**GOOD, "1.png": png(), "1.cls": pickle.dumps(print)}, ("class", "number")),
        ({"0.pth": b"", "0.cls": b"0"}, ("0.pth", "0")),
        ({}, ("holds", "samples")),
    ],
)
def test_hostile_shards_are_one_line(tmp_path: Path, members: dict[str, bytes], message: str) -> None:
    write_tar(tmp_path / "set" / "train-000000.tar", members)
    with refuses(DataError, names=message) as caught:
        opened(tmp_path / "set")
    assert "\n" not in str(caught.value) and "train-000000.tar" in str(caught.value)


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE, tarfile.CHRTYPE])
def test_links_and_devices_are_refused(tmp_path: Path, kind: bytes) -> None:
    path = write_tar(tmp_path / "set" / "train-000000.tar", GOOD)
    with tarfile.open(path, "a") as tar:
        member = tarfile.TarInfo("1.png")
        member.type, member.linkname = kind, "/etc/passwd"
        tar.addfile(member)
    with refuses(DataError, names=["1.png"]):
        opened(tmp_path / "set")


def test_truncated_and_damaged_shards(folder: Path) -> None:
    path = folder / "train-000002.tar"
    whole = path.read_bytes()
    end = 2 * PER_SHARD * 1024
    # A size below zero, which an archive can state in base 256, would have the reader go round in circles.
    negative = tarfile.TarInfo("1.png").tobuf(tarfile.GNU_FORMAT)
    field = b"\xff" * 10 + (-1024 & 0xFFFF).to_bytes(2, "big")
    header = bytearray(negative[:124] + field + negative[136:])
    header[148:156] = b"%06o\0 " % (sum(header[:148]) + sum(header[156:512]) + 8 * 32)
    # within a member, between samples, a header, nothing
    damaged = [whole[:kept] for kept in (end - 700, end - 1024, end - 2048, 100, 0)]
    damaged += [whole[:2048] + part + whole[2048:] for part in (b"x" * 512, bytes(header))]
    for content in (*damaged, os.urandom(20_000)):
        path.write_bytes(content)
        with refuses(DataError, names=["train-000002.tar"]):
            opened(folder)


def test_an_image_that_cannot_be_decoded_is_named_or_left_out(tmp_path: Path) -> None:
    labels = {"0.cls": b"0", "1.cls": b"1", "2.cls": b"1"}
    members = {"0.png": png(), "1.png": png()[:45], "2.png": png(), **labels}
    write_tar(tmp_path / "set" / "train-000000.tar", dict(sorted(members.items())))
    name = f"wds:{tmp_path / 'set'}"
    with refuses(DataError, names=["train-000000.tar/1.png"]):
        list(Batches(opened(tmp_path / "set"), 3).epoch())
    skipped: list[str] = []
    kept = load_dataset(name, "train", size=6, resize=6, skipped=skipped)
    assert len(kept) == 2 and kept.labels.tolist() == [0, 1] and "1.png" in skipped[0]


@pytest.mark.slow
def test_shards_of_the_library_webdataset_are_read(tmp_path: Path) -> None:
    webdataset = pytest.importorskip(
        "webdataset", reason="needs webdataset: make test-ray runs this in Ray's environment"
    )
    grey = [np.full((12, 12), 5 * k, np.uint8) for k in range(25)]
    (tmp_path / "set").mkdir()
    with webdataset.ShardWriter(f"{tmp_path}/set/train-%06d.tar", maxcount=10, verbose=0) as sink:
        for k, image in enumerate(grey):
            sink.write({"__key__": f"{k:06d}", "png": image, "cls": k % 3})
    data = opened(tmp_path / "set")
    assert len(data.shards.unique()) == 3 and data.labels.tolist() == [k % 3 for k in range(25)]
    (whole,) = data.read([torch.arange(25)])
    assert [image.unique().tolist() for image in whole] == [[5 * k] for k in range(25)]


def test_shards_of_a_test_split_are_never_trained_on(tmp_path: Path, pictures: np.ndarray) -> None:
    """The last word of a shard's name is its split."""
    for split, count in (("crash-test-Train", 4), ("Testing", 2)):
        write_shards(tmp_path / "set", pictures[:count], [0, 1] * (count // 2), 8, split)
    assert find_splits(f"wds:{tmp_path / 'set'}") == {"train", "test"}
    assert len(opened(tmp_path / "set")) == 4 and len(opened(tmp_path / "set", "test")) == 2
    write_shards(tmp_path / "set", pictures[:2], [0, 1], 8, "dev")
    with refuses(DataError, names=["dev-000000.tar"]):
        opened(tmp_path / "set")


@pytest.mark.parametrize("labels", [("dog", "cat", "10"), (10, 2, 5), ("e4", "E", "1-2")])
def test_labels_are_names_or_numbers_of_any_kind(tmp_path: Path, labels: tuple[int | str, ...]) -> None:
    members: dict[str, bytes] = {}
    for k, label in enumerate(labels):
        stated = ("cls", f"{label}\n".encode()) if k % 2 else ("json", json.dumps({"label": label}).encode())
        members |= {f"{k}.png": png(), f"{k}.{stated[0]}": stated[1]}
    write_tar(tmp_path / "set" / "train-0.tar", members)
    write_tar(tmp_path / "set" / "test-0.tar", {"0.png": png(), "0.cls": str(labels[0]).encode()})
    for _ in range(2):  # the second time from the cache
        found = load_dataset(f"wds:{tmp_path / 'set'}", "train", size=4)
        names = found.spec.label_names
        assert names == (("2", "5", "10") if 10 in labels else tuple(sorted(map(str, labels))))
        assert [names[k] for k in found.labels] == list(map(str, labels))
        test = load_dataset(f"wds:{tmp_path / 'set'}", "test", size=4)
        assert test.spec.label_names == names and names[int(test.labels[0])] == str(labels[0])
    (tmp_path / "set" / "classes.txt").write_text("".join(f"{label}\n" for label in ("ape", *labels)))
    if "cat" in labels:
        assert len(load_dataset(f"wds:{tmp_path / 'set'}", "train", size=4).spec.label_names) == 4
