"""Recorded training gives the numbers of one party at a time: traced and run here; on a GPU, if there is one,
recorded and compiled."""

import dataclasses
import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hansa
from hansa.core.op import Memory, Payload, Replies
from hansa.local import DPSGD, SGD, SVRG, Batch, Carry, Context, Gradient, LocalSolver
from hansa.models.resnet import ResidualBlock
from hansa.numerics.objective import Objective
from hansa.numerics.params import Params, ParamSpec
from hansa.schedule import ExponentialDecay
from hansa.sim import gpu, recorded_round, rewrite, trial
from hansa.sim.engine import Outcome, PartyWork, ReferenceEngine, one_by_one
from hansa.sim.rewrite import Rewritten
from hansa.sim.run_size import RunSize
from hansa.sim.stack import DeferredNumbers
from hansa.sim.stacked import StackedEngine
from lora import WIDTH, adapted

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
SIZES = (5, 1, 9, 3, 16, 9, 2)


@dataclasses.dataclass(frozen=True)
class Corrected(SGD):
    """Descent corrected by the party's memory, which changes in every round."""

    name = "corrected"  # type: ignore[misc]

    def remember(self, spec: ParamSpec, initial: Params) -> Memory:
        return {"control": torch.full((spec.dim,), 0.1, dtype=spec.dtype)}

    def start(self, ctx: Context, w: Tensor, payload: Payload, memory: Memory) -> tuple[Tensor, Carry]:
        return w, {"control": memory["control"], "speed": w * 0.0}

    def direction(self, ctx: Context, w: Tensor, batch: Batch, carry: Carry, key: Tensor) -> Tensor:
        return ctx.gradient(w, batch, key) - carry["control"]

    def step(self, ctx: Context, w: Tensor, direction: Tensor, carry: Carry) -> tuple[Tensor, Carry]:
        speed = 0.5 * carry["speed"] + direction
        return super().step(ctx, w, speed, carry)[0], {**carry, "speed": speed}

    def finish(self, ctx: Context, start: Tensor, w: Tensor, carry: Carry,
               memory: Memory) -> tuple[dict[str, Tensor], Memory]:  # fmt: skip
        return {"w": w - start}, {"control": (start - w) / ctx.steps}


@dataclasses.dataclass(frozen=True)
class Counted(Corrected):
    """Also reports two metrics."""

    name = "counted"  # type: ignore[misc]
    measures = frozenset({"train_loss", "speed", "control"})  # type: ignore[misc]

    def report(self, carry: Carry) -> dict[str, Tensor]:
        return {"speed": carry["speed"].norm(), "control": carry["control"].norm()}


def dense() -> nn.Module:
    return nn.Sequential(nn.Linear(24, 6), nn.ReLU(), nn.Linear(6, 3)).double()


def wide() -> nn.Module:
    return nn.Sequential(
        nn.Linear(24, 900), nn.Tanh(), nn.Linear(900, 20, bias=False), nn.ReLU(), nn.Linear(20, 3)
    ).double()


def convolving() -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (1, 4, 6)), nn.Conv2d(1, 3, 3, padding=1, bias=False), nn.ReLU(), nn.Dropout(0.3),
        nn.Conv2d(3, 4, (2, 3), stride=(1, 2), padding=(0, 1), dilation=(2, 1)), nn.ReLU(), nn.MaxPool2d((2, 1)),
        nn.Flatten(), nn.Linear(12, 3),
    ).double()  # fmt: skip


def grouped() -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (2, 3, 4)), nn.Conv2d(2, 4, 3, padding="same", groups=2), nn.GroupNorm(2, 4), nn.Flatten(),
        nn.Linear(48, 3),
    ).double()  # fmt: skip


def residual() -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (2, 4, 3)), nn.Conv2d(2, 4, 3, padding=1, bias=False), nn.GroupNorm(2, 4), nn.ReLU(),
        ResidualBlock(4, 8, 2, 2), nn.Flatten(), nn.Linear(32, 3),
    ).double()  # fmt: skip


