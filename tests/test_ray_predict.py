"""`capszoo predict --ray`: shards of answers, kept and gone on with; on a cluster whose workers die."""

from __future__ import annotations

import csv
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from capszoo.errors import CapszooError, UsageError
from capszoo.inference import load_model, predict
from capszoo.ray_predict import Job, ShardPredictor, Summary, _check_address, _find_done
from tests.support import PACKED
from tests.support.command import fails
from tests.support.errors import assert_names, refuses

pq = pytest.importorskip("pyarrow.parquet", reason="the answers are parquet files: needs pyarrow")

MODEL = "resnet20_routingcaps.mnist"


def digits(root: Path, folder: Path, count: int) -> list[Path]:
    folder.mkdir()
    images = np.load(root / "tests" / "fixtures" / PACKED["mnist"])["images"]
    for k in range(count):
        Image.fromarray(images[k]).save(folder / f"{k:04d}.png")
    return sorted(folder.iterdir())


@pytest.fixture
def job(root: Path, tmp_path: Path) -> Job:
    """A job over 7 digits and a file that is no image, in shards of 3."""
    digits(root, tmp_path / "images", 7)
    (tmp_path / "images" / "0003.png").write_text("no image")
    return Job(
        MODEL, "0" * 64, root=str(tmp_path), out=str(tmp_path / "answers.parquet"), topk=2, device="cpu"
    )


FILES = [f"images/{k:04d}.png" for k in range(7)]
SHARDS = [FILES[:3], FILES[3:6], FILES[6:]]


def answer(job: Job, numbers: list[int], shards: Sequence[list[str]] = SHARDS) -> list[dict[str, Any]]:
    """What a worker says of shards, one after the other."""
    worker = ShardPredictor(job)
    batches = [{"number": np.array([k]), "files": np.array([json.dumps(shards[k])])} for k in numbers]
    return [{name: values[0] for name, values in worker(batch).items()} for batch in batches]


def rows_of(out: Path | str) -> list[dict[str, Any]]:
    return pq.read_table(out).to_pylist()


def test_a_worker_writes_what_predict_says(job: Job) -> None:
    rows = answer(job, [0, 1, 2])
    assert [row["images"] for row in rows] == [3, 3, 1] and [row["errors"] for row in rows] == [0, 1, 0]
    assert not any(row["failure"] for row in rows)
    found = rows_of(job.out)
    expected = predict(load_model(MODEL, device="cpu"), [Path(job.root) / file for file in FILES], 2)
    assert list(dict.fromkeys(row["image"] for row in found)) == FILES
    for name, result in zip(FILES, expected, strict=True):
        mine = [row for row in found if row["image"] == name]
        if result.error:
            (row,) = mine
            assert row["rank"] is row["score"] is None and "not an image" in row["error"]
            continue
        assert [(row["index"], row["class"], row["rank"]) for row in mine] == [
            (one.index, one.label, rank) for rank, one in enumerate(result.top, start=1)
        ]
        assert [row["score"] for row in mine] == pytest.approx([one.score for one in result.top], abs=1e-5)


