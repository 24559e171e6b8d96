"""The verb `session`: generators at several parties that exchange messages within one ask."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from postal import acted

import hansa
from hansa.core.op import Memory, Party, Payload, Reply, Shape
from hansa.core.post import AHEAD
from hansa.core.quantities import AnyCount
from hansa.core.registry import register
from hansa.core.session_op import Receive, Send, SessionOp, Talk
from hansa.core.shapes import UpTo
from hansa.plumbing.errors import AlgorithmError, PartyError
from hansa.sim.devices import Devices
from hansa.sim.distributions import Constant


@register("test-countdown")
@dataclass(frozen=True)
class Countdown(SessionOp):
    """Party 0 sends numbers to the others, which add their ids and send them back; `ahead` are sent at once."""

    times: AnyCount = 3
    ahead: AnyCount = 1
    measures: ClassVar[frozenset[str] | None] = frozenset({"total"})

    def talk(self, party: Party, payload: Payload, memory: Memory) -> Talk:
        others, total = payload["others"], 0.0
        if party.id in payload.get("declines", ()):
            raise PartyError("it does not talk today")
        for at in range(0, self.times, self.ahead):
            if party.id != 0:
                for _ in range(self.ahead):
                    message = yield Receive(0)
                    assert message is not None
                    total += float(message["x"])
                    yield Send(0, {"x": message["x"] + party.id})
                continue
            for k in range(self.ahead):
                for other in others:
                    value = float("nan") if payload.get("broken") else float(at + k)
                    yield Send(other, {"x": torch.tensor(value)})
            for _ in range(self.ahead):
                for other in others:
                    message = yield Receive(other)
                    assert message is not None
                    total += float(message["x"])
        if payload.get("extra") and party.id == 0:
            yield Send(others[0], {"x": torch.tensor(0.0)})
        new = {**memory, "sum": memory.get("sum", torch.zeros(())) + total}
        return Reply({"total": torch.tensor(total)}, metrics={"total": total}), new

    def expects(self, payload: Payload) -> dict[str, Shape]:
        return {"total": ((), torch.float32)}

    def expects_messages(self, payload: Payload, sender: int, receiver: int) -> Sequence[Mapping[str, Shape]]:
        count = self.times + ("extra" in payload)
        return [{"x": ((), torch.float32)}] * (count if 0 in (sender, receiver) else 0)


@register("test-large-countdown")
@dataclass(frozen=True)
class LargeCountdown(Countdown):
    """The same, with messages that a session cannot carry."""

    def expects_messages(self, payload: Payload, sender: int, receiver: int) -> Sequence[Mapping[str, Shape]]:
        return [{"x": ((2**20,), torch.float32)}]


@register("test-open-countdown")
@dataclass(frozen=True)
class OpenCountdown(Countdown):
    """The same, with messages of a size that the sender chooses."""

    def expects_messages(self, payload: Payload, sender: int, receiver: int) -> Sequence[Mapping[str, Shape]]:
        return [{"x": ((UpTo(3),), torch.float32)}]


PAIRS = [(0, 1), (1, 0), (0, 2), (2, 0)]
OTHERS = {"others": [1, 2]}


def played(op: SessionOp, payload: Payload = OTHERS, pairs: Any = PAIRS, **run: Any) -> tuple[Any, hansa.Result]:
    return acted(lambda fed: fed.session(op, payload, pairs), **run)


@pytest.mark.parametrize("ahead", [1, 3])
def test_parties_exchange_many_messages_and_then_reply(ahead: int) -> None:
    (replies,), result = played(Countdown(6, ahead))
    assert replies.parties == (0, 1, 2)  # party 3 has no route
    assert replies.rows("total").tolist() == [2 * 15 + 6 * 1 + 6 * 2, 15, 15]
    assert {p: float(m["sum"]) for p, m in result.memories.items()} == {0: 48.0, 1: 15.0, 2: 15.0}


def test_memories_are_committed_with_the_round() -> None:
    _, result = played(Countdown(), {**OTHERS, "declines": [2]})
    line = result.history[0]
    assert line["empty"].startswith("0 usable replies of 3 parties asked") and not result.memories
    assert line["missing"] == {
        "0": "party 2 left the session", "1": "party 2 left the session", "2": "it does not talk today"
    }  # fmt: skip


def test_messages_that_are_not_finite_end_the_session_with_the_senders_name() -> None:
    _, result = played(Countdown(), {**OTHERS, "broken": True})
    assert "x has values that are not finite" in result.history[0]["missing"]["0"]


def test_a_sender_cannot_be_far_ahead() -> None:
    """Party 0 sends to party 1 more than the mailboxes hold before party 1 may send to party 0 what it waits for."""
    played(Countdown(AHEAD, AHEAD))
    with pytest.raises(AlgorithmError, match="nobody reads"):
        played(Countdown(1), {**OTHERS, "extra": True})


def test_the_bytes_of_a_session_are_counted_in_both_directions() -> None:
    lines = [played(Countdown(times))[1].history[0] for times in (2, 4)]
    up, down = (lines[1][name] - lines[0][name] for name in ("bytes_up", "bytes_down"))
    assert up == pytest.approx(down, abs=8) and up > 8 * 4


@pytest.mark.parametrize(
    ("op", "pairs", "reason"),
    [
        (LargeCountdown(), PAIRS, "bytes, and a session carries at most"),
        (OpenCountdown(), PAIRS, "have an open dimension"),
        (Countdown(), [], "needs at least one route"),
        (Countdown(), [(0, 9)], "there is no party 9"),
        (hansa.SGD(), PAIRS, "session needs a SessionOp; 'sgd' is not a SessionOp"),
    ],
)
def test_a_session_that_cannot_work_is_refused_before_parties_are_asked(op: Any, pairs: Any, reason: str) -> None:
    with pytest.raises(AlgorithmError, match=reason):
        played(op, OTHERS, pairs)


def test_a_session_takes_simulated_time() -> None:
    devices = Devices(bandwidth=Constant(1000.0))
    times = [played(Countdown(count), devices=devices)[1].history[0]["simulated_seconds"] for count in (2, 20)]
    assert times[1] > times[0] + 1
