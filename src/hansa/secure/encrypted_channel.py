"""Secure sums that need a certain party: the one that holds the key, or gives keys out."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

import numpy as np

from hansa.core.algorithm import Problem
from hansa.core.errors import ConfigError, DataError, HansaError, PartyError, RoundAborted
from hansa.core.federation import Ask, Federation, Gathered
from hansa.core.op import Op, Payload, Reply
from hansa.secure.channel import Channel

log = logging.getLogger("hansa")
S = TypeVar("S")
T = TypeVar("T")
LONG = 60.0  # seconds of a party's time in a round from which on they are worth a warning


async def one(fed: Federation, op: Op, payload: Payload, party: int, role: str) -> Reply:
    """The reply of a party that a sum cannot do without; its round is aborted where there is none."""
    try:
        answer = await fed.gather(op, payload, parties=[party])
    except RoundAborted as stop:
        raise RoundAborted(f"party {party}, which {role}, is missing: {stop}") from stop
    return answer.replies[0]


def rows_of(answer: Gathered, name: str = "sealed") -> dict[int, np.ndarray[Any, Any]]:
    """What the parties sent under a name, by party, as a process that computes apart is given it."""
    return {party: reply.tensors[name].numpy() for party, reply in zip(answer.parties, answer.replies, strict=True)}


def sort_out(sent: Mapping[int, S], read: Callable[[S], T]) -> tuple[dict[int, T], dict[int, str]]:
    """What parties sent, read; and why it cannot be used, of those who sent something else."""
    good, wrong = {}, {}
    for party, data in sent.items():
        try:
            good[party] = read(data)
        except HansaError as error:
            wrong[party] = str(error)
    return good, wrong


def leave_out(fed: Federation, wrong: Mapping[int, str]) -> None:
    """Have the round's record name those whose part in a secure sum is not used, and why."""
    for party, why in wrong.items():
        log.warning("party %d is left out of the secure sum: %s", party, why)
        fed.reject(party, why)


@contextmanager
def opening(trouble: str = "the secure sum could not be opened") -> Iterator[None]:
    """Abort the round where what is done inside finds that the sum cannot be opened."""
    try:
        yield
    except DataError as error:
        raise RoundAborted(f"{trouble}: {error}") from error


@contextmanager
def declining() -> Iterator[None]:
    """At a party: decline where what it was sent turns out to be wrong."""
    try:
        yield
    except DataError as error:
        raise PartyError(str(error)) from None


@dataclass(frozen=True)
class Costly(Channel):
    """Base of sums by public-key cryptography: dear, and never of a single party.

    `min_parties` is the fewest whose sum is opened: of noise for differential privacy each party adds the share of one
    of so many. `rate` is about how many values of an update a party works through in a second on one core.
    """

    min_parties: int = 2
    rate: ClassVar[float]

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.min_parties < 2:
            raise ConfigError(
                f"privacy.min_parties must be at least 2, got {self.min_parties}: a sum of one party hides nothing"
            )

    def least(self, parties: int) -> int:
        return self.min_parties

    def check(self, problem: Problem) -> None:
        super().check(problem)
        least = self.least(problem.cohort_size)
        if problem.cohort_size < least:
            raise ConfigError(
                f"the secure sum {self.name!r} is of at least {least} parties, and a round asks {problem.cohort_size}; "
                "a sum of one party hides nothing"
            )
        seconds = problem.spec.dim / self.rate
        if seconds > LONG:
            log.warning("privacy.secure = %r: a party will take about %d s a round for %d values; the secure sum "
                        "'masking' is far faster", self.name, round(seconds), problem.spec.dim)  # fmt: skip

    def summed(self, fed: Federation, ask: Ask, answer: Gathered, wrong: Mapping[int, str]) -> int:
        """How many parties' numbers are in a sum; the round is aborted where they are too few for it to be opened.
        Those who sent something else, `wrong`, are named in the round's record."""
        leave_out(fed, wrong)
        least, count = self.least(len(ask.parties)), len(answer.parties) - len(wrong)
        if count < least:
            raise RoundAborted(
                f"{count} of {len(ask.parties)} parties gave their numbers, and the secure sum "
                f"{self.name!r} opens none of fewer than {least}"
            )
        return count


@dataclass(frozen=True)
class Held(Costly):
    """Base of sums of which one party holds the key: `holder` by number, by default the first of those that are asked.

    The aggregator has the ciphertexts and no key, the holder the key and no ciphertext but that of the sum. The two
    together see every update. The holder opens one vector for each sum and cannot know whether it is a sum at all, so
    this is for an aggregator that does as agreed and is only curious.
    """

    holder: int | None = None

    def check(self, problem: Problem) -> None:
        super().check(problem)
        if self.holder is not None and not 0 <= self.holder < problem.parties:
            raise ConfigError(f"privacy.holder must be one of the {problem.parties} parties, from 0 on, "
                              f"got {self.holder}")  # fmt: skip

    def holder_of(self, ask: Ask) -> int:
        """The party that holds the key of a sum."""
        return self.holder if self.holder is not None else min(ask.parties)
