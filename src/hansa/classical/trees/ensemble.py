"""What boosting and forests share: their settings, the bins, the asks for sums, and prediction."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import numpy as np
import torch
from msgspec import Meta
from torch import Tensor

from hansa.classical.trees import cuts as cut_points
from hansa.classical.trees.bins import BINS, BinCount, Bins, rows_of
from hansa.classical.trees.growth import Slots
from hansa.classical.trees.histograms import TreeOp
from hansa.classical.trees.table import TREES, Levels, TreeArrays
from hansa.core.algorithm import Algorithm, Problem
from hansa.core.applies import Applies, If
from hansa.core.ask import Reduced
from hansa.core.declared_ops import DeclaredOps, OpenOp
from hansa.core.entries import Number, Shaped, Sizes, Text, optional, stated
from hansa.core.federation import Federation
from hansa.core.op import Payload
from hansa.core.predictor import Predictor
from hansa.core.quantities import AnyCount, Count
from hansa.core.registry import register
from hansa.numerics.objective import Objective
from hansa.plumbing.errors import ConfigError, PartyError, RoundAborted

NUMBERS = 2**22  # of a reply: the sums of more nodes are asked for in turn
BY_SUMS, BY_PARTY = ("quantiles", "extents", "public"), ("exact", "sketch", "pax")
Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class TreeEnsemble(Algorithm):
    """Base of boosting and forests.

    `bins` is the most bins of a feature. `cuts` says where features are cut. Learned from sums: at "quantiles" of all
    samples, or in parts of equal width between the "extents". Without any sample: in parts of equal width of the
    `span`, a lowest and a highest value ("public"). From values of single parties, which the aggregator then sees:
    between all values ("exact"), at quantiles of merged summaries of the rank error `error` ("sketch"), or at the
    points of party-adaptive summaries ("pax"). `categorical` lists the columns of categories, which are whole numbers
    from 0; they are split into two groups. `min_samples` is the fewest samples of a leaf over all parties, `min_rows`
    the fewest of a single party in the sums of a node: its rows in a smaller node are counted with those of the
    sibling.
    """

    max_depth: Levels = 6
    bins: BinCount = 256
    min_samples: Count = 1
    min_rows: Count = 1
    categorical: tuple[AnyCount, ...] = ()
    cuts: str = "quantiles"
    error: Annotated[float, Meta(ge=1e-4, le=0.5, description="a share of the samples")] = 0.001
    span: tuple[float, ...] = ()
    trains: ClassVar[bool] = False
    takes_missing: ClassVar[bool] = True
    applies: ClassVar[Applies] = {"error": If("cuts", "sketch", "pax")}

    @property
    def ops(self) -> DeclaredOps:
        names = ("class-counts", "target-range", "category-counts", "beyond-edges", "value-profile", "rank-counts",
                 "sample-count", "quantile-summary")  # fmt: skip
        return tuple(map(OpenOp, names))

    def __post_init__(self) -> None:
        if self.cuts not in BY_SUMS + BY_PARTY:
            raise ConfigError(f"{self.name}: cuts must be one of {', '.join(BY_SUMS + BY_PARTY)}, got {self.cuts!r}")
        spans = len(self.span) == 2 and self.span[0] < self.span[1]
        if (self.cuts == "public") != bool(self.span) or (self.span and not spans):
            raise ConfigError(
                f"{self.name}: cuts = 'public' and span belong together; span is a lowest and a highest value, such as "
                f"[-4.0, 4.0], got {list(self.span)}"
            )
        if list(self.categorical) != sorted(set(self.categorical)):
            raise ConfigError(f"{self.name}: categorical lists columns in rising order, got {list(self.categorical)}")

    @property
    def verbs(self) -> frozenset[str]:
        return frozenset({"reduce"} if self.cuts in BY_SUMS else {"reduce", "gather"})

    @property
    def sums_alone(self) -> str | None:
        return None if self.cuts in BY_SUMS else "algorithm.cuts = 'quantiles'"

    def check(self, problem: Problem) -> None:
        super().check(problem)
        features = math.prod(problem.shape)
        if self.categorical and self.categorical[-1] >= features:
            raise ConfigError(
                f"{self.name}: categorical names column {self.categorical[-1]}, and samples have {features} columns"
            )
        if self.cuts == "pax" and problem.cohort_size < problem.parties:
            raise ConfigError(
                f"{self.name}: cuts = 'pax' needs every party in every round; set the cohort to 1.0 (it selects "
                f"{problem.cohort_size} of {problem.parties})"
            )

    async def learn_bins(self, fed: Federation, features: int) -> dict[str, Any]:
        """The bins, and for party-adaptive ones the number of points of each party."""
        rule = cut_points.BinRule(self.bins, self.categorical, self.cuts, self.error, self.span)
        bins, points = await rule.learn(fed, features)
        return {"bins": bins.payload(), "points": {str(party): number for party, number in points.items()}}


@dataclass
class SumsAsker:
    """Asks for the sums of nodes, in parts that fit a message, and checks them."""

    fed: Federation
    op: TreeOp
    bins: Bins
    features: Array
    payload: dict[str, Any]
    points: Mapping[str, int]

    async def ask(self, trees: TreeArrays, nodes: Slots) -> Array:
        """The sums [nodes, statistics, bins]."""
        size = self.op.rows * int(self.bins.widths[self.features].sum())
        step = max(1, NUMBERS // size)
        return np.concatenate([await self._part(trees, nodes[at : at + step]) for at in range(0, len(nodes), step)])

    async def _part(self, trees: TreeArrays, nodes: Slots) -> Array:
        slots = torch.tensor(nodes, dtype=torch.int64)
        features = torch.from_numpy(self.features)
        payload = {**self.payload, "trees": trees.payload(), "slots": slots, "features": features}
        each = {int(party): {"points": number} for party, number in self.points.items()}
        got = await self.fed.reduce(self.op, payload, uniform=True, each=each)
        found: Array = got.sums["sums"].cpu().numpy()
        why = self.op.contradiction(found, payload, 2**46, got.count)
        if why is not None:
            raise RoundAborted(f"the sums of the parties are impossible ({why}): some party sent wrong numbers")
        self.answered(got)
        return found

    def answered(self, got: Reduced) -> None:
        """Called with each answer."""


@register("trees")
@dataclass(frozen=True)
class TreesPredictor(Predictor):
    """The sum or the mean of the values of a sample's leaves: class scores, or a number.

    Boosting adds them to base scores; for two classes the score of class 0 is 0. A forest has the mean of the trees'
    class frequencies, whose logarithms are the scores.
    """

    entries = stated(
        classes=Number(whole=True, least=0), loss=Text(), base=Shaped(shape=(None,), optional=True),
        centre=Number(optional=True), oob=Number(optional=True),
        bins=optional(BINS), trees=optional(TREES),
    )  # fmt: skip

    def check_payload(self, payload: Payload, sizes: Sizes) -> None:
        if "bins" not in payload:  # nothing learned yet
            return
        if not {"trees", "base"} <= set(payload):
            raise PartyError("malformed ask: trees, bins and base belong together")
        trees = TreeArrays.of(payload["trees"], Bins.of(payload["bins"], sizes.get("features")))
        width, all_outputs = len(payload["base"]), bool((trees.outputs == -1).any())
        if trees.outputs.max(initial=-1) >= width or (all_outputs and trees.value.shape[1] not in (1, width)):
            raise PartyError("malformed trees: they add to other outputs than the model has")

    def outputs(self, objective: Objective, payload: Payload, x: Tensor) -> Tensor:
        loss, classes = payload["loss"], payload["classes"]
        if "bins" not in payload:  # nothing learned yet
            return torch.zeros(len(x), classes or 1, dtype=torch.float64, device=x.device)
        rows = rows_of(x)
        bins = Bins.of(payload["bins"], rows.shape[1])
        trees = TreeArrays.of(payload["trees"], bins)
        margins = np.tile(payload["base"].cpu().numpy(), (len(rows), 1))
        trees.add_to(margins, bins.codes(rows), bins)
        scores = scores_of(margins, loss, classes, len(trees.roots), payload.get("centre", 0.0))
        return torch.from_numpy(scores).to(x.device)


def scores_of(margins: Array, loss: str, classes: int, trees: int, centre: float) -> Array:
    """The scores of classes, or numbers, from the sums of the trees' values."""
    if loss == "forest":
        means = margins / max(1, trees)
        return np.log(np.maximum(means, 1e-15)) if classes else means + centre
    return np.concatenate([np.zeros_like(margins), margins], 1) if loss == "logistic" else margins