def test_finished_shards_are_found_and_damaged_ones_answered_again(job: Job) -> None:
    assert _find_done(job, SHARDS) == (Summary(shards=3), [0, 1, 2])
    answer(job, [0, 1])
    assert _find_done(job, SHARDS) == (Summary(images=6, errors=1, shards=3, kept=2), [2])
    whole = job.part(0).read_bytes()
    for damaged in (whole[: len(whole) // 2], b"", os.urandom(500)):
        job.part(0).write_bytes(damaged)
        assert _find_done(job, SHARDS)[1] == [0, 2]
    answer(job, [0, 2])
    assert _find_done(job, SHARDS)[1] == []


def test_answers_of_another_call_are_not_mixed(job: Job) -> None:
    answer(job, [1])
    for changes in (
        {"topk": 3},
        {"sha256": "1" * 64},
        {"model": "idpa_cnn.mnist"},
        {"reading": {"invert": True}},
    ):
        with refuses(CapszooError, names=["part-000001.parquet"]):
            _find_done(replace(job, **changes), SHARDS)
    assert _find_done(replace(job, batch_size=7, device=None), SHARDS)[1] == [0, 2]
    for shards in ([FILES[:2], FILES[2:4], FILES[4:]], SHARDS[:1]):  # other images, other shards
        with refuses(CapszooError, names=["--out"]):
            _find_done(job, shards)


def test_a_name_that_is_no_text_is_written(job: Job) -> None:
    names = [os.fsdecode(b"\xe9%d.png" % k) for k in range(2)]
    for name, content in zip(names, (Path(job.root, FILES[0]).read_bytes(), b"no image"), strict=True):
        Path(job.root, name).write_bytes(content)
    assert answer(job, [0], [names]) == [{"number": 0, "images": 2, "errors": 1, "failure": ""}]
    found = rows_of(job.out)
    assert {row["image"] for row in found} == {r"\udce90.png", r"\udce91.png"}
    assert "not an image" in found[-1]["error"] and r"\udce91.png" in found[-1]["error"]


def test_a_worker_that_cannot_write_says_so(job: Job) -> None:
    Path(job.out).write_text("a file")
    (row,) = answer(job, [0])
    assert row["failure"].startswith("shard 0: ") and job.out in row["failure"]
    with refuses(CapszooError, names=["file"]):
        _find_done(job, SHARDS)
    Path(job.out).unlink()
    (row,) = answer(replace(job, model=f"{job.root}/gone.safetensors"), [0])
    assert "no such file" in row["failure"] and "\n" not in row["failure"]
    Path(job.out, ".part-000002.tried").write_bytes(b"...")
    (row,) = answer(job, [2])
    died = "3 workers died on it (first image: images/0006.png): lower --workers or --batch-size"
    assert row["failure"] == f"shard 2: {died}"


def test_addresses() -> None:
    _check_address("local")
    _check_address("auto")
    for address in ("nonsense", "ray://", "host:", "host:99999", "1:2:x"):
        with refuses(UsageError, names=["address"]):
            _check_address(address)
    for address in ("127.0.0.1:9", "ray://127.0.0.1:9"):
        with refuses(CapszooError, names=["--ray", address]):
            _check_address(address)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--ray local", "give --out NAME.parquet"),
        ("--ray local --out a.csv", "give --out NAME.parquet"),
        ("--out a.parquet", "parquet is written with --ray"),
        ("--ray local --out a.parquet --json", "--ray and --json exclude each other"),
        ("--ray local --out a.parquet --runtime onnx", "exclude each other"),
        ("--ray local --out a.parquet --runtime onx", "did you mean 'onnx'"),
        ("--ray local --out a.parquet --background red", "no background 'red'"),
    ],
)
def test_options_that_do_not_go_together(arguments: str, message: str) -> None:
    assert message in fails(2, "predict", MODEL, "image.png", *arguments.split())


def test_without_ray_one_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    find = "capszoo.errors.importlib.util.find_spec"
    monkeypatch.setattr(find, lambda name: None if name == "ray" else object())
    line = ("predict", MODEL, "image.png", "--ray", "auto", "--out", "a.parquet")
    fails(1, *line, names=["--ray", ".[ray]"])


# -- on a cluster ---------------------------------------------------------------------------------------------------


def command(folder: Path, out: Path, *more: str) -> list[str]:
    options = ["--ray", "local", "--workers", "2", "--shard-size", "20", "--out", str(out)]
    return [sys.executable, "-m", "capszoo", "predict", MODEL, str(folder), *options, *more]


def errors(said: str) -> list[str]:
    """Our lines of error: Ray's notes about its processes stand beside them."""
    assert "Traceback" not in said and "Warning" not in said, said
    return [line for line in said.splitlines() if line.startswith("error: ")]


def workers_of(process: subprocess.Popen[str]) -> list[Any]:
    """The processes of the cluster that answer shards."""
    import psutil

    children = psutil.Process(process.pid).children(recursive=True)
    return [child for child in children if "ShardPredictor" in " ".join(child.cmdline())]


