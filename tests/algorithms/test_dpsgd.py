"""D-PSGD: card 11.4 of the specification."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from gossip import Scatter, models, net, task
from torch import Tensor, nn

import hansa
from hansa.local import SGD
from hansa.schedule import ExponentialDecay
from hansa.topology import RandomGraph, metropolis, spectral_gap

TOPOLOGIES: list[Any] = ["ring", "grid", "complete", "star", {"name": "random", "probability": 0.5, "seed": 7},
                         {"name": "random-regular", "degree": 3}, "small-world"]  # fmt: skip


def spread(x: Tensor) -> float:
    return float(torch.linalg.norm(x - x.mean(0)))


def mixing(algorithm: hansa.DecentralizedSGD, parties: int) -> Tensor:
    return metropolis(algorithm.topology.graph(parties)).dense()


@pytest.mark.thin(2)
@pytest.mark.parametrize("topology", TOPOLOGIES, ids=lambda each: each if isinstance(each, str) else each["name"])
def test_mixing_keeps_the_mean_and_contracts_by_the_spectral_factor(topology: Any) -> None:
    algorithm = hansa.DecentralizedSGD(local=Scatter(), topology=topology)
    factor = 1 - spectral_gap(metropolis(algorithm.topology.graph(6)))
    states = [models(hansa.simulate(algorithm, task(), rounds=rounds)) for rounds in (1, 2, 3, 6)]
    assert spread(states[0]) > 0.5
    for state in states[1:]:
        assert torch.allclose(state.mean(0), states[0].mean(0), atol=1e-13)
    for before, after, steps in [(0, 1, 1), (1, 2, 1), (2, 3, 3)]:
        assert spread(states[after]) <= factor**steps * spread(states[before]) + 1e-12
    assert factor < 1


def test_a_round_mixes_the_models_and_then_applies_the_training() -> None:
    algorithm = hansa.DecentralizedSGD(local=SGD(lr=0.5, steps=1, batch=None), topology="ring")
    weights, given = mixing(algorithm, 5), task(5)
    states = [models(hansa.simulate(algorithm, given, rounds=rounds, engine="reference")) for rounds in (1, 2)]
    module, steps = net(), []
    for k in range(5):
        x, y = given.parties[k]
        parameters = {"weight": states[0][k][:6].view(2, 3).requires_grad_(), "bias": states[0][k][6:].requires_grad_()}
        loss = nn.functional.cross_entropy(torch.func.functional_call(module, parameters, (x,)), y)
        steps.append(torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(parameters.values()))]))
    expected = weights @ states[0].detach() - 0.5 * torch.stack(steps)
    assert torch.allclose(states[1], expected, atol=1e-13)


def test_on_the_complete_graph_mixing_is_the_centralised_average() -> None:
    weights = mixing(hansa.DecentralizedSGD(topology="complete"), 6)
    assert torch.allclose(weights, torch.full((6, 6), 1 / 6, dtype=torch.float64), atol=1e-15)
    algorithm = hansa.DecentralizedSGD(local=Scatter(), topology="complete")
    first, second = (models(hansa.simulate(algorithm, task(), rounds=rounds)) for rounds in (1, 2))
    assert torch.allclose(second, first.mean(0).expand(6, -1), atol=1e-14)


def test_what_is_published_is_the_plain_mean_of_the_parties_models() -> None:
    done = hansa.simulate(hansa.DecentralizedSGD(), task(), rounds=3)
    assert torch.allclose(done.state.params.w, models(done).mean(0), atol=1e-15)


@pytest.mark.thin(3)
@pytest.mark.parametrize("topology", TOPOLOGIES, ids=lambda each: each if isinstance(each, str) else each["name"])
@pytest.mark.parametrize("engine", ["reference", "stacked"])
def test_a_missing_party_keeps_its_model_and_the_mean_is_preserved(topology: Any, engine: str) -> None:
    algorithm = hansa.DecentralizedSGD(local=Scatter(), topology=topology)

    def run(rounds: int) -> hansa.Result:
        return hansa.simulate(
            algorithm, task(), rounds=rounds, engine=engine, absent=lambda p, r: (p, r) in {(2, 1), (0, 2), (4, 2)}
        )

    states = [models(run(rounds)) for rounds in (1, 2, 3, 4)]
    for state in states[1:]:
        assert torch.allclose(state.mean(0), states[0].mean(0), atol=1e-13)
    assert torch.equal(states[1][2], states[0][2])
    assert torch.equal(states[2][[0, 4]], states[1][[0, 4]])
    assert not torch.equal(states[1][3], states[0][3])
    assert run(2).history[1]["missing"] == {"2": "it did not answer"}


def test_a_round_below_the_quorum_changes_no_model() -> None:
    algorithm = hansa.DecentralizedSGD()
    one = hansa.simulate(algorithm, task(), rounds=1)
    two = hansa.simulate(algorithm, task(), rounds=2, quorum=4, absent=lambda p, r: r == 1 and p > 2)
    assert "empty" in two.history[1]
    assert torch.equal(models(one), models(two))


def test_a_graph_that_is_not_connected_is_refused_in_one_sentence() -> None:
    with pytest.raises(hansa.ConfigError, match=r"d-psgd: the topology random is not connected: nothing from party '0' "
                       r"reaches party '1', .*; set another seed, or a larger probability"):  # fmt: skip
        hansa.simulate(hansa.DecentralizedSGD(topology=RandomGraph(0.0)), task(3), rounds=1)
    for parties in (1, 2, 3):
        hansa.simulate(hansa.DecentralizedSGD(topology="ring"), task(parties), rounds=1)


def test_two_sides_that_keep_nothing_of_their_own_models_are_refused() -> None:
    swapping = hansa.DecentralizedSGD(weights="max-degree")
    with pytest.raises(hansa.ConfigError, match=r"two sides.* exchange their models for ever; set weights = 'metrop"):
        hansa.simulate(swapping, task(6), rounds=1)
    hansa.simulate(swapping, task(5), rounds=1)  # a ring of odd length has no two sides
    hansa.simulate(
        hansa.DecentralizedSGD(weights="max-degree", topology="grid"), task(6), rounds=1
    )  # corners keep a share


def test_the_old_fields_of_the_random_topology_still_work_and_warn() -> None:
    with pytest.warns(FutureWarning, match=r"edge_probability is deprecated .* use topology\.probability"):
        old = hansa.DecentralizedSGD(topology="random", edge_probability=0.5)
    with pytest.warns(FutureWarning, match=r"topology_seed is deprecated .* use topology\.seed"):
        old = hansa.DecentralizedSGD(topology=old.topology, topology_seed=7)
    assert old == hansa.DecentralizedSGD(topology=RandomGraph(0.5, 7))


@pytest.mark.slow
def test_parties_come_to_agree_on_the_optimum_of_the_mean_loss() -> None:
    make = torch.Generator().manual_seed(3)
    x, noise = torch.randn(5, 6, 2, generator=make).double(), torch.randn(5, 6, 1, generator=make).double()
    targets = x @ torch.tensor([[2.0], [-1.0]]).double() + noise
    given = hansa.Task(lambda: nn.Linear(2, 1, bias=False).double(), "mse", list(zip(x, targets, strict=True)))
    done = hansa.simulate(
        hansa.DecentralizedSGD(local=SGD(lr=0.2, schedule=ExponentialDecay(0.97), steps=1, batch=None)),
        given,
        rounds=150,
    )
    best = torch.linalg.lstsq(x.flatten(0, 1), targets.flatten(0, 1)).solution.flatten()
    assert torch.allclose(models(done), best.expand(5, 2), atol=0.02)


def test_it_needs_every_party() -> None:
    with pytest.raises(hansa.ConfigError, match="d-psgd needs every party in every round"):
        hansa.simulate(hansa.DecentralizedSGD(), task(), cohort=0.5)
