"""The base of secure sums. A channel replaces `reduce`; the aggregator learns the sum and no single reply."""

from __future__ import annotations

import logging
import math
import weakref
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar

from msgspec import Meta

from hansa.core.algorithm import Problem
from hansa.core.ask import Ask, Reduced
from hansa.core.declared_ops import DeclaredOps
from hansa.core.federation import Federation
from hansa.core.fields import Owner
from hansa.core.op import Memory, Op, Party, Payload, Reply, Shape
from hansa.core.quantities import Noise, Parties, SumRange, Weight
from hansa.core.registry import Part
from hansa.core.sample_bounds import Bounds, largest_entry
from hansa.core.wrapper import Around, Wrapper
from hansa.numerics.norms import max_abs
from hansa.numerics.objective import Objective
from hansa.plumbing.errors import ConfigError, before_reading
from hansa.secure.encoding import WIDEST, Encoding, FixedPoint, Numbers, SumLayout, WideFixedPoint, sum_width

log = logging.getLogger("hansa")
# The warnings about values that were cut off, by the objective of the run: each is logged once.
_told: weakref.WeakKeyDictionary[Objective, set[str]] = weakref.WeakKeyDictionary()
LYING = "an aggregator that lies"
CURIOUS = "a curious aggregator that follows the protocol, not one that lies"
SumBits = Annotated[int, Meta(ge=2, le=53, description="of a value, sign included"), Owner(1, 64)]


@dataclass(frozen=True)
class Encoded(Wrapper):
    """Base of the ops that hide a reply: they encode the inner op's reply as integers.

    Subclasses decide what is sent instead of the integers. The weight and the metrics of the inner reply leave the
    party in this encoding only.
    """

    inner: Op
    range: SumRange = 16.0
    bits: SumBits = 32
    max_weight: Weight = 2**20
    statistics: SumRange = 2.0**30  # the largest absolute value of the numbers that are sent beside an update
    parties: Parties = 1  # the most parties that may be summed
    uniform: bool = False
    stochastic: bool = False
    noise: Noise = 0.0  # the standard deviation of this party's share of the noise
    label: str = ""  # of the sum within its round: different labels draw different random numbers
    measures: ClassVar[frozenset[str] | None] = frozenset()
    update: ClassVar[str | None] = None
    per_sample: ClassVar[Bounds] = {}  # nobody sees the sums

    def __post_init__(self) -> None:
        if self.noise and not self.uniform:
            raise ConfigError("the noise of a secure sum is for equal weights; set uniform, or leave out noise")
        if (width := sum_width(self.bits, self.parties, self.max_weight)) > WIDEST:
            raise ConfigError(f"the secure sum needs {width} bits, and {WIDEST} are the most")

    def around(self, party: Party, payload: Payload, memory: Memory) -> Around:
        with before_reading():
            checked = self.checked(party, payload, memory)
        reply, memory = yield self.before(party, payload, memory)
        return self.hidden(party, payload, reply, memory, checked)

    def checked(self, party: Party, payload: Payload, memory: Memory) -> Any:
        """What the second half needs of the request; a PartyError if the request is invalid.

        Called before the inner op reads a sample: a refusal later than that could depend on samples.
        """
        raise TypeError(f"{self.name!r} does not define checked()")

    def hidden(
        self, party: Party, payload: Payload, reply: Reply, memory: Memory, checked: Any
    ) -> tuple[Reply, Memory]:
        """The hidden reply, and the memory."""
        raise TypeError(f"{self.name!r} does not define hidden()")

    def encoding(self, payload: Payload) -> Encoding:
        """How replies of the inner op become integers."""
        layout = SumLayout(self.inner, payload, WideFixedPoint(self.statistics, self.bits))
        return Encoding(layout, FixedPoint(self.range, self.bits), self.parties, self.max_weight)

    def numbers(self, party: Party, payload: Payload, reply: Reply) -> Numbers:
        """The inner op's reply as integers. A few values that do not fit are cut off, with one warning per run.

        A sum over more samples than the numbers have room for is rescaled to fit first.
        """
        one = largest_entry(self.inner.per_sample, reply.tensors, 1)
        if one:
            whole = not any(tensor.is_floating_point() for tensor in reply.tensors.values())
            room = 2.0 ** (self.bits - 1) - 1 if whole else self.range
            limit = max(1, int(room / one))
            if reply.weight > limit and max_abs(reply.tensors.values()) > room:
                tensors = self.inner.rescaled(reply.tensors, reply.weight, limit)
                reply = replace(reply, tensors=tensors)
        reply = replace(reply, tensors=self.inner.covered(party, reply.tensors))
        code = self.encoding(payload)
        drawn = self.stochastic or self.noise or code.layout.sums
        secret = party.private("encode", self.label) if drawn else b""

        def tell(sentence: str) -> None:
            told = _told.setdefault(party.objective, set())
            if sentence not in told:
                told.add(sentence)
                log.warning("secure sum: %s", sentence)

        return code.encode(reply, self.uniform, secret, self.stochastic, self.noise, tell)

    def expects_maxima(self, payload: Payload) -> dict[str, Shape]:
        return {}


