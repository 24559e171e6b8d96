"""Plug-ins whose parties send to each other: gossip between random pairs, and split learning."""

from __future__ import annotations

import pytest
import torch
from pairwise_gossip import PairwiseGossip
from split_learning import HOLDER, SplitLearning, columns_of, drawn, loss_of, score_of
from torch import Tensor, nn

import hansa
from hansa.testing import NetworkPool, PartyPool, check_algorithm, check_network

PARTIES, FEATURES = 3, 7


@pytest.mark.parametrize("algorithm", [PairwiseGossip(), SplitLearning()], ids=lambda a: a.name)
def test_a_routed_plugin_keeps_the_promises_in_every_runtime(
    algorithm: hansa.Algorithm, pool: PartyPool, network: NetworkPool
) -> None:
    check_algorithm(algorithm, pool)
    check_network(algorithm, network)


def table(samples: int = 40) -> tuple[Tensor, Tensor]:
    draws = torch.Generator().manual_seed(5)
    x = torch.randn(samples, FEATURES, generator=draws, dtype=torch.float64)
    return x, (x @ torch.arange(1.0, FEATURES + 1).double() > 0).long()


def vertical(samples: int = 40) -> hansa.Task:
    return hansa.Task(None, "cross_entropy", [table(samples)] * PARTIES, classes=2, test=table(300))


def layers(seed: int) -> tuple[dict[int, Tensor], Tensor]:
    """The initial layers of all parties."""
    columns = [columns_of(torch.zeros(1, FEATURES), party, PARTIES).shape[1] for party in range(PARTIES)]
    bottoms = {party: drawn(seed, f"bottom {party}", columns[party], 2) for party in range(PARTIES)}
    return bottoms, drawn(seed, "top", PARTIES * 2 + 1)


@pytest.mark.parametrize("batch", [40, 10])
def test_a_step_of_split_learning_is_a_step_of_the_whole_network(batch: int) -> None:
    """The network is trained as one, with autograd, on the same batches."""
    algorithm = SplitLearning(lr=0.7, batch=batch, samples=40)
    done = hansa.simulate(algorithm, vertical(), rounds=1, seed=9)
    bottoms, top = layers(9)
    x, y = table()
    order = torch.from_numpy(hansa.core.rng.generator(9, "batches", 0).permutation(40))
    for rows in order.split(batch):
        weights = [w.clone().requires_grad_() for w in (*bottoms.values(), top)]
        score = score_of(x[rows], dict(enumerate(weights[:-1])), weights[-1])
        grads = torch.autograd.grad(loss_of(score, y[rows]), weights)
        *after, top = [(w - 0.7 * g).detach() for w, g in zip(weights, grads, strict=True)]
        bottoms = dict(enumerate(after))
    for party in range(PARTIES):
        assert torch.allclose(done.memories[party]["split/bottom"], bottoms[party], rtol=0, atol=1e-12)
    assert torch.allclose(done.memories[HOLDER]["split/top"], top, rtol=0, atol=1e-12)
    assert not torch.allclose(bottoms[1], layers(9)[0][1], rtol=0, atol=1e-3)  # it has moved


def test_split_learning_learns_and_only_the_label_holder_reports() -> None:
    done = hansa.simulate(SplitLearning(lr=0.5, batch=20, samples=200, width=3), vertical(200), rounds=20, seed=1)
    assert done.history[-1]["accuracy"] > 0.9
    assert done.history[-1]["train_loss"] < 0.3 < done.history[0]["train_loss"]


def test_a_bottom_layer_stays_when_its_party_is_missing() -> None:
    def run(rounds: int) -> hansa.Result:
        return hansa.simulate(
            SplitLearning(batch=40, samples=40), vertical(), rounds=rounds, seed=1, absent=lambda p, r: (p, r) == (2, 1)
        )

    before, after = run(1), run(2)
    assert torch.equal(before.memories[2]["split/bottom"], after.memories[2]["split/bottom"])
    assert not torch.equal(before.memories[1]["split/bottom"], after.memories[1]["split/bottom"])
    assert after.history[1]["missing"] == {"2": "it did not answer"}


def test_without_the_label_holder_a_round_is_empty_and_nothing_moves() -> None:
    absent = {(HOLDER, 1)}

    def run(rounds: int) -> hansa.Result:
        return hansa.simulate(SplitLearning(), vertical(), rounds=rounds, seed=1, absent=lambda p, r: (p, r) in absent)

    before, after = run(1), run(2)
    assert "empty" in after.history[1]
    for party in range(PARTIES):
        assert torch.equal(before.memories[party]["split/bottom"], after.memories[party]["split/bottom"])


def net() -> nn.Module:
    return nn.Linear(3, 2).double()


def test_pairwise_gossip_keeps_the_mean_and_brings_models_together() -> None:
    draws = torch.Generator().manual_seed(1)
    pairs = [(torch.randn(4, 3, generator=draws).double() + k, torch.arange(4) % 2) for k in range(5)]

    def models(rounds: int, lr: float) -> Tensor:
        local = hansa.SGD(lr=1.0, steps=1, batch=None, schedule=hansa.schedule.ExponentialDecay(lr))
        done = hansa.simulate(PairwiseGossip(local=local), hansa.Task(net, "cross_entropy", pairs), rounds=rounds)
        return torch.stack([done.memories[party]["gossip/w"] for party in range(5)])

    first, later = models(1, 1e-30), models(30, 1e-30)  # the rate is 1 in the first round, then practically 0
    assert torch.allclose(first.mean(0), later.mean(0), rtol=0, atol=1e-12)
    spread = [float((m - m.mean(0)).norm()) for m in (first, later)]
    assert spread[1] < 1e-3 * spread[0]
