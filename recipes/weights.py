"""From a finished run to a checkpoint of the zoo: weights, metadata and golden outputs.

``python -m capszoo.recipes.weights RUN`` copies a finished run's files into the package's ``weights/`` folder; weights
that are too large for a wheel go to ``weights-large/`` at the top of the checkout, while their metadata stays in the
package. Weights of the zoo's recipes of more than ``FILE_LIMIT`` bytes are stored in half precision, and the metrics
are those of the file as stored.
``--half`` stores smaller ones so, too, and evaluates the new file: for a package that is nearly full.
``--seeds RUN RUN`` adds the mean over the run and these ones, which have other seeds, to its metadata; with a
checkpoint's name in place of the first run, to that checkpoint's, whose run need not exist any more.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import platform
import statistics
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from capszoo._pretrained.catalogue import checkpoints
from capszoo._pretrained.files import sha256_of
from capszoo._pretrained.info import WeightsInfo, stored_file, weights_folders
from capszoo._utils.files import PACKAGE_FOLDER, read_npz, write_atomically
from capszoo.checkpoint import model_from_file, run_weights
from capszoo.data import DATASETS, DatasetSpec, normalize
from capszoo.errors import CapszooError, WeightsError
from capszoo.images import default_background
from capszoo.scores import kind_for

from .config import BACKBONE, list_recipes, load_recipe
from .evaluate import evaluate
from .training.checkpoints import write_safetensors
from .training.history import history_of, read_records

#: Raw images whose outputs are stored beside the weights.
GOLDEN_IMAGES = 4

#: Of weights from a recipe of the package, and of others: whose they are, and whose images, only the user knows.
ZOO_LICENSE, USER_LICENSE = "apache-2.0", "unknown"

SUFFIXES = (".safetensors", ".golden.npz", ".json")  # the metadata comes last: it makes the tag exist

#: Bytes of one file and of all in the package's ``weights/``, and in ``weights-large/`` of a checkout.
FILE_LIMIT, FOLDER_LIMIT = 20_000_000, 64_000_000
LARGE_FILE_LIMIT, LARGE_FOLDER_LIMIT = 80_000_000, 160_000_000


def source_commit() -> str | None:
    """The commit of the checkout that this package runs from ("+changes" if a used file differs).

    Outside a checkout, as in a copy of its files alone, ``CAPSZOO_COMMIT``; else None.
    """
    package = PACKAGE_FOLDER
    root = package.resolve().parent

    def git(*args: str) -> str:
        done = subprocess.run(["git", "-C", str(root), *args], capture_output=True, text=True, check=True)
        return done.stdout.strip()

    try:
        # not the repository of a project whose virtual environment has the package
        git("ls-files", "--error-unmatch", "--", str(package.resolve() / "__init__.py"))
        # by their text: resolving thousands of paths takes a second
        folders = tuple(f"{folder}{os.sep}" for folder in {package.parent, root})
        files = {getattr(module, "__file__", None) or "" for module in list(sys.modules.values())}
        ours = [name for name in files if name.startswith(folders) and "site-packages" not in name]
        changed = git("status", "--porcelain", "--", *ours)
        return git("rev-parse", "HEAD") + ("+changes" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return os.environ.get("CAPSZOO_COMMIT") or None


def hardware(device: torch.device) -> str:
    """The accelerator's name, or the processor's with the number of threads used."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    name = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        models = [line for line in cpuinfo.read_text().splitlines() if line.startswith("model name")]
        name = models[0].split(":", 1)[1].strip() if models else name
    threads = torch.get_num_threads()
    return f"{name}, {threads} CPU thread{'s' if threads > 1 else ''}"


def golden_outputs(
    net: nn.Module, pixels: Tensor, mean: tuple[float, ...], std: tuple[float, ...]
) -> np.ndarray:
    """Scores [b, n] in float32 for raw images ``pixels`` uint8 [b, c, h, w]."""
    with torch.no_grad():
        return net.eval()(normalize(pixels, mean, std)).float().cpu().numpy()


def _feature_grid(net: nn.Module, input_size: tuple[int, int, int]) -> list[int] | None:
    """Height and width of the net's last feature map at this input size; None if it has none."""
    forward_features: Any = getattr(net.eval(), "forward_features", None)
    if forward_features is None:
        return None
    like = next(net.parameters())
    with torch.no_grad():
        features = forward_features(torch.zeros(1, *input_size, device=like.device, dtype=like.dtype))
    return list(features.shape[-2:]) if features.ndim == 4 else None


