"""All adversaries of a run: their members, the poisoned data and the forged replies."""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hansa.adversary.adversary import Adversary, Arriving, Scene
from hansa.adversary.exchange import Exchange, own_copy
from hansa.core.algorithm import Algorithm
from hansa.core.ask import Ask, Ticket
from hansa.core.op import Op, Payload, Replies, Reply, open_tensors
from hansa.core.plain_data import from_config
from hansa.core.registry import registered
from hansa.core.task import Holdings
from hansa.core.wrapper import Wrapper
from hansa.holdings.stored_rows import whole
from hansa.numerics import rng
from hansa.numerics.rows import Rows, room
from hansa.plumbing.errors import ConfigError
from hansa.replies.replies import Outcomes, single_replies

log = logging.getLogger("hansa")


def adversaries(attacks: Any) -> tuple[Adversary, ...]:
    """Read one adversary or a list: parts, names or tables. A table may use `kind` instead of `name`."""
    if attacks is None:
        return ()
    several = isinstance(attacks, (list, tuple))
    groups = []
    for number, value in enumerate(attacks if several else [attacks]):
        where = f"adversary[{number}]" if several else "adversary"
        groups.append(from_config("adversary", named(value, where), where=where))
    return tuple(groups)


def named(table: Any, where: str = "adversary") -> Any:
    """Rename the field `kind` of an adversary's table to `name`, the field of all parts."""
    if not isinstance(table, Mapping) or "kind" not in table:
        return table
    if "name" in table:
        raise ConfigError(f"{where}: kind and name mean the same; give one of them")
    return {"name" if field == "kind" else field: value for field, value in table.items()}


