"""Updates of an ask that stay on the cluster, because together they are larger than `run.reply_memory`.

An actor that has trained a chunk checks its replies, and sends every other actor its columns of their large vectors.
The driver receives the rest of the replies, and a `ClusterRows` for each large vector.
"""

from __future__ import annotations

import itertools
import uuid
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch

from hansa.cluster.crew import LOSSES, is_loss
from hansa.cluster.matrix import ClusterRows, ColumnStore, T, limits_of
from hansa.cluster.trees import unpack
from hansa.core.op import Op, Reply
from hansa.plumbing.errors import RuntimeFailure
from hansa.replies.placed import PlacedReply
from hansa.replies.reply_checks import Rules
from hansa.sim.engine import Outcome, PartyWork

if TYPE_CHECKING:
    from hansa.cluster.engine import RayEngine

AHEAD = 4  # chunks whose pieces may be on the way, or one per actor if there are more


class LostColumns(Exception):
    """An actor that held columns was lost."""


class UpdateGather(ColumnStore):
    """The large vectors of an ask's replies, at the actors. `vectors` has their lengths and types.

    If an actor is lost, its columns of all updates are, so all parties of the ask train again.
    """

    def __init__(self, engine: RayEngine, op: Op, members: list[PartyWork], round: int, rules: Rules,
                 vectors: Mapping[str, tuple[int, torch.dtype]]) -> None:  # fmt: skip
        self.ray, self._engine, self._rules, self._vectors = engine.ray, engine, rules, vectors
        self._ask = op, members, round
        self._row = {member.party: k for k, member in enumerate(members)}
        self._data = engine.data
        self._losses, self.key = 0, ""

    def replies(self) -> Iterator[PlacedReply | tuple[int, Outcome]]:
        """Train the parties, and yield their replies in order."""
        results = self._filled()
        matrices = {name: ClusterRows(self, name, len(self._row), length, dtype)
                    for name, (length, dtype) in self._vectors.items()}  # fmt: skip
        for party, row in self._row.items():
            said = unpack(results[party])
            if isinstance(said, str):
                yield party, said
            else:
                reply = said["reply"] if isinstance(said["reply"], str) else Reply.of_tree(said["reply"])
                yield PlacedReply(party, reply, said["bytes"], matrices, row, {party: said["memory"]})

    def surely(self, action: Callable[[], T]) -> T:
        while True:
            try:
                return action()
            except self.ray.exceptions.RayError as error:
                if not is_loss(self.ray, error):
                    raise error.cause from None
                if self._engine.data != self._data:
                    raise RuntimeFailure(
                        "run.engine (ray): an actor that held updates was lost, and the samples have changed since"
                    ) from None
                self._count_loss()
                self._filled()

    def _filled(self) -> dict[int, Any]:
        """What the actors say about each party's reply, when they hold the columns of all."""
        while True:
            try:
                return self._fill()
            except LostColumns:
                self._count_loss()

    def _count_loss(self) -> None:
        self._losses += 1
        if self._losses >= LOSSES:
            raise RuntimeFailure(
                f"run.engine (ray): actors that held updates were lost {LOSSES} times; their machines may have run out "
                "of memory"
            )
        self._engine.drop_lost()

    def _fill(self) -> dict[int, Any]:
        op, members, round = self._ask
        self._engine.release(self.key)
        self.actors = self._engine.actors()
        self.key = uuid.uuid4().hex
        weakref.finalize(self, self._engine.dropped.append, self.key)
        self.cuts = {name: limits_of(length, len(self.actors)) for name, (length, _) in self._vectors.items()}
        sent = [self.call(actor, "open_columns", self.key, name, len(members), span, dtype, self._rules.memory)
                for name, (_, dtype) in self._vectors.items()
                for actor, span in enumerate(itertools.pairwise(self.cuts[name]))]  # fmt: skip
        places = [(name, actor) for name, limits in self.cuts.items() for actor in range(len(limits) - 1)]
        work, pieces = self._engine.place(op, members, round, self.cuts, self._rules)
        results: dict[int, Any] = {}
        for number, result in work.results():
            results[number] = result
            columns = pieces.pop(number)
            rows = [self._row[party] for party in result.get("rows", ())]
            if rows:
                sent += [self.call(actor, "put_columns", self.key, name, rows, piece)
                         for (name, actor), piece in zip(places, columns, strict=True)]  # fmt: skip
            del columns
            sent = self._settled(sent, max(AHEAD, len(self.actors)) * len(places))
        self._settled(sent, 0)
        self._engine.check(results)
        return {party: said for result in results.values() for party, said in result["outcomes"].items()}

    def _settled(self, sent: list[Any], ahead: int) -> list[Any]:
        """Wait until at most so many of the calls are not finished; the others."""
        if len(sent) <= ahead:
            return sent
        done, rest = self.ray.wait(sent, num_returns=len(sent) - ahead)
        try:
            self.ray.get(done)
        except self.ray.exceptions.RayError as error:
            if not is_loss(self.ray, error):
                raise RuntimeFailure(f"run.engine (ray): an actor cannot store updates: {error.cause}") from None
            raise LostColumns from None
        return list(rest)
