"""Plug-ins whose parties send to each other: gossip between random pairs, and split learning."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from pairwise_gossip import PairwiseGossip
from split_learning import SplitLearning, drawn, hashed, loss_of, score_of
from torch import Tensor, nn

import hansa
from hansa.testing import NetworkPool, PartyPool, check_algorithm, check_network

WIDTHS = (2, 4, 1)  # columns of each party
HOLDER = 1  # the party with the labels
PARTIES = len(WIDTHS)


@pytest.mark.night
@pytest.mark.parametrize("algorithm", [PairwiseGossip(), SplitLearning()], ids=lambda a: a.name)
def test_a_routed_plugin_keeps_the_promises_in_every_runtime(
    algorithm: hansa.Algorithm, pool: PartyPool, tmp_path: Path
) -> None:
    check_algorithm(algorithm, pool)
    network = NetworkPool(tmp_path, algorithm.data)
    try:
        check_network(algorithm, network)
    finally:
        network.close()


def table(people: int, seed: int = 5) -> tuple[Tensor, Tensor]:
    """All columns of all people, and their labels."""
    draws = torch.Generator().manual_seed(seed)
    x = torch.randn(people, sum(WIDTHS), generator=draws, dtype=torch.float64)
    return x, (x @ torch.arange(1.0, sum(WIDTHS) + 1).double() > 0).long()


def held(x: Tensor, y: Tensor, first: int, apart: int) -> tuple[list[tuple[Tensor, Tensor | None]], list[list[str]]]:
    """What each party holds: its columns of all people but `apart`, in an order of its own, with their ids."""
    pairs, ids = [], []
    for party, columns in enumerate(x.split(WIDTHS, 1)):
        order = torch.randperm(len(x), generator=torch.Generator().manual_seed(party))
        rows = order[~torch.isin(order, torch.arange(party * apart, (party + 1) * apart))]
        pairs.append((columns[rows], y[rows] if party == HOLDER else None))
        ids.append([f"person {first + row}" for row in rows.tolist()])
    return pairs, ids


def vertical(people: int = 40, apart: int = 0) -> hansa.Task:
    parties, ids = held(*table(people), 0, apart)
    tests, test_ids = held(*table(300, 6), people, 10)
    return hansa.Task(None, "cross_entropy", parties, party_tests=tests, ids=ids, test_ids=test_ids, classes=2)


def common_order(people: int, apart: int = 0, first: int = 0) -> list[int]:
    """The people whom all parties have, in the order of the hashes of their ids."""
    ids = np.array([f"person {first + k}" for k in range(PARTIES * apart, people)])
    return [PARTIES * apart + int(k) for k in hashed(ids).argsort()]


def layers(seed: int) -> tuple[dict[int, Tensor], Tensor]:
    """The initial layers of all parties."""
    bottoms = {party: drawn(seed, f"bottom {party}", WIDTHS[party], 2) for party in range(PARTIES)}
    return bottoms, drawn(seed, "top", PARTIES * 2 + 1)


@pytest.mark.parametrize(("batch", "apart"), [(40, 0), (10, 0), (10, 4)])
def test_a_step_of_split_learning_is_a_step_of_the_whole_network(batch: int, apart: int) -> None:
    """The network is trained as one, with autograd, on the same batches of the people whom all parties have."""
    done = hansa.simulate(SplitLearning(lr=0.7, batch=batch), vertical(40, apart), rounds=1, seed=9)
    bottoms, top = layers(9)
    x, y = (values[common_order(40, apart)] for values in table(40))
    assert done.state.slots["train"] == len(x) == 40 - PARTIES * apart
    order = torch.from_numpy(hansa.numerics.rng.generator(9, "batches", 0).permutation(len(x)))
    for rows in order.split(batch):
        weights = [w.clone().requires_grad_() for w in (*bottoms.values(), top)]
        columns = dict(enumerate(x[rows].split(WIDTHS, 1)))
        score = score_of(columns, dict(enumerate(weights[:-1])), weights[-1])
        grads = torch.autograd.grad(loss_of(score, y[rows]), weights)
        *after, top = [(w - 0.7 * g).detach() for w, g in zip(weights, grads, strict=True)]
        bottoms = dict(enumerate(after))
    for party in range(PARTIES):
        assert torch.allclose(done.memories[party]["split/bottom"], bottoms[party], rtol=0, atol=1e-12)
    assert torch.allclose(done.memories[HOLDER]["split/top"], top, rtol=0, atol=1e-12)
    assert not torch.allclose(bottoms[0], layers(9)[0][0], rtol=0, atol=1e-3)  # it has moved
    test_x, test_y = (values[common_order(300, 10, 40)] for values in table(300, 6))
    score = score_of(dict(enumerate(test_x.split(WIDTHS, 1))), bottoms, top)
    assert done.state.slots["test"] == 270
    assert done.history[-1]["accuracy"] == pytest.approx(float(((score > 0) == (test_y > 0)).double().mean()))
    assert done.history[-1]["loss"] == pytest.approx(float(loss_of(score, test_y)), abs=1e-12)


@pytest.mark.slow
def test_split_learning_learns_and_only_the_label_holder_reports() -> None:
    done = hansa.simulate(SplitLearning(lr=0.5, batch=20, width=3), vertical(200, 10), rounds=20, seed=1)
    assert done.history[-1]["accuracy"] > 0.9
    assert done.history[-1]["train_loss"] < 0.3 < done.history[0]["train_loss"]


def test_no_single_place_predicts(tmp_path: Path) -> None:
    task = vertical()
    task.prepare = hansa.Standardise()
    done = hansa.simulate(SplitLearning(), task, rounds=1, run_dir=tmp_path / "run")
    for model in (done, hansa.load(tmp_path / "run")):
        with pytest.raises(hansa.ConfigError, match="no single place can predict"):
            model.predict(table(5)[0])


def test_a_bottom_layer_stays_when_its_party_is_missing() -> None:
    def run(rounds: int) -> hansa.Result:
        return hansa.simulate(
            SplitLearning(batch=40), vertical(), rounds=rounds, seed=1, absent=lambda p, r: (p, r) == (2, 1)
        )

    before, after = run(1), run(2)
    assert torch.equal(before.memories[2]["split/bottom"], after.memories[2]["split/bottom"])
    assert not torch.equal(before.memories[0]["split/bottom"], after.memories[0]["split/bottom"])
    assert after.history[1]["missing"] == {"2": "it did not answer"}


@pytest.mark.parametrize("round", [0, 1])
def test_without_the_label_holder_a_round_is_empty_and_nothing_moves(round: int) -> None:
    def run(rounds: int) -> hansa.Result:
        absent = {(HOLDER, round)}
        return hansa.simulate(SplitLearning(), vertical(), rounds=rounds, seed=1, absent=lambda p, r: (p, r) in absent)

    after = run(2)
    assert "empty" in after.history[round]
    assert "empty" not in after.history[1 - round]  # the rows are matched later, or were matched before
    if round == 1:
        for party in range(PARTIES):
            assert torch.equal(run(1).memories[party]["split/bottom"], after.memories[party]["split/bottom"])


def test_a_method_for_one_label_holder_refuses_two() -> None:
    task = vertical()
    task.parties[0] = (task.parties[0][0], torch.zeros(40).long())
    task.party_tests[0] = (task.party_tests[0][0], torch.zeros(290).long())
    with pytest.raises(hansa.ConfigError, match="plugin-split needs one party with labels, not 2"):
        hansa.simulate(SplitLearning(), task, rounds=1)


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
