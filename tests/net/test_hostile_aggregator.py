"""A hostile aggregator: a party refuses invalid responses in one sentence and keeps running."""

from __future__ import annotations

import asyncio
import gzip
import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from league import Asked, League, samples

from hansa.net.party import agent as parties
from hansa.net.party.store import TASK as TASK_FILE
from hansa.net.transport import client as clients
from hansa.net.transport import keys
from hansa.net.transport.client import Client, Refusal, Unreachable
from hansa.net.transport.signing import About
from hansa.net.transport.tls import unverified_context
from hansa.net.transport.wire import Blob, Trouble, Work, pack, unpack
from hansa.plumbing import codec
from hansa.plumbing.errors import DataError, HansaError

BLOB = Blob("ab" * 32, 10)


class Liar:
    """A server that answers each request with the next of the given bytes, and repeats the last."""

    def __init__(self, *answers: bytes, endless: bytes = b"") -> None:
        self.answers, self.endless = list(answers), endless
        self.heard: list[bytes] = []

    async def _talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                self.heard.append(head)
                lines = dict(line.split(": ", 1) for line in head.decode().splitlines()[1:] if line)
                await reader.readexactly(int(lines.get("Content-Length", 0)))
                answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
                writer.write(answer)
                if not answer or b"Connection: close" in answer:
                    return
                while self.endless:
                    writer.write(self.endless)
                    await writer.drain()
        except (OSError, EOFError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    def meet(self, work: Any) -> Any:
        """The result of `await work(client)`."""

        async def main() -> Any:
            server = await asyncio.start_server(self._talk, "127.0.0.1", 0)
            port = server.sockets[0].getsockname()[1]
            client = Client(f"https://127.0.0.1:{port}", unverified_context(), keys.new_key(), patience=0)
            client.url = f"http://127.0.0.1:{port}"  # these tests do not depend on TLS
            try:
                async with client:
                    return await work(client)
            finally:
                server.close()

        return asyncio.run(main())


def response(body: bytes = b"", status: str = "200 OK", *lines: str) -> bytes:
    return "\r\n".join((f"HTTP/1.1 {status}", f"Content-Length: {len(body)}", *lines, "", "")).encode() + body


def refusal(liar: Liar, work: Any) -> HansaError:
    with pytest.raises(HansaError) as caught:
        liar.meet(work)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 5000
    return caught.value


def asking(client: Client) -> Any:
    return client.call("GET", "/v1/work")


@pytest.mark.parametrize("head", ["HTTP/1.1 200 OK\r\n\r\n", "HTTP/1.1 500 x\r\nTransfer-Encoding: chunked\r\n\r\n"])
def test_a_body_without_end_is_not_read_to_it(head: str) -> None:
    piece = b"x" * 2**16
    endless = b"10000\r\n" + piece + b"\r\n" if "chunked" in head else piece
    assert "more than 4194304 bytes" in str(refusal(Liar(head.encode(), endless=endless), asking))


@pytest.mark.parametrize("coding", ["gzip", "deflate", "br"])
def test_what_is_compressed_is_not_unpacked(coding: str) -> None:
    bomb = gzip.compress(bytes(2**27))

    async def work(client: Client) -> Work:
        return unpack((await asking(client))[1], Work)

    liar = Liar(response(bomb, "200 OK", f"Content-Encoding: {coding}"))
    assert isinstance(refusal(liar, work), DataError)
    assert b"Accept-Encoding: identity" in liar.heard[0]


@pytest.mark.parametrize(
    "answer",
    [
        b"nonsense\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nX: " + b"y" * 100_000 + b"\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 50_000 + b"\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nx",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\nConnection: close\r\n\r\nx",
        b"HTTP/1.1 999999 x\r\n\r\n",
        b"",
    ],
    ids=range(8),
)
def test_what_is_no_http_is_no_answer(answer: bytes) -> None:
    assert isinstance(refusal(Liar(answer), asking), Unreachable)


def test_a_redirect_is_refused_and_cookies_are_not_kept() -> None:
    liar = Liar(response(b"", "302 Found", "Location: https://elsewhere.example/", "Set-Cookie: a=b; Path=/"),
                response(b"", "200 OK"))  # fmt: skip

    async def work(client: Client) -> None:
        with pytest.raises(Refusal, match="status 302"):
            await asking(client)
        await asking(client)

    liar.meet(work)
    assert len(liar.heard) == 2 and b"ookie" not in liar.heard[1]


def test_an_error_cannot_write_into_a_partys_log() -> None:
    said = "no\n2026-01-01 info all is well\x1b[2J\u202e" + "x" * 4000
    error = refusal(Liar(response(pack(Trouble(said)), "404 Not Found")), asking)
    assert isinstance(error, Refusal) and str(error).isprintable()


@pytest.mark.parametrize("at", ["", "x", "-1", "9" * 5000, "1e3", "٣", "²"])
def test_an_upload_that_stands_nowhere_is_given_up(at: str) -> None:
    for status in ("204 No Content", "416 Range"):
        lines = ["Content-Type: x", *([f"Hansa-At: {at}"] if at else [])]
        answer = "\r\n".join((f"HTTP/1.1 {status}", "Content-Length: 0", *lines, "", "")).encode()
        error = refusal(Liar(answer), lambda client: client.send("/v1/uploads", BLOB, memoryview(bytes(10)), About()))
        assert isinstance(error, (DataError, Refusal))


@pytest.mark.parametrize("status", ["204 No Content", "416 Range"])
def test_an_upload_that_never_advances_is_given_up(status: str) -> None:
    liar = Liar(f"HTTP/1.1 {status}\r\nContent-Length: 0\r\nHansa-At: 0\r\n\r\n".encode())
    error = refusal(liar, lambda client: client.send("/v1/uploads", BLOB, memoryview(bytes(10)), About()))
    assert "repeatedly lost the uploaded data" in str(error) and len(liar.heard) == clients.SETBACKS


def test_a_download_of_another_length_or_content_is_refused(tmp_path: Path) -> None:
    for body in (b"", b"x" * 9, b"x" * 11, b"x" * 10, b"x" * 2**22 + b"x"):
        error = refusal(Liar(response(body)), lambda client: client.fetch("/m", BLOB, tmp_path / "blob"))
        assert isinstance(error, DataError)
        (tmp_path / "blob").unlink(missing_ok=True)


def test_a_pause_of_many_digits_is_a_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    slept = []

    async def nap(seconds: float) -> None:
        slept.append(seconds)

    monkeypatch.setattr(clients.asyncio, "sleep", nap)
    answers = [response(b"", "503 No", f"Retry-After: {wait}") for wait in ("9" * 4000, "٣", "1e400", "-1", "nan")]
    liar = Liar(*answers, response(b"good"))

    async def work(client: Client) -> bytes:
        client.patience = None
        return (await asking(client))[1]

    assert liar.meet(work) == b"good"
    assert len(slept) == 5 and all(0.5 <= seconds <= 90 for seconds in slept)


# A real party, real messages


def header(tree: str, **tensors: Any) -> bytes:
    text = json.dumps({"__metadata__": {"tree": tree}, **tensors}).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


TASK = codec.encode({"task": {}, "preparations": []})
MESSAGES = {
    "nothing like it": b"message",
    "a lying length": (2**63).to_bytes(8, "little") + b"{}",
    "a header over the limit": header(" " * (2**24 + 8) + "{}"),
    "deep": header("[" * 100_000),
    "not a table": codec.encode([1]),
    "no op": codec.encode({"payload": {}, "round": 0}),
    "a payload that is none": codec.encode({"op": {"name": "sgd"}, "payload": 5, "round": 0}),
    "a round that is a text": codec.encode({"op": {"name": "sgd"}, "payload": {}, "round": "x"}),
    "an unknown op": codec.encode({"op": {"name": "x\n\x1b[2J" * 100}, "payload": {}, "round": 0}),
    "an op of another kind": codec.encode({"op": {"kind": "algorithm", "name": "fedavg"}, "payload": {}, "round": 0}),
    "an op that is a module": codec.encode({"op": {"kind": "os", "name": "system"}, "payload": {}, "round": 0}),
    "an op with a field of no such type": codec.encode(
        {"op": {"kind": "local", "name": "sgd", "lr": [torch.zeros(1)]}, "payload": {}, "round": 0}),
    "deep in an op": codec.encode({"op": {"kind": "local", "name": {"name": {"name": {}}}}, "payload": {}, "round": 0}),
    "half a character": header('{"op":{"kind":"local","name":"\\ud800"},"payload":{},"round":0}'),
    "a model of the aggregator's": (codec.encode({"op": {"kind": "local", "name": "sgd"}, "payload": {}, "round": 0}),
                                    codec.encode({"task": {"model": "os:system"}, "preparations": []})),
    "a model that is a number": (codec.encode({"op": {"kind": "local", "name": "sgd"}, "payload": {}, "round": 0}),
                                 codec.encode({"task": {"model": 5}, "preparations": []})),
    "a task that is none": (codec.encode({"op": {"kind": "local", "name": "sgd"}, "payload": {}, "round": 0}), b"task"),
}  # fmt: skip


def test_a_party_answers_every_message_that_is_none_with_a_sentence(
    league: League, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(parties, "PAUSE", 0.01)
    ann = league.join("ann", samples(0))
    caplog.set_level(logging.CRITICAL)
    for number, (name, given) in enumerate(MESSAGES.items()):
        message, task = given if isinstance(given, tuple) else (given, TASK)
        asked = league.ask(Asked(number=number), parties=(0,), message=message, task=task)
        league.until(lambda asked=asked: 0 in league.replies(asked))  # type: ignore[misc]
        why = league.replies(asked)[0]["why"]
        assert why and why.isprintable() and len(why) <= 4096, (name, why)
        league.close_ask(asked)
    assert ann.failure is None and ann._thread.is_alive()
    league.until(lambda: {path.name for path in ann.store.folder.glob("fetch-*")} <= {TASK_FILE})
