"""The ops that grow boosted trees and forests over columns."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar

import numpy as np
import torch
from msgspec import Meta

from hansa.classical.trees import gradients
from hansa.classical.trees.boosting import boosting_rule, boosting_value
from hansa.classical.trees.forest_ops import MOST_TREES, ForestSums, Trees, bootstrap, drawn_columns, mean_value
from hansa.classical.trees.histograms import GradientHistograms, targets
from hansa.classical.trees.table import NAMES, TreeArrays
from hansa.classical.trees.targets import mean_and_bound_of
from hansa.core.fields import Owner
from hansa.core.op import Memory, Party, Payload, Reply
from hansa.core.quantities import MANY, SEEDS, AnyCount, Factor, Rate, Seed, Size, Some
from hansa.core.registry import register
from hansa.core.session_op import Talk
from hansa.numerics import rng
from hansa.plumbing.errors import PartyError
from hansa.secure.additive import AdditiveKeyBits
from hansa.vertical.psi_ops import ROWS
from hansa.vertical.split_ops import Roles, common_rows
from hansa.vertical.tree_active import Active, Grown
from hansa.vertical.tree_bins import PREFIX, sums_of
from hansa.vertical.tree_messages import ColumnLevels, TreeSession
from hansa.vertical.tree_passive import Passive

Array = np.ndarray[Any, Any]
Learned = tuple[Memory, dict[str, float]]
MARGINS, BASE, CENTRE = (f"{PREFIX}{name}" for name in ("margins", "base", "centre"))
TABLE = f"{PREFIX}table/"


def loss_of(classes: int) -> str:
    """The loss of boosting: of numbers, two classes, or more."""
    return "squared" if not classes else "logistic" if classes == 2 else "softmax"


def stored_trees(memory: Memory, width: int) -> TreeArrays:
    """The trees in the active party's memory; none before the first round."""
    if f"{TABLE}roots" not in memory:
        return TreeArrays.none(width)
    return TreeArrays(**{name: memory[f"{TABLE}{name}"].cpu().numpy() for name in NAMES})


class GrowTrees(TreeSession):
    """Base of the ops: run the party's role, and keep the trees at the active party."""

    classes: int
    min_samples: int
    entries = TreeSession.entries

    def grown(self, party: Party, labels: Array, roles: Roles, memory: Memory, before: TreeArrays) -> Grown:
        """What this round grows."""
        raise TypeError(f"the op {self.name!r} does not define grown()")

    def learned(self, active: Active, new: TreeArrays, labels: Array, memory: Memory) -> Learned:
        """What the active party remembers of the new trees, and its metrics."""
        return {}, {}

    def talk(self, party: Party, payload: Payload, memory: Memory) -> Talk:
        roles = Roles.of(payload)
        self.check_session(roles)
        sums = sums_of(payload, roles)
        if party.id != roles.holder:
            kept = yield from Passive(self, party, roles, memory).talk()
            return Reply({}), {**memory, **kept}
        at = common_rows(memory, ROWS, roles)
        labels = targets(party, party.rows("train")[1], self.classes)[at.cpu().numpy()]
        before = stored_trees(memory, self.sums(roles.rows).outputs)
        grown = self.grown(party, labels, roles, memory, before)
        active = Active(self, party, roles, sums, memory, grown, len(before.feature))
        kept = yield from active.talk()
        new = active.table.arrays()
        more, metrics = self.learned(active, new, labels, memory)
        table = {f"{TABLE}{name}": tensor for name, tensor in before.joined(new).payload().items()}
        return Reply({}, metrics=metrics), {**memory, **kept, **table, **more}


