"""How long a drawn digit's answer takes in Chromium: ``python -m tests.app.latency`` in the site's environment.

The page measures itself: from the event that ends the stroke to the first frame that shows the answer, and to the first
one that shows couplings and reconstruction. Ends with exit code 1 where the median answer takes `LIMIT` or more.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.support.browser import chromium_page, draw, free_port, served

#: Milliseconds in which the page should show the class of a drawn digit, on a machine that does nothing else.
LIMIT = 300

#: Notes in ``window.shownAfter`` when the parts of the first column appear.
WATCH = """() => {
  const picture = (id) => {
    const image = document.querySelector(`#${id} img`);
    return image && image.complete && image.naturalWidth > 0;
  };
  const parts = {
    answer: () => document.querySelector("#status-1 strong"),
    couplings: () => picture("overlay-1"),
    reconstruction: () => picture("reconstruction-1"),
  };
  document.querySelector("#sketch canvas").addEventListener("pointerup", () => {
    const start = performance.now(), found = {};
    window.shownAfter = null;
    const look = () => {
      for (const name in parts)
        if (!(name in found) && parts[name]()) found[name] = performance.now() - start;
      if (Object.keys(found).length === Object.keys(parts).length) window.shownAfter = found;
      else requestAnimationFrame(look);
    };
    requestAnimationFrame(look);
  }, true);
}"""

EMPTY = """() => !document.querySelector("#status-1 strong") && !document.querySelector("#overlay-1 img")"""


def times_of_strokes(page: Any, count: int) -> dict[str, list[float]]:
    """Milliseconds from the end of each stroke until the page shows each part; the first stroke is not counted.

    Args:
        page: of the app, with a model that has couplings and a decoder in the first column.
        count: of strokes.
    """
    page.evaluate(WATCH)
    found: dict[str, list[float]] = {}
    for number in range(count + 1):
        page.click("#sketch button")
        page.wait_for_function(EMPTY, timeout=30_000)
        page.wait_for_timeout(300)
        draw(page, "#sketch canvas", "712"[number % 3])
        page.wait_for_function("() => window.shownAfter", timeout=30_000)
        if number:
            for name, taken in page.evaluate("() => window.shownAfter").items():
                found.setdefault(name, []).append(taken)
        page.evaluate("() => { window.shownAfter = null; }")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="capsnet_dynamic.mnist", help="a model with a decoder")
    parser.add_argument("--strokes", type=int, default=15)
    options = parser.parse_args()
    root, port = Path(__file__).resolve().parents[2], free_port()
    command = [sys.executable, "-m", "capszoo", "app", options.model, "--port", str(port)]
    env = {"PYTHONPATH": str(root), "HF_HUB_OFFLINE": "1"}
    with (
        tempfile.TemporaryDirectory() as folder,
        served(command, port, root, env, Path(folder) / "log") as url,
        chromium_page() as (page, _),
    ):
        page.goto(url)
        page.wait_for_selector("#sketch canvas")
        page.wait_for_timeout(1500)
        found = times_of_strokes(page, options.strokes)
    for name, times in found.items():
        print(
            f"{name}: median {statistics.median(times):.0f} ms, {min(times):.0f} to {max(times):.0f}, "
            f"n = {len(times)}"
        )
    return int(statistics.median(found["answer"]) >= LIMIT)


if __name__ == "__main__":
    sys.exit(main())
