"""Zeno++: asynchronous training under any number of hostile parties (Xie, Koyejo and Gupta 2020)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
from msgspec import Meta
from torch import Tensor

from hansa.algorithms.fedbuff import REMEMBERED, refill, staleness
from hansa.core.algorithm import Algorithm, Parts, State
from hansa.core.declared_ops import DeclaredOps
from hansa.core.federation import Federation, Finding
from hansa.core.op import Payload
from hansa.core.quantities import Count, Factor, NotNegative, Positive
from hansa.core.registry import register
from hansa.fusion import Update
from hansa.local import SGD, Gradient, LocalSolver
from hansa.numerics.norms import l2_norm, max_abs
from hansa.plumbing.errors import RoundAborted
from hansa.replies.reply_checks import all_finite
from hansa.server import Descent


@register("zeno++")
@dataclass(frozen=True)
class ZenoPlusPlus(Algorithm):
    """Asynchronous: the server tests each update with its own gradient. Xie et al. 2020.

    The server keeps v, the gradient on its trusted samples (`task.trusted`), and computes it again every `refresh`
    steps. An update g is scaled to u = g ||v|| / ||g|| and applied, x <- x - gamma u, if gamma <v, u> - rho ||u||^2 +
    gamma epsilon >= 0. (u has the paper's sign: uphill. Parties send downhill updates, and only the direction matters.)
    An update that is 0 or more than `max_staleness` steps old is rejected. A round is one update that arrived; the
    run's cohort size is the number of parties that work at the same time.
    """

    local: LocalSolver = SGD(lr=0.1, batch=128, steps=1)
    gamma: Positive = 0.1
    rho: Factor = 0.001
    epsilon: NotNegative = 0.0
    refresh: Count = 10
    max_staleness: Annotated[int, Meta(ge=0, le=REMEMBERED)] = 10
    participation: ClassVar[Literal["cohort", "all", "own"]] = "own"
    trusts: ClassVar[bool] = True

    @property
    def ops(self) -> DeclaredOps:
        return ()

    def parts(self) -> Parts:
        return Parts(self.local)

    @property
    def verbs(self) -> frozenset[str]:
        return frozenset({"submit", "next"})

    async def round(self, fed: Federation, state: State) -> State:
        steps: list[int] = list(state.slots.get("steps", []))  # the rounds that moved the model
        model: Payload = {"model": state.params._asdict()}
        own = state.slots.get("own")
        if own is None or state.slots["age"] >= self.refresh:
            seen = fed.at_server(Gradient(), model).tensors
            own = -seen["w"].double()
            if not all_finite(own):
                raise RoundAborted("zeno++: the server's own gradient is not finite")
            params = state.params._replace(stats=seen.get("stats", state.params.stats))  # not from an untrusted party
            state = state.replace(params, own=own, age=0)
        await refill(fed, self.local, model, fed.rng("zeno++"))
        arrival = await fed.next()
        reply, age = arrival.reply, staleness(steps, arrival.ticket)
        if reply is None:
            return state
        u, score = self.judge(reply.tensors["w"], own)
        taken = u is not None and score >= 0 and age <= self.max_staleness
        party = arrival.ticket.party
        fed.report(Finding(self.name, [party], [float(taken)], [score], [] if taken else [party]))
        if u is None or not taken:
            return state
        state = state.replace(steps=[*steps[-REMEMBERED:], fed.round], age=state.slots["age"] + 1)
        return Descent(lr=self.gamma).step(state, Update(-u.to(state.params.w.dtype)))

    def judge(self, update: Tensor, own: Tensor) -> tuple[Tensor | None, float]:
        """The uphill direction scaled to the length of `own`, and its score; a negative score means rejection."""
        scale = max_abs([update])
        if not scale > 0:
            return None, -torch.inf
        unit = update.double() / scale
        u = -unit * (l2_norm([own]) / l2_norm([unit]))
        return u, float(self.gamma * (own @ u) - self.rho * (u @ u) + self.gamma * self.epsilon)
