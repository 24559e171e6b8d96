"""Means of updates: the F of FedAvg (McMahan et al. 2017, with weights over the parties that replied)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from hansa.core.federation import Federation, Reduced
from hansa.core.op import Op, Payload
from hansa.core.params import Params
from hansa.core.registry import Part, register
from hansa.fusion.update import Update


class Fusion(Part):
    """Base of fusions: how updates become one. `verbs` says what it needs to see."""

    kind: ClassVar[str] = "fusion"
    verbs: ClassVar[frozenset[str]]

    async def collect(self, fed: Federation, op: Op, params: Params, each: Mapping[int, Payload] | None = None,
                      **extra: Any) -> Update:  # fmt: skip
        """Send the model (and `extra`) to the cohort, have it run `op`, fuse the replies."""
        raise TypeError(f"the fusion {self.name!r} fuses nothing")


@register("mean")
@dataclass(frozen=True)
class WeightedMean(Fusion):
    """The mean of the updates over those that replied. McMahan et al. 2017.

    Weighted by samples, unless the cohort was already drawn in proportion to them (the selectors `weighted` and
    `power-of-choice`): then every party counts the same, as Cho, Wang and Joshi 2020 do. `uniform = true` forces equal
    weights (under uniform selection another objective than the centralised one), `false` weights by samples.
    """

    uniform: bool | None = None
    verbs: ClassVar[frozenset[str]] = frozenset({"reduce"})

    async def collect(self, fed: Federation, op: Op, params: Params, each: Mapping[int, Payload] | None = None,
                      **extra: Any) -> Update:  # fmt: skip
        payload = {"model": params._asdict(), **extra}
        uniform = fed.by_size if self.uniform is None else self.uniform
        return mean_update(await fed.reduce(op, payload, each=each, uniform=uniform), params)


def mean_update(reduced: Reduced, params: Params) -> Update:
    """The mean of a reduce as an update, in the types of the model."""
    stats = reduced.mean("stats", params.stats.dtype) if "stats" in reduced.sums else None
    others = {name: reduced.mean(name, params.w.dtype) for name in reduced.sums if name not in ("w", "stats")}
    return Update(reduced.mean("w", params.w.dtype), stats, reduced.maxima.get("counts"), others, reduced.count)
