"""Batch prediction with Ray Data: the implementation of ``capszoo predict --ray ADDRESS``.

The images are divided into shards of a fixed number of files. A worker predicts a shard and writes it as one parquet
file, which appears under its final name when it is complete: ``part-000000.parquet`` and so on. Ray restarts a worker
that dies, and retries its shard; a second call predicts the shards whose files are missing. Every node must see the
images, the model and the output folder under the same paths.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from ._utils.files import replacing
from .errors import CapszooError, UsageError, require
from .scores import TABLE_COLUMNS, ImagePrediction

__all__ = ["Job", "Summary", "predict_by_ray"]

_METADATA = b"capszoo"  # key of a part's schema for its job and counts
_ATTEMPTS = 3  # per shard: if its worker dies this often, the shard is the cause
_PATIENCE = 10.0  # seconds for a cluster to accept a connection
_RESUMES = "finished shards are kept: the same command answers the others"


@dataclass(frozen=True)
class Job:
    """Settings shared by all shards of a call.

    Attributes:
        model: a MODEL argument; a path is absolute.
        sha256: of the weights, if they are on this machine.
        root: folder to which the images' names are relative.
        out: output folder, absolute.
        topk: classes per image.
        batch_size: images per forward pass.
        device: device of each worker.
        options: arguments of the model.
        reading: arguments of ``capszoo.preprocess.model_transform``.
    """

    model: str
    sha256: str
    root: str
    out: str
    topk: int
    batch_size: int = 32
    device: str | None = None
    options: dict[str, Any] = field(default_factory=dict)
    reading: dict[str, Any] = field(default_factory=dict)

    def key(self, files: Sequence[str]) -> str:
        """Key of a shard of this job; it depends on the model, the options and the images."""
        free = {"batch_size", "device", "out"}
        if all(os.path.isabs(file) for file in files):
            free.add("root")
        same = {name: value for name, value in asdict(self).items() if name not in free}
        text = json.dumps([same, list(files)], sort_keys=True, default=str)
        return hashlib.sha256(text.encode("utf-8", "backslashreplace")).hexdigest()

    def part(self, number: int) -> Path:
        return Path(self.out) / f"part-{number:06d}.parquet"


@dataclass
class Summary:
    """Result of a call: images predicted and how many were unreadable; shards in total and already done."""

    images: int = 0
    errors: int = 0
    shards: int = 0
    kept: int = 0


def predict_by_ray(
    job: Job,
    files: Sequence[str],
    address: str,
    *,
    workers: int | None = None,
    shard_size: int = 10_000,
    advance: Callable[[int], None] | None = None,
) -> Summary:
    """Classify files on a Ray cluster, into a folder of parquet files.

    Args:
        job: settings of the call.
        files: images; a relative name is relative to the job's root.
        address: of the cluster in Ray's format: ``local`` starts one here, ``auto``, ``HOST:PORT``,
            ``ray://HOST:PORT``.
        workers: processes; None: one for each of the cluster's CPUs (GPUs if the device is ``cuda``).
        shard_size: images per parquet file.
        advance: called with the number of images after each shard.

    Raises:
        CapszooError: Ray is not installed, no cluster responds, or the folder contains results of another call.
    """
    require("--ray", ("ray", "pyarrow"), "ray")
    shards = [list(files[k : k + shard_size]) for k in range(0, len(files), shard_size)]
    summary, missing = _find_done(job, shards)
    if advance:
        advance(summary.images)
    if missing:
        _clear(job)
        with _cluster(address, workers) as ray:
            for row in _answered(ray, job, shards, missing, workers):
                if row["failure"]:
                    raise CapszooError(row["failure"], _RESUMES)
                summary.images += row["images"]
                summary.errors += row["errors"]
                if advance:
                    advance(row["images"])
    _clear(job)
    return summary


def _clear(job: Job) -> None:
    """Remove files left by workers that died."""
    for pattern in (".*.part-*.parquet", ".part-*.tried"):
        for leftover in Path(job.out).glob(pattern):
            leftover.unlink(missing_ok=True)


def _find_done(job: Job, shards: Sequence[Sequence[str]]) -> tuple[Summary, list[int]]:
    """Results of an earlier call, and the numbers of the missing shards."""
    summary, missing = Summary(shards=len(shards)), []
    shard_names = {job.part(number).name for number in range(len(shards))}
    out = Path(job.out)
    if out.exists() and not out.is_dir():
        raise CapszooError(
            f"{out} is a file", "with --ray, --out is a folder of parquet files: choose another"
        )
    # names with a dot are of workers that died: `_clear` removes them
    names = (path.name for path in out.glob("*.parquet"))
    strangers = sorted(name for name in names if name not in shard_names and not name.startswith("."))
    other = f"{out} holds %s of another call (other images, model, options or --shard-size)"
    if strangers:
        raise CapszooError(other % strangers[0], "choose another --out")
    for number, files in enumerate(shards):
        noted = _read_note(job.part(number))
        if noted is None:
            missing.append(number)
        elif noted.get("key") != job.key(files):
            raise CapszooError(other % job.part(number).name, "choose another --out")
        else:
            summary.images += len(files)
            summary.errors += int(noted["errors"])
            summary.kept += 1
    return summary, missing


def _read_note(part: Path) -> dict[str, Any] | None:
    """The job and counts stored in a part; None if it is missing or damaged."""
    import pyarrow.parquet as pq

    try:
        note = json.loads((pq.read_schema(part).metadata or {})[_METADATA])
        return note if isinstance(note, dict) else None
    except (OSError, KeyError, ValueError):  # pyarrow's errors are ValueErrors
        return None


def _check_address(address: str) -> None:
    """Refuse an address at which nothing listens; Ray itself would retry for many minutes."""
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if address in ("local", "auto"):
        return
    if not colon or not port.isdecimal() or not 0 < int(port[:6]) < 2**16:
        raise UsageError(f"--ray {address} is no address", "give local, auto, HOST:PORT or ray://HOST:PORT")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_PATIENCE).close()
    except OSError as error:
        raise _no_cluster(address, error.strerror or str(error)) from error


def _no_cluster(address: str, reason: str) -> CapszooError:
    return CapszooError(
        f"--ray {address}: no cluster answers there ({reason})",
        "start one with `ray start --head`, or let --ray local start one on this machine",
    )


@contextmanager
def _cluster(address: str, workers: int | None) -> Iterator[Any]:
    """Connect Ray to a cluster within this context, without Ray's output: we report progress ourselves."""
    _check_address(address)
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")  # errors are raised as exceptions anyway
    import ray
    import ray.data

    local = address == "local"
    try:
        ray.init(
            address=address,
            num_cpus=workers if local else None,
            logging_level=logging.ERROR,
            log_to_driver=False,
            **({"include_dashboard": False} if local else {}),
        )
    except Exception as error:  # ConnectionError, ValueError, RuntimeError, TimeoutError, grpc's errors
        reason = " ".join(str(error).split())[:120] or type(error).__name__
        raise _no_cluster(address, reason) from error
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    context.print_on_execution_start = False
    logging.getLogger("ray.data").setLevel(logging.ERROR)
    try:
        with redirect_stdout(sys.stderr):  # Ray reports worker deaths there; stdout is for results
            yield ray
    finally:
        ray.shutdown()


