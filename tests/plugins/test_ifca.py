"""IFCA as a plug-in: a wrapper with two halves, a predictor that knows its party, metrics over several asks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from ifca import CLUSTER, IFCA

import hansa
from hansa.core.op import Party
from hansa.holdings.gateway import SampleGateway
from hansa.numerics.objective import Objective
from hansa.testing import NetworkPool, PartyPool, check_algorithm, check_network

PARTIES = 6


def sort_of(party: int) -> int:
    """The two kinds of parties have opposite labels for equal samples."""
    return party % 2


def task(**given: Any) -> hansa.Task:
    draws = torch.Generator().manual_seed(3)
    line = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
    pairs, tests = [], []
    for party in range(PARTIES):
        x = torch.randn(20 + 4 * party, 3, generator=draws, dtype=torch.float64)
        y = ((x @ line > 0).long() + sort_of(party)) % 2
        pairs.append((x[:-8], y[:-8]))
        tests.append((x[-8:], y[-8:]))
    model = hansa.build("model", "logistic", inputs=(3,), outputs=2)
    return hansa.Task(**{"model": lambda: model().double(), "parties": pairs, "party_tests": tests, **given})


SOLVER = hansa.SGD(lr=0.5, epochs=5, batch=8)


@pytest.mark.parametrize("summed", [False, True])
def test_parties_of_two_kinds_find_two_clusters(summed: bool) -> None:
    result = hansa.simulate(IFCA(local=SOLVER, spread=0.3, summed=summed), task(), rounds=12)
    clusters = [int(result.memories[party][CLUSTER]) for party in range(PARTIES)]
    assert all((clusters[k] == clusters[0]) == (sort_of(k) == sort_of(0)) for k in range(PARTIES))
    assert result.history[-1]["accuracy"] > 0.9
    common = hansa.simulate(hansa.FedAvg(local=SOLVER), task(), rounds=12)
    assert common.history[-1]["accuracy"] < 0.7  # one model cannot fit both kinds


@pytest.mark.parametrize("engine", ["reference", "stacked", "workers"])
def test_one_ask_and_one_sum_per_cluster_give_the_same_models(engine: str) -> None:
    one, other = (
        hansa.simulate(IFCA(local=SOLVER, spread=0.3, summed=summed), task(), rounds=4, engine=engine)
        for summed in (False, True)
    )
    assert one.state.slots["sizes"] == other.state.slots["sizes"]
    assert torch.allclose(one.state.slots["w"], other.state.slots["w"], rtol=0, atol=1e-9)


@pytest.mark.parametrize("summed", [False, True])
def test_with_one_cluster_it_is_fedavg(summed: bool) -> None:
    one = hansa.simulate(IFCA(local=SOLVER, clusters=1, spread=0.0, summed=summed), task(), rounds=3)
    other = hansa.simulate(hansa.FedAvg(local=SOLVER), task(), rounds=3)
    assert torch.allclose(one.state.slots["w"][0], other.state.params.w, rtol=0, atol=1e-12)


def test_the_training_loss_is_the_mean_over_the_parties_of_all_clusters() -> None:
    result = hansa.simulate(IFCA(local=SOLVER, spread=0.3, summed=True), task(), rounds=1, engine="reference")
    objective = Objective(task().model, "cross_entropy", 0)
    models = IFCA(local=SOLVER, spread=0.3).init(result.training.problem).slots["w"]
    total = weight = 0.0
    for party, (x, y) in enumerate(task().parties):
        model = {**objective.initial._asdict(), "w": models[int(result.memories[party][CLUSTER])]}
        reply, _ = SOLVER.run(Party(party, objective, SampleGateway((x, y)), 0, 0), {"model": model}, {})
        total, weight = total + reply.metrics["train_loss"] * len(x), weight + len(x)
    assert min(result.state.slots["sizes"]) > 0
    assert result.history[0]["train_loss"] == pytest.approx(total / weight, abs=1e-12)


def test_the_initial_models_depend_on_the_run_s_seed() -> None:
    runs = [hansa.simulate(IFCA(), task(), rounds=1, seed=seed).training.state for seed in (0, 0, 1)]
    spread = [run.slots["w"] for run in runs]
    assert torch.equal(spread[0], spread[1]) and not torch.equal(spread[0], spread[2])


def test_a_saved_model_predicts_with_the_cluster_that_the_party_trained(tmp_path: Path) -> None:
    result = hansa.simulate(IFCA(local=SOLVER, spread=0.3), task(), rounds=12)
    loaded = hansa.load(result.save(tmp_path / "run"))
    make = task().model
    for party, (x, y) in enumerate(task().party_tests):
        scores = result.predict(x, party)
        assert float((scores.argmax(1) == y).double().mean()) > 0.8
        assert torch.equal(scores, loaded.model(make, party=party)(x).detach())


@pytest.mark.slow
@pytest.mark.parametrize("summed", [False, True])
def test_it_keeps_the_promises_in_every_runtime(summed: bool, pool: PartyPool, network: NetworkPool) -> None:
    check_algorithm(IFCA(summed=summed), pool)
    if not summed:
        check_network(IFCA(), network)
