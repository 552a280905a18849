"""AOTInductor: the package equals eager, and the portable program is compiled again by the printed command."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from capszoo.errors import CapszooError
from capszoo.export import to_aoti, to_onnx
from capszoo.export.bundle import check_bundle, compare_bundle, export_bundle, open_runner
from capszoo.export.compare import EagerRunner
from capszoo.export.to_onnx import ExportError
from tests.support.errors import assert_names, refuses
from tests.support.toys import ToyCaps

pytest.importorskip("onnxruntime")

needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")


@pytest.mark.slow
@needs_compiler
def test_bundle_with_a_package(tmp_path: Path, root: Path) -> None:
    out = tmp_path / "toy"
    model = ToyCaps().eval()
    manifest = export_bundle(
        model, out, formats=("onnx", "aoti"), batch=(1, 2, 5), gate="quick", outputs=("scores", "poses")
    )
    described = manifest["engines"]["aoti"]
    assert described["device"] == ("cuda" if torch.cuda.is_available() else "cpu")
    assert described["share_of_largest_output"] <= 1e-4
    assert "a batch of 1" in (out / "README.md").read_text(), "what PyTorch's own check refuses"
    assert {described["file"], "program.pt2"} <= manifest["files"].keys() and check_bundle(out).passed
    result = compare_bundle(out, ("onnxruntime", "aoti"), batches=(1, 5), repeats=1)
    assert result["differences"][0]["relative"] <= 1e-4

    # the program, compiled again by the command that the bundle states
    command = shlex.split(described["recompile"].replace("model.pt2", "again.pt2"))
    assert command[0] == "python"
    done = subprocess.run(
        [sys.executable, *command[1:], "--device", "cpu"],
        cwd=out,
        capture_output=True,
        text=True,
        timeout=280,
        env={**os.environ, "PYTHONPATH": str(root)},
    )
    assert done.returncode == 0, done.stderr
    images = np.random.default_rng(0).standard_normal((3, 1, 10, 10), dtype=np.float32)
    again = to_aoti.AotiRunner(out / "again.pt2")(images)
    runner = open_runner("aoti", out)
    for wrong in (images[:, :, :9, :9], images.astype(np.float64)):
        with refuses(CapszooError, names=["float32", "1", "10"]):
            runner(wrong)
    job = to_onnx.prepare(model, outputs=("scores", "poses"))
    for mine, theirs in zip(again, EagerRunner(job.original)(images), strict=True):
        np.testing.assert_allclose(mine, theirs, atol=1e-5)


def package(job: to_onnx.PreparedModel, factor: float) -> type:
    """In place of the runner of a compiled package: the original's answers, times a factor."""

    class Package:
        name = "aoti"

        def __init__(self, path: Path, device: str, *spec: object) -> None:
            assert path.read_text() == "package"

        def __call__(self, images: np.ndarray) -> list[np.ndarray]:
            return [output * factor for output in EagerRunner(job.original)(images)]

    return Package


def compiled(program: object, path: Path, device: str) -> Path:
    """In place of the compiler."""
    path.write_text("package")
    return path


def test_a_package_that_differs_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = to_onnx.prepare(ToyCaps(1).eval(), batch=(1, 2, 2))
    monkeypatch.setattr(to_aoti, "compile_program", compiled)
    monkeypatch.setattr(to_aoti, "AotiRunner", package(job, 1.01))
    with refuses(ExportError, names=["1.0e-02"]):
        to_aoti.write(job, tmp_path)
    assert (tmp_path / "program.pt2").is_file()


def test_no_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch._inductor.config.cpp, "cxx", (None, "no-such-compiler"))
    program = to_onnx.prepare(ToyCaps(1).eval()).trace()
    with refuses(ExportError, names=["no-such-compiler", "C++", "install"]):
        to_aoti.compile_program(program, tmp_path / "x.pt2", "cpu")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_package_for_another_device(tmp_path: Path) -> None:
    with refuses(CapszooError, names=["CUDA"]):
        to_aoti.AotiRunner(tmp_path / "x.pt2", "cuda")


def test_a_package_takes_images_in_rows_whatever_their_memory_order() -> None:
    """Compiled code assumes the strides of its example input."""
    runner = to_aoti.AotiRunner.__new__(to_aoti.AotiRunner)
    runner.device, runner.size = "cpu", None
    runner.model = lambda x: [x.is_contiguous() * x]
    pixels = np.random.default_rng(0).standard_normal((2, 4, 5, 3), dtype=np.float32).transpose(0, 3, 1, 2)
    assert not pixels.flags.c_contiguous
    np.testing.assert_array_equal(runner(pixels)[0], pixels)


def test_the_command_ends_with_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def main(*arguments: object) -> int:
        return to_aoti.main([*map(str, arguments), "--trust"])

    assert main(tmp_path / "missing.pt2", tmp_path / "out.pt2") == 1
    (tmp_path / "bad.pt2").write_text("no program")
    assert main(tmp_path / "bad.pt2", tmp_path / "out.pt2", "--device", "cpu") == 1
    assert main(tmp_path / "bad.pt2", tmp_path, "--device", "cpu") == 1
    *lines, last = capsys.readouterr().err.splitlines()
    assert f"{tmp_path} is a folder" in last
    if not torch.cuda.is_available():
        assert main(tmp_path / "bad.pt2", tmp_path / "out.pt2", "--device", "cuda") == 1
        assert_names(capsys.readouterr().err, ["CUDA"])
    assert len(lines) == 2 and lines[0].startswith("error: there is no file")
    assert "no program of torch.export can be read" in lines[1]
    assert [file.name for file in tmp_path.iterdir()] == ["bad.pt2"]


def test_a_program_is_read_only_if_it_is_trusted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.export, "load", lambda *_: pytest.fail("it was read"))
    (tmp_path / "program.pt2").write_text("any")
    assert to_aoti.main([str(tmp_path / "program.pt2"), str(tmp_path / "out.pt2")]) == 1
    assert_names(capsys.readouterr().err, ["--trust"])


def test_a_package_that_is_compiled_again_is_compared_with_the_stored_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = ToyCaps(1).eval()
    out = tmp_path / "toy"
    export_bundle(model, out, gate="quick", batch=(1, 2, 4), outputs=("poses", "scores"))
    torch.export.save(to_onnx.prepare(model).trace(), str(out / "program.pt2"))
    job = to_onnx.prepare(model, outputs=("poses", "scores"))
    monkeypatch.setattr(to_aoti, "compile_program", compiled)
    monkeypatch.setattr(to_aoti, "AotiRunner", package(job, 1.0))
    command = [str(out / "program.pt2"), str(out / "model.pt2"), "--device", "cpu", "--trust"]
    assert to_aoti.main(command) == 0 and "of the largest output on 4 inputs" in capsys.readouterr().out
    assert (out / "model.pt2").read_text() == "package"
    (out / "model.pt2").unlink()
    monkeypatch.setattr(to_aoti, "AotiRunner", package(job, 1.01))
    assert to_aoti.main(command) == 1 and not (out / "model.pt2").exists()
    assert_names(capsys.readouterr().err, ["1.0e-02"])