def _answered(
    ray: Any, job: Job, shards: Sequence[Sequence[str]], missing: Sequence[int], workers: int | None
) -> Iterator[dict[str, Any]]:
    """Yield a row for each shard of ``missing`` when it is finished."""
    on_gpu = str(job.device).startswith("cuda")
    available = ray.cluster_resources().get("GPU" if on_gpu else "CPU", 0)
    if on_gpu and not available:
        raise UsageError("--device cuda: the cluster has no GPUs", "leave --device out")
    count = max(1, min(workers or int(available), len(missing)))
    if job.device in (None, "auto"):  # a worker for each CPU: they would share one GPU
        job = replace(job, device="cpu")
    rows = [{"number": number, "files": json.dumps(shards[number])} for number in missing]
    # A block is a row, so that the death of a worker loses only its current shard.
    answered = ray.data.from_items(rows, override_num_blocks=len(rows)).map_batches(
        ShardPredictor,
        fn_constructor_kwargs={"job": job},
        batch_size=1,
        compute=ray.data.ActorPoolStrategy(size=count, max_tasks_in_flight_per_actor=1),
        **{"num_gpus" if on_gpu else "num_cpus": 1},
    )
    try:
        yield from answered.iter_rows()
    except ray.exceptions.RayError as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[-1][:200]
        raise CapszooError(f"Ray gave up ({reason.strip()})", _RESUMES) from error


