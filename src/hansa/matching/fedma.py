"""FedMA: federated matched averaging, layer by layer (Wang, Yurochkin, Sun, Papailiopoulos and Khazaeni 2020)."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from hansa.core.algorithm import Problem, State
from hansa.core.declared_ops import DeclaredOps, OpenOp
from hansa.core.entries import WHOLE, WORK_ENTRY, Several, Shaped, stated
from hansa.core.federation import Federation
from hansa.core.op import Memory, Party, Payload, Reply, Shape
from hansa.core.quantities import Count, Layers
from hansa.core.registry import register
from hansa.core.shapes import UpTo, largest_shape
from hansa.local import SGD
from hansa.local.solver import LocalSolver
from hansa.matching.beta_bernoulli import match
from hansa.matching.matched import Growth, Matched, TrainUnits, each_place, output_shares, sliced, sound
from hansa.matching.pfnm import started
from hansa.matching.units import LAYER, Network, Units
from hansa.numerics import rng
from hansa.numerics.objective import Objective
from hansa.plumbing.errors import PartyError
from hansa.plumbing.functions import double

PREFIX = "fedma/"  # of the party's own upper layers in its memory


@register("fedma-train")
@dataclass(frozen=True)
class TrainAbove(TrainUnits):
    """Train the layers from number `stage` on, above the matched layers of the payload; send that layer's units.

    A party begins with the initial values of its own model, which are the pretrained weights if the model has any. It
    remembers the layers above. The matched layers are frozen: they take part in the training, and are not trained.
    `place` in the payload says which of the units below are the party's own; without it the party begins the layers
    above anew, and layer `stage`, whose inputs are the matched units, with random values. With `start` a party begins
    from its part of an earlier matched network.
    """

    stage: Layers = 0
    entries = stated(
        layers=Several(of=LAYER),
        start=Several(of=LAYER, optional=True),
        place=Shaped(types=WHOLE, shape=(None,), least=0, optional=True),
        work=WORK_ENTRY,
    )

    def run(self, party: Party, payload: Payload, memory: Memory) -> tuple[Reply, Memory]:
        own = self.own(party)
        frozen = self.frozen(payload)
        below = [len(layer.bias) for layer in frozen]
        network = own.resized([*below, *own.widths[self.stage :]])
        objective = self.objective(party, network, frozen)
        fresh = network.read({**objective.spec.split(objective.initial.w.cpu()), **_cpu(objective.frozen)})
        free = self.begun(party, own, fresh[self.stage], payload, memory)
        named = network.write([*frozen, *free])
        w = torch.cat([named[entry.name].reshape(-1) for entry in objective.spec.weights])
        here = replace(party, objective=objective)
        w, reply = self.trained(here, objective.initial._replace(w=w.to(objective.device)), payload)
        trained, *above = network.read({**named, **objective.spec.split(w)})[self.stage :]
        kept = {f"{PREFIX}{self.stage + 1 + k}/{name}": value.contiguous() for k, layer in enumerate(above)
                for name, value in layer.tree().items()}  # fmt: skip
        other = {name: value for name, value in memory.items() if not name.startswith(PREFIX)}
        tensors = {name: value.contiguous() for name, value in trained.tree().items()}
        shares = {} if above else self.shares(party)
        return Reply({**tensors, **shares}, weight=party.n, metrics=reply.metrics), {**other, **kept}

    def frozen(self, payload: Payload) -> list[Units]:
        """The matched layers of the payload; a PartyError if they do not fit together."""
        trees, layers, network = payload.get("layers"), list[Units](), self.network
        below = network.layers[0].inputs
        if not isinstance(trees, list) or len(trees) != self.stage or self.stage > len(network.widths):
            raise PartyError(f"the payload has no {self.stage} matched layers")
        for layer, tree in zip(network.layers, trees, strict=False):
            if not layer.fits(tree, below) or not len(tree["bias"]) or not _usable(tree, self.kind_of_numbers):
                raise PartyError("the matched layers of the payload do not fit together, or are not finite")
            layers.append(Units.of_tree(tree))
            below = len(layers[-1].bias)
        return layers

    def objective(self, party: Party, network: Network, frozen: Sequence[Units]) -> Objective:
        """The objective of the party's network above frozen layers."""
        task, chain = party.objective, network.chain((1,))  # the shape of a sample changes no layer
        fixed = {name: value for layer, units in zip(network.layers, frozen, strict=False)
                 for name, value in layer.write(units).items()}  # fmt: skip
        make = functools.partial(double, chain) if task.dtype == torch.float64 else chain

        def freeze() -> nn.Module:
            module = make()
            parameters = dict(module.named_parameters())
            with torch.no_grad():
                for name, value in fixed.items():
                    parameters[name].copy_(value)
                    parameters[name].requires_grad_(False)
            return module

        seed = rng.key(party.seed, "own model", party.id)
        return Objective(freeze, task.loss, seed, str(task.device), task.bf16)

    def begun(self, party: Party, own: Network, fresh: Units, payload: Payload,
              memory: Memory) -> list[Units]:  # fmt: skip
        """The party's layers from number `stage` on, before the training; `fresh` is that layer with random values."""
        initial = own.read(party.objective.spec.split(party.initial().w.cpu()))
        if not self.stage:
            return started(own, payload["start"], self.kind_of_numbers) if "start" in payload else initial
        mine = [{name: memory.get(f"{PREFIX}{k}/{name}") for name in layer.sizes(0, 0)}
                for k, layer in enumerate(own.layers)][self.stage :]  # fmt: skip
        below = (0, *own.widths)[self.stage :]
        place, count = payload.get("place"), fresh.incoming.shape[1]
        fit = all(layer.fits(tree, inputs, layer.units)
                  for layer, tree, inputs in zip(own.layers[self.stage :], mine, below, strict=True))  # fmt: skip
        if not fit or not _is_place(place, below[0], count):
            return [fresh, *initial[self.stage + 1 :]]
        assert isinstance(place, Tensor)
        layers = [Units.of_tree(tree) for tree in mine]  # type: ignore[arg-type]
        return [layers[0].above(place, count), *layers[1:]]

    def expects(self, payload: Payload) -> dict[str, Shape]:
        network = self.network
        layer, trees = network.layers[self.stage], payload["layers"]
        below = len(trees[-1]["bias"]) if trees else layer.inputs
        last = self.stage == len(network.widths)
        sizes = layer.sizes(layer.units if last else UpTo(layer.units), below)
        shapes: dict[str, Shape] = {name: (size, self.kind_of_numbers) for name, size in sizes.items()}
        return shapes | ({"shares": ((self.classes,), torch.float64)} if last and self.classes else {})

    def demands(self, n: int, payload: Payload) -> dict[str, int]:
        """As the local solver's, and the parameters of the network, which grows with the matched layers."""
        trees = payload.get("layers")
        frozen = [Units.of_tree(tree) for tree in trees] if isinstance(trees, list) else []
        size, network = sum(t.numel() for layer in frozen for t in layer), self.network
        below = len(frozen[-1].bias) if frozen else network.layers[0].inputs
        for layer in network.layers[self.stage :]:
            size += sum(math.prod(largest_shape(sizes)) for sizes in layer.sizes(layer.units, below).values())
            below = layer.units
        return {**super().demands(n, payload), "parameters": size}


