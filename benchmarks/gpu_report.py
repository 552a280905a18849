"""Results of `benchmarks/gpu_day.py`: its records, its targets, and its report as markdown."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, NamedTuple

#: The reference for the other networks' training steps.
YARDSTICK = "ResNet-18 (CIFAR)"

#: How a training step is compiled: the end of its item's name, and torch.compile's mode.
COMPILED: dict[str, str | None] = {", compiled": None, ", CUDA graphs": "reduce-overhead"}


class Settings(NamedTuple):
    """Settings of a step.

    Attributes:
        bandwidth: bytes per second, for the floor. flops: bfloat16 operations per second, two for a multiply-add.
    """

    out: Path
    dry_run: bool
    bandwidth: float
    flops: float

    @property
    def device(self) -> Any:
        import torch

        return torch.device("cpu" if self.dry_run else "cuda")

    @property
    def backend(self) -> str:
        """Backend of torch.compile: the dry run traces and generates no code."""
        return "aot_eager" if self.dry_run else "inductor"

    @property
    def batch(self) -> int:
        return 2 if self.dry_run else 128


def write(path: Path, content: Any) -> None:
    """Write JSON, completely or not at all."""
    part = path.with_name(path.name + ".part")
    part.write_text(json.dumps(content, indent=1) + "\n")
    os.replace(part, path)


def state(out: Path, step: str) -> dict[str, Any]:
    """`{"items": {name: result}, "running": name, "finished": bool}` for the current state of a step."""
    path = out / f"{step}.json"
    empty: dict[str, Any] = {"items": {}, "running": None, "finished": False}
    return json.loads(path.read_text()) if path.is_file() else empty


def read(out: Path, step: str) -> dict[str, Any]:
    """Measurements of a step."""
    items: dict[str, Any] = state(out, step)["items"]
    return items


class Target(NamedTuple):
    """A target figure: reached if `found` is at least (or at most) `wanted`; None: not measured."""

    name: str
    found: float | None
    wanted: float
    at_least: bool = True

    @property
    def reached(self) -> bool | None:
        if self.found is None:
            return None
        return self.found >= self.wanted if self.at_least else self.found <= self.wanted


def row_of(out: Path, case: str) -> dict[str, Any]:
    """Figures of a layer's forward and backward; empty if there are none."""
    rows = read(out, "layers").get(case)
    return rows[1] if isinstance(rows, list) else {}


def quotient(a: float | None, b: float | None) -> float | None:
    """a / b; None if one of them is missing, not a number, or b is zero."""
    return a / b if a and b and a == a and b == b else None


def targets(out: Path) -> list[Target]:
    """The targets for an H200, forward and backward in bfloat16."""
    conv = row_of(out, "idpa_conv")
    steps = read(out, "train")
    # eager and compiled steps are limited by the host; CUDA graphs show the GPU's time
    kind = ", CUDA graphs" if "ms" in steps.get("IDPA, CUDA graphs", {}) else ", compiled"
    names = (f"IDPA{kind}", f"IDPA, backbone alone{kind}")
    whole, backbone = (steps.get(name, {}).get("ms") for name in names)
    memory = quotient(conv.get("fused_mib"), conv.get("reference_mib"))
    found = [
        Target("IDPA conv, reference / fused", quotient(conv.get("reference_ms"), conv.get("fused_ms")), 8),
        Target("IDPA conv, share of the larger floor", conv.get("of_floor"), 0.6),
        Target("IDPA conv, memory, fused / reference", memory, 0.1, False),
        Target("IDPA, training step / its backbone's", quotient(whole, backbone), 1.3, False),
    ]
    for case in ("idpa_conv", "idpa_classes"):
        row = row_of(out, case)
        gain = quotient(row.get("compiled_ms"), row.get("fused_ms"))
        found.append(Target(f"{case}: compiled reference / fused (missed: the kernel goes)", gain, 1.3))
    return found


def shown(value: Any, form: str = ".3f") -> str:
    return "–" if value is None or value != value else format(value, form)


