"""Measures of a study follow its metric, and impossible intervals are marked as meaningless."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from made_up import made_up

from hansa.cli.compare import print_results
from hansa.metrics.measures import measure_of, reaches_beyond, written
from hansa.metrics.names import higher_is_better
from hansa.metrics.statistics import Estimate
from hansa.report.study_findings import Names
from hansa.report.study_plots import is_percent, title
from hansa.report.study_report import write
from hansa.report.study_tables import main
from hansa.study.results import Results


def last(found: Results, algorithm: str, setting: str, name: str) -> list[float]:
    return [outcome.history[-1][name] for outcome in found.runs(algorithm, setting)]


@pytest.mark.parametrize("metric", ["auc", "accuracy", "party_auc_mean"])
def test_the_worst_tenth_is_of_the_metric_that_the_study_compares_by(metric: str) -> None:
    found = made_up(("fedavg", "scaffold"), ("iid",), metric="auc")
    found = replace(found, study=replace(found.study, metric=metric))
    plain = {"auc": "auc", "accuracy": "accuracy", "party_auc_mean": "auc"}[metric]
    worst = list(found.values("worst_tenth", "fedavg", "iid").values())
    assert worst == last(found, "fedavg", "iid", f"party_{plain}_worst_tenth")
    assert measure_of("worst_tenth", metric).label == f"worst tenth's {'AUC' if plain == 'auc' else plain}"


@pytest.mark.slow
def test_every_view_of_a_study_by_auc_shows_the_worst_tenth_of_auc(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = made_up(("fedavg", "scaffold"), ("iid",), metric="auc")
    worst = found.estimate("worst_tenth", "fedavg", "iid")
    assert worst is not None and worst.mean == pytest.approx(
        np.mean(last(found, "fedavg", "iid", "party_auc_worst_tenth"))
    )
    wrong = float(np.mean(last(found, "fedavg", "iid", "party_accuracy_worst_tenth")))
    print_results(found, [], as_json=False)
    printed = capsys.readouterr().out
    assert f"{worst.mean:.3f}" in printed and f"{wrong:.3f}" not in printed
    write(found, tmp_path)
    page = (tmp_path / "report.md").read_text()
    assert "worst tenth's AUC, %" in page and f"{100 * worst.mean:.2f}" in page
    assert "worst tenth's accuracy" not in page and f"{100 * wrong:.2f}" not in page
    html = found._repr_html_()
    assert "worst tenth&#x27;s AUC" in html and f"{worst.mean:.4f}" in html
    assert next(row["worst_tenth"] for row in found.rows()) == last(found, "fedavg", "iid", "party_auc_worst_tenth")[0]


def test_of_a_loss_the_least_worst_tenth_is_the_best_in_the_report() -> None:
    assert measure_of("worst_tenth", "loss").higher is False and measure_of("worst_tenth", "auc").higher is True
    assert measure_of("best_auc", "auc").higher is True and measure_of("final_rmse", "rmse").higher is False


def test_the_best_of_a_metric_beside_accuracy_is_bold_in_the_report() -> None:
    found = made_up(("fedavg", "scaffold"), ("iid",), metric="auc")
    sheet = main(found, Names(found))
    assert sheet is not None
    column = list(sheet.header).index("best\nAUC, %")
    assert [row[column].strong for row in sheet.rows] == [True, False]  # type: ignore[union-attr]


def test_a_variance_over_parties_is_no_share_and_is_named() -> None:
    assert (
        not is_percent("party_accuracy_variance")
        and title("party_accuracy_variance") == "accuracy, variance over parties"
    )
    assert is_percent("party_accuracy_mean") and not higher_is_better("party_accuracy_variance")


@pytest.mark.parametrize(
    ("measure", "metric", "low", "high", "beyond"),
    [("final_accuracy", "accuracy", -0.6, 2.5, True), ("final_accuracy", "accuracy", 0.8, 1.01, True),
     ("final_accuracy", "accuracy", 0.8, 0.99, False), ("final_loss", "loss", -0.1, 0.5, True),
     ("final_loss", "loss", 0.1, 5.0, False), ("final_r2", "r2", -3.0, 0.5, False), ("final_r2", "r2", 0.5, 1.5, True),
     ("worst_tenth", "auc", 0.2, 1.2, True), ("worst_tenth", "rmse", 0.2, 1.2, False),
     ("rounds_to_target", "accuracy", -59.9, 117.9, True), ("best_auc", "auc", 1.0, 1.0, False)],
)  # fmt: skip
def test_an_interval_that_reaches_beyond_the_possible_values_is_marked(
    measure: str, metric: str, low: float, high: float, beyond: bool
) -> None:
    found = Estimate((low + high) / 2, low, high, 2)
    assert reaches_beyond(found, measure_of(measure, metric)) is beyond
    assert written(found, measure=measure_of(measure, metric)).endswith("!") is beyond


@pytest.mark.slow
def test_a_meaningless_interval_is_said_to_be_one_wherever_it_is_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = made_up(("fedavg", "scaffold"), ("iid",), seeds=2, top=lambda algorithm, setting: 0.9999)
    found.outcomes[0].history[-1]["accuracy"] = 0.7
    print_results(found, [], as_json=False)
    printed = capsys.readouterr().out
    assert re.search(r"0\.\d{3} ± 1\.\d{3}!", printed) and "meaningless" in printed
    write(found, tmp_path)
    page = (tmp_path / "report.md").read_text()
    assert re.search(r"± 1\d\d\.\d\d\\?!", page) and "beyond the possible values, so it is meaningless" in page
    assert "!" in found._repr_html_() and "meaningless" in found._repr_html_()
    steady = made_up(("fedavg", "scaffold"), ("iid",), seeds=3, top=lambda algorithm, setting: 0.6)
    print_results(steady, [], as_json=False)
    assert "meaningless" not in capsys.readouterr().out
