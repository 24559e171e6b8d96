"""Messages between parties by way of an aggregator that cannot read them, and that may lie."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import Any

import pytest
import torch
from routed_parties import CPU, JobVault, RoutedParties, Say, Shout, flipped, sums

from hansa.core.ask import Ask
from hansa.core.op import Party, Reply
from hansa.core.relay import KEYS, REASONS, RECEIVE, SEND, UNLIKE, UNSEALED, UNTRUSTED
from hansa.holdings.gateway import SampleGateway
from hansa.net.party.workload import Workload
from hansa.plumbing import codec
from hansa.plumbing.errors import PartyError, RoundAborted
from hansa.secure import envelopes, key_agreement, session, signatures
from hansa.secure.byte_tensors import as_bytes, as_tensor
from hansa.secure.routing import ENVELOPE, RouteEnd, RouteKeys, RouteReceive, RouteSend, _advertised, split_memory
from hansa.vertical.psi_ops import PsiAnswer

NUMBERS = {0: [1.0, 2.0, 3.0], 1: [10.0, 20.0, 30.0], 2: [100.0, 200.0, 300.0]}
ALL = [(a, b) for a in range(3) for b in range(3) if a != b]
RING = [(0, 1), (1, 2), (2, 0)]


def test_every_receiver_gets_its_own_messages_and_nobody_elses() -> None:
    routed = RoutedParties(NUMBERS).route([(0, 1), (2, 1), (1, 0)])
    assert routed.arrived == ((0, 1), (1, 0), (2, 1))
    assert sums(routed) == {0: [10.0, 20.0, 30.0], 1: [103.0, 204.0, 305.0]}  # a message has its receiver's id added
    assert routed.refused == {}


def test_the_aggregator_sees_no_number_of_a_message() -> None:
    draws = torch.Generator().manual_seed(1)
    numbers = {k: torch.randn(3, generator=draws, dtype=torch.float64).tolist() for k in range(3)}
    parties = RoutedParties(numbers)
    parties.route(ALL)
    seen = b"".join(codec.encode(tree) for tree in parties.sent.values())
    seen += b"".join(codec.encode(r.tree()) for (_, op, _), r in parties.replied.items() if op != RECEIVE)
    for sender, receiver in ALL:
        for number in torch.tensor(numbers[sender], dtype=torch.float64) + receiver:
            assert as_bytes(number) not in seen
    assert as_bytes(parties.sent[0, RECEIVE, 0]["route"]["keys"][0]) in seen  # the search finds what is there


def test_a_broadcast_is_sealed_and_uploaded_once() -> None:
    op, parties = Shout(size=5000), RoutedParties({k: [float(k)] * 5000 for k in range(5)})
    parties.route([(0, to) for to in range(1, 5)], op)
    tensors = parties.replied[0, SEND, 0].tensors
    assert sum(t.numel() for t in tensors.values()) < 5000 * 8 + 4 * (ENVELOPE + 1) + 500
    assert all(parties.memories[to]["heard"].tolist() == [0] for to in range(1, 5))


def test_a_repeated_ask_gives_the_same_bytes_and_different_messages_never_share_a_key() -> None:
    one, other = RoutedParties(NUMBERS), RoutedParties(NUMBERS)
    one.route(ALL)
    other.route(ALL)
    for key, reply in one.replied.items():
        assert codec.encode(reply.tree()) == codec.encode(other.replied[key].tree())
    changed = RoutedParties({**NUMBERS, 0: [1.0, 2.0, 4.0]})
    changed.route(ALL)
    before, after = (p.replied[0, SEND, 0].tensors["sealed/1"] for p in (one, changed))
    # The streams differ where the plain numbers are equal: the key depends on the message.
    assert int((before == after).sum()) < 0.1 * before.numel()


@pytest.mark.parametrize("op", [Say(), Shout()], ids=lambda op: op.name)
@pytest.mark.parametrize("where", [KEYS, SEND, RECEIVE])
@pytest.mark.parametrize("gone", range(3))
def test_a_party_may_leave_before_any_ask(op: Say, where: str, gone: int) -> None:
    parties = RoutedParties(NUMBERS, {gone: where})
    routed = parties.route(ALL, op)
    sends = where == RECEIVE
    expected = [(a, b) for a, b in ALL if b != gone and (a != gone or sends)]
    assert routed.arrived == tuple(expected)
    for party in set(NUMBERS) - {gone}:
        assert parties.memories[party]["heard"].tolist() == [a for a, b in expected if b == party]
    assert "heard" not in parties.memories.get(gone, {})
    if where == RECEIVE and op.name == "test-route-say":
        assert parties.memories[gone]["said"].tolist() == [p for p in range(3) if p != gone]  # what `send` staged


def test_a_receiver_without_senders_gets_an_empty_inbox_and_a_party_without_routes_takes_part() -> None:
    parties = RoutedParties(NUMBERS, {0: SEND})
    assert parties.route([(0, 1), (1, 2)], parties=[0, 1, 2]).arrived == ((1, 2),)
    assert parties.memories[1]["heard"].tolist() == []
    parties = RoutedParties(NUMBERS)
    routed = parties.route([(0, 1)], parties=[0, 1, 2])
    assert sums(routed) == {1: [2.0, 3.0, 4.0], 2: [0.0, 0.0, 0.0]}
    assert (0, KEYS, 2) not in parties.sent
    assert parties.memories[2]["said"].tolist() == []


def test_a_route_without_senders_or_without_receivers_aborts_the_round() -> None:
    with pytest.raises(RoundAborted):
        RoutedParties(NUMBERS, dict.fromkeys(NUMBERS, KEYS)).route(ALL)
    with pytest.raises(RoundAborted, match="none of the 1 senders"):
        RoutedParties(NUMBERS, {0: KEYS}).route([(0, 1), (0, 2)])
    with pytest.raises(RoundAborted, match="none of the 1 receivers"):
        RoutedParties(NUMBERS, {0: KEYS}).route([(1, 0), (2, 0)])
    with pytest.raises(RoundAborted, match="none of the 2 receivers of a route sent"):
        RoutedParties(NUMBERS, {0: SEND, 1: SEND}).route([(1, 0), (2, 0), (0, 1)])
    with pytest.raises(RoundAborted, match="0 usable replies of 1"):
        RoutedParties(NUMBERS, {0: RECEIVE}).route([(1, 0), (2, 0)])


def test_the_secret_key_is_gone_when_the_route_is_over() -> None:
    parties = RoutedParties(NUMBERS)
    parties.route([(0, 1), (1, 2)])
    assert [name for memory in parties.memories.values() for name in memory if "secret" in name] == []


# --- an aggregator that lies ---


def refused(parties: RoutedParties, routes: Any = ALL, **options: Any) -> dict[tuple[int, int], str]:
    """The messages that receivers refuse; all the others arrive."""
    routed = parties.route(routes, **options)
    assert set(routed.arrived) | set(routed.refused) >= {pair for pair in routes if pair[1] in parties.memories}
    return dict(routed.refused)


def meddling(change: Any, op: str = RECEIVE, victim: int = 1) -> Any:
    """An aggregator that changes the route of one party's ask."""

    def meddle(step: Ask, party: int, payload: dict[str, Any]) -> dict[str, Any]:
        assert step.op is not None
        if step.op.name == op and party == victim:
            change(payload["route"])
        return payload

    return meddle


