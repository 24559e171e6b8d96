"""Recorded requests that are sent again, doubled, reordered or late: each is refused or gets its earlier receipt,
and the fused replies do not change."""

from __future__ import annotations

import hashlib
import http.client
import random
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from league import PARTIES, SPOKEN, Answered, Asked, Caller, League, draft, logistic_task

import hansa
from hansa.net.transport import certificates, keys, signing
from hansa.net.transport import client as clients
from hansa.net.transport.client import Client
from hansa.net.transport.signing import About
from hansa.net.transport.tls import client_context
from hansa.net.transport.wire import Blob, IssuedCertificate, pack, unpack
from hansa.plumbing import codec

TASK = {"dataset": "heart", "model": "logistic", "dtype": "float64"}
DATA = b"an update"
BLOB = Blob(hashlib.sha256(DATA).hexdigest(), len(DATA))


def recorded(caller: Caller, method: str, path: str, body: bytes, about: About) -> bytes:
    """A signed request as bytes."""
    assert caller.key is not None
    head = {"Host": "127.0.0.1", "Hansa-Protocol": SPOKEN, "Content-Length": str(len(body)),
            **signing.sign(caller.key, method, path, body, about)}  # fmt: skip
    lines = [f"{method} {path} HTTP/1.1", *(f"{name}: {value}" for name, value in head.items())]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


class Tap:
    """A connection for raw bytes."""

    def __init__(self, league: League, caller: Caller) -> None:
        assert caller.files is not None
        tls = client_context(league.folder / "ca.pem", *caller.files)
        self._socket = tls.wrap_socket(
            socket.create_connection(("127.0.0.1", league.port), 20), server_hostname="127.0.0.1"
        )

    def send(self, data: bytes) -> Answered:
        self._socket.sendall(data)
        return self.receive()

    def receive(self) -> Answered:
        with http.client.HTTPResponse(self._socket) as got:
            got.begin()
            return Answered(got.status, dict(got.headers), got.read())

    def __enter__(self) -> Tap:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()


def sent(league: League, caller: Caller, data: bytes) -> Answered:
    """Send bytes over a new connection with the caller's certificate."""
    with Tap(league, caller) as tap:
        return tap.send(data)


class Taped:
    """An upload and an answer of ann, recorded."""

    def __init__(self, league: League, ask: Asked, caller: Caller) -> None:
        self.put = recorded(caller, "PUT", f"{ask.path}/parts/{BLOB.digest}?at=0", DATA, ask.about)
        self.reply = recorded(caller, "POST", f"{ask.path}/reply", pack(caller.signed(ask, draft(BLOB))), ask.about)


@pytest.fixture
def bob(league: League) -> Caller:
    return league.enrolled("bob")


def fused(league: League, ask: Asked) -> list[tuple[Any, ...]]:
    """All replies to an ask that a job would fuse."""
    return [(party, row["blob"], row["why"]) for party, row in sorted(league.replies(ask).items())]


def test_an_answer_sent_again_byte_for_byte_gets_the_same_receipt_whenever_it_comes(
    league: League, ann: Caller
) -> None:
    ask = league.ask()
    tape = Taped(league, ask, ann)
    with Tap(league, ann) as tap:
        assert tap.send(tape.put).status == 204
        first = tap.send(tape.reply)
        assert first.status == 200 and first.receipt.status == "accepted"
        assert tap.send(tape.reply).body == first.body  # over the same connection
        assert tap.send(tape.put).status == 404  # and no file is left behind
    assert list((league.folder / "state" / "uploads").iterdir()) == []
    assert sent(league, ann, tape.reply).body == first.body  # over another
    league.close_ask(ask)
    assert sent(league, ann, tape.reply).body == first.body  # after the round was closed
    league.stop()
    league.start()
    assert sent(league, ann, tape.reply).body == first.body  # after a restart
    assert fused(league, ask) == [(0, BLOB.digest, None)]
    assert league.events("conflict") == []


