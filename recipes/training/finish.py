"""How a run ends: its weights, their metadata, and the one evaluation on the test set."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from capszoo._pretrained.files import sha256_of
from capszoo.data import Batches, DatasetSpec, ImageSet

from ..evaluate import evaluate
from ..evaluation.metrics import recall_line
from ..weights import GOLDEN_IMAGES, finished_metadata, write_weights
from .distributed import TrainingError, raise_on_all_ranks
from .log import RunLog, accuracy_line, weights_line
from .run_folder import read_sessions, versions
from .state import Run, TrainState

#: Factor of the recall of guessing, below which a network has hardly learned.
GUESSING = 1.2


def result_of_finished(run: Run) -> dict[str, Any] | None:
    """The result of a run that finished earlier, from its metadata; None if it is not complete."""
    metadata = finished_metadata(run.out)
    measured = (metadata or {}).get("metrics", {})
    if metadata is None or (run.data.test is not None) != ("test" in measured):
        return None
    # checkpoints may be deleted; `check_run` compared the recipes
    epochs = [epoch for epoch in (metadata.get("history") or {}).get("epoch", ()) if epoch is not None]
    epoch = int(epochs[-1]) if epochs else run.recipe.epochs
    weights = run.out / f"{metadata['architecture']}.{metadata['tag']}.safetensors"
    if sha256_of(weights) != metadata["sha256"]:
        return None
    print(f"{run.recipe.name}: already finished; choose another --out to train again", file=sys.stderr)
    print(weights_line(weights))
    for split in ("validation", "test"):
        if split in measured:
            print(accuracy_line(split, run.data.training.spec.accuracy, measured[split]))
    result = {"out": run.out, "finished": True, "step": epoch * run.steps, "epoch": epoch}
    return result | {"weights": weights, **measured}


def finish_run(run: Run, state: TrainState, log: RunLog) -> dict[str, Any]:
    """Write the weights, and evaluate the stored file once on the test set."""
    recipe, spec = run.recipe, run.data.training.spec
    result: dict[str, Any] = {
        "out": run.out,
        "finished": True,
        "step": state.step,
        "epoch": state.step // run.steps,
    }
    if state.best:
        state.evaluated.load_state_dict(state.best.weights)
        epoch = f"epoch {state.best.epoch} of {recipe.epochs}"
        ended = "" if state.step == run.total else f" (stopped: no better epoch in {recipe.early_stop} more)"
        by = f", mean recall {state.best.score:.2f}%" if state.best.measure == "val_recall" else ""
        log.say(f"kept: {epoch}, validation {spec.accuracy} {state.best.top1:.2f}%{by}{ended}")
    if run.main and state.held_out:
        _say_validation(run, state, log)
    net = state.evaluated
    with raise_on_all_ranks(run.accelerator):
        if run.main:
            details = _details(run, state, log)

            def write(**more: Any) -> Path:
                return write_weights(
                    run.out,
                    net,
                    architecture=recipe.arch,
                    tag=recipe.tag,
                    model_args=recipe.model_args,
                    spec=spec,
                    golden_pixels=next(Batches(run.data.measured, GOLDEN_IMAGES).epoch()).pixels,
                    details=details | more,
                )

            # a run that is killed before its last `write` is not finished (`weights.finished_run`)
            result["weights"] = write(evaluated=False)
            log.result(weights_line(result["weights"]))
            if run.data.test is not None:
                figures = evaluate(
                    result["weights"], run.data.test, batch_size=recipe.eval_batch_size, device=run.device
                )
                details["metrics"]["test"] = {key: figures[key] for key in ("top1", "errors", "n")}
            # without validation and test images there are no metrics, which otherwise mark a finished run
            write(**({} if details["metrics"] else {"evaluated": True}))
            if run.data.test is not None:
                log.result(accuracy_line("test", spec.accuracy, figures))
                right, images = ([row[key] for row in figures["per_class"]] for key in ("right", "n"))
                _say_recalls(log, "test", spec, right, images)
            elif "validation" in details["metrics"]:
                log.result(accuracy_line("validation", spec.accuracy, details["metrics"]["validation"]))
            result |= details["metrics"]
    return result


def _say_recalls(
    log: RunLog, split: str, spec: DatasetSpec, right: Sequence[int], images: Sequence[int]
) -> None:
    """Print the lowest recall and the classes without images; nothing where images have several labels."""
    line = None if spec.multi_label else recall_line(split, spec.label_names, right, images)
    if line:
        log.say(line)


def _kept_record(state: TrainState, log: RunLog) -> dict[str, Any]:
    """Record of the epoch whose weights are kept; empty if the file has none."""
    records = [r for r in log.records() if not state.best or r["epoch"] == state.best.epoch]
    return records[-1] if records else {}


def _say_validation(run: Run, state: TrainState, log: RunLog) -> None:
    """Print what the validation accuracy of the kept epoch hides: rare classes, and a net that only guesses."""
    spec, record = run.data.training.spec, _kept_record(state, log)
    right = record.get("val_right")
    if not right:  # several labels, no validation images, or a run of an earlier version
        return
    images = torch.bincount(run.data.validation.labels.cpu(), minlength=spec.num_classes).tolist()
    _say_recalls(log, "validation", spec, right, images)
    chance = 100 / sum(n > 0 for n in images)
    if max(record["val_recall"], record["train_top1"] if run.recipe.data.balance else 0) < GUESSING * chance:
        log.say(
            f"note: a mean recall of {record['val_recall']:.2f}% is not much more than guessing ({chance:.2f}%): the "
            "network has hardly learned. Try another learning rate (--lr), more epochs, or other starting weights"
        )


def _details(run: Run, state: TrainState, log: RunLog) -> dict[str, Any]:
    """Metadata of the weights that describe the run."""
    recipe, data, spec = run.recipe, run.data, run.data.training.spec
    details: dict[str, Any] = {
        "description": recipe.description or None,
        "recipe": recipe.model_dump(mode="json"),
        "seed": recipe.seed,
        "commit": run.commit,
        "dataset": {
            "name": spec.name,
            "title": spec.title,
            "source": spec.source,
            "sha256": data.fingerprints,
            "read": data.summary.to_dict(),
            **({"left_out": list(data.skipped)} if data.skipped else {}),
        },
        "chosen": "best validation epoch" if state.best else "last epoch",
        "hardware": run.hardware,
        "train_seconds": round(state.seconds),
        "versions": versions(),
        "metrics": {},
    }
    began = next((s["init_sha256"] for s in read_sessions(run.out) if s.get("init_sha256")), None)
    if began:
        details["init_sha256"] = began
    if state.best:
        details["epoch"] = state.best.epoch
    composed = isinstance(data.training, ImageSet) and data.training.composer
    if not composed and state.batches.margin[0]:
        # predict crops in the same way as evaluation
        details["crop_pct"] = spec.input_size[1] / data.training.size[0]
    if recipe.data.crop_mode != "center":
        details["crop_mode"] = recipe.data.crop_mode
    if spec.value_range:
        details["value_range"] = list(spec.value_range)
    if state.held_out:
        top1 = state.best.top1 if state.best else _kept_record(state, log).get("val_top1")
        if top1 is None:
            raise TrainingError(
                f"{log.metrics} has no validation accuracy of the last epoch: put the file back, "
                "or choose another --out"
            )
        details["metrics"]["validation"] = {"top1": top1, "n": len(data.validation)}
        if state.best and state.best.measure == "val_recall":
            details["metrics"]["validation"]["recall"] = state.best.score
    return details | _machines(run.out)


def _machines(out: Path) -> dict[str, Any]:
    """The metadata of a run whose processor, precision or software changed: each of its parts, and all the hardware."""
    keys = ("from_update", "commit", "hardware", "precision", "compile", "channels_last")
    parts: list[dict[str, Any]] = []
    images: Any = None
    for session in read_sessions(out):
        machine = {key: session.get(key) for key in keys} | {
            "torch": session.get("versions", {}).get("torch")
        }
        if images is not None and session.get("data") not in (None, images):
            machine["other_images"] = session["data"]  # with --accept-data
        images = images or session.get("data")
        if parts and machine["from_update"] == parts[-1]["from_update"]:
            parts.pop()  # the session before made no update
        if parts and machine | {"from_update": None} == parts[-1] | {"from_update": None}:
            continue  # a resume on the same machine with the same software
        parts.append(machine)
    if len(parts) < 2:
        return {}
    return {
        "hardware": "; ".join(dict.fromkeys(str(machine["hardware"]) for machine in parts)),
        "sessions": parts,
    }
