"""Cards 1.3 to 1.5, in whole runs. The loss |w x - y| with an unreachable y has the gradient -x for every w, so
FedSGD gives the server the update x in every round."""

from __future__ import annotations

import math
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor, nn

import hansa
from hansa.local import SGD, Gradient
from hansa.plumbing.errors import ConfigError
from hansa.schedule import ExponentialDecay
from hansa.server import Adagrad, Descent, Momentum, ServerAdam, ServerOptimizer, Yogi
from quadratics import ENGINES, zeros

OPTIMISERS = [Descent(lr=0.5), Momentum(lr=0.5), Momentum(lr=0.5, nesterov=True), Adagrad(), ServerAdam(), Yogi()]
UPDATE = [0.1, -2.0, 0.003]


def task(*updates: list[float]) -> hansa.Task:
    """One party per update, with that update as its only sample."""
    pairs = [(torch.tensor([u], dtype=torch.float64), torch.tensor([[1e9]]).double()) for u in updates]
    return hansa.Task(lambda: zeros(len(updates[0])), "mae", pairs)


def run(server: ServerOptimizer, *updates: list[float], rounds: int = 1, **more: Any) -> hansa.State:
    algorithm = more.pop("algorithm", hansa.FedSGD(server=server))
    return hansa.simulate(algorithm, task(*updates), rounds=rounds, **{"engine": "reference", **more}).state


def path(server: ServerOptimizer, update: list[float], rounds: int) -> Tensor:
    """The position of the model after each round [rounds, d]; it starts from 0."""
    return torch.stack([run(server, update, rounds=t + 1).params.w for t in range(rounds)])


def steps(server: ServerOptimizer, update: list[float], rounds: int) -> Tensor:
    return torch.diff(path(server, update, rounds), dim=0, prepend=torch.zeros(1, len(update)).double())


def close(a: Tensor, b: Any, tolerance: float = 1e-12) -> bool:
    return torch.allclose(a, torch.as_tensor(b, dtype=a.dtype), rtol=tolerance, atol=1e-300)


def digits(algorithm: hansa.Algorithm, engine: str, rounds: int = 3) -> Tensor:
    make = np.random.default_rng(5)
    pairs = [(make.normal(size=(n, 3)), make.integers(0, 2, n)) for n in (3, 8, 5)]
    network = lambda: nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()  # noqa: E731
    given = hansa.Task(network, "cross_entropy", pairs, classes=2)
    return hansa.simulate(algorithm, given, rounds=rounds, engine=engine).state.params.w


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("server", [Descent(lr=1.0), Momentum(lr=1.0, beta=0.0)])
def test_a_server_that_takes_the_update_as_it_is_gives_fedavg(server: ServerOptimizer, engine: str) -> None:
    local = SGD(lr=0.3, batch=2, epochs=2)
    plain = digits(hansa.FedAvg(local=local), engine)
    assert torch.equal(digits(hansa.FedAvgM(local=local, server=server), engine), plain)
    assert not torch.equal(digits(hansa.FedAvgM(local=local), engine), plain)


@pytest.mark.parametrize("server", OPTIMISERS, ids=repr)
def test_updates_of_zero_leave_the_model_as_it_is(server: ServerOptimizer) -> None:
    assert torch.equal(run(server, [0.0, 0.0], rounds=3).params.w, torch.zeros(2).double())


@pytest.mark.parametrize("beta", [0.0, 0.7, 0.9])
def test_the_momentum_of_a_constant_update_grows_as_a_geometric_sum(beta: float) -> None:
    for t in range(5):
        v = run(Momentum(beta=beta), UPDATE, rounds=t + 1).slots["server/v"]
        assert close(v, [-u * (1 - beta ** (t + 1)) / (1 - beta) for u in UPDATE])


def test_momentum_steps_by_its_velocity() -> None:
    found = steps(Momentum(lr=0.5, beta=0.5), [2.0], 3)
    assert close(found[:, 0], [0.5 * 2.0, 0.5 * 3.0, 0.5 * 3.5])


def test_nesterovs_momentum_looks_one_step_ahead() -> None:
    # g + beta v with v = -2, -3, -3.5 and g = -2
    found = steps(Momentum(lr=0.5, beta=0.5, nesterov=True), [2.0], 3)
    assert close(found[:, 0], [0.5 * 3.0, 0.5 * 3.5, 0.5 * 3.75])


@pytest.mark.parametrize("tau", [1e-3, 1e-9])
def test_adam_without_memory_steps_by_the_sign_of_the_update(tau: float) -> None:
    server = ServerAdam(lr=0.3, beta1=0.0, beta2=0.0, tau=tau, initial=0.0)
    found = steps(server, UPDATE, 3)
    assert close(found, [[0.3 * u / (abs(u) + tau) for u in UPDATE]] * 3, 1e-10)
    if tau < 1e-6:
        assert close(found, [[0.3 * math.copysign(1, u) for u in UPDATE]] * 3, 1e-6)


