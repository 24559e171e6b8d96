"""APFL: card 10.4 of the specification."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from test_fedper import task
from torch import Tensor, nn

import hansa
from hansa.fusion import FLTrust
from hansa.local import DPSGD, SGD, Adam, Gradient, Halves, ModelInterpolation, Proximal
from hansa.local.mixed import ALPHA, OWN
from quadratics import ENGINES
from small_tasks import SIZES, net, samples
from wire import sent_and_remembered

LOCAL = SGD(lr=0.3, batch=3)


def loss_at(done: hansa.Result, w: Tensor, party: int) -> Tensor:
    """The mean loss of a party's samples at a weight vector, to differentiate."""
    x, y = samples(SIZES)[party]
    module = net()
    output = torch.func.functional_call(module, done.training.objective.spec.split(w), (x,))
    return nn.functional.cross_entropy(output, y)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("local", [LOCAL, Proximal(lr=0.3, batch=3, mu=0.5), Adam(lr=0.05, batch=3)])
def test_with_alpha_0_every_party_predicts_as_fedavg(local: Any, engine: str) -> None:
    mixed = hansa.simulate(hansa.APFL(local=local, alpha=0.0, alpha_lr=0.0), task(), rounds=3, engine=engine)
    plain = hansa.simulate(hansa.FedAvg(local=local), task(), rounds=3, engine=engine)
    x = samples([9], 4)[0][0]
    for party in range(3):
        torch.testing.assert_close(mixed.predict(x, party=party), plain.predict(x), rtol=0, atol=1e-12)


@pytest.mark.parametrize("engine", ENGINES)
def test_with_alpha_1_each_party_predicts_with_the_model_that_it_trains_alone(engine: str) -> None:
    local = SGD(lr=0.3, batch=None, epochs=2)
    done = hansa.simulate(hansa.APFL(local=local, alpha=1.0, alpha_lr=0.0), task(), rounds=3, engine=engine)
    for k, party in enumerate(samples(SIZES)):
        own = hansa.Task(net, "cross_entropy", [party], classes=3)
        alone = hansa.simulate(hansa.FedAvg(local=local), own, rounds=3)
        for name, value in done.model(party=k).state_dict().items():
            torch.testing.assert_close(value, alone.params[name], rtol=0, atol=1e-12)


@pytest.mark.parametrize("fusion", ["mean", "median", "krum", "norm-clip", "fltrust"])
def test_the_global_model_is_that_of_fedavg_whatever_the_parties_mix(fusion: str) -> None:
    given = dataclasses.replace(task(samples([5, 9, 4, 7, 6])), trusted=samples([9], 2)[0])
    parts: dict[str, Any] = {"local": LOCAL, "fusion": fusion, "server": {"name": "momentum", "lr": 0.5}}
    runs = [hansa.simulate(hansa.build("algorithm", name, **parts), given, rounds=3, engine="reference")
            for name in ("apfl", "fedavg")]  # fmt: skip
    assert torch.equal(runs[0].state.params.w, runs[1].state.params.w)


@pytest.mark.parametrize("engine", ENGINES)
def test_the_steps_of_the_own_model_and_of_alpha_are_the_derivatives_of_the_mixture_s_loss(engine: str) -> None:
    method = hansa.APFL(local=SGD(lr=0.3, batch=None), alpha=0.4, alpha_lr=0.05)
    first, second = (hansa.simulate(method, task(), rounds=n, engine=engine) for n in (1, 2))
    for party in range(3):
        before, after = first.memories[party], second.memories[party]
        assert float(before[ALPHA]) == 0.4  # the own model began as the global one
        w, own = first.state.params.w, before[OWN].clone().requires_grad_()
        alpha = before[ALPHA].clone().requires_grad_()
        value = loss_at(first, alpha * own + (1 - alpha) * w, party)
        slope, pull = torch.autograd.grad(value, [own, alpha])
        torch.testing.assert_close(after[OWN], before[OWN] - 0.3 * slope, rtol=0, atol=1e-13)
        torch.testing.assert_close(after[ALPHA], 0.4 - 0.05 * pull, rtol=0, atol=1e-13)
        step = 1e-6
        ends = [loss_at(first, (0.4 + s) * before[OWN] + (0.6 - s) * w, party) for s in (step, -step)]
        assert float(ends[0] - ends[1]) / (2 * step) == pytest.approx(float(pull), rel=1e-6)
        assert abs(float(pull)) > 1e-4


