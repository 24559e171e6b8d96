"""Sessions between deployed parties: bits of the simulation, parties that restart or decline, hostile requests."""

from __future__ import annotations

import asyncio
import errno
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from league import PARTIES, Asked, Caller, League, posting, samples
from msgspec import structs

import hansa
from hansa import State
from hansa.core.algorithm import Algorithm, Problem
from hansa.core.federation import Federation
from hansa.core.op import Memory, Party, Payload, Reply, Shape
from hansa.core.quantities import AnyCount
from hansa.core.registry import register
from hansa.core.session_op import Receive, Send, SessionOp, Talk
from hansa.net.aggregator import sessions
from hansa.net.aggregator.sessions import Mailboxes
from hansa.net.party.after_reading import REFUSAL
from hansa.net.transport.wire import Exchanged, Letter, SessionCall, Work, pack
from hansa.numerics.params import Params
from hansa.testing import same_bits

TIMES = 8
STARTED: list[tuple[int, int]] = []  # (party, round) of every conversation that began in this process
SIGN = 3.25  # a number in every message, whose bytes the aggregator must not see


@pytest.fixture(autouse=True)
def unstarted(quick: None) -> None:
    STARTED.clear()


@register("test-ring")
@dataclass(frozen=True)
class Ring(SessionOp):
    """Party 0 sends a vector around the ring several times; every party doubles it, and adds its number and round."""

    times: AnyCount = TIMES
    parties: AnyCount = 3

    def talk(self, party: Party, payload: Payload, memory: Memory) -> Talk:
        STARTED.append((party.id, party.round))
        before, after = (party.id - 1) % self.parties, (party.id + 1) % self.parties
        heard = torch.full((50,), SIGN, dtype=torch.float64)
        for _ in range(self.times):
            if party.id == 0:
                yield Send(after, {"x": heard})
            message = yield Receive(before)
            assert message is not None
            heard = 2 * message["x"] + party.id + memory.get("sum", torch.zeros(())) / 7
            if party.id != 0:
                yield Send(after, {"x": heard})
        return Reply({"last": heard[0]}), {**memory, "sum": memory.get("sum", torch.zeros(())) + heard[0]}

    def expects(self, payload: Payload) -> dict[str, Shape]:
        return {"last": ((), torch.float64)}

    def expects_messages(self, payload: Payload, sender: int, receiver: int) -> Sequence[Mapping[str, Shape]]:
        linked = receiver == (sender + 1) % self.parties
        return [{"x": ((50,), torch.float64)}] * (self.times if linked else 0)


@register("test-ringing")
@dataclass(frozen=True)
class Ringing(Algorithm):
    """One session per round; the replies are the state."""

    trains: ClassVar[bool] = False
    participation: ClassVar[Any] = "all"
    times: int = TIMES

    @property
    def verbs(self) -> frozenset[str]:
        return frozenset({"route"})

    def init(self, problem: Problem) -> State:
        return State(Params.none())

    async def round(self, fed: Federation, state: State) -> State:
        replies = await fed.session(Ring(self.times), {}, [(0, 1), (1, 2), (2, 0)])
        return state.replace(None, last=[float(value) for value in replies.rows("last")])

    def predictor(self, state: State) -> tuple[str, dict[str, Any]]:
        return "joint", dict(state.slots)


def tree(rounds: int = 3, **fields: Any) -> dict[str, Any]:
    table = {"dataset": "heart", "model": "logistic", "dtype": "float64"}
    algorithm = {"name": "test-ringing", **fields}
    return {"task": table, "algorithm": algorithm, "run": {"rounds": rounds}}


def simulated(rounds: int = 3) -> hansa.Result:
    task = hansa.Task(None, "cross_entropy", [samples(k)[0] for k in range(3)], names=list(PARTIES), classes=2)
    return hansa.simulate(Ringing(), task, rounds=rounds)


def slots(league: League, job: str) -> Any:
    return league.model(job)["payload"]["last"]  # type: ignore[call-overload]


def test_a_deployed_session_has_the_bits_and_bytes_of_its_simulation(league: League) -> None:
    league.join_all()
    done, reference = league.ended(league.submit(tree(), min_parties=3)), simulated()
    assert done["status"] == "finished", done["reason"]
    assert same_bits(slots(league, done["id"]), reference.state.slots["last"])
    for line, expected in zip(done["rounds"], reference.history, strict=True):
        assert (line["replies"], line["bytes_up"], line["bytes_down"]) == (
            expected["replies"], expected["bytes_up"], expected["bytes_down"]
        )  # fmt: skip


