"""The README: generated tables are up to date, examples run, links lead somewhere."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import capszoo


def _documents(root: Path) -> list[Path]:
    return [root / "README.md", root / "CONTRIBUTING.md", *sorted((root / "docs").glob("*.md"))]


def test_generated_files_are_up_to_date(root: Path) -> None:
    command = [sys.executable, str(root / "scripts" / "generate.py"), "--check"]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_model_and_checkpoint_is_listed(root: Path) -> None:
    text = (root / "README.md").read_text(encoding="utf-8")
    for name in (*capszoo.list_models(), *capszoo.list_pretrained()):
        assert f"| `{name}` |" in text


def test_python_examples_run(root: Path, tmp_path: Path) -> None:
    texts = [(root / name).read_text(encoding="utf-8") for name in ("README.md", "docs/fine-tune.md")]
    blocks = [block for text in texts for block in re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)]
    assert len(blocks) >= 3
    for block in blocks:
        code = f"import sys; sys.path.insert(0, {str(root)!r})\n{block}"
        done = subprocess.run(
            [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=240
        )
        assert done.returncode == 0, f"{block}\n{done.stderr}"


def _commands(root: Path) -> set[str]:
    """Sub-commands of ``capszoo`` that the documents use."""
    found = set()
    for path in _documents(root):
        found |= set(
            re.findall(r"^\$? ?capszoo ([a-z]+)", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
        )
    return found


def test_commands_of_the_documents_exist(root: Path) -> None:
    from typer.main import get_command

    from capszoo.cli import app

    used = _commands(root)
    assert {"list", "info", "predict", "explain", "export", "train"} <= used
    assert used <= set(get_command(app).commands)


def test_make_targets_of_the_documents_exist(root: Path) -> None:
    makefile = (root / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z-]+):", makefile, flags=re.MULTILINE))
    for path in _documents(root):
        used = set(
            re.findall(r"`make ([a-z-]+)[ `]|^make ([a-z-]+)", path.read_text(encoding="utf-8"), re.MULTILINE)
        )
        for target in {name for pair in used for name in pair if name}:
            assert target in targets, f"{path.name} names make {target}"


def test_links_lead_somewhere(root: Path) -> None:
    for path in _documents(root):
        for link in re.findall(r"\]\(([^)#]+)[^)]*\)", path.read_text(encoding="utf-8")):
            if "://" not in link:
                assert (path.parent / link).exists(), f"{path.name} links to {link}"
