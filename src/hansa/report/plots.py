"""Plots of a run: learning curves, bytes exchanged, replies. Line styles and hatches make them readable without colour.

Figures are matplotlib objects with their own canvas. pyplot and its global state are not used, and matplotlib is
imported with the first figure.
"""

from __future__ import annotations

import io
import math
import threading
import warnings
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from hansa.core.task import Task

# Okabe and Ito's colours, which colour-blind readers can distinguish; neighbours also differ in lightness.
BLUE, ORANGE, GREEN, SKY, RED, GREY = "#0072B2", "#E69F00", "#009E73", "#56B4E9", "#D55E00", "#999999"
FEW_POINTS = 40  # up to this many points, a curve has a marker at each point
LOSSES = (("loss", "test", "-", BLUE), ("train_loss", "training", "--", ORANGE))
SCORES = (
    ("accuracy", "accuracy", "-", BLUE),
    ("auc", "AUC", "--", ORANGE),
    ("party_accuracy_worst_tenth", "accuracy, worst tenth of parties", ":", GREEN),
    ("r2", "R²", "-", BLUE),
)
ERRORS = (("rmse", "root mean square error", "-", BLUE), ("mae", "mean absolute error", "--", ORANGE))

_one_at_a_time = threading.Lock()  # matplotlib's settings and warning filters are global to the process


def blank(width: float, height: float) -> Figure:
    """An empty figure with its own canvas, size in inches; a notebook displays it."""
    from hansa.report.figure import Drawing

    return Drawing(width, height)


def svg(figure: Figure) -> bytes:
    """The figure as SVG with reproducible bytes; letters are paths, so no font is needed."""
    from matplotlib import rc_context

    with _one_at_a_time, rc_context({"svg.hashsalt": "hansa"}):
        return _saved(figure, "svg", {"Date": None, "Creator": None})


def png(figure: Figure) -> bytes:
    """The figure as PNG."""
    with _one_at_a_time:
        return _saved(figure, "png", {"Software": None})


def _saved(figure: Figure, kind: str, metadata: dict[str, None]) -> bytes:
    out = io.BytesIO()
    with warnings.catch_warnings():  # characters that the font lacks are drawn as boxes
        warnings.filterwarnings("ignore", message=r"Glyph \d+ .* missing from", category=UserWarning)
        figure.savefig(out, format=kind, bbox_inches="tight", dpi=150, metadata=metadata)
    figure.set_layout_engine("none")  # lay out once, so that the next format is the same and faster
    return out.getvalue()


def shown(label: str, most: int = 40) -> str:
    """A name for use in a figure: one line, shortened, never parsed as a formula."""
    return shortened(label, most).replace("$", r"\$")


def shortened(text: str, most: int) -> str:
    """A text in one line, without bidirectional control characters, its middle cut out if it is long."""
    line = " ".join("".join(c if c.isprintable() else " " for c in text).split())
    tail = (most - 1) // 3
    return line if len(line) <= most else f"{line[: most - 1 - tail]}…{line[len(line) - tail :]}"


def plain(axes: Axes, title: str) -> None:
    """Apply the common style of all panels."""
    axes.set_title(title, loc="left", fontsize="medium")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="0.88", lw=0.8)
    axes.set_axisbelow(True)


def rounds_axis(axes: Axes) -> None:
    """Whole rounds along x."""
    from matplotlib.ticker import MaxNLocator

    axes.set_xlabel("round")
    axes.xaxis.set_major_locator(MaxNLocator(nbins=8, integer=True, min_n_ticks=1, steps=[1, 2, 5, 10]))


def legend_below(axes: Axes) -> None:
    """Put the legend below the panel, where it hides no curve."""
    axes.legend(frameon=False, fontsize="small", loc="upper center", bbox_to_anchor=(0.5, -0.2), ncols=3)


def learning(history: Sequence[Mapping[str, Any]]) -> Figure | None:
    """Plot loss and measured scores against rounds; None if nothing was measured."""
    groups = (("Loss", LOSSES), ("Score on the test samples", SCORES), ("Error on the test samples", ERRORS),
              ("Chosen metrics", _chosen(history)))  # fmt: skip
    panels = []
    for title, styles in groups:
        curves = [(_series(history, name), *style) for name, *style in styles]
        curves = [curve for curve in curves if curve[0][0]]
        if curves:
            panels.append((title, curves))
    if not panels:
        return None
    figure = blank(4.6 * len(panels), 3.1)
    for axes, (title, curves) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        for (x, y), label, line, colour in curves:
            marker = "o" if len(x) <= FEW_POINTS else ""
            axes.plot(x, y, ls=line, color=colour, marker=marker, ms=3, lw=1.6, label=label)
        plain(axes, title)
        rounds_axis(axes)
        legend_below(axes)
    return figure


def _chosen(history: Sequence[Mapping[str, Any]]) -> tuple[tuple[str, str, str, str], ...]:
    """The first three metrics of `run.metrics` that no other panel has, with their styles."""
    others = {name for name, *_ in (*LOSSES, *SCORES, *ERRORS)}
    names = dict.fromkeys(name for line in history for name in line if f"party_{name}_mean" in line)
    styles = (("-", BLUE), ("--", ORANGE), (":", GREEN))
    shown = [name for name in names if name not in others]
    return tuple((name, name.replace("_", " "), *style) for name, style in zip(shown, styles, strict=False))


