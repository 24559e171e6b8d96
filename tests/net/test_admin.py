"""The admin port: health, readiness with the reason, and metrics; read-only, for this machine. The live page on it
has its own tests (`tests/ui`)."""

from __future__ import annotations

import http.client
import json
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from league import PARTIES, PATIENCE, League
from prometheus_client.parser import text_string_to_metric_families

from hansa.net.aggregator.federation import FederationFolder, init
from hansa.net.aggregator.serve_settings import Serve
from hansa.plumbing.errors import ConfigError

ADMIN = {"admin": "127.0.0.1:0"}


@pytest.fixture
def league(found: Callable[..., League]) -> League:
    return found(**ADMIN)


def ask(league: League, path: str, method: str = "GET") -> tuple[int, str]:
    line = http.client.HTTPConnection("127.0.0.1", league.aggregator.admin.port, timeout=PATIENCE)
    try:
        line.request(method, path)
        got = line.getresponse()
        return got.status, got.read().decode()
    finally:
        line.close()


def numbers(league: League) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """The metrics, by name and labels."""
    families = text_string_to_metric_families(ask(league, "/metrics")[1])
    return {(one.name, tuple(sorted(one.labels.items()))): one.value for each in families for one in each.samples}


def test_an_aggregator_that_serves_lives_and_is_ready(league: League) -> None:
    assert ask(league, "/healthz")[0] == 200
    assert ask(league, "/readyz") == (200, "ready\n")


def test_there_is_nothing_else_and_nothing_to_write(league: League) -> None:
    for path in ("/v1/ca", "/v1/parties", "/metrics/x", "/assets", "/../ca.key"):
        assert ask(league, path)[0] == 404
    for path in ("/healthz", "/readyz", "/metrics"):
        for method in ("POST", "PUT", "DELETE", "HEAD"):
            assert ask(league, path, method)[0] == 405


def test_it_is_not_ready_before_its_jobs_are_resumed_and_while_it_shuts_down(league: League) -> None:
    admin = league.aggregator.admin
    admin.starting = True
    assert ask(league, "/readyz") == (503, "starting: jobs are not resumed yet\n")
    admin.starting, admin.closing = False, True
    assert ask(league, "/readyz") == (503, "shutting down\n")
    assert ask(league, "/healthz")[0] == 200


def test_it_is_not_ready_where_the_disk_is_nearly_full(tmp_path: Path) -> None:
    league = League(tmp_path / "league", min_free=2**62, **ADMIN)
    status, why = ask(league, "/readyz")
    assert status == 503 and "min_free" in why
    assert numbers(league)["hansa_ready", ()] == 0
    league.close()


def test_it_is_not_ready_where_the_ledger_cannot_be_written_and_is_again_when_it_can(league: League) -> None:
    league.ledger._db.execute("PRAGMA query_only = 1")
    status, why = ask(league, "/readyz")
    assert status == 503 and "cannot be written" in why
    league.ledger._db.execute("PRAGMA query_only = 0")
    assert ask(league, "/readyz")[0] == 200


def test_the_metrics_count_a_job_and_name_neither_party_nor_job(league: League) -> None:
    league.join_all()
    tree = {"task": {"parties": ["x"], "model": "logistic"}, "algorithm": {"name": "fedavg"}, "run": {"rounds": 2}}
    assert league.ended(league.submit(tree, "secretname"))["status"] == "finished"
    text, found = ask(league, "/metrics")[1], numbers(league)
    assert found["hansa_connected_parties", ()] == 3 == found["hansa_open_connections", ()]
    assert found["hansa_rounds_total", (("status", "closed"),)] == 2 == found["hansa_round_seconds_count", ()]
    assert found["hansa_replies_total", (("status", "accepted"),)] >= 6
    reply = (("route", "POST /v1/jobs/{job}/asks/{round}/{phase}/{number}/reply"), ("status", "200"))
    assert found["hansa_requests_total", reply] >= 6
    for name in ("blobs_bytes", "ledger_bytes", "log_entries", "ledger_commit_seconds_count", "disk_free_bytes"):
        assert found[f"hansa_{name}", ()] > 0, name
    for name in ("sent_bytes_total", "received_bytes_total"):
        assert found[f"hansa_{name}", ()] > 1000, name
    assert found["process_resident_memory_bytes", ()] > 0
    assert "hansa_event_loop_lag_seconds" in text and "hansa_ledger_queue" in text
    assert not [word for word in (*PARTIES, "secretname") if f'"{word}' in text]


