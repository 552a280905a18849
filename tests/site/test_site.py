"""The built site: links, foreign hosts, pages of public names and commands; its first page in Chromium.

Reads ``build/site``, which ``make site`` writes; ``make test-site`` builds it first.
"""

from __future__ import annotations

import http.server
import importlib
import json
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest

from capszoo.cli.examples import EXAMPLES
from scripts.site.families import FAMILIES, example_code, models_of
from scripts.site.reference import API_MODULES, public_names
from tests.support.browser import chromium_page, draw
from tests.support.zoo import has_capsules

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def site(root: Path) -> Path:
    folder = root / "build" / "site"
    if not (folder / "index.html").is_file():
        pytest.skip("the site is not built: make site")
    return folder


class _Page(HTMLParser):
    """Links, what the page loads, and the places that a link may lead to."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loads: list[str] = []
        self.places: set[str] = set()
        self.feed(file.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        if given.get("id"):
            self.places.add(str(given["id"]))
        if tag == "a" and given.get("href"):
            self.links.append(str(given["href"]))
        elif tag == "link" and given.get("rel") not in ("canonical",) and given.get("href"):
            self.loads.append(str(given["href"]))
        elif given.get("src"):
            self.loads.append(str(given["src"]))


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[Path, _Page]:
    # the theme puts a template of its own into _static
    found = {file: _Page(file) for file in site.rglob("*.html") if "_static" not in file.parts}
    assert len(found) > 60
    return found


def test_every_link_leads_to_a_page_and_a_place(site: Path, pages: dict[Path, _Page]) -> None:
    wrong = []
    for file, page in pages.items():
        for link in (*page.links, *page.loads):
            parts = urlsplit(link)
            if parts.scheme or link.startswith("#") and not parts.fragment:
                continue
            target = (file.parent / unquote(parts.path)).resolve() if parts.path else file
            if not target.exists():
                wrong.append(f"{file.relative_to(site)}: {link}")
            elif parts.fragment and target in pages and unquote(parts.fragment) not in pages[target].places:
                wrong.append(f"{file.relative_to(site)}: {link} (no such place)")
    assert not wrong, "\n".join(wrong[:30])


def test_no_page_loads_from_another_host(site: Path, pages: dict[Path, _Page]) -> None:
    loads = {
        load for page in pages.values() for load in page.loads if urlsplit(load).scheme not in ("", "data")
    }
    assert loads == set()
    for file in site.rglob("*.css"):
        addresses = re.findall(
            r"url\(\s*['\"]?(https?:[^)]*)|@import\s+['\"](https?:[^'\"]*)", file.read_text()
        )
        assert not addresses, file


#: Modules without a page, which the commands and other modules use.
INTERNAL = {"capszoo.summary", "capszoo.export.cached", "capszoo.export.prepare"}


def test_every_public_module_has_its_page(root: Path) -> None:
    """A module of capszoo or capszoo.export whose names no other page has."""
    found = {
        f"{package}.{file.stem}"
        for package, folder in (("capszoo", "capszoo"), ("capszoo.export", "export"))
        for file in (root / folder).glob("[!_]*.py")
    }
    on_pages = {
        id(getattr(module, name))
        for module in map(importlib.import_module, API_MODULES)
        for name in public_names(module)
    }
    missing = {
        name
        for name in found.difference(API_MODULES)
        for module in [importlib.import_module(name)]
        if any(id(getattr(module, public)) not in on_pages for public in public_names(module))
    }
    assert missing == INTERNAL


@pytest.mark.parametrize("name", API_MODULES)
def test_every_public_name_has_its_place(site: Path, name: str) -> None:
    page = (site / "api" / f"{name}.html").read_text(encoding="utf-8")
    text = unescape(re.sub(r"<[^>]+>", "", page))
    missing = [public for public in public_names(importlib.import_module(name)) if public not in text]
    assert not missing


def test_the_command_page_has_every_command_and_example(site: Path) -> None:
    page = (site / "commands.html").read_text(encoding="utf-8")
    text = " ".join(unescape(re.sub(r"<[^>]+>", "", page)).split())
    for name, examples in EXAMPLES.items():
        assert f"capszoo {name}".strip() in text
        assert all(" ".join(line.split()) in text for line in examples.splitlines()), name


def test_every_family_has_its_drawing(site: Path) -> None:
    for module in FAMILIES:
        page = (site / "families" / f"{module}.html").read_text(encoding="utf-8")
        assert f"{module}.svg" in page
        assert all(name in page for name in models_of(module))
        text = unescape(re.sub(r"<[^>]+>", "", page))
        parts = ("Layers", "Variants", "Weights", "Speed", "training steps on an NVIDIA H200", "Use", "Cite")
        assert [part for part in parts if part not in text] == [], module
        if FAMILIES[module].routing:
            assert f"def {FAMILIES[module].code}(" in text, module


@pytest.mark.parametrize("module", FAMILIES)
def test_the_example_of_a_family_runs(root: Path, module: str, capsys: pytest.CaptureFixture[str]) -> None:
    """It has capsules, where the family has some, and a picture of the kind that its weights read."""
    code = example_code(FAMILIES[module], models_of(module))
    picture = root / "capszoo" / "assets" / "digit_3.png"
    found: dict[str, Any] = {}
    exec(re.sub(r"digit\.png|photo\.jpg", picture.as_posix(), code), found)
    label = capsys.readouterr().out.strip()
    assert label in found["model"].labels
    assert label.isdigit() == ("digit.png" in code) == ("photo.jpg" not in code)
    assert has_capsules(found["model"].name.partition(".")[0]) == (module != "cnn_baselines")
    assert ("net" in found) == (module == "caps_head") == ("attach_head" in code)


@pytest.fixture(scope="module")
def address(site: Path) -> Iterator[str]:
    """The built site, served on the loopback interface."""

    class Quiet(http.server.SimpleHTTPRequestHandler):
        extensions_map = {**http.server.SimpleHTTPRequestHandler.extensions_map, ".mjs": "text/javascript"}

        def log_message(self, *_: Any) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(site)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()


def _result(page: Any) -> dict[str, Any]:
    page.wait_for_function("() => document.querySelector('.capszoo-demo').dataset.result", timeout=30_000)
    return dict(json.loads(page.get_attribute(".capszoo-demo", "data-result")))


def test_the_first_page_scores_as_predict_does(address: str, root: Path) -> None:
    digits = [str(root / "capszoo" / "assets" / f"digit_{k}.png") for k in range(10)]
    words = ("predict", "resnet20_routingcaps.mnist", *digits, "-k", "10", "--json")
    command = [sys.executable, "-m", "capszoo", *words]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True)
    expected = [
        {one["index"]: one for one in result["predictions"]} for result in json.loads(done.stdout)["results"]
    ]
    with chromium_page() as (page, foreign):
        page.goto(address)
        page.wait_for_selector(".capszoo-demo[data-ready=yes]", timeout=60_000)
        worst, times = 0.0, []
        for k in range(10):
            page.click(f".capszoo-digits img[alt='test image {k}']")
            found = _result(page)
            assert found["label"] == str(k)
            times.append(found["milliseconds"])
            for i, one in expected[k].items():
                differences = (
                    found["scores"][i] - one["score"],
                    found["probabilities"][i] - one["probability"],
                )
                worst = max(worst, *map(abs, differences))
        assert foreign == []
    print(f"largest difference of a score or probability {worst:.1e}; {sorted(times)[5]:.0f} ms an image")
    assert worst < 1e-3


def test_the_first_page_reads_drawn_digits(address: str) -> None:
    with chromium_page() as (page, foreign):
        page.goto(address)
        page.wait_for_selector(".capszoo-demo[data-ready=yes]", timeout=60_000)
        for digit in ("1", "7", "2"):
            page.click(".capszoo-demo button")
            draw(page, ".capszoo-demo canvas.drawing", digit)
            page.wait_for_timeout(800)
            assert _result(page)["label"] == digit
        colours = page.evaluate(
            "() => { const c = document.querySelector('.overlay'); "
            "const d = c.getContext('2d').getImageData(0, 0, c.width, c.height).data; let n = 0; "
            "for (let i = 0; i < d.length; i += 4) if (d[i] !== d[i + 2]) n++; return n; }"
        )
        assert colours > 100, "the couplings are not drawn"
        assert foreign == []


def test_a_page_opened_from_a_file_says_what_to_do(site: Path) -> None:
    with chromium_page() as (page, foreign):
        page.goto((site / "index.html").as_uri())
        page.wait_for_timeout(1000)
        assert "http.server" in page.inner_text(".capszoo-demo .status")
        assert foreign == []
