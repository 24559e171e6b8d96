"""An attack on federated boosting that rebuilds rows from messages, after TimberStrike (Di Gennaro et al. 2025).

The attacker is an honest-but-curious aggregator: it knows the model, the bins and the messages that it received. The
attack uses that a row has the same gradient in the histogram of every feature, and that later trees give nearly every
row a gradient of its own. A bin with one row shows that gradient, and the gradient links the bins of different
features. In small nodes the subset of rows whose gradients add up to those of a bin tells who is in larger bins.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import numpy as np

import hansa
from hansa.classical.trees import gradients
from hansa.classical.trees.bins import Bins
from hansa.classical.trees.ensemble import SumsAsker
from hansa.classical.trees.histograms import GradientHistograms
from hansa.classical.trees.table import TreeArrays
from hansa.core.op import Payload, Reply
from hansa.secure import ring
from hansa.secure.masking_ops import SecureMasked
from hansa.sim import runtime

Array = np.ndarray[Any, Any]
SUBSETS = 32  # rows of a node whose subsets are tried, from two halves (Horowitz and Sahni 1974)


@dataclass(frozen=True)
class Seen:
    """Histograms [nodes, statistics, bins] of nodes that were leaves of the growing `trees`, after `before` trees."""

    before: int
    trees: TreeArrays
    nodes: Array
    sums: Array


@dataclass
class Tap:
    """What an aggregator received: messages by party as they were sent, and the sums that it computed from them."""

    parties: dict[int, list[Seen]] = field(default_factory=dict)
    sums: list[Seen] = field(default_factory=list)


@contextlib.contextmanager
def tapped() -> Iterator[Tap]:
    """Record the histograms that the aggregator of a simulation receives."""
    tap, combine, part = Tap(), runtime.combine, SumsAsker._part

    def record(op: Any, payload: Payload, outcomes: Iterable[Any]) -> Iterator[Any]:
        for item in outcomes:
            if isinstance(item, tuple) and isinstance(item[1], Reply):
                own = tap.parties.setdefault(item[0], [])
                own.append(_seen(getattr(op, "inner", op).trees, payload, _sent(op, payload, item[1]), own))
            yield item

    def combining(ask: Any, outcomes: Any, *more: Any) -> Any:
        histograms = isinstance(getattr(ask.op, "inner", ask.op), GradientHistograms)
        return combine(ask, record(ask.op, ask.payload, outcomes) if histograms else outcomes, *more)

    async def asking(self: Any, trees: TreeArrays, nodes: Any) -> Array:
        found = await part(self, trees, nodes)
        payload = {"bins": self.bins.payload(), "trees": trees.payload(), "slots": np.array(nodes)}
        tap.sums.append(_seen(self.op.trees, payload, found, tap.sums))
        return found

    with mock.patch.object(runtime, "combine", combining), mock.patch.object(SumsAsker, "_part", asking):
        yield tap


def _sent(op: Any, payload: Payload, reply: Reply) -> Array:
    """The histograms of a party's message, as they read: masked ones are numbers modulo a power of 2."""
    if not isinstance(op, SecureMasked):
        return reply.tensors["sums"].numpy()
    width, layout = op.width(payload), op.encoding(payload).layout
    words = ring.signed(ring.unpack(reply.tensors["masked"].numpy(), width), width)
    begin = 1 + sum(layout.entries(name) for name in layout.tensors if name < "sums")
    return words[begin : begin + layout.entries("sums")].reshape(layout.tensors["sums"][0])


def _seen(before: int, payload: Any, sums: Array, earlier: Sequence[Seen]) -> Seen:
    """A message, with the histograms of siblings that follow: those of the parent minus those of the node."""
    trees = TreeArrays.of(payload["trees"], Bins.of(payload["bins"]))
    nodes = np.asarray(payload["slots"])[:, 1].tolist()
    known = {n: s for one in earlier if one.before == before for n, s in zip(one.nodes.tolist(), one.sums, strict=True)}
    found = dict(zip(nodes, sums, strict=True))
    for parent in np.flatnonzero(trees.feature >= 0).tolist():
        left = int(trees.child[parent])
        for child, sibling in ((left, left + 1), (left + 1, left)):
            if child in nodes and sibling not in nodes and parent in known:
                found[sibling] = known[parent] - found[child]
    return Seen(before, trees, np.array(list(found)), np.stack(list(found.values())))


