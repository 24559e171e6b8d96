"""The verb `route`: what the federation refuses, and what a simulation delivers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from postal import acted

import hansa
from hansa import Federation
from hansa.core.ask import Routed
from hansa.core.mixing import Mixing, MixingRows, mixing_shares
from hansa.core.op import Memory, Party, Payload, Reply, Shape
from hansa.core.quantities import AnyCount
from hansa.core.registry import register
from hansa.core.route_op import Message, RouteOp
from hansa.core.shapes import UpTo
from hansa.plumbing.errors import AlgorithmError, PartyError


@register("test-letters")
@dataclass(frozen=True)
class Letters(RouteOp):
    """Send each receiver a number that names both; remember and report what was heard."""

    size: AnyCount = 2
    replies: ClassVar[bool] = True
    measures: ClassVar[frozenset[str] | None] = frozenset({"heard"})

    def send(self, party: Party, payload: Payload, receivers: tuple[int, ...],
             memory: Memory) -> tuple[Mapping[int, Message], Memory]:  # fmt: skip
        if party.id in payload.get("declines", ()):
            raise PartyError("it does not send today")
        size = payload.get("own", self.size)
        value = float("nan") if party.id == payload.get("broken") else 1.0
        messages = {to: {"x": torch.full((size,), value * (100 * party.id + to))} for to in receivers}
        if payload.get("forgets"):
            messages.pop(receivers[0])
        return messages, {**memory, "sent": memory.get("sent", torch.zeros(())) + 1}

    def receive(self, party: Party, payload: Payload, inbox: Mapping[int, Message],
                memory: Memory) -> tuple[Reply | None, Memory]:  # fmt: skip
        if party.id in payload.get("deaf", ()):
            raise PartyError("it does not listen today")
        for sender, message in inbox.items():
            assert message["x"].tolist() == [100 * sender + party.id] * self.size
        memory["heard"] = torch.tensor([*inbox])
        return Reply({"count": torch.tensor(float(len(inbox)))}, metrics={"heard": len(inbox)}), memory

    def expects(self, payload: Payload) -> dict[str, Shape]:
        return {"x": ((payload.get("own", self.size),), torch.float32)}

    def expects_reply(self, payload: Payload) -> dict[str, Shape]:
        return {"count": ((), torch.float32)}


@register("test-quiet-letters")
@dataclass(frozen=True)
class QuietLetters(Letters):
    """The same, without replies."""

    replies: ClassVar[bool] = False


@register("test-open-letters")
@dataclass(frozen=True)
class OpenLetters(Letters):
    """The same, with messages of a size that the sender chooses."""

    def expects(self, payload: Payload) -> dict[str, Shape]:
        return {"x": ((UpTo(9),), torch.float32)}


ROUTES = [(0, 1), (2, 1), (1, 3), (0, 3)]


def test_messages_go_where_the_routes_say_and_receivers_may_reply() -> None:
    (routed,), result = acted(lambda fed: fed.route(Letters(), {}, ROUTES))
    assert routed.arrived == tuple(sorted(ROUTES))
    assert routed.replies.parties == (1, 3) and routed.replies.rows("count").tolist() == [2.0, 2.0]
    assert {p: m["heard"].tolist() for p, m in result.memories.items() if "heard" in m} == {1: [0, 2], 3: [0, 1]}
    line = result.history[0]
    assert (line["asked"], line["replies"], line["heard"]) == (5, 5, 2.0)  # three senders, two replies of receivers


def test_without_replies_only_senders_count() -> None:
    (routed,), result = acted(lambda fed: fed.route(QuietLetters(), {}, ROUTES))
    assert routed.arrived == tuple(sorted(ROUTES)) and routed.replies.parties == ()
    assert (result.history[0]["asked"], result.history[0]["replies"]) == (3, 3)
    assert "heard" not in result.history[0]


def test_a_sender_that_declines_is_missing_in_the_inboxes_and_does_not_receive() -> None:
    (routed,), result = acted(lambda fed: fed.route(Letters(), {"declines": [1, 2]}, ROUTES))
    assert routed.arrived == ((0, 3),)  # party 1 should send and does not, so it takes no further part
    assert set(result.memories) == {0, 3}
    assert result.history[0]["missing"] == dict.fromkeys("12", "it does not send today")


def test_a_receiver_that_declines_keeps_the_memory_of_its_sending() -> None:
    (routed,), result = acted(lambda fed: fed.route(Letters(), {"deaf": [1]}, ROUTES))
    assert routed.arrived == ((0, 3), (1, 3))
    assert set(result.memories[1]) == {"sent"}
    assert result.history[0]["missing"] == {"1": "it does not listen today"}


def test_a_message_with_numbers_that_are_not_finite_goes_nowhere() -> None:
    (routed,), result = acted(lambda fed: fed.route(Letters(), {"broken": 0}, ROUTES))
    assert routed.arrived == ((1, 3), (2, 1))
    assert "x has values that are not finite" in result.history[0]["rejected"]["0"]


def test_a_receiver_checks_messages_by_its_own_payload() -> None:
    """Party 0 is told to send three numbers; its receivers expect two."""
    (routed,), result = acted(lambda fed: fed.route(Letters(), {}, ROUTES, each={0: {"own": 3}}))
    assert routed.arrived == ((1, 3), (2, 1))
    assert set(routed.refused) == {(0, 1), (0, 3)}
    assert "refused its message: its tensors are not those" in result.history[0]["rejected"]["0"]


def test_memory_is_committed_with_the_round() -> None:
    async def fails(fed: Federation) -> Routed:
        await fed.route(Letters(), {}, ROUTES)
        return await fed.route(Letters(), {"declines": [0, 1, 2]}, ROUTES)

    _, result = acted(fails)
    assert "empty" in result.history[0] and not result.memories


def test_two_routes_of_a_round_build_on_each_other() -> None:
    async def twice(fed: Federation) -> Routed:
        await fed.route(Letters(), {}, ROUTES)
        return await fed.route(Letters(), {}, ROUTES)

    _, result = acted(twice)
    assert [float(result.memories[party]["sent"]) for party in (0, 1, 2)] == [2.0, 2.0, 2.0]


def test_an_op_must_have_a_message_for_each_receiver() -> None:
    with pytest.raises(AlgorithmError, match=r"has messages for the parties \[3\], expected \[1, 3\]"):
        acted(lambda fed: fed.route(Letters(), {"forgets": True}, [(0, 1), (0, 3)]))


@pytest.mark.parametrize(
    ("routes", "reason"),
    [
        ([(0, 4)], "the route 0 -> 4: there is no party 4 in this job"),
        ([(-1, 2)], "the route -1 -> 2: there is no party -1 in this job"),
        ([(2, 2)], "the route 2 -> 2: a party cannot send to itself"),
        ([(0, 1), (0, 1)], "routes must be distinct"),
    ],
)
def test_a_route_outside_the_job_is_refused(routes: list[tuple[int, int]], reason: str) -> None:
    with pytest.raises(AlgorithmError, match=reason):
        acted(lambda fed: fed.route(Letters(), {}, routes))


def test_routes_need_a_route_op_and_all_their_parties() -> None:
    with pytest.raises(AlgorithmError, match="route needs a RouteOp; 'sgd' is not a RouteOp"):
        acted(lambda fed: fed.route(hansa.SGD(), {}, ROUTES))
    with pytest.raises(AlgorithmError, match=r"the routes name the parties \[3\], which `parties` leaves out"):
        acted(lambda fed: fed.route(Letters(), {}, ROUTES, parties=[0, 1, 2]))
    with pytest.raises(AlgorithmError, match="cannot have an entry 'route'"):
        acted(lambda fed: fed.route(Letters(), {}, ROUTES, each={0: {"route": 1}}))
    with pytest.raises(AlgorithmError, match="'x' of the messages of 'test-open-letters' has an open dimension"):
        acted(lambda fed: fed.route(OpenLetters(), {}, ROUTES))
    with pytest.raises(AlgorithmError, match=r"the mixing matrix is \(2, 2\), expected \(4, 4\)"):
        acted(lambda fed: fed.exchange(Letters(), {}, mixing=torch.eye(2)))


def test_the_bytes_of_a_route_grow_with_its_messages() -> None:
    def traffic(size: int, routes: list[tuple[int, int]]) -> tuple[int, int]:
        line = acted(lambda fed: fed.route(QuietLetters(size), {}, routes))[1].history[0]
        return line["bytes_up"], line["bytes_down"]

    small, large, more = traffic(10, ROUTES), traffic(1010, ROUTES), traffic(10, [*ROUTES, (3, 0)])
    assert large[0] - small[0] == pytest.approx(4 * 1000 * 4, abs=60)  # four messages, float32, and digits in headers
    assert large[1] - small[1] == pytest.approx(4 * 1000 * 4, abs=60)
    assert more[0] > small[0] + 40 + 92  # one more message, and one more envelope
    assert traffic(10, [*ROUTES, (2, 0)])[1] > small[1] + 2 * 2048  # each of the two needs the other's certificate


def row(*weights: float, party: int = 0) -> dict[str, Any]:
    """A party's row of mixing weights, as its payload has them."""
    matrix = torch.zeros(len(weights), len(weights), dtype=torch.float64)
    matrix[party] = torch.tensor(weights)
    return dict(MixingRows(Mixing.of(matrix))[party])


