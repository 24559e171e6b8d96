"""A bound on updates: it clips the update, and does not change the numbers beside it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import hansa
from hansa.core.op import Op, Reply
from hansa.core.plain_data import build
from hansa.local import Controlled, Fair, Normalised
from hansa.local.scaffold import OWN
from hansa.plumbing.errors import ConfigError
from hansa.replies.reply_checks import Rules, fault
from hansa.transforms import ClippedUpdate
from quadratics import ENGINES, found, task

SECURE: list[dict[str, Any]] = [{}, {"secure": "masking"}]
MODEL = {"w": torch.zeros(2), "stats": torch.zeros(0), "counts": torch.zeros(0, dtype=torch.int64)}


@pytest.mark.slow
@pytest.mark.thin(1)
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("bound", [1e-2, 100.0])
@pytest.mark.parametrize("option", ["II", "I"])
def test_scaffold_with_a_bound_reaches_the_optimum(option: str, bound: float, engine: str) -> None:
    # The quadratics of card 1.9 (c), whose optimum is 10 / 11. Near it no update is as long as either bound.
    local = Controlled(lr=0.05, steps=10, batch=None, option=option)  # type: ignore[arg-type]
    given = task([1.0, 10.0], [0.0, 1.0])
    end = found(hansa.Scaffold(local=local), given, 300, engine=engine, privacy={"bound": bound})
    assert end == pytest.approx(10 / 11, abs=1e-9)


@pytest.mark.parametrize("secure", SECURE, ids=["plain", "masking"])
@pytest.mark.parametrize("option", ["I", "II"])
def test_a_party_remembers_the_control_variate_that_the_server_got(option: str, secure: dict[str, Any]) -> None:
    local = Controlled(lr=0.05, steps=10, batch=None, option=option)  # type: ignore[arg-type]
    given, settings = task([1.0, 10.0, 4.0], [0.0, 1.0, -3.0]), {"privacy": {"bound": 1e-2, **secure}}
    for rounds in (1, 3):
        done = hansa.simulate(hansa.Scaffold(local=local), given, rounds=rounds, **settings)
        own = torch.stack([done.memories[party][OWN] for party in range(3)])
        assert float(own.abs().max()) > 1.0
        torch.testing.assert_close(done.state.slots["c"], own.mean(0), rtol=0, atol=1e-9 if secure else 1e-14)


@pytest.mark.thin(2)
@pytest.mark.parametrize("secure", SECURE, ids=["plain", "masking"])
@pytest.mark.parametrize("algorithm", [
    hansa.FedNova(Normalised(lr=0.01, steps=40)), hansa.FedNova(Normalised(lr=0.01, steps=40, momentum=0.9)),
    hansa.QFedAvg(Fair(lr=0.01, steps=5, q=0.0)), hansa.QFedAvg(Fair(lr=0.01, steps=5, q=1.0)),
], ids=["fednova", "fednova momentum", "qfedavg q=0", "qfedavg"])  # fmt: skip
def test_a_bound_that_no_update_reaches_changes_nothing(algorithm: hansa.Algorithm, secure: dict[str, Any]) -> None:
    given = task([0.1, 0.3, 0.2], [1.0, -2.0, 4.0])
    free = found(algorithm, given, 2)
    assert abs(free) > 0.005
    assert found(algorithm, given, 2, privacy={"bound": 15.0, **secure}) == pytest.approx(free, rel=1e-5)


def test_an_update_that_is_too_long_is_shortened_and_what_travels_beside_it_is_not() -> None:
    class Answer(Normalised):
        def run(self, party: Any, payload: Any, memory: Any) -> Any:
            return Reply({"w": torch.tensor([30.0, 40.0]), "tau": torch.tensor(7.0)}, 3), memory

    op = ClippedUpdate(Answer(), 5.0)
    reply, _ = op.run(None, {"model": MODEL}, {})  # type: ignore[arg-type]
    assert reply.tensors["w"].tolist() == pytest.approx([3.0, 4.0], rel=1e-5)
    assert float(reply.tensors["tau"]) == 7.0
    assert fault(reply, op, {"model": MODEL}, Rules()) is None
    reply.tensors["w"] = reply.tensors["w"] * 1.01
    assert "the bound to which the party should have clipped it" in str(fault(reply, op, {"model": MODEL}, Rules()))


def test_an_op_without_an_update_has_nothing_that_a_bound_could_shorten() -> None:
    counts: Op = build("op", "feature-counts")
    with pytest.raises(ConfigError, match="clip bounds the length of an update, and 'feature-counts' sends none"):
        ClippedUpdate(counts, 1.0)