def test_adagrad_steps_shrink_as_the_root_of_the_rounds() -> None:
    tau, lr = 0.01, 0.2
    found = steps(Adagrad(lr=lr, tau=tau), UPDATE, 4)
    for t in range(4):
        expected = [lr * c / (math.sqrt(tau**2 + (t + 1) * c**2) + tau) for c in UPDATE]
        assert close(found[t], expected, 1e-10)


def test_adagrad_has_no_momentum_unless_asked() -> None:
    assert Adagrad().beta1 == 0.0
    assert close(steps(Adagrad(beta1=0.9), UPDATE, 1)[0], steps(Adagrad(), UPDATE, 1)[0] * 0.1, 1e-10)


@pytest.mark.parametrize(("server", "v"), [(ServerAdam(), 1.0099e-4), (Yogi(), 1.01e-4)])
def test_the_first_step_has_the_papers_numbers(server: ServerAdam, v: float) -> None:
    """Reddi et al. 2021, Algorithm 2 with tau = 1e-3, beta2 = 0.99 and an update of 0.1, by hand."""
    after = run(server, [0.1])
    assert close(after.slots["server/v"], [v])
    assert close(after.slots["server/m"], [0.01])
    assert close(after.params.w, [server.lr * 0.01 / (math.sqrt(v) + 1e-3)])


@pytest.mark.parametrize("server", [Adagrad(beta1=0.5), ServerAdam(), Yogi(beta1=0.7)])
def test_the_mean_of_a_constant_update_approaches_the_update(server: Any) -> None:
    for t in range(1, 5):
        m = run(server, UPDATE, rounds=t).slots["server/m"]
        assert close(m, [(1 - server.beta1**t) * u for u in UPDATE])


def test_the_default_rates_are_those_of_the_papers() -> None:
    """Reddi et al. 2021: 0.1 for Adagrad, 0.01 for Adam and Yogi; Hsu et al. 2019 apply the momentum as it is."""
    assert [server().lr for server in (Adagrad, ServerAdam, Yogi, Momentum)] == [0.1, 0.01, 0.01, 1.0]


updates = st.lists(st.floats(-10, 10, allow_nan=False), min_size=1, max_size=4)


@settings(max_examples=25)
@given(updates, st.floats(0, 5), st.sampled_from([0.0, 0.5, 0.9, 0.99]))
def test_yogis_measure_moves_by_at_most_a_share_of_the_square_and_never_below_zero(
    deltas: list[float], initial: float, beta2: float
) -> None:
    server = Yogi(beta2=beta2, initial=initial)
    state = hansa.State(run(server, [0.0]).params)
    before = initial
    for delta in deltas:
        _, slots = server.move(state, torch.tensor([delta], dtype=torch.float64))
        v = float(slots["server/v"])
        assert abs(v - before) <= (1 - beta2) * delta**2 + 1e-12
        assert v >= 0
        state, before = state.replace(**slots), v


def test_yogi_falls_slower_than_adam_when_updates_become_small() -> None:
    state = run(Yogi(initial=1.0), [0.01], rounds=5).slots["server/v"]
    assert close(state, [1 - 5 * 0.01 * 0.01**2])
    assert float(run(ServerAdam(initial=1.0), [0.01], rounds=5).slots["server/v"]) < 0.96


@pytest.mark.parametrize("kind", [Adagrad, ServerAdam, Yogi])
@pytest.mark.parametrize("c", [1e-3, 40.0])
def test_the_unit_of_the_updates_does_not_matter(kind: Any, c: float) -> None:
    small, large = kind(tau=0.01, initial=0.02), kind(tau=0.01 * c, initial=0.02 * c**2)
    assert close(path(large, [u * c for u in UPDATE], 4), path(small, UPDATE, 4), 1e-9)


def test_tau_stands_outside_the_root() -> None:
    found = steps(ServerAdam(lr=1.0, beta1=0.0, beta2=0.0, tau=3.0, initial=0.0), [4.0], 1)
    assert close(found[0], [4 / 7])  # inside, it would be 4 / sqrt(16 + 9)


@pytest.mark.parametrize("kind", [ServerAdam, Yogi])
def test_bias_correction_is_a_factor_on_the_rate_that_counts_from_one(kind: Any) -> None:
    plain, corrected = steps(kind(), UPDATE, 4), steps(kind(bias_correction=True), UPDATE, 4)
    for t in range(4):
        factor = math.sqrt(1 - 0.99 ** (t + 1)) / (1 - 0.9 ** (t + 1))
        assert close(corrected[t], plain[t] * factor, 1e-9)


