"""Each party's own metrics in the last evaluation of a run, and after fine-tuning, as rows of a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

Metrics = Mapping[str, Mapping[str, float]]  # by party and metric
FIRST = ("accuracy", "auc", "loss")  # metrics that are listed first


class PartyTable(NamedTuple):
    """A table with one row per party; `notes` says what it leaves out, in sentences."""

    header: tuple[str, ...]
    rows: list[tuple[str, ...]]
    notes: list[str]


def own_metrics(history: Sequence[Mapping[str, Any]], summary: Mapping[str, Any], most: int) -> PartyTable:
    """The parties' metrics on their own test samples; of more than `most` parties, those with the highest loss."""
    line: Mapping[str, Any] = next((each for each in reversed(history) if _measured(each)), {})
    tuned: Mapping[str, Any] = summary.get("finetuned", {})
    after: Metrics = _each(tuned.get("after", {}))
    before: Metrics = _each(line) or _each(tuned.get("before", {}))
    names = [name for name in dict.fromkeys((*before, *after))]
    shown = names if len(names) <= most else sorted(names, key=lambda name: -_loss(before.get(name, {})))[:most]
    metrics = sorted({m for own in before.values() for m in own}, key=lambda m: (m not in FIRST, m))
    columns = [(m, source, f"{m}{words}") for m in metrics for source, words in
               ((before, ""), *([(after, ", fine-tuned")] if after else []))]  # fmt: skip
    rows = [(name, *(_number(source.get(name, {}).get(m)) for m, source, _ in columns)) for name in shown]
    notes = []
    if "worst_parties" in line or len(shown) < len(names):
        notes.append(f"The {len(shown)} parties with the highest loss.")
    notes += [f"{reason[0].upper()}{reason[1:]}." for reason in (line.get("hidden"), tuned.get("unmeasured")) if reason]
    if tuned.get("untuned"):
        notes.append(f"Not fine-tuned: {_listed(list(tuned['untuned']))}.")
    if tuned.get("untested"):
        notes.append(f"Without test samples: {_listed(tuned['untested'])}.")
    return PartyTable(("party", *(label for *_, label in columns)), rows, notes)


def _measured(line: Mapping[str, Any]) -> bool:
    return any(name in line for name in ("parties", "worst_parties", "hidden"))


def _each(metrics: Mapping[str, Any]) -> Metrics:
    each: Metrics = metrics.get("parties") or metrics.get("worst_parties") or {}
    return each


def _loss(metrics: Mapping[str, float]) -> float:
    return metrics.get("loss", 0.0)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"


def _listed(names: Sequence[str], most: int = 10) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
