"""Secure sums that need a certain party: the one that holds the key, or gives keys out."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

from torch import Tensor

from hansa.core.algorithm import Problem
from hansa.core.errors import ConfigError, DataError, HansaError, PartyError, RoundAborted
from hansa.core.federation import Ask, Federation, Gathered
from hansa.core.op import Op, Payload, Reply
from hansa.secure.channel import Channel

log = logging.getLogger("hansa")
T = TypeVar("T")
LONG = 60.0  # seconds of a party's time in a round from which on they are worth a warning


async def one(fed: Federation, op: Op, payload: Payload, party: int, role: str) -> Reply:
    """The reply of a party that a sum cannot do without; its round is aborted where there is none."""
    try:
        answer = await fed.gather(op, payload, parties=[party])
    except RoundAborted as stop:
        raise RoundAborted(f"party {party}, which {role}, is missing: {stop}") from stop
    return answer.replies[0]


def readable(answer: Gathered, read: Callable[[Tensor], T]) -> dict[int, T]:
    """What the parties sealed, by party; those who sent something else are left out of the sum."""
    out = {}
    for party, reply in zip(answer.parties, answer.replies, strict=True):
        try:
            out[party] = read(reply.tensors["sealed"])
        except HansaError as error:
            log.warning("party %d is left out of the secure sum: %s", party, error)
    return out


@contextmanager
def opening() -> Iterator[None]:
    """Abort the round where what is done inside finds that the sum cannot be opened."""
    try:
        yield
    except DataError as error:
        raise RoundAborted(f"the secure sum could not be opened: {error}") from error


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

    def enough(self, ask: Ask, sealed: Mapping[int, Any]) -> None:
        """Abort the round where too few parties have given their numbers for a sum of them to be opened."""
        least = self.least(len(ask.parties))
        if len(sealed) < least:
            raise RoundAborted(
                f"{len(sealed)} of {len(ask.parties)} parties gave their numbers, and the secure sum "
                f"{self.name!r} opens none of fewer than {least}"
            )


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
