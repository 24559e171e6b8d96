"""Display of a run: one line, a table and curves in a notebook, a pandas DataFrame."""

from __future__ import annotations

import base64
import html
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from hansa.plumbing.errors import ConfigError
from hansa.report.diagnosis import problem
from hansa.report.party_metrics import FIRST

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from pandas import DataFrame

PARTIES = "parties"  # key of each party's own metrics in a metrics line
APART = ("rounds", "bytes_up", "bytes_down", "seconds", "simulated_seconds", "run_dir", "stopped", "empty_rounds",
         "problem", "finetuned", "tested", "combined", "baselines")  # fmt: skip
LATEST = (
    "train_loss",
    "epsilon",
    "epsilon_aggregator",
    "delta",
    "common",
    "common_test",
)  # taken from the last round that has them, evaluated or not
COUNTS = ("common", "common_test")  # whole numbers
LABELS = {"auc": "AUC", "common": "common people", "common_test": "common test people"}


class Displayed:
    """Base of classes with an `experiment` (the run's record), a `history` (one entry per round) and a `summary`."""

    experiment: dict[str, Any]

    @property
    def history(self) -> list[dict[str, Any]]:
        raise NotImplementedError

    @property
    def summary(self) -> dict[str, Any]:
        raise NotImplementedError

    @property
    def _algorithm(self) -> str:
        return str(self.experiment.get("algorithm", {}).get("name", "run"))

    def to_frame(self, parties: bool = False) -> DataFrame:
        """The history as a pandas DataFrame, one row per round, indexed by round.

        Columns are the numbers of the history: metrics (NaN in rounds without an evaluation), bytes, seconds. Columns
        `missing`, `rejected` and `excluded` (by the fusion) count parties. With `parties=True`, the frame has instead
        the metrics of each party on its own test samples, one row per round and party.
        """
        pandas = _pandas()
        if not parties:
            return pandas.DataFrame([_flat(line) for line in self.history] or {"round": []}).set_index("round")
        rows = [
            {"round": line["round"], "party": name, **metrics}
            for line in self.history
            for name, metrics in line.get(PARTIES, {}).items()
        ]
        if not rows:
            raise ConfigError("no party has metrics of its own: give the task party_tests (in a file: task.party_test)")
        return pandas.DataFrame(rows).set_index(["round", "party"])

    def plot(self) -> Figure:
        """Learning curves against rounds: loss, and scores on the test samples if measured."""
        from hansa.report import plots

        figure = plots.learning(self.history)
        if figure is None:
            raise ConfigError("there is nothing to plot: no loss and no score was measured in any round")
        return figure

    def __repr__(self) -> str:
        summary = self.summary
        names = ("accuracy", "loss") if summary.get("loss") is not None else ("train_loss",)  # without a test set
        metrics = [f"{name} {summary[name]:.4f}" for name in names if summary.get(name) is not None]
        rounds = f"{summary['rounds']} round" + "s" * (summary["rounds"] != 1)
        return f"<{type(self).__name__} of {', '.join([self._algorithm, rounds, *metrics])}, {_stopped(summary)}>"

    def _repr_html_(self) -> str:
        from hansa.report import plots

        rows = "".join(
            f'<tr><th scope="row" style="text-align: left">{html.escape(name)}</th><td>{html.escape(value)}</td></tr>'
            for name, value in rows_of(self.summary)
        )
        table = f"<table><caption><b>{html.escape(self._algorithm)}</b></caption><tbody>{rows}</tbody></table>"
        curves = plots.learning(self.history)
        image = ""
        if curves is not None:
            data = base64.b64encode(plots.png(curves)).decode()
            image = (
                f'<img alt="Learning curves" style="max-width: 40em; width: 100%" src="data:image/png;base64,{data}">'
            )
        return (
            f'<div style="display: flex; flex-wrap: wrap; gap: 1.5em; align-items: flex-start">{table}'
            f'<div style="flex: 1 1 24em">{image}</div></div>'
        )


