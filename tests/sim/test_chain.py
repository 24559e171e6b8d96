"""Models replayed as chains of layers: the same numbers as one party at a time, and no chain where they would
differ."""

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import hansa
from forked import needs_fork
from hansa.core.op import Memory, Payload, Replies
from hansa.core.registry import register
from hansa.local import SGD, Batch, Carry, Context, Gradient, LocalSolver
from hansa.numerics.objective import Objective
from hansa.schedule import ExponentialDecay
from hansa.sim.engine import Outcome, PartyWork, ReferenceEngine
from hansa.sim.stack import Stack
from hansa.sim.stacked import StackedEngine
from hansa.sim.workers import WorkersEngine
from hansa.testing import same_bits

SIZES = (3, 11, 0, 7, 16, 5)


class Plain(nn.Module):
    """Layers called from a custom forward, one of them without a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(8, 6, bias=False), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.body(x)))


class Branches(nn.Module):
    """Branches on the values of the whole batch."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x)
        return out if bool(x.sum() > -1e9) else -out


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.layer(torch.tanh(self.layer(x)))))


class Peeks(nn.Module):
    """Uses a weight outside its layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + 0.1 * self.layer.weight.sum()


def dense() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Flatten(), nn.Linear(6, 3)).double()


def plain() -> nn.Module:
    return Plain().double()


def branches() -> nn.Module:
    return Branches().double()


def with_norm() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 6), nn.LayerNorm(6), nn.Linear(6, 3)).double()


def with_dropout() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 6), nn.Dropout(0.5), nn.Linear(6, 3)).double()


def twice() -> nn.Module:
    return Twice().double()


def peeks() -> nn.Module:
    return Peeks().double()


def task(model: object) -> hansa.Task:
    draws = torch.Generator().manual_seed(3)
    pairs = [
        (torch.randn(n, 8, generator=draws, dtype=torch.float64), torch.randint(0, 3, (n,), generator=draws))
        for n in SIZES
    ]
    return hansa.Task(model, "cross_entropy", pairs)  # type: ignore[arg-type]


def fuses(model: object, solver: LocalSolver) -> bool:
    given = task(model)
    objective = Objective(given.model, given.loss, 0)
    chain = StackedEngine(objective, given.holdings(objective), 0).chain
    return chain is not None and chain.stacks and type(solver) is SGD


@pytest.mark.parametrize("model", [dense, plain])
@pytest.mark.parametrize(
    "local",
    [
        SGD(batch=4, epochs=2),
        SGD(batch=None, epochs=3),
        SGD(batch=5, steps=7, schedule=ExponentialDecay(0.9)),
        SGD(batch=4, drop_last=True),
    ],
)
def test_fused_steps_equal_one_party_at_a_time(model: object, local: SGD) -> None:
    assert fuses(model, local)
    runs = [
        hansa.simulate(hansa.FedAvg(local=local), task(model), rounds=3, engine=e) for e in ("reference", "stacked")
    ]
    for name, value in runs[0].params.items():
        torch.testing.assert_close(runs[1].params[name], value, rtol=0, atol=1e-12)
    losses = [[line["train_loss"] for line in run.history] for run in runs]
    assert losses[0] == pytest.approx(losses[1], abs=1e-12)


@pytest.mark.parametrize("model", [with_norm, with_dropout, twice, peeks, branches])
def test_other_models_are_not_fused_and_still_right(model: object) -> None:
    assert not fuses(model, SGD())
    local = SGD(batch=4, epochs=2)
    runs = [
        hansa.simulate(hansa.FedAvg(local=local), task(model), rounds=2, engine=e) for e in ("reference", "stacked")
    ]
    torch.testing.assert_close(runs[1].state.params.w, runs[0].state.params.w, rtol=0, atol=1e-9)


def convolving() -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (1, 2, 4)), nn.Conv2d(1, 3, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(3, 4, 1),
        nn.GELU(), nn.Flatten(), nn.Linear(8, 5), nn.Softplus(), nn.Linear(5, 3),
    ).double()  # fmt: skip


def shaped() -> nn.Module:
    class Shaped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.head = nn.Conv1d(1, 2, 3), nn.Linear(12, 3)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.head(torch.tanh(self.conv(x.view(x.size(0), 1, -1))).reshape(x.shape[0], -1))
            return y

    return Shaped().double()


@register("test_proximal")
@dataclasses.dataclass(frozen=True)
class Proximal(SGD):
    """Descent that is pulled back to its start: a solver that uses only the chain's gradients."""

    def start(self, ctx: Context, w: Tensor, payload: Payload, memory: Memory) -> tuple[Tensor, Carry]:
        return w, {"start": w}

    def direction(self, ctx: Context, w: Tensor, batch: Batch, carry: Carry, key: Tensor) -> Tensor:
        return ctx.gradient(w, batch, key) + 0.5 * (w - carry["start"])


