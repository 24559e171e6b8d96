"""Randomised pairwise gossip (Boyd, Ghosh, Prabhakar and Shah 2006), with local training: a plug-in.

In each round the parties are matched at random. The two parties of a pair send each other their models, take the mean,
and add their own training. The op is that of D-PSGD: the mixing weights of the round are in the payload.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hansa import DecentralizedSGD, Federation, State, register
from hansa.algorithms.decentralized_sgd import Gossip
from hansa.algorithms.peers import layout
from hansa.core.mixing import Mixing


@register("plugin-gossip")
@dataclass(frozen=True)
class PairwiseGossip(DecentralizedSGD):
    """Train, then average with a partner that is drawn in each round."""

    async def round(self, fed: Federation, state: State) -> State:
        order = [int(party) for party in fed.rng("pairs").permutation(len(fed.parties))]
        pairs = list(zip(order[0::2], order[1::2], strict=False))  # with an odd number, one party has no partner
        rows = torch.eye(len(order), dtype=torch.float64)
        for pair in pairs:
            for party in pair:
                rows[party, list(pair)] = 0.5
        await fed.exchange(Gossip(self.local), layout(state.params), mixing=Mixing.of(rows))
        return state
