"""HTTP as the aggregator takes it: bodies that say how long they are, and answers that are one sentence.

A body is read only once it is known who sends it, never further than it may be long, and never unpacked: neither
chunks without a stated length (411) nor compressed content (415) are taken, and "100 Continue" is said to nobody who is
turned away. What is no HTTP gets 400 and one line in the log.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable

from aiohttp import HttpVersion10, HttpVersion11, web

from hansa.core.errors import HansaError
from hansa.net.transport.wire import Trouble, pack, printable


class Refused(HansaError):
    """A request that is answered with that status and that sentence; perhaps with the seconds to wait."""

    def __init__(self, status: int, error: str, wait: float | None = None) -> None:
        super().__init__(error)
        self.status = status
        self.headers = {} if wait is None else {"Retry-After": str(max(1, math.ceil(wait)))}


class CutOff(ConnectionError):
    """An answer cannot be brought to its end. It has begun, so there is nothing to say but to end the connection."""


def trouble(status: int, error: str, headers: dict[str, str] | None = None) -> web.Response:
    """What went wrong as a response."""
    return web.Response(status=status, body=pack(Trouble(printable(error[:4096]))), content_type="application/msgpack",
                        headers=headers)  # fmt: skip


async def invite_body(request: web.Request, limit: int) -> int:
    """The bytes of a request's body, which may have `limit`, and which comes from now on; a Refused for one that is
    longer, or in another form."""
    if request.headers.get("Content-Encoding", "identity").lower() != "identity":
        raise Refused(415, "the body is compressed; send it as it is")
    if not request.body_exists:
        return 0
    length = request.content_length
    if length is None:
        raise Refused(411, "the body does not say how long it is; send a Content-Length")
    if length > limit:
        raise Refused(413, f"the body has {length} bytes, and at most {limit} are taken")
    if request.headers.get("Expect"):
        await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        request.writer.output_size = 0
    return length


async def expected(request: web.Request) -> None:
    """Take note of an Expect header; `invite_body` answers it."""
    if request.headers.get("Expect", "").lower() != "100-continue":
        raise web.HTTPExpectationFailed


@web.middleware
async def in_a_sentence(request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
                        ) -> web.StreamResponse:  # fmt: skip
    """What is refused before it reaches a route is answered as everything else is."""
    if request.version not in (HttpVersion10, HttpVersion11):
        return trouble(505, "this aggregator speaks HTTP/1.1")
    try:
        return await handler(request)
    except web.HTTPException as error:
        allowed = {"Allow": error.headers["Allow"]} if "Allow" in error.headers else None
        return trouble(error.status, f"{request.method} {request.path[:80]!r}: {error.reason}", allowed)