@dataclass
class Attack:
    """The attack on one finished run with two classes."""

    result: hansa.Result

    def __post_init__(self) -> None:
        slots = self.result.state.slots
        self.bins, self.bits = Bins.of(slots["bins"]), slots["bits"]
        self.trees, self.base = TreeArrays.of(slots["trees"], self.bins), slots["base"].numpy()

    def rebuilt(self, view: Sequence[Seen]) -> set[tuple[int, ...]]:
        """The rows that the view shows: the bin of every feature, then the class."""
        rows: set[tuple[int, ...]] = set()
        for before in {one.before for one in view}:
            known: dict[tuple[int, int], list[int]] = {}  # of each gradient the bins, -1 if unknown, -2 if several
            for one in view:
                for sums in one.sums if one.before == before else ():
                    self._link(sums, known)
            rows |= {(*row, int(g < 0)) for (g, _), row in known.items() if min(row) >= 0}
        return rows

    def _link(self, sums: Array, known: dict[tuple[int, int], list[int]]) -> None:
        g, h, count = sums
        offsets = self.bins.offsets
        here: set[tuple[int, int]] = set()
        for feature, (begin, end) in enumerate(itertools.pairwise(offsets.tolist())):
            for at in (np.flatnonzero(count[begin:end] == 1) + begin).tolist():
                key = int(g[at]), int(h[at])
                here.add(key)
                self._note(known, key, feature, at - begin)
        total = int(count[: offsets[1]].sum())
        if len(here) != total or not 0 < total <= SUBSETS:
            return  # some gradients of the node are not known
        keys = np.array(sorted(here), dtype=np.int64)
        mixed = keys[:, 0] * 2**20 + keys[:, 1]  # one number for both sums
        half = len(keys) // 2
        low, high = _subset_sums(mixed[:half]), _subset_sums(mixed[half:])
        order = np.argsort(high, kind="stable")
        for feature, (begin, end) in enumerate(itertools.pairwise(offsets.tolist())):
            for at in (np.flatnonzero(count[begin:end] > 1) + begin).tolist():
                rest = g[at] * 2**20 + h[at] - low
                left, right = (np.searchsorted(high, rest, side, sorter=order) for side in ("left", "right"))
                found = np.flatnonzero(right > left)
                if len(found) != 1 or right[found[0]] - left[found[0]] != 1:
                    continue
                members = int(found[0]) | int(order[left[found[0]]]) << half
                if members.bit_count() == count[at]:
                    for k, (one, two) in enumerate(keys.tolist()):
                        if members >> k & 1:
                            self._note(known, (one, two), feature, at - begin)

    def _note(self, known: dict[tuple[int, int], list[int]], key: tuple[int, int], feature: int, bin: int) -> None:
        row = known.setdefault(key, [-1] * len(self.bins.widths))
        row[feature] = bin if row[feature] in (-1, bin) else -2

    def success(self, view: Sequence[Seen], x: Any, y: Any) -> tuple[float, float]:
        """The share of rows that the view rebuilds to the bin, and of rebuilt rows the share that exist (1 of none)."""
        true = [(*row, int(label)) for row, label in zip(self.bins.codes(x).T.tolist(), y, strict=True)]
        found = self.rebuilt(view)
        right = found & set(true)
        return sum(row in right for row in true) / len(true), len(right) / len(found) if found else 1.0

    def evidence(self, view: Sequence[Seen], x: Any, y: Any) -> Array:
        """For each message [messages, rows]: does it hold the row? Between -1 (no) and 1 (yes), a mean over features.

        An empty bin of the row's node says no. A bin with one row says yes if it shows the row's gradient.
        """
        codes, labels = self.bins.codes(x), np.asarray(y)
        margins, done = np.tile(self.base.astype(np.float64), (codes.shape[1], 1)), 0
        places = self.bins.offsets[:-1, None] + codes
        out = np.zeros((len(view), codes.shape[1]))
        for line, one in enumerate(view):
            if one.before != done:
                self.trees.first(one.before).add_to(margins, codes, self.bins, done)
                done = one.before
            exact = gradients.gradients("logistic", margins, labels)
            g, h = (gradients.rounded(values[:, 0], 1.0, self.bits) for values in exact)
            slot = np.full(len(one.trees.feature), -1)
            slot[one.nodes] = np.arange(len(one.nodes))
            at = slot[one.trees.leaves(codes, self.bins, 0)]
            found = one.sums[at[None, :], :, places]  # [features, rows, statistics]
            alone = (found[:, :, 0] == g) & (found[:, :, 1] == h)
            says = np.where(found[:, :, 2] <= 0, -1.0, np.where(found[:, :, 2] == 1, np.where(alone, 1.0, -1.0), 0.0))
            out[line] = np.where(at >= 0, says.mean(0), 0.0)
        return out

    def holder_scores(self, tap: Tap, x: Any, y: Any) -> Array:
        """How much more the messages of party 0 speak for a row than those of party 1."""
        first, second = (self.evidence(tap.parties[party], x, y).sum(0) for party in (0, 1))
        return first - second

    def informed_scores(self, view: Sequence[Seen], x: Any, y: Any, owner: Array, known: Array) -> Array:
        """The holder of the rows that are not `known`, from sums alone, by an attacker that knows those of the others.

        A party whose rows in a node are fewer than `min_rows` counts all of them with the sibling. So rows of one node
        that are missing together, or present together, have the same holder.
        """
        says = self.evidence(view, x, y)
        scores = np.zeros(says.shape[1])
        for line, one in enumerate(view):
            leaf = one.trees.leaves(self.bins.codes(x), self.bins, 0)
            for node in one.nodes.tolist():
                rows = leaf == node
                sides = [says[line, rows & known & (owner == party)] for party in (0, 1)]
                if all(len(side) for side in sides):
                    scores[rows] += says[line, rows] * (sides[0].mean() - sides[1].mean())
        return scores