def _as_stored(tensors: Mapping[str, Tensor], limit: int | None = None) -> tuple[dict[str, Tensor], str]:
    """The tensors as stored, and the name of the precision: half for more than ``limit`` (``FILE_LIMIT``) bytes.

    Vectors (biases, BatchNorm's statistics) stay unchanged, and so do values that half precision cannot represent.
    """
    limit = FILE_LIMIT if limit is None else limit
    if sum(t.numel() * t.element_size() for t in tensors.values()) <= limit:
        return dict(tensors), "float32"
    stored = {}
    for key, tensor in tensors.items():
        half = tensor.half() if tensor.dtype == torch.float32 and tensor.dim() > 1 else tensor
        stored[key] = half if bool(half.isfinite().all()) else tensor
    return stored, "float16"


def _metadata_text(metadata: Mapping[str, Any]) -> str:
    """Metadata as readable JSON, with the history in one line instead of one line per number."""
    rest = {key: value for key, value in metadata.items() if key != "history"}
    text = json.dumps(rest, indent=1, ensure_ascii=False)
    if "history" in metadata:
        text = text.removesuffix("\n}") + f',\n "history": {json.dumps(metadata["history"])}\n}}'
    return text + "\n"


def amend_metadata(weights: Path, **more: Any) -> WeightsInfo:
    """Add later findings to the metadata beside a weights file; return the new metadata."""
    path = weights.with_suffix(".json")
    write_atomically(path, _metadata_text(json.loads(path.read_text(encoding="utf-8")) | more))
    return WeightsInfo.from_json(path)


def golden_file(info: WeightsInfo) -> Path:
    """The golden outputs of a checkpoint of the zoo: beside its metadata, wherever the weights are."""
    name, folders = f"{info.name}.golden.npz", weights_folders()
    return stored_file(name, folders) or folders[0] / name


def finished_run(run: str | Path) -> Path:
    """The weights that a finished run wrote to its folder.

    The metadata of an unfinished run state ``evaluated: false``, or neither this key nor metrics. Raises
    ``WeightsError`` if there are no weights of a finished run, also for a run that ended during the evaluation on its
    test images. ``checked_pair`` verifies that weights and metadata belong together.
    """
    try:
        weights = run_weights(Path(run))
    except CapszooError as error:
        several = "it has several checkpoints: name a .safetensors file"
        what = several if "several" in error.message else "run its recipe to the end first"
        raise WeightsError(f"{run} is not a finished run: {what}") from error
    try:
        info = WeightsInfo.from_json(weights.with_suffix(".json"))
        finished = bool(info.raw.get("evaluated", info.metadata.metrics))
    except CapszooError as error:
        raise WeightsError(f"{run} is not a finished run: {error}") from error
    if not finished:
        raise WeightsError(f"{run} is not a finished run: run its recipe to the end first")
    return weights


def finished_metadata(run: Path) -> dict[str, Any] | None:
    """The metadata that a finished run wrote to its folder; None if it is not finished."""
    try:
        return json.loads(finished_run(run).with_suffix(".json").read_text(encoding="utf-8"))
    except (WeightsError, OSError, ValueError):
        return None


def _room(target: Path, name: str, size: int, file_limit: int, folder_limit: int) -> bool:
    others = sum(f.stat().st_size for f in target.glob("*") if f.name != name)
    return size <= file_limit and others + size <= folder_limit


