"""Adapters on a frozen base: what parties send, every engine, differential privacy, saved models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hansa
from hansa.core.op import Party
from hansa.holdings.gateway import SampleGateway
from hansa.local.dp_sgd import DPSGD
from hansa.numerics.objective import Objective
from hansa.numerics.params import ParamSpec
from lora import ADAPTERS, FEATURES, LENGTH, adapted, pretrained

X = torch.randn(48, LENGTH, FEATURES, generator=torch.Generator().manual_seed(1))
Y = (X.mean(1).sum(1) > 0).long()


def double() -> nn.Module:
    return adapted().double()


def task(model: Any = adapted) -> hansa.Task:
    parties = [(X[k:40:3], Y[k:40:3]) for k in range(3)]
    return hansa.Task(model, "cross_entropy", parties, (X[40:], Y[40:]))


def run(model: Any = adapted, **settings: Any) -> hansa.Result:
    local = settings.pop("local", hansa.SGD(lr=0.2, batch=5))
    return hansa.simulate(hansa.FedAvg(local=local), task(model), rounds=2, seed=3, **settings)


def test_an_update_is_the_adapters_alone() -> None:
    """The bytes of the uploads of a round: the adapters, and a frame that does not depend on the base."""
    with_base, whole = run(), run(pretrained)
    sent = [result.history[-1]["bytes_up"] for result in (with_base, whole)]
    total = ParamSpec.of(pretrained()).dim
    assert with_base.training.objective.spec.dim == ADAPTERS < total / 2
    assert sent[1] - sent[0] == 3 * 4 * (total - ADAPTERS)
    assert 3 * 4 * ADAPTERS < sent[0] < 3 * (4 * ADAPTERS + 600)
    down = [result.history[-1]["bytes_down"] for result in (with_base, whole)]
    assert down[1] - down[0] >= 3 * 4 * (total - ADAPTERS)


@pytest.mark.thin(1)
@pytest.mark.parametrize("settings", [{}, {"compress": {"name": "clip", "clip": 0.05}}, {"compress": "int8"}])
@pytest.mark.parametrize("engine", ["workers", "stacked"])
def test_engines_agree_on_adapters(engine: Any, settings: dict[str, Any]) -> None:
    runs = [run(double, engine=name, **settings).state.params.w for name in ("reference", engine)]
    torch.testing.assert_close(*runs, rtol=0, atol=1e-9)


@pytest.mark.slow
def test_dp_sgd_trains_adapters_in_every_engine() -> None:
    local = DPSGD(lr=0.2, batch=5, sigma=0.5, clip=0.3)
    runs = [run(double, engine=name, local=local).state.params.w for name in ("reference", "workers", "stacked")]
    for other in runs[1:]:
        torch.testing.assert_close(runs[0], other, rtol=0, atol=1e-9)
    start = Objective(double, "cross_entropy", 3).initial.w
    assert len(start) == ADAPTERS and not torch.equal(runs[0], start)


def test_a_saved_model_reproduces_the_evaluation_and_has_the_base(tmp_path: Path) -> None:
    done = run()
    back = hansa.load(done.save(tmp_path / "run"))
    accuracy = float((back.predict(X[40:]).argmax(1) == Y[40:]).double().mean())
    assert accuracy == done.history[-1]["accuracy"]
    base = pretrained().state_dict()
    saved = back.model().state_dict()
    assert torch.equal(saved["embed.weight"], base["embed.weight"])
    assert torch.equal(saved["value.base.weight"], base["value.weight"])


def test_the_digest_of_a_base_has_its_names_shapes_types_and_bytes() -> None:
    base = Objective(adapted, "cross_entropy", 0).base
    assert base is not None and len(base) == 64
    assert Objective(adapted, "cross_entropy", 1).base == base  # the seed draws the adapters, not the base
    assert Objective(pretrained, "cross_entropy", 0).base is None

    def changed(change: Any) -> Any:
        def make() -> nn.Module:
            model = adapted()
            change(model)
            return model

        return make

    def one_bit(model: Any) -> None:
        model.embed.weight.data.view(torch.int32)[0, 0] ^= 1

    def reshape(model: Any) -> None:
        model.norm.weight = nn.Parameter(model.norm.weight.data.view(2, 3), requires_grad=False)

    def rename(model: Any) -> None:
        model.other, model.embed = model.embed, None

    def reorder(model: Any) -> None:
        embed = model._modules.pop("embed")
        model._modules["embed"] = embed

    digests = {Objective(changed(change), "cross_entropy", 0).base for change in (one_bit, reshape, rename)}
    digests |= {Objective(double, "cross_entropy", 0).base, base}
    assert len(digests) == 5
    assert Objective(changed(reorder), "cross_entropy", 0).base == base


def test_dp_sgd_clips_the_gradient_of_the_adapters_alone() -> None:
    """One step of all samples without noise, against the gradients of one sample after another."""
    objective, clip = Objective(double, "cross_entropy", 0), 0.05
    x, y = X[:6].double(), Y[:6]
    start = objective.initial
    solver = DPSGD(batch=None, steps=1, sigma=0.0, clip=clip, lr=1.0)
    reply, _ = solver.run(Party(0, objective, SampleGateway((x, y)), 0), {"model": start._asdict()}, {})
    module, total = objective.spec.load(double(), start), torch.zeros(ADAPTERS, dtype=torch.float64)
    trained = [p for p in module.parameters() if p.requires_grad]
    for k in range(len(x)):
        loss = nn.functional.cross_entropy(module(x[k : k + 1]), y[k : k + 1])
        gradient = torch.cat([g.flatten() for g in torch.autograd.grad(loss, trained)])
        assert float(gradient.norm()) > clip
        total += gradient * clip / gradient.norm()
    torch.testing.assert_close(reply.tensors["w"], -total / len(x), rtol=0, atol=1e-12)
