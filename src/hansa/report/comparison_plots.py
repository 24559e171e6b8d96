"""Plots that compare algorithms in pairs: mean ranks with critical differences, and a matrix of differences."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from hansa.report.plots import blank
from hansa.report.study_plots import scale_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FEW = 12  # up to this many algorithms, a matrix shows numbers


def critical_difference(ranks: Mapping[str, float], critical: float | None, cliques: Sequence[Sequence[str]]) -> Figure:
    """Plot mean ranks on a line, best on the left; bars join algorithms without a significant difference.

    Demšar 2006, figure 1."""
    order = sorted(ranks, key=lambda name: ranks[name])
    half = math.ceil(len(order) / 2)
    joined = [group for group in cliques if len(group) > 1]
    low, high = 1, max(2, len(order))
    rows = 0.32 * half + 0.16 * len(joined)
    figure = blank(9.2, 1.35 + rows)
    axes = figure.subplots()
    axes.set_axis_off()
    axes.set_xlim(low - 0.32 * (high - low), high + 0.32 * (high - low))
    depth = 0.55 + 0.34 * len(joined) + 0.68 * half
    axes.set_ylim(-depth, 1.75)
    axes.plot([low, high], [0, 0], color="black", lw=1.2)
    for tick in np.arange(low, high + 0.1, 0.5 if high <= 12 else 1):
        whole = float(tick).is_integer()
        axes.plot([tick, tick], [0, 0.22 if whole else 0.12], color="black", lw=1)
        if whole:
            axes.text(tick, 0.3, f"{tick:.0f}", ha="center", va="bottom", fontsize="small")
    axes.text(low - 0.02 * (high - low), 0.0, "best ", ha="right", va="center", fontsize="small", color="0.35")
    axes.text(high + 0.02 * (high - low), 0.0, " worst", ha="left", va="center", fontsize="small", color="0.35")
    if critical is not None and math.isfinite(critical):
        end = low + min(critical, 1.25 * (high - low))
        axes.plot([low, end], [1.25, 1.25], color="black", lw=1.2)
        for at in (low, end):
            axes.plot([at, at], [1.15, 1.35], color="black", lw=1.2)
        axes.text(low, 1.42, f"critical difference {critical:.2f}", fontsize="small", va="bottom")
    for at, group in enumerate(joined):
        y = -0.3 - 0.34 * at
        ends = [ranks[name] for name in group]
        gap = 0.006 * (high - low)
        axes.plot([min(ends) - gap, max(ends) + gap], [y, y], color="black", lw=4.5, solid_capstyle="butt")
    start = 0.55 + 0.34 * len(joined)
    for at, name in enumerate(order):
        left = at < half
        row = at if left else len(order) - 1 - at
        y = -start - 0.68 * row
        edge = low - 0.04 * (high - low) if left else high + 0.04 * (high - low)
        axes.plot([ranks[name], ranks[name], edge], [0, y, y], color="0.35", lw=0.9)
        text = f"{name}  {ranks[name]:.2f} " if left else f" {ranks[name]:.2f}  {name}"
        axes.text(edge, y, text, ha="right" if left else "left", va="center", fontsize="small")
    return figure


@dataclass(frozen=True)
class Pair:
    """How much better one algorithm was than another, in units of the metric, and whether that is significant."""

    better: float  # positive if the row is better than the column
    significant: bool


def matrix(metric: str, panels: Mapping[str, tuple[Sequence[str], Mapping[tuple[int, int], Pair]]]) -> Figure:
    """Plot for each setting how much better the algorithm of a row is than that of a column.

    Significant differences are framed and bold."""
    from matplotlib.colors import LinearSegmentedColormap
    from matplotlib.patches import Rectangle

    greatest = max((abs(p.better) for _, pairs in panels.values() for p in pairs.values()), default=0.0) or 1.0
    scale = scale_of(metric)
    count = max(len(names) for names, _ in panels.values())
    columns = 1 if count > FEW else (2 if count > 5 else 3)
    columns = min(columns, len(panels))
    rows = math.ceil(len(panels) / columns)
    side = 1.4 + (0.46 if count <= FEW else 0.36) * count
    figure = blank(max(4.6, min(10.2, columns * (side + 1.2))), rows * side)
    # Light in the middle and equally dark at both ends: the sign shows the direction, also in print.
    shades = LinearSegmentedColormap.from_list("better", [(0.0, "#D58B4A"), (0.5, "#FFFFFF"), (1.0, "#5B9BC8")])
    axes = list(figure.subplots(rows, columns, squeeze=False).flat)
    for panel in axes[len(panels) :]:
        panel.set_axis_off()
    for panel, (setting, (names, pairs)) in zip(axes, panels.items(), strict=False):
        values = np.full((len(names), len(names)), np.nan)
        for (row, column), pair in pairs.items():
            values[row, column] = math.copysign(math.sqrt(abs(pair.better) / greatest), pair.better)
        panel.imshow(values, cmap=shades.with_extremes(bad="0.92"), vmin=-1, vmax=1, aspect="auto")
        for (row, column), pair in pairs.items():
            if len(names) <= FEW:
                panel.text(column, row, _signed(pair.better * scale), ha="center", va="center", fontsize="x-small",
                           fontweight="bold" if pair.significant else "normal", color="black")  # fmt: skip
            elif pair.significant:
                panel.text(column, row, "+" if pair.better > 0 else "−", ha="center", va="center",
                           fontsize="x-small", fontweight="bold")  # fmt: skip
            if pair.significant:
                panel.add_patch(Rectangle((column - 0.47, row - 0.46), 0.94, 0.92, fill=False, ec="black", lw=1.1))
        panel.set_title(setting, loc="left", fontsize="medium")
        panel.set_xticks(range(len(names)), names, rotation=40, ha="right", rotation_mode="anchor", fontsize="small")
        panel.set_yticks(range(len(names)), names, fontsize="small")
        panel.tick_params(length=0)
        panel.spines[:].set_visible(False)
    return figure


def _signed(value: float) -> str:
    size = abs(value)
    text = f"{value:+.{3 if size < 0.0995 else 2 if size < 9.995 else 1}f}"
    return text.replace("-", "−") if float(text) else "0"
