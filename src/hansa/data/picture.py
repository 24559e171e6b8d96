"""A partition as a table and as a picture: the samples and classes of each party."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from hansa.holdings.stored_rows import is_dataset, read_dataset
from hansa.plumbing.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from hansa.core.task import Task

FEW_CLASSES = 20  # classes: up to here each class has its own colour
FEW_NAMED = 30  # parties: up to here the bars show class numbers
NUMBER = {"boxstyle": "round,pad=0.15", "fc": "white", "ec": "none", "alpha": 0.75}
FEW_PARTIES = 120  # parties: up to here there is a gap between bars


def table(parts: Sequence[np.ndarray], y: Tensor | np.ndarray, classes: int | None) -> list[list[int]]:
    """The number of targets of each class, one row per party; for regression only the number of samples."""
    if classes is None:
        return [[len(rows)] for rows in parts]
    targets = np.asarray(y)
    return [np.bincount(targets[rows].ravel(), minlength=classes).tolist() for rows in parts]


def held(task: Task) -> tuple[list[np.ndarray], np.ndarray]:
    """Return each party's row numbers and the targets of all parties of a task; of a sequence its first target.

    Parties with different columns have zeros as targets: most of them have no labels.
    """
    if task.ids is not None:
        sizes = np.cumsum([0, *(len(x) for x, _ in task.parties)])
        return [np.arange(a, b) for a, b in itertools.pairwise(sizes)], np.zeros(sizes[-1])
    if isinstance(task.parties, tuple) and len(task.parties) == 3:
        joined, edges = np.asarray(task.parties[1]), np.asarray(task.parties[2])
    else:
        pairs = [read_dataset(each, "parties") if is_dataset(each) else each for each in task.parties]
        targets = [np.asarray(y) for _, y in pairs]
        joined, edges = np.concatenate(targets), np.cumsum([0, *map(len, targets)])
    return [np.arange(a, b) for a, b in itertools.pairwise(edges)], joined if joined.ndim == 1 else joined[:, 0]


def draw(
    parts: Sequence[np.ndarray],
    y: Tensor | np.ndarray,
    classes: int | None,
    path: str | Path,
    names: Sequence[str] | None = None,
) -> None:
    """Write a picture of the partition to `path`; the file extension (.png, .svg, .pdf) sets the format."""
    try:
        if not Path(path).suffix:
            raise ValueError("it would be written to another name")
        picture(parts, y, classes, names).savefig(path, dpi=150)
    except ValueError:
        raise ConfigError(f"{path}: a picture ends in .png, .svg or .pdf") from None


def picture(
    parts: Sequence[np.ndarray],
    y: Tensor | np.ndarray,
    classes: int | None,
    names: Sequence[str] | None = None,
    on: Figure | None = None,
) -> Figure:
    """Draw the partition on a new figure, or on the empty figure `on`, whose size is changed.

    The upper panel shows the number of samples of each party, the lower panel the share of each class (not for
    regression). A separate panel for shares keeps small parties legible beside large ones.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = on or Figure(layout="constrained")
    if on is None:
        FigureCanvasAgg(figure)
    figure.set_size_inches(float(np.clip(3 + 0.3 * len(parts), 7, 13)), 3 if classes is None else 6)
    panels = figure.subplots(1 if classes is None else 2, 1, sharex=True, squeeze=False, gridspec_kw=_heights(classes))
    _sizes(panels[0, 0], np.array([len(rows) for rows in parts]))
    if classes is not None:
        counts = np.array(table(parts, y, classes)).reshape(len(parts), classes)
        shares = counts / np.maximum(1, counts.sum(axis=1, keepdims=True))
        (_bars if classes <= FEW_CLASSES else _heat)(figure, panels[1, 0], shares)
    _label_parties(panels[-1, 0], len(parts), names)
    return figure


def _heights(classes: int | None) -> dict[str, Sequence[float]]:
    return {} if classes is None else {"height_ratios": (1, 1.6)}


def _steps(axes: Axes, base: np.ndarray, top: np.ndarray, **style: Any) -> None:
    """One layer of bars, drawn as one outline, so that a thousand parties take no longer than ten."""
    axes.stairs(top, np.arange(len(top) + 1) - 0.5, baseline=base, fill=True, lw=0, **style)


def _gaps(axes: Axes, parties: int, height: float) -> None:
    axes.set(xlim=(-0.5, parties - 0.5), ylim=(0, height))
    axes.spines[["top", "right"]].set_visible(False)
    if parties <= FEW_PARTIES:
        axes.vlines(np.arange(parties + 1) - 0.5, 0, height, color="white", lw=60 / (parties + 20))


def _sizes(axes: Axes, sizes: np.ndarray) -> None:
    _steps(axes, np.zeros(len(sizes)), sizes, color="0.45")
    _gaps(axes, len(sizes), max(1.0, float(sizes.max())) * 1.05)
    axes.set_ylabel("samples")
    axes.set_title(
        f"{len(sizes):,} parties, {sizes.sum():,} samples: {sizes.min():,} to {sizes.max():,} a party, "
        f"median {np.median(sizes):,.0f}",
        loc="left",
        fontsize="medium",
    )


def _bars(figure: Figure, axes: Axes, shares: np.ndarray) -> None:
    from matplotlib import colormaps

    palette = colormaps["tab10" if shares.shape[1] <= 10 else "tab20"]
    base = np.zeros(len(shares))
    for label, column in enumerate(shares.T):
        _steps(axes, base, base + column, color=palette(label), label=str(label))
        if len(shares) <= FEW_NAMED:
            _name(axes, label, base, column)
        base = base + column
    _gaps(axes, len(shares), 1.0)
    axes.set_ylabel("share of each class")
    handles, labels = axes.get_legend_handles_labels()  # reversed to match the stacking order
    figure.legend(handles[::-1], labels[::-1], title="class", loc="outside right lower", frameon=False)


def _name(axes: Axes, label: int, base: np.ndarray, shares: np.ndarray) -> None:
    """Write the class number into each bar that is high enough, for colour-blind readers and for print."""
    for party in np.flatnonzero(shares > 0.05):
        axes.text(float(party), base[party] + shares[party] / 2, str(label), ha="center", va="center",
                  fontsize="x-small", bbox=NUMBER)  # fmt: skip


def _heat(figure: Figure, axes: Axes, shares: np.ndarray) -> None:
    from matplotlib.colors import PowerNorm

    norm = PowerNorm(0.5, vmin=0, vmax=max(float(shares.max()), 1e-9))  # rare classes stay visible
    image = axes.imshow(shares.T, aspect="auto", interpolation="nearest", cmap="viridis", origin="lower", norm=norm)
    axes.set_ylabel("class")
    figure.colorbar(image, ax=axes, label="share of each class")


def _label_parties(axes: Axes, count: int, names: Sequence[str] | None) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.set_xlabel("party")
    if names is not None and count <= 40:
        turned = sum(len(name) for name in names) > 80
        axes.set_xticks(range(count), names, rotation=90 if turned else 0, fontsize="small")
    elif count <= 30:
        axes.set_xticks(range(count))
    else:
        axes.xaxis.set_major_locator(MaxNLocator(nbins=12, integer=True))
