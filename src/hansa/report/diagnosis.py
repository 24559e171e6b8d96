"""Explains in one sentence why rounds changed nothing or a run diverged, and what to do."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from hansa.core.round_record import without_numbers
from hansa.plumbing.errors import DataError

NAMED, REASONS, LETTERS = 5, 5, 400  # limits of a sentence: parties per reason, reasons, characters per reason
LOWER = "lower algorithm.local.lr"
# By a part of the reason for rejecting all replies of a round: what is wrong, and what to do.
KNOWN = {
    "values that are not finite": ("updates are not finite", LOWER),
    "the norm of its update": ("updates are longer than run.max_norm allows", f"{LOWER}, or raise run.max_norm"),
    "its metrics are not finite": ("the training loss is not finite", LOWER),
}
LOSSES = ("loss", "party_loss_mean", "train_loss")  # the losses of a metrics line; the first measured one counts
RISE = 1000.0  # a loss that grew by this factor has diverged
GUESS = (1.0, 10.0)  # for classes, the first loss counts as one between these: a random guess has log(classes)


def problem(history: Sequence[Mapping[str, Any]]) -> str | None:
    """What went wrong in a run, in one sentence; None if nothing did."""
    unfinished: str | None = history[-1].get("unfinished") if history else None
    return without_effect(history) or diverged(history) or rejected_rounds(history) or unfinished


def diverged(history: Sequence[Mapping[str, Any]]) -> str | None:
    """How the loss of a run diverged, and the likely reason; None if it did not.

    A loss has diverged if it is not finite at the end, or `RISE` times the first one. For classes the first one is
    limited to what a random guess has, because a run may diverge in its first round.
    """
    name = next((name for name in LOSSES if any(name in line for line in history)), None)
    if name is None:
        return None
    what = {"loss": "the loss", "train_loss": "the training loss"}.get(name, "the mean loss of the parties")
    measured = [(line["round"], line[name]) for line in history if name in line]
    (began, first), (ended, last) = measured[0], measured[-1]
    advice = f"the likely reason is a learning rate that is too high: {LOWER}"
    if last is None or not math.isfinite(last):
        return f"diverged: {what} is not finite in round {ended}; {advice}"
    usual = first
    if any("accuracy" in line or "party_accuracy_mean" in line for line in history):
        usual = GUESS[1] if first is None else min(max(first, GUESS[0]), GUESS[1])
    if usual is None or not 0 < usual <= last / RISE:
        return None
    before = f", and {first:.4g} in round {began}" if first is not None and began < ended else ""
    return f"diverged: {what} is {last:.4g} in round {ended}{before}; {advice}"


def rejected_rounds(history: Sequence[Mapping[str, Any]]) -> str | None:
    """The most frequent reason why all replies of a round were rejected; None without such a round.

    For instance "updates are not finite in 4 of 4 rounds: lower algorithm.local.lr".
    """
    reasons = Counter(reason for reason in map(_common_reason, history) if reason is not None)
    if not reasons:
        return None
    reason, count = reasons.most_common(1)[0]
    rounds = f"in {count} of {len(history)} rounds"
    for part, (problem, advice) in KNOWN.items():
        if part in reason:
            return f"{problem} {rounds}: {advice}"
    return f"all replies were rejected {rounds}: {reason}"


def without_effect(history: Sequence[Mapping[str, Any]]) -> str | None:
    """The reason why no round changed the model; None if a round did."""
    if not history or not all("empty" in line for line in history):
        return None
    last = history[-1]
    why = "; ".join(filter(None, (last["empty"], grouped({**last.get("missing", {}), **last.get("rejected", {})}))))
    return f"no round changed the model: {rejected_rounds(history) or why}"


def check_trained(history: Sequence[Mapping[str, Any]]) -> None:
    """Raise a DataError with the reason if no round changed the model: its predictions would be those of its start."""
    reason = without_effect(history)
    if reason is not None:
        raise DataError(f"the model is not trained: {reason}")


def grouped(reasons: Mapping[str, str]) -> str:
    """List each distinct reason, after the names of its parties."""
    parties: dict[str, list[str]] = {}
    for party, reason in reasons.items():
        parties.setdefault(reason, []).append(party)
    out = []
    for reason, names in list(parties.items())[:REASONS]:
        others = f" and {len(names) - NAMED} others" if len(names) > NAMED else ""
        out.append(f"{', '.join(names[:NAMED])}{others}: {reason[:LETTERS]}")
    more = len(parties) - REASONS
    return "; ".join([*out, f"{more} other reasons"] if more > 0 else out)


def _common_reason(line: Mapping[str, Any]) -> str | None:
    """The one reason for which all replies of a round were rejected, without its numbers."""
    reasons = {without_numbers(reason) for reason in line.get("rejected", {}).values()}
    return reasons.pop() if "empty" in line and len(reasons) == 1 and not line["replies"] else None