@register("fedma")
@dataclass(frozen=True)
class FedMA(Matched):
    """Match networks layer by layer; parties retrain the layers above the matched ones. Wang et al. 2020.

    One layer is matched per round, so a network of N layers needs N rounds. Parties train their own networks from
    initial values of their own, or from the model's pretrained weights, and send the units of the lowest layer. The
    server matches them by their incoming weights, and each global unit is the mean over the parties that have it.
    Parties freeze the matched layer, retrain those above, and send the next one. The output layer is averaged by the
    parties' shares of each class, or evenly for a class that nobody has. `cycles` above 1 is FedMA with communication:
    each party starts again from its own part of the matched network. Layers are linear, convolutions, LSTMs (one order
    for the hidden states, in all gates and in both dimensions of the recurrent weights) and embeddings. `sigma`,
    `sigma0`, `gamma`, `sweeps` and `growth` are as for `pfnm`. Parties may have other widths (`task.models`).
    """

    local: LocalSolver = SGD(lr=0.1, epochs=10, batch=32)
    growth: Growth = 4.0
    cycles: Count = 1
    kinds: ClassVar[frozenset[str]] = frozenset({"linear", "conv", "lstm", "embedding"})

    @property
    def ops(self) -> DeclaredOps:
        return (OpenOp("fedma-train"),)

    def init(self, problem: Problem) -> State:
        return super().init(problem).replace(done=0, matched=[], begun={})

    async def round(self, fed: Federation, state: State) -> State:
        slots = state.slots
        network, matched = Network.of_texts(slots["texts"]), list(slots["matched"])
        stage = len(matched)
        layer, last = network.layers[stage], stage == len(network.widths)
        op = TrainAbove(self.local, tuple(slots["texts"]), slots["classes"], slots["dtype"], stage)
        answer = await fed.gather(op, {"layers": matched}, each=self._each(fed, slots, stage))
        below = len(matched[-1]["bias"]) if matched else layer.inputs

        def read(reply: Reply) -> Units | None:
            tree = {name: reply.tensors[name] for name in layer.sizes(0, 0)}
            fits = layer.fits(tree, below) and len(tree["bias"]) > 0
            return Units.of_tree(tree) if fits else None

        parties, groups, replies = sound(fed, answer, read)
        fed.metrics["layer"] = float(stage + 1)
        if not last:
            found = match([units.atoms for units in groups], self.process(), most=self.most(layer.units),
                          order=fed.rng("matching"))  # fmt: skip
            merged = owners_mean(groups, found.places, len(found.atoms))
            fed.metrics["units"] = float(len(found.atoms))
            places = dict(slots["begun"]) if stage else {}
            places = {str(party): [*places.get(str(party), []), place]
                      for party, place in zip(parties, found.places, strict=True)}  # fmt: skip
            matched.append(merged.tree())
            whole = slots["layers"] if slots["done"] else matched  # the last complete network, if there is one
            return state.replace(matched=matched, begun=places, layers=whole)
        layers = [*matched, class_mean(groups, output_shares(replies, network.outputs)).tree()]
        return state.replace(layers=layers, places=slots["begun"], matched=[], begun={}, done=slots["done"] + 1)

    @staticmethod
    def _each(fed: Federation, slots: Any, stage: int) -> dict[int, Payload]:
        """What each party is sent beside the matched layers: its places, or its part of an earlier matched network."""
        if stage:
            known = each_place(slots["begun"], fed.cohort)
            return {party: {"place": own[-1]} for party, own in known.items()}
        layers = [Units.of_tree(tree) for tree in slots["layers"]]
        whole = {party: own for party, own in each_place(slots["places"], fed.cohort).items()
                 if len(own) == len(layers) - 1}  # fmt: skip
        return {party: {"start": [layer.tree() for layer in sliced(layers, own)]} for party, own in whole.items()}

    def finished(self, state: State) -> bool:
        return int(state.slots["done"]) >= self.cycles


