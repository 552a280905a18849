"""A network reads real digits, shows where it looked, and is exported: users run it when they begin.

``make demo``. Every step is one call of the ``capszoo`` command, printed before it runs; the files are in ``demo/``
afterwards. Nothing is downloaded.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
OUT = ROOT / "demo"
MODEL = "resnet20_routingcaps.mnist"  # routing pooling's capsules; shown in every step
OTHER = "idpa_cnn.mnist"  # inverted dot-product attention routing, on the same digits
DIGITS = "capszoo/assets"


def step(title: str, *arguments: str) -> None:
    """Print and run one ``capszoo`` command; stop the demo if it fails."""
    print(f"\n{title}\n$ capszoo {shlex.join(arguments)}", flush=True)
    # no network access: all files of the demo are in the repository
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    code = subprocess.run([sys.executable, "-m", "capszoo", *arguments], cwd=ROOT, env=environment).returncode
    if code:
        sys.exit(f"error: the demo stopped: capszoo {arguments[0]} ended with exit code {code}")


def main() -> None:
    if not list((ROOT / DIGITS).glob("*.png")):
        sys.exit(f"error: no images in {DIGITS}: the checkout is incomplete")
    OUT.mkdir(exist_ok=True)
    step("1. What are these digits?", "predict", MODEL, DIGITS, "--topk", "2")
    step("2. Another routing on the same digits", "predict", OTHER, DIGITS, "--topk", "1")
    picture = ("heatmap", MODEL, f"{DIGITS}/digit_0.png", "--out", "demo/heat.png")
    step("3. Where did the capsules look?", "explain", *picture)
    file = ("--out", f"demo/{MODEL}.onnx", "--verify-data", DIGITS)
    step("4. The same network as an ONNX file, verified against the original", "export", MODEL, *file)
    print("\nThe files lie here:")
    for path in sorted(OUT.iterdir()):
        print(f"  demo/{path.name}  ({path.stat().st_size / 1024:,.0f} KiB)")


if __name__ == "__main__":
    main()
