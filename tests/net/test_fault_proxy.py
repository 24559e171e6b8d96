"""The fault proxy injects the configured faults, and never alters, reorders or invents a byte."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import hashlib
import json
import math
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from typing import Any

import fault_proxy
import pytest
import tcp_proxy as module
from tcp_proxy import BUFFER, NEAR, SEGMENT, Dice, Faults, Proxy, ProxyThread, parse_faults

from hansa.plumbing.errors import ConfigError
from in_loop import SOON, in_loop

WHILE = 0.15  # seconds in which an unwanted event is watched for
Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Echo:
    """A server that echoes; its input and the ends of its connections can be inspected."""

    def __init__(self) -> None:
        self.got: list[bytearray] = []
        self.ends: list[str] = []

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        mine, number = bytearray(), len(self.ends)
        self.got.append(mine)
        self.ends.append("")
        try:
            while data := await reader.read(65536):
                mine += data
                writer.write(data)
                await writer.drain()
            self.ends[number] = "end"
        except ConnectionError:
            self.ends[number] = "reset"
        except asyncio.CancelledError:
            pass
        writer.close()


@contextlib.asynccontextmanager
async def through(faults: Faults = Faults(), **more: Any) -> AsyncIterator[tuple[Proxy, Echo]]:  # noqa: B008
    echo = Echo()
    server = await asyncio.start_server(echo.serve, "127.0.0.1", 0)
    async with Proxy(("127.0.0.1", server.sockets[0].getsockname()[1]), faults, **more) as proxy:
        yield proxy, echo
    server.close()


async def connect(proxy: Proxy) -> Streams:
    return await asyncio.open_connection("127.0.0.1", proxy.port)


async def say(streams: Streams, data: bytes) -> bytes:
    """Send data and wait for the echo."""
    streams[1].write(data)
    return await asyncio.wait_for(streams[0].readexactly(len(data)), SOON)


async def close(*all_streams: Streams) -> None:
    for _, writer in all_streams:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


async def until(found: Any) -> None:
    while not found():
        await asyncio.sleep(0.002)


async def silent(streams: Streams) -> bool:
    """Whether nothing arrives, not even an end of stream."""
    try:
        await asyncio.wait_for(streams[0].read(1), WHILE)
    except TimeoutError:
        return True
    return False


WEATHER = Faults(latency=0.004, jitter=0.003, loss=0.05, rto=0.002, rate=20e6)


@pytest.mark.parametrize("faults", [Faults(), WEATHER])
@in_loop
async def test_bytes_arrive_as_they_were_sent_and_so_does_the_end(faults: Faults) -> None:
    async with through(faults, down=Faults(latency=0.002), seed=3) as (proxy, echo):
        data = [os.urandom(300_000 + k) for k in range(3)]
        streams = [await connect(proxy) for _ in data]
        for (_, writer), mine in zip(streams, data, strict=True):
            writer.write(mine)
            writer.write_eof()
        back = await asyncio.gather(*(reader.read(-1) for reader, _ in streams))
        assert [hashlib.sha256(b).digest() for b in back] == [hashlib.sha256(d).digest() for d in data]
        assert sorted(map(bytes, echo.got)) == sorted(data) and echo.ends == ["end"] * 3
        total = sum(map(len, data))
        assert proxy.counts["bytes up"] == proxy.counts["bytes down"] == total
        assert (proxy.counts["loss"] > 0) == (faults.loss > 0)
        await close(*streams)
        await until(lambda: not proxy.connections)


class Clocked:
    """An event loop's clock that records sleeps, so that a test does not measure time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.slept: list[float] = []
        sleep = asyncio.sleep

        async def noted(seconds: float, *given: Any) -> None:
            self.slept.append(seconds)
            await sleep(min(seconds, 0.01))

        monkeypatch.setattr("tcp_proxy.asyncio.sleep", noted)


