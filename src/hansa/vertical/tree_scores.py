"""Walk samples through trees over columns: to measure the trees on test samples, or to score single people.

The active party has the trees. At a split of its own column it goes on alone; at a record of a passive party it sends
the samples that stand there, and learns which go left. A passive party learns which samples reach its splits, the
active party learns nothing about splits that a sample does not reach.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from hansa.classical.trees.ensemble import scores_of
from hansa.classical.trees.forest_ops import MOST_TREES
from hansa.classical.trees.table import TreeArrays
from hansa.core.entries import Sizes, stated
from hansa.core.op import Memory, Party, Payload, Reply, Shape
from hansa.core.predictor import METRICS
from hansa.core.quantities import Size
from hansa.core.registry import register
from hansa.core.route_op import Message
from hansa.core.session_op import Receive, Send, SessionOp, Talk
from hansa.plumbing.errors import PartyError
from hansa.vertical.psi_ops import TEST_ROWS
from hansa.vertical.split_ops import ROLES, Roles, common_rows
from hansa.vertical.split_scores import HELD, PEOPLE, SCORED, SCORES, UNKNOWN, people_here
from hansa.vertical.tree_active import OWNERS
from hansa.vertical.tree_bins import RECORDS, coded_rows, features, own_bins
from hansa.vertical.tree_messages import MOST_CELLS, ColumnLevels
from hansa.vertical.tree_ops import BASE, CENTRE, loss_of, stored_trees
from hansa.vertical.tree_passive import goes_left

Array = np.ndarray[Any, Any]
CELLS = 2**16  # pairs of a tree and a sample in a message
Steps = Generator[Send | Receive, Message | None, Any]


class TreeWalk(SessionOp):
    """Base of the ops that walk samples through the trees; `forest` says whether they are a forest."""

    classes: int
    forest: bool
    max_depth: int

    entries = stated(**ROLES)

    def check_ask(self, payload: Payload, sizes: Sizes) -> None:
        Roles.of(payload)

    def expects_messages(self, payload: Payload, sender: int, receiver: int) -> Sequence[Mapping[str, Shape]]:
        roles = Roles.of(payload)
        if roles.rows > MOST_CELLS:
            raise PartyError(f"{self.name}: at most {MOST_CELLS} samples")
        cells = cells_of(roles)
        steps = -(-roles.rows * MOST_TREES // cells) * self.max_depth
        if sender == roles.holder and receiver in roles.shapes:
            pairs = ((cells,), torch.int32)
            return [{"last": ((), torch.bool), "nodes": pairs, "rows": pairs}] * (steps + 1)
        if receiver == roles.holder and sender in roles.shapes:
            return [{"left": ((-(-cells // 8),), torch.uint8)}] * steps
        return []

    def expects(self, payload: Payload) -> dict[str, Shape]:
        return {}

    def demands(self, n: int, payload: Payload) -> dict[str, int]:
        return {"steps": self.max_depth}

    def walked(self, party: Party, roles: Roles, memory: Memory, codes: Array) -> Steps:
        """The party's part in the walk; returns the scores at the active party, None elsewhere."""
        if party.id != roles.holder:
            yield from _answers(roles, memory, codes)
            return None
        if BASE not in memory:
            raise PartyError("it has no trees yet")
        base = memory[BASE].cpu().numpy()
        walk = _Walk(party.id, roles, stored_trees(memory, len(base)), memory, codes)
        leaves = yield from walk.leaves()
        margins = np.tile(base, (roles.rows, 1))
        for tree, output in enumerate(walk.trees.outputs.tolist()):
            values = walk.trees.value[leaves[tree]]
            if output < 0:
                margins += values
            else:
                margins[:, output] += values[:, 0]
        loss = "forest" if self.forest else loss_of(self.classes)
        centre = float(memory[CENTRE]) if CENTRE in memory else 0.0
        return torch.from_numpy(scores_of(margins, loss, self.classes, len(leaves), centre))


def cells_of(roles: Roles) -> int:
    """The pairs of a tree and a sample in a message."""
    return max(1, min(CELLS, 64 * roles.rows))


