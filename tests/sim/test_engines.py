"""The stacked engine against the reference: to 1e-9 in float64, whatever the model, the sizes and the chunks."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import hansa
from forked import needs_fork
from hansa.core.op import Replies, Reply
from hansa.core.plain_data import build
from hansa.local import (
    SGD,
    SVRG,
    Adam,
    Controlled,
    Elastic,
    Fair,
    Gradient,
    LocalSolver,
    Normalised,
    Overlapped,
    Personal,
    Proximal,
)
from hansa.numerics.objective import Objective
from hansa.schedule import ExponentialDecay
from hansa.sim import runtime
from hansa.sim.engine import EngineInputs, PartyWork, ReferenceEngine
from hansa.sim.run_size import RunSize
from hansa.sim.stacked import StackedEngine
from hansa.sim.workers import WorkersEngine

Model = Callable[[], nn.Module]


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)).double()


def dropout() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Dropout(0.4), nn.Linear(8, 3)).double()


def group_norm() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.GroupNorm(2, 8), nn.ReLU(), nn.Linear(8, 3)).double()


def conv() -> nn.Module:
    layers = [
        nn.Unflatten(1, (1, 2, 3)),
        nn.Conv2d(1, 3, 2),
        nn.ReLU(),
        nn.Dropout2d(0.3),
        nn.Flatten(),
        nn.Linear(6, 3),
    ]
    return nn.Sequential(*layers).double()


def batch_norm() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 3)).double()


class Words(nn.Module):
    """Means of embedded words."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 4)
        self.out = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.out(self.embed(x).mean(1))
        return y


def words() -> nn.Module:
    return Words().double()


MODELS: list[Model] = [mlp, dropout, group_norm, conv, batch_norm, words]
UNEQUAL = [5, 1, 9, 3, 2, 9]
EVEN = [4, 2, 4, 6, 2]  # BatchNorm needs batches of more than one sample


def task(model: Model, sizes: list[int], seed: int = 0) -> hansa.Task:
    make = np.random.default_rng(seed)
    parties = []
    for n in sizes:
        x = make.integers(0, 11, (n, 5)) if model is words else make.normal(size=(n, 6))
        parties.append((x, make.integers(0, 3, n)))
    return hansa.Task(model, "cross_entropy", parties, classes=3)


def pair(given: hansa.Task, seed: int = 4, chunk: int | None = None) -> tuple[ReferenceEngine, StackedEngine]:
    objective = Objective(given.model, given.loss, seed)
    holdings = given.holdings(objective)
    return ReferenceEngine(objective, holdings, seed), StackedEngine(objective, holdings, seed, chunk)


def payload(engine: ReferenceEngine, solver: LocalSolver) -> dict[str, Any]:
    out: dict[str, Any] = {"model": engine.objective.initial._asdict()}
    spec = engine.objective.spec
    if isinstance(solver, SVRG):
        out["gradient"] = torch.linspace(-1, 1, spec.dim, dtype=torch.float64)
    if isinstance(solver, Controlled):
        out["c"] = torch.linspace(-0.1, 0.2, spec.dim, dtype=torch.float64)
    if isinstance(solver, Elastic):
        out["alpha"] = 0.3
    if isinstance(solver, Normalised):
        out["rate"] = 0.2
    if isinstance(solver, Personal):
        out["model"] = {**out["model"], "w": out["model"]["w"][solver.division(spec).base]}
    return out


def memory(engine: ReferenceEngine, solver: LocalSolver, party: int) -> dict[str, Tensor]:
    """The memory of a party: empty at first, nonzero for every second party."""
    if party % 2:
        return {}
    return {name: torch.linspace(0.1, 0.3 + party, value.numel(), dtype=torch.float64).view(value.shape)
            for name, value in solver.remember(engine.objective.spec, engine.objective.initial).items()}  # fmt: skip


