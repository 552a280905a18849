"""The documentation's screenshot of the app, ``docs/pictures/app.png``, in the environment of ``make site``.

``python -m tests.app.screenshots`` draws it.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

from PIL import Image

from tests.support.browser import chromium_page, draw, free_port, served, set_slider

ROOT = Path(__file__).resolve().parents[2]

MODELS = ("capsnet_dynamic.mnist", "resnet20_routingcaps.mnist")

#: The app down to the picture below the second model's slider.
WIDTH, HEIGHT = 1300, 1640


def app_page(page: Any, url: str) -> None:
    """The app with a drawn digit, its answer by two models, and a moved slider."""
    page.goto(url)
    page.wait_for_selector("#sketch canvas")
    page.click("#model-2 input")
    page.click(f"[role=option]:has-text('{MODELS[1]}')")
    draw(page, "#sketch canvas", "2")
    for column in (1, 2):
        page.wait_for_selector(f"#settled-{column} img", timeout=60_000)
    set_slider(page, "#iterations-2 input[type=range]", 1)
    page.wait_for_timeout(2000)


def save(page: Any, name: str) -> None:
    """A screenshot in 256 colours, which a page of few colours does not show."""
    with tempfile.TemporaryDirectory() as folder:
        page.screenshot(path=f"{folder}/page.png")
        with Image.open(f"{folder}/page.png") as shot:
            shot.convert("RGB").quantize(256).save(ROOT / "docs" / "pictures" / name, optimize=True)


def main() -> int:
    env = {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    app_port = free_port()
    app = [sys.executable, "-m", "capszoo", "app", *MODELS, "--port", str(app_port)]
    with tempfile.TemporaryDirectory() as folder, chromium_page(WIDTH, HEIGHT) as (page, _):
        with served(app, app_port, ROOT, env, Path(folder) / "app.log") as url:
            app_page(page, url)
            save(page, "app.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
