"""SPAHM for Gaussian atoms (Yurochkin, Agarwal, Ghosh, Greenewald and Hoang 2019): matched means of a mixture.

Parties describe their samples by means; the server matches them and finds how many there are. For other sets of atoms,
such as topics, call `hansa.matching.match` with `Process(marginal=True)`; for a hidden layer, `pfnm` with `marginal`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from hansa.core.algorithm import Algorithm, Problem, State
from hansa.core.declared_ops import DeclaredOps, OpenOp
from hansa.core.entries import Number, Shaped, Sizes, check_size, stated
from hansa.core.federation import Federation
from hansa.core.op import Memory, Op, Party, Payload, Reply, Shape
from hansa.core.predictor import Predictor
from hansa.core.quantities import AnyCount, Components, Positive, SomeSize
from hansa.core.registry import register
from hansa.core.shapes import UpTo
from hansa.matching.beta_bernoulli import LEAST, Process, match
from hansa.matching.matched import LARGEST, WHOLE
from hansa.numerics.objective import Objective
from hansa.numerics.params import Params
from hansa.plumbing.errors import ConfigError, PartyError, RoundAborted
from hansa.plumbing.stopping import go_on

FEWEST = 5  # samples of a mean that a party sends: the mean of one sample is that sample
PASSES = 100  # of Lloyd's algorithm


@register("spahm-means")
@dataclass(frozen=True)
class LocalMeans(Op):
    """Up to `components` means of the party's samples, by k-means; for each mean, its share of the samples by class.

    Means of fewer than 5 samples are left out, whatever the ask says.
    """

    components: Components = 10
    features: SomeSize = 1
    classes: SomeSize = 2
    entries = stated()

    def check_ask(self, payload: Payload, sizes: Sizes) -> None:
        check_size(self.name, "features", self.features, sizes)
        check_size(self.name, "classes", self.classes, sizes)

    @property
    def largest(self) -> float | None:
        return LARGEST

    def run(self, party: Party, payload: Payload, memory: Memory) -> tuple[Reply, Memory]:
        if party.n < FEWEST:
            raise PartyError(f"it has fewer than {FEWEST} samples, and a mean of them would reveal them")
        x, y = party.samples("statistics")
        rows = x.flatten(1).double().cpu()
        if rows.shape[1] != self.features or y.dim() != 1 or int(y.max()) >= self.classes:
            raise PartyError(f"the ask is about {self.features} features and {self.classes} classes, its samples not")
        if float(rows.abs().max()) > LARGEST**0.5:  # their squares are sent too
            raise PartyError(f"its features have values over {LARGEST**0.5:g}; scale them (task.prepare)")
        means, nearest = k_means(rows, min(self.components, len(rows) // FEWEST), party.rng("means"))
        counts = torch.zeros(len(means), self.classes, dtype=torch.float64)
        counts.index_put_((nearest, y.cpu()), torch.ones(len(y), dtype=torch.float64), accumulate=True)
        spread = (rows - means[nearest]).square().mean()
        large = counts.sum(1) >= FEWEST
        tensors = {"atoms": means[large], "shares": counts[large] / len(rows), "spread": spread}
        return Reply(tensors, weight=party.n), memory

    def expects(self, payload: Payload) -> dict[str, Shape]:
        most = UpTo(self.components)
        return {"atoms": ((most, self.features), torch.float64), "shares": ((most, self.classes), torch.float64),
                "spread": ((), torch.float64)}  # fmt: skip

    def demands(self, n: int, payload: Payload) -> dict[str, int]:
        return {"steps": PASSES}


def k_means(rows: Tensor, count: int, draws: Any) -> tuple[Tensor, Tensor]:
    """At most `count` means of rows, and the mean of each row, by Lloyd's algorithm from a k-means++ start."""
    chosen = [int(draws.integers(len(rows)))]
    apart = (rows - rows[chosen[0]]).square().sum(1)
    while len(chosen) < count and float(apart.max()) > 0:
        at = float(draws.random()) * float(apart.sum())
        chosen.append(min(int(torch.searchsorted(apart.cumsum(0), at, right=True)), len(rows) - 1))
        apart = torch.minimum(apart, (rows - rows[chosen[-1]]).square().sum(1))
    means = rows[chosen]
    nearest = nearest_mean(rows, means)
    for _ in range(PASSES):
        go_on()
        sizes = torch.bincount(nearest, minlength=len(means)).double()[:, None]
        sums = torch.zeros_like(means).index_add_(0, nearest, rows)
        means = torch.where(sizes > 0, sums / sizes.clamp(min=1), means)
        again = nearest_mean(rows, means)
        if torch.equal(again, nearest):
            break
        nearest = again
    return means, nearest