def rows_of(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Readable rows of a summary: name and value."""
    empty = f", {summary['empty_rounds']} of them empty" if summary["empty_rounds"] else ""
    rows = [("rounds", f"{summary['rounds']} ({_stopped(summary)}{empty})")]
    rows += [("problem", summary["problem"])] if "problem" in summary else []
    for name in sorted(set(summary) - set(APART), key=lambda n: (n not in FIRST, n.startswith("party_"), n)):
        value = summary[name]
        if value is not None:
            label = LABELS.get(name, name.replace("_", " "))
            rows.append((label, _shown(name, value)))
    rows += tuned_rows(summary.get("finetuned")) + baseline_rows(summary) + combined_rows(summary.get("combined"))
    rows.append(("bytes up / down", f"{human_bytes(summary['bytes_up'])} / {human_bytes(summary['bytes_down'])}"))
    rows.append(("seconds", f"{summary['seconds']:.1f}"))
    if summary.get("simulated_seconds") is not None:
        rows.append(("simulated seconds", f"{summary['simulated_seconds']:.1f}"))
    return rows


def tuned_rows(tuned: Mapping[str, Any] | None) -> list[tuple[str, str]]:
    """The rows of a fine-tuning: how many parties, and their means before and after."""
    if tuned is None:
        return []
    rows = [("fine-tuned", f"{tuned['parties']} parties, {tuned['epochs']} epochs at the rate {tuned['lr']:g}")]
    before, after = tuned.get("before", {}), tuned.get("after", {})
    for metric in FIRST:  # behind a secure sum there is only the mean over samples
        name = next((n for n in (f"party_{metric}_mean", metric) if after.get(n) is not None), None)
        if name is not None and before.get(name) is not None:
            label = f"{name.replace('_', ' ')}, fine-tuned"
            rows.append((label, f"{_number(after[name])} (before {_number(before[name])})"))
    return rows


def baseline_rows(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    """One row for each baseline: its metrics over all parties, the usual ones first."""
    rows = []
    for name, metrics in summary.get("baselines", {}).items():
        known = [m for m, value in metrics.items() if isinstance(value, float) and not m.startswith("party_")]
        known.sort(key=lambda m: (m not in FIRST, m))
        shown = [f"{m.replace('_', ' ')} {_number(metrics[m])}" for m in known]
        rows.append((name, ", ".join(shown) or "not measured"))
    return rows


def combined_rows(combined: Mapping[str, str] | None) -> list[tuple[str, str]]:
    """One row for each way in which chosen metrics combine over the parties."""
    by_way: dict[str, list[str]] = {}
    for metric, way in (combined or {}).items():
        by_way.setdefault(way, []).append(metric.replace("_", " "))
    return [(", ".join(metrics), way) for way, metrics in by_way.items()]


def _shown(name: str, value: Any) -> str:
    """Format a value of the summary; numbers of people have no decimals."""
    if name in COUNTS:
        return f"{value:,.0f}"
    return _number(value) if isinstance(value, float) else str(value)


def _number(value: float) -> str:
    """Format with four decimals, or with four digits if the number is too small (a delta)."""
    return f"{value:.4f}" if value == 0 or abs(value) >= 1e-3 else f"{value:.3g}"


def human_bytes(count: float) -> str:
    """Format bytes with a unit."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def totals(history: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Summary of rounds: metrics of the last evaluation, last training loss, privacy spent, total bytes, time."""
    last: Mapping[str, Any] = next((line for line in reversed(history) if "loss" in line), {})
    numbers = {k: v for k, v in last.items() if isinstance(v, float) and k not in ("seconds", "simulated_seconds")}
    numbers |= {name: line[name] for line in history for name in LATEST if line.get(name) is not None}
    end: Mapping[str, Any] = history[-1] if history else {}
    wrong = problem(history)
    up, down = (sum(line[name] for line in history) for name in ("bytes_up", "bytes_down"))
    return {
        **numbers, "rounds": end.get("round", 0), "accuracy": last.get("accuracy"), "loss": last.get("loss"),
        "bytes_up": up, "bytes_down": down,
        "seconds": round(end.get("seconds", 0.0), 3), "simulated_seconds": end.get("simulated_seconds"),
        "empty_rounds": sum("empty" in line for line in history), **_exclusion(history),
    } | ({} if wrong is None else {"problem": wrong})  # fmt: skip


def _exclusion(history: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Precision and recall of the excluded parties, over the rounds in which they were measured."""
    means: dict[str, float] = {}
    for name in ("exclusion_precision", "exclusion_recall"):
        values = [line[name] for line in history if name in line]
        means |= {name: sum(values) / len(values)} if values else {}
    return means


def _stopped(summary: Mapping[str, Any]) -> str:
    return str(summary.get("stopped") or "not finished")


def _flat(line: Mapping[str, Any]) -> dict[str, Any]:
    """A round's numbers and strings; entries about single parties are counted."""
    out = {name: value for name, value in line.items() if not isinstance(value, (dict, list))}
    out |= {"missing": len(line.get("missing", ())), "rejected": len(line.get("rejected", ()))}
    if "fusion" in line:
        out["excluded"] = len(line["fusion"]["excluded"])
    return out


def _pandas() -> Any:
    try:
        import pandas
    except ImportError:
        raise ConfigError("to_frame() needs pandas: pip install 'hansa[notebook]'") from None
    return pandas