def normed() -> nn.Module:
    return nn.Sequential(nn.Linear(24, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3)).double()


def adapting() -> nn.Module:
    """Adapters on a frozen transformer."""
    model: Any = adapted()
    model.head = nn.Linear(WIDTH, 3)
    return nn.Sequential(nn.Unflatten(1, (8, 3)), model).double()


class Reader(nn.Module):
    def __init__(self, kind: Callable[..., nn.Module], **given: Any) -> None:
        super().__init__()
        self.body = kind(8, 5, batch_first=True, **given)
        self.head = nn.Linear(10 if given.get("bidirectional") else 5, 3)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(self.body(x.view(-1, 3, 8))[0][:, -1])
        return y


READERS = [
    lambda: Reader(nn.LSTM, num_layers=2).double(),
    lambda: Reader(nn.GRU, bidirectional=True).double(),
    lambda: Reader(nn.RNN, nonlinearity="relu", bias=False).double(),
    lambda: Reader(nn.RNN, num_layers=2, bidirectional=True).double(),
]
SOLVERS = [
    SGD(lr=0.3, batch=4, epochs=2, schedule=ExponentialDecay(0.5)),
    Corrected(lr=0.1, batch=4),
    Gradient(),
    SVRG(h=1.0, batch=3),
]


def slow(*values: Any) -> list[Any]:
    """The same values, for CI and `make test-gpu` alone."""
    return [pytest.param(value, marks=pytest.mark.slow) for value in values]


def named(value: Any) -> str:
    return str(getattr(value, "__name__", None) or getattr(value, "name", value))


def task(model: Any, sizes: tuple[int, ...] = SIZES) -> hansa.Task:
    make = np.random.default_rng(0)
    pairs = [(make.normal(size=(n, 24)), make.integers(0, 3, n)) for n in sizes]
    return hansa.Task(model, "cross_entropy", pairs, classes=3)


def outcomes(engine: ReferenceEngine, solver: LocalSolver, round: int) -> dict[int, Outcome]:
    device = engine.objective.device
    payload: dict[str, Any] = {"model": engine.objective.initial._asdict()}
    if isinstance(solver, SVRG):
        payload["gradient"] = torch.linspace(-1, 1, engine.objective.spec.dim, dtype=torch.float64, device=device)
    members = [PartyWork(party, payload, {}) for party in range(len(engine.holdings))]
    stacks: list[Replies] = []
    alone: dict[int, Outcome] = {}
    for done in engine.blocks(solver, members, round):
        if isinstance(done, Replies):
            stacks.append(kept(done))
        else:
            alone[done[0]] = done[1]
    for stack in stacks:  # metrics that a GPU is still computing are read after the last replay
        alone.update(one_by_one(stack, {member.party: member for member in members}))
    return dict(sorted(alone.items()))


def kept(stack: Replies) -> Replies:
    """A stack with tensors of its own: the engine may overwrite the others after the next item."""
    parts = {name: getattr(stack, name) for name in ("tensors", "maxima", "memory")}
    return dataclasses.replace(stack, **{k: {n: v.clone() for n, v in part.items()} for k, part in parts.items()})


