"""The gateway to a party's samples that refuses: purposes, quotas and the privacy budget, before each reading."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from hansa.core.budget import PrivateOp
from hansa.core.errors import PartyError
from hansa.core.gateway import Purpose, SampleGateway
from hansa.core.op import Op, Payload, unwrap

Purposes = tuple[Purpose, ...]
TRAINING: Purposes = ("train", "statistics", "match")


class ReadingLedger(Protocol):
    """The record of what was read for one job. Each method raises a PartyError once its quota or budget is spent.

    An entry is on disk when the method returns. The same `ask` counts once.
    """

    def charge(self, ask: str, op: PrivateOp, n: int, payload: Mapping[str, Any]) -> float | None:
        """Record the privacy spending of an ask; return the job's epsilon, or None without differential privacy."""

    def evaluate(self, ask: str) -> None:
        """Record an evaluation."""

    def match(self, ask: str) -> None:
        """Record a reading of ids."""


def purposes_of(op: Op) -> Purposes:
    """The purposes for which an op may read samples: those of its kind, whatever the op itself says."""
    inner = unwrap(op)[1]
    if inner.evaluates:
        return ("evaluate",)
    return ("describe",) if inner.name == "describe" else TRAINING


class GuardedGateway(SampleGateway):
    """The samples of a party for one ask. Every reading is checked and recorded before the op sees a sample.

    `admit` records the quota of evaluations, the quota of readings of ids, or the privacy budget in the ledger at the
    first reading. It refuses a purpose that is not the op's: a plug-in that reads test samples without being an
    evaluation would bypass the quota. `spent` is the job's epsilon after the reading. Samples can be read after `open`,
    which names the ask for the ledger, and before `close`: an op that keeps the gateway reads nothing later.
    """

    def __init__(self, samples: SampleGateway, ledger: ReadingLedger, op: Op, payload: Payload) -> None:
        super().__init__(samples._train, samples._test, samples.header, samples._before, samples.kinds, samples.table)
        self._ledger, self._op, self._payload, self._ask = ledger, op, payload, ""
        self._open, self._recorded = False, False
        self.spent: float | None = None

    def open(self, ask: str) -> None:
        """Begin the ask of this name, a hash of everything that the reply depends on."""
        self._ask, self._open = ask, True

    def admit(self, purpose: Purpose) -> None:
        if not self._open or purpose not in purposes_of(self._op):
            name = unwrap(self._op)[1].name
            raise PartyError(f"{name!r} may not read its samples for the purpose {purpose!r}")
        if purpose == "match":
            self._ledger.match(self._ask)
        if self._recorded:
            return
        if purpose == "evaluate":
            self._ledger.evaluate(self._ask)
        self.spent = self._ledger.charge(self._ask, self._op, self.n, self._payload)
        self._recorded = True

    def close(self) -> None:
        """End the ask: no further reading is admitted."""
        self._open = False
