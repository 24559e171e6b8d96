"""Tables of a run's chosen metrics: by group, by class, the confusion matrix; and of its baselines."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from hansa.core.plain_data import from_config
from hansa.metrics.classes import ConfusionMatrix, PerClass
from hansa.metrics.metric import Metric
from hansa.metrics.names import plain_metric
from hansa.report.html import Sheet
from hansa.report.party_metrics import FIRST

CLASSES = 30  # maximum number of classes in a table
PARTIES = 100  # maximum number of parties in the table of baselines


def chosen(record: Mapping[str, Any]) -> list[Metric]:
    """The metrics of a run's record."""
    return [from_config("metric", table, where="run.metrics") for table in record.get("run", {}).get("metrics", ())]


def sheets(metrics: Sequence[Metric], history: Sequence[Mapping[str, Any]], summary: Mapping[str, Any],
           name: str) -> Iterator[Sheet]:  # fmt: skip
    """The tables of the last evaluation; `name` is that of the algorithm."""
    line: Mapping[str, Any] = next((each for each in reversed(history) if "loss" in each), {})
    yield from _baselines(line, summary.get("baselines", {}), name)
    groups = [
        (metric.key.replace("_", " "), group, f"{value:.4f}")
        for metric in metrics
        if metric.by is not None
        for group, value in [*line.get(metric.key, {}).items(), ("largest gap", line.get(f"{metric.key}_gap"))]
        if value is not None
    ]
    if groups:
        yield Sheet("Metrics by group", ("metric", "group", "value"), groups, words=2, grouped=0)
    for metric in metrics:
        value = line.get(metric.key)
        if value is None:
            continue
        if isinstance(metric, PerClass):
            yield _per_class(value)
        elif isinstance(metric, ConfusionMatrix):
            yield _confusion(value)
    combined: Mapping[str, str] = summary.get("combined", {})
    if combined:
        rows = [(metric.replace("_", " "), way) for metric, way in combined.items()]
        yield Sheet("How metrics combine over the parties", ("metric", "how"), rows, words=2, prose=True)


def _per_class(value: Mapping[str, Sequence[float]]) -> Sheet:
    columns = ("precision", "recall", "f1")
    rows = [(str(k), *(f"{value[name][k]:.4f}" for name in columns), f"{value['samples'][k]:,}")
            for k in range(min(CLASSES, len(value["samples"])))]  # fmt: skip
    return Sheet("Classes", ("class", "precision", "recall", "F1", "samples"), rows, note=_cut(len(value["samples"])))


def _confusion(value: Sequence[Sequence[int]]) -> Sheet:
    rows = [(str(k), *(f"{count:,}" for count in row[:CLASSES])) for k, row in enumerate(value[:CLASSES])]
    note = f"Rows: class; columns: predicted class. {_cut(len(value))}".strip()
    return Sheet("Confusion matrix", ("class", *map(str, range(min(CLASSES, len(value))))), rows, note=note)


def _cut(count: int) -> str:
    return f"The first {CLASSES} of {count} classes." if count > CLASSES else ""


def _baselines(line: Mapping[str, Any], baselines: Mapping[str, Mapping[str, Any]], name: str) -> Iterator[Sheet]:
    """The run beside its baselines: over all parties, and for each party."""
    if not baselines:
        return
    every: dict[str, Mapping[str, Any]] = {name: line, **dict(sorted(baselines.items(), reverse=True))}
    measured = {m for values in every.values() for m, v in values.items() if isinstance(v, float)}
    means = sorted((m for m in measured if m.startswith("party_") and m.endswith(("_mean", "_worst_tenth"))),
                   key=lambda m: (plain_metric(m) not in FIRST, m))  # fmt: skip
    rows = [(m.removeprefix("party_").replace("_", " "), *(_number(values.get(m)) for values in every.values()))
            for m in means]  # fmt: skip
    note = "On the parties' own test samples. Local-only: each party alone. Centralised: all samples in one place."
    yield Sheet("Baselines", ("over parties", *every), rows, note=note)
    own = {label: values.get("parties", {}) for label, values in every.items()}
    metric = next((m for m in FIRST if any(m in values for values in own[name].values())), None)
    parties = list(own[name])[:PARTIES]
    if metric is not None and parties:
        cells = [(party, *(_number(by.get(party, {}).get(metric)) for by in own.values())) for party in parties]
        yield Sheet(f"Baselines by party: {metric}", ("party", *every), cells, under=True)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"