@pytest.mark.parametrize(
    "server", [Momentum(), Adagrad(), ServerAdam(bias_correction=True), Yogi(bias_correction=True)]
)
def test_an_empty_round_changes_neither_the_model_nor_what_the_server_remembers(server: ServerOptimizer) -> None:
    undisturbed = run(server, UPDATE, rounds=2)
    with_gap = run(server, UPDATE, rounds=3, absent=lambda party, round: round == 1)
    assert torch.equal(undisturbed.params.w, with_gap.params.w)
    assert undisturbed.slots.keys() == with_gap.slots.keys()
    for name, value in undisturbed.slots.items():
        assert torch.equal(torch.as_tensor(value), torch.as_tensor(with_gap.slots[name])), name


@pytest.mark.parametrize("server", OPTIMISERS, ids=repr)
def test_the_schedule_lowers_the_servers_rate(server: Any) -> None:
    faded = type(server)(**{**vars(server), "schedule": ExponentialDecay(0.5)})
    full = steps(server, UPDATE, 3)
    assert close(steps(faded, UPDATE, 3), full * torch.tensor([[1.0], [0.5], [0.25]]), 1e-9)


@pytest.mark.parametrize("server", OPTIMISERS, ids=repr)
def test_every_server_optimiser_serves_the_asynchronous_method_too(server: ServerOptimizer) -> None:
    parties = [[1.0, 0.2], [3.0, -0.4]]
    buffered = hansa.FedBuff(local=Gradient(), server=server, buffer=2, refill="flush")
    together, apart = run(server, *parties, rounds=3), run(server, *parties, rounds=3, algorithm=buffered)
    assert close(apart.params.w, together.params.w)


@pytest.mark.parametrize("server", OPTIMISERS, ids=repr)
def test_what_the_server_remembers_has_the_type_of_the_model(server: ServerOptimizer) -> None:
    pairs = [(torch.ones(1, 2), torch.full((1, 1), 1e9))]
    given = hansa.Task(lambda: nn.Linear(2, 1), "mae", pairs)
    state = hansa.simulate(hansa.FedSGD(server=server), given, rounds=2).state
    assert {v.dtype for v in [state.params.w, *state.slots.values()] if isinstance(v, Tensor)} == {torch.float32}


def test_buffers_of_the_model_pass_the_optimiser_by() -> None:
    network = lambda: nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 1)).double()  # noqa: E731
    make = np.random.default_rng(2)
    given = hansa.Task(network, "mse", [(make.normal(size=(6, 2)), make.normal(size=(6, 1))) for _ in range(2)])
    local = SGD(lr=1e-12, batch=None)  # the weights stay, the statistics move
    plain = hansa.simulate(hansa.FedAvg(local=local), given, rounds=1).state
    adam = hansa.simulate(hansa.FedAdam(local=local), given, rounds=1).state
    assert torch.equal(adam.params.stats, plain.params.stats)
    assert torch.equal(adam.params.counts, plain.params.counts)
    assert adam.slots["server/v"].shape == adam.params.w.shape


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    ("recipe", "server"),
    [
        (hansa.FedAvgM, Momentum()),
        (hansa.FedAdagrad, Adagrad()),
        (hansa.FedAdam, ServerAdam()),
        (hansa.FedYogi, Yogi()),
    ],
)
def test_a_recipe_is_fedavg_with_another_server(recipe: Any, server: ServerOptimizer, engine: str) -> None:
    assert torch.equal(digits(recipe(), engine), digits(hansa.FedAvg(server=server), engine))


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: Momentum(lr=0.0), "lr must be above 0"),
        (lambda: Momentum(beta=1.0), "beta must be at least 0 and below 1"),
        (lambda: Momentum(beta=-0.1), "beta must be at least 0 and below 1"),
        (lambda: Adagrad(lr=-1.0), "lr must be above 0"),
        (lambda: Adagrad(tau=0.0), "tau must be above 0"),
        (lambda: ServerAdam(tau=-1e-3), "tau must be above 0"),
        (lambda: ServerAdam(beta1=1.0), "beta1 must be at least 0 and below 1"),
        (lambda: ServerAdam(beta2=1.0), "beta2 must be at least 0 and below 1"),
        (lambda: Yogi(beta2=-0.5), "beta2 must be at least 0 and below 1"),
        (lambda: Yogi(initial=-1.0), "initial must be at least 0, got -1; leave it out for"),
        (lambda: Yogi(lr=float("nan")), "expected a number, got nan"),
    ],
)
def test_impossible_hyper_parameters_are_refused(make: Any, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        make()


def test_descent_at_rate_one_makes_no_copy_of_the_update() -> None:
    state, delta = hansa.State(run(Descent(), [0.0]).params), torch.randn(1)
    assert Descent().move(state, delta)[0] is delta
    assert torch.equal(Descent(lr=0.5).move(state, delta)[0], 0.5 * delta)
