"""Publish a checkpoint on the Hugging Face Hub: a finished run, a weights file, or a checkpoint of the zoo.

Everything is written into a folder, loaded back from it and compared with the golden outputs before the first call;
then it is uploaded as one commit. An interruption (no network, no permission, a limit) is reported in one line, and the
same command resumes: large files that were uploaded are not sent again, and unchanged files are not committed again.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import timm
import torch
from torch import Tensor, nn

from capszoo._pretrained.catalogue import checkpoints
from capszoo._pretrained.facts import label_lines
from capszoo._pretrained.files import HUB_FILENAME, METADATA_FILENAME, sha256_of, sha256_tag
from capszoo._pretrained.info import WeightsInfo
from capszoo._utils.files import read_npz, replacing, write_atomically
from capszoo._utils.hub import PublishError, check_repo_id, upload
from capszoo.checkpoint import resolve
from capszoo.data import normalize
from capszoo.errors import CapszooError
from capszoo.models._factory import create_model

from .evaluation.plots import draw_curves
from .release.model_card import (
    CONFUSION,
    CURVES,
    GOLDEN,
    LABELS,
    model_card,
)
from .release.public import PRIVATE, default_tag, is_private_set, public
from .training.checkpoints import write_safetensors
from .training.history import history_of, read_records, records_of
from .weights import GOLDEN_IMAGES, finished_run, golden_file, golden_outputs

__all__ = ["PublishError", "publish", "publish_all", "stage"]

#: Names of the files of a repository that we write.
WRITTEN = {HUB_FILENAME, METADATA_FILENAME, "config.json", "README.md", GOLDEN, LABELS, CURVES, CONFUSION}


@dataclass(frozen=True)
class Checkpoint:
    """The files to publish: a weights file, its metadata, and images [b, c, h, w] uint8 with their scores [b, n]."""

    info: WeightsInfo
    weights: Path
    net: nn.Module
    pixels: Tensor
    scores: Tensor


def find_checkpoint(run: str | Path) -> Checkpoint:
    """The checkpoint of a run's folder, a ``.safetensors`` file beside its metadata, or a name of the zoo.

    Raises:
        WeightsError: no finished run, or files that do not belong together.
        PublishError: it does not exist.
    """
    path = Path(run)
    alias = checkpoints().get(str(run))
    if alias is not None and alias.stored_as:
        raise PublishError(f"{run} is another name of {alias.stored_as}", "publish that one")
    checkpoint = resolve(
        finished_run(path) if str(run) not in checkpoints(aliases=False) and path.is_dir() else run
    )
    info = checkpoint.info
    if info is None or (checkpoint.kind == "name" and checkpoint.argument != info.name):
        raise PublishError(
            f"{run}: neither the folder of a finished run, nor a .safetensors file, nor a checkpoint of the zoo",
            "`capszoo list --pretrained` shows those",
        )
    weights, net = checkpoint.weights(), checkpoint.create(device="cpu")
    golden, of_user = golden_file(info), checkpoint.kind == "file"
    if of_user:
        golden = weights.with_name(f"{weights.stem}.golden.npz")
        records = read_records(weights.with_name("metrics.jsonl"))
        if records and not info.metadata.history:
            info = replace(info, raw={**info.raw, "history": history_of(records)})
    pixels = scores = None
    if golden.is_file():
        arrays = read_npz(golden, ("pixels", "scores"))
        _check_golden(arrays, info, golden)
        pixels, scores = torch.from_numpy(arrays["pixels"]), torch.from_numpy(arrays["scores"])
        if of_user:
            images = normalize(pixels, info.mean, info.std)
            _compare(
                net, images, scores, f"{info.name}: its scores differ by {{:.2g}} from the golden outputs"
            )
    if pixels is None or scores is None or of_user:  # a user's own images are not uploaded
        generator = torch.Generator().manual_seed(0)
        pixels = torch.randint(
            0, 256, (GOLDEN_IMAGES, *info.input_size), generator=generator, dtype=torch.uint8
        )
        scores = torch.from_numpy(golden_outputs(net, pixels, info.mean, info.std))
    return Checkpoint(info, weights, net, pixels, scores)


def _check_golden(arrays: dict[str, np.ndarray], info: WeightsInfo, path: Path) -> None:
    """Check golden outputs: a few raw images of the model's size, and their scores."""
    pixels, scores = arrays["pixels"], arrays["scores"]
    count = len(pixels) if pixels.ndim else 0
    images = pixels.dtype == np.uint8 and pixels.shape[1:] == info.input_size and 1 <= count <= 1024
    numbers = scores.dtype.kind == "f" and scores.shape == (count, info.num_classes)
    if not images or not numbers or not np.isfinite(scores).all():
        raise PublishError(
            f"{path}: pixels {pixels.dtype} {pixels.shape} and scores {scores.dtype} {scores.shape} are no golden "
            f"outputs for up to 1,024 images of {info.input_size} and {info.num_classes} classes",
            "remove the file: other images are drawn then",
        )


