"""Selection in proportion to the parties' samples (p_k = n_k / n), as FedProx (Li et al. 2020) and q-FFL sample."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch

from hansa.core.algorithm import Algorithm, State
from hansa.core.federation import Federation
from hansa.core.op import Memory, Op, Party, Payload, Reply, Shape
from hansa.core.registry import register
from hansa.select.selector import Ids, Kept, Selector, ids


@register("samples")
@dataclass(frozen=True)
class BySamples(Op):
    """How many samples a party has.

    The number is the reply's weight, which a run may limit (`max_weight`); a weight is positive, so a party without
    samples says `empty`. A million of these replies are small: they hold no tensor.
    """

    measures: ClassVar[frozenset[str] | None] = frozenset({"empty"})

    def run(self, party: Party, payload: Payload, memory: Memory) -> tuple[Reply, Memory]:
        return Reply({}, weight=max(party.n, 1), metrics={} if party.n else {"empty": 1.0}), memory

    def expects(self, payload: Payload) -> dict[str, Shape]:
        return {}


@register("weighted")
@dataclass(frozen=True)
class Weighted(Selector):
    """Without replacement, each next party with a probability in proportion to its samples.

    Every party is asked once how many samples it has; one that did not answer is asked again, and not drawn before it
    did. Parties without samples are never drawn. The draw carries the sizes, so the mean of the updates gives every
    party the same weight (`fusion.uniform = false` would count sizes twice).
    """

    by_size: ClassVar[bool] = True

    async def select(self, fed: Federation, algorithm: Algorithm, state: State,
                     kept: Kept) -> tuple[tuple[int, ...], Kept]:  # fmt: skip
        kept = await ask_sizes(fed, kept)
        return draw(fed, kept, fed.cohort_size), kept

    def pool(self, fed: Federation, kept: Kept) -> int:
        return drawable(fed, kept)


def drawable(fed: Federation, kept: Kept) -> int:
    """How many parties there are to draw from: those available that have samples."""
    return int(np.count_nonzero(kept["sizes"].numpy()[ids(fed.available)] > 0))


async def ask_sizes(fed: Federation, kept: Kept) -> Kept:
    """What was kept, with the sizes of all parties that could be asked: `sizes`, -1 where one was never heard of."""
    sizes = kept["sizes"] if "sizes" in kept else torch.full((len(fed.parties),), -1)
    here = ids(fed.available)
    unknown = here[sizes.numpy()[here] < 0]
    if len(unknown):
        answer = await fed.gather(BySamples(), parties=unknown.tolist())
        heard = [0 if "empty" in reply.metrics else reply.weight for reply in answer.replies]
        sizes = sizes.clone()
        sizes[torch.tensor(answer.parties, dtype=torch.int64)] = torch.tensor(heard, dtype=torch.int64)
        known = sizes[sizes > 0]
        if fed.times is not None and len(known):  # of all that are known: who comes late may come alone
            sizes = sizes.clamp(max=fed.times * int(known.median()))
    return {**kept, "sizes": sizes}


def draw(fed: Federation, kept: Kept, count: int) -> tuple[int, ...]:
    """`count` available parties in proportion to their sizes, in the order of their ids; fewer where there are fewer.

    The draws of one round are nested: those for a smaller count are among those for a larger one.
    """
    sizes = kept["sizes"].numpy()
    weights = np.zeros(len(sizes))
    here = ids(fed.available)
    weights[here] = np.maximum(sizes[here], 0)
    return tuple(smallest_clocks(fed.rng("select"), weights, count).tolist())


def smallest_clocks(stream: np.random.Generator, weights: Ids, count: int) -> Ids:
    """`count` places, drawn one after another without replacement in proportion to their weights, sorted.

    Each place has an exponential clock with its weight as rate; the first `count` to ring are such a sample, in time
    linear in the number of places (Efraimidis and Spirakis 2006).
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        rings = stream.standard_exponential(len(weights)) / weights
    count = min(count, int(np.count_nonzero(weights)))
    return np.sort(np.argpartition(rings, count - 1)[:count]) if count else np.zeros(0, dtype=np.int64)
