"""Plots of a study. An algorithm has the same colour, line style and marker in all plots. Each of the three alone
distinguishes neighbours, so that plots are readable in black and white and for colour-blind readers.

If curves crowd near the top, the axis is stretched towards the perfect score (equal steps divide the error by equal
factors). It begins at the value that most algorithms have after a seventh of the run; the edge of the plot names the
algorithms that never get that far.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from hansa.metrics.names import higher_is_better, plain_metric, possible_values
from hansa.report.plots import BLUE, GREEN, ORANGE, RED, SKY, blank, plain, rounds_axis, unit

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PURPLE, DARK = "#CC79A7", "#333333"
COLOURS = (BLUE, RED, GREEN, DARK, ORANGE, PURPLE, SKY, "#7F7F00")
LINES: tuple[Any, ...] = ("-", (0, (5, 1.6)), (0, (1.2, 1.2)), (0, (6, 1.5, 1.2, 1.5)), (0, (3, 1.2, 1, 1.2, 1, 1.2)))
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", "*", ">", "h", "p")
NAMES = {
    "accuracy": "accuracy", "loss": "loss", "auc": "AUC", "r2": "R²", "rmse": "root mean square error",
    "mae": "mean absolute error", "train_loss": "training loss", "f1": "F1",
}  # fmt: skip
PERCENT = ("accuracy", "auc")  # shares, shown as percentages
CROWDED = 0.1  # the axis is stretched below this error
ARROWS = "◀▶"  # before a value that lies beyond the axis
COLUMNS = 3  # maximum number of panels per row

Band = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]  # x, mean, low, high


@dataclass(frozen=True)
class Look:
    """Style of an algorithm in plots, and its name there."""

    name: str
    colour: str
    line: Any
    marker: str
    hollow: bool

    @property
    def points(self) -> dict[str, Any]:
        """Keyword arguments of matplotlib for the marker."""
        return {"marker": self.marker, "ms": 7.5 if self.marker == "*" else 5, "color": self.colour, "mew": 1.2,
                "mfc": "white" if self.hollow else self.colour}  # fmt: skip


def look(at: int, name: str) -> Look:
    """The style of the algorithm at an index of the study's list."""
    return Look(name, COLOURS[at % len(COLOURS)], LINES[at % len(LINES)], MARKERS[at % len(MARKERS)], at % 2 == 1)


def is_percent(metric: str) -> bool:
    """Whether a metric is a share, shown in percent."""
    share = plain_metric(metric) in PERCENT or possible_values(plain_metric(metric)) == (0.0, 1.0)
    return share and not metric.endswith("_variance")  # a spread has the metric's unit


def title(metric: str) -> str:
    """Axis label of a metric."""
    plain_name = plain_metric(metric)
    words = NAMES.get(plain_name, plain_name.replace("_", " "))
    over = {"_mean": ", mean of parties", "tenth": ", worst tenth of parties", "iance": ", variance over parties",
            "pread": ", spread over parties"}  # fmt: skip
    words += over.get(metric[-5:], "")
    return f"{words}, %" if is_percent(metric) else words


def cost(metric: str) -> Callable[[Any], Any]:
    """Function from a metric to its cost: the distance from a perfect score, or the loss itself."""
    return (lambda value: 1 - np.asarray(value)) if higher_is_better(metric) else np.asarray


def grid(count: int, height: float = 2.8) -> tuple[Figure, list[Axes]]:
    """A figure of `count` panels, in rows of at most three."""
    columns = min(COLUMNS, count)
    rows = math.ceil(count / columns)
    width, tall = {1: (7.6, height + 0.9), 2: (4.7, height + 0.3)}.get(columns, (3.35, height))
    figure = blank(width * columns, tall * rows + 0.5)
    panels = list(figure.subplots(rows, columns, squeeze=False).flat)
    for empty in panels[count:]:
        empty.set_axis_off()
    return figure, panels[:count]


