"""Trees over the columns of several parties, grown as on joined columns: SecureBoost, and a random forest.

Cheng, Fan, Jin, Liu, Chen, Papadopoulos and Yang 2021 (SecureBoost: a lossless federated learning framework). The
party with the labels has the trees; the other parties have the thresholds of splits by their own columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from hansa.classical.trees.bins import BinCount
from hansa.classical.trees.forest_ops import Trees
from hansa.core.algorithm import PeopleScores, Problem, State
from hansa.core.declared_ops import DeclaredOps, OpenOp
from hansa.core.federation import Federation
from hansa.core.quantities import Count, Factor, Rate, Share
from hansa.core.registry import register
from hansa.numerics import rng
from hansa.numerics.params import Params
from hansa.plumbing.errors import ConfigError, DataError, RoundAborted
from hansa.secure.additive import AdditiveKeyBits
from hansa.vertical.column_model import ColumnModel, asked_people
from hansa.vertical.split_ops import Roles
from hansa.vertical.tree_bins import TreeBins
from hansa.vertical.tree_messages import MOST_CELLS, ColumnLevels
from hansa.vertical.tree_ops import BoostTrees, ForestTrees, GrowTrees
from hansa.vertical.tree_scores import TreeScores, TreeTest


@dataclass(frozen=True)
class ColumnTrees(ColumnModel):
    """Base of trees over columns.

    `bins` is the most bins of a column; its owner cuts it between all values, or at quantiles of the common rows.
    `min_samples` is the fewest samples of a leaf. `key_bits` is the length of the key. `match` finds the common people:
    "psi" by private set intersection, "same" for parties that hold the same people. With `of_job`, a job grows nothing:
    it asks the trees of that finished job for the scores of `people`, hashes of ids with a `salt`
    (`hansa predict --federation` writes them).
    """

    max_depth: ColumnLevels = 6
    bins: BinCount = 32
    min_samples: Count = 1
    key_bits: AdditiveKeyBits = 2048
    match: Literal["psi", "same"] = "psi"
    of_job: str | None = None
    people: tuple[str, ...] = ()
    salt: str = ""
    takes_missing: ClassVar[bool] = True
    forest: ClassVar[bool] = False
    grows: ClassVar[str] = "boost-trees"

    def __post_init__(self) -> None:
        self.check_people()

    @property
    def ops(self) -> DeclaredOps:
        if self.of_job is not None:
            return (OpenOp("tree-scores"),)
        grown = OpenOp.of(self.grows, self, "max_depth", "min_samples", "key_bits")
        return (*self.matching_ops, OpenOp.of("tree-bins", self, "bins"), grown, OpenOp("tree-test"))

    def check(self, problem: Problem) -> None:
        super().check(problem)
        if problem.layout is not None and len(self._roles(problem).shapes) < 2:
            raise ConfigError(f"{self.name} needs at least two parties with columns")

    def _roles(self, problem: Problem) -> Roles:
        layout = problem.layout
        assert layout is not None
        shapes = {party: shape for party, shape in enumerate(layout.shapes) if shape is not None}
        holder = layout.label_holders[0]
        return Roles(shapes, holder, holder, 0, problem.classes or 1)

    def init(self, problem: Problem) -> State:
        slots = {"roles": self._roles(problem).tree(), "classes": problem.classes or 0, "trees": 0,
                 "key": rng.key(problem.seed, self.name)}  # fmt: skip
        return State(Params.none(), slots=slots)

    def growing(self, state: State) -> GrowTrees:
        """The op of the next round."""
        raise TypeError(f"the algorithm {self.name!r} does not define growing()")

    def matched_parties(self, state: State) -> tuple[int, list[int], int]:
        roles = Roles.of({**state.slots["roles"], "rows": 0})
        return roles.holder, sorted(roles.shapes), 2

    async def trained(self, fed: Federation, state: State) -> State:
        if "sums" not in state.slots:
            state = await self._cut(fed, state)
        roles, op = self._with_rows(state, "train"), self.growing(state)
        trees = op.trees(roles)
        if trees * roles.rows > MOST_CELLS:
            raise DataError(
                f"{trees} trees of {roles.rows} rows grow at once, and trees times rows may be {MOST_CELLS} at most; "
                "grow fewer trees per round, or use fewer rows"
            )
        await fed.session(op, {**roles.tree(), "sums": state.slots["sums"]}, roles.routes)
        return state.replace(trees=state.slots["trees"] + trees)

    async def _cut(self, fed: Federation, state: State) -> State:
        """Let the parties cut their columns."""
        roles = self._with_rows(state, "train")
        got = await fed.gather(TreeBins(self.bins), roles.tree(), parties=sorted(roles.shapes), need="all")
        counts = {party: int(reply.tensors["sums"]) for party, reply in zip(got.parties, got.replies, strict=True)}
        passive = {str(party): count for party, count in counts.items() if party != roles.holder}
        if not any(passive.values()):
            raise RoundAborted("no party without labels has a column with two different values")
        return state.replace(sums=passive)

    def _with_rows(self, state: State, kind: str) -> Roles:
        return Roles.of({**state.slots["roles"], "rows": state.slots["people"][kind]})

    async def score_people(self, fed: Federation, state: State, people: Sequence[str], salt: str) -> PeopleScores:
        roles = Roles.of({**state.slots["roles"], "rows": len(people)})
        op = TreeScores(state.slots["classes"], self.forest, self.max_depth, self.of_job)
        return await self.scores_by(fed, op, asked_people(roles.tree(), people, salt), roles.routes, roles.holder)

    async def tested(self, fed: Federation, state: State) -> dict[str, float]:
        if not state.slots["trees"]:
            return {}
        roles = self._with_rows(state, "test")
        op = TreeTest(state.slots["classes"], self.forest, self.max_depth)
        return await self.metrics_by(fed, op, roles.tree(), roles.routes, roles.holder)


@register("secureboost")
@dataclass(frozen=True)
class SecureBoost(ColumnTrees):
    """Gradient boosted trees over columns, equal to boosting on the joined columns. Cheng et al. 2021.

    A round grows one tree, with more than two classes one per class. For `lr`, `l2`, `gamma` and `min_weight` see
    `Boosting`; for the other fields see `ColumnTrees`.
    """

    lr: Rate = 0.3
    l2: Factor = 1.0
    gamma: Factor = 0.0
    min_weight: Factor = 0.0

    def growing(self, state: State) -> GrowTrees:
        return BoostTrees(state.slots["classes"], self.lr, self.l2, self.gamma, self.min_weight, self.min_samples,
                          self.max_depth, self.bins + 1, self.key_bits)  # fmt: skip


@register("column-forest")
@dataclass(frozen=True)
class ColumnForest(ColumnTrees):
    """A random forest over columns, equal to `RandomForest` with shared growth on the joined columns.

    `trees` trees, `per_round` of them in each round. For `columns` and `bootstrap` see `RandomForest`; for the other
    fields see `ColumnTrees`.
    """

    trees: Trees = 20
    per_round: Trees = 1
    columns: Share | None = None
    bootstrap: bool = True
    forest: ClassVar[bool] = True
    grows: ClassVar[str] = "forest-trees"

    def growing(self, state: State) -> GrowTrees:
        done, slots = state.slots["trees"], state.slots
        return ForestTrees(slots["classes"], min(self.per_round, self.trees - done), done, slots["key"],
                           self.bootstrap, self.columns, self.min_samples, self.max_depth, self.bins + 1,
                           self.key_bits)  # fmt: skip

    def finished(self, state: State) -> bool:
        return super().finished(state) or state.slots["trees"] >= self.trees
