"""Frozen parameters (`requires_grad = False`) are part of the model, but not of what parties send."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hansa
from hansa.core.op import Party
from hansa.core.plain_data import build
from hansa.holdings.gateway import SampleGateway
from hansa.local.dp_sgd import DPSGD
from hansa.numerics.objective import Objective
from hansa.plumbing.errors import ConfigError

X = torch.randn(60, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
Y = (X.sum(1) > 0).long()
FROZEN = ("0.weight", "0.bias")


def net() -> nn.Module:
    """A frozen layer under one that is trained, with a BatchNorm between them."""
    module = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 2))
    module[0].requires_grad_(False)
    return module.double()


def still() -> nn.Module:
    """The same without a buffer: everything beside the trained parameters is frozen."""
    module = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 2))
    module[0].requires_grad_(False)
    return module.double()


def task(model: Any = net) -> hansa.Task:
    parties = [(X[k::3], Y[k::3]) for k in range(3)]
    return hansa.Task(model, "cross_entropy", parties, (X[:20], Y[:20]), [(x[:4], y[:4]) for x, y in parties],
                      trusted=(X[:12], Y[:12]))  # fmt: skip


def start(model: Any = net) -> dict[str, torch.Tensor]:
    module = Objective(model, "cross_entropy", 0).network()
    return {name: module.state_dict()[name].clone() for name in FROZEN}


def test_a_party_sends_no_frozen_parameter_and_is_sent_none() -> None:
    objective = Objective(still, "cross_entropy", 0)
    model = objective.initial._asdict()
    assert sum(value.numel() for value in model.values()) == objective.spec.dim == 47
    reply, _ = hansa.SGD().run(Party(0, objective, SampleGateway((X, Y)), 0), {"model": model}, {})
    assert list(reply.tensors) == ["w"] and not reply.maxima
    normed = Objective(net, "cross_entropy", 0)
    reply, _ = hansa.SGD().run(Party(0, normed, SampleGateway((X, Y)), 0), {"model": normed.initial._asdict()}, {})
    assert reply.tensors["stats"].numel() == 12  # running mean and variance of the BatchNorm


ALGORITHMS = [
    "fedavg", "fedprox", "scaffold", "fednova", "fedper", "d-psgd", "fedbuff", "easgd", "zeno++", "fedadam", "qfedavg",
    "overlap-sgd", "prunefl", "fedavg+", "fedgeomed+", "fedcomed+", "ditto", "admm", "fedrep", "lg-fedavg", "apfl",
    "mapper", "optimal-averaging",
]  # fmt: skip


@pytest.mark.thin(4)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_every_algorithm_leaves_frozen_parameters_to_the_bit_and_trains_the_rest(algorithm: str) -> None:
    run: dict[str, Any] = {"rounds": 2, "seed": 0}
    done = hansa.simulate(build("algorithm", algorithm), task(), engine="reference", **run)
    stacked = hansa.simulate(build("algorithm", algorithm), task(), engine="stacked", **run)
    for result in (done, stacked):
        module = result.model(0 if result.personal else None)
        for name, value in start().items():
            assert torch.equal(module.state_dict()[name], value) and torch.equal(result.params[name], value)
    assert not torch.equal(done.state.params.w, Objective(net, "cross_entropy", 0).initial.w)
    torch.testing.assert_close(tuple(done.state.params), tuple(stacked.state.params), rtol=0, atol=1e-9)


@pytest.mark.thin(2)
@pytest.mark.parametrize("model", [net, still])
@pytest.mark.parametrize("engine", ["reference", "workers", "stacked"])
def test_engines_agree_with_a_model_whose_base_is_frozen(engine: Any, model: Any) -> None:
    given = dataclasses.replace(task(model), trusted=None)
    runs = [hansa.simulate(hansa.FedAvg(), given, rounds=2, engine=e).state.params for e in ("reference", engine)]
    torch.testing.assert_close(tuple(runs[0]), tuple(runs[1]), rtol=0, atol=1e-9)


@pytest.mark.parametrize(
    "privacy", [{"secure": "masking"}, {"bound": 0.5}, {"dp": {"name": "central", "clip": 1.0, "sigma": 0.1}}]
)
def test_private_sums_are_of_what_is_trained(privacy: dict[str, Any]) -> None:
    done = hansa.simulate(hansa.FedAvg(), task(still), rounds=2, privacy=privacy, eval_parties=False)
    assert all(torch.equal(done.params[name], value) for name, value in start(still).items())


@pytest.mark.parametrize("fusion", ["krum", "median", "fltrust"])
def test_robust_fusions_see_what_is_trained(fusion: str) -> None:
    done = hansa.simulate(hansa.FedAvg(fusion=build("fusion", fusion)), task(), rounds=2)
    assert all(torch.equal(done.params[name], value) for name, value in start().items())


def test_dp_sgd_trains_a_model_with_a_frozen_base_without_sending_it() -> None:
    objective = Objective(still, "cross_entropy", 0)
    at = Party(0, objective, SampleGateway((X, Y)), 0)
    reply, _ = DPSGD(batch=8).run(at, {"model": objective.initial._asdict()}, {})
    assert list(reply.tensors) == ["w"]


@pytest.mark.parametrize("algorithm", ["fedavg", "fedper"])
def test_a_saved_model_has_its_frozen_parameters_whatever_its_function_makes_later(
    algorithm: str, tmp_path: Path
) -> None:
    done = hansa.simulate(build("algorithm", algorithm), task(), rounds=2)
    party = 0 if done.personal else None
    wanted = done.predict(X, party)

    def other() -> nn.Module:
        module = net()
        module[0].weight.data.fill_(9.0)  # type: ignore[index]
        return module

    back = hansa.load(done.save(tmp_path / "run"))
    assert torch.equal(back.predict(X, party), wanted) if party is None else True
    for make in (net, other):
        from hansa.artifacts import saved_model as saved

        loaded = saved.load(tmp_path / "run", make=make)
        assert torch.equal(loaded.predict(X, party), wanted)
        assert torch.equal(loaded.model(party).state_dict()["0.weight"], start()["0.weight"])


def test_a_run_resumes_to_the_same_bits_and_is_refused_with_another_base(tmp_path: Path) -> None:
    whole = hansa.simulate(hansa.FedAvg(), task(), rounds=4)
    hansa.simulate(hansa.FedAvg(), task(), rounds=2, run_dir=tmp_path / "run", checkpoint_seconds=0.0)

    def other() -> nn.Module:
        module = net()
        module[0].weight.data.fill_(9.0)  # type: ignore[index]
        return module

    with pytest.raises(ConfigError, match="frozen"):
        hansa.simulate(hansa.FedAvg(), task(other), rounds=4, run_dir=tmp_path / "run", resume=True)
    done = hansa.simulate(hansa.FedAvg(), task(), rounds=4, run_dir=tmp_path / "run", resume=True)
    assert all(torch.equal(done.params[name], whole.params[name]) for name in whole.params)


def test_a_method_without_a_model_vector_resumes_though_the_task_has_a_model(tmp_path: Path) -> None:
    given = dataclasses.replace(task(still), trusted=None)
    whole = hansa.simulate(build("algorithm", "naive-bayes"), given, rounds=2)
    hansa.simulate(build("algorithm", "naive-bayes"), given, rounds=1, run_dir=tmp_path / "run", checkpoint_seconds=0.0)
    done = hansa.simulate(build("algorithm", "naive-bayes"), given, rounds=2, run_dir=tmp_path / "run", resume=True)
    assert torch.equal(done.state.slots["mean"], whole.state.slots["mean"])