def outcomes(engine: ReferenceEngine, solver: LocalSolver, round: int = 1) -> dict[int, Outcome]:
    payload: dict[str, Any] = {"model": engine.objective.initial._asdict()}
    if isinstance(solver, hansa.SVRG):
        payload["gradient"] = torch.linspace(-1, 1, engine.objective.spec.dim, dtype=torch.float64)
    return dict(engine.run(solver, [PartyWork(party, payload, {}) for party in range(len(SIZES))], round))


@pytest.mark.thin(4)
@pytest.mark.parametrize("chunk", [1, 3, None])
@pytest.mark.parametrize("solver", [SGD(batch=4), Proximal(batch=4, epochs=2), Gradient(), hansa.SVRG(batch=3)])
@pytest.mark.parametrize("model", [dense, plain, convolving, shaped], ids=lambda m: m.__name__)
def test_every_solver_is_served_by_a_chain(model: Any, solver: LocalSolver, chunk: int | None) -> None:
    given = task(model)
    objective = Objective(given.model, given.loss, 0)
    holdings = given.holdings(objective)
    engine = StackedEngine(objective, holdings, 0, chunk)
    assert engine.chain is not None
    assert engine.chain.stacks == (model in (dense, plain))
    if chunk != 3:  # convolutions that must be stacked use vmap
        engine.one = None  # type: ignore[assignment,method-assign]
    wanted, got = outcomes(ReferenceEngine(objective, holdings, 0), solver), outcomes(engine, solver)
    assert list(wanted) == list(got)
    for party, outcome in wanted.items():
        other = got[party]
        if isinstance(outcome, str) or isinstance(other, str):
            assert outcome == other
            continue
        torch.testing.assert_close(other[0].tensors["w"], outcome[0].tensors["w"], rtol=0, atol=1e-12)
        assert other[0].metrics == pytest.approx(outcome[0].metrics, abs=1e-12)


@pytest.mark.parametrize("loss", ["mse", "mae", "bce"])
def test_other_losses_than_cross_entropy_go_through_a_chain(loss: str) -> None:
    draws = torch.Generator().manual_seed(3)
    pairs = [(torch.randn(n, 8, generator=draws, dtype=torch.float64),
              torch.randint(0, 2, (n, 1), generator=draws).double()) for n in (3, 8, 5)]  # fmt: skip

    def model() -> nn.Module:
        return nn.Sequential(nn.Linear(8, 4), nn.Tanh(), nn.Linear(4, 1)).double()

    given = hansa.Task(model, loss, pairs)
    objective = Objective(given.model, given.loss, 0)
    assert StackedEngine(objective, given.holdings(objective), 0).chain is not None
    runs = [
        hansa.simulate(hansa.FedAvg(local=SGD(batch=2)), given, rounds=2, engine=e) for e in ("reference", "stacked")
    ]
    torch.testing.assert_close(runs[1].state.params.w, runs[0].state.params.w, rtol=0, atol=1e-12)


