"""Sequential split learning (Gupta and Raskar 2018): clients with different people train one network in turn."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from hansa.core.algorithm import Algorithm, Problem, State
from hansa.core.ask import Gathered
from hansa.core.declared_ops import DeclaredOps, OpenOp
from hansa.core.federation import Federation
from hansa.core.quantities import BatchSize, Epochs, Momentum, Rate
from hansa.core.registry import register
from hansa.models.dense import Logistic, TwoNN
from hansa.models.model import Model
from hansa.numerics.params import Params
from hansa.plumbing.errors import ConfigError, RoundAborted
from hansa.vertical.split import check_momentum
from hansa.vertical.split_sequential_ops import SplitSize, SplitTurns, SplitTurnsTest, Turns


@register("split-sequential")
@dataclass(frozen=True)
class SequentialSplit(Algorithm):
    """Train a network in turn at clients with the same columns. Gupta and Raskar 2018, with the head at the clients.

    The party number `server` has the `middle` and uses no samples of its own. In a round each other party trains
    `epochs` passes over its samples with the `bottom` and the `head`, then hands both on, with the state of their
    optimisers. So labels stay at their party, and the steps are those of one network that sees one party after another.
    `optimiser`, `lr` train bottom and head; `top_optimiser`, `top_lr` the middle (by default the same).
    """

    bottom: Model = TwoNN(hidden=32, outputs=16)
    middle: Model = TwoNN(hidden=32, outputs=16)
    head: Model = Logistic()
    server: int = 0
    epochs: Epochs = 1
    batch: BatchSize = 32
    optimiser: Literal["sgd", "adam"] = "sgd"
    lr: Rate = 0.1
    momentum: Momentum = 0.0
    top_optimiser: Literal["sgd", "adam"] | None = None
    top_lr: Rate | None = None
    dtype: Literal["float32", "float64"] = "float32"
    trains: ClassVar[bool] = False
    participation: ClassVar[Any] = "all"

    def __post_init__(self) -> None:
        check_momentum(self)

    @property
    def verbs(self) -> frozenset[str]:
        return frozenset({"gather", "route"})

    @property
    def ops(self) -> DeclaredOps:
        tested = OpenOp.of("split-turns-test", self, "bottom", "middle", "head", "dtype")
        return OpenOp("split-size"), self._training(), tested

    def check(self, problem: Problem) -> None:
        super().check(problem)
        if not 0 <= self.server < problem.parties:
            raise ConfigError(f"server: there is no party {self.server}; the job has {problem.parties} parties")
        if problem.parties < 2:
            raise ConfigError(f"{self.name} needs at least two parties: the server's and a client")

    def init(self, problem: Problem) -> State:
        return State(Params.none(), slots={"shape": list(problem.shape), "outputs": problem.classes or 1})

    def _turns(self, state: State, kind: str) -> Turns:
        sizes = {int(party): own[kind] for party, own in state.slots["sizes"].items() if own[kind]}
        return Turns(self.server, sizes, tuple(state.slots["shape"]), state.slots["outputs"])

    async def round(self, fed: Federation, state: State) -> State:
        if "sizes" not in state.slots:
            counted = await fed.gather(SplitSize(), parties=fed.parties, need="all")
            sizes = {str(party): {name: int(size) for name, size in reply.tensors.items()}
                     for party, reply in zip(counted.parties, counted.replies, strict=True)
                     if party != self.server}  # fmt: skip
            state = state.replace(None, sizes=sizes)
        turns = self._turns(state, "train")
        if not turns.sizes:
            raise RoundAborted("no client has samples")
        handed = [(client, turns.next_of(client)) for client in turns.clients if len(turns.clients) > 1]
        await fed.session(self._training(), turns.tree(), [*_both_ways(turns), *handed])
        return state

    def _training(self) -> SplitTurns:
        return SplitTurns(
            self.bottom, self.middle, self.head, self.dtype, self.epochs, self.batch, self.optimiser, self.lr,
            self.momentum, self.top_optimiser or self.optimiser, self.top_lr or self.lr,
        )  # fmt: skip

    async def evaluate(self, fed: Federation, state: State) -> dict[str, float]:
        if "sizes" not in state.slots or not (turns := self._turns(state, "test")).sizes:
            return {}
        first = self._turns(state, "train").clients[0]
        op = SplitTurnsTest(self.bottom, self.middle, self.head, self.dtype, first)
        handed = [(first, client) for client in turns.clients if client != first]
        replies: Gathered = await fed.session(op, turns.tree(), [*_both_ways(turns), *handed])
        return replies.mean_metrics([reply.weight for reply in replies.replies])

    def predictor(self, state: State) -> tuple[str, dict[str, Any]]:
        return "joint", {}


def _both_ways(turns: Turns) -> list[tuple[int, int]]:
    """The routes between the clients and the server."""
    return [pair for client in turns.clients for pair in ((client, turns.server), (turns.server, client))]
