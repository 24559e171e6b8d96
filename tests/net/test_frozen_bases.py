"""Jobs with adapters on a frozen base: parties compare the digest of their base, and the base is in no message."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import league as leagues
import pytest
import torch
from league import PARTIES, League
from torch import nn

import hansa
from hansa.artifacts import saved_model
from hansa.data.statement import DataStatement
from hansa.net.party.samples import PartySamples, preparer
from hansa.numerics.objective import Objective
from hansa.plumbing import codec
from hansa.plumbing.errors import NotAdmitted, PartyError
from lora import ADAPTERS, FEATURES, LENGTH, adapted, pretrained

NET = "test_frozen_bases:net"
POLICY = f'functions = ["{NET}"]\n'
HERE = threading.local()  # a party's thread may have another base
DISK = {"base": 7}


def net() -> nn.Module:
    """The model of a party, from the base that it has."""
    return adapted(pretrained(getattr(HERE, "base", DISK["base"])))


def samples(party: int) -> PartySamples:
    x = torch.randn(12, LENGTH, FEATURES, generator=torch.Generator().manual_seed(party))
    return PartySamples((x, (x.mean(1).sum(1) > 0).long()))


def other_base(samples: PartySamples) -> Callable[..., Any]:
    """The preparer of a party that has another base on its disk."""
    prepare = preparer(samples)

    def prepared(number: int, task: dict[str, Any], device: str) -> Any:
        HERE.base = 8
        try:
            return prepare(number, task, device)
        finally:
            del HERE.base

    return prepared


def tree(**run: Any) -> dict[str, Any]:
    return {
        "task": {"parties": ["x"], "model": NET},
        "algorithm": {"name": "fedavg", "local": {"name": "sgd", "lr": 0.2, "batch": 5}},
        "run": {"rounds": 2, "seed": 3, "eval_parties": False, **run},
    }  # fmt: skip


def reference(parties: list[int], **run: Any) -> hansa.Result:
    task = hansa.Task(net, "cross_entropy", [samples(k).train for k in parties], names=[PARTIES[k] for k in parties])
    algorithm = hansa.FedAvg(local=hansa.SGD(lr=0.2, batch=5))
    return hansa.simulate(algorithm, task, engine="reference", rounds=2, seed=3, eval_parties=False, **run)


@pytest.mark.parametrize("compress", [None, {"name": "clip", "clip": 0.05}], ids=["plain", "clip"])
def test_a_job_trains_adapters_with_the_bits_of_the_simulation(
    compress: Any, found: Callable[..., League], tmp_path: Path
) -> None:
    league, run = found(functions=(NET,)), {} if compress is None else {"compress": compress}
    for number, name in enumerate(PARTIES):
        league.join(name, samples(number), POLICY)
    job = league.submit(tree(**run))
    ended, wanted = league.ended(job), reference([0, 1, 2], **run)
    assert ended["status"] == "finished", ended["reason"]
    assert codec.encode(league.model(job)) == codec.encode(wanted.saved_model())
    for line, simulated in zip(ended["rounds"], wanted.history, strict=True):
        assert line["bytes_up"] == simulated["bytes_up"] < 3 * (4 * ADAPTERS + 600)
    assert line["bytes_down"] == simulated["bytes_down"]
    (begun,) = league.events("job begun")
    assert Objective(net, "cross_entropy", 3).base in begun["detail"]
    pulled = league.operator.pull(job, tmp_path / "model")
    x = samples(0).train[0]
    assert torch.equal(saved_model.load(pulled, make=net).predict(x), wanted.predict(x))


@pytest.mark.slow
def test_parties_train_adapters_under_a_privacy_budget(found: Callable[..., League]) -> None:
    """The noise comes from the parties' secrets, so the bits are not those of a simulation."""
    league = found(functions=(NET,))
    for number, name in enumerate(PARTIES):
        league.join(name, samples(number), f"{POLICY}[privacy]\nepsilon = 100.0\n")
    local = {"name": "dp-sgd", "lr": 0.2, "batch": 5, "clip": 0.5, "sigma": 1.0}
    job = league.submit({**tree(), "algorithm": {"name": "fedavg", "local": local}})
    ended = league.ended(job)
    assert ended["status"] == "finished", ended["reason"]
    assert all(line["replies"] == 3 and line["bytes_up"] < 3 * (4 * ADAPTERS + 600) for line in ended["rounds"])
    made: Any = league.model(job)
    start = Objective(net, "cross_entropy", 3)
    assert all(torch.equal(made["params"][name], value) for name, value in start.frozen.items())
    assert not torch.equal(made["params"]["head.weight"], start.spec.named(start.initial)["head.weight"])


