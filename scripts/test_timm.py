"""timm's own tests of models, unmodified, on ours: developers run it when a model changes.

``make test-timm`` downloads the source distribution of the *installed* timm with pip. ``tests/test_models.py`` and
``conftest.py`` are unpacked into ``.timm-tests/`` (git-ignored) and kept for the next run. ``tests/timm_plugin.py``
selects the tests and gives reasons for skipping. Further arguments are passed to pytest: ``-k test_model_forward
-x``.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import tempfile
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
WANTED = ("tests/test_models.py", "tests/conftest.py", "pyproject.toml")


def fetch(folder: Path, timm_version: str) -> None:
    """Download timm's source distribution and unpack ``WANTED`` into ``folder``.

    Raises:
        SystemExit: the download failed, or the archive contains no test file.
    """
    print(f"downloading the source distribution of timm {timm_version}", flush=True)
    with tempfile.TemporaryDirectory() as download:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        command += [
            "--disable-pip-version-check",
            "--no-binary",
            "timm",
            f"timm=={timm_version}",
            "--dest",
            download,
        ]
        if subprocess.run(command).returncode:
            sys.exit(f"error: pip could not download the source distribution of timm {timm_version}")
        with tarfile.open(next(Path(download).glob("timm-*.tar.gz"))) as archive:
            for name in WANTED:
                try:
                    archive.extract(f"timm-{timm_version}/{name}", folder.parent, filter="data")
                except KeyError:
                    sys.exit(f"error: the source distribution of timm {timm_version} carries no {name}")


def main(arguments: list[str]) -> int:
    timm_version = version("timm")
    folder = ROOT / ".timm-tests" / f"timm-{timm_version}"
    if not all((folder / name).is_file() for name in WANTED):
        fetch(folder, timm_version)
    command = [sys.executable, "-m", "pytest", str(folder / "tests" / "test_models.py")]
    command += ["-c", str(folder / "pyproject.toml"), "--rootdir", str(folder), "-p", "tests.timm_plugin"]
    # timm's per-test limits are meant for a faster machine than two shared cores; TIMEOUT overrides them.
    environment = {"TIMEOUT": "1200", **os.environ}
    return subprocess.run([*command, *arguments], cwd=ROOT, env=environment).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
