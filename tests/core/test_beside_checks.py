"""Limits on tensors beside an update, which the limit on the update's norm does not cover."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import hansa
from hansa.core.op import Reply
from hansa.local import Controlled, Fair, FairGradient, Normalised
from hansa.replies.reply_checks import Rules, fault
from hansa.transforms import ClippedUpdate
from quadratics import ENGINES, task

MODEL = {"w": torch.zeros(2), "stats": torch.zeros(0), "counts": torch.zeros(0, dtype=torch.int64)}
PAYLOAD: dict[str, Any] = {"model": MODEL, "c": torch.zeros(2), "rate": 0.1}


def found(op: Any, rules: Rules | None = None, **numbers: Any) -> str | None:
    tensors = {name: torch.as_tensor(value, dtype=torch.float32) for name, value in numbers.items()}
    return fault(Reply({"w": torch.ones(2), **tensors}, 10), op, PAYLOAD, rules or Rules())


@pytest.mark.parametrize("wrap", [lambda op: op, lambda op: ClippedUpdate(op, 5.0)], ids=["bare", "clipped"])
def test_a_number_of_steps_is_not_negative_and_no_more_than_the_work_allows(wrap: Any) -> None:
    """A negative tau would reverse the update of every party; a large tau would enlarge every step."""
    for op, most in ((Normalised(steps=20), 2_000), (Normalised(steps=20, momentum=0.9), 20_000),
                     (Normalised(epochs=2, batch=5), 400)):  # fmt: skip
        assert found(wrap(op), tau=20.0) is None
        assert found(wrap(op), tau=most * 0.99) is None
        assert f"its tau is {most * 1.01:.4g}" in str(found(wrap(op), tau=most * 1.01))
        assert "possible" in str(found(wrap(op), tau=1e30))
        assert found(wrap(op), tau=-1e-3) == "its tau is negative"


@pytest.mark.parametrize("op", [Fair(), FairGradient()])
def test_what_a_server_divides_by_is_not_negative(op: Any) -> None:
    """With a negative h a party could make the sum of all h small, and so the step large."""
    assert found(op, h=1e6) is None
    assert found(op, h=-100.0) == "its h is negative"


def test_control_variates_are_limited_where_updates_are() -> None:
    op = Controlled(lr=0.1, steps=5)
    assert found(op, c=[1e30, 0.0]) is None
    assert found(op, Rules(max_norm=10.0), c=[3.0, -4.0]) is None
    assert "its c is 1e+30, and at most 2e+04 is possible" in str(found(op, Rules(max_norm=10.0), c=[1e30, 0.0]))
    assert "its c is 1e+30" in str(found(op, Rules(growth=1000.0), c=[1e30, 0.0]))


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("algorithm", [
    hansa.FedNova(Normalised(lr=0.01, steps=40)), hansa.QFedAvg(Fair(lr=0.01, steps=5)),
    hansa.Scaffold(Controlled(lr=0.01, steps=5)),
], ids=["fednova", "qfedavg", "scaffold"])  # fmt: skip
def test_no_honest_party_is_rejected_by_it(algorithm: hansa.Algorithm, engine: str) -> None:
    given = task([1.0, 3.0, 2.0], [1.0, -2.0, 4.0], sizes=(1, 30, 2))
    limits: dict[str, Any] = {"max_norm": 1000.0}
    for line in hansa.simulate(algorithm, given, rounds=3, engine=engine, **limits).history:
        assert line["replies"] == 3 and "rejected" not in line