@dataclass(frozen=True)
class Channel(Part):
    """Base of secure sums. Subclasses are frozen dataclasses; `[privacy]` has their fields beside `secure` and `dp`.

    The values of an update are at most `range` in absolute value. They are sent in `bits` bits, sign included, rounded
    to the nearest step, or with `stochastic` to one of the two nearest steps without bias. Numbers beside an update
    (FedNova's tau, control variates, metrics) are at most `statistics` in absolute value; their precision does not
    depend on `bits`. `max_weight` is the largest weight (number of samples) of a party. Metrics of an evaluation are
    weighted by the number of test samples. Sums that are not updates (counts, moments) give all parties the same
    weight. Numbers of such sums are at most what `max_weight` samples add up to; a party with more samples rescales its
    sums to fit. Where a sample has no bound, they keep the digits of a float64, up to 2^141. Of other values a few may
    be larger, and are cut off; a party with many declines. Both are logged with the setting to raise. Replies that
    declare their largest value (FedMD's scores) have that range in place of `range`.

    `against` is the worst aggregator that the sum withstands with its default settings, LYING or CURIOUS.
    """

    kind: ClassVar[str] = "secure"
    against: ClassVar[str] = CURIOUS

    range: SumRange = 16.0
    bits: SumBits = 32
    max_weight: Weight = 2**20
    stochastic: bool = False
    statistics: SumRange = 2.0**30
    widest: ClassVar[int] = WIDEST  # the most bits of a sum
    most: ClassVar[int | None] = None  # the most parties of a round
    hides: ClassVar[str | None] = None  # the op that hides a reply

    @property
    def ops(self) -> DeclaredOps:
        """The ops of a sum, for the owners of parties to approve; None if they are not declared."""
        return None

    def check(self, problem: Problem) -> None:
        """Refuse, with the reason, a problem that this secure sum cannot handle. Called before the run starts."""
        self._room(self.bits, problem.cohort_size, self.max_weight)

    def warn(self, values: int) -> None:
        """Log a warning if a sum of so many values takes long."""

    @property
    def withstands(self) -> str:
        """The worst aggregator that this sum withstands with its settings, LYING or CURIOUS."""
        return self.against

    def least(self, parties: int) -> int:
        """The fewest of `parties` parties whose sum can be opened."""
        return 1

    def needed(self, ask: Ask) -> int:
        """The fewest parties of an ask whose sum may be opened."""
        asked = ask.enough or len(ask.parties)
        return asked if ask.need == "all" else self.least(asked)

    def hint_for(self, least: int, parties: int) -> str:
        """Which setting ensures that no sum of fewer than `least` of `parties` parties can be opened."""
        return f"set privacy.min_parties = {least}"

    def _room(self, bits: int, parties: int, max_weight: int) -> None:
        width = sum_width(bits, parties, max_weight)
        if width > self.widest:
            raise ConfigError(
                f"the secure sum could overflow: {parties} parties with weights up to {max_weight} and {bits} bits per "
                f"value take {width} bits, and {self.widest} are the most; lower privacy.bits or privacy.max_weight"
            )

    def settings(self, ask: Ask, noise: float = 0.0) -> dict[str, object]:
        """The fields of the `Encoded` op for an ask."""
        assert ask.op is not None
        parties = max(1, len(ask.parties))
        if not ask.op.expects(ask.payload):  # metrics only: weighted as updates are
            bits = min(53, self.widest - (parties * self.max_weight - 1).bit_length())
            regime = {"range": self.range, "bits": bits, "max_weight": self.max_weight, "stochastic": False}
        elif ask.op.update is None:
            bits = min(53, self.widest - math.ceil(math.log2(parties)))
            largest, types = self.statistics, {dtype for _, dtype in ask.op.expects(ask.payload).values()}
            room = largest_entry(ask.op.per_sample, ask.op.expects(ask.payload), self.max_weight)
            if room and any(dtype.is_floating_point for dtype in types):
                largest = min(largest, room)
            elif room:  # of whole numbers, the bits are the range
                bits = min(bits, math.ceil(room).bit_length() + 1)
            regime = {"range": largest, "bits": bits, "max_weight": 1, "stochastic": False}
        else:
            weight = 1 if ask.uniform else self.max_weight
            largest = self.range if ask.op.largest is None else ask.op.largest
            regime = {"range": largest, "bits": self.bits, "max_weight": weight, "stochastic": self.stochastic}
            self._room(self.bits, parties, weight)
        return {"inner": ask.op, **regime, "statistics": self.statistics, "parties": parties, "uniform": ask.uniform,
                "noise": noise, "label": f"{ask.phase}.{ask.index}"}  # fmt: skip

    async def reduce(self, fed: Federation, ask: Ask, noise: float = 0.0) -> Reduced:
        """Compute the ask's sum. Each party adds Gaussian noise of deviation `noise` to each value before hiding it."""
        raise TypeError(f"the secure sum {self.name!r} does not implement reduce")
