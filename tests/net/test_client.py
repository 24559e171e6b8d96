"""The client repeats requests after transient errors, with back-off; it does not repeat refused ones."""

from __future__ import annotations

import asyncio
import hashlib
import os
import socket
import ssl
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st
from league import PATIENCE, SPOKEN, Caller, League

from hansa.net.transport import client as clients
from hansa.net.transport import keys
from hansa.net.transport.client import OPTIONS, Client, Refusal, Unreachable, backoff, retry_delay
from hansa.net.transport.http import trouble
from hansa.net.transport.signing import About, verify
from hansa.net.transport.tls import client_context, unverified_context
from hansa.net.transport.wire import CHUNK, Blob
from hansa.plumbing.errors import ConfigError, DataError
from in_loop import in_loop

chances = st.floats(0, 1, exclude_max=True)


@given(st.integers(1, 10_000), chances)
def test_a_pause_lies_between_half_a_second_and_a_bound_that_doubles(attempt: int, chance: float) -> None:
    seconds = backoff(attempt, lambda: chance)
    bound = min(60.0, 0.5 * 2.0 ** min(attempt, 20))
    assert 0.5 <= seconds <= max(0.5, bound) <= 60
    assert seconds == max(0.5, chance * bound)


def test_pauses_are_spread_over_all_of_their_range() -> None:
    drawn = [backoff(7) for _ in range(400)]
    assert min(drawn) < 5 and max(drawn) > 55 and len({round(seconds, 3) for seconds in drawn}) > 300


@given(st.floats(0, 1e300), chances)
def test_the_aggregators_own_word_is_a_least_pause_within_the_bounds(wait: float, chance: float) -> None:
    seconds = retry_delay(wait, lambda: chance)
    assert 0.5 <= seconds <= 90 and seconds >= min(wait, 60)


@asynccontextmanager
async def served(answer: Any, key: keys.PrivateKey | None, patience: int | None = None) -> AsyncIterator[Client]:
    """A client, not entered yet, of a server that answers so."""
    runner = web.ServerRunner(web.Server(answer))
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = site._server.sockets[0].getsockname()[1]  # type: ignore[union-attr]
        client = Client(f"https://127.0.0.1:{port}/", unverified_context(), key, patience)
        client.url = f"http://127.0.0.1:{port}"  # these tests do not depend on TLS
        yield client
    finally:
        await runner.cleanup()


