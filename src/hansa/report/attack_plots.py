"""Figures of the attack report: ROC curves, rebuilt samples, and fidelity against queries."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from hansa.report.plots import BLUE, GREEN, GREY, ORANGE, RED, blank, legend_below, plain, shown

if TYPE_CHECKING:
    from matplotlib.figure import Figure

STYLES = {"loss": ("-", BLUE), "shadow": ("--", ORANGE), "lira": (":", GREEN), "rmia": ("-.", RED),
          "updates": ("--", GREEN)}  # fmt: skip
SHOWN = 10  # pictures in a row


def roc(attacks: Mapping[str, Mapping[str, Any]]) -> Figure:
    """True against false positive rates, both on logarithmic axes (Carlini et al. 2022)."""
    figure = blank(5.2, 4.4)
    axes = figure.subplots()
    for name, found in attacks.items():
        line, colour = STYLES[name]
        rates = np.array(found["roc"])
        axes.plot(rates[:, 0], np.maximum(rates[:, 1], 1e-4), ls=line, color=colour, lw=1.6, label=name)
    axes.plot([1e-3, 1], [1e-3, 1], color=GREY, lw=1.0, label="a guess")
    axes.set(xscale="log", yscale="log", xlim=(1e-3, 1), ylim=(1e-3, 1.1), xlabel="false positive rate",
             ylabel="true positive rate")  # fmt: skip
    plain(axes, "Members found")
    legend_below(axes)
    return figure


def rows_of_pictures(rows: Mapping[str, Sequence[Any]]) -> Figure:
    """Rows of pictures, one row per name, at most ten in each; all on one scale of grey."""
    arrays = {name: np.asarray(pictures, dtype=np.float64)[:SHOWN] for name, pictures in rows.items()}
    count = max(len(array) for array in arrays.values())
    low = min(float(array.min()) for array in arrays.values())
    high = max(float(array.max()) for array in arrays.values())
    figure = blank(1.3 + 0.85 * count, 0.95 * len(arrays))
    grid = figure.subplots(len(arrays), count, squeeze=False)
    for line, (name, array) in zip(grid, arrays.items(), strict=True):
        for at, axes in enumerate(line):
            axes.set_xticks([])
            axes.set_yticks([])
            axes.spines[:].set_visible(False)
            if at < len(array):
                image = (array[at] - low) / max(high - low, 1e-12)
                grey = image[0] if image.shape[0] != 3 else image.transpose(1, 2, 0)
                axes.imshow(grey, cmap="gray", vmin=0, vmax=1, interpolation="nearest")
        line[0].set_ylabel(name, rotation=0, ha="right", va="center", fontsize="small")
    return figure


def tradeoff(points: Sequence[tuple[str, float, float]]) -> Figure:
    """Accuracy against the AUC of a membership attack, one labelled point per algorithm and setting."""
    figure = blank(6.4, 4.2)
    axes = figure.subplots()
    colours, marks = (BLUE, ORANGE, GREEN, RED, GREY), "osD^v"
    for at, (label, accuracy, leak) in enumerate(points):
        axes.plot([leak], [accuracy], marks[at % 5], color=colours[at % 5], ms=7, label=shown(label, 60))
    axes.axvline(0.5, color=GREY, lw=1.0, ls=":")
    axes.set(xlabel="AUC of membership inference (0.5: a guess)", ylabel="accuracy")
    plain(axes, "Privacy and accuracy")
    figure.legend(frameon=False, fontsize="small", loc="outside lower center", ncols=1)
    return figure


def fidelity(rows: Sequence[Mapping[str, Any]], accuracy: float) -> Figure:
    """Fidelity and accuracy of a copied model against the number of queries."""
    figure = blank(5.2, 3.1)
    axes = figure.subplots()
    queries = [row["queries"] for row in rows]
    axes.plot(queries, [row["fidelity"] for row in rows], color=BLUE, marker="o", ms=4, label="fidelity")
    axes.plot(queries, [row["accuracy"] for row in rows], color=ORANGE, ls="--", marker="s", ms=4,
              label="accuracy of the copy")  # fmt: skip
    axes.axhline(accuracy, color=GREY, lw=1.0, ls=":", label="accuracy of the model")
    axes.set(xlabel="queries", ylim=(0, 1.02))
    plain(axes, "A copy made from answers")
    legend_below(axes)
    return figure
