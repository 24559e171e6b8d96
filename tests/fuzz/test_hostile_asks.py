"""The fuzzing of asks finds what it looks for: leaks, data-dependent failures, and faults that were found before."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import hostile_asks
import pytest
import torch
from hostile_asks import TASK, HostileAsk, _quiet, _same_digest, _samples, answered, check

from hansa.core.ask import op_config
from hansa.core.op import Memory, Op, Party, Payload, Reply, Shape
from hansa.core.predictor import Evaluate
from hansa.core.registry import register
from hansa.local import DPSGD, SGD
from hansa.plumbing.errors import PartyError
from hansa.secure.paillier_sum import PaillierEncrypt

MODEL = {"w": torch.zeros(62, dtype=torch.float64), "stats": torch.zeros(0), "counts": torch.zeros(0).long()}


@register("test-behind")
@dataclass(frozen=True)
class Behind(Op):
    """Reads a sample without the gateway, and sends it or fails by it."""

    fails: bool = False

    def run(self, party: Party, payload: Payload, memory: Memory) -> tuple[Reply, Memory]:
        first = party.data._train.x[0, 0]
        if self.fails and float(first) < -50:
            raise PartyError("the first sample is small")
        return Reply({} if self.fails else {"x": first}), memory

    def expects(self, payload: Payload) -> dict[str, Shape]:
        return {} if self.fails else {"x": ((), torch.float64)}


@register("test-brittle")
@dataclass(frozen=True)
class Brittle(DPSGD):
    """DP-SGD that fails at a large sample, which no noise covers."""

    entries = DPSGD.entries

    def run(self, party: Party, payload: Payload, memory: Memory) -> tuple[Reply, Memory]:
        if float(party.samples("train")[0].max()) > 1000:
            raise IndexError
        return super().run(party, payload, memory)


@register("test-free")
@dataclass(frozen=True)
class Free(DPSGD):
    """Says that it is private, and has nothing to charge."""

    entries = DPSGD.entries

    def run(self, party: Party, payload: Payload, memory: Memory) -> tuple[Reply, Memory]:
        return Reply({"w": party.data._train.x[0].repeat(3)[:62]}, 5), memory


def ask(policy: str, op: Op, **payload: Any) -> HostileAsk:
    message = {"op": op_config(op), "payload": {"model": MODEL, **payload}, "round": 0}
    return HostileAsk(policy, message, {"task": dict(TASK), "preparations": []}, 0)


def compare(sent: HostileAsk) -> list[Reply | str]:
    with _quiet(), _same_digest():
        both = [answered(sent, samples) for samples in _samples()]
    check(sent, *both)
    return [one.answer for one in both]


@pytest.mark.parametrize(("policy", "op", "fault"), [
    ("open", Behind(), "without a reading"), ("open", Behind(fails=True), "without a reading"),
    ("private", Free(steps=2), "without a reading"),
], ids=str)  # fmt: skip
def test_a_leak_is_noticed(policy: str, op: Op, fault: str) -> None:
    with pytest.raises(AssertionError, match=fault):
        compare(ask(policy, op))


def test_a_failure_that_is_not_counted_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    compare(ask("private", Brittle(steps=2)))
    monkeypatch.setattr("hansa.net.party.vault.PartyVault.declined", lambda *_: None)
    with pytest.raises(AssertionError, match="a sample decides about the answer"):
        compare(ask("private", Brittle(steps=2)))


def test_a_reading_that_is_not_charged_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    sent = ask("private", DPSGD(steps=1))
    assert all(isinstance(answer, Reply) for answer in compare(sent))
    monkeypatch.setattr("hansa.net.party.vault.PartyVault._charge", lambda *_: (1.0, None))
    with pytest.raises(AssertionError, match="nothing was charged"):
        compare(sent)


def test_a_reply_outside_a_secure_sum_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert all(isinstance(answer, str) for answer in compare(ask("secure", SGD(steps=1))))
    monkeypatch.setattr("hansa.net.party.floor.Floor.refuses", lambda *_: None)
    with pytest.raises(AssertionError, match="outside a secure sum"):
        compare(ask("secure", SGD(steps=1)))


@pytest.mark.slow
def test_every_policy_is_answered_by_replies_too() -> None:
    hidden = [seed for seed in hostile_asks.seeds() if seed.op["name"] == PaillierEncrypt.name]
    assert len(hidden) >= 4
    assert all(isinstance(answer, Reply) for answer in compare(ask("open", SGD(steps=1))))
    assert all(isinstance(answer, Reply) for answer in compare(ask("private", Evaluate())))
    assert all(isinstance(answer, Reply) for answer in compare(ask("private", DPSGD(steps=1))))
    names = {part["name"] for seed in hostile_asks.seeds() for part in (seed.op, seed.op.get("inner", seed.op))}
    assert set(hostile_asks.ops()) <= names


VALUES = {"rows": torch.zeros(30, 30), "texts": ["a" * 5000], "text": "x\ny" * 2000, "nested": [torch.zeros(30)]}


@pytest.mark.parametrize("value", VALUES.values(), ids=VALUES)
def test_a_refusal_is_one_sentence_whatever_it_quotes(value: Any) -> None:
    sent = ask("open", SGD())
    for message, task in (
        ({**sent.message, "op": {**sent.message["op"], "steps": value}}, sent.task),
        ({**sent.message, "op": {"kind": "op", "name": value}}, sent.task),
        (sent.message, {**sent.task, "task": {**TASK, "seed": value}}),
        (sent.message, {**sent.task, "task": {**TASK, "outputs": value}}),
    ):
        for answer in compare(HostileAsk("open", message, task, 0)):
            assert isinstance(answer, str) and answer.isprintable() and len(answer) <= 1800