class Far:
    """A server with scripted responses, and a client whose pauses are short."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.answers: list[Callable[[], web.Response] | None] = []
        self.asked: list[web.BaseRequest] = []
        self.slept: list[float] = []
        self.told: dict[str, str] = {}
        sleep = asyncio.sleep

        async def nap(seconds: float, *given: Any) -> None:
            if seconds:
                self.slept.append(seconds)
            await sleep(0)

        monkeypatch.setattr(clients.asyncio, "sleep", nap)

    async def _answer(self, request: web.BaseRequest) -> web.StreamResponse:
        self.asked.append(request)
        answer = self.answers.pop(0)
        if answer is None:  # the connection breaks
            assert request.transport is not None
            request.transport.abort()
            return web.Response()
        return answer()

    def call(self, *given: Any, patience: int | None = None, key: keys.PrivateKey | None = None, **more: Any) -> Any:
        async def main() -> Any:
            async with served(self._answer, key, patience) as client:
                client.pace.update(self.told)
                async with client:
                    return await client.call(*given, **more)

        return asyncio.run(main())


@pytest.fixture
def far(monkeypatch: pytest.MonkeyPatch) -> Far:
    return Far(monkeypatch)


def good() -> web.Response:
    return web.Response(body=b"good")


def saying(status: int, **headers: str) -> Callable[[], web.Response]:
    return lambda: trouble(status, f"because of {status}", {name.replace("_", "-"): v for name, v in headers.items()})


def test_what_fails_in_passing_is_tried_again(far: Far) -> None:
    far.answers = [None, saying(503), saying(500), lambda: web.Response(status=502, body=b"<html>"), saying(429), good]
    assert far.call("POST", "/x")[1] == b"good"
    assert len(far.slept) == 5 and all(0.5 <= seconds <= 16 for seconds in far.slept)


def test_a_connection_that_is_cut_comes_back_within_the_time_that_the_aggregator_gave_to_all(far: Far) -> None:
    far.told = {"Hansa-Spread": "600"}
    for _ in range(25):
        far.answers = [None, good]
        assert far.call("GET", "/x")[1] == b"good"
    assert len(far.slept) == 25 and max(far.slept) > 100  # not at once, nor within the second of a first pause
    far.slept, far.answers = [], [saying(503), good]
    far.call("GET", "/x")
    assert max(far.slept) <= 1  # it is running and responds


def test_the_aggregators_pace_is_kept(far: Far) -> None:
    far.answers = [saying(503, Retry_After="7"), saying(503, Retry_After="0"), saying(503, Retry_After="9" * 400),
                   saying(503, Retry_After="Fri, 31 Dec 1999 23:59:59 GMT"), good]  # fmt: skip
    far.call("GET", "/x")
    assert 7 <= far.slept[0] <= 10.5 and 0.5 <= far.slept[1] <= 0.75 and 60 <= far.slept[2] <= 90
    assert 0.5 <= far.slept[3] <= 60


@pytest.mark.parametrize("status", [400, 401, 403, 404, 409, 413, 416, 426])
def test_a_refusal_is_not_tried_again(far: Far, status: int) -> None:
    far.answers = [saying(status, Hansa_At="42"), good]
    with pytest.raises(Refusal, match=f"because of {status}") as caught:
        far.call("GET", "/x")
    assert caught.value.status == status and caught.value.at == 42 and far.slept == []


def test_patience_ends_where_there_is_a_bound_to_it(far: Far) -> None:
    far.answers = [saying(503)] * 3
    with pytest.raises(Unreachable, match="because of 503"):
        far.call("GET", "/x", patience=2)
    assert len(far.slept) == 2


def test_a_redirect_is_not_followed(far: Far) -> None:
    far.answers = [lambda: web.Response(status=307, headers={"Location": "http://127.0.0.1:1/"})]
    with pytest.raises(Refusal, match="status 307"):
        far.call("GET", "/x")
    assert len(far.asked) == 1


def test_each_attempt_is_signed_and_speaks_its_version(far: Far) -> None:
    key = keys.new_key()
    far.answers = [saying(503), good]
    far.call("POST", "/v1/x?y=1", b"body", About("job-1", 3, "3/round/0"), key=key)
    for request in far.asked:
        assert request.headers["Hansa-Protocol"] == SPOKEN
        assert verify(key.public_key(), "POST", "/v1/x?y=1", b"body", request.headers) == About("job-1", 3, "3/round/0")
    assert len({request.headers["Hansa-Nonce"] for request in far.asked}) == 2


class Shelf:
    """A server of uploads. It answers a chunk when the next one has arrived, if there is one."""

    def __init__(self, size: int) -> None:
        self.size, self.chunks, self.answered = size, dict[int, bytes](), list[int]()
        self.lose: set[int] = set()  # chunks that are refused once, as if the one before had not arrived

    async def answer(self, request: web.BaseRequest) -> web.StreamResponse:
        if request.method == "GET":
            return web.Response(status=204, headers={"Hansa-At": "0"})
        at, body = int(request.query["at"]), await request.content.read()
        if at in self.lose:
            self.lose.discard(at)
            return trouble(416, "too early", {"Hansa-At": str(at - CHUNK)})
        assert at not in self.answered or self.chunks[at] == body
        self.chunks[at], end = body, at + len(body)
        while end < self.size and end not in self.chunks and self.lose == set():
            await asyncio.sleep(0.001)
        self.answered.append(at)
        return web.Response(status=204, headers={"Hansa-At": str(end)})

    def take(self, data: bytes) -> None:
        """Let a client send data."""

        async def main() -> None:
            async with served(self.answer, keys.new_key()) as client, client:
                blob = Blob(hashlib.sha256(data).hexdigest(), len(data))
                await client.send("/v1/uploads", blob, memoryview(data), About())

        asyncio.run(asyncio.wait_for(main(), 60))


def test_a_chunk_is_sent_while_the_one_before_is_stored() -> None:
    data = os.urandom(3 * CHUNK + 5)
    shelf = Shelf(len(data))
    shelf.take(data)
    assert b"".join(shelf.chunks[at] for at in sorted(shelf.chunks)) == data
    assert sorted(shelf.answered) == [0, CHUNK, 2 * CHUNK, 3 * CHUNK]


def test_a_chunk_that_was_refused_too_early_is_sent_again() -> None:
    data = os.urandom(3 * CHUNK + 5)
    shelf = Shelf(len(data))
    shelf.lose = {CHUNK}
    shelf.take(data)
    assert b"".join(shelf.chunks[at] for at in sorted(shelf.chunks)) == data
    assert shelf.answered.count(0) == 1  # its acknowledgement counts, not the older answer to the next chunk


@in_loop
async def test_a_party_goes_on_when_the_aggregator_comes_back(league: League, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clients, "LEAST", 0.01)
    caller: Caller = league.enrolled("ann")
    assert caller.files is not None
    league.stop()
    async with Client(league.url, client_context(league.folder / "ca.pem", *caller.files)) as client:
        asked = asyncio.ensure_future(client.call("POST", f"/v1/alive?instance={caller.instance}"))
        await asyncio.to_thread(league.start)
        await asyncio.wait_for(asked, PATIENCE)


@pytest.mark.parametrize(
    "url",
    ["http://a.example", "a.example:8443", "https://", "https://a.example:99999", "https://a.example/v1", "ftp://a",
     "https://me@a.example", "https://a.example?x=1", ""],
)  # fmt: skip
def test_what_tls_would_not_protect_is_no_aggregators_url(url: str) -> None:
    with pytest.raises(ConfigError, match="expected a URL like https"):
        Client(url, unverified_context())


def test_a_url_that_is_refused_is_not_repeated_at_any_length() -> None:
    with pytest.raises(ConfigError, match="expected a URL like https") as caught:
        Client("http://" + "a" * 1_000_000, unverified_context())
    assert len(str(caught.value)) < 500


def test_a_lost_probe_of_a_silent_connection_does_not_end_it() -> None:
    probed = OPTIONS["TCP_KEEPIDLE"] + OPTIONS["TCP_KEEPINTVL"] * OPTIONS["TCP_KEEPCNT"]
    assert probed * 1000 <= OPTIONS["TCP_USER_TIMEOUT"] <= 60_000


def test_an_answer_longer_than_it_may_be_is_not_read(far: Any) -> None:
    far.answers = [lambda: web.Response(body=b"x" * 2000)]
    with pytest.raises(DataError, match="more than 1000 bytes"):
        far.call("GET", "/", limit=1000)


def test_a_client_leaves_no_connection_open_that_the_server_does_not_close(league: League) -> None:
    """The server reads no further after its response, so a TLS shutdown would wait for its side for 30 seconds."""
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(league.folder / "server.pem", league.folder / "server.key")
    done = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            with server.wrap_socket(listener.accept()[0], server_side=True) as line:
                line.recv(2**16)
                line.sendall(b"HTTP/1.1 403 Forbidden\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
                done.wait(PATIENCE)

        serving = threading.Thread(target=serve)
        serving.start()
        client = Client(f"https://127.0.0.1:{listener.getsockname()[1]}", unverified_context())

        async def main() -> None:
            async with client:
                with pytest.raises(Refusal):
                    await client.call("GET", "/v1/ca")
                assert [line.fileno() >= 0 for line in client._sockets] == [True]

        asyncio.run(main())
        try:
            assert [line.fileno() for line in client._sockets] == [-1]
        finally:
            done.set()
            serving.join(PATIENCE)