def compare(given: hansa.Task, solver: LocalSolver, chunk: int | None = 4, round: int = 1,
            works: Sequence[dict[str, Any]] = ()) -> None:  # fmt: skip
    """Check that both engines' replies agree, tensor by tensor, and that the stacked engine did stack."""
    alone, together = pair(given, chunk=chunk)
    together.one = None  # type: ignore[assignment,method-assign]  # training a party alone would agree for the wrong reason
    sent = payload(alone, solver)
    told = [{**sent, "work": works[k % len(works)]} if works else sent for k in range(len(alone.holdings))]
    jobs = [PartyWork(k, told[k], memory(alone, solver, k)) for k in range(len(alone.holdings))]
    first, second = dict(alone.run(solver, jobs, round)), dict(together.run(solver, jobs, round))
    assert together._refused is None
    assert list(first) == list(second) == [job.party for job in jobs]
    moved = 0.0
    for party, outcome in first.items():
        other = second[party]
        assert not isinstance(outcome, str)
        assert not isinstance(other, str)
        a, b = outcome[0], other[0]
        assert a.weight == b.weight == alone.holdings.train.size(party)
        assert set(a.tensors) == set(b.tensors)
        assert set(a.maxima) == set(b.maxima)
        for name, value in a.tensors.items():
            assert value.dtype == b.tensors[name].dtype == torch.float64
            assert torch.allclose(value, b.tensors[name], rtol=0, atol=1e-9), (party, name)
        for name, value in a.maxima.items():
            assert torch.equal(value, b.maxima[name])
        assert a.metrics == pytest.approx(b.metrics, abs=1e-9)
        assert set(outcome[1]) == set(other[1])
        for name, value in outcome[1].items():
            assert torch.allclose(value, other[1][name], rtol=0, atol=1e-9), (party, name)
        moved += float(a.tensors["w"].abs().max())
    assert moved > 1e-3


@pytest.mark.thin(2)
@pytest.mark.parametrize("solver", [SGD(lr=0.3, epochs=2, batch=2), Gradient(), SVRG(h=2.0)], ids=lambda s: s.name)
@pytest.mark.parametrize("model", MODELS, ids=lambda m: m.__name__)
def test_stacked_parties_train_as_they_do_alone(model: Model, solver: LocalSolver) -> None:
    if model is batch_norm and isinstance(solver, SVRG):
        solver = SVRG(h=2.0, batch=2)
    compare(task(model, EVEN if model is batch_norm else UNEQUAL), solver)


def line() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3)).double()


SOLVERS: list[LocalSolver] = [
    SGD(lr=0.3, epochs=2, batch=2, momentum=0.9, nesterov=True, weight_decay=0.1),
    SGD(lr=0.3, epochs=2, batch=2, weight_decay=0.1),
    Adam(lr=0.1, epochs=2, batch=2, eps=0.01),
    Proximal(lr=0.3, epochs=2, batch=2, mu=0.5),
    Proximal(lr=0.3, epochs=2, batch=2, mu=0.5, gamma=0.9),
    Controlled(lr=0.3, epochs=2, batch=2),
    Controlled(lr=0.3, epochs=2, batch=2, option="I", momentum=0.5),
    Normalised(lr=0.3, epochs=2, batch=2, momentum=0.5),
    Normalised(lr=0.3, epochs=2, batch=2, mu=0.5),
    Fair(lr=0.3, epochs=2, batch=2, q=1.5),
    Personal(SGD(lr=0.3, epochs=2, batch=2)),
    Personal(Adam(lr=0.1, epochs=2, batch=2, eps=0.01)),
    Elastic(lr=0.3, epochs=2, batch=2),
    Overlapped(lr=0.3, epochs=2, batch=2),
]
WORKS = [{"steps": 3}, {"lr": 0.1, "epochs": 1}, {}, {"batch": 3, "steps": 1}, {"epochs": 3, "lr": 0.5}]


@pytest.mark.thin(14)
@pytest.mark.parametrize("solver", SOLVERS, ids=repr)
@pytest.mark.parametrize("model", [line, conv, batch_norm], ids=lambda m: m.__name__)
@pytest.mark.parametrize("works", [(), WORKS, WORKS[1:2]], ids=["alike", "each", "shared"])
def test_every_solver_is_the_same_in_a_stack_whatever_each_party_is_told(
    model: Model, solver: LocalSolver, works: list[dict[str, Any]]
) -> None:
    sizes = EVEN if model is batch_norm else UNEQUAL
    told = [work for work in works if model is not batch_norm or work.get("batch") != 3]
    compare(task(model, sizes), solver, works=told)