@in_loop
async def test_latency_is_waited_for_in_both_directions_and_for_the_handshake(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clocked(monkeypatch)
    async with through(Faults(latency=3.0), down=Faults(latency=1.0)) as (proxy, _):
        streams = await connect(proxy)
        assert await say(streams, b"hello") == b"hello"
        assert clock.slept[0] == 4.0
        waits = [round(s) for s in clock.slept[1:] if s > 0.5]
        assert waits == [3, 1]
        await close(streams)


@in_loop
async def test_jitter_spreads_and_keeps_the_order() -> None:
    dice = Dice(1)
    delays = [dice.delay(Faults(latency=1.0, jitter=0.5)) for _ in range(1000)]
    assert 1.0 <= min(delays) < 1.02 and 1.48 < max(delays) <= 1.5
    async with through(Faults(jitter=0.01)) as (proxy, _):
        streams = await connect(proxy)
        for k in range(100):  # pieces that are on their way together
            streams[1].write(f"{k:04d}".encode())
            await asyncio.sleep(0.0005)
        assert await streams[0].readexactly(400) == b"".join(f"{k:04d}".encode() for k in range(100))
        await close(streams)


def test_a_lost_segment_stalls_its_direction_and_twice_as_long_when_lost_again() -> None:
    faults, dice = Faults(loss=0.25, rto=0.1), Dice(5)
    stalls = [dice.fate(faults, SEGMENT).stall for _ in range(20_000)]
    for times, stall in ((1, 0.1), (2, 0.3), (3, 0.7)):
        share = sum(math.isclose(s, stall) for s in stalls) / len(stalls)
        assert share == pytest.approx(0.75 * 0.25**times, abs=0.02)
    many = [dice.fate(faults, 8 * SEGMENT).stall for _ in range(5000)]  # each of them may be lost
    assert sum(s == 0 for s in many) / len(many) == pytest.approx(0.75**8, abs=0.02)


@pytest.mark.parametrize("faults", [Faults(loss=0.2, rto=0.001), Faults(reset=0.1), Faults(silence=0.1)])
def test_the_same_seed_gives_the_same_faults(faults: Faults) -> None:
    def happened(seed: int) -> list[Any]:
        events: list[dict[str, Any]] = []
        heard: list[int] = []

        async def main() -> None:
            async with through(faults, seed=seed, down=Faults(), tell=events.append) as (proxy, echo):
                for _ in range(3):
                    streams = await connect(proxy)
                    with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
                        for k in range(30):
                            streams[1].write(bytes([k]))
                            silenced = asyncio.ensure_future(
                                until(lambda: any(c.silent for c in proxy.connections.values()))
                            )
                            read = asyncio.ensure_future(streams[0].readexactly(1))
                            await asyncio.wait((silenced, read), return_when=asyncio.FIRST_COMPLETED)
                            silenced.cancel()
                            if not read.done():
                                read.cancel()
                                break
                            read.result()
                    await close(streams)
                    proxy.reset_all()
                heard.extend(len(got) for got in echo.got)

        asyncio.run(asyncio.wait_for(main(), SOON))
        return [*heard, *(event for event in events if event["event"] != "peer reset")]

    first = happened(7)
    assert first and first == happened(7)
    assert first != happened(8)


@in_loop
async def test_throttling_paces_by_the_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clocked(monkeypatch)
    async with through(Faults(rate=10_000), down=Faults()) as (proxy, _):
        streams = await connect(proxy)
        assert len(await say(streams, bytes(5000))) == 5000
        paused = [s for s in clock.slept if s > 0]
        assert sum(paused) == pytest.approx(0.5) and max(paused) <= 0.02 + 1e-9
        await close(streams)


@pytest.mark.parametrize("fault", ["rate", "drip", "partition", "silence"])
@in_loop
async def test_a_direction_that_stands_still_makes_its_writer_wait(fault: str) -> None:
    """Data that are not passed on are not read: at most the sockets' buffers and one window are in transit."""
    faults = {"rate": Faults(rate=0.001), "drip": Faults(drip=1000.0)}.get(fault, Faults())
    async with through(faults) as (proxy, echo):
        reader, writer = await connect(proxy)
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER)
        await until(lambda: proxy.connections)
        if fault in ("partition", "silence"):
            assert await say((reader, writer), b"x") == b"x"
            proxy.partition() if fault == "partition" else proxy.silence_all()
        size = 64 * NEAR
        writer.write(bytes(size))
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(writer.drain(), WHILE)
        left = writer.transport.get_write_buffer_size()
        assert left > size - NEAR - 8 * BUFFER - 2**17, "it was taken, and is piled up somewhere"
        assert sum(map(len, echo.got)) <= 2
        if fault == "partition":
            proxy.heal()
            assert len(await reader.readexactly(size)) == size
        await close((reader, writer)) if fault == "partition" else writer.transport.abort()


