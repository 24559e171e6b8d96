"""Unusual models, losses and solvers: every engine gives the reference's numbers, or gives the reason why it cannot."""

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import hansa
from forked import needs_fork
from hansa.core.op import Memory, Op, Party, Payload, Reply
from hansa.core.registry import register
from hansa.core.wrapper import Wrapper
from hansa.local import SGD, Carry, Context, LocalSolver
from hansa.numerics.objective import Objective
from hansa.plumbing.errors import PartyError
from hansa.sim.engine import Outcome, PartyWork, ReferenceEngine
from hansa.sim.stacked import StackedEngine
from hansa.sim.workers import WorkersEngine

SIZES = (6, 4, 9, 6, 4)


def dense() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 5), nn.ReLU(), nn.Linear(5, 3)).double()


def task(model: Any = dense, loss: Any = "cross_entropy", sizes: tuple[int, ...] = SIZES) -> hansa.Task:
    make = np.random.default_rng(2)
    return hansa.Task(model, loss, [(make.normal(size=(n, 8)), make.integers(0, 3, n)) for n in sizes], classes=3)


def engines(given: hansa.Task, chunk: int | None = None) -> list[ReferenceEngine]:
    objective = Objective(given.model, given.loss, 0)
    holdings = given.holdings(objective)
    stacked = StackedEngine(objective, holdings, 0, chunk)
    return [
        ReferenceEngine(objective, holdings, 0),
        stacked,
        WorkersEngine(StackedEngine(objective, holdings, 0, chunk)),
    ]


def outcomes(engine: ReferenceEngine, op: Op) -> dict[int, Outcome]:
    payload = {"model": engine.objective.initial._asdict()}
    try:
        return dict(engine.run(op, [PartyWork(k, payload, {}) for k in range(len(engine.holdings))], 1))
    finally:
        engine.close()


def agree(given: hansa.Task, op: Op, chunk: int | None = None) -> None:
    needs_fork()
    wanted, *others = (outcomes(engine, op) for engine in engines(given, chunk))
    for got in others:
        assert list(wanted) == list(got)
        for party, outcome in wanted.items():
            other = got[party]
            if isinstance(outcome, str) or isinstance(other, str):
                assert outcome == other
                continue
            torch.testing.assert_close(other[0].tensors["w"], outcome[0].tensors["w"], rtol=0, atol=1e-9)
            assert sorted(other[1]) == sorted(outcome[1])


class Viewing(nn.Module):
    """Flattens images by `view`, which depends on their memory layout."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(2, 3, 3, padding=1), nn.Linear(48, 3)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(torch.relu(self.conv(x)).view(x.size(0), -1))
        return y


@pytest.mark.parametrize("engine", ["reference", "stacked", "workers"])
def test_a_float32_model_that_views_its_images_trains_and_is_evaluated(engine: str) -> None:
    make = torch.Generator().manual_seed(0)
    pairs = [(torch.randn(5, 2, 4, 4, generator=make), torch.randint(0, 3, (5,), generator=make)) for _ in range(3)]
    given = hansa.Task(Viewing, "cross_entropy", pairs, test=pairs[0], classes=3)
    done = hansa.simulate(hansa.FedAvg(local=SGD(batch=2)), given, rounds=1, engine=engine)
    assert done.history[-1]["loss"] > 0


def relative(output: Tensor, target: Tensor) -> Tensor:
    """A loss that depends on the other samples of its batch."""
    values = nn.functional.cross_entropy(output, target, reduction="none")
    return values * (values / values.mean()).detach()


def unremembered() -> nn.Module:
    norm = nn.BatchNorm1d(5, track_running_stats=False)
    return nn.Sequential(nn.Linear(8, 5), norm, nn.ReLU(), nn.Linear(5, 3)).double()


@pytest.mark.thin(1)
@pytest.mark.parametrize("chunk", [None, 3])
@pytest.mark.parametrize(("model", "loss"), [(dense, relative), (unremembered, "cross_entropy")])
def test_rows_that_look_at_each_other_stay_with_their_party(model: Any, loss: Any, chunk: int | None) -> None:
    agree(task(model, loss), SGD(lr=0.3, batch=4, drop_last=True, epochs=2), chunk)


@register("test_uneven")
@dataclasses.dataclass(frozen=True)
class Uneven(SGD):
    """Takes more steps at some parties than at others of the same size."""

    def batches(self, n: int, seed: int, round: int, party: int) -> list[np.ndarray[Any, Any]]:
        return super().batches(n, seed, round, party) * (1 + party % 3)


def test_steps_that_depend_on_the_party_are_taken_by_that_party() -> None:
    agree(task(), Uneven(lr=0.3, batch=2))


class Reversal(torch.autograd.Function):
    """A gradient that is not the derivative."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return -2.0 * gradient