def uneven(history: Sequence[Mapping[str, Any]]) -> bool:
    """Whether simulated time was recorded and rounds have different durations."""
    ends = [line["simulated_seconds"] for line in history if "simulated_seconds" in line]
    return len(ends) > 1 and bool(np.ptp(np.diff(ends, prepend=0.0)) > 1e-9 * ends[-1])


def over_time(history: Sequence[Mapping[str, Any]]) -> Figure | None:
    """Plot accuracy, or else the loss, against simulated time; None if all rounds have the same duration."""
    name = next((name for name in ("accuracy", "loss", "train_loss") if _series(history, name)[0]), None)
    if name is None or not uneven(history):
        return None
    rounds, y = _series(history, name)
    when = {line["round"]: line["simulated_seconds"] for line in history}
    figure = blank(9.2, 2.9)
    axes = figure.subplots()
    axes.plot([when[at] for at in rounds], y, color=BLUE, marker="o" if len(y) <= FEW_POINTS else "", ms=3, lw=1.6)
    plain(axes, name.replace("_", " ").capitalize())
    axes.set_xlabel("simulated seconds")
    return figure


def traffic(up: Sequence[float], down: Sequence[float], before: tuple[float, float] = (0, 0)) -> Figure:
    """Plot bytes per round and cumulative bytes, to and from the parties; `before`: bytes before round 1."""
    figure = blank(9.2, 2.9)
    rounds = np.arange(len(up) + 1)
    flows = (
        (np.asarray(down, dtype=float), before[1], "to the parties", "-", BLUE),
        (np.asarray(up, dtype=float), before[0], "from the parties", "--", ORANGE),
    )
    for axes, title, so_far in zip(
        figure.subplots(1, 2), ("Exchanged each round", "Exchanged so far"), (False, True), strict=True
    ):
        curves = [np.append(start, start + flow.cumsum()) if so_far else flow for flow, start, *_ in flows]
        most = max([float(curve.max()) for curve in curves if len(curve)], default=0.0)
        scale, name = unit(most)
        for curve, (*_, label, line, colour) in zip(curves, flows, strict=True):
            marker = "o" if len(curve) <= FEW_POINTS and not so_far else ""
            x = rounds[-len(curve) :] if len(curve) else rounds[:0]
            axes.plot(x, curve / scale, ls=line, color=colour, marker=marker, ms=3, lw=1.6, label=label)
        plain(axes, f"{title}, {name}")
        rounds_axis(axes)
        axes.set_ylim(0, max(most / scale, 1e-9) * 1.12)
        legend_below(axes)
    return figure


def answers(history: Sequence[Mapping[str, Any]]) -> Figure | None:
    """Plot how many parties replied, were missing or were rejected per round; None if all replied."""
    lost = {name: np.array([len(line.get(name, {})) for line in history]) for name in ("missing", "rejected")}
    if not any(counts.any() for counts in lost.values()):
        return None
    taken = np.array([line.get("replies", 0) for line in history])
    figure = blank(9.2, 2.7)
    axes = figure.subplots()
    edges = np.arange(len(history) + 1) + 0.5
    base = np.zeros(len(history))
    for counts, label, colour, hatch in (
        (taken, "accepted", SKY, ""),
        (lost["missing"], "missing", "white", "////"),
        (lost["rejected"], "rejected", RED, "xxx"),
    ):
        if not counts.any():
            continue
        axes.stairs(
            base + counts, edges, baseline=base, fill=True, fc=colour, ec="0.3", lw=0.4, hatch=hatch, label=label
        )
        base = base + counts
    plain(axes, "Replies by round")
    rounds_axis(axes)
    axes.set_ylim(0, float(base.max()) * 1.05)
    figure.legend(frameon=False, fontsize="small", loc="outside right upper")
    return figure


def draw_partition(task: Task) -> Figure:
    """Plot the number of samples of each party of a task, and their classes."""
    from hansa.data.picture import held, picture

    rows, targets = held(task)
    classes = task.classes if task.ids is None else None
    if classes is None and task.ids is None and task.loss == "cross_entropy" and len(targets):
        targets = targets.astype(np.int64)
        classes = int(targets.max()) + 1
    return picture(rows, targets, classes, list(task.names) if task.names is not None else None, on=blank(7, 6))


def unit(most: float) -> tuple[float, str]:
    """Divisor and name of the unit that suits the largest number of bytes."""
    for scale, name in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if most >= scale:
            return scale, name
    return 1.0, "bytes"


def _series(history: Sequence[Mapping[str, Any]], name: str) -> tuple[list[int], list[float]]:
    """The rounds at which a metric was measured and finite, and its values."""
    points = [(line["round"], line[name]) for line in history if isinstance(line.get(name), (int, float))]
    points = [(at, value) for at, value in points if math.isfinite(value)]
    return [at for at, _ in points], [value for _, value in points]
