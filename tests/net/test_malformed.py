"""Malformed requests on every port that we open: each is answered or dropped, and none prints a traceback."""

from __future__ import annotations

import json
import re
import socket
import ssl
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from league import PATIENCE
from served import Served

from hansa.net.transport.tls import client_context

NAMED = "Host: localhost\r\nConnection: close\r\n"
HEADS = (
    "", "Host: \r\n", "Host: a\r\nHost: b\r\n", "Host: [\r\n", "Host: [::1\r\n", "Host: ]:80\r\n", "Host: a\0b\r\n",
    "Host: localhost:99999999\r\n", "Host: \xff\xfe\r\n", "Host: user@localhost\r\n", f"Host: {'a' * 9000}\r\n",
    NAMED + "".join(f"X{i}: {i}\r\n" for i in range(200)), NAMED + "Content-Length: -1\r\n", NAMED + ": x\r\n",
    NAMED + "Content-Length: 99999999999999999999\r\n", NAMED + "Transfer-Encoding: gzip, chunked\r\n",
    NAMED + "Last-Event-ID: \xff\r\n", NAMED + f"Last-Event-ID: {'9' * 5000}\r\n", NAMED + "Last-Event-ID: -1-x\r\n",
    NAMED + "Authorization: Bearer \xff\xfe\r\n", NAMED + "Upgrade: websocket\r\nConnection: Upgrade\r\n",
)  # fmt: skip
TARGETS = (
    "/%", "/%zz", "/%00", "/%ff", "/\0", "/\xff", "/events?last=%ff%00", "/events?last=%", f"/{'a' * 9000}", "*", "x",
    "//", "http://", "http://[", "http://a:b/", "http://evil.example/", "http://user:pw@localhost/", "?", "/../..",
)  # fmt: skip
RAW = (
    b"\0\0\0\0\r\n\r\n", b"GET\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\r\n\r\n", b"GET / HTTP/1.1\r\n X: y\r\n\r\n", b"CONNECT [ HTTP/1.1\r\n\r\n",
    b"G\xffT / HTTP/1.1\r\n\r\n", b"GET / HTTP/1.0\r\n\r\n", b"GET / HTTP/1.1\r\nHost localhost\r\n\r\n",
)  # fmt: skip


def malformed() -> Iterator[bytes]:
    for path in ("/", "/events", "/metrics", "/v1/ca"):
        for head in HEADS:
            yield f"GET {path} HTTP/1.1\r\n{head}\r\n".encode("latin1")
    for head in HEADS:
        yield f"POST /start HTTP/1.1\r\n{head}\r\n".encode("latin1")
    for target in TARGETS:
        yield f"GET {target} HTTP/1.1\r\n{NAMED}\r\n".encode("latin1")
    yield from RAW


def throw(port: int, data: bytes, tls: ssl.SSLContext | None = None) -> bytes:
    """The beginning of the response to bytes; empty if the connection is closed."""
    line = socket.create_connection(("127.0.0.1", port), timeout=PATIENCE)
    try:
        if tls is not None:
            line = tls.wrap_socket(line, server_hostname="127.0.0.1")
        line.sendall(data)
        return line.recv(4096)
    except ConnectionError:
        return b""
    finally:
        line.close()


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    league = Served(tmp_path_factory.mktemp("malformed") / "league")
    yield league
    league.close()


def test_the_admin_port_prints_no_traceback_for_a_request_without_a_host(served: Served) -> None:
    (serving,) = (line for line in served.lines() if line["event"] == "serving")
    assert throw(int(str(serving["admin"])), b"GET / HTTP/1.1\r\n\r\n").partition(b" ")[2].startswith(b"400")
    served.check()


@pytest.mark.slow
def test_malformed_requests_to_the_admin_port_print_no_traceback(served: Served) -> None:
    (serving,) = (line for line in served.lines() if line["event"] == "serving")
    for data in malformed():
        assert b" 500 " not in throw(int(str(serving["admin"])), data)[:20], data
    served.check()


@pytest.mark.slow
def test_malformed_requests_to_the_parties_port_print_no_traceback(served: Served) -> None:
    tls = client_context(served.folder / "ca.pem", None, None)
    for data in malformed():
        assert b" 500 " not in throw(served.port, data, tls)[:20], data
    served.check()


@pytest.mark.slow
def test_malformed_requests_to_a_simulations_page_print_nothing(tmp_path: Path) -> None:
    with open(tmp_path / "said", "wb") as said:
        page = subprocess.Popen([sys.executable, "-m", "hansa.ui", str(tmp_path), "0"], stdin=subprocess.PIPE,
                                stdout=subprocess.PIPE, stderr=said)  # fmt: skip
    assert page.stdin is not None and page.stdout is not None
    try:
        page.stdin.write(b'{"token": "x"}\n')
        page.stdin.flush()
        port = json.loads(page.stdout.readline())["port"]
        for data in malformed():
            assert b" 500 " not in throw(port, data)[:20], data
        page.stdin.close()
        assert page.wait(PATIENCE) == 0
    finally:
        page.kill()
        page.wait()
        page.stdout.close()
    assert not re.search("Traceback|Error", (tmp_path / "said").read_text())
