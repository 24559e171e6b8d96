"""FedMA as a plug-in: replies of unequal size, and a model of widths that no party had."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from fedma import MLP, WIDTHS, FedMA, match
from torch import nn

import hansa
from hansa.testing import NetworkPool, PartyPool, check_algorithm, check_network

SOLVER = hansa.SGD(lr=0.3, epochs=30, batch=16)


def task(parties: int = 4, dtype: torch.dtype = torch.float64) -> hansa.Task:
    """Two classes that no line divides: inside and outside a ring."""
    draws = torch.Generator().manual_seed(5)
    x = torch.randn(60 * parties + 200, 2, generator=draws, dtype=torch.float64).to(dtype)
    y = (x.square().sum(1) > 1.4).long()
    pairs = [(x[60 * k : 60 * (k + 1)], y[60 * k : 60 * (k + 1)]) for k in range(parties)]
    return hansa.Task(lambda: nn.Linear(2, 2).to(dtype), "cross_entropy", pairs, test=(x[-200:], y[-200:]))


def test_equal_neurons_in_another_order_are_matched_exactly() -> None:
    neurons = torch.randn(5, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    order = torch.tensor([3, 0, 4, 1, 2])
    atoms, maps = match([neurons, neurons[order], neurons[:2]], new_cost=0.5)
    assert torch.equal(atoms, neurons) and torch.equal(maps[1], order) and maps[2].tolist() == [0, 1]
    far, maps = match([neurons, neurons + 100.0], new_cost=0.5)
    assert len(far) == 10 and maps[1].tolist() == [5, 6, 7, 8, 9]  # nothing fits: all are new
    empty, maps = match([neurons[:0], neurons], new_cost=0.5)
    assert torch.equal(empty, neurons) and maps[0].numel() == 0


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["reference", "stacked", "workers"])
def test_three_stages_give_a_model_that_no_party_had(engine: str) -> None:
    result = hansa.simulate(FedMA(local=SOLVER), task(), rounds=9, engine=engine)
    assert [line["round"] for line in result.history] == [1, 2, 3]  # then nothing is left to match
    widths = [len(layer) for layer in result.state.slots["layers"]]
    own = [result.memories[party][WIDTHS].tolist() for party in range(4)]
    assert len({tuple(one) for one in own}) > 1
    for k in (0, 1):
        assert max(one[k] for one in own) <= widths[k] <= sum(one[k] for one in own)
    module = result.model()
    assert [layer.out_features for layer in module if isinstance(layer, nn.Linear)] == widths
    x, y = task().test
    assert torch.equal(module(x).detach(), result.predict(x))
    accuracy = float((result.predict(x).argmax(1) == y).double().mean())
    assert result.history[-1]["accuracy"] == pytest.approx(accuracy) and accuracy > 0.85
    linear = hansa.simulate(hansa.FedAvg(local=SOLVER), task(), rounds=3)
    assert linear.history[-1]["accuracy"] < 0.75


def test_one_party_alone_keeps_its_own_neurons() -> None:
    result = hansa.simulate(FedMA(local=SOLVER, spread=0), task(1), rounds=3)
    assert [len(layer) for layer in result.state.slots["layers"]] == [6, 5, 2]
    assert result.history[-1]["accuracy"] > 0.8


def test_bytes_are_those_of_the_neurons_that_parties_have() -> None:
    narrow = hansa.simulate(FedMA(local=SOLVER, spread=0), task(), rounds=1).history[0]["bytes_up"]
    wide = hansa.simulate(FedMA(local=SOLVER, spread=3), task(), rounds=1)
    more = sum(int(wide.memories[party][WIDTHS][0]) - 6 for party in range(4))
    assert wide.history[0]["bytes_up"] - narrow == pytest.approx(more * 3 * 8, abs=4 * 8)  # and digits of the header


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_saved_model_is_built_again_from_its_own_architecture(tmp_path: Path, dtype: torch.dtype) -> None:
    result = hansa.simulate(FedMA(local=SOLVER), task(dtype=dtype), rounds=3, run_dir=tmp_path / "run")
    x = task(dtype=dtype).test[0]
    loaded = hansa.load(tmp_path / "run")
    assert torch.equal(loaded.predict(x), result.predict(x))
    assert {name: tuple(value.shape) for name, value in loaded.params.items()} == {
        name: tuple(value.shape) for name, value in result.model().state_dict().items()
    }
    assert torch.equal(loaded.model()(x).detach(), result.predict(x))
    again = hansa.load(result.save(tmp_path / "again"))
    assert torch.equal(again.predict(x), result.predict(x))


def test_before_the_last_stage_the_model_predicts_nothing_and_has_the_widths_so_far() -> None:
    result = hansa.simulate(FedMA(local=SOLVER), task(), rounds=1)
    model = FedMA(local=SOLVER).model(result.state)
    assert isinstance(model.architecture, MLP) and len(model.architecture.widths) == 1
    assert not result.predict(task().test[0]).any()


@pytest.mark.slow
def test_it_keeps_the_promises_in_every_runtime(pool: PartyPool, network: NetworkPool) -> None:
    check_algorithm(FedMA(), pool)
    check_network(FedMA(), network)