@pytest.mark.parametrize("chunk", [2, 3, 32])
@pytest.mark.parametrize("model", [dropout, batch_norm], ids=lambda m: m.__name__)
def test_the_size_of_a_chunk_changes_nothing(model: Model, chunk: int) -> None:
    compare(task(model, EVEN if model is batch_norm else UNEQUAL), SGD(lr=0.3, batch=2, epochs=2), chunk)


@pytest.mark.parametrize(
    "solver",
    [
        SGD(lr=0.3, batch=None, epochs=3),
        SGD(lr=0.3, batch=None, steps=5),
        SGD(lr=0.3, batch=2, drop_last=True, epochs=2),
        SGD(lr=0.3, batch=2, steps=7),
        SGD(lr=0.3, batch=2, steps=1),
        SGD(lr=0.3, batch=100),
        SGD(lr=0.3, batch=1),
        SGD(lr=0.3, batch=2, schedule=ExponentialDecay(0.5)),
        SVRG(h=1.0, batch=5),
        SVRG(h=1.0, batch=None),
    ],
    ids=repr,
)
def test_every_way_to_batch_is_the_same_in_a_stack(solver: LocalSolver) -> None:
    compare(task(dropout, UNEQUAL), solver)


def test_the_full_form_of_svrg_is_the_same_in_a_stack() -> None:
    given = task(lambda: nn.Linear(6, 3).double(), UNEQUAL)
    for x, _ in given.parties:
        x[np.random.default_rng(len(x)).random(x.shape) < 0.6] = 0.0
    results = [
        hansa.simulate(hansa.FSVRG(local=SVRG(h=1.0), form="full"), given, rounds=2, engine=engine).state.params.w
        for engine in ("reference", "stacked")
    ]
    assert torch.allclose(*results, rtol=0, atol=1e-9)


ALGORITHMS = [
    hansa.FedAvg(local=SGD(lr=0.2, batch=2, epochs=2)),
    hansa.FedSGD(),
    hansa.FSVRG(),
    hansa.DecentralizedSGD(local=SGD(lr=0.2, batch=2)),
    hansa.FedBuff(buffer=3),
]


@pytest.mark.thin(2)
@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=lambda a: a.name)
@pytest.mark.parametrize("model", [dropout, batch_norm], ids=lambda m: m.__name__)
def test_whole_runs_agree_and_repeat_bit_for_bit(algorithm: hansa.Algorithm, model: Model) -> None:
    if model is batch_norm and algorithm.name == "fsvrg":
        algorithm = hansa.FSVRG(local=SVRG(batch=2))
    given = task(model, EVEN)
    runs = {
        engine: [hansa.simulate(algorithm, given, rounds=2, seed=5, engine=engine) for _ in range(2)]
        for engine in ("reference", "stacked")
    }
    for first, second in runs.values():
        for name, value in first.params.items():
            assert torch.equal(value, second.params[name]), name
    one, other = runs["reference"][0], runs["stacked"][0]
    for name, value in one.params.items():
        assert value.dtype == other.params[name].dtype == (torch.int64 if "num_batches" in name else torch.float64)
        assert torch.allclose(value.double(), other.params[name].double(), rtol=0, atol=1e-9), name
    if model is batch_norm:
        assert not torch.equal(one.params["1.running_mean"], torch.zeros(8, dtype=torch.float64))
        assert one.params["1.num_batches_tracked"] > 0
    seeded = hansa.simulate(algorithm, given, rounds=2, seed=6, engine="stacked")
    assert not torch.equal(seeded.state.params.w, other.state.params.w)


