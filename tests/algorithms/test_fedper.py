"""FedPer: card 1.11 of the specification."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hansa
from hansa.core.federation import Federation
from hansa.fusion import FLTrust
from hansa.local import SGD, Adam, Gradient, Proximal
from hansa.local.personal import HEAD
from quadratics import ENGINES
from small_tasks import SIZES, net, samples


def task(parties: list[tuple[Tensor, Tensor]] | None = None) -> hansa.Task:
    given = parties or samples(SIZES)
    return hansa.Task(net, "cross_entropy", given, party_tests=samples([4] * len(given), 1), classes=3)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("local", [SGD(lr=0.3, batch=3), Proximal(lr=0.3, batch=3, mu=0.5), Adam(lr=0.05, batch=3)])
def test_without_a_head_it_is_fedavg(local: Any, engine: str) -> None:
    personal = hansa.simulate(hansa.FedPer(local=local, layers=0), task(), rounds=3, engine=engine)
    plain = hansa.simulate(hansa.FedAvg(local=local), task(), rounds=3, engine=engine)
    torch.testing.assert_close(personal.state.params.w, plain.state.params.w, rtol=0, atol=1e-13)


@pytest.mark.parametrize("engine", ENGINES)
def test_without_a_base_each_party_trains_alone(engine: str) -> None:
    local = SGD(lr=0.3, batch=None, epochs=2)
    done = hansa.simulate(hansa.FedPer(local=local, layers=2), task(), rounds=3, engine=engine)
    for k, party in enumerate(samples(SIZES)):
        alone = hansa.simulate(
            hansa.FedAvg(local=local), hansa.Task(net, "cross_entropy", [party], classes=3), rounds=3
        )
        for name, value in done.model(party=k).state_dict().items():
            torch.testing.assert_close(value, alone.params[name], rtol=0, atol=1e-12)


@pytest.mark.parametrize("engine", ENGINES)
def test_heads_differ_and_only_the_base_is_averaged(engine: str) -> None:
    local = SGD(lr=0.3, batch=None)
    done = hansa.simulate(hansa.FedPer(local=local), task(), rounds=1, engine=engine)
    models = [
        hansa.simulate(hansa.FedAvg(local=local), hansa.Task(net, "cross_entropy", [p], classes=3), rounds=1).params
        for p in samples(SIZES)
    ]
    for name in ("0.weight", "0.bias"):
        mean = sum(n * m[name] for n, m in zip(SIZES, models, strict=True)) / sum(SIZES)
        torch.testing.assert_close(done.params[name], mean, rtol=0, atol=1e-13)
    for k, model in enumerate(models):
        own = torch.cat([model["2.weight"].flatten(), model["2.bias"]])
        torch.testing.assert_close(done.memories[k][HEAD], own, rtol=0, atol=1e-13)


def test_no_byte_of_a_head_is_in_any_message(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    ask = Federation._ask

    def watched(self: Federation, verb: Any, **given: Any) -> Any:
        seen.append(given)
        return ask(self, verb, **given)

    monkeypatch.setattr(Federation, "_ask", watched)
    done = hansa.simulate(hansa.FedPer(local=SGD(lr=0.3)), task(), rounds=2, engine="reference")
    rounds = [given for given in seen if given["op"].name == "personal"]
    assert len(rounds) == 2
    base = 4 * 5 + 5
    for given in rounds:
        assert given["payload"]["model"]["w"].numel() == base
        assert given["op"].expects(given["payload"])["w"][0] == (base,)  # and a reply that differs is rejected
    assert all(not line.get("rejected") for line in done.history)
    heads = [done.memories[k][HEAD] for k in range(3)]
    assert not torch.equal(heads[0], heads[1])


@pytest.mark.parametrize("engine", ENGINES)
def test_what_the_server_makes_depends_on_bases_alone(engine: str) -> None:
    # A party that returns after others have moved on still has its own head; the head of another, whatever it is,
    # changes neither the sums nor the server's own copy of the head, which stays the initial one.
    done = hansa.simulate(hansa.FedPer(local=SGD(lr=0.3)), task(), rounds=4, cohort_size=2, engine=engine)
    initial = done.training.objective.spec.named(done.training.objective.initial)
    for name in ("2.weight", "2.bias"):
        assert torch.equal(done.params[name], initial[name])
        assert not torch.equal(done.params["0.weight"], initial["0.weight"])


def test_each_party_is_evaluated_with_its_own_head_and_nobody_else_is() -> None:
    given = task()
    given.test = samples([20], 3)[0]
    done = hansa.simulate(hansa.FedPer(local=SGD(lr=0.3, epochs=3)), given, rounds=3)
    line = done.history[-1]
    for k, (x, y) in enumerate(samples([4, 4, 4], 1)):
        right = (done.model(party=k)(x).argmax(1) == y).double().mean()
        assert line["parties"][str(k)]["accuracy"] == pytest.approx(float(right))
        torch.testing.assert_close(done.predict(x, party=k), done.model(party=k)(x).detach(), rtol=0, atol=1e-14)
    mean = sum(p["accuracy"] for p in line["parties"].values()) / 3
    assert line["accuracy"] == pytest.approx(mean)  # over the parties, not on the central test set
    with pytest.raises(hansa.ConfigError, match="set party, from party=0 to party=2"):
        done.predict(given.test[0])


def test_a_party_that_comes_late_begins_with_the_common_head() -> None:
    done = hansa.simulate(
        hansa.FedPer(local=SGD(lr=0.3, batch=None)), task(), rounds=2,
        absent=lambda party, round: party == 2 and round == 0,
    )  # fmt: skip
    first = hansa.simulate(
        hansa.FedPer(local=SGD(lr=0.3, batch=None)), task(), rounds=1, absent=lambda party, round: party == 2
    )
    start = {**first.params}  # the base after one round with the initial head
    objective = done.training.objective
    module = net()
    module.load_state_dict(start)
    x, y = samples(SIZES)[2]
    nn.functional.cross_entropy(module(x), y).backward()
    grads = dict(module.named_parameters())
    head = torch.cat([(start[n] - 0.3 * grads[n].grad).flatten() for n in ("2.weight", "2.bias")])  # type: ignore[operator]
    torch.testing.assert_close(done.memories[2][HEAD], head, rtol=0, atol=1e-13)
    assert objective.spec.dim == 43


@pytest.mark.parametrize(
    ("head", "names"),
    [(("2",), {"2.weight", "2.bias"}), (("2.bias",), {"2.bias"}), (("0", "2.bias"), {"0.weight", "0.bias", "2.bias"})],
)
def test_a_head_can_be_named(head: tuple[str, ...], names: set[str]) -> None:
    done = hansa.simulate(hansa.FedPer(local=SGD(lr=0.3), head=head), task(), rounds=1)
    initial = done.training.objective.spec.named(done.training.objective.initial)
    assert {name for name in initial if torch.equal(initial[name], done.params[name])} == names


def test_a_head_that_the_model_does_not_have_is_refused() -> None:
    with pytest.raises(hansa.ConfigError, match="no parameter or layer 'top'"):
        hansa.simulate(hansa.FedPer(head=("top",)), task())


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: hansa.FedPer(layers=-1), "layers must be at least 0, got -1"),
        (lambda: hansa.FedPer(local=Gradient()), "the local solver 'gradient' takes no steps, so it cannot train a"),
        (lambda: hansa.FedPer(fusion=FLTrust()), "fltrust needs a whole model, and the server has no head"),
    ],
)
def test_parts_that_cannot_train_a_head_are_refused(make: Any, reason: str) -> None:
    with pytest.raises(hansa.ConfigError, match=reason):
        hansa.simulate(make(), dataclasses.replace(task(), trusted=samples([9], 2)[0]), rounds=1)


def test_stopping_on_accuracy_needs_the_parties_own_tests() -> None:
    given = hansa.Task(net, "cross_entropy", samples(SIZES), test=samples([9])[0], classes=3)
    with pytest.raises(hansa.ConfigError, match="fedper has no single model to test"):
        hansa.simulate(hansa.FedPer(), given, target=0.9)
