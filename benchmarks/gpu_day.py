"""All measurements that need a GPU, in bounded steps that are recorded and can be resumed.

    python benchmarks/gpu_day.py --minutes 9 --out gpu-day        # again, until it says that all is done
    python benchmarks/gpu_day.py --warm --out gpu-day             # before it: compile, on many cores at a time
    python benchmarks/gpu_day.py --dry-run --out /tmp/gpu-day     # the same code on the CPU, with tiny sizes

Needs torch, timm, Triton and the checkout; no installation. Each step runs in a separate process: a kernel that hangs
or breaks the device affects only its measurement. `<out>/<step>.json` has the measurements after each
item; a second call resumes with the next item. Failures and wrong results are recorded, and repeated with `--retry`.
`<out>/report.md` and `<out>/report.json` list the measurements and the reached targets.

Steps: `machine` (rates of a large product and copy), `check` (each routing layer against the reference in float64:
fresh random inputs, memory filled with NaN), `layers` (times; a layer that failed its check is not timed), `train`
(training steps of one network of each routing, images per second), `tests` (pytest's mark `gpu`), `onnxruntime`,
`torch_tensorrt`. Shares of the floor are those of `--bandwidth` and `--flops`. A folder holds the results of one card.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # a plain checkout works too

from benchmarks.gpu_report import COMPILED, YARDSTICK, Settings, read, report, state, targets, write

Item = Callable[[], Any]

#: Attainable bytes and bf16 operations per second: about 0.9 and 0.8 of the data sheets of the SXM cards.
FLOORS = {"H200": (4.3e12, 790e12), "H100": (3.0e12, 790e12)}

#: Seconds limit for one process of a step. Another process goes on with the item that was running; if the limit ends
#: the first item of a process, the item is recorded as too slow.
LIMITS = {
    "machine": 150,  # with the first imports on a fresh machine
    "check": 240,
    "layers": 300,
    "train": 300,
    "tests": 420,
    "onnxruntime": 240,
    "torch_tensorrt": 300,
}

#: Steps of a dry run whose kernels run in Triton's interpreter; for whole networks it would take minutes.
INTERPRETED = ("check", "layers")

#: Exit code of a step whose device is broken: the next item needs a new process.
BROKEN = 3

#: One network of each routing, and the two networks that they are compared with.
MODELS = {
    YARDSTICK: "resnet18_cifar",
    "IDPA": "idpa_resnet",
    "IDPA, backbone alone": "idpa_resnet@norm",
    "dynamic": "capsnet_dynamic",
    "EM": "capsnet_em",
    "routing pooling": "resnet20_routingpool",
    "capConv": "encapnet_v1:mode=master",  # the queue's
    "self-attention": "efficient_capsnet",
    "self-routing": "resnet20_selfrouting",
}
#: Networks whose compiled steps are measured first: the queue trains them compiled.
FIRST = ("IDPA", "IDPA, backbone alone", YARDSTICK, "capConv", "routing pooling")
TINY_MODELS = {
    YARDSTICK: "resnet18_cifar",
    "IDPA": "idpa_cnn:num_caps=4,pose_dim=4,backbone_chans=8",
    "IDPA, backbone alone": "idpa_cnn@norm:num_caps=4,pose_dim=4,backbone_chans=8",
    "dynamic": "resnet20_dynamic",
    "EM": "resnet20_em",
    "routing pooling": "resnet20_routingpool",
    "capConv": "encapnet6_master",
    "self-attention": "efficient_capsnet",
    "self-routing": "resnet20_selfrouting",
}


# --- steps: names of items, and their measurements - -----------------------------------------------------------------


def tests(settings: Settings) -> dict[str, Item]:
    """The tests marked `gpu`: an item for each file, or each data type in it, since a killed item leaves nothing."""
    if importlib.util.find_spec("pytest") is None:
        return {"pytest": lambda: {"left_out": "pytest is not installed; the step check holds correctness"}}
    marked = re.compile(r"^(\s*@|pytestmark = )pytest\.mark\.gpu\b", re.MULTILINE)
    files = sorted(path for path in (ROOT / "tests").rglob("test_*.py") if marked.search(path.read_text()))
    found: dict[str, Item] = {}
    for path in files:
        parts = DTYPES if 'parametrize("dtype"' in path.read_text() else {"": ""}
        for name, names in parts.items():
            key = f"{path.relative_to(ROOT)}{name}"
            found[key] = lambda path=path, names=names: run_tests(path, names)  # type: ignore[misc]
    return found


#: Parts of a file whose tests have a data type, and pytest's selection of each.
DTYPES = {
    "": "not float32 and not bfloat16 and not float16",
    ", float32": "float32",
    ", bfloat16": "bfloat16",
    ", float16": "float16 and not bfloat16",
}


def run_tests(file: Path, names: str = "") -> dict[str, Any]:
    """Result of the tests marked `gpu` in a file: counts, and what failed with the end of pytest's output.

    `names` selects some of them (pytest's ``-k``).
    """
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "junit.xml"
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-m",
            "gpu",
            "-p",
            "no:cacheprovider",
            "--continue-on-collection-errors",
            f"--junitxml={report}",
            *(["-k", names] if names else []),
            str(file),
        ]
        if importlib.util.find_spec("xdist"):  # most of the time is Triton's compiler, on one core a test
            command += ["-n", str(max(1, min(6, (os.cpu_count() or 1) // 2)))]
        # each worker has compilers of its own
        environment = {"TORCHINDUCTOR_COMPILE_THREADS": "2", **os.environ}
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment)
        root = ElementTree.parse(report).getroot() if report.is_file() else ElementTree.Element("none")
    suite = root.find("testsuite")
    counts = {} if suite is None else suite.attrib
    result: dict[str, Any] = {
        key: int(counts[key]) for key in ("tests", "failures", "errors", "skipped") if key in counts
    }
    if done.returncode:
        cases = root.iter("testcase")
        failed = [
            c.get("name") for c in cases if c.find("failure") is not None or c.find("error") is not None
        ]
        said = f"{done.stdout[-3000:]}{done.stderr[-500:]}"
        result["error"] = f"pytest exited with {done.returncode}; failed: {failed[:20]}: {said}"
    return result


def machine(settings: Settings) -> dict[str, Item]:
    from benchmarks import gpu

    return {"rates": lambda: asdict(gpu.measure_machine(settings.device, 256 if settings.dry_run else 8192))}


def cases(settings: Settings) -> dict[str, Any]:
    from benchmarks import gpu

    return gpu.tiny_cases() if settings.dry_run else gpu.all_cases()


def check(settings: Settings) -> dict[str, Item]:
    """Largest relative error of values and gradients, by layer and dtype."""
    from benchmarks import gpu

    def one(case: Any, dtype: Any, tolerance: float) -> dict[str, Any]:
        # routings are a multiple of 16 as in `layers`, so that Triton compiles one variant for both
        error = gpu.check(case, dtype, min(16, case.batch), settings.device)
        return {"case": case.name, "error": error, "tolerance": tolerance, "passed": bool(error <= tolerance)}

    return {
        f"{key}, {str(dtype).removeprefix('torch.')}": lambda c=case, d=dtype, t=tolerance: one(c, d, t)  # type: ignore[misc]
        for key, case in cases(settings).items()
        for dtype, tolerance in gpu.TOLERANCE.items()
    }


def layers(settings: Settings) -> dict[str, Item]:
    """Times, memory and launches of each layer against the reference, also under torch.compile."""
    from benchmarks import gpu

    limits = gpu.Machine(settings.flops / 2, settings.bandwidth)

    def one(key: str, case: Any) -> Any:
        held = {
            name: value for name, value in read(settings.out, "check").items() if name.startswith(f"{key}, ")
        }
        wrong = [name for name, value in held.items() if not value.get("passed")]
        if wrong or not held:
            return {"left_out": f"not timed: {', '.join(wrong) or key} did not pass its check"}
        copies = 1 if settings.dry_run else 4
        rows = gpu.measure(case, limits, settings.device, True, copies, settings.backend)
        return [{**asdict(row), "of_floor": row.of_floor} for row in rows]

    return {key: lambda key=key, case=case: one(key, case) for key, case in cases(settings).items()}  # type: ignore[misc]


def train(settings: Settings) -> dict[str, Item]:
    """Training steps (bf16 autocast, SGD) of one network of each routing, eager and compiled."""
    import torch

    from benchmarks import gpu

    def one(spec: str, compiled: bool, mode: str | None = None) -> dict[str, Any]:
        torch._dynamo.reset()
        step = gpu.step_of(spec, settings.batch, settings.device, compiled, settings.backend, mode)
        ms = gpu.timed([step] * 10, settings.device)  # the host goes ahead, as in training
        mib = gpu.peak_mib(step, settings.device)
        images = round(settings.batch / ms * 1e3, 1)
        return {"model": spec, "batch": settings.batch, "ms": ms, "images_per_s": images, "peak_mib": mib}

    models = networks(settings)
    first = FIRST[:2] if settings.dry_run else FIRST
    last = () if settings.dry_run else [name for name in models if name not in FIRST]

    def compiled(names: Sequence[str], kind: str = ", compiled") -> dict[str, Item]:
        mode = COMPILED[kind]
        return {f"{name}{kind}": lambda spec=models[name]: one(spec, True, mode) for name in names}  # type: ignore[misc]

    eager: dict[str, Item] = {name: lambda spec=spec: one(spec, False) for name, spec in models.items()}  # type: ignore[misc]
    graphs = ", CUDA graphs"
    if settings.dry_run:  # its backend has no modes
        return compiled(first) | eager
    return compiled(first) | compiled(FIRST, graphs) | compiled(last, graphs) | compiled(last) | eager


def networks(settings: Settings) -> dict[str, str]:
    """Networks whose training steps are measured: name to model."""
    return TINY_MODELS if settings.dry_run else MODELS


def small_networks(settings: Settings) -> dict[str, str]:
    """Networks that are exported: name to model."""
    if settings.dry_run:
        return {"IDPA": TINY_MODELS["IDPA"]}
    return {name: spec for name, spec in MODELS.items() if "@" not in spec}


def missing(*modules: str) -> str:
    """The first of these modules that is not installed, or an empty string."""
    return next((name for name in modules if importlib.util.find_spec(name) is None), "")


def onnxruntime(settings: Settings) -> dict[str, Item]:
    """ONNX Runtime on CUDA (on the CPU in a dry run) against eager PyTorch."""
    if absent := missing("onnx", "onnxscript", "onnxruntime"):
        return {"onnxruntime": lambda: {"left_out": f"{absent} is not installed"}}
    import onnxruntime as ort
    import torch

    from benchmarks import gpu, models

    runtime = "cpu" if settings.dry_run else "gpu"
    provider = "CPUExecutionProvider" if settings.dry_run else "CUDAExecutionProvider"
    if provider not in ort.get_available_providers():
        return {"onnxruntime": lambda: {"left_out": f"this onnxruntime has no {provider}"}}

    def one(spec: str) -> dict[str, Any]:
        from capszoo.export import to_onnx

        model, size = models.build(spec)
        model.eval()
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "model.onnx"
            to_onnx.export(model, path, batch=settings.batch, input_size=size, gate="quick", runtime=runtime)
            session = ort.InferenceSession(str(path), providers=[provider])
        x = torch.rand(settings.batch, *size)
        binding = session.io_binding()
        kind = settings.device.type
        binding.bind_ortvalue_input(
            session.get_inputs()[0].name, ort.OrtValue.ortvalue_from_numpy(x.numpy(), kind)
        )
        for output in session.get_outputs():
            binding.bind_output(output.name, kind)
        return against_eager(model, x, lambda: session.run_with_iobinding(binding), gpu.timed, settings)

    return {name: lambda spec=spec: one(spec) for name, spec in small_networks(settings).items()}  # type: ignore[misc]


def against_eager(
    model: Any, x: Any, other: Callable[[], object], timed: Callable[..., float], settings: Settings
) -> dict[str, Any]:
    import torch

    model, x = model.to(settings.device), x.to(settings.device)

    def eager() -> object:
        with torch.inference_mode():
            return model(x)

    return {
        "batch": len(x),
        "ms": timed([other], settings.device),
        "eager_ms": timed([eager], settings.device),
    }


def torch_tensorrt(settings: Settings) -> dict[str, Item]:
    """Torch-TensorRT against eager PyTorch."""
    if absent := missing("torch_tensorrt"):
        return {"torch_tensorrt": lambda: {"left_out": f"{absent} is not installed"}}
    import torch

    from benchmarks import gpu, models

    def one(spec: str) -> dict[str, Any]:
        from capszoo.export.to_torch_tensorrt import compile_module

        model, size = models.build(spec)
        fast = compile_module(model.eval(), batch=settings.batch, input_size=size)
        x = torch.rand(settings.batch, *size, device=settings.device)
        return against_eager(model, x, lambda: fast(x), gpu.timed, settings)

    return {name: lambda spec=spec: one(spec) for name, spec in small_networks(settings).items()}  # type: ignore[misc]


STEPS: dict[str, Callable[[Settings], dict[str, Item]]] = {
    "machine": machine,
    "check": check,
    "layers": layers,
    "train": train,
    "tests": tests,
    "onnxruntime": onnxruntime,
    "torch_tensorrt": torch_tensorrt,
}


def warm(arguments: list[str], settings: Settings, seconds: float) -> int:
    """Compile what `layers` and `train` measure, each item in a separate process; return the number that failed.

    torch keeps compiled code on disk (TORCHINDUCTOR_CACHE_DIR), so that the steps then load it. Nothing is measured.
    """
    names = [name for name in train(settings) if name.endswith(tuple(COMPILED))]
    names += list(cases(settings))
    threads = str(max(1, (os.cpu_count() or 1) // 4))
    environment = {"TORCHINDUCTOR_COMPILE_THREADS": threads, "OMP_NUM_THREADS": "1", **os.environ}
    command = [sys.executable, str(Path(__file__).resolve()), *arguments, "--warm-item"]
    processes = [
        subprocess.Popen([*command, name], env=environment, start_new_session=True, stdout=subprocess.DEVNULL)
        for name in names
    ]
    end = time.monotonic() + seconds
    failed = 0
    try:
        for name, process in zip(names, processes, strict=True):
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, end - time.monotonic()))
            if (code := process.poll()) != 0:
                failed += 1
                print(
                    f"{name}: {'not compiled in time' if code is None else f'exit code {code}'}", flush=True
                )
    finally:
        for process in processes:
            stop(process)
    print(f"{len(names) - failed} of {len(names)} items are compiled", flush=True)
    return failed


def warm_item(name: str, settings: Settings) -> None:
    from benchmarks import gpu

    if name in (layers := cases(settings)):
        gpu.compile_reference(layers[name], settings.device, settings.backend)
        return
    kind = next(kind for kind in COMPILED if name.endswith(kind))
    spec = networks(settings)[name.removesuffix(kind)]
    step = gpu.step_of(spec, settings.batch, settings.device, True, settings.backend, COMPILED[kind])
    for _ in range(3):
        step()


# --- one step, in a separate process -------------------------------------------------------------------------------


def run_step(step: str, settings: Settings) -> int:
    """Run the step's missing measurements; return the exit code."""
    if settings.dry_run and step in INTERPRETED:
        from capszoo.layers import _triton

        _triton._on_cpu = importlib.util.find_spec("triton") is not None
    now = state(settings.out, step)
    path = settings.out / f"{step}.json"
    items = STEPS[step](settings)
    for name, item in items.items():
        if name in now["items"]:
            continue
        write(path, {**now, "running": name})
        try:
            now["items"][name] = item()
        except Exception as error:  # any error is recorded, and the others continue
            now["items"][name] = {"error": f"{type(error).__name__}: {error}"}
            if is_broken(error):
                write(path, now)
                return BROKEN
        write(path, now)
    write(path, {**now, "running": None, "finished": True})
    return 0


def is_broken(error: Exception) -> bool:
    """True if the process can no longer use its device."""
    signs = ("CUDA error", "Triton Error [CUDA]", "CUDNN_STATUS", "CUBLAS_STATUS")
    return any(sign in str(error) for sign in signs) or type(error).__name__ == "AcceleratorError"


def supervise(step: str, arguments: list[str], settings: Settings, seconds: float) -> str:
    """Run a step in processes until it is finished; return its outcome as a word or a line.

    Args:
        step: name of the step.
        arguments: of this script, for the step's process.
        settings: settings of the run.
        seconds: remaining for this call.
    """
    end = time.monotonic() + seconds
    environment = {**os.environ, **({"TRITON_INTERPRET": "1"} if settings.dry_run else {})}
    command = [sys.executable, str(Path(__file__).resolve()), *arguments, "--step", step]
    path = settings.out / f"{step}.json"
    while True:
        left = end - time.monotonic()
        if left <= 0:
            return "to be gone on with"
        before = len(read(settings.out, step))
        with tempfile.TemporaryFile() as said:
            process = subprocess.Popen(command, env=environment, stderr=said, start_new_session=True)
            try:
                code: int | None = process.wait(min(left, LIMITS[step]))
            except subprocess.TimeoutExpired:
                code = None
            finally:
                stop(process)
            said.seek(0)
            messages = said.read().decode(errors="replace").strip()
        if messages:
            print(messages, file=sys.stderr, flush=True)
        now = state(settings.out, step)
        if now["finished"]:
            failed = {name: value for name, value in now["items"].items() if to_repeat(value)}
            for name, value in failed.items():
                print(f"{name}: {str(value)[-2000:]}", file=sys.stderr, flush=True)
            return f"{len(failed)} failed: {', '.join(failed)}" if failed else "done"
        if code is None and left <= LIMITS[step]:
            return "to be gone on with"  # this call's time expired, not the step's
        if code is None and len(now["items"]) > before:
            continue  # the running item had only what the others left of the limit
        error = f"took more than {LIMITS[step]} s"
        if code is not None:
            error = ": ".join(filter(None, (f"its process exited with {code}", messages[-500:])))
        if code != BROKEN:
            # the running item is the cause; before the first item, the step itself
            now["items"][now["running"] or step] = {"error": error}
            now["running"] = None
        now["finished"] = len(now["items"]) == before or step in now["items"]
        write(path, now)


def stop(process: subprocess.Popen[bytes]) -> None:
    """End a step's process and its subprocesses (compiler workers)."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def write_report(settings: Settings) -> None:
    import torch

    name = platform.processor() or platform.machine()
    if not settings.dry_run and torch.cuda.is_available():
        name = torch.cuda.get_device_name()
    hardware = {"device": name, "torch": torch.__version__, "python": platform.python_version()}
    if importlib.util.find_spec("triton"):
        hardware["triton"] = importlib.metadata.version("triton")
    (settings.out / "report.md").write_text(report(settings, hardware))
    figures = [{**one._asdict(), "reached": one.reached} for one in targets(settings.out)]
    steps = {step: read(settings.out, step) for step in STEPS}
    content = {"dry_run": settings.dry_run, "hardware": hardware, "targets": figures, "steps": steps}
    write(settings.out / "report.json", content)


def is_failure(value: Any) -> bool:
    """True if an item could not be measured, or was not timed because its check failed."""
    return (
        isinstance(value, dict)
        and "tolerance" not in value
        and ("error" in value or "not timed" in str(value))
    )


def is_wrong(value: Any) -> bool:
    """True if an item is a failed check."""
    return isinstance(value, dict) and value.get("passed") is False


def to_repeat(value: Any) -> bool:
    """True if `--retry` repeats an item."""
    return is_failure(value) or is_wrong(value)


def forget_failures(out: Path, steps: Sequence[str] = tuple(STEPS)) -> None:
    """Make the next call of these steps repeat failed items and wrong ones."""
    for step in steps:
        now = state(out, step)
        kept = {key: value for key, value in now["items"].items() if not to_repeat(value)}
        if len(kept) < len(now["items"]):
            write(out / f"{step}.json", {"items": kept, "running": None, "finished": False})


def reopen(settings: Settings, steps: Sequence[str]) -> None:
    """Continue finished steps that have gained items since: a folder of an earlier version lacks them."""
    for step in steps:
        now = state(settings.out, step)
        failed = step in now["items"]  # as a whole: --retry repeats it
        if now["finished"] and not failed and STEPS[step](settings).keys() - now["items"].keys():
            write(settings.out / f"{step}.json", {**now, "finished": False})


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--out", type=Path, required=True, help="folder of the results; a second call goes on there"
    )
    parser.add_argument("--minutes", type=float, default=9, help="of this call (default: 9)")
    parser.add_argument(
        "--steps", default=",".join(STEPS), help=f"with commas, of {', '.join(STEPS)} (default: all)"
    )
    parser.add_argument("--retry", action="store_true", help="repeat what failed in earlier calls")
    parser.add_argument(
        "--dry-run", action="store_true", help="tiny sizes on the CPU, kernels in Triton's interpreter"
    )
    known = f"(default: by the card's name, of {' and '.join(FLOORS)}; else those of an H200)"
    parser.add_argument("--bandwidth", type=float, help=f"bytes a second of the floor {known}")
    parser.add_argument("--flops", type=float, help=f"bf16 operations a second {known}")
    parser.add_argument(
        "--warm",
        action="store_true",
        help="only compile what is measured, many items at a time; measure nothing",
    )
    parser.add_argument("--step", choices=STEPS, help=argparse.SUPPRESS)  # passed to a step's process
    parser.add_argument("--warm-item", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    args.steps = args.steps.split(",")
    unknown = [step for step in args.steps if step not in STEPS]
    if unknown:
        parser.error(f"no step {unknown[0]!r}: the steps are {', '.join(STEPS)}")
    return args


def main(argv: list[str] | None = None) -> int:
    end = time.monotonic()
    args = parse(argv)
    end += 60 * args.minutes
    if args.step:
        return run_step(args.step, Settings(args.out, args.dry_run, args.bandwidth, args.flops))
    if args.warm_item:
        warm_item(args.warm_item, Settings(args.out, args.dry_run, 0.0, 0.0))
        return 0
    import torch

    if not args.dry_run and not torch.cuda.is_available():
        print(
            "error: torch.cuda.is_available() is False: --dry-run tries the code on the CPU", file=sys.stderr
        )
        return 1
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that a step's process ends too
    args.out.mkdir(parents=True, exist_ok=True)
    if args.warm:
        passed = ["--out", str(args.out.resolve()), *(["--dry-run"] if args.dry_run else [])]
        return 1 if warm(passed, Settings(args.out, args.dry_run, 0.0, 0.0), end - time.monotonic()) else 0
    mark = args.out / "settings.json"
    card = "cpu" if args.dry_run else torch.cuda.get_device_name()
    floors = next((FLOORS[key] for key in FLOORS if key in card), FLOORS["H200"])
    bandwidth, flops = args.bandwidth or floors[0], args.flops or floors[1]
    settings = Settings(args.out, args.dry_run, bandwidth, flops)
    mine = {"dry_run": args.dry_run, "card": card, "bandwidth": bandwidth, "flops": flops}
    if mark.is_file() and (before := json.loads(mark.read_text())) != mine:
        print(
            f"error: {args.out} holds results of other settings ({before}, not {mine}): choose another --out",
            file=sys.stderr,
        )
        return 1
    write(mark, mine)
    if args.retry:
        forget_failures(args.out, args.steps)
    reopen(settings, args.steps)
    passed = [
        "--out",
        str(args.out.resolve()),
        "--bandwidth",
        str(bandwidth),
        "--flops",
        str(flops),
    ]
    passed += ["--dry-run"] if args.dry_run else []
    for step in args.steps:
        began = time.monotonic()
        outcome = "done before"
        if not state(args.out, step)["finished"]:
            outcome = supervise(step, passed, settings, end - time.monotonic() - 5)
        print(f"{step}: {outcome} ({time.monotonic() - began:.0f} s)", flush=True)
        write_report(settings)
    open_steps = [step for step in args.steps if not state(args.out, step)["finished"]]
    failed = sum(to_repeat(value) for step in STEPS for value in read(args.out, step).values())
    if open_steps:
        print(f"the same command resumes with {open_steps[0]}")
    else:
        repeat = f"; {failed} failed: --retry repeats them" if failed else ""
        print(f"all is done: {args.out / 'report.md'}{repeat}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
