"""Draw the diagrams of the concepts page: `python docs/pictures.py` writes docs/images/concept-*.svg.

These diagrams are boxes and arrows without data; docs/figures.py draws the results of runs. Kinds of boxes differ in
outline and line style as well as in colour.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch, Rectangle

from hansa.report.plots import BLUE, GREEN, GREY, ORANGE, RED, blank

IMAGES = Path(__file__).resolve().parent / "images"
Point = tuple[float, float]
PALE = {BLUE: "#E5F1F8", ORANGE: "#FDF4E0", GREEN: "#E3F4EE", GREY: "#F3F3F3", RED: "#FBE9DF"}


def canvas(figure: Figure, width: float, height: float, place: object = 111) -> Axes:
    """Create axes without a frame, with their own units."""
    axes = figure.add_subplot(place)
    axes.set_xlim(0, width)
    axes.set_ylim(0, height)
    axes.set_aspect("equal")
    axes.axis("off")
    return axes


def box(axes: Axes, at: Point, size: Point, text: str, colour: str = GREY, style: str = "-", weight: str = "normal",
        fontsize: float = 9) -> None:  # fmt: skip
    """Draw a box around a point, with centred text."""
    corner = (at[0] - size[0] / 2, at[1] - size[1] / 2)
    axes.add_patch(FancyBboxPatch(corner, *size, boxstyle="round,pad=0,rounding_size=0.12", ls=style, lw=1.4,
                                  edgecolor=colour, facecolor=PALE[colour]))  # fmt: skip
    axes.text(*at, text, ha="center", va="center", fontsize=fontsize, weight=weight, linespacing=1.25)


def arrow(axes: Axes, start: Point, end: Point, colour: str = "black", style: str = "-", both: bool = False,
          bend: float = 0.0) -> None:  # fmt: skip
    head = "<|-|>" if both else "-|>"
    axes.add_patch(FancyArrowPatch(start, end, arrowstyle=head, mutation_scale=11, lw=1.3, ls=style, color=colour,
                                   shrinkA=1, shrinkB=1, connectionstyle=f"arc3,rad={bend}"))  # fmt: skip


def dot(axes: Axes, at: Point, text: str = "", colour: str = BLUE, shape: str = "o", size: float = 15) -> None:
    axes.plot(*at, shape, ms=size, mfc=PALE[colour], mec=colour, mew=1.5, zorder=3)
    axes.text(*at, text, ha="center", va="center", fontsize=8, zorder=4)


def round_of_learning() -> Figure:
    """Draw a round: query, local work, fusion."""
    figure = blank(7.6, 3.7)
    axes = canvas(figure, 15.2, 7.4)
    box(axes, (2.1, 5.6), (3.6, 1.7), "Q: query\nmodel, op, cohort", ORANGE)
    box(axes, (13.1, 5.6), (3.6, 1.7), "F: fusion\ncombine the updates,\nupdate the model", GREEN)
    axes.text(7.6, 4.95, "aggregator", ha="center", fontsize=9, style="italic", color="0.35")
    axes.add_patch(FancyBboxPatch((0.05, 4.5), 15.1, 2.7, boxstyle="round,pad=0,rounding_size=0.15", ls=":", lw=1,
                                  edgecolor="0.5", facecolor="none"))  # fmt: skip
    for x, name, size in ((3.8, "party 0", "n = 120"), (7.6, "party 1", "n = 300"), (11.4, "party 2", "n = 45")):
        box(axes, (x, 1.6), (3.0, 1.9), f"{name}\nL: local work\n{size}, memory", BLUE)
        arrow(axes, (2.7 + (x - 3.8) * 0.12, 4.7), (x - 0.5, 2.6), ORANGE)
        arrow(axes, (x + 0.5, 2.6), (12.5 + (x - 11.4) * 0.12, 4.7), GREEN, "--")
    axes.text(0.4, 3.7, "down: the model", fontsize=8.5, color="0.2", ha="left")
    axes.text(12.5, 3.7, "up: update, weight", fontsize=8.5, color="0.2", ha="left")
    arrow(axes, (11.2, 6.0), (4.0, 6.0), "black")
    axes.text(7.6, 6.2, "next round", ha="center", fontsize=8.5)
    axes.text(7.6, 0.25, "samples never leave these boxes", ha="center", fontsize=8.5, style="italic", color="0.35")
    return figure


def verbs() -> Figure:
    """Draw what the aggregator sees of the replies, for each verb."""
    figure = blank(8.4, 3.4)
    grid = figure.add_gridspec(1, 4)
    spots: Sequence[Point] = ((1.0, 1.2), (2.5, 1.2), (4.0, 1.2))
    for place, (name, what) in enumerate((
        ("reduce", "one sum:\nno single update"), ("gather", "each reply,\nby party"),
        ("submit, next", "replies as they\narrive, no rounds"), ("route", "only sizes: parties\nsend to each other"),
    )):  # fmt: skip
        axes = canvas(figure, 5, 7.6, grid[0, place])
        axes.text(2.5, 7.2, name, ha="center", fontsize=11, weight="bold", family="monospace")
        axes.text(2.5, 0.15, what, ha="center", va="center", fontsize=9, linespacing=1.3)
        for k, spot in enumerate(spots):
            dot(axes, (spot[0], 1.9), f"{k}", BLUE, size=17)
        if name == "reduce":
            box(axes, (2.5, 5.9), (2.6, 1.0), "3.7", GREEN)
            dot(axes, (2.5, 4.2), "Σ", GREY, "o", 19)
            arrow(axes, (2.5, 4.65), (2.5, 5.4), GREEN)
            for spot in spots:
                arrow(axes, (spot[0], 2.35), (2.5 + (spot[0] - 2.5) * 0.25, 3.75), "black")
        elif name == "gather":
            box(axes, (2.5, 5.9), (4.4, 1.0), "1.2 | 0.9 | 1.6", GREEN)
            for spot in spots:
                arrow(axes, (spot[0], 2.35), (spot[0], 5.35), GREEN)
        elif name == "submit, next":
            box(axes, (2.5, 5.9), (4.4, 1.0), "0.9, then 1.6, then …", GREEN, fontsize=8.5)
            for spot, length in zip(spots, (0.55, 1.0, 0.8), strict=True):
                top = 2.35 + length * 3.0
                arrow(
                    axes,
                    (spot[0], 2.35),
                    (spot[0], top),
                    GREEN if length == 1.0 else "black",
                    "-" if length == 1.0 else ":",
                )
        else:
            box(axes, (2.5, 5.9), (2.6, 1.0), "sealed", GREY, "--")
            for start, top, end in ((1.0, 1.6, 3.85), (2.5, 2.3, 4.1)):  # two senders, one receiver
                arrow(axes, (start, 2.35), (top, 5.3), "0.45", "--")
                arrow(axes, (top + 1.2, 5.3), (end, 2.4), "0.45", "--")
    return figure


def cells(axes: Axes, corner: Point, size: tuple[int, int], colour: str, head: str, labels: bool = False) -> None:
    """Draw a table of columns and rows; with labels, a hatched column on its right."""
    columns, rows = size
    for column in range(columns + labels):
        for row in range(rows):
            at = (corner[0] + 0.55 * column, corner[1] + 0.45 * row)
            edge, hatch = (GREEN, "//") if column == columns else (colour, None)
            axes.add_patch(Rectangle(at, 0.55, 0.45, lw=1.0, edgecolor=edge, facecolor=PALE[edge], hatch=hatch))
    middle = corner[0] + 0.55 * (columns + labels) / 2
    axes.text(middle, corner[1] + 0.45 * rows + 0.25, head, ha="center", fontsize=9)


def columns() -> Figure:
    """Draw parties with the same columns, and parties with different columns of the same people."""
    figure = blank(8.0, 3.0)
    grid = figure.add_gridspec(1, 2)
    left, right = (canvas(figure, 8, 6, grid[0, place]) for place in range(2))
    left.text(4, 5.6, "rows", ha="center", fontsize=11, weight="bold", family="monospace")
    for corner, rows, head in (((2.4, 3.5), 3, "party 0"), ((2.4, 1.85), 2, "party 1"), ((2.4, 0.2), 2, "party 2")):
        cells(left, corner, (4, rows), BLUE, head, labels=True)
    right.text(4, 5.6, "columns", ha="center", fontsize=11, weight="bold", family="monospace")
    people = ("ann", "bob", "cid", "dan", "eve", "fay")
    for corner, size, first, head in (((0.9, 1.9), (2, 4), 2, "label holder"), ((3.9, 1.45), (3, 4), 1, "party 1"),
                                      ((6.8, 1.0), (1, 6), 0, "party 2")):  # fmt: skip
        cells(right, corner, size, ORANGE, head, labels=head == "label holder")
        for row in range(size[1]):
            name = people[::-1][first + row]
            right.text(corner[0] - 0.1, corner[1] + 0.45 * row + 0.22, name, ha="right", va="center", fontsize=7.5)
    for axes, text in (
        (left, "the same columns; all have labels (hatched)"),
        (right, "ids match the rows of a person"),
    ):
        axes.text(4, -0.25 if axes is left else 0.3, text, ha="center", fontsize=8.5, style="italic", color="0.35")
    return figure


def runtimes() -> Figure:
    """Draw one algorithm object and the runtimes that answer its asks."""
    figure = blank(8.0, 3.9)
    axes = canvas(figure, 16, 7.8)
    box(axes, (2.0, 3.9), (3.4, 2.2), "algorithm\nstraight-line code:\nawait fed.reduce(...)", ORANGE)
    box(axes, (6.2, 3.9), (2.4, 1.5), "driver\nask, answer", GREY)
    arrow(axes, (3.75, 3.9), (4.95, 3.9), both=True)
    rows = (
        (7.0, "reference", "one party after another, one thread", BLUE, "-"),
        (5.6, "workers", "the same, one process per core", BLUE, "-"),
        (4.2, "stacked", "many parties at once, CPU or GPU", BLUE, "--"),
        (2.2, "processes", "one process per party, no shared objects", GREEN, "-"),
        (0.8, "network", "parties across organisations, mutual TLS", GREEN, "-"),
    )
    for y, name, what, colour, style in rows:
        box(axes, (11.9, y), (7.2, 1.05), f"{name}: {what}", colour, style, fontsize=8.5)
        arrow(axes, (7.45, 3.9 + (y - 3.9) * 0.12), (8.25, y))
    for y, name in ((5.6, "simulation"), (1.5, "separate")):
        axes.text(15.9, y, name, rotation=90, va="center", ha="center", fontsize=8.5, color="0.35", style="italic")
    legend = "solid outline:\nthe same bits\ndashed: to 1e-9\nin float64"
    axes.text(6.2, 1.25, legend, ha="center", va="center", fontsize=8.5, color="0.25", linespacing=1.3)
    return figure


def replay() -> Figure:
    """Draw a killed and resumed run that ends with the bits of an undisturbed run."""
    figure = blank(7.6, 2.9)
    axes = canvas(figure, 15.2, 5.8)
    steps = [3.2 + 1.6 * k for k in range(6)]
    rows = (("undisturbed", 5.1, range(6)), ("killed in round 4", 3.1, range(3)), ("resumed", 1.1, range(2, 6)))
    for name, y, rounds in rows:
        axes.text(0.1, y, name, va="center", fontsize=9)
        for k in rounds:
            dot(axes, (steps[k], y), f"{k + 1}", BLUE, size=17)
            if k + 1 in rounds:
                arrow(axes, (steps[k] + 0.45, y), (steps[k + 1] - 0.45, y))
        if 5 in rounds:
            arrow(axes, (steps[5] + 0.45, y), (12.35, y))
            box(axes, (13.7, y), (2.6, 1.1), "model\na41f…", GREEN)
    arrow(axes, (steps[2] + 0.45, 3.1), (steps[3] - 0.45, 3.1))
    axes.text(steps[3], 3.1, "×", color=RED, fontsize=20, weight="bold", ha="center", va="center")
    axes.text(steps[3] + 0.5, 3.1, "kill -9", color=RED, fontsize=9, va="center")
    box(axes, (steps[1], 1.1), (1.9, 0.9), "checkpoint\nafter 2", GREY, "--", fontsize=8)
    arrow(axes, (steps[1], 2.6), (steps[1], 1.6), "0.4")
    arrow(axes, (steps[1] + 0.98, 1.1), (steps[2] - 0.4, 1.1), "0.4")
    axes.text(13.7, 3.1, "the same bits", fontsize=9, ha="center", va="center", weight="bold")
    arrow(axes, (13.7, 3.4), (13.7, 4.5), "black")
    arrow(axes, (13.7, 2.8), (13.7, 1.7), "black")
    return figure


def topologies() -> Figure:
    """Draw the topologies: which parties exchange messages."""
    figure = blank(8.4, 2.6)
    grid = figure.add_gridspec(1, 5)
    names = ("aggregator\n(nearly all methods)", "ring", "complete", "star", "random")
    circle = [(2.5 + 1.8 * math.sin(2 * math.pi * k / 6), 3.0 + 1.8 * math.cos(2 * math.pi * k / 6)) for k in range(6)]
    drawn = np.triu(np.random.default_rng(5).random((6, 6)) < 0.4, 1)
    for place, name in enumerate(names):
        axes = canvas(figure, 5, 5.8, grid[0, place])
        axes.text(2.5, 0.25, name, ha="center", va="center", fontsize=8.5, linespacing=1.2)
        for i in range(6):
            for j in range(i + 1, 6):
                linked = {"ring": j - i in (1, 5), "complete": True, "star": i == 0, "random": bool(drawn[i, j])}
                if linked.get(name):
                    axes.plot(*zip(circle[i], circle[j], strict=True), "-", color="0.45", lw=1.2, zorder=1)
        for k, spot in enumerate(circle):
            if place == 0:
                axes.plot(*zip(spot, (2.5, 3.0), strict=True), "-", color="0.45", lw=1.2, zorder=1)
            dot(axes, spot, f"{k}", BLUE, size=13)
        if place == 0:
            dot(axes, (2.5, 3.0), "", ORANGE, "s", 15)
    return figure


PICTURES = {
    "round": round_of_learning,
    "verbs": verbs,
    "runtimes": runtimes,
    "columns": columns,
    "replay": replay,
    "topologies": topologies,
}


def main() -> None:
    matplotlib.rcParams["svg.hashsalt"] = "hansa"  # makes the SVG file reproducible
    for name, draw in PICTURES.items():
        path = IMAGES / f"concept-{name}.svg"
        draw().savefig(path, metadata={"Date": None, "Creator": None}, facecolor="white")
        print(path.relative_to(IMAGES.parent.parent))


if __name__ == "__main__":
    main()
