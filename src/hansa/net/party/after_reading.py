"""What leaves a party once an ask has read its samples: the reply, or one constant refusal that the vault counts.

A refusal after a reading is an answer: it may depend on a sample. So it has one sentence, whatever went wrong, and a
party with a privacy floor gives at most `privacy.declines` of them over all jobs. The reason is in the party's log.
"""

from __future__ import annotations

import logging
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Protocol

from hansa.net.party.floor import Floor
from hansa.net.party.model_watch import LossRefused
from hansa.net.party.vault import PartyVault
from hansa.net.transport.wire import Work
from hansa.plumbing import disk
from hansa.plumbing.errors import HansaError, NotAdmitted, PartyError
from hansa.plumbing.stopping import Halted

REFUSAL = "the party does not answer this ask; the reason is in its own log"
log = logging.getLogger("hansa.net")


class AgentLink(Protocol):
    """What a worker process asks of its agent."""

    def sign(self, data: bytes) -> tuple[bytes, bytes]:
        """The party's certificate (PEM) and its signature of a message to other parties."""

    def reads(self, job: str, ask: str) -> None:
        """Learn that an ask begins to read: if the worker ends in it, that counts as a decline."""


class Declined(PartyError):
    """The constant refusal. It is in the vault when it is raised."""

    def __init__(self) -> None:
        super().__init__(REFUSAL)


class AfterReading(AbstractContextManager["AfterReading"]):
    """The only way out of an ask that has read something, for the block that it is entered for.

    Every exception in the block becomes a `Declined`, except a full disk and work that the aggregator itself stopped:
    both leave no answer. Before anything is read, exceptions pass unchanged. `ask` names the decline in the vault; an
    ask that was declined before is declined again, without being read again. A `NotAdmitted` passes until samples are
    read, even if the party's memory was.
    """

    def __init__(self, vault: PartyVault, floor: Floor, agent: AgentLink | None, work: Work, ask: str) -> None:
        self._vault, self._floor, self._agent, self._work, self._ask = vault, floor, agent, work, ask
        self._begun = self._sampled = False

    def begin(self) -> None:
        """Learn that the ask is going to read: samples, or memory that was made from samples.

        A party with a floor raises a NotAdmitted once its declines are used up, and a Declined for a declined ask.
        """
        if self._begun:
            return
        if self._floor.exists:
            if self._vault.has_declined(self._work.job, self._ask):
                raise Declined
            self._vault.may_decline(self._floor.declines)
        if self._agent is not None:
            self._agent.reads(self._work.job, self._ask)
        self._begun = True

    def sampled(self) -> None:
        """Learn that samples are read from now on."""
        self._sampled = True

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:  # fmt: skip
        refused = isinstance(error, LossRefused)  # also where the ask was refused before, and is not read again
        if error is None or isinstance(error, Declined) or not (self._begun or refused) or _is_no_answer(error):
            return
        if isinstance(error, NotAdmitted) and not self._sampled:
            return
        about = {"job": self._work.job, "round": self._work.round, "detail": {"ask": self._work.ask}}
        log.error("the ask is declined: %s", error or type(error).__name__, extra=about,
                  exc_info=None if isinstance(error, (HansaError, Halted)) else error)  # fmt: skip
        if refused:
            self._vault.refused(self._work.job, self._ask)
        else:
            self._vault.declined(self._work.job, self._ask)
        raise Declined from None


def _is_no_answer(error: BaseException) -> bool:
    """Whether an exception ends an ask without an answer: a full disk, or work that nobody waits for any more."""
    if isinstance(error, Halted):
        return error.reason is None
    full = isinstance(error, OSError) and error.errno in disk.FULL
    return full or not isinstance(error, Exception)
