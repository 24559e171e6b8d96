"""The adversaries of a run at work: who they are, what they make of the data and of the replies."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from hansa.adversary.adversary import Adversary, Scene
from hansa.core import rng
from hansa.core.algorithm import Algorithm
from hansa.core.errors import ConfigError, nearest
from hansa.core.federation import Ask, Ticket
from hansa.core.op import Op, Payload, Replies, Reply
from hansa.core.registry import from_config
from hansa.core.replies import Outcomes, Rules, fault
from hansa.core.task import Holdings


def adversaries(given: Any) -> tuple[Adversary, ...]:
    """One adversary or a list of them, as parts, names or tables; a table may say `kind` for `name`."""
    if given is None:
        return ()
    several = isinstance(given, (list, tuple))
    groups = []
    for number, value in enumerate(given if several else [given]):
        where = f"adversary[{number}]" if several else "adversary"
        if isinstance(value, Mapping) and "kind" in value:
            if "name" in value:
                raise ConfigError(f"{where}: kind and name say the same; give one of them")
            value = {"name" if field == "kind" else field: setting for field, setting in value.items()}
        groups.append(from_config("adversary", value, where=where))
    return tuple(groups)


class Band:
    """All groups of attackers of a run. Groups are disjoint: named parties first, then those drawn, group by group.

    `rate` gives the server's learning rate of a round, where it is known. A server that looks at each update counts
    parties alike, unless it is `weighted` by samples.
    """

    def __init__(self, groups: tuple[Adversary, ...], holdings: Holdings, seed: int,
                 rate: Callable[[int], float] | None = None, weighted: bool = False) -> None:  # fmt: skip
        self.seed, self.rate, self.weighted = seed, rate, weighted
        self.members = _members(groups, holdings, seed)
        self.attackers = frozenset(party for members in self.members for party in members)
        self.groups = []
        for number, (group, members) in enumerate(zip(groups, self.members, strict=True)):
            if group.poisons:
                y = holdings.train.y
                classes = holdings.classes if y.dim() == 1 and not y.is_floating_point() else None
                try:
                    group.check(holdings.shape, classes)
                except ConfigError as error:
                    raise ConfigError(f"adversary[{number}] ({group.name}): {error}") from None
                if members:
                    group = group.learn([holdings.train.of(party)[0] for party in sorted(members)])
            self.groups.append(group)

    @property
    def forges(self) -> bool:
        """Whether any group changes what is sent."""
        return any(group.forges or group.corrupts for group in self.groups)

    def check(self, algorithm: Algorithm, masked: bool) -> None:
        """Refuse, with the reason, attacks that the algorithm, or a secure sum (`masked`), leaves no room for."""
        for group in self.groups:
            if not (group.forges or group.corrupts):
                continue
            what = f"the adversary {group.name!r} changes updates of the model"
            if "exchange" in algorithm.verbs:
                raise ConfigError(f"{what}, and with {algorithm.name} parties exchange models; use 'label-flip'")
            if not algorithm.trains:
                raise ConfigError(f"{what}, and parties of {algorithm.name} send none; use 'label-flip'")
            if masked:
                raise ConfigError(f"{what}, and a secure sum lets only masked ones be seen here; use 'label-flip'")
            if "submit" in algorithm.verbs and group.sees == "honest":
                raise ConfigError(
                    f"the adversary {group.name!r} needs the round's other updates, and with {algorithm.name} each "
                    "arrives by itself; use one that goes by its own, such as 'sign-flip'"
                )
            if group.needs_rate and ("submit" in algorithm.verbs or self.rate is None):
                raise ConfigError(
                    f"the adversary {group.name!r} replaces the model where the server takes the mean at a known rate, "
                    f"which {algorithm.name} does not do here; give scale, or replace = false"
                )

    def poison(self, holdings: Holdings) -> None:
        """Have the groups poison their members' training samples; the task's own tensors stay as they are."""
        train, copied = holdings.train, set()
        for number, (group, members) in enumerate(zip(self.groups, self.members, strict=True)):
            for party in members if group.poisons else ():
                assert holdings.classes is not None
                before = train.of(party)
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
        """Samples of the central test set that show whether the attacks succeed, with the classes they want."""
        if holdings.test is None or holdings.classes is None:
            return None
        found = [group.probe(*holdings.test) for group, who in zip(self.groups, self.members, strict=True) if who]
        wanted = [pair for pair in found if pair is not None and len(pair[0])]
        return (torch.cat([x for x, _ in wanted]), torch.cat([y for _, y in wanted])) if wanted else None

    def forge(self, ask: Ask, outcomes: Outcomes) -> Outcomes:
        """The outcomes of an ask as they reach the server. Only asks that train for an update are attacked."""
        if ask.op is None or ask.op.update is None or not ask.in_round or ask.selects:
            return outcomes
        whole = list(_one_by_one(outcomes))
        replies = {party: outcome for party, outcome in whole if isinstance(outcome, Reply)}
        occasion = (ask.round, ask.phase, ask.index)
        uniform = ask.uniform or (ask.verb == "gather" and not self.weighted)
        sent = self._sent(ask.op, ask.payload, replies, ask.round, len(ask.parties), uniform, occasion)
        return [(party, sent.get(party, outcome)) for party, outcome in whole]

    def forge_one(self, ticket: Ticket, op: Op, payload: Payload, reply: Reply) -> Reply:
        """A reply that comes back by itself, as it reaches the server."""
        if op.update is None:
            return reply
        sent = self._sent(op, payload, {ticket.party: reply}, ticket.round, 1, True, ("ticket", ticket.id))
        return sent.get(ticket.party, reply)

    def _sent(self, op: Op, payload: Payload, replies: dict[int, Reply], round: int, asked: int, uniform: bool,
              occasion: tuple[int | str, ...]) -> dict[int, Reply]:  # fmt: skip
        """The replies that could be fused, with the updates that the groups make of them."""
        assert op.update is not None
        name = op.update
        sound = {p: r for p, r in replies.items() if fault(r, op, payload, Rules(), summed=False) is None}
        if not sound:
            return {}
        rows = {party: reply.tensors[name].flatten() for party, reply in sound.items()}
        shares = {party: 1 if uniform else reply.weight for party, reply in sound.items()}
        honest = [party for party in rows if party not in self.attackers]
        others = torch.stack(list(rows.values())[:1])[:0]  # copied only where somebody looks at them
        if honest and any(group.forges and group.sees == "honest" for group in self.groups):
            others = torch.stack([rows[party] for party in honest])
        model = payload["model"]["w"] if "model" in payload else None
        rate = self.rate(round) if self.rate is not None else None

        def scene(number: int, parties: list[int]) -> Scene:
            return Scene(tuple(parties), tuple(shares[p] for p in parties), sum(shares.values()), asked, round,
                         rng.key(self.seed, "attack", number, *occasion), rng.key(self.seed, "attack", number),
                         tuple(shares[p] for p in honest), rate, model)  # fmt: skip

        sent = dict(rows)
        for number, (group, members) in enumerate(zip(self.groups, self.members, strict=True)):
            here = [party for party in rows if party in members]
            blind = group.sees == "honest" and not len(others)  # nobody to go by: they send what they have
            if here and group.forges and not blind:
                own = torch.stack([rows[party] for party in here])
                sent.update(zip(here, group.forge(own, others, scene(number, here)), strict=True))
        for number, group in enumerate(self.groups):
            if group.corrupts:
                here = list(sent)
                arrived = group.corrupt(torch.stack([sent[party] for party in here]), scene(number, here))
                sent.update(zip(here, arrived, strict=True))
        return {
            party: dataclasses.replace(reply, tensors={**reply.tensors, name: sent[party].view_as(reply.tensors[name])})
            for party, reply in sound.items()
        }


def _one_by_one(outcomes: Outcomes) -> Iterator[tuple[int, Reply | str]]:
    """Outcomes with stacks taken apart, in tensors of their own: an engine reuses a stack's."""
    for outcome in outcomes:
        if isinstance(outcome, Replies):
            yield from ((party, outcome.copy(k)) for k, party in enumerate(outcome.parties))
        else:
            yield outcome


