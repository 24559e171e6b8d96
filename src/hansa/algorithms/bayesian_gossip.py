"""Bayesian gossip: parties exchange beliefs about the model (Lalitha, Kilinc, Javidi and Koushanfar 2019).

A belief is a Gaussian over the model's parameters. The likelihood of a party's samples enters by a Laplace
approximation with the generalised Gauss-Newton matrix (Martens 2020; Daxberger et al. 2021), which is exact for linear
models with squared errors.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from hansa.algorithms.curvature import WHOLE, Likelihood
from hansa.algorithms.peers import PeerToPeer, layout
from hansa.core.algorithm import Problem, State
from hansa.core.declared_ops import DeclaredOps, OpenOp
from hansa.core.entries import Number, Text, stated
from hansa.core.federation import Federation
from hansa.core.mixing import MIXING, Mixing, mixing_shares
from hansa.core.op import Memory, Op, Party, Payload, Reply, Shape
from hansa.core.quantities import PositiveFactor, Precision, Repeats, Steps
from hansa.core.registry import register
from hansa.core.route_op import Message, RouteOp
from hansa.core.sample_bounds import Bounds, PerSample
from hansa.numerics.params import Params
from hansa.plumbing.errors import ConfigError, PartyError
from hansa.topology import Ring, Topology, metropolis

LEAST = 2.0**-20  # of a Newton step that would lead uphill
Form = Literal["diagonal", "full"]
BELIEF = stated(dim=Number(whole=True, least=1, size="dim"), form=Text(among=("diagonal", "full")),
                prior=Number(above=0))  # fmt: skip


def belief_shapes(form: Form, dim: int) -> dict[str, Shape]:
    """Shapes of a belief: its precision (a diagonal, or a matrix) and its mean."""
    return {"precision": ((dim,) if form == "diagonal" else (dim, dim), torch.float64), "mean": ((dim,), torch.float64)}


def times(precision: Tensor, vector: Tensor) -> Tensor:
    """A precision times a vector."""
    return precision * vector if precision.dim() == 1 else precision @ vector


def solve(precision: Tensor, vector: Tensor) -> Tensor:
    """The inverse of a precision times a vector."""
    return vector / precision if precision.dim() == 1 else torch.linalg.solve(precision, vector)


def own_belief(party: Party, payload: Payload, memory: Memory) -> dict[str, Tensor]:
    """The party's belief; at first the prior: the initial model, with one precision for all parameters."""
    if "belief/mean" in memory:
        return {name: memory[f"belief/{name}"] for name in ("precision", "mean")}
    start, prior = party.objective.initial.w.double(), payload.get("prior")
    if not isinstance(prior, float) or not 0 < prior < math.inf:
        raise PartyError(f"it was sent an invalid precision of the prior: {prior!r}")
    ones = torch.full_like(start, prior)
    return {"precision": ones if payload["form"] == "diagonal" else torch.diag(ones), "mean": start}