def _answers(roles: Roles, memory: Memory, codes: Array) -> Steps:
    """A passive party's answers: which samples go left at its own splits."""
    bins, records = own_bins(memory, roles), memory.get(RECORDS, torch.zeros((0, 4), dtype=torch.int64)).cpu().numpy()
    place = {int(node): row for row, node in enumerate(records[:, 0])}
    while True:
        message = yield Receive(roles.holder)
        assert message is not None
        if bool(message["last"]):
            return
        nodes, rows = message["nodes"].cpu().numpy(), message["rows"].cpu().numpy()
        at = np.flatnonzero(nodes >= 0)
        known = set(nodes[at].tolist()) <= set(place)
        if not known or (len(at) and not 0 <= int(rows[at].min()) <= int(rows[at].max()) < roles.rows):
            raise PartyError(f"party {roles.holder} asks about splits or samples that are not here")
        split, left = records[[place[node] for node in nodes[at].tolist()]], np.zeros(len(nodes), dtype=bool)
        columns = split[:, 1]
        left[at] = goes_left(codes[columns, rows[at]], bins.widths[columns], split[:, 2], split[:, 3])
        yield Send(roles.holder, {"left": torch.from_numpy(np.packbits(left))})


class _Walk:
    """The walk of all samples through all trees, at the active party."""

    def __init__(self, here: int, roles: Roles, trees: TreeArrays, memory: Memory, codes: Array) -> None:
        if not 1 <= len(trees.roots) <= MOST_TREES:
            raise PartyError(f"it has {len(trees.roots)} trees, and {MOST_TREES} are the most that can be asked")
        self.here, self.trees, self.codes, self.cells, self.count = here, trees, codes, cells_of(roles), roles.rows
        self.others = [other for other in roles.shapes if other != here]
        self.owners = memory[OWNERS].cpu().numpy()
        self.first = int(np.flatnonzero(self.owners == here)[0])
        self.widths = own_bins(memory, roles).widths

    def leaves(self) -> Steps:
        """The leaves [trees, samples]."""
        found = np.repeat(self.trees.roots.astype(np.int64), self.count)
        for start in range(0, len(found), self.cells):
            at = np.arange(start, min(start + self.cells, len(found)))
            found[at] = yield from self._steps(found[at], at % self.count)
        empty = torch.full((self.cells,), -1, dtype=torch.int32)
        for other in self.others:
            yield Send(other, {"last": torch.tensor(True), "nodes": empty, "rows": empty})
        return found.reshape(-1, self.count)

    def _steps(self, nodes: Array, rows: Array) -> Steps:
        """Walk some pairs of a tree and a sample to their leaves."""
        while True:
            nodes, owner = self._alone(nodes, rows)
            if (owner < 0).all():
                return nodes
            left = np.zeros(len(nodes), dtype=bool)
            for other in self.others:
                pairs = np.full((2, self.cells), -1, dtype=np.int32)
                pairs[:, : len(nodes)] = np.where(owner == other, (nodes, rows), -1)
                yield Send(other, {"last": torch.tensor(False), "nodes": torch.from_numpy(pairs[0]),
                                   "rows": torch.from_numpy(pairs[1])})  # fmt: skip
            for other in self.others:
                message = yield Receive(other)
                assert message is not None
                bits = np.unpackbits(message["left"].cpu().numpy(), count=len(nodes)).astype(bool)
                left |= bits & (owner == other)
            nodes = self._moved(nodes, owner >= 0, left)

    def _alone(self, nodes: Array, rows: Array) -> tuple[Array, Array]:
        """Pass the active party's own splits; the nodes after them, and who splits these, -1 at a leaf."""
        while True:
            feature = self.trees.feature[nodes]
            owner = np.where(feature >= 0, self.owners[feature], -1)
            at = np.flatnonzero(owner == self.here)
            if not len(at):
                return nodes, owner
            node, column, left = nodes[at], feature[at] - self.first, np.zeros(len(nodes), dtype=bool)
            left[at] = goes_left(self.codes[column, rows[at]], self.widths[column], self.trees.bin[node],
                                 self.trees.missing[node])  # fmt: skip
            nodes = self._moved(nodes, owner == self.here, left)

    def _moved(self, nodes: Array, going: Array, left: Array) -> Array:
        child = self.trees.child[nodes]
        return np.where(going, np.where(left, child, child + 1), nodes)


