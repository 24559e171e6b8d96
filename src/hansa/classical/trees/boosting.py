"""Gradient boosting on histograms (Friedman 2001; Chen and Guestrin 2016): the aggregator grows trees from sums."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, ClassVar

import numpy as np
import torch
from msgspec import Meta
from torch import Tensor

from hansa.classical.trees import gradients
from hansa.classical.trees.bins import Bins
from hansa.classical.trees.ensemble import SumsAsker, TreeEnsemble
from hansa.classical.trees.growth import Growth
from hansa.classical.trees.histograms import GradientHistograms, history
from hansa.classical.trees.private import SIGMAS, PrivateHistograms
from hansa.classical.trees.splits import SplitRule
from hansa.classical.trees.table import TreeArrays, TreeTable
from hansa.classical.trees.targets import mean_and_bound
from hansa.core.algorithm import Problem, State
from hansa.core.applies import Applies, If
from hansa.core.ask import Reduced
from hansa.core.budget import Budget
from hansa.core.class_counts import ClassCounts
from hansa.core.declared_ops import DeclaredOps, OpenOp
from hansa.core.federation import Federation
from hansa.core.quantities import BelowOne, Count, Delta, Epsilon, Factor, Rate, Share
from hansa.core.registry import register
from hansa.numerics import rng
from hansa.numerics.params import Params
from hansa.plumbing.errors import ConfigError


class _Stop(Exception):
    """The loss of held-out samples has not improved for long enough."""


@register("boosting")
@dataclass(frozen=True)
class Boosting(TreeEnsemble):
    """Gradient boosted trees from sums. Equal to histogram boosting on the samples of all parties, for any partition.

    Each round adds a tree, with more than two classes one per class. A split has the largest gain of Chen and Guestrin
    2016 (XGBoost), a leaf the value -lr G / (H + l2). Trees grow level by level, or leaf by leaf up to `leaves` leaves
    (`growth = "leaves"`; Ke et al. 2017). Missing values take the direction that gains more. `rows` and `columns` are
    the shares of samples and features of a tree. With `held_out`, that share of each party's samples measures the
    model; after `patience` rounds without progress the run ends, with the trees of the best round. With `sigma` each
    party adds noise to its sums, and declines when its next sums would exceed `epsilon` at `delta`
    (`PrivateHistograms`). For the other fields see `TreeEnsemble`.
    """

    lr: Rate = 0.3
    l2: Factor = 1.0
    gamma: Factor = 0.0
    min_weight: Factor = 0.0
    growth: str = "levels"
    leaves: Annotated[int, Meta(ge=2, le=2**14)] = 31
    rows: Share = 1.0
    columns: Share = 1.0
    held_out: BelowOne = 0.0
    patience: Count | None = None
    sigma: Annotated[float, Meta(ge=0, le=SIGMAS[1])] = 0.0
    epsilon: Epsilon | None = None
    delta: Delta = 1e-5
    applies: ClassVar[Applies] = {
        **TreeEnsemble.applies,
        "leaves": If("growth", "leaves"),
        "patience": If("held_out"),
        "epsilon": If("sigma"),
        "delta": If("sigma"),
    }

    @property
    def ops(self) -> DeclaredOps:
        if self.sigma:
            own = OpenOp.of("private-histograms", self, "min_rows", "sigma", "epsilon", "delta")
        else:
            own = OpenOp.of("gradient-histograms", self, "min_rows")
        return (*(super().ops or ()), own)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.growth not in ("levels", "leaves"):
            raise ConfigError(f"boosting: growth must be 'levels' or 'leaves', got {self.growth!r}")
        if 0 < self.sigma < SIGMAS[0]:
            raise ConfigError(f"boosting: sigma must be 0 or at least {SIGMAS[0]:g}, got {self.sigma}")
        if self.sigma and (self.cuts != "public" or self.held_out or self.rows < 1 or self.min_rows > 1):
            raise ConfigError(
                "boosting: with sigma, cuts must be 'public' (with a span), and held_out, rows and min_rows must be "
                "left out: noise covers the sums of nodes alone"
            )

    @property
    def budget(self) -> Budget | None:
        return Budget(math.inf if self.epsilon is None else self.epsilon, self.delta) if self.sigma else None

    def check(self, problem: Problem) -> None:
        super().check(problem)
        if self.sigma and problem.classes is None:
            raise ConfigError("boosting: sigma needs classes as targets; the gradients of numbers have no bound")

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
        sums = self._asker(fed, slots, bins, before)
        table, rule = TreeTable(1), self._rule(slots)
        growth = Growth(sums.ask, bins, sums.features, rule, lambda found: boosting_value(rule, self.lr, found),
                        self.max_depth, self.leaves if self.growth == "leaves" else None,
                        subtract=not self.sigma)  # fmt: skip
        outputs = gradients.outputs_of(slots["loss"], slots["classes"])
        try:
            await growth.grow(table, range(outputs))
        except _Stop:
            best = before.first(outputs * int(sums.held.argmin()))
            return state.replace(**{**slots, "held": sums.held, "trees": best.payload(), "done": True})
        return state.replace(**{**slots, "held": sums.held, "trees": before.joined(table.arrays()).payload()})

    async def _start(self, fed: Federation, slots: Mapping[str, Any]) -> dict[str, Any]:
        """What is learned once: the base scores, the scale of gradients, and the bins."""
        bound = 1.0
        if self.sigma:
            base, n = np.zeros(gradients.outputs_of(slots["loss"], slots["classes"])), 2**27  # 20 bits
        elif slots["classes"]:
            counts = (await fed.reduce(ClassCounts(slots["classes"]))).sums["counts"].cpu().numpy()
            base, n = gradients.base_scores(slots["loss"], counts), int(counts.sum())
        else:
            mean, reach, n = await mean_and_bound(fed)
            base, bound = np.array([mean]), 4 * reach  # outputs may pass the targets: room for that
        scale = {"base": torch.from_numpy(base), "bound": bound, "bits": gradients.unit_bits(n)}
        return {**scale, **await self.learn_bins(fed, slots["features"])}

    def _asker(self, fed: Federation, slots: Mapping[str, Any], bins: Bins, before: TreeArrays) -> _RoundSums:
        everything, trees = len(bins.widths), len(before.roots)
        count = max(1, round(self.columns * everything))
        drawn = rng.generator(slots["key"], "columns", trees).permutation(everything)[:count]
        op = GradientHistograms(slots["loss"], slots["classes"], slots["bound"], slots["bits"], trees, self.held_out,
                                self.rows, slots["key"], self.min_rows)  # fmt: skip
        if self.sigma:
            op = PrivateHistograms(**vars(op), sigma=self.sigma, epsilon=self.epsilon, delta=self.delta)
        payload = {"bins": slots["bins"], "base": slots["base"], "before": before.payload()}
        return _RoundSums(fed, op, bins, np.sort(drawn), payload, slots["points"], slots["held"], self.patience)

    def _rule(self, slots: Mapping[str, Any]) -> SplitRule:
        return boosting_rule(slots["loss"], slots["bound"], slots["bits"], self.l2, self.gamma, self.min_samples,
                             self.min_weight)  # fmt: skip

    def finished(self, state: State) -> bool:
        return bool(state.slots["done"])

    def predictor(self, state: State) -> tuple[str, dict[str, Any]]:
        names = ("classes", "loss", "bins", "trees", "base")
        return "trees", {name: state.slots[name] for name in names if name in state.slots}


def boosting_rule(loss: str, bound: float, bits: int, l2: float, gamma: float, min_samples: int,
                  min_weight: float) -> SplitRule:  # fmt: skip
    """How boosting judges splits, from sums in units of 2^-bits."""
    unit = 2.0**-bits
    return SplitRule(1, loss == "squared", bound * unit, unit, l2, gamma, min_samples, min_weight)


def boosting_value(rule: SplitRule, lr: float, sums: Any) -> Any:
    """The value of a leaf: -lr G / (H + l2)."""
    g, h, _ = rule.parts(sums)
    below = h + rule.l2
    return -lr * g / below if below > 0 else 0.0 * g


@dataclass
class _RoundSums(SumsAsker):
    """The asks of a round of boosting: the first one brings the earlier trees, and the loss of held-out samples."""

    held: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.float64))
    patience: int | None = None

    def answered(self, got: Reduced) -> None:
        if isinstance(self.op, PrivateHistograms):
            self.op = replace(self.op, ask=self.op.ask + 1)
        if "before" in self.payload:
            self.payload["history"] = history(self.payload)
        if self.payload.pop("before", None) is None or "held" not in got.sums:
            return
        held = int(got.sums["held"])
        if held <= 0:
            return
        mean = int(got.sums["loss"]) / held * 2.0**-gradients.HELD_BITS
        self.held = torch.cat([self.held, torch.tensor([mean], dtype=torch.float64)])
        if self.patience is not None and len(self.held) - 1 - int(self.held.argmin()) >= self.patience:
            raise _Stop
