"""The content of a study's report, for studies of every kind."""

from __future__ import annotations

import math
import re
import tomllib
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made_up import made_up

from hansa.report import markdown, toml
from hansa.report import plots as house
from hansa.report import study_plots as plots
from hansa.report import study_report as report
from hansa.report import study_tables as sheets
from hansa.report.comparison_plots import critical_difference
from hansa.report.html import Detail, Picture, Section, Sheet, TableCell, render
from hansa.report.study_findings import Names, findings
from hansa.study import Results, Trial, compare, parse_study

NASTY = (
    "<script>alert(1)</script>", "</td></table><img src=x onerror=alert(1)>", "a\nb\t'\"&amp;", r"$\frac{1", "$x$",
    "\u202eabc עברית", "x" * 300, "x" * 299 + "y", "| **b** `c` [l](http://x.example) <!-- www.x.example",
    "日本 \x00\x1b[31m",
)  # fmt: skip
TAGS = {"html", "head", "meta", "title", "style", "body", "main", "h1", "h2", "h3", "p", "nav", "ul", "li", "a",
        "section", "div", "table", "thead", "tbody", "tr", "th", "td", "strong", "figure", "img", "figcaption", "pre",
        "footer", "script"}  # fmt: skip
ATTRIBUTES = {"lang", "charset", "name", "content", "http-equiv", "id", "href", "class", "role", "tabindex", "scope",
              "aria-label", "aria-labelledby", "data-order", "alt", "src"}  # fmt: skip
VOID = {"meta", "img"}


