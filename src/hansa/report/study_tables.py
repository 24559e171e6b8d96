"""The tables of a study's report."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from hansa.metrics.measures import BEYOND, OVER_PARTIES, TO_TARGET, measure_of, number, over_parties, reaches_beyond
from hansa.metrics.statistics import Estimate
from hansa.report.html import Sheet, TableCell
from hansa.report.plots import uneven, unit
from hansa.report.study_display import StudyDisplay
from hansa.report.study_findings import Names, line, listed, value
from hansa.report.study_plots import is_percent, title

PAIRS = 150  # maximum number of pairs listed
TIMES = {"simulated_seconds_to_target": "simulated s\nto target", "simulated_seconds": "simulated\ns",
         "seconds": "wall-clock\ns"}  # fmt: skip


@dataclass(frozen=True)
class Column:
    """A column of the main table: the measure, its header, and its number format."""

    measure: str
    header: str
    scale: float
    write: Callable[[float], str]


def timed(results: StudyDisplay) -> bool:
    """Whether simulated time was recorded and rounds differ in length."""
    return any(uneven(outcome.history) for outcome in results.outcomes)


def main(results: StudyDisplay, names: Names) -> Sheet | None:
    """The main table: one row per setting and algorithm, best first; None if nothing was measured."""
    best_metric = f"best_{results.metric}"
    rows = [
        row | {best_metric: results.estimate(best_metric, row["algorithm"], row["setting"])} for row in results.table()
    ]
    columns = [column for column in _columns(results, rows) if any(_known(row[column.measure]) for row in rows)]
    if not columns:
        return None
    many = len(results.settings) > 1
    compared = len(results.algorithms) > 1
    tested = compared and len(results.study.seeds) > 1
    best = {setting: _best(results, rows, setting, columns) if compared else {} for setting in results.settings}
    out: list[list[str | TableCell]] = []
    for row in rows:
        cells: list[str | TableCell] = [names.algorithms[row["algorithm"]]]
        cells += [names.settings[row["setting"]]] if many else []
        for column in columns:
            strong = row["algorithm"] in best[row["setting"]].get(column.measure, ())
            main_column = column.measure == f"final_{results.metric}"
            alike = main_column and tested and row["leads"] and not row["best"]
            estimate = row[column.measure]
            if estimate is None and row.get(column.measure.replace("final_", "best_")) is not None:
                estimate = Estimate(None, None, None, 0)  # was measured, but is not finite at the end
            beyond = reaches_beyond(estimate, measure_of(column.measure, results.metric))
            cells.append(entry(estimate, column, beyond, row["best"] if main_column and compared else strong, alike))
        out.append(cells)
    header = ["algorithm", *(["setting"] if many else []), *(column.header for column in columns)]
    return Sheet("Results", header, out, note=_note(results, out), words=1 + many,
                 grouped=1 if many else None)  # fmt: skip


def _known(estimate: Estimate | None) -> bool:
    return estimate is not None and (estimate.mean is not None or estimate.reached is not None)


def _columns(results: StudyDisplay, rows: Sequence[dict[str, Any]]) -> list[Column]:
    metric = results.metric
    shown = list(dict.fromkeys([f"final_{metric}", f"best_{metric}", "final_accuracy", "best_accuracy", "final_loss",
                                "best_loss", *OVER_PARTIES]))  # fmt: skip
    time = ["simulated_seconds_to_target", "simulated_seconds"] if timed(results) else []
    spent = ["rounds_to_target", *time[:1], "bytes_to_target", "bytes_up", "bytes_down", *time[1:], "seconds"]
    out = []
    for measure in [*shown, *spent]:
        out.append(column(measure, metric, [_mean(row.get(measure)) for row in rows]))
    return out


def column(measure: str, metric: str, means: Sequence[float | None]) -> Column:
    """The column of a measure in a study that compares by `metric`; `means` decide the unit of bytes."""
    of = over_parties(measure, metric) if measure in OVER_PARTIES else measure.partition("_")[2]
    if "bytes" in measure:
        scale, name = unit(max((mean for mean in means if mean is not None), default=0.0))
        words = {"bytes_to_target": " to\ntarget", "bytes_up": "\nup", "bytes_down": "\ndown"}[measure]
        return Column(measure, f"{name}{words}", 1 / scale, lambda x: f"{x:,.3g}" if x < 100 else f"{x:,.0f}")
    if measure in TIMES:
        return Column(measure, TIMES[measure], 1.0, lambda x: f"{x:,.1f}")
    if measure == "rounds_to_target":
        return Column(measure, "rounds\nto target", 1.0, lambda x: f"{x:,.0f}" if x == round(x) else f"{x:,.1f}")
    words = measure_of(measure, metric).label if measure in OVER_PARTIES else f"{measure.partition('_')[0]} {title(of)}"
    words = words.removesuffix(", %")
    if is_percent(of):
        return Column(measure, f"{_broken(words)}, %", 100.0, lambda x: f"{x:.2f}")
    return Column(measure, _broken(words), 1.0, number)


def _broken(words: str) -> str:
    """Break a header into two lines, so that columns stay narrow."""
    first, _, last = words.rpartition(" ")
    return f"{first}\n{last}" if first else last


def _mean(estimate: Estimate | None) -> float | None:
    return None if estimate is None else estimate.mean


def _best(
    results: StudyDisplay, rows: Sequence[dict[str, Any]], setting: str, columns: Sequence[Column]
) -> dict[str, list[str]]:
    """By measure, the algorithms with the best mean of a setting; none if all are equal, nor for wall-clock time."""
    out: dict[str, list[str]] = {}
    mine = [row for row in rows if row["setting"] == setting and row["algorithm"] in results.contenders]
    for column in columns:
        measure = column.measure
        if results.tested and measure.startswith(("final_", "best_")) and "_party_" not in measure:
            continue  # on other samples for some algorithms
        higher = measure_of(measure, results.metric).higher
        estimates = {row["algorithm"]: row[measure] for row in mine if _mean(row[measure]) is not None}
        if measure in TO_TARGET and estimates:  # runs that reached the target count first
            most = max(each.reached or 0 for each in estimates.values())
            estimates = {name: each for name, each in estimates.items() if each.reached == most}
        means = {name: each.mean for name, each in estimates.items()}
        if higher is None or measure == "seconds" or (len(set(means.values())) < 2 and measure not in TO_TARGET):
            continue
        if means and (len(set(means.values())) > 1 or len(means) < len(mine)):
            top = max(means.values()) if higher else min(means.values())
            out[measure] = [name for name, mean in means.items() if mean == top]
    return out


def entry(estimate: Estimate | None, column: Column, beyond: bool, strong: bool, alike: bool) -> TableCell:
    """Format an estimate: mean, half the interval, number of runs with a value, and marks.

    One mark is for an interval beyond the possible values, one for "not significantly worse than the best"."""
    if estimate is None:
        return TableCell("–", math.nan)
    if estimate.mean is None:
        return TableCell(f"0 of {estimate.n}" if column.measure in TO_TARGET else "no number", math.nan)
    text = column.write(column.scale * estimate.mean)
    if estimate.low is not None and estimate.high is not None and estimate.high > estimate.low:
        text += f" ± {column.write(column.scale * (estimate.high - estimate.low) / 2)}{BEYOND if beyond else ''}"
    if estimate.reached is not None:
        text += f" ({estimate.reached} of {estimate.n})"
    return TableCell(f"{text} ≈" if alike else text, column.scale * estimate.mean, strong)


def seeds_note(results: StudyDisplay, rows: Sequence[Sequence[str | TableCell]]) -> str:
    """How to read the estimates of a table."""
    seeds, cells = len(results.study.seeds), [cell for row in rows for cell in row if isinstance(cell, TableCell)]
    notes = [f"Means over {seeds} seeds ± half of the 95 % interval." if seeds > 1 else "One seed: no intervals."]
    if any(cell.strong for cell in cells):
        notes.append("Bold: the best of the setting.")
    if any(BEYOND in cell.text for cell in cells):
        notes.append("!: the interval reaches beyond the possible values, so it is meaningless; more seeds are needed.")
    return " ".join(notes)


def tested_note(results: StudyDisplay) -> list[str]:
    """Which algorithms were tested on which samples, where these differ."""
    by_samples: dict[str, list[str]] = {}
    for name, samples in results.tested.items():
        by_samples.setdefault(samples, []).append(line(name))
    each = "; ".join(f"on {samples}: {listed(names)}" for samples, names in by_samples.items())
    if not each:
        return []
    return [f"Measured {each}. Such numbers are not compared; means over parties are on the same samples for all."]


def _note(results: StudyDisplay, rows: Sequence[Sequence[str | TableCell]]) -> str:
    target = results.study.target
    cells = [cell for row in rows for cell in row if isinstance(cell, TableCell)]
    notes = [seeds_note(results, rows)]
    if any(cell.text.endswith("≈") for cell in cells):
        notes.append(
            f"≈: its final {title(results.metric).removesuffix(', %')} is not significantly worse than the best."
        )
    if target is not None:
        notes.append(
            f"To target: until {title(results.metric).removesuffix(', %')} first reached "
            f"{value(target, results.metric)}; mean of the runs that reached it, and their number."
        )
    notes += tested_note(results)
    if results.baselines:
        notes.append(f"Baselines, not ranked and not tested: {listed([line(name) for name in results.baselines])}.")
    notes.append("Up: from the parties; down: to the parties. Sums over all parties, without evaluation.")
    return " ".join(notes)


def pairs(results: StudyDisplay, names: Names) -> Sheet | None:
    """Every pair of algorithms in every setting, smallest p value first; None if nothing was tested."""
    pairs = [pair for setting in results.settings for pair in results.differences(setting) if pair.p is not None]
    if not pairs:
        return None
    pairs.sort(key=lambda pair: (pair.adjusted, pair.p))
    percent = is_percent(results.metric)
    scale = 100.0 if percent else 1.0
    unit_name = ",\n% points" if percent else ""
    rows: list[list[str | TableCell]] = []
    for pair in pairs[:PAIRS]:
        interval = f"{_signed(scale * pair.low)} to {_signed(scale * pair.high)}" if pair.low is not None else "–"  # type: ignore[operator]
        rows.append([
            names.settings[pair.setting], names.algorithms[pair.first], names.algorithms[pair.second],
            TableCell(_signed(scale * pair.difference), scale * pair.difference, pair.significant), interval,
            str(pair.n), _p(pair.p), _p(pair.adjusted), "yes" if pair.significant else "no",
        ])  # fmt: skip
    header = ("setting", "first", "second", f"first − second{unit_name}", f"95 % interval{unit_name}", "seeds", "p",
              "p, adjusted", "significant")  # fmt: skip
    note = (
        f"Differences of the final {title(results.metric).removesuffix(', %')} in pairs of runs with the same seed; "
        "paired t tests, adjusted over the pairs of a setting (Holm 1979), significant below 0.05."
    )
    if len(pairs) > PAIRS:
        note += f" The {PAIRS} pairs with the smallest p values, of {len(pairs):,}."
    drop = 0 if len(results.settings) > 1 else 1
    return Sheet("Pair by pair", header[drop:], [row[drop:] for row in rows], note=note, words=3 - drop, under=True)


def _signed(number_: float) -> str:
    return f"{number_:+.4f}".replace("-", "−") if abs(number_) < 0.01 else f"{number_:+.2f}".replace("-", "−")


def _p(p: float | None) -> TableCell:
    if p is None:
        return TableCell("–", math.nan)
    return TableCell("< 0.0001" if p < 1e-4 else f"{p:.4f}", p)


def tuning(results: StudyDisplay, names: Names) -> list[Sheet]:
    """Tables of the chosen values, and of all trials by rung."""
    if not results.trials:
        return []
    groups: dict[tuple[str, str], list[Any]] = {}
    for trial in results.trials:
        groups.setdefault((trial.algorithm, trial.setting), []).append(trial)
    chosen: list[list[str | TableCell]] = []
    tried: list[list[str | TableCell]] = []
    rungs = sorted({trial.rung for trial in results.trials})
    for (algorithm, setting), trials in groups.items():
        labels: list[str | TableCell] = [
            names.settings.get(setting, line(setting)),
            names.algorithms.get(algorithm, line(algorithm)),
        ]
        last = max(trial.rung for trial in trials)
        won = [trial for trial in trials if trial.rung == last and trial.kept]
        for trial in won:
            note = "smallest or largest value tried; a better value may lie beyond" if trial.edge else ""
            chosen.append([*labels, written(trial.values), _score(trial), note])
        candidates: dict[str, dict[int, Any]] = {}
        for trial in trials:
            candidates.setdefault(written(trial.values), {})[trial.rung] = trial
        for values, by_rung in candidates.items():
            scores = [_score(by_rung.get(rung)) for rung in rungs]
            tried.append([*labels, values, *scores])
    metric = title(results.trials[0].metric).removesuffix(", %")
    rounds = {rung: max(trial.rounds for trial in results.trials if trial.rung == rung) for rung in rungs}
    header = [
        "setting",
        "algorithm",
        "values",
        *(f"rung {k + 1},\n{rounds[rung]:,} rounds" for k, rung in enumerate(rungs)),
    ]
    return [
        Sheet("Tuning", ("setting", "algorithm", "chosen", f"score: {metric}", "remark"), chosen, words=3, prose=True,
              note="All algorithms had the same number of candidates; the comparison uses the best candidate."),
        Sheet("All trials", header, tried, words=3, grouped=1, under=True,
              note=f"Successive halving: the score ({metric}, mean over the tuning seeds) after each rung; bold "
              "continued to the next rung, or was chosen. –: dropped earlier."),
    ]  # fmt: skip


def written(values: dict[str, Any]) -> str:
    """Format chosen values."""
    return line(
        ", ".join(
            f"{name} = {value:g}" if isinstance(value, float) else f"{name} = {value}" for name, value in values.items()
        )
    )


def _score(trial: Any) -> TableCell:
    if trial is None:
        return TableCell("–", math.nan)
    if trial.score is None or not math.isfinite(trial.score):
        return TableCell("no number", math.nan)
    text = value(trial.score, trial.metric)
    return TableCell(text, trial.score, trial.kept)


def failures(results: StudyDisplay, names: Names) -> Sheet | None:
    """The failed runs, with the reasons."""
    rows = [
        (*_who(outcome.cell, names), str(outcome.cell.seed), line(outcome.failed or "")) for outcome in results.failed
    ]
    return Sheet("Failed runs", ("setting", "algorithm", "seed", "why"), rows, words=2, prose=True) if rows else None


def _who(cell: Any, names: Names) -> tuple[str, str]:
    return names.settings[cell.setting], names.algorithms[cell.algorithm]


def runs(results: StudyDisplay, names: Names) -> Sheet:
    """All runs with their keys."""
    rows = []
    for outcome in results.outcomes:
        last = outcome.history[-1]["round"] if outcome.history else 0
        ended = "failed" if outcome.failed is not None else str(outcome.summary.get("stopped") or "not finished")
        rows.append((*_who(outcome.cell, names), str(outcome.cell.seed), f"{last:,}", outcome.cell.key, line(ended)))
    note = "The key is a hash of the run's whole configuration and of everything else that its numbers depend on."
    return Sheet("Runs", ("setting", "algorithm", "seed", "rounds", "key", "ended because"), rows, words=2, prose=True,
                 note=note, under=True)  # fmt: skip
