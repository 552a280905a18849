"""Cost of training by the number of routing iterations, as a picture: maintainers run it when engines change.

    python benchmarks/iterations.py             # measure on an idle machine (a few minutes), then draw
    python benchmarks/iterations.py --draw      # draw what is stored

Each point is a row of ``benchmarks/models.py``: a training step against ResNet-18's, taken in turns, and the peak
memory of a fresh process above its memory at the start. The results are in benchmarks/results/iterations.json, the
picture is docs/pictures/cost_by_iterations.svg.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # a plain checkout works too

from capszoo.explain.plotting import new_figure, save

RESULTS = ROOT / "benchmarks" / "results" / "iterations.json"
PICTURE = ROOT / "docs" / "pictures" / "cost_by_iterations.svg"

#: Name in the picture → model of ``benchmarks/models.py``, without its iterations.
MODELS = {
    "idpa_resnet (inverted dot-product attention)": "idpa_resnet:",
    "capsnet_dynamic (dynamic routing)": "capsnet_dynamic:",
    "capsnet_em_norb_small, 1×28×28 (EM)": "capsnet_em_norb_small:in_chans=1,img_size=28,num_classes=10,",
    "resnet20_routingcaps (routing capsules)": "resnet20_routingcaps:",
}

ITERATIONS = (1, 2, 3, 5)


def spec(model: str, iterations: int) -> str:
    """Model of ``benchmarks/models.py`` with a number of iterations."""
    return f"{model}routing_iters={iterations}"


def source(results: dict[str, Any]) -> str:
    """The results that a picture was drawn from, as it states them."""
    return f"results {hashlib.sha256(json.dumps(results).encode()).hexdigest()[:16]}"


def measure() -> None:
    command = [sys.executable, "benchmarks/models.py", "--batch", "32", "--iters", "5", "--warmup", "2"]
    command += ["--train", "--no-forward", "--memory", "--out", str(RESULTS), "--models"]
    command += [spec(model, iterations) for model in MODELS.values() for iterations in ITERATIONS]
    subprocess.run(command, cwd=ROOT, check=True)


def draw(results: dict[str, Any], path: Path) -> Path:
    """Draw the step's time and the memory of each model against its iterations."""
    rows = {row["model"]: row for row in results["rows"]}
    figure = new_figure(9.5, 4.2)
    times, memory = figure.subplots(1, 2)
    for name, model in MODELS.items():
        found = [rows[spec(model, iterations)] for iterations in ITERATIONS]
        times.plot(ITERATIONS, [row["train_ratio"] for row in found], marker="o", label=name)
        memory.plot(ITERATIONS, [row["peak_over_start_mib"] for row in found], marker="o")
    for axis, title in ((times, "training step, × ResNet-18's"), (memory, "peak memory above start-up, MiB")):
        axis.set(xlabel="routing iterations", xticks=ITERATIONS)
        axis.set_title(title, fontsize=10)
        axis.set_ylim(bottom=0)
        axis.grid(alpha=0.3)
    about = results["settings"]
    figure.suptitle(
        f"Cost of routing iterations: training in float32, batch {about['batch']}, {about['processor']}, "
        f"medians of n = {about['iters']} pairs",
        fontsize=10,
    )
    figure.legend(loc="outside lower center", ncols=2, fontsize=8, frameon=False)
    return save(figure, path, source(results))


def main() -> None:
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("--draw", action="store_true", help="measure nothing")
    if not parser.parse_args().draw:
        measure()
    print(f"written: {draw(json.loads(RESULTS.read_text(encoding='utf-8')), PICTURE)}")


if __name__ == "__main__":
    main()