class Reversed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(8, 5), nn.Linear(5, 3)
        nn.init.zeros_(self.head.weight)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(torch.tanh(Reversal.apply(self.body(x))))
        return y


class Counting(nn.Module):
    """Behaves differently for a large batch."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x)
        return y * 2 if len(x) > 3 else y


@pytest.mark.thin(2)
@pytest.mark.parametrize("model", [lambda: Reversed().double(), lambda: Counting().double()])
@pytest.mark.parametrize("scale", [1.0, 1e-8])
def test_models_that_a_chain_would_not_replay_are_not_replayed(model: Any, scale: float) -> None:
    def loss(output: Tensor, target: Tensor) -> Tensor:
        return scale * nn.functional.cross_entropy(output, target, reduction="none")

    agree(task(model, loss), SGD(lr=0.3 / scale, batch=6))


@dataclasses.dataclass(frozen=True)
class Unregistered(SGD):
    name = "unregistered"  # type: ignore[misc]


def test_a_solver_that_is_not_registered_trains_in_this_process() -> None:
    agree(task(), Unregistered(batch=2))


@register("test_picky")
@dataclasses.dataclass(frozen=True)
class Picky(SGD):
    """Declines for small parties, from inside the solver."""

    def start(self, ctx: Context, w: Tensor, payload: Payload, memory: Memory) -> tuple[Tensor, Carry]:
        if not isinstance(ctx.n, Tensor) and ctx.n < 5:
            raise PartyError("too few samples")
        if isinstance(ctx.n, Tensor):
            raise PartyError("somebody has too few samples")
        return w, {}


def test_a_party_that_declines_while_it_trains_is_missing_and_the_others_are_not() -> None:
    agree(task(), Picky(batch=2))


@register("test_hoarder")
@dataclasses.dataclass(frozen=True)
class Hoarder(SGD):
    """Remembers more than it declares."""

    def finish(self, ctx: Context, start: Tensor, w: Tensor, carry: Carry,
               memory: Memory) -> tuple[dict[str, Tensor], Memory]:  # fmt: skip
        return {"w": w - start}, {"all": torch.cat([w, w, w, w, w, w, w, w])}


def test_memories_larger_than_announced_reach_the_parent() -> None:
    agree(task(), Hoarder(batch=2))


@register("test_broken")
@dataclasses.dataclass(frozen=True)
class Broken(Wrapper):
    inner: LocalSolver = SGD(batch=2)
    kind = "local"  # type: ignore[misc]

    def after(self, party: Party, payload: Payload, reply: Reply, memory: Memory) -> tuple[Reply, Memory]:
        if party.id == 2:
            raise ValueError("no such thing")
        return reply, memory


def test_a_wrapper_that_fails_is_named_with_its_party_in_every_engine() -> None:
    for engine in engines(task()):
        with pytest.raises(PartyError, match="party 2 failed at 'test_broken' in round 1: ValueError: no such thing"):
            outcomes(engine, Broken())
