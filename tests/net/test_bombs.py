"""Input that is too large, too deep, too long or false: refused at a limit, with one sentence, in bounded memory."""

from __future__ import annotations

import contextlib
import gzip
import json
import tracemalloc
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from league import Asked, Caller, draft
from served import MIB, Served, dial, hear, hear_one, say, statuses

from hansa.core.sums import StoredReply
from hansa.net.aggregator.operator_routes import ORDER
from hansa.net.transport import signing, wire
from hansa.net.transport.signing import About
from hansa.net.transport.wire import ENVELOPE, Answer, Blob, pack
from hansa.plumbing import codec
from hansa.plumbing.errors import DataError

GROWTH = 64 * MIB


# Lying safetensors


def framed(header: Any, body: bytes = b"", length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return (len(text) if length is None else length).to_bytes(8, "little") + text + body


def entry(dtype: str = "F32", shape: Any = (2,), offsets: Any = (0, 8)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def holding(body: bytes = bytes(8), tree: Any = None, **tensors: Any) -> bytes:
    plain = {name: {"$tensor": name} for name in tensors} if tree is None else tree
    return framed({"__metadata__": {"tree": json.dumps(plain)}, **tensors}, body)


def texted(tree: bytes) -> bytes:
    """A file whose tree is that text."""
    return framed(b'{"__metadata__":{"tree":%s}}' % json.dumps(tree.decode()).encode())


REPLY = b'"__metadata__":{"tree":"{\\"w\\":{\\"$tensor\\":\\"w\\"}}"}'
ENTRY = b'{"dtype":"F32","shape":[2],"data_offsets":[0,8]}'
LIES = {
    "a length of 2^63": framed({}, length=2**63),
    "a length of 2^64 - 1": framed({}, length=2**64 - 1),
    "a length past the end": framed({}, length=64),
    "no header": bytes(8),
    "seven bytes": bytes(7),
    "a header over the limit": framed(b'{"__metadata__":{"tree":"{}"}}' + b" " * 2**24),
    "overlapping": holding(bytes(8), v=entry(), w=entry()),
    "partly overlapping": holding(bytes(12), v=entry(), w=entry(offsets=(4, 12))),
    "a gap": holding(bytes(24), v=entry(), w=entry(offsets=(16, 24))),
    "out of range": holding(w=entry(offsets=(8, 16))),
    "negative": holding(w=entry(offsets=(-8, 0))),
    "backwards": holding(w=entry(offsets=(8, 0))),
    "bytes left over": holding(bytes(9), w=entry()),
    "zero bytes of a huge shape": holding(b"", w=entry(shape=(2**40,), offsets=(0, 0))),
    "a huge shape times zero": holding(b"", w=entry(shape=(0, 2**47, 2**47), offsets=(0, 0))),
    "an extent of 2^63": holding(b"", w=entry(shape=(2**63, 0), offsets=(0, 0))),
    "a product of 2^64": holding(b"", w=entry(shape=(2**32, 2**32), offsets=(0, 0))),
    "a product that wraps to the size": holding(w=entry(shape=(2**47, 2**17 + 1, 2), offsets=(0, 8))),
    "a negative extent": holding(w=entry(shape=(-1, -2))),
    "a thousand dimensions": holding(w=entry(shape=(1,) * 1000 + (2,))),
    "a bool for a number": holding(bytes(4), w=entry(shape=(True,), offsets=(0, 4))),
    "a float for a number": framed(b'{%s,"w":{"dtype":"F32","shape":[2.0],"data_offsets":[0,8]}}' % REPLY, bytes(8)),
    "infinity for a number": framed(b'{%s,"w":{"dtype":"F32","shape":[1e999],"data_offsets":[0,8]}}' % REPLY, bytes(8)),
    "NaN for a number": framed(b'{%s,"w":{"dtype":"F32","shape":[NaN],"data_offsets":[0,8]}}' % REPLY, bytes(8)),
    "5,000 digits": framed(b'{%s,"w":{"dtype":"F32","shape":[%s],"data_offsets":[0,8]}}' % (REPLY, b"9" * 5000)),
    "a product of many digits": holding(w=entry(shape=(10**300,) * 3000)),
    "a name twice": framed(b'{%s,"w":%s,"w":%s}' % (REPLY, ENTRY, ENTRY), bytes(8)),
    "metadata twice": framed(b'{%s,%s,"w":%s}' % (REPLY, REPLY, ENTRY), bytes(8)),
    "a name twice in the tree": texted(b'{"a":1,"a":2}'),
    "an unknown type": holding(w=entry(dtype="F8_E4M3")),
    "a type that is a number": framed(b'{%s,"w":{"dtype":7,"shape":[2],"data_offsets":[0,8]}}' % REPLY, bytes(8)),
    "a field more": holding(w={**entry(), "more": 1}),
    "a field less": holding(w={"dtype": "F32", "shape": [2]}),
    "not aligned": b"%s%s" % ((len(REPLY) + 70).to_bytes(8, "little"), (b'{%s,"w":%s}' % (REPLY, ENTRY)).ljust(
        len(REPLY) + 70) + bytes(8)) if (len(REPLY) + 70) % 4 else b"",
    "a bool that is neither": holding(b"\2" + bytes(7), w=entry("BOOL", (8,))),
    "a tree that is deep": texted(b"[" * 100_000 + b"]" * 100_000),
    "a header that is deep": framed(b'{"__metadata__":' + b"[" * 100_000 + b"]" * 100_000 + b"}"),
    "a shape that is deep": framed(b'{%s,"w":{"dtype":"F32","shape":%s,"data_offsets":[0,8]}}' % (
        REPLY, b"[" * 900 + b"]" * 900)),
    "digits in the tree": texted(b'{"a":%s}' % (b"9" * 5000)),
    "half a character in a name": framed(b'{"__metadata__":{"tree":"{}"},"\\ud800":%s}' % ENTRY, bytes(8)),
    "half a character in the tree": texted(b'{"a":"\\ud800"}'),
    "half a character, and a long backslash": texted(b'{"a":"' + b"\\\\" * 9 + b'\\uDFFF"}'),
    "no UTF-8": framed(b'{"__metadata__":{"tree":"\xff"}}'),
    "UTF-16": framed(json.dumps({"__metadata__": {"tree": "{}"}}).encode("utf-16")),
    "no tree": framed({"__metadata__": {}}),
    "a tree for metadata": framed({"__metadata__": {"tree": {}}}),
    "a long name": holding(tree={"w": {"$tensor": "x" * 200_000}}),
    "no tensor of that name": texted(b'{"w":{"$tensor":"w"}}'),
    "more beside the mark": holding(tree={"w": {"$tensor": "w", "v": 1}, "v": {"$tensor": "v"}}, w=entry()),
}  # fmt: skip


def growth(work: Any) -> int:
    """The peak memory during a call."""
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("name", LIES)
def test_a_lying_file_is_refused_in_a_sentence_and_in_little_memory(tmp_path: Path, name: str) -> None:
    data = LIES[name]
    assert data, "the case is made wrongly"
    (tmp_path / "reply").write_bytes(data)

    def both() -> None:
        for read in (lambda: codec.decode(data, 2**24), lambda: StoredReply.read(tmp_path / "reply")):
            with pytest.raises(DataError) as caught:
                read()
            said = str(caught.value)
            assert "\n" not in said and len(said) < 300 and said.encode()

    assert growth(both) <= GROWTH


def test_what_the_lies_alter_is_right() -> None:
    assert torch.equal(codec.decode(holding(w=entry()))["w"], torch.zeros(2))
    assert codec.decode(framed(b'{%s,"w":%s}' % (REPLY, ENTRY), bytes(8)))["w"].shape == (2,)
    assert codec.decode(holding(b"\1" + bytes(7), w=entry("BOOL", (8,))))["w"].sum() == 1
    assert codec.decode(texted(b'{"a":"C:\\\\ud800"}')) == {"a": "C:\\ud800"}
    assert codec.decode(codec.encode({"a": "C:\\ud800 \U0001f600 \x07"})) == {"a": "C:\\ud800 \U0001f600 \x07"}
    assert codec.decode(holding(b"", w=entry(shape=(2**40, 0), offsets=(0, 0))))["w"].shape == (2**40, 0)


@pytest.mark.parametrize("one", [b"[]", b"{}", b"9"])
def test_a_reply_of_a_full_header_takes_little_memory(tmp_path: Path, one: bytes) -> None:
    """A sixteenth of the largest header takes a sixteenth of the memory: it repeats the same content."""
    count = 2**16 // (len(one) + 1) - 100
    (tmp_path / "reply").write_bytes(texted(b"[" + (one + b",") * count + one + b"]"))
    assert growth(lambda: codec.mapped(tmp_path / "reply")) <= GROWTH / 16


def test_tens_of_thousands_of_tensors_are_refused_by_the_size_of_their_header(tmp_path: Path) -> None:
    data = codec.encode(dict.fromkeys((f"t{number}" for number in range(30_000)), torch.zeros(0)))
    (tmp_path / "reply").write_bytes(data)
    with pytest.raises(DataError, match="at most 1048576 are allowed"):
        StoredReply.read(tmp_path / "reply")


# Envelopes


STRUCTS = [
    wire.Blob,
    wire.Work,
    wire.Answer,
    wire.Receipt,
    wire.Enrolment,
    wire.IssuedCertificate,
    wire.VaultMark,
    wire.Order,
    wire.Trouble,
]
ORDERED = b"\x82\xa4name\xa1a\xaaexperiment\x81\xa1x"  # an order up to the value of one of its fields
ENVELOPES = {
    "deep": b"\x91" * 100_000 + b"\xc0",
    "deep tables": b"\x81\xa1a" * 100_000 + b"\xc0",
    "an array of 2^32 - 1": b"\xdd\xff\xff\xff\xff",
    "a table of 2^32 - 1": b"\xdf\xff\xff\xff\xff",
    "a text of 2^32 - 1": b"\x81\xa3why\xdb\xff\xff\xff\xff",
    "bytes of 2^32 - 1": b"\x82\xa6secret\xa1x\xa7request\xc6\xff\xff\xff\xff",
    "an extension": b"\xc7\x08\x05" + bytes(8),
    "an extension of 2^32 - 1": b"\xc9\xff\xff\xff\xff\x05",
    "a time": b"\xd6\xff" + bytes(4),
    "a name that is no text": b"\x81\xc4\x03why\xa1x",
    "no UTF-8": b"\x81\xa3why\xa2\xff\xfe",
    "half a character": b"\x81\xa3why\xa3\xed\xa0\x80",
    "bytes left over": pack(Answer("0" * 64, "0" * 128, why="no")) + b"\xc0",
    "a text over its limit": pack(msgspec.structs.replace(Answer("0" * 64, "0" * 128), why="x" * 4097)),
    "a size below zero": msgspec.msgpack.encode({"blob": {"digest": "0" * 64, "size": -1}}),
    "a size of 2^64": b"\x81\xa4blob\x82\xa6digest\xd9\x40" + b"0" * 64 + b"\xa4size\xcf" + b"\xff" * 8,
    "a size that is not finite": b"\x81\xa4blob\x82\xa6digest\xd9\x40" + b"0" * 64 + b"\xa4size\xcb\x7f\xf0" + bytes(6),
    "a digest with a line's end": pack(Answer("0" * 64, "0" * 128, Blob("0" * 64 + "\n", 1), 1)),
    "deep in an order": ORDERED + b"\x91" * 100_000,
    "an order over its limit": ORDERED + b"\xdd\x00\x10\x00\x00" + b"\x90" * ENVELOPE,
    "nothing": b"",
}  # fmt: skip


@pytest.mark.parametrize("name", ENVELOPES)
def test_an_envelope_that_is_none_is_refused_in_a_sentence_and_in_little_memory(name: str) -> None:
    def read() -> None:
        for kind in STRUCTS:
            with pytest.raises(DataError) as caught:
                wire.unpack(ENVELOPES[name], kind)
            assert "\n" not in str(caught.value) and len(str(caught.value)) < 300

    assert growth(read) <= GROWTH


@pytest.mark.thin(0)
@pytest.mark.parametrize("one", [b"\x90", b"\x80", b"\xc0", b"\x81\x90\x80"])
def test_an_order_as_long_as_it_may_be_takes_little_memory(one: bytes) -> None:
    count = (ORDER - len(ORDERED) - 5) // len(one)
    data = ORDERED + b"\xdd" + count.to_bytes(4, "big") + one * count

    def read() -> None:
        with contextlib.suppress(DataError):
            wire.unpack(data, wire.Order)

    assert growth(read) <= GROWTH


# The aggregator, as a process


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    league = Served(tmp_path_factory.mktemp("bombs") / "league")
    yield league
    league.close()


@pytest.fixture(scope="module")
def ann(served: Served) -> Caller:
    return served.enrolled("ann")


class Watch:
    """Check the aggregator after an attack."""

    def __init__(self, served: Served) -> None:
        self.served = served
        self.files, self.before = served.files(), served.memory()
        served.forget_peak()

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            self.served.check()
            assert self.served.memory("VmHWM") - self.before <= GROWTH
            assert self.served.files() == self.files, "something is left on disk"


def head(method: str = "POST", path: str = "/v1/enrol", *lines: str, version: str = "1.1") -> bytes:
    """The head of a request."""
    first = f"{method} {path} HTTP/{version}", "Host: 127.0.0.1", "Hansa-Protocol: 2"
    return "\r\n".join((*first, *lines, "", "")).encode("utf-8", "surrogateescape")


def signed(caller: Caller, method: str, path: str, body: bytes, about: About) -> list[str]:
    assert caller.key is not None
    return [f"{name}: {value}" for name, value in signing.sign(caller.key, method, path, body, about).items()]


def asked(served: Served, data: bytes, files: Any = None) -> tuple[int, bytes]:
    """Status and body of the response to bytes."""
    with dial(served, files) as stream:
        say(stream, data)
        return hear_one(stream, data.split(b" ")[0].decode("latin-1"))


def heard(served: Served, data: bytes, files: Any = None) -> list[int]:
    """The statuses of all responses to bytes."""
    with dial(served, files) as stream:
        say(stream, data)
        return statuses(hear(stream))


CLOSE = "Connection: close"


def test_a_body_is_refused_by_the_length_that_it_states(served: Served, ann: Caller) -> None:
    with Watch(served):
        for caller, path, limit in ((None, "/v1/enrol", ENVELOPE), (ann, Asked().path + "/reply", ENVELOPE),
                                    (ann, f"{Asked().path}/parts/{'ab' * 32}?at=0", 4 * MIB)):  # fmt: skip
            method = "PUT" if "parts" in path else "POST"
            for length in (limit + 1, 2**40, 2**63 - 1):
                data = head(method, path, f"Content-Length: {length}", CLOSE)
                status, got = asked(served, data, caller.files if caller is not None else None)
                assert status == 413 and b"at most" in got
        data = head("POST", "/v1/enrol", f"Content-Length: {128 * MIB}", CLOSE) + bytes(128 * MIB)
        assert asked(served, data)[0] == 413
        assert asked(served, head("POST", "/v1/enrol", f"Content-Length: {2**64}", CLOSE))[0] == 400


def test_chunks_of_no_stated_length_are_not_read(served: Served, ann: Caller) -> None:
    chunked = "Transfer-Encoding: chunked"
    tiny = b"1\r\nx\r\n" * 300_000
    extended = b"1;" + b"e" * 4000 + b"\r\nx\r\n"
    with Watch(served):
        for body in (tiny, extended * 500, b"4000000\r\n" + bytes(64 * MIB), b"f" * 5000, b"-1\r\n", b"0x1\r\nx\r\n",
                     b"1" + b"0" * 30 + b"\r\n"):  # fmt: skip
            for files, path in ((None, "/v1/enrol"), (ann.files, Asked().path + "/reply")):
                assert asked(served, head("POST", path, chunked, CLOSE) + body, files)[0] in (400, 411)
        status, got = asked(served, head("POST", "/v1/enrol", chunked, CLOSE) + tiny[:600])
        assert status == 411 and b"Content-Length" in got


@pytest.mark.thin(1)
@pytest.mark.parametrize("coding", ["gzip", "deflate", "br", "zstd", "x-gzip", "GZIP", "identity, gzip", "unknown"])
def test_a_compressed_body_is_refused_and_never_unpacked(served: Served, ann: Caller, coding: str) -> None:
    bomb = gzip.compress(bytes(128 * MIB), 9) if "gzip" in coding.lower() else zlib.compress(bytes(MIB), 9)
    with Watch(served):
        for files, path in ((None, "/v1/enrol"), (ann.files, Asked().path + "/reply")):
            data = head("POST", path, f"Content-Encoding: {coding}", f"Content-Length: {len(bomb)}", CLOSE) + bomb
            status, got = asked(served, data, files)
            assert status == 415 and b"compressed" in got


def test_many_or_long_headers_and_long_paths_are_refused(served: Served) -> None:
    with Watch(served):
        for lines in (["X: " + "y" * 10_000], ["X" * 10_000 + ": y"], [f"X{number}: y" for number in range(10_000)],
                      ["X: " + "y" * 64 * MIB], [f"X: {'y' * 8000}"] * 200):  # fmt: skip
            assert asked(served, head("GET", "/v1/ca", *lines, CLOSE))[0] == 400
        for path in ("/" + "a" * 10_000, "/v1/ca?" + "a" * 10_000_000):
            assert asked(served, head("GET", path, CLOSE))[0] in (400, 414)


@pytest.mark.parametrize(
    "lines",
    [
        ["Content-Length: 3", "Content-Length: 4"],
        ["Content-Length: 3", "Content-Length: 3"],
        ["Content-Length: 3", "Transfer-Encoding: chunked"],
        ["Content-Length: 3, 4"],
        ["Content-Length: +3"],
        ["Content-Length: -3"],
        ["Content-Length: 0x3"],
        ["Content-Length: 3 3"],
        ["Content-Length : 3"],
        ["Transfer-Encoding: chunked, identity"],
        ["Transfer-Encoding: xchunked"],
        ["Transfer-Encoding : chunked"],
        ["Transfer-Encoding: chunked", "Transfer-Encoding: chunked"],
        ["X: a\x00b"],
        ["X: a\rb"],
        [" X: folded"],
    ],
)
def test_what_two_readers_could_read_in_two_ways_is_refused(served: Served, lines: list[str]) -> None:
    """A second request that is hidden in the body of the first gets no response."""
    with Watch(served):
        hidden = b"GET /v1/ca HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
        got = heard(served, head("POST", "/v1/enrol", *lines) + hidden)
        assert got and 400 <= got[0] < 500 and 200 not in got


def test_expectations_are_met_only_for_who_is_let_in(served: Served, ann: Caller) -> None:
    wait, path = "Expect: 100-continue", Asked().path + "/reply"
    body = pack(ann.signed(Asked(), draft(why="no")))
    with Watch(served):
        assert asked(served, head("POST", path, wait, f"Content-Length: {len(body)}", CLOSE))[0] == 401
        assert asked(served, head("POST", path, wait, "Content-Length: 9999999", CLOSE), ann.files)[0] == 413
        assert asked(served, head("POST", path, "Expect: miracles", CLOSE))[0] == 417
        lines = signed(ann, "POST", path, body, Asked().about)
        with dial(served, ann.files) as stream:
            stream.sendall(head("POST", path, wait, f"Content-Length: {len(body)}", *lines, CLOSE))
            assert stream.recv(100).startswith(b"HTTP/1.1 100 Continue\r\n\r\n")
            stream.sendall(body)
            assert statuses(hear(stream)) == [404], "the ask is not there, but the signatures were taken"


def test_old_versions_and_pipelines_are_answered_in_order(served: Served, ann: Caller) -> None:
    with Watch(served):
        assert asked(served, head("GET", "/v1/ca", version="1.0"))[0] == 200
        assert heard(served, head("GET", "/v1/ca", CLOSE, version="2.0")) == [505]
        many = head("GET", "/v1/ca") * 300 + head("GET", "/v1/nothing", CLOSE)
        assert heard(served, many, ann.files) == [200] * 300 + [404]
        assert asked(served, b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")[0] == 400
        assert asked(served, b"\x00" * 4096)[0] == 400
        assert asked(served, head("CONNECT", "127.0.0.1:22", CLOSE))[0] in (400, 404, 405)


@pytest.mark.parametrize(
    "path",
    ["/v1/../ca.key", "/v1/%2e%2e/ca.key", "/v1/jobs/..%2f..%2fca.key", "/v1/jobs/%00", "/v1/jobs/%ff%fe",
     "/v1/jobs/%ed%a0%80", "/v1/jobs/%F0%9F%98%80", "/v1/jobs/\u00e9", "/v1/jobs/%0d%0aX:%20y", "/v1/jobs/%",
     "//v1/ca", "/v1/ca/", "/v1/ca;x", "*", "/v1/jobs/a%2fb/model", "/v1/parties/%00/invite",
     "/v1/log?after=%00", "/v1/log?after=1&after=2", "/v1/jobs/x?after=%ff", "/v1/uploads/..%2f..%2f"],
)  # fmt: skip
def test_a_path_that_leads_nowhere_gets_a_sentence(served: Served, path: str) -> None:
    chief = served.chief()
    with Watch(served):
        for method in ("GET", "POST", "PUT", "DELETE", "OPTIONS", "HEAD", "PATCH", "TRACE"):
            lines = ["Content-Length: 0", CLOSE]
            if path.isascii():
                lines += signed(chief, method, path, b"", About())
            status, got = asked(served, head(method, path, *lines), chief.files)
            assert 400 <= status < 500 or (method, path) in [("GET", "/v1/log?after=1&after=2")], (method, status, got)


def test_a_form_is_no_envelope(served: Served) -> None:
    body = (
        b'--x\r\nContent-Disposition: form-data; name="a"; filename="../../a"\r\n\r\n' + b"y" * 5000 + b"\r\n--x--\r\n"
    )
    with Watch(served):
        lines = "Content-Type: multipart/form-data; boundary=x", f"Content-Length: {len(body)}", CLOSE
        data = head("POST", "/v1/enrol", *lines) + body
        status, got = asked(served, data)
        assert status == 400 and b"not a valid Enrolment" in got


@pytest.mark.slow
def test_a_header_that_is_no_text_is_answered_with_one(served: Served, ann: Caller) -> None:
    with Watch(served):
        data = head("GET", "/v1/work", CLOSE).replace(b"Hansa-Protocol: 2", b"Hansa-Protocol: \xff\xfe\x1b[2J")
        assert asked(served, data, ann.files)[0] in (400, 426)
        for name in (signing.JOB, signing.ROUND, signing.NONCE, signing.SIGNATURE):
            data = head("POST", "/v1/rotate", "Content-Length: 0", CLOSE, f"{name}: \udcff\udcfe")
            assert asked(served, data, ann.files)[0] in (400, 401)


@pytest.mark.slow
def test_an_order_of_anything_is_refused_or_taken_as_one(served: Served) -> None:
    chief = served.chief()
    full = ORDERED + b"\xdd" + (ORDER - 200).to_bytes(4, "big") + b"\x90" * (ORDER - 200)
    with Watch(served):
        for body in (*ENVELOPES.values(), full):
            got = chief.call("POST", "/v1/jobs", body, About())
            assert got.status in (400, 413) and got.error
            chief.close()
