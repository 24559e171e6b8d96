"""One ask of a round as a state machine without I/O: events go in, commands come out.

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

UNAPPROVED = "its owner has not approved the job yet"


@dataclass(frozen=True)
class Decision:
    """The members of an ask, in the order of their numbers, and why other parties are not in."""

    members: tuple[int, ...]
    missing: Mapping[int, str]

    def text(self) -> str:
        return json.dumps({"in": self.members, "missing": {str(k): why for k, why in self.missing.items()}})

    @classmethod
    def of(cls, text: str) -> Decision:
        tree = json.loads(text)
        return cls(tuple(tree["in"]), {int(party): why for party, why in tree["missing"].items()})


# Events


@dataclass(frozen=True)
class Started:
    """The ask is in the ledger. `answers` were stored before, perhaps by an earlier process; `here` are the parties
    that are present; `now` is a monotonic time. The owners of the parties in `unapproved` have not approved the job."""

    now: float
    here: frozenset[int]
    answers: Mapping[int, str | None] = field(default_factory=dict)
    unapproved: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Answered:
    """A party's answer is on disk: a reply, or `why` the party refuses."""

    party: int
    why: str | None


@dataclass(frozen=True)
class Looked:
    """Time has passed; these of the awaited parties are present. The owners of those in `unapproved` have not approved
    the job."""

    now: float
    here: frozenset[int]
    unapproved: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Closed:
    """The ledger has decided the members. It may count an answer that the machine has not seen."""

    decision: Decision


Event = Started | Answered | Looked | Closed

# Commands, to be carried out in this order


@dataclass(frozen=True)
class Offer:
    """Offer the ask to these parties."""

    parties: tuple[int, ...]


@dataclass(frozen=True)
class Withdraw:
    """Stop offering the ask."""


@dataclass(frozen=True)
class Close:
    """Let the ledger decide the members: the parties that have replied. `missing` says why others are not in."""

    missing: Mapping[int, str]


Command = Offer | Withdraw | Close


class Asking:
    """The machine of one ask. The ask ends when all parties have answered, when `enough` have replied, when no party is
    left to wait for, or after `deadline` seconds. An answer after the end changes nothing. Until `patient` parties have
    replied, the ask waits for parties whose owners have not approved the job."""

    def __init__(self, parties: Sequence[int], enough: int | None = None, deadline: float | None = None,
                 absent_after: float = math.inf, patient: int = 0) -> None:  # fmt: skip
        self.patient = patient
        self.parties, self.enough, self.deadline, self.absent_after = tuple(parties), enough, deadline, absent_after
        self.state: Literal["new", "waiting", "closing", "closed"] = "new"
        self.answers: dict[int, str | None] = {}
        self.missing: dict[int, str] = {}
        self.decision: Decision | None = None
        self.until = math.inf
        self.waiting = dict.fromkeys(self.parties)  # parties that have not answered yet, in order
        self._replies = 0

    def handle(self, event: Event) -> list[Command]:
        """Handle an event; returns the commands to carry out."""
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
        else:  # the ask has ended
            return []
        return self._over()

    def _start(self, event: Started) -> list[Command]:
        self.state = "waiting"
        for party, why in event.answers.items():
            self._answer(party, why)
        self._miss_unapproved(event.unapproved)
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

    def _miss_unapproved(self, unapproved: frozenset[int]) -> None:
        if self._replies >= self.patient:
            self._miss([party for party in self.waiting if party in unapproved], UNAPPROVED)

    def _look(self, event: Looked) -> None:
        if event.now >= self.until:
            self._miss(list(self.waiting), f"it did not answer within the deadline of {self.deadline:g} s")
        else:
            self._miss_unapproved(event.unapproved)
            away = [party for party in self.waiting if party not in event.here]
            self._miss(away, f"it had no contact for {self.absent_after:g} s")

    def _over(self) -> list[Command]:
        enough = self.enough is not None and self._replies >= self.enough
        if self.waiting and not enough:
            return []
        self.state = "closing"
        return [Withdraw(), Close(dict(self.missing))]
