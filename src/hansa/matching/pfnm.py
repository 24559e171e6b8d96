"""PFNM: probabilistic federated neural matching (Yurochkin et al. 2019), for networks of fully connected layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hansa.core.algorithm import Problem, State
from hansa.core.declared_ops import DeclaredOps, OpenOp
from hansa.core.entries import WORK_ENTRY, Several, stated
from hansa.core.federation import Federation
from hansa.core.op import Memory, Party, Payload, Reply, Shape
from hansa.core.registry import register
from hansa.core.shapes import UpTo
from hansa.local import SGD
from hansa.local.solver import LocalSolver
from hansa.matching.beta_bernoulli import Process, match
from hansa.matching.matched import Matched, TrainUnits, each_place, output_shares, sliced, sound
from hansa.matching.units import LAYER, Network, Units
from hansa.plumbing.errors import ConfigError, PartyError


@register("pfnm-train")
@dataclass(frozen=True)
class TrainNetwork(TrainUnits):
    """Train the party's own network and send all of its units.

    It starts from the party's part of the matched network if the payload has it (`start`), else from initial values of
    the party's own.
    """

    entries = stated(start=Several(of=LAYER, optional=True), work=WORK_ENTRY)

    def run(self, party: Party, payload: Payload, memory: Memory) -> tuple[Reply, Memory]:
        network, model = self.own(party), party.initial()
        if "start" in payload:
            layers = started(network, payload["start"], self.kind_of_numbers)
            named = network.write(layers)
            start = torch.cat([named[entry.name].reshape(-1) for entry in party.objective.spec.weights])
            model = model._replace(w=start.to(model.w))
        w, reply = self.trained(party, model, payload)
        units = network.read(party.objective.spec.split(w))
        tensors = {f"{k}.{name}": value.contiguous() for k, layer in enumerate(units)
                   for name, value in layer.tree().items()}  # fmt: skip
        return Reply({**tensors, **self.shares(party)}, weight=party.n, metrics=reply.metrics), memory

    def expects(self, payload: Payload) -> dict[str, Shape]:
        network, shapes = self.network, dict[str, Shape]()
        below: int | UpTo = network.layers[0].inputs
        for k, layer in enumerate(network.layers):
            units = layer.units if k == len(network.widths) else UpTo(layer.units)
            shapes |= {f"{k}.{n}": (sizes, self.kind_of_numbers) for n, sizes in layer.sizes(units, below).items()}
            below = units
        return shapes | ({"shares": ((self.classes,), torch.float64)} if self.classes else {})


@register("pfnm")
@dataclass(frozen=True)
class PFNM(Matched):
    """Match the neurons of networks that parties trained on their own. Yurochkin et al. 2019.

    One round is the one-shot method: each party trains from initial values of its own, and the server matches the
    neurons under a Beta-Bernoulli process, from the top hidden layer down. The global network has as many neurons as
    the matching finds, at most `growth` times those of the widest party. In further rounds each party starts from its
    part of the global network; `local = "proximal"` keeps it close to that part. `sigma` and `sigma0` are the variances
    of a party's weights around the global ones and of the global ones around 0, `gamma` makes new neurons likelier,
    `sweeps` is the number of passes over the parties. The outputs of a class count as much as the party's share of the
    class. `marginal` integrates the global neurons out and learns the variances (SPAHM); then classes do not count.
    Parties may have other widths (`task.models`).
    """

    local: LocalSolver = SGD(lr=0.1, epochs=10, batch=32)
    marginal: bool = False

    @property
    def ops(self) -> DeclaredOps:
        return (OpenOp("pfnm-train"),)

    def process(self) -> Process:
        return Process(self.sigma, self.sigma0, self.gamma, self.sweeps, self.marginal)

    def check(self, problem: Problem) -> None:
        super().check(problem)
        if self.marginal and len(self.widest(problem).widths) > 1:
            raise ConfigError(
                "pfnm: algorithm.marginal learns the variances of one hidden layer, and the model has "
                f"{len(self.widest(problem).widths)}; leave it out, or use a model with one"
            )

    async def round(self, fed: Federation, state: State) -> State:
        slots = state.slots
        widest = Network.of_texts(slots["texts"])
        op = TrainNetwork(self.local, tuple(slots["texts"]), slots["classes"], slots["dtype"])
        layers = [Units.of_tree(tree) for tree in slots["layers"]]
        each = {party: {"start": [layer.tree() for layer in sliced(layers, own)]}
                for party, own in each_place(slots["places"], fed.cohort).items()}  # fmt: skip
        answer = await fed.gather(op, {}, each=each)

        def read(reply: Reply) -> list[Units] | None:
            trees = [{name: reply.tensors[f"{k}.{name}"] for name in layer.sizes(0, 0)}
                     for k, layer in enumerate(widest.layers)]  # fmt: skip
            return fitting(widest, trees)

        parties, networks, replies = sound(fed, answer, read)
        shares = output_shares(replies, widest.outputs)
        caps = [self.most(width) for width in widest.widths]
        merged, places = assemble(networks, shares, self.process(), caps, fed.rng("matching"))
        fed.metrics["units"] = float(sum(len(layer.bias) for layer in merged[:-1]))
        return state.replace(
            layers=[layer.tree() for layer in merged],
            places={str(party): own for party, own in zip(parties, places, strict=True)},
        )


def fitting(network: Network, trees: Sequence[Any], widths: Sequence[int] | None = None) -> list[Units] | None:
    """The layers of a network from named tensors, if they fit together and have units; with `widths`, those."""
    below, layers = network.layers[0].inputs, []
    for k, (layer, tree) in enumerate(zip(network.layers, trees, strict=True)):
        last = k == len(network.widths)
        if not layer.fits(tree, below, layer.units if last else widths[k] if widths is not None else None):
            return None
        layers.append(Units.of_tree(tree))
        below = len(layers[-1].bias)
        if not below:
            return None
    return layers


def started(network: Network, trees: Any, dtype: torch.dtype) -> list[Units]:
    """A party's own network from a payload; a PartyError if it does not have the party's widths, or is not finite."""
    known = isinstance(trees, list) and len(trees) == len(network.layers)
    layers = fitting(network, trees, network.widths) if known else None
    if layers is None or not all(t.dtype == dtype and bool(torch.isfinite(t).all()) for layer in layers for t in layer):
        raise PartyError("the payload has no network of the party's own widths to start from")
    return layers


def assemble(networks: Sequence[Sequence[Units]], shares: Sequence[Tensor], process: Process, caps: Sequence[int],
             draws: Any) -> tuple[list[Units], list[list[Tensor]]]:  # fmt: skip
    """The matched network, and the places of each party's units in its hidden layers.

    From the top hidden layer down: an atom is a unit's bias and outgoing weights, to the units that the layer above was
    matched to (zero to those that the party does not have). The lowest layer's atoms have the incoming weights too.
    """
    depth, one = len(caps), torch.ones(1, dtype=torch.float64)
    places: list[list[Tensor]] = [[torch.empty(0)] * depth for _ in networks]
    outgoing = [layers[-1].incoming for layers in networks]
    bias = output_bias([layers[-1].bias for layers in networks], shares, process)
    merged: list[Units] = []
    for layer in reversed(range(depth)):
        below = [layers[layer] for layers in networks]
        head = below[0].incoming[0].numel() if layer == 0 else 0
        groups = [torch.cat([own.incoming.flatten(1)[:, :head], own.bias, out.transpose(0, 1).flatten(1)], 1)
                  for own, out in zip(below, outgoing, strict=True)]  # fmt: skip
        tail = head + below[0].bias.shape[1]
        by_class = layer == depth - 1 and not process.marginal
        precisions = [torch.cat([one.expand(tail), share.repeat_interleave(outgoing[0].shape[2])]) for share in shares]
        found = match(groups, process, shares=precisions if by_class else None, most=caps[layer], order=draws)
        count = len(found.atoms)
        weights = found.atoms[:, tail:].view(count, *outgoing[0].shape[::2]).transpose(0, 1)
        merged.insert(0, Units(weights.contiguous(), bias, bias.new_zeros(len(bias), len(bias), 0)))
        bias = found.atoms[:, head:tail].contiguous()
        for own_places, place in zip(places, found.places, strict=True):
            own_places[layer] = place
        if layer == 0:
            first = found.atoms[:, :head].reshape(count, *below[0].incoming.shape[1:]).contiguous()
            merged.insert(0, Units(first, bias, bias.new_zeros(count, count, 0)))
        outgoing = [spread(own.incoming, place, count) for own, place in zip(below, found.places, strict=True)]
    return merged, places


def output_bias(biases: Sequence[Tensor], shares: Sequence[Tensor], process: Process) -> Tensor:
    """The best estimate of the outputs' biases [outputs, 1], by the parties' shares of classes."""
    if not biases[0].shape[1]:
        return biases[0]
    total = torch.stack([share[:, None] * bias.double() for share, bias in zip(shares, biases, strict=True)]).sum(0)
    known = torch.stack(list(shares)).sum(0)[:, None]
    return (total / process.sigma / (1 / process.sigma0 + known / process.sigma)).to(biases[0].dtype)


def spread(incoming: Tensor, place: Tensor, count: int) -> Tensor:
    """Incoming weights of a party's units, as those of the `count` global units that they are part of."""
    wide = incoming.new_zeros(count, *incoming.shape[1:])
    return wide.index_copy_(0, place, incoming)
