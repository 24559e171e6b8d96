"""The simulated clock charges the steps that an op of a method's own declares in `demands`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from clocks import lengths, missing, task

import hansa
from hansa.core.op import Memory, Op, Party, Payload, Reply, Shape
from hansa.core.quantities import AnyCount


@hansa.register("test-passes")
@dataclass(frozen=True)
class Passes(Op):
    """Passes over the samples, one step each."""

    passes: AnyCount = 3

    def run(self, party: Party, payload: Payload, memory: Memory) -> tuple[Reply, Memory]:
        return Reply({"n": torch.tensor(float(party.n))}), memory

    def expects(self, payload: Payload) -> dict[str, Shape]:
        return {"n": ((), torch.float32)}

    def demands(self, n: int, payload: Payload) -> dict[str, int]:
        return {"steps": self.passes * n if payload.get("each") else self.passes}


@hansa.register("test-passing")
@dataclass(frozen=True)
class Passing(hansa.FedAvg):
    """An algorithm whose parties only pass over their samples."""

    verbs: ClassVar[frozenset[str]] = frozenset({"reduce"})  # type: ignore[misc]
    each: bool = False

    async def round(self, fed: Any, state: Any) -> Any:
        await fed.reduce(Passes(), {"each": self.each})
        return state


def simulate(each: bool = False, **settings: Any) -> Any:
    devices = {"compute": {"name": "constant", "value": 0.5}, "latency": {"name": "constant", "value": 1.0}}
    return hansa.simulate(Passing(each=each), task(), rounds=2, devices=devices, **settings)


def test_an_op_that_is_no_local_solver_takes_the_time_of_its_steps() -> None:
    assert lengths(simulate()) == pytest.approx([1 + 3 * 0.5] * 2)


def test_a_party_that_cannot_take_its_steps_before_the_deadline_is_missing() -> None:
    free, bound = simulate(each=True), simulate(each=True, deadline=8.0, quorum=1)
    assert lengths(free)[0] > 8.0
    assert lengths(bound) == pytest.approx([8.0] * 2)
    late = missing(bound)[0]
    assert 0 < len(late) < 10 and set(late.values()) == {"it was not done before the deadline of 8 s"}


def test_without_a_time_per_step_the_steps_cost_nothing() -> None:
    done = hansa.simulate(Passing(), task(), rounds=1, devices={"latency": {"name": "constant", "value": 1.0}})
    assert lengths(done) == pytest.approx([1.0])