def swap_rows(name: str) -> Any:
    def change(route: dict[str, Any]) -> None:
        route[name] = route[name].flip(0)

    return change


def test_reordered_envelopes_are_refused_with_the_senders_names() -> None:
    parties = RoutedParties(NUMBERS, meddle=meddling(swap_rows("envelopes")))
    assert refused(parties) == {(0, 1): REASONS[UNSEALED], (2, 1): REASONS[UNSEALED]}
    assert parties.memories[1]["heard"].tolist() == []


def test_swapped_messages_are_refused() -> None:
    def change(route: dict[str, Any]) -> None:
        route["sealed"] = {"0": route["sealed"]["2"], "2": route["sealed"]["0"]}

    assert set(refused(RoutedParties(NUMBERS, meddle=meddling(change)))) == {(0, 1), (2, 1)}


def test_keys_of_the_wrong_party_are_refused() -> None:
    for name in ("keys", "signatures"):
        found = refused(RoutedParties(NUMBERS, meddle=meddling(swap_rows(name))))
        assert found == {(0, 1): REASONS[UNTRUSTED], (2, 1): REASONS[UNTRUSTED]}


@pytest.mark.parametrize("name", ["envelopes", "sealed"])
def test_a_changed_byte_is_refused_and_the_other_message_counts(name: str) -> None:
    def change(route: dict[str, Any]) -> None:
        if name == "sealed":
            route["sealed"]["0"] = flipped(route["sealed"]["0"])
        else:
            route["envelopes"] = flipped(route["envelopes"])  # in the first row, which is that of party 0

    parties = RoutedParties(NUMBERS, meddle=meddling(change))
    assert refused(parties) == {(0, 1): REASONS[UNSEALED]}
    assert parties.memories[1]["heard"].tolist() == [2]


