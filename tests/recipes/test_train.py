"""Training on a few real images: it learns, resumes bit for bit, leaves nothing half-written, and fails in one line."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch.utils._pytree import tree_map

import capszoo
from capszoo.checkpoint import model_from_file
from capszoo.data import Batches, DataError, load_dataset, split_validation
from capszoo.errors import CapszooError, UsageError, WeightsError
from capszoo.recipes import train as train_module
from capszoo.recipes.config import RecipeError
from capszoo.recipes.evaluate import evaluate
from capszoo.recipes.evaluation import target
from capszoo.recipes.train import TrainingError, train
from capszoo.recipes.training import begin, finish, step
from capszoo.recipes.training.checkpoints import latest_checkpoint
from capszoo.recipes.training.distributed import StopRequest
from capszoo.recipes.training.log import RunLog
from capszoo.recipes.weights import bundle
from tests.support.command import fails, succeeds
from tests.support.errors import assert_names, refuses
from tests.support.recipes import assert_same_weights, metadata, records, tiny_recipe


def test_training_and_evaluation_on_a_cpu_keep_memory(
    tiny_mnist: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    monkeypatch.setattr(train_module, "keep_freed_memory", lambda: calls.append("train"))
    monkeypatch.setattr(target, "keep_freed_memory", lambda: calls.append("evaluate"))
    train(tiny_recipe(epochs=1), out=tmp_path / "run", data=tiny_mnist)  # its end is an evaluation
    assert calls == ["train", "evaluate"]


def files_under(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def test_a_run_from_start_to_bundle(tiny_mnist: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    result = train(tiny_recipe(), out=out, data=tiny_mnist)
    assert result["finished"] and result["step"] == 6 and result["test"]["n"] == 40
    checkpoint = {"model.safetensors", "optimizer.pt", "state.json"}
    name = "resnet20_routingcaps.mnist"
    (events,) = (out / "tensorboard").iterdir()
    assert files_under(out) == {
        *(".lock", "recipe.yaml", "sessions.json", "metrics.jsonl", "curves.png"),
        f"tensorboard/{events.name}",
        *(f"{name}{suffix}" for suffix in (".safetensors", ".json", ".golden.npz")),
        *(f"checkpoints/step-{number:08d}/{file}" for number in (3, 6) for file in checkpoint),
    }
    epochs = records(out)
    assert [record["epoch"] for record in epochs] == [1, 2] and epochs[-1]["lr"] < 0.003
    stated = metadata(result)
    assert stated["input_size"] == [1, 28, 28] and stated["metrics"]["test"] == result["test"]
    assert stated["metrics"]["validation"] == {"top1": epochs[-1]["val_top1"], "n": 20}
    assert stated["recipe"]["epochs"] == 2 and len(stated["dataset"]["sha256"]["train"]) == 64

    again = evaluate(out / f"{name}.safetensors", data=tiny_mnist)
    assert again["top1"] == again["stated"] == result["test"]["top1"] and again["n"] == 40
    model, info = model_from_file(out / f"{name}.json")
    assert info.model_args == {"depth": 8} and type(model) is type(capszoo.create_model(info.architecture))
    assert info.raw["num_params"] == sum(p.numel() for p in model.parameters())
    golden = np.load(out / f"{name}.golden.npz")
    pixels = torch.from_numpy(golden["pixels"]).float() / 255
    with torch.no_grad():
        scores = model((pixels - info.mean[0]) / info.std[0])
    torch.testing.assert_close(scores, torch.from_numpy(golden["scores"]), atol=1e-5, rtol=0)
    paths = bundle(out, tmp_path / "weights")
    assert files_under(tmp_path / "weights") == {path.name for path in paths} and len(paths) == 3


def test_only_held_out_images_validate_and_none_of_them_trains(
    tiny_mnist: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    validated: list[Any] = []
    trained: set[bytes] = set()
    count, step_of = train_module.count_correct, train_module.train_step

    def counted(net: Any, batches: Batches, *rest: Any) -> Any:
        validated.append(batches.data)
        return count(net, batches, *rest)

    def stepped(run: Any, state: Any, batch: Any) -> Any:
        trained.update(pixels.numpy().tobytes() for pixels in batch.pixels)
        return step_of(run, state, batch)

    monkeypatch.setattr(train_module, "count_correct", counted)
    monkeypatch.setattr(train_module, "train_step", stepped)
    data = {"name": "mnist", "val_size": 20, "val_seed": 7}
    train(tiny_recipe(epochs=1, data=data), out=tmp_path / "run", data=tiny_mnist, cpu=True)
    rest, held = split_validation(load_dataset("mnist", "train", tiny_mnist), 20, 7)
    (given,) = validated
    assert torch.equal(given.images, held.images)
    assert trained <= {pixels.numpy().tobytes() for pixels in rest.images} and len(trained) > 60
    others = [*held.images, *load_dataset("mnist", "test", tiny_mnist).images]
    assert not trained & {pixels.numpy().tobytes() for pixels in others}
    seen = target.prepare(str(tmp_path / "run"), split="val", data=tiny_mnist, device="cpu").images
    assert torch.equal(seen.images, held.images)


def test_the_loss_falls(tiny_mnist: Path, tmp_path: Path) -> None:
    train(tiny_recipe(epochs=8, data={"name": "mnist", "val_size": 20}), out=tmp_path, data=tiny_mnist)
    first, *_, last = records(tmp_path)
    assert last["train_loss"] < 0.7 * first["train_loss"] and last["train_top1"] > first["train_top1"] + 20


@pytest.mark.parametrize(
    ("stop_after", "changes"),
    [
        pytest.param(1, {}, marks=pytest.mark.slow),
        pytest.param(3, {"precision": "bf16"}, marks=pytest.mark.slow),
        (4, {"ema_decay": 0.9, "accumulate": 2, "optimizer": {"name": "sgd", "lr": 0.05}}),
        (2, {"model_args": {"drop_rate": 0.2}, "arch": "test_resnet", "loss": {"name": "cross_entropy"}}),
    ],
)
def test_resume_is_bit_exact(
    tiny_mnist: Path, tmp_path: Path, stop_after: int, changes: dict[str, Any]
) -> None:
    recipe = tiny_recipe(**changes)
    whole = train(recipe, out=tmp_path / "whole", data=tiny_mnist)
    parts = train(recipe, out=tmp_path / "parts", data=tiny_mnist, stop_after=stop_after)
    assert not parts["finished"] and parts["step"] == stop_after
    torch.manual_seed(123)  # whatever the process did in between must not matter
    while not parts["finished"]:
        parts = train(recipe, out=tmp_path / "parts", data=tiny_mnist, stop_after=stop_after)
    assert_same_weights(whole["weights"], parts["weights"])
    assert (
        records(tmp_path / "whole") == records(tmp_path / "parts") and len(records(tmp_path / "whole")) == 2
    )


def test_a_finished_run_is_not_evaluated_again(
    tiny_mnist: Path, tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "run"
    first = train(tiny_recipe(), out=out, data=tiny_mnist)
    printed = capsys.readouterr().out
    assert "epoch 1/" in printed and "training accuracy" in printed and "train_top1" not in printed
    lines = (out / "metrics.jsonl").read_bytes()
    (out / "checkpoints").rename(tmp_path / "checkpoints")  # deleted to save space
    with monkeypatch.context() as patch:
        patch.setattr(finish, "evaluate", None)
        assert train(tiny_recipe(), out=out, data=tiny_mnist) == first
    assert (out / "metrics.jsonl").read_bytes() == lines
    said = capsys.readouterr()
    assert_names(said.err, ["--out"])
    assert said.out.splitlines() == [
        f"weights in {first['weights']}",
        f"validation: top-1 {first['validation']['top1']:.2f}% of {first['validation']['n']} images",
        f"test: top-1 {first['test']['top1']:.2f}% of {first['test']['n']} images",
    ]
    (tmp_path / "checkpoints").rename(out / "checkpoints")
    first["weights"].write_bytes(first["weights"].read_bytes()[:-1] + b"x")  # damaged: written again
    mended = train(tiny_recipe(), out=out, data=tiny_mnist)
    assert mended["test"] == first["test"] and "resumed at update" in capsys.readouterr().out


@pytest.mark.parametrize("damage", ["gone", "damaged"])
def test_a_run_whose_checkpoints_are_lost_does_not_start_again(
    tiny_mnist: Path, tmp_path: Path, damage: str
) -> None:
    out = tmp_path / "run"
    train(tiny_recipe(), out=out, data=tiny_mnist, stop_after=4)
    records = (out / "metrics.jsonl").read_bytes()
    if damage == "gone":
        shutil.rmtree(out / "checkpoints")
    else:
        for file in out.glob("checkpoints/*/optimizer.pt"):
            file.write_bytes(b"")
    with refuses(TrainingError, names=["checkpoints/"]):
        train(tiny_recipe(), out=out, data=tiny_mnist)
    assert (out / "metrics.jsonl").read_bytes() == records


def test_seed_changes_the_run(tiny_mnist: Path, tmp_path: Path) -> None:
    found = []
    for seed in (0, 1):
        result = train(tiny_recipe(epochs=1, seed=seed), out=tmp_path / str(seed), data=tiny_mnist)
        found.append(load_file(result["weights"]))
    assert any(not torch.equal(value, found[1][key]) for key, value in found[0].items())


def test_early_stopping_keeps_the_moving_average(tiny_mnist: Path, tmp_path: Path) -> None:
    """The best epoch's weights are those that were validated: with `ema_decay` not the network's own."""
    found = []
    for decay in (None, 0.9):
        recipe = tiny_recipe(epochs=1, early_stop=1, ema_decay=decay)
        found.append(load_file(train(recipe, out=tmp_path / str(decay), data=tiny_mnist)["weights"]))
    assert any(not torch.equal(value, found[1][key]) for key, value in found[0].items())


def test_a_damaged_checkpoint_is_passed_over(
    tiny_mnist: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    recipe = tiny_recipe(checkpoint_every=1)
    whole = train(recipe, out=tmp_path / "whole", data=tiny_mnist)
    train(recipe, out=tmp_path / "run", data=tiny_mnist, stop_after=2)
    damaged = tmp_path / "run" / "checkpoints" / "step-00000002" / "model.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-100])
    capsys.readouterr()
    resumed = train(recipe, out=tmp_path / "run", data=tiny_mnist)
    printed = capsys.readouterr().out
    assert "skipped the damaged checkpoint step-00000002" in printed and "resumed at update 1" in printed
    assert_same_weights(whole["weights"], resumed["weights"])


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("before", [0, 3])
def test_a_non_finite_layer_is_named_and_the_last_state_kept(
    tiny_mnist: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: int
) -> None:
    """A layer overflows in the third update of an epoch, also when it is repeated: both are named."""
    recipe, original = tiny_recipe(epochs=3), begin.create_net
    step.seed_update(recipe.seed, before + 2, 0)
    third = torch.initial_seed()

    def create(*args: Any) -> Any:
        net = original(*args)
        layer = net.get_submodule("stages.layer2.0.conv1")
        layer.register_forward_hook(lambda _, __, y: y * float("inf") if torch.initial_seed() == third else y)
        return net

    if before:
        train(recipe, out=tmp_path / "run", data=tiny_mnist, stop_after=before)
    folder = tmp_path / "run" / "checkpoints"
    kept = contents(folder)
    monkeypatch.setattr(begin, "create_net", create)
    with pytest.raises(TrainingError) as caught:
        train(recipe, out=tmp_path / "run", data=tiny_mnist)
    assert "\n" not in str(caught.value) and str(caught.value).startswith(
        f"the loss is not finite at update {before + 3} (epoch {before // 3 + 1}), "
        f"first in the output of stages.layer2.0.conv1 (Conv2d); the state of update {before} is kept: "
        "start again in another --out with a lower optimizer.lr or with clip_grad"
    )
    if before:
        assert contents(folder) == kept
    else:  # a failure at the start keeps the state before the first update
        assert os.listdir(folder) == ["step-00000000"]


def test_a_gradient_that_is_not_finite_is_named(
    tiny_mnist: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Overflow(torch.nn.Module):
        """A finite loss whose gradient is not: the root at 0."""

        def forward(self, scores: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            return (scores - scores.detach()).abs().sum().sqrt() + scores.mean()

    monkeypatch.setattr(step, "create_loss", lambda *_, **__: Overflow())
    with refuses(TrainingError, names=["2", "1", "0", "gradient"]):
        train(tiny_recipe(), out=tmp_path / "run", data=tiny_mnist)
    # the weights of update 1 are not finite: no checkpoint has them
    with refuses(TrainingError, names=["1", "0", "gradient"]):
        train(tiny_recipe(checkpoint_every=1), out=tmp_path / "often", data=tiny_mnist)
    assert os.listdir(tmp_path / "often" / "checkpoints") == ["step-00000000"]


def test_a_loss_that_is_not_finite_once_is_told_from_one_that_is_again(
    tiny_mnist: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, calls = train_module.train_step, []

    def once(*args: Any) -> torch.Tensor:
        calls.append(1)
        return original(*args) * (float("nan") if len(calls) == 2 else 1.0)

    monkeypatch.setattr(train_module, "train_step", once)
    with refuses(TrainingError, names=["0", "repeating"]):
        train(tiny_recipe(), out=tmp_path / "run", data=tiny_mnist)


@pytest.mark.parametrize("decoder", [False, True])
def test_a_fault_of_the_compiled_net_is_told_from_a_diverging_run(
    decoder: bool, tiny_mnist: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Broken(torch.nn.Module):
        def __init__(self, run: Any) -> None:
            super().__init__()
            self.run = run

        def forward(self, *inputs: Any) -> Any:
            return tree_map(lambda tensor: tensor * float("nan"), self.run(*inputs))

    def compiled(run: Any, **_: Any) -> Any:
        return Broken(run) if isinstance(run, torch.nn.Module) else Broken(run).forward

    monkeypatch.setattr(torch, "compile", compiled)
    rebuilt = {"model_args": {"decoder": True}, "loss": {"name": "margin", "reconstruction": 0.0005}}
    recipe = tiny_recipe(compile=True, **(rebuilt if decoder else {}))
    with refuses(TrainingError, names=["without compilation", "compile=false"]):
        train(recipe, out=tmp_path / "run", data=tiny_mnist)


def test_a_run_without_images_to_measure_on_finishes(
    tiny_mnist: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    recipe = tiny_recipe(data={"name": "mnist", "val_size": 0, "test": False}, epochs=1)
    first = train(recipe, out=tmp_path / "run", data=tiny_mnist)
    capsys.readouterr()
    assert train(recipe, out=tmp_path / "run", data=tiny_mnist) == first
    assert_names(capsys.readouterr().err, ["finished"])


def test_records_that_are_missing_at_the_end_are_one_line(
    tiny_mnist: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RunLog, "records", lambda *_: [])
    with refuses(TrainingError, names=["metrics.jsonl"]):
        train(tiny_recipe(epochs=1), out=tmp_path / "run", data=tiny_mnist)


@pytest.mark.parametrize("units", [(), ("_is_amx_tile_supported",), ("_is_avx512_bf16_supported",)])
@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_bf16_on_a_processor_without_units_for_it_is_noted(
    tiny_mnist: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    units: tuple[str, ...],
    precision: str,
) -> None:
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    for name in ("_is_amx_tile_supported", "_is_avx512_bf16_supported"):
        monkeypatch.setattr(torch.cpu, name, lambda name=name: name in units, raising=False)
    train(tiny_recipe(precision=precision), out=tmp_path, data=tiny_mnist, stop_after=1, cpu=True)
    said = "--set precision=fp32" in capsys.readouterr().out
    assert said == (precision == "bf16" and not units)


@pytest.mark.parametrize(
    ("schedule", "noted_for_two"),
    [
        ({"warmup_epochs": 2}, "the warm-up takes the whole run (schedule.warmup_epochs 2)"),
        (
            {"name": "multistep", "milestones": [1, 2, 2.5]},
            "the run ends before the drops of the learning rate at 2, 2.5 (schedule.milestones; epochs 2)",
        ),
    ],
    ids=["warm-up", "milestones"],
)
def test_a_schedule_that_the_run_has_no_room_for_is_noted(
    tiny_mnist: Path, tmp_path: Path, capsys: pytest.CaptureFixture, schedule: dict, noted_for_two: str
) -> None:
    for epochs in (2, 3):
        recipe = tiny_recipe(epochs=epochs, schedule=schedule)
        train(recipe, out=tmp_path / str(epochs), data=tiny_mnist, stop_after=1)
        said = capsys.readouterr().out
        assert (noted_for_two in said) == (epochs == 2)
        assert ("the run ends before" in said) == (epochs == 2 and schedule.get("name") == "multistep")


@pytest.mark.parametrize("name", ["SIGTERM", pytest.param("SIGINT", marks=pytest.mark.slow)])
def test_a_signal_saves_and_says_how_to_go_on(
    tiny_mnist: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    recipe, number = tiny_recipe(), signal.Signals[name]
    whole = train(recipe, out=tmp_path / "whole", data=tiny_mnist)
    original, calls, handler = step._update, [], signal.getsignal(number)

    def interrupted(*args: Any) -> Any:
        calls.append(1)
        if len(calls) == 4:
            os.kill(os.getpid(), number)  # in the midst of an update, which is then made to its end
        return original(*args)

    monkeypatch.setattr(step, "_update", interrupted)
    with refuses(TrainingError, names=["4", "6", "command"]) as caught:
        train(recipe, out=tmp_path / "run", data=tiny_mnist)
    assert caught.value.exit_code == 128 + number and signal.getsignal(number) == handler
    assert (tmp_path / "run" / "checkpoints" / "step-00000004").is_dir()
    assert_same_weights(whole["weights"], train(recipe, out=tmp_path / "run", data=tiny_mnist)["weights"])


@pytest.mark.parametrize("handler", [signal.SIG_DFL, signal.SIG_IGN], ids=["default", "ignored"])
def test_a_hangup_is_recorded_and_an_ignored_one_stays_ignored(
    handler: signal.Handlers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("capszoo.recipes.training.distributed._leave_terminal", lambda: None)
    before = signal.signal(signal.SIGHUP, handler)
    try:
        with StopRequest() as stop:
            os.kill(os.getpid(), signal.SIGHUP)
        assert stop.number == (0 if handler is signal.SIG_IGN else signal.SIGHUP)
        assert signal.getsignal(signal.SIGHUP) == handler
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.slow
def test_a_closed_terminal_takes_what_is_printed_no_more() -> None:
    """A pseudo-terminal whose other end is closed, as a window is: writing to it fails."""
    code = (
        "import os, pty, sys\n"
        "from capszoo.recipes.training.distributed import _leave_terminal\n"
        "ours, theirs = pty.openpty()\n"
        "os.dup2(theirs, 1)\n"
        "os.close(ours)\n"
        "_leave_terminal()\n"
        "print('lost', flush=True)\n"
        "print('kept', file=sys.stderr)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr.strip()) == (0, "", "kept")


def test_a_slow_epoch_is_saved_on_the_way(
    tiny_mnist: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved: list[int] = []
    monkeypatch.setattr(train_module, "save_state", lambda run, state: saved.append(state.step))
    monkeypatch.setattr(train_module, "LONGEST_SECONDS", 0.0)
    train(tiny_recipe(epochs=1), out=tmp_path / "run", data=tiny_mnist)
    assert saved == [1, 2, 3]


def test_a_second_interrupt_stops_at_once(
    tiny_mnist: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(StopRequest, "PATIENCE", -1.0)
    original, calls = step._update, []

    def stuck(*args: Any) -> Any:
        calls.append(1)
        if len(calls) == 5:
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)
        return original(*args)

    monkeypatch.setattr(step, "_update", stuck)
    with refuses(TrainingError, names=["3", "6", "command"]):
        train(tiny_recipe(), out=tmp_path / "run", data=tiny_mnist)


@pytest.mark.parametrize(
    ("error", "changes", "named"),
    [
        (CapszooError, {"arch": "resnet20_routingcap", "model_args": {}}, ["resnet20_routingcaps"]),
        (CapszooError, {"model_args": {"routing_iter": 2}}, ["routing_iters"]),
        (RecipeError, {"loss": {"name": "no_such"}}, ["no_such"]),
        (RecipeError, {"loss": {"name": "spread", "options": {"margin": "wide"}}}, ["spread"]),
        (
            RecipeError,
            {"loss": {"name": "margin", "reconstruction": 0.0005}},
            ["loss.reconstruction", "model_args.decoder"],
        ),
        (
            RecipeError,
            {"model_args": {"depth": 8, "decoder": True}},
            ["model_args.decoder", "loss.reconstruction"],
        ),
        (DataError, {"batch_size": 101}, ["fill", "batch"]),
        (DataError, {"data": {"name": "mnist", "val_size": 120}}, ["carved"]),
    ],
)
def test_mistakes_are_one_line(
    tiny_mnist: Path, tmp_path: Path, error: type[Exception], changes: dict[str, Any], named: list[str]
) -> None:
    with refuses(error, names=named):
        train(tiny_recipe(**changes), out=tmp_path / "run", data=tiny_mnist)
    assert not (tmp_path / "run").exists(), "a start that fails has written nothing"


def test_arguments_that_cannot_be_are_one_line(tmp_path: Path) -> None:
    with refuses(UsageError, names=["--threads", "0", "CPU"]):
        train(tiny_recipe(), out=tmp_path / "run", threads=0)
    with refuses(DataError, names=["--data"]):
        train(tiny_recipe(), out=tmp_path / "run", data=tmp_path / "absent")
    assert not (tmp_path / "run").exists()


def test_another_recipe_s_run_is_not_overwritten(tiny_mnist: Path, tmp_path: Path) -> None:
    train(tiny_recipe(), out=tmp_path / "run", data=tiny_mnist, stop_after=1)
    with refuses(TrainingError, names=["epochs=2", "3"]):
        train(tiny_recipe(epochs=3), out=tmp_path / "run", data=tiny_mnist)
    with refuses(TrainingError, names=["optimizer.lr=0.003", "0.1"]):
        train(tiny_recipe(optimizer={"lr": 0.1}), out=tmp_path / "run", data=tiny_mnist)
    with refuses(TrainingError, names=["holds", "run"]):
        train(tiny_recipe(), out=tmp_path / "run", data=tiny_mnist, resume=False)
    with refuses(WeightsError, names=["finished", "run"]):
        bundle(tmp_path / "run", tmp_path / "weights")
    (tmp_path / "file").write_text("")
    with refuses(TrainingError, names=["write"]):
        train(tiny_recipe(), out=tmp_path / "file", data=tiny_mnist)


def test_a_batch_is_shared_evenly(tmp_path: Path) -> None:
    three: Any = SimpleNamespace(num_processes=3, device=torch.device("cpu"), is_main_process=True)
    with refuses(RecipeError, names=["batch_size", "32", "3", "1"]):
        train_module._prepare_process(tiny_recipe(), tmp_path / "run", three, None)


def test_one_image_is_too_few_for_batch_norm() -> None:
    net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(784, 10), torch.nn.BatchNorm1d(10))
    module = step.TrainStep(net, tiny_recipe())
    batch = (torch.rand(1, 1, 28, 28), torch.tensor([3]), torch.zeros(1, 1, 28, 28))
    with refuses(RecipeError, names=["BatchNorm", "batch_size"]):
        module(*batch)
    loss, scores = module(*(part.repeat_interleave(2, 0) for part in batch))
    assert loss.isfinite() and scores.shape == (2, 10)


def test_decoder_and_reconstruction_loss(tiny_mnist: Path, tmp_path: Path) -> None:
    changes = {"model_args": {"depth": 8, "decoder": True}, "epochs": 1}
    recipe = tiny_recipe(loss={"name": "margin", "reconstruction": 0.0005}, **changes)
    result = train(recipe, out=tmp_path / "run", data=tiny_mnist)
    net, _ = model_from_file(result["weights"])
    checkpoint, _ = latest_checkpoint(tmp_path / "run")
    assert checkpoint is not None and net.decoder is not None
    moments = checkpoint.optimizer["optimizer"]["state"]
    assert len(moments) == len(list(net.parameters())), "all have gradients"


def test_the_command_line_trains(tiny_mnist: Path, tmp_path: Path) -> None:
    command = ("train", "resnet20_routingcaps.mnist", "--out", tmp_path / "run", "--device", "cpu")
    assert "'epoch'" in fails(2, *command, "--set", "epoch=1")
    sets = ["epochs=1", "data.val_size=0", "batch_size=60", "precision=fp32"]
    text = succeeds(*command, "--data", tiny_mnist, *(part for line in sets for part in ("--set", line)))
    assert "epochs of 2 updates" in text and "test: top-1" in text
    stated = json.loads((tmp_path / "run" / "resnet20_routingcaps.mnist.json").read_text())
    assert "validation" not in stated["metrics"]