class Band:
    """All groups of attackers of a run. Groups are disjoint: named parties first, then drawn ones, group by group.

    `rate` gives the server's learning rate of a round, if it is known. A robust fusion gives parties equal weights,
    unless it is `weighted` by samples. Updates that wait for other updates are stored in `folder` if they take more
    than `memory` bytes.
    """

    def __init__(self, groups: tuple[Adversary, ...], holdings: Holdings, seed: int,
                 rate: Callable[[int], float] | None = None, weighted: bool = False, memory: int = 2**30,
                 folder: Path | None = None) -> None:  # fmt: skip
        self.seed, self.rate, self.weighted, self.memory, self.folder = seed, rate, weighted, memory, folder
        self.members = _members(groups, holdings, seed)
        self.attackers = frozenset(party for members in self.members for party in members)
        self.groups = []
        for number, (group, members) in enumerate(zip(groups, self.members, strict=True)):
            if group.poisons:
                if not isinstance(holdings.train.x, Tensor):
                    raise ConfigError(
                        f"adversary[{number}] ({group.name}): it changes samples, and those of the parties stay in "
                        "files; load them into memory, or use another attack"
                    )
                y = holdings.train.y
                classes = holdings.classes if y.dim() == 1 and not y.is_floating_point() else None
                try:
                    group.check(holdings.shape, classes)
                except ConfigError as error:
                    raise ConfigError(f"adversary[{number}] ({group.name}): {error}") from None
                if members:
                    group = group.learn([whole(holdings.train.of(party)[0]) for party in sorted(members)])
            if group.fraction == 0:
                log.warning("adversary[%d] (%s): its fraction is 0, so nobody attacks", number, group.name)
            self.groups.append(group)
        sending = [(n, group, members) for n, (group, members) in enumerate(zip(self.groups, self.members, strict=True))
                   if group.forges]  # fmt: skip
        self._lone = {party: n for n, group, members in sending if group.sees == "own" for party in members}
        self._colluding = frozenset(p for _, group, members in sending if group.sees != "own" for p in members)
        self._constrained = {party: group for group, members in zip(self.groups, self.members, strict=True)
                             if group.constrains for party in members}  # fmt: skip
        blind = next((n for n, group, members in sending if group.sees == "honest" and members), None)
        if blind is not None and len(self.attackers) == len(holdings):
            raise ConfigError(
                f"adversary[{blind}] ({self.groups[blind].name}): it needs the updates of honest parties, and all "
                f"{len(holdings)} parties are hostile; use a smaller fraction"
            )

    @property
    def forges(self) -> bool:
        """Whether any group changes updates, or trains in another way than its parties are asked."""
        return any(group.forges or group.corrupts or group.constrains for group in self.groups)

    def check(self, algorithm: Algorithm, cohort: int, masked: bool, packed: bool = False) -> None:
        """Raise ConfigError if an attack cannot work with the algorithm, the cohort size, a secure sum (`masked`), or
        updates that travel in another form (`packed`)."""
        for group in self.groups:
            if not (group.forges or group.corrupts or group.constrains):
                continue
            problem = f"the adversary {group.name!r} changes updates of the model"
            if "route" in algorithm.verbs:
                raise ConfigError(f"{problem}, and with {algorithm.name} parties send to each other; use 'label-flip'")
            if not algorithm.trains:
                raise ConfigError(f"{problem}, and parties of {algorithm.name} send no updates; use 'label-flip'")
            if masked:
                raise ConfigError(
                    f"{problem}, and with a secure sum only masked updates are visible here; use 'label-flip'"
                )
            if group.constrains:
                self._check_solver(group, algorithm)
            if group.corrupts and packed:
                raise ConfigError(
                    f"the adversary {group.name!r} corrupts the numbers of updates on their way, and run.compress "
                    "sends updates in another form; leave one of them out"
                )
            if group.needs_rate and ("submit" in algorithm.verbs or self.rate is None):
                raise ConfigError(
                    f"the adversary {group.name!r} needs a server that applies the mean at a known rate, which "
                    f"{algorithm.name} does not do here; give scale, or replace = false"
                )
            if "submit" in algorithm.verbs and group.sees != "own":
                raise ConfigError(
                    f"the adversary {group.name!r} needs the round's other updates, and with {algorithm.name} each "
                    "update arrives alone; use an attack that needs only its own update, such as 'sign-flip'"
                )
            if group.corrupts and group.sees != "own":
                _check_fraction(group, cohort, f"the adversary {group.name!r}", "parties of a round")

    @staticmethod
    def _check_solver(group: Adversary, algorithm: Algorithm) -> None:
        """Refuse a group that trains another objective, if parties of the algorithm run a solver it cannot change."""
        solvers, given = registered("local"), algorithm.parts().local
        own = [solvers[op.name]() for op in algorithm.ops or () if op.name in solvers]  # those of the algorithm itself
        try:
            if not isinstance(given, Op):
                raise ConfigError(f"it changes the local solver, and {algorithm.name} has none")
            for solver in (given, *own):
                assert isinstance(solver, Op)
                group.training(solver, {})
        except ConfigError as error:
            raise ConfigError(f"the adversary {group.name!r} with {algorithm.name}: {error}") from None

    def training(self, party: int, op: Op, payload: Payload) -> tuple[Op, Payload]:
        """The op and the payload with which a party trains; honest parties train as they are asked."""
        group = self._constrained.get(party)
        if group is None or op.update is None:
            return op, payload
        if isinstance(op, Wrapper):
            inner, payload = self.training(party, op.inner, payload)
            return dataclasses.replace(op, inner=inner), payload  # type: ignore[type-var]
        return group.training(op, payload)

    def poison(self, holdings: Holdings) -> None:
        """Poison the training samples of the groups' members; the task's own tensors are not changed."""
        train, copied = holdings.train, set()
        for number, (group, members) in enumerate(zip(self.groups, self.members, strict=True)):
            for party in members if group.poisons else ():
                assert holdings.classes is not None
                before = whole(train.of(party)[0]), train.of(party)[1]
                stream = rng.generator(self.seed, "poison", number, party)
                rows = slice(int(train.offsets[party]), int(train.offsets[party + 1]))
                for name, old, new in zip("xy", before, group.poison(*before, holdings.classes, stream), strict=True):
                    if new is old:
                        continue
                    if name not in copied:
                        setattr(train, name, getattr(train, name).clone())
                        copied.add(name)
                    getattr(train, name)[rows] = new

    def probe(self, holdings: Holdings) -> tuple[Tensor, Tensor] | None:
        """Central test samples that show whether the attacks succeed, with the classes that the attacks want."""
        if holdings.test is None or holdings.classes is None:
            return None
        attacking = [group for group, members in zip(self.groups, self.members, strict=True) if members]
        probes = [group.probe(*holdings.test) for group in attacking]
        wanted = [pair for pair in probes if pair is not None and len(pair[0])]
        return (torch.cat([x for x, _ in wanted]), torch.cat([y for _, y in wanted])) if wanted else None

    def forge(self, ask: Ask, outcomes: Outcomes) -> Outcomes:
        """The outcomes of an ask as they reach the server. Only asks for updates of the model are attacked."""
        if ask.op is None or ask.op.update is None or not ask.in_round or ask.selects:
            return outcomes
        uniform = ask.uniform or (ask.verb == "gather" and not self.weighted)
        occasion = (ask.round, ask.phase, ask.index)
        exchange = Exchange(ask.op, ask.payload, ask.round, ask.parties, uniform, occasion, ask.each)
        self._check_sizes(ask)
        if not self._colluding.isdisjoint(ask.parties):
            outcomes = self._together(exchange, outcomes)
        return self._alone(exchange, outcomes)

    def forge_one(self, ticket: Ticket, op: Op, payload: Payload, reply: Reply) -> Reply:
        """The reply to a ticket as it reaches the server."""
        exchange = Exchange(op, payload, ticket.round, (ticket.party,), True, ("ticket", ticket.id))
        return reply if op.update is None else self._on_the_way(exchange)(ticket.party, reply)

    def _check_sizes(self, ask: Ask) -> None:
        """Refuse attacks that compare or corrupt updates of one length, if an op leaves the length open."""
        assert ask.op is not None
        compare = next(
            (group for group in self.groups if group.corrupts or (group.forges and group.sees != "own")), None
        )
        if compare is None or not ask.parties:
            return
        if ask.op.update in open_tensors(ask.op, ask.payload_of(ask.parties[0])):
            raise ConfigError(
                f"the adversary {compare.name!r} needs updates of one length, and the op {ask.op.name!r} leaves the "
                "length open; use an attack that needs only its own update, such as 'sign-flip'"
            )

    def _scene(self, exchange: Exchange, number: int, parties: Iterable[int], weights: Iterable[int] = (),
               total: int = 0) -> Scene:  # fmt: skip
        """What a group knows about an exchange."""
        return Scene(
            tuple(parties), len(exchange.parties), exchange.round,
            rng.key(self.seed, "attack", number, *exchange.occasion), rng.key(self.seed, "attack", number),
            self.rate(exchange.round) if self.rate is not None else None,
            exchange.payload["model"]["w"] if "model" in exchange.payload else None, tuple(weights), total,
        )  # fmt: skip

    def _together(self, exchange: Exchange, outcomes: Outcomes) -> Iterator[tuple[int, Reply | str]]:
        """Wait for all outcomes, then forge the updates of groups that need the updates of other parties.

        Meanwhile updates are the rows of a matrix, which is on disk if it is larger than the memory limit.
        """
        waiting: list[tuple[int, Reply | str]] = []
        rows: Rows | None = None
        row_of: dict[int, int] = {}  # the row of each valid reply
        weights: dict[int, int] = {}
        for party, outcome in single_replies(outcomes):
            if isinstance(outcome, Reply) and exchange.sound(party, outcome):
                update = exchange.update(outcome)
                rows = room(len(exchange.parties), update, self.memory, self.folder) if rows is None else rows
                row_of[party], weights[party] = len(row_of), 1 if exchange.uniform else outcome.weight
                outcome = own_copy(exchange.replaced(outcome, rows.write(row_of[party], update)), but=exchange.name)
            elif isinstance(outcome, Reply):
                outcome = own_copy(outcome)
            waiting.append((party, outcome))
        if rows is None:
            yield from waiting
            return
        honest = [row for party, row in row_of.items() if party not in self.attackers]
        sent: dict[int, Iterator[Tensor]] = {}
        for number, (group, members) in enumerate(zip(self.groups, self.members, strict=True)):
            here = [party for party in row_of if party in members and party in self._colluding]
            if here and (honest or group.sees != "honest"):  # without honest updates, members send their own updates
                own = rows.take([row_of[party] for party in here])
                scene = self._scene(exchange, number, here, (weights[p] for p in here), sum(weights.values()))
                sent |= dict.fromkeys(here, iter(group.forge(own, rows.take(honest), scene)))
        for party, outcome in waiting:
            if isinstance(outcome, Reply) and party in row_of:
                row = next(sent[party]) if party in sent else rows.row(row_of[party])
                outcome = exchange.replaced(outcome, row)
            yield party, outcome

    def _alone(self, exchange: Exchange, outcomes: Outcomes) -> Iterator[tuple[int, Reply | str] | Replies]:
        """Forge and corrupt outcomes one by one. A stack that no attack changes stays whole."""
        arrived = self._on_the_way(exchange)
        everybody = any(group.corrupts for group in self.groups)
        for outcome in outcomes:
            if isinstance(outcome, Replies) and not everybody and self._lone.keys().isdisjoint(outcome.parties):
                yield outcome
                continue
            for party, reply in single_replies([outcome]):
                yield party, reply if isinstance(reply, str) else arrived(party, reply)

    def _on_the_way(self, exchange: Exchange) -> Callable[[int, Reply], Reply]:
        """A function that returns a party's reply as it arrives: forged by a lone member, then corrupted in transit."""
        corrupting = [number for number, group in enumerate(self.groups) if group.corrupts]
        corruptions: list[Arriving] = []  # made at the first update, which has the shape of all updates

        def arrived(party: int, reply: Reply) -> Reply:
            member = self._lone.get(party)
            if (member is None and not corrupting) or not exchange.sound(party, reply):
                return reply
            row = exchange.update(reply)
            if member is not None:
                own = Rows(row[None])
                (row,) = self.groups[member].forge(own, own.take(()), self._scene(exchange, member, [party]))
            if len(corruptions) < len(corrupting):
                corruptions.extend(self.groups[number].corruption(self._scene(exchange, number, exchange.parties), row)
                                   for number in corrupting)  # fmt: skip
            for corruption in corruptions:
                row = corruption(party, row)
            return exchange.replaced(reply, row)

        return arrived