def nearest_mean(rows: Tensor, means: Tensor) -> Tensor:
    """The mean nearest to each row: the least ||m||^2 - 2 <row, m>, which is the squared distance less ||row||^2."""
    return torch.addmm(means.square().sum(1), rows, means.T, alpha=-2.0).argmin(1)


@register("spahm")
@dataclass(frozen=True)
class SPAHM(Algorithm):
    """Match the means of the parties' samples, and find how many there are. Yurochkin et al. 2019, Gaussian case.

    One round. Each party sends up to `components` means of its samples (k-means) and the share of each class in each of
    them. The server matches the means under a Beta-Bernoulli process whose global atoms are integrated out, and learns
    their mean and both variances; `sigma` and `sigma0` are the first values of the variances. `gamma` makes new means
    likelier. The result is a mixture of Gaussians with class shares, which predicts classes.
    """

    components: Components = 10
    sigma: Positive = 1.0
    sigma0: Positive = 1.0
    gamma: Positive = 1.0
    sweeps: AnyCount = 10
    trains: ClassVar[bool] = False

    @property
    def ops(self) -> DeclaredOps:
        return (OpenOp.of("spahm-means", self, "components"),)

    def process(self) -> Process:
        """The settings of the matching."""
        return Process(self.sigma, self.sigma0, self.gamma, self.sweeps, marginal=True)

    @property
    def verbs(self) -> frozenset[str]:
        return frozenset({"gather"})

    def check(self, problem: Problem) -> None:
        super().check(problem)
        if problem.classes is None:
            raise ConfigError("spahm predicts classes by the means nearest to a sample, and the task has no classes")

    def init(self, problem: Problem) -> State:
        shape = (0, math.prod(problem.shape))
        counts = torch.zeros(0, problem.classes or 1, dtype=torch.float64)
        atoms = torch.zeros(shape, dtype=torch.float64)
        return State(Params.none(), slots={"atoms": atoms, "counts": counts, "variance": 1.0})

    async def round(self, fed: Federation, state: State) -> State:
        features, classes = state.slots["atoms"].shape[1], state.slots["counts"].shape[1]
        answer = await fed.gather(LocalMeans(self.components, features, classes))
        groups, counts, spreads, weights = list[Tensor](), list[Tensor](), 0.0, 0
        for party, reply in zip(answer.parties, answer.replies, strict=True):
            atoms, shares, spread = (reply.tensors[name].cpu() for name in ("atoms", "shares", "spread"))
            within = bool((shares >= 0).all()) and float(shares.sum()) <= 1 + WHOLE and float(spread) >= 0
            if len(atoms) != len(shares) or not len(atoms) or not within:
                fed.reject(party, "its means, their shares of the samples and their spread do not fit together")
                continue
            groups.append(atoms)
            counts.append(shares * reply.weight)
            spreads, weights = spreads + float(spread) * reply.weight, weights + reply.weight
        if not groups:
            raise RoundAborted("no party sent means that could be matched")
        found = match(groups, self.process(), order=fed.rng("matching"))
        total = torch.zeros(len(found.atoms), classes, dtype=torch.float64)
        for own, place in zip(counts, found.places, strict=True):
            total.index_add_(0, place, own)
        fed.metrics["atoms"] = float(len(found.atoms))
        return state.replace(atoms=found.atoms, counts=total, variance=max(spreads / weights, LEAST))

    def finished(self, state: State) -> bool:
        return len(state.slots["atoms"]) > 0

    def predictor(self, state: State) -> tuple[str, dict[str, Any]]:
        return "matched-means", dict(state.slots)


@register("matched-means")
@dataclass(frozen=True)
class MatchedMeansPredictor(Predictor):
    """Log-probability of each class under a mixture of Gaussians with one variance; 0 before the first round."""

    entries = stated(
        atoms=Shaped(shape=("atoms", "features")), counts=Shaped(shape=("atoms", "classes")), variance=Number(above=0)
    )

    def outputs(self, objective: Objective, payload: Payload, x: Tensor) -> Tensor:
        atoms, counts = (payload[name].to(x.device) for name in ("atoms", "counts"))
        rows = x.flatten(1).double()
        if not len(atoms):
            return rows.new_zeros(len(rows), counts.shape[1])
        apart = torch.cdist(rows, atoms).square() / (2 * float(payload["variance"]))
        score = counts.clamp(min=1e-9).log()[None] - apart[:, :, None]
        return torch.logsumexp(score, 1)
