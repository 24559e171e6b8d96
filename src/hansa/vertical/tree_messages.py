"""Grow trees over the columns of several parties: the session of SecureBoost (Cheng et al. 2021).

The party with the labels is the active one. It encrypts the statistics of every sample once per tree. For each level
the passive parties return encrypted sums by node and bin of their own columns; the active party decrypts them, and
grows the trees with the code of boosting on joined columns (`classical.trees.growth`). A split of a passive party's
column is a record of that party: it keeps the feature and the bin, and tells which samples of the node go left.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Mapping, Sequence
from typing import Annotated, Any

import torch
from msgspec import Meta
from torch import Tensor

from hansa.classical.trees.histograms import TreeOp
from hansa.core.entries import Several, Sizes, stated
from hansa.core.fields import Owner
from hansa.core.op import Payload, Shape
from hansa.core.route_op import Message
from hansa.core.session_op import Receive, Send, SessionOp
from hansa.plumbing.errors import DataError, PartyError
from hansa.secure.additive import capacity_of
from hansa.vertical.encrypted_bins import Fields
from hansa.vertical.split_ops import PARTY, ROLES, Roles
from hansa.vertical.tree_bins import sums_of

BLOCK = 4096  # samples of a message with encrypted statistics
PARCEL = 256  # ciphertexts of a message with sums
MOST_DEPTH = 16
ColumnLevels = Annotated[int, Meta(ge=1, le=MOST_DEPTH, description="levels of splits"), Owner(0, 64)]
MOST_CELLS = 2**19  # trees of a round times rows: the numbers of a message


class TreeSession(SessionOp):
    """Base of the sessions that grow trees: their messages.

    Subclasses say how many trees grow at once, which statistics they need, and how splits are judged.
    """

    max_depth: int
    most_bins: int  # of a feature, that of missing values included
    key_bits: int

    entries = stated(**ROLES, sums=Several(of=PARTY, keys="party ids"))

    def check_ask(self, payload: Payload, sizes: Sizes) -> None:
        roles = Roles.of(payload)
        self.check_session(roles)
        sums_of(payload, roles)

    def trees(self, roles: Roles) -> int:
        """The number of trees that grow at once."""
        raise TypeError(f"the op {self.name!r} does not define trees()")

    def sums(self, rows: int) -> TreeOp:
        """The op of trees on joined columns that has the same statistics."""
        raise TypeError(f"the op {self.name!r} does not define sums()")

    def fields(self, roles: Roles) -> Fields:
        """The fields of a sample's number."""
        op = self.sums(roles.rows)
        return Fields(op.outputs, op.constant, *op.highest, roles.rows)

    def splits(self, roles: Roles, level: int) -> int:
        """The most nodes that are split at a level, from 1; as many children are summed there."""
        return self.trees(roles) * max(1, min(1 << (level - 1), roles.rows // 2))

    def parcels(self, count: int) -> int:
        """The messages of `count` rows of bytes."""
        return -(-count // PARCEL)

    def check_session(self, roles: Roles) -> None:
        try:
            self.fields(roles).slots(capacity_of(self.key_bits))
        except DataError as reason:
            raise PartyError(f"{self.name}: {reason}") from None
        if self.trees(roles) * roles.rows > MOST_CELLS:
            raise PartyError(f"{self.name}: at most {MOST_CELLS} trees times rows in a round")

    def expects_messages(self, payload: Payload, sender: int, receiver: int) -> Sequence[Mapping[str, Shape]]:
        roles = Roles.of(payload)
        self.check_session(roles)
        counts, size, trees = sums_of(payload, roles), self.key_bits // 8, self.trees(roles)
        cells = ((trees, roles.rows), torch.int32)
        if sender == roles.holder and receiver in counts:
            blocks = [min(BLOCK, roles.rows - start) for start in range(0, roles.rows, BLOCK)]
            asked: Mapping[str, Shape] = {"nodes": cells, "count": ((), torch.int32)}
            out: list[Mapping[str, Shape]] = [{"key": ((size,), torch.uint8)}, asked]
            out += [{"statistics": ((rows, size), torch.uint8)} for rows in blocks] * trees
            for level in range(1, self.max_depth + 1):
                records = ((self.splits(roles, level), 4), torch.int32)
                out += [{"last": ((), torch.bool), "nodes": cells, "records": records}, asked]
            return out[:-1]
        if receiver == roles.holder and sender in counts:
            features = math.prod(roles.shapes[sender])
            layout: Mapping[str, Shape] = {
                "widths": ((features,), torch.int32), "summed": ((counts[sender],), torch.int32),
                "omitted": ((features,), torch.int32),
            }  # fmt: skip
            slots = self.fields(roles).slots(capacity_of(self.key_bits))
            nodes = [trees, *(self.splits(roles, level) for level in range(1, self.max_depth))]
            texts = sum(self.parcels(-(-count * counts[sender] // slots)) for count in nodes)
            most = texts + self.max_depth * self.parcels(-(-trees * roles.rows // (8 * size)))
            return [layout] + [{"data": ((PARCEL, size), torch.uint8)}] * most
        return []

    def expects(self, payload: Payload) -> dict[str, Shape]:
        return {}

    def demands(self, n: int, payload: Payload) -> dict[str, int]:
        return {"steps": self.trees(Roles.of(payload)) * self.max_depth}


Steps = Generator[Send | Receive, Message | None, Any]


def sent_parcels(to: int, rows: Tensor, size: int) -> Steps:
    """Send rows of bytes in messages of equal size."""
    for start in range(0, len(rows), PARCEL):
        data = torch.zeros((PARCEL, size), dtype=torch.uint8)
        part = rows[start : start + PARCEL]
        data[: len(part)] = part
        yield Send(to, {"data": data})


def received_parcels(sender: int, count: int, size: int) -> Steps:
    """Receive `count` rows of bytes."""
    parts = [torch.zeros((0, size), dtype=torch.uint8)]
    for _ in range(0, count, PARCEL):
        message = yield Receive(sender)
        assert message is not None
        parts.append(message["data"].cpu())
    return torch.cat(parts)[:count]