@in_loop
async def test_a_slow_reader_makes_the_server_wait() -> None:
    async with through(Faults(), down=Faults(rate=0.001)) as (proxy, echo):
        streams = await connect(proxy)
        await until(lambda: echo.got)
        streams[1].write(bytes(2**24))
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(streams[1].drain(), 2 * WHILE)
        assert len(echo.got[0]) < 2**24, "an echo that is not read stops the echo"
        assert proxy.counts["bytes down"] <= 2
        streams[1].transport.abort()


@in_loop
async def test_a_slow_writer_gives_a_byte_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, sent = Clocked(monkeypatch), []
    loop = asyncio.get_running_loop()
    send = loop.sock_sendall
    monkeypatch.setattr(loop, "sock_sendall", lambda s, data: sent.append(bytes(data)) or send(s, data))
    async with through(Faults(drip=2.0), down=Faults()) as (proxy, echo):
        streams = await connect(proxy)
        assert await say(streams, b"slowly") == b"slowly"
        assert [s for s in clock.slept if s > 1] == [2.0] * 6
        assert sent[0] == b"s" and [piece for piece in sent if len(piece) > 1] == []
        assert bytes(echo.got[0]) == b"slowly"
        await close(streams)


@in_loop
async def test_a_reset_on_command_is_one_for_both_sides() -> None:
    async with through() as (proxy, echo):
        all_streams = [await connect(proxy) for _ in range(3)]
        for streams in all_streams:
            await say(streams, b"hello")
        proxy.connections[2].reset()
        with pytest.raises(ConnectionResetError):
            await all_streams[1][0].readexactly(1)
        assert await say(all_streams[0], b"still here") == b"still here"
        proxy.reset_all()
        for streams in (all_streams[0], all_streams[2]):
            with pytest.raises(ConnectionResetError):
                await streams[0].readexactly(1)
        await until(lambda: echo.ends == ["reset"] * 3)
        assert proxy.counts["reset"] == 3 and not proxy.connections
        all_streams.append(await connect(proxy))
        assert await say(all_streams[3], b"a new one works") == b"a new one works"
        await close(*all_streams)


def test_resets_at_random_happen_as_often_as_they_should() -> None:
    dice, faults = Dice(9), Faults(reset=0.01)
    until_reset = []
    for _ in range(300):
        count = 0
        while dice.fate(faults, SEGMENT).then != "reset":
            count += 1
        until_reset.append(count)
    assert sum(until_reset) / 300 == pytest.approx(99, rel=0.2)
    cut = Dice(2).fate(Faults(reset=0.3), 20 * SEGMENT)
    assert cut.then == "reset" and cut.passing % SEGMENT == 0 and cut.passing < 20 * SEGMENT


@in_loop
async def test_a_peers_end_and_reset_pass_through() -> None:
    async with through(Faults(latency=0.005)) as (proxy, echo):
        one, two = await connect(proxy), await connect(proxy)
        await say(one, b"1")
        await say(two, b"2")
        one[1].transport.abort()
        await until(lambda: echo.ends[0] == "reset" or echo.ends[0] == "end")
        two[1].write_eof()
        assert await two[0].read() == b"" and echo.ends[1] == "end"
        await close(one, two)


@in_loop
async def test_a_server_that_is_not_there_resets_the_client() -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        async with Proxy(("127.0.0.1", nobody.getsockname()[1])) as proxy:
            streams = await connect(proxy)
            with pytest.raises((ConnectionResetError, asyncio.IncompleteReadError)):
                await streams[0].readexactly(1)
            await until(lambda: not proxy.connections)
            assert proxy.counts["no server"] == 1


@in_loop
async def test_a_half_open_connection_stays_and_says_nothing() -> None:
    async with through() as (proxy, echo):
        streams, other = await connect(proxy), await connect(proxy)
        await say(streams, b"hello")
        await say(other, b"hello")
        proxy.connections[1].silence()
        streams[1].write(b"is anybody there?")
        assert await silent(streams) and bytes(echo.got[0]) == b"hello" and echo.ends[0] == ""
        proxy.heal()  # which is for partitions
        assert await silent(streams)
        assert await say(other, b"others go on") == b"others go on"
        await close(streams)
        await asyncio.sleep(WHILE)
        assert echo.ends[0] == "", "that the client has gone is not told either"
        await close(other)


