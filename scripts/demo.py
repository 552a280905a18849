"""``make demo``: a capsule network with bundled weights reads real digits, shows where it looked, and is exported.

Every step is one call of the ``capszoo`` command, printed before it runs; the files lie in ``demo/`` afterwards.
Nothing is downloaded.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
OUT = ROOT / "demo"
MODEL = "resnet20_routingcaps.mnist"


def step(title: str, *arguments: str) -> None:
    """Print and run one ``capszoo`` command; stop the demo where it fails."""
    print(f"\n{title}\n$ capszoo {shlex.join(arguments)}", flush=True)
    # the network must not be needed: what the demo uses is in the repository
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    code = subprocess.run([sys.executable, "-m", "capszoo", *arguments], cwd=ROOT, env=environment).returncode
    if code:
        sys.exit(f"error: the demo stopped: capszoo {arguments[0]} ended with exit code {code}")


def main() -> None:
    digits = sorted((ROOT / "capszoo" / "assets").glob("*.png"))
    if not digits:
        sys.exit("error: no images in capszoo/assets: the checkout is incomplete")
    OUT.mkdir(exist_ok=True)
    images = [str(path.relative_to(ROOT)) for path in digits]
    step("1. What are these digits?", "predict", MODEL, *images, "--topk", "3")
    step("2. Where did the capsules look?", "explain", MODEL, images[0], "--out", "demo/heat.png")
    step("3. The same network as an ONNX file, proved equal", "export", MODEL, "--out", f"demo/{MODEL}.onnx")
    print("\nThe files lie here:")
    for path in sorted(OUT.iterdir()):
        print(f"  demo/{path.name}  ({path.stat().st_size / 1024:,.0f} KiB)")


if __name__ == "__main__":
    main()
