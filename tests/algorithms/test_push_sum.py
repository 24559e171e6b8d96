"""Push-sum: card 11.4 of the specification."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from gossip import Scatter, models, net, task
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import hansa
from hansa.algorithms.push_sum import PushSumStep
from hansa.core.op import Memory, Party, Reply
from hansa.holdings.gateway import SampleGateway
from hansa.local import SGD
from hansa.numerics.objective import Objective
from hansa.plumbing.errors import PartyError
from hansa.schedule import ExponentialDecay
from hansa.topology import EdgeList, Ring, Topology

ONE_WAY = EdgeList(edges=("0 -> 1", "1 -> 2", "2 -> 0", "2 -> 3", "3 -> 4", "4 -> 0", "1 -> 4"))  # unequal degrees


def simulated(topology: Any = ONE_WAY, rounds: int = 3, **run: Any) -> hansa.Result:
    algorithm = hansa.PushSum(local=Scatter(), topology=topology)
    return hansa.simulate(algorithm, task(5), rounds=rounds, eval_every=rounds, **run)


def mass(memories: Mapping[int, Memory], topology: Topology, name: str) -> Tensor:
    """What all parties hold, and what was sent and not yet received."""
    graph = topology.graph(5)
    total: Any = sum(memories[party][f"push/held/{name}"] for party in range(5))
    for sender, receiver in zip(graph.senders.tolist(), graph.receivers.tolist(), strict=True):
        sent = memories[sender][f"push/sent/{name}"]
        total = total + sent - memories[receiver].get(f"push/heard/{sender}/{name}", torch.zeros_like(sent))
    return torch.as_tensor(total)


def start() -> Tensor:
    """The mean of the models after the training of round 0, from which only mixing follows."""
    alone = hansa.simulate(hansa.DecentralizedSGD(local=Scatter()), task(5), rounds=1)
    return models(alone).mean(0)


def party(id: int) -> Party:
    return Party(id, Objective(net, "cross_entropy", 0), SampleGateway(task(5).parties[id]), 0)


def mixed(topology: Topology, rounds: int, arrives: Callable[[int, int, int], bool]) -> dict[int, Memory]:
    """Memories after rounds without training, from models 0, 1, 2, 3, 4; `arrives(round, sender, receiver)`."""
    op, graph, memories = PushSumStep(), topology.graph(5), dict[int, Memory]()
    parties = [party(k) for k in range(5)]
    memories = {k: {"push/held/x": torch.full((8,), float(k)).double()} for k in range(5)}
    for number in range(rounds):
        messages = {}
        for k in range(5):
            payload = {"receivers": int(graph.outgoing[k]), "parties": 5}
            reply, memories[k] = op.after(parties[k], payload, Reply({"w": torch.zeros(8).double()}), memories[k])
            messages[k] = reply.tensors
        for k in range(5):
            senders = graph.senders[graph.receivers == k].tolist()
            inbox = {sender: messages[sender] for sender in senders if arrives(number, sender, k)}
            _, memories[k] = op.receive(parties[k], {"parties": 5}, inbox, memories[k])
    return memories


@pytest.mark.parametrize("topology", [ONE_WAY, Ring(directed=True), Ring()])
def test_the_models_converge_to_the_true_mean_on_directed_graphs(topology: Topology) -> None:
    for memory in mixed(topology, 150, lambda *_: True).values():
        assert torch.allclose(memory["gossip/w"], torch.full((8,), 2.0).double(), atol=1e-9)


@settings(max_examples=15, deadline=None)
@given(st.sets(st.tuples(st.integers(0, 9), st.integers(0, 4), st.integers(0, 4)), max_size=60))
def test_mass_is_conserved_when_messages_are_lost(lost: set[tuple[int, int, int]]) -> None:
    memories = mixed(ONE_WAY, 10, lambda *message: message not in lost)
    assert torch.allclose(mass(memories, ONE_WAY, "weight"), torch.tensor([5.0]).double(), atol=1e-12)
    assert torch.allclose(mass(memories, ONE_WAY, "x"), torch.full((8,), 10.0).double(), atol=1e-11)


@pytest.mark.slow
def test_the_models_converge_to_the_true_mean_although_half_of_the_messages_is_lost() -> None:
    draws = torch.rand(400, 5, 5, generator=torch.Generator().manual_seed(3)) < 0.5
    for memory in mixed(ONE_WAY, 400, lambda *message: bool(draws[message])).values():
        assert torch.allclose(memory["gossip/w"], torch.full((8,), 2.0).double(), atol=1e-6)


@pytest.mark.thin(1)
@pytest.mark.parametrize("engine", ["reference", "stacked"])
def test_parties_that_miss_rounds_of_a_run_lose_no_mass(engine: str) -> None:
    lost = {(2, 1), (0, 2), (4, 2), (1, 3), (2, 3)}
    done = simulated(rounds=5, engine=engine, absent=lambda party, round: (party, round) in lost)
    assert done.history[2]["missing"].keys() == {"0", "4"}
    assert torch.allclose(mass(done.memories, ONE_WAY, "weight"), torch.tensor([5.0]).double(), atol=1e-13)
    assert torch.allclose(mass(done.memories, ONE_WAY, "x") / 5, start(), atol=1e-13)


def test_plain_means_over_senders_would_miss_the_mean() -> None:
    graph, x = ONE_WAY.graph(5), torch.eye(5).double()
    mixing = torch.eye(5).double()
    mixing[graph.receivers, graph.senders] = 1.0
    mixing /= mixing.sum(1, keepdim=True)
    assert float((torch.linalg.matrix_power(mixing, 500) @ x - 0.2).abs().max()) > 0.05


def test_a_round_pushes_equal_shares_of_the_trained_mass() -> None:
    algorithm = hansa.PushSum(local=SGD(lr=0.5, steps=1, batch=None), topology=ONE_WAY)
    first, second = (hansa.simulate(algorithm, task(5), rounds=rounds, engine="reference") for rounds in (1, 2))
    graph, given = ONE_WAY.graph(5), task(5)
    shares = torch.eye(5).double()
    shares[graph.receivers, graph.senders] = 1.0
    shares /= shares.sum(0, keepdim=True)
    x = torch.stack([first.memories[k]["push/held/x"] for k in range(5)])
    weights = torch.stack([first.memories[k]["push/held/weight"] for k in range(5)])
    assert torch.allclose(weights.flatten(), shares.sum(1), atol=1e-15)
    steps = []
    for k in range(5):
        z = (x[k] / weights[k]).requires_grad_()
        loss = nn.functional.cross_entropy(given.parties[k][0] @ z[:6].view(2, 3).T + z[6:], given.parties[k][1])
        steps.append(torch.autograd.grad(loss, z)[0])
    expected = shares @ (x - 0.5 * torch.stack(steps)) / (shares @ weights)
    assert torch.allclose(models(second), expected, atol=1e-13)


@pytest.mark.slow
def test_training_on_a_one_way_ring_finds_the_optimum_of_the_mean_loss() -> None:
    make = torch.Generator().manual_seed(3)
    x, noise = torch.randn(5, 6, 2, generator=make).double(), torch.randn(5, 6, 1, generator=make).double()
    targets = x @ torch.tensor([[2.0], [-1.0]]).double() + noise
    data = hansa.Task(lambda: nn.Linear(2, 1, bias=False).double(), "mse", list(zip(x, targets, strict=True)))
    local = SGD(lr=0.2, schedule=ExponentialDecay(0.97), steps=1, batch=None)
    done = hansa.simulate(hansa.PushSum(local=local), data, rounds=120, eval_every=120)
    best = torch.linalg.lstsq(x.flatten(0, 1), targets.flatten(0, 1)).solution.flatten()
    assert torch.allclose(models(done), best.expand(5, 2), atol=0.03)


def test_the_buffers_of_a_model_are_averaged_too() -> None:
    def normed() -> nn.Module:
        return nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 2)).double()

    done = hansa.simulate(hansa.PushSum(local=SGD(lr=1e-9, steps=1)), task(5, normed), rounds=12)
    stats = torch.stack([done.memories[party]["gossip/stats"] for party in range(5)])
    assert float(stats[:, :3].std(0).max()) < 1.0  # the parties' own means are 0, 1, 2, 3, 4
    assert int(done.state.params.counts[0]) == 12


def lone() -> tuple[PushSumStep, Party, dict[str, Any], Memory]:
    """A party that has sent once, with three parties in all."""
    payload = {"receivers": 1, "parties": 3, "dim": 8, "stats": 0, "dtype": "float64", "stats_dtype": "float64"}
    _, memory = PushSumStep().after(party(0), payload, Reply({"w": torch.zeros(8).double()}), {})
    return PushSumStep(), party(0), payload, memory


@pytest.mark.parametrize(
    ("weights", "held"),
    [([0.5], 1.0), ([-0.2], 0.5), ([0.0], 0.5), ([2.6], 0.5), ([0.5, 0.4], 1.0), ([0.5, 0.7], 1.2)],
)
def test_a_neighbour_can_neither_take_weight_nor_make_it(weights: list[float], held: float) -> None:
    op, here, payload, memory = lone()
    for weight in weights:
        message = {"x": torch.ones(8).double(), "weight": torch.tensor([weight]).double()}
        _, memory = op.receive(here, payload, {1: message}, memory)
    assert float(memory["push/held/weight"]) == pytest.approx(held)
    assert bool(torch.isfinite(memory["gossip/w"]).all())


@pytest.mark.parametrize("receivers", [-1, 3, 1.5, None, "1"])
def test_a_party_refuses_a_number_of_receivers_that_cannot_be(receivers: Any) -> None:
    op, here, payload, memory = lone()
    with pytest.raises(PartyError, match="it was sent an invalid number of receivers"):
        op.after(here, {**payload, "receivers": receivers}, Reply({"w": torch.zeros(8).double()}), memory)


def test_a_graph_with_a_dead_end_is_refused() -> None:
    with pytest.raises(hansa.ConfigError, match=r"push-sum: .* is not connected: nothing from party '2' reaches"):
        simulated(EdgeList(edges=("0 -> 1", "1 -> 2", "0 -> 3", "3 -> 4", "4 -> 0", "1 -> 0")))


def test_two_runs_of_one_plan_have_the_same_bits() -> None:
    local = SGD(lr=0.1, steps=2, batch=2)
    one, two = (hansa.simulate(hansa.PushSum(local=local), task(5), rounds=4) for _ in range(2))
    assert torch.equal(models(one), models(two))
    assert torch.equal(one.state.params.w, two.state.params.w)