def _members(groups: tuple[Adversary, ...], holdings: Holdings, seed: int) -> list[frozenset[int]]:
    """The parties of each group. Attacks on values of everybody have none."""
    count = len(holdings)
    numbers = {holdings.name(party): party for party in range(count)} if any(group.parties for group in groups) else {}
    members = [frozenset[int]() for _ in groups]
    taken: set[int] = set()
    for number, group in enumerate(groups):
        where = f"adversary[{number}] ({group.name})"
        for given in map(str, group.parties):
            party = numbers.get(given, int(given) if given.isdecimal() else -1)
            if not 0 <= party < count:
                raise ConfigError(f"{where}: there is no party {given!r}{nearest(given, list(numbers))}")
            if party in taken:
                raise ConfigError(f"{where}: the party {given!r} attacks twice; groups have no member in common")
            taken.add(party)
            members[number] |= {party}
    for number, group in enumerate(groups):
        if group.fraction is None or group.corrupts:
            continue
        wanted = int(group.fraction * count + 1e-9)
        free = [party for party in range(count) if party not in taken]
        if wanted > len(free):
            raise ConfigError(
                f"adversary[{number}] ({group.name}): fraction asks for {wanted} of {count} parties, and the other "
                f"groups leave {len(free)}"
            )
        chosen = rng.generator(seed, "adversary", number).choice(len(free), size=wanted, replace=False)
        members[number] = frozenset(free[int(at)] for at in chosen)
        taken |= members[number]
    return members
