"""The passive party of trees over columns: it sums ciphertexts by its own bins, and splits nodes by its own columns."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hansa.core.op import Memory, Party
from hansa.core.route_op import Message
from hansa.core.session_op import Receive, Send
from hansa.plumbing.errors import DataError, PartyError
from hansa.secure.additive import AdditivePublicKey
from hansa.secure.byte_tensors import as_tensor
from hansa.secure.primes import Stream
from hansa.vertical.encrypted_bins import BinSums, Layout
from hansa.vertical.psi_ops import ROWS
from hansa.vertical.split_ops import Roles, common_rows
from hansa.vertical.tree_bins import RECORDS, coded_rows, features, own_bins
from hansa.vertical.tree_messages import BLOCK, Steps, TreeSession, sent_parcels

Array = np.ndarray[Any, Any]


class Passive:
    """One party's part in a session."""

    def __init__(self, op: TreeSession, party: Party, roles: Roles, memory: Memory) -> None:
        self.op, self.roles, self.holder, self.least = op, roles, roles.holder, party.min_rows
        self.bins = own_bins(memory, roles)
        rows = common_rows(memory, ROWS, roles)
        self.codes = coded_rows(features(party, roles, "train"), self.bins, rows)
        self.layout = Layout.of(self.codes, self.bins)
        self.records = memory.get(RECORDS, torch.zeros((0, 4), dtype=torch.int64))
        self.draws = Stream(party.private("hidden sums"))
        self.trees, self.fields = op.trees(roles), op.fields(roles)

    def talk(self) -> Generator[Send | Receive, Message | None, Memory]:
        """The messages of the session; returns the new memory."""
        layout = {name: torch.from_numpy(getattr(self.layout, name)) for name in ("widths", "summed", "omitted")}
        yield Send(self.holder, layout)
        key = self._key((yield Receive(self.holder)))
        sums, texts = BinSums(key, self.codes, self.layout), list[list[int]]()
        nodes, count = self._nodes((yield Receive(self.holder)), self.trees)
        found = sums.empty(count)
        for tree in range(self.trees):
            texts.append([])
            for start in range(0, self.roles.rows, BLOCK):
                block = self._texts(key, (yield Receive(self.holder)))
                sums.add(found, block, start, nodes[tree, start : start + BLOCK])
                texts[tree] += block
        yield from self._sent(key, sums, found)
        for level in range(1, self.op.max_depth + 1):
            message = yield Receive(self.holder)
            assert message is not None
            yield from sent_parcels(self.holder, self._left(message, level), key.size)
            if bool(message["last"]):
                break
            nodes, count = self._nodes((yield Receive(self.holder)), self.op.splits(self.roles, level))
            found = sums.empty(count)
            for tree in range(self.trees):
                sums.add(found, texts[tree], 0, nodes[tree])
            yield from self._sent(key, sums, found)
        return {RECORDS: self.records}

    def _key(self, message: Message | None) -> AdditivePublicKey:
        assert message is not None
        try:
            key = AdditivePublicKey.of_tensor(message["key"].cpu())
            key.check(self.op.key_bits)
        except DataError as reason:
            raise PartyError(f"party {self.holder} sent an invalid key: {reason}") from None
        return key

    def _texts(self, key: AdditivePublicKey, message: Message | None) -> list[int]:
        assert message is not None
        try:
            return key.ciphertexts(message["statistics"])
        except DataError as reason:
            raise PartyError(f"party {self.holder} sent invalid statistics: {reason}") from None

    def _nodes(self, message: Message | None, most: int) -> tuple[Array, int]:
        """The node of each row in each tree, -1 for none, and the number of nodes; none may have too few rows."""
        assert message is not None
        nodes, count = message["nodes"].cpu().numpy(), int(message["count"])
        if not 1 <= count <= most or nodes.min(initial=0) < -1 or nodes.max(initial=-1) >= count:
            raise PartyError(f"party {self.holder} asks for {count} nodes, and at most {most} can be summed here")
        self._large_enough(people_of_nodes(nodes, count))
        return nodes, count

    def _large_enough(self, sizes: Array) -> None:
        if len(sizes) and int(sizes.min()) < self.least:
            raise PartyError(
                f"party {self.holder} asks about a node of {int(sizes.min())} rows, and the policy here requires "
                f"{self.least}; raise algorithm.min_samples"
            )

    def _sent(self, key: AdditivePublicKey, sums: BinSums, found: list[int]) -> Steps:
        texts = sums.packed(found, self.fields, self.draws)
        yield from sent_parcels(self.holder, key.rows(texts), key.size)

    def _left(self, message: Message, level: int) -> Tensor:
        """Record the splits of this party's columns; which rows of their nodes go left, as bits in rows of bytes."""
        nodes, records = message["nodes"].cpu().numpy(), message["records"].cpu().long().numpy()
        count, widths = int(nodes.max(initial=-1)) + 1, self.bins.widths
        own = records[:count]
        valid = count <= len(records) and nodes.min(initial=0) >= -1 and bool((own[:, 0] >= 0).all())
        valid = valid and bool(((own[:, 1] >= 0) & (own[:, 1] < len(widths))).all())
        if valid:
            valid = bool(((own[:, 2] >= 0) & (own[:, 2] < widths[own[:, 1]] - 1) & np.isin(own[:, 3], (0, 1))).all())
        known = np.concatenate([self.records[:, 0].numpy(), own[:, 0]])
        if not valid or len(np.unique(known)) < len(known):
            raise PartyError(f"party {self.holder} asks for splits at level {level} that this party's bins do not have")
        left = np.zeros(nodes.shape, dtype=bool)
        self._large_enough(people_of_nodes(nodes, count))
        for tree, row in enumerate(nodes):
            at = np.flatnonzero(row >= 0)
            split = own[row[at]]
            left[tree, at] = goes_left(self.codes[split[:, 1], at], widths[split[:, 1]], split[:, 2], split[:, 3])
        self.records = torch.cat([self.records, torch.from_numpy(own.copy())])
        size = self.op.key_bits // 8
        bits = np.packbits(left.reshape(-1))
        data = as_tensor(np.pad(bits, (0, -len(bits) % size)).tobytes())
        return data.view(-1, size)


def people_of_nodes(nodes: Array, count: int) -> Array:
    """The number of people of each node, from the node of each row in each tree; nobody counts twice."""
    trees, rows = np.nonzero(nodes >= 0)
    people = np.unique(nodes[trees, rows].astype(np.int64) * nodes.shape[1] + rows)
    return np.bincount(people // max(1, nodes.shape[1]), minlength=count)


def goes_left(codes: Array, widths: Array, bins: Array, missing: Array) -> Array:
    """Whether values go left: numbers up to the bin of the split, missing values if the split says so."""
    return np.where(codes == widths - 1, missing == 1, codes <= bins)