def test_an_envelope_for_another_receiver_is_refused() -> None:
    first = RoutedParties(NUMBERS)
    first.route(ALL)
    stolen = first.sent[0, RECEIVE, 2]["route"]

    def change(route: dict[str, Any]) -> None:
        route["envelopes"] = route["envelopes"].clone()
        route["envelopes"][0] = stolen["envelopes"][0]  # that of party 0, for party 2
        route["sealed"]["0"] = stolen["sealed"]["0"]

    assert refused(RoutedParties(NUMBERS, meddle=meddling(change))) == {(0, 1): REASONS[UNSEALED]}


@pytest.mark.parametrize("other", [{"round": 1}, {"index": 1}], ids=["round", "ask"])
@pytest.mark.parametrize("keys", [False, True])
def test_a_message_of_another_round_or_ask_is_refused(other: dict[str, int], keys: bool) -> None:
    """The aggregator replays a message, with the key that it was sealed with, or with the sender's present key."""
    first = RoutedParties(NUMBERS)
    first.route(ALL)
    old = first.sent[0, RECEIVE, 1]["route"]

    def change(route: dict[str, Any]) -> None:
        for name in ("envelopes", "keys", "certificates", "signatures") if keys else ("envelopes",):
            route[name] = old[name]
        route["sealed"] = old["sealed"]

    again = RoutedParties(NUMBERS, meddle=meddling(change), memories=first.memories)
    reason = REASONS[UNTRUSTED if keys else UNSEALED]
    assert refused(again, **other) == {(0, 1): reason, (2, 1): reason}


def test_keys_that_were_signed_for_another_job_or_federation_are_refused() -> None:
    for scope in (("league", "job-2"), ("guild", "job-1")):
        other = RoutedParties(NUMBERS, scope=scope)
        other.route(ALL)
        old = other.replied[0, KEYS, 0].tensors

        def change(route: dict[str, Any], old: dict[str, Any] = old) -> None:
            for many, one in (("keys", "key"), ("signatures", "signature")):
                route[many][0] = old[one]

        parties = RoutedParties(NUMBERS, meddle=meddling(change))
        assert refused(parties) == {(0, 1): REASONS[UNTRUSTED]}


def test_the_aggregators_own_key_gets_no_message() -> None:
    """A man in the middle: the sender is shown a key of the aggregator, and refuses to seal for it."""
    secret = bytes(range(32))
    mine = as_tensor(key_agreement.public(secret))

    def change(route: dict[str, Any]) -> None:
        route["keys"][0] = mine

    parties = RoutedParties(NUMBERS, meddle=meddling(change, SEND, victim=0))  # the key of party 1
    routed = parties.route(ALL)
    assert (0, 1) not in routed.arrived and (0, 2) in routed.arrived
    assert routed.refused == {(1, 0): REASONS[UNTRUSTED]}  # named: the party whose key was not accepted
    assert not parties.replied[0, SEND, 0].tensors["sealed/1"].any()
    assert not parties.replied[0, SEND, 0].tensors["envelopes"][0].any()


