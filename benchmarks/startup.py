"""Seconds that commands take which load no model: developers run it when imports change.

``python benchmarks/startup.py``. Each command runs in a new process, three times after one run that fills the disk
cache; the table has every time and the peak memory. The budget is half a second; ``--budget`` fails if
the fastest run exceeds it.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

#: Half a second: the budget of a command that computes nothing.
BUDGET_S = 0.5

COMMANDS: tuple[tuple[str, ...], ...] = (
    ("--help",),
    ("--version",),
    ("list",),
    ("list", "mnist", "--pretrained"),
    ("info", "idpa_resnet"),
    ("predict", "--help"),
    ("predict", "idpa_resnt", "digit.png"),
    ("train", "idpa_resnet.cifar1"),
    ("nosuch",),
)

_MEASURE = "import resource, runpy, sys, atexit\n" + (
    "atexit.register(lambda: print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, file=sys.stderr))\n"
    "sys.argv[0] = 'capszoo'\nrunpy.run_module('capszoo', run_name='__main__')"
)


def completion_environment(words: str) -> dict[str, str]:
    """Environment that bash's completion sets before it calls the command."""
    count = len(words.split()) - (0 if words.endswith(" ") else 1)
    return {"_CAPSZOO_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(count)}


def run(arguments: tuple[str, ...], more: dict[str, str]) -> tuple[float, int]:
    """Seconds and peak KiB of one process."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **more}
    start = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-c", _MEASURE, *arguments], env=environment, capture_output=True, text=True
    )
    seconds = time.perf_counter() - start
    if "Traceback" in done.stderr:
        raise SystemExit(f"error: {' '.join(arguments)} failed: {done.stderr.splitlines()[-2]}")
    return seconds, int(done.stderr.split()[-1])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--budget", action="store_true", help="fail where a fastest run exceeds half a second"
    )
    options = parser.parse_args()
    words = "capszoo predict idpa_"
    rows: list[tuple[str, tuple[str, ...], dict[str, str]]]
    rows = [(" ".join(("capszoo", *command)), command, {}) for command in COMMANDS]
    rows.append((f"completion of {words}", (), completion_environment(words)))
    print("| command | seconds | peak MB |\n|---|---|---:|")
    slow = []
    for title, command, environment in rows:
        run(command, environment)
        measured = [run(command, environment) for _ in range(3)]
        times = ", ".join(f"{seconds:.2f}" for seconds, _ in measured)
        print(f"| `{title}` | {times} | {max(kib for _, kib in measured) * 1024 / 1e6:.0f} |")
        if min(seconds for seconds, _ in measured) > BUDGET_S:
            slow.append(title)
    if slow and options.budget:
        print(f"over {BUDGET_S} s: {', '.join(slow)}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
