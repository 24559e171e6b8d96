"""The report of a study: results in sentences, tables and pictures, and how to reproduce them.

`write` makes report.html (self-contained), report.md (with linked pictures), and each picture as PNG and SVG.
"""

from __future__ import annotations

import itertools
import math
import platform
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from hansa.artifacts.run_folder import RunFolder, write_atomic
from hansa.metrics.names import MEMBERSHIP, higher_is_better
from hansa.plumbing.errors import HansaError
from hansa.report import attack_plots, comparison_plots, markdown, party_grid, study_metrics, toml
from hansa.report import study_plots as plots
from hansa.report import study_tables as sheets
from hansa.report.comparison_plots import Pair
from hansa.report.html import Detail, Picture, Section, write_report
from hansa.report.plots import draw_partition, png, shortened, shown
from hansa.report.study_display import Axis, StudyDisplay
from hansa.report.study_findings import Names, findings, line, p_value
from hansa.report.study_plots import Band, Look, Standing, title

FILES = "plots"
LINKED = re.compile(rf"^!\[.*\]\({FILES}/([\w-]+)\.png\)$", re.MULTILINE)
MATRICES = 6  # up to this many settings, every pair is drawn
PARTITIONS = 12  # maximum number of partitions drawn
AGAINST: tuple[tuple[Axis, str], ...] = (
    ("rounds", "rounds"), ("bytes", "bytes"), ("simulated_seconds", "simulated time"),
)  # fmt: skip


def write(results: StudyDisplay, folder: str | Path) -> list[Path]:
    """Write report.html, report.md, and plots/*.png and *.svg to a folder; return the files, report.html first.

    Pictures of an earlier report that this one does not have are removed."""
    place = Path(folder)
    (place / FILES).mkdir(parents=True, exist_ok=True)
    heading, intro, sections = contents(results)
    links: dict[str, str] = {}
    written = [write_report(place / "report.html", heading, intro, sections), place / "report.md"]
    for section in sections:
        if isinstance(section, Picture):
            links[section.name] = f"{FILES}/{section.name}.png"
            for ending, data in (("png", png(section.figure)), ("svg", section.svg)):
                written.append(place / FILES / f"{section.name}.{ending}")
                write_atomic(written[-1], data)
    for name in _pictured(place / "report.md") - set(links):
        for ending in ("png", "svg"):
            (place / FILES / f"{name}.{ending}").unlink(missing_ok=True)
    write_atomic(written[1], markdown.render(heading, intro, sections, links).encode(errors="replace"))
    return written


def _pictured(page: Path) -> set[str]:
    """The names of the pictures that a Markdown report links; user text never begins a line in this form."""
    return set(LINKED.findall(page.read_text(errors="replace"))) if page.exists() else set()


def contents(results: StudyDisplay) -> tuple[str, list[str], list[Section]]:
    """Title, findings and sections of the report, in their order."""
    names = Names(results)
    sections: list[Section] = [
        *filter(None, [sheets.main(results, names)]),
        *study_metrics.sections(results, names),
        *_finals(results, names),
        *party_grid.sections(results, names),
        *_curves(results, names),
        *_ranks(results, names),
        *_pairs(results, names),
        *_adversaries(results, names),
        *_leaks(results, names),
        *_partitions(results),
        *sheets.tuning(results, names),
        *filter(None, [sheets.failures(results, names)]),
        *_origin(results, names),
    ]
    count = len(results.contenders)
    heading = f"{names.title}: {count} algorithms compared" if count > 1 else names.title
    return heading, findings(results, names), sections


def pictures(results: StudyDisplay) -> Iterator[Picture]:
    """The pictures of the report, in its order, each drawn on demand."""
    names = Names(results)
    parts = (_finals, party_grid.sections, _curves, _ranks, _pairs, _adversaries, _leaks)
    for section in itertools.chain(*(part(results, names) for part in parts), _partitions(results)):
        if isinstance(section, Picture):
            yield section


def _plain(metric: str) -> str:
    return title(metric).removesuffix(", %")


def _standing(results: StudyDisplay, algorithm: str, setting: str, leaders: list[str]) -> Standing | None:
    measure = f"final_{results.metric}"
    estimate = results.estimate(measure, algorithm, setting)
    if estimate is None or estimate.mean is None or not math.isfinite(estimate.mean):
        return None
    each = [value for value in results.values(measure, algorithm, setting).values() if value is not None]
    return Standing(estimate.mean, estimate.low, estimate.high, each, algorithm in leaders)


def _standings(results: StudyDisplay, names: Names, setting: str) -> dict[Look, Standing]:
    leaders = results.leaders(setting) if results.order(setting) else []
    standings = {look: _standing(results, name, setting, leaders) for name, look in names.looks.items()}
    return {look: standing for look, standing in standings.items() if standing is not None}


