"""Constrain-and-scale: members of a backdoor keep close to the global model (Bagdasaryan et al. 2020)."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from test_attacked_runs import images, linear
from torch import Tensor

import hansa
from hansa.local import SGD, Proximal
from hansa.sim.workers import usable
from quadratics import ENGINES, found
from quadratics import task as quadratics


@dataclass(frozen=True)
class Constrained(hansa.Backdoor):
    """A backdoor without its trigger, which needs images: its training and its scaling alone."""

    name: ClassVar[str] = "constrained"
    poisons: ClassVar[bool] = False

    def probe(self, x: Tensor, y: Tensor) -> None:
        return None


def task() -> hansa.Task:
    return hansa.Task(linear, parties=[images(30, seed) for seed in range(5)], test=images(200, 99), classes=3)


def simulate(adversary: Any, local: Any = None, **settings: Any) -> hansa.Result:
    algorithm = settings.pop("algorithm", None) or hansa.FedAvg(local=local or SGD(lr=0.5, batch=10))
    return hansa.simulate(algorithm, task(), adversary=adversary,
                          **{"rounds": 2, "seed": 4, "engine": "reference", "progress": False, **settings})  # fmt: skip


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("alpha", [1.0, 0.5, 0.1])
def test_members_reach_the_minimum_of_their_loss_and_the_distance(alpha: float, engine: str) -> None:
    # alpha a/2 (w - b)^2 + (1 - alpha)/2 (w - w_t)^2 is least at (alpha a b + (1 - alpha) w_t) / (alpha a + 1 - alpha)
    a, b, start, others = 2.0, 5.0, 1.0, 3.0
    given = quadratics([a, 1.0], [b, others], start=start)
    local = SGD(lr=0.2, steps=400, batch=None)
    groups = [Constrained(parties=(0,), alpha=alpha, replace=False)]
    reached = found(hansa.FedAvg(local=local), given, 1, adversary=groups, engine=engine)
    member = (alpha * a * b + (1 - alpha) * start) / (alpha * a + 1 - alpha)
    assert reached == pytest.approx((member + others) / 2, abs=1e-9)


@pytest.mark.parametrize("engine", ENGINES)
def test_the_first_step_is_alpha_times_the_plain_step(engine: str) -> None:
    given = quadratics([1.0, 1.0], [8.0, 0.0])
    groups = [Constrained(parties=(0,), alpha=0.25, replace=False)]
    reached = found(hansa.FedAvg(local=SGD(lr=1.0, steps=1, batch=None)), given, 1, adversary=groups, engine=engine)
    assert reached == pytest.approx(0.25 * 8.0 / 2, abs=1e-12)  # at w_t the distance has no gradient


@pytest.mark.parametrize("engine", ENGINES)
def test_an_alpha_of_one_is_the_plain_backdoor_bit_for_bit(engine: str) -> None:
    group = {"parties": (0, 3), "size": 2}
    plain, one = (simulate(hansa.Backdoor(**group, **given), engine=engine) for given in ({}, {"alpha": 1.0}))
    assert torch.equal(plain.state.params.w, one.state.params.w)
    half = simulate(hansa.Backdoor(**group, alpha=0.5), engine=engine)
    assert not torch.equal(plain.state.params.w, half.state.params.w)


def test_engines_agree_on_constrained_members() -> None:
    attack = hansa.Backdoor(parties=(1, 4), size=2, alpha=0.3)
    reference, stacked = (simulate(attack, SGD(lr=0.5, batch=10, momentum=0.5), engine=name) for name in ENGINES)
    torch.testing.assert_close(reference.state.params.w, stacked.state.params.w, rtol=1e-9, atol=1e-9)


@pytest.mark.skipif(not usable(torch.device("cpu")), reason="needs a system that forks and more than one core")
def test_worker_processes_train_constrained_members_too() -> None:
    attack = hansa.Backdoor(parties=(1, 4), size=2, alpha=0.3)
    reference, workers = (simulate(attack, engine=name) for name in ("reference", "workers"))
    assert torch.equal(reference.state.params.w, workers.state.params.w)


@pytest.mark.parametrize("engine", ENGINES)
def test_replacement_gives_the_constrained_model_where_others_send_nothing(engine: str) -> None:
    a, b, alpha = 2.0, 5.0, 0.5
    groups = [Constrained(parties=(0,), alpha=alpha), hansa.FreeRider(parties=(1, 2))]
    algorithm = hansa.FedAvg(local=SGD(lr=0.2, steps=400, batch=None))
    reached = found(algorithm, quadratics([a] * 3, [b] * 3, sizes=[3, 6, 9]), 1, adversary=groups, engine=engine)
    assert reached == pytest.approx(alpha * a * b / (alpha * a + 1 - alpha), abs=1e-9)


def test_a_smaller_alpha_gives_a_shorter_update() -> None:
    def length(alpha: float) -> float:
        attack = hansa.Backdoor(parties=(0,), size=2, alpha=alpha, replace=False)
        local = SGD(lr=0.5, batch=10, epochs=5)
        alone = simulate(attack, local, rounds=1, absent=lambda party, round: party != 0)
        start = simulate(None, local, rounds=1, absent=lambda party, round: party != 0, algorithm=hansa.FedAvg(
            local=SGD(lr=1e-300, batch=10)))  # fmt: skip
        return float((alone.state.params.w - start.state.params.w).norm())

    lengths = [length(alpha) for alpha in (1.0, 0.6, 0.3, 0.1)]
    assert all(longer > 1.2 * shorter for longer, shorter in itertools.pairwise(lengths)), lengths


def test_the_distance_adds_to_the_proximal_term_of_the_algorithm() -> None:
    a, b, mu, alpha = 2.0, 5.0, 0.5, 0.5
    groups = [Constrained(parties=(0,), alpha=alpha, replace=False)]
    local = Proximal(lr=0.2, steps=400, batch=None, mu=mu)
    reached = found(hansa.FedProx(local=local), quadratics([a], [b]), 1, adversary=groups)
    assert reached == pytest.approx(alpha * a * b / (alpha * (a + mu) + 1 - alpha), abs=1e-9)


def test_a_learning_rate_of_a_members_own_is_scaled_too() -> None:
    given = quadratics([1.0, 1.0], [8.0, 0.0])
    groups = [Constrained(parties=(0,), alpha=0.25, replace=False)]
    reached = found(hansa.FedAvg(local=SGD(lr=1.0, steps=1, batch=None)), given, 1, adversary=groups,
                    own={"0": {"lr": 0.5}})  # fmt: skip
    assert reached == pytest.approx(0.25 * 0.5 * 8.0 / 2, abs=1e-12)


def test_members_train_constrained_inside_a_bound_and_in_tickets() -> None:
    group = {"parties": (0, 3), "size": 2, "replace": False}
    for settings in ({"privacy": {"bound": 10.0}}, {"algorithm": hansa.FedBuff(local=SGD(lr=0.5, batch=10))}):
        plain, half = (simulate(hansa.Backdoor(**group, alpha=alpha), **settings) for alpha in (1.0, 0.5))
        assert not torch.equal(plain.state.params.w, half.state.params.w)


@pytest.mark.parametrize("alpha", [0.0, -0.1, 1.1])
def test_an_alpha_outside_0_to_1_is_refused(alpha: float) -> None:
    with pytest.raises(hansa.ConfigError, match=r"above 0 and at most 1, got .*; it is the share of the members' loss"):
        hansa.Backdoor(alpha=alpha)


ADAM = hansa.build("local", "adam")


@pytest.mark.parametrize("algorithm", [hansa.Scaffold(), hansa.Ditto(), hansa.FedAvg(local=ADAM),
                                       hansa.FedProx(local=Proximal(gamma=0.1))], ids=str)  # fmt: skip
def test_solvers_whose_loss_it_cannot_change_are_refused_before_the_run(algorithm: hansa.Algorithm) -> None:
    with pytest.raises(hansa.ConfigError, match=r"the adversary 'backdoor' with .*: alpha = 0.5 changes the loss"):
        simulate(hansa.Backdoor(parties=(0,), size=2, alpha=0.5, scale=2.0), algorithm=algorithm)


def test_a_secure_sum_hides_what_members_train_so_it_is_refused() -> None:
    with pytest.raises(hansa.ConfigError, match="only masked updates are visible"):
        simulate(hansa.Backdoor(parties=(0,), size=2, alpha=0.5, replace=False), privacy={"secure": "masking"})