def test_batch_norm_averages_statistics_and_takes_the_largest_count() -> None:
    sizes = [4, 12]
    given = task(batch_norm, sizes)
    alone, _ = pair(given)
    sent = payload(alone, SGD())
    replies = [r[0] for _, r in alone.run(SGD(batch=2), [PartyWork(0, sent, {}), PartyWork(1, sent, {})], 0)]  # type: ignore[index]
    done = hansa.simulate(hansa.FedAvg(local=SGD(batch=2)), given, rounds=1, seed=4, engine="reference")
    expected = (replies[0].tensors["stats"] * 4 + replies[1].tensors["stats"] * 12) / 16
    assert torch.allclose(done.state.params.stats, expected, atol=1e-15)
    assert done.params["1.num_batches_tracked"] == 6  # the larger party took six steps


class Counters(nn.Module):
    """Buffers of several types, written in place and replaced."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(6)  # float32, beside a float64 buffer
        self.out = nn.Linear(6, 3)
        self.register_buffer("wide", torch.zeros(2, dtype=torch.float64))
        self.register_buffer("passes", torch.zeros((), dtype=torch.int32))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.wide.add_(0.5)
            self.passes = self.passes + 1
        y: Tensor = self.out(self.norm(x))
        return y


@pytest.mark.parametrize("engine", ["reference", "stacked"])
@pytest.mark.parametrize(
    "algorithm", [hansa.FedAvg(local=SGD(batch=2)), hansa.DecentralizedSGD()], ids=lambda a: a.name
)
def test_buffers_of_every_type_move_on_whether_written_or_replaced(algorithm: hansa.Algorithm, engine: str) -> None:
    given = task(Counters, [4, 4, 4])
    done = hansa.simulate(algorithm, given, rounds=2, engine=engine)
    steps = 4 if algorithm.name == "fedavg" else 2
    assert done.params["passes"] == done.params["norm.num_batches_tracked"] == steps
    assert done.params["passes"].dtype == torch.int32
    assert done.params["wide"].tolist() == [0.5 * steps] * 2
    assert float(done.params["norm.running_mean"].abs().min()) > 0


def test_a_wrapped_solver_is_stacked_and_the_wrapper_sees_each_party() -> None:
    given = task(mlp, [5, 9, 4])
    runs = [
        hansa.simulate(hansa.DecentralizedSGD(), given, rounds=4, engine=engine) for engine in ("reference", "stacked")
    ]
    for party, memory in runs[0].memories.items():
        for name, value in memory.items():
            assert torch.allclose(value, runs[1].memories[party][name], rtol=0, atol=1e-9)


def test_the_stacked_engine_answers_in_the_order_of_ids_whatever_order_it_trains_in(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    orders: list[list[int]] = []

    def watched(ask: Any, outcomes: Any, *rest: Any) -> Any:
        seen: list[int] = []

        def passed() -> Any:
            for item in outcomes:
                replied = item.parties if isinstance(item, Replies) else [item[0]] if isinstance(item[1], Reply) else []
                seen.extend(replied)
                yield item

        answer = real(ask, passed(), *rest)
        orders.append(seen)
        return answer

    real = runtime.combine
    monkeypatch.setattr(runtime, "combine", watched)
    sizes = [1 + (300 - k) % 7 for k in range(300)]  # it trains the small ones first, and more than one window
    sizes[5] = 0
    given = task(mlp, sizes)
    for engine in ("reference", "stacked"):
        hansa.simulate(hansa.FedSGD(), given, rounds=1, engine=engine, absent=lambda party, round: party in (0, 17))
    assert orders == [[party for party in range(300) if party not in (0, 5, 17)]] * 2


def test_a_float32_model_stays_float32() -> None:
    given = hansa.Task(lambda: nn.Linear(2, 1), "mse", [(np.ones((3, 2)), np.ones((3, 1)))] * 2)
    for engine in ("reference", "stacked"):
        done = hansa.simulate(hansa.FedAvg(), given, rounds=2, engine=engine)
        assert {v.dtype for v in done.params.values()} == {torch.float32}


# --- what cannot be stacked ---


class Reader(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(1, 4, batch_first=True)
        self.out = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.out(self.lstm(x.unsqueeze(-1))[0][:, -1])
        return y


class Branching(nn.Module):
    """Branches if all values of the batch are positive."""

    def forward(self, x: Tensor) -> Tensor:
        return x * 2 if bool(x.sum() > 0) else x


def branching() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 3), Branching()).double()


def reader() -> nn.Module:
    return Reader().double()


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (reader, "engine stacked: one party at a time, which convolutions and recurrent nets prefer on a CPU"),
        (branching, "parties train one at a time: Branching at '1' cannot be batched over parties"),
    ],
)
def test_what_cannot_be_stacked_trains_one_at_a_time_and_is_named_once(
    model: Model, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    given = task(model, [4, 6, 3])
    with caplog.at_level(logging.INFO, logger="hansa"):
        stacked = hansa.simulate(hansa.FedAvg(), given, rounds=3, engine="stacked")
    told = [record.getMessage() for record in caplog.records if record.name == "hansa"]
    assert [line.startswith(said) for line in told].count(True) == 1
    alone = hansa.simulate(hansa.FedAvg(), given, rounds=3, engine="reference")
    assert torch.equal(stacked.state.params.w, alone.state.params.w)


def test_auto_stacks_chains_and_small_models_in_long_runs_and_leaves_the_others_alone() -> None:
    needs_fork()
    short, long = RunSize(1, 4, SGD(batch=2)), RunSize(100_000, 4, SGD(batch=2))
    cases = [
        (mlp, 8, short, "stacked"),  # a chain of linear layers
        (dropout, 8, short, "reference"),
        (dropout, 8, long, "stacked"),
        (dropout, 7, long, "workers"),  # too few parties to stack by vmap
        (reader, 8, short, "reference"),
        (reader, 8, long, "workers"),
    ]
    for model, parties, work, name in cases:
        given = task(model, [4] * parties)
        objective = Objective(given.model, given.loss, 0)
        engine = build("engine", "auto").start(EngineInputs(objective, given.holdings(objective), 0, work))
        assert engine.name == name, (model, parties, work)
        assert isinstance(engine, WorkersEngine) == (work is long)
        assert engine.why()


def test_a_resumed_run_keeps_the_bits_it_began_with() -> None:
    needs_fork()
    given = task(dropout, [4] * 8)
    objective = Objective(given.model, given.loss, 0)
    long = RunSize(100_000, 4, SGD(batch=2))
    inputs = EngineInputs(objective, given.holdings(objective), 0, long, before={"engine": "reference"})
    engine = build("engine", "auto").start(inputs)
    assert engine.name == "workers"
    assert engine.plan() == ReferenceEngine(objective, given.holdings(objective), 0).plan()


def test_an_unknown_engine_suggests_the_nearest() -> None:
    with pytest.raises(hansa.ConfigError, match="did you mean 'stacked'"):
        hansa.simulate(hansa.FedAvg(), task(mlp, [3]), engine="staked")


def test_workers_by_name_are_refused_where_processes_cannot_be_forked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hansa.sim.choice.cores", lambda: 1)
    with pytest.raises(hansa.ConfigError, match="'workers' needs more than one core, and this process may use one"):
        hansa.simulate(hansa.FedAvg(), task(mlp, [3]), engine="workers")


def test_a_run_that_is_alone_in_its_process_forks_only_by_name() -> None:
    given, long = task(dropout, [4] * 7), RunSize(100_000, 4, SGD(batch=2))
    objective = Objective(given.model, given.loss, 0)
    inputs = EngineInputs(objective, given.holdings(objective), 0, long, alone=True)
    names = ("auto", "stacked", "reference", "workers")
    forks = {name: isinstance(build("engine", name).start(inputs), WorkersEngine) for name in names}
    assert forks == {"auto": False, "stacked": False, "reference": False, "workers": True}


def test_a_party_of_one_sample_cannot_train_batch_norm_and_is_named() -> None:
    for engine in ("reference", "stacked"):
        with pytest.raises(
            hansa.HansaError, match=r"party 1 failed at 'sgd' in round 0: a batch of one sample cannot train BatchNorm"
        ):
            hansa.simulate(hansa.FedAvg(), task(batch_norm, [4, 1]), rounds=1, engine=engine)
