"""How weights ship: limits over the repository, half precision where large, two folders, a history."""

from __future__ import annotations

import json
import math
import re
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from capszoo._pretrained import files as _pretrained
from capszoo._pretrained import info as _info
from capszoo._pretrained.catalogue import checkpoints
from capszoo.checkpoint import model_from_file
from capszoo.data import ImageSet, dataset_spec
from capszoo.errors import WeightsError
from capszoo.recipes import weights as module
from capszoo.recipes.config import load_recipe
from capszoo.recipes.evaluate import evaluate
from capszoo.recipes.evaluation.plots import draw_curves
from capszoo.recipes.evaluation.target import create_for
from capszoo.recipes.training.history import history_of, read_records, records_of
from capszoo.recipes.weights import (
    FILE_LIMIT,
    FOLDER_LIMIT,
    LARGE_FILE_LIMIT,
    LARGE_FOLDER_LIMIT,
    bundle,
    golden_file,
    write_weights,
)
from tests.support.errors import assert_names, refuses
from tests.support.recipes import HISTORY, metadata

NAME = "resnet20_routingcaps.mnist"


def run_of(folder: Path, net: nn.Module | None = None, tag: str = "mnist", start: str = "") -> Path:
    """A run's folder with a net of the zoo that was trained for nothing."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "metrics.jsonl").write_text(
        "".join(json.dumps(record) + "\n" for record in HISTORY) + '{"cut": '
    )
    spec = dataset_spec("mnist")
    args = {"depth": 8}
    write_weights(
        folder,
        net or create_for("resnet20_routingcaps", 10, spec.input_size, args),
        architecture="resnet20_routingcaps",
        tag=tag,
        model_args=args,
        spec=spec,
        golden_pixels=torch.randint(0, 256, (4, *spec.input_size), dtype=torch.uint8),
        details={
            "metrics": {"test": {"top1": 10.0, "errors": 9, "n": 10}},
            "dataset": {"name": "mnist"},
            **({"recipe": {"init": {"weights": start}}} if start else {}),
        },
    )
    return folder


def test_the_repository_keeps_its_limits(root: Path) -> None:
    for folder, largest, total in (
        (root / "capszoo" / "weights", FILE_LIMIT, FOLDER_LIMIT),
        (root / "weights-large", LARGE_FILE_LIMIT, LARGE_FOLDER_LIMIT),
    ):
        sizes = {path.name: path.stat().st_size for path in folder.glob("*")}
        assert sum(sizes.values()) <= total and max(sizes.values(), default=0) <= largest
    assert (FILE_LIMIT, FOLDER_LIMIT, LARGE_FILE_LIMIT, LARGE_FOLDER_LIMIT) == (20e6, 64e6, 80e6, 160e6)
    for path in (root / "weights-large").glob("*"):
        assert path.suffix == ".safetensors", "metadata lies in the package, where a wheel has it, too"
        assert (root / "capszoo" / "weights" / f"{path.stem}.json").is_file()


@pytest.mark.parametrize("name", sorted(checkpoints(aliases=False)))
def test_every_checkpoint_has_its_history_and_golden_outputs(name: str) -> None:
    info = checkpoints(aliases=False)[name]
    assert golden_file(info).is_file()
    records = records_of(info.raw["history"])
    assert [record["epoch"] for record in records] == list(range(1, info.raw["recipe"]["epochs"] + 1))
    validation = info.raw["metrics"].get("validation")
    if validation:
        assert records[-1]["val_top1"] == validation["top1"], "the history of this very run"


def test_history_travels_in_the_metadata(tmp_path: Path) -> None:
    run = run_of(tmp_path / "run")
    history = json.loads((run / f"{NAME}.json").read_text())["history"]
    assert records_of(history) == [{k: v for k, v in r.items() if k != "step"} for r in HISTORY]
    assert history_of([{"epoch": 1, "lr": None}, {"epoch": 2, "lr": None}]) == {"epoch": [1, 2]}
    assert read_records(run / "absent.jsonl") == [] and history_of([]) == {}
    lines = (run / f"{NAME}.json").read_text().splitlines()
    assert sum('"history"' in line for line in lines) == 1 and len(lines) < 100
    bundle(run, tmp_path / "bundled")
    assert json.loads((tmp_path / "bundled" / f"{NAME}.json").read_text())["history"] == history


def test_large_weights_are_stored_in_half_precision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FILE_LIMIT", 50_000)
    spec = dataset_spec("mnist")
    net = create_for("resnet20_routingcaps", 10, spec.input_size, {"depth": 8}).eval()
    with torch.no_grad():
        first = next(p for p in net.parameters() if p.dim() > 1)
        first[0] = 7e4  # beyond half precision's largest number: this tensor must stay as it is
    stored = load_file(run_of(tmp_path / "run", net) / f"{NAME}.safetensors")
    halves = {key for key, tensor in stored.items() if tensor.dtype == torch.float16}
    for key, tensor in net.state_dict().items():
        expected = tensor.dtype == torch.float32 and tensor.dim() > 1 and tensor is not first
        expected = expected and float(tensor.abs().max()) < 7e4
        assert (key in halves) == expected, key
        assert torch.equal(stored[key], tensor.half() if key in halves else tensor)
    assert halves and first.dtype == torch.float32
    reread, info = model_from_file(tmp_path / "run" / f"{NAME}.safetensors")
    assert info.raw["storage"] == "float16" and all(p.dtype == torch.float32 for p in reread.parameters())
    images = ImageSet(
        spec, "test", torch.randint(0, 256, (20, 1, 28, 28), dtype=torch.uint8), torch.arange(20) % 10
    )
    assert evaluate(tmp_path / "run" / f"{NAME}.safetensors", images)["n"] == 20


def test_a_run_that_began_with_another_of_its_recipe_states_the_name(tmp_path: Path) -> None:
    def stated(folder: Path) -> tuple[str, str]:
        metadata = json.loads((folder / f"{NAME}.json").read_text())
        return metadata["recipe"]["init"]["weights"], metadata["license"]

    first = run_of(tmp_path / "first")
    assert stated(run_of(tmp_path / "second", start=str(first))) == (NAME, module.ZOO_LICENSE)
    backbone = "backbone:local-dir:mine"  # the recipe has none
    assert stated(run_of(tmp_path / "third", start=backbone)) == (backbone, module.USER_LICENSE)
    other = str(run_of(tmp_path / "other", tag="mnist_uniform"))
    assert stated(run_of(tmp_path / "third", start=other)) == (other, module.USER_LICENSE)
    mine = json.loads((first / f"{NAME}.json").read_text()) | {"license": module.USER_LICENSE}
    (first / f"{NAME}.json").write_text(json.dumps(mine))
    assert stated(run_of(tmp_path / "fourth", start=str(first))) == (str(first), module.USER_LICENSE)


@pytest.mark.parametrize(
    ("tag", "limit", "storage"),
    [("pets", 10_000, "float32"), ("mnist", 10_000, "float16"), ("mnist", FILE_LIMIT, "float32")],
)
def test_only_large_weights_of_the_zoo_are_stored_in_half_precision(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tag: str, limit: int, storage: str
) -> None:
    monkeypatch.setattr(module, "FILE_LIMIT", limit)
    weights = next(run_of(tmp_path / tag, tag=tag).glob("*.safetensors"))
    stated = metadata({"weights": weights})
    assert stated["storage"] == storage
    assert stated["license"] == (module.USER_LICENSE if tag == "pets" else module.ZOO_LICENSE)
    halves = any(tensor.dtype == torch.float16 for tensor in load_file(weights).values())
    assert halves == (storage == "float16")


def test_a_finished_run_is_stored_in_half_precision_on_request(
    tmp_path: Path, tiny_mnist: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, zoo = run_of(tmp_path / "run"), tmp_path / "zoo"
    source, weights = run / f"{NAME}.safetensors", zoo / f"{NAME}.safetensors"
    summary = {"seeds": [0, 1], "test": {"mean": 10.0, "values": [10.0, 10.0]}}
    stated = metadata({"weights": source})["metrics"] | {"validation": {"top1": 20.0, "n": 5}}
    module.amend_metadata(source, metrics=stated, per_class={"split": "test"}, seeds=summary)
    full = source.read_bytes()
    assert module.main([str(run), "--half", "--data", str(tiny_mnist), "--to", str(zoo)]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 3
    assert source.read_bytes() == full, "the run keeps its own"
    _, info = model_from_file(weights)  # checks the sha256
    assert info.raw["storage"] == "float16" and weights.stat().st_size < 0.6 * len(full)
    assert records_of(info.raw["history"]), "the run's history came along"

    figures = evaluate(weights, data=tiny_mnist)
    assert info.raw["metrics"] == {"test": {key: figures[key] for key in ("top1", "errors", "n")}}
    assert figures["n"] == 40 and figures["top1"] != 10.0, "measured anew, not carried over"
    assert figures["stated"] == figures["top1"]
    assert "per_class" not in info.raw and info.raw["seeds"] == summary
    assert info.raw["run_metrics"] == stated
    assert module.main([str(run), "--half", "--data", str(tmp_path / "none")]) == 1
    assert "error: " in capsys.readouterr().err
    with pytest.raises(SystemExit):
        module.main([str(run), "--data", str(tiny_mnist)])
    scores = []
    for file in (source, weights):
        net, _ = model_from_file(file)
        golden = np.load(file.with_suffix(".golden.npz"))
        scores.append(golden["scores"])
        found = module.golden_outputs(net, torch.from_numpy(golden["pixels"]), info.mean, info.std)
        np.testing.assert_allclose(found, scores[-1], atol=1e-5)
    assert not np.array_equal(*scores), "the golden outputs are the stored file's"


def known(seed: int, top1: float, *overrides: str, **more: Any) -> dict[str, Any]:
    """Metadata of a finished run."""
    recipe = load_recipe("cnn6.mnist", [f"seed={seed}", *overrides], "short").model_dump(mode="json")
    metrics = {"test": {"top1": top1, "n": 10000}}
    named = {"architecture": "cnn6", "tag": "mnist", "seed": seed, "recipe": recipe}
    return {**named, "metrics": metrics, **more}


FIRST = known(0, 99.5)
del FIRST["recipe"]["stages"]  # a key that is newer than the run
REWORDED = ("description=in other words", "checkpoint_every=5", "routing_images=9")
OTHERS = {"b": known(1, 99.6, "compile=true"), "c": known(2, 99.7, *REWORDED)}


def test_the_mean_over_seeds_is_that_of_one_recipe() -> None:
    summary = module.same_but_seed(FIRST, OTHERS)
    assert (summary["seeds"], summary["epochs"]) == ([0, 1, 2], 10)
    assert summary["test"] == {"values": [99.5, 99.6, 99.7], "mean": 99.6, "n": 10000, "sd": 0.1}
    assert "sd" not in module.same_but_seed(FIRST, {})["test"], "of one run"
    # a file stored in half precision states the test accuracy alone
    validated = known(1, 99.6)
    validated["metrics"]["validation"] = {"top1": 99.0, "n": 5000}
    assert "validation" not in module.same_but_seed(FIRST, {"b": validated})
    with refuses(WeightsError, names=["accuracies", "splits"]):
        module.same_but_seed(validated, {"b": FIRST})
    # a mean over runs takes the run's own accuracy, not that of its copy in half precision
    stored = {**FIRST, "metrics": {"test": {"top1": 99.4, "n": 10000}}}
    for kept in ({"run_metrics": FIRST["metrics"]}, {"seeds": summary}):
        added = known(3, 99.8) if "seeds" in kept else OTHERS["b"]
        assert module.same_but_seed({**stored, **kept}, {"d": added})["test"]["values"][:2] == [99.5, 99.6]
    again = module.same_but_seed({**stored, "seeds": summary}, {"b": known(1, 99.9)})
    assert again["test"]["values"] == [99.5, 99.9, 99.7], "a run that was trained again counts"


@pytest.mark.parametrize(
    ("other", "names"),
    [
        (known(1, 99.0, "epochs=3"), ["epochs=3", "cnn6.mnist", "10"]),
        (known(1, 99.0, dataset={"sha256": {"train": "b"}}), ["cnn6.mnist", "images"]),
        (known(0, 99.0), ["0", "runs"]),
        (known(1, 99.0, metrics={}), ["cnn6.mnist", "splits"]),
    ],
)
def test_runs_without_a_common_mean_are_refused(other: dict[str, Any], names: list[str]) -> None:
    with refuses(WeightsError, names=names):
        module.same_but_seed({**FIRST, "dataset": {"sha256": {"train": "a"}}}, {"b": other})


def test_a_mean_over_seeds_is_added_to_the_zoo_s_metadata(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "cnn6.mnist.json"
    file.write_text(json.dumps(FIRST))
    monkeypatch.setattr(module, "weights_folders", lambda: (tmp_path, tmp_path))
    monkeypatch.setattr(module, "checkpoints", lambda **_: {"cnn6.mnist": object()})
    monkeypatch.setattr(module, "finished_metadata", lambda run: OTHERS.get(run.name))
    monkeypatch.setattr(module.WeightsInfo, "from_json", lambda path: None)
    assert module.main(["cnn6.mnist"]) == 1 and "is in the zoo" in capsys.readouterr().err
    assert module.main(["cnn6.mnist", "--seeds", "gone"]) == 1
    assert_names(capsys.readouterr().err, ["gone", "finished"])
    for ignored in (["--half"], ["--to", "x"], ["--data", "x"]):
        with pytest.raises(SystemExit):
            module.main(["cnn6.mnist", "--seeds", "b", *ignored])
        assert_names(capsys.readouterr().err, ["folder", "run"])
    file.write_text(json.dumps({**FIRST, "metrics": {"validation": {}}}))
    assert module.main(["cnn6.mnist", "--seeds", "b"]) == 1
    assert_names(capsys.readouterr().err, ["cnn6.mnist"])
    for calls in (["b", "c"],), (["c"], ["b"]):  # together, or one at a time in any order
        file.write_text(json.dumps(FIRST))
        assert [module.main(["cnn6.mnist", "--seeds", *others]) for others in calls] == [0] * len(calls)
        assert capsys.readouterr().out.endswith("cnn6.mnist: test 99.60 ± 0.10, n = 3\n")
        assert json.loads(file.read_text())["seeds"] == module.same_but_seed(FIRST, OTHERS)


def test_a_canonical_checkpoint_stays_canonical(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Though a bare name would otherwise refer to another tag, one of the data set's name alone."""
    zoo = tmp_path / "zoo"
    monkeypatch.setattr(module, "weights_folders", lambda: (zoo, tmp_path / "large"))
    monkeypatch.setattr(_info, "weights_folders", lambda: (zoo, tmp_path / "large"))
    run = run_of(tmp_path / "run", tag="mnist_other")
    checkpoints.cache_clear()
    try:
        for again in (False, True):
            bundle(run)
            metadata = json.loads((zoo / "resnet20_routingcaps.mnist_other.json").read_text())
            assert metadata["canonical"], f"bundled again: {again}"
            if not again:
                checkpoints.cache_clear()
                bundle(run_of(tmp_path / "mnist"))
                assert not json.loads((zoo / f"{NAME}.json").read_text())["canonical"]
                checkpoints.cache_clear()
    finally:
        checkpoints.cache_clear()


