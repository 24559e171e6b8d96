"""Push-sum: averaging over directed graphs and lossy links (Kempe, Dobra and Gehrke 2003), with local training in
between (stochastic gradient push: Nedic and Olshevsky 2016; Assran, Loizou, Ballas and Rabbat 2019)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from hansa.algorithms.peers import LAYOUT, PeerToPeer, layout, own_model, shapes
from hansa.core.algorithm import Parts, Problem, State
from hansa.core.declared_ops import DeclaredOps, OpenOp
from hansa.core.entries import Entries, Number, extended
from hansa.core.federation import Federation
from hansa.core.op import Memory, Party, Payload, Reply, Shape
from hansa.core.registry import register
from hansa.core.route_op import Message, PeerOp
from hansa.local import SGD, LocalSolver
from hansa.plumbing.errors import PartyError
from hansa.topology import Ring, Topology

HELD, SENT, HEARD = "push/held/", "push/sent/", "push/heard/"  # entries of a memory: own mass, and running sums
SPARE = 1e-6  # by how much rounding may raise the total weight of all parties


@register("push-sum")
@dataclass(frozen=True)
class PushSumStep(PeerOp):
    """Train from x / w, keep an equal share of (x, w), and send the running sums of the shares that were sent so far.

    A receiver adds what a running sum has grown since it last heard from the sender. So a lost message is made up for
    by the next one, and no mass is lost (Hadjicostis, Vaidya and Dominguez-Garcia 2016). Mass is in float64.
    """

    inner: LocalSolver = SGD()
    update: ClassVar[str | None] = None  # the reply is a running sum, not an update

    @property
    def entries(self) -> Entries | None:  # type: ignore[override]
        count = Number(whole=True, least=0)
        return extended(extended(self.inner.entries, "model", **LAYOUT), receivers=count, parties=count)

    def before(self, party: Party, payload: Payload, memory: Memory) -> Payload:
        shared = {name: value for name, value in payload.items() if name not in ("receivers", "parties")}
        return {**shared, "model": own_model(party, memory)._asdict()}

    def after(self, party: Party, payload: Payload, reply: Reply, memory: Memory) -> tuple[Reply, Memory]:
        receivers, parties = payload.get("receivers"), payload.get("parties")
        if not isinstance(receivers, int) or not isinstance(parties, int) or not 0 <= receivers < parties:
            raise PartyError(f"it was sent an invalid number of receivers: {receivers!r} of {parties!r} parties")
        held = self.held(party, memory)
        held["x"] = held["x"] + reply.tensors["w"]
        if "stats" in reply.tensors:
            held["stats"] = reply.tensors["stats"].double() * held["weight"]
        model = estimate(held, party)
        shares = {name: value / (receivers + 1) for name, value in held.items()}
        sums = {name: memory.get(SENT + name, torch.zeros_like(share)) + share for name, share in shares.items()}
        staged = {**memory, **model, **_named(HELD, shares), **_named(SENT, sums)}
        if "counts" in reply.maxima:
            staged["gossip/counts"] = reply.maxima["counts"]
        return Reply(sums, weight=reply.weight, metrics=reply.metrics), staged

    def held(self, party: Party, memory: Memory) -> dict[str, Tensor]:
        """The mass that a party holds: at first its initial model, with the weight 1."""
        start = party.objective.initial
        mass = {"x": start.w.double(), "weight": torch.ones(1, dtype=torch.float64, device=start.w.device)}
        mass |= {"stats": start.stats.double()} if start.stats.numel() else {}
        return {name: memory.get(HELD + name, value) for name, value in mass.items()}

    def expects(self, payload: Payload) -> dict[str, Shape]:
        return {**shapes(payload, "x", torch.float64), "weight": ((1,), torch.float64)}

    def expects_maxima(self, payload: Payload) -> dict[str, Shape]:
        return {}

    def receive(self, party: Party, payload: Payload, inbox: Mapping[int, Message],
                memory: Memory) -> tuple[None, Memory]:  # fmt: skip
        held, new = self.held(party, memory), dict(memory)
        most = payload["parties"] * (1 + SPARE)
        for sender, sums in inbox.items():
            heard = f"{HEARD}{sender}/"
            grown = {name: total - memory.get(heard + name, torch.zeros_like(total)) for name, total in sums.items()}
            # All weights together are the number of parties: what takes or makes weight is a lie, and is not heard.
            if not 0 < float(grown["weight"]) <= most - float(held["weight"]):
                continue
            held = {name: held[name] + grown[name] for name in held}
            new.update(_named(heard, {name: total.clone() for name, total in sums.items()}))
        return None, {**new, **_named(HELD, held), **estimate(held, party)}


def estimate(held: Mapping[str, Tensor], party: Party) -> Memory:
    """The party's model x / w, as `own_model` reads it."""
    weight, start = held["weight"], party.objective.initial
    if not float(weight) > 0:
        raise PartyError("its weight in push-sum has become 0: its neighbours have not sent anything for too long")
    model = {"gossip/w": (held["x"] / weight).to(start.w.dtype)}
    return model | ({"gossip/stats": (held["stats"] / weight).to(start.stats.dtype)} if "stats" in held else {})


def _named(prefix: str, tensors: Mapping[str, Tensor]) -> Memory:
    return {prefix + name: tensor for name, tensor in tensors.items()}


@register("push-sum")
@dataclass(frozen=True)
class PushSum(PeerToPeer):
    """Gossip on a directed graph, also over links that lose messages. Kempe et al. 2003; Assran et al. 2019.

    Each party holds a mass x and a weight w, at first 1, and its model is x / w. In a round it trains from x / w, adds
    the change to x, divides (x, w) evenly among itself and the parties that it sends to, and adds what arrives. The sum
    of all masses stays, so all models approach its mean, although the shares of a directed graph have columns and not
    rows of the sum 1. The graph must have a path from every party to every other one. Parties send running sums, in
    float64: what a lost message held arrives with the next one. A party remembers one running sum per sender.
    """

    local: LocalSolver = SGD(steps=1)
    topology: Topology = Ring(directed=True)
    symmetric: ClassVar[bool] = False

    @property
    def ops(self) -> DeclaredOps:
        return (OpenOp("push-sum"), OpenOp("own-model"))

    def parts(self) -> Parts:
        return Parts(self.local)

    def init(self, problem: Problem) -> State:
        graph = self.graph(problem)
        edges = torch.stack([torch.from_numpy(graph.senders), torch.from_numpy(graph.receivers)])
        return State(problem.initial, slots={"edges": edges})

    async def round(self, fed: Federation, state: State) -> State:
        senders, receivers = state.slots["edges"]
        outgoing = torch.bincount(senders, minlength=len(fed.parties)).tolist()
        payload = {**layout(state.params), "parties": len(fed.parties)}
        each = {party: {"receivers": outgoing[party]} for party in fed.parties}
        routes = zip(senders.tolist(), receivers.tolist(), strict=True)
        await fed.route(PushSumStep(self.local), payload, routes, parties=fed.parties, each=each)
        return state
