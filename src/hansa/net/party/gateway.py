"""The gateway to a deployed party's samples: it knows the owner's limits, the quotas and the privacy budget."""

from __future__ import annotations

from hansa.core.errors import PartyError
from hansa.core.gateway import Purpose, SampleGateway
from hansa.core.op import Op, Payload, unwrap
from hansa.data.describe import Describe, over_columns
from hansa.net.party.evaluations import evaluates
from hansa.net.party.policy import Policy
from hansa.net.party.vault import PartyVault


class OwnerGateway(SampleGateway):
    """The samples of a party for one ask. Every reading is checked and recorded before the op sees a sample.

    `check` compares the ask with the owner's limits. `admit` records the quota of evaluations, the quota of readings of
    ids, or the privacy budget in the vault at the first reading. It refuses a purpose that is not the op's: a plug-in
    that reads test samples without being an evaluation would bypass the quota. `spent` is the job's epsilon after the
    reading. Samples can be read after `open`, which names the ask for the vault, and before `close`: an op that keeps
    the gateway reads nothing later.
    """

    def __init__(self, samples: SampleGateway, policy: Policy, vault: PartyVault, job: str, op: Op,
                 payload: Payload) -> None:  # fmt: skip
        super().__init__(samples._train, samples._test, samples.header, samples._before, samples.kinds, samples.table)
        self._policy, self._vault, self._job, self._ask = policy, vault, job, ""
        self._op, self._payload = op, payload
        self._limits = policy.evaluate.under(policy.privacy.exists)
        self.least = self._limits.min_samples or 0
        self._open, self._recorded = False, False
        self.spent: float | None = None

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

    def open(self, ask: str) -> None:
        """Begin the ask of this name, a hash of everything that the reply depends on."""
        self._ask, self._open = ask, True

    def admit(self, purpose: Purpose) -> None:
        inner = unwrap(self._op)[1]
        own: tuple[Purpose, ...] = ("train", "statistics", "match")
        if evaluates(inner):
            own = ("evaluate",)
        elif inner.name == "describe":
            own = ("describe",)
        if not self._open or purpose not in own:
            raise PartyError(f"{inner.name!r} may not read its samples for the purpose {purpose!r}")
        if purpose == "match":
            self._vault.match(self._job, self._ask, self._policy.matches)
        if self._recorded:
            return
        if purpose == "evaluate":
            self._vault.evaluate(self._job, self._ask, self._limits)
        self.spent = self._vault.charge(self._job, self._ask, self._op, self.n, self._payload)
        self._recorded = True

    def close(self) -> None:
        """End the ask: no further reading is admitted."""
        self._open = False
