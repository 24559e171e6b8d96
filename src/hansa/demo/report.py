"""The report of the demonstration: sentences, figures, HTML page."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from hansa.demo.hospitals import (
    CANDIDATES,
    LOCAL,
    REGIMES,
    ROUNDS,
    SCORES,
    TEST_SHARE,
    TUNING,
    VALIDATION_SHARE,
    Demo,
    cell_text,
    heading,
)
from hansa.report import plots
from hansa.report.html import Detail, Picture, Section, Sheet, write_report

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FILL = {"local-only": ("#D9D9D9", ""), "federated": (plots.BLUE, ""), "fine-tuned": (plots.GREEN, ""),
        "chosen": ("#FFFFFF", "...."), "centralised": (plots.ORANGE, "////")}  # fmt: skip
OTHER = ("#CC79A7", "")  # of further methods
LINE = {"local-only": ("0.35", ":"), "federated": (plots.BLUE, "-"), "fine-tuned": (plots.GREEN, "-."),
        "centralised": (plots.RED, "--")}  # fmt: skip
ATTRIBUTION = (
    "Heart Disease, UCI Machine Learning Repository, 1989 (doi 10.24432/C52P4X), licensed under CC BY 4.0. Creators: "
    "Andras Janosi (Hungarian Institute of Cardiology, Budapest), William Steinbrunn (University Hospital, Zurich), "
    "Matthias Pfisterer (University Hospital, Basel), Robert Detrano (V.A. Medical Center, Long Beach, and Cleveland "
    "Clinic Foundation). 'Disease' is any narrowed vessel (diagnosis 1 to 4); a cholesterol or blood pressure of 0 is "
    "read as missing."
)


def findings(demo: Demo) -> list[str]:
    """The findings in sentences. Each is made from the numbers, and left out if the numbers do not support it."""
    auc = {regime: demo.cell("auc", regime)[0] for regime in REGIMES}
    wins = int((demo.by_seed("auc", "federated") > demo.by_seed("auc", "local-only")).sum())
    sentences = [
        f"Mean AUC: {_percent(auc['local-only'])} alone, {_percent(auc['federated'])} federated "
        f"({_points(demo.gain('auc'))}; higher on {wins} of {demo.seeds} splits), "
        f"{_percent(auc['centralised'])} if all patients were pooled."
    ]
    gains = [demo.gain("auc", k) for k in range(len(demo.hospitals))]
    best = int(np.nanargmax(gains))
    if gains[best] > 0:
        ahead = int((demo.scores["auc"]["federated"] > demo.scores["auc"]["local-only"])[:, best].sum())
        sentences.append(
            f"{demo.hospitals[best].name} gains most from the others: AUC {_points(gains[best])}, "
            f"higher on {ahead} of {demo.seeds} splits."
        )
    return sentences + _accuracy(demo) + _loss(demo) + _cautions(demo)


def _accuracy(demo: Demo) -> list[str]:
    """The mean accuracies, and why federated is lower, if the prevalence at one hospital explains it."""
    alone, together = (_percent(demo.cell("accuracy", regime)[0]) for regime in ("local-only", "federated"))
    sentence = f"Mean accuracy: {alone} alone, {together} federated ({_points(demo.gain('accuracy'))})"
    changes = [demo.gain("accuracy", k) for k in range(len(demo.hospitals))]
    worst = max(range(len(changes)), key=lambda k: demo.hospitals[k].prevalence)
    if sum(changes) >= 0 or changes[worst] > sum(changes) / 2:  # no loss, or less than half of it there
        return [sentence + "."]
    others = float(np.mean(changes[:worst] + changes[worst + 1 :]))
    hospital = demo.hospitals[worst]
    return [
        f"{sentence}: disease is {hospital.prevalence:.0%} of {hospital.name}'s patients, so a model trained there "
        f"alone profits from answering 'ill' ({_points(changes[worst])} at {hospital.name}, {_points(others)} at the "
        "other hospitals)."
    ]


def _loss(demo: Demo) -> list[str]:
    """The mean log losses, and what the hospitals chose on their validation patients."""
    loss = {regime: demo.cell("loss", regime)[0] for regime in REGIMES}
    listed = ", ".join(f"{loss[name]:.3f} {name}" for name in CANDIDATES)
    best = min(CANDIDATES, key=lambda name: loss[name])
    choices = [name for row in demo.chosen for name in row]
    often = ", ".join(f"{name} {choices.count(name)} times" for name in CANDIDATES)
    return [
        f"Mean log loss: {listed}, {loss['centralised']:.3f} centralised; {best} is lowest. A hospital that chooses on "
        f"its validation patients has {loss['chosen']:.3f} on average (chosen: {often}).",
    ]


def _cautions(demo: Demo) -> list[str]:
    """Warn of hospitals with few held-out patients of one class."""
    sentences = []
    for k, hospital in enumerate(demo.hospitals):
        few = min(hospital.tested_ill, hospital.tested - hospital.tested_ill)
        undefined = int(np.isnan(demo.scores["auc"]["federated"][:, k]).sum())
        kind = "ill" if hospital.tested_ill == few else "healthy"
        if undefined:
            sentences.append(
                f"AUC is undefined at {hospital.name} on {undefined} of {demo.seeds} splits (one class only); they are "
                "left out of its mean."
            )
        elif few < 5:
            sentences.append(
                f"Only {few} of {hospital.name}'s {hospital.tested} held-out patients are {kind}, so its AUC varies a "
                "lot from split to split."
            )
    return sentences


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _points(change: float) -> str:
    return f"{100 * change:+.1f} points"


def write(demo: Demo, path: Path) -> Path:
    """Write the report of the demonstration."""
    intro = [
        "Four hospitals train one model, logistic regression, to recognise heart disease. In the federated regime no "
        "patient leaves a hospital: the hospitals exchange models and sums. Fine-tuned, each hospital trains the "
        "federated model further, alone, and keeps the result. "
        f"Means over {demo.seeds} random splits; on each, {TEST_SHARE:.0%} of every hospital's patients are held out, "
        "and all regimes are measured on the same ones.",
        *findings(demo),
    ]
    span = "the standard deviation over splits"
    pictures = [
        Picture(
            "By hospital",
            f"Bars are means, whiskers {span} (cut off at 100 %). An AUC of 50 % is guessing.",
            by_hospital(demo),
        ),
        Picture(
            "Learning curves",
            f"The federated model on held-out patients, mean over hospitals; the band is {span}. Horizontal lines: "
            "where other regimes end.",
            learning(demo),
        ),
        Picture(
            "Bytes exchanged",
            f"All four hospitals together, as the wire carries them. Learning the scaling comes before round 1: "
            f"{demo.prepared[0]:,} bytes from the hospitals, {demo.prepared[1]:,} to them. Measuring the model is not "
            "counted.",
            plots.traffic(demo.bytes_up.tolist(), demo.bytes_down.tolist(), demo.prepared),
        ),
    ]
    details = [
        Detail("How it was done", METHOD),
        Detail("How to reproduce", f"hansa demo --seeds {demo.seeds}", code=True),
        Detail("Data", ATTRIBUTION),
    ]
    sections: list[Section] = [*_sheets(demo), *pictures, *details]
    return write_report(path, "Four hospitals, one model, no shared patient", intro, sections)


METHOD = (
    f"All regimes: {ROUNDS * LOCAL.epochs} full passes, in the federated regime {ROUNDS} rounds of {LOCAL.epochs}, "
    f"learning rate {LOCAL.lr}, chosen once. Fine-tuned: {TUNING.epochs} more passes at each hospital alone, rate "
    f"{TUNING.lr}. Chosen: each hospital uses the method with the lowest log loss on its validation patients, "
    f"{VALIDATION_SHARE:.0%} of those that are not held out for the test; no regime trains on them. Missing "
    "values become the mean of the training patients and features are scaled to unit variance: learned alone, by "
    "federated sums or on the pooled patients, as the regime allows. Federated is FedAvg: every hospital trains in "
    "every round and models are averaged, weighted by patients. The mean row weighs hospitals equally. AUC is the "
    "chance that an ill patient is ranked above a healthy one; it does not reward knowing how common the disease is, "
    "which accuracy does."
)


def _sheets(demo: Demo) -> list[Sheet]:
    note = f"Mean ± standard deviation over {demo.seeds} splits." if demo.seeds > 1 else "One split."
    sheets = []
    for score in SCORES:
        rows = [
            (
                "mean" if k is None else demo.hospitals[k].name,
                *(cell_text(demo.cell(score, regime, k), score) for regime in REGIMES),
            )
            for k in (*range(len(demo.hospitals)), None)
        ]
        lower = " Lower is better." if score == "loss" else ""
        title = heading(score)
        sheets.append(Sheet(title[0].upper() + title[1:], ("hospital", *REGIMES), rows, note=note + lower, total=True))
    choices = [
        (h.name, *(str(sum(row[k] == name for row in demo.chosen)) for name in CANDIDATES))
        for k, h in enumerate(demo.hospitals)
    ]
    people = [
        (h.name, str(h.patients), f"{h.prevalence:.1%}", str(h.tested), str(h.tested - h.tested_ill), str(h.tested_ill))
        for h in demo.hospitals
    ]
    return [
        *sheets,
        Sheet("Chosen on validation patients", ("hospital", *CANDIDATES), choices, note="Splits by chosen method."),
        Sheet("The hospitals", ("hospital", "patients", "with disease", "held out", "healthy", "ill"), people),
    ]


def by_hospital(demo: Demo) -> Figure:
    """The scores of each hospital under all regimes."""
    figure = plots.blank(9.2, 8.0)
    for axes, score in zip(figure.subplots(len(SCORES), 1, sharex=True), SCORES, strict=True):
        _bars(axes, demo, score)
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, frameon=False, ncols=len(REGIMES), loc="outside upper right")
    return figure


def learning(demo: Demo) -> Figure:
    """The federated model against rounds: AUC, accuracy and loss."""
    figure = plots.blank(9.2, 3.2)
    for axes, metric in zip(figure.subplots(1, len(demo.curves)), demo.curves, strict=True):
        _curve(axes, demo, metric)
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, frameon=False, ncols=3, loc="outside upper right")
    return figure


def wide(demo: Demo) -> Figure:
    """AUC by hospital beside the learning curve, in one figure."""
    figure = plots.blank(12, 3.9)
    left, right = figure.subplots(1, 2, width_ratios=(1.7, 1))
    _bars(left, demo, "auc")
    _curve(right, demo, "auc")
    left.set_title("AUC on held-out patients, %", loc="left", fontsize="medium")
    right.set_title("Mean AUC as the federation learns, %", loc="left", fontsize="medium")
    for axes in (left, right):
        plots.legend_below(axes)
    return figure


def _bars(axes: Axes, demo: Demo, score: str) -> None:
    """One group of bars per hospital, and one for their mean. The AUC axis starts at 50 %, which is guessing."""
    floor, scale = 50.0 if score == "auc" else 0.0, 1 if score == "loss" else 100
    places = np.append(np.arange(len(demo.hospitals), dtype=float), len(demo.hospitals) + 0.25)
    width = 0.78 / len(REGIMES)
    for at, regime in enumerate(REGIMES):
        cells = [demo.cell(score, regime, k) for k in (*range(len(demo.hospitals)), None)]
        means, spread = scale * np.array(cells).T
        colour, hatch = FILL.get(regime, OTHER)
        x = places + width * (at - (len(REGIMES) - 1) / 2)
        axes.bar(x, means - floor, width, bottom=floor, fc=colour, hatch=hatch, ec="0.15", lw=0.7, label=regime)
        above = spread if score == "loss" else np.minimum(spread, 100 - means)
        axes.errorbar(x, means, [np.minimum(spread, means - floor), above], fmt="none", ecolor="black", elinewidth=1,
                      capsize=2)  # fmt: skip
    plots.plain(axes, heading(score))
    if score != "loss":
        axes.set_ylim(floor, 101)
    axes.set_xticks(places, [*(h.name for h in demo.hospitals), "mean"])
    axes.tick_params(axis="x", length=0)


def _curve(axes: Axes, demo: Demo, metric: str) -> None:
    scale = 1 if metric == "loss" else 100
    values = scale * demo.curves[metric]
    rounds = np.arange(1, values.shape[1] + 1)
    middle = values.mean(0)
    colour, line = LINE["federated"]
    if demo.seeds > 1:
        spread = values.std(0, ddof=1)
        axes.fill_between(rounds, middle - spread, middle + spread, color=colour, alpha=0.18, lw=0)
    axes.plot(rounds, middle, ls=line, color=colour, lw=2, marker="o", ms=3, label="federated")
    for regime in ("local-only", "fine-tuned", "centralised"):
        other, style = LINE[regime]
        axes.axhline(scale * demo.cell(metric, regime)[0], color=other, ls=style, lw=1.6, label=regime)
    axes.margins(y=0.08)
    plots.plain(axes, heading(metric))
    plots.rounds_axis(axes)
