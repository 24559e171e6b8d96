"""The gateway to a deployed party's samples: the kernel's, with the owner's limits and the party's vault."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hansa.core.budget import PrivateOp
from hansa.core.errors import PartyError
from hansa.core.gateway import SampleGateway
from hansa.core.op import Op, Payload, unwrap
from hansa.data.describe import Describe, over_columns
from hansa.kernel.gateway import GuardedGateway
from hansa.net.party.evaluations import Evaluations
from hansa.net.party.policy import Policy
from hansa.net.party.vault import PartyVault


@dataclass(frozen=True)
class JobLedger:
    """The readings of one job, recorded in the party's vault within the owner's quotas."""

    vault: PartyVault
    job: str
    evaluations: Evaluations
    matches: int

    def charge(self, ask: str, op: PrivateOp, n: int, payload: Mapping[str, Any]) -> float | None:
        return self.vault.charge(self.job, ask, op, n, payload)

    def evaluate(self, ask: str) -> None:
        self.vault.evaluate(self.job, ask, self.evaluations)

    def match(self, ask: str) -> None:
        self.vault.match(self.job, ask, self.matches)


class OwnerGateway(GuardedGateway):
    """The samples of a deployed party for one ask. `check` compares the ask with the owner's limits."""

    def __init__(self, samples: SampleGateway, policy: Policy, vault: PartyVault, job: str, op: Op,
                 payload: Payload) -> None:  # fmt: skip
        self._policy, self._limits = policy, policy.evaluate.under(policy.privacy.exists)
        super().__init__(samples, JobLedger(vault, job, self._limits, policy.matches), op, payload)
        self.least = self._limits.min_samples or 0

    def check(self, held_out: bool) -> None:
        """Raise a PartyError if the ask exceeds the owner's limits.

        `held_out` says that the job takes its test samples from the party's training samples.
        """
        policy, op, payload = self._policy, self._op, self._payload
        if isinstance(unwrap(op)[1], Describe) and over_columns(payload) and not policy.matches:
            raise PartyError(
                "its policy does not let jobs match its rows with those of other parties; see matches in party.toml"
            )
        refused = policy.privacy.refuses(op, self.n, payload, held_out)
        refused = refused or self._limits.refuses(op, self.tests) or policy.limits.refuses(op, self.n, payload)
        if refused is not None:
            raise PartyError(refused)
