"""D-PSGD: card 11.4 of the specification."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import hansa
from hansa.algorithms.decentralized_sgd import metropolis, spectral_gap
from hansa.local import SGD, LocalSolver
from hansa.local.solver import Carry, Context
from hansa.schedule import ExponentialDecay

TOPOLOGIES = ["ring", "complete", "star", "random"]


def net() -> nn.Module:
    return nn.Linear(3, 2).double()


def task(parties: int = 6, model: Any = net) -> hansa.Task:
    make = torch.Generator().manual_seed(1)
    data = [
        (torch.randn(4, 3, generator=make).double() + k, torch.randint(2, (4,), generator=make)) for k in range(parties)
    ]
    return hansa.Task(model, "cross_entropy", data, classes=2)


@dataclass(frozen=True)
class Scatter(LocalSolver):
    """In round 0 a party moves to its own optimum; after that its gradient is zero."""

    name: ClassVar[str] = "scatter"
    sampler: ClassVar[Any] = "full"

    def step(self, ctx: Context, w: Tensor, direction: Tensor, carry: Carry) -> tuple[Tensor, Carry]:
        return w - 3.0 * direction * (ctx.round == 0), carry


def models(result: hansa.Result) -> Tensor:
    return torch.stack([result.memories[party]["gossip/w"] for party in sorted(result.memories)])


def spread(x: Tensor) -> float:
    return float(torch.linalg.norm(x - x.mean(0)))


def mixing(algorithm: hansa.DecentralizedSGD, parties: int) -> Tensor:
    return metropolis(algorithm.graph(parties))


@settings(max_examples=50)
@given(st.integers(1, 9), st.floats(0, 1), st.integers(0, 50))
def test_metropolis_weights_are_symmetric_doubly_stochastic_and_on_the_graph(parties: int, p: float, seed: int) -> None:
    graph = hansa.DecentralizedSGD(topology="random", edge_probability=p, topology_seed=seed).graph(parties)
    assert torch.equal(graph, graph.T)
    assert not graph.diagonal().any()
    weights = metropolis(graph)
    assert torch.equal(weights, weights.T)
    assert torch.allclose(weights.sum(1), torch.ones(parties, dtype=torch.float64), atol=1e-14)
    assert bool((weights.diagonal() > 0).all())  # so that no eigenvalue is -1, on a bipartite graph either
    off = weights - torch.diag(weights.diagonal())
    assert torch.equal(off > 0, graph)
    degree = graph.sum(1)
    for i, j in graph.nonzero().tolist():
        assert float(weights[i, j]) == pytest.approx(1 / (1 + max(int(degree[i]), int(degree[j]))), abs=1e-15)


def test_the_topologies_are_what_their_names_say() -> None:
    def degrees(name: str, parties: int) -> list[int]:
        return hansa.DecentralizedSGD(topology=name).graph(parties).sum(1).tolist()  # type: ignore[arg-type, no-any-return]

    assert degrees("ring", 5) == [2] * 5
    assert degrees("ring", 2) == [1, 1]
    assert degrees("ring", 1) == [0]
    assert degrees("complete", 4) == [3] * 4
    assert degrees("star", 5) == [4, 1, 1, 1, 1]


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_mixing_keeps_the_mean_and_contracts_by_the_spectral_factor(topology: Any) -> None:
    algorithm = hansa.DecentralizedSGD(local=Scatter(), topology=topology, edge_probability=0.5, topology_seed=7)
    factor = 1 - spectral_gap(mixing(algorithm, 6))
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


@pytest.mark.parametrize("topology", TOPOLOGIES)
@pytest.mark.parametrize("engine", ["reference", "stacked"])
def test_a_missing_party_keeps_its_model_and_the_mean_is_preserved(topology: Any, engine: str) -> None:
    algorithm = hansa.DecentralizedSGD(local=Scatter(), topology=topology, edge_probability=0.5, topology_seed=7)

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


def test_a_graph_that_is_not_connected_warns_and_others_do_not() -> None:
    with pytest.warns(UserWarning, match="the graph is not connected, so the parties will not agree"):
        hansa.simulate(hansa.DecentralizedSGD(topology="random", edge_probability=0.0), task(3), rounds=1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for parties in (1, 2, 3):
            hansa.simulate(hansa.DecentralizedSGD(topology="ring"), task(parties), rounds=1)


def test_the_spectral_gap_is_that_of_known_graphs() -> None:
    # Ring of n with weights 1/3: eigenvalues (1 + 2 cos(2 pi k / n)) / 3; n = 4 gives 1, 1/3, -1/3, 1/3.
    assert spectral_gap(mixing(hansa.DecentralizedSGD(topology="ring"), 4)) == pytest.approx(2 / 3)
    assert spectral_gap(mixing(hansa.DecentralizedSGD(topology="complete"), 5)) == pytest.approx(1.0)
    assert spectral_gap(mixing(hansa.DecentralizedSGD(topology="random", edge_probability=0.0), 4)) == pytest.approx(
        0.0
    )


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


@pytest.mark.parametrize("probability", [-0.1, 1.1])
def test_an_edge_probability_outside_0_to_1_is_refused(probability: float) -> None:
    with pytest.raises(hansa.ConfigError, match=rf"edge_probability must lie in 0\.\.1, got {probability}"):
        hansa.DecentralizedSGD(topology="random", edge_probability=probability)