def owners_mean(groups: Sequence[Units], places: Sequence[Tensor], count: int) -> Units:
    """The global layer: each weight is the mean over the parties that have its units."""
    first = groups[0]
    sums = [torch.zeros(count, *tensor.shape[1:], dtype=torch.float64) for tensor in (first.incoming, first.bias)]
    recurrent = torch.zeros(count, count, first.recurrent.shape[2], dtype=torch.float64)
    owners, pairs = torch.zeros(count, 1, dtype=torch.float64), torch.zeros(count, count, 1, dtype=torch.float64)
    for units, place in zip(groups, places, strict=True):
        for total, own in zip(sums, (units.incoming, units.bias), strict=True):
            total.index_add_(0, place, own.double())
        owners.index_add_(0, place, torch.ones(len(place), 1, dtype=torch.float64))
        if recurrent.shape[2]:
            recurrent[place[:, None], place] += units.recurrent.double()
            pairs[place[:, None], place] += 1
    incoming, bias = sums[0] / owners[:, :, None], sums[1] / owners
    dtype = first.bias.dtype
    return Units(incoming.to(dtype), bias.to(dtype), (recurrent / pairs.clamp(min=1)).to(dtype))


def class_mean(groups: Sequence[Units], shares: Sequence[Tensor]) -> Units:
    """The output layer: each output is the mean over the parties by their shares of its class, or evenly."""
    weights = torch.stack(list(shares))  # [parties, outputs]
    weights = torch.where(weights.sum(0) > 0, weights, 1 / len(groups))
    incoming = sum(own[:, None, None] * units.incoming.double() for own, units in zip(weights, groups, strict=True))
    bias = sum(own[:, None] * units.bias.double() for own, units in zip(weights, groups, strict=True))
    assert isinstance(incoming, Tensor) and isinstance(bias, Tensor)
    dtype = groups[0].bias.dtype
    return Units(incoming.to(dtype), bias.to(dtype), groups[0].recurrent)


def _usable(tree: Any, dtype: torch.dtype) -> bool:
    return all(value.dtype == dtype and bool(torch.isfinite(value).all()) for value in tree.values())


def _is_place(place: Any, units: int, count: int) -> bool:
    """Whether a payload's places are distinct places of a party's units among the matched ones."""
    if not isinstance(place, Tensor) or place.dtype != torch.int64 or tuple(place.shape) != (units,):
        return False
    return len(set(place.tolist())) == units and bool(((place >= 0) & (place < count)).all())


def _cpu(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.cpu() for name, tensor in tensors.items()}
