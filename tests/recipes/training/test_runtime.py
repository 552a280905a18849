"""The runtime's options and records: TensorBoard, curves, precision, accumulation, clipping, compiling, older runs."""

from __future__ import annotations

import io
import json
import re
import shutil
import signal
import threading
import time
from collections import namedtuple
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar
from unittest.mock import Mock

import pytest
import torch
from accelerate import tracking
from accelerate.state import PartialState
from PIL import Image
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from capszoo.cli import app
from capszoo.data import dataset_spec
from capszoo.errors import UsageError
from capszoo.layers import engine_report, use_engines
from capszoo.layers.tuning import tuned
from capszoo.losses import SpreadLoss
from capszoo.recipes import train as training
from capszoo.recipes.config import Recipe
from capszoo.recipes.evaluation.target import create_for
from capszoo.recipes.train import TrainingError, train
from capszoo.recipes.training import begin, checkpoints, estimate, setup, step
from capszoo.recipes.training import state as state_module
from capszoo.recipes.training.distributed import Stopped
from tests.support.errors import refuses
from tests.support.recipes import TINY, assert_same_weights, metadata, newest, records


def recipe(**changes: Any) -> Recipe:
    return Recipe.model_validate({**TINY, "batch_size": 32, "epochs": 2, **changes})


def weights(out: Path) -> dict[str, torch.Tensor]:
    return load_file(newest(out) / "model.safetensors")


def same_weights(one: Path, two: Path) -> None:
    assert_same_weights(newest(one) / "model.safetensors", newest(two) / "model.safetensors")


def test_events_and_curves_of_a_resumed_run(tiny_mnist: Path, tmp_path: Path, real_curves: None) -> None:
    out = tmp_path / "run"
    train(recipe(checkpoint_every=1), out=out, data=tiny_mnist, stop_after=5)
    shutil.rmtree(out / "checkpoints" / "step-00000005")  # as if killed before it: update 5 is made twice
    assert not (out / "curves.png").exists(), "drawn once a minute and after the last epoch"
    time.sleep(1.01)  # event files are read in the order of their names, which begin with the second
    train(recipe(checkpoint_every=1), out=out, data=tiny_mnist)
    events = EventAccumulator(str(out / "tensorboard"))
    events.Reload()
    steps = [event.step for event in events.Scalars("update/loss")]
    assert steps == [1, 2, 3, 4, 5, 6], "nothing twice, nothing missing"
    assert [event.step for event in events.Scalars("epoch/val_top1")] == [3, 6]
    losses = [record["train_loss"] for record in records(out)]
    assert [event.value for event in events.Scalars("epoch/train_loss")] == pytest.approx(losses)
    assert Image.open(out / "curves.png").size == (1200, 360)

    sessions = json.loads((out / "sessions.json").read_text())
    assert [session["from_update"] for session in sessions] == [0, 4]
    for session in sessions:
        assert session["versions"]["torch"] == torch.__version__ and session["versions"]["python"]
        assert session["seed"] == 0 and session["processes"] == 1 and session["hardware"]
        assert "commit" in session and session["started"].endswith("+00:00")
        assert set(session["engines"]) == {"capsules.conv1", "capsules.conv2", "capsules.classes"}


class Recorder(tracking.GeneralTracker):
    """Stands for a tracker whose library is not installed here; Accelerate calls it as it calls theirs."""

    name, requires_logging_directory = "trackio", False
    calls: ClassVar[list[tuple[Any, ...]]] = []

    def __init__(self, project: str, **options: Any) -> None:
        super().__init__()
        self.calls.append((project, options))

    tracker = property(lambda self: self)

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self.calls.append(("settings", values))

    def log(self, values: dict[str, Any], step: int | None = None, **more: Any) -> None:
        self.calls.append((step, values))

    def finish(self) -> None:
        self.calls.append(("finished",))


