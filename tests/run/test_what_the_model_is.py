"""`Algorithm.model` decides what is evaluated, saved, loaded and served; it may have another architecture."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hansa
from hansa.core.other_model import ARCHITECTURE, OtherModel
from hansa.core.plain_data import build
from hansa.core.predictor import evaluate
from hansa.core.registry import register
from hansa.numerics.objective import Objective
from hansa.numerics.params import Params
from hansa.plumbing.errors import ConfigError, DataError


def task(**given: Any) -> hansa.Task:
    draws = torch.Generator().manual_seed(2)
    pairs = [(torch.randn(12, 3, generator=draws), torch.randint(0, 2, (12,), generator=draws)) for _ in range(4)]
    model = build("model", "logistic", inputs=(3,), outputs=2)
    return hansa.Task(**{"model": model, "parties": pairs[:3], "test": pairs[3], **given})


@register("test-averaged")
@dataclass(frozen=True)
class Averaged(hansa.FedAvg):
    """FedAvg whose model is the mean of all iterates (Polyak and Juditsky 1992)."""

    async def round(self, fed: hansa.Federation, state: hansa.State) -> hansa.State:
        new = await super().round(fed, state)
        count = state.slots.get("count", 0) + 1
        before = state.slots.get("mean", torch.zeros_like(new.params.w))
        return new.replace(mean=before + (new.params.w - before) / count, count=count)

    def model(self, state: hansa.State) -> Params:
        return state.params._replace(w=state.slots.get("mean", state.params.w))


def test_the_model_of_a_state_is_evaluated_saved_and_loaded(tmp_path: Path) -> None:
    result = hansa.simulate(Averaged(), task(), rounds=4, run_dir=tmp_path / "run")
    x, y = task().test
    iterates = [hansa.simulate(hansa.FedAvg(), task(), rounds=n).state.params.w for n in (1, 2, 3, 4)]
    mean = torch.stack(iterates).mean(0)
    assert torch.allclose(torch.cat([value.flatten() for value in result.params.values()]), mean, rtol=0, atol=1e-6)
    assert torch.equal(result.state.params.w, iterates[-1])  # the rounds go on from the last iterate
    assert torch.equal(result.model()(x).detach(), result.predict(x))
    loss = float(nn.functional.cross_entropy(result.predict(x), y))
    assert result.history[-1]["loss"] == pytest.approx(loss, abs=1e-6)
    loaded = hansa.load(tmp_path / "run")
    assert torch.equal(loaded.predict(x), result.predict(x))
    assert all(torch.equal(loaded.params[name], value) for name, value in result.params.items())


@register("test-widened")
@dataclass(frozen=True)
class Widened(hansa.FedAvg):
    """FedAvg on a linear model, published as a network with one hidden layer that computes the same."""

    def model(self, state: hansa.State) -> OtherModel:
        weight, bias = state.params.w[:6].view(2, 3), state.params.w[6:]
        eye = torch.eye(3)
        tensors = {
            "1.weight": torch.cat([eye, -eye]), "1.bias": torch.zeros(6),
            "3.weight": torch.eye(6), "3.bias": torch.zeros(6),
            "5.weight": torch.cat([weight, -weight], 1), "5.bias": bias,
        }  # fmt: skip
        return OtherModel.of(build("model", "2nn", inputs=(3,), outputs=2, hidden=6), tensors)


def test_a_model_of_another_architecture_is_evaluated_everywhere_and_loaded(tmp_path: Path) -> None:
    tests = [(x[:6], y[:6]) for x, y in task().parties]
    plain = hansa.simulate(hansa.FedAvg(), task(party_tests=tests), rounds=2)
    result = hansa.simulate(Widened(), task(party_tests=tests), rounds=2, run_dir=tmp_path / "run")
    x, _ = task().test
    assert torch.allclose(result.predict(x), plain.predict(x), rtol=0, atol=1e-6)
    for ours, theirs in zip(result.history, plain.history, strict=True):
        assert ours["accuracy"] == theirs["accuracy"] and ours["loss"] == pytest.approx(theirs["loss"], abs=1e-6)
        assert ours["party_accuracy_mean"] == theirs["party_accuracy_mean"]
    module = result.model()
    assert [layer.out_features for layer in module.modules() if isinstance(layer, nn.Linear)] == [6, 6, 2]
    loaded = hansa.load(tmp_path / "run")
    assert torch.equal(loaded.predict(x), result.predict(x)) and torch.equal(
        loaded.model()(x).detach(), result.predict(x)
    )
    assert result.params.keys() == module.state_dict().keys()


def test_a_method_without_a_network_has_no_module() -> None:
    result = hansa.simulate(hansa.GaussianNB(), task(), rounds=2)
    assert result.params == {}
    with pytest.raises(ConfigError, match="trains no torch module"):
        result.model()


def test_tensors_that_do_not_fit_the_architecture_are_refused() -> None:
    part = build("model", "logistic", inputs=(3,), outputs=2)
    with pytest.raises(ConfigError, match="the model 'logistic' has the tensors"):
        OtherModel.of(part, {"1.weight": torch.zeros(2, 4), "1.bias": torch.zeros(2)})
    with pytest.raises(ConfigError, match="expected a registered model"):
        OtherModel(hansa.SGD(), Params.none())


@pytest.mark.parametrize(
    ("architecture", "error", "sentence"),
    [
        ({"name": "2nn", "inputs": [3], "outputs": 2, "hidden": 9}, DataError, "do not fit the model '2nn'"),
        ({"name": "unknown"}, ConfigError, "unknown model 'unknown'"),
        ("os:getcwd", DataError, "expected the fields of a registered model"),
    ],
)
def test_a_payload_that_describes_another_model_than_it_holds_is_refused(
    architecture: Any, error: type[Exception], sentence: str
) -> None:
    objective = Objective(task().model, "cross_entropy", 0)
    x, y = task().test
    payload = {"model": objective.initial._asdict(), ARCHITECTURE: architecture}
    with pytest.raises(error, match=sentence):
        evaluate("network", objective, payload, x, y)
