"""The record of a round: counts, reasons for missing or rejected replies, metrics, bytes."""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from hansa.core.ask import Ask, Gathered, Reduced
from hansa.core.budget import EPSILON
from hansa.core.op import Op
from hansa.numerics.exact_sums import from_steps, steps_of_limbs, steps_to_limbs, to_steps

LISTED = 100  # largest number of parties that a metrics line lists one by one
NUMBER = re.compile(r"-?\b\d[\d.,e+-]*|\b(?:nan|inf)\b")


def without_numbers(reason: str) -> str:
    """A reason without its numbers: with a smallest cohort (min_cohort), only the party itself may see them."""
    return NUMBER.sub("...", reason)


class Malformed(str):
    """The reason why a party's message is not a valid reply."""


class Means:
    """Weighted means of named numbers; each mean is over the parties that sent the number."""

    def __init__(self) -> None:
        self._sums: dict[str, tuple[Any, int, int]] = {}

    def add(self, numbers: dict[str, float], weight: int) -> None:
        for name, value in numbers.items():
            total, weights, count = self._sums.get(name, (0.0, 0, 0))
            self._sums[name] = (total + value * weight, weights + weight, count + 1)

    def join(self, other: Means, names: Iterable[str]) -> None:
        """Add some of the numbers of another ask."""
        for name in names:
            ours, theirs = self._sums.get(name, (0.0, 0, 0)), other._sums[name]
            self._sums[name] = (ours[0] + theirs[0], ours[1] + theirs[1], ours[2] + theirs[2])

    def result(self, least: int = 1) -> dict[str, float]:
        """The means of the numbers that at least `least` parties sent."""
        return {name: total / weights for name, (total, weights, count) in self._sums.items() if count >= least}


class ExactMeans(Means):
    """Weighted means whose sums are exact (`numerics.exact_sums`): any grouping of the parties gives the same bits."""

    def add(self, numbers: dict[str, float], weight: int) -> None:
        for name, value in numbers.items():
            self._join(name, to_steps(value * weight), weight, 1)

    def _join(self, name: str, steps: int, weight: int, count: int) -> None:
        total, weights, parties = self._sums.get(name, (0, 0, 0))
        self._sums[name] = (total + steps, weights + weight, parties + count)

    def add_partial(self, rows: Mapping[str, list[int]]) -> None:
        """Add the sums of other parties, as `partial` has them."""
        for name, (*limbs, weight, count) in rows.items():
            self._join(name, steps_of_limbs(limbs), weight, count)

    def partial(self) -> dict[str, list[int]]:
        """For each name the limbs of the sum, the weight, and the number of parties."""
        return {name: [*steps_to_limbs(total), weight, count] for name, (total, weight, count) in self._sums.items()}

    def result(self, least: int = 1) -> dict[str, float]:
        return {name: from_steps(total) / weights for name, (total, weights, n) in self._sums.items() if n >= least}


class Medians(Means):
    """Medians of named numbers, for fusions against hostile parties: no single party decides."""

    def __init__(self) -> None:
        super().__init__()
        self._values: dict[str, list[float]] = {}

    def add(self, numbers: dict[str, float], weight: int) -> None:
        for name, value in numbers.items():
            self._values.setdefault(name, []).append(value)

    def join(self, other: Means, names: Iterable[str]) -> None:
        assert isinstance(other, Medians)
        for name in names:
            self._values.setdefault(name, []).extend(other._values[name])

    def result(self, least: int = 1) -> dict[str, float]:
        return {name: statistics.median(values) for name, values in self._values.items() if len(values) >= least}


@dataclass
class Record:
    """What happened in a round: parties asked, missing and rejected, with reasons; metrics; bytes of the messages."""

    asked: int = 0
    consulted: int = 0  # asked by the selector
    accepted: int = 0
    missing: dict[int, str] = field(default_factory=dict)
    rejected: dict[int, str] = field(default_factory=dict)
    declined: list[set[int]] = field(default_factory=list)  # for each ask: the missing parties that declined
    capped: dict[int, str] = field(default_factory=dict)  # parties whose weight or sum was reduced, with the reasons
    bytes_down: int = 0
    bytes_up: int = 0
    metrics: dict[str, float] = field(default_factory=dict)
    fused: set[int] = field(default_factory=set)  # parties whose replies are in the last answer
    spent: dict[int, float] = field(default_factory=dict)  # the epsilon that parties report as spent
    delta: float | None = None  # the delta of `spent`
    each: dict[int, float] | None = None  # the training loss of each party, if requested
    arrived: Means = field(default_factory=Means)  # over the answered tickets
    measured: dict[tuple[str, type], Means] = field(default_factory=dict)  # over the asks of an op, by its name
    seconds: dict[int, float] = field(default_factory=dict)  # simulated, per party of the last ask that trained

    def without(self, party: int, reason: str) -> None:
        """Record why a party has no reply: it is missing, or its message was malformed."""
        (self.rejected if isinstance(reason, Malformed) else self.missing)[party] = reason

    def noted(self, party: int, metrics: dict[str, float]) -> dict[str, float]:
        """Record the party's spending, and return the other metrics: a mean of spendings has no meaning."""
        if EPSILON not in metrics:
            return metrics
        self.spent[party] = metrics[EPSILON]
        return {name: value for name, value in metrics.items() if name != EPSILON}

    def measure(self, op: Op, means: Means, metrics: Iterable[str]) -> None:
        """Add the metrics of an ask: means (or medians) over all parties that the round asked for the same op.

        Metrics of another op replace those of the same name. `metrics` names those that enough parties sent.
        """
        kind = type(means)
        joined = self.measured.setdefault((op.name, kind), kind())
        joined.join(means, metrics)
        values = joined.result()
        self.metrics.update({name: values[name] for name in metrics})

    def count_ask(self, ask: Ask) -> None:
        """Count the bytes of an ask's messages to its parties."""
        self.bytes_down += sum(ask.sizes())

    def count_session(self, size: int) -> None:
        """Count the bytes of a session's messages, each of which goes up to the aggregator and down to a party."""
        self.bytes_up += size
        self.bytes_down += size

    def refuse(self, refused: Mapping[tuple[int, int], str], name: Callable[[int], str]) -> None:
        """Record the parties whose messages or keys others refused in a route; the reasons are the others' claims."""
        for (party, by), reason in refused.items():
            self.rejected[party] = f"{name(by)} refused its message: {reason}"

    def timed(self, answer: Reduced | Gathered) -> Reduced | Gathered:
        """The answer with the simulated seconds of each gathered reply."""
        if isinstance(answer, Gathered) and self.seconds:
            return replace(answer, seconds=tuple(self.seconds[party] for party in answer.parties))
        return answer
