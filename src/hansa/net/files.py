"""Files as answers: whole or a range, sent a piece at a time to somebody who has to keep taking them."""

from __future__ import annotations

import asyncio
from pathlib import Path

from aiohttp import web

from hansa.core.errors import DataError
from hansa.net.asks import Unasked
from hansa.net.gate import Refused, trouble
from hansa.net.limits import PIECE


async def served(request: web.Request, path: Path, stall: float,
                 headers: dict[str, str] | None = None) -> web.StreamResponse:  # fmt: skip
    """A file, whole or the range that was asked for. Who does not take a piece of it within `stall` seconds is given up
    (TimeoutError)."""
    try:
        asked = request.http_range
        start, stop, size, data = await asyncio.to_thread(_range, path, asked.start, asked.stop)
    except FileNotFoundError:
        raise Unasked("what was asked for is not here (any more)") from None
    except ValueError:
        raise Refused(416, "the range that was asked for cannot be read: expected bytes=FIRST-LAST") from None
    if stop <= start and size:
        return trouble(416, f"the file has {size} bytes", {"Content-Range": f"bytes */{size}"})
    whole = asked.start is None and asked.stop is None
    place = {} if whole else {"Content-Range": f"bytes {start}-{stop - 1}/{size}"}
    out = web.StreamResponse(status=200 if whole else 206, headers={**(headers or {}), **place})
    out.content_type, out.content_length = "application/octet-stream", stop - start
    async with asyncio.timeout(stall):
        await out.prepare(request)
    while True:
        for at in range(0, len(data), PIECE):
            async with asyncio.timeout(stall):
                await out.write(data[at : at + PIECE])
        start += len(data)
        if start >= stop:
            return out
        data = await asyncio.to_thread(_read, path, start, stop)


def _range(path: Path, first: int | None, last: int | None) -> tuple[int, int, int, memoryview]:
    """Where a range of a file begins and ends, the file's size, and the first bytes of the range."""
    size = path.stat().st_size
    start = max(0, size + first) if first is not None and first < 0 else first or 0
    stop = size if last is None else min(last, size)
    return start, stop, size, _read(path, start, stop)


def _read(path: Path, start: int, stop: int) -> memoryview:
    with open(path, "rb") as file:
        file.seek(start)
        data = file.read(max(0, min(8 * PIECE, stop - start)))
    if not data and stop > start:
        raise DataError("a file is shorter than it was")
    return memoryview(data)