@register("boost-trees")
@dataclass(frozen=True)
class BoostTrees(GrowTrees):
    """Grow the next boosted tree over columns, with more than two classes one per class. Cheng et al. 2021."""

    classes: Size = 2
    lr: Rate = 0.3
    l2: Factor = 1.0
    gamma: Annotated[float, Meta(ge=0), Owner(0, 1e9)] = 0.0
    min_weight: Annotated[float, Meta(ge=0), Owner(0, MANY)] = 0.0
    min_samples: AnyCount = 1
    max_depth: ColumnLevels = 6
    most_bins: Some = 33
    key_bits: AdditiveKeyBits = 2048
    measures: ClassVar[frozenset[str] | None] = frozenset({"train_loss"})

    def trees(self, roles: Roles) -> int:
        return gradients.outputs_of(loss_of(self.classes), self.classes)

    def sums(self, rows: int) -> GradientHistograms:
        return GradientHistograms(loss_of(self.classes), self.classes, bits=gradients.unit_bits(rows))

    def grown(self, party: Party, labels: Array, roles: Roles, memory: Memory, before: TreeArrays) -> Grown:
        loss, base, bound = self._start(labels)
        op = replace(self.sums(len(labels)), bound=bound)
        margins = self._margins(memory, base, len(labels))
        g, h = gradients.gradients(loss, margins, labels)
        g, h = gradients.rounded(g, bound, op.bits), gradients.rounded(h, 1.0, op.bits)
        both = np.stack([g.T, h.T, np.ones_like(g.T)])
        trees = self.trees(roles)
        statistics = [op.of_tree(both, tree) for tree in range(trees)]
        rule = boosting_rule(loss, bound, op.bits, self.l2, self.gamma, max(self.min_samples, party.min_rows),
                             self.min_weight)  # fmt: skip
        used = np.ones((trees, len(labels)), dtype=bool)
        return Grown(op, statistics, used, rule, lambda sums: boosting_value(rule, self.lr, sums), range(trees))

    def _start(self, labels: Array) -> tuple[str, Array, float]:
        """The loss, the outputs before the first tree, and the bound of gradients."""
        loss = loss_of(self.classes)
        if self.classes:
            return loss, gradients.base_scores(loss, np.bincount(labels, minlength=self.classes)), 1.0
        mean, reach = mean_and_bound_of(labels)
        return loss, np.array([mean]), 4 * reach

    @staticmethod
    def _margins(memory: Memory, base: Array, rows: int) -> Array:
        kept = memory.get(MARGINS)
        return np.tile(base, (rows, 1)) if kept is None else kept.cpu().numpy()

    def learned(self, active: Active, new: TreeArrays, labels: Array, memory: Memory) -> Learned:
        loss, base, bound = self._start(labels)
        margins = self._margins(memory, base, len(labels)).copy()
        for tree, output in enumerate(new.outputs.tolist()):
            margins[:, output] += new.value[active.nodes[tree], 0]
        mean = gradients.losses(loss, margins, labels, bound).sum() / len(labels) * 2.0**-gradients.HELD_BITS
        mean *= bound**2 if loss == "squared" else 1.0
        return {MARGINS: torch.from_numpy(margins), BASE: torch.from_numpy(base)}, {"train_loss": float(mean)}


@register("forest-trees")
@dataclass(frozen=True)
class ForestTrees(GrowTrees):
    """Grow `count` trees of a random forest over columns, by the exchange of boosted trees."""

    classes: Size = 2
    count: Annotated[Trees, Owner(0, 100_000)] = 1
    first: Annotated[int, Meta(ge=0, le=MOST_TREES), SEEDS] = 0
    key: Seed = 0
    bootstrap: bool = True
    columns: Annotated[float, Meta(gt=0, le=1), Owner(0, MANY)] | None = None
    min_samples: AnyCount = 1
    max_depth: ColumnLevels = 6
    most_bins: Some = 33
    key_bits: AdditiveKeyBits = 2048

    def trees(self, roles: Roles) -> int:
        return self.count

    def sums(self, rows: int) -> ForestSums:
        return ForestSums(self.classes, bits=gradients.unit_bits(16 * rows), drawn=self.bootstrap)

    def grown(self, party: Party, labels: Array, roles: Roles, memory: Memory, before: TreeArrays) -> Grown:
        if len(before.roots) != self.first:
            raise PartyError(f"it has {len(before.roots)} trees, and this ask continues after {self.first}")
        centre, bound = (0.0, 1.0) if self.classes else mean_and_bound_of(labels)
        op = replace(self.sums(len(labels)), centre=centre, bound=bound, first=self.first, key=self.key)
        values = op.values(party, torch.from_numpy(labels))
        statistics, used = [], []
        for tree in range(self.count):
            draws = np.ones(len(labels))
            if self.bootstrap:
                draws = bootstrap(rng.uniforms(rng.folded(self.key, self.first + tree, 0), len(labels)))
            second = [] if op.constant else [draws[None]]
            statistics.append(np.concatenate([draws * values, *second, np.ones((1, len(labels)))]))
            used.append(draws > 0)
        rule = op.rule(max(self.min_samples, party.min_rows))

        def allowed(features: int) -> Any:
            share = self.columns if self.columns is not None else features**-0.5 if self.classes else 1.0
            return drawn_columns(self.key, self.first, features, max(1, round(share * features)))

        return Grown(op, statistics, np.stack(used), rule, lambda sums: mean_value(rule, sums), [-1] * self.count,
                     allowed)  # fmt: skip

    def learned(self, active: Active, new: TreeArrays, labels: Array, memory: Memory) -> Learned:
        centre = 0.0 if self.classes else mean_and_bound_of(labels)[0]
        base = torch.zeros(max(1, self.classes), dtype=torch.float64)
        return {BASE: base, CENTRE: torch.tensor(centre, dtype=torch.float64)}, {}
