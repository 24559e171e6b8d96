"""A party that sends its reply in the form of a relay's answer speaks for itself alone, and its reply is rejected."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from league import League

from hansa.core.op import Reply
from hansa.net.aggregator import runtime
from hansa.net.party.worker import Worker
from hansa.net.transport.wire import Work
from hansa.replies.partial_sums import ReplySum

RUN = {"rounds": 2, "quorum": 2}
TASK = {"dataset": "heart", "model": "logistic", "dtype": "float64"}
STATEMENT = "0" * 64


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "TICK", 0.05)


@dataclass
class Disguised(Reply):
    """A reply with other entries beside its own."""

    beside: dict[str, Any] = field(default_factory=dict)

    def tree(self) -> dict[str, Any]:
        return {**super().tree(), **self.beside}


def outcomes(*parties: int) -> list[dict[str, Any]]:
    return [{"party": number, "status": "accepted", "statement": STATEMENT, "staged": False} for number in parties]


def as_sum(reply: Reply, *parties: int) -> dict[str, Any]:
    """The answer of a relay with the sum of as many replies as there are parties."""
    total = ReplySum()
    for _ in parties:
        total.add(reply)
    return {"relay": outcomes(*parties), "replies": {}, "sum": total.reply().tree()}


def longer(reply: Reply) -> Reply:
    """Another update, and another weight than the party signed."""
    return Reply({**reply.tensors, "w": reply.tensors["w"] + 3}, reply.weight + 1, reply.maxima, reply.metrics)


DISGUISES: dict[str, Callable[[Reply], dict[str, Any]]] = {
    "nobody's replies": lambda reply: {"relay": [], "replies": {}},
    "the sum of all parties": lambda reply: as_sum(reply, 0, 1, 2),
    "another reply of its own": lambda reply: {"relay": outcomes(0), "replies": {"0": longer(reply).tree()}},
    "an entry without a meaning": lambda reply: {"x": torch.ones(1)},
}


@pytest.mark.thin(2)
@pytest.mark.parametrize("settings", [{}, {"sums": "exact", "max_weight": 100}], ids=["floating", "exact"])
@pytest.mark.parametrize("disguise", DISGUISES)
def test_a_party_cannot_answer_as_a_relay(
    disguise: str, settings: dict[str, Any], league: League, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = Worker.answer

    def answer(self: Any, work: Work, *rest: Any) -> tuple[Reply | str, bool]:
        reply, staged = plain(self, work, *rest)
        if work.party == 0 and work.phase == "round" and isinstance(reply, Reply):
            reply = Disguised(reply.tensors, reply.weight, reply.maxima, reply.metrics, 1, DISGUISES[disguise](reply))
        return reply, staged

    monkeypatch.setattr(Worker, "answer", answer)
    league.join_all()
    ended = league.ended(league.submit({"task": TASK, "run": {**RUN, **settings}}))
    assert ended["status"] == "finished", ended["reason"]
    for line in ended["rounds"]:
        assert line["members"] == ["bob", "cid"]
        assert line["rejected"]["ann"] == "it has other entries than those of a reply"