class ShardPredictor:
    """Predict shards in a worker process, with a model that is loaded once."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.model: Any = None

    def __call__(self, batch: dict[str, Any]) -> dict[str, list[Any]]:
        """Predict the one shard of a batch; errors are returned as values, because Ray would wrap exceptions."""
        number, files = int(batch["number"][0]), json.loads(str(batch["files"][0]))
        row: dict[str, Any] = {"number": number, "images": 0, "errors": 0, "failure": ""}
        # Ray restarts a dead worker without limit: attempts are counted in a file that outlives the worker.
        tried = self.job.part(number).with_name(f".part-{number:06d}.tried")
        try:
            tried.parent.mkdir(parents=True, exist_ok=True)
            if tried.exists() and tried.stat().st_size >= _ATTEMPTS:
                raise CapszooError(
                    f"{_ATTEMPTS} workers died on it (first image: {files[0]}): lower --workers or --batch-size"
                )
            with open(tried, "ab") as file:
                file.write(b".")
            row["errors"] = self._answer(number, files)
            row["images"] = len(files)
            tried.unlink(missing_ok=True)
        except OSError as error:
            row["failure"] = f"shard {number}: {error.filename or self.job.out}: {error.strerror or error}"
        except CapszooError as error:
            row["failure"] = f"shard {number}: {error}"
        return {name: [value] for name, value in row.items()}

    def _answer(self, number: int, files: list[str]) -> int:
        """Write the part of a shard; returns the number of images that could not be read."""
        from .inference import load_model, predict
        from .preprocess import model_transform

        job = self.job
        if self.model is None:
            self.model = load_model(job.model, device=job.device, **job.options)
        paths = [Path(job.root) / file for file in files]
        transform = model_transform(self.model, **job.reading)
        results = predict(self.model, paths, job.topk, job.batch_size, transform=transform)
        errors = sum(bool(result.error) for result in results)
        _write_part(job.part(number), files, results, {"key": job.key(files), "errors": errors})
        return errors


def _as_text(name: str) -> str:
    """A name of a file without bytes that are no text: parquet strings are UTF-8."""
    return name.encode("utf-8", "backslashreplace").decode()


def _write_part(
    part: Path, names: Sequence[str], results: Sequence[ImagePrediction], note: dict[str, Any]
) -> None:
    """Write a parquet file with the columns of ``predict --out FILE.csv``, one row per image and class."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    text, number, real = pa.string(), pa.int32(), pa.float64()
    types = zip(TABLE_COLUMNS, (text, number, number, text, real, real, text), strict=True)
    schema = pa.schema([*types], metadata={_METADATA: json.dumps(note).encode()})
    named = (
        replace(result, image=_as_text(name), error=_as_text(result.error))
        for name, result in zip(names, results, strict=True)
    )
    rows = [row for result in named for row in result.table_rows()]
    columns = [list(column) for column in zip(*rows, strict=True)]
    table = pa.table(columns, schema=schema)
    with replacing(part) as temporary:
        pq.write_table(table, temporary)
