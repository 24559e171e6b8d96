"""Encrypted linear models over columns: linear and logistic regression, and a linear support vector machine.

Hardy, Henecka, Ivey-Law, Nock, Patrini, Smith and Thorne 2017 (Private federated learning on vertically partitioned
data via entity resolution and additively homomorphic encryption). The cryptosystem is that of Okamoto and Uchiyama.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from msgspec import Meta

from hansa.core.algorithm import PeopleScores, Problem, State
from hansa.core.declared_ops import DeclaredOps, OpenOp
from hansa.core.federation import Federation
from hansa.core.quantities import BatchSize, Epochs, Factor, Rate
from hansa.core.registry import register
from hansa.numerics.params import Params
from hansa.plumbing.errors import ConfigError
from hansa.secure.additive import AdditiveKeyBits
from hansa.vertical.column_model import ColumnModel, asked_people
from hansa.vertical.linear_model import LinearRoles, Loss, Residual
from hansa.vertical.linear_ops import LARGEST, LinearTrain
from hansa.vertical.linear_scores import LinearScores, LinearTest, ring_of


class LinearColumns(ColumnModel):
    """Base of linear models over columns: the roles, matching, tests and scores of people."""

    loss: Loss
    batch: int
    helps: ClassVar[str]  # the name of the field with the party that has no columns

    def __post_init__(self) -> None:
        self.check_people()

    @property
    def helper(self) -> int | None:
        """The number of the party without columns that the settings name."""
        number: int | None = getattr(self, self.helps)
        return number

    @property
    def ops(self) -> DeclaredOps:
        if self.of_job is not None:
            return (OpenOp("linear-scores"),)
        return (*self.matching_ops, *self.training_ops(), LinearTest(self._classes))

    def training_ops(self) -> tuple[Any, ...]:
        """The ops that the algorithm trains with."""
        raise TypeError(f"the algorithm {self.name!r} does not define training_ops()")

    @property
    def _classes(self) -> bool:
        return Residual.KINDS[self.loss].classes

    def check(self, problem: Problem) -> None:
        super().check(problem)
        layout = problem.layout
        if layout is None:
            return
        if self._classes and problem.classes != 2:
            found = "numbers as targets" if problem.classes is None else f"{problem.classes} classes"
            raise ConfigError(f'{self.name}: loss = "{self.loss}" is for two classes, and the task has {found}')
        if not self._classes and problem.classes is not None:
            raise ConfigError(
                f'{self.name}: loss = "linear" predicts a number, and the task has classes; use "logistic"'
            )
        here = [party for party, shape in enumerate(layout.shapes) if shape is not None]
        if len(here) < 3:
            raise ConfigError(
                f"{self.name} needs at least three parties: two with columns, and one without ({self.helps}); the job "
                f"has {len(here)}"
            )
        if self.helper is not None and self.helper not in here:
            raise ConfigError(f"{self.helps}: there is no party {self.helper} in this job; its parties are {here}")
        if self.helper == layout.label_holders[0]:
            raise ConfigError(
                f"{self.helps}: party {self.helper} has the labels, and would see what encryption hides; name a party "
                "whose columns are not used"
            )
        wide = [party for party in here if len(layout.shapes[party] or ()) != 1]
        if wide:
            raise ConfigError(f"{self.name}: samples must be rows of numbers, and party {wide[0]} has others")

    def roles(self, problem: Problem) -> LinearRoles:
        """Who has columns, labels and keys. Without a setting, the last party without labels has the keys."""
        layout = problem.layout
        assert layout is not None
        holder = layout.label_holders[0]
        here = {party: shape[0] for party, shape in enumerate(layout.shapes) if shape is not None}
        helper = self.helper if self.helper is not None else max(party for party in here if party != holder)
        return LinearRoles({party: width for party, width in here.items() if party != helper}, holder, helper, 0)

    def init(self, problem: Problem) -> State:
        return State(Params.none(), slots={"roles": self.roles(problem).tree()})

    def matched_parties(self, state: State) -> tuple[int, list[int], int]:
        roles = LinearRoles.of(state.slots["roles"])
        return roles.holder, list(roles.widths), self.batch

    def with_rows(self, state: State, kind: str) -> LinearRoles:
        """The roles, with the number of common rows."""
        return LinearRoles.of({**state.slots["roles"], "rows": state.slots["people"][kind]})

    async def score_people(self, fed: Federation, state: State, people: Sequence[str], salt: str) -> PeopleScores:
        roles = LinearRoles.of({**state.slots["roles"], "rows": len(people)})
        routes = {*ring_of(roles), *((other, roles.holder) for other in roles.others)}
        op = LinearScores(self._classes, self.of_job)
        return await self.scores_by(fed, op, asked_people(roles.tree(), people, salt), routes, roles.holder)

    async def tested(self, fed: Federation, state: State) -> dict[str, float]:
        roles = self.with_rows(state, "test")
        return await self.metrics_by(fed, LinearTest(self._classes), roles.tree(), ring_of(roles), roles.holder)


@register("vertical-linear")
@dataclass(frozen=True)
class VerticalLinear(LinearColumns):
    """Train a linear model over the columns of several parties under encryption. Hardy et al. 2017.

    `loss` is "linear", "logistic" (the Taylor polynomial of degree 2) or "svm" (least squares). A round is `epochs`
    passes over the common people, in batches of at least `batch`, with gradient descent of the rate `lr` and the
    penalty `l2`. The party number `coordinator` holds the key, and its columns are not used; by default it is the last
    party without labels. `range` bounds the scores of a party and the targets. `key_bits` is the length of the key.

    `match` finds the common people: "psi" by private set intersection, "same" for parties that hold the same people.

    With `of_job`, a job trains nothing: it asks the model of that finished job for the scores of `people`, hashes of
    ids with a `salt` (`hansa predict --federation` writes them).
    """

    loss: Loss = "logistic"
    coordinator: int | None = None
    match: Literal["psi", "same"] = "psi"
    epochs: Epochs = 1
    batch: BatchSize = 128
    lr: Rate = 0.1
    l2: Factor = 0.0
    range: Annotated[float, Meta(gt=0, le=LARGEST)] = 64.0
    key_bits: AdditiveKeyBits = 2048
    of_job: str | None = None
    people: tuple[str, ...] = ()
    salt: str = ""
    helps: ClassVar[str] = "coordinator"

    def training_ops(self) -> tuple[Any, ...]:
        return (self._training(),)

    def _training(self) -> LinearTrain:
        return LinearTrain(self.loss, self.epochs, self.batch, self.lr, self.l2, self.range, self.key_bits)

    def check(self, problem: Problem) -> None:
        super().check(problem)
        widest = max(map(self.roles(problem).length, self.roles(problem).widths)) if problem.layout is not None else 0
        if self.of_job is None and self.batch <= widest:
            raise ConfigError(
                f"batch is {self.batch}, and a party has {widest} weights: its gradient would reveal the residual of "
                f"each person; use a batch of more than {widest}, better several times as many"
            )

    async def trained(self, fed: Federation, state: State) -> State:
        roles = self.with_rows(state, "train")
        routes = [pair for party in roles.widths for pair in ((party, roles.helper), (roles.helper, party))]
        routes += [pair for party in roles.others for pair in ((party, roles.holder), (roles.holder, party))]
        await fed.session(self._training(), roles.tree(), routes)
        return state