def test_a_receiver_cannot_pass_on_another_message_as_the_senders() -> None:
    """Party 2 knows the key of the broadcast of party 0. With the aggregator's help it sends party 1 another one."""
    routes = [(0, 1), (0, 2)]
    honest = RoutedParties(NUMBERS)
    honest.route(routes, Shout())
    sealed = as_bytes(honest.sent[0, RECEIVE, 2]["route"]["sealed"]["0"])
    plain = codec.encode({"x": torch.tensor(NUMBERS[0], dtype=torch.float64), "from": torch.tensor(0)})
    key = session.resume(honest.here[0], "route", "round 0").secret("message", hashlib.sha256(plain).hexdigest())
    assert envelopes.unseal(key, sealed) == plain
    forged = codec.encode({"x": torch.full((3,), 666.0, dtype=torch.float64), "from": torch.tensor(0)})

    def change(route: dict[str, Any]) -> None:
        route["sealed"]["0"] = as_tensor(envelopes.seal(key, forged))

    parties = RoutedParties(NUMBERS, meddle=meddling(change))
    assert refused(parties, routes, op=Shout()) == {(0, 1): REASONS[UNSEALED]}
    assert parties.memories[2]["heard"].tolist() == [0]


def test_a_message_is_not_read_by_another_op() -> None:
    parties = RoutedParties(NUMBERS)
    answer = parties.answer

    def other_op(step: Ask) -> Any:
        assert step.op is not None
        if step.op.name == RECEIVE:
            step = replace(step, op=RouteReceive(Say2(3)))
        return answer(step)

    parties.answer = other_op  # type: ignore[method-assign]
    assert set(refused(parties)) == set(ALL)


def test_a_receiver_answers_for_one_set_of_messages_per_key() -> None:
    parties = RoutedParties(NUMBERS)
    before: dict[int, Any] = {}

    def meddle(step: Ask, party: int, payload: dict[str, Any]) -> dict[str, Any]:
        assert step.op is not None
        if step.op.name == RECEIVE:
            before[party] = dict(parties.memories[party])
        return payload

    parties.meddle = meddle
    parties.route(ALL)
    sent = parties.sent[0, RECEIVE, 1]
    receive = RouteReceive(Say())
    party = parties.here[1]
    reply, _ = receive.run(party, sent, before[1])  # the same again, as after a crash
    assert reply.tensors["sum"].tolist() == parties.replied[0, RECEIVE, 1].tensors["sum"].tolist()
    route = sent["route"]
    fewer = {name: route[name][:1] for name in ("senders", "keys", "certificates", "signatures", "envelopes")}
    with pytest.raises(PartyError, match="answered route-receive otherwise before"):
        receive.run(party, {"route": {**fewer, "sealed": {"0": route["sealed"]["0"]}}}, before[1])
    with pytest.raises(PartyError, match="knows nothing of this route"):
        receive.run(party, sent, parties.memories[1])  # its key is gone


def test_one_party_cannot_be_shown_as_two() -> None:
    def change(route: dict[str, Any]) -> None:
        for name in ("keys", "certificates", "signatures", "envelopes"):
            route[name][1] = route[name][0]
        route["sealed"]["2"] = route["sealed"]["0"]

    found = refused(RoutedParties(NUMBERS, meddle=meddling(change)))
    assert found == {(0, 1): REASONS[UNTRUSTED], (2, 1): REASONS[UNTRUSTED]}


def posing_as(name: str, party: int, row: int, round: int = 0) -> Any:
    """An aggregator that shows a key which the owner of another certificate signed for the number of a party."""
    key = key_agreement.public(b"k" * 32)
    vault = JobVault(("league", "job-1"), name)
    poser = Party(party, CPU, SampleGateway((torch.zeros(3), torch.zeros(3))), 0, round, b"", vault)
    certificate, signature = signatures.sign(poser, _advertised(poser, party, "round 0", key))

    def change(route: dict[str, Any]) -> None:
        shown = (("keys", key), ("certificates", certificate), ("signatures", signature))
        for many, data in shown:
            route[many][row] = as_tensor(data)

    return change


