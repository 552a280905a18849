"""The site in ``build/site``: developers run it when a page changes.

``make site``. The pages of docs/ are copied, links that lead out of docs/ are replaced by the name of the file, and
the generated pages are added: models, command line, Python, changelog, and the files of the page in the browser.
Sphinx then runs with warnings as errors.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "build"

#: Pages from outside docs/, and their names on the site.
PAGES = {
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "recipes/README.md": "recipes.md",
}


def copy_pages(source: Path) -> None:
    """Copy the pages of docs/ and ``PAGES``, with links among themselves."""
    shutil.copytree(ROOT / "docs", source, ignore=shutil.ignore_patterns("_build", "__pycache__"))
    for name, target in PAGES.items():
        shutil.copyfile(ROOT / name, source / target)
    moved = {ROOT / name: target for name, target in PAGES.items()}
    origins = {target: (ROOT / name).parent for name, target in PAGES.items()}
    for page in source.rglob("*.md"):
        relative = page.relative_to(source)
        origin = origins.get(str(relative), (ROOT / "docs" / relative).parent)

        def relink(match: re.Match[str], origin: Path = origin, page: Path = page) -> str:
            text, link, anchor = match[1], match[2], match[3] or ""
            if "://" in link or not link:
                return match[0]
            target = (origin / link).resolve()
            if target in moved:
                inside = source / moved[target]
            elif (ROOT / "docs") in target.parents:
                inside = source / target.relative_to(ROOT / "docs")
            else:  # a file of the repository that is not on the site
                return text if text.startswith("`") else f"{text} (`{target.relative_to(ROOT)}`)"
            return f"[{text}]({os.path.relpath(inside, page.parent)}{anchor})"

        content = page.read_text(encoding="utf-8")
        content = re.sub(r"(?<!!)\[([^\]]*)\]\(([^)#\s]*)(#[^)]*)?\)", relink, content)
        page.write_text(content, encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=BUILD / "site")
    parser.add_argument(
        "--no-demo",
        action="store_true",
        help="leave out the files of the page that classifies in the browser",
    )
    options = parser.parse_args()
    os.environ.setdefault("PYTHONPATH", str(ROOT))
    from scripts.site.demo import place_demo
    from scripts.site.families import family_pages
    from scripts.site.reference import api_pages, command_page

    source = BUILD / "site-source"
    shutil.rmtree(source, ignore_errors=True)
    copy_pages(source)
    family_pages(source / "families")
    command_page(source / "commands.md")
    api_pages(source / "api")
    if not options.no_demo:
        place_demo(source / "_static" / "demo", BUILD / "npm")
    from sphinx.cmd.build import build_main

    shutil.rmtree(options.out, ignore_errors=True)
    code = build_main(["-n", "-W", "--keep-going", "-q", "-b", "html", str(source), str(options.out)])
    if code == 0:
        print(f"{options.out / 'index.html'}")
    return code


if __name__ == "__main__":
    sys.exit(main())
