"""The privacy floor, the table `[privacy]` of `party.toml`: the least protection of what leaves a party."""

from __future__ import annotations

import math
from dataclasses import dataclass

from hansa.core.budget import Budget
from hansa.core.data_op import DataOp
from hansa.core.delivery import Deliver
from hansa.core.op import Op, Payload
from hansa.core.plain_data import check_numbers
from hansa.core.predictor import Evaluate
from hansa.core.quantities import AnyCount, Delta, Epsilon, Sigma
from hansa.core.wrapper import unwrap
from hansa.local.dp_sgd import DPSGD
from hansa.local.finetune import FineTune, FineTunedPredictor
from hansa.local.solver import LEAST_NOISE
from hansa.net.party.evaluations import evaluates
from hansa.net.party.op_parts import parts, signed
from hansa.plumbing.errors import ConfigError

CURIOUS = "a curious aggregator that follows the protocol, not one that lies"  # as secure sums say it
DECLINES = 20  # asks that a party may decline after it has read its samples, over all jobs


@dataclass(frozen=True)
class Floor:
    """The table `[privacy]` of `party.toml`: the protection of replies that depend on training samples.

    `epsilon` is the party's budget over all jobs. With it, or with `dp`, the party accepts only dp-sgd with at least
    `sigma`; without epsilon and sigma, `dp` requires a sigma of 0.3. With `discrete` it accepts no noise in floating
    point, whose last bits may reveal something about a sample. With `secure` it accepts only ops that hide the reply in
    a secure sum. The aggregator chooses the kind of sum and its parties, so `secure` protects against a curious
    aggregator that follows the protocol. Against a lying aggregator a party sets `active`, so that it takes part only
    in masked sums with signatures, and pins the other parties (`peers`).

    With any floor, no job takes test samples out of the training samples: the aggregator would choose which.
    Evaluations on separate test samples are hidden in a secure sum too. They need no noise, since they do not train.
    A party that declines an ask after it has read its samples reveals a bit, whatever the reason: after `declines` of
    these it answers no ask any more that reads samples. Descriptions of the data need no protection of their reply. To
    refuse evaluations or descriptions, leave them out of `ops`.
    """

    epsilon: Epsilon | None = None
    delta: Delta = 1e-5
    dp: bool = False
    sigma: Sigma = 0.0
    discrete: bool = False
    secure: bool = False
    active: bool = False
    declines: AnyCount = DECLINES

    def __post_init__(self) -> None:
        check_numbers(self)
        if self.declines != DECLINES and not self.exists:
            raise ConfigError("declines applies to a privacy floor, which this party has not; set epsilon, dp, secure "
                              "or active too")  # fmt: skip
        if self.discrete and not self.private:
            raise ConfigError("discrete applies to the noise of dp-sgd, which this party does not require; set "
                              "epsilon, sigma or dp = true too")  # fmt: skip

    @property
    def budget(self) -> Budget | None:
        return None if self.epsilon is None else Budget(self.epsilon, self.delta)

    @property
    def private(self) -> bool:
        """Whether the party requires differential privacy."""
        return self.dp or self.sigma > 0 or self.epsilon is not None

    @property
    def least_noise(self) -> float:
        """The least noise multiplier; `dp` alone requires LEAST_NOISE, or almost no noise would be enough."""
        return LEAST_NOISE if self.dp and not self.sigma and self.epsilon is None else self.sigma

    @property
    def exists(self) -> bool:
        """Whether the party requires any protection."""
        return self.private or self.secure or self.active

    def refuses(self, op: Op, n: int, payload: Payload, held_out: bool = False) -> str | None:
        """Why a reply from n samples would not be protected enough, or None.

        `held_out` says that the job takes its test samples from the party's training samples.
        """
        if held_out and self.exists and evaluates(op):
            return (
                "its policy has a privacy floor, so no job may evaluate on its training samples; give the party test "
                "samples of its own (hansa join --test) and set task.party_test = 0"
            )
        inner = unwrap(op)[1]
        if isinstance(inner, Evaluate) and inner.predictor == FineTunedPredictor.name and self.private:
            return (
                "its policy requires differential privacy, and metrics of its fine-tuned model depend on its training "
                "samples without noise"
            )
        if op.name == "describe" or isinstance(op, (DataOp, FineTune, Deliver)):  # the last two have empty replies
            return None
        if (self.secure or self.active) and op.name.startswith("route-"):
            return "its policy requires a secure sum, and this job sends messages to other parties, which read them"
        if self.secure and not op.name.startswith("secure-"):
            return f"its policy requires a secure sum, and {op.name!r} would reveal its reply; set privacy.secure"
        if self.active and not signed(op):
            weak = f", and withstands {CURIOUS}" if op.name.startswith("secure-") else ""
            return (
                f"its policy requires masked sums with signatures, and {op.name!r} is not part of one{weak}; set "
                "privacy.secure = 'masking' and privacy.active = true"
            )
        if op.serves or isinstance(inner, Evaluate) or not self.private:  # another evaluation sends more
            return None
        if op.budget is None:
            return f"its policy requires differential privacy, and {op.name!r} has none; use the local solver 'dp-sgd'"
        least, noise = self.least_noise, op.release(n, payload).noise if n else math.inf
        if noise < least or noise == 0:
            return f"its policy requires a sigma of at least {least:g}, and the job has {noise:g}; set local.sigma"
        for part in parts(op):
            if isinstance(part, DPSGD) and part.mechanism == "float" and self.discrete:
                return "its policy requires discrete noise, and the job has local.mechanism = 'float'; leave it out"
        return None