def write_weights(
    folder: Path,
    net: nn.Module,
    *,
    architecture: str,
    tag: str,
    model_args: Mapping[str, Any],
    spec: DatasetSpec,
    golden_pixels: Tensor,
    details: Mapping[str, Any],
) -> Path:
    """Write ``<architecture>.<tag>`` as safetensors, json and golden.npz into ``folder``; return the safetensors' path.

    Args:
        folder: target folder.
        net: the trained net.
        architecture, tag: name of the checkpoint.
        model_args: arguments of ``create_model`` besides classes, channels and size.
        spec: specification of the data set.
        golden_pixels: a few raw images [b, c, h, w] uint8 whose scores are stored as golden outputs.
        details: further metadata: recipe, seed, commit, metrics, hardware, …
    """
    stem = f"{architecture}.{tag}"
    weights = folder / f"{stem}.safetensors"
    history = history_of(read_records(folder / "metrics.jsonl"))
    recipe = dict(details.get("recipe", {}))
    start = (recipe.get("init") or {}).get("weights")
    if start and _is_run_of_zoo(stem, Path(start)):
        start = stem  # a folder's name says less
        recipe["init"] = {**recipe["init"], "weights": stem}
    # a name alone is not enough: images of a user may be in a folder `cifar10`
    of_zoo = stem in list_recipes() and spec.name in DATASETS
    if of_zoo and start not in (None, stem):  # that name is the zoo's, and so is the recipe's own backbone
        backbone = load_recipe(stem).model_args.get("backbone")
        of_zoo = str(start).startswith(BACKBONE) and model_args.get("backbone") == backbone is not None
    tensors, storage = _as_stored(net.state_dict()) if of_zoo else (net.state_dict(), "float32")
    write_safetensors(weights, tensors)
    metadata = {
        "architecture": architecture,
        "tag": tag,
        "license": ZOO_LICENSE if of_zoo else USER_LICENSE,
        "sha256": sha256_of(weights),
        "storage": storage,
        "num_params": sum(p.numel() for p in net.parameters()),
        "num_classes": spec.num_classes,
        "input_size": spec.input_size,
        "mean": spec.mean,
        "std": spec.std,
        "pool_size": _feature_grid(net, spec.input_size),
        "label_names": spec.label_names,
        "model_args": dict(model_args),
        **reading_keys(spec, str(details.get("recipe", {}).get("loss", {}).get("name", "cross_entropy"))),
        **details,
        **({"recipe": recipe} if recipe else {}),
        **({"history": history} if history else {}),
    }
    write_atomically(folder / f"{stem}.json", _metadata_text(metadata))
    _write_golden(weights, golden_pixels.cpu(), spec.mean, spec.std)
    return weights


def _is_run_of_zoo(stem: str, run: Path) -> bool:
    """True for the folder of an earlier run of the same recipe of the zoo, whose weights have the zoo's licence."""
    metadata = finished_metadata(run) or {}
    return (
        metadata.get("license") == ZOO_LICENSE
        and f"{metadata.get('architecture')}.{metadata.get('tag')}" == stem
    )


def reading_keys(spec: DatasetSpec, loss: str) -> dict[str, Any]:
    """Metadata about reading a model's input and output.

    ``score_kind`` is the kind of the scores (``capszoo.scores``), ``background`` the background for transparent pixels,
    and ``object_size`` the height and width of an object if training images are composed of objects on a larger
    canvas (None: images fill the frame).
    """
    objects = DATASETS[spec.base].input_size[1:] if spec.base and spec.base in DATASETS else None
    return {
        "score_kind": kind_for(loss, not spec.multi_label),
        "background": default_background(spec.input_size[0]),
        "object_size": list(objects) if objects and objects != spec.input_size[1:] else None,
    }


def canonical_keys(infos: Mapping[str, WeightsInfo]) -> dict[str, bool]:
    """``canonical`` of every checkpoint: whether a bare architecture name refers to it.

    An architecture keeps its canonical checkpoint. Without one it is the only checkpoint, or the first
    whose tag is only its data set's name, with photographs or scans before a composed data set.
    """
    chosen: dict[str, str] = {}
    for info in sorted(infos.values(), key=_standing):
        chosen.setdefault(info.architecture, info.name)
    return {name: chosen[info.architecture] == name for name, info in infos.items()}


def _standing(info: WeightsInfo) -> tuple[bool, bool, bool, str]:
    name = str(info.raw.get("dataset", {}).get("name"))
    composed = name in DATASETS and bool(DATASETS[name].base)
    return not info.canonical, info.tag != name, composed, info.name


def _write_golden(weights: Path, pixels: Tensor, mean: tuple[float, ...], std: tuple[float, ...]) -> None:
    """Write golden outputs beside a weights file: those of the written file, not of a net in memory."""
    reread, _ = model_from_file(weights)
    buffer = io.BytesIO()
    np.savez_compressed(buffer, pixels=pixels.numpy(), scores=golden_outputs(reread, pixels, mean, std))
    write_atomically(weights.with_suffix(".golden.npz"), buffer.getvalue())


