"""Limits over real sockets: slow, frequent or long requests are refused, and other clients are still served."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import json
import logging
import os
import re
import select
import socket
import ssl
import time
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import uvloop
from league import PATIENCE, Caller, League, until

from hansa.core.plain_data import fill
from hansa.net.aggregator.federation import TOML, FederationFolder, init
from hansa.net.aggregator.serve_settings import Serve
from hansa.net.transport import certificates, keys
from hansa.net.transport.limits import FIRST, Limits, LogThrottle, TokenBuckets, address_key, retry_after
from hansa.net.transport.signing import About
from hansa.net.transport.tls import client_context
from hansa.net.transport.wire import Enrolment, pack
from hansa.plumbing.errors import ConfigError

QUICK = {"handshake": 1.0, "head": 1.0, "stall": 0.6}
LOOPS = {"asyncio": None, "uvloop": uvloop.new_event_loop}


class Hasty(League):
    """A federation whose aggregator soon has short timeouts."""

    def hurry(self, name: str) -> None:
        """From now on. Whatever a client does in time comes before: a busy machine may stop for a while."""
        limits = dataclasses.replace(self.aggregator.listener.limits, **{name: QUICK[name]})  # type: ignore[arg-type]
        self.aggregator.listener.limits = self.aggregator.admission.limits = limits


@pytest.fixture(params=sorted(LOOPS))
def hasty(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Hasty]:
    league = Hasty(tmp_path / "league", limits={"idle": 2.0}, loop=LOOPS[request.param])
    yield league
    league.close()


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., League]]:
    made: list[League] = []

    def one(**limits: Any) -> League:
        made.append(League(tmp_path / f"league-{len(made)}", limits=limits))
        return made[-1]

    yield one
    for league in made:
        league.close()


def stop_time(*buckets: TokenBuckets) -> None:
    """No token comes back any more, however slow this machine is."""
    now = time.monotonic()
    for bucket in buckets:
        bucket._clock = lambda: now


def counted(league: League, name: str, **labels: str) -> float:
    return league.aggregator.metrics.registry.get_sample_value(f"hansa_{name}", labels) or 0.0


def plain(league: League) -> socket.socket:
    return socket.create_connection(("127.0.0.1", league.port), timeout=PATIENCE)


def secured(league: League, caller: Caller | None = None) -> ssl.SSLSocket:
    tls = caller._tls if caller is not None else client_context(league.folder / "ca.pem")
    return tls.wrap_socket(plain(league), server_hostname="127.0.0.1")


def closed(line: socket.socket) -> bytes:
    """The remaining data until the other side closes the connection; it must close it."""
    got = bytearray()
    try:
        while piece := line.recv(65536):
            got += piece
    except TimeoutError:
        raise AssertionError("the connection was not closed") from None
    except OSError:
        pass
    line.close()
    return bytes(got)


def turned_away(league: League) -> None:
    """Check that a new connection is closed before it can send anything."""
    with contextlib.suppress(ConnectionResetError):
        assert closed(plain(league)) == b""


# Too slow


def test_who_begins_no_handshake_is_cut_off(hasty: Hasty) -> None:
    hasty.hurry("handshake")
    assert closed(plain(hasty)) == b""
    until(lambda: counted(hasty, "handshake_failures_total", reason="too slow") == 1)
    until(lambda: counted(hasty, "open_connections") == 0)


def test_who_sends_a_handshake_byte_by_byte_is_cut_off(hasty: Hasty) -> None:
    hasty.hurry("handshake")
    line = plain(hasty)
    with contextlib.suppress(OSError):
        for byte in b"\x16\x03\x01\x02\x00\x01" * 100:
            line.send(bytes([byte]))
            time.sleep(0.02)
    assert b"HTTP" not in closed(line)
    until(lambda: counted(hasty, "open_connections") == 0)


def test_who_asks_nothing_after_the_handshake_is_cut_off(hasty: Hasty) -> None:
    hasty.hurry("head")
    assert closed(secured(hasty)) == b""
    until(lambda: counted(hasty, "connections_dropped_total", reason="no request") == 1)


def test_a_head_that_comes_in_drops_is_cut_off(hasty: Hasty) -> None:
    hasty.hurry("head")
    line = secured(hasty)
    with contextlib.suppress(OSError):
        for byte in b"GET /v1/ca HTTP/1.1\r\nHost: x\r\n" + b"X-A: b\r\n" * 100:
            line.send(bytes([byte]))
            time.sleep(0.01)
    assert closed(line) == b""
    until(lambda: counted(hasty, "connections_dropped_total", reason="no request") == 1)


def test_a_second_head_that_comes_in_drops_is_cut_off(hasty: Hasty) -> None:
    line = secured(hasty, hasty.enrolled("ann"))
    line.send(b"GET /v1/ca HTTP/1.1\r\nHost: x\r\n\r\n")
    assert line.recv(65536).startswith(b"HTTP/1.1 200")
    hasty.hurry("head")
    line.send(b"GET /v1/")
    assert b"HTTP" not in closed(line)
    until(lambda: counted(hasty, "connections_dropped_total", reason="no request") == 1)


def test_a_body_that_stops_is_answered_and_cut_off(hasty: Hasty) -> None:
    ann = hasty.enrolled("ann")
    line = secured(hasty, ann)
    hasty.hurry("stall")
    line.send(b"POST /v1/rotate HTTP/1.1\r\nHost: x\r\nHansa-Protocol: 2\r\nContent-Length: 1000\r\n\r\nabc")
    assert closed(line).startswith(b"HTTP/1.1 408")
    until(lambda: counted(hasty, "connections_dropped_total", reason="body too slow") == 1)


def test_who_does_not_take_its_answer_is_cut_off(hasty: Hasty) -> None:
    ann = hasty.enrolled("ann")
    ask = hasty.ask(parties=[0], message=bytes(2**24))
    open_before = counted(hasty, "open_connections")
    with socket.socket() as line:
        line.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        line.connect(("127.0.0.1", hasty.port))
        with ann._tls.wrap_socket(line, server_hostname="127.0.0.1") as held:
            hasty.hurry("stall")
            held.send(f"GET {ask.path}/message HTTP/1.1\r\nHost: x\r\nHansa-Protocol: 2\r\n\r\n".encode())
            until(lambda: counted(hasty, "open_connections") <= open_before)
    shown = hasty.aggregator.metrics.text().decode()
    assert "POST /v1/alive" in shown and counted(hasty, "open_connections") <= open_before
    until(lambda: counted(hasty, "connections_dropped_total", reason="answer not taken") == 1)


def test_a_message_that_is_removed_while_it_is_fetched_comes_whole(make: Callable[..., League]) -> None:
    league = make()
    ann = league.enrolled("ann")
    ask = league.ask(parties=[0], message=bytes(2**25))
    line = secured(league, ann)
    line.send(f"GET {ask.path}/message HTTP/1.1\r\nHost: x\r\nHansa-Protocol: 2\r\nConnection: close\r\n\r\n".encode())
    got = line.recv(1000)  # it has begun, and does not fit what lies between
    for path in league.folder.glob("message-*"):
        path.unlink()
    got += closed(line)
    assert got.count(b"HTTP/1.1") == 1 and len(got.partition(b"\r\n\r\n")[2]) == 2**25


def test_an_answer_that_goes_wrong_is_cut_off_and_there_is_no_second(hasty: Hasty) -> None:
    ann = hasty.enrolled("ann")
    ask = hasty.ask(parties=[0], message=bytes(2**25))
    line = secured(hasty, ann)
    line.send(f"GET {ask.path}/message HTTP/1.1\r\nHost: x\r\nHansa-Protocol: 2\r\n\r\n".encode())
    got = line.recv(1000)
    for path in hasty.folder.glob("message-*"):
        os.truncate(path, 2**17)
    got += closed(line)
    assert got.count(b"HTTP/1.1") == 1 and len(got) < 2**25
    until(lambda: counted(hasty, "connections_dropped_total", reason="answer cut off") == 1)


def test_a_connection_on_which_nothing_is_asked_is_closed(hasty: Hasty) -> None:
    line = secured(hasty, hasty.enrolled("ann"))
    line.send(b"GET /v1/ca HTTP/1.1\r\nHost: x\r\n\r\n")
    assert b"BEGIN CERTIFICATE" in closed(line)


def test_a_connection_without_a_certificate_is_closed_after_its_answer(make: Callable[..., League]) -> None:
    league = make()
    line = secured(league)
    line.send(b"GET /v1/ca HTTP/1.1\r\nHost: x\r\n\r\n" * 3)
    got = closed(line)  # `idle` is longer than this waits
    assert got.count(b"HTTP/1.1 200") == 1 and b"Connection: close" in got


def test_a_question_for_work_is_held_longer_than_a_head_may_take(hasty: Hasty) -> None:
    ann = hasty.enrolled("ann")
    hasty.hurry("head")
    end = time.monotonic() + PATIENCE
    while not counted(hasty, "held_polls"):  # unless this machine was itself too slow
        assert time.monotonic() < end, "it was never held"
        line = secured(hasty, ann)
        question = f"GET /v1/work?instance={ann.instance} HTTP/1.1\r\nHost: x\r\nHansa-Protocol: 2\r\n\r\n"
        with contextlib.suppress(OSError):
            line.send(question.encode())
        while not counted(hasty, "held_polls") and not select.select([line], [], [], 0.01)[0]:
            pass
    line.settimeout(1.5)
    with pytest.raises(TimeoutError):
        line.recv(1)
    assert counted(hasty, "held_polls") == 1
    line.close()


def test_a_question_is_not_held_for_somebody_who_has_gone(hasty: Hasty, caplog: pytest.LogCaptureFixture) -> None:
    ann = hasty.enrolled("ann")
    line = secured(hasty, ann)
    line.send(f"GET /v1/work?instance={ann.instance} HTTP/1.1\r\nHost: x\r\nHansa-Protocol: 2\r\n\r\n".encode())
    until(lambda: counted(hasty, "held_polls") == 1)
    line.close()
    until(lambda: counted(hasty, "held_polls") == 0)  # a question is held for longer than this waits
    until(lambda: not hasty.aggregator.admission.under_way)
    assert not [record for record in caplog.records if record.exc_info]


def test_the_system_watches_every_connection_for_a_peer_that_has_gone(make: Callable[..., League]) -> None:
    league = make()
    ann = league.enrolled("ann")
    (found,) = (c.transport.get_extra_info("socket") for c in league.aggregator.listener.open
                if c.transport.get_extra_info("peername") == ann.connection.sock.getsockname())  # fmt: skip
    read = lambda name: found.getsockopt(socket.IPPROTO_TCP, getattr(socket, name))  # noqa: E731
    assert found.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
    probed = read("TCP_KEEPIDLE") + read("TCP_KEEPINTVL") * read("TCP_KEEPCNT")
    assert probed * 1000 <= read("TCP_USER_TIMEOUT") <= 60_000  # else one lost probe would end it


# Too much


def test_an_address_has_so_many_connections_and_no_more(make: Callable[..., League]) -> None:
    league = make(per_address=3)
    lines = [secured(league) for _ in range(3)]
    turned_away(league)
    assert counted(league, "refused_total", reason="connections of an address") == 1
    lines.pop().close()
    until(lambda: counted(league, "open_connections") == 2)
    lines.append(secured(league))
    lines[-1].send(b"GET /v1/ca HTTP/1.1\r\nHost: x\r\n\r\n")
    assert lines[-1].recv(100).startswith(b"HTTP/1.1 200")
    for line in lines:
        line.close()


def test_there_are_so_many_connections_in_all_and_no_more(make: Callable[..., League]) -> None:
    league = make(connections=2)
    ann = league.enrolled("ann")
    lines = [secured(league, ann)]
    until(lambda: counted(league, "open_connections") == 2)
    turned_away(league)
    assert counted(league, "refused_total", reason="connections in all") == 1
    for line in lines:
        line.close()


def test_strangers_that_connect_too_often_are_refused_and_parties_do_not_count(make: Callable[..., League]) -> None:
    league = make(stranger_burst=12, stranger_rate=0.001)
    ann = league.enrolled("ann")  # two strangers' tokens: a connection and a request
    for _ in range(20):
        line = secured(league, ann)
        line.send(f"POST /v1/alive?instance={ann.instance} HTTP/1.1\r\nHost: x\r\nHansa-Protocol: 2\r\n\r\n".encode())
        assert line.recv(100).startswith(b"HTTP/1.1 204")
        line.close()
    for _ in range(10):
        secured(league).close()
    assert counted(league, "refused_total", reason="rate of strangers") == 0
    assert closed(secured(league)) == b""
    assert counted(league, "refused_total", reason="rate of strangers") == 1
    line = secured(league, ann)  # strangers at a party's address do not keep the party out
    line.send(f"POST /v1/alive?instance={ann.instance} HTTP/1.1\r\nHost: x\r\nHansa-Protocol: 2\r\n\r\n".encode())
    assert line.recv(100).startswith(b"HTTP/1.1 204")
    line.close()


def test_strangers_have_a_quarter_of_the_connections(make: Callable[..., League]) -> None:
    league = make(connections=8)
    ann = league.enrolled("ann")
    lines = [secured(league) for _ in range(2)]
    assert closed(secured(league)) == b""
    assert counted(league, "refused_total", reason="connections of strangers") == 1
    lines += [secured(league, ann) for _ in range(5)]
    until(lambda: counted(league, "open_connections") == 8)
    for line in lines:
        line.close()
    until(lambda: counted(league, "open_connections") == 1)
    assert league.nobody().call("GET", "/v1/ca").status == 200  # disconnected clients are not counted


@pytest.mark.parametrize("loop", sorted(LOOPS))
def test_silent_connections_of_many_addresses_do_not_keep_others_waiting(tmp_path: Path, loop: str) -> None:
    limits = {"handshakes": 16, "handshake": 60.0, "head": 60.0}  # a waiting client waits longer than this test
    league = League(tmp_path / "league", limits=limits, loop=LOOPS[loop])
    ann, stuck = league.enrolled("ann"), []
    for k in range(2, 12):
        for _ in range(3):
            stuck.append(socket.create_connection(("127.0.0.1", league.port), PATIENCE, (f"127.0.0.{k}", 0)))
    until(lambda: counted(league, "open_connections") == len(stuck) + 1 - counted(
        league, "handshake_failures_total", reason="made room"))  # fmt: skip
    shaking = [len(tasks) for tasks in league.aggregator.listener._shaking.values()]
    assert max(shaking) <= 2 and sum(shaking) <= 16
    for _ in range(20):
        line = secured(league, ann)
        line.send(f"POST /v1/alive?instance={ann.instance} HTTP/1.1\r\nHost: x\r\nHansa-Protocol: 2\r\n\r\n".encode())
        assert line.recv(100).startswith(b"HTTP/1.1 204")
        line.close()
    for line in stuck:
        line.close()
    until(lambda: counted(league, "open_connections") == 1 and not league.aggregator.listener._waiting)
    league.close()


@pytest.mark.slow
def test_many_handshakes_that_do_not_go_on_make_room_for_one_that_does(make: Callable[..., League]) -> None:
    league = make(handshakes=4, handshake=16.0)
    stuck = [plain(league) for _ in range(4)]
    line = secured(league)
    line.send(b"GET /v1/ca HTTP/1.1\r\nHost: x\r\n\r\n")
    assert line.recv(100).startswith(b"HTTP/1.1 200")
    for each in (*stuck, line):
        each.close()


def test_a_stranger_that_asks_too_often_is_told_when_to_come_back(make: Callable[..., League]) -> None:
    league = make(stranger_burst=7, stranger_rate=0.1)
    stop_time(league.aggregator.admission.strangers)
    ann, nobody = league.enrolled("ann"), league.nobody()
    got = [nobody.call("GET", "/v1/ca") for _ in range(3)]  # a connection and a request, each, of the same allowance
    assert [one.status for one in got] == [200] * 2 + [429]
    assert int(got[-1].headers["Retry-After"]) >= 1 and "too many" in got[-1].error
    assert ann.call("POST", f"/v1/alive?instance={ann.instance}").status == 204
    assert counted(league, "refused_total", reason="requests of strangers") == 1


@pytest.mark.slow
def test_a_request_costs_a_token_whatever_is_answered(make: Callable[..., League]) -> None:
    league = make(party_burst=100, party_rate=0.001, stranger_burst=100, stranger_rate=0.001)
    ann = league.enrolled("ann")
    listener, admission = league.aggregator.listener, league.aggregator.admission
    assert listener.strangers is admission.strangers

    def left(buckets: TokenBuckets) -> int:
        (level,) = (level for level, _ in buckets._levels.values())
        return round(level)

    asked = {
        404: "GET /nothing HTTP/1.1\r\nHansa-Protocol: 2",
        405: "DELETE /v1/ca HTTP/1.1\r\nHansa-Protocol: 2",
        426: "GET /v1/work HTTP/1.1\r\nHansa-Protocol: 9",
        505: "GET /v1/ca HTTP/2.0\r\nHansa-Protocol: 2",
    }
    for status, head in asked.items():
        party, strangers = left(admission.known), left(admission.strangers)
        for caller in (ann, None):
            line = secured(league, caller)
            line.send(f"{head}\r\nHost: x\r\nConnection: close\r\n\r\n".encode())
            assert f" {status} ".encode() in closed(line)[:16]
        assert (left(admission.known), left(admission.strangers)) == (party - 1, strangers - 2), status
    for path in ("/nothing", "/v1/ca"):  # what aiohttp answers before anything here sees it ends the connection
        line = secured(league, ann)
        line.send(f"GET {path} HTTP/1.1\r\nHost: x\r\nExpect: wonders\r\n\r\n".encode() * 2)
        got = closed(line)
        assert got.startswith(b"HTTP/1.1 417") and got.count(b"HTTP/1.1") == 1


def test_wrong_tokens_slow_a_stranger_down_and_leave_no_trace_in_the_record(make: Callable[..., League]) -> None:
    league = make(stranger_burst=31, stranger_rate=0.001, wrong_token=8)  # each costs 10, and a connection 1
    before = len(league.ledger.all("SELECT seq FROM log"))
    nobody, body = league.nobody(), pack(Enrolment("x" * 43, certificates.make_request(keys.new_key(), "ann")))
    got = [nobody.call("POST", "/v1/enrol", body).status for _ in range(4)]
    assert got == [403, 403, 403, 429]
    assert len(league.ledger.all("SELECT seq FROM log")) == before


def test_a_party_that_asks_too_often_is_told_when_to_come_back_and_others_are_served(
    make: Callable[..., League],
) -> None:
    league = make(party_burst=6, party_rate=0.5)
    stop_time(league.aggregator.admission.known)
    ann, bob = league.enrolled("ann"), league.enrolled("bob")
    got = [ann.call("POST", f"/v1/alive?instance={ann.instance}") for _ in range(8)]
    assert [one.status for one in got] == [204] * 5 + [429] * 3
    assert int(got[-1].headers["Retry-After"]) == 2
    assert "this certificate may make 0.5 requests per second" in got[-1].error
    assert bob.call("POST", f"/v1/alive?instance={bob.instance}").status == 204


def test_a_party_makes_so_many_requests_at_the_same_time_and_no_more(make: Callable[..., League]) -> None:
    league = make(party_requests=2)
    ann = league.enrolled("ann")
    lines = [secured(league, ann) for _ in range(2)]
    for k, line in enumerate(lines):
        line.send(f"GET /v1/work?instance={k:032x} HTTP/1.1\r\nHost: x\r\nHansa-Protocol: 2\r\n\r\n".encode())
    until(lambda: counted(league, "held_polls") == 2)
    got = ann.call("POST", f"/v1/alive?instance={ann.instance}")
    assert got.status == 429 and "2 requests at the same time" in got.error
    league.ask(parties=[0])
    assert any(line in select.select(lines, [], [], PATIENCE)[0] for line in lines)  # one of them got it
    until(lambda: ann.call("POST", f"/v1/alive?instance={ann.instance}").status == 204)
    for line in lines:
        line.close()


def test_one_question_for_work_of_an_instance_is_held(make: Callable[..., League]) -> None:
    league = make()
    ann = league.enrolled("ann")
    lines = [secured(league, ann) for _ in range(2)]
    question = f"GET /v1/work?instance={ann.instance} HTTP/1.1\r\nHost: x\r\nHansa-Protocol: 2\r\n\r\n".encode()
    lines[0].send(question)
    until(lambda: counted(league, "held_polls") == 1)
    lines[1].send(question)
    assert lines[0].recv(100).startswith(b"HTTP/1.1 204")
    assert counted(league, "held_polls") == 1
    league.ask(parties=[0])
    assert lines[1].recv(100).startswith(b"HTTP/1.1 200")
    for line in lines:
        line.close()


def test_a_certificate_has_so_many_connections_and_no_more(make: Callable[..., League]) -> None:
    league = make(party_connections=3)
    ann = league.enrolled("ann")
    lines = [secured(league, ann) for _ in range(2)]
    assert closed(secured(league, ann)) == b""
    assert counted(league, "refused_total", reason="connections of a party") == 1
    assert ann.call("POST", f"/v1/alive?instance={ann.instance}").status == 204
    for line in lines:
        line.close()


def test_a_party_cannot_fill_the_record_with_certificates(make: Callable[..., League]) -> None:
    league = make()
    ann = league.enrolled("ann")
    got = [
        ann.call("POST", "/v1/rotate", certificates.make_request(keys.new_key(), "ann"), About()).status
        for _ in range(12)
    ]
    assert got == [200] * 10 + [429] * 2
    assert len(league.events("certificate rotated")) == 10


def test_bodies_in_memory_are_bounded_over_all_parties(make: Callable[..., League]) -> None:
    league = make(bodies=1500)
    ann, bob = league.enrolled("ann"), league.enrolled("bob")
    line = secured(league, ann)
    line.send(b"POST /v1/rotate HTTP/1.1\r\nHost: x\r\nHansa-Protocol: 2\r\nContent-Length: 1000\r\n\r\nabc")
    until(lambda: bob.call("POST", "/v1/rotate", bytes(1000)).status == 503)
    line.close()
    until(lambda: bob.call("POST", "/v1/rotate", bytes(1000)).status == 401)  # it is not signed


def test_a_certificate_has_a_quarter_of_the_bodies_in_memory(make: Callable[..., League]) -> None:
    league = make(bodies=4000)
    ann, bob = league.enrolled("ann"), league.enrolled("bob")
    line = secured(league, ann)
    line.send(b"POST /v1/rotate HTTP/1.1\r\nHost: x\r\nHansa-Protocol: 2\r\nContent-Length: 900\r\n\r\nabc")
    until(lambda: league.aggregator.admission.bodies == 900)
    assert ann.call("POST", "/v1/rotate", bytes(200)).status == 503
    assert ann.call("POST", "/v1/rotate", bytes(100)).status == 401
    assert bob.call("POST", "/v1/rotate", bytes(1000)).status == 401
    line.close()
    until(lambda: not league.aggregator.admission.bodies_of)


def test_a_head_that_is_too_long_is_refused_in_a_line(make: Callable[..., League], caplog: Any) -> None:
    league = make()
    for head in (b"X-A: " + b"b" * 20000 + b"\r\n", b"X-A: b\r\n" * 200, b"no header\x00\r\n"):
        line = secured(league)
        line.send(b"GET /v1/ca HTTP/1.1\r\nHost: x\r\n" + head + b"\r\n")
        assert closed(line).startswith(b"HTTP/1.0 400")
    assert counted(league, "refused_total", reason="no proper request") == 3
    assert not [record for record in caplog.records if record.exc_info]


# What is kept of it


def test_what_a_party_is_denied_is_in_the_log_at_a_bounded_rate_and_all_of_it_is_counted(
    make: Callable[..., League],
) -> None:
    league = make()
    ann = league.enrolled("ann")
    stop_time(league.aggregator.admission._throttle._buckets)
    for _ in range(FIRST + 30):
        assert ann.call("GET", "/v1/jobs").status == 403
    assert len(league.events("denied")) == FIRST
    league.stop()
    league.start()
    entries = league.events("denied")
    assert len(entries) == FIRST + 1 and entries[-1]["party"] == "ann"
    assert json.loads(entries[-1]["detail"]) == {"left_out": 30}


def shown(
    league: League, name: str, when: datetime.timedelta, monkeypatch: pytest.MonkeyPatch, days: int = 1
) -> Caller:
    """A caller whose certificate was issued at another time, by the federation's authority."""
    now = datetime.datetime.now(datetime.UTC)
    key = keys.new_key()
    with monkeypatch.context() as patch:
        patch.setattr(certificates, "_now", lambda: now + when)
        pem = FederationFolder.open(league.folder).issue(key.public_key(), name, "party", days)
    return league.certified(name, key, pem)


