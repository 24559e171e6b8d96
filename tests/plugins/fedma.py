"""FedMA on multilayer perceptrons: match one layer after the other (Wang et al. 2020).

Parties have hidden layers of unequal width. In stage s they train the layers from s on and send the neurons of layer s;
the server matches them and freezes the layer. Last, the output layer is averaged. The global model has widths that no
party had.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor, nn

from hansa import State
from hansa.core.algorithm import Algorithm, Parts, Problem
from hansa.core.federation import Federation
from hansa.core.op import Memory, Op, Party, Payload, Reply, Shape
from hansa.core.other_model import OtherModel
from hansa.core.quantities import AnyCount
from hansa.core.registry import register
from hansa.core.shapes import UpTo
from hansa.holdings.gateway import SampleGateway
from hansa.local import LocalSolver
from hansa.local.sgd import SGD
from hansa.models.model import Model
from hansa.numerics.objective import Objective
from hansa.numerics.params import Params
from hansa.plumbing.errors import ConfigError

WIDTHS = "fedma/widths"


@register("plugin-mlp")
@dataclass(frozen=True)
class MLP(Model):
    """Hidden layers of any widths; without one, a linear model."""

    inputs: tuple[int, ...] = (1,)
    outputs: int = 2
    widths: tuple[int, ...] = ()

    def __call__(self) -> nn.Module:
        sizes = [self.width_in, *self.widths, self.outputs]
        layers: list[nn.Module] = [nn.Flatten()]
        for before, after in itertools.pairwise(sizes):
            layers += [nn.Linear(before, after), nn.ReLU()]
        return nn.Sequential(*layers[:-1])


def named(rows: Sequence[Tensor]) -> dict[str, Tensor]:
    """The tensors of an MLP, from its layers as rows: weights, and the bias in the last column."""
    out = {}
    for k, layer in enumerate(rows):
        out |= {f"{2 * k + 1}.weight": layer[:, :-1], f"{2 * k + 1}.bias": layer[:, -1]}
    return out


def layers_of(objective: Objective, w: Tensor) -> list[Tensor]:
    """The layers of an MLP as rows; the inverse of `named`."""
    tensors = list(objective.spec.split(w).values())
    return [torch.cat([weight, bias[:, None]], 1) for weight, bias in zip(tensors[::2], tensors[1::2], strict=True)]


@register("plugin-fedma-stage")
@dataclass(frozen=True)
class MatchedStage(Op):
    """Train the layers above the frozen ones; send the neurons of the first of them, and remember the others."""

    inner: LocalSolver = SGD()
    stage: AnyCount = 0
    hidden: tuple[AnyCount, ...] = (6, 5)
    spread: AnyCount = 3
    outputs: AnyCount = 2
    dtype: str = "float64"

    def run(self, party: Party, payload: Payload, memory: Memory) -> tuple[Reply, Memory]:
        x, y = party.samples("train")
        features = x.flatten(1)
        for layer in payload["layers"]:
            features = (features @ layer[:, :-1].T + layer[:, -1]).relu()
        memory = memory if WIDTHS in memory else self._begin(party)
        widths = memory[WIDTHS].tolist()[self.stage :]
        model = MLP((features.shape[1],), self.outputs, tuple(widths))
        objective = Objective(lambda: model().to(x.dtype), party.objective.loss, int(party.rng("init").integers(2**31)))
        layers = layers_of(objective, objective.initial.w)
        if "map" in payload and self._key(self.stage) in memory:  # the party's own layers, on the matched neurons below
            own = [memory[self._key(k)] for k in range(self.stage, len(self.hidden) + 1)]
            if len(payload["map"]) == own[0].shape[1] - 1:  # the server matched all neurons that the party has
                first = torch.zeros_like(layers[0])
                first[:, payload["map"].long()] = own[0][:, :-1]
                first[:, -1] = own[0][:, -1]
                layers = [first, *own[1:]]
        w = torch.cat([tensor.reshape(-1) for tensor in named(layers).values()])
        here = replace(party, objective=objective, data=SampleGateway((features, y)))
        reply, _ = self.inner.run(here, {"model": {**objective.initial._asdict(), "w": w}}, {})
        rows, *above = layers_of(objective, w + reply.tensors["w"])
        kept = {self._key(self.stage + 1 + k): layer for k, layer in enumerate(above)}
        return Reply({"rows": rows}, weight=party.n, metrics=reply.metrics), {WIDTHS: memory[WIDTHS], **kept}

    def _begin(self, party: Party) -> Memory:
        """The widths of the party's own hidden layers, drawn once."""
        more = torch.from_numpy(party.rng("widths").integers(0, self.spread + 1, len(self.hidden)))
        return {WIDTHS: torch.tensor(self.hidden) + more}

    def _key(self, layer: int) -> str:
        return f"fedma/{layer}"

    measures: ClassVar[frozenset[str] | None] = frozenset({"train_loss"})

    def expects(self, payload: Payload) -> dict[str, Shape]:
        below = len(payload["layers"][-1]) if payload["layers"] else payload["inputs"]
        last = self.stage == len(self.hidden)
        count = self.outputs if last else UpTo(self.hidden[self.stage] + self.spread)
        return {"rows": ((count, below + 1), getattr(torch, self.dtype))}


