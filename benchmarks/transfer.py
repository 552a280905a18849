"""Does a pretrained backbone help a capsule head? CIFAR-100 to 5,000 images of CIFAR-10, with and without.

    CAPSZOO_DATA=FOLDER python benchmarks/transfer.py --out DIR --threads 1    # the table of docs/fine-tune.md
    python benchmarks/transfer.py --photos photos --seed 0                     # the images of one seed as a folder
    python benchmarks/transfer.py --out DIR --tiny                             # every step in a few minutes

Every step is a `capszoo` command, run in DIR as printed in docs/fine-tune.md; all take over an hour. ResNet-20
is trained on CIFAR-100, its weights become a folder, and each head is fine-tuned from them and from random weights on
the same 500 training images per class of CIFAR-10, a fifth of which is held out for early stopping. Only the weights of
the backbone differ, and the layers' rates, which are scaled for pretrained weights. Test accuracy is measured
once, at the end.

The same command resumes: a run that has a line in DIR/runs.jsonl is skipped, an interrupted one continues.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # a plain checkout works too

RESULTS = ROOT / "benchmarks" / "results" / "transfer.json"
SEEDS = (0, 1, 2)
#: Head -> its settings. A grid of 4x4 capsule positions trains about as fast as average pooling.
HEADS: dict[str, tuple[str, ...]] = {"idpa": ("model_args.max_grid=4",), "avg": ()}
PER_CLASS, EPOCHS, PRETRAIN_EPOCHS = 500, 10, 8
TINY = ("epochs=1", "data.limit=256")


def _sets(settings: tuple[str, ...] | list[str]) -> list[str]:
    return [word for setting in settings for word in ("--set", setting)]


def pretrain_command(extra: tuple[str, ...] = ()) -> list[str]:
    """ResNet-20 with average pooling on CIFAR-100, by the recipe that the comparison of heads uses on CIFAR-10."""
    command = ["train", "resnet20_avg.cifar10", "--profile", "comparison", "--epochs", str(PRETRAIN_EPOCHS)]
    sets = ["data.name=cifar100", "tag=cifar100", "clip_grad=null", *extra]  # this head needs no clipping
    return [*command, *_sets(sets), "--out", "runs/cifar100"]


def folder_command() -> list[str]:
    """The run as a folder for `local-dir:`: config.json and model.safetensors."""
    return ["publish", "runs/cifar100", "me/backbone", "--dry-run", "--out", "backbone"]


def run_folder(head: str, seed: int, scratch: bool) -> str:
    return f"runs/{head}.{seed}" + (".scratch" if scratch else "")


def finetune_command(head: str, seed: int, scratch: bool, extra: tuple[str, ...] = ()) -> list[str]:
    command = ["finetune", "--backbone", "local-dir:backbone", "--head", head, "--data", f"photos.{seed}"]
    command += ["--tag", "photos", "--epochs", str(EPOCHS), "--seed", str(seed)]
    command += _sets(["data.augment.flip=true", *HEADS[head], *extra])
    return [*command, *(["--from-scratch"] if scratch else []), "--out", run_folder(head, seed, scratch)]


def eval_command(head: str, seed: int, scratch: bool) -> list[str]:
    return ["eval", run_folder(head, seed, scratch), "--dataset", "cifar10"]


def write_photos(folder: Path, seed: int, per_class: int = PER_CLASS) -> None:
    """Write training images of CIFAR-10 as PNG files, a sub-folder per class; the seed samples them."""
    import torch
    from PIL import Image

    from capszoo.data import ImageSet, load_dataset

    images = load_dataset("cifar10", "train")
    assert isinstance(images, ImageSet)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(seed))
    unfinished = folder.with_name(f"{folder.name}.unfinished")
    for kind, label in enumerate(images.spec.label_names):
        place = unfinished / label
        place.mkdir(parents=True, exist_ok=True)
        for index in order[images.labels[order] == kind][:per_class].tolist():
            Image.fromarray(images.images[index].permute(1, 2, 0).numpy()).save(place / f"{index:05d}.png")
    unfinished.rename(folder)


def capszoo(command: list[str], out: Path, threads: int, capture: bool = False) -> str:
    """Run a `capszoo` command in ``out``, in a separate process.

    Raises:
        SystemExit: the command failed.
    """
    count = str(threads)
    environment = {**os.environ, "OMP_NUM_THREADS": count, "MKL_NUM_THREADS": count}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    print(f"$ capszoo {shlex.join(command)}", flush=True)
    done = subprocess.run(
        [sys.executable, "-m", "capszoo", *command],
        cwd=out,
        env=environment,
        text=True,
        stdout=subprocess.PIPE if capture else None,
    )
    if done.returncode:
        sys.exit(f"error: capszoo {command[0]} failed; the same command goes on from here")
    return done.stdout or ""


def metadata(run: Path) -> dict[str, Any]:
    """The metadata of a finished run."""
    (weights,) = run.glob("*.safetensors")
    found: dict[str, Any] = json.loads(weights.with_suffix(".json").read_text(encoding="utf-8"))
    return found


def measure(head: str, seed: int, scratch: bool, out: Path, threads: int, tiny: bool) -> dict[str, Any]:
    """Train and evaluate one run."""
    capszoo(finetune_command(head, seed, scratch, TINY if tiny else ()), out, threads)
    wanted = [*eval_command(head, seed, scratch), "--json", *(["--limit", "500"] if tiny else [])]
    test = json.loads(capszoo(wanted, out, threads, capture=True))
    found = metadata(out / run_folder(head, seed, scratch))
    return {
        "head": head,
        "seed": seed,
        "pretrained": not scratch,
        "top1": test["top1"],
        "n": test["n"],
        "validation": found["metrics"]["validation"]["top1"],
        "parameters": found["num_params"],
        "seconds": found["train_seconds"],
    }


def stored(file: Path = RESULTS) -> dict[str, Any]:
    """The stored results; empty without measurements."""
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}


def _shown(values: list[float]) -> str:
    """Mean ± (sample) standard deviation, if there are several values."""
    spread = f" ± {statistics.stdev(values):.1f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.1f}{spread}"


def table(results: dict[str, Any]) -> str:
    """Test accuracy with and without the backbone's weights, and their difference seed by seed."""
    lines = [
        "| head | parameters | pretrained, % | from scratch, % | difference, points | seeds |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for head in HEADS:
        mine = [row for row in results.get("rows", []) if row["head"] == head]
        sides = {
            kind: {r["seed"]: r["top1"] for r in mine if r["pretrained"] is kind} for kind in (True, False)
        }
        seeds = sorted(set(sides[True]) & set(sides[False]))
        if not seeds:
            continue
        tuned, scratch = ([sides[kind][seed] for seed in seeds] for kind in (True, False))
        gains = [a - b for a, b in zip(tuned, scratch, strict=True)]
        cells = [
            f"`{head}`",
            f"{mine[0]['parameters']:,}",
            *map(_shown, (tuned, scratch, gains)),
            str(len(seeds)),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) if len(lines) > 2 else ""


def section(results: dict[str, Any] | None = None) -> str:
    """The section of docs/fine-tune.md: the commands of one seed, and the table."""
    results = stored() if results is None else results
    commands = [
        pretrain_command(),
        folder_command(),
        finetune_command("idpa", 0, False),
        finetune_command("idpa", 0, True),
        eval_command("idpa", 0, False),
        eval_command("idpa", 0, True),
    ]
    lines = ["```sh", "python benchmarks/transfer.py --photos photos.0 --seed 0"]
    lines += [f"capszoo {shlex.join(command)}" for command in commands]
    lines += ["```", ""]
    found = table(results)
    if not found:
        return "\n".join([*lines, "No figures yet: `python benchmarks/transfer.py --out DIR` makes them."])
    backbone = results["backbone"]
    return "\n".join(
        [
            *lines,
            f"Top-1 on all {results['rows'][0]['n']:,} test images, mean ± standard deviation over the seeds (of the "
            "images drawn, their order and new weights), by `python benchmarks/transfer.py --out DIR`. The backbone "
            f"reached {backbone['test']:.1f}% on the test images of CIFAR-100 after {backbone['epochs']} epochs. "
            "Measured with "
            f"{backbone['hardware']}, torch {backbone['torch']}:",
            "",
            found,
        ]
    )


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="folder of the runs; the same folder resumes")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--heads", nargs="+", choices=list(HEADS), default=list(HEADS))
    parser.add_argument("--seeds", type=int, nargs="+", default=list(SEEDS))
    parser.add_argument(
        "--json", type=Path, help="file of the results (default: the one that the page is made of)"
    )
    parser.add_argument(
        "--tiny", action="store_true", help="a trial: one short epoch each, in DIR/tiny alone"
    )
    parser.add_argument("--photos", type=Path, metavar="FOLDER", help="only write the images of one --seed")
    parser.add_argument("--seed", type=int, default=0, help="of --photos")
    args = parser.parse_args(argv)
    if (args.out is None) == (args.photos is None):
        parser.error("give --out DIR or --photos FOLDER")
    if args.photos is not None and args.photos.exists():
        parser.error(f"{args.photos} exists")
    return args