def test_the_weight_of_a_missing_neighbour_stays_with_the_receiver() -> None:
    payload = row(0.5, 0.25, 0.25)
    assert mixing_shares(payload, 0, [1, 2]) == {0: 0.5, 1: 0.25, 2: 0.25}
    assert mixing_shares(payload, 0, [2]) == {0: 0.75, 2: 0.25}
    assert mixing_shares(payload, 0, []) == {0: 1.0}
    assert mixing_shares(row(0.5, 0.0, 0.5, party=1), 1, [0, 2]) == {0: 0.5, 1: 0.0, 2: 0.5}
    for own, senders in ((3, []), (0, [3]), (0, [-1])):
        with pytest.raises(PartyError, match="do not cover the parties"):
            mixing_shares(payload, own, senders)


@pytest.mark.parametrize(
    ("mixing", "reason"),
    [(None, "has no mixing weights"), ({"ids": torch.tensor([0])}, "has no mixing weights"),
     ({"ids": torch.tensor([0, 1]), "weights": torch.ones(1).double()}, "has no mixing weights"),
     ({"ids": torch.tensor([0.0]), "weights": torch.ones(1).double()}, "are not whole numbers"),
     ({"ids": torch.tensor([0, 0]), "weights": torch.ones(2).double() / 2}, "name a party twice"),
     ({"ids": torch.tensor([0, 1]), "weights": torch.tensor([2.0, -1.0]).double()}, "or are negative"),
     ({"ids": torch.tensor([0, 1]), "weights": torch.tensor([1.0, torch.nan]).double()}, "or are negative"),
     ({"ids": torch.tensor([0, 1]), "weights": torch.ones(2).double()}, "have the sum 2.0, expected 1")],
)  # fmt: skip
def test_a_party_refuses_mixing_weights_that_are_none(mixing: Any, reason: str) -> None:
    with pytest.raises(PartyError, match=reason):
        mixing_shares({"mixing": mixing}, 0, [])
