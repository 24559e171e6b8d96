"""What trees need to know about the targets before they grow: class counts, or the mean and the range of numbers."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import numpy as np
import torch
from msgspec import Meta

from hansa.classical.trees.gradients import rounded
from hansa.classical.trees.histograms import targets
from hansa.core.entries import stated
from hansa.core.federation import Federation
from hansa.core.fields import Owner
from hansa.core.op import Memory, Op, Party, Payload, Reply, Shape
from hansa.core.quantities import Centre
from hansa.core.registry import register
from hansa.core.sample_bounds import Bounds, PerSample

Array = np.ndarray[Any, Any]
LOWEST, HIGHEST = -100, 100  # powers of 2 that bound targets
MEAN_BITS = 20


@register("target-range")
@dataclass(frozen=True)
class TargetRange(Op):
    """The power of 2 that bounds a party's targets about `centre`, as a 1 in its place; their number and sum.

    The sum is that of (y - centre) / 2^`power`, in units of 2^-20. In the sum over parties, the last place that is not
    0 is the largest power: a maximum of which the aggregator learns no more than how many parties have which power.
    """

    centre: Centre = 0.0
    power: Annotated[int, Meta(ge=LOWEST, le=HIGHEST), Owner(-1100, 1100)] = HIGHEST
    per_sample: ClassVar[Bounds] = {
        "places": PerSample(over=(-1,), per_party=True), "sum": PerSample(2**MEAN_BITS, signed=True),
        "count": PerSample(),
    }  # fmt: skip
    entries = stated()

    def run(self, party: Party, payload: Payload, memory: Memory) -> tuple[Reply, Memory]:
        y = targets(party, party.rows("statistics")[1], 0) - self.centre
        places = torch.zeros(HIGHEST - LOWEST + 1, dtype=torch.int64)
        places[_power(y) - LOWEST] = 1
        total = torch.tensor(_total(y, self.power))
        return Reply({"places": places, "sum": total, "count": torch.tensor(len(y))}, weight=len(y)), memory

    def expects(self, payload: Payload) -> dict[str, Shape]:
        return {"places": ((HIGHEST - LOWEST + 1,), torch.int64), "sum": ((), torch.int64), "count": ((), torch.int64)}

    def impossible(self, reply: Reply, payload: Payload) -> str | None:
        count = int(reply.tensors["count"])
        if int(reply.tensors["places"].sum()) != 1 or count < 1:
            return "it must have one power of 2 and at least one sample"
        return "its sum is beyond its samples" if abs(int(reply.tensors["sum"])) > count << MEAN_BITS else None


def _power(y: Array) -> int:
    """The power of 2 above all targets."""
    most = float(np.abs(y).max())
    return min(max(math.frexp(most)[1], LOWEST), HIGHEST) if most else LOWEST


def _total(y: Array, power: int) -> int:
    """The sum of targets, in units of 2^(power - MEAN_BITS)."""
    return int(rounded(y, 2.0**power, MEAN_BITS).sum())


def mean_and_bound_of(y: Array) -> tuple[float, float]:
    """What `mean_and_bound` finds, where one party has all targets."""
    centre, power = 0.0, HIGHEST
    for _ in range(2):
        power = _power(y - centre)
        centre += _total(y - centre, power) / len(y) * 2.0 ** (power - MEAN_BITS)
    return centre, 2.0 ** (power + 1)


async def mean_and_bound(fed: Federation) -> tuple[float, float, int]:
    """The mean of all targets, a power of 2 above their distance from it, and their number; in four exchanges.

    The second pass takes sums about the mean of the first one, so that targets far from 0 keep their digits.
    """
    centre, power, count = 0.0, HIGHEST, 0
    for _ in range(2):
        sums = (await fed.reduce(TargetRange(centre, HIGHEST))).sums
        power = int(sums["places"].nonzero().max()) + LOWEST
        sums = (await fed.reduce(TargetRange(centre, power))).sums
        count = int(sums["count"])
        centre += int(sums["sum"]) / count * 2.0 ** (power - MEAN_BITS)
    return centre, 2.0 ** (power + 1), count