def backbone_of(out: Path, threads: int, tiny: bool) -> dict[str, Any]:
    """Create the pretrained backbone as DIR/backbone; return its accuracy on CIFAR-100."""
    if not (out / "backbone").is_dir():
        capszoo(pretrain_command((*TINY, "schedule.warmup_epochs=0") if tiny else ()), out, threads)
        capszoo(folder_command(), out, threads)
    found = metadata(out / "runs" / "cifar100")
    metrics = {split: found["metrics"][split]["top1"] for split in ("validation", "test")}
    told = {"epochs": found["recipe"]["epochs"], "seconds": found["train_seconds"]}
    return {**metrics, **told, "hardware": found["hardware"], "torch": found["versions"]["torch"]}


def measure_all(args: argparse.Namespace, out: Path, target: Path) -> list[dict[str, Any]]:
    """Run everything that has no line in runs.jsonl yet; results are written after each."""
    backbone = backbone_of(out, args.threads, args.tiny)
    log = out / "runs.jsonl"
    rows = [json.loads(line) for line in log.read_text().splitlines()] if log.is_file() else []
    done = {(row["head"], row["seed"], row["pretrained"]) for row in rows}
    for head in args.heads:
        for seed in args.seeds:
            photos = out / f"photos.{seed}"
            if not photos.is_dir():
                write_photos(photos, seed, 20 if args.tiny else PER_CLASS)
            for scratch in (False, True):
                if (head, seed, not scratch) in done:
                    continue
                row = measure(head, seed, scratch, out, args.threads, args.tiny)
                rows.append(row)
                with log.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(row) + "\n")
                write_results(target, backbone, rows)
    write_results(target, backbone, rows)
    return rows


def write_results(target: Path, backbone: dict[str, Any], rows: list[dict[str, Any]]) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"backbone": backbone, "rows": rows}, indent=1)
    target.write_text(text + "\n", encoding="utf-8")


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    if args.photos is not None:
        write_photos(args.photos, args.seed)
        return 0
    out: Path = args.out.resolve() / (
        "tiny" if args.tiny else ""
    )  # a trial's runs are not those of the table
    out.mkdir(parents=True, exist_ok=True)
    target = args.json or (out / "transfer.json" if args.tiny else RESULTS)
    print(table({"rows": measure_all(args, out, target)}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
