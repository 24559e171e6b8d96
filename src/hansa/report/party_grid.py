"""The scores of each party under each algorithm: a table and a heat map.

The score is the study's metric on the party's own test samples at the end, its mean over seeds.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from hansa.metrics.names import higher_is_better, plain_metric
from hansa.report.html import Picture, Section, Sheet, TableCell
from hansa.report.plots import blank, shortened, shown
from hansa.report.study_display import StudyDisplay
from hansa.report.study_findings import Names
from hansa.report.study_plots import is_percent, title

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PARTIES = 60  # maximum number of parties in the table and the heat map
WRITTEN = 12  # up to this many rows or columns, the cells of the heat map have numbers
Grid = dict[str, dict[str, float]]  # scores by party and algorithm


def last_scores(history: Sequence[Mapping[str, Any]], metric: str) -> dict[str, float]:
    """Each party's own metric in the last evaluation of a run; of many parties, those that the line lists."""
    line: Mapping[str, Any] = next(
        (each for each in reversed(history) if each.get("parties") or each.get("worst_parties")), {}
    )
    own = line.get("parties") or line.get("worst_parties") or {}
    plain = plain_metric(metric)
    return {party: values[plain] for party, values in own.items() if values.get(plain) is not None}


def grid(results: StudyDisplay, setting: str) -> Grid:
    """The scores of a setting: the mean over the seeds in which a party has one."""
    out: dict[str, dict[str, list[float]]] = {}
    for algorithm in results.algorithms:
        for outcome in results.runs(algorithm, setting):
            for party, score in last_scores(outcome.history, results.metric).items():
                out.setdefault(party, {}).setdefault(algorithm, []).append(score)
    return {party: {name: float(np.mean(each)) for name, each in by.items()} for party, by in out.items()}


def sections(results: StudyDisplay, names: Names) -> Iterator[Section]:
    """For each setting the table of parties and its heat map; nothing where no party has a score of its own."""
    many = len(results.settings) > 1
    for number, setting in enumerate(results.settings):
        scores = grid(results, setting)
        if not scores or len(results.algorithms) < 2:
            continue
        metric = f"party_{plain_metric(results.metric)}_mean"
        where = f" ({names.settings[setting]})" if many else ""
        listed = _worst_first(scores, metric)[:PARTIES]
        note = f"{_words(metric)} of each party on its own test samples at the end, mean over seeds."
        if len(scores) > len(listed):
            note += f" The {len(listed)} of {len(scores)} parties with the lowest scores."
        columns = {name: names.algorithms[name] for name in results.algorithms}
        yield Sheet(f"Parties{where}", ("party", *columns.values()),
                    [_row(party, scores[party], columns, metric) for party in listed], note=note)  # fmt: skip
        gaps = any(len(scores[party]) < len(columns) for party in listed)
        caption = f"{note} Darker is better{'; a cross: no score' if gaps else ''}."
        suffix = f"-{number + 1}" if many else ""
        yield Picture(f"Parties by algorithm{where}", caption, heat_map(scores, listed, columns, metric),
                      name=f"parties{suffix}")  # fmt: skip


def _words(metric: str) -> str:
    words = title(plain_metric(metric))
    return words[0].upper() + words[1:]


def _worst_first(scores: Grid, metric: str) -> list[str]:
    """The parties by their mean score over algorithms, the worst first."""
    sign = 1.0 if higher_is_better(metric) else -1.0
    return sorted(scores, key=lambda party: sign * float(np.mean(list(scores[party].values()))))


def _row(party: str, scores: Mapping[str, float], columns: Mapping[str, str], metric: str) -> list[str | TableCell]:
    best = (max if higher_is_better(metric) else min)(scores.values())
    return [shortened(party, 40), *(TableCell(_written(scores.get(name), metric), scores.get(name),
                                              strong=scores.get(name) == best) for name in columns)]  # fmt: skip


def _written(score: float | None, metric: str) -> str:
    if score is None:
        return "-"
    return f"{100 * score:.1f}" if is_percent(metric) else f"{score:.4g}"


def heat_map(scores: Grid, parties: Sequence[str], columns: Mapping[str, str], metric: str) -> Figure:
    """Parties as rows, algorithms as columns; darker is better."""
    scale = 100.0 if is_percent(metric) else 1.0
    values = scale * np.array([[scores[party].get(name, np.nan) for name in columns] for party in parties])
    figure = blank(2.6 + 0.85 * len(columns), 1.6 + 0.28 * max(4, len(parties)))
    axes = figure.subplots()
    low, high = np.nanmin(values), np.nanmax(values)
    high = high if high > low else low + 1e-9
    colours = "Blues" if higher_is_better(metric) else "Blues_r"
    image = axes.imshow(values, cmap=colours, vmin=low, vmax=high, aspect="auto")
    axes.set_xticks(range(len(columns)), [shown(name, 22) for name in columns.values()], rotation=35, ha="right")
    axes.set_yticks(range(len(parties)), [shown(party, 22) for party in parties])
    axes.tick_params(length=0, labelsize=8)
    for spine in axes.spines.values():
        spine.set_visible(False)
    middle = (low + high) / 2
    for row, col in np.ndindex(*values.shape):
        value = values[row, col]
        if np.isnan(value):
            axes.text(col, row, "×", ha="center", va="center", fontsize=8, color="0.4")
        elif len(parties) <= 3 * WRITTEN and len(columns) <= WRITTEN:
            dark = (value > middle) == higher_is_better(metric)
            text = _written(float(value) / scale, metric)
            axes.text(col, row, text, ha="center", va="center", fontsize=7, color="white" if dark else "0.15")
    bar = figure.colorbar(image, ax=axes, fraction=0.05, pad=0.03)
    bar.set_label(title(plain_metric(metric)), fontsize=8)
    bar.ax.tick_params(labelsize=7)
    return figure