def test_large_weights_lie_beside_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = run_of(tmp_path / "run")
    small, large = tmp_path / "weights", tmp_path / "weights-large"
    for where in (module, _info):
        monkeypatch.setattr(where, "weights_folders", lambda: (small, large))
    size = (run / f"{NAME}.safetensors").stat().st_size
    monkeypatch.setattr(module, "FILE_LIMIT", size - 1)
    bundle(run)
    assert {path.name for path in small.iterdir()} == {f"{NAME}.json", f"{NAME}.golden.npz"}
    assert [path.name for path in large.iterdir()] == [f"{NAME}.safetensors"]
    checkpoints.cache_clear()
    try:
        info = checkpoints(aliases=False)[NAME]
        assert _pretrained.locate_weights(info) == large / f"{NAME}.safetensors"
        assert golden_file(info) == small / f"{NAME}.golden.npz"
        monkeypatch.setattr(module, "FILE_LIMIT", size)  # it fits now: one place, not two
        bundle(run)
        assert not list(large.iterdir())
        assert _pretrained.locate_weights(info) == small / f"{NAME}.safetensors"
        (large / f"{NAME}.safetensors").write_bytes(b"another file")
        assert _pretrained.locate_weights(info).parent == small, "the bundled one comes first"

        monkeypatch.setattr(module, "FILE_LIMIT", size - 1)
        monkeypatch.setattr(module, "LARGE_FILE_LIMIT", size - 1)
        with refuses(WeightsError, names=["weights/", "weights-large/"]):
            bundle(run)
        monkeypatch.setattr(module, "LARGE_FILE_LIMIT", size)
        monkeypatch.setattr(module, "LARGE_FOLDER_LIMIT", size + 5)
        (large / "other.safetensors").write_bytes(b"so full")
        with refuses(WeightsError, names=["room"]):
            bundle(run)
    finally:
        checkpoints.cache_clear()