@contextmanager
def silence() -> Iterator[None]:
    """Fail if an engine logs a warning: it would have left its fast path, and agreed for the wrong reason."""

    class Heard(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            heard.append(record.getMessage())

    heard: list[str] = []
    handler = Heard(logging.WARNING)
    logging.getLogger("hansa").addHandler(handler)
    try:
        yield
    finally:
        logging.getLogger("hansa").removeHandler(handler)
    assert heard == []


def agree(
    given: hansa.Task,
    solver: LocalSolver,
    device: str,
    chunk: int | None = None,
    compiles: bool = True,
    apart: bool = False,
    window: int | None = None,
) -> StackedEngine:
    """A recorded stack, replayed over several rounds, agrees with the reference on the CPU. On a GPU it is compiled,
    unless `compiles` is false: the compiler takes seconds for each size of a stack."""
    alone, there = Objective(given.model, given.loss, 0), Objective(given.model, given.loss, 0, device)
    engine = StackedEngine(there, given.holdings(there), 0, chunk)
    engine.records, engine.compiles, engine.lanes = True, compiles and device == "cuda", 1
    engine.apart = apart
    engine.one = None  # type: ignore[assignment,method-assign]  # alone would agree for the wrong reason
    engine.window = window or engine.window
    engine.look()
    engine._chain = None
    reference = ReferenceEngine(alone, given.holdings(alone), 0)
    for round in range(3):
        with silence():
            got = outcomes(engine, solver, round)
        same(outcomes(reference, solver, round), got)
    return engine


def same(wanted: dict[int, Outcome], got: dict[int, Outcome]) -> None:
    """Every part of the replies and memories is equal."""
    assert list(wanted) == list(got)
    for party, outcome in wanted.items():
        other = got[party]
        assert not isinstance(outcome, str) and not isinstance(other, str)
        trees = zip((outcome[0].tensors, outcome[0].maxima, outcome[1]),
                    (other[0].tensors, other[0].maxima, other[1]), strict=True)  # fmt: skip
        for tree, copy in trees:
            assert tree.keys() == copy.keys()
            for name, value in tree.items():
                torch.testing.assert_close(copy[name].cpu(), value, rtol=0, atol=1e-9)
        assert other[0].metrics == pytest.approx(outcome[0].metrics, abs=1e-9)
        assert other[0].weight == outcome[0].weight


@pytest.mark.thin(3)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("solver", SOLVERS, ids=lambda s: s.name)
@pytest.mark.parametrize("model", [dense, *slow(wide), convolving, adapting, *slow(grouped, residual)], ids=named)
def test_a_recorded_stack_trains_as_each_party_does_alone(model: Any, solver: LocalSolver, device: str) -> None:
    engine = agree(task(model), solver, device, chunk=8, compiles=model is dense and isinstance(solver, Corrected))
    assert len(engine.programs) == 1  # replayed, not recorded anew
    engine.close()
    assert not engine.programs and not engine.traces  # the memory of the recordings is free for another run


@pytest.mark.thin(2)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("solver", SOLVERS, ids=lambda s: s.name)
def test_parties_of_one_size_whose_last_batch_is_short_train_as_each_does_alone(
    solver: LocalSolver, device: str
) -> None:
    agree(task(dense, (6, 6, 6)), solver, device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("solver", [SOLVERS[0], SGD(lr=0.3, batch=None), SGD(lr=0.3, batch=4, steps=7)], ids=repr)
@pytest.mark.parametrize("model", [wide, *slow(convolving, residual)], ids=named)
def test_equal_parties_are_trained_by_one_recording(model: Any, solver: LocalSolver, device: str) -> None:
    engine = agree(task(model, (10,) * 5), solver, device, chunk=8)
    assert [type(program) for program in engine.programs.values()] == [recorded_round.Epochs]


@pytest.mark.thin(1)
@pytest.mark.parametrize("sizes", [(10,) * 5, SIZES], ids=["alike", "unlike"])
@pytest.mark.parametrize("device", DEVICES)
def test_a_failing_compiler_leaves_the_recording_as_it_is(
    device: str, sizes: tuple[int, ...], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    given, solver = task(dense, sizes), SGD(lr=0.3, batch=4)

    def refuse(*_: Any, **__: Any) -> Callable[..., Any]:
        def fail(*leaves: Tensor) -> Any:
            raise RuntimeError("backend='inductor' raised:\nValueError: Cannot view a tensor")

        return fail

    def results(compiles: bool) -> tuple[StackedEngine, dict[int, Outcome]]:
        objective = Objective(given.model, given.loss, 0, device)
        engine = StackedEngine(objective, given.holdings(objective), 0, 8)
        engine.records, engine.compiles, engine.lanes = True, compiles, 1
        engine.one = None  # type: ignore[assignment,method-assign]  # one party at a time is the path not to take
        engine.look()
        engine._chain = None
        return engine, outcomes(engine, solver, 0)

    recording, wanted = results(compiles=False)
    monkeypatch.setattr(torch, "compile", refuse)
    with caplog.at_level(logging.WARNING, "hansa"):
        engine, got = results(compiles=True)
        outcomes(engine, solver, 1)
    assert set(map(type, engine.programs.values())) == set(map(type, recording.programs.values()))
    for party, outcome in wanted.items():
        other = got[party]
        assert not isinstance(outcome, str) and not isinstance(other, str)
        assert torch.equal(outcome[0].tensors["w"], other[0].tensors["w"])
        assert outcome[0].metrics == other[0].metrics
    said = [record.getMessage() for record in caplog.records]
    assert said == ["the compiler failed (ValueError: Cannot view a tensor); steps are recorded without it"]


@pytest.mark.thin(1)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("model", [dense, convolving, adapting], ids=lambda m: m.__name__)
def test_batches_that_are_drawn_anew_and_may_be_empty_are_recorded_once(model: Any, device: str) -> None:
    solver = DPSGD(lr=0.3, batch=1, steps=4, clip=0.5, sigma=0.7)
    assert any(len(rows) == 0 for party in range(4) for rows in solver.batches(6, 0, 0, party))
    engine = agree(task(model, (6,) * 4), solver, device, chunk=8)
    assert len(engine.programs) == 1


WINDOWS = {"equal": (10,) * 12, "unequal": (5, 1, 9, 3, 16, 9, 2, 5, 1, 9, 3, 16)}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("model", "solver", "sizes", "how"),
    [
        (wide, SOLVERS[0], "equal", "recorded"),
        (dense, SOLVERS[0], "unequal", "compiled"),
        (dense, Counted(lr=0.3, batch=4), "equal", "compiled"),
        (dense, Counted(lr=0.3, batch=4), "unequal", "recorded"),
        (normed, SGD(lr=0.3, batch=5), "equal", "recorded"),
        (dense, SOLVERS[0], "equal", "apart"),
        (normed, Counted(lr=0.3, batch=5), "equal", "apart"),
    ],
    ids=named,
)
def test_no_output_of_a_recorded_window_is_overwritten(
    model: Any, solver: LocalSolver, sizes: str, how: str, device: str
) -> None:
    """Four chunks in two windows, whose metrics are read after the last replay."""
    engine = agree(task(model, WINDOWS[sizes]), solver, device, 3, how == "compiled", how == "apart", window=6)
    assert engine.programs


@pytest.mark.thin(0)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("reader", [READERS[1], *slow(READERS[0], READERS[2], READERS[3])])
def test_recurrent_layers_are_unrolled(reader: Any, device: str) -> None:
    agree(task(reader, (4, 7, 5)), SGD(lr=0.3, batch=3), device, chunk=3)


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
def test_batch_norm_is_recorded_where_all_batches_are_alike(device: str) -> None:
    engine = agree(task(normed, (8, 4, 8, 4)), SGD(lr=0.3, batch=4), device, chunk=4)
    assert engine.programs
    engine = agree(task(normed, (6, 6, 6)), SGD(lr=0.3, batch=4), device, chunk=4)
    assert not engine.programs  # the last batch is short, and may not be padded


@pytest.mark.slow
def test_large_dense_layers_take_their_step_inside_the_product() -> None:
    given = task(wide)
    objective = Objective(given.model, given.loss, 0)
    engine = StackedEngine(objective, given.holdings(objective), 0, 8)
    engine.records = True
    engine.look()
    engine._chain = None
    places: list[list[int]] = []
    lift = gpu.lift_products
    gpu.lift_products = lambda *args: places.append(lift(*args)) or places[-1]  # type: ignore[func-returns-value]
    try:
        outcomes(engine, SGD(batch=4), 0)
    finally:
        gpu.lift_products = lift
    assert places and all(found == [0, 2] for found in places)  # both large ones, not the small one, not the bias


@pytest.mark.parametrize(("stride", "padding", "dilation"), [(1, 0, 1), (2, 1, 1), ((1, 2), (2, 0), (1, 2)), (3, 2, 2)])
@pytest.mark.parametrize("parties", [1, 7, 500])
def test_patches_times_a_matrix_are_a_convolution(stride: Any, padding: Any, dilation: Any, parties: int) -> None:
    draws = torch.Generator().manual_seed(0)
    x = torch.randn(6, 3, 9, 8, generator=draws, dtype=torch.float64)
    weight = torch.randn(5, 3, 3, 2, generator=draws, dtype=torch.float64)
    bias = torch.randn(5, generator=draws, dtype=torch.float64)
    with Rewritten(parties):
        got = nn.Conv2d(3, 5, (3, 2), stride, padding, dilation).double()._conv_forward(x, weight, bias)
    torch.testing.assert_close(got, F.conv2d(x, weight, bias, stride, padding, dilation), rtol=0, atol=1e-12)


def test_a_stack_shrinks_through_few_sizes_and_wastes_little() -> None:
    sizes = [gpu.level(count) for count in range(1, 257)]
    assert all(count <= size <= max(count + 1, 1.2 * count) for count, size in enumerate(sizes, 1))
    assert len(set(sizes)) < 32
    for seed in range(5):  # log-normal sizes, sigma 1, cohorts of 100
        samples = np.maximum(1, np.random.default_rng(seed).lognormal(4.0, 1.0, 100)).astype(int)
        steps = -(-samples // 10)
        active = [(steps > s).sum() for s in range(steps.max())]
        taken = sum(gpu.level(int(count)) for count in active)
        assert taken < 1.1 * steps.sum()


def test_a_step_counts_once_for_all_parties_that_are_trained_together() -> None:
    given = task(dense, (10, 10, 13))  # 11 samples on average: 3 batches of 4
    holdings = given.holdings(Objective(given.model, given.loss, 0))
    assert RunSize(rounds=100, cohort=3, solver=SGD(batch=4, epochs=2)).steps(holdings, chunk=3) == 100 * 1 * 6
    assert RunSize(rounds=100, cohort=3, solver=SGD(batch=4, epochs=2)).steps(holdings, chunk=2) == 100 * 2 * 6


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("solver", SOLVERS, ids=lambda s: s.name)
@pytest.mark.parametrize("model", [convolving, adapting, *slow(dense, residual, READERS[0])], ids=named)
def test_parties_apart_train_as_each_does_alone(model: Any, solver: LocalSolver, device: str) -> None:
    for sizes in (SIZES, (10,) * 5):
        engine = agree(task(model, sizes), solver, device, chunk=8, apart=True)
        assert len(engine.programs) == 1


def test_the_faster_way_is_found_by_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    given = task(convolving, (10,) * 5)
    objective = Objective(given.model, given.loss, 0, DEVICES[-1])
    engine = StackedEngine(objective, given.holdings(objective), 0, 8)
    work = RunSize(3, 5, SGD(batch=4))
    times: dict[bool, float | None] = {True: 2.0, False: 4.0}
    measured = []

    def timed(engine: StackedEngine, count: int, width: int, apart: bool) -> float | None:
        measured.append(trial_of(engine, count, width, apart))
        assert (count, width, engine.apart) == (5, 4, False)
        return times[apart]

    trial_of = trial._trial
    monkeypatch.setattr(trial, "_trial", timed)
    assert trial.faster_apart(engine, work)
    engine.compiles = True  # a compiled stack may be faster than 2.0
    assert not trial.faster_apart(engine, work)
    assert all(seconds is not None and seconds > 0 for seconds in measured) and len(measured) == 4
    engine.compiles = False
    times[True] = 1e-4  # too small to fill a card: stacks are not even tried
    assert not trial.faster_apart(engine, work) and len(measured) == 5
    times[True] = None
    assert not trial.faster_apart(engine, work)
    times[True], times[False] = 2.0, None
    assert trial.faster_apart(engine, work)


def test_a_model_that_cannot_be_stacked_trains_apart() -> None:
    class Counting(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * (1.0 if float(x.detach().sum()) > -1e9 else 2.0)  # vmap cannot branch

    given = task(lambda: Counting(24, 3).double(), (6,) * 3)
    objective = Objective(given.model, given.loss, 0)
    engine = StackedEngine(objective, given.holdings(objective), 0, 8)
    assert trial.faster_apart(engine, RunSize(3, 3, SGD(batch=4)))
    assert (engine.apart, engine.compiles) == (False, False)


@pytest.mark.parametrize("way", [{}, {"is_causal": True}, {"scale": 0.3}, {"mask": "bool"}, {"mask": "float"}], ids=str)
def test_attention_as_products_is_attention(way: dict[str, Any]) -> None:
    draws = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 3, n, 4, generator=draws, dtype=torch.float64) for n in (5, 6, 6))
    given = {name: value for name, value in way.items() if name != "mask"}
    if "mask" in way:
        seen = torch.rand(5, 6, generator=draws) < 0.7
        seen[:, 0] = True
        given["attn_mask"] = seen if way["mask"] == "bool" else torch.randn(5, 6, generator=draws, dtype=torch.float64)
    wanted = F.scaled_dot_product_attention(q, k, v, **given)
    with Rewritten(2):
        got = F.scaled_dot_product_attention(q, k, v, **given)
    torch.testing.assert_close(got, wanted)
    assert F.scaled_dot_product_attention is not rewrite.attend  # put back


def test_attention_inside_a_layer_of_torch_is_batched_without_a_warning() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True).double()
    stacked = {n: torch.stack([p.detach() + 0.01 * k for k in range(3)]) for n, p in layer.named_parameters()}
    x = torch.randn(3, 4, 6, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    def loss(weights: dict[str, Tensor], x: Tensor) -> Tensor:
        return torch.func.functional_call(layer, weights, (x,)).sin().sum()

    def one(weights: dict[str, Tensor], x: Tensor) -> Any:
        with Rewritten(3):
            return torch.func.grad(loss)(weights, x)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        got = torch.func.vmap(one)(stacked, x)
    for k in range(3):
        wanted = torch.func.grad(loss)({name: value[k] for name, value in stacked.items()}, x[k])
        for name, value in wanted.items():
            torch.testing.assert_close(got[name][k], value)


@pytest.mark.parametrize("given", [{"num_layers": 2}, {"bidirectional": True}, {"bias": False}], ids=str)
def test_an_lstm_layer_has_its_own_derivative(given: dict[str, Any]) -> None:
    layer = nn.LSTM(3, 5, batch_first=True, **given).double()
    stacked = {n: torch.stack([p.detach() + 0.1 * k for k in range(3)]) for n, p in layer.named_parameters()}
    x = torch.randn(3, 4, 6, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    def loss(weights: dict[str, Tensor], x: Tensor) -> Tensor:
        out, (h, c) = torch.func.functional_call(layer, weights, (x,))
        total: Tensor = out.sin().sum() + (h * c).sum()
        return total

    def one(weights: dict[str, Tensor], x: Tensor) -> Any:
        def rewritten(weights: dict[str, Tensor]) -> Tensor:
            with Rewritten(3):
                return loss(weights, x)

        return torch.func.grad(rewritten)(weights)

    got = torch.func.vmap(one)(stacked, x)
    for k in range(3):
        leaves = {name: value[k].clone().requires_grad_() for name, value in stacked.items()}
        wanted = torch.autograd.grad(loss(leaves, x[k]), list(leaves.values()))
        for name, value in zip(leaves, wanted, strict=True):
            torch.testing.assert_close(got[name][k], value)


def test_losses_of_a_gpu_are_read_once_and_late() -> None:
    reads: list[int] = []
    numbers = DeferredNumbers(lambda: reads.append(1) or [1.0, 2.5])  # type: ignore[func-returns-value]
    assert reads == []
    assert (len(numbers), list(numbers), sum(numbers), min(numbers), numbers[1]) == (2, [1.0, 2.5], 3.5, 1.0, 2.5)
    assert reads == [1]
