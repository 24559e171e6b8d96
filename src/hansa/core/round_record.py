"""The record of a round: counts, reasons for missing or rejected replies, metrics, bytes."""

from __future__ import annotations

import re
import statistics
from dataclasses import dataclass, field, replace

from hansa.core.budget import EPSILON
from hansa.core.federation import Gathered, Reduced

LISTED = 100  # parties whose numbers are listed one by one
NUMBER = re.compile(r"-?\b\d[\d.,e+-]*|\b(?:nan|inf)\b")


def without_numbers(reason: str) -> str:
    """Why a party's reply is not used, as others than the party may be told it where there is a least cohort."""
    return NUMBER.sub("...", reason)


class Malformed(str):
    """Why something that a party sent is no reply at all."""


class Means:
    """Weighted means of named numbers; one that a party leaves out does not count for it."""

    def __init__(self) -> None:
        self._sums: dict[str, tuple[float, int, int]] = {}

    def add(self, numbers: dict[str, float], weight: int) -> None:
        for name, value in numbers.items():
            total, heard, count = self._sums.get(name, (0.0, 0, 0))
            self._sums[name] = (total + value * weight, heard + weight, count + 1)

    def result(self, least: int = 1) -> dict[str, float]:
        """The means of those numbers that so many parties have given."""
        return {name: total / heard for name, (total, heard, count) in self._sums.items() if count >= least}


class Medians(Means):
    """Medians of named numbers: where parties may be hostile, none of them decides."""

    def __init__(self) -> None:
        super().__init__()
        self._values: dict[str, list[float]] = {}

    def add(self, numbers: dict[str, float], weight: int) -> None:
        for name, value in numbers.items():
            self._values.setdefault(name, []).append(value)

    def result(self, least: int = 1) -> dict[str, float]:
        return {name: statistics.median(values) for name, values in self._values.items() if len(values) >= least}


@dataclass
class Record:
    """What happened in a round: who was asked, who was missing or rejected and why, bytes as the wire carries them."""

    asked: int = 0
    consulted: int = 0  # asked by the selector, before it chose
    accepted: int = 0
    missing: dict[int, str] = field(default_factory=dict)
    rejected: dict[int, str] = field(default_factory=dict)
    declined: list[set[int]] = field(default_factory=list)  # by ask: the missing ones who said that they will not
    capped: dict[int, str] = field(default_factory=dict)  # whose replies count for less than their weight, and why
    bytes_down: int = 0
    bytes_up: int = 0
    metrics: dict[str, float] = field(default_factory=dict)
    fused: set[int] = field(default_factory=set)  # whose replies the last answer holds
    spent: dict[int, float] = field(default_factory=dict)  # the epsilon that parties have spent, as far as is known
    delta: float | None = None  # and at which delta
    each: dict[int, float] | None = None  # the loss of each party that trained, where somebody wants to know
    arrived: Means = field(default_factory=Means)  # over the tickets that came back
    seconds: dict[int, float] = field(default_factory=dict)  # simulated, of the parties of the last ask, if it trained

    def without(self, party: int, reason: str) -> None:
        """Note why there is no reply: the party is missing, or what it sent was none."""
        (self.rejected if isinstance(reason, Malformed) else self.missing)[party] = reason

    def noted(self, party: int, metrics: dict[str, float]) -> dict[str, float]:
        """A reply's metrics less what it says its party has spent, which is noted: nobody wants the mean of that."""
        if EPSILON not in metrics:
            return metrics
        self.spent[party] = metrics[EPSILON]
        return {name: value for name, value in metrics.items() if name != EPSILON}

    def timed(self, answer: Reduced | Gathered) -> Reduced | Gathered:
        """The answer with the seconds that each gathered reply took."""
        if isinstance(answer, Gathered) and self.seconds:
            return replace(answer, seconds=tuple(self.seconds[party] for party in answer.parties))
        return answer
