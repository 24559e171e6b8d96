"""A tree of relays in the simulation: sums pass from level to level, and every level adds its latency.

Hierarchical aggregation: a relay sends the sum of its replies and of their weights, never a mean. With exact sums any
tree gives the bits of the flat federation. Replies that cannot be summed (`partial_sums.unsuitable`) are passed on
one by one, as a deployed relay does.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from hansa.core.ask import Ask
from hansa.core.op import Reply
from hansa.core.quantities import Amount, Count
from hansa.core.registry import Part, register
from hansa.plumbing.errors import ConfigError
from hansa.replies.partial_sums import PartialSum, ReplySum, obstacle, unsuitable
from hansa.replies.replies import Outcomes, OutcomesOrSums, reply_size, single_replies
from hansa.replies.reply_checks import Rules, received
from hansa.sim.distributions import Array

Path = tuple[int, ...]  # the relays between the root and a party, the one next to the root first
DEEPEST = 64  # levels of relays


@register("relays")
@dataclass(frozen=True)
class Relays(Part):
    """The relays between the simulated parties and the root.

    `counts` is the number of relays at each level, per relay of the level above; the parties are divided evenly, in the
    order of their numbers: `counts = [10, 4]` is 10 relays with 4 relays each. Or `groups` gives any tree: a number is
    a party, a list is a relay with what is behind it, as in `groups = [[0, 1], [2, [3, 4]]]`. Parties that are in no
    group are behind no relay. `latency` has, for each level, the seconds that an exchange takes through its relays,
    down and up together; level 1 is next to the root.
    """

    kind: ClassVar[str] = "relays"
    counts: tuple[Count, ...] = ()
    groups: tuple[Any, ...] = ()
    latency: tuple[Amount, ...] = ()

    def __post_init__(self) -> None:
        if bool(self.counts) == bool(self.groups):
            raise ConfigError(
                "relays: give either counts, as in counts = [10], or groups, as in groups = [[0, 1], [2]]"
            )

    def paths(self, parties: int) -> list[Path]:
        """The relays above each party; a ConfigError if the tree does not fit the number of parties."""
        paths = self._even(parties) if self.counts else self._grouped(parties)
        deepest = max(map(len, paths), default=0)
        if len(self.latency) > deepest:
            raise ConfigError(f"relays.latency has {len(self.latency)} levels, and the tree has {deepest}")
        return paths

    def _even(self, parties: int) -> list[Path]:
        count = int(np.prod(self.counts))
        if count > parties:
            raise ConfigError(
                f"relays.counts = {list(self.counts)} are {count} relays, more than the {parties} parties"
            )
        return [tuple(int(k) for k in np.unravel_index(p * count // parties, self.counts)) for p in range(parties)]

    def _grouped(self, parties: int) -> list[Path]:
        found = list(_walk(self.groups, ()))
        behind = Counter(party for party, _ in found)
        for party, times in behind.items():
            if isinstance(party, bool) or not isinstance(party, int) or not 0 <= party < parties:
                raise ConfigError(f"relays.groups: {party!r} is not the number of a party, 0 to {parties - 1}")
            if times > 1:
                raise ConfigError(f"relays.groups: party {party} is behind two relays; list it once")
        above = dict(found)
        return [above.get(party, ()) for party in range(parties)]

    def seconds(self, parties: int) -> Array:
        """The seconds that an exchange of each party takes on its way through relays."""
        total = np.concatenate(([0.0], np.cumsum(self.latency)))
        depth = np.array([len(path) for path in self.paths(parties)])
        return np.asarray(total[np.minimum(depth, len(self.latency))])


def _walk(tree: Any, path: Path) -> Iterator[tuple[Any, Path]]:
    if len(path) > DEEPEST:
        raise ConfigError(f"relays.groups: more than {DEEPEST} levels of relays")
    for number, part in enumerate(tree):
        if isinstance(part, (list, tuple)):
            if not part:
                raise ConfigError("relays.groups: no party is behind one of the relays; leave its empty list out")
            yield from _walk(part, (*path, number))
        else:
            yield part, path


def through_relays(ask: Ask, outcomes: Outcomes, paths: Sequence[Path], rules: Rules) -> OutcomesOrSums:
    """The outcomes of an ask as the root receives them: each relay next to it sends one sum, if replies can be summed.

    A relay checks each reply. A reply that fails is passed on by itself, so that the root rejects it with the reason. A
    relay without any reply sends nothing. The bytes are those of all levels.
    """
    if unsuitable(ask, rules, checked=True) is not None:
        yield from outcomes
        return
    assert ask.op is not None
    sums: dict[Path, ReplySum] = {}
    members: dict[Path, list[int]] = {}
    sent: Counter[int] = Counter()  # bytes below each relay next to the root
    for party, outcome in single_replies(outcomes):
        path = paths[party]
        if isinstance(outcome, Reply) and path:
            checked = received(outcome, ask.op, ask.payload_of(party), rules)
            share = 1 if ask.uniform else outcome.weight
            if isinstance(checked, Reply) and obstacle(checked, share) is None:
                sums.setdefault(path, ReplySum(ask.uniform)).add(checked)
                members.setdefault(path[:1], []).append(party)
                sent[path[0]] += reply_size(outcome)
                continue
        yield party, outcome
    for depth in range(max(map(len, sums), default=0), 1, -1):  # each relay adds up what is behind it, then sends it
        for path in sorted(path for path in sums if len(path) == depth):
            reply = sums.pop(path).reply()
            sent[path[0]] += reply_size(reply)
            sums.setdefault(path[:-1], ReplySum(ask.uniform)).add_sum(reply)
    for path, parties in sorted(members.items()):
        reply = sums[path].reply()
        yield PartialSum(f"relay {path[0]}", tuple(sorted(parties)), reply, sent[path[0]] + reply_size(reply), True)