@register("tree-test")
@dataclass(frozen=True)
class TreeTest(TreeWalk):
    """Measure trees over columns on the common test rows; the label holder computes the metrics."""

    classes: Size = 2
    forest: bool = False
    max_depth: ColumnLevels = 6
    measures: ClassVar[frozenset[str] | None] = METRICS
    evaluates: ClassVar[bool] = True
    entries = TreeWalk.entries

    def talk(self, party: Party, payload: Payload, memory: Memory) -> Talk:
        roles = Roles.of(payload)
        rows = common_rows(memory, TEST_ROWS, roles)
        if 0 < len(rows) < party.data.least:  # whoever brings the other people chooses the common ones
            raise PartyError(
                f"its policy requires at least {party.data.least} test samples, and fewer are common to all parties; "
                "see evaluate.min_samples in party.toml"
            )
        codes = coded_rows(features(party, roles, "evaluate", test=True), own_bins(memory, roles), rows)
        scores = yield from self.walked(party, roles, memory, codes)
        if scores is None:
            return Reply({}), memory
        y = party.data.test_rows("evaluate")[1][rows]
        outputs = scores.to(party.objective.device)
        return Reply({}, metrics=party.objective.metrics(outputs, y)), memory


@register("tree-scores")
@dataclass(frozen=True)
class TreeScores(TreeWalk):
    """Score people by trees over columns. The label holder sends the scores to the aggregator.

    `job` is the finished job whose trees the parties use; None for those of this run.
    """

    classes: Size = 2
    forest: bool = False
    max_depth: ColumnLevels = 6
    job: str | None = None
    scores_people: ClassVar[bool] = True
    entries = stated(**ROLES, **PEOPLE)

    @property
    def continues(self) -> str | None:
        return self.job

    def demands(self, n: int, payload: Payload) -> dict[str, int]:
        return {**super().demands(n, payload), "people": Roles.of(payload).rows}

    def expects_messages(self, payload: Payload, sender: int, receiver: int) -> Sequence[Mapping[str, Shape]]:
        steps = super().expects_messages(payload, sender, receiver)
        roles = Roles.of(payload)
        held: Mapping[str, Shape] = {HELD: ((roles.rows,), torch.bool)}
        return [held, *steps] if steps and receiver == roles.holder else steps

    def expects(self, payload: Payload) -> dict[str, Shape]:
        unknown: dict[str, Shape] = {UNKNOWN: ((), torch.int64)}
        if not payload.get("reports"):
            return unknown
        rows = Roles.of(payload).rows
        scores: dict[str, Shape] = {SCORES: ((rows, max(1, self.classes)), torch.float64)}
        return {**unknown, SCORED: ((rows,), torch.bool), **scores}

    def talk(self, party: Party, payload: Payload, memory: Memory) -> Talk:
        roles = Roles.of(payload)
        bins = own_bins(memory, roles)
        held, at = people_here(party, payload, roles.rows)
        codes = np.zeros((len(bins.widths), roles.rows), dtype=np.int64)
        for kind in range(2):
            places = [k for k, place in enumerate(at) if place is not None and place[0] == kind]
            if places:
                rows = torch.tensor([at[k][1] for k in places])  # type: ignore[index]
                codes[:, places] = coded_rows(features(party, roles, "match", bool(kind)), bins, rows)
        known: Tensor = held
        if party.id != roles.holder:
            yield Send(roles.holder, {HELD: held})
        else:
            for other in roles.shapes:
                if other != party.id:
                    known = known & ((yield Receive(other)) or {})[HELD].cpu()
        scores = yield from self.walked(party, roles, memory, codes)
        reply = {UNKNOWN: (~held).sum()}
        if scores is not None:
            reply |= {SCORED: known, SCORES: scores * known[:, None]}
        return Reply(reply), {}
