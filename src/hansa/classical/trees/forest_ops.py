"""The party's side of random forests: sums over bootstrap samples, out-of-bag votes, and trees of its own."""

from __future__ import annotations

import math
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import numpy as np
import torch
from msgspec import Meta
from torch import Tensor

from hansa.classical.trees.bins import BINS, Bins
from hansa.classical.trees.coded import coded
from hansa.classical.trees.gradients import HELD_BITS, rounded
from hansa.classical.trees.growth import Growth, Slots
from hansa.classical.trees.histograms import POINTS, Reach, TreeOp, UnitBits, targets
from hansa.classical.trees.splits import SplitRule
from hansa.classical.trees.table import NAMES, TREES, Levels, TreeArrays, TreeTable
from hansa.core.entries import Sizes, check_size, stated
from hansa.core.fields import Owner
from hansa.core.op import Memory, Party, Payload, Reply, Shape
from hansa.core.quantities import SEEDS, SIZED, AnyCount, Centre, Seed
from hansa.core.registry import register
from hansa.core.sample_bounds import Bounds, PerSample
from hansa.core.shapes import UpTo
from hansa.numerics import rng
from hansa.plumbing.errors import PartyError

Array = np.ndarray[Any, Any]
MOST_TREES = 2**14
Trees = Annotated[int, Meta(ge=1, le=MOST_TREES)]
# Weights of Poisson(1): a sample with a uniform number u gets the number of entries that are at most u.
POISSON = np.cumsum([math.exp(-1) / math.factorial(k) for k in range(15)])
VOTES, SEEN, DATA = "forest/votes", "forest/trees", "forest/data"


def bootstrap(draws: Array) -> Array:
    """How often each sample counts in a tree: Poisson(1), from a uniform number per sample."""
    return np.searchsorted(POISSON, draws, side="right").astype(np.float64)


@dataclass(frozen=True)
class ForestSums(TreeOp):
    """What the ops of a forest share: statistics of samples, weighted by how often they are drawn.

    For classes the "gradients" are the weights of each class; for numbers (`classes` 0) the weighted targets, as whole
    numbers of the unit `bound` 2^-`bits` about `centre`. `first` is the number of earlier trees.
    """

    classes: Annotated[int, Meta(ge=0, le=2**12), SIZED] = 2
    centre: Centre = 0.0
    bound: Reach = 1.0
    bits: UnitBits = 30
    first: Annotated[int, Meta(ge=0, le=2**30), SEEDS] = 0
    key: Seed = 0
    drawn: bool = True
    min_rows: AnyCount = 1
    recalls: ClassVar[bool] = False

    @property
    def outputs(self) -> int:  # type: ignore[override]
        return max(1, self.classes)

    @property
    def constant(self) -> bool:  # type: ignore[override]
        return not self.drawn

    @property
    def highest(self) -> tuple[int, int]:
        most = len(POISSON) if self.drawn else 1
        return most * (1 if self.classes else 2**self.bits), most

    def check_ask(self, payload: Payload, sizes: Sizes) -> None:
        check_size(self.name, "classes", self.classes, sizes)
        super().check_ask(payload, sizes)

    def rule(self, min_samples: int) -> SplitRule:
        """How splits are judged: by the Gini impurity, or by the variance."""
        unit = 1.0 if self.classes else self.bound * 2.0**-self.bits
        return SplitRule(self.outputs, self.constant, unit, 1.0, l2=0.0, min_samples=min_samples)

    def values(self, party: Party, y: Tensor) -> Array:
        """The statistics [outputs, samples] without weights."""
        labels = targets(party, y, self.classes)
        if self.classes:
            drawn: Array = (labels == np.arange(self.classes)[:, None]).astype(np.float64)
            return drawn
        return rounded(labels - self.centre, self.bound, self.bits)[None]

    def weights(self, party: Party, tree: int) -> Array:
        """How often each sample counts in a tree of the ask."""
        return bootstrap(party.row_draws(self.key, self.first + tree)) if self.drawn else np.ones(party.n)

    def of_tree(self, statistics: Array, tree: int) -> Array:
        return statistics[tree]  # type: ignore[no-any-return]

    def used(self, used: Array, tree: int) -> Array:
        return used[tree]  # type: ignore[no-any-return]

    def of_trees(self, party: Party, y: Tensor, trees: int) -> tuple[Array, Array]:
        """The statistics [trees, rows, samples], and which samples count [trees, samples]."""
        values = self.values(party, y)
        if trees > MOST_TREES:
            raise PartyError(f"the ask is about {trees} trees, and {MOST_TREES} are the most")
        weights = np.stack([self.weights(party, tree) for tree in range(trees)])
        ones = np.ones_like(weights)[:, None]
        second = [] if self.constant else [weights[:, None]]
        return np.concatenate([weights[:, None] * values, *second, ones], axis=1), weights > 0

    def demands(self, n: int, payload: Payload) -> dict[str, int]:
        return {"steps": 1}


