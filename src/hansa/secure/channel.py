"""What every secure sum is: it takes over `reduce`, and the aggregator learns the sum and nothing about any summand."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from hansa.core.algorithm import Problem
from hansa.core.errors import ConfigError
from hansa.core.federation import Ask, Federation, Reduced
from hansa.core.op import Op, Party, Payload, Reply, Shape, Wrapper
from hansa.core.registry import Part
from hansa.secure.encoding import WIDEST, Encoding, FixedPoint, Layout, Numbers, Wide, sum_width


def check_numbers(where: str, ranges: Mapping[str, float], bits: int, max_weight: int) -> None:
    """Refuse numbers that cannot be encoded; `where` stands before the names of the settings."""
    for name, value in ranges.items():
        if not 0 < value < math.inf:
            raise ConfigError(f"{where}{name} must be positive and finite, got {value}")
    if not 2 <= bits <= 53:
        raise ConfigError(f"{where}bits must lie in 2..53, got {bits}")
    if max_weight < 1:
        raise ConfigError(f"{where}max_weight must be at least 1, got {max_weight}")


@dataclass(frozen=True)
class Encoded(Wrapper):
    """Base of the ops that hide a reply: the inner op's reply as whole numbers. What is sent in their place is up to
    the channel; neither the weight nor the metrics of the inner reply leave the party in another way."""

    inner: Op
    range: float = 16.0
    bits: int = 32
    max_weight: int = 2**20
    statistics: float = 2.0**30  # the largest of the numbers that travel beside an update
    parties: int = 1  # how many may be summed
    uniform: bool = False
    stochastic: bool = False
    noise: float = 0.0  # the standard deviation of this party's share of the noise
    label: str = ""  # of the sum within its round: no two draw the same
    measures: ClassVar[frozenset[str] | None] = frozenset()
    update: ClassVar[str | None] = None

    def __post_init__(self) -> None:
        check_numbers("", {"range": self.range, "statistics": self.statistics}, self.bits, self.max_weight)
        if self.parties < 1 or not 0 <= self.noise < math.inf:
            raise ConfigError(f"a secure sum of {self.parties} parties with noise of {self.noise} is not possible")
        if (width := sum_width(self.bits, self.parties, self.max_weight)) > WIDEST:
            raise ConfigError(f"the secure sum would take {width} bits, and there are {WIDEST}")

    def encoding(self, payload: Payload) -> Encoding:
        """How the inner op's replies become numbers."""
        layout = Layout(self.inner, payload, Wide(self.statistics, self.bits))
        return Encoding(layout, FixedPoint(self.range, self.bits), self.parties, self.max_weight)

    def numbers(self, party: Party, payload: Payload, reply: Reply) -> Numbers:
        """The inner op's reply as numbers; a PartyError where the sum has no room for it."""
        secret = party.private("encode", self.label) if self.stochastic or self.noise else b""
        return self.encoding(payload).encode(reply, self.uniform, secret, self.stochastic, self.noise)

    def expects_maxima(self, payload: Payload) -> dict[str, Shape]:
        return {}


@dataclass(frozen=True)
class Channel(Part):
    """Base of secure sums. Subclasses are frozen dataclasses; what `[privacy]` says beside `secure` and `dp` is theirs.

    Values of an update are at most `range` in absolute value and sent in `bits` bits, sign included, to the nearest
    step or, if `stochastic`, to one of the two nearest, right on average. What travels beside an update (FedNova's tau,
    control variates, metrics) is at most `statistics` in absolute value, and its precision does not depend on `bits`.
    `max_weight` is the largest weight (number of samples) that a party may have. Metrics of an evaluation are weighed
    by the number of test samples. Sums that are no updates (counts, moments) weigh parties alike, and their numbers are
    at most `statistics`. A party whose values are larger declines, with the reason; nothing is clipped.
    """

    kind: ClassVar[str] = "secure"

    range: float = 16.0
    bits: int = 32
    max_weight: int = 2**20
    stochastic: bool = False
    statistics: float = 2.0**30
    widest: ClassVar[int] = WIDEST  # bits that a sum may take

    def __post_init__(self) -> None:
        ranges = {"range": self.range, "statistics": self.statistics}
        check_numbers("privacy.", ranges, self.bits, self.max_weight)

    def check(self, problem: Problem) -> None:
        """Refuse, with the reason, what cannot work. Called before anything runs."""
        if problem.spec.counts:
            raise ConfigError(
                "the model counts batches (BatchNorm), of which the largest count is wanted, and a secure sum can only "
                "add; use a model without BatchNorm (GroupNorm needs no counters), or no secure sum"
            )
        self._room(self.bits, problem.cohort_size, self.max_weight)

    def least(self, parties: int) -> int:
        """The fewest of so many parties whose sum is ever given out."""
        return 1

    def raises(self, least: int, parties: int) -> str:
        """The setting by which no sum of fewer than `least` of so many parties is given out."""
        return f"set privacy.min_parties = {least}"

    def _room(self, bits: int, parties: int, max_weight: int) -> None:
        width = sum_width(bits, parties, max_weight)
        if width > self.widest:
            raise ConfigError(
                f"the secure sum could overflow: {parties} parties with weights up to {max_weight} and {bits} bits a "
                f"value take {width} bits, and there are {self.widest}; lower privacy.bits or privacy.max_weight"
            )

    def settings(self, ask: Ask, noise: float = 0.0) -> dict[str, object]:
        """The fields of an `Encoded` op for an ask."""
        assert ask.op is not None
        parties = max(1, len(ask.parties))
        if not ask.op.expects(ask.payload):  # metrics alone, which are weighed as updates are, and whole in any bits
            bits = min(53, self.widest - (parties * self.max_weight - 1).bit_length())
            regime = {"range": self.range, "bits": bits, "max_weight": self.max_weight, "stochastic": False}
        elif ask.op.update is None:
            bits = min(53, self.widest - math.ceil(math.log2(parties)))
            regime = {"range": self.statistics, "bits": bits, "max_weight": 1, "stochastic": False}
        else:
            weight = 1 if ask.uniform else self.max_weight
            regime = {"range": self.range, "bits": self.bits, "max_weight": weight, "stochastic": self.stochastic}
            self._room(self.bits, parties, weight)
        return {"inner": ask.op, **regime, "statistics": self.statistics, "parties": parties, "uniform": ask.uniform,
                "noise": noise, "label": f"{ask.phase}.{ask.index}"}  # fmt: skip

    async def reduce(self, fed: Federation, ask: Ask, noise: float = 0.0) -> Reduced:
        """The sum that the ask is for. With `noise` each party adds its own, of that standard deviation, to every value
        of its tensors before it hides them."""
        raise TypeError(f"the secure channel {self.name!r} sums nothing")
