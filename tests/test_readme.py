"""The README: generated tables are up to date, examples run, links lead somewhere."""

from __future__ import annotations

import argparse
import functools
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support import load_script, packed
from tests.support.command import parse
from tests.support.recipes import write_photos


def _documents(root: Path) -> list[Path]:
    pages = sorted((root / "docs").rglob("*.md"))
    return [root / "README.md", root / "CONTRIBUTING.md", root / "recipes" / "README.md", *pages]


def test_generated_files_are_up_to_date(root: Path) -> None:
    command = [sys.executable, str(root / "scripts" / "generate.py"), "--check"]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_changelog_states_replaced_weights_beside_the_present_ones(root: Path) -> None:
    rows = re.findall(
        r"^\| `(\S+)`[^|]*\| ([\d., ]+) \| ([\d.]+) \|$",
        (root / "CHANGELOG.md").read_text("utf-8"),
        re.MULTILINE,
    )
    assert len(rows) >= 18
    for name, earlier, now in rows:
        metadata = json.loads((root / "capszoo" / "weights" / f"{name}.json").read_text("utf-8"))
        assert float(now) == round(metadata["metrics"]["test"]["top1"], 2), name
        assert now not in earlier.split(", ")


def test_python_examples_run(root: Path, tmp_path: Path) -> None:
    write_photos(packed(root, "mnist"), tmp_path / "photos", {"digit 1": 10, "digit 3": 10})
    texts = [(root / name).read_text(encoding="utf-8") for name in ("README.md", "docs/fine-tune.md")]
    blocks = [block for text in texts for block in re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)]
    assert len(blocks) >= 3
    # in one process, which loads torch once; each with names of its own, as a reader pastes it
    code = f"import sys; sys.path.insert(0, {str(root)!r})\n"
    code += "".join(f"print({block!r})\nexec({block!r}, {{'__name__': '__main__'}})\n" for block in blocks)
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert (tmp_path / "runs" / "photos" / "labels.txt").read_text() == "digit 1\ndigit 3\n"


def test_the_launch_line_of_timm_s_train_script(root: Path, tmp_path: Path) -> None:
    """The documented command, with a script in the place of timm's `train.py` that makes its calls by our names."""
    text = (root / "docs" / "fine-tune.md").read_text(encoding="utf-8")
    (command,) = re.findall(r"^python -c \"import capszoo.*?(?=```)", text, flags=re.DOTALL | re.MULTILINE)
    _, _, code, *arguments = shlex.split(command.replace("\\\n", " "))
    (tmp_path / "train.py").write_text(_STAND_IN)
    environment = {**os.environ, "PYTHONPATH": str(root)}
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=240,
        env=environment,
    )
    assert done.returncode == 0 and done.stdout.split() == ["(3,", "32,", "32)", "(2,", "4)"], done.stderr


_STAND_IN = """
import argparse, ast
import torch
from timm.data import resolve_data_config
from timm.models import create_model
from timm.optim import create_optimizer_v2, optimizer_kwargs
from timm.scheduler import create_scheduler_v2
from timm.utils import ParseKwargs

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    for name in ("--data-dir", "--model", "--opt", "--sched", "--device"):
        parser.add_argument(name)
    parser.add_argument("--pretrained", action="store_true")
    for name in ("--num-classes", "--img-size", "--epochs", "--in-chans"):
        parser.add_argument(name, type=int)
    for name in ("--lr", "--layer-decay"):
        parser.add_argument(name, type=float)
    parser.add_argument("--model-kwargs", nargs="*", default={}, action=ParseKwargs)
    args = parser.parse_args()
    args.weight_decay, args.momentum = 2e-5, 0.9
    model = create_model(
        args.model, pretrained=args.pretrained, in_chans=args.in_chans or 3, num_classes=args.num_classes,
        drop_rate=0.0, drop_path_rate=None, drop_block_rate=None, global_pool=None, bn_momentum=None, bn_eps=None,
        scriptable=False, checkpoint_path="", **args.model_kwargs,
    )
    config = resolve_data_config(vars(args), model=model)
    optimizer = create_optimizer_v2(model, **optimizer_kwargs(cfg=args))
    scheduler, _ = create_scheduler_v2(optimizer, sched=args.sched, num_epochs=args.epochs)
    scheduler.step(1)
    images = torch.rand(2, *config["input_size"])
    loss = torch.nn.functional.cross_entropy(model(images), torch.tensor([0, 3]))
    loss.backward()
    optimizer.step()
    print(config["input_size"], tuple(model(images).shape))
"""


