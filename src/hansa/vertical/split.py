"""Split learning over columns: a network whose pieces lie at several parties.

Gupta and Raskar 2018 (Distributed learning of deep neural network over multiple agents); Vepakomma, Gupta, Swedish and
Raskar 2018 (Split learning for health: vanilla, U-shaped and vertically partitioned configurations). The shape follows
from who has which piece:

- vertical: every party has a bottom for its columns, the label holder has the head (the default);
- vanilla: `columns` names one party without labels, which has the only bottom;
- U-shaped: `columns` names the label holder and `middle_at` another party, so that labels never leave.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from hansa.core.algorithm import PeopleScores, Problem, State
from hansa.core.declared_ops import DeclaredOps, OpenOp
from hansa.core.federation import Federation
from hansa.core.quantities import BatchSize, Epochs, Momentum, Noise, Norm, Rate
from hansa.core.registry import register
from hansa.models.dense import Logistic, TwoNN
from hansa.models.model import Model
from hansa.numerics.params import Params
from hansa.plumbing.errors import ConfigError
from hansa.vertical.column_model import ColumnModel, asked_people
from hansa.vertical.split_ops import Roles, SplitTest, SplitTrain
from hansa.vertical.split_scores import SplitScores


def check_momentum(algorithm: Any) -> None:
    """Raise a ConfigError for a momentum that no optimiser of a split network has."""
    if algorithm.momentum and "sgd" not in (algorithm.optimiser, algorithm.top_optimiser):
        raise ConfigError("momentum is for the optimiser 'sgd'; leave it out, or set optimiser = 'sgd'")


@register("split")
@dataclass(frozen=True)
class Split(ColumnModel):
    """Train a network whose pieces lie at parties with different columns. Vepakomma et al. 2018.

    `bottoms` has one model for all parties with columns, or one per such party in the order of their numbers; their
    outputs are joined. `middle` is an optional model at the party number `middle_at`. `head` is at the label holder.
    Inputs of all models come from the data, and so do the outputs of the head. `columns` names the parties whose
    columns are used; all by default. A round is `epochs` passes over the common people.

    `optimiser`, `lr` train the bottoms; `top_optimiser`, `top_lr` the middle and the head (by default the same). The
    optimisers keep their state from round to round. `clip` bounds the length of a row's activations, and `noise` adds
    Gaussian noise of the standard deviation noise * clip to what a bottom sends in training; no budget is accounted.

    `match` finds the common people: "psi" by private set intersection, "same" for parties that hold the same people.

    With `of_job`, a job trains nothing: it asks the network of that finished job for the scores of `people`, hashes of
    ids with a `salt` (`hansa predict --federation` writes them).
    """

    bottoms: tuple[Model, ...] = (TwoNN(hidden=32, outputs=16),)
    head: Model = Logistic()
    middle: Model | None = None
    middle_at: int | None = None
    columns: tuple[int, ...] = ()
    match: Literal["psi", "same"] = "psi"
    epochs: Epochs = 1
    batch: BatchSize = 32
    optimiser: Literal["sgd", "adam"] = "sgd"
    lr: Rate = 0.1
    momentum: Momentum = 0.0
    top_optimiser: Literal["sgd", "adam"] | None = None
    top_lr: Rate | None = None
    clip: Norm | None = None
    noise: Noise = 0.0
    dtype: Literal["float32", "float64"] = "float32"
    of_job: str | None = None
    people: tuple[str, ...] = ()
    salt: str = ""

    def __post_init__(self) -> None:
        check_momentum(self)
        if (self.middle is None) != (self.middle_at is None):
            raise ConfigError("middle and middle_at belong together: give the model and the number of its party")
        if self.noise and self.clip is None:
            raise ConfigError("noise needs clip: its standard deviation is noise * clip")
        if not self.bottoms:
            raise ConfigError("bottoms: give one model for all parties, or one per party")
        self.check_people()

    @property
    def ops(self) -> DeclaredOps:
        if self.of_job is not None:
            return (OpenOp("split-scores"),)
        return (*self.matching_ops, self._training(), self._testing())

    def check(self, problem: Problem) -> None:
        super().check(problem)
        if problem.layout is None:
            return
        (holder,) = problem.layout.label_holders
        here = [party for party, shape in enumerate(problem.layout.shapes) if shape is not None]
        for name, parties in (("columns", self.columns), ("middle_at", (self.middle_at,))):
            unknown = [party for party in parties if party is not None and party not in here]
            if unknown:
                raise ConfigError(f"{name}: there is no party {unknown[0]} in this job; its parties are {here}")
        if self.middle_at == holder:
            raise ConfigError(
                f"middle_at: party {holder} has the labels and the head, so the middle must be at another party"
            )
        roles = self._roles(problem, 1)
        if not roles.routes:
            raise ConfigError(f"{self.name}: party {holder} has all pieces of the network, so nothing is split")
        if len(self.bottoms) not in (1, len(roles.shapes)):
            raise ConfigError(
                f"bottoms: expected one model, or one per party with columns ({len(roles.shapes)}); got "
                f"{len(self.bottoms)}"
            )

    def _roles(self, problem: Problem, rows: int) -> Roles:
        layout = problem.layout
        assert layout is not None
        shapes = {party: shape for party, shape in enumerate(layout.shapes)
                  if shape is not None and (not self.columns or party in self.columns)}  # fmt: skip
        holder = layout.label_holders[0]
        joins = holder if self.middle_at is None else self.middle_at
        return Roles(shapes, joins, holder, rows, problem.classes or 1)

    def init(self, problem: Problem) -> State:
        return State(Params.none(), slots={"roles": self._roles(problem, 0).tree()})

    def matched_parties(self, state: State) -> tuple[int, list[int], int]:
        roles = Roles.of({**state.slots["roles"], "rows": 0})
        return roles.holder, sorted({*roles.shapes, roles.joins, roles.holder}), self.batch

    async def trained(self, fed: Federation, state: State) -> State:
        roles = self._with_rows(state, "train")
        await fed.session(self._training(), roles.tree(), roles.routes)
        return state

    def _training(self) -> SplitTrain:
        return SplitTrain(
            self.bottoms, self.middle, self.head, self.dtype, self.epochs, self.batch, self.optimiser, self.lr,
            self.momentum, self.top_optimiser or self.optimiser, self.top_lr or self.lr, self.clip, self.noise,
        )  # fmt: skip

    def _testing(self) -> SplitTest:
        return SplitTest(self.bottoms, self.middle, self.head, self.dtype)

    def _with_rows(self, state: State, kind: str) -> Roles:
        return Roles.of({**state.slots["roles"], "rows": state.slots["people"][kind]})

    async def score_people(self, fed: Federation, state: State, people: Sequence[str], salt: str) -> PeopleScores:
        roles = Roles.of({**state.slots["roles"], "rows": len(people)})
        op = SplitScores(self.bottoms, self.middle, self.head, self.dtype, self.of_job)
        return await self.scores_by(fed, op, asked_people(roles.tree(), people, salt), roles.routes, roles.holder)

    async def tested(self, fed: Federation, state: State) -> dict[str, float]:
        roles = self._with_rows(state, "test")
        return await self.metrics_by(fed, self._testing(), roles.tree(), roles.routes, roles.holder)
