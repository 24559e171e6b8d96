"""Random forests (Breiman 2001): grown together from sums, or by each party on its own samples."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
import torch

from hansa.classical.trees.bins import BinCount, Bins
from hansa.classical.trees.ensemble import SumsAsker, TreeEnsemble
from hansa.classical.trees.forest_ops import (
    ForestHistograms,
    ForestSums,
    GrowForest,
    OutOfBag,
    Trees,
    drawn_columns,
    mean_value,
)
from hansa.classical.trees.gradients import HELD_BITS, unit_bits
from hansa.classical.trees.growth import Growth
from hansa.classical.trees.table import Levels, TreeArrays, TreeTable
from hansa.classical.trees.targets import mean_and_bound
from hansa.core.algorithm import Problem, State
from hansa.core.declared_ops import DeclaredOps, OpenOp
from hansa.core.federation import Federation
from hansa.core.quantities import Share
from hansa.core.registry import register
from hansa.numerics import rng
from hansa.numerics.params import Params
from hansa.plumbing.errors import ConfigError, RoundAborted

AnyForestSums = TypeVar("AnyForestSums", bound=ForestSums)


@register("random-forest")
@dataclass(frozen=True)
class RandomForest(TreeEnsemble):
    """A random forest over all parties: `trees` trees, `per_round` of them in each round.

    With `growth = "shared"` the aggregator grows each tree from sums over all parties. Samples are drawn by Poisson(1)
    weights of key, tree, party and row, so a tree is that of the Poisson bootstrap of all samples (Oza and Russell
    2001). Without `bootstrap` every tree uses each sample once. A node tries the share `columns` of the features, drawn
    by key; by default the square root of their number for classes, and all of them for numbers. Splits have the largest
    decrease of the Gini impurity or of the variance. With `growth = "local"` each party grows trees on its own
    bootstrap samples, and the aggregator collects them, weighted by the parties' numbers of samples: one exchange, but
    another model, and every party shows its trees. The state has the out-of-bag error (`oob`): the share of wrong
    classes or the mean squared error, of samples at the trees that did not draw them.
    """

    max_depth: Levels = 10
    bins: BinCount = 64
    trees: Trees = 100
    per_round: Trees = 10
    columns: Share | None = None
    bootstrap: bool = True
    growth: str = "shared"

    @property
    def ops(self) -> DeclaredOps:
        sums = tuple(OpenOp.of(name, self, "min_rows") for name in ("forest-histograms", "out-of-bag"))
        grown = OpenOp.of("grow-forest", self, "min_rows", "max_depth", "min_samples")
        return (*(super().ops or ()), *(sums if self.growth == "shared" else (grown,)))

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.growth not in ("shared", "local"):
            raise ConfigError(f"random-forest: growth must be 'shared' or 'local', got {self.growth!r}")
        if self.growth == "local" and self.cuts == "pax":
            raise ConfigError("random-forest: trees that parties grow alone have common cuts; use cuts = 'quantiles'")

    @property
    def verbs(self) -> frozenset[str]:
        return super().verbs | (frozenset({"gather"}) if self.growth == "local" else frozenset())

    @property
    def sums_alone(self) -> str | None:
        return "algorithm.growth = 'shared'" if self.growth == "local" else super().sums_alone

    def init(self, problem: Problem) -> State:
        classes = problem.classes or 0
        slots = {"features": math.prod(problem.shape), "classes": classes, "loss": "forest",
                 "key": rng.key(problem.seed, "forest"), "trees": TreeArrays.none(max(1, classes)).payload(),
                 "centre": 0.0, "bound": 1.0, "bits": 1}  # fmt: skip
        return State(Params.none(), slots=slots)

    async def round(self, fed: Federation, state: State) -> State:
        slots = dict(state.slots)
        if "bins" not in slots:
            if not slots["classes"]:
                slots["centre"], slots["bound"], n = await mean_and_bound(fed)
                slots["bits"] = unit_bits(16 * n)
            slots |= await self.learn_bins(fed, slots["features"])
        bins = Bins.of(slots["bins"])
        before = TreeArrays.of(slots["trees"], bins)
        grow = self._shared if self.growth == "shared" else self._local
        trees = before.joined(await grow(fed, slots, bins, len(before.roots)))
        if self.bootstrap and self.growth == "shared":
            slots["oob"] = await self._out_of_bag(fed, slots, trees)
        return state.replace(**{**slots, "trees": trees.payload()})

    def _count(self, done: int) -> int:
        """The trees of this round."""
        return min(self.per_round, self.trees - done)

    def _columns(self, slots: Mapping[str, Any]) -> int:
        features: int = slots["features"]
        share = self.columns if self.columns is not None else features**-0.5 if slots["classes"] else 1.0
        return max(1, round(share * features))

    def _op(self, kind: type[AnyForestSums], slots: Mapping[str, Any], first: int) -> AnyForestSums:
        return kind(slots["classes"], slots["centre"], slots["bound"], slots["bits"], first, slots["key"],
                    self.bootstrap, self.min_rows)  # fmt: skip

    async def _shared(self, fed: Federation, slots: Mapping[str, Any], bins: Bins, done: int) -> TreeArrays:
        op, features = self._op(ForestHistograms, slots, done), np.arange(len(bins.widths))
        sums = SumsAsker(fed, op, bins, features, {"bins": slots["bins"]}, slots["points"])
        rule, table = op.rule(self.min_samples), TreeTable(op.outputs)
        drawn = drawn_columns(slots["key"], done, len(features), self._columns(slots))
        growth = Growth(sums.ask, bins, features, rule, lambda found: mean_value(rule, found), self.max_depth, None,
                        drawn)  # fmt: skip
        await growth.grow(table, [-1] * self._count(done))
        return table.arrays()

    async def _local(self, fed: Federation, slots: Mapping[str, Any], bins: Bins, done: int) -> TreeArrays:
        """Trees of each party, about `per_round` of all parties together; their values weigh as the party's samples."""
        each = -(-self._count(done) // len(fed.cohort))
        op = replace(self._op(GrowForest, slots, done), trees=each, max_depth=self.max_depth,
                     min_samples=self.min_samples, columns=self._columns(slots))  # fmt: skip
        got = await fed.gather(op, {"bins": slots["bins"]})
        mean = sum(reply.weight for reply in got.replies) / len(got.replies)
        trees = TreeArrays.none(op.outputs)
        for reply in got.replies:
            own = TreeArrays.of(reply.tensors, bins)
            trees = trees.joined(replace(own, value=own.value * (reply.weight / mean)))
        return trees

    async def _out_of_bag(self, fed: Federation, slots: Mapping[str, Any], trees: TreeArrays) -> float:
        op = self._op(OutOfBag, slots, len(trees.roots))
        each = {int(party): {"points": number} for party, number in slots["points"].items()}
        payload = {"bins": slots["bins"], "trees": trees.payload()}
        sums = (await fed.reduce(op, payload, uniform=True, each=each)).sums
        errors, count = int(sums["errors"]), int(sums["count"])
        if count < 0 or errors < 0:
            raise RoundAborted("the out-of-bag errors of the parties are impossible: some party sent wrong numbers")
        scale = 1.0 if slots["classes"] else slots["bound"] ** 2 * 2.0**-HELD_BITS
        return errors / count * scale if count else 0.0

    def finished(self, state: State) -> bool:
        return len(state.slots["trees"]["roots"]) >= self.trees

    def predictor(self, state: State) -> tuple[str, dict[str, Any]]:
        slots = state.slots
        names = ("classes", "loss", "centre", "bins", "trees", "oob")
        base = torch.zeros(max(1, slots["classes"]), dtype=torch.float64)
        return "trees", {"base": base, **{name: slots[name] for name in names if name in slots}}