def test_a_party_with_another_base_declines_and_the_others_go_on(
    found: Callable[..., League], monkeypatch: pytest.MonkeyPatch
) -> None:
    league = found(functions=(NET,))
    for number, name in enumerate(PARTIES):
        with monkeypatch.context() as patch:
            if name == "bob":
                patch.setattr(leagues, "preparer", other_base)
            league.join(name, samples(number), POLICY)
    job = league.submit(tree(quorum=2))
    ended = league.ended(job)
    assert ended["status"] == "finished", ended["reason"]
    ours, bobs = (Objective(lambda s=seed: adapted(pretrained(s)), "cross_entropy", 3).base for seed in (7, 8))  # type: ignore[misc]
    assert ours is not None and bobs is not None
    sentence = (f"its frozen parameters of the model {NET!r} have the SHA-256 {bobs[:12]}, and those of the job "
                f"{ours[:12]}; both must make the model from the same base")  # fmt: skip
    for line in ended["rounds"]:
        assert line["missing"] == {"bob": sentence} and line["replies"] == 2


TASK = {"model": NET, "dtype": "float32", "shape": [LENGTH, FEATURES], "outputs": 2, "loss": "cross_entropy",
        "classes": 2, "party_test": 0.0, "seed": 0, "bf16": False, "prepared": False}  # fmt: skip


def test_a_party_checks_the_digest_before_it_touches_a_sample() -> None:
    class Untouched:
        def __getattr__(self, name: str) -> Any:
            raise AssertionError(f"the party read {name} of its samples")

        def __getitem__(self, index: Any) -> Any:
            raise AssertionError("the party read its samples")

    statement = DataStatement((LENGTH, FEATURES), "classes", classes=2)
    prepare = preparer(PartySamples((Untouched(), Untouched()), statement=statement))  # type: ignore[arg-type]
    wrong = hashlib.sha256(b"another base").hexdigest()
    for base in (wrong, None):
        with pytest.raises(PartyError, match=f"{NET}.*the SHA-256 [0-9a-f]{{12}}, and those of the job"):
            prepare(0, {**TASK, "base": base}, "cpu")
    with pytest.raises(PartyError, match="'logistic' have the SHA-256 none, and those of the job " + wrong[:12]):
        prepare(0, {**TASK, "model": {"name": "logistic"}, "base": wrong}, "cpu")
    for malformed in (7, "ab", wrong.upper(), {"0.weight": torch.zeros(2)}, [wrong]):
        with pytest.raises(NotAdmitted, match="malformed task: base must be the SHA-256"):
            prepare(0, {**TASK, "base": malformed}, "cpu")
    with pytest.raises(AssertionError, match="the party read"):
        prepare(0, {**TASK, "base": Objective(net, "cross_entropy", 0).base}, "cpu")


def test_a_base_that_the_factory_draws_follows_from_the_seed_of_the_job() -> None:
    def drawn() -> nn.Module:
        module = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
        module[0].requires_grad_(False)
        return module

    bases = [Objective(drawn, "cross_entropy", seed).base for seed in (0, 0, 1)]
    assert bases[0] == bases[1] != bases[2]


def test_a_job_does_not_continue_with_another_base_at_the_aggregator(
    found: Callable[..., League], monkeypatch: pytest.MonkeyPatch
) -> None:
    league = found(functions=(NET,))
    for number, name in enumerate(PARTIES):
        league.join(name, samples(number), POLICY)
    job = league.submit(tree(rounds=10_000))
    league.until(lambda: len(league.shown(job)["rounds"]) >= 1)
    league.stop()
    monkeypatch.setitem(DISK, "base", 9)
    league.start()
    ended = league.ended_after_all(job)
    assert ended["status"] == "failed" and "are not those with which" in ended["reason"], ended["reason"]