@pytest.mark.parametrize("ways", [(), ("up",), ("down",)])
@in_loop
async def test_a_partition_holds_what_is_said_and_healing_lets_it_pass(ways: tuple[Any, ...]) -> None:
    async with through() as (proxy, echo):
        streams = await connect(proxy)
        await say(streams, b"before")
        proxy.partition(*ways)
        streams[1].write(b"during")
        new = await connect(proxy)  # the kernel takes it; nobody answers
        new[1].write(b"new")
        heard = ["beforeduring", "new"] if ways == ("down",) else ["before"]
        await until(lambda: [got.decode() for got in echo.got] == heard)
        assert await silent(streams) and await silent(new)
        assert [got.decode() for got in echo.got] == heard
        proxy.heal()
        assert await streams[0].readexactly(6) == b"during" and await new[0].readexactly(3) == b"new"
        assert bytes(echo.got[0]) == b"beforeduring"
        await close(streams, new)


@in_loop
async def test_a_reset_or_an_end_in_a_partition_is_heard_of_after_it() -> None:
    async with through() as (proxy, echo):
        one, two = await connect(proxy), await connect(proxy)
        await say(one, b"1")
        await say(two, b"2")
        proxy.partition()
        one[1].transport.abort()
        two[1].close()
        await asyncio.sleep(WHILE)
        assert echo.ends == ["", ""]
        proxy.heal()
        await until(lambda: all(echo.ends))
        await until(lambda: not proxy.connections)


@in_loop
async def test_a_partition_comes_and_goes_by_the_schedule() -> None:
    events: list[str] = []
    async with through(partitions=[(0.02, 0.05)], tell=lambda e: events.append(e["event"])) as (proxy, _):
        await until(lambda: proxy.counts["partition"])
        streams = await connect(proxy)
        assert await say(streams, b"held, then not") == b"held, then not"
        assert events == ["partition", "heal"]
        await close(streams)


@in_loop
async def test_refused_connections_are_refused_and_old_ones_go_on() -> None:
    async with through() as (proxy, _):
        port, streams = proxy.port, await connect(proxy)
        await say(streams, b"hello")
        proxy.refuse()
        with pytest.raises(ConnectionRefusedError):
            await connect(proxy)
        assert await say(streams, b"still") == b"still"
        proxy.accept()
        assert proxy.port == port
        again = await connect(proxy)
        assert await say(again, b"again") == b"again"
        await close(streams, again)


@in_loop
async def test_faults_change_at_once_for_all_or_for_one() -> None:
    async with through() as (proxy, _):
        one, two = await connect(proxy), await connect(proxy)
        await say(one, b"x")
        await say(two, b"x")
        proxy.connections[2].up = Faults(reset=0.999999)
        assert await say(one, b"unharmed") == b"unharmed"
        two[1].write(b"harmed")
        with pytest.raises(ConnectionResetError):
            await two[0].readexactly(1)
        proxy.faults = Faults(reset=0.999999)
        one[1].write(b"harmed")
        with pytest.raises(ConnectionResetError):
            await one[0].readexactly(1)
        await close(one, two)


