"""The report of a study in a browser: it sorts by mouse and keyboard, fetches nothing, and is not cut off in print."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from made_up import made_up

from hansa.report import study_report as report
from hansa.report.html import Sheet, TableCell, write_report

sync_api = pytest.importorskip("playwright.sync_api", reason="the browser's driver (playwright) is not installed")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
PATIENT = 600_000.0  # milliseconds; a slow machine takes its time
pytestmark = [pytest.mark.slow, pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")]
MILLIMETRE = 96 / 25.4


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with sync_api.sync_playwright() as playwright:
        launched = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"], timeout=PATIENT)
        yield launched
        launched.close()


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    results = made_up(("fedavg", "<b onclick=alert(1)>", "scaffold"), ("iid", "x" * 90), 2, 4, target=0.8,
                      clock=lambda number: number**1.5,
                      task={"dataset": "no_such_module:data", "model": "logistic"})  # fmt: skip
    return write_report(tmp_path_factory.mktemp("study") / "report.html", *report.contents(results))


@pytest.fixture
def page(browser: Any) -> Iterator[Any]:
    """A page that fails the test on any console message or request."""
    context = browser.new_context()
    opened = context.new_page()
    opened.set_default_timeout(PATIENT)
    said: list[str] = []
    opened.on("console", lambda message: said.append(message.text))
    opened.on("pageerror", lambda error: said.append(str(error)))
    opened.on("dialog", lambda dialog: (said.append("a dialog"), dialog.dismiss()))
    opened.on(
        "request", lambda asked: said.append(asked.url) if not asked.url.startswith(("file:", "data:image/")) else None
    )
    yield opened
    context.close()
    assert said == []


def cells(page: Any, at: int) -> list[str]:
    return page.locator(f"section table >> nth=0 >> tbody tr td:nth-child({at + 1})").all_inner_texts()  # type: ignore[no-any-return]


def head(page: Any, name: str) -> Any:
    return page.locator("section table >> nth=0 >> thead th").filter(has_text=name).first


def test_a_click_sorts_by_value_up_and_then_down(page: Any, written: Path) -> None:
    page.goto(written.as_uri())
    final = head(page, "final\naccuracy")
    assert final.get_attribute("aria-sort") == "none"
    final.get_by_role("button").click()
    values = [float(text.split()[0]) for text in cells(page, 2)]
    assert values == sorted(values) and len(set(values)) == 6 and final.get_attribute("aria-sort") == "ascending"
    final.get_by_role("button").click()
    assert [float(text.split()[0]) for text in cells(page, 2)] == values[::-1]
    assert final.get_attribute("aria-sort") == "descending"
    head(page, "algorithm").get_by_role("button").click()
    assert final.get_attribute("aria-sort") == "none"
    assert cells(page, 0) == sorted(cells(page, 0))


def test_keys_alone_sort(page: Any, written: Path) -> None:
    page.goto(written.as_uri())
    button = head(page, "final\nloss").get_by_role("button")
    for _ in range(60):
        page.keyboard.press("Tab")
        if button.evaluate("it => it === document.activeElement"):
            break
    else:
        pytest.fail("the button cannot be reached with the Tab key")
    page.keyboard.press("Enter")
    values = [float(text.split()[0]) for text in cells(page, 4)]
    assert values == sorted(values)
    assert button.evaluate("it => it === document.activeElement"), "it keeps the focus"
    page.keyboard.press("Space")
    assert [float(text.split()[0]) for text in cells(page, 4)] == values[::-1]


def test_odd_cells_sort_as_they_are_read(page: Any, tmp_path: Path) -> None:
    rows = [
        ("b", "1,200", TableCell("2 MB", 2e6), "−3"), ("a10", "-", TableCell("0 of 3", float("nan")), "+2"),
        ("a9", "90 ± 5", TableCell("900 kB", 9e5), "1e-3"), ("sum", "0", "0", "0"),
    ]  # fmt: skip
    table = Sheet("T", ("name", "number", "size", "sign"), rows, total=True)
    page.goto(write_report(tmp_path / "r.html", "T", [], [table]).as_uri())
    for at, expected in enumerate((["a9", "a10", "b"], ["a9", "b", "a10"], ["a9", "b", "a10"], ["b", "a9", "a10"])):
        head(page, str(table.header[at])).get_by_role("button").click()
        assert cells(page, 0) == [*expected, "sum"], table.header[at]
    head(page, "number").get_by_role("button").click()
    head(page, "number").get_by_role("button").click()
    assert cells(page, 0) == ["b", "a9", "a10", "sum"], "what has no number stays last, and the total below"


def test_nothing_is_wider_than_the_window_or_the_sheet_of_paper(page: Any, written: Path) -> None:
    page.goto(written.as_uri())
    width = "document.documentElement.scrollWidth"
    for window in (360, 800, 1600):
        page.set_viewport_size({"width": window, "height": 800})
        assert page.evaluate(width) <= window
    page.emulate_media(media="print")
    for selector, paper in ((".broad table", 297), ("section:not(.broad) table", 210)):
        printable = round((paper - 28) * MILLIMETRE)
        page.set_viewport_size({"width": printable, "height": 700})
        widths = page.locator(selector).evaluate_all("tables => tables.map(it => it.getBoundingClientRect().right)")
        assert widths and max(widths) <= printable
    assert page.locator("nav").is_hidden()
    assert page.pdf(prefer_css_page_size=True, format="A4").startswith(b"%PDF")


def test_it_is_light_or_dark_as_the_reader_likes_it_and_light_on_paper(page: Any, written: Path) -> None:
    page.goto(written.as_uri())

    def shade(element: str, what: str) -> int:
        found = page.locator(element).first.evaluate(f"it => getComputedStyle(it).{what}")
        return sum(int(part) for part in found.removeprefix("rgb(").removesuffix(")").split(","))

    for media, scheme, dark in (("screen", "light", False), ("screen", "dark", True), ("print", "dark", False)):
        page.emulate_media(media=media, color_scheme=scheme)
        assert (shade("body", "backgroundColor") < 200) == dark
        assert (shade("body", "color") > 500) == dark
        inverted = page.locator("figure img").first.evaluate("it => getComputedStyle(it).filter") != "none"
        assert inverted == dark


def test_pictures_are_shown(page: Any, written: Path) -> None:
    page.goto(written.as_uri())
    shown = page.locator("img").evaluate_all("all => all.map(it => it.complete && it.naturalWidth > 100)")
    assert len(shown) == 9 and all(shown)


def test_the_parties_of_a_study_are_a_table_that_sorts_and_a_heat_map(page: Any, tmp_path: Path) -> None:
    results = made_up(("fedavg", "scaffold"), ("iid",), 2, 3)
    scores = {"clinic": 0.7, "<b>lab</b>": 0.9, "ward": 0.8}
    for at, outcome in enumerate(results.outcomes):
        outcome.history[-1]["parties"] = {name: {"accuracy": score - 0.01 * at} for name, score in scores.items()}
    page.goto(write_report(tmp_path / "report.html", *report.contents(results)).as_uri())
    section = page.locator("section").filter(has=page.get_by_role("heading", name="Parties", exact=True))
    names = section.locator("tbody tr > :first-child")
    assert names.all_inner_texts() == ["clinic", "ward", "<b>lab</b>"]  # the worst first
    sort = section.locator("thead th").filter(has_text="scaffold").get_by_role("button")
    sort.click()
    first = names.all_inner_texts()
    sort.click()
    assert names.all_inner_texts() == first[::-1] and set(first) == set(scores)
    figure = page.locator("section").filter(has=page.get_by_role("heading", name="Parties by algorithm"))
    assert figure.locator("svg, img").count() == 1


def test_every_chosen_metric_is_a_row_of_a_table_that_fits_the_window(page: Any, tmp_path: Path) -> None:
    chosen = ["f1", "log-loss", {"name": "recall", "by": 1}, "confusion-matrix"]
    results = made_up(("fedavg", "scaffold", "<i>own</i>"), ("iid",), 3, 3, metrics=chosen)
    for at, outcome in enumerate(results.outcomes):
        outcome.history[-1] |= {"f1": 0.5 + 0.01 * at, "party_f1_mean": 0.4 + 0.01 * at, "log_loss": 0.9 - 0.1 * at,
                                "recall_by_1_gap": None if at == 0 else 0.1, "recall_by_1": {"0": 0.3}}  # fmt: skip
    page.goto(write_report(tmp_path / "report.html", *report.contents(results)).as_uri())
    section = page.locator("section").filter(has=page.get_by_role("heading", name="All metrics", exact=True))
    rows = {row[0]: row[1:] for row in ([*each.locator("td, th").all_inner_texts()]
                                        for each in section.locator("tbody tr").all())}  # fmt: skip
    assert list(rows) == ["F1, %", "F1, mean of parties, %", "log loss", "recall by 1 gap, %", "accuracy, %",
                          "accuracy, worst tenth of parties, %", "loss"]  # fmt: skip
    assert rows["F1, %"][0].startswith("51.00 ± 2.48") and rows["F1, %"][2].startswith("57.00")
    assert rows["recall by 1 gap, %"][0].endswith("(2 of 3)")
    strong = section.locator("tbody tr").nth(0).locator("strong")
    assert strong.count() == 1 and strong.inner_text().startswith("57.00")
    assert section.locator("thead th").all_inner_texts()[1:] == ["fedavg", "scaffold", "<i>own</i>"]
    page.set_viewport_size({"width": 360, "height": 800})
    assert page.evaluate("document.documentElement.scrollWidth") <= 360


def test_a_study_without_chosen_metrics_has_no_table_of_them() -> None:
    headings = [getattr(section, "title", "") for section in report.contents(made_up())[2]]
    assert "Results" in headings and "All metrics" not in headings
