"""The documentation's site: it builds strictly, needs nothing from elsewhere, and its reference is complete."""

from __future__ import annotations

import html
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from docs_pages import ROOT, console

import hansa

pytest.importorskip("mkdocs", reason="the documentation's tools are not installed (make extras)")
pytest.importorskip("material", reason="the documentation's theme is not installed (make extras)")
pytest.importorskip("mkdocstrings", reason="the documentation's tools are not installed (make extras)")

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built with broken links as errors. (With --quiet MkDocs counts no warning, and lets them pass.)"""
    folder = tmp_path_factory.mktemp("site")
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run([sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)],
                          capture_output=True, text=True, cwd=ROOT, env=environment)  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_no_page_fetches_anything_from_elsewhere(site: Path) -> None:
    pages = list(site.rglob("*.html"))
    assert len(pages) > 50
    for page in pages:
        fetched = re.findall(r"<(?:script|img|link|iframe)[^>]*?(?:src|href)=\"?(https?://[^\s\">]+)", page.read_text())
        assert fetched == [], page.relative_to(site)
    for style in site.rglob("*.css"):
        assert not re.search(r"url\(\"?https?://", style.read_text()), style.relative_to(site)


def test_the_reference_has_every_name_that_hansa_offers(site: Path) -> None:
    pages = "".join(page.read_text() for page in (site / "reference").glob("*.html"))
    for name in hansa.__all__:
        found = getattr(hansa, name)
        if hasattr(found, "__qualname__"):
            assert f'id="{found.__module__}.{found.__qualname__}"' in pages, name


def test_the_reference_has_every_command_with_its_options(site: Path) -> None:
    page = html.unescape((site / "reference" / "cli.html").read_text())
    waiting = [("hansa", console())]
    while waiting:
        words, command = waiting.pop()
        below = getattr(command, "commands", {})
        waiting += [(f"{words} {name}", child) for name, child in below.items() if not child.hidden]
        if not below:
            section = page.partition(f'>{words}<a class="headerlink"')[2].partition("<h2")[0]
            assert section, words
            for option in (name for each in command.params for name in each.opts if name.startswith("-")):
                assert f"<code>{option}</code>" in section, f"{words} {option}"


def test_files_outside_docs_are_pages_of_the_site(site: Path) -> None:
    for path in ("benchmarks/RESULTS.html", "benchmarks/reproduce/index.html", "SECURITY.html", "CHANGELOG.html",
                 "deploy/index.html", "source/src/hansa/algorithms/fedavg.py.html"):  # fmt: skip
        assert (site / path).is_file(), path
    notebook = (site / "source/examples/notebooks/01-first-steps.ipynb.html").read_text()
    assert '<h1 id="first-steps">First steps' in notebook and 'href="02-compare.ipynb.html"' in notebook
    assert 'href="../source/src/hansa/classical/naive_bayes.py.html"' in (site / "howto/own-algorithm.html").read_text()