def test_the_aggregator_sees_sizes_alone(league: League, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bytes] = []
    serve = Mailboxes.serve

    async def watched(self: Mailboxes, party: int, request: SessionCall) -> Exchanged:
        seen.extend(letter.data for letter in request.letters)
        return await serve(self, party, request)

    monkeypatch.setattr(Mailboxes, "serve", watched)
    league.join_all()
    done = league.ended(league.submit(tree(1), min_parties=3))
    assert done["status"] == "finished"
    plain = torch.full((2,), SIGN, dtype=torch.float64).numpy().tobytes()
    assert len(seen) >= 3 * TIMES and len({len(data) for data in seen}) == 1
    assert not any(plain in data or b"float" in data.lower() or b"F64" in data for data in seen)


def flipped(letter: Letter, earlier: list[Letter]) -> Letter:
    data = bytearray(letter.data)
    data[-1] ^= 1
    return Letter(letter.party, letter.number, bytes(data))


def replayed(letter: Letter, earlier: list[Letter]) -> Letter:
    return Letter(letter.party, letter.number, earlier[0].data)


def shortened(letter: Letter, earlier: list[Letter]) -> Letter:
    return Letter(letter.party, letter.number, letter.data[:-1])


def renumbered(letter: Letter, earlier: list[Letter]) -> Letter:
    """An earlier message with the number of this one in clear."""
    return Letter(letter.party, letter.number, letter.data[:12] + earlier[0].data[12:])


