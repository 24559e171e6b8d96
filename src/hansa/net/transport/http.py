"""The aggregator's rules for HTTP: bodies with a Content-Length, and errors of one sentence.

A body is read only after its sender is known, up to its limit, and never decompressed. Bodies without a length (411)
and compressed bodies (415) are refused. "100 Continue" is sent only for requests that are admitted. Malformed HTTP gets
status 400 and one line in the log.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable

from aiohttp import HttpVersion10, HttpVersion11, web

from hansa.net.transport.wire import Trouble, pack, printable
from hansa.plumbing.errors import HansaError


class Refused(HansaError):
    """A refused request: its status, its sentence, and optionally the seconds to wait (Retry-After)."""

    def __init__(self, status: int, error: str, wait: float | None = None) -> None:
        super().__init__(error)
        self.status = status
        self.headers = {} if wait is None else {"Retry-After": str(max(1, math.ceil(wait)))}


class CutOff(ConnectionError):
    """A response that failed after it was begun: only the connection can be closed."""


def trouble(status: int, error: str, headers: dict[str, str] | None = None) -> web.Response:
    """A response with an error of one sentence."""
    return web.Response(status=status, body=pack(Trouble(printable(error[:4096]))), content_type="application/msgpack",
                        headers=headers)  # fmt: skip


async def accept_body(request: web.Request, limit: int) -> int:
    """Check a request's body and invite the client to send it; return its length, at most `limit` bytes."""
    if request.headers.get("Content-Encoding", "identity").lower() != "identity":
        raise Refused(415, "the body is compressed; send it uncompressed")
    if not request.body_exists:
        return 0
    length = request.content_length
    if length is None:
        raise Refused(411, "the body has no stated length; send a Content-Length")
    if length > limit:
        raise Refused(413, f"the body has {length} bytes; at most {limit} are accepted")
    if request.headers.get("Expect"):
        await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        request.writer.output_size = 0
    return length


async def check_expect(request: web.Request) -> None:
    """Check the Expect header; `accept_body` sends the 100 Continue."""
    if request.headers.get("Expect", "").lower() != "100-continue":
        raise web.HTTPExpectationFailed


@web.middleware
async def errors_as_trouble(request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
                        ) -> web.StreamResponse:  # fmt: skip
    """Turn aiohttp's own errors into responses with one sentence."""
    if request.version not in (HttpVersion10, HttpVersion11):
        return trouble(505, "this aggregator speaks HTTP/1.1")
    try:
        return await handler(request)
    except web.HTTPException as error:
        allowed = {"Allow": error.headers["Allow"]} if "Allow" in error.headers else None
        return trouble(error.status, f"{request.method} {request.path[:80]!r}: {error.reason}", allowed)