def target_lines(out: Path) -> list[str]:
    lines = ["## Targets", "", "| target | wanted | found | |", "|---|---:|---:|---|"]
    for one in targets(out):
        word = {True: "reached", False: "missed", None: "not measured"}[one.reached]
        sign = "≥" if one.at_least else "≤"
        lines.append(f"| {one.name} | {sign} {one.wanted:g} | {shown(one.found, '.2f')} | {word} |")
    return lines


def check_lines(out: Path) -> list[str]:
    lines = ["", "## Correctness", "", "| layer, type | error | at most | |", "|---|---:|---:|---|"]
    for name, one in read(out, "check").items():
        if "error" in one and "tolerance" not in one:
            lines.append(f"| {name} | | | {flat(one['error'])} |")
        else:
            passed = "passed" if one["passed"] else "**wrong**"
            lines.append(f"| {name} | {one['error']:.1e} | {one['tolerance']:.0e} | {passed} |")
    return lines


def layer_lines(out: Path) -> list[str]:
    lines = [
        "",
        "## Layers, bfloat16",
        "",
        "| layer | | ms | of the larger floor | reference, ms | compiled reference, ms | MiB (reference) "
        "| launches (reference) |",
        "|---|---|---:|---:|---:|---:|---:|---:|",
    ]
    for key, rows in read(out, "layers").items():
        if not isinstance(rows, list):
            lines.append(f"| {key} | {flat(rows)} | | | | | | |")
            continue
        for row in rows:
            memory = f"{shown(row['fused_mib'], '.0f')} ({shown(row['reference_mib'], '.0f')})"
            lines.append(
                f"| {row['name']} | {row['what']} | {row['fused_ms']:.3f} | {row['of_floor']:.0%} "
                f"| {row['reference_ms']:.3f} | {shown(row['compiled_ms'])} | {memory} "
                f"| {row['fused_launches']} ({row['reference_launches']}) |"
            )
    return lines


def train_lines(out: Path) -> list[str]:
    steps = read(out, "train")
    lines = ["", "## Training steps", "", "| network | model | images a second | × ResNet-18's time | MiB |"]
    lines.append("|---|---|---:|---:|---:|")
    for name, one in steps.items():
        if "ms" not in one:
            lines.append(f"| {name} | {flat(one)} | | | |")
            continue
        kind = next((kind for kind in COMPILED if name.endswith(kind)), "")
        yardstick = YARDSTICK + kind
        memory = None if kind == ", CUDA graphs" else one["peak_mib"]  # graphs keep theirs between the steps
        ratio = quotient(one["ms"], steps.get(yardstick, {}).get("ms"))
        lines.append(
            f"| {name} | `{one['model']}` | {one['images_per_s']:,.0f} | {shown(ratio, '.2f')} "
            f"| {shown(memory, '.0f')} |"
        )
    return lines


def flat(value: Any) -> str:
    """A value on one line of a table, truncated."""
    text = next(iter(value.values())) if isinstance(value, dict) and len(value) == 1 else value
    return " ".join(str(text).replace("|", "/").split())[:300]


def report(settings: Settings, hardware: dict[str, Any]) -> str:
    """All measurements so far, as markdown."""
    out = settings.out
    title = (
        "# A dry run on the CPU: no figure below says anything about a GPU"
        if settings.dry_run
        else "# On a GPU"
    )
    machine_line = ", ".join(f"{key} {value}" for key, value in hardware.items())
    lines = [title, "", machine_line, ""]
    lines.append(f"Floors: {settings.bandwidth / 1e12:g} TB/s, {settings.flops / 1e12:g} TFLOP/s.")
    for rates in read(out, "machine").values():
        if "macs" in rates:
            lines.append(
                f"Measured: {rates['bytes'] / 1e12:.2f} TB/s, {2 * rates['macs'] / 1e12:.0f} TFLOP/s."
            )
    lines += ["", *target_lines(out), *check_lines(out), *layer_lines(out), *train_lines(out)]
    for step in ("tests", "onnxruntime", "torch_tensorrt"):
        lines += ["", f"## {step}", ""]
        lines += [f"- {name}: {flat(value)}" for name, value in read(out, step).items()] or ["not run yet"]
    return "\n".join(lines) + "\n"