@pytest.mark.parametrize(("op", "blamed"), [(SEND, (0, 1)), (RECEIVE, (0, 1))])
def test_a_key_signed_by_a_certificate_outside_the_federation_is_refused(op: str, blamed: tuple[int, int]) -> None:
    parties = RoutedParties(NUMBERS, meddle=meddling(posing_as("eve", 0, 0), op))
    routed = parties.route(ALL)
    assert routed.refused == {blamed: REASONS[UNTRUSTED]}
    lost = (1, 0) if op == SEND else (0, 1)  # as a sender party 1 seals nothing; as a receiver it opens nothing
    assert set(routed.arrived) == set(ALL) - {lost}


def test_a_party_of_the_federation_cannot_take_the_number_of_another_beside_its_own() -> None:
    parties = RoutedParties(NUMBERS, meddle=meddling(posing_as("p2", 0, 0)))
    assert refused(parties) == {(0, 1): REASONS[UNTRUSTED], (2, 1): REASONS[UNTRUSTED]}


def test_a_message_for_one_party_is_not_sealed_for_another() -> None:
    """The aggregator shows party 0 the honest key of party 2 as that of party 1."""
    parties = RoutedParties(NUMBERS)

    def change(route: dict[str, Any]) -> None:
        key = parties.replied[0, KEYS, 2].tensors
        for many, one in (("keys", "key"), ("certificates", "certificate"), ("signatures", "signature")):
            route[many][0] = key[one]

    parties.meddle = meddling(change, SEND, victim=0)
    routed = parties.route([(0, 1), (2, 1)])
    assert routed.arrived == ((2, 1),) and routed.refused == {(1, 0): REASONS[UNTRUSTED]}


def test_a_number_belongs_to_one_party_for_the_whole_job() -> None:
    parties = RoutedParties(NUMBERS)
    parties.route([(0, 1)])
    parties.meddle = meddling(posing_as("p2", 0, 0, round=1))
    assert refused(parties, [(0, 1)], round=1) == {(0, 1): REASONS[UNTRUSTED]}


def test_a_party_has_one_number_for_the_whole_job() -> None:
    """Under several numbers one party would count as several, for all that is answered once per other party."""
    parties = RoutedParties(NUMBERS)
    parties.route([(2, 1)])
    parties.meddle = meddling(posing_as("p2", 0, 0, round=1))
    assert refused(parties, [(0, 1)], round=1) == {(0, 1): REASONS[UNTRUSTED]}


# --- a sender that lies ---


@pytest.mark.parametrize(
    "message",
    [
        {"x": torch.full((3,), float("nan"), dtype=torch.float64), "from": torch.tensor(0)},
        {"x": torch.full((3,), float("inf"), dtype=torch.float64), "from": torch.tensor(0)},
        {"x": torch.zeros(4, dtype=torch.float64), "from": torch.tensor(0)},
        {"x": torch.zeros(3), "from": torch.tensor(0)},
        {"x": torch.zeros(3, dtype=torch.float64)},
        {"x": [1.0, 2.0, 3.0], "from": torch.tensor(0)},
        [torch.zeros(3, dtype=torch.float64)],
        b"no tensors at all",
        b"",
    ],
    ids=str,
)
def test_a_message_that_is_not_as_announced_is_refused_with_its_senders_name(message: Any) -> None:
    """Party 0 seals something else for party 1, correctly."""
    data = message if isinstance(message, bytes) else codec.encode(message)
    parties = RoutedParties(NUMBERS)
    liar = parties.here[0]

    def forge(step: Ask, party: int, reply: Reply) -> Reply:
        assert step.op is not None
        if step.op.name == SEND and party == 0:
            session = RouteEnd.of(liar, Say(), split_memory(parties.memories[0])[1])
            key = session.trusted_keys(step.payload_of(0)["route"], [1, 2])[1]
            sealed = envelopes.seal(b"k" * 32, data)
            reply.tensors["envelopes"][0] = as_tensor(session.envelope(1, key, b"k" * 32, sealed))
            reply.tensors["sealed/1"] = as_tensor(sealed)
        return reply

    parties.forge = forge
    honest = RoutedParties(NUMBERS)
    honest.route(ALL)
    fits = len(data) + envelopes.OVERHEAD == honest.replied[0, SEND, 0].tensors["sealed/1"].numel()
    if not fits:  # the aggregator itself refuses another size: the sender takes no further part
        assert parties.route(ALL).arrived == ((1, 2), (2, 1))
        return
    assert refused(parties) == {(0, 1): REASONS[UNLIKE]}
    assert parties.memories[1]["heard"].tolist() == [2]


