"""FedRep (Collins et al. 2021) and LG-FedAvg (Liang et al. 2020): the siblings of FedPer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_fedper import task
from torch import Tensor, nn

import hansa
from hansa.core.plain_data import build
from hansa.local import DPSGD, SGD, Adam, Alternating, Gradient
from hansa.local.personal import HEAD
from quadratics import ENGINES
from small_tasks import SIZES, net, samples
from wire import sent_and_remembered

BASE, TOP = ("0.weight", "0.bias"), ("2.weight", "2.bias")


def train(module: nn.Module, x: Tensor, y: Tensor, names: tuple[str, ...], steps: int, momentum: float = 0.0) -> None:
    """Full-batch steps of some parameters, the others fixed."""
    chosen = [parameter for name, parameter in module.named_parameters() if name in names]
    optimiser = torch.optim.SGD(chosen, lr=0.3, momentum=momentum)
    for _ in range(steps):
        module.zero_grad()
        nn.functional.cross_entropy(module(x), y).backward()
        optimiser.step()


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("work", [{"epochs": 2}, {"steps": 2}])
def test_the_head_is_trained_first_then_the_base(engine: str, momentum: float, work: dict[str, int]) -> None:
    local = SGD(lr=0.3, batch=None, momentum=momentum, **work)
    method = hansa.FedRep(local=local, head_epochs=3)
    done = hansa.simulate(method, task(), rounds=1, engine=engine)
    modules = []
    for k, (x, y) in enumerate(samples(SIZES)):
        module = net()
        module.load_state_dict(done.training.objective.spec.named(done.training.objective.initial))
        train(module, x, y, TOP, 3 * 2 if "steps" in work else 3, momentum)
        train(module, x, y, BASE, 2, momentum)  # the base has no velocity from the steps of the head
        values = module.state_dict()
        head = torch.cat([values[name].flatten() for name in TOP])
        torch.testing.assert_close(done.memories[k][HEAD], head, rtol=0, atol=1e-12)
        modules.append(values)
    for name in BASE:
        mean = sum(n * values[name] for n, values in zip(SIZES, modules, strict=True)) / sum(SIZES)
        torch.testing.assert_close(done.params[name], mean, rtol=0, atol=1e-12)


@pytest.mark.parametrize("engine", ENGINES)
def test_fedrep_without_a_head_is_fedavg_after_steps_that_move_nothing(engine: str) -> None:
    local = SGD(lr=0.3, batch=None, epochs=2, weight_decay=0.1)
    personal = hansa.simulate(hansa.FedRep(local=local, layers=0, head_epochs=1), task(), rounds=3, engine=engine)
    plain = hansa.simulate(hansa.FedAvg(local=local), task(), rounds=3, engine=engine)
    torch.testing.assert_close(personal.state.params.w, plain.state.params.w, rtol=0, atol=1e-13)


@pytest.mark.parametrize("local", [SGD(lr=0.3, batch=3), Adam(lr=0.05, batch=2), DPSGD(lr=0.1, batch=3)])
def test_engines_agree_on_fedrep_with_parties_that_take_other_steps(local: Any) -> None:
    own: Any = {"1": {"epochs": 3}, "2": {"lr": 0.1}}
    method = hansa.FedRep(local=local, head_epochs=2)
    runs = [hansa.simulate(method, task(), rounds=3, own=own, engine=engine) for engine in ENGINES]
    torch.testing.assert_close(runs[0].state.params.w, runs[1].state.params.w, rtol=0, atol=1e-10)
    for party in range(3):
        a, b = (run.memories[party][HEAD] for run in runs)
        torch.testing.assert_close(a, b, rtol=0, atol=1e-10)


def test_the_steps_of_both_phases_are_counted_and_cost_privacy() -> None:
    inner = DPSGD(batch=2, epochs=2)
    solver = Alternating(inner, head_epochs=3, base_epochs=2)
    assert solver.count(8) == 5 * 4 == len(solver.batches(8, 0, 0, 0)) == solver.demands(8, {})["steps"]
    assert solver.release(8, {}) == DPSGD(batch=2, epochs=5).release(8, {})
    assert solver.release(8, {"work": {"epochs": 4}}) == DPSGD(batch=2, epochs=10).release(8, {})
    assert Alternating(SGD(steps=4), head_epochs=2).count(8) == 4 * 3


@pytest.mark.parametrize("engine", ENGINES)
def test_in_lg_fedavg_the_first_layers_stay_and_the_last_are_averaged(engine: str) -> None:
    local = SGD(lr=0.3, batch=None)
    done = hansa.simulate(hansa.LGFedAvg(local=local), task(), rounds=1, engine=engine)
    models = [
        hansa.simulate(hansa.FedAvg(local=local), hansa.Task(net, "cross_entropy", [p], classes=3), rounds=1).params
        for p in samples(SIZES)
    ]
    initial = done.training.objective.spec.named(done.training.objective.initial)
    for name in TOP:
        mean = sum(n * m[name] for n, m in zip(SIZES, models, strict=True)) / sum(SIZES)
        torch.testing.assert_close(done.params[name], mean, rtol=0, atol=1e-13)
    for name in BASE:
        assert torch.equal(done.params[name], initial[name])  # the server does not have them
        for k, model in enumerate(models):
            torch.testing.assert_close(done.model(party=k).state_dict()[name], model[name], rtol=0, atol=1e-13)


@pytest.mark.parametrize(
    ("method", "kept"),
    [
        (hansa.LGFedAvg(layers=0), set()),
        (hansa.LGFedAvg(layers=2), {*BASE, *TOP}),
        (hansa.LGFedAvg(layers=9), {*BASE, *TOP}),
        (hansa.LGFedAvg(representation=("0.bias",)), {"0.bias"}),
        (hansa.FedRep(head=("2.bias",)), {"2.bias"}),
    ],
)
def test_layers_are_chosen_by_number_or_by_name(method: hansa.Algorithm, kept: set[str]) -> None:
    done = hansa.simulate(method, task(), rounds=1)
    initial = done.training.objective.spec.named(done.training.objective.initial)
    assert {name for name in initial if torch.equal(initial[name], done.params[name])} == kept


@pytest.mark.parametrize("name", ["fedrep", "lg-fedavg"])
def test_no_number_of_a_party_s_own_layers_is_in_any_message(name: str) -> None:
    method = build("algorithm", name, local={"name": "sgd", "lr": 0.3, "batch": 3})
    sent, kept = sent_and_remembered(method, task(), [HEAD], rounds=3)
    assert len(kept) >= 3 * 3 * 18 and len(sent) > 100
    assert not sent & kept


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: hansa.FedRep(head_epochs=0), "head_epochs must be at least 1, got 0"),
        (lambda: Alternating(base_epochs=0), "base_epochs must be at least 1, got 0"),
        (lambda: hansa.FedRep(layers=-1), "layers must be at least 0, got -1"),
        (lambda: hansa.LGFedAvg(layers=-1), "layers must be at least 0, got -1"),
        (lambda: hansa.FedRep(head=("top",)), "the model has no parameter or layer 'top'; it has: 0.weight, 0.bias, 2"),
        (lambda: hansa.LGFedAvg(representation=("conv",)), "the model has no parameter or layer 'conv'; it has: 0.we"),
        (lambda: hansa.FedRep(local=Gradient()), "fedrep: the local solver 'gradient' takes no steps, so it cannot"),
        (lambda: hansa.LGFedAvg(local=Gradient()), "so it cannot train a representation"),
    ],
)
def test_what_cannot_be_divided_or_trained_is_refused(make: Any, reason: str) -> None:
    with pytest.raises(hansa.ConfigError, match=reason):
        hansa.simulate(make(), task(), rounds=1)