@pytest.mark.thin(2)
@pytest.mark.parametrize("lie", [flipped, replayed, shortened, renumbered])
def test_a_message_that_the_aggregator_changed_is_refused(
    league: League, monkeypatch: pytest.MonkeyPatch, lie: Callable[[Letter, list[Letter]], Letter],
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    serve, sent = Mailboxes.serve, list[Letter]()

    async def lying(self: Mailboxes, party: int, request: SessionCall) -> Exchanged:
        if party == 0 and request.letters:
            sent.extend(request.letters)
            if len(sent) == 3:
                request = structs.replace(request, letters=[lie(request.letters[0], sent)])
        return await serve(self, party, request)

    monkeypatch.setattr(Mailboxes, "serve", lying)
    league.join_all()
    done = league.ended(league.submit(tree(1), min_parties=3))
    line = done["rounds"][0]
    assert "empty" in line and line["missing"]["bob"] == line["missing"]["ann"] == REFUSAL
    assert "message 2 of party 0 cannot be used" in caplog.text


def failing(league: League, name: str, round: int, error: Callable[[], BaseException]) -> list[int]:
    """Let the conversation of a party fail once in the middle of a round; returns where that is noted."""
    failed = list[int]()

    def wrap(work: Work, office: Any) -> Any:
        exchange, count = office.exchange, 0

        def broken(*args: Any) -> Any:
            nonlocal count
            count += 1
            if work.round == round and not failed and count == TIMES // 2:
                failed.append(count)
                raise error()
            return exchange(*args)

        office.exchange = broken
        return office

    posting(league.members[name], wrap)
    return failed


@pytest.mark.slow
def test_a_party_that_fails_in_the_middle_comes_back_and_the_session_is_repeated(
    league: League, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after `kill -9`: the party lost all that it had computed, and is offered the same ask again."""
    seen: dict[tuple[int, int, int], set[bytes]] = {}  # (party, receiver, number): what was sent
    serve = Mailboxes.serve

    async def watched(self: Mailboxes, party: int, request: SessionCall) -> Exchanged:
        for letter in request.letters:
            seen.setdefault((party, letter.party, letter.number), set()).add(letter.data)
        return await serve(self, party, request)

    monkeypatch.setattr(Mailboxes, "serve", watched)
    league.join_all()
    failed = failing(league, "bob", 1, lambda: OSError(errno.ENOSPC, "the disk is full"))
    done = league.ended(league.submit(tree(), min_parties=3))
    assert done["status"] == "finished" and failed, done["reason"]
    assert [line["replies"] for line in done["rounds"]] == [3, 3, 3]
    assert {party for party, round in STARTED if round == 1} == {0, 1, 2}
    assert min(STARTED.count((party, 1)) for party in range(3)) == 2  # all of them began again
    assert len(seen[0, 1, 0]) == 4  # three rounds and a repetition, whose keys are new
    assert same_bits(slots(league, done["id"]), simulated().state.slots["last"])


@pytest.mark.slow
def test_an_aggregator_that_restarts_in_the_middle_repeats_the_session(league: League) -> None:
    league.join_all()
    reached = list[int]()

    def wrap(work: Work, office: Any) -> Any:
        if work.round == 1 and not reached:
            reached.append(work.round)
            time.sleep(0.5)
        return office

    posting(league.members["cid"], wrap)
    job = league.submit(tree(), min_parties=3)
    while not reached:
        time.sleep(0.01)
    league.stop()
    league.start()
    done = league.ended_after_all(job)
    assert done["status"] == "finished", done["reason"]
    if all(line["replies"] == 3 for line in done["rounds"]):
        assert same_bits(slots(league, job), simulated().state.slots["last"])


def test_a_party_that_declines_ends_the_session_for_all(league: League) -> None:
    league.join_all(bob='ops = ["route-keys"]')
    done = league.ended(league.submit(tree(1), min_parties=3))
    missing = done["rounds"][0]["missing"]
    assert missing["bob"] == "its policy does not accept the op 'route-session'"
    assert missing["ann"] == missing["cid"] == REFUSAL
    assert "empty" in done["rounds"][0]


def test_a_party_that_never_comes_back_is_named(
    found: Callable[..., League], leaving: set[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sessions, "HELD", 0.1)  # a held request is a contact, and the parties below are soon absent
    league = found(absent_after=0.5).join_all()
    gone: list[bool] = []

    def wrap(work: Work, office: Any) -> Any:
        if (work.phase, work.number) != ("round.0", 1):
            return office
        league.members["bob"]._loop.call_soon_threadsafe(league.members["bob"]._task.cancel)
        gone.append(True)
        leaving.add(1)
        raise OSError(errno.ENOSPC, "the disk is full")

    posting(league.members["bob"], wrap)
    job = league.submit(tree(1), min_parties=3)
    done = league.ended(job)
    missing = done["rounds"][0]["missing"]
    assert gone and "it had no contact for 0.5 s" in missing["bob"]
    assert missing["ann"] == missing["cid"] == REFUSAL


# What a hostile party can send to the mailboxes


def entered(boxes: Mailboxes, *parties: int) -> dict[int, bytes]:
    nonces = {party: bytes([party]) * 16 for party in parties}
    for party, nonce in nonces.items():
        boxes._enter(party, nonce)
    return nonces


def served(boxes: Mailboxes, party: int, request: SessionCall) -> Exchanged:
    return asyncio.run(boxes.serve(party, request))


def test_mailboxes_bound_what_a_party_may_leave_in_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "HELD", 0.05)
    boxes = Mailboxes({(0, 1): 10, (1, 0): 10})
    nonces = entered(boxes, 0, 1)
    for bad in (Letter(1, 0, bytes(11)), Letter(1, 1, b"x"), Letter(7, 0, b"x"), Letter(0, 0, b"x")):
        with pytest.raises(hansa.plumbing.errors.DataError):
            served(boxes, 0, SessionCall(nonces[0], "talk", [bad]))
    letters = [Letter(1, number, bytes([number])) for number in range(6)]
    assert served(boxes, 0, SessionCall(nonces[0], "talk", letters)).waiting  # only four fit
    assert served(boxes, 0, SessionCall(nonces[0], "talk", letters)).waiting  # repeated: nothing is stored twice
    first = served(boxes, 1, SessionCall(nonces[1], "talk", [], {}, 0)).letters
    assert [letter.data for letter in first] == [bytes([n]) for n in range(4)]
    assert served(boxes, 1, SessionCall(nonces[1], "talk", [], {}, 0)).letters == first  # a lost response is repeated
    assert served(boxes, 1, SessionCall(nonces[1], "talk", [], {0: 4}, None)).letters == []
    assert not served(boxes, 0, SessionCall(nonces[0], "talk", letters)).waiting


def test_a_party_that_enters_again_restarts_the_session_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "HELD", 0.05)
    boxes = Mailboxes({(0, 1): 10, (1, 0): 10})
    nonces = entered(boxes, 0, 1)
    served(boxes, 0, SessionCall(nonces[0], "talk", [Letter(1, 0, b"old")]))
    assert served(boxes, 1, SessionCall(b"n" * 16, "enter")).waiting  # for party 0, which has not entered again
    assert served(boxes, 0, SessionCall(nonces[0], "talk", [], {}, 1)).restarted
    again = served(boxes, 0, SessionCall(b"m" * 16, "enter"))
    assert again.nonces == {0: b"m" * 16, 1: b"n" * 16}
    assert served(boxes, 1, SessionCall(b"n" * 16, "talk", [], {}, 0)).waiting  # the old message is gone


def test_only_parties_of_an_open_session_reach_its_mailboxes(league: League) -> None:
    ann: Caller = league.enrolled("ann")
    asked = Asked()
    body = pack(SessionCall(bytes(16), "enter"))
    assert ann.call("POST", f"{asked.path}/session", body).status == 404
    league.ask(asked)
    got = ann.call("POST", f"{asked.path}/session", body)
    assert got.status == 400 and "exchange no messages" in got.error
    queued = league.queue.find(0, asked.key)
    assert queued is not None
    queued.session = Mailboxes({(0, 1): 10, (1, 0): 10})
    assert ann.call("POST", f"{asked.path}/session", b"\xff").status == 400
    queued.session.gone.setdefault(1)
    got = ann.call("POST", f"{asked.path}/session", body)
    assert got.status == 400 and got.error == "party 1 left the session"