def store_half(run: str | Path, data: str | Path | None = None) -> Path:
    """Write a finished run's weights in half precision, with the test accuracy and golden outputs of that file.

    Other metrics, which are those of the run's own file, move to ``run_metrics``, where a summary over seeds finds
    them; an existing summary, which is one of runs, is kept. The three files are in the run's folder ``half/``, from
    which ``bundle`` copies them.

    Args:
        run: folder of the run.
        data: folder of the data set; None uses ``CAPSZOO_DATA``.

    Raises:
        WeightsError: the run is not finished.
    """
    source = finished_run(run)
    net, info = model_from_file(source)
    weights = source.parent / "half" / source.name
    weights.parent.mkdir(exist_ok=True)
    tensors, storage = _as_stored(net.state_dict(), limit=0)
    write_safetensors(weights, tensors)
    kept = {key: value for key, value in info.raw.items() if key not in ("evaluated", "per_class")}
    kept |= {
        "sha256": sha256_of(weights),
        "storage": storage,
        "metrics": {},
        "run_metrics": run_metrics(info.raw),
    }
    write_atomically(weights.with_suffix(".json"), _metadata_text(kept))
    pixels = read_npz(source.with_suffix(".golden.npz"), ("pixels",))["pixels"]
    _write_golden(weights, torch.from_numpy(pixels), info.mean, info.std)
    figures = evaluate(weights, data=data)
    test = {key: figures[key] for key in ("top1", "errors", "n")}
    amend_metadata(weights, metrics={"test": test})
    return weights


def images_sha256(metadata: Mapping[str, Any]) -> dict[str, str] | None:
    """The sha256 of the images of each split that a run used; None: not recorded."""
    return metadata.get("dataset", {}).get("sha256")