@register("forest-histograms")
@dataclass(frozen=True)
class ForestHistograms(ForestSums):
    """Sums over bootstrap samples, weighted by how often a sample was drawn, by node, feature and bin."""

    entries = ForestSums.entries

    def run(self, party: Party, payload: Payload, memory: Memory) -> tuple[Reply, Memory]:
        x, y = party.samples("statistics")
        bins = Bins.of(payload["bins"], math.prod(x.shape[1:]))
        trees = len(TreeArrays.of(payload["trees"], bins).roots)
        statistics, used = self.of_trees(party, y, trees)
        own = coded(x, bins, self.points(payload))
        sums = self.counted(own, bins, payload, statistics, used, max(self.min_rows, party.min_rows))
        return Reply({"sums": sums}, weight=len(y)), memory


@register("grow-forest")
@dataclass(frozen=True)
class GrowForest(ForestSums):
    """Trees that the party grows on its own samples, for bagging."""

    trees: Annotated[Trees, Owner(0, 100_000)] = 1
    max_depth: Annotated[Levels, Owner(0, 64)] = 6
    min_samples: AnyCount = 1
    columns: AnyCount = 1
    per_sample: ClassVar[Bounds] = {}  # trees are no sums
    entries = stated(bins=BINS)

    def check_ask(self, payload: Payload, sizes: Sizes) -> None:
        check_size(self.name, "classes", self.classes, sizes)
        Bins.of(payload["bins"], sizes.get("features"))

    def run(self, party: Party, payload: Payload, memory: Memory) -> tuple[Reply, Memory]:
        x, y = party.samples("train")
        bins = Bins.of(payload["bins"], math.prod(x.shape[1:]))
        statistics, used = self.of_trees(party, y, self.trees)
        own = coded(x, bins)
        features = np.arange(len(bins.widths))

        async def ask(trees: TreeArrays, nodes: Slots) -> Array:
            wanted = {"trees": trees.payload(), "slots": torch.tensor(nodes), "features": torch.from_numpy(features)}
            return self.counted(own, bins, wanted, statistics, used, 1).numpy()

        rule = self.rule(max(self.min_samples, self.min_rows, party.min_rows))
        table = TreeTable(self.outputs)
        drawn = drawn_columns(rng.folded(self.key, party.id), self.first, len(features), self.columns)
        growth = Growth(ask, bins, features, rule, lambda sums: mean_value(rule, sums), self.max_depth, None, drawn)
        _run(growth.grow(table, [-1] * self.trees))
        return Reply(dict(table.arrays().payload()), weight=len(y)), memory

    def expects(self, payload: Payload) -> dict[str, Shape]:
        nodes = self.trees * min(2 ** (self.max_depth + 1), 2**20)
        widest = int(Bins.of(payload["bins"]).widths.max())
        kinds = {"gain": torch.float64, "value": torch.float64, "sets": torch.uint8}
        sizes: dict[str, tuple[int | UpTo, ...]] = {name: (UpTo(nodes),) for name in NAMES}
        sizes |= {"roots": (self.trees,), "outputs": (self.trees,), "value": (UpTo(nodes), self.outputs),
                  "sets": (UpTo(nodes), UpTo(widest))}  # fmt: skip
        return {name: (sizes[name], kinds.get(name, torch.int32)) for name in NAMES}

    def impossible(self, reply: Reply, payload: Payload) -> str | None:
        bins = Bins.of(payload["bins"])
        try:
            trees = TreeArrays.of(reply.tensors, bins)
        except PartyError as reason:
            return str(reason)
        low, high = (0.0, 1.0) if self.classes else (-self.bound, self.bound)
        if len(trees.value) and not low - 1e-9 <= float(trees.value.min()) <= float(trees.value.max()) <= high + 1e-9:
            return f"its trees have values outside {low:g} to {high:g}"
        return "its trees must add to all outputs" if bool((trees.outputs != -1).any()) else None