def test_one_partys_requests_over_anothers_connection_are_refused_and_logged(
    league: League, ann: Caller, bob: Caller
) -> None:
    ask = league.ask()
    tape = Taped(league, ask, ann)
    for data in (tape.put, tape.reply):
        got = sent(league, bob, data)
        assert got.status == 401 and "does not match its content" in got.error
    assert fused(league, ask) == [] and list((league.folder / "state" / "uploads").iterdir()) == []
    assert sent(league, ann, tape.put).status == 204 and sent(league, ann, tape.reply).status == 200
    assert sent(league, bob, tape.reply).status == 401  # what was accepted already, too
    assert [entry["party"] for entry in league.events("denied")] == ["bob"] * 3
    assert fused(league, ask) == [(0, BLOB.digest, None)]


def test_recorded_requests_do_not_survive_the_key_that_signed_them(league: League, ann: Caller) -> None:
    ask, later = league.ask(parties=(0,)), league.ask(round=1, parties=(0,))
    old, unsent = Taped(league, ask, ann), Taped(league, later, ann)
    with Tap(league, ann) as tap:
        assert tap.send(old.put).status == 204 and tap.send(old.reply).status == 200
        fresh = keys.new_key()
        rotating = recorded(ann, "POST", "/v1/rotate", certificates.make_request(fresh, "ann"), About())
        given = tap.send(rotating)
        assert tap.send(rotating).body == given.body  # the same certificate
        new = league.certified("ann", fresh, unpack(given.body, IssuedCertificate).certificate)
        assert new.call("POST", f"/v1/alive?instance={new.instance}").status == 204
        for data in (old.reply, unsent.put, unsent.reply, rotating):  # open connection, superseded key
            assert tap.send(data).status == 403
    for data in (old.reply, unsent.put, unsent.reply, rotating):
        assert sent(league, ann, data).status == 403
        assert sent(league, new, data).status == 401  # its own signature is now by another key
    assert fused(league, ask) == [(0, BLOB.digest, None)] and fused(league, later) == []
    own = Taped(league, later, new)
    with Tap(league, new) as tap:
        assert tap.send(own.put).status == 204 and tap.send(own.reply).status == 200
        league.operator.revoke("ann")
        assert tap.send(own.reply).status == 403
    assert sent(league, new, own.reply).status == 403
    assert len(league.events("denied")) == 14


def test_a_party_that_is_revoked_while_it_sends_has_sent_in_vain(league: League, ann: Caller) -> None:
    """The request was admitted, and its body is still arriving."""
    ask = league.ask()
    tape = Taped(league, ask, ann)
    assert sent(league, ann, tape.put).status == 204
    with Tap(league, ann) as tap:
        tap._socket.sendall(tape.reply[:-5])
        assert sent(league, ann, tape.put).status == 204  # so the earlier head has been read too
        league.operator.revoke("ann")
        tap._socket.sendall(tape.reply[-5:])
        got = tap.receive()
    assert got.status == 403 and fused(league, ask) == []


def test_an_answer_of_one_round_is_none_of_the_next(league: League, ann: Caller) -> None:
    """Recorded in one round and sent in the next, or moved to it: by its path, by its signed fields, or by both."""
    first, second = league.ask(), league.ask(round=1)
    tape = Taped(league, first, ann)
    league.close_ask(first, {0: "it did not answer"})
    assert sent(league, ann, tape.put).status == 404
    got = sent(league, ann, tape.reply)
    assert got.status == 200 and got.receipt.status == "late" and got.receipt.round == 0
    assert sent(league, ann, tape.reply).body == got.body
    for data in (tape.put, tape.reply):
        for old, new in (
            (b"asks/0/", b"asks/1/"),
            (b"Hansa-Round: 0", b"Hansa-Round: 1"),
            (b"Hansa-Ask: 0/", b"Hansa-Ask: 1/"),
        ):
            assert old in data
            assert sent(league, ann, data.replace(old, new)).status == 401
        moved = data.replace(b"asks/0/", b"asks/1/").replace(b"Round: 0", b"Round: 1").replace(b"Ask: 0/", b"Ask: 1/")
        assert sent(league, ann, moved).status == 401
    assert fused(league, first) == [] and fused(league, second) == []


