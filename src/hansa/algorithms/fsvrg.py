"""FSVRG: federated stochastic variance-reduced gradient (Konecny, McMahan, Ramage and Richtarik 2016)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from hansa.core.algorithm import Algorithm, Parts, Problem, State
from hansa.core.declared_ops import DeclaredOps, OpenOp
from hansa.core.entries import Sizes, check_size, stated
from hansa.core.federation import Federation
from hansa.core.op import Memory, Op, Party, Payload, Reply, Shape
from hansa.core.quantities import Size
from hansa.core.registry import register
from hansa.core.sample_bounds import Bounds, PerSample
from hansa.fusion import mean_update
from hansa.local import SVRG, Batch, Gradient
from hansa.local.svrg import feature_entry, present, spread
from hansa.server import Descent


@register("feature-counts")
@dataclass(frozen=True)
class FeatureCounts(Op):
    """For each feature: the number of a party's samples in which it is not zero, and whether it occurs at all."""

    features: Size = 0
    per_sample: ClassVar[Bounds] = {"samples": PerSample(), "parties": PerSample(per_party=True), "n": PerSample()}
    entries = stated()

    def check_ask(self, payload: Payload, sizes: Sizes) -> None:
        check_size(self.name, "features", self.features, sizes)

    def run(self, party: Party, payload: Payload, memory: Memory) -> tuple[Reply, Memory]:
        counts = present(Batch(*party.samples("statistics"), None)).to(torch.int64)
        found = {"samples": counts, "parties": (counts > 0).to(torch.int64), "n": torch.tensor(party.n)}
        return Reply(found, weight=party.n), memory

    def expects(self, payload: Payload) -> dict[str, Shape]:
        row: Shape = ((self.features,), torch.int64)
        return {"samples": row, "parties": row, "n": ((), torch.int64)}


@register("fsvrg")
@dataclass(frozen=True)
class FSVRG(Algorithm):
    """SVRG over parties: full gradient first, variance-reduced local passes second. Konecny et al. 2016, Algorithm 4.

    Two exchanges per round: the parties' mean gradient g, then one local pass around the global model with g. The
    full form (linear models on sparse data) scales local steps by feature frequency, and scales up the fused update of
    features that few parties have; on dense data both forms agree. Needs every party in every round.
    """

    local: SVRG = SVRG()
    form: Literal["naive", "full"] = "naive"
    participation: ClassVar[Literal["cohort", "all", "own"]] = "all"
    completes: ClassVar[str | None] = "fsvrg"

    @property
    def ops(self) -> DeclaredOps:
        return (OpenOp("gradient"), *((OpenOp("feature-counts"),) if self.form == "full" else ()))

    def parts(self) -> Parts:
        return Parts(self.local)

    @property
    def verbs(self) -> frozenset[str]:
        return frozenset({"reduce"})

    @property
    def sums(self) -> int:
        return 2 if self.form == "naive" else 0  # the full form counts features

    def check(self, problem: Problem) -> None:
        super().check(problem)
        if self.form == "full":
            feature_entry(problem.spec, torch.Size(problem.shape).numel())

    def init(self, problem: Problem) -> State:
        features = torch.Size(problem.shape).numel()
        columns = spread(problem.spec, torch.arange(features).double() + 2) if self.form == "full" else None
        return State(problem.initial, slots={"features": features, "columns": columns})

    async def round(self, fed: Federation, state: State) -> State:
        slots = state.slots
        model = {"model": state.params._asdict()}
        gradient = await fed.reduce(Gradient(), model)
        if self.form == "full":  # asked in every round, because the parties that take part may have changed
            counts = await fed.reduce(FeatureCounts(slots["features"]))
            holders = counts.sums["parties"].double()
            state = state.replace(
                frequency=counts.sums["samples"].double() / int(counts.sums["n"]),
                boost=torch.where(holders > 0, counts.count / holders, 1.0),
            )
        extra = {"gradient": -gradient.mean("w", state.params.w.dtype)}
        if self.form == "full":
            extra["frequency"] = state.slots["frequency"]
        update = mean_update(await fed.reduce(self.local, {**model, **extra}), state.params)
        if self.form == "full":
            column = slots["columns"].long()  # 1 for coordinates of no feature, feature + 2 for the others
            factors = torch.cat([torch.ones(2, dtype=torch.float64), state.slots["boost"].cpu()])
            update = update._replace(w=update.w * factors[column].to(update.w))
        return Descent().step(state, update)