@register("out-of-bag")
@dataclass(frozen=True)
class OutOfBag(ForestSums):
    """Errors of a forest on samples that its trees were not grown on: wrong classes or squared errors, and samples.

    `first` is the number of all trees. The party remembers the votes of the trees that it has seen before.
    """

    entries = stated(bins=BINS, trees=TREES, points=POINTS)

    def check_ask(self, payload: Payload, sizes: Sizes) -> None:
        check_size(self.name, "classes", self.classes, sizes)
        self._trees(payload, Bins.of(payload["bins"], sizes.get("features")))

    def _trees(self, payload: Payload, bins: Bins) -> TreeArrays:
        trees = TreeArrays.of(payload["trees"], bins)
        if len(trees.roots) != self.first or trees.value.shape[1] != self.outputs:
            raise PartyError(f"malformed ask: it should have {self.first} trees of {self.outputs} outputs")
        return trees

    @property
    def per_sample(self) -> Bounds:  # type: ignore[override]
        return {"errors": PerSample(self._most), "count": PerSample()}

    @property
    def _most(self) -> int:
        """The largest error of a sample."""
        return 1 if self.classes else 4 << HELD_BITS

    def run(self, party: Party, payload: Payload, memory: Memory) -> tuple[Reply, Memory]:
        x, y = party.samples("statistics")
        bins = Bins.of(payload["bins"], math.prod(x.shape[1:]))
        trees, width = self._trees(payload, bins), self.outputs
        own, labels = coded(x, bins, self.points(payload)), targets(party, y, self.classes)
        known = memory.get(VOTES)
        same = known is not None and known.shape == (len(labels), width + 1) and int(memory[DATA]) == own.digest
        seen = int(memory[SEEN]) if same else 0
        votes = np.zeros((len(labels), width + 1))
        # In a sum that must hide the reply, votes of trees that only this party was sent must not count.
        if same and known is not None and seen <= self.first and not party.min_drawn:
            votes = known.cpu().numpy().copy()
        else:
            seen = 0
        for tree in range(seen, self.first):
            out = np.flatnonzero(bootstrap(party.row_draws(self.key, tree)) == 0)
            leaves = trees.leaves(np.ascontiguousarray(own.codes[:, out]), bins, tree)
            votes[out, :width] += trees.value[leaves]
            votes[out, width] += 1
        voted = votes[:, width] > 0
        found = votes[voted, :width] / votes[voted, width:]
        if self.classes:
            errors = (found.argmax(1) != labels[voted]).sum()
        else:
            apart = (found[:, 0] - (labels[voted] - self.centre)) / self.bound
            errors = np.rint(np.minimum(apart**2 * 2.0**HELD_BITS, self._most)).sum()
        kept = {VOTES: torch.from_numpy(votes), SEEN: torch.tensor(self.first), DATA: torch.tensor(own.digest)}
        tensors = {"errors": torch.tensor(int(errors)), "count": torch.tensor(int(voted.sum()))}
        return Reply(tensors, weight=len(labels)), {**memory, **kept}

    def expects(self, payload: Payload) -> dict[str, Shape]:
        return {"errors": ((), torch.int64), "count": ((), torch.int64)}

    def impossible(self, reply: Reply, payload: Payload) -> str | None:
        errors, count = int(reply.tensors["errors"]), int(reply.tensors["count"])
        return "it has more errors than samples" if errors > count * self._most else None


def mean_value(rule: SplitRule, sums: Array) -> Array:
    """The value of a node of a forest: class frequencies, or the mean target; 0 without samples."""
    g, h, _ = rule.parts(sums)
    return g / h if h > 0 else 0.0 * g


def drawn_columns(key: int, first: int, features: int, count: int) -> Any:
    """A function that draws the features of a node, by key, tree and node; None if nodes use all features."""
    if count >= features:
        return None

    def draw(tree: int, node: int) -> Array:
        allowed = np.zeros(features, dtype=bool)
        allowed[rng.shuffled(rng.folded(key, first + tree, node), features)[:count]] = True
        return allowed

    return draw


def _run(growth: Coroutine[Any, Any, None]) -> None:
    """Run a coroutine that waits for nothing."""
    try:
        growth.send(None)
    except StopIteration:
        return
    raise TypeError("a party's own trees must not wait")
