"""A round's ask on its way to its answer, as a state machine without I/O: events go in, commands come out.

    new -> waiting -> closing -> closed

The machine knows no clock, thread, disk or network. Its driver reports events (`Started`, `Answered`, `Looked`,
`Closed`) and carries out commands (`Offer`, `Withdraw`, `Close`). The aggregator is one driver, with its ledger and its
queue; the simulation in `tests/dst` is another, with a virtual clock and processes that die. The same events give the
same commands.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True)
class Decision:
    """Who is in an ask, in the order of numbers, and why others are not."""

    members: tuple[int, ...]
    missing: Mapping[int, str]

    def text(self) -> str:
        return json.dumps({"in": self.members, "missing": {str(k): why for k, why in self.missing.items()}})

    @classmethod
    def of(cls, text: str) -> Decision:
        tree = json.loads(text)
        return cls(tuple(tree["in"]), {int(party): why for party, why in tree["missing"].items()})


# Events: what happened.


@dataclass(frozen=True)
class Started:
    """The ask is in the ledger. `answers` came before, in an earlier life perhaps; `here` are the parties that can be
    asked now, `now` is a clock that only goes forward."""

    now: float
    here: frozenset[int]
    answers: Mapping[int, str | None] = field(default_factory=dict)


@dataclass(frozen=True)
class Answered:
    """A party's answer is on disk: a reply, or why there is none."""

    party: int
    why: str | None


@dataclass(frozen=True)
class Looked:
    """Time has passed; these parties are still there."""

    now: float
    here: frozenset[int]


@dataclass(frozen=True)
class Closed:
    """The ledger has decided who is in; it has the last word, for an answer may have come in between."""

    decision: Decision


Event = Started | Answered | Looked | Closed

# Commands: what is to be done, in this order.


@dataclass(frozen=True)
class Offer:
    """Ask these parties."""

    parties: tuple[int, ...]


@dataclass(frozen=True)
class Withdraw:
    """Nobody need answer any more."""


@dataclass(frozen=True)
class Close:
    """Have the ledger decide who is in: those that answered by then; `missing` says why others are not."""

    missing: Mapping[int, str]


Command = Offer | Withdraw | Close


class Asking:
    """The machine of one ask. It is over when all have answered, or enough of them, or nobody is left to wait for, or
    its time has run out; an answer that comes after it was closed is late, and changes nothing."""

    def __init__(self, parties: Sequence[int], enough: int | None = None, deadline: float | None = None,
                 absent_after: float = math.inf) -> None:  # fmt: skip
        self.parties, self.enough, self.deadline, self.absent_after = tuple(parties), enough, deadline, absent_after
        self.state: Literal["new", "waiting", "closing", "closed"] = "new"
        self.answers: dict[int, str | None] = {}
        self.missing: dict[int, str] = {}
        self.decision: Decision | None = None
        self.until = math.inf
        self.waiting = dict.fromkeys(self.parties)  # who is still waited for, in order
        self._replies = 0

    def handle(self, event: Event) -> list[Command]:
        """Take in what happened; gives what is to be done."""
        if isinstance(event, Started):
            assert self.state == "new"
            return self._start(event)
        if isinstance(event, Closed):
            assert self.state == "closing"
            self.state, self.decision = "closed", event.decision
            return []
        if self.state == "waiting" and isinstance(event, Answered):
            self._answer(event.party, event.why)
        elif self.state == "waiting" and isinstance(event, Looked):
            self._look(event)
        else:  # it was decided before
            return []
        return self._over()

    def _start(self, event: Started) -> list[Command]:
        self.state = "waiting"
        for party, why in event.answers.items():
            self._answer(party, why)
        self._miss([party for party in self.waiting if party not in event.here], "it is not connected")
        if self.deadline is not None:
            self.until = event.now + self.deadline
        over = self._over()
        return over or [Offer(tuple(self.waiting))]

    def _answer(self, party: int, why: str | None) -> None:
        if party not in self.answers:
            self.answers[party] = why
            self._replies += why is None
            self.missing.pop(party, None)
            self.waiting.pop(party, None)

    def _miss(self, parties: Sequence[int], why: str) -> None:
        for party in parties:
            self.missing[party] = why
            self.waiting.pop(party)

    def _look(self, event: Looked) -> None:
        if event.now >= self.until:
            self._miss(list(self.waiting), f"it did not answer within the deadline of {self.deadline:g} s")
        else:
            away = [party for party in self.waiting if party not in event.here]
            self._miss(away, f"it was not heard of for {self.absent_after:g} s")

    def _over(self) -> list[Command]:
        enough = self.enough is not None and self._replies >= self.enough
        if self.waiting and not enough:
            return []
        self.state = "closing"
        return [Withdraw(), Close(dict(self.missing))]