def _code(page: str) -> tuple[list[str], str]:
    """The code blocks of a page, with continued lines joined, and the page without them."""
    fence = re.compile(r"^ *```\w*\n(.*?)^ *```", flags=re.MULTILINE | re.DOTALL)
    return [block.replace("\\\n", " ") for block in fence.findall(page)], fence.sub("", page)


def _written_commands(path: Path) -> Iterator[str]:
    """Complete `capszoo` commands of a page or a notebook; in prose those that begin with an argument."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".ipynb":
        sources = [(cell["cell_type"], "".join(cell["source"])) for cell in json.loads(text)["cells"]]
        text = "".join(
            f"```\n{source}\n```\n" if kind == "code" else f"{source}\n" for kind, source in sources
        )
    blocks, prose = _code(text)
    for block in blocks:
        yield from re.findall(r"^ *[!$]? ?(capszoo .*)", block, flags=re.MULTILINE)
    for words in (line.split() for line in re.findall(r"`(capszoo [a-z][^`]*)`", prose)):
        groups = ("explain", "data", "recipes", "state")
        arguments = words[3 if words[1] in groups else 2 :]
        if arguments and not arguments[0].startswith("-") and "[" not in " ".join(arguments):
            yield " ".join(words)


def test_commands_of_the_documents_parse(root: Path) -> None:
    documents = [*_documents(root), *sorted((root / "docs").rglob("*.ipynb"))]
    seen = {parse(line) for path in documents for line in _written_commands(path)}
    assert {"list", "info", "predict", "heatmap", "export", "train", "finetune", "eval"} <= seen


def _benchmark_commands(path: Path) -> Iterator[list[str]]:
    """Words of the `python benchmarks/…` commands of a page or a docstring; not those with a part left open."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        lines = re.findall(r"^    (python benchmarks/.*)", text, flags=re.MULTILINE)
    else:
        blocks, prose = _code(text)
        lines = [line for block in blocks for line in block.splitlines()]
        lines += [inline.replace("\n", " ") for inline in re.findall(r"`([^`]+)`", prose)]
    for line in lines:
        for command in re.findall(r"(?<!\")python3? (benchmarks/\w+\.py.*)", line):
            if not re.search(r"…|\bNAME\b", command):
                yield [word for word in shlex.split(command, comments=True) if word != "&"]


class _ParsedError(Exception):
    """Raised in place of a benchmark's run."""


def test_commands_of_the_benchmarks_parse(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parse_args = argparse.ArgumentParser.parse_args

    def stop(parser: argparse.ArgumentParser, args: Any = None) -> None:
        parse_args(parser, args)
        raise _ParsedError

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", stop)
    load, seen = functools.cache(load_script), set()
    scripts = sorted((root / "benchmarks").glob("*.py"))
    for path in [*_documents(root), *scripts]:
        for words in _benchmark_commands(path):
            monkeypatch.setattr("sys.argv", words)
            try:
                load(root / words[0]).main()
            except _ParsedError:
                seen.add(words[0])
            except SystemExit:
                raise AssertionError(f"{path.name}: {' '.join(words)}") from None
    assert {f"benchmarks/{script.name}" for script in scripts} == seen


def test_the_first_line_of_a_script_says_who_runs_it_and_when(root: Path) -> None:
    scripts = [path for folder in ("benchmarks", "scripts") for path in (root / folder).glob("*.*")]
    for path in scripts:
        if path.suffix in (".py", ".sh"):
            first, second = path.read_text(encoding="utf-8").splitlines()[:2]
            line = second if first.startswith("#!") else first
            assert re.search(r": (developers|maintainers|users|make|[a-z_]+\.py) runs? it when ", line), (
                path.name
            )


def test_make_targets_of_the_documents_exist(root: Path) -> None:
    makefile = (root / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z-]+):", makefile, flags=re.MULTILINE))
    for path in _documents(root):
        used = set(
            re.findall(r"`make ([a-z-]+)[ `]|^make ([a-z-]+)", path.read_text(encoding="utf-8"), re.MULTILINE)
        )
        for target in {name for pair in used for name in pair if name}:
            assert target in targets, f"{path.name} names make {target}"


#: Folders of the site that its build writes; tests/site looks at links into them.
GENERATED = ("families/", "commands.md", "api/")


def test_links_lead_somewhere(root: Path) -> None:
    for path in _documents(root):
        for link in re.findall(r"\]\(([^)#]+)[^)]*\)", path.read_text(encoding="utf-8")):
            if "://" not in link and not link.startswith(GENERATED):
                assert (path.parent / link).exists(), f"{path.name} links to {link}"