def test_a_certificate_that_is_expired_or_of_another_authority_is_refused_and_who_showed_it_is_told(
    make: Callable[..., League], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    league = make()
    other = init(tmp_path / "other", "other", ["ann"], ["127.0.0.1"], 0)
    key = keys.new_key()
    foreign = league.certified("ann", key, other.issue(key.public_key(), "ann", "party", 1))
    expired = shown(league, "ann", datetime.timedelta(days=-3), monkeypatch)
    caplog.set_level(logging.WARNING, "hansa.net")
    for caller, reason in ((foreign, "certificate not accepted"), (expired, "certificate expired")):
        with contextlib.suppress(OSError):
            caller.call("POST", f"/v1/alive?instance={caller.instance}")
            raise AssertionError("it was let in")
        until(lambda reason=reason: counted(league, "handshake_failures_total", reason=reason) == 1)  # type: ignore[misc]
    said = [record.detail for record in caplog.records if record.getMessage() == "handshake failed"]
    assert [line["peer"] for line in said] == ["127.0.0.1"] * 2
    assert "expired" in said[1]["why"]


@pytest.mark.parametrize("days", [-1, 1])
def test_a_clock_that_is_a_day_off_does_not_matter(
    make: Callable[..., League], days: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The aggregator's clock is a day off: certificates that it issues now, for itself and for a party, are valid on
    the other day. Certificates begin two days before they are issued; an aggregator's is valid for a year, a party's
    for 90 days."""
    now = datetime.datetime.now(datetime.UTC)
    monkeypatch.setattr(certificates, "_now", lambda: now + datetime.timedelta(days=days))
    real = time.time
    monkeypatch.setattr("hansa.net.aggregator.registry.time.time", lambda: real() + days * 86400)
    league = make()
    ann = league.enrolled("ann")
    assert ann.call("POST", f"/v1/alive?instance={ann.instance}").status == 204
    body = certificates.make_request(keys.new_key(), "ann")
    assert ann.call("POST", "/v1/rotate", body, About()).status == 200


# TokenBuckets and settings


def test_a_bucket_gives_its_burst_then_its_rate() -> None:
    now = [0.0]
    bucket = TokenBuckets(2.0, 3, lambda: now[0])
    assert [bucket.take("a") for _ in range(4)] == [0, 0, 0, 0.5]
    assert bucket.take("b") == 0
    now[0] = 0.5
    assert bucket.take("a") == 0 and bucket.take("a") == 0.5
    now[0] = 100.0
    assert [bucket.take("a") for _ in range(4)] == [0, 0, 0, 0.5]
    bucket.spend("a", 100)
    now[0] = 102.0
    assert bucket.take("a") == 0.0, "a debt is no larger than a burst"


def test_buckets_do_not_grow_with_those_who_come(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hansa.net.transport.limits.MOST", 10)
    now = [0.0]
    bucket = TokenBuckets(1.0, 2, lambda: now[0])
    for k in range(100):
        bucket.take(k)
    assert len(bucket) <= 11
    assert bucket.take("another") > 0, "those beyond share one"
    now[0] = 10.0
    assert bucket.take("another") == 0


def test_notes_tell_how_many_were_left_out() -> None:
    now = [0.0]
    notes = LogThrottle(lambda: now[0])
    taken = [notes.take("a") for _ in range(FIRST + 5)]
    assert taken == [0] * FIRST + [None] * 5
    assert notes.due() == []
    now[0] = 61.0
    assert notes.take("a") == 5
    assert notes.take("a") is None
    assert notes.rest() == [("a", 1)] and notes.rest() == []


def test_an_ipv6_network_is_one_place() -> None:
    assert address_key("2001:db8::1") == address_key("2001:db8::2:3") != address_key("2001:db8:0:1::1")
    assert address_key("192.0.2.1") == "192.0.2.1" != address_key("192.0.2.2")


def test_after_a_shutdown_parties_come_back_spread_over_a_minute_if_there_are_many() -> None:
    waits = [retry_after(10_000, k / 10_000) * (1 + k % 97 / 97 / 2) for k in range(10_000)]  # as a client waits
    assert max(waits) <= 60
    assert max(sum(second <= wait < second + 1 for wait in waits) for second in range(60)) <= 400
    assert retry_after(5, 0.999) == 1


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ({"connections": 0}, "connections must be at least 1, got 0"),
        ({"stall": 120.0}, "stall must be at least 0.1 and at most 60"),
        ({"per_adress": 3}, "per_address"),
    ],
)
def test_a_limit_that_is_none_gets_a_sentence(table: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        fill(Limits, table, where="limits")


def test_the_file_of_a_new_federation_shows_every_limit_with_its_default() -> None:
    text = TOML.format(name="x", folder="x", parties='"a"', url="https://x:1", host="0.0.0.0", port=8443,
                       admin="127.0.0.1:9464", relays="")  # fmt: skip
    tree = tomllib.loads(re.sub(r"^# (\w+ = |\[)", r"\1", text, flags=re.M))
    assert fill(Limits, tree["limits"], where="limits") == Limits()
    assert set(tree["limits"]) == {field.name for field in dataclasses.fields(Limits)}
    assert fill(Serve, tree["serve"], where="serve") == Serve()
    assert set(tree["serve"]) == {field.name for field in dataclasses.fields(Serve)}