def test_worker_processes_give_the_bits_of_the_stacked_engine_alone() -> None:
    given = task(dense)
    objective = Objective(given.model, given.loss, 0)
    holdings = given.holdings(objective)
    alone = outcomes(StackedEngine(objective, holdings, 0, 2), Proximal(batch=4))
    needs_fork()
    engine = WorkersEngine(StackedEngine(objective, holdings, 0, 2))
    try:
        spread = outcomes(engine, Proximal(batch=4))
    finally:
        engine.close()
    assert list(alone) == list(spread)
    for party, outcome in alone.items():
        other = spread[party]
        if isinstance(outcome, str) or isinstance(other, str):
            assert outcome == other
        else:
            assert same_bits(outcome[0].tree(), other[0].tree())


def test_worker_processes_hold_as_many_parties_as_a_window() -> None:
    x = torch.linspace(-1, 1, 300 * 2 * 8, dtype=torch.float64).view(-1, 8)
    given = hansa.Task(dense, "cross_entropy", (x, torch.arange(len(x)) % 3, np.arange(0, 601, 2)))
    objective = Objective(given.model, given.loss, 0)
    holdings = given.holdings(objective)
    payload = {"model": objective.initial._asdict()}
    jobs = [PartyWork(party, payload, {}) for party in range(300)]
    needs_fork()
    engine = WorkersEngine(StackedEngine(objective, holdings, 0))
    try:
        (block,) = engine.blocks(SGD(batch=1), jobs, 0)
        assert isinstance(block, Replies)
        spread = block.tensors["w"].clone()
    finally:
        engine.close()
    (alone,) = StackedEngine(objective, holdings, 0).blocks(SGD(batch=1), jobs, 0)
    assert isinstance(alone, Replies)
    assert torch.equal(alone.tensors["w"], spread)


def test_parties_of_very_different_sizes_cost_no_idle_steps() -> None:
    sizes = np.maximum(1, np.random.default_rng(5).lognormal(3.0, 1.0, 400)).astype(int)
    x = torch.zeros(int(sizes.sum()), 8, dtype=torch.float64)
    y = torch.zeros(len(x), dtype=torch.int64)
    given = hansa.Task(dense, "cross_entropy", (x, y, np.concatenate([[0], np.cumsum(sizes)])), classes=3)
    objective = Objective(given.model, given.loss, 0)
    engine = StackedEngine(objective, given.holdings(objective), 0)
    engine.lanes = 2
    payload = {"model": objective.initial._asdict()}
    solver = SGD(batch=8)
    needed = taken = 0
    loads = [0] * engine.lanes
    for at, chunk in enumerate(engine.arrange(solver, [PartyWork(k, payload, {}) for k in range(400)])):
        stack = Stack(engine, [solver], chunk, 0)
        needed += sum(solver.count(int(sizes[job.party])) for job in chunk)
        taken += sum(stack.plan.active)
        loads[at % engine.lanes] += sum(stack.plan.active)
    assert taken == needed
    assert max(loads) < 1.1 * sum(loads) / len(loads)


@pytest.mark.parametrize("chunk", [1, 2, 5])
def test_chunks_of_any_size_give_the_same_updates(chunk: int) -> None:
    given = task(dense)
    objective = Objective(given.model, given.loss, 0)
    engine = StackedEngine(objective, given.holdings(objective), 0, chunk)
    payload = {"model": objective.initial._asdict()}
    jobs = [PartyWork(party, payload, {}) for party in range(len(SIZES))]
    for party, outcome in engine.run(SGD(batch=4), jobs, 0):
        alone = engine.one(SGD(batch=4), jobs[party], 0)
        assert isinstance(alone, str) == isinstance(outcome, str) == (SIZES[party] == 0)
        if not isinstance(outcome, str) and not isinstance(alone, str):
            torch.testing.assert_close(outcome[0].tensors["w"], alone[0].tensors["w"], rtol=0, atol=1e-12)
