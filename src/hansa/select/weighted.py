"""Selection in proportion to the parties' samples (p_k = n_k / n), as FedProx (Li et al. 2020) and q-FFL sample."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch

from hansa.core.algorithm import Algorithm, State
from hansa.core.declared_ops import DeclaredOps, OpenOp
from hansa.core.entries import stated
from hansa.core.federation import Federation
from hansa.core.op import Memory, Op, Party, Payload, Reply, Shape
from hansa.core.registry import register
from hansa.select.selector import Ids, Selector, SelectorState, ids


@register("samples")
@dataclass(frozen=True)
class BySamples(Op):
    """Ask a party for its number of samples.

    The number is the reply's weight, which a run may limit (`max_weight`). A weight is positive, so a party without
    samples replies with the metric `empty`. The replies are small because they hold no tensor.
    """

    measures: ClassVar[frozenset[str] | None] = frozenset({"empty"})
    recalls: ClassVar[bool] = False
    entries = stated()

    def run(self, party: Party, payload: Payload, memory: Memory) -> tuple[Reply, Memory]:
        party.data.admit("statistics")  # a number about the samples is counted as other readings are
        return Reply({}, weight=max(party.n, 1), metrics={} if party.n else {"empty": 1.0}), memory

    def expects(self, payload: Payload) -> dict[str, Shape]:
        return {}


@register("weighted")
@dataclass(frozen=True)
class Weighted(Selector):
    """Draw parties one by one without replacement, with probabilities in proportion to their samples.

    Every party is asked once for its number of samples. A party that did not reply is asked again, and is not drawn
    until it replies. Parties without samples are never drawn. The draw already accounts for sizes, so the mean of the
    updates gives every party the same weight (`fusion.uniform = false` would count sizes twice).
    """

    by_size: ClassVar[bool] = True

    ops: ClassVar[DeclaredOps] = (OpenOp("samples"),)

    async def select(self, fed: Federation, algorithm: Algorithm, state: State,
                     own_state: SelectorState) -> tuple[tuple[int, ...], SelectorState]:  # fmt: skip
        own_state = await ask_sizes(fed, own_state)
        return draw(fed, own_state, fed.cohort_size), own_state

    def pool(self, fed: Federation, own_state: SelectorState) -> int:
        return drawable(fed, own_state)


def drawable(fed: Federation, own_state: SelectorState) -> int:
    """The number of parties to draw from: available parties with samples."""
    return int(np.count_nonzero(own_state["sizes"].numpy()[ids(fed.available)] > 0))


async def ask_sizes(fed: Federation, own_state: SelectorState) -> SelectorState:
    """Ask the available parties for their sizes; return the state with `sizes`, -1 for a party that never replied."""
    sizes = own_state["sizes"] if "sizes" in own_state else torch.full((len(fed.parties),), -1)
    here = ids(fed.available)
    unknown = here[sizes.numpy()[here] < 0]
    if len(unknown):
        answer = await fed.gather(BySamples(), parties=unknown.tolist())
        heard = [0 if "empty" in reply.metrics else reply.weight for reply in answer.replies]
        sizes = sizes.clone()
        sizes[torch.tensor(answer.parties, dtype=torch.int64)] = torch.tensor(heard, dtype=torch.int64)
        known = sizes[sizes > 0]
        if fed.times is not None and len(known):  # median of all known sizes: a late party may reply alone
            sizes = sizes.clamp(max=fed.times * int(known.median()))
    return {**own_state, "sizes": sizes}


def draw(fed: Federation, own_state: SelectorState, count: int) -> tuple[int, ...]:
    """Draw at most `count` available parties in proportion to their sizes, in the order of their ids.

    The draws of one round are nested: a draw with a smaller count is a subset of a draw with a larger count.
    """
    sizes = own_state["sizes"].numpy()
    weights = np.zeros(len(sizes))
    here = ids(fed.available)
    weights[here] = np.maximum(sizes[here], 0)
    return tuple(smallest_clocks(fed.rng("select"), weights, count).tolist())


def smallest_clocks(stream: np.random.Generator, weights: Ids, count: int) -> Ids:
    """Draw `count` indices one by one without replacement, in proportion to their weights; return them sorted.

    Each index has an exponential clock with its weight as the rate. The first `count` clocks to ring give the sample,
    in time linear in the number of indices (Efraimidis and Spirakis 2006).
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        rings = stream.standard_exponential(len(weights)) / weights
    count = min(count, int(np.count_nonzero(weights)))
    return np.sort(np.argpartition(rings, count - 1)[:count]) if count else np.zeros(0, dtype=np.int64)