def _finals(results: StudyDisplay, names: Names) -> Iterator[Section]:
    panels = {names.panels[setting]: _standings(results, names, setting) for setting in results.settings}
    figure = plots.finals(results.metric, panels, results.study.target)
    if figure is None:
        return
    several = len(results.study.seeds) > 1
    caption = f"The {_plain(results.metric)} at the end."
    if several:
        caption += " Circles are means, lines are 95 % intervals, ticks below them are single seeds."
    if several and len(results.algorithms) > 1:
        caption += " Filled: not significantly worse than the best."
    if results.study.target is not None:
        caption += " Dashed: the target."
    if any(text.get_text()[:1] in plots.ARROWS for axes in figure.axes for text in axes.texts):
        caption += " Arrows: values beyond the axis."
    yield Picture("Final values", caption, figure, "final")


def _curves(results: StudyDisplay, names: Names) -> Iterator[Section]:
    """Metrics against rounds, bytes, and simulated time if rounds differ in length."""
    measured = {name for outcome in results.outcomes for line in outcome.history for name in line}
    metrics = [name for name in dict.fromkeys((results.metric, "accuracy", "loss", "r2")) if name in measured]
    for against, words in AGAINST:
        if against == "simulated_seconds" and not sheets.timed(results):
            continue
        for metric in metrics:
            panels = {
                names.panels[setting]: {
                    look: _band(results, name, setting, metric, against) for name, look in names.looks.items()
                }
                for setting in results.settings
            }
            target = results.study.target if metric == results.metric else None
            drawn = plots.curves(metric, against, panels, target)
            if drawn is not None:
                figure, axis = drawn
                heading = f"{_plain(metric)} against {words}"
                yield Picture(heading[0].upper() + heading[1:], f"{_seen(results, against)} {axis}".strip(), figure,
                              f"{metric}-{against.replace('_', '-')}")  # fmt: skip


def _band(results: StudyDisplay, algorithm: str, setting: str, metric: str, against: Axis) -> Band:
    """The mean over seeds, and the band from the lowest to the highest seed.

    With two or three seeds, an interval of the mean would hide all curves."""
    x, mean, *_ = results.curve(algorithm, setting, metric, against)
    each = []
    for outcome in results.runs(algorithm, setting):
        at, values, *_ = results.only([outcome]).curve(algorithm, setting, metric, against)
        each += [np.interp(x, at, values)] if len(at) else []
    return (x, mean, np.min(each, axis=0), np.max(each, axis=0)) if each else (x, mean, mean, mean)


def _seen(results: StudyDisplay, against: str) -> str:
    many = len(results.study.seeds) > 1
    caption = "Lines are means over seeds, bands run from the lowest to the highest seed." if many else "One seed."
    if against == "bytes":
        caption += " Bytes are those of all parties, up and down."
    if against == "simulated_seconds":
        caption += " Rounds differ in simulated time: each lasts as long as its slowest party."
    return caption


def _ranks(results: StudyDisplay, names: Names) -> Iterator[Section]:
    ranking = results.ranks()
    if len(ranking.ranks) < 2 or ranking.p is None:
        return
    of = {name: look.name for name, look in names.looks.items()}
    figure = comparison_plots.critical_difference(
        {of[name]: rank for name, rank in ranking.ranks.items()},
        ranking.critical,
        [[of[name] for name in group] for group in ranking.cliques],
    )
    caption = (
        f"Mean ranks by final {_plain(results.metric)} over {ranking.blocks} blocks (a block is a setting with a "
        "seed); 1 is the best. Bars join algorithms between which no significant difference was found (Nemenyi, 5 %; "
        f"Demšar 2006). Friedman's test: {p_value(ranking.p)}. Blocks with the same data are not "
        "independent, so the p value and the bars hold for these settings only, not for other data sets."
    )
    yield Picture("Critical difference of the ranks", caption, figure, "critical-difference")


def _pairs(results: StudyDisplay, names: Names) -> Iterator[Section]:
    pairs = sheets.pairs(results, names)
    if pairs is None:
        return
    sign = 1.0 if higher_is_better(results.metric) else -1.0
    panels = {}
    for setting in results.settings:
        order = results.order(setting)
        matrix: dict[tuple[int, int], Pair] = {}
        for each in results.differences(setting):
            if each.first in order and each.second in order:
                row, column = order.index(each.first), order.index(each.second)
                matrix[row, column] = Pair(sign * each.difference, each.significant)
                matrix[column, row] = Pair(-sign * each.difference, each.significant)
        if matrix:
            panels[names.panels[setting]] = ([names.looks[name].name for name in order], matrix)
    points = " in percentage points," if plots.is_percent(results.metric) else ""
    caption = (
        f"How much better the final {_plain(results.metric)} of the row is than that of the column,{points} the best "
        "of a setting first. Framed and bold: significant after Holm's correction."
    )
    if panels and len(panels) <= MATRICES:
        yield Picture("Significant differences", caption, comparison_plots.matrix(results.metric, panels), "pairs")
        yield pairs
    else:
        yield Detail("Significant differences", "Every pair of algorithms in every setting.")
        yield pairs


