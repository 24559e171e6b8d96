"""The attack report in a browser: it shows its pictures and tables, sorts, and fetches nothing."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hansa.attacks import attack
from hansa.experiment.config import parse
from hansa.run.resume import execute

sync_api = pytest.importorskip("playwright.sync_api", reason="the browser's driver (playwright) is not installed")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
PATIENT = 600_000.0  # milliseconds; a slow machine takes its time
pytestmark = [pytest.mark.slow, pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")]
TREE = {"task": {"dataset": "digits", "model": "logistic"}, "partition": {"name": "iid", "parties": 5},
        "run": {"rounds": 2}}  # fmt: skip


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("attacked") / "run"
    execute(parse(TREE), folder)
    return attack(folder, references=1, canaries=100).save(folder)


@pytest.fixture(scope="module")
def page(written: Path) -> Iterator[Any]:
    """The opened report; the test fails on any console message or request."""
    said: list[str] = []
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"], timeout=PATIENT)
        opened = browser.new_page(viewport={"width": 1200, "height": 900})
        opened.set_default_timeout(PATIENT)
        opened.on("console", lambda message: said.append(message.text))
        opened.on("pageerror", lambda error: said.append(str(error)))
        opened.on("request", lambda asked: said.append(asked.url)
                  if not asked.url.startswith(("file:", "data:image/")) else None)  # fmt: skip
        opened.goto(written.as_uri())
        yield opened
        browser.close()
    assert said == []


def test_every_picture_is_drawn(page: Any) -> None:
    sizes = page.eval_on_selector_all("figure img", "images => images.map(i => [i.complete, i.naturalWidth, i.alt])")
    assert len(sizes) == 5 and all(complete and width > 100 and alt for complete, width, alt in sizes)


def test_the_first_table_says_who_could_learn_what(page: Any) -> None:
    cells = page.locator("section table >> nth=0 >> tbody tr td:nth-child(1)").all_inner_texts()
    assert set(cells) == {"outsider", "party", "aggregator"}
    assert page.locator("h1").inner_text() == "Attacks on run"


def test_the_defences_can_be_sorted_by_their_accuracy(page: Any) -> None:
    section = page.locator("section").filter(has_text="secure sum (masking)").last
    section.get_by_role("button", name="accuracy").click()
    values = [float(text) for text in section.locator("tbody tr td:nth-child(2)").all_inner_texts()]
    assert values == sorted(values) and len(values) == 6


def test_the_page_is_not_wider_than_the_window(page: Any) -> None:
    assert page.evaluate("document.documentElement.scrollWidth") <= 1200


def test_the_page_ends_with_the_command_that_repeats_it(page: Any) -> None:
    assert page.locator("pre").last.inner_text().startswith("hansa attack ")
