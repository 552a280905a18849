"""Freed memory is kept where that is asked for, and only there."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

#: Page faults of twenty blocks of 40 MiB that come and go, loaded without PyTorch, which has memory of its own.
CODE = """
import resource, runpy, sys
kept = runpy.run_path(sys.argv[1])["keep_freed_memory"]()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(20):
    block = b"x" * (40 << 20)
    del block
print(int(kept), resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def kept_and_faults(root: Path, value: str) -> tuple[bool, int]:
    command = [sys.executable, "-c", CODE, str(root / "capszoo" / "_utils" / "process.py")]
    env = {**os.environ, "CAPSZOO_KEEP_MEMORY": value}
    kept, faults = subprocess.check_output(command, env=env, text=True).split()
    return bool(int(kept)), int(faults)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="without glibc memory is left as it is")
def test_blocks_that_come_and_go_are_new_once(root: Path) -> None:
    kept, faults = kept_and_faults(root, "1")
    forbidden, as_it_is = kept_and_faults(root, "0")
    assert kept and not forbidden and 10 * faults < as_it_is


def test_without_glibc_nothing_is_done(root: Path) -> None:
    code = f"""
import ctypes, runpy, sys
class Libc: pass
ctypes.CDLL = lambda name: Libc()
keep = runpy.run_path({str(root / "capszoo" / "_utils" / "process.py")!r})["keep_freed_memory"]
assert keep() is False
sys.platform = "darwin"
ctypes.CDLL = None  # is not asked for
assert keep() is False
"""
    subprocess.run([sys.executable, "-c", code], check=True)
