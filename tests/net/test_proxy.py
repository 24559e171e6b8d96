"""Parties behind a proxy: the usual environment variables work, and the proxy sees only encrypted bytes."""

import asyncio
from pathlib import Path

import pytest
from aiohttp import web

from hansa.net.transport import certificates, keys
from hansa.net.transport.client import Client
from hansa.net.transport.tls import client_context, server_context


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
    except ConnectionError:
        pass
    writer.close()


def test_a_party_goes_through_the_proxy_that_its_environment_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    authority, authority_pem = certificates.make_ca("f")
    key = keys.new_key()
    (tmp_path / "ca.pem").write_bytes(authority_pem)
    (tmp_path / "server.pem").write_bytes(
        certificates.issue(authority, authority_pem, key.public_key(), "a", "server", "f", 1, ["localhost"])
    )
    keys.write_private(tmp_path / "server.key", keys.key_bytes(key))
    asked: list[str] = []

    async def proxy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        asked.append(head.split("\r\n")[0])
        host, _, port = head.split()[1].rpartition(":")
        there = await asyncio.open_connection(host, int(port))
        writer.write(b"HTTP/1.1 200 Connection established\r\n\r\n")
        await asyncio.gather(_pump(reader, there[1]), _pump(there[0], writer))

    async def hello(request: web.Request) -> web.Response:
        return web.Response(body=b"hello")

    async def main() -> bytes:
        app = web.Application()
        app.router.add_get("/v1/ca", hello)
        runner = web.AppRunner(app)
        await runner.setup()
        tls = server_context(tmp_path / "server.pem", tmp_path / "server.key", tmp_path / "ca.pem")
        site = web.TCPSite(runner, "127.0.0.1", 0, ssl_context=tls)
        await site.start()
        port = runner.addresses[0][1]
        middle = await asyncio.start_server(proxy, "127.0.0.1", 0)
        monkeypatch.setenv("https_proxy", f"http://127.0.0.1:{middle.sockets[0].getsockname()[1]}")
        monkeypatch.setenv("no_proxy", "")
        async with Client(f"https://localhost:{port}", client_context(authority_pem), patience=0) as client:
            _, body = await client.call("GET", "/v1/ca")
        middle.close()
        await runner.cleanup()
        return body

    assert asyncio.run(main()) == b"hello"
    assert len(asked) == 1 and asked[0].startswith("CONNECT localhost:")