def test_chunks_doubled_and_in_any_order_give_the_bytes_or_nothing(league: League, ann: Caller) -> None:
    """Every order of the requests of an upload, each sent twice: the accepted bytes are the intended ones."""
    chunks = [DATA[:3], DATA[3:6], DATA[6:]]
    chance = random.Random(4)
    for number in range(20):
        ask = league.ask(number=number, parties=(0,))
        order = [0, 1, 2, 3] * 2
        chance.shuffle(order)
        accepted: list[bytes] = []
        with Tap(league, ann) as tap:
            for which in [*order, 0, 1, 2, 3]:  # in the end the party sends everything again
                if which < 3:
                    path = f"{ask.path}/parts/{BLOB.digest}?at={3 * which}"
                    got = tap.send(recorded(ann, "PUT", path, chunks[which], ask.about))
                    assert got.status in (204, 416) if not accepted else got.status == 404
                else:
                    got = tap.send(
                        recorded(ann, "POST", f"{ask.path}/reply", pack(ann.signed(ask, draft(BLOB))), ask.about)
                    )
                    assert got.status == 416 or got.receipt.status == "accepted"
                    accepted += [got.body] if got.status == 200 else []
        assert accepted and set(accepted) == {accepted[0]}
        assert fused(league, ask) == [(0, BLOB.digest, None)]
    assert league.aggregator.blobs.path(BLOB.digest).read_bytes() == DATA


@pytest.mark.slow
def test_a_request_with_any_byte_changed_is_refused_or_means_the_same(league: League, ann: Caller) -> None:
    ask = league.ask()
    tape = Taped(league, ask, ann)
    assert sent(league, ann, tape.put).status == 204
    chance = random.Random(7)
    for at in range(0, len(tape.reply), 7):
        data = bytearray(tape.reply)
        data[at] ^= 1 << chance.randrange(7)
        with Tap(league, ann) as tap:
            tap._socket.sendall(data)
            tap._socket.settimeout(0.3)  # a changed length makes the aggregator wait for more
            try:
                got = tap.receive()
            except (TimeoutError, http.client.HTTPException, OSError):
                continue
        assert got.status >= 400 or got.receipt.digest == BLOB.digest, (at, bytes(data))
        assert fused(league, ask) in ([], [(0, BLOB.digest, None)])
    assert sent(league, ann, tape.reply).receipt.status == "accepted"
    assert fused(league, ask) == [(0, BLOB.digest, None)]


# A job of which every request is sent more than once


def simulated(**run: Any) -> Any:
    return hansa.simulate(hansa.Scaffold(), logistic_task(), engine="reference", **run).saved_model()


@pytest.mark.slow
def test_a_job_whose_every_request_comes_twice_or_more_ends_with_the_same_bits(
    found: Callable[..., League], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As if responses had been lost; old requests arrive again at random, even those of closed rounds."""
    league, once, chance = found(), Client._attempt, random.Random(5)
    past: list[tuple[Client, tuple[Any, ...]]] = []
    refused: list[int] = []

    async def again(self: Client, method: str, path: str, *given: Any) -> Any:
        answers = [await once(self, method, path, *given) for _ in range(1 if "/work" in path else 2)]
        if "/asks/" in path and method in ("PUT", "POST"):
            past.append((self, (method, path, *given)))
            mine = [request for client, request in past if client is self]
            for request in chance.sample(mine, min(3, len(mine))):
                refused.append((await once(self, *request))[0])
        return chance.choice([answer for answer in answers if answer[0] == min(a[0] for a in answers)])

    monkeypatch.setattr(Client, "_attempt", again)
    monkeypatch.setattr(clients, "LEAST", 0.02)
    league.join_all()
    job = league.submit({"task": TASK, "algorithm": "scaffold", "run": {"rounds": 4}})
    ended = league.ended(job)
    assert ended["status"] == "finished" and all(line["members"] == list(PARTIES) for line in ended["rounds"])
    assert codec.encode(league.model(job)) == codec.encode(simulated(rounds=4))
    assert {200, 404} <= set(refused) <= {200, 204, 404, 416} and league.events("conflict") == []
