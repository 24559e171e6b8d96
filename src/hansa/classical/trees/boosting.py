"""Gradient boosting on histograms (Friedman 2001; Chen and Guestrin 2016): parties send sums, the aggregator grows trees."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from hansa.classical.trees import cuts as cut_points
from hansa.classical.trees import gradients
from hansa.classical.trees.bins import MOST_BINS, Bins, rows_of
from hansa.classical.trees.growth import Growth, Slots
from hansa.classical.trees.histograms import GradientHistograms
from hansa.classical.trees.splits import SplitRule
from hansa.classical.trees.table import MOST_DEPTH, TreeArrays, TreeTable
from hansa.classical.trees.targets import ClassCounts, mean_and_bound
from hansa.core import rng
from hansa.core.algorithm import Algorithm, Problem, State
from hansa.core.errors import ConfigError, RoundAborted
from hansa.core.federation import Federation
from hansa.core.objective import Objective
from hansa.core.op import Payload
from hansa.core.params import Params
from hansa.core.predictor import Predictor
from hansa.core.registry import register

NUMBERS = 2**22  # of a reply: more nodes are asked for in turn
CUTS = ("quantiles", "extents")


class _Stop(Exception):
    """The loss of held-out samples has not improved for long enough."""


@register("boosting")
@dataclass(frozen=True)
class Boosting(Algorithm):
    """Gradient boosted trees from sums. Equal to histogram boosting on the samples of all parties, for any partition.

    Each round adds a tree, with more than two classes one per class. A split has the largest gain of Chen and Guestrin
    2016 (XGBoost), a leaf the value -lr G / (H + l2). Trees grow level by level, or leaf by leaf up to `leaves` leaves
    (`growth = "leaves"`; Ke et al. 2017). Missing values take the direction that gains more. `categorical` lists columns
    of categories, which are split into two groups. `rows` and `columns` are the shares of samples and features of a
    tree. With `held_out`, that share of each party's samples measures the model, and `patience` rounds without progress
    end the run.
    """

    lr: float = 0.3
    max_depth: int = 6
    bins: int = 256
    l2: float = 1.0
    gamma: float = 0.0
    min_samples: int = 1
    min_weight: float = 0.0
    growth: str = "levels"
    leaves: int = 31
    rows: float = 1.0
    columns: float = 1.0
    categorical: tuple[int, ...] = ()
    cuts: str = "quantiles"
    held_out: float = 0.0
    patience: int | None = None
    min_rows: int = 1
    trains: ClassVar[bool] = False
    takes_missing: ClassVar[bool] = True

    def __post_init__(self) -> None:
        _check_shared(self)
        if not 0 < self.lr < math.inf:
            raise ConfigError(f"boosting: lr must be positive, got {self.lr}")
        for name in ("l2", "gamma", "min_weight"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ConfigError(f"boosting: {name} must be a number from 0, got {getattr(self, name)}")
        for name in ("rows", "columns"):
            if not 0 < getattr(self, name) <= 1:
                raise ConfigError(f"boosting: {name} is a share above 0 and at most 1, got {getattr(self, name)}")
        if self.growth not in ("levels", "leaves"):
            raise ConfigError(f"boosting: growth must be 'levels' or 'leaves', got {self.growth!r}")
        if not 2 <= self.leaves <= 2**14:
            raise ConfigError(f"boosting: leaves must lie in 2..16384, got {self.leaves}")
        if not 0 <= self.held_out < 1:
            raise ConfigError(f"boosting: held_out is a share from 0 to below 1, got {self.held_out}")
        if self.patience is not None and (self.patience < 1 or not self.held_out):
            raise ConfigError("boosting: patience is a number of rounds from 1, and needs held_out above 0 (0.1)")

    @property
    def verbs(self) -> frozenset[str]:
        return frozenset({"reduce"})

    def check(self, problem: Problem) -> None:
        super().check(problem)
        check_columns(self.name, self.categorical, math.prod(problem.shape))

    def init(self, problem: Problem) -> State:
        classes = problem.classes or 0
        loss = "squared" if not classes else "logistic" if classes == 2 else "softmax"
        slots = {"features": math.prod(problem.shape), "classes": classes, "loss": loss,
                 "key": rng.key(problem.seed, "boosting"), "trees": TreeArrays.none(1).payload(),
                 "held": torch.empty(0, dtype=torch.float64), "done": False}  # fmt: skip
        return State(Params.none(), slots=slots)

    async def round(self, fed: Federation, state: State) -> State:
        slots = dict(state.slots)
        if "bins" not in slots:
            slots |= await self._start(fed, slots)
        bins = Bins.of(slots["bins"])
        before = TreeArrays.of(slots["trees"], bins)
        table, sums = TreeTable(1), _Sums(self, fed, slots, bins, before)
        growth = Growth(sums.ask, bins, sums.features, self._rule(slots), lambda s: self._value(slots, s),
                        self.max_depth, self.leaves if self.growth == "leaves" else None)  # fmt: skip
        try:
            await growth.grow(table, range(gradients.outputs_of(slots["loss"], slots["classes"])))
        except _Stop:
            best = int(slots["held"].argmin()) if len(slots["held"]) else 0
            return state.replace(**slots, best=best, done=True)
        return state.replace(**{**slots, "trees": before.joined(table.arrays()).payload()})

    async def _start(self, fed: Federation, slots: Mapping[str, Any]) -> dict[str, Any]:
        """What is learned once: the base scores, the scale of gradients, and the bins."""
        bound = 1.0
        if slots["classes"]:
            counts = (await fed.reduce(ClassCounts(slots["classes"]))).sums["counts"].cpu().numpy()
            base, n = gradients.base_scores(slots["loss"], counts), int(counts.sum())
        else:
            mean, reach, n = await mean_and_bound(fed)
            base, bound = np.array([mean]), 4 * reach  # outputs may pass the targets: room for that
        bins = await cut_points.learn_bins(fed, slots["features"], self.bins, self.categorical, self.cuts)
        return {"base": torch.from_numpy(base), "bound": bound, "bits": gradients.unit_bits(n), "bins": bins.payload()}

    def _rule(self, slots: Mapping[str, Any]) -> SplitRule:
        unit = 2.0 ** -slots["bits"]
        return SplitRule(1, slots["loss"] == "squared", slots["bound"] * unit, unit, self.l2, self.gamma,
                         self.min_samples, self.min_weight)  # fmt: skip

    def _value(self, slots: Mapping[str, Any], sums: Any) -> Any:
        g, h, _ = self._rule(slots).parts(sums)
        below = h + self.l2
        return -self.lr * g / below if below > 0 else 0.0 * g

    def finished(self, state: State) -> bool:
        return bool(state.slots["done"])

    def predictor(self, state: State) -> tuple[str, dict[str, Any]]:
        slots = state.slots
        names = ("bins", "trees", "base", "best")
        return "trees", {"classes": slots["classes"], "loss": slots["loss"],
                         **{name: slots[name] for name in names if name in slots}}  # fmt: skip


class _Sums:
    """Asks of one round: sums of nodes, in parts that fit a message, each checked."""

    def __init__(self, algorithm: Boosting, fed: Federation, slots: dict[str, Any], bins: Bins,
                 before: TreeArrays) -> None:  # fmt: skip
        self.algorithm, self.fed, self.slots, self.bins, self.before = algorithm, fed, slots, bins, before
        everything = len(bins.widths)
        count = max(1, round(algorithm.columns * everything))
        draws = rng.generator(slots["key"], "columns", len(before.roots))
        self.features = np.sort(draws.permutation(everything)[:count]) if count < everything else np.arange(everything)
        self.op = GradientHistograms(slots["loss"], slots["classes"], slots["bound"], slots["bits"], len(before.roots),
                                     algorithm.held_out, algorithm.rows, slots["key"], algorithm.min_rows)  # fmt: skip
        self.first = True

    async def ask(self, trees: TreeArrays, nodes: Slots) -> Any:
        size = self.op.rows * int(self.bins.widths[self.features].sum())
        step = max(1, NUMBERS // size)
        parts = [await self._part(trees, nodes[at : at + step]) for at in range(0, len(nodes), step)]
        return np.concatenate(parts)

    async def _part(self, trees: TreeArrays, nodes: Slots) -> Any:
        payload: dict[str, Any] = {
            "bins": self.slots["bins"], "trees": trees.payload(), "base": self.slots["base"],
            "slots": torch.tensor(nodes, dtype=torch.int64), "features": torch.from_numpy(self.features),
        }  # fmt: skip
        if self.first:
            payload["before"] = self.before.payload()
        got = await self.fed.reduce(self.op, payload, uniform=True)
        found = got.sums["sums"].cpu().numpy()
        why = self.op.contradiction(found, payload, 2**46)
        if why is not None:
            raise RoundAborted(f"the sums of the parties are impossible ({why}): some party sent wrong numbers")
        if self.first:
            self.first = False
            self._judge(int(got.sums["loss"]), int(got.sums["held"]))
        return found

    def _judge(self, loss: int, held: int) -> None:
        """Keep the mean loss of the held-out samples before this round; stop if it has not improved for long."""
        if not self.algorithm.held_out or held <= 0:
            return
        known = torch.cat([self.slots["held"], torch.tensor([loss / held * 2.0**-gradients.HELD_BITS], dtype=torch.float64)])
        self.slots["held"] = known
        patience = self.algorithm.patience
        if patience is not None and len(known) - 1 - int(known.argmin()) >= patience:
            raise _Stop


def _check_shared(part: Any) -> None:
    """Refuse fields, common to boosting and forests, that make no sense."""
    if not 1 <= part.max_depth <= MOST_DEPTH:
        raise ConfigError(f"{part.name}: max_depth must lie in 1..{MOST_DEPTH}, got {part.max_depth}")
    if not 2 <= part.bins <= MOST_BINS:
        raise ConfigError(f"{part.name}: bins must lie in 2..{MOST_BINS}, got {part.bins}")
    if part.min_samples < 1 or part.min_rows < 1:
        raise ConfigError(f"{part.name}: min_samples and min_rows must be at least 1")
    if part.cuts not in CUTS:
        raise ConfigError(f"{part.name}: cuts must be one of {', '.join(CUTS)}, got {part.cuts!r}")
    if list(part.categorical) != sorted(set(part.categorical)) or any(f < 0 for f in part.categorical):
        raise ConfigError(f"{part.name}: categorical lists columns from 0 in ascending order, got {part.categorical}")


def check_columns(name: str, categorical: tuple[int, ...], features: int) -> None:
    """Refuse categorical columns that samples do not have."""
    if categorical and categorical[-1] >= features:
        raise ConfigError(f"{name}: categorical names column {categorical[-1]}, and samples have {features} columns")


@register("trees")
@dataclass(frozen=True)
class TreesPredictor(Predictor):
    """The summed values of a sample's leaves: class scores, or a number; for two classes those of class 0 are 0."""

    def outputs(self, objective: Objective, payload: Payload, x: Tensor) -> Tensor:
        width = gradients.outputs_of(payload["loss"], payload["classes"])
        if "bins" not in payload:  # nothing learned yet
            return torch.zeros(len(x), max(width, payload["classes"]), dtype=torch.float64, device=x.device)
        rows = rows_of(x)
        bins = Bins.of(payload["bins"], rows.shape[1])
        margins = np.tile(payload["base"].cpu().numpy(), (len(rows), 1))
        TreeArrays.of(payload["trees"], bins).add_to(margins, bins.codes(rows), bins)
        if payload["loss"] == "logistic":
            margins = np.concatenate([np.zeros_like(margins), margins], 1)
        return torch.from_numpy(margins).to(x.device)
