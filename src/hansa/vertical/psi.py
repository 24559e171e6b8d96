"""Private set intersection: parties find the people whom all of them hold, and learn nothing of the others.

The protocol is Diffie-Hellman on ristretto255 (`psi_ops`, `psi_group`), from one leader to each party in turn.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

from hansa.core.algorithm import Algorithm, Problem, State
from hansa.core.ask import Routed
from hansa.core.declared_ops import DeclaredOps, OpenOp
from hansa.core.federation import Federation
from hansa.core.op import Payload
from hansa.core.registry import register
from hansa.core.route_op import RouteOp
from hansa.numerics.params import Params
from hansa.plumbing.errors import ConfigError, DataError, RoundAborted
from hansa.vertical.psi_ops import KINDS, PsiAlign, PsiAnswer, PsiAsk, PsiCount, PsiSize

ALIGNED = (OpenOp("psi-size"), PsiAsk(), OpenOp("psi-answer"), OpenOp("psi-align"))  # the ops of `aligned`
COUNTED = (OpenOp("psi-size"), PsiAsk(count=True), OpenOp("psi-count"))  # the ops of `counted`


class People(NamedTuple):
    """The numbers of people whom all parties hold: in their training rows, and in their test rows."""

    train: int
    test: int


async def aligned(fed: Federation, leader: int, parties: Iterable[int] | None = None, least: int = 1) -> People:
    """Match the rows of parties by their ids. Afterwards every party knows its common rows, in the common order.

    An algorithm calls it in its first round, with the verbs `gather` and `route`. Then the memory of every party has
    two int64 tensors: `rows` (the numbers of its common training rows) and `test_rows` (those of its test rows). Entry
    k is the same person at every party. The order depends on the run's seed and the people alone.

    The leader, for instance the label holder, also learns whom it has in common with the first parties, one more party
    at a time; the others learn about common people alone. The aggregator learns the numbers of rows and the result. A
    DataError if fewer than `least` people are common in the training rows; an aborted round if a party is missing.
    """
    members = sorted(fed.parties if parties is None else parties)
    sizes = await _sizes(fed, leader, members)
    others = [party for party in members if party != leader]
    for party in others:
        pair = _told(sizes, leader, party)
        await arrived(fed, PsiAsk(), pair, [(leader, party)])
        await arrived(fed, PsiAnswer(), pair, [(party, leader)])
    each = {party: _told(sizes, party) for party in others} | {leader: _told(sizes, *members)}
    done = await arrived(fed, PsiAlign(), {}, [(leader, party) for party in others], each)
    counts = {People(*(int(reply.tensors[kind]) for kind in KINDS)) for reply in done.replies.replies}
    if len(done.replies.replies) < len(others) or len(counts) != 1:
        raise RoundAborted("the parties do not agree on the number of common people")
    people = counts.pop()
    if people.train < least:
        raise DataError(
            f"the parties have {people.train} people in common in their training rows, and the method needs at least "
            f"{least}; check that their ids have the same form" + (", or use a smaller batch" if people.train else "")
        )
    return people


async def counted(fed: Federation, leader: int, parties: Iterable[int] | None = None) -> dict[int, int]:
    """The number of people that the leader has in common with each other party; nobody learns who they are.

    Training rows and test rows count together. The leader and the aggregator learn the numbers.
    """
    members = sorted(fed.parties if parties is None else parties)
    sizes = await _sizes(fed, leader, members)
    counts = {}
    for party in members:
        if party != leader:
            pair = _told(sizes, leader, party)
            await arrived(fed, PsiAsk(count=True), pair, [(leader, party)])
            done = await arrived(fed, PsiCount(), pair, [(party, leader)])
            counts[party] = int(done.replies.replies[0].tensors["people"])
    return counts


def _told(sizes: Mapping[int, int], *parties: int) -> Payload:
    """A payload with the numbers of people of some parties: a party is told no others."""
    return {"sizes": {str(party): sizes[party] for party in parties}}


async def _sizes(fed: Federation, leader: int, members: list[int]) -> dict[int, int]:
    """The number of people of each party."""
    if leader not in members or len(members) < 2:
        raise ConfigError("matching people needs a leader and at least one other party")
    got = await fed.gather(PsiSize(), parties=members, need="all")
    pairs = zip(got.parties, got.replies, strict=True)
    return {party: sum(int(reply.tensors[kind]) for kind in KINDS) for party, reply in pairs}


async def arrived(fed: Federation, op: RouteOp, payload: Payload, routes: list[tuple[int, int]],
                  each: Mapping[int, Payload] | None = None) -> Routed:  # fmt: skip
    """A route whose messages all arrived; an aborted round otherwise."""
    done = await fed.route(op, payload, routes, each=each)
    missing = sorted(set(routes) - set(done.arrived))
    if missing:
        pairs = ", ".join(f"{sender} -> {receiver}" for sender, receiver in missing)
        raise RoundAborted(f"people were not matched: the messages {pairs} of {op.name!r} did not arrive")
    return done


class CommonPeople(Algorithm):
    """Base of algorithms that find the people whom all parties hold; the first label holder leads."""

    trains: ClassVar[bool] = False
    participation: ClassVar[Any] = "all"
    data: ClassVar[Literal["rows", "columns"]] = "columns"

    @property
    def verbs(self) -> frozenset[str]:
        return frozenset({"gather", "route"})

    def check(self, problem: Problem) -> None:
        super().check(problem)
        members = len(_members(problem))
        if members < 2:
            raise ConfigError(f"{self.name} matches the people of at least two parties, and the job has {members}")

    def init(self, problem: Problem) -> State:
        assert problem.layout is not None
        return State(Params.none(), slots={"members": _members(problem), "leader": problem.layout.label_holders[0]})

    async def common(self, fed: Federation, leader: int, members: list[int]) -> dict[str, int]:
        """Match the people; return the numbers of common people by the name of a metric, `common` among them."""
        raise TypeError(f"the algorithm {self.name!r} does not define common()")

    async def round(self, fed: Federation, state: State) -> State:
        if self.finished(state):
            return state
        return state.replace(people=await self.common(fed, state.slots["leader"], state.slots["members"]))

    async def evaluate(self, fed: Federation, state: State) -> dict[str, float]:
        return {name: float(count) for name, count in state.slots.get("people", {}).items()}

    def finished(self, state: State) -> bool:
        return "people" in state.slots


@register("psi")
@dataclass(frozen=True)
class PSI(CommonPeople):
    """Match the people of parties with different columns (Meadows 1986; Huberman, Franklin and Hogg 1999).

    The first label holder leads. `common` in the metrics is the number of people whom all parties hold. With `count`
    nobody learns who they are; it needs exactly two parties.
    """

    count: bool = False

    def check(self, problem: Problem) -> None:
        super().check(problem)
        members = len(_members(problem))
        if self.count and members != 2:
            raise ConfigError(
                f"{self.name}: count = true is for two parties, and the job has {members}; leave it out, or ask two "
                "parties at a time"
            )

    @property
    def ops(self) -> DeclaredOps:
        return COUNTED if self.count else ALIGNED

    async def common(self, fed: Federation, leader: int, members: list[int]) -> dict[str, int]:
        if self.count:
            return {"common": sum((await counted(fed, leader, members)).values())}
        people = await aligned(fed, leader, members, least=0)
        return {"common": people.train, "common_test": people.test}


def _members(problem: Problem) -> list[int]:
    """The parties that take part."""
    assert problem.layout is not None
    return [party for party, shape in enumerate(problem.layout.shapes) if shape is not None]
