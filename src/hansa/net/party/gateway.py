"""The gateway to a deployed party's samples: the kernel's, with the owner's limits and the party's vault."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hansa.core.budget import PrivateOp
from hansa.core.op import Op, Payload
from hansa.core.wrapper import unwrap
from hansa.data.describe import Describe, over_columns
from hansa.holdings.gateway import Purpose, SampleGateway
from hansa.kernel.gateway import GuardedGateway
from hansa.net.party.after_reading import AfterReading
from hansa.net.party.policy import Policy
from hansa.net.party.query_budget import QueryBudget
from hansa.net.party.vault import PartyVault
from hansa.plumbing.errors import NotAdmitted, PartyError


@dataclass
class JobLedger:
    """The readings of one job, recorded in the party's vault within the owner's budget. `data` is the data set.

    A reading that is not admitted is refused by what was asked before, so the reason may be told. `rule` learns of each
    reading.
    """

    vault: PartyVault
    job: str
    data: str
    budget: QueryBudget
    rule: AfterReading | None = None

    def read(self, ask: str, purpose: Purpose, op: PrivateOp, n: int, payload: Mapping[str, Any]) -> float | None:
        if self.rule is not None:
            self.rule.begin()
        try:
            epsilon = self.vault.read(self.job, ask, purpose, self.data, op, n, payload, self.budget)
        except PartyError as error:
            raise NotAdmitted(str(error)) from None
        if self.rule is not None:
            self.rule.sampled()
        return epsilon


class OwnerGateway(GuardedGateway):
    """The samples of a deployed party for one ask. `check` compares the ask with the owner's limits, before `open`."""

    def __init__(self, samples: SampleGateway, policy: Policy, vault: PartyVault, job: str, op: Op, payload: Payload,
                 data: str = "") -> None:  # fmt: skip
        self._policy, self._limits = policy, policy.evaluate.under(policy.privacy.exists)
        self._readings = JobLedger(vault, job, data, policy.queries)
        super().__init__(samples, self._readings, op, payload, policy.ranges)
        self.least, self._checked = self._limits.min_samples or 0, False

    def open(self, ask: str, rule: AfterReading | None = None) -> None:
        """Begin the ask of this name; `rule` is that about refusals once samples were read."""
        self._readings.rule = rule
        if not self._checked:
            raise PartyError("the ask was not compared with the owner's limits")
        super().open(ask)

    def for_itself(self) -> None:
        """Admit a reading that the party makes for itself: of what leaves, at most a counted refusal depends on it."""
        self._checked = True

    def check(self, held_out: bool) -> None:
        """Raise a PartyError if the ask exceeds the owner's limits.

        `held_out` says that the job takes its test samples from the party's training samples.
        """
        policy, op, payload = self._policy, self._op, self._payload
        if isinstance(unwrap(op)[1], Describe) and over_columns(payload) and not policy.matches:
            raise PartyError(
                "its policy does not let jobs match its rows with those of other parties; see matches in party.toml"
            )
        if unwrap(op)[1].fuzzy and not policy.fuzzy:
            raise PartyError(
                "its policy does not let jobs match its rows by how alike ids are, which reveals more than a private "
                "intersection; see fuzzy in party.toml"
            )
        if unwrap(op)[1].scores_people and not policy.scores:
            raise PartyError(
                "its policy does not let jobs tell the operator the scores of single people; see scores in party.toml"
            )
        refused = policy.privacy.refuses(op, self.n, payload, held_out)
        refused = refused or self._limits.refuses(op, self.tests) or policy.limits.refuses(op, self.n, payload)
        if refused is not None:
            raise PartyError(refused)
        self._checked = True