@pytest.mark.slow
def test_a_worker_is_killed_and_every_image_is_answered_once(root: Path, tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="needs ray: make test-ray runs this in Ray's environment")
    files = digits(root, tmp_path / "images", 600)
    out = tmp_path / "answers.parquet"
    started = subprocess.Popen(
        command(tmp_path / "images", out),
        cwd=root,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        deadline = time.monotonic() + 300
        while not (found := list(out.glob("part-*"))):
            assert started.poll() is None and time.monotonic() < deadline, started.communicate()
            time.sleep(0.01)
        workers = workers_of(started)
        assert len(workers) == 2 and len(found) < 25
        workers[0].send_signal(signal.SIGKILL)
        said, complained = started.communicate(timeout=400)
    finally:
        if started.poll() is None:
            os.killpg(started.pid, signal.SIGKILL)
            started.wait()
    assert started.returncode == 0, complained
    assert said == f"written: {out}, 600 images in 30 files\n" and not errors(complained)
    rows = rows_of(out)
    names = sorted(row["image"] for row in rows if row["rank"] == 1)
    assert names == sorted(map(str, files)) and len(rows) == 3 * 600
    assert [path.name for path in sorted(out.iterdir())] == [f"part-{k:06d}.parquet" for k in range(30)]
    table = tmp_path / "plain.csv"
    argv = [sys.executable, "-m", "capszoo", "predict", MODEL, str(tmp_path / "images"), "--out", str(table)]
    subprocess.run(argv, cwd=root, check=True, capture_output=True)
    with open(table, newline="") as file:
        plain = {(row["image"], row["rank"]): row for row in csv.DictReader(file)}
    assert len(plain) == len(rows)
    for row in rows:
        other = plain[row["image"], str(row["rank"])]
        assert abs(row["score"] - float(other["score"])) < 1e-4


@pytest.mark.slow
def test_a_second_call_answers_the_missing_shards_alone(root: Path, tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="needs ray: make test-ray runs this in Ray's environment")
    files = digits(root, tmp_path / "images", 60)
    files[25].write_text("no image")
    out = tmp_path / "answers.parquet"

    def call(*more: str) -> subprocess.CompletedProcess[str]:
        argv = command(tmp_path / "images", out, *more)
        return subprocess.run(argv, cwd=root, capture_output=True, text=True, timeout=400)

    first = call()
    complaint = [f"error: 1 of 60 images could not be read: see the column error of {out}"]
    assert (first.returncode, errors(first.stderr)) == (1, complaint), first.stderr
    before = {path.name: path.stat().st_mtime_ns for path in out.iterdir()}
    (out / "part-000002.parquet").unlink()
    again = call()
    assert (again.returncode, errors(again.stderr)) == (1, complaint)
    assert again.stdout == f"written: {out}, 60 images in 3 files, 2 of them from an earlier call\n"
    after = {path.name: path.stat().st_mtime_ns for path in out.iterdir()}
    assert after.keys() == before.keys()
    assert [name for name in sorted(after) if after[name] != before[name]] == ["part-000002.parquet"]
    bad = [row for row in rows_of(out) if row["error"]]
    assert [row["image"] for row in bad] == [str(files[25])]
    other = call("--topk", "1")
    assert_names(other.stderr, ["call"])
    assert other.returncode == 1
    assert other.stderr.count("\n") == 1


#: A worker that dies at the second shard, whenever it is tried.
POISONED = """
import os, sys
from capszoo import ray_predict
from capszoo.errors import CapszooError

class Poisoned(ray_predict.ShardPredictor):
    def _answer(self, number, files):
        return os._exit(3) if number == 1 else super()._answer(number, files)

ray_predict.ShardPredictor = Poisoned
job = ray_predict.Job(sys.argv[1], "", sys.argv[2], sys.argv[3], 1, device="cpu")
files = [f"images/{k:04d}.png" for k in range(6)]
try:
    ray_predict.predict_by_ray(job, files, "local", workers=1, shard_size=2)
except CapszooError as error:
    print(error)
"""


@pytest.mark.slow
def test_a_shard_that_kills_its_workers_is_given_up(root: Path, tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="needs ray: make test-ray runs this in Ray's environment")
    digits(root, tmp_path / "images", 6)
    argv = [sys.executable, "-c", POISONED, MODEL, str(tmp_path), str(tmp_path / "answers.parquet")]
    done = subprocess.run(argv, cwd=root, capture_output=True, text=True, timeout=400)
    reason = "shard 1: 3 workers died on it (first image: images/0002.png): lower --workers or --batch-size"
    last = done.stdout.splitlines()[-1]  # Ray's own notices of the dead workers may stand before it
    assert last == f"{reason}: finished shards are kept: the same command answers the others", done


def test_a_part_that_a_dead_worker_left_is_not_another_call_s(job: Job) -> None:
    out = Path(job.out)
    out.mkdir()
    (out / ".71.140.part-000001.parquet").write_bytes(b"half")
    assert _find_done(job, SHARDS)[1] == [0, 1, 2]
    (out / "mine.parquet").write_bytes(b"x")
    with refuses(CapszooError, names=["mine.parquet"]):
        _find_done(job, SHARDS)


def test_the_folder_of_the_call_counts_for_relative_names_alone(job: Job) -> None:
    elsewhere = replace(job, root="/elsewhere")
    assert job.key(["/images/a.png"]) == elsewhere.key(["/images/a.png"])
    assert job.key(["a.png"]) != elsewhere.key(["a.png"])