def test_an_unfinished_run_is_not_bundled(tmp_path: Path) -> None:
    run = run_of(tmp_path / "run")
    metadata = json.loads((run / f"{NAME}.json").read_text())
    for metrics, message in (
        ({}, ("finished", "run")),
        ({"validation": {"top1": 1.0, "n": 2}}, ("accuracy", "test")),
    ):
        (run / f"{NAME}.json").write_text(json.dumps({**metadata, "metrics": metrics}))
        with refuses(WeightsError, names=message):
            bundle(run, tmp_path / "bundled")


@pytest.mark.parametrize("kind", ["svg", "png"])
def test_the_same_curves_give_the_same_picture(tmp_path: Path, kind: str) -> None:
    pictures = []
    for name in ("one", "two"):
        about: dict[str, Any] = {"Description": "what it is"}
        draw_curves(tmp_path / f"{name}.{kind}", "a run", HISTORY, **about)
        pictures.append((tmp_path / f"{name}.{kind}").read_bytes())
    assert pictures[0] == pictures[1] and b"what it is" in pictures[0]
    draw_curves(tmp_path / f"formula.{kind}", "$EXP_$SEED", HISTORY)  # a folder's name is no formula
    draw_curves(tmp_path / f"one.{kind}", "a run", [{**r, "train_loss": math.pi} for r in HISTORY])
    assert (tmp_path / f"one.{kind}").read_bytes() != pictures[0]


def test_the_commit_is_not_that_of_a_project_around_the_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / ".venv" / "lib" / "site-packages" / "capszoo"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (tmp_path / ".gitignore").write_text(".venv\n")
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@example.org"]
    for command in (["init", "-q"], ["add", "."], ["commit", "-qm", "a project of its own"]):
        subprocess.run([*git, *command], check=True)
    monkeypatch.setattr(module, "PACKAGE_FOLDER", package)
    monkeypatch.delenv("CAPSZOO_COMMIT", raising=False)
    assert module.source_commit() is None
    monkeypatch.setenv("CAPSZOO_COMMIT", "abc")
    assert module.source_commit() == "abc"
    subprocess.run([*git, "add", "-f", "."], check=True)
    assert re.fullmatch("[0-9a-f]{40}.*", module.source_commit() or ""), "a checkout"