def _config(checkpoint: Checkpoint) -> dict[str, Any]:
    """``config.json`` in timm's format, with the sha256 that our loading verifies."""
    info = checkpoint.info
    cfg: dict[str, Any] = getattr(checkpoint.net, "pretrained_cfg", None) or {}
    kept = ("first_conv", "classifier", "fixed_input_size", "paper_name", "paper_ids")
    return {
        "architecture": info.architecture,
        "num_classes": info.num_classes,
        "num_features": getattr(checkpoint.net, "num_features", None),
        **({"label_names": list(info.label_names)} if info.label_names else {}),
        "model_args": dict(info.model_args),
        "sha256": info.sha256,
        "torch_dtype": "float32",  # transformers would else compute in the file's, which may be half
        "capszoo": info.facts,
        "pretrained_cfg": {
            "tag": info.tag,
            "custom_load": False,
            "input_size": list(info.input_size),
            "num_classes": info.num_classes,
            "mean": list(info.mean),
            "std": list(info.std),
            "interpolation": info.interpolation,
            "crop_pct": info.crop_pct,
            "crop_mode": info.crop_mode,
            "pool_size": list(info.metadata.pool_size) if info.metadata.pool_size else None,
            "license": info.license,
            "description": info.description,
            **{key: cfg[key] for key in kept if cfg.get(key) is not None},
        },
    }


def _public_info(info: WeightsInfo) -> WeightsInfo:
    """The metadata without names of the user's folders, of which the default tag is one."""
    # a label may look like a path
    raw = {key: value if key == "label_names" else public(value, key) for key, value in info.raw.items()}
    name = info.metadata.dataset.name
    if is_private_set(name) and info.tag == default_tag(name):
        raw["tag"] = PRIVATE
        hidden = {"recipe": {"tag": PRIVATE}, "seeds": {"recipe": f"{info.architecture}.{PRIVATE}"}}
        raw |= {key: {**raw[key], **names} for key, names in hidden.items() if raw.get(key)}
    return replace(info, raw=raw, tag=raw["tag"], description=raw.get("description"))


def stage(run: str | Path, repo_id: str, folder: Path, private: bool = False) -> WeightsInfo:
    """Write all files of a repository into the empty ``folder``, load the model from there and compare.

    Raises:
        PublishError: the written files do not reproduce the golden outputs.
        WeightsError: see ``find_checkpoint``.
    """
    checkpoint = find_checkpoint(run)
    checkpoint = replace(checkpoint, info=_public_info(checkpoint.info))
    info = checkpoint.info
    shutil.copyfile(checkpoint.weights, folder / HUB_FILENAME)
    write_safetensors(folder / GOLDEN, {"pixels": checkpoint.pixels, "scores": checkpoint.scores})
    write_atomically(
        folder / "config.json", json.dumps(_config(checkpoint), indent=1, ensure_ascii=False) + "\n"
    )
    write_atomically(folder / METADATA_FILENAME, json.dumps(info.raw, indent=1, ensure_ascii=False) + "\n")
    if info.label_names:
        write_atomically(folder / LABELS, "".join(f"{line}\n" for line in label_lines(info.label_names)))
    history = info.metadata.history
    if history:
        draw_curves(folder / CURVES, info.name, records_of(history))
    confusion = checkpoint.weights.with_name(CONFUSION)  # drawn by fine-tuning
    evaluated = confusion.with_name("eval.json").is_file()  # its picture has replaced fine-tuning's
    if confusion.is_file() and not evaluated:
        shutil.copyfile(confusion, folder / CONFUSION)
    pictures = [file for file in (CURVES, CONFUSION) if (folder / file).is_file()]
    card = model_card(info, repo_id, private, pictures)
    write_atomically(folder / "README.md", card.content)
    _check(folder, checkpoint)
    return info


