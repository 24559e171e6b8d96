"""The table of all metrics of a study, where its runs measure more than the metric it compares by."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from hansa.metrics import statistics
from hansa.metrics.measures import measure_of, reaches_beyond
from hansa.metrics.names import higher_is_better, single_numbers
from hansa.metrics.statistics import Estimate
from hansa.plumbing.errors import HansaError
from hansa.report.html import Sheet, TableCell
from hansa.report.study_display import StudyDisplay
from hansa.report.study_findings import Names
from hansa.report.study_tables import column, entry, seeds_note

USUAL = ("accuracy", "loss")  # the table of results has them
OVER = ("{}", "party_{}_mean", "party_{}_worst_tenth")  # over all test samples, and over parties


def sections(results: StudyDisplay, names: Names) -> Iterator[Sheet]:
    """One table: a row for each setting and metric, a column for each algorithm; nothing without chosen metrics."""
    chosen = _chosen(results)
    if not set(chosen) - {results.metric, *USUAL}:
        return
    many = len(results.settings) > 1
    rows: list[list[str | TableCell]] = []
    for setting in results.settings:
        for metric in (over.format(name) for name in chosen for over in OVER):
            cells = _cells(results, setting, metric)
            if cells is not None:
                label = column(f"final_{metric}", results.metric, ()).header.removeprefix("final").replace("\n", " ")
                rows.append([label.strip(), *([names.settings[setting]] if many else []), *cells])
    if rows:
        header = ["metric", *(["setting"] if many else []), *(names.algorithms[name] for name in results.algorithms)]
        yield Sheet("All metrics", header, rows, note=f"At the end. {seeds_note(results, rows)}", words=1 + many,
                    grouped=1 if many else None)  # fmt: skip


def _chosen(results: StudyDisplay) -> list[str]:
    """The names of the single numbers that the study's runs measure by choice, and the usual ones."""
    found: dict[str, None] = {}
    for outcome in {each.cell.algorithm: each for each in results.outcomes}.values():
        try:
            found |= dict.fromkeys(single_numbers(outcome.cell.experiment.run.metrics))
        except HansaError:  # a module of the user's own that is not here any more
            continue
    return [*found, *(name for name in USUAL if name not in found)] if found else []


def _cells(results: StudyDisplay, setting: str, metric: str) -> list[TableCell] | None:
    """The final metric of each algorithm over seeds, the best one strong; None if no run has it."""
    estimates: dict[str, Estimate | None] = {}
    for algorithm in results.algorithms:
        values = [_last(outcome.history).get(metric) for outcome in results.runs(algorithm, setting)]
        estimates[algorithm] = None if all(value is None for value in values) else statistics.estimate(values)
    means = {name: each.mean for name, each in estimates.items() if each is not None and each.mean is not None}
    if not means:
        return None
    ranked = [mean for name, mean in means.items() if name in results.contenders]
    best = (max if higher_is_better(metric) else min)(ranked) if len(set(ranked)) > 1 else None
    shape, measure = column(f"final_{metric}", results.metric, ()), measure_of(f"final_{metric}", results.metric)
    return [entry(each, shape, reaches_beyond(each, measure),
                  name in results.contenders and best is not None and means.get(name) == best, False)
            for name, each in estimates.items()]  # fmt: skip


def _last(history: list[Mapping[str, Any]]) -> Mapping[str, Any]:
    """The last evaluation of a run."""
    return next((line for line in reversed(history) if "loss" in line or "party_loss_mean" in line), {})
