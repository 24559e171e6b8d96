"""HTTP as the aggregator takes it: bodies that say how long they are, and answers that are one sentence.

A body is read only once it is known who sends it, never further than it may be long, and never unpacked: neither
chunks without a stated length (411) nor compressed content (415) are taken, and "100 Continue" is said to nobody who is
turned away. What is no HTTP gets 400 and one line in the log.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import HttpVersion10, HttpVersion11, web
from aiohttp.http_exceptions import HttpProcessingError

from hansa.core.errors import HansaError
from hansa.net.wire import Trouble, pack, printable


class Refused(HansaError):
    """A request that is answered with that status and that sentence."""

    def __init__(self, status: int, error: str) -> None:
        super().__init__(error)
        self.status = status


def trouble(status: int, error: str, headers: dict[str, str] | None = None) -> web.Response:
    """What went wrong as a response."""
    return web.Response(status=status, body=pack(Trouble(printable(error[:4096]))), content_type="application/msgpack",
                        headers=headers)  # fmt: skip


async def read_body(request: web.Request, limit: int) -> bytes:
    """The body of a request, which may have `limit` bytes; a Refused for one that is longer, or in another form."""
    if request.headers.get("Content-Encoding", "identity").lower() != "identity":
        raise Refused(415, "the body is compressed; send it as it is")
    if not request.body_exists:
        return b""
    length = request.content_length
    if length is None:
        raise Refused(411, "the body does not say how long it is; send a Content-Length")
    if length > limit:
        raise Refused(413, f"the body has {length} bytes, and at most {limit} are taken")
    if request.headers.get("Expect"):
        await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        request.writer.output_size = 0
    return await request.content.read()


async def expected(request: web.Request) -> None:
    """Take note of an Expect header; `read_body` answers it."""
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


class OneLine(logging.Filter):
    """A request that is no HTTP, or that is cut off, is a line of the log: anyone can make as many as he likes."""

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        if isinstance(error, (HttpProcessingError, web.RequestPayloadError, ConnectionError)):
            lost = isinstance(error, ConnectionError)
            record.levelno = logging.INFO if lost else logging.WARNING
            record.levelname = logging.getLevelName(record.levelno)
            record.msg = "a request was cut off" if lost else "a request is not HTTP"
            record.detail = {"from": record.args[0] if isinstance(record.args, tuple) and record.args else None}
            record.args, record.exc_info, record.exc_text = (), None, None
        return True


_log = logging.getLogger("hansa.net.http")
_log.addFilter(OneLine())
STRICT: dict[str, Any] = {"auto_decompress": False, "logger": _log}  # for a `web.AppRunner`
