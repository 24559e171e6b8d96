"""Sparse mixing matrices: how much of each neighbour's message a party takes. Memory grows with the edges alone."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hansa.core.entries import FLOAT64, WHOLE, Nested, Shaped, stated
from hansa.core.op import Payload
from hansa.plumbing.errors import PartyError

MIXING = Nested(entries=stated(ids=Shaped(types=WHOLE, shape=("mixed",), least=0),
                              weights=Shaped(types=FLOAT64, shape=("mixed",), least=0, most=2)))  # fmt: skip
ROUNDING = 1e-9  # the sum of a party's weights may differ from 1 by this much


class Mixing(NamedTuple):
    """A square matrix W by rows: party i takes W[i, j] of party j's message.

    Row i has the entries `starts[i]` to `starts[i + 1]` of `ids` and `weights`: the parties j, ascending, among them i
    itself.
    """

    starts: Tensor
    ids: Tensor
    weights: Tensor

    @classmethod
    def of(cls, matrix: Tensor) -> Mixing:
        """The sparse form of a matrix [K, K]."""
        present = (matrix != 0) | torch.eye(len(matrix), dtype=torch.bool)
        starts = torch.cat([torch.zeros(1, dtype=torch.int64), present.sum(1).cumsum(0)])
        return cls(starts, present.nonzero()[:, 1], matrix[present].to(torch.float64))

    @property
    def parties(self) -> int:
        return len(self.starts) - 1

    @property
    def rows(self) -> Tensor:
        """The row of each entry."""
        return torch.repeat_interleave(torch.arange(self.parties), self.starts.diff())

    @property
    def own(self) -> Tensor:
        """The share of its own message that each party keeps."""
        return self.weights[self.ids == self.rows]

    def dense(self) -> Tensor:
        """The matrix [K, K]; for few parties."""
        out = torch.zeros(self.parties, self.parties, dtype=torch.float64)
        out[self.rows, self.ids] = self.weights
        return out

    def apply(self, models: Tensor) -> Tensor:
        """W times models [K, d], in their type. Each row is added in float64, in the order of ids."""
        out = torch.zeros(models.shape, dtype=torch.float64)
        counts = self.starts.diff()
        for k in range(int(counts.max()) if len(counts) else 0):
            (rows,) = (counts > k).nonzero(as_tuple=True)
            at = self.starts[rows] + k
            added = models[self.ids[at]].to(torch.float64).mul_(self.weights[at, None])
            out = out.add_(added) if len(rows) == len(out) else out.index_add_(0, rows, added)
        return out.to(models.dtype)

    def routes(self) -> list[tuple[int, int]]:
        """The (sender, receiver) pairs: whom each party receives from."""
        rows = self.rows
        apart = (rows != self.ids) & (self.weights != 0)
        return list(zip(self.ids[apart].tolist(), rows[apart].tolist(), strict=True))


class MixingRows(Mapping[int, Payload]):
    """The additions to the parties' payloads: each party gets its own row of a mixing matrix, as `mixing`."""

    def __init__(self, mixing: Mixing) -> None:
        self.mixing = mixing
        self._starts: list[int] = mixing.starts.tolist()

    def __getitem__(self, party: int) -> dict[str, Any]:
        if not 0 <= party < len(self):
            raise KeyError(party)
        at, end = self._starts[party], self._starts[party + 1]
        return {"mixing": {"ids": self.mixing.ids[at:end].clone(), "weights": self.mixing.weights[at:end].clone()}}

    def __iter__(self) -> Iterator[int]:
        return iter(range(len(self)))

    def __len__(self) -> int:
        return len(self._starts) - 1


def mixing_shares(payload: Payload, own: int, senders: Iterable[int]) -> dict[int, float]:
    """The weight of each message that a party mixes, its own included, in the order of ids.

    `payload["mixing"]` is the party's row. The weights of missing neighbours are added to its own, so the mixing stays
    symmetric and doubly stochastic. A PartyError if the row is not one of a mixing matrix, or lacks a party.
    """
    row = payload.get("mixing")
    ids, weights = (row.get("ids"), row.get("weights")) if isinstance(row, Mapping) else (None, None)
    if not isinstance(ids, Tensor) or not isinstance(weights, Tensor) or ids.dim() != 1 or ids.shape != weights.shape:
        raise PartyError("the payload has no mixing weights: expected ids and weights of the same length")
    if ids.dtype != torch.int64 or weights.dtype != torch.float64:
        raise PartyError("the mixing weights it was sent are not whole numbers (ids) and float64 (weights)")
    shares = dict(zip(ids.tolist(), weights.tolist(), strict=True))
    if len(shares) < len(ids) or not all(weight >= 0 for weight in shares.values()):
        raise PartyError("the mixing weights it was sent name a party twice, or are negative")
    if not abs(sum(shares.values()) - 1) <= ROUNDING:
        raise PartyError(f"the mixing weights it was sent have the sum {sum(shares.values())}, expected 1")
    here = sorted({own, *senders})
    if not shares.keys() >= set(here):
        raise PartyError(f"the mixing weights it was sent do not cover the parties {here}")
    lost = sum(weight for party, weight in sorted(shares.items()) if party not in here)
    return {party: shares[party] + (lost if party == own else 0.0) for party in here}
