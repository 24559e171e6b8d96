"""Federated Gaussian naive Bayes from sums of moments per class; equal to scikit-learn's GaussianNB on all samples."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from hansa.core.algorithm import Algorithm, Problem, State
from hansa.core.declared_ops import DeclaredOps, OpenOp
from hansa.core.entries import Number, Shaped, stated
from hansa.core.federation import Federation
from hansa.core.op import Memory, Op, Party, Payload, Reply, Shape, sent
from hansa.core.predictor import Predictor
from hansa.core.quantities import Factor
from hansa.core.registry import register
from hansa.core.sample_bounds import Bounds, PerSample
from hansa.numerics.objective import Objective
from hansa.numerics.params import Params
from hansa.plumbing.errors import ConfigError


@register("class-moments")
@dataclass(frozen=True)
class ClassMoments(Op):
    """For each class: the number of samples, their sum and sum of squares, about a point that the aggregator sends.

    Features have no bound, nor have their sums and squares.
    """

    per_sample: ClassVar[Bounds] = {
        "count": PerSample(over=(-1,)), "sum": PerSample(None, signed=True, counted="count"),
        "square": PerSample(None, counted="count"),
    }  # fmt: skip

    entries = stated(centre=Shaped(shape=("classes", "features")))

    def run(self, party: Party, payload: Payload, memory: Memory) -> tuple[Reply, Memory]:
        x, y = party.samples("statistics")
        centre = sent(payload, "centre", (None, math.prod(x.shape[1:]))).to(x.device)
        apart = x.flatten(1).double() - centre[y]
        zeros = torch.zeros_like(centre)
        count = torch.zeros(len(centre), dtype=torch.int64, device=x.device).index_add(0, y, torch.ones_like(y))
        moments = {"sum": zeros.index_add(0, y, apart), "square": zeros.index_add(0, y, apart**2)}
        return Reply({"count": count, **moments}, weight=len(y)), memory

    def expects(self, payload: Payload) -> dict[str, Shape]:
        shape = tuple(payload["centre"].shape)
        return {"count": (shape[:1], torch.int64), "sum": (shape, torch.float64), "square": (shape, torch.float64)}


@register("naive-bayes")
@dataclass(frozen=True)
class GaussianNB(Algorithm):
    """Gaussian naive Bayes from sums. Equal to scikit-learn's GaussianNB on the samples of all parties.

    Parties send N, sum and sum of squares of each class. One round is enough; a second round takes the moments about
    the means just learned, which avoids cancellation for data far from zero. `var_smoothing` times the largest
    variance over all data is added once, at the server.
    """

    var_smoothing: Factor = 1e-9
    trains: ClassVar[bool] = False

    @property
    def ops(self) -> DeclaredOps:
        return (OpenOp("class-moments"),)

    @property
    def verbs(self) -> frozenset[str]:
        return frozenset({"reduce"})

    def check(self, problem: Problem) -> None:
        super().check(problem)
        if problem.classes is None:
            raise ConfigError("naive-bayes is a classifier: it needs class numbers (whole numbers) as targets")

    def init(self, problem: Problem) -> State:
        shape = (problem.classes or 0, math.prod(problem.shape))
        start = torch.zeros(shape, dtype=torch.float64)
        return State(
            Params.none(), slots={"mean": start, "var": torch.ones_like(start), "prior": start[:, 0], "passes": 0}
        )

    async def round(self, fed: Federation, state: State) -> State:
        centre = state.slots["mean"]
        moments = await fed.reduce(ClassMoments(), {"centre": centre})
        count = moments.sums["count"].double().cpu()
        n, seen = count.sum(), count.clamp(min=1)[:, None]
        shift = moments.sums["sum"].cpu() / seen
        var = (moments.sums["square"].cpu() / seen - shift**2).clamp(min=0)
        mean = centre + shift
        pooled = (count[:, None] * mean).sum(0) / n
        overall = (count[:, None] * (var + (mean - pooled) ** 2)).sum(0) / n
        smoothed = var + self.var_smoothing * overall.max()
        return state.replace(mean=mean, var=smoothed, prior=count / n, passes=state.slots["passes"] + 1)

    def finished(self, state: State) -> bool:
        return int(state.slots["passes"]) >= 2

    def predictor(self, state: State) -> tuple[str, dict[str, Any]]:
        return "naive-bayes", dict(state.slots)


@register("naive-bayes")
@dataclass(frozen=True)
class NaiveBayesPredictor(Predictor):
    """Joint log-likelihood of each class; a class that no party has is never predicted."""

    entries = stated(
        mean=Shaped(shape=("classes", "features")),
        var=Shaped(shape=("classes", "features")),
        prior=Shaped(shape=("classes",)),
        passes=Number(whole=True, least=0, optional=True),
    )

    def outputs(self, objective: Objective, payload: Payload, x: Tensor) -> Tensor:
        mean, var, prior = (payload[name].to(x.device) for name in ("mean", "var", "prior"))
        flat = x.flatten(1).double()
        alive = prior > 0
        safe = torch.where(var > 0, var, torch.finfo(torch.float64).tiny)
        apart = flat[:, None, :] - mean
        score = prior.clamp(min=1e-300).log() - 0.5 * (torch.log(2 * math.pi * safe) + apart**2 / safe).sum(-1)
        return torch.where(alive, score, score.new_tensor(-1e300))
