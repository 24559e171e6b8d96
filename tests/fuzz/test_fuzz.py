"""Valid input, mutated: every reader takes it or refuses it, and the aggregator answers it and lives.

The examples are the same in every run. HANSA_FUZZ=10 takes ten times as many; fuzz.py goes on for as long as it is
told, led by what is reached.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import targets as readers
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from league import Asked, Caller
from served import Served, dial, say, statuses

from hansa.net import keys, signing, wire
from hansa.net.signing import About

MORE = int(os.environ.get("HANSA_FUZZ", "1"))
TARGETS = readers.targets()
BORDERS = sorted({sign * 2**power + off for power in (7, 8, 15, 16, 31, 32, 53, 63, 64) for sign in (1, -1)
                  for off in (-1, 0, 1)})  # fmt: skip


@st.composite
def mutated(draw: st.DrawFn, seeds: Sequence[bytes], words: Sequence[bytes] = ()) -> bytes:
    """A valid input after some changes: bytes flipped, parts cut, repeated, put elsewhere or taken from another one,
    words put in, numbers replaced by such as lie at a border."""
    data = bytearray(draw(st.sampled_from(seeds)))
    for _ in range(draw(st.integers(1, 4))):
        at, length = draw(st.integers(0, len(data))), draw(st.integers(0, 40))
        match draw(st.integers(0, 7)):
            case 0 if at < len(data):
                data[at] ^= 1 << draw(st.integers(0, 7))
            case 1:
                del data[at : at + length]
            case 2:
                data[at:at] = data[at : at + length] * draw(st.sampled_from([1, 2, 500]))
            case 3:
                del data[at:]
            case 4:
                other = draw(st.sampled_from(seeds))
                data[at:] = other[draw(st.integers(0, len(other))) :]
            case 5 if words:
                data[at : at + draw(st.integers(0, 8))] = draw(st.sampled_from(words))
            case 6:
                number = draw(st.sampled_from(BORDERS))
                size = draw(st.sampled_from([1, 2, 4, 8]))
                data[at : at + size] = (number % 2 ** (8 * size)).to_bytes(
                    size, draw(st.sampled_from(["big", "little"]))
                )
            case _:
                digits = [at + k for k, byte in enumerate(data[at:]) if chr(byte).isdigit()][:1]
                for place in digits:
                    data[place : place + 1] = str(draw(st.sampled_from(BORDERS))).encode()
    return bytes(data)


@pytest.mark.parametrize("name", TARGETS)
def test_what_a_reader_must_take_it_takes(name: str) -> None:
    target = TARGETS[name]
    assert any([target.run(seed) for seed in target.seeds])


@pytest.mark.parametrize("name", TARGETS)
def test_a_reader_takes_mutated_input_or_refuses_it(name: str) -> None:
    target = TARGETS[name]

    @settings(max_examples=120 * MORE, suppress_health_check=list(HealthCheck))
    @given(mutated(target.seeds, target.words))
    def run(data: bytes) -> None:
        target.run(data)

    run()


FOUND = {  # by reader: what once made it fail in another way
    "order": [readers.wire.pack(readers.wire.Blob("ab" * 32, 1)),
              b"\x82\xa4name\xa3job\xaaexperiment\x81\xa4task\x81\x05\x05",
              b"\x82\xa4name\xa3job\xaaexperiment\x81\xa4task\x81\xa5model\xc4\x01x",
              b"\x82\xa4name\xa3job\xaaexperiment\x81\xa4task\x81\xa5model\xd6\xff\x00\x00\x00\x00"],
    "federation.toml": [b"name = " + b"9" * 5000, b"name = " + b"[" * 5000],
    "party.toml": [b"min_cohort = " + b"9" * 5000, b"jobs = " + b"[" * 5000],
}  # fmt: skip


@pytest.mark.parametrize(("name", "data"), [(name, data) for name, found in FOUND.items() for data in found])
def test_what_was_found_before_is_refused(name: str, data: bytes) -> None:
    assert TARGETS[name].run(data) is False


# The aggregator


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    league = Served(tmp_path_factory.mktemp("fuzz") / "league")
    yield league
    league.close()


DIGEST = "ab" * 32
ASK = Asked().path
PARTS = [  # role, method, path, whether it is about an ask
    ("party", "POST", "/v1/rotate", False), ("party", "GET", "/v1/work?instance=ab", False),
    ("party", "POST", "/v1/alive?instance=ab", False), ("party", "GET", f"{ASK}/message", False),
    ("party", "GET", f"{ASK}/task", False), ("party", "GET", f"{ASK}/parts/{DIGEST}", False),
    ("party", "PUT", f"{ASK}/parts/{DIGEST}?at=0", True), ("party", "POST", f"{ASK}/reply", True),
    ("operator", "GET", f"/v1/uploads/{DIGEST}", False), ("operator", "PUT", f"/v1/uploads/{DIGEST}?at=0", False),
    ("operator", "GET", "/v1/parties", False), ("operator", "POST", "/v1/parties/dot/invite", False),
    ("operator", "POST", "/v1/parties/cid/revoke", False), ("operator", "GET", "/v1/jobs", False),
    ("operator", "POST", "/v1/jobs", False), ("operator", "GET", "/v1/jobs/job-1?after=0", False),
    ("operator", "POST", "/v1/jobs/job-1/stop", False), ("operator", "GET", "/v1/jobs/job-1/model", False),
    ("operator", "GET", "/v1/log?after=0", False), ("anyone", "GET", "/v1/ca", False),
    ("anyone", "POST", "/v1/enrol", False),
]  # fmt: skip
BODIES = [
    b"", b"x", bytes(5000), wire.pack(wire.Answer(why="no")), wire.pack(wire.Answer(wire.Blob(DIGEST, 1))),
    wire.pack(wire.Enrolment("s" * 43, keys.request(readers.KEY, "ann"))), keys.request(readers.KEY, "ann"),
    wire.pack(wire.Order("job", readers.TABLES[0])), wire.pack(wire.Order("job", readers.TABLES[1], None, 2, "mark")),
]  # fmt: skip


class Everybody:
    """A caller for each role."""

    def __init__(self, served: Served) -> None:
        self.served = served
        self.callers = {"party": served.enrolled("ann"), "operator": served.chief(), "anyone": served.nobody()}

    def signed(self, role: str, method: str, path: str, body: bytes, ask: bool) -> dict[str, str]:
        key = self.callers[role].key
        return signing.sign(key, method, path, body, Asked().about if ask else About()) if key is not None else {}

    def request(self, role: str, method: str, path: str, body: bytes, ask: bool) -> bytes:
        """A request as bytes."""
        lines = {"Host": "127.0.0.1", "Hansa-Protocol": "1", "Content-Length": str(len(body)),
                 **self.signed(role, method, path, body, ask)}  # fmt: skip
        head = "\r\n".join(
            (f"{method} {path} HTTP/1.1", *(f"{name}: {value}" for name, value in lines.items()), "", "")
        )
        return head.encode() + body


@pytest.fixture(scope="module")
def everybody(served: Served) -> Everybody:
    return Everybody(served)


WORDS = [b"\r\n", b"\r\n\r\n", b"\x00", b"\xff", b"%00", b"%ff", b"..", b"%2e%2e%2f", b"Transfer-Encoding: chunked\r\n",
         b"Content-Length: 5\r\n", b"Content-Encoding: gzip\r\n", b"Expect: 100-continue\r\n",
         b"Connection: upgrade\r\n", b"Upgrade: websocket\r\n", b"Range: bytes=0-\r\n", b"Range: bytes=9-1,5-\r\n",
         b"If-Modified-Since: x\r\n",
         b"Cookie: \xff=\xff\r\n", b"Content-Type: multipart/form-data; boundary=\r\n",
         b"HTTP/0.9", b"HTTP/9.9", b"CONNECT ", b"PATCH ", b"?", b"&", b"#", b" ", b"\t", b":",
         b"9" * 5000, b"A" * 9000]  # fmt: skip


def test_a_mutated_request_is_answered_or_the_connection_closed(served: Served, everybody: Everybody) -> None:
    requests: dict[str, list[bytes]] = {role: [] for role in everybody.callers}
    for role, method, path, ask in PARTS:
        requests[role] += [everybody.request(role, method, path, body, ask) for body in BODIES]

    @settings(max_examples=150 * MORE, suppress_health_check=list(HealthCheck))
    @given(
        st.sampled_from(sorted(requests)).flatmap(lambda role: st.tuples(st.just(role), mutated(requests[role], WORDS)))
    )
    def run(drawn: tuple[str, bytes]) -> None:
        role, data = drawn
        with dial(served, everybody.callers[role].files) as stream:
            stream.settimeout(0.05)  # what is no whole request is waited for in vain
            say(stream, data)
            try:
                got = stream.recv(2**16)
            except OSError:
                return
        assert all(status < 500 or status == 505 for status in statuses(got)), got

    run()
    served.check()


@st.composite
def whole(draw: st.DrawFn) -> tuple[Any, bytes, str]:
    """A request to a route that is there, right or nearly so, and whose certificate comes with it."""
    part = draw(st.sampled_from([part for part in PARTS if "/v1/work" not in part[2]]))  # which is held open
    bodies = [*BODIES, draw(mutated(BODIES[3:]))]
    return part, draw(st.sampled_from(bodies)), draw(st.sampled_from([part[0], part[0], part[0], "party", "operator"]))


@example([(PARTS[14], BODIES[-2], "operator"), (PARTS[15], b"", "operator"), (PARTS[16], b"", "operator")])
@settings(max_examples=40 * MORE, suppress_health_check=list(HealthCheck))
@given(st.lists(whole(), min_size=1, max_size=8))
def _orders(served: Served, everybody: Everybody, calls: list[tuple[Any, bytes, str]]) -> None:
    for (_, method, path, ask), body, who in calls:
        caller: Caller = everybody.callers[who]
        got = caller.call(method, path, body, headers=everybody.signed(who, method, path, body, ask))
        assert got.status < 500, (method, path, got)
        assert got.status < 400 or got.error


def test_whole_requests_in_any_order_are_answered(served: Served, everybody: Everybody) -> None:
    _orders(served, everybody)
    served.check()
