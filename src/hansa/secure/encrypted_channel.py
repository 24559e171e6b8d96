"""The base of secure sums by public-key encryption, and of those with one key holder."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, TypeVar

import numpy as np
from msgspec import Meta

from hansa.core.algorithm import Problem
from hansa.core.ask import Ask, Gathered
from hansa.core.federation import Federation
from hansa.core.fields import Advice
from hansa.core.op import Op, Payload, Reply
from hansa.plumbing.errors import ConfigError, DataError, HansaError, PartyError, RoundAborted
from hansa.secure.channel import Channel

log = logging.getLogger("hansa")
S = TypeVar("S")
T = TypeVar("T")
SLOW = 60.0  # seconds of a party's time per round above which there is a warning


async def ask_one(fed: Federation, op: Op, payload: Payload, party: int, role: str) -> Reply:
    """The reply of a party that the sum requires; without a reply the round is aborted."""
    try:
        answer = await fed.gather(op, payload, parties=[party])
    except RoundAborted as stop:
        raise RoundAborted(f"party {party}, which {role}, is missing: {stop}") from stop
    return answer.replies[0]


def rows_of(answer: Gathered, name: str = "sealed") -> dict[int, np.ndarray[Any, Any]]:
    """The tensor `name` of every reply as an array, by party."""
    return {party: reply.tensors[name].numpy() for party, reply in zip(answer.parties, answer.replies, strict=True)}


def sort_out(sent: Mapping[int, S], read: Callable[[S], T]) -> tuple[dict[int, T], dict[int, str]]:
    """Apply `read` to what each party sent: the results, and the reasons for which `read` refused the others."""
    good, wrong = {}, {}
    for party, data in sent.items():
        try:
            good[party] = read(data)
        except HansaError as error:
            wrong[party] = str(error)
    return good, wrong


def leave_out(fed: Federation, wrong: Mapping[int, str]) -> None:
    """Reject the replies of these parties; the log and the metrics line give the reasons."""
    for party, reason in wrong.items():
        log.warning("party %d is left out of the secure sum: %s", party, reason)
        fed.reject(party, reason)


@contextmanager
def opening(problem: str = "the secure sum could not be opened") -> Iterator[None]:
    """At the aggregator: turn a DataError into an aborted round."""
    try:
        yield
    except DataError as error:
        raise RoundAborted(f"{problem}: {error}") from error


@contextmanager
def declining() -> Iterator[None]:
    """At a party: turn a DataError about what it was sent into a PartyError, with which it declines."""
    try:
        yield
    except DataError as error:
        raise PartyError(str(error)) from None


@dataclass(frozen=True)
class EncryptedChannel(Channel):
    """Base of sums by public-key encryption: slow, and never over a single party.

    `min_parties` is the fewest parties whose sum is opened. Under differential privacy each party adds the noise that
    suffices if only `min_parties` add theirs. `rate` is roughly how many values of an update a party processes per
    second on one core.
    """

    min_parties: Annotated[int, Meta(ge=2), Advice("a sum of one party hides nothing")] = 2
    rate: ClassVar[float]

    def least(self, parties: int) -> int:
        return self.min_parties

    def check(self, problem: Problem) -> None:
        super().check(problem)
        least = self.least(problem.cohort_size)
        if problem.cohort_size < least:
            raise ConfigError(
                f"the secure sum {self.name!r} needs at least {least} parties, and a round asks {problem.cohort_size}; "
                "a sum of one party hides nothing"
            )

    def warn(self, values: int) -> None:
        seconds = values / self.rate
        if seconds > SLOW:
            log.warning("privacy.secure = %r: a party will take about %d s per round for %d values; the secure sum "
                        "'masking' is far faster", self.name, round(seconds), values)  # fmt: skip

    def summed(self, fed: Federation, ask: Ask, answer: Gathered, wrong: Mapping[int, str]) -> int:
        """The number of parties in a sum; the round is aborted if they are too few to open it.

        The parties in `wrong`, which sent invalid data, are rejected with the reason.
        """
        leave_out(fed, wrong)
        least, count = self.needed(ask), len(answer.parties) - len(wrong)
        if count < least:
            raise RoundAborted(
                f"{count} of {len(ask.parties)} parties sent their numbers, and the secure sum "
                f"{self.name!r} opens no sum of fewer than {least}"
            )
        return count


@dataclass(frozen=True)
class KeyHolderChannel(EncryptedChannel):
    """Base of sums with one key holder: party `holder`, by default the first of the parties asked.

    The aggregator has the ciphertexts and no key. The holder has the key and is sent the ciphertext of the sum only.
    Both together can read every update. The holder decrypts one vector per sum and cannot check that it is a sum, so
    the guarantee is against an honest-but-curious aggregator: one that follows the protocol.
    """

    holder: int | None = None

    def check(self, problem: Problem) -> None:
        super().check(problem)
        if self.holder is not None and not 0 <= self.holder < problem.parties:
            raise ConfigError(f"privacy.holder must be one of the {problem.parties} parties, from 0 on, "
                              f"got {self.holder}")  # fmt: skip

    def holder_of(self, ask: Ask) -> int:
        """The party that holds the key of the ask's sum."""
        return self.holder if self.holder is not None else min(ask.parties)
