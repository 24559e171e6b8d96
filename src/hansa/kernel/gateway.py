"""The gateway to a party's samples that refuses: purposes, quotas and the privacy budget, before each reading."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Any, Protocol

from hansa.core.budget import PrivateOp
from hansa.core.op import Op, Payload
from hansa.core.wrapper import unwrap
from hansa.holdings.gateway import Purpose, SampleGateway
from hansa.kernel.ranges import Ranges
from hansa.plumbing.errors import PartyError

Purposes = tuple[Purpose, ...]
TRAINING: Purposes = ("train", "statistics", "match")


class ReadingLedger(Protocol):
    """The record of what was read for one job."""

    def read(self, ask: str, purpose: Purpose, op: PrivateOp, n: int, payload: Mapping[str, Any]) -> float | None:
        """Record a reading and its privacy spending; a PartyError once a quota or a budget is spent.

        The result is the job's epsilon, or None without differential privacy. The entries are on disk when the method
        returns. The same ask and purpose count once.
        """


def purposes_of(op: Op) -> Purposes:
    """The purposes for which an op may read samples: those of its kind, whatever the op itself says."""
    inner = unwrap(op)[1]
    if inner.evaluates:
        return ("evaluate",)
    return ("describe",) if inner.name == "describe" else TRAINING


class GuardedGateway(SampleGateway):
    """The samples of a party for one ask. Every reading is checked and recorded before the op sees a sample.

    `admit` records each purpose in the ledger at its first reading, with the privacy budget. It refuses a purpose that
    is not the op's: a plug-in that reads test samples without being an evaluation would bypass the quota. `spent` is
    the job's epsilon after the reading. Samples can be read after `open`, which compares the ask with the owner's
    ranges and names it for the ledger, and before `close`: an op that keeps the gateway reads nothing later.
    """

    def __init__(self, samples: SampleGateway, ledger: ReadingLedger, op: Op, payload: Payload,
                 ranges: Ranges | None = None) -> None:  # fmt: skip
        super().__init__(samples._train, samples._test, samples.header, samples._before, samples.kinds, samples.table)
        self.stated = samples.stated
        self._ledger, self._op, self._payload, self._ask = ledger, op, payload, ""
        self._ranges, self._open = ranges or Ranges(), False
        self._recorded: set[Purpose] = set()
        self.spent: float | None = None

    def open(self, ask: str) -> None:
        """Begin the ask of this name, a hash of everything that the reply depends on.

        A PartyError if a number of the request is out of the owner's range.
        """
        refused = self._ranges.refuses(self._op, self.n, self._payload)
        if refused is not None:
            raise PartyError(refused)
        self._ask, self._open = ask, True

    def begin_again(self) -> None:
        self._ask = f"{self._ask.partition(' ')[0]} {secrets.token_hex(8)}"
        self._recorded.clear()

    def admit(self, purpose: Purpose) -> None:
        if not self._open or purpose not in purposes_of(self._op):
            name = unwrap(self._op)[1].name
            raise PartyError(f"{name!r} may not read its samples for the purpose {purpose!r}")
        if purpose not in self._recorded:
            self.spent = self._ledger.read(self._ask, purpose, self._op, self.n, self._payload)
            self._recorded.add(purpose)

    def close(self) -> None:
        """End the ask: no further reading is admitted."""
        self._open = False
