"""Build the documentation as a site: `make docs`. Its pages are those of the repository, with the same links.

    PYTHONPATH=.venv/docs python scripts/docs_site.py [SITE]

The pages are copied into build/pages under the paths that they have here, with the files that they link to, so that a
link works on the site as it does in the repository. References of the Python package and of the contracts are made from
docstrings and comments. The order of the pages is that of the tables in README.md, docs/how-to and bench/results.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from proto_pages import proto_pages

ROOT = Path(__file__).resolve().parent.parent
PAGES = ROOT / "build" / "pages"
CONFIG = ROOT / "build" / "mkdocs.yml"
FOLDERS = ("docs", "deploy", "bench/results")
_LINK = re.compile(r"(?<=\]\()([^)\s#]+)")
_ROW = re.compile(r"\[([^\]]+)\]\(([^)#\s]+\.md)\)")
PYTHON = {
    "clients": ("ServiceClient", "TrainingClient", "SamplingClient", "PacelineFuture", "SampleStream", "MetricsStream"),
    "settings": ("Datum", "ModelInput", "SamplingParams", "AdamParams", "LoraConfig", "Timeouts", "RetryPolicy"),
    "errors": ("errors",),
}
"""What the pages of the Python package describe."""

Nav = list[dict[str, object]]


def main() -> None:
    """Copy the pages, write the configuration, and run MkDocs, to which every warning is an error."""
    site = Path(sys.argv[1]).resolve() if len(sys.argv) > 1 else ROOT / "build" / "site"
    shutil.rmtree(PAGES, ignore_errors=True)
    for page in _pages():
        _copy(page)
    references = _write_references()
    CONFIG.write_text(
        json.dumps(
            {
                "INHERIT": "../mkdocs.yml",
                "docs_dir": str(PAGES),
                "site_dir": str(site),
                "nav": menu(references),
            }
        )
    )
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--config-file", str(CONFIG)]
    # Material announces its successor at each build, as a warning.
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    if status := subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode:
        raise SystemExit(status)
    print(f"the site is in {site}; to read it, python -m http.server -d {site}")


def _pages() -> Iterator[Path]:
    yield from sorted(ROOT.glob("*.md"))
    for folder in FOLDERS:
        yield from sorted((ROOT / folder).rglob("*.md"))


def _copy(page: Path) -> None:
    """Copy a page and the files that it links to. A link to a folder leads to a page that lists it."""

    def copied(link: re.Match[str]) -> str:
        target = (page.parent / link[1]).resolve()
        if "://" in link[1] or not target.is_relative_to(ROOT) or not target.exists() or target == page:
            return link[1]
        if target.is_dir():
            return f"{link[1].rstrip('/')}/{_list_folder(target)}"
        if target.suffix != ".md":
            _put(target, target.read_bytes())
        return link[1]

    _put(page, _LINK.sub(copied, page.read_text()).encode())


def _list_folder(folder: Path) -> str:
    """Return the name of the page of a folder, made if the folder has none of its own."""
    if (folder / "README.md").exists():
        return "README.md"
    tracked = subprocess.run(["git", "ls-files"], cwd=folder, capture_output=True, text=True, check=True)
    names = tracked.stdout.splitlines()
    for name in names:
        _put(folder / name, (folder / name).read_bytes())
    lines = [f"- [{name}]({name})" for name in names]
    _put(folder / "index.md", "\n".join([f"# {folder.relative_to(ROOT)}", "", *lines, ""]).encode())
    return "index.md"


def _put(path: Path, content: bytes) -> None:
    target = PAGES / path.relative_to(ROOT)
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_bytes(content)


def _write_references() -> Nav:
    """Write the pages that are made from docstrings and comments; return them for the menu."""
    python: Nav = []
    for title, names in PYTHON.items():
        body = "\n\n".join(f"::: paceline.{name}" for name in names)
        _put(ROOT / "reference" / f"{title}.md", f"# Python: {title}\n\n{body}\n".encode())
        python.append({title.capitalize(): f"reference/{title}.md"})
    contracts: Nav = []
    for name, text in proto_pages(ROOT).items():
        _put(ROOT / "reference" / "grpc" / f"{name}.md", text.encode())
        contracts.append({name.capitalize(): f"reference/grpc/{name}.md"})
    return [{"Python": python}, {"gRPC": contracts}]


def menu(references: Nav) -> Nav:
    """Return the menu: the pages in the order of the tables that list them, each once."""
    how_to = _listed("docs/how-to/README.md")
    results = _listed("bench/results/README.md")
    guides = [entry for entry in _listed("README.md", "## Documents") if "how-to" not in str(entry)]
    about = ("CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md")
    return [
        {"Quickstart": "README.md"},
        {"How to": ["docs/how-to/README.md", *how_to]},
        {"Guides": [entry for entry in guides if not set(entry.values()) & set(about)]},
        {"Deployment": "deploy/README.md"},
        {"Reference": references},
        {"Results": ["bench/results/README.md", *results]},
        {"Project": [{Path(name).stem.capitalize(): name} for name in about]},
    ]


def _listed(page: str, heading: str = "") -> Nav:
    """Return the pages that the tables of a page link to, after a heading."""
    path = ROOT / page
    found: dict[str, str] = {}
    text = path.read_text()
    for line in text[text.index(heading) :].splitlines():
        for title, link in _ROW.findall(line) if line.startswith("| [") else ():
            target = str((path.parent / link).resolve().relative_to(ROOT))
            found.setdefault(target, title[0].upper() + title[1:])
    return [{title: target} for target, title in found.items()]


if __name__ == "__main__":
    main()
