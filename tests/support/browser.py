"""What tests in a browser share: headless Chromium, a process that serves a page, strokes on a canvas."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")

#: Strokes of digits, in shares of the canvas.
STROKES = {
    "1": [(0.5, 0.15), (0.5, 0.85)],
    "7": [(0.28, 0.2), (0.72, 0.2), (0.45, 0.85)],
    "2": [(0.3, 0.3), (0.35, 0.2), (0.5, 0.15), (0.65, 0.22), (0.68, 0.35), (0.3, 0.82), (0.72, 0.82)],
}


@contextmanager
def chromium_page(width: int = 1300, height: int = 1100) -> Iterator[tuple[Any, list[str]]]:
    """A page of headless Chromium, and a list that collects the addresses of other machines that it asks for."""
    sync_api = pytest.importorskip(
        "playwright.sync_api", reason="needs playwright: make test-site runs this in the site's environment"
    )
    if CHROMIUM is None:
        pytest.skip("needs Chromium (Debian: apt install chromium)")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": width, "height": height})
        foreign: list[str] = []

        def look(request: Any) -> None:
            if not request.url.startswith(("http://127.0.0.1", "data:", "blob:", "file:")):
                foreign.append(request.url)

        page.on("request", look)
        try:
            yield page, foreign
        finally:
            browser.close()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def served(
    command: Sequence[str], port: int, cwd: Path, env: dict[str, str], log: Path, seconds: int = 120
) -> Iterator[str]:
    """The address of a process that serves on a port; stopped at the end."""
    with log.open("wb") as file:
        process = subprocess.Popen(
            command, cwd=cwd, env={**os.environ, **env}, stdout=file, stderr=subprocess.STDOUT
        )
    url = f"http://127.0.0.1:{port}/"
    try:
        end = time.monotonic() + seconds
        while True:
            try:
                urllib.request.urlopen(url, timeout=5).close()
                break
            except urllib.error.HTTPError:
                break  # it answers
            except OSError:
                assert process.poll() is None and time.monotonic() < end, log.read_text()
                time.sleep(0.3)
        yield url
    finally:
        process.terminate()
        process.wait(20)


def draw(page: Any, canvas: str, digit: str) -> None:
    """Draw a digit with the mouse."""
    box = page.query_selector(canvas).bounding_box()
    points = [(box["x"] + x * box["width"], box["y"] + y * box["height"]) for x, y in STROKES[digit]]
    page.mouse.move(*points[0])
    page.mouse.down()
    for x, y in points[1:]:
        page.mouse.move(x, y, steps=8)
    page.mouse.up()


def set_slider(page: Any, selector: str, value: float) -> None:
    page.eval_on_selector(
        selector,
        "(e, value) => { e.value = value; e.dispatchEvent(new Event('input', { bubbles: true })); }",
        value,
    )
