"""FedSGD and FedAvg: cards 1.1 and 1.2 of the specification."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import hansa
from hansa.fusion import WeightedMean
from hansa.local import SGD
from hansa.numerics.objective import Objective
from hansa.schedule import ExponentialDecay
from hansa.sim.engine import PartyWork, ReferenceEngine
from quadratics import ENGINES, Scalar, found
from quadratics import task as quadratics
from small_tasks import net


def samples(sizes: list[int], seed: int = 0) -> list[tuple[Tensor, Tensor]]:
    make = np.random.default_rng(seed)
    return [
        (torch.tensor(make.normal(k, 1, (n, 4))), torch.tensor(make.integers(0, 3, n), dtype=torch.int64))
        for k, n in enumerate(sizes)
    ]


def task(sizes: list[int], seed: int = 0) -> hansa.Task:
    return hansa.Task(net, "cross_entropy", samples(sizes, seed), classes=3)


def trained(algorithm: hansa.Algorithm, parties: Any, rounds: int = 1, **settings: Any) -> Tensor:
    given = parties if isinstance(parties, hansa.Task) else hansa.Task(net, "cross_entropy", parties, classes=3)
    return hansa.simulate(algorithm, given, rounds=rounds, **settings).state.params.w


def start(seed: int = 0) -> Tensor:
    return Objective(net, "cross_entropy", seed).initial.w


def close(a: Tensor, b: Tensor) -> bool:
    return bool(torch.linalg.vector_norm(a - b) <= 1e-12 * torch.linalg.vector_norm(b))


def descended(parties: list[tuple[Tensor, Tensor]], lr: float, rounds: int) -> Tensor:
    """Gradient descent on the union, in plain torch."""
    objective = Objective(net, "cross_entropy", 0)
    module = objective.spec.load(net(), objective.initial)
    x, y = torch.cat([p[0] for p in parties]), torch.cat([p[1] for p in parties])
    for _ in range(rounds):
        module.zero_grad()
        nn.functional.cross_entropy(module(x), y).backward()
        with torch.no_grad():
            for parameter in module.parameters():
                parameter -= lr * parameter.grad  # type: ignore[operator]
    return objective.spec.flatten(module).w


@pytest.mark.parametrize("engine", ENGINES)
def test_fedsgd_with_every_party_is_gradient_descent_on_the_union(engine: str) -> None:
    parties = samples([3, 8, 1, 5])
    found = trained(hansa.FedSGD(server=hansa.Descent(lr=0.5)), parties, rounds=5, engine=engine)
    assert close(found, descended(parties, 0.5, 5))


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("rounds", [1, 4])
def test_fedavg_with_one_epoch_and_one_batch_is_fedsgd(rounds: int, engine: str) -> None:
    parties = samples([3, 8, 1, 5])
    averaged = trained(hansa.FedAvg(local=SGD(lr=0.5, epochs=1, batch=None)), parties, rounds, engine=engine)
    stepped = trained(hansa.FedSGD(server=hansa.Descent(lr=0.5)), parties, rounds, engine=engine)
    assert close(averaged, stepped)
    assert close(averaged, descended(parties, 0.5, rounds))


def test_uniform_weights_are_another_objective_than_the_union() -> None:
    parties = samples([3, 8, 1, 5])
    uniform = hansa.FedSGD(fusion=WeightedMean(uniform=True), server=hansa.Descent(lr=0.5))
    assert not torch.allclose(trained(uniform, parties, 3), descended(parties, 0.5, 3), atol=1e-3)


@settings(max_examples=15)
@given(st.permutations(range(5)), st.sampled_from(ENGINES))
def test_the_order_of_the_parties_makes_no_difference(order: list[int], engine: str) -> None:
    parties = samples([3, 8, 1, 5, 2])
    algorithm = hansa.FedSGD()
    assert close(trained(algorithm, [parties[k] for k in order], 2, engine=engine), trained(algorithm, parties, 2))


@settings(max_examples=10)
@given(st.lists(st.integers(0, 17), max_size=4))
def test_how_samples_are_divided_makes_no_difference_to_fedsgd(cuts: list[int]) -> None:
    x, y = samples([17])[0]
    at = [0, *sorted(cuts), 17]
    parties = [(x[a:b], y[a:b]) for a, b in itertools.pairwise(at)]
    assert close(trained(hansa.FedSGD(), parties, 3), trained(hansa.FedSGD(), [(x, y)], 3))


def test_one_party_alone_is_plain_sgd_in_the_same_order() -> None:
    ((x, y),) = parties = samples([11])
    local = SGD(lr=0.3, epochs=2, batch=4)
    objective = Objective(net, "cross_entropy", 0)
    module = objective.spec.load(net(), objective.initial)
    plain = torch.optim.SGD(module.parameters(), lr=0.3)
    for round in range(3):
        rows = local.batches(11, 0, round, 0)
        assert [len(r) for r in rows] == [4, 4, 3, 4, 4, 3]  # the short last batch of an epoch is kept
        assert sorted(np.concatenate(rows[:3])) == sorted(np.concatenate(rows[3:])) == list(range(11))
        for batch in rows:
            plain.zero_grad()
            nn.functional.cross_entropy(module(x[batch]), y[batch]).backward()
            plain.step()
    expected = objective.spec.flatten(module).w
    for engine in ENGINES:
        assert close(trained(hansa.FedAvg(local=local), parties, 3, engine=engine), expected)


@pytest.mark.parametrize("engine", ENGINES)
def test_identical_parties_are_one_party(engine: str) -> None:
    parties = samples([6])
    local = SGD(lr=0.3, epochs=3, batch=None)  # one batch, so that all have the same order
    many = trained(hansa.FedAvg(local=local), parties * 4, 3, engine=engine)
    assert close(many, trained(hansa.FedAvg(local=local), parties, 3, engine=engine))


def models(parties: list[tuple[Tensor, Tensor]], local: SGD, round: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """The end point of each party's own training, the sizes, and the start point."""
    given = hansa.Task(net, "cross_entropy", parties, classes=3)
    objective = Objective(net, "cross_entropy", 0)
    engine = ReferenceEngine(objective, given.holdings(objective), 0)
    jobs = [PartyWork(k, {"model": objective.initial._asdict()}, {}) for k in range(len(parties))]
    replies = [outcome[0] for _, outcome in engine.run(local, jobs, round)]  # type: ignore[index]
    ends = torch.stack([objective.initial.w + reply.tensors["w"] for reply in replies])
    return ends, torch.tensor([reply.weight for reply in replies]), objective.initial.w