def match(groups: Sequence[Tensor], new_cost: float) -> tuple[Tensor, list[Tensor]]:
    """Global neurons, and which of them each party's neurons are: greedy Hungarian matching, with new neurons."""
    atoms, counts, maps = groups[0][:0], torch.zeros(0), []
    for group in groups:
        cost = torch.cat([torch.cdist(group, atoms) ** 2, torch.full((len(group), len(group)), new_cost)], 1)
        old, to = len(atoms), torch.zeros(len(group), dtype=torch.int64)
        for i, j in zip(*linear_sum_assignment(cost.numpy()), strict=True):
            if j < old:
                atoms[j] += (group[i] - atoms[j]) / (counts[j] + 1)
                counts[j] += 1
                to[i] = int(j)
            else:
                to[i] = len(atoms)
                atoms, counts = torch.cat([atoms, group[i : i + 1]]), torch.cat([counts, torch.ones(1)])
        maps.append(to)
    return atoms, maps


@register("plugin-fedma")
@dataclass(frozen=True)
class FedMA(Algorithm):
    """Match the hidden layers one per round, then average the output layer. Wang et al. 2020, algorithm 1."""

    local: LocalSolver = SGD()
    hidden: tuple[int, ...] = (6, 5)
    spread: int = 3
    new_cost: float = 2.0
    trains: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if not self.hidden or min(self.hidden) < 1:
            raise ConfigError(f"hidden must name at least one positive width, got {list(self.hidden)}")

    def parts(self) -> Parts:
        return Parts(self.local)

    @property
    def verbs(self) -> frozenset[str]:
        return frozenset({"gather", "reduce"})

    def init(self, problem: Problem) -> State:
        return State(Params.none(), slots={
            "layers": [], "maps": {}, "shape": list(problem.shape), "outputs": problem.spec.weights[-1].shape[0],
            "dtype": str(problem.spec.dtype).removeprefix("torch."),
        })  # fmt: skip

    async def round(self, fed: Federation, state: State) -> State:
        slots = state.slots
        stage = len(slots["layers"])
        op = MatchedStage(self.local, stage, self.hidden, self.spread, slots["outputs"], slots["dtype"])
        payload = {"layers": list(slots["layers"]), "inputs": math.prod(slots["shape"])}
        each = {party: {"map": slots["maps"][str(party)]} for party in fed.cohort if str(party) in slots["maps"]}
        if stage == len(self.hidden):  # the outputs need no matching
            mean = (await fed.reduce(op, payload, each=each)).mean("rows", getattr(torch, slots["dtype"]))
            return state.replace(layers=[*slots["layers"], mean])
        answer = await fed.gather(op, payload, each=each)
        atoms, maps = match([reply.tensors["rows"] for reply in answer.replies], self.new_cost)
        if not len(atoms):
            return state
        places = {str(party): place for party, place in zip(answer.parties, maps, strict=True)}
        return state.replace(layers=[*slots["layers"], atoms], maps=places)

    def finished(self, state: State) -> bool:
        return len(state.slots["layers"]) == len(self.hidden) + 1

    def model(self, state: State) -> OtherModel:
        """The matched layers; until the last stage the output layer is zero."""
        slots: Mapping[str, Any] = state.slots
        rows = list(slots["layers"])
        if not self.finished(state):
            below = len(rows[-1]) if rows else math.prod(slots["shape"])
            rows.append(torch.zeros(slots["outputs"], below + 1, dtype=getattr(torch, slots["dtype"])))
        widths = tuple(len(layer) for layer in rows[:-1])
        return OtherModel.of(MLP(tuple(slots["shape"]), slots["outputs"], widths), named(rows))