def curves(
    metric: str,
    against: str,
    panels: Mapping[str, Mapping[Look, Band]],
    target: float | None = None,
) -> tuple[Figure, str] | None:
    """Plot a metric against rounds, bytes or simulated seconds: one panel per setting, bands over seeds.

    Also return notes on the axes for the caption. None if nothing was measured."""
    curves = {
        setting: {drawn: _finite(band) for drawn, band in bands.items()}
        for setting, bands in panels.items()
    }  # fmt: skip
    curves = {s: {k: b for k, b in bands.items() if len(b[0])} for s, bands in curves.items()}
    curves = {setting: bands for setting, bands in curves.items() if bands}
    if not curves:
        return None
    figure, axes = grid(len(curves))
    most = max(float(band[0][-1]) for bands in curves.values() for band in bands.values())
    scale, name = unit(most) if against == "bytes" else (1.0, "")
    stretched = _stretched(metric, [_span(metric, bands, None) for bands in curves.values()])
    spans = {setting: _span(metric, bands, target) for setting, bands in curves.items()}
    for panel, (setting, bands) in zip(axes, curves.items(), strict=True):
        _panel(panel, metric, {k: (b[0] / scale, *b[1:]) for k, b in bands.items()}, target, spans[setting], stretched)
        plain(panel, setting)
        if against == "rounds":
            rounds_axis(panel)
        else:
            panel.set_xlabel(f"exchanged so far, {name}" if against == "bytes" else "simulated seconds")
            panel.locator_params(axis="x", nbins=6)
    for panel in axes[::COLUMNS]:
        panel.set_ylabel(title(metric))
    _legend(figure, [k for bands in curves.values() for k in bands])
    of = cost(metric)
    costs = [(of(band[1]), spans[setting][1]) for setting, bands in curves.items() for band in bands.values()]
    notes = ["Axes are stretched towards 100 %: equal steps divide the error by equal factors."] if (
        stretched and is_percent(metric)) else []  # fmt: skip
    if any(float(each.max()) > worst for each, worst in costs):
        notes.append("Axes begin at the value that most algorithms have after a seventh of the run.")
    if any(float(each.min()) > worst for each, worst in costs):
        notes.append(f"Algorithms that stay {'below' if higher_is_better(metric) else 'above'} are named.")
    return figure, " ".join(notes)


def _finite(band: Band) -> Band:
    keep = np.isfinite(band[1])
    return tuple(np.asarray(part, dtype=float)[keep] for part in band)  # type: ignore[return-value]


def _legend(figure: Figure, looks: Sequence[Look]) -> None:
    """Add one legend for all panels, with lines long enough to distinguish the styles."""
    from matplotlib.lines import Line2D

    each = list(dict.fromkeys(looks))
    handles = [Line2D([], [], ls=k.line, lw=1.6, label=k.name, **k.points) for k in each]
    width = figure.get_figwidth() / (0.9 + 0.085 * max(len(k.name) for k in each))
    columns = max(1, min(len(each), int(width)))
    columns = math.ceil(len(each) / math.ceil(len(each) / columns))
    figure.legend(handles=handles, frameon=False, fontsize="small", loc="outside lower center", ncols=columns,
                  handlelength=3.6)  # fmt: skip


def _span(metric: str, bands: Mapping[Look, Band], target: float | None) -> tuple[float, float]:
    """The smallest and largest cost of a panel: from the best value to that of most algorithms after a seventh of the
    run, extended to a target nearby."""
    of = cost(metric)
    begin = min(float(x[0]) for x, *_ in bands.values())
    end = max(float(x[-1]) for x, *_ in bands.values())
    ends = {k: float(of(mean[-1])) for k, (_, mean, *_) in bands.items()}
    usual = pack(list(ends.values()))
    worst = max(ends[k] for k in bands if ends[k] <= usual)
    for x, mean, *_ in (band for k, band in bands.items() if ends[k] <= usual):
        early = min(np.searchsorted(x, begin + (end - begin) / 7), len(x) - 1)
        worst = max(worst, float(of(mean[early:]).max()))
    best = min(float(of(mean).min()) for _, mean, *_ in bands.values())
    if target is not None and best / 1.7 < of(target) < 2 * worst:
        worst, best = max(worst, 1.04 * float(of(target))), min(best, 0.96 * float(of(target)))
    return best, worst