def test_without_a_loop_of_ones_own_it_runs_in_a_thread() -> None:
    server = socket.create_server(("127.0.0.1", 0))
    with server, ProxyThread(server.getsockname(), Faults(), seed=1) as proxy:  # noqa: SIM117
        with socket.create_connection(("127.0.0.1", proxy.port), SOON) as client:
            there, _ = server.accept()
            client.sendall(b"hello")
            assert there.recv(5) == b"hello"
            proxy.partition("down")
            there.sendall(b"back")
            client.settimeout(WHILE)
            with pytest.raises(TimeoutError):
                client.recv(4)
            client.settimeout(SOON)
            proxy.heal()
            assert client.recv(4) == b"back"
            proxy.faults = Faults(latency=0.001)
            assert proxy.faults.latency == 0.001 and proxy.counts["bytes up"] == 5
            proxy.reset_all()
            with pytest.raises(ConnectionResetError):
                client.recv(1)
            there.close()
    with pytest.raises(ConfigError, match="cannot listen"), ProxyThread(("127.0.0.1", 1), listen=("192.0.2.1", 1)):
        pass


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--to", "here"], r"expected HOST:PORT, got 'here'"),
        (["--to", "a:70000"], r"expected HOST:PORT, got 'a:70000'"),
        (["--to", "a:1", "--loss", "2"], "loss must be a chance"),
        (["--to", "a:1", "--loss", "nan"], "loss must be a chance"),
        (["--to", "a:1", "--latency", "-1"], "latency must be seconds"),
        (["--to", "a:1", "--rate", "0"], "rate must be bytes a second"),
        (["--to", "a:1", "--drip", "much"], "'drip=much' is no fault"),
        (["--to", "a:1", "--down", "lag=3"], "'lag=3' is no fault"),
        (["--to", "a:1", "--partition", "30"], "expected BEGIN:SECONDS"),
        (["--to", "a:1", "--seed", "x"], "invalid int value"),
        (["--to", "a:1", "--listen", "192.0.2.1:1"], "cannot listen on 192.0.2.1:1"),
        ([], "required: --to"),
    ],
)
def test_bad_words_are_answered_in_one_sentence(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        fault_proxy.main(words)
    out, err = capsys.readouterr()
    assert ended.value.code == 2 and out == "" and err.count("\n") == 1 and re.search(said, err)


@pytest.mark.parametrize("where", ("accept", "socket"))
@in_loop
async def test_without_open_files_it_says_so_and_accepts_again_when_it_has_some(
    monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """For the client's side or, once that is accepted, for the server's side."""
    monkeypatch.setattr(module, "PAUSE", 0.01)
    left = 2

    def failing() -> None:
        nonlocal left
        if left > 0:
            left -= 1
            raise OSError(errno.EMFILE, "Too many open files")

    loop, make = asyncio.get_running_loop(), module._socket
    accept = loop.sock_accept

    async def accepting(listener: socket.socket) -> Any:
        failing()
        return await accept(listener)

    def making(near: Any) -> socket.socket:
        if near[1] != 0:  # not the one that listens
            failing()
        return make(near)

    if where == "accept":
        monkeypatch.setattr(loop, "sock_accept", accepting)
    else:
        monkeypatch.setattr(module, "_socket", making)
    told: list[dict[str, Any]] = []
    async with through(tell=told.append) as (proxy, _):
        if where == "socket":
            for _ in range(2):
                reader, writer = await connect(proxy)
                assert await reader.read() == b""  # the peer is notified at once
                writer.close()
        streams = await connect(proxy)
        assert await say(streams, b"hello") == b"hello"
        assert told == [{"event": "not accepted", "why": "Too many open files"}] * 2
        assert proxy.counts["not accepted"] == 2 and proxy.counts["connections"] == 1
        streams[1].close()


def test_faults_on_the_command_line_are_in_milliseconds() -> None:
    faults = parse_faults("latency=200,jitter=50,loss=0.05,rto=300,rate=1000,drip=1")
    assert faults == Faults(latency=0.2, jitter=0.05, loss=0.05, rto=0.3, rate=1000, drip=0.001)
    assert parse_faults("loss=0.5", faults) == Faults(0.2, 0.05, 0.5, 0.3, 1000, drip=0.001)


def test_by_hand_it_tells_each_fault_and_counts_at_the_end() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        words = ["--to", f"127.0.0.1:{server.getsockname()[1]}", "--latency", "1", "--reset", "0.999999",
                 "--down", "reset=0", "--seed", "4", "--json"]  # fmt: skip
        process = subprocess.Popen([sys.executable, fault_proxy.__file__, *words], stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        port = json.loads(process.stdout.readline())["port"]
        with socket.create_connection(("127.0.0.1", port), SOON) as client:
            client.sendall(b"hello")
            with pytest.raises(ConnectionResetError):
                client.recv(1)
        process.send_signal(signal.SIGINT)
        rest, _ = process.communicate(timeout=SOON)
        assert process.returncode == 0
        lines = [json.loads(line) for line in rest.splitlines()]
        assert [line["event"] for line in lines] == ["reset", "end"]
        assert lines[0]["way"] == "up" and lines[1]["connections"] == 1 and lines[1]["reset"] == 1


def test_by_hand_it_speaks_to_people_too(capsys: pytest.CaptureFixture[str]) -> None:
    options = fault_proxy.parser().parse_args(["--to", "a:1"])
    fault_proxy.configured(options).note("loss", connection=3, way="up", seconds=0.2)
    assert re.fullmatch(r" +\d+\.\d{3}  loss  connection=3 way=up seconds=0\.2\n", capsys.readouterr().out)