def test_two_aggregators_in_one_process_count_apart(league: League, tmp_path: Path) -> None:
    other = League(tmp_path / "other", **ADMIN)
    other.enrolled("ann")
    enrol = (("route", "POST /v1/enrol"), ("status", "200"))
    assert numbers(other)["hansa_requests_total", enrol] == 1
    assert ("hansa_requests_total", enrol) not in numbers(league)
    other.close()


@pytest.mark.parametrize("where", ["0.0.0.0:9464", "192.0.2.1:9464", "[::]:9464", "aggregator.example.org:9464"])
def test_an_address_that_others_reach_has_to_be_meant(where: str) -> None:
    with pytest.raises(ConfigError, match="no TLS and no certificate"):
        Serve(admin=where)
    assert Serve(admin=where, admin_open=True).admin_at[1] == 9464


@pytest.mark.parametrize("where", ["9464", "localhost", "127.0.0.1:x", "127.0.0.1:99999"])
def test_an_address_that_is_none_gets_a_sentence(where: str) -> None:
    with pytest.raises(ConfigError, match="expected HOST:PORT"):
        Serve(admin=where)


def test_a_port_that_is_taken_gets_a_sentence_and_the_federation_can_be_served_again(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(AssertionError) as failed:
        League(tmp_path / "league", admin=f"127.0.0.1:{taken.getsockname()[1]}")
    assert "serve.admin" in str(failed.value)
    federation = FederationFolder.open(tmp_path / "league")
    assert not (federation.folder / "state" / "hansa.db-wal").exists(), "the ledger was closed"


def test_federations_on_one_machine_have_admin_ports_of_their_own(tmp_path: Path) -> None:
    def admin(name: str, port: int) -> Any:
        made = init(tmp_path / name, name, ["ann"], [], port)
        assert made == FederationFolder.open(tmp_path / name)
        return made.serve.admin_at

    assert admin("one", 8443) == ("127.0.0.1", 9464)
    assert admin("two", 8444) == ("127.0.0.1", 9465)
    assert admin("three", 50000) == ("127.0.0.1", 0)


@pytest.mark.parametrize(("listen", "host", "port"), [
    ("10.0.0.5", "10.0.0.5", 8443), ("127.0.0.1:9", "127.0.0.1", 9), ("[::]:0", "::", 0), ("::1", "::1", 8443),
    ("[fe80::1]", "fe80::1", 8443), ("inside.example.org:443", "inside.example.org", 443),
])  # fmt: skip
def test_the_address_to_listen_on_can_be_chosen(tmp_path: Path, listen: str, host: str, port: int) -> None:
    assert Serve().listening(listen).host == host
    init(tmp_path / "f", "f", ["ann"], ["aggregator.example.org"], 8443, listen)
    made = FederationFolder.open(tmp_path / "f")
    assert (made.serve.host, made.serve.port, made.url) == (host, port, "https://aggregator.example.org:8443")


@pytest.mark.parametrize("listen", ["", ":", ":80", "a:b", "[::1", "1.2.3.4:99999", "[]:1", "a:1:b"])
def test_an_address_that_is_none_is_refused_in_a_sentence(listen: str) -> None:
    with pytest.raises(ConfigError, match=r"--listen: expected ADDRESS or ADDRESS:PORT"):
        Serve().listening(listen)


@pytest.mark.parametrize("host", ["a..b", "x" * 70])
def test_a_name_that_no_machine_can_have_gets_a_sentence(tmp_path: Path, host: str) -> None:
    for name, serve in (("f", {"host": host}), ("g", {"admin": f"{host}:1", "admin_open": True})):
        with pytest.raises(AssertionError, match=r"ConfigError\('cannot listen on .*: invalid address"):
            League(tmp_path / name, **serve)


@pytest.mark.slow
def test_serve_listens_where_it_is_told(tmp_path: Path) -> None:
    init(tmp_path / "f", "f", ["ann"], [], 1)  # a port that nobody may use
    command = [sys.executable, "-m", "hansa.cli", "serve", str(tmp_path / "f"), "--json", "--listen", "127.0.0.2:0",
               "--admin", "127.0.0.3:0"]  # fmt: skip
    with subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL) as process:
        assert process.stderr is not None
        said = json.loads(process.stderr.readline())
        assert (said["event"], said["host"]) == ("serving", "127.0.0.2")
        for host, port in (("127.0.0.2", said["port"]), ("127.0.0.3", said["admin"])):
            socket.create_connection((host, port), timeout=PATIENCE).close()
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection(("127.0.0.1", port), timeout=PATIENCE)
        process.terminate()