def test_an_honest_sender_declines_instead_of_sending_what_is_not_finite() -> None:
    parties = RoutedParties({**NUMBERS, 0: [1.0, float("nan"), 3.0]})
    assert parties.route(ALL).arrived == ((1, 2), (2, 1))
    assert "x has values that are not finite" in parties.reasons[0]


def test_a_receiver_accepts_only_what_its_own_payload_announces() -> None:
    """The aggregator tells the sender of another size than the receiver."""

    class Announced(Say):
        name = "test-announced"

        def expects_message(self, payload: Any, sender: int, receiver: int) -> Any:
            return {**super().expects(payload), "x": ((payload.get("size", 3),), torch.float64)}

    parties = RoutedParties(NUMBERS)

    def meddle(step: Ask, party: int, payload: dict[str, Any]) -> dict[str, Any]:
        return {**payload, "size": 4} if step.op is not None and step.op.name == RECEIVE else payload

    parties.meddle = meddle
    assert set(refused(parties, op=Announced())) == set(ALL)


# --- malformed asks ---

IDS = torch.tensor([1, 2])
GOOD = {"sender": 0, "receivers": IDS, "receives": True, "keys": torch.zeros(2, 32, dtype=torch.uint8),
        "certificates": torch.zeros(2, signatures.CERTIFICATE, dtype=torch.uint8),
        "signatures": torch.zeros(2, 64, dtype=torch.uint8)}  # fmt: skip


@pytest.mark.parametrize(
    "route",
    [None, 3, {}, {**GOOD, "receivers": [1, 2]}, {**GOOD, "receivers": torch.tensor([2, 1])},
     {**GOOD, "receivers": torch.tensor([-1, 1])}, {**GOOD, "keys": None}, {**GOOD, "keys": torch.zeros(2, 31)},
     {**GOOD, "signatures": torch.zeros(1, 64, dtype=torch.uint8)}, {**GOOD, "sender": 1}, {**GOOD, "sender": None}],
)  # fmt: skip
def test_a_malformed_ask_is_declined(route: Any) -> None:
    party = Party(0, CPU, SampleGateway((torch.zeros(3), torch.zeros(3))), 0, 0, b"s", JobVault(("league", "job")))
    _, memory = RouteKeys().run(party, {"session": "round 0"}, {})
    with pytest.raises(PartyError):
        RouteSend(Say()).run(party, {"route": route}, memory)
    received = {**route, "senders": route.get("receivers")} if isinstance(route, dict) else route
    with pytest.raises(PartyError):
        RouteReceive(Say()).run(party, {"route": received}, memory)
    for name in (None, "", "x" * 101, 3):
        with pytest.raises(PartyError, match="session"):
            RouteKeys().run(party, {"session": name}, {})


def test_more_peers_than_the_policy_allows_and_messages_larger_than_the_memory_are_refused() -> None:
    party = Party(0, CPU, SampleGateway((torch.zeros(3), torch.zeros(3))), 0)
    for op in (RouteSend(Say()), RouteReceive(Say())):
        route = {**GOOD, "senders": IDS}
        assert Workload(participants=2).refuses(op, party, {"route": route}) is None
        assert "participants" in str(Workload(participants=1).refuses(op, party, {"route": route}))
    huge = RouteSend(Say(size=2**50))
    assert "limits.memory" in str(Workload().refuses(huge, party, {"route": GOOD}))


@pytest.mark.parametrize("half", [RouteSend, RouteReceive])
def test_both_halves_of_a_route_demand_what_their_op_demands(half: type[RouteSend] | type[RouteReceive]) -> None:
    payload = {"route": {**GOOD, "senders": IDS}, "sizes": {"0": 3, "1": 7}}
    assert half(PsiAnswer()).demands(3, payload) == {"participants": len(IDS), "people": 7}


class Say2(Say):
    """The same messages under another name."""

    name = "test-route-say-2"
