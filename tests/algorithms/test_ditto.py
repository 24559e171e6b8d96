"""Ditto: a shared model as in FedAvg, and a personal model of each party that is never sent."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import hansa
from hansa.artifacts import saved_model
from hansa.core.ask import Ask
from hansa.core.op import Replies
from hansa.core.plain_data import build
from hansa.fusion import Krum, Median
from hansa.local import DPSGD, SGD, Adam, Personal, Proximal, TwoModels
from hansa.plumbing import codec
from hansa.replies import replies
from hansa.testing import check_solver
from quadratics import ENGINES, Scalar, line, task
from small_tasks import classes as three_classes
from small_tasks import net, samples

A, B = [1.0, 3.0, 2.0], [0.0, 4.0, -1.0]
OWN = "own/w"


def classes() -> hansa.Task:
    return three_classes(party_tests=samples(seed=1))


def by_hand(rounds: int, steps: int, lr: float, lam: float, absent: Any) -> tuple[list[float], float]:
    own, w = [0.0] * 3, 0.0
    for at in range(rounds):
        ends = []
        for k, (a, b) in enumerate(zip(A, B, strict=True)):
            if absent(k, at):
                continue
            x = w
            for _ in range(steps):
                x -= lr * a * (x - b)
                own[k] -= lr * (a * (own[k] - b) + lam * (own[k] - w))
            ends.append(x)
        w = sum(ends) / len(ends)
    return own, w


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("model", [line, Scalar])
def test_a_run_is_the_papers_equations(model: object, engine: str) -> None:
    def absent(party: int, round: int) -> bool:
        return party == round % 3

    algorithm = hansa.Ditto(local=SGD(lr=0.05, steps=4, batch=None), lam=0.7)
    done = hansa.simulate(algorithm, task(A, B, model=model), rounds=5, engine=engine, absent=absent)
    own, w = by_hand(5, 4, 0.05, 0.7, absent)
    assert float(done.state.params.w) == pytest.approx(w, abs=1e-12)
    assert [float(done.memories[k][OWN]) for k in range(3)] == pytest.approx(own, abs=1e-12)


LOCALS = [SGD(lr=0.3, batch=3), SGD(lr=0.1, batch=3, momentum=0.9), Adam(lr=0.05, batch=3), DPSGD(lr=0.1, batch=3)]


@pytest.mark.thin(2)
@pytest.mark.parametrize("local", LOCALS)
@pytest.mark.parametrize("engine", ENGINES)
def test_the_shared_model_is_that_of_fedavg_to_the_last_bit(engine: str, local: Any) -> None:
    for fusion, server in (("mean", "descent"), ("median", "adam")):
        parts: Any = {"local": local, "fusion": hansa.build("fusion", fusion), "server": hansa.build("server", server)}
        shared, plain = (hansa.simulate(make(**parts), classes(), rounds=3, engine=engine).state.params.w
                         for make in (hansa.Ditto, hansa.FedAvg))  # fmt: skip
        exact = engine == "reference"
        torch.testing.assert_close(shared, plain, rtol=0, atol=0 if exact else 1e-12)


@pytest.mark.thin(2)
@pytest.mark.parametrize("local", LOCALS[:3])
@pytest.mark.parametrize("engine", ENGINES)
def test_with_lam_0_each_party_trains_its_own_model_alone(engine: str, local: Any) -> None:
    done = hansa.simulate(hansa.Ditto(local=local, lam=0.0), classes(), rounds=1, engine=engine)
    for k in range(3):  # in the first round both models start from the initial one
        alone = hansa.simulate(
            hansa.FedAvg(local=local), classes(), rounds=1, absent=lambda party, round, k=k: party != k, quorum=1
        )
        torch.testing.assert_close(done.memories[k][OWN], alone.state.params.w, rtol=0, atol=1e-12)
    own = hansa.simulate(hansa.Ditto(local=SGD(lr=0.3, batch=None), lam=0.0), classes(), rounds=3, engine=engine)
    for k, party in enumerate(samples()):
        one = hansa.Task(net, "cross_entropy", [party], classes=3)
        alone = hansa.simulate(hansa.FedAvg(local=SGD(lr=0.3, batch=None)), one, rounds=3)
        torch.testing.assert_close(own.memories[k][OWN], alone.state.params.w, rtol=0, atol=1e-12)


def test_beside_dp_sgd_both_models_have_their_own_noise_and_cost_privacy() -> None:
    local = DPSGD(lr=0.1, steps=1, batch=None, sigma=1.0)
    op = TwoModels(local)
    assert op.release(9, {}) == replace(local.release(9, {}), times=2)
    done = hansa.simulate(hansa.Ditto(local=local, lam=0.0), task(A, B), rounds=1)
    for k in range(3):  # both models begin with the same gradient
        alone = hansa.simulate(hansa.FedAvg(local=local), task(A, B), rounds=1, quorum=1,
                               absent=lambda party, round, k=k: party != k)  # fmt: skip
        assert abs(float(done.memories[k][OWN] - alone.state.params.w)) > 1e-3


@pytest.mark.slow
def test_a_large_lam_ties_the_own_models_to_the_shared_one() -> None:
    away = []
    for lam in (0.0, 1.0, 20.0):
        algorithm = hansa.Ditto(local=SGD(lr=0.04, steps=250, batch=None), lam=lam)
        sent, done = (hansa.simulate(algorithm, task(A, B), rounds=rounds, engine="reference") for rounds in (1, 2))
        w = float(sent.state.params.w)  # what the parties were sent last
        away.append(max(float((done.memories[k][OWN] - w).abs()) for k in range(3)))
        for k, (a, b) in enumerate(zip(A, B, strict=True)):  # the minimum of F_k(v) + lam/2 (v - w)^2
            least = (a * b + lam * w) / (a + lam)
            assert float(done.memories[k][OWN]) == pytest.approx(least, abs=1e-4)
    assert away[0] > away[1] > 4 * away[2]


def test_own_models_are_evaluated_and_survive_a_save(tmp_path: Any) -> None:
    done = hansa.simulate(hansa.Ditto(local=SGD(lr=0.5, epochs=3)), classes(), rounds=3)
    back = saved_model.load(done.save(tmp_path / "run"), make=net)
    for k, (x, y) in enumerate(samples(seed=1)):
        right = (done.model(party=k)(x).argmax(1) == y).double().mean()
        assert done.history[-1]["parties"][str(k)]["accuracy"] == pytest.approx(float(right))
        assert torch.equal(back.predict(x, party=k), done.predict(x, party=k))


def messages(algorithm: hansa.Algorithm, monkeypatch: pytest.MonkeyPatch) -> tuple[hansa.Result, bytes, list[Tensor]]:
    """A run, all messages in both directions as bytes, and the vectors that the parties sent."""
    sent: list[bytes] = []
    vectors: list[Tensor] = []
    message, received = Ask.message, replies.received_stack

    def down(self: Ask, party: int) -> Any:
        tree = message(self, party)
        sent.append(codec.encode(tree))
        return tree

    def up(stack: Replies, *rest: Any) -> Any:
        for reply in map(stack.row, range(len(stack.parties))):
            sent.append(codec.encode(reply.tree()))
            vectors.extend(reply.tensors.values())
        return received(stack, *rest)

    monkeypatch.setattr(Ask, "message", down)
    monkeypatch.setattr(replies, "received_stack", up)
    done = hansa.simulate(algorithm, classes(), rounds=3, engine="reference")
    return done, b"".join(sent), vectors


@pytest.mark.parametrize(
    ("algorithm", "private"),
    [(hansa.Ditto(local=SGD(lr=0.3)), ["own/w"]), (hansa.ConsensusADMM(local=SGD(lr=0.3)), ["admm/y", "own/w"]),
     (hansa.FedAvgPlus(local=SGD(lr=0.3)), ["own/w"])],
)  # fmt: skip
def test_no_message_contains_what_a_party_keeps(
    algorithm: hansa.Algorithm, private: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    done, wire, vectors = messages(algorithm, monkeypatch)
    assert vectors and all(vector.numpy().tobytes() in wire for vector in vectors)  # the search finds what is there
    for k in range(3):
        for name in private:
            kept = done.memories[k][name]
            assert float(kept.abs().max()) > 0
            numbers = kept.numpy().tobytes()
            assert not any(numbers[at : at + 8] in wire for at in range(0, len(numbers), 8)), f"{name} of party {k}"
            if algorithm.name == "ditto":  # nor what differs from it by the shared model alone
                assert not any(torch.allclose(vector, kept - done.state.params.w) for vector in vectors)


@pytest.mark.slow
@pytest.mark.parametrize(
    "solver", [TwoModels(SGD(batch=4), 0.5), TwoModels(Adam(batch=4), 2.0), TwoModels(Proximal(batch=4), 0.0)]
)
def test_the_solver_passes_the_suite_of_solvers(solver: TwoModels) -> None:
    check_solver(solver)


@pytest.mark.parametrize("fusion", [Median(), Krum(f=0)])
def test_it_takes_any_fusion(fusion: Any) -> None:
    done = hansa.simulate(hansa.Ditto(fusion=fusion), classes(), rounds=2)
    assert all("empty" not in line for line in done.history)


def test_a_step_takes_twice_the_time_on_the_simulated_clock() -> None:
    times = [
        hansa.simulate(
            make(), classes(), rounds=1, devices={"compute": {"name": "constant", "value": seconds}}
        ).history[0]["simulated_seconds"]
        for make, seconds in ((hansa.FedAvg, 1.0), (hansa.FedAvg, 2.0), (hansa.Ditto, 1.0))
    ]
    assert times[0] < times[1] == times[2]


def test_a_negative_strength_is_refused() -> None:
    with pytest.raises(hansa.ConfigError, match="lam must be at least 0"):
        hansa.Ditto(lam=-1.0)


def test_a_nesting_that_would_use_a_noise_twice_is_refused() -> None:
    """The inner solver's own model and the outer one's shared model had the same key, so their noises cancelled."""
    for inner in (TwoModels(DPSGD()), Personal(TwoModels(DPSGD()))):
        with pytest.raises(hansa.ConfigError, match=r"ditto inside ditto: .* the same noise twice"):
            TwoModels(inner)
    with pytest.raises(hansa.ConfigError, match="ditto inside ditto"):
        build("local", "ditto", inner={"name": "ditto", "inner": {"name": "dp-sgd"}})
    with pytest.raises(hansa.ConfigError, match="alternating inside alternating: both would keep the same memory"):
        build("local", "alternating", inner={"name": "alternating"})