class Structure(HTMLParser):
    """Fails if tags are not closed in the order of opening, or are not among those of a report."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.feed(page)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag in TAGS and {name for name, _ in attrs} <= ATTRIBUTES, (tag, attrs)
        self.seen.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)


def of(results: Results, kind: type, title: str | None = None) -> Any:
    if title == "Results":
        return sheets.main(results, Names(results))
    found = [section for section in report.contents(results)[2] if isinstance(section, kind)]
    return found if title is None else next(section for section in found if section.title == title)


def told(results: Results) -> str:
    return " ".join(findings(results, Names(results)))


def text(cell: str | TableCell) -> str:
    return cell if isinstance(cell, str) else cell.text


def column(sheet: Sheet, head: str) -> list[Any]:
    at = [header.replace("\n", " ") for header in sheet.header].index(head)
    return [row[at] for row in sheet.rows]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Path]]:
    """A report with every section, written."""
    trials = [
        Trial("fedavg", "iid", {"local.lr": 0.1}, 0, 4, 0.8, True),
        Trial("fedavg", "iid", {"local.lr": 0.3}, 0, 4, 0.7, False),
        Trial("fedavg", "iid", {"local.lr": 0.1}, 1, 8, 0.9, True, edge=True),
    ]  # fmt: skip
    results = made_up(
        ("fedavg", "fedprox"), ("iid",), 2, 6, adversaries=("none", "loud"), target=0.9, trials=trials,
        clock=lambda number: number + number % 3 / 2,
        failed=lambda cell: "it ran out of <memory>" if cell.adversary and cell.seed else None,
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("whole")
    return folder, report.write(results, folder)


@pytest.mark.slow
def test_a_report_is_written_as_html_and_markdown_with_each_picture_as_png_and_svg(
    whole: tuple[Path, list[Path]],
) -> None:
    folder, written = whole
    assert written[0] == folder / "report.html"
    assert sorted(written) == sorted(path for path in folder.rglob("*") if path.is_file())
    names = {path.stem for path in written if path.suffix == ".svg"}
    assert names == {path.stem for path in written if path.suffix == ".png"}
    assert names == {"final", "accuracy-rounds", "accuracy-bytes", "accuracy-simulated-seconds", "loss-rounds",
                     "loss-bytes", "loss-simulated-seconds", "critical-difference", "pairs", "adversaries",
                     "partition-1"}  # fmt: skip
    linked = re.findall(r"!\[[^]]*\]\(([^)]*)\)", (folder / "report.md").read_text())
    assert {folder / link for link in linked} == {path for path in written if path.suffix == ".png"}


@pytest.mark.slow
def test_the_page_is_well_formed_and_has_its_sections_in_order(whole: tuple[Path, list[Path]]) -> None:
    page = whole[0].joinpath("report.html").read_text()
    structure = Structure(page)
    assert [tag for tag, _ in structure.seen].count("script") == 1
    links = [attrs["href"] for tag, attrs in structure.seen if tag == "a"]
    targets = {f"#{attrs['id']}" for _, attrs in structure.seen if "id" in attrs}
    assert links and set(links) <= targets
    heads = re.findall(r"<h2[^>]*>([^<]*)</h2>", page)
    assert heads == [
        "Results", "Final values", "Accuracy against rounds", "Loss against rounds", "Accuracy against bytes",
        "Loss against bytes", "Accuracy against simulated time", "Loss against simulated time",
        "Critical difference of the ranks", "Significant differences", "By adversary", "Data of the parties",
        "Tuning", "Failed runs", "Exact configuration", "How to reproduce",
    ]  # fmt: skip
    assert "it ran out of &lt;memory&gt;" in page and "a better value may lie beyond" in page


@pytest.mark.slow
def test_labels_are_taken_literally_in_every_form(tmp_path: Path) -> None:
    results = made_up(NASTY, (NASTY[0], NASTY[1]), 2, 3, adversaries=("none", NASTY[2]), name=NASTY[0],
                      failed=lambda cell: NASTY[1] if cell.algorithm == NASTY[-1] else None)  # fmt: skip
    title, intro, sections = report.contents(results)
    few: list[Section] = [s for s in sections if not isinstance(s, Picture)]
    few += [s for s in sections if isinstance(s, Picture) and s.name in ("final", "critical-difference")]
    structure = Structure(render(title, intro, few))
    assert [tag for tag, _ in structure.seen].count("script") == 1
    assert not any(attrs.get("src") == "x" for _, attrs in structure.seen)
    words = "".join(structure.words)
    assert "<script>alert(1)</script> has the best" in words and "\u202e" not in words and "\x1b" not in words
    drawn = "".join(section.svg.decode() for section in few if isinstance(section, Picture))
    assert "<script" not in drawn and "onerror" not in re.sub(r"<!--.*?-->", "", drawn)
    text = markdown.render(title, intro, few, {"final": "f.png", "critical-difference": "c.png"})
    outside = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    assert "<" not in outside and "http://" not in outside and "\x1b" not in outside
    for rows in re.findall(r"(?:^\|.*\n?)+", outside, flags=re.MULTILINE):
        assert len({line.count("|") for line in rows.strip().splitlines()}) == 1


def test_long_labels_that_differ_stay_different() -> None:
    names = Names(made_up(NASTY, ("iid",), 1, 2))
    assert len(set(names.algorithms.values())) == len({look.name for look in names.looks.values()}) == len(NASTY)
    assert max(map(len, names.algorithms.values())) < 60
    alike = Names(made_up(["a" * 40 + str(k) + "b" * 40 for k in range(3)], ("iid",), 1, 2))
    assert len(set(alike.algorithms.values())) == len({look.name for look in alike.looks.values()}) == 3


NO_DATA = {"dataset": "no_such_module:data", "model": "logistic"}
ODD: dict[str, dict[str, Any]] = {
    "one seed": {"seeds": 1},
    "one algorithm": {"algorithms": ("fedavg",)},
    "one of each": {"algorithms": ("fedavg",), "partitions": ("iid",), "seeds": 1, "rounds": 1},
    "one setting": {"partitions": ("iid",)},
    "many algorithms": {"algorithms": [f"a{k}" for k in range(20)], "partitions": ("iid",), "rounds": 4},
    "many settings": {"partitions": [f"p{k}" for k in range(12)], "rounds": 3, "algorithms": ("a", "b")},
    "no target reached": {"target": 0.999},
    "all failed": {"failed": lambda cell: "it failed", "target": 0.9},
    "no finite loss": {"lost": lambda cell: "lost"},
    "loss as metric, and not finite": {"lost": lambda cell: "lost" if cell.seed else None, "metric": "loss"},
    "regression": {"metric": "loss", "target": 0.5},
    "regression by R²": {"metric": "r2"},
    "perfect": {"top": lambda algorithm, setting: 1.5},
    "hopeless": {"top": lambda algorithm, setting: 0.0},
}  # fmt: skip


@pytest.mark.thin(2)
@pytest.mark.parametrize("name", ODD)
def test_odd_studies_have_a_good_report(name: str) -> None:
    results = made_up(**{"rounds": 5, "seeds": 2, "task": NO_DATA, **ODD[name]})
    title, intro, sections = report.contents(results)
    pictures = [section for section in sections if isinstance(section, Picture)]
    for picture in pictures[:1]:
        house.svg(picture.figure)  # drawn without a warning
    words = [section for section in sections if not isinstance(section, Picture)]
    page = render(title, intro, words)
    Structure(page)
    assert "nan" not in page.lower().replace("nano", "") and "None" not in page.replace("None of", "")
    assert "inf " not in page and intro and all(sentence.endswith(".") for sentence in intro)
    assert len({picture.name for picture in pictures}) == len(pictures)
    if name == "all failed":
        assert not [p for p in pictures if not p.name.startswith("partition")]
        assert "Every run failed" in intro[1] and "it failed" in page
        assert not any(section.title == "Results" for section in sections)
    else:
        assert "final" in {picture.name for picture in pictures} and sections[0].title == "Results"


def test_data_that_is_not_there_is_told_and_does_not_fail_the_report() -> None:
    results = made_up(task=NO_DATA)
    _, detail, *_ = report._partitions(results)
    assert isinstance(detail, Detail) and detail.title == "iid"
    assert "Cannot draw this partition" in detail.text and "no_such_module" in detail.text


def test_the_table_has_the_estimates_best_first_and_marks_who_is_not_significantly_worse() -> None:
    results = made_up(("slow", "good", "twin"), ("iid",), 3, 60, target=0.95,
                      top=lambda algorithm, setting: (0.9, 0.97, 0.97)[algorithm])  # fmt: skip
    sheet = of(results, Sheet, "Results")
    names = column(sheet, "algorithm")
    assert set(names[:2]) == {"good", "twin"} and names[2] == "slow"
    finals = column(sheet, "final accuracy, %")
    assert [cell.strong for cell in finals] == [True, False, False]
    assert [cell.text.endswith("≈") for cell in finals] == [False, True, False]
    for name, cell in zip(names, finals, strict=True):
        found = results.estimate("final_accuracy", name, "iid")
        assert found is not None and found.mean is not None and found.high is not None
        assert cell.order == pytest.approx(100 * found.mean)
        shown = re.match(r"([\d.]+) ± ([\d.]+)", cell.text)
        assert shown is not None
        assert float(shown[1]) == pytest.approx(100 * found.mean, abs=0.0051)
        assert float(shown[2]) == pytest.approx(100 * (found.high - found.mean), abs=0.0051)
    reached = column(sheet, "rounds to target")
    assert "(3 of 3)" in reached[0].text and reached[2].text == "0 of 3" and math.isnan(reached[2].order)
    assert not any(cell.strong for cell in column(sheet, "wall-clock s"))
    assert not any(cell.strong for cell in column(sheet, "MB up")), "all alike: nobody is best"


def test_one_seed_has_neither_intervals_nor_tests() -> None:
    results = made_up(seeds=1)
    sheet = of(results, Sheet, "Results")
    assert not any("±" in text(cell) or "≈" in text(cell) for row in sheet.rows for cell in row)
    assert "One seed" in sheet.note and "may be due to chance" in told(results)
    assert not list(report._pairs(results, Names(results)))


def test_the_findings_name_the_best_and_who_missed_the_target() -> None:
    results = made_up(("good", "bad"), ("easy", "hard"), 3, target=0.9,
                      top=lambda algorithm, setting: 0.97 - 0.2 * algorithm - 0.03 * setting)  # fmt: skip
    words = told(results)
    assert "good has the best final accuracy in easy" in words and "good has the best final accuracy in hard" in words
    assert "all others are significantly worse" in words
    assert "The target, accuracy 90.00 %, was never reached by bad in easy; by bad in hard." in words
    assert "2 of 2 pairwise differences are significant" in words
    assert "was reached by every run" in told(made_up(target=0.1, rounds=4))
    assert "was reached by no run" in told(made_up(target=0.9999))
    partly = made_up(("a",), ("iid",), 3, target=0.95)
    ends = [outcome.history[-1]["accuracy"] for outcome in partly.outcomes]
    between = made_up(
        ("a",), ("iid",), 3, target=sorted(max(line["accuracy"] for line in o.history) for o in partly.outcomes)[1]
    )
    assert len(set(ends)) == 3 and "a (2 of 3)" in told(between)


def test_runs_that_diverged_are_told() -> None:
    results = made_up(lost=lambda cell: "lost" if cell.algorithm == "scaffold" else None)
    assert "rose a thousandfold): scaffold in 6 of 6" in told(results)
    sheet = of(results, Sheet, "Results")
    ends = dict(zip(column(sheet, "algorithm"), column(sheet, "final loss"), strict=True))
    assert ends["scaffold"].text == "no number" and math.isnan(ends["scaffold"].order)


def test_tuning_shows_every_rung_what_was_chosen_and_an_edge() -> None:
    def tried(rung: int, lr: float, score: float | None, kept: bool, edge: bool = False) -> Trial:
        return Trial("fedavg", "iid", {"local.lr": lr}, rung, 3 * (rung + 1), score, kept, edge=edge)

    trials = [tried(0, 0.1, 0.8, True), tried(0, 0.3, 0.85, True), tried(0, 1.0, None, False),
              tried(1, 0.1, 0.87, False), tried(1, 0.3, 0.9, True, True)]  # fmt: skip
    chosen, every = sheets.tuning(results := made_up(trials=trials), Names(results))
    assert [text(cell) for cell in chosen.rows[0][:4]] == ["iid", "fedavg", "local.lr = 0.3", "90.00 %"]
    assert "beyond" in text(chosen.rows[0][4]) and len(chosen.rows) == 1
    assert [[text(cell) for cell in row[2:]] for row in every.rows] == [
        ["local.lr = 0.1", "80.00 %", "87.00 %"], ["local.lr = 0.3", "85.00 %", "90.00 %"],
        ["local.lr = 1", "no number", "–"],
    ]  # fmt: skip
    assert every.rows[1][4].strong and not every.rows[0][4].strong and every.rows[0][3].strong  # type: ignore[union-attr]


def test_pairs_are_sorted_by_how_sure_they_are() -> None:
    pairs = sheets.pairs(results := made_up(), Names(results))
    assert pairs is not None
    adjusted = [cell.order for cell in column(pairs, "p, adjusted")]
    assert adjusted == sorted(adjusted) and len(adjusted) == 6
    significant = column(pairs, "significant")
    assert [cell == "yes" for cell in significant] == [p < 0.05 for p in adjusted]


def test_simulated_time_is_drawn_only_where_rounds_do_not_say_as_much() -> None:
    even, uneven = (made_up(clock=clock, rounds=4) for clock in (float, lambda number: number**2 / 2))
    names = [{p.name for p in report._curves(each, Names(each)) if isinstance(p, Picture)} for each in (even, uneven)]
    assert names[0] == {"accuracy-rounds", "accuracy-bytes", "loss-rounds", "loss-bytes"}
    assert names[1] - names[0] == {"accuracy-simulated-seconds", "loss-simulated-seconds"}


def test_looks_differ_in_colour_line_and_marker() -> None:
    looks = [plots.look(at, str(at)) for at in range(24)]
    assert len({(k.colour, k.line, k.marker) for k in looks}) == 24
    assert len({k.colour for k in looks[:8]}) == 8 and len({k.marker for k in looks[:12]}) == 12
    assert len({(k.line, k.marker) for k in looks}) == 24, "without colour, too"


def curve(top: float, pace: float = 5.0, rounds: int = 50) -> plots.Band:
    x = np.arange(1.0, rounds + 1)
    y = top * (1 - np.exp(-x / pace))
    return x, y, y - 0.001, y + 0.001


def test_curves_that_crowd_near_the_top_are_pulled_apart_and_who_stays_below_is_named() -> None:
    tops = np.linspace(0.96, 0.98, 8)
    bands = {plots.look(at, f"a{at}"): curve(float(top)) for at, top in enumerate(tops)}
    bands[plots.look(8, "lost")] = curve(0.3)
    drawn = plots.curves("accuracy", "rounds", {"iid": bands}, target=0.97)
    assert drawn is not None
    figure, said = drawn
    axes = figure.axes[0]
    ends = [axes.transAxes.inverted().transform(axes.transData.transform((50, 100 * top)))[1] for top in tops]
    assert min(ends) > 0 and max(ends) < 1 and max(ends) - min(ends) > 0.25
    words = " ".join(text.get_text() for text in axes.texts)
    assert "below: lost 30 %" in words and "target 97 %" in words
    assert "stretched" in said and "named" in said
    ticks = [float(tick) for tick in axes.get_yticks()]
    assert len(ticks) >= 4 and all(tick == round(tick, 1) for tick in ticks)
    assert len(axes.lines) == 8 + 1  # and the target


def test_a_target_beyond_the_panel_is_named_and_a_flat_curve_is_drawn() -> None:
    drawn = plots.curves("accuracy", "bytes", {"iid": {plots.look(0, "a"): curve(0.5)}}, target=0.99)
    assert drawn is not None and "target 99 % ↑" in [text.get_text() for text in drawn[0].axes[0].texts]
    x = np.arange(1.0, 4.0)
    flat = plots.curves("loss", "rounds", {"iid": {plots.look(0, "a"): (x, x * 0 + 2, x * 0 + 2, x * 0 + 2)}})
    assert flat is not None
    low, high = flat[0].axes[0].get_ylim()
    assert low < 2 < high
    nothing = (np.zeros(0),) * 4
    assert plots.curves("loss", "rounds", {"iid": {plots.look(0, "a"): nothing}}) is None


def test_bands_run_from_the_lowest_to_the_highest_seed() -> None:
    results = made_up(("a",), ("iid",), 3, 5)
    _, mean, low, high = report._band(results, "a", "iid", "accuracy", "rounds")
    each = np.array([[line["accuracy"] for line in outcome.history] for outcome in results.outcomes])
    assert np.allclose(mean, each.mean(0)) and np.allclose(low, each.min(0)) and np.allclose(high, each.max(0))


def test_the_critical_difference_joins_the_cliques_and_names_everybody() -> None:
    ranks = {"a": 1.2, "b": 1.9, "c": 3.1, "d": 3.8}
    figure = critical_difference(ranks, 1.0, [["a", "b"], ["c", "d"]])
    axes = figure.axes[0]
    words = " ".join(text.get_text() for text in axes.texts)
    assert all(f"{name}" in words and f"{rank:.2f}" in words for name, rank in ranks.items())
    assert "critical difference 1.00" in words
    bars = sorted((min(line.get_xdata()), max(line.get_xdata())) for line in axes.lines if line.get_linewidth() > 3)
    assert [(pytest.approx(low, abs=0.05), pytest.approx(high, abs=0.05)) for low, high in bars] == [
        (1.2, 1.9),
        (3.1, 3.8),
    ]


def test_the_matrix_reads_row_better_than_column() -> None:
    results = made_up(("good", "bad"), ("iid",), 3, metric="loss")
    picture = next(report._pairs(results, Names(results)))
    assert isinstance(picture, Picture)
    figure = picture.figure
    axes = figure.axes[0]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["good", "bad"]
    signs = {tuple(map(round, text.get_position())): text.get_text()[0] for text in axes.texts}
    assert signs == {(1, 0): "+", (0, 1): "−"}, "a lower loss is better"


def test_figures_give_the_same_bytes_twice() -> None:
    one, two = (house.svg(critical_difference({"a": 1.0, "b": 2.0}, 0.5, [])) for _ in range(2))
    assert one == two


plain = st.recursive(
    st.booleans() | st.integers(-(2**60), 2**60) | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3), max_leaves=12,
)  # fmt: skip


@settings(max_examples=60)
@given(st.dictionaries(st.text(), plain, max_size=4))
def test_toml_is_read_back_as_it_was(tree: dict[str, Any]) -> None:
    assert tomllib.loads(toml.dumps(tree)) == tree


def test_the_configuration_in_the_report_is_the_study_with_the_same_keys() -> None:
    results = made_up(adversaries=("none", "loud"), target=0.9)
    written = next(report._origin(results, Names(results))).text  # type: ignore[union-attr]
    again = parse_study(tomllib.loads(written), "again")
    assert [cell.key for cell in again.cells()] == [outcome.cell.key for outcome in results.outcomes]
    assert column(sheets.runs(results, Names(results)), "key") == [outcome.cell.key for outcome in results.outcomes]


@given(st.text(alphabet=st.characters(codec="utf-8"), max_size=40))
def test_markdown_shows_text_as_it_is(given_text: str) -> None:
    reader = pytest.importorskip("markdown", reason="the documentation's tools are not installed")
    shown: list[str] = []
    parser = HTMLParser()
    parser.handle_data = shown.append  # type: ignore[method-assign]
    parser.feed(reader.markdown("x " + markdown.literal(given_text) + " x"))
    parser.close()
    expected = " ".join("".join(c if c.isprintable() else " " for c in given_text).split())
    assert " ".join("".join(shown).split()) == " ".join(f"x {expected} x".split())


def test_a_study_that_was_run_reports_its_plan_and_no_place_of_the_machine(tmp_path: Path) -> None:
    results = compare(["fedavg", "fedprox"], dataset="digits", model="logistic", parties=4, seeds=1, rounds=2, jobs=1,
                      folder=tmp_path / "study")  # fmt: skip
    sections = report.contents(results)[2]
    page = render("x", [], [section for section in sections if not isinstance(section, Picture)])
    assert "torch" in page and "engine" in page and str(tmp_path) not in page
    assert of(results, Sheet, "Results").rows and not results.failed


def test_pictures_of_an_earlier_report_go_and_files_of_the_users_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write(*names: str) -> None:
        drawn: list[Section] = [Picture(name, "![](plots/mine.png)", house.blank(1, 1), name) for name in names]
        code = Detail("Exact configuration", 'name = "![x](plots/mine.png)"', code=True)
        monkeypatch.setattr(report, "contents", lambda results: ("![x](plots/mine.png)", [], [*drawn, code]))
        report.write(made_up(seeds=1, rounds=1), tmp_path)

    write("final", "loss-simulated-seconds", "partition-2")
    (tmp_path / "plots" / "mine.png").write_bytes(b"mine")
    write("final", "partition-1")
    write("final", "partition-1")
    left = {path.name for path in (tmp_path / "plots").iterdir()}
    assert left == {"final.png", "final.svg", "partition-1.png", "partition-1.svg", "mine.png"}


def test_numbers_on_different_test_samples_are_not_compared() -> None:
    plain = made_up()
    history = [{**outcome.history[-1], "party_accuracy_mean": 0.5} for outcome in plain.outcomes]
    outcomes = [replace(outcome, summary={**outcome.summary, "tested": "the parties' own test samples"
                                          if outcome.cell.algorithm == "scaffold" else "the test set"})
                for outcome in plain.outcomes]  # fmt: skip
    results = replace(plain, outcomes=outcomes)
    assert plain.tested == {} and set(results.tested) == {"fedavg", "fedprox", "scaffold"}
    assert plain.metric == results.metric == "accuracy" and not any(row["best"] for row in results.table())
    alike = [replace(outcome, history=[line]) for outcome, line in zip(outcomes, history, strict=True)]
    assert replace(plain, outcomes=alike).metric == "party_accuracy_mean"  # of the same samples for all
    sheet = of(results, Sheet, "Results")
    assert "on the test set: fedavg and fedprox; on the parties' own test samples: scaffold" in str(sheet.note)
    for name in ("final accuracy, %", "final loss"):
        assert not any(cell.strong for cell in column(sheet, name))
        assert any(cell.strong for cell in column(of(plain, Sheet, "Results"), name))
