"""Algorithms: straight-line code over a federation, and the server's explicit state."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, NamedTuple

from torch import Tensor, nn

from hansa.core.budget import Budget
from hansa.core.columns import ColumnLayout
from hansa.core.declared_ops import DeclaredOps
from hansa.core.federation import Federation
from hansa.core.op import Op
from hansa.core.other_model import OtherModel
from hansa.core.registry import Part
from hansa.core.wrapper import unwrap
from hansa.numerics.params import Params, ParamSpec
from hansa.plumbing.errors import ConfigError


@dataclass(frozen=True)
class State:
    """The aggregator's state between rounds: the model, and slots for a method's other tensors and plain values."""

    params: Params
    round: int = 0
    slots: Mapping[str, Any] = field(default_factory=dict)

    def replace(self, params: Params | None = None, **slots: Any) -> State:
        """A copy with another model, and with the slots set."""
        return dataclasses.replace(self, params=params or self.params, slots={**self.slots, **slots})

    def tree(self) -> dict[str, Any]:
        """The state as a tree for the codec."""
        return {"params": self.params._asdict(), "round": self.round, "slots": dict(self.slots)}

    @classmethod
    def of_tree(cls, tree: Mapping[str, Any]) -> State:
        """The inverse of `tree`."""
        return cls(Params(**tree["params"]), tree["round"], tree["slots"])


@dataclass(frozen=True)
class Problem:
    """What the aggregator knows about the task before the first round: shapes and counts, no data."""

    spec: ParamSpec
    initial: Params
    parties: int
    shape: tuple[int, ...]
    classes: int | None
    cohort_size: int
    party_tests: bool = False  # whether the parties have their own test samples
    trusted: int = 0  # the number of the aggregator's own samples
    seed: int = 0  # the run's seed, for random draws in `Algorithm.init`
    models: Mapping[str, ParamSpec] = field(default_factory=dict)  # by name, where the parties train several models
    public: int = 0  # the number of public samples
    layout: ColumnLayout | None = None  # who holds what, if the parties hold different columns; then `shape` is ()
    empty: frozenset[int] = frozenset()  # parties without samples; none are known in a deployment
    drawn: Callable[[int], Params] | None = None  # other initial values of the model, by a key; None without a model
    public_targets: bool = False  # whether the public samples have targets
    modules: Mapping[str, nn.Module] = field(default_factory=dict)  # the task's models by name; a single one is ""
    names: Sequence[str] | None = None  # of the parties; None for their numbers
    columns: Sequence[str] = ()  # the names of the features; none if they have no names


class PeopleScores(NamedTuple):
    """Outputs of a joint model for people whom an asker names, and whether each has a score: all parties hold them.

    `unknown` is, by party, the number of asked people whom the party does not hold.
    """

    outputs: Tensor
    scored: Tensor
    unknown: dict[int, int]


@dataclass(frozen=True)
class Parts:
    """The exchangeable parts of an algorithm; None for a part that it does not have.

    `local` is the op that trains at a party: a `hansa.local.LocalSolver`, or a wrapper around one. `fusion` is a
    `hansa.fusion.Fusion`, `server` a `hansa.server.ServerOptimizer`.
    """

    local: Op | None = None
    fusion: Any = None
    server: Any = None


class Algorithm(Part):
    """Base of algorithms. Subclasses are frozen dataclasses: the fields are the hyper-parameters, nothing else.

    `participation` says which parties a round needs: the round's cohort, all parties, or parties that the algorithm
    chooses itself (asynchronous methods; the cohort size then bounds how many work at once). `data` says what parties
    hold: different rows with the same columns, or different columns of the same people.
    """

    kind: ClassVar[str] = "algorithm"
    participation: ClassVar[Literal["cohort", "all", "own"]] = "cohort"
    completes: ClassVar[str | None] = None  # the algorithm's name in `LocalSolver.partner`, if it needs such a solver
    takes_any: ClassVar[bool] = False  # whether it takes other solvers too, although `completes` names one
    trusts: ClassVar[bool] = False  # whether it needs the aggregator's own samples
    whole_updates: ClassVar[bool] = False  # whether what a clip or noise changes in an update would stay wrong for good
    packs: ClassVar[bool] = False  # whether it packs updates by a transform of its own
    aligned: ClassVar[bool] = True  # whether a number of an update is about the same parameter in every round
    trains: ClassVar[bool] = True  # whether it trains the task's model; False for methods with their own model
    takes_missing: ClassVar[bool] = False  # whether features may be missing (NaN)
    # "several": parties may train different architectures; "widths": chains of layers that differ in their widths
    models: ClassVar[Literal["one", "several", "widths"]] = "one"
    uses_public: ClassVar[bool] = False  # whether its parties need the task's public samples
    public_targets: ClassVar[bool] = False  # whether its parties need the targets of the public samples
    data: ClassVar[Literal["rows", "columns"]] = "rows"  # over columns, `trains` is False
    whole: ClassVar[bool] = True  # whether a party's update has a number for each trained parameter of the model
    clustered: ClassVar[bool] = False  # whether groups of parties train a model each, and parties are sent all of them

    @property
    def verbs(self) -> frozenset[str]:
        """The verbs that the algorithm uses; the federation refuses all others."""
        raise TypeError(f"the algorithm {self.name!r} does not declare its verbs")

    @property
    def weighs(self) -> bool:
        """Whether the algorithm uses weights of samples and classes; local solvers do."""
        return self.trains or self.models == "several"

    @property
    def sums(self) -> int:
        """The number of sums of model updates per round; 0 if the algorithm also sums other things."""
        return 1 if self.trains else 0

    @property
    def numbers(self) -> tuple[str, ...]:
        """The single numbers that parties send beside their update, by name; by default those of the local solver."""
        local = self.parts().local
        return () if local is None else getattr(unwrap(local)[1], "numbers", ())

    @property
    def alone(self) -> str | None:
        """The settings with which no round asks a single party; None if no round does that anyway."""
        return None

    @property
    def sums_alone(self) -> str | None:
        """The setting with which an algorithm that sees each reply needs their sums alone; None if it has none."""
        return None

    @property
    def budget(self) -> Budget | None:
        """The privacy budget of a party in a run, if its replies have noise; by default that of the local solver."""
        local = self.parts().local
        return None if local is None else local.budget

    @property
    def ops(self) -> DeclaredOps:
        """The ops that the algorithm asks for, beside those in its fields and `parts`; None if they are not declared.

        The owners of deployed parties approve them in advance. With None they are asked to approve any op.
        """
        return None

    def parts(self) -> Parts:
        """The local solver, the fusion and the server optimiser that the algorithm uses; override to declare them."""
        return Parts()

    def sent_layers(self, spec: ParamSpec) -> list[tuple[str, int]]:
        """The parameters whose updates the parties send, with their lengths, in the order of the vector."""
        return [(entry.name, entry.numel) for entry in spec.weights]

    def check(self, problem: Problem) -> None:
        """Raise a ConfigError for fields of the algorithm that its task cannot have. Called before the first round.

        It is also called when a job is submitted, with a `problem` that lacks all that depends on the parties' data.
        """

    def check_parties(self, parties: int, names: Sequence[str] | None) -> None:
        """Raise a ConfigError for parties that the algorithm cannot serve."""

    def init(self, problem: Problem) -> State:
        """The state before the first round."""
        return State(problem.initial)

    async def round(self, fed: Federation, state: State) -> State:
        """Run one round: query, local work, fusion. Deterministic in the state, the replies and `fed.rng`."""
        raise TypeError(f"the algorithm {self.name!r} does not define round()")

    async def publish(self, fed: Federation, state: State) -> State:
        """The state to evaluate and save; methods without a global model collect one here."""
        return state

    async def evaluate(self, fed: Federation, state: State) -> dict[str, float]:
        """Metrics of a published state that no single place can compute; none by default.

        They are added to the metrics line of the evaluation. The parties keep nothing that they stage. The asks have no
        quorum and take no simulated time. `fed` allows `gather`, `reduce` and the algorithm's own verbs, but not
        `submit` and `next`; with a secure sum it does not allow `gather`.
        """
        return {}

    async def score_people(self, fed: Federation, state: State, people: Sequence[str], salt: str) -> PeopleScores:
        """Scores of people by a joint model, whose parts lie at several parties.

        `people` are hashes of ids (`core.columns.id_hash`). The parties keep nothing that they stage.
        """
        raise ConfigError(f"{self.name} does not score people by their ids")

    @property
    def continues(self) -> str | None:
        """The finished job of a federation whose model the algorithm asks; None for an algorithm that trains."""
        return None

    def finished(self, state: State) -> bool:
        """Whether further rounds would change nothing; False for iterative methods."""
        return False

    def unfinished(self, state: State) -> str | None:
        """Why a run that ends with this state ends too early, for methods with a defined end; else None."""
        return None

    def model(self, state: State) -> Params | OtherModel:
        """The model of a state: what is evaluated, saved, shown, pulled and served, and hashed in the audit log.

        By default the state's parameters, for the task's model. An `OtherModel` has another architecture.
        """
        return state.params

    def predictor(self, state: State) -> tuple[str, dict[str, Any]]:
        """The name of the predictor for the state, and its payload; by default the network of `model`.

        Over columns the default is "joint": no single place can predict.
        """
        if self.data == "columns":
            return "joint", {}
        model = self.model(state)
        return "network", model.payload() if isinstance(model, OtherModel) else {"model": model._asdict()}