@settings(max_examples=10)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=5), st.integers(0, 99))
def test_the_new_model_lies_in_the_hull_of_the_parties_models(sizes: list[int], seed: int) -> None:
    parties, local = samples(sizes, seed), SGD(lr=0.5, epochs=2, batch=3)
    ends, _, _ = models(parties, local)
    new = trained(hansa.FedAvg(local=local), parties)
    assert bool((new >= ends.min(0).values - 1e-14).all())
    assert bool((new <= ends.max(0).values + 1e-14).all())


def test_averaging_updates_is_averaging_models_with_weights_that_sum_to_one() -> None:
    parties, local = samples([2, 9, 4]), SGD(lr=0.5, epochs=2, batch=3)
    ends, sizes, _ = models(parties, local)
    assert sizes.tolist() == [2, 9, 4]
    expected = (ends * (sizes.double() / sizes.sum())[:, None]).sum(0)
    assert close(trained(hansa.FedAvg(local=local), parties), expected)


def test_weights_are_taken_over_those_that_replied() -> None:
    parties, local = samples([2, 9, 4, 7]), SGD(lr=0.5, epochs=2, batch=3)
    ends, sizes, _ = models(parties, local)
    for gone in ({0}, {1, 3}, {0, 1, 2}):
        here = [k for k in range(4) if k not in gone]
        expected = (ends[here] * sizes[here, None]).sum(0) / sizes[here].sum()
        found = trained(hansa.FedAvg(local=local), parties, absent=lambda party, round, gone=gone: party in gone)
        assert close(found, expected)


def test_a_cohort_is_averaged_over_itself() -> None:
    parties, local = samples([2, 9, 4, 7, 3, 5]), SGD(lr=0.5, batch=3)
    ends, sizes, _ = models(parties, local)
    asked: list[int] = []
    found = trained(
        hansa.FedAvg(local=local), parties, cohort=0.5, absent=lambda party, round: bool(asked.append(party))
    )
    assert len(asked) == 3
    assert close(found, (ends[asked] * sizes[asked, None]).sum(0) / sizes[asked].sum())


def test_server_and_local_rates_decay_round_by_round() -> None:
    parties = samples([5])
    faded = trained(hansa.FedAvg(local=SGD(lr=0.4, schedule=ExponentialDecay(0.5), batch=None)), parties, 3)
    module = net()
    objective = Objective(net, "cross_entropy", 0)
    objective.spec.load(module, objective.initial)
    for rate in (0.4, 0.2, 0.1):
        loss = nn.functional.cross_entropy(module(parties[0][0]), parties[0][1])
        for parameter, gradient in zip(
            module.parameters(), torch.autograd.grad(loss, list(module.parameters())), strict=True
        ):
            parameter.data -= rate * gradient
    assert close(faded, objective.spec.flatten(module).w)
    assert close(trained(hansa.FedSGD(server=hansa.Descent(lr=0.4, schedule=ExponentialDecay(0.5))), parties, 3), faded)


def test_a_server_rate_of_two_moves_twice_as_far() -> None:
    parties = samples([5, 3])
    once, twice = (trained(hansa.FedAvg(server=hansa.Descent(lr=lr)), parties) - start() for lr in (1.0, 2.0))
    assert close(twice, 2 * once)


@pytest.mark.thin(2)
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(("steps", "fixed"), [(1, 0.909091), (10, 0.713442)])
def test_the_fixed_point_of_two_quadratics_is_that_of_the_specification(steps: int, fixed: float, engine: str) -> None:
    # Card 1.2 (f): a = (1, 10), b = (0, 1), p = 1/2, rate 0.05; derived there and confirmed numerically.
    given = quadratics([1.0, 10.0], [0.0, 1.0], model=Scalar)
    end = found(hansa.FedAvg(local=SGD(lr=0.05, steps=steps, batch=None)), given, 80, engine=engine)
    assert end == pytest.approx(fixed, abs=1e-6)
    drift = [1 - (1 - 0.05 * a) ** steps for a in (1, 10)]
    assert end == pytest.approx(drift[1] / sum(drift), abs=1e-9)
