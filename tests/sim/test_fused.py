"""Steps fused into the backward pass: the same numbers as one party at a time, and only where that is so."""

import pytest
import torch
from torch import Tensor, nn

import hansa
from hansa.core.objective import Objective
from hansa.local import SGD, Gradient, LocalSolver
from hansa.sim.stacked import StackedEngine

SIZES = (3, 11, 0, 7, 16, 5)


class Plain(nn.Module):
    """Layers called from a forward of its own, one of them without a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(8, 6, bias=False), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.body(x)))


class Branches(nn.Module):
    """Looks at the whole batch to decide what to do with it."""

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
    return StackedEngine(objective, given.holdings(objective), 0)._fuses(solver)


@pytest.mark.parametrize("model", [dense, plain])
@pytest.mark.parametrize(
    "local",
    [
        SGD(batch=4, epochs=2),
        SGD(batch=None, epochs=3),
        SGD(batch=5, steps=7, decay=0.9),
        SGD(batch=4, drop_last=True),
    ],
)
def test_fused_steps_equal_one_party_at_a_time(model: object, local: SGD) -> None:
    assert fuses(model, local)
    runs = [hansa.simulate(hansa.FedAvg(local=local), task(model), rounds=3, engine=e) for e in ("reference", "vmap")]
    for name, value in runs[0].params.items():
        torch.testing.assert_close(runs[1].params[name], value, rtol=0, atol=1e-12)
    losses = [[line["train_loss"] for line in run.history] for run in runs]
    assert losses[0] == pytest.approx(losses[1], abs=1e-12)


@pytest.mark.parametrize("model", [with_norm, with_dropout, twice, peeks, branches])
def test_other_models_are_not_fused_and_still_right(model: object) -> None:
    assert not fuses(model, SGD())
    local = SGD(batch=4, epochs=2)
    runs = [hansa.simulate(hansa.FedAvg(local=local), task(model), rounds=2, engine=e) for e in ("reference", "vmap")]
    torch.testing.assert_close(runs[1].state.params.w, runs[0].state.params.w, rtol=0, atol=1e-9)


def test_other_solvers_are_not_fused() -> None:
    assert not fuses(dense, Gradient())
    assert not fuses(dense, hansa.SVRG())


@pytest.mark.parametrize("chunk", [1, 2, 5])
def test_chunks_of_any_size_give_the_same_updates(chunk: int) -> None:
    given = task(dense)
    objective = Objective(given.model, given.loss, 0)
    engine = StackedEngine(objective, given.holdings(objective), 0, chunk)
    from hansa.sim.engine import Job

    payload = {"model": objective.initial._asdict()}
    jobs = [Job(party, payload, {}) for party in range(len(SIZES))]
    for party, outcome in engine.run(SGD(batch=4), jobs, 0):
        alone = engine.one(SGD(batch=4), jobs[party], 0)
        assert isinstance(alone, str) == isinstance(outcome, str) == (SIZES[party] == 0)
        if not isinstance(outcome, str) and not isinstance(alone, str):
            torch.testing.assert_close(outcome[0].tensors["w"], alone[0].tensors["w"], rtol=0, atol=1e-12)
