"""Plots and tables of each party's share in robust fusion, by round."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from hansa.report.plots import BLUE, FEW_POINTS, ORANGE, blank, plain, rounds_axis

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NAMED = 40  # up to this many parties, a plot names each party
LISTED = 200  # up to this many parties, a table lists all parties
History = Sequence[Mapping[str, Any]]


def parties(history: History, attackers: Sequence[str]) -> list[str]:
    """All parties that a fusion examined or whose replies were rejected; attackers first."""
    robust = [line for line in history if "fusion" in line]
    seen = dict.fromkeys(name for line in robust for name in (*line["fusion"]["shares"], *line.get("rejected", {})))
    return sorted(seen, key=lambda name: (name not in attackers, len(name), name))


def figure(history: History, attackers: Sequence[str]) -> Figure | None:
    """Plot each party's share per round, relative to the largest share of the round.

    If the attackers are known, also plot precision and recall of the exclusion. None if no fusion examined single
    parties."""
    names = parties(history, attackers)
    if not names:
        return None
    rows = {name: k for k, name in enumerate(names)}
    shares = np.full((len(names), len(history)), np.nan)
    for at, line in enumerate(history):
        of_round = line.get("fusion", {}).get("shares", {})
        largest = max(of_round.values(), default=0.0) or 1.0
        for name, share in of_round.items():
            shares[rows[name], at] = share / largest
    known = any("exclusion_recall" in line for line in history)
    height = min(9.0, max(2.6, 0.16 * min(len(names), NAMED) + 1.2))
    drawn = blank(9.2, height)
    panels = drawn.subplots(1, 2 if known else 1, squeeze=False, width_ratios=[3, 2] if known else [1])[0]
    _shares(panels[0], shares, names, attackers, history)
    if known:
        _precision(panels[1], history)
    return drawn


def _shares(
    axes: Any, shares: np.ndarray[Any, Any], names: list[str], attackers: Sequence[str], history: History
) -> None:
    from matplotlib import colormaps

    colours = colormaps["cividis"].with_extremes(bad="0.9")
    edges = (history[0]["round"] - 0.5, history[-1]["round"] + 0.5)
    picture = axes.imshow(shares, aspect="auto", interpolation="nearest", cmap=colours, vmin=0, vmax=1,
                          extent=(*edges, len(names) - 0.5, -0.5))  # fmt: skip
    axes.figure.colorbar(picture, ax=axes, label="share, relative to the round's largest", fraction=0.05)
    plain(axes, "Share in the model" + (", attackers above the line" if attackers else ""))
    axes.grid(visible=False)
    rounds_axis(axes)
    hostile = sum(name in attackers for name in names)
    if hostile:
        axes.axhline(hostile - 0.5, color="white", lw=2.5)
        axes.axhline(hostile - 0.5, color="black", lw=1, ls="--")
    if len(names) <= NAMED:
        axes.set_yticks(range(len(names)), names, fontsize="small")
    axes.set_ylabel("party")


def _precision(axes: Any, history: History) -> None:
    for name, label, line, colour in (
        ("exclusion_precision", "precision: attackers among excluded parties", "-", BLUE),
        ("exclusion_recall", "recall: attackers that were excluded", "--", ORANGE),
    ):
        points = [(entry["round"], entry[name]) for entry in history if name in entry]
        marker = "o" if len(points) <= FEW_POINTS else ""
        axes.plot(
            [at for at, _ in points], [y for _, y in points], ls=line, color=colour, marker=marker, ms=3, label=label
        )
    plain(axes, "Excluded parties")
    axes.set_ylim(-0.03, 1.03)
    rounds_axis(axes)
    axes.legend(frameon=False, fontsize="small", loc="upper center", bbox_to_anchor=(0.5, -0.2))


def table(history: History, attackers: Sequence[str]) -> list[tuple[str, ...]]:
    """One row per party: attacker or not, rounds seen, rounds excluded, mean share."""
    rows = []
    for name in parties(history, attackers)[:LISTED]:
        lines = [line["fusion"] for line in history if name in line.get("fusion", {}).get("shares", {})]
        out = sum(name in finding["excluded"] for finding in lines)
        rejected = sum(name in line.get("rejected", {}) for line in history)
        share = sum(finding["shares"][name] for finding in lines) / max(1, len(lines))
        kind = ("attacker" if name in attackers else "honest",) if attackers else ()
        rows.append((name, *kind, f"{len(lines):,}", f"{out:,}", f"{rejected:,}", f"{share:.4f}"))
    return rows