def _adversaries(results: StudyDisplay, names: Names) -> Iterator[Section]:
    """The final metric by adversary, where the study has more than one."""
    places: dict[str, dict[str, str]] = {}  # by partition and variant, the setting of each adversary
    for cell in (outcome.cell for outcome in results.outcomes):
        place = ", ".join(part for part in (cell.partition, cell.variant) if part)
        places.setdefault(place, {})[cell.adversary] = cell.setting
    if len({adversary for settings in places.values() for adversary in settings}) < 2:
        return
    panels = {}
    for number, (place, settings) in enumerate(places.items()):
        rows = [_standings(results, names, setting) for setting in settings.values()]
        standings = {look: [row.get(look) for row in rows] for look in names.looks.values()}
        attacks = [shown(line(adversary) or "no attack", 24) for adversary in settings]
        heading = shown(line(place) or "default partition", 44)
        panels[heading if heading not in panels else f"{heading} ({number})"] = (attacks, standings)
    caption = f"Final {_plain(results.metric)} under each attack"
    caption += "; lines are 95 % intervals." if len(results.study.seeds) > 1 else "."
    yield Picture("By adversary", caption, plots.adversaries(results.metric, panels), "adversaries")


def _leaks(results: StudyDisplay, names: Names) -> Iterator[Section]:
    """Accuracy against the success of a membership attack, if the study measures it."""
    points = []
    for setting in results.settings if results.metric == MEMBERSHIP else ():
        for name, look in names.looks.items():
            each = [results.estimate(f"final_{metric}", name, setting) for metric in ("accuracy", MEMBERSHIP)]
            means = [None if one is None else one.mean for one in each]
            if means[0] is not None and means[1] is not None:
                label = f"{look.name}, {names.panels[setting]}" if len(results.settings) > 1 else look.name
                points.append((label, means[0], means[1]))
    if points:
        caption = "Means over the seeds. Up is more accurate, right leaks more: 0.5 is a guess, 1 finds every member."
        yield Picture("Privacy and accuracy", caption, attack_plots.tradeoff(points), "privacy")


def _partitions(results: StudyDisplay) -> Iterator[Section]:
    """What each party holds, drawn once per partition; a note if the data is not available."""
    if not results.outcomes:
        return
    cells = {outcome.cell.partition: outcome.cell for outcome in reversed(results.outcomes)}
    labels = list(dict.fromkeys(outcome.cell.partition for outcome in results.outcomes))
    note = f"As divided with seed {results.study.seeds[0]}"
    note += "; other seeds give other divisions." if len(results.study.seeds) > 1 else "."
    if len(labels) > PARTITIONS:
        note += f" The first {PARTITIONS} of {len(labels)} partitions."
    yield Detail("Data of the parties", note)
    for at, label in enumerate(labels[:PARTITIONS]):
        heading = shortened(label, 80) or "(no name)"
        try:
            task = cells[label].experiment.build_task()
            figure = draw_partition(task)
        except (HansaError, OSError, ValueError, TypeError, RuntimeError) as error:
            yield Detail(heading, f"Cannot draw this partition: {line(str(error))}", under=True)
            continue
        caption = "Top: number of training samples per party. Bottom: their classes."
        caption = caption if task.classes is not None else "Number of training samples per party."
        yield Picture(heading, caption, figure, f"partition-{at + 1}", under=True)


def _origin(results: StudyDisplay, names: Names) -> Iterator[Section]:
    """The exact configuration, and how to reproduce the numbers."""
    tree = results.study.ordered_tree()
    yield Detail("Exact configuration", toml.dumps(tree), code=True)
    yield sheets.runs(results, names)
    made = "\n".join(f"#   {name} {value}" for name, value in _facts(results).items())
    commands = (
        "# The configuration above, saved as study.toml, gives the same numbers on the same kind of machine:\n"
        "hansa compare study.toml\n\n"
        "# This report again, from the study's folder:\n"
        "hansa compare --report FOLDER\n\n"
        f"# The runs were made with:\n{made}\n"
    )
    yield Detail("How to reproduce", commands, code=True)


def _facts(results: StudyDisplay) -> dict[str, str]:
    """What the numbers depend on: versions, and the plans of the runs; no machine names, no paths."""
    seen: dict[str, dict[str, None]] = {}
    for outcome in results.outcomes:
        try:
            record: dict[str, Any] = RunFolder(outcome.run_dir).experiment() if outcome.run_dir is not None else {}
        except (HansaError, OSError):
            continue
        for name, value in {"hansa": record.get("hansa"), **record.get("plan", {})}.items():
            if value is not None:
                seen.setdefault(name, {})[str(value)] = None
    return {"python": platform.python_version(), **{name: " or ".join(values) for name, values in seen.items()}}