def _check_fraction(group: Adversary, count: int, where: str, whom: str) -> None:
    """Refuse a positive fraction of `count` parties that is rounded down to no party."""
    share = group.fraction or 0.0
    if share > 0 and int(share * count + 1e-9) == 0:
        digits = 1000 * 10 ** len(str(count))
        raise ConfigError(
            f"{where}: a fraction of {share:g} of {count} {whom} is rounded down to no party; use "
            f"{math.ceil(digits / count) / digits:g} for one party, or 0 for no attack"
        )


def _members(groups: tuple[Adversary, ...], holdings: Holdings, seed: int) -> list[frozenset[int]]:
    """The parties of each group. Attacks that corrupt the values of all parties have no members."""
    count = len(holdings)
    members = [frozenset[int]() for _ in groups]
    taken: set[int] = set()
    for number, group in enumerate(groups):
        where = f"adversary[{number}] ({group.name})"
        for label in map(str, group.parties):
            party = holdings.find(label, where)
            if party in taken:
                raise ConfigError(f"{where}: the party {label!r} is listed twice; groups must have no member in common")
            taken.add(party)
            members[number] |= {party}
    for number, group in enumerate(groups):
        if group.fraction is None or group.corrupts:
            continue
        wanted = int(group.fraction * count + 1e-9)
        _check_fraction(group, count, f"adversary[{number}] ({group.name})", "parties")
        free = [party for party in range(count) if party not in taken]
        if wanted > len(free):
            raise ConfigError(
                f"adversary[{number}] ({group.name}): fraction needs {wanted} of {count} parties, and the other "
                f"groups leave {len(free)}"
            )
        chosen = rng.generator(seed, "adversary", number).choice(len(free), size=wanted, replace=False)
        members[number] = frozenset(free[int(at)] for at in chosen)
        taken |= members[number]
    return members