def _subset_sums(numbers: Array) -> Array:
    """The sums of all subsets: subset k has the numbers of the bits of k."""
    sums = np.zeros(1, dtype=np.int64)
    for number in numbers:
        sums = np.concatenate([sums, sums + number])
    return sums


def auc(scores: Array, positive: Array) -> float:
    """The share of pairs that the scores order rightly; ties count half."""
    _, at, sizes = np.unique(scores, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(sizes) - (sizes - 1) / 2)[at]
    n = int(positive.sum())
    return float((ranks[positive].sum() - n * (n + 1) / 2) / (n * (len(scores) - n)))


def upper_bound(values: Sequence[float]) -> float:
    """The one-sided 95% bound of the mean over seeds: mean + t s / sqrt(n), with Student's t of n - 1 degrees."""
    from scipy.stats import t

    n = len(values)
    return float(np.mean(values) + t.ppf(0.95, n - 1) * np.std(values, ddof=1) / math.sqrt(n))


def boosted(parties: Sequence[tuple[Any, Any]], rounds: int, secure: bool, **fields: Any) -> tuple[Attack, Tap]:
    """Boost over the parties, in the clear or over masked sums, and listen."""
    task = hansa.Task(parties=list(parties), classes=2, loss="cross_entropy", model=None)
    with tapped() as tap:
        result = hansa.simulate(hansa.Boosting(**fields), task, rounds=rounds, engine="reference", progress=False,
                                privacy={"secure": "masking"} if secure else None)  # fmt: skip
    return Attack(result), tap
