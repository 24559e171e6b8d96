"""Engines: how a simulation computes the parties' work. The reference engine trains one party at a time.

An `Engine` is a registered part; `Engine.start` makes the running engine of one run, a `ReferenceEngine` or a subclass
of it. The registered engines are in `sim.engines`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar

from hansa.core.op import Memory, Op, Party, Payload, Replies, Reply, perform
from hansa.core.registry import Part
from hansa.core.task import Holdings
from hansa.numerics.objective import Objective
from hansa.plumbing.determinism import threads
from hansa.plumbing.errors import HansaError, PartyError
from hansa.replies.partial_sums import PartialSum
from hansa.replies.placed import PlacedReply
from hansa.replies.reply_checks import Rules
from hansa.sim.run_size import RunSize

Outcome = tuple[Reply, Memory] | str


@dataclass
class PartyWork:
    """One party's share of an ask. Tickets that are trained together have `round`s of their own."""

    party: int
    payload: Payload
    memory: Memory
    round: int | None = None

    def in_round(self, round: int) -> int:
        """The round of this work, in an ask of a round."""
        return round if self.round is None else self.round


def one_by_one(item: Replies | tuple[int, Outcome], members: Mapping[int, PartyWork]) -> Iterator[tuple[int, Outcome]]:
    """The outcomes of a stack one by one, with tensors of their own; or the one outcome."""
    if not isinstance(item, Replies):
        yield item
        return
    for k, party in enumerate(item.parties):
        yield party, (item.copy(k), {**members[party].memory, **item.remembered(k)})


@dataclass(frozen=True)
class EngineInputs:
    """What an engine is given at the start of a run.

    `holdings` are the parties' samples; the engine must read them again after `data_changed`. `work` is the size of the
    run, if its parties train. `before` is the plan of the run that is resumed. A run that is `alone` should use one
    process, because others run beside it. `compile` is `run.compile`. `device` is `run.device`, on which the parties
    train; objective and holdings are on that of `Engine.driver_device`.
    """

    objective: Objective
    holdings: Holdings
    seed: int
    work: RunSize | None = None
    before: Mapping[str, Any] = field(default_factory=dict)
    alone: bool = False
    compile: str = "auto"
    device: str = "cpu"


class Engine(Part):
    """Base of the registered engines. Subclasses are frozen dataclasses; their fields are settings of `run.engine`."""

    kind: ClassVar[str] = "engine"

    def driver_device(self, device: str) -> str:
        """The device of the model and the samples in this process, if the parties train on `device`."""
        return device

    def start(self, inputs: EngineInputs) -> ReferenceEngine:
        """The running engine of one run. A ConfigError if the engine cannot work here."""
        raise TypeError(f"the engine {self.name!r} does not define start()")


class ReferenceEngine:
    """Train one party after another, on one thread, by the function that a deployed party runs.

    Other engines are subclasses, which override `blocks`. An engine with `sums` also defines `partial_sums`, an engine
    with `places` also `placed`.
    """

    name = "reference"
    sums: ClassVar[bool] = False  # whether the engine can sum replies itself (`partial_sums`)
    places: ClassVar[bool] = False  # whether the engine can store gathered replies itself (`placed`)
    ahead: int = 1  # tickets that `blocks` should be given at once; above 1 it must heed `PartyWork.round`

    def __init__(self, objective: Objective, holdings: Holdings, seed: int) -> None:
        self.objective, self.holdings, self.seed = objective, holdings, seed

    @property
    def sender(self) -> str:
        """The name of the engine as the sender of partial sums."""
        return f"the engine {self.name!r}"

    def plan(self) -> dict[str, Any]:
        """What the bits of a run depend on."""
        return {"engine": self.name, "threads": 1}

    def party(self, id: int, round: int) -> Party:
        models = self.holdings.models
        objective = self.objective if models is None else models.of(id)
        return Party(id, objective, self.holdings.gateway(id), self.seed, round, public=self.holdings.public,
                     augment=self.holdings.augment)  # fmt: skip

    def why(self) -> str:
        """How this engine trains parties, in a few words, for the log."""
        if self.holdings.models is not None:
            return "one party at a time, because the parties train several models"
        if self.holdings.augment is not None:
            return "one party at a time, because its samples are augmented one by one"
        return "one party at a time, as a deployed party trains"

    def blocks(self, op: Op, members: list[PartyWork], round: int) -> Iterator[Replies | tuple[int, Outcome]]:
        """Yield the parties' outcomes, one by one or in stacks, with replies in the order of `members`."""
        with threads(1):
            for member in members:
                yield member.party, self.one(op, member, round)

    def run(self, op: Op, members: list[PartyWork], round: int) -> Iterator[tuple[int, Outcome]]:
        """Yield each party's outcome, in the order of `members`."""
        by_party = {member.party: member for member in members}
        done: dict[int, Outcome] = {}
        for item in self.blocks(op, members, round):
            done.update(one_by_one(item, by_party))
        for member in members:
            yield member.party, done[member.party]

    def partial_sums(self, op: Op, members: list[PartyWork], round: int,
                     uniform: bool) -> Iterator[PartialSum | tuple[int, Outcome]]:  # fmt: skip
        """Yield partial sums of the parties' replies, in any grouping, instead of the replies.

        Only called with `run.sums = "exact"` for a sum that looks at no single reply. `uniform` gives all parties the
        weight 1. The `bytes` of a sum are those of the single replies. A party that declines, or whose reply does not
        fit an exact sum, is yielded by itself.
        """
        raise TypeError(f"the engine {self.name!r} does not define partial_sums()")

    def placed(self, op: Op, members: list[PartyWork], round: int,
               rules: Rules) -> Iterator[PlacedReply | Replies | tuple[int, Outcome]]:  # fmt: skip
        """As `blocks`, for replies that are gathered; those with large updates may be checked and stored elsewhere.

        Only called by engines with `places`, for an op without a privacy budget.
        """
        raise TypeError(f"the engine {self.name!r} does not define placed()")

    def data_changed(self, parties: Sequence[int] | None = None) -> None:
        """The samples of these parties (None: of all) have changed: copies of them must not be used any more."""

    def close(self) -> None:
        """Release processes and shared memory; closing twice is fine."""

    def one(self, op: Op, member: PartyWork, round: int) -> Outcome:
        round = member.in_round(round)
        with named(op, member.party, round):
            memory = {name: value.clone() for name, value in member.memory.items()}  # the op may write into it
            return perform(op, self.party(member.party, round), member.payload, memory)


class Failure(PartyError):
    """A party's work failed, rather than being declined by the party."""


@contextmanager
def named(op: Op, party: int, round: int) -> Iterator[None]:
    """Wrap user code: an exception becomes a Failure that names party, op and round."""
    try:
        yield
    except HansaError:
        raise
    except Exception as error:
        raise Failure(f"party {party} failed at {op.name!r} in round {round}: {first_line(error)}") from error


def first_line(error: BaseException) -> str:
    """The first line of an error, with advice where the cause is known."""
    text = str(error).strip().splitlines()[0] if str(error).strip() else ""
    if not isinstance(error, RuntimeError):
        text = f"{type(error).__name__}: {text}".removesuffix(": ")
    if "more than 1 value per channel" in text:
        return (
            "a batch of one sample cannot train BatchNorm; choose a batch size that leaves no party a single sample, "
            "or set drop_last (of the local solver, or of run.finetune)"
        )
    return text
