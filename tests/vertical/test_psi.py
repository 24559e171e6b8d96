"""Private set intersection: what parties find, what they are told, and what liars are refused."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
import pytest
import torch
from columns import OnceVault
from torch import Tensor

import hansa
from hansa import Federation, register
from hansa.core.op import Memory, Party, Payload
from hansa.core.route_op import Message
from hansa.core.vault import Vault
from hansa.holdings.gateway import SampleGateway, TableRows
from hansa.numerics.objective import Objective
from hansa.plumbing import codec
from hansa.plumbing.errors import ConfigError, DataError, PartyError
from hansa.secure.byte_tensors import as_bytes, split
from hansa.vertical import PSI, aligned, counted, psi_group
from hansa.vertical.psi_ops import PsiAlign, PsiAnswer, PsiAsk, PsiCount, PsiSize, accept, people_of

pytest.importorskip("rbcl")
OBJECTIVE = Objective(None, "cross_entropy", 2)
Sets = Sequence[Sequence[Any]]


def table(ids: Sequence[Any], labelled: bool) -> tuple[Tensor, Tensor | None]:
    return torch.arange(2.0 * len(ids)).view(-1, 2), torch.arange(len(ids)) % 2 if labelled else None


def task(sets: Sets, tests: Sets | None = None, holder: int = 0) -> hansa.Task:
    held = None if tests is None else [table(ids, k == holder) for k, ids in enumerate(tests)]
    pairs = [table(ids, k == holder) for k, ids in enumerate(sets)]
    return hansa.Task(None, "cross_entropy", pairs, party_tests=held, classes=2, ids=sets, test_ids=tests)


@register("test-psi-least")
@dataclass(frozen=True)
class Least(PSI):
    """Match people, and need some."""

    async def common(self, fed: Federation, leader: int, members: list[int]) -> dict[str, int]:
        return {"common": (await aligned(fed, leader)).train}


@register("test-psi-pairs")
@dataclass(frozen=True)
class Pairs(PSI):
    """Count the people that the leader has in common with each other party."""

    async def common(self, fed: Federation, leader: int, members: list[int]) -> dict[str, int]:
        return {str(party): count for party, count in (await counted(fed, leader)).items()}


def matched(sets: Sets, memories: Mapping[int, Memory], name: str = "rows") -> list[list[Any]]:
    """The common people of each party, in its order."""
    return [[ids[row] for row in memories[k][name].tolist()] for k, ids in enumerate(sets)]


def drawn(parties: int, seed: int) -> list[list[int]]:
    draw = np.random.default_rng(seed)
    return [draw.permutation(40)[: draw.integers(15, 36)].tolist() for _ in range(parties)]


@pytest.mark.parametrize("parties", [2, 3, 4])
@pytest.mark.parametrize("holder", [0, 1])
def test_the_rows_are_the_intersection_in_one_order(parties: int, holder: int) -> None:
    sets, tests = drawn(parties, parties), [[1000 + i for i in ids] for ids in drawn(parties, 50 + parties)]
    result = hansa.simulate(PSI(), task(sets, tests, holder), rounds=3)
    for own, name, metric in ((sets, "rows", "common"), (tests, "test_rows", "common_test")):
        people = matched(own, result.memories, name)
        assert set(people[0]) == set.intersection(*map(set, own)) and len(people[0]) == len(set(people[0]))
        assert all(other == people[0] for other in people[1:])
        assert result.history[0][metric] == len(people[0]) > 0
    assert all(
        set(memory) == {"rows", "test_rows", "psi.over"} for memory in result.memories.values()
    )  # secrets are forgotten
    assert len(result.history) == 1


def test_a_person_in_training_rows_here_and_test_rows_there_is_not_common() -> None:
    result = hansa.simulate(PSI(), task([[1, 2, 3], [3, 4, 5]], [[4, 9], [2, 9]]), rounds=1)
    assert (result.history[0]["common"], result.history[0]["common_test"]) == (1.0, 1.0)


def test_the_order_depends_on_seed_and_people_alone() -> None:
    sets = drawn(3, 7)

    def order(sets: Sets, seed: int) -> list[Any]:
        return matched(sets, hansa.simulate(PSI(), task(sets), rounds=1, seed=seed).memories)[0]

    first = order(sets, 1)
    assert order([sorted(ids) for ids in sets], 1) == first != sorted(first)
    assert order(sets, 2) != first and sorted(order(sets, 2)) == sorted(first)


def test_ids_that_differ_in_case_white_space_or_composition_are_the_same_person() -> None:
    sets = [["  Zoë  Smith", "BOB", "x1"], ["zoe\u0308 smith ", "bob", "x2"]]
    result = hansa.simulate(PSI(), task(sets), rounds=1)
    assert sorted(matched(sets, result.memories)[0]) == ["  Zoë  Smith", "BOB"]
    with pytest.raises(DataError, match=r"ids\[0\]: two rows have the same id.*case and white space do not count"):
        hansa.simulate(PSI(), task([["Ann", "ann "], ["ann", "bob"]]), rounds=1)


def test_no_common_person_is_a_result_and_one_sentence_for_a_method_that_needs_some() -> None:
    sets = [[1, 2], [3, 4], [5]]
    result = hansa.simulate(PSI(), task(sets), rounds=1)
    assert result.history[0]["common"] == 0.0 and matched(sets, result.memories) == [[], [], []]
    with pytest.raises(DataError, match="the parties have 0 people in common in their training rows, and the method"):
        hansa.simulate(Least(), task(sets), rounds=1)


def test_counts_are_those_of_pairs_and_nobody_keeps_anything() -> None:
    sets = drawn(3, 3)
    result = hansa.simulate(Pairs(), task(sets), rounds=1)
    assert result.state.slots["people"] == {str(k): len(set(sets[0]) & set(sets[k])) for k in (1, 2)}
    assert all(set(memory) == {"psi.over"} for memory in result.memories.values())
    two = hansa.simulate(PSI(count=True), task(sets[:2]), rounds=2)
    assert two.history[0]["common"] == len(set(sets[0]) & set(sets[1]))
    assert all(set(memory) == {"psi.over"} for memory in two.memories.values())


def test_a_count_is_for_two_parties() -> None:
    with pytest.raises(ConfigError, match="count = true is for two parties, and the job has 3"):
        hansa.simulate(PSI(count=True), task(drawn(3, 1)), rounds=1)


def test_the_library_is_named_where_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    psi_group.sodium.cache_clear()
    monkeypatch.setattr(psi_group.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"needs rbcl; pip install 'hansa\[vertical\]'"):
        hansa.simulate(PSI(), task([[1], [1]]), rounds=1)


# What parties send and learn


class Transcript:
    """All messages between parties, and what the leader remembers after each answer."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.messages: list[tuple[str, int, int, Message]] = []
        self.memories: list[tuple[int, Memory]] = []
        self.sizes: list[tuple[str, int, set[str]]] = []  # the parties whose numbers of people a receiver is told
        for op in (PsiAsk, PsiAnswer, PsiCount, PsiAlign):
            self._watch(op, monkeypatch)

    def _watch(self, op: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        plain = op.receive

        def receive(own: Any, party: Party, payload: Payload, inbox: Mapping[int, Message], memory: Memory) -> Any:
            self.sizes.append((own.name, party.id, set(payload["sizes"])))
            self.messages += [(own.name, sender, party.id, message) for sender, message in inbox.items()]
            reply, new = plain(own, party, payload, inbox, memory)
            self.memories.append((party.id, new))
            return reply, new

        monkeypatch.setattr(op, "receive", receive)

    def points(self) -> list[bytes]:
        points = ("points", "asked", "own")
        tensors = [tensor for *_, message in self.messages for name, tensor in message.items() if name in points]
        return [point for tensor in tensors for point in split(as_bytes(tensor), 32)]


@pytest.mark.parametrize("algorithm", [PSI(), Pairs()])
def test_messages_have_no_id_and_no_point_that_can_be_guessed(monkeypatch: pytest.MonkeyPatch, algorithm: PSI) -> None:
    sets = [[f"person-{number:04}" for number in ids] for ids in drawn(3, 5)]
    transcript, again = Transcript(monkeypatch), Transcript(monkeypatch)
    hansa.simulate(algorithm, task(sets), rounds=1)
    first, points = list(transcript.messages), transcript.points()
    assert len(points) == len(set(points)) > 3 * 40  # no point is sent twice: every message has fresh secrets
    for *_, message in first:
        assert b"person" not in codec.encode(dict(message))
    everybody = people_of(party(0, sorted(set().union(*sets))), {"sizes": {"0": len(set().union(*sets))}}, {})
    assert not set(points) & set(split(as_bytes(everybody), 32))  # hashes without a secret
    again.messages.clear()
    hansa.simulate(algorithm, task(sets), rounds=1, seed=1)
    assert not set(points) & set(again.points())


def test_the_leader_learns_nothing_more_about_people_whom_an_earlier_party_lacks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sets, transcript = [[1, 2, 3, 4, 5], [1, 2, 9], [2, 3, 4, 5]], Transcript(monkeypatch)
    hansa.simulate(PSI(), task(sets), rounds=1)
    leader = [memory for number, memory in transcript.memories if number == 0][-1]
    assert (leader["psi.at.1"] >= 0).tolist() == [True, True, False, False, False]
    assert (leader["psi.at.2"] >= 0).tolist() == [False, True, False, False, False]  # 3, 4, 5 were decoys
    asked = [message["points"] for name, _, _, message in transcript.messages if name == "psi-ask"]
    assert [len(points) for points in asked] == [5, 5]  # party 2 cannot count the people common to 0 and 1
    assert {frozenset(told) for name, number, told in transcript.sizes if number == 2} == {
        frozenset({"0", "2"}), frozenset({"2"})}  # nothing about party 1  # fmt: skip


# Liars


def party(number: int, ids: Sequence[Any]) -> Party:
    x, y = table(ids, True)
    rows = TableRows(x, y, np.array([str(text) for text in ids], dtype=np.str_))
    return Party(number, OBJECTIVE, SampleGateway(rows), 0)


PAYLOAD = {"sizes": {"0": 3, "1": 4}}


def asked() -> tuple[Party, Party, Memory, Memory]:
    """A leader that has asked, and a party that was asked, with their memories."""
    leader, other = party(0, [1, 2, 3]), party(1, [2, 3, 4, 5])
    messages, memory = PsiAsk().send(leader, PAYLOAD, (1,), {})
    _, own = PsiAsk().receive(other, PAYLOAD, {0: messages[1]}, {})
    return leader, other, memory, own


def test_two_parties_match_without_a_federation() -> None:
    leader, other, memory, own = asked()
    answer, own = PsiAnswer().send(other, PAYLOAD, (0,), own)
    _, memory = PsiAnswer().receive(leader, PAYLOAD, {1: answer[0]}, memory)
    masks, memory = PsiAlign().send(leader, PAYLOAD, (1,), memory)
    reply, own = PsiAlign().receive(other, PAYLOAD, {0: masks[1]}, own)
    assert reply is not None and int(reply.tensors["train"]) == 2
    assert sorted(memory["rows"].tolist()) == [1, 2] and sorted(own["rows"].tolist()) == [0, 1]


def invalid(points: Tensor, how: str) -> Tensor:
    points = points.clone()
    if how == "twice":
        points[1] = points[0]
    elif how == "neutral":
        points[0] = 0
    elif how == "not canonical":
        points[0] = torch.tensor([*[255] * 31, 127], dtype=torch.uint8)
    elif how == "negative":
        points[0] = torch.tensor([1, *[0] * 31], dtype=torch.uint8)
    return points


REASONS = {
    "twice": "has a point twice", "neutral": "not a valid element of ristretto255",
    "not canonical": "not a valid element of ristretto255", "negative": "not a valid element of ristretto255",
}  # fmt: skip


@pytest.mark.parametrize("how", REASONS)
def test_invalid_points_are_refused(how: str) -> None:
    leader, other, memory, own = asked()
    lie = {**own, "psi.asked": invalid(own["psi.asked"], how)}
    if how == "twice":
        with pytest.raises(PartyError, match=r"the message of party 0 has a point twice"):
            PsiAsk().receive(other, PAYLOAD, {0: {"points": lie["psi.asked"], "commitments": own["psi.committed"]}}, {})
    else:
        with pytest.raises(PartyError, match=REASONS[how]):
            PsiAnswer().send(other, PAYLOAD, (0,), lie)
    answer = PsiAnswer().send(other, PAYLOAD, (0,), own)[0][0]
    for name in ("asked", "own") if how == "twice" else ("asked",):  # an invalid point of its own matches nobody
        with pytest.raises(PartyError, match=REASONS[how]):
            PsiAnswer().receive(leader, PAYLOAD, {1: {**answer, name: invalid(answer[name], how)}}, memory)


def test_an_answer_goes_to_the_party_that_asked_and_comes_from_the_party_that_was_asked() -> None:
    leader, other, memory, own = asked()
    with pytest.raises(PartyError, match="party 2 asks for the answer to another party"):
        PsiAnswer().send(other, PAYLOAD, (2,), own)
    answer, own = PsiAnswer().send(other, PAYLOAD, (0,), own)
    with pytest.raises(PartyError, match="party 2 answers in place of another party"):
        PsiAnswer().receive(leader, PAYLOAD, {2: answer[0]}, memory)
    with pytest.raises(PartyError, match="party 2 names the common people in place of another party"):
        PsiAlign().receive(other, PAYLOAD, {2: {}}, own)
    with pytest.raises(PartyError, match="matched with one party at a time, not with 2"):
        PsiAsk().receive(other, PAYLOAD, {0: answer[0], 2: answer[0]}, {})


def test_a_party_answers_once_per_reading_of_its_ids() -> None:
    _, other, _, own = asked()
    _, own = PsiAnswer().send(other, PAYLOAD, (0,), own)
    with pytest.raises(PartyError, match="knows nothing of this matching"):
        PsiAnswer().send(other, PAYLOAD, (0,), own)
    with pytest.raises(PartyError, match="knows nothing of this matching"):
        PsiAlign().send(other, PAYLOAD, (0,), {})


@pytest.mark.parametrize("op", [PsiAnswer(), PsiCount()])
def test_a_leader_compares_its_people_with_those_of_a_party_once_per_reading_of_its_ids(op: PsiAnswer) -> None:
    """The aggregator names the memory that an ask builds on. With an earlier one, a party that conspires with it could
    bring other people again and again, while the leader's ids are read once."""
    leader, other, first, own = asked()
    leader.vault = OnceVault()
    liar = party(1, [6, 7, 8, 1])
    answers = [op.send(each, PAYLOAD, (0,), own)[0][0] for each in (other, liar)]
    for _ in range(2):
        op.receive(leader, PAYLOAD, {1: answers[0]}, first)  # the same answer again, after a crash
    with pytest.raises(PartyError, match="answers it only once"):
        op.receive(leader, PAYLOAD, {1: answers[1]}, first)
    leader.round = 1
    _, second = PsiAsk().send(leader, PAYLOAD, (1,), first)  # without a new reading
    with pytest.raises(PartyError, match="answers it only once"):
        op.receive(leader, PAYLOAD, {1: answers[1]}, second)
    _, renewed = PsiAsk().send(leader, PAYLOAD, (1,), {})
    op.receive(leader, PAYLOAD, {1: answers[1]}, renewed)


# A leader that lies about common people


def answers(ids: Sequence[Any], *sets: Sequence[Any], vault: Vault | None = None,
            round: int = 0) -> tuple[Payload, Party, Memory, list[tuple[Party, Memory]]]:  # fmt: skip
    """A leader with these ids that has the answers of other parties, and these parties, with their memories."""
    payload: Payload = {"sizes": {str(number): len(each) for number, each in enumerate((ids, *sets))}}
    leader, memory, others = party(0, ids), Memory(), list[tuple[Party, Memory]]()
    for number, own in enumerate(sets, 1):
        other = party(number, own)
        other.round, other.vault = round, vault or other.vault
        messages, memory = PsiAsk().send(leader, payload, (number,), memory)
        _, kept = PsiAsk().receive(other, payload, {0: messages[number]}, {})
        answer, kept = PsiAnswer().send(other, payload, (0,), kept)
        _, memory = PsiAnswer().receive(leader, payload, {number: answer[0]}, memory)
        others.append((other, kept))
    return payload, leader, memory, others


def only_these(memory: Memory, ids: Sequence[Any], chosen: Sequence[Any]) -> Memory:
    """The memory of a leader that leaves out common people, or adds people to them."""
    return {**memory, "psi.common": torch.tensor([person in chosen for person in ids])}


def claims(payload: Payload, leader: Party, memory: Memory, others: list[tuple[Party, Memory]],
           tamper: Any = dict) -> list[list[int]]:  # fmt: skip
    """The rows that the other parties keep after the leader's claims."""
    messages, _ = PsiAlign().send(leader, payload, tuple(other.id for other, _ in others), memory)
    kept = [PsiAlign().receive(other, payload, {0: tamper(messages[other.id])}, own)[1] for other, own in others]
    return [sorted(memory["rows"].tolist()) for memory in kept]


def test_a_leader_proves_that_it_named_common_people_before() -> None:
    ids, sets = [1, 2, 3, 4, 5], [[9, 5, 2, 3], [3, 8, 5, 7, 6]]
    assert claims(*answers(ids, *sets)) == [[1, 3], [0, 2]]  # 3 and 5


def moved(places: Tensor, number: int) -> Tensor:
    """The places with another number at the first person that is claimed."""
    places = places.clone()
    places[(places >= 0).nonzero()[0]] = number
    return places


LIES = {
    "a person whom it does not have": lambda own: {**own, "places": own["places"].masked_fill(own["places"] < 0, 0)},
    "another person": lambda own: {name: tensor.roll(1, 0) for name, tensor in own.items()},
    "by another commitment": lambda own: {**own, "places": moved(own["places"], int(own["places"].max() + 1) % 3)},
    "by no commitment": lambda own: {**own, "places": moved(own["places"], 3)},
    "by a negative number": lambda own: {**own, "places": moved(own["places"], -2)},
    "without the nonces": lambda own: {**own, "nonces": torch.zeros_like(own["nonces"])},
}


@pytest.mark.parametrize("lie", LIES)
def test_a_leader_cannot_claim_people_whom_it_did_not_name_before_it_saw_the_answer(lie: str) -> None:
    """A follower that believes the leader would be aligned to rows of the leader's choice."""
    with pytest.raises(PartyError, match="party 0 claims people whom it did not name before it saw the answer"):
        claims(*answers([1, 2, 3], [2, 3, 4, 5]), tamper=LIES[lie])


def test_a_leader_cannot_claim_a_person_in_whose_place_it_sent_a_decoy() -> None:
    """With three parties, the second follower gets no commitment to a person whom the first one lacks."""
    ids, sets = [1, 2, 3], [[2, 3, 4], [1, 3, 5]]
    payload, leader, memory, others = answers(ids, *sets)
    assert claims(payload, leader, memory, others) == [[1], [1]]
    at = memory["psi.at.2"].clone()
    at[0] = (others[1][1]["psi.order"] == 0).nonzero()[0, 0]  # even if the leader guesses where person 1 is
    lie = {**only_these(memory, ids, [1, 3]), "psi.at.2": at}
    with pytest.raises(PartyError, match="party 0 claims people whom it did not name before it saw the answer"):
        claims(payload, leader, lie, others[1:])


def test_a_leader_claims_once_per_answer() -> None:
    """With two claims that differ by one person, the leader would see what the rows of this person change."""
    ids, vault = [1, 2, 3], OnceVault()
    payload, leader, memory, others = answers(ids, [2, 3, 4, 5], vault=vault)
    for _ in range(2):
        assert claims(payload, leader, memory, others) == [[0, 1]]  # the same claim again, after a crash
    with pytest.raises(PartyError, match=r"psi claim of party 0 in [0-9a-f]{64} before, for different content"):
        claims(payload, leader, only_these(memory, ids, [2]), others)


@pytest.mark.parametrize("lie", ["another order", "one point for all"])
def test_a_party_cannot_make_the_leader_believe_in_people_whom_it_does_not_know(lie: str) -> None:
    """The leader would be aligned to people whom the party lacks, and would open its commitments to them."""
    ids, payload = list(range(20)), {"sizes": {"0": 20, "1": 10}}
    leader, other = party(0, ids), party(1, list(range(10)))
    messages, memory = PsiAsk().send(leader, payload, (1,), {})
    _, own = PsiAsk().receive(other, payload, {0: messages[1]}, {})
    answer = dict(PsiAnswer().send(other, payload, (0,), own)[0][0])
    if lie == "another order":
        answer["asked"] = answer["asked"].roll(1, 0)
    else:  # multiples of one point, and the same multiples of a person whom the party knows
        multiples = list(range(2, 22))
        known = people_of(other, payload, {})[:1].expand(10, -1)
        answer = {"asked": psi_group.raised(own["psi.asked"][:1].expand(20, -1), multiples),
                  "own": psi_group.raised(known, multiples[:10])}  # fmt: skip
    _, memory = PsiAnswer().receive(leader, payload, {1: answer}, memory)
    assert not bool((memory["psi.at.1"][10:] >= 0).any()) and int(memory["psi.common"].sum()) <= 1


def test_inverses_are_those_of_each_scalar() -> None:
    secrets = psi_group.scalars(b"s" * 32, 5)
    assert [a * b % psi_group.ORDER for a, b in zip(secrets, psi_group.inverses(secrets), strict=True)] == [1] * 5
    assert psi_group.inverses([]) == psi_group.scalars(b"", 0) == []


def test_a_claim_that_was_refused_cannot_be_replaced() -> None:
    """The leader would learn in which of many places a person is, one guess after the other."""
    honest = answers([1, 2, 3], [2, 3, 4, 5], vault=OnceVault())
    with pytest.raises(PartyError, match="whom it did not name"):
        claims(*honest, tamper=LIES["another person"])
    with pytest.raises(PartyError, match=r"psi claim of party 0 in [0-9a-f]{64} before, for different content"):
        claims(*honest)


def test_a_party_accepts_one_set_of_people_per_job() -> None:
    """A round that is repeated reads the ids again; the secrets are others and the people must be the same."""
    ids, vault = [1, 2, 3], OnceVault()
    assert claims(*answers(ids, [2, 3, 4, 5], vault=vault)) == [[0, 1]]
    assert claims(*answers(ids, [2, 3, 4, 5], vault=vault, round=1)) == [[0, 1]]
    payload, leader, memory, others = answers(ids, [2, 3, 4, 5], vault=vault, round=2)
    with pytest.raises(PartyError, match="the matching of its rows before, for different content"):
        claims(payload, leader, only_these(memory, ids, [2]), others)
    leader.vault = OnceVault()
    PsiAlign().send(leader, payload, (), memory)
    with pytest.raises(PartyError, match="the matching of its rows before, for different content"):
        PsiAlign().send(leader, payload, (), only_these(memory, ids, [2]))


@pytest.mark.parametrize(("train", "test", "enough"), [(3, 0, True), (2, 0, False), (3, 2, False), (3, 3, True)])
@pytest.mark.parametrize("who", ["leader", "other"])
def test_an_owner_decides_how_many_people_must_be_common(who: str, train: int, test: int, enough: bool) -> None:
    payload, leader, memory, others = answers(range(train + test), [*range(train + test), 100, 101])
    one = leader if who == "leader" else others[0][0]
    one.min_matches = 3
    context = nullcontext() if enough else pytest.raises(PartyError, match=r"see min_matches in party\.toml")
    with context:
        accept(one, torch.arange(train), torch.arange(test))
    if not test:
        with context:
            claims(payload, leader, memory, others)


def test_a_party_requires_twenty_common_people_where_it_has_a_privacy_floor() -> None:
    from hansa.net.party.floor import Floor
    from hansa.net.party.policy import Policy

    assert Policy().fewest_matches == 0 and Policy(privacy=Floor(secure=True)).fewest_matches == 20
    assert Policy(min_matches=5, privacy=Floor(secure=True)).fewest_matches == 5 == Policy(min_matches=5).fewest_matches
    with pytest.raises(ConfigError, match="min_matches must be at least 0, got -1"):
        Policy(min_matches=-1)


def test_a_leader_and_a_party_compare_the_sizes_of_an_answer_with_those_of_the_claim() -> None:
    _, leader, memory, others = answers([1, 2, 3], [2, 3, 4, 5])
    with pytest.raises(PartyError, match="announces another number of people of party 1 than before"):
        PsiAlign().send(leader, {"sizes": {"1": 2}}, (1,), memory)
    with pytest.raises(PartyError, match="announces another number of people of party 1 than before"):
        PsiAlign().receive(others[0][0], {"sizes": {"1": 2}}, {0: {}}, others[0][1])


@pytest.mark.parametrize("sizes", [{"0": 3, "1": 5}, {"0": 3}, {"1": -4}, {"1": True}, {"1": "4"}, 7, None])
def test_a_party_checks_the_announced_sizes(sizes: Any) -> None:
    _, other, _, own = asked()
    with pytest.raises(PartyError, match=r"another number of its people|malformed ask: sizes"):
        PsiAnswer().send(other, {"sizes": sizes}, (0,), own)


def test_a_party_without_ids_declines() -> None:
    x = torch.zeros(3, 2)
    bare = Party(0, OBJECTIVE, SampleGateway((x, torch.zeros(3, dtype=torch.int64))), 0)
    with pytest.raises(PartyError, match="its rows have no ids, and this job matches rows by their ids"):
        PsiSize().run(bare, {}, {})


class Admitted(SampleGateway):
    """Notes the purpose of each reading."""

    def __init__(self, samples: SampleGateway) -> None:
        super().__init__(samples._train, samples._test)
        self.purposes: list[str] = []

    def admit(self, purpose: str) -> None:
        self.purposes.append(purpose)


def test_each_party_that_a_leader_asks_counts_as_a_reading_of_its_ids() -> None:
    """The leader may build on its memory, where its people are already points."""
    payload = {"sizes": {"0": 3, "1": 4, "2": 4}}
    leader = replace(party(0, [1, 2, 3]), data=Admitted(party(0, [1, 2, 3]).data))
    memory = PsiAsk().send(leader, payload, (1,), {})[1]
    leader.data.purposes.clear()
    PsiAsk().send(leader, payload, (2,), memory)
    assert leader.data.purposes == ["match"]


def test_the_numbers_of_rows_are_counted_as_statistics() -> None:
    one = replace(party(0, [1, 2]), data=Admitted(party(0, [1, 2]).data))
    assert int(PsiSize().run(one, {}, {})[0].tensors["train"]) == 2 and one.data.purposes == ["statistics"]


@pytest.mark.parametrize(("least", "enough"), [(2, True), (3, False)])
def test_a_leader_counts_no_fewer_people_than_its_owner_requires(least: int, enough: bool) -> None:
    leader, other = party(0, [1, 2, 3]), party(1, [2, 3, 4, 5])
    messages, memory = PsiAsk(count=True).send(leader, PAYLOAD, (1,), {})
    _, own = PsiAsk(count=True).receive(other, PAYLOAD, {0: messages[1]}, {})
    answer, _ = PsiCount().send(other, PAYLOAD, (0,), own)
    leader.min_matches = least
    with nullcontext() if enough else pytest.raises(PartyError, match=r"see min_matches in party\.toml"):
        PsiCount().receive(leader, PAYLOAD, {1: answer[0]}, memory)


def test_a_count_hides_which_people_are_common() -> None:
    """The leader's points come back in another order, and no test against the order that it sent can succeed."""
    ids = list(range(200))
    leader, other = party(0, ids), party(1, ids)
    payload = {"sizes": {"0": 200, "1": 200}}
    messages, memory = PsiAsk(count=True).send(leader, payload, (1,), {})
    _, own = PsiAsk(count=True).receive(other, payload, {0: messages[1]}, {})
    linked = PsiAnswer().send(other, payload, (0,), own)[0][0]["asked"]
    told = PsiCount().send(other, payload, (0,), own)[0][0]["asked"]
    assert set(split(as_bytes(told), 32)) == set(split(as_bytes(linked), 32))
    assert int((told == linked).all(1).sum()) < 10
    answer = PsiCount().send(other, payload, (0,), own)[0][0]
    reply, left = PsiCount().receive(leader, payload, {1: answer}, memory)
    assert reply is not None and int(reply.tensors["people"]) == 200 and set(left) == {"psi.over"}


def test_both_parties_send_their_people_in_a_secret_order() -> None:
    """The order of a message says nothing about the order of the sender's file, and the sender can undo it."""
    ids, payload = list(range(200)), {"sizes": {"0": 200, "1": 200}}
    leader, other = party(0, ids), party(1, ids)
    messages, memory = PsiAsk().send(leader, payload, (1,), {})
    secrets, points = psi_group.scalars(as_bytes(memory["psi.key"]), 200), people_of(leader, payload, {})
    assert torch.equal(messages[1]["points"], psi_group.raised(points[memory["psi.order"]], secrets))
    assert len(set(secrets)) == 200
    _, own = PsiAsk().receive(other, payload, {0: messages[1]}, {})
    answer, own = PsiAnswer().send(other, payload, (0,), own)
    roots = psi_group.raised(answer[0]["asked"], psi_group.inverses(secrets))  # equal the other party's points
    places = psi_group.places(roots, "")
    found = [int(memory["psi.order"][places[point]]) for point in split(as_bytes(answer[0]["own"]), 32)]
    assert found == own["psi.order"].tolist()  # both hold the same people, in the same order of rows
    for order in (memory["psi.order"], own["psi.order"]):
        assert sorted(order.tolist()) == ids and int((order == torch.arange(200)).sum()) < 10
    assert not torch.equal(memory["psi.order"], own["psi.order"])


def test_the_owner_bounds_the_people_that_others_bring() -> None:
    from hansa.net.party.workload import Workload

    refused = Workload(people=3).refuses(PsiAnswer(), 4, cast(Any, {**PAYLOAD}))
    assert refused is not None and "at most 3 people (limits.people in party.toml), and this one requests 4" in refused
