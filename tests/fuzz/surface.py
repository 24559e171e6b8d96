"""The aggregator's routes as targets for bytes: every route with a valid request, and the role that may use it."""

from __future__ import annotations

import asyncio
import logging
import socket
import tempfile
from pathlib import Path

import targets as readers
from league import PLENTY, SPOKEN, Asked, League
from served import dial, hear, say, statuses

from hansa.net.aggregator import party_routes
from hansa.net.transport import certificates, signing, wire
from hansa.net.transport.signing import About

DIGEST = "ab" * 32
ASK = Asked().path
PARTS = [  # role, method, path, whether it concerns an ask
    ("party", "POST", "/v1/rotate", False), ("party", "GET", "/v1/work?instance=ab", False),
    ("party", "POST", "/v1/alive?instance=ab", False), ("party", "GET", f"{ASK}/message", False),
    ("party", "GET", f"{ASK}/task", False), ("party", "GET", f"{ASK}/parts/{DIGEST}", False),
    ("party", "PUT", f"{ASK}/parts/{DIGEST}?at=0", True), ("party", "POST", f"{ASK}/reply", True),
    ("operator", "GET", f"/v1/uploads/{DIGEST}", False), ("operator", "PUT", f"/v1/uploads/{DIGEST}?at=0", False),
    ("operator", "GET", "/v1/parties", False), ("operator", "POST", "/v1/parties/dot/invite", False),
    ("operator", "POST", "/v1/parties/cid/revoke", False), ("operator", "GET", "/v1/jobs", False),
    ("operator", "POST", "/v1/jobs", False), ("operator", "GET", "/v1/jobs/job-1?after=0", False),
    ("operator", "POST", "/v1/jobs/job-1/stop", False), ("operator", "GET", "/v1/jobs/job-1/model", False),
    ("operator", "GET", "/v1/log?after=0", False),
    ("operator", "GET", "/v1/log/head", False), ("operator", "GET", "/v1/log/lines?after=0&size=9", False),
    ("party", "GET", "/v1/log/certificate", False), ("anyone", "GET", "/v1/ca", False),
    ("anyone", "POST", "/v1/enrol", False),
]  # fmt: skip
BODIES = [
    b"", b"x", bytes(5000), wire.pack(wire.Answer(DIGEST, "0" * 128, why="no")),
    wire.pack(wire.Answer(DIGEST, "0" * 128, wire.Blob(DIGEST, 1), 3)),
    wire.pack(wire.Enrolment("s" * 43, certificates.make_request(readers.KEY, "ann"))),
    certificates.make_request(readers.KEY, "ann"),
    wire.pack(wire.Order("job", readers.TABLES[0])), wire.pack(wire.Order("job", readers.TABLES[1], None, 2, "mark")),
]  # fmt: skip


class Everybody:
    """A client for each role."""

    def __init__(self, league: League) -> None:
        self.league = league
        self.callers = {"party": league.enrolled("ann"), "operator": league.chief(), "anyone": league.nobody()}

    def signed(self, role: str, method: str, path: str, body: bytes, ask: bool) -> dict[str, str]:
        key = self.callers[role].key
        return signing.sign(key, method, path, body, Asked().about if ask else About()) if key is not None else {}

    def request(self, role: str, method: str, path: str, body: bytes, ask: bool) -> bytes:
        """A request as bytes."""
        lines = {"Host": "127.0.0.1", "Hansa-Protocol": SPOKEN, "Content-Length": str(len(body)),
                 **self.signed(role, method, path, body, ask)}  # fmt: skip
        head = "\r\n".join(
            (f"{method} {path} HTTP/1.1", *(f"{name}: {value}" for name, value in lines.items()), "", "")
        )
        return head.encode() + body


WORDS = [b"\r\n", b"\r\n\r\n", b"\x00", b"\xff", b"%00", b"%ff", b"..", b"%2e%2e%2f", b"Transfer-Encoding: chunked\r\n",
         b"Content-Length: 5\r\n", b"Content-Encoding: gzip\r\n", b"Expect: 100-continue\r\n",
         b"Connection: upgrade\r\n", b"Upgrade: websocket\r\n", b"Range: bytes=0-\r\n", b"Range: bytes=9-1,5-\r\n",
         b"If-Modified-Since: x\r\n",
         b"Cookie: \xff=\xff\r\n", b"Content-Type: multipart/form-data; boundary=\r\n",
         b"HTTP/0.9", b"HTTP/9.9", b"CONNECT ", b"PATCH ", b"?", b"&", b"#", b" ", b"\t", b":",
         b"9" * 5000, b"A" * 9000]  # fmt: skip


class Failures(logging.Handler):
    """Collects log lines of an aggregator in this process that should not occur."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.found: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.found.append(self.format(record))


class Surface:
    """An aggregator in this process, on its own thread; its failures are raised in the client."""

    def __init__(self) -> None:
        self._kept = tempfile.TemporaryDirectory(prefix="hansa-fuzz-")
        self._failures = Failures()
        logging.getLogger().addHandler(self._failures)
        logging.getLogger("hansa").setLevel(logging.INFO)
        party_routes.POLL = 0.05  # polls for work are held open only briefly
        self._league = League(Path(self._kept.name) / "league", limits=PLENTY)
        self._everybody = Everybody(self._league)

    def raw(self, data: bytes) -> None:
        """Send bytes over TLS; the first byte chooses the client."""
        role = list(self._everybody.callers)[data[0] % 3] if data else "anyone"
        with dial(self._league, self._everybody.callers[role].files) as stream:
            say(stream, data[1:])
            socket.socket.shutdown(stream, socket.SHUT_WR)  # no further request follows
            self._check(statuses(hear(stream)))

    def whole(self, data: bytes) -> None:
        """Send a correctly signed request: the first byte chooses the route, the rest is the body."""
        parts = [part for part in PARTS if "/v1/work" not in part[2]]
        role, method, path, ask = parts[data[0] % len(parts)] if data else parts[0]
        body = data[1:]
        signed = self._everybody.signed(role, method, path, body, ask)
        self._check([self._everybody.callers[role].call(method, path, body, headers=signed).status])

    def _check(self, got: list[int]) -> None:
        loop = self._league._loop
        for _ in range(3):  # until the server has finished the request
            asyncio.run_coroutine_threadsafe(asyncio.sleep(0), loop).result()
        assert all(status < 500 or status == 505 for status in got), got
        found, self._failures.found = self._failures.found, []
        assert not found, found[0]

    def seeds(self) -> tuple[list[bytes], list[bytes]]:
        """Requests for `raw` and for `whole`."""
        roles = list(self._everybody.callers)
        raw = [bytes([roles.index(part[0])]) + self._everybody.request(*part[:3], b"x", part[3]) for part in PARTS]
        whole = [bytes([number]) + body for number in range(len(PARTS) - 1) for body in BODIES]
        return raw, whole

    def targets(self) -> list[readers.Target]:
        raw, whole = self.seeds()
        return [readers.Target("http.raw", self.raw, raw, WORDS), readers.Target("http.whole", self.whole, whole)]
