"""MAPPER (model interpolation) and DAPPER (data interpolation): cards 10.4 and 10.3 of the specification."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from test_fedper import task
from torch import Tensor, nn

import hansa
from hansa.fusion import FLTrust, WeightedMean
from hansa.local import SGD, Batch, Context, DataInterpolation, ModelInterpolation
from hansa.local.choosing import CHOICE, OWN, held_mask, trained_rows
from hansa.local.data_interpolation import public_count
from hansa.numerics.objective import Objective
from hansa.sim.chain import chain_of
from quadratics import ENGINES
from small_tasks import net, samples
from wire import sent_and_remembered

SIZES = [5, 9, 2, 1, 12]
SHARE = 0.2
PUBLIC = samples([30], 7)[0]
EVEN = WeightedMean(uniform=True)


def parties() -> list[tuple[Tensor, Tensor]]:
    return samples(SIZES)


def trained() -> list[tuple[Tensor, Tensor]]:
    """The samples on which the parties train."""
    return [(x[trained_rows(len(x), SHARE)], y[trained_rows(len(x), SHARE)]) for x, y in parties()]


def given(**changes: Any) -> hansa.Task:
    return dataclasses.replace(task(parties()), **changes)


def loss_at(w: Tensor, x: Tensor, y: Tensor, done: hansa.Result) -> Tensor:
    output = torch.func.functional_call(net(), done.training.objective.spec.split(w), (x,))
    return nn.functional.cross_entropy(output, y)


def mapper(grid: tuple[float, ...] = (0.25, 0.5, 0.75), **fields: Any) -> hansa.MAPPER:
    return hansa.MAPPER(local=ModelInterpolation(**{"lr": 0.3, "batch": 3, **fields}, grid=grid), fusion=EVEN)


def dapper(grid: tuple[float, ...] = (0.25, 0.5, 0.75), **fields: Any) -> hansa.DAPPER:
    return hansa.DAPPER(local=DataInterpolation(**{"lr": 0.3, "batch": 3, **fields}, grid=grid))


@pytest.mark.parametrize("n", [1, 2, 3, 5, 9, 10, 100])
@pytest.mark.parametrize("share", [0.1, 0.2, 0.25, 0.9])
def test_training_and_held_out_samples_are_disjoint_and_cover_all(n: int, share: float) -> None:
    rows, width = trained_rows(n, share), n + 3
    for size in (n, torch.tensor(float(n)), torch.tensor(float(n), dtype=torch.float64)):
        held = np.flatnonzero(held_mask(width, size, share, torch.device("cpu")).numpy())
        if n == 1:
            assert rows.tolist() == held.tolist() == [0]
        else:
            assert sorted([*rows, *held]) == list(range(n)) and 1 <= len(held) == min(max(1, round(n * share)), n - 1)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("local", [{"batch": None, "weight_decay": 0.1}, {"batch": None, "epochs": 3, "momentum": 0.5}])
def test_mapper_with_weight_0_alone_is_fedavg_on_the_training_samples(engine: str, local: dict[str, Any]) -> None:
    done = hansa.simulate(mapper((0.0,), **local), given(), rounds=3, engine=engine)
    plain = hansa.simulate(hansa.FedAvg(SGD(lr=0.3, **local), EVEN), given(parties=trained()), rounds=3, engine=engine)
    torch.testing.assert_close(done.state.params.w, plain.state.params.w, rtol=0, atol=1e-12)
    x = samples([9], 4)[0][0]
    torch.testing.assert_close(done.predict(x, party=1), plain.predict(x), rtol=0, atol=1e-12)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("method", ["mapper", "dapper"])
def test_with_weight_1_alone_each_party_trains_alone(method: str, engine: str) -> None:
    local: dict[str, Any] = {"batch": None, "epochs": 2}
    algorithm = {"mapper": mapper, "dapper": dapper}[method]((1.0,), **local)
    public = {"public": PUBLIC} if method == "dapper" else {}
    done = hansa.simulate(algorithm, given(**public), rounds=3, engine=engine)
    for k, party in enumerate(trained()):
        own = hansa.Task(net, "cross_entropy", [party], classes=3)
        alone = hansa.simulate(hansa.FedAvg(SGD(lr=0.3, **local)), own, rounds=3)
        for name, value in done.model(party=k).state_dict().items():
            torch.testing.assert_close(value, alone.params[name], rtol=0, atol=1e-12)


@pytest.mark.parametrize("engine", ENGINES)
def test_mapper_s_steps_are_the_derivatives_of_the_mixture_s_loss(engine: str) -> None:
    lam, method = 0.4, mapper((0.4,), batch=None)
    first, second = (hansa.simulate(method, given(), rounds=n, engine=engine) for n in (1, 2))
    central = []
    for party, (x, y) in enumerate(trained()):
        w, own = first.state.params.w.clone().requires_grad_(), first.memories[party][OWN][0].requires_grad_()
        value = loss_at(lam * own + (1 - lam) * w, x, y, first)
        of_own, of_w = torch.autograd.grad(value, [own, w])
        torch.testing.assert_close(second.memories[party][OWN][0], (own - 0.3 * of_own).detach(), rtol=0, atol=1e-13)
        central.append(of_w)
    mean = torch.stack(central).mean(0)
    torch.testing.assert_close(second.state.params.w, first.state.params.w - 0.3 * mean, rtol=0, atol=1e-13)


@pytest.mark.thin(2)
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("method", ["mapper", "dapper"])
def test_a_party_chooses_the_weight_with_the_lowest_loss_on_its_held_out_samples(method: str, engine: str) -> None:
    grid, choices = (0.1, 0.5, 0.9), set()
    for seed in range(6):
        ((x, y),) = samples([30], 20 + seed)
        alone = dataclasses.replace(task([(x, y)]), public=PUBLIC if method == "dapper" else None)
        algorithm = {"mapper": mapper, "dapper": dapper}[method](grid, epochs=3)
        done = hansa.simulate(algorithm, alone, rounds=3, engine=engine)
        held, memory = held_mask(30, 30, SHARE, torch.device("cpu")), done.memories[0]
        own, w = memory[OWN], done.state.params.w  # with one party, the central model is the party's
        models = own if method == "dapper" else [lam * v + (1 - lam) * w for lam, v in zip(grid, own, strict=True)]
        losses = torch.stack([loss_at(model, x[held], y[held], done) for model in models])
        assert int(losses.argmin()) == int(memory[CHOICE])
        predicted = done.model(party=0).state_dict()
        for name, value in done.training.objective.spec.split(models[int(memory[CHOICE])]).items():
            torch.testing.assert_close(predicted[name], value, rtol=0, atol=1e-13)
        choices.add(int(memory[CHOICE]))
    assert len(choices) > 1


@pytest.mark.parametrize("method", ["mapper", "dapper"])
def test_held_out_samples_move_no_model(method: str) -> None:
    algorithm = {"mapper": mapper, "dapper": dapper}[method]((0.5,))
    changed = []
    for x, y in parties():
        held = torch.ones(len(x), dtype=torch.bool)
        held[torch.from_numpy(trained_rows(len(x), SHARE))] = False
        changed.append((torch.where(held.unsqueeze(1), x + 100, x), y))
    public = {"public": PUBLIC} if method == "dapper" else {}
    a, b = (hansa.simulate(algorithm, given(parties=p, **public), rounds=2) for p in (parties(), changed))
    assert torch.equal(a.state.params.w, b.state.params.w)
    assert all(torch.equal(a.memories[k][OWN], b.memories[k][OWN]) for k in range(len(SIZES)))


@pytest.mark.parametrize("method", ["mapper", "dapper"])
def test_engines_agree_on_what_parties_remember(method: str) -> None:
    own: Any = {"1": {"lr": 0.1, "steps": 5}, "4": {"batch": 2}}
    algorithm = {"mapper": mapper, "dapper": dapper}[method](momentum=0.5)
    public = {"public": PUBLIC} if method == "dapper" else {}
    runs = [hansa.simulate(algorithm, given(**public), rounds=3, own=own, engine=e) for e in ENGINES]
    for party in range(len(SIZES)):
        a, b = (run.memories[party] for run in runs)
        torch.testing.assert_close(a[OWN], b[OWN], rtol=0, atol=1e-10)
        assert torch.equal(a[CHOICE], b[CHOICE])
    assert runs[0].history[-1]["train_loss"] == pytest.approx(runs[1].history[-1]["train_loss"], abs=1e-10)


@pytest.mark.parametrize("method", ["mapper", "dapper"])
def test_no_number_of_a_party_s_models_is_in_any_message(method: str) -> None:
    algorithm = {"mapper": mapper, "dapper": dapper}[method]()
    public = {"public": PUBLIC} if method == "dapper" else {}
    sent, kept = sent_and_remembered(algorithm, given(**public), [OWN], rounds=3)
    assert len(kept) > 3 * 43 * len(SIZES) and len(sent) > 10
    assert not sent & kept


@pytest.mark.parametrize(("n", "lam", "count"), [(8, 0.5, 8), (8, 0.8, 2), (9, 0.75, 3), (1, 0.9, 1), (8, 0.1, 30),
                                                 (8, 0.0, 30)])  # fmt: skip
def test_as_many_public_samples_are_used_as_the_weight_asks_for(n: int, lam: float, count: int) -> None:
    assert public_count(n, lam, 30) == count
    if lam:
        assert float(public_count(torch.tensor(float(n)), lam, 30)) == count


@pytest.mark.parametrize("lam", [0.0, 0.25, 0.5, 0.8, 1.0])
@pytest.mark.parametrize("size", [None, 3])
def test_dapper_weighs_own_samples_by_lam_over_n_and_public_ones_by_the_rest_over_r(lam: float, size: Any) -> None:
    solver = DataInterpolation(batch=size, grid=(lam,))
    done = hansa.simulate(dapper((lam,)), given(public=PUBLIC), rounds=1)
    x, y = parties()[4]
    rows = trained_rows(12, SHARE)
    objective, public = done.training.objective, done.training.holdings.public
    ctx = Context(objective, 12, 1, 0, 0.1, lambda: Batch(x, y, None), (torch.zeros(0), torch.zeros(0)), public=public)
    order, batch = torch.arange(30).flip(0), Batch(x[rows], y[rows], None)
    joined = solver.joined(ctx, batch, lam, order, torch.tensor(5))
    if lam == 1:
        assert joined is batch
        return
    assert joined.mask is not None and float(joined.mask.sum()) == pytest.approx(1.0)
    n, r = len(rows), public_count(len(rows), lam, 30)
    own = 0 if lam == 0 else n
    assert torch.allclose(joined.mask[:own], torch.full((own,), lam / n, dtype=torch.float64))
    used = joined.mask[own:] > 0
    shared = r if size is None else n  # a step of a batch draws as many public samples as own ones
    assert int(used.sum()) == shared
    assert torch.allclose(joined.mask[own:][used], torch.full((shared,), (1 - lam) / shared, dtype=torch.float64))
    assert set(map(tuple, joined.x[own:][used].tolist())) <= set(map(tuple, PUBLIC[0][order[:r]].tolist()))


@pytest.mark.parametrize("engine", ENGINES)
def test_dapper_with_weight_0_trains_on_all_public_samples_and_no_others(engine: str) -> None:
    done = hansa.simulate(dapper((0.0,), batch=None, epochs=2), given(public=PUBLIC), rounds=2, engine=engine)
    own = hansa.Task(net, "cross_entropy", [PUBLIC], classes=3)
    alone = hansa.simulate(hansa.FedAvg(SGD(lr=0.3, batch=None, epochs=2)), own, rounds=2)
    for party in range(len(SIZES)):
        for name, value in done.model(party=party).state_dict().items():
            torch.testing.assert_close(value, alone.params[name], rtol=0, atol=1e-12)


def test_a_party_draws_its_public_samples_once_and_parties_draw_different_ones() -> None:
    done = hansa.simulate(dapper((0.8,)), given(public=PUBLIC), rounds=1)
    again = hansa.simulate(dapper((0.8,)), given(public=PUBLIC), rounds=3)
    keys = [int(done.memories[k]["grid/key"]) for k in range(len(SIZES))]
    assert len(set(keys)) == len(SIZES) and keys == [int(again.memories[k]["grid/key"]) for k in range(len(SIZES))]


def batch_norm() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)).double()


@pytest.mark.parametrize(
    ("make", "changes", "reason"),
    [
        (lambda: mapper(()), {}, "grid lists no weights"),
        (lambda: mapper((0.5, 1.5)), {}, "grid.1. must be at least 0 and at most 1, got 1.5"),
        (lambda: mapper((0.5, 0.5)), {}, "grid lists a weight twice"),
        (lambda: dapper(tuple(k / 21 for k in range(21))), {}, "grid lists 21 weights, .* give at most 20"),
        (lambda: mapper(held_out=1.0), {}, "held_out must be above 0 and below 1, got 1"),
        (lambda: hansa.MAPPER(local=SGD()), {}, "mapper needs its own local solver, and cannot use 'sgd'"),
        (lambda: hansa.MAPPER(fusion=FLTrust()), {}, "the server trains as a party does, but it has no memory"),
        (lambda: hansa.FedAvg(local=ModelInterpolation()), {}, "one half of mapper, which evaluates the mixtures"),
        (dapper, {}, "dapper needs samples that every party sees, and the task has none; set task.public"),
        (dapper, {"public": PUBLIC[0]}, "dapper needs public samples with targets, and task.public has features alone"),
        (dapper, {"public": (PUBLIC[0][:, :3], PUBLIC[1])}, r"public: samples are \(3,\), the parties' \(4,\)"),
        (dapper, {"public": PUBLIC, "model": batch_norm}, "dapper remembers no running statistics of its models"),
    ],
)
def test_what_cannot_be_interpolated_is_refused(make: Any, changes: dict[str, Any], reason: str) -> None:
    with pytest.raises((hansa.ConfigError, hansa.DataError), match=reason.replace("[]", r"\[\]")):
        hansa.simulate(make(), given(trusted=samples([9], 2)[0], **changes), rounds=1)


def test_mapper_keeps_the_running_statistics_of_the_chosen_mixture() -> None:
    equal = given(parties=samples([9, 9, 9]), model=batch_norm, party_tests=samples([4, 4, 4], 1))
    runs = [hansa.simulate(mapper(batch=4), equal, rounds=2, engine=engine) for engine in ENGINES]
    torch.testing.assert_close(runs[0].state.params.stats, runs[1].state.params.stats, rtol=0, atol=1e-10)
    assert int(runs[0].state.params.counts[0]) == 2 * 2  # two rounds of two batches of at most 4 of 7


def test_a_chain_takes_the_weights_of_the_samples_for_a_single_party_too() -> None:
    objective = Objective(net, "cross_entropy", 0)
    x, y = samples([9], 3)[0]
    chain = chain_of(objective, x, y)
    assert chain is not None
    weights = torch.linspace(0.0, 1.0, 9, dtype=torch.float64)
    batch, nothing = Batch(x, y, weights / weights.sum()), torch.zeros(0)
    ctx = Context(objective, 9, 1, 0, 0.1, lambda: batch, (nothing, nothing))
    wanted = ctx.gradient(objective.initial.w, batch, torch.tensor(0))
    torch.testing.assert_close(chain.alone(objective.initial.w, batch)[0], wanted, rtol=0, atol=1e-14)
    torch.testing.assert_close(chain.alone(objective.initial.w, batch)[1], ctx.seen, rtol=0, atol=1e-14)