def _check(folder: Path, checkpoint: Checkpoint) -> None:
    """Check that both libraries can load the folder, and that the loaded models reproduce the golden outputs."""
    if sha256_of(folder / HUB_FILENAME) != checkpoint.info.sha256:
        raise PublishError(
            f"{checkpoint.weights}: the copy differs from its metadata", "check the disk for errors"
        )
    images = normalize(checkpoint.pixels, checkpoint.info.mean, checkpoint.info.std)
    for library, create in (("capszoo", create_model), ("timm", timm.create_model)):
        net: Any = create(f"local-dir:{folder}", pretrained=True)
        name = checkpoint.info.name
        what = f"{name}: loaded back with {library}, its scores differ by {{:.2g}} from the golden outputs"
        _compare(net, images, checkpoint.scores, what)


def _compare(net: nn.Module, images: Tensor, expected: Tensor, problem: str) -> None:
    """Raise PublishError unless a net has the expected scores; ``problem`` has a place for their difference."""
    with torch.no_grad():
        scores = net.eval()(images).float()
    difference = float((scores - expected).abs().max())
    if not difference <= 1e-4 * float(expected.abs().max()):
        raise PublishError(problem.format(difference), "nothing was sent; train or bundle it again")


@contextmanager
def _staging(out: Path | None, replaces: bool = False) -> Iterator[Path]:
    """A temporary folder that becomes ``out`` on success, and is deleted otherwise.

    With ``replaces``, ``out`` may hold the files of an earlier call, which are then replaced.
    """
    if out is not None and out.exists():
        earlier = out.is_dir() and {file.name for file in out.iterdir()}
        if not (replaces and earlier and "config.json" in earlier and earlier <= WRITTEN):
            raise PublishError(f"{out} exists already", "name another folder, or remove it")
    with ExitStack() as stack:
        if out is not None:
            yield stack.enter_context(replacing(out, folder=True))
        else:
            yield Path(stack.enter_context(tempfile.TemporaryDirectory()))


def publish(
    run: str | Path,
    repo_id: str,
    private: bool = False,
    dry_run: bool = False,
    out: str | Path | None = None,
    say: Callable[[str], None] = print,
    replaces: bool = False,
) -> dict[str, Any]:
    """Publish one checkpoint.

    Args:
        run: folder of a finished run, a ``.safetensors`` file beside its metadata, or a name of the zoo.
        repo_id: ``user/repository``; created if it does not exist.
        private: for a repository that is new, or already private.
        dry_run: write and check everything, without network calls.
        out: keep the written files in this folder, which must not exist.
        say: called with each line of progress.
        replaces: ``out`` may hold the files of an earlier call, which are then replaced.

    Returns:
        ``{"repo_id", "model", "files": [{"name", "bytes", "sha256"}], "url", "commit", "changed"}``; the last three
        are None with ``dry_run``, and ``changed`` is False if the repository already had everything.

    Raises:
        UsageError: an invalid repository name.
        PublishError, WeightsError: one line; the same command can be repeated.
    """
    check_repo_id(repo_id)
    with _staging(Path(out) if out else None, replaces) as folder:
        info = stage(run, repo_id, folder, private)
        files = [
            {"name": file.name, "bytes": file.stat().st_size, "sha256": sha256_of(file)}
            for file in sorted(folder.iterdir())
            if file.is_file()
        ]
        result: dict[str, Any] = {"repo_id": repo_id, "model": info.name, "files": files}
        if dry_run:
            return {**result, "url": None, "commit": None, "changed": None}
        # files that earlier weights had and these do not; the user's own files stay
        owned, message = (CURVES, CONFUSION, LABELS), f"{info.name}, sha256 {info.sha256[:12]}"
        sent = upload(folder, repo_id, message, private, say, owned=owned, tag=sha256_tag(info.sha256))
        return {**result, **sent}


def publish_all(
    org: str,
    private: bool = False,
    dry_run: bool = False,
    out: str | Path | None = None,
    say: Callable[[str], None] = print,
) -> list[dict[str, Any]]:
    """Publish every checkpoint of the zoo as ``<org>/<name>``; arguments and errors as for ``publish``.

    It stops at the first failure; the next call skips what is already published, and resumes.
    """
    check_repo_id(f"{org}/name")
    done: list[dict[str, Any]] = []
    names = checkpoints(aliases=False)
    for name in names:
        try:
            into = Path(out) / name if out else None
            done.append(publish(name, f"{org}/{name}", private, dry_run, into, say, replaces=True))
        except CapszooError as error:
            raise PublishError(f"{name} ({len(done)} of {len(names)} were done): {error}") from error
        say(f"{done[-1]['repo_id']}: {'checked' if dry_run else 'published'}")
    return done