@register("exchange-beliefs")
@dataclass(frozen=True)
class ExchangeBeliefs(RouteOp):
    """Update the party's belief by its samples, send it to the neighbours, and mix it with theirs.

    A party whose update is not finite, or sharper than `sharpest`, sends the belief that it had.

    Natural parameters are mixed: L_i = sum_j W_ij L_j and mean_i = L_i^-1 sum_j W_ij L_j mean_j, which is the weighted
    geometric mean of the beliefs. The likelihood enters `repeats` times to the power 1 / `repeats`, and then no more:
    no sample counts twice. A received precision must be positive definite, and at most `sharpest` in each direction of
    the parameters.
    """

    repeats: Repeats = 10
    steps: Steps = 1
    scale: PositiveFactor = 1.0
    sharpest: Precision = 1e9
    broadcast: ClassVar[bool] = True
    entries = stated(mixing=MIXING, **BELIEF)

    def send(self, party: Party, payload: Payload, receivers: tuple[int, ...],
             memory: Memory) -> tuple[Mapping[int, Message], Memory]:  # fmt: skip
        belief = own_belief(party, payload, memory)
        counted = int(memory["belief/counted"]) if "belief/counted" in memory else 0
        if party.n == 0:
            raise PartyError("it has no samples")
        if counted < self.repeats:
            belief = self.updated(party, belief)
            counted += 1
        new = {**memory, **named(belief, party), "belief/counted": torch.tensor(counted)}
        return dict.fromkeys(receivers, belief), new

    def updated(self, party: Party, prior: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The belief after `steps` Newton steps; the likelihood of the samples has the power 1 / repeats."""
        likelihood = Likelihood(party, self.scale / self.repeats)
        held, precision, mean = prior["precision"], prior["precision"], prior["mean"]

        def height(at: Tensor) -> float:
            away = at - prior["mean"]
            return likelihood.value(at) + float(away @ times(held, away)) / 2

        for _ in range(self.steps):
            gradient = likelihood.gradient(mean) + times(held, mean - prior["mean"])
            if held.dim() == 1:
                step, precision = likelihood.solved(mean, held, gradient), held + likelihood.diagonal(mean)
            else:
                precision = held + likelihood.matrix(mean)
                try:
                    step = solve(precision, gradient)
                except RuntimeError:  # singular
                    return dict(prior)
            here, share = height(mean), 1.0
            while height(mean - share * step) > here and share > LEAST:  # never for linear models
                share /= 2
            mean = mean - share * step
        if not bool(torch.isfinite(mean).all()) or not self.plausible(precision):
            return dict(prior)  # a refusal would depend on the samples
        return {"precision": precision, "mean": mean}

    def plausible(self, precision: Tensor) -> bool:
        """Whether a precision is positive definite, symmetric, and nowhere above the limit."""
        if precision.dim() == 1:
            return bool((precision > 0).all()) and float(precision.max()) <= self.sharpest
        if not torch.equal(precision, precision.T) or float(precision.diagonal().max()) > self.sharpest:
            return False
        return int(torch.linalg.cholesky_ex(precision).info) == 0

    def expects(self, payload: Payload) -> dict[str, Shape]:
        return belief_shapes(payload["form"], payload["dim"])

    def demands(self, n: int, payload: Payload) -> dict[str, int]:
        return {"steps": self.steps}

    def receive(self, party: Party, payload: Payload, inbox: Mapping[int, Message],
                memory: Memory) -> tuple[None, Memory]:  # fmt: skip
        beliefs = {sender: belief for sender, belief in inbox.items() if self.plausible(belief["precision"])}
        shares = mixing_shares(payload, party.id, beliefs)
        beliefs[party.id] = own_belief(party, payload, memory)
        precision, shift = (torch.zeros_like(beliefs[party.id][name]) for name in ("precision", "mean"))
        for sender, share in shares.items():
            belief = beliefs[sender]
            precision = precision + share * belief["precision"]
            shift = shift + share * times(belief["precision"], belief["mean"])
        return None, {**memory, **named({"precision": precision, "mean": solve(precision, shift)}, party)}


def named(belief: Mapping[str, Tensor], party: Party) -> Memory:
    """A belief as entries of a memory, and its mean as the party's own model."""
    model = belief["mean"].to(party.objective.initial.w.dtype)
    return {**{f"belief/{name}": tensor for name, tensor in belief.items()}, "gossip/w": model}


@register("own-belief")
@dataclass(frozen=True)
class OwnBelief(Op):
    """Read a party's belief, as its precision and the precision times the mean, for the model that is evaluated.

    Precisions and means have no bound.
    """

    per_sample: ClassVar[Bounds] = dict.fromkeys(("precision", "w"), PerSample(None, signed=True, per_party=True))

    entries = stated(**BELIEF)

    def run(self, party: Party, payload: Payload, memory: Memory) -> tuple[Reply, Memory]:
        if party.n == 0:
            raise PartyError("it has no samples")
        belief = own_belief(party, payload, memory)
        return Reply({"precision": belief["precision"], "w": times(belief["precision"], belief["mean"])}), memory

    def expects(self, payload: Payload) -> dict[str, Shape]:
        found = belief_shapes(payload["form"], payload["dim"])
        return {"precision": found["precision"], "w": found["mean"]}


@register("bayesian-gossip")
@dataclass(frozen=True)
class BayesianGossip(PeerToPeer):
    """Parties exchange Gaussian beliefs about the model with their neighbours, and mix them. Lalitha et al. 2019.

    Each party updates its belief by the likelihood of its samples, and takes the weighted geometric mean of its own
    belief and its neighbours' (Metropolis weights). All beliefs approach the posterior of all samples, with its
    precision divided by the number of parties: also if a party alone knows about a parameter. For linear models with
    squared errors and `belief = "full"` that is exact. `prior` is the precision of the common prior, whose mean is the
    initial model. The likelihood is exp(-scale * sum of losses): 1 for cross-entropy, 1 / (2 sigma^2) for squared
    errors. It is spread over the first `repeats` rounds. `full` beliefs are for at most 1024 parameters; `diagonal`
    ones ignore correlations between parameters, and are four times as long as a float32 model. A neighbour can claim to
    be certain of a false belief: `sharpest` is the largest precision that a party accepts.
    """

    topology: Topology = Ring()
    belief: Form = "diagonal"
    prior: Precision = 1.0
    scale: PositiveFactor = 1.0
    repeats: Repeats = 10
    steps: Steps = 1
    sharpest: Precision = 1e9

    def __post_init__(self) -> None:
        if self.sharpest < self.prior:
            raise ConfigError(f"sharpest is {self.sharpest}, below the precision of the prior ({self.prior})")

    @property
    def ops(self) -> DeclaredOps:
        return (OpenOp.of("exchange-beliefs", self, "repeats", "steps", "scale", "sharpest"), OpenOp("own-belief"))

    @property
    def sums(self) -> int:
        return 0

    def check(self, problem: Problem) -> None:
        super().check(problem)
        if problem.spec.stats or problem.spec.counts:
            raise ConfigError(
                "bayesian-gossip: the model has buffers (BatchNorm and the like), about which there is no belief; use "
                "a model without them"
            )
        if self.belief == "full" and problem.spec.dim > WHOLE:
            raise ConfigError(
                f"bayesian-gossip: belief = 'full' is for at most {WHOLE} parameters, and the model has "
                f"{problem.spec.dim}; set belief = 'diagonal'"
            )

    def init(self, problem: Problem) -> State:
        return State(problem.initial, slots={"mixing": metropolis(self.graph(problem))._asdict()})

    def payload(self, fed: Federation, state: State) -> dict[str, Any]:
        """The size and form of a belief, and each party's share of the prior."""
        dim = layout(state.params)["dim"]
        return {"dim": dim, "form": self.belief, "prior": self.prior / len(fed.parties)}

    async def round(self, fed: Federation, state: State) -> State:
        op = ExchangeBeliefs(self.repeats, self.steps, self.scale, self.sharpest)
        await fed.exchange(op, self.payload(fed, state), mixing=Mixing(**state.slots["mixing"]))
        return state

    async def publish(self, fed: Federation, state: State) -> State:
        total = await fed.reduce(OwnBelief(), self.payload(fed, state), uniform=True)
        precision, shift = total.mean("precision", torch.float64), total.mean("w", torch.float64)
        w = solve(precision, shift).to(state.params.w.dtype)
        return state.replace(Params(w, state.params.stats, state.params.counts))
