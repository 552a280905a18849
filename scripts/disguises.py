"""Which of ten digits are recognised in six disguises: maintainers run it when reading of images changes.

``python scripts/disguises.py``, with the digits of ``capszoo/assets``. Each digit unchanged, in black and in white
ink on a transparent picture, inverted, off-centre on a large canvas, and small in the middle of one. Read by
``predict``'s function and by the ``infer.py`` of a newly exported bundle, without options and with the option for the
disguise. Prints a markdown table.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a plain checkout works too

from PIL import Image, ImageChops

import capszoo
from capszoo.errors import CapszooError

ASSETS = Path(capszoo.__file__).parent / "assets"

#: Disguise -> the option for it.
DISGUISES = {
    "plain": "",
    "transparent, black ink": "",
    "transparent, white ink": "",
    "inverted": "--invert",
    "off-centre": "--fit",
    "small": "--fit",
}


def disguise(digit: Image.Image, how: str) -> Image.Image:
    """A grey digit of 28x28, white on black, in one of ``DISGUISES``."""
    if how.startswith("transparent"):
        ink = 0 if "black" in how else 255
        drawn = Image.new("RGBA", digit.size, (ink, ink, ink, 0))
        drawn.putalpha(digit)
        return drawn
    if how == "inverted":
        return ImageChops.invert(digit)
    if how in ("off-centre", "small"):
        canvas = Image.new("L", (112, 112))
        canvas.paste(digit.resize((42, 42)), (4, 8) if how == "off-centre" else (35, 35))
        return canvas
    return digit


def write(folder: Path, how: str) -> list[Path]:
    """Write the ten digits as PNG files, in order."""
    folder.mkdir(parents=True, exist_ok=True)
    files = []
    for number in range(10):
        with Image.open(ASSETS / f"digit_{number}.png") as digit:
            disguise(digit.convert("L"), how).save(folder / f"{number}.png")
        files.append(folder / f"{number}.png")
    return files


def right_by_predict(model: capszoo.LoadedModel, files: Sequence[Path], option: str) -> int:
    """Number of digits that ``predict`` recognises."""
    reading = {option.removeprefix("--"): True} if option else {}
    return sum(found.label == Path(found.image).stem for found in model.predict(files, **reading))


def right_by_infer(bundle: Path, files: Sequence[Path], option: str) -> int:
    """Number of digits that a bundle's ``infer.py`` recognises."""
    command = [sys.executable, str(bundle / "infer.py"), *map(str, files), "--json", *option.split()]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found = json.loads(done.stdout)["results"]
    return sum(entry["predictions"][0]["label"] == Path(entry["image"]).stem for entry in found)


def print_table(name: str) -> None:
    """How many digits a model recognises in each disguise."""
    model = capszoo.load(name, device="cpu")
    with tempfile.TemporaryDirectory() as folder:
        bundle = model.export(Path(folder) / "bundle", gate="quick").path
        print(f"{name}, digits of ten that are read right\n")
        print("| disguise | predict | infer.py | with | predict | infer.py |\n|---|---:|---:|---|---:|---:|")
        for how, option in DISGUISES.items():
            files = write(Path(folder) / how, how)
            cells = [how, right_by_predict(model, files, ""), right_by_infer(bundle, files, "")]
            more = [right_by_predict(model, files, option), right_by_infer(bundle, files, option)]
            cells += [f"`{option}`", *more] if option else [""] * 3
            print("| " + " | ".join(map(str, cells)) + " |")
        print()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", default=["resnet20_routingcaps.mnist"])
    try:
        for name in parser.parse_args().models:
            print_table(name)
    except CapszooError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
