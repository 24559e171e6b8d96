"""Shutdown of an aggregator: new requests are refused, open ones finish, and all clients are told when to return."""

from __future__ import annotations

import contextlib
import http.client
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import uvloop
from league import PARTIES, PATIENCE, SPOKEN, Asked, Caller, League, draft, until

from hansa.net.aggregator.federation import init
from hansa.net.aggregator.jobs import REST
from hansa.net.transport.signing import sign
from hansa.net.transport.tls import client_context
from hansa.net.transport.wire import Blob

LOOPS = {"asyncio": None, "uvloop": uvloop.new_event_loop}


@pytest.fixture(params=sorted(LOOPS))
def league(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[League]:
    league = League(tmp_path / "league", limits={"shutdown": PATIENCE}, loop=LOOPS[request.param])
    yield league
    for member in league.members.values():
        member.leave()


def tell(league: League) -> None:
    """Tell the aggregator to shut down."""
    league._loop.call_soon_threadsafe(league._done.set)


def ended(league: League) -> None:
    league._thread.join(PATIENCE)
    assert not league._thread.is_alive()
    for caller in league._callers:
        caller.close()


def held(league: League) -> float:
    return league.aggregator.metrics.registry.get_sample_value("hansa_held_polls") or 0.0


def test_questions_that_are_held_are_answered_with_when_to_come_back(league: League) -> None:
    callers, got = [league.enrolled(name) for name in PARTIES], []

    def wait(caller: Caller) -> None:
        got.append(caller.call("GET", f"/v1/work?instance={caller.instance}"))

    threads = [threading.Thread(target=wait, args=(caller,)) for caller in callers]
    for thread in threads:
        thread.start()
    until(lambda: held(league) == 3)
    tell(league)
    for thread in threads:
        thread.join(PATIENCE)
    ended(league)
    assert [one.status for one in got] == [503] * 3
    assert all(int(one.headers["Retry-After"]) >= 1 for one in got)
    assert all(one.headers["Connection"] == "close" for one in got)


def test_an_upload_under_way_is_finished_and_nobody_new_is_let_in(league: League) -> None:
    ann, bob = league.enrolled("ann"), league.enrolled("bob")
    ask = league.ask(parties=[0])
    data, digest = bytes(1000), "ab" * 32
    path = f"{ask.path}/parts/{digest}?at=0"
    assert ann.key is not None
    head = {
        "Host": "x",
        "Hansa-Protocol": SPOKEN,
        "Content-Length": "1000",
        **sign(ann.key, "PUT", path, data, ask.about),
    }
    lines = "".join(f"{name}: {value}\r\n" for name, value in head.items())
    raw = socket.create_connection(("127.0.0.1", league.port), timeout=PATIENCE)
    line = ann._tls.wrap_socket(raw, server_hostname="127.0.0.1")
    line.send(f"PUT {path} HTTP/1.1\r\n{lines}\r\n".encode() + data[:500])
    until(lambda: _bodies(league) == 1000)
    tell(league)
    until(lambda: not league.aggregator.listener._sockets)
    late = bob.call("POST", f"/v1/alive?instance={bob.instance}")
    assert late.status == 503 and "shutting down" in late.error and int(late.headers["Retry-After"]) >= 1
    with pytest.raises(OSError):
        socket.create_connection(("127.0.0.1", league.port), timeout=PATIENCE).recv(1)
        raise OSError  # on some systems the connection is made and closed
    line.send(data[500:])
    assert line.recv(1000).startswith(b"HTTP/1.1 204")
    line.close()
    ended(league)
    league.start()
    assert league.aggregator.blobs.received("party.ann", digest) == 1000
    league.stop()


def _bodies(league: League) -> int:
    return league.aggregator.admission.bodies


def test_an_upload_that_does_not_end_does_not_hold_up_the_end(tmp_path: Path) -> None:
    league = League(tmp_path / "league", limits={"shutdown": 0.2})
    nobody = league.nobody()
    nobody.connection.putrequest("POST", "/v1/enrol")
    nobody.connection.putheader("Hansa-Protocol", SPOKEN)
    nobody.connection.putheader("Content-Length", "1000")
    nobody.connection.endheaders(b"abc")
    until(lambda: _bodies(league) == 1000)
    tell(league)
    ended(league)


@pytest.mark.slow
def test_a_job_comes_to_rest_and_goes_on(tmp_path: Path) -> None:
    league = League(tmp_path / "league")
    tree = {"task": {"parties": ["x"], "model": "logistic"}, "algorithm": {"name": "fedavg"}, "run": {"rounds": 30}}
    league.join_all()
    job = league.submit(tree)
    until(lambda: len(league.shown(job)["rounds"]) >= 2)
    league.stop()
    league.start()
    assert league.ended(job)["status"] == "finished"
    assert [line["round"] for line in league.shown(job)["rounds"]] == list(range(1, 31))
    league.close()


@pytest.mark.slow
def test_a_process_that_is_told_to_end_does_so_with_0_and_told_twice_does_so_at_once(tmp_path: Path) -> None:
    init(tmp_path / "heart", "heart", ["ann"], ["127.0.0.1"], 0)
    config = tmp_path / "heart" / "federation.toml"
    config.write_text(
        config.read_text().replace("# shutdown = 20 ", "shutdown = 600 ").replace("# stall = 30 ", "stall = 60 ")
    )
    for twice in (False, True):
        command = [
            sys.executable,
            "-c",
            "from hansa.cli import main; main()",
            "serve",
            str(tmp_path / "heart"),
            "--json",
        ]
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
            assert process.stderr is not None
            line = next(line for line in process.stderr if '"serving"' in line)
            port = int(line.partition('"port": ')[2].partition(",")[0])
            if twice:  # with an open request, for which it would wait
                tls = client_context(tmp_path / "heart" / "ca.pem")
                raw = tls.wrap_socket(socket.create_connection(("127.0.0.1", port)), server_hostname="127.0.0.1")
                head = "POST /v1/enrol HTTP/1.1\r\nHost: x\r\nHansa-Protocol: 2\r\nContent-Length: 9\r\n"
                raw.send(f"{head}Expect: 100-continue\r\n\r\n".encode())
                assert raw.recv(100).startswith(b"HTTP/1.1 100")  # the request has begun
                raw.send(b"abcd")
            process.send_signal(signal.SIGTERM)
            assert any("shutting down" in line for line in process.stderr)
            if twice:
                process.send_signal(signal.SIGTERM)
            process.stderr.read()
            assert process.wait(PATIENCE) == (128 + signal.SIGTERM if twice else 0)
            if twice:
                raw.close()


def test_a_request_that_outlives_the_shutdown_does_not_hold_it_up(
    tmp_path: Path,
) -> None:
    for name, loop in LOOPS.items():
        league = League(tmp_path / name, limits={"shutdown": 0.1}, loop=loop)
        ann, begun, go = league.enrolled("ann"), threading.Event(), threading.Event()
        ask = league.ask(parties=[0])
        queued = league.queue.find(0, ask.key)
        assert queued is not None
        queued.check = lambda path, answer, begun=begun, go=go: (begun.set(), go.wait(PATIENCE))  # type: ignore
        blob = ann.upload(ask, b"update")

        def send(ann: Caller = ann, ask: Asked = ask, blob: Blob = blob) -> None:
            with contextlib.suppress(OSError, http.client.HTTPException):
                ann.reply(ask, draft(blob))

        sending = threading.Thread(target=send)
        sending.start()
        assert begun.wait(PATIENCE)
        tell(league)
        until(lambda league=league: league.ledger._closed)
        assert blob.digest not in league.aggregator.blobs  # it was cancelled before, and undone
        go.set()
        ended(league)
        sending.join(PATIENCE)


def test_jobs_come_to_rest_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    league = League(tmp_path / "league")
    waits: list[float] = []

    class Stubborn:
        """A thread that does not end and uses all the time that it gets; the clock advances as it does."""

        def join(self, timeout: float) -> None:
            waits.append(timeout)
            now[0] += timeout

    now = [100.0]
    league.runner._running = {str(k): (None, Stubborn()) for k in range(4)}  # type: ignore[misc]
    with monkeypatch.context() as patch:
        patch.setattr("hansa.net.aggregator.jobs.time.monotonic", lambda: now[0])
        league.runner.close()
    assert len(waits) == 4 and sum(waits) == REST
    league.runner._running = {}
    league.stop()
