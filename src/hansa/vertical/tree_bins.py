"""Bins of a party's own columns, learned where they are; and what parties remember of trees over columns."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
import torch
from torch import Tensor

from hansa.classical.trees.bins import BinCount, Bins, rows_of
from hansa.classical.trees.coded import coded
from hansa.classical.trees.sketches import spread_cuts
from hansa.core.entries import Sizes, stated
from hansa.core.op import Memory, Op, Party, Payload, Reply, Shape
from hansa.core.quantities import CHECKED
from hansa.core.registry import register
from hansa.holdings.stored_rows import whole
from hansa.plumbing.errors import PartyError
from hansa.vertical.encrypted_bins import Layout
from hansa.vertical.psi_ops import ROWS
from hansa.vertical.split_ops import ROLES, Roles, common_rows

Array = np.ndarray[Any, Any]
PREFIX = "trees/"
RECORDS, HOLDER = f"{PREFIX}records", f"{PREFIX}holder"  # [splits, 4]: node, feature, bin, missing values go left


@register("tree-bins")
@dataclass(frozen=True)
class TreeBins(Op):
    """Cut a party's own columns into at most `bins` bins, over the common rows; the cuts stay at the party.

    The reply has one number: how many sums a node takes (`Layout`).
    """

    bins: Annotated[BinCount, CHECKED] = 32

    entries = stated(**ROLES)

    def check_ask(self, payload: Payload, sizes: Sizes) -> None:
        Roles.of(payload)

    def run(self, party: Party, payload: Payload, memory: Memory) -> tuple[Reply, Memory]:
        roles = Roles.of(payload)
        rows, x = common_rows(memory, ROWS, roles), features(party, roles, "train")
        own = rows_of(x)[rows.cpu().numpy()]
        points = [_cuts(column, self.bins) for column in own.T]
        bins = Bins.of_features(points, ())
        layout = Layout.of(bins.codes(own), bins)
        kept = {f"{PREFIX}{name}": tensor for name, tensor in bins.payload().items()}
        sums = 0 if party.id == roles.holder else len(layout.summed)
        new = {name: value for name, value in memory.items() if not name.startswith(PREFIX)}
        return Reply({"sums": torch.tensor(sums)}), {**new, **kept, HOLDER: torch.tensor(roles.holder)}

    def expects(self, payload: Payload) -> dict[str, Shape]:
        return {"sums": ((), torch.int64)}

    def impossible(self, reply: Reply, payload: Payload) -> str | None:
        most = max(math.prod(shape) for shape in Roles.of(payload).shapes.values()) * self.bins
        return None if 0 <= int(reply.tensors["sums"]) <= most else f"a node has at most {most} sums"

    def demands(self, n: int, payload: Payload) -> dict[str, int]:
        return {"steps": 1}


def _cuts(column: Array, bins: int) -> list[float]:
    known = column[np.isfinite(column)].astype(np.float64)  # infinite values come into the outermost bins
    return spread_cuts(*np.unique(known, return_counts=True), bins)


def features(party: Party, roles: Roles, purpose: Any, test: bool = False) -> Tensor:
    """A party's columns; a PartyError if they have another shape than announced."""
    x = whole(party.data.test_features(purpose) if test else party.data.features(purpose))
    if tuple(x.shape[1:]) != roles.shapes.get(party.id):
        raise PartyError(f"its samples have the shape {tuple(x.shape[1:])}, and the ask names "
                         f"{roles.shapes.get(party.id)}")  # fmt: skip
    return x


def own_bins(memory: Memory, roles: Roles) -> Bins:
    """The bins that a party remembers; a PartyError if it has none, or learned them for another label holder."""
    names = ("points", "starts", "categorical")
    if any(f"{PREFIX}{name}" not in memory for name in names) or int(memory.get(HOLDER, -1)) != roles.holder:
        raise PartyError("it has no bins for these trees, or another party had the labels")
    return Bins.of({name: memory[f"{PREFIX}{name}"] for name in names})


def coded_rows(x: Tensor, bins: Bins, rows: Tensor) -> Array:
    """The bin numbers [features, rows] of some rows."""
    return np.ascontiguousarray(coded(x, bins).codes[:, rows.cpu().numpy()])


def sums_of(payload: Payload, roles: Roles) -> dict[int, int]:
    """The number of sums that each passive party has for a node; a PartyError if the ask is malformed."""
    tree = payload.get("sums")
    pairs = tree.items() if isinstance(tree, Mapping) else ()
    found = {int(party): count for party, count in pairs if str(party).isdecimal()}
    passive = [party for party in roles.shapes if party != roles.holder]
    if sorted(found) != passive or not all(type(count) is int and 0 <= count < 2**31 for count in found.values()):
        raise PartyError("malformed ask: 'sums' must have one whole number for each party without labels")
    return found
