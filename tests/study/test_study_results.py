"""The results of a study: measures, estimates, curves, ranks, saving and loading."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

import hansa
from hansa.plumbing.errors import ConfigError
from hansa.study import Cell, Outcome, Results, parse_study


def line(number: int, accuracy: float | None = None, loss: float | None = 1.0, **more: Any) -> dict[str, Any]:
    measured = {} if accuracy is None else {"accuracy": accuracy, "loss": loss}
    return {"round": number, "bytes_up": 10, "bytes_down": 20, "simulated_seconds": 2.0 * number, **measured, **more}


def outcome(algorithm: str, seed: int, accuracies: list[float | None], **more: Any) -> Outcome:
    history = [line(i + 1, value) for i, value in enumerate(accuracies)]
    cell = Cell(algorithm, "iid", "", "", seed, {"task": {"dataset": "digits", "model": "2nn"}, "run": {"seed": seed}})
    summary = {"bytes_up": 10 * len(history), "bytes_down": 20 * len(history), "seconds": 1.5, "simulated_seconds": 9.0}
    return Outcome(cell, history, summary, **more)


def results(*outcomes: Outcome, target: float | None = 0.9) -> Results:
    names = list(dict.fromkeys(each.cell.algorithm for each in outcomes))
    seeds = sorted({each.cell.seed for each in outcomes})
    tree = {"study": {"algorithms": [{"name": "fedavg", "label": name} for name in names], "seeds": seeds}}
    return Results(replace(parse_study(tree, "test"), target=target), list(outcomes), [])


def test_measures_are_of_the_last_and_the_best_evaluation_and_of_the_first_that_meets_the_target() -> None:
    run = outcome("a", 0, [0.5, None, 0.92, 0.95, 0.91, None])
    found = run.measures(0.92)
    assert (found["final_accuracy"], found["best_accuracy"]) == (0.91, 0.95)
    assert found["rounds_to_target"] == 3 and found["bytes_to_target"] == 90  # of all three rounds
    assert found["simulated_seconds_to_target"] == 6.0
    assert (found["bytes_up"], found["bytes_down"], found["seconds"]) == (60.0, 120.0, 1.5)
    never = run.measures(0.96)
    assert never["rounds_to_target"] is None and never["bytes_to_target"] is None


def test_a_loss_is_better_where_it_is_less() -> None:
    history = [line(i + 1, 0.5, loss) for i, loss in enumerate([3.0, 1.0, 2.0])]
    found = replace(outcome("a", 0, []), history=history).measures(1.0, "loss")
    assert (found["final_loss"], found["best_loss"], found["rounds_to_target"]) == (2.0, 1.0, 2.0)


def test_a_diverged_run_has_no_final_loss_and_ranks_last() -> None:
    gone = replace(outcome("bad", 0, []), history=[line(1, 0.3, 2.0), line(2, 0.1, None)])
    fine = replace(outcome("good", 0, []), history=[line(1, 0.3, 2.0), line(2, 0.1, 9.0)])
    found = results(gone, fine)
    found = replace(found, study=replace(found.study, metric="loss", target=None))
    assert gone.measures()["final_loss"] is None and gone.measures()["best_loss"] == 2.0
    assert list(found.ranks().ranks) == ["good", "bad"]


def test_estimates_are_over_seeds_and_a_target_missed_is_counted() -> None:
    found = results(*(outcome("a", seed, [0.5, value]) for seed, value in enumerate((0.90, 0.92, 0.85))))
    final = found.estimate("final_accuracy", "a", "iid")
    assert final is not None and final.mean == pytest.approx(0.89) and final.n == 3 and final.reached is None
    low, high = stats.t.interval(0.95, 2, loc=0.89, scale=stats.sem([0.90, 0.92, 0.85]))
    assert (final.low, final.high) == pytest.approx((low, high))
    rounds = found.estimate("rounds_to_target", "a", "iid")
    assert rounds is not None and (rounds.mean, rounds.reached, rounds.n) == (2.0, 2, 3)
    assert found.estimate("worst_tenth", "a", "iid") is None  # never measured
    assert results(outcome("a", 0, [0.5]), target=None).estimate("rounds_to_target", "a", "iid") is None


def test_a_failed_run_counts_nowhere_but_among_the_failed() -> None:
    bad = outcome("a", 1, [0.1], failed="it broke")
    found = results(outcome("a", 0, [0.5]), bad, outcome("b", 0, [0.6]), outcome("b", 1, [0.7]))
    final = found.estimate("final_accuracy", "a", "iid")
    assert final is not None and (final.mean, final.n) == (0.5, 1)
    assert found.failed == [bad] and found.ranks().blocks == 1
    assert found.differences("iid")[0].n == 1


def test_a_curve_has_the_mean_and_interval_at_every_round_that_all_runs_have() -> None:
    found = results(outcome("a", 0, [0.2, None, 0.6, 0.8]), outcome("a", 1, [0.4, 0.5, 0.8]))
    x, mean, low, high = found.curve("a", "iid", "accuracy")
    assert x.tolist() == [1.0, 3.0] and mean == pytest.approx([0.3, 0.7])
    half = stats.t.ppf(0.975, 1) * 0.1
    assert low == pytest.approx(mean - half) and high == pytest.approx(mean + half)
    x, mean, _, _ = found.curve("a", "iid", "accuracy", "bytes")
    assert x[0] == 30 and x[-1] == 90 and mean[0] == pytest.approx(0.3) and mean[-1] == pytest.approx(0.7)
    alone = results(outcome("a", 0, [0.2, 0.4]))
    x, mean, low, high = alone.curve("a", "iid", "accuracy", "simulated_seconds")
    assert x.tolist() == [2.0, 4.0] and np.array_equal(mean, low) and np.array_equal(mean, high)
    assert len(alone.curve("a", "iid", "auc")[0]) == 0


def test_leaders_are_the_best_and_those_not_significantly_worse() -> None:
    runs = [outcome(name, seed, [value + 0.01 * seed + wiggle * (seed % 2)])
            for name, value, wiggle in (("best", 0.9, 0.0), ("alike", 0.89, 0.08), ("worse", 0.5, 0.001))
            for seed in range(5)]  # fmt: skip
    found = results(*runs)
    assert found.order("iid")[-1] == "worse" and set(found.leaders("iid")) == {"best", "alike"}
    rows = found.table()
    assert [row["best"] for row in rows] == [True, False, False] and [row["leads"] for row in rows][2] is False
    html = found._repr_html_()
    assert html.count("<tr>") == 4 and " *<" in html and "worse<" in html


def test_labels_are_escaped_in_html() -> None:
    assert "<script>" not in results(outcome("<script>", 0, [0.5]))._repr_html_()


def test_unknown_names_are_one_sentence() -> None:
    found = results(outcome("a", 0, [0.5]))
    with pytest.raises(ConfigError, match="unknown measure 'final_acuracy'; did you mean 'final_accuracy'"):
        found.estimate("final_acuracy", "a", "iid")
    with pytest.raises(ConfigError, match="the study has no 'b'"):
        found.curve("b", "iid", "accuracy")


@pytest.mark.slow
def test_results_come_back_from_their_folder_as_they_were(tmp_path: Path) -> None:
    found = hansa.compare(["fedavg", "fedprox"], partitions=["iid", "dirichlet:0.5"], parties=4, seeds=2, rounds=2,
                          target=0.2, jobs=1, folder=tmp_path / "one", model={"name": "2nn", "hidden": 16},
                          tune={"local.lr": [0.03, 0.1]})  # fmt: skip
    back = Results.load(tmp_path / "one")
    assert back.ranks() == found.ranks() and back.trials == found.trials and back.rows() == found.rows()
    assert back.table() == found.table() and back.metric == "accuracy" and back.study.target == 0.2
    assert [each.cell.key for each in back.outcomes] == [each.cell.key for each in found.outcomes]
    assert back.settings == ["iid", "dirichlet:0.5"] and back.algorithms == ["fedavg", "fedprox"]
    assert found.estimate("worst_tenth", "fedavg", "iid") is not None  # parties have tests of their own by default
    with pytest.raises(ConfigError, match="holds no results of a study"):
        Results.load(tmp_path)


def test_results_are_a_frame_with_a_row_a_run() -> None:
    pandas = pytest.importorskip("pandas", reason="pandas is an extra")
    frame = results(outcome("a", 0, [0.5]), outcome("b", 0, [0.6])).to_frame()
    assert isinstance(frame, pandas.DataFrame) and list(frame["algorithm"]) == ["a", "b"]
    assert list(frame["final_accuracy"]) == [0.5, 0.6]