def _stretched(metric: str, spans: Sequence[tuple[float, float]]) -> bool:
    """Whether all axes of a figure are logarithmic in the error or the loss."""
    if is_percent(metric):
        return any(best < CROWDED and worst > best for best, worst in spans)
    return not higher_is_better(metric) and all(best > 0 for best, _ in spans) and any(w > 6 * b for b, w in spans)


def _panel(axes: Axes, metric: str, bands: Mapping[Look, Band], target: float | None, span: tuple[float, float],
           stretched: bool) -> None:  # fmt: skip
    of = cost(metric)
    wide = 0.16 if len(bands) <= 6 else 0.09
    begin = min(float(x[0]) for x, *_ in bands.values())
    end = max(float(x[-1]) for x, *_ in bands.values())
    best, worst = span
    if target is not None and best <= of(target) <= worst:
        axes.axhline(target * scale_of(metric), color="0.35", lw=0.9, ls=(0, (8, 3)), zorder=1.5)
        axes.annotate(f"target {_number(target, metric)}", (0, target * scale_of(metric)), xytext=(3, 2), ha="left",
                      xycoords=("axes fraction", "data"), textcoords="offset points", fontsize="x-small",
                      color="0.25")  # fmt: skip
    elif target is not None:
        beyond = "↑" if (of(target) < best) == higher_is_better(metric) else "↓"
        axes.text(0.01, 0.99, f"target {_number(target, metric)} {beyond}", transform=axes.transAxes, va="top",
                  fontsize="x-small", color="0.25")  # fmt: skip
    out = []
    for at, (drawn, (x, mean, low, high)) in enumerate(bands.items()):
        if float(of(mean).min()) > worst:
            out.append(f"{drawn.name} {_number(float(mean[-1]), metric)}")
            continue
        step = max(1, len(x) // 6)
        axes.plot(x, mean * scale_of(metric), ls=drawn.line, lw=1.5, markevery=(at * step // max(1, len(bands)), step),
                  **drawn.points)  # fmt: skip
        if np.isfinite(low).all() and (high > low).any():
            axes.fill_between(x, low * scale_of(metric), high * scale_of(metric), color=drawn.colour, alpha=wide, lw=0)
    _limits(axes, metric, best, worst, stretched)
    axes.set_xlim(begin - 0.02 * (end - begin or 1), end + 0.02 * (end - begin or 1))
    if out:
        side = "below" if higher_is_better(metric) else "above"
        at_y, grows = (0.02, "bottom") if side == "below" else (0.98, "top")
        more = f", and {len(out) - 2} more" if len(out) > 2 else ""
        axes.text(0.98, at_y, f"{side}: {', '.join(out[:2])}{more}", transform=axes.transAxes, ha="right", va=grows,
                  fontsize="x-small", color="0.25")  # fmt: skip


def pack(ends: Sequence[float]) -> float:
    """The largest final cost within four times the median; never below the best."""
    known = [value for value in ends if math.isfinite(value)]
    return max(4 * float(np.median(known)), min(known)) if known else math.inf


def scale_of(metric: str) -> float:
    """The factor from a metric to the numbers that plots show."""
    return 100.0 if is_percent(metric) else 1.0


def _number(value: float, metric: str) -> str:
    return f"{100 * value:.4g} %" if is_percent(metric) else f"{value:.4g}"


def _limits(axes: Axes, metric: str, best: float, worst: float, stretched: bool) -> None:
    """Set the limits of a metric's axis; `best` and `worst` are costs."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    scale = scale_of(metric)
    if is_percent(metric) and stretched:
        floor = max(best, 1e-4)
        low, high = 1.12 * max(worst, 1.3 * floor), floor / 1.15

        def forward(share: np.ndarray) -> np.ndarray:
            return -np.log10(np.maximum(1 - np.asarray(share) / scale, 1e-6))

        axes.set_yscale("function", functions=(forward, lambda y: scale * (1 - 10.0 ** -np.asarray(y))))
        axes.set_ylim(scale * (1 - min(low, 0.98)), scale * (1 - high))
        _ticks(axes, forward)
    elif stretched:
        axes.set_yscale("log")
        axes.set_ylim(best / 1.1, worst * 1.1)
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if worst < 300 * best else (1,)))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.yaxis.set_minor_locator(NullLocator())
    else:
        pad = max(0.04 * (worst - best), 1e-3 * max(abs(worst), 1e-6))
        ends = (1 - worst - pad, 1 - best + pad) if higher_is_better(metric) else (best - pad, worst + pad)
        axes.set_ylim(scale * ends[0], scale * ends[1])


def _ticks(axes: Axes, forward: Callable[[np.ndarray], np.ndarray]) -> None:
    """Set ticks at round percentages, at least a ninth of the axis apart."""
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    low, high = axes.get_ylim()
    bottom, top = (float(forward(np.array(v))) for v in (low, high))
    taken: list[float] = []
    for step in (10, 5, 2, 1, 0.5, 0.2, 0.1, 0.05, 0.02, 0.01):
        if len(taken) > 4:
            break
        for tick in np.arange(math.ceil(low / step), math.floor(high / step) + 1) * step:
            place = float(forward(np.array(tick)))
            if all(abs(place - float(forward(np.array(t)))) > (top - bottom) / 9 for t in taken):
                taken.append(float(tick))
    axes.yaxis.set_major_locator(FixedLocator(sorted(taken)))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.5g}"))


@dataclass(frozen=True)
class Standing:
    """Final metric of an algorithm in a setting: mean, interval if any, and value per seed.

    Also whether no other algorithm is significantly better."""

    mean: float
    low: float | None
    high: float | None
    each: Sequence[float]
    leads: bool


def finals(metric: str, panels: Mapping[str, Mapping[Look, Standing]], target: float | None = None) -> Figure | None:
    """Plot the final metric by setting; a filled marker means that no other is significantly better."""
    panels = {setting: standings for setting, standings in panels.items() if standings}
    if not panels:
        return None
    order = list(dict.fromkeys(k for standings in panels.values() for k in standings))
    figure, axes = grid(len(panels), max(1.9, 0.75 + 0.24 * len(order)))
    of = cost(metric)
    scale = scale_of(metric)
    for number, (panel, (setting, standings)) in enumerate(zip(axes, panels.items(), strict=True)):
        usual = pack([float(of(s.mean)) for s in standings.values()])
        seen: list[float] = []
        for row, drawn in enumerate(order):
            standing = standings.get(drawn)
            if standing is None:
                panel.text(0.02, row, "no result", transform=panel.get_yaxis_transform(), va="center",
                           fontsize="x-small", color="0.35")  # fmt: skip
            elif of(standing.mean) > usual:
                arrow = f"{ARROWS[0 if higher_is_better(metric) else 1]} "
                side, where = ("left", 0.02) if higher_is_better(metric) else ("right", 0.98)
                panel.text(where, row, arrow + _number(standing.mean, metric), va="center", ha=side,
                           transform=panel.get_yaxis_transform(), fontsize="x-small", color="0.25")  # fmt: skip
            else:
                seen += _standing(panel, row, standing, scale)
        low, high = min(seen), max(seen)
        if is_percent(metric):
            low, high = max(low, 0.0), min(high, 100.0)
        if target is not None and low - (high - low) < scale * target < high + (high - low):
            panel.axvline(scale * target, color="0.35", lw=0.9, ls=(0, (8, 3)), zorder=1)
            low, high = min(low, scale * target), max(high, scale * target)
        pad = 0.06 * (high - low) or 0.01 * max(abs(high), 1e-6)
        panel.set_xlim(low - pad, high + pad)
        panel.set_ylim(len(order) - 0.4, -0.6)
        plain(panel, setting)
        panel.grid(visible=False, axis="y")
        panel.grid(axis="x", color="0.88", lw=0.8)
        panel.hlines(np.arange(len(order)), *panel.get_xlim(), color="0.93", lw=0.8, zorder=0)
        panel.set_yticks(range(len(order)), [k.name for k in order] if number % COLUMNS == 0 else [])
        panel.tick_params(axis="y", length=0)
        panel.locator_params(axis="x", nbins=6)
        panel.set_xlabel(title(metric))
    return figure


def _standing(axes: Axes, row: int, standing: Standing, scale: float) -> list[float]:
    """Draw one algorithm's row; return the values that the panel must include."""
    mean = scale * standing.mean
    each = scale * np.asarray(standing.each, dtype=float)
    if len(each) > 1:
        axes.plot(each, np.full(len(each), row + 0.22), "|", color="0.45", ms=4, mew=1)
    seen = [mean, *each.tolist()]
    if standing.low is not None and standing.high is not None:
        low, high = scale * standing.low, scale * standing.high
        axes.plot([low, high], [row, row], color="0.15", lw=1.3, solid_capstyle="butt")
        axes.plot([low, high], [row, row], "|", color="0.15", ms=5)
        span = max(max(seen) - min(seen), 1e-12)
        seen += [max(low, min(seen) - span), min(high, max(seen) + span)]
    axes.plot([mean], [row], "o", ms=6, mew=1.3, mec="black", mfc="black" if standing.leads else "white", zorder=3)
    return seen


def adversaries(
    metric: str, panels: Mapping[str, tuple[Sequence[str], Mapping[Look, Sequence[Standing | None]]]]
) -> Figure:
    """Plot the final metric by adversary, with one panel per partition and variant."""
    figure, axes = grid(len(panels))
    scale = scale_of(metric)
    for panel, (name, (attacks, rows)) in zip(axes, panels.items(), strict=True):
        step = 0.8 / max(1, len(rows))
        for at, (drawn, standings) in enumerate(rows.items()):
            known = [(k + step * (at - (len(rows) - 1) / 2), s) for k, s in enumerate(standings) if s is not None]
            x = [place for place, _ in known]
            panel.plot(x, [scale * s.mean for _, s in known], ls="", zorder=3, **drawn.points)
            ranged = [(place, s) for place, s in known if s.low is not None and s.high is not None]
            if ranged:
                panel.vlines([p for p, _ in ranged], [scale * s.low for _, s in ranged],  # type: ignore[operator]
                             [scale * s.high for _, s in ranged], color=drawn.colour, zorder=1, lw=1)  # type: ignore[operator] # fmt: skip
        for edge in range(1, len(attacks)):
            panel.axvline(edge - 0.5, color="0.85", lw=0.8)
        plain(panel, name)
        turned = sum(len(attack) + 3 for attack in attacks) > {1: 83, 2: 51}.get(len(panels), 36)
        panel.set_xticks(range(len(attacks)), attacks, fontsize="small", rotation=30 if turned else 0,
                         ha="right" if turned else "center")  # fmt: skip
        panel.tick_params(axis="x", length=0)
        panel.set_xlim(-0.5, len(attacks) - 0.5)
    for panel in axes[::COLUMNS]:
        panel.set_ylabel(title(metric))
    _legend(figure, [k for _, rows in panels.values() for k in rows])
    return figure
