"""The active party of trees over columns: it has the labels, the key and the trees, and grows them from opened sums."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from hansa.classical.trees.bins import Bins
from hansa.classical.trees.growth import Growth, Slots
from hansa.classical.trees.histograms import TreeOp, histograms
from hansa.classical.trees.splits import SplitRule
from hansa.classical.trees.table import TreeArrays, TreeTable
from hansa.core.op import Memory, Party
from hansa.core.route_op import Message
from hansa.core.session_op import Receive, Send
from hansa.plumbing.errors import DataError, PartyError
from hansa.secure.additive import AdditivePrivateKey
from hansa.secure.primes import Stream
from hansa.vertical.encrypted_bins import Layout, opened
from hansa.vertical.psi_ops import ROWS
from hansa.vertical.split_ops import Roles, common_rows
from hansa.vertical.tree_bins import PREFIX, coded_rows, features, own_bins
from hansa.vertical.tree_messages import BLOCK, Steps, TreeSession, received_parcels
from hansa.vertical.tree_passive import goes_left

Array = np.ndarray[Any, Any]
KEY, WIDTHS, OWNERS = (f"{PREFIX}{name}" for name in ("key", "widths", "owners"))
FIRST_KEY = "key of trees"


@dataclass(frozen=True, eq=False)
class Grown:
    """What is grown: the statistics [statistics, rows] of each tree, which rows count, and how splits are judged.

    `outputs` are those of the trees. `allowed` draws the features that a node may use, from the number of features.
    """

    op: TreeOp
    statistics: Sequence[Array]
    used: Array
    rule: SplitRule
    value: Callable[[Array], Array]
    outputs: Sequence[int]
    allowed: Callable[[int], Any] = field(default=lambda features: None)


@dataclass(frozen=True)
class _Wait:
    """Lets a coroutine wait for steps of a session."""

    steps: Steps

    def __await__(self) -> Steps:
        return self.steps


class Active:
    """The active party's part in a session. `nodes` [trees, rows] is the present node of each row."""

    def __init__(self, op: TreeSession, party: Party, roles: Roles, sums: Mapping[int, int], memory: Memory,
                 grown: Grown, before: int) -> None:  # fmt: skip
        self.op, self.party, self.roles, self.sums, self.grown = op, party, roles, sums, grown
        self.before = before  # nodes of earlier trees: the records of passive parties count through all trees
        self.own_bins = own_bins(memory, roles)
        self.codes = coded_rows(features(party, roles, "train"), self.own_bins, common_rows(memory, ROWS, roles))
        self.fields, self.level, self.table = op.fields(roles), 0, TreeTable(grown.rule.outputs)
        kept = memory.get(KEY)
        draws = Stream(party.private(FIRST_KEY))
        self.key = (
            AdditivePrivateKey.generate(op.key_bits, draws) if kept is None else AdditivePrivateKey.of_tensor(kept)
        )
        self.layouts: dict[int, Layout] = {}
        self.known: dict[int, Array] = {}  # the sums of a node

    def talk(self) -> Generator[Send | Receive, Message | None, Memory]:
        """The messages of the session; returns the party's new memory. The trees are in `table`."""
        for party in self.sums:
            self.layouts[party] = self._layout(party, (yield Receive(party)))
        parts = {party: self.own_bins if party == self.party.id else self.layouts[party].bins()
                 for party in self.roles.shapes}  # fmt: skip
        self.starts = dict(zip(parts, np.cumsum([0, *(len(bins.widths) for bins in parts.values())]), strict=False))
        self.owners = np.concatenate([np.full(len(bins.widths), party) for party, bins in parts.items()])
        points = [bins.of_feature(f).tolist() for bins in parts.values() for f in range(len(bins.widths))]
        self.bins = Bins.of_features(points, ())
        for party in self.sums:
            yield Send(party, {"key": self.key.public.tensor()})
        everything, grown = np.arange(len(self.owners)), self.grown
        growth = Growth(self._ask, self.bins, everything, grown.rule, grown.value, self.op.max_depth,
                        allowed=grown.allowed(len(everything)))  # fmt: skip
        yield from growth.grow(self.table, grown.outputs).__await__()
        yield from self._settle(self.table.arrays(), True)
        return {KEY: self.key.tensor(), WIDTHS: torch.from_numpy(self.bins.widths.astype(np.int64)),
                OWNERS: torch.from_numpy(self.owners.astype(np.int64))}  # fmt: skip

    def _layout(self, party: int, message: Message | None) -> Layout:
        assert message is not None
        layout = Layout(*(message[name].cpu().numpy() for name in ("widths", "summed", "omitted")))
        fault = layout.fault(self.op.most_bins)
        if fault is not None:
            raise PartyError(f"party {party} sent an invalid layout of its bins: {fault}")
        return layout

    async def _ask(self, trees: TreeArrays, slots: Slots) -> Array:
        found: Array = await _Wait(self._summed(trees, slots))
        return found

    def _summed(self, trees: TreeArrays, slots: Slots) -> Steps:
        """The sums [nodes, statistics, bins] of nodes over the columns of all parties."""
        if self.level == 0:
            self.nodes = np.repeat(trees.roots[:, None], self.roles.rows, axis=1)
        else:
            yield from self._settle(trees, False)
        self.level += 1
        place = np.full((len(trees.feature),), -1, dtype=np.int32)
        place[[node for _, node in slots]] = np.arange(len(slots))
        at = np.where(self.grown.used, place[self.nodes], -1).astype(np.int32)
        for party in self.sums:
            count = torch.tensor(len(slots), dtype=torch.int32)
            yield Send(party, {"nodes": torch.from_numpy(at), "count": count})
        if self.level == 1:
            yield from self._encrypted()
        own = self._own(at, len(slots))
        width = int(self.own_bins.widths[0])
        parts = []
        for party in self.roles.shapes:
            if party == self.party.id:
                parts.append(own)
            else:
                parts.append((yield from self._received(party, own[:, :, :width].sum(2))))
        sums = np.concatenate(parts, axis=2)
        self._remember(trees, slots, sums)
        return sums

    def _own(self, at: Array, count: int) -> Array:
        """The sums over the active party's own columns."""
        columns = np.arange(len(self.own_bins.widths))
        return sum(histograms(self.codes, columns, self.own_bins, row, count, statistics)
                   for row, statistics in zip(at, self.grown.statistics, strict=True))  # type: ignore[return-value]  # fmt: skip

    def _encrypted(self) -> Steps:
        """Send the encrypted statistics of all rows."""
        draws, public = Stream(self.party.private("statistics of trees")), self.key.public
        for statistics in self.grown.statistics:
            numbers = self.fields.encode(statistics)
            for start in range(0, len(numbers), BLOCK):
                rows = public.rows(self.key.encrypt(numbers[start : start + BLOCK], draws))
                for party in self.sums:
                    yield Send(party, {"statistics": rows})

    def _received(self, party: int, totals: Array) -> Steps:
        """Receive and open the sums of a passive party; a PartyError if they are impossible."""
        layout, count = self.layouts[party], len(totals) * self.sums[party]
        texts = -(-count // self.fields.slots(self.key.public.capacity))
        rows = yield from received_parcels(party, texts, self.key.public.size)
        try:
            found = opened(self.key, self.key.public.ciphertexts(rows), self.fields, count)
        except DataError as reason:
            raise PartyError(f"party {party} sent sums that cannot be used: {reason}") from None
        sums = layout.whole(found, totals)
        asked = {"bins": layout.bins().payload(), "features": torch.arange(len(layout.widths))}
        why = self.grown.op.contradiction(sums, asked, self.roles.rows)
        if why is not None:
            raise PartyError(f"the sums of party {party} are impossible: {why}")
        return sums

    def _remember(self, trees: TreeArrays, slots: Slots, sums: Array) -> None:
        """Keep the sums of nodes, and of their siblings: those of the parent minus their own."""
        parents, known = self._parents(trees), dict[int, Array]()
        for (_, node), one in zip(slots, sums, strict=True):
            known[node] = one
            if node in parents:
                parent, sibling = parents[node]
                known.setdefault(sibling, self.known[parent] - one)
        self.known = known

    @staticmethod
    def _parents(trees: TreeArrays) -> dict[int, tuple[int, int]]:
        """The parent and the sibling of each node that has them."""
        inner = np.flatnonzero(trees.feature >= 0).tolist()
        pairs = [(parent, int(trees.child[parent])) for parent in inner]
        return {left + side: (parent, left + 1 - side) for parent, left in pairs for side in (0, 1)}

    def _settle(self, trees: TreeArrays, last: bool) -> Steps:
        """Move the rows of nodes that were split to the children, with the parties whose columns split them."""
        features = np.where(self.grown.used, trees.feature[self.nodes], -1)
        split = features >= 0
        owner = np.where(split, self.owners[features], -1)
        left = np.zeros(split.shape, dtype=bool)
        mine = [np.flatnonzero(row == self.party.id) for row in owner]
        for tree, at in enumerate(mine):
            node = self.nodes[tree, at]
            column = features[tree, at] - self.starts[self.party.id]
            widths = self.own_bins.widths[column]
            left[tree, at] = goes_left(self.codes[column, at], widths, trees.bin[node], trees.missing[node])
        wanted: dict[int, Array] = {}
        for party in self.sums:
            wanted[party] = np.unique(self.nodes[owner == party])
            place = np.full(len(trees.feature), -1, dtype=np.int32)
            place[wanted[party]] = np.arange(len(wanted[party]))
            records = np.full((self.op.splits(self.roles, max(1, self.level)), 4), -1, dtype=np.int32)
            for row, node in zip(records, wanted[party].tolist(), strict=False):
                row[:] = (self.before + node, trees.feature[node] - self.starts[party], trees.bin[node],
                          trees.missing[node])  # fmt: skip
            nodes = np.where(owner == party, place[self.nodes], -1).astype(np.int32)
            yield Send(party, {"last": torch.tensor(last), "nodes": torch.from_numpy(nodes),
                               "records": torch.from_numpy(records)})  # fmt: skip
        for party in self.sums:
            size = self.key.public.size
            rows = yield from received_parcels(party, -(-left.size // (8 * size)), size)
            bits = np.unpackbits(rows.numpy().reshape(-1), count=left.size).reshape(left.shape).astype(bool)
            left |= bits & (owner == party)
            self._verify(trees, party, wanted[party], left)
        child = trees.child[self.nodes]
        self.nodes = np.where(split, np.where(left, child, child + 1), self.nodes)

    def _verify(self, trees: TreeArrays, party: int, nodes: Array, left: Array) -> None:
        """Refuse instance sets that are not those whose sums the party sent."""
        for node in nodes.tolist():
            start = int(self.bins.offsets[trees.feature[node]])
            end = int(self.bins.offsets[trees.feature[node] + 1])
            sums = self.known[node][:, start:end]
            promised = sums[:, : trees.bin[node] + 1].sum(1) + trees.missing[node] * sums[:, -1]
            tree = int(np.flatnonzero((self.nodes == node).any(1))[0])
            rows = (self.nodes[tree] == node) & left[tree] & self.grown.used[tree]
            if not np.array_equal(self.grown.statistics[tree][:, rows].sum(1).astype(np.int64), promised):
                raise PartyError(
                    f"party {party} returned other samples for a split than those whose sums it sent; its columns or "
                    "its software changed in the middle, or it lies"
                )