def run_metrics(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """The accuracies of a run's own file, also in the metadata of its copy in half precision (:func:`store_half`)."""
    return dict(metadata.get("run_metrics") or metadata["metrics"])


def bundle(run: str | Path, folder: str | Path | None = None) -> list[Path]:
    """Copy a finished run's weights, metadata and golden outputs into the zoo, or into ``folder``.

    In the zoo the three are in the package's ``weights/``; weights that are too large for it, in ``weights-large/``.

    Raises:
        WeightsError: the run is not finished, or neither folder has room.
    """
    weights = finished_run(run)
    _, info = model_from_file(weights)  # checks the pair, and that a net can be created from it
    if "test" not in info.metadata.metrics:
        raise WeightsError(f"{run} has no accuracy on a test set: run its recipe to the end first")
    small, large = (Path(folder), Path(folder)) if folder else weights_folders()
    size = weights.stat().st_size
    fits_small = folder or _room(small, weights.name, size, FILE_LIMIT, FOLDER_LIMIT)
    target, other = (small, large) if fits_small else (large, small)
    if not fits_small and not _room(large, weights.name, size, LARGE_FILE_LIMIT, LARGE_FOLDER_LIMIT):
        raise WeightsError(
            f"{weights.name} has {size:,} bytes, for which neither {small.name}/ nor {large.name}/ has room "
            f"({FILE_LIMIT:,} and {LARGE_FILE_LIMIT:,} bytes a file): publish it on the Hub alone"
        )
    copied = []
    for suffix in SUFFIXES:
        file = weights.with_name(weights.stem + suffix)
        into = target if suffix == ".safetensors" else small
        into.mkdir(parents=True, exist_ok=True)
        if suffix == ".json":
            metadata = json.loads(file.read_text(encoding="utf-8"))
            if not folder:
                # the zoo's entry of this name takes precedence: the run does not know that it is canonical
                every = {info.name: info} | dict(checkpoints(aliases=False))
                metadata["canonical"] = canonical_keys(every)[info.name]
            write_atomically(into / file.name, _metadata_text(metadata))
        else:
            write_atomically(into / file.name, file.read_bytes())
        copied.append(into / file.name)
    if not folder:  # an earlier version may exist in either folder
        (other / weights.name).unlink(missing_ok=True)
    return copied


def seeds_summary(name: str, runs: dict[int, dict[str, Any]], epochs: int) -> dict[str, Any]:
    """Accuracies of one recipe's runs: each seed's, their mean and (sample) standard deviation.

    Args:
        name: of the recipe.
        runs: metadata of the finished run of each seed.
        epochs: number of epochs.

    Returns:
        ``{"recipe", "epochs", "seeds", "test": {"values", "mean", "sd", "n"}, "validation": …}``, in per cent; a
        split that a run lacks is omitted, and ``sd`` for a single seed.
    """
    summary: dict[str, Any] = {"recipe": name, "epochs": epochs, "seeds": list(runs)}
    for split in ("test", "validation"):
        measurements = [info["metrics"].get(split) for info in runs.values()]
        if not measurements or any(measurement is None for measurement in measurements):
            continue
        values = [measurement["top1"] for measurement in measurements]
        summary[split] = {
            "values": values,
            "mean": round(statistics.fmean(values), 4),
            "n": measurements[0]["n"],
        }
        if len(values) > 1:
            summary[split]["sd"] = round(statistics.stdev(values), 4)
    return summary


def same_but_seed(metadata: Mapping[str, Any], others: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The summary over finished runs of one recipe with different seeds (:func:`seeds_summary`).

    Seeds of an earlier summary in ``metadata`` are kept, so that runs can be added one at a time.

    Args:
        metadata: of the run that is bundled.
        others: metadata of the other runs, by a name for messages.

    Raises:
        WeightsError: a run of another recipe, with other settings or images, with the seed of another one, or with
            accuracies on other splits.
    """
    from .training.run_folder import compared_settings, first_difference

    name = f"{metadata['architecture']}.{metadata['tag']}"
    measured, seed = run_metrics(metadata), int(metadata["seed"])
    runs = _stated_runs(metadata.get("seeds", {}))
    runs.setdefault(seed, {**metadata, "metrics": measured})
    taken = {seed}
    for folder, other in others.items():
        settings = compared_settings(other["recipe"])
        key, was, wanted = first_difference(settings, compared_settings(metadata["recipe"]))
        if key:
            raise WeightsError(
                f"{folder} was trained with {key}={was}, {name} with {wanted}: "
                "these are not runs of the same recipe"
            )
        images, ours = map(images_sha256, (other, metadata))
        if images and ours and images != ours:
            raise WeightsError(
                f"{folder} was trained on other images than {name}: leave it out, or train it on the same data"
            )
        if int(other["seed"]) in taken:
            raise WeightsError(
                f"{folder} has seed {other['seed']}, as another of the runs has: leave one of them out"
            )
        if not measured.keys() <= other["metrics"].keys():
            raise WeightsError(
                f"{folder} does not state accuracies for the same splits as {name}: leave it out"
            )
        taken.add(int(other["seed"]))
        runs[int(other["seed"])] = dict(other)
    return seeds_summary(name, dict(sorted(runs.items())), int(metadata["recipe"]["epochs"]))


def _stated_runs(summary: Mapping[str, Any]) -> dict[int, dict[str, Any]]:
    """The metrics of each seed in a summary of ``seeds_summary``, as in the metadata of its run."""
    splits = [split for split in ("test", "validation") if split in summary]
    return {
        seed: {
            "metrics": {
                split: {"top1": summary[split]["values"][i], "n": summary[split]["n"]} for split in splits
            }
        }
        for i, seed in enumerate(summary.get("seeds", []))
    }


def _with_seeds(weights: Path, others: list[str]) -> None:
    """Add the summary over a run and ``others`` to the metadata beside its weights."""
    first: dict[str, Any] = json.loads(weights.with_suffix(".json").read_text(encoding="utf-8"))
    if "test" not in first["metrics"]:
        raise WeightsError(
            f"{weights.stem} has no accuracy on a test set, of which to state the mean: run its recipe to the end first"
        )
    metadata: dict[str, dict[str, Any]] = {}
    for other in others:
        finished = finished_metadata(Path(other))
        if finished is None:
            raise WeightsError(f"{other} is not a finished run: run its recipe to the end first")
        metadata[other] = finished
    summary = same_but_seed(first, metadata)
    amend_metadata(weights, seeds=summary)
    test, count = summary["test"], len(summary["seeds"])
    print(f"{weights.stem}: test {test['mean']:.2f} ± {test['sd']:.2f}, n = {count}")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m capszoo.recipes.weights", description=__doc__)
    parser.add_argument("run", help="folder of a finished run; with --seeds also a checkpoint's name")
    parser.add_argument(
        "--seeds", nargs="+", default=[], metavar="RUN", help="runs with other seeds: add the mean"
    )
    parser.add_argument("--to", help="default: the package's weights/ folder")
    parser.add_argument("--half", action="store_true", help="store in half precision and evaluate that file")
    parser.add_argument("--data", help="folder of the data set, for --half; default: CAPSZOO_DATA")
    args = parser.parse_args(argv)
    in_zoo = args.run in checkpoints(aliases=False) and not Path(args.run).is_dir()
    if in_zoo and args.seeds and (args.half or args.to or args.data):
        parser.error("--half, --to and --data are for the folder of a run, not for a checkpoint's name")
    if args.data and not args.half:
        parser.error("--data is for --half")
    try:
        if in_zoo and not args.seeds:
            raise WeightsError(f"{args.run} is in the zoo: name the folder of a run, or --seeds")
        if in_zoo:
            _with_seeds(weights_folders()[0] / f"{args.run}.safetensors", args.seeds)
            return 0
        if args.seeds:
            _with_seeds(finished_run(args.run), args.seeds)
        run = store_half(args.run, args.data).parent if args.half else args.run
        for path in bundle(run, args.to):
            print(f"{path} ({path.stat().st_size:,} bytes)")
    except (CapszooError, OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