def test_a_tracker_sees_the_settings_and_what_is_logged(
    tiny_mnist: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(tracking.LOGGER_TYPE_TO_CLASS, "trackio", Recorder)
    monkeypatch.setattr(tracking, "_available_trackers", [tracking.LoggerType.TRACKIO])
    train(recipe(), out=tmp_path / "run", data=tiny_mnist, log_with=("trackio",))
    start, (_, settings), *logged, end = Recorder.calls
    assert start == ("capszoo", {"name": "run"}) and end == ("finished",)
    assert settings["optimizer.lr"] == recipe().optimizer.lr and settings["batch_size"] == 32
    assert [step for step, values in logged if "epoch/val_top1" in values] == [3, 6]
    assert any("update/loss" in values for _, values in logged)
    assert (tmp_path / "run" / "tensorboard").is_dir()


def test_a_tracker_that_cannot_start_is_one_line(
    tiny_mnist: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with refuses(UsageError, names=["wandbb", "wandb"]):
        train(recipe(), out=tmp_path / "run", data=tiny_mnist, log_with=("wandbb",))
    monkeypatch.setattr(tracking, "_available_trackers", [])
    with refuses(UsageError, names=["mlflow", "pip install"]):
        train(recipe(), out=tmp_path / "run", data=tiny_mnist, log_with=("mlflow",))

    def offline(*args: Any, **options: Any) -> Any:
        raise OSError("no account")

    monkeypatch.setattr(tracking, "_available_trackers", [tracking.LoggerType.TRACKIO])
    monkeypatch.setitem(tracking.LOGGER_TYPE_TO_CLASS, "trackio", offline)
    monkeypatch.setattr(offline, "requires_logging_directory", False, raising=False)
    with refuses(TrainingError, names=["trackio", "no account", "--log-with"]):
        train(recipe(), out=tmp_path / "run", data=tiny_mnist, log_with=("trackio",))


def test_a_session_names_the_engine_of_each_routing_layer() -> None:
    class Curious(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x if x.sum() > 0 else -x  # needs data

    run: Any = SimpleNamespace(
        recipe=SimpleNamespace(batch_size=128, accumulate=2, compile=False),
        accelerator=SimpleNamespace(autocast=nullcontext),
        world=2,
        device=torch.device("cpu"),
        data=SimpleNamespace(training=SimpleNamespace(spec=dataset_spec("mnist"))),
    )
    net = create_for("idpa_cnn", 10, (1, 28, 28), {})

    def report(batch: int) -> dict[str, Any]:
        return {c.name: c for c in engine_report(net, batch, training=True, input_size=(1, 28, 28))}

    votes = 2 * report(32)["capsules.classes"].call.votes
    with tuned(native_min_votes=votes, idpa_blocked_min_votes=votes):
        expected, whole = ({key: c.engine.name for key, c in report(n).items()} for n in (32, 128))
        assert expected != whole, "a process computes 32 of the 128 images at a time"
        assert begin.training_engines(run, net, (28, 28)) == expected and len(expected) == 3
    with use_engines("reference"):
        assert set((begin.training_engines(run, net, (28, 28)) or {}).values()) == {"reference"}
    assert begin.training_engines(run, Curious(), (28, 28)) is None

    # an engine for eager mode and float32 alone
    net = create_for("encapnet_v1", 10, (1, 28, 28), {})
    eager = set((begin.training_engines(run, net, (28, 28)) or {}).values())
    run.accelerator.autocast = lambda: torch.autocast("cpu", torch.bfloat16)
    half = set((begin.training_engines(run, net, (28, 28)) or {}).values())
    run.accelerator.autocast, run.recipe.compile = nullcontext, True
    compiled = set((begin.training_engines(run, net, (28, 28)) or {}).values())
    assert "recompute" in eager and "recompute" not in half | compiled


def test_no_room_is_said_before_the_first_update(
    tiny_mnist: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "total used free")
    expected = r"no room for checkpoints of about 0.05 MB in .*: 0.14 MB more must be free"
    with monkeypatch.context() as patch:
        patch.setattr(checkpoints.shutil, "disk_usage", lambda _: usage(10**9, 10**9, 1000))
        with pytest.raises(TrainingError, match=expected):
            train(recipe(), out=tmp_path / "run", data=tiny_mnist)
    assert not (tmp_path / "run" / "checkpoints").exists()
    assert train(recipe(), out=tmp_path / "run", data=tiny_mnist, stop_after=1)["step"] == 1


def test_a_start_that_fails_closes_its_log(
    tiny_mnist: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A writer that TensorBoard left open would write into the folder that is gone, and print a traceback."""
    monkeypatch.setattr(begin, "save_state", Mock(side_effect=TrainingError("cannot be saved")))
    threads = set(threading.enumerate())
    with pytest.raises(TrainingError, match="cannot be saved"):
        train(recipe(), out=tmp_path / "run", data=tiny_mnist, cpu=True)
    assert not (tmp_path / "run").exists() and not set(threading.enumerate()) - threads


def test_a_slow_first_update_is_announced_and_changes_nothing(
    tiny_mnist: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    said = []
    for name, least in (("quick", 1e9), ("slow", 0.0)):
        monkeypatch.setattr(estimate, "SLOW", least)
        train(recipe(), out=tmp_path / name, data=tiny_mnist, cpu=True, stop_after=2)
        said.append(re.findall(r"first update takes about \d+ s", capsys.readouterr().out))
    assert [len(lines) for lines in said] == [0, 1]
    same_weights(tmp_path / "quick", tmp_path / "slow")


def test_fp16_needs_a_gpu(tiny_mnist: Path, tmp_path: Path) -> None:
    with refuses(TrainingError, names=["fp16", "CPU", "bf16", "fp32"]):
        train(recipe(precision="fp16"), out=tmp_path / "run", data=tiny_mnist, cpu=True)
    assert not (tmp_path / "run").exists()


def test_a_run_of_another_precision_goes_on_in_fp16(
    tiny_mnist: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(recipe(), out=tmp_path / "run", data=tiny_mnist, stop_after=2)
    real = training.accelerator_for

    @contextmanager
    def scaling(one: Any, *settings: Any) -> Iterator[Any]:
        """fp16 needs a GPU; its scaler, of which the checkpoint knows nothing, does not."""
        with real(one.model_copy(update={"precision": "fp32"}), *settings) as accelerator:
            accelerator.scaler = torch.amp.GradScaler("cpu")
            yield accelerator

    monkeypatch.setattr(training, "accelerator_for", scaling)
    result = train(recipe(precision="fp16"), out=tmp_path / "run", data=tiny_mnist, stop_after=2)
    assert result["step"] == 4


@pytest.mark.gpu
def test_fp16_resumes_on_a_gpu(tiny_mnist: Path, tmp_path: Path) -> None:
    for limit in (2, None):
        result = train(recipe(precision="fp16"), out=tmp_path / "run", data=tiny_mnist, stop_after=limit)
    assert result["finished"]


def test_bf16_computes_in_bf16_and_keeps_float32_weights(
    tiny_mnist: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dtypes: list[torch.dtype] = []
    original = begin.create_net

    def create(*args: Any) -> Any:
        net = original(*args)
        layer = net.get_submodule("stages.stem.conv")
        # neither shapes alone nor the few images that memory and time are measured on
        layer.register_forward_hook(
            lambda _, __, y: dtypes.append(y.dtype) if len(y) == 32 and not y.is_meta else None
        )
        return net

    monkeypatch.setattr(begin, "create_net", create)
    train(recipe(precision="bf16"), out=tmp_path / "run", data=tiny_mnist, stop_after=1)
    assert dtypes == [torch.bfloat16]
    assert {value.dtype for value in weights(tmp_path / "run").values()} == {torch.float32}


def test_parts_of_a_batch_make_the_same_update(tiny_mnist: Path, tmp_path: Path) -> None:
    sgd = {"name": "momentum", "lr": 0.01, "momentum": 0.0}
    for accumulate in (1, 4):
        changes = {"accumulate": accumulate, "optimizer": sgd, "clip_grad": None}
        train(recipe(**changes), out=tmp_path / str(accumulate), data=tiny_mnist, stop_after=2)
    whole, parts = weights(tmp_path / "1"), weights(tmp_path / "4")
    for key, value in whole.items():
        torch.testing.assert_close(parts[key], value, atol=1e-5, rtol=1e-5)


def test_clipping_bounds_the_update(tiny_mnist: Path, tmp_path: Path) -> None:
    sgd = {"name": "momentum", "lr": 1.0, "momentum": 0.0}
    moved = {}
    for clip in (None, 0.01):
        out = tmp_path / str(clip)
        changes = {"optimizer": sgd, "clip_grad": clip, "schedule": {"name": "none"}}
        train(recipe(**changes), out=out, data=tiny_mnist, stop_after=1)
        start = load_file(out / "checkpoints" / "step-00000000" / "model.safetensors")
        moved[clip] = float(sum((weights(out)[key] - start[key]).square().sum() for key in start)) ** 0.5
    assert moved[0.01] == pytest.approx(0.01, rel=1e-3) and moved[None] > 0.05


def test_ema_is_the_average_of_the_weights(tiny_mnist: Path, tmp_path: Path) -> None:
    """With a decay of d every update takes d of the average and 1 - d of the weights."""
    out = tmp_path / "run"
    changes = {"ema_decay": 0.5, "checkpoint_every": 1}
    train(recipe(**changes), out=out, data=tiny_mnist, stop_after=4)
    before = load_file(newest(out) / "ema.safetensors")
    result = train(recipe(**changes), out=out, data=tiny_mnist, stop_after=1)
    assert result["step"] == 5
    after, now = load_file(newest(out) / "ema.safetensors"), weights(out)
    shares = [
        float(((after[key] - before[key]) / (now[key] - before[key])).nanmedian())
        for key in now
        if (now[key] - before[key]).abs().max() > 1e-4
    ]
    assert shares and max(shares) - min(shares) < 1e-2 and shares[0] == pytest.approx(0.5, abs=1e-2)
    finished = train(recipe(**changes), out=out, data=tiny_mnist)  # the average is what is kept
    assert_same_weights(finished["weights"], newest(out) / "ema.safetensors")


def test_channels_last(tiny_mnist: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original, layouts = step._update, []

    def spy(run: Any, state: Any, batch: Any) -> Any:
        weight = state.net.get_submodule("stages.layer2.0.conv1").weight
        layouts.append(weight.is_contiguous(memory_format=torch.channels_last))
        return original(run, state, batch)

    monkeypatch.setattr(step, "_update", spy)
    found = []
    for wanted in (True, False):
        out = tmp_path / str(wanted)
        changes = {"arch": "resnet20_routingcaps", "model_args": {"depth": 8}, "channels_last": wanted}
        changes["optimizer"] = {"name": "sgd", "lr": 0.01}
        train(recipe(**changes), out=out, data=tiny_mnist, stop_after=1)
        found.append(weights(out))
    assert layouts == [True, False]
    for key, value in found[0].items():
        torch.testing.assert_close(found[1][key], value, atol=1e-5, rtol=1e-4)


@pytest.mark.slow
def test_a_compiled_net_resumes_bit_for_bit(
    tiny_mnist: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled: list[Any] = []
    original = torch.compile
    monkeypatch.setattr(torch, "compile", lambda net, **_: compiled.append(net) or original(net))
    changes = {"compile": True, "ema_decay": 0.9}
    whole = train(recipe(**changes), out=tmp_path / "whole", data=tiny_mnist)
    for limit in (2, None):
        torch._dynamo.reset()  # what a new process would compile again
        parts = train(recipe(**changes), out=tmp_path / "parts", data=tiny_mnist, stop_after=limit)
    assert len(compiled) == 3 and parts["finished"]
    assert_same_weights(whole["weights"], parts["weights"])
    assert not any("_orig_mod" in key for key in load_file(parts["weights"]))


def test_compile_modes(tiny_mnist: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[dict[str, Any]] = []
    monkeypatch.setattr(torch, "compile", lambda net, **how: calls.append(how) or net)
    wanted: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({"compile": True}, {"options": None}),
        ({"compile": "reduce-overhead"}, {"mode": "reduce-overhead"}),
        ({"compile": True, "channels_last": False}, {"options": {"layout_optimization": False}}),
    ]
    for changes, _ in wanted:  # a run may change them
        train(recipe(**changes), out=tmp_path / "run", data=tiny_mnist, stop_after=1, cpu=True)
    assert calls == [how for _, how in wanted]
    sessions = json.loads((tmp_path / "run" / "sessions.json").read_text())
    assert [session["channels_last"] for session in sessions] == [True, True, False]


def test_a_schedule_without_decay_epochs_passes_a_number_to_timm(monkeypatch: pytest.MonkeyPatch) -> None:
    """timm 1.0.29 multiplies it."""
    factory = Mock(return_value=(None, 1))
    monkeypatch.setattr(setup, "create_scheduler_v2", factory)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    for value in (None, 3.0):
        setup.create_scheduler(recipe(schedule={"name": "poly", "decay_epochs": value}), optimizer, 10)
    assert [call.kwargs["decay_epochs"] for call in factory.call_args_list] == [90, 3.0]


def test_what_a_recipe_says_reaches_batches_and_loss(tiny_mnist, tmp_path, monkeypatch) -> None:
    options, margins = [], []
    real, forward = begin.Batches, SpreadLoss.forward
    monkeypatch.setattr(begin, "Batches", lambda *a, **k: options.append(k) or real(*a, **k))

    def note(self: SpreadLoss, scores: torch.Tensor, *labels: torch.Tensor) -> torch.Tensor:
        if len(scores) == 32:  # not the few images that time is measured on
            margins.append(self.current)
        return forward(self, scores, *labels)

    monkeypatch.setattr(SpreadLoss, "forward", note)
    augment = {"cutout": 4, "cutout_off_epochs": 1}
    data = {"name": "mnist", "val_size": 20, "balance": True, "augment": augment}
    train(recipe(data=data, loss={"name": "spread"}), out=tmp_path / "run", data=tiny_mnist, cpu=True)
    assert (options[0]["balance"], options[0]["cutout_epochs"]) == (True, 1)
    assert margins[:6] == pytest.approx([0.2 + 0.7 * update / 6 for update in range(6)])


def test_loss_and_seconds_of_an_epoch(tiny_mnist, tmp_path, monkeypatch) -> None:
    now, losses, original = [0.0], [], training.train_step

    def slow(*args):
        now[0] += 10
        losses.append(original(*args).item())
        return torch.tensor(losses[-1])

    monkeypatch.setattr(training, "train_step", slow)
    monkeypatch.setattr(training, "time", SimpleNamespace(monotonic=lambda: now[0]))
    train(recipe(), out=tmp_path / "run", data=tiny_mnist, stop_after=4, cpu=True)
    now[0] += 1000  # between the sessions
    train(recipe(), out=tmp_path / "run", data=tiny_mnist, cpu=True)
    epochs = records(tmp_path / "run", timed=True)
    assert [record["seconds"] for record in epochs] == [30, 60]
    means = [sum(losses[:3]) / 3, sum(losses[3:]) / 3]
    assert [record["train_loss"] for record in epochs] == pytest.approx(means, rel=1e-3)


def test_predict_crops_as_training_did(tiny_mnist, tmp_path) -> None:
    data = {"name": "mnist", "val_size": 20, "augment": {"resize": 32}}
    done = train(recipe(data=data), out=tmp_path / "run", data=tiny_mnist, cpu=True)
    assert metadata(done)["crop_pct"] == 28 / 32


def test_checkpoints_do_not_slow_short_epochs_down(
    tiny_mnist: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checkpoint is left out where it takes too long; a killed run repeats the epochs since the last one."""
    train(recipe(epochs=4), out=tmp_path / "every", data=tiny_mnist)
    monkeypatch.setattr(state_module, "QUICK_SECONDS", 0.0)
    monkeypatch.setattr(state_module, "SAVING_SHARE", 1e-9)
    save = Mock(side_effect=state_module.save_checkpoint)
    monkeypatch.setattr(state_module, "save_checkpoint", save)
    update = training.train_step

    def killed(run: Any, state: Any, batch: Any) -> torch.Tensor:
        if state.step == 2 * run.steps + 1:
            raise KeyboardInterrupt
        return update(run, state, batch)

    with monkeypatch.context() as patch, refuses(TrainingError, names=["0", "resumes"]):
        patch.setattr(training, "train_step", killed)
        train(recipe(epochs=4), out=tmp_path / "few", data=tiny_mnist)
    result = train(recipe(epochs=4), out=tmp_path / "few", data=tiny_mnist)
    # the second call does not know before update 3 how long one takes
    assert [call.args[1] for call in save.call_args_list] == [0, 3, result["step"]]
    assert [record["epoch"] for record in records(tmp_path / "few")] == [1, 2, 3, 4]
    same_weights(tmp_path / "every", tmp_path / "few")


@pytest.mark.parametrize("batch", [100, 32])
def test_a_signal_with_the_last_update_of_an_epoch_stops_the_run(
    tiny_mnist: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, batch: int
) -> None:
    """Also where every update is the last of its epoch, and although no checkpoint is due."""
    monkeypatch.setattr(training, "checkpoint_due", lambda *_: False)
    update, last = training.train_step, 100 // batch

    def signalled(run: Any, state: Any, images: Any) -> torch.Tensor:
        if state.step == 2 * last - 1:
            signal.raise_signal(signal.SIGTERM)
        return update(run, state, images)

    monkeypatch.setattr(training, "train_step", signalled)
    changes = {"epochs": 3, "batch_size": batch}
    with refuses(Stopped, names=[2 * last, 3 * last]):
        train(recipe(**changes), out=tmp_path / "run", data=tiny_mnist)
    monkeypatch.setattr(training, "train_step", update)
    result = train(recipe(**changes), out=tmp_path / "run", data=tiny_mnist)
    train(recipe(**changes), out=tmp_path / "whole", data=tiny_mnist)
    assert result["finished"]
    same_weights(tmp_path / "run", tmp_path / "whole")


def test_checkpoint_every_counts_at_the_end_of_an_epoch(
    tiny_mnist: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training, "checkpoint_due", lambda *_: False)
    steps: list[int] = []
    monkeypatch.setattr(training, "save_state", lambda run, state: steps.append(state.step))
    train(recipe(epochs=4, checkpoint_every=6), out=tmp_path / "run", data=tiny_mnist)  # epochs of 3 updates
    assert steps == [6, 12]


def test_a_run_leaves_no_device_to_the_next(
    tiny_mnist: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the clock does not advance between two updates."""
    monkeypatch.setattr(training, "time", SimpleNamespace(monotonic=lambda: 5.0))
    assert train(recipe(epochs=1), out=tmp_path / "run", data=tiny_mnist, cpu=True)["finished"]
    assert PartialState._shared_state == {}


@pytest.mark.parametrize("encoding", ["ascii", "cp1252"])
def test_a_path_that_the_output_cannot_write(
    tiny_mnist: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, encoding: str
) -> None:
    out = tmp_path / "\N{CYRILLIC CAPITAL LETTER ZHE}"
    path = tmp_path / "recipe.yaml"
    path.write_text(recipe(epochs=1).model_dump_json(exclude_unset=True))
    written = io.BytesIO()
    with io.TextIOWrapper(written, encoding=encoding, write_through=True) as stdout:
        monkeypatch.setattr("sys.stdout", stdout)
        command = ["train", str(path), "--out", str(out), "--data", str(tiny_mnist), "--device", "cpu"]
        with pytest.raises(SystemExit, match="0"):
            app(command)
        assert b"\\u0416" in written.getvalue()