def test_alpha_is_learned_at_the_model_s_rate_and_stays_between_0_and_1() -> None:
    default, same, fast = (
        hansa.simulate(hansa.APFL(local=LOCAL, alpha_lr=rate), task(), rounds=3) for rate in (None, 0.3, 1e6)
    )
    for party in range(3):
        assert torch.equal(default.memories[party][ALPHA], same.memories[party][ALPHA])
        assert float(fast.memories[party][ALPHA]) in (0.0, 1.0)


def test_engines_agree_with_parties_of_other_rates_and_steps() -> None:
    own: Any = {"1": {"lr": 0.1, "steps": 5}, "2": {"batch": 1}}
    runs = [hansa.simulate(hansa.APFL(local=LOCAL), task(), rounds=3, own=own, engine=engine) for engine in ENGINES]
    for party in range(3):
        for name in (OWN, ALPHA):
            a, b = (run.memories[party][name] for run in runs)
            torch.testing.assert_close(a, b, rtol=0, atol=1e-10)


def test_a_party_predicts_with_the_mixture_and_before_its_first_round_with_the_global_model() -> None:
    absent = {"absent": lambda party, round: party == 2}
    done = hansa.simulate(hansa.APFL(local=LOCAL), task(), rounds=2, **absent)  # type: ignore[arg-type]
    spec, w = done.training.objective.spec, done.state.params.w
    memory = done.memories[0]
    mixture = memory[ALPHA] * memory[OWN] + (1 - memory[ALPHA]) * w
    for name, value in spec.split(mixture).items():
        torch.testing.assert_close(done.model(party=0).state_dict()[name], value, rtol=0, atol=1e-13)
    for name, value in done.params.items():
        assert torch.equal(done.model(party=2).state_dict()[name], value)


def test_no_number_of_an_own_model_or_of_alpha_is_in_any_message() -> None:
    sent, kept = sent_and_remembered(hansa.APFL(local=LOCAL, alpha=0.25), task(), [OWN, ALPHA], rounds=3)
    assert len(kept) > 3 * 3 * 40 and len(sent) > 100
    assert not sent & (kept - {0.25})  # the first alpha is a setting


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: hansa.APFL(alpha=1.5), "alpha must be at least 0 and at most 1, got 1.5"),
        (lambda: hansa.APFL(alpha_lr=-1.0), "alpha_lr must be at least 0, got -1"),
        (lambda: hansa.APFL(local=Gradient()), "the local solver 'gradient' takes no steps"),
        (lambda: hansa.APFL(local=DPSGD()), "the epsilon of 'dp-sgd' does not cover; use another local solver"),
    ],
)
def test_what_cannot_train_an_own_model_is_refused(make: Any, reason: str) -> None:
    with pytest.raises(hansa.ConfigError, match=reason):
        hansa.simulate(make(), task(), rounds=1)


def test_a_step_takes_the_simulated_time_of_its_gradients() -> None:
    shares = {hansa.APFL().mixed(): 2.0, ModelInterpolation(): 3.0, ModelInterpolation(grid=(0.5,)): 1.0, Halves(): 2.0}
    assert {solver: solver.share({}) for solver in shares} == shares


def test_a_fusion_that_trains_at_the_server_needs_no_own_model_there() -> None:
    given = dataclasses.replace(task(), trusted=samples([9], 2)[0])
    done = hansa.simulate(hansa.APFL(local=LOCAL, fusion=FLTrust()), given, rounds=2)
    assert all(line["replies"] == 3 for line in done.history)
