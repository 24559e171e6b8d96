"""Files as answers: whole or a range, sent a piece at a time to somebody who has to keep taking them."""

from __future__ import annotations

import asyncio
import functools
from pathlib import Path

from aiohttp import web

from hansa.core.errors import DataError
from hansa.net.asks import Unasked
from hansa.net.gate import Refused, trouble
from hansa.net.limits import PIECE

SMALL = 2**16  # bytes of a file that is kept in memory for all who fetch it


async def served(request: web.Request, path: Path, stall: float,
                 headers: dict[str, str] | None = None) -> web.StreamResponse:  # fmt: skip
    """A file, whole or the range that was asked for. Who does not take a piece of it within `stall` seconds is given up
    (TimeoutError)."""
    try:
        asked = request.http_range
        data = _small(path)
        size = len(data) if data is not None else path.stat().st_size
    except FileNotFoundError:
        raise Unasked("what was asked for is not here (any more)") from None
    except ValueError:
        raise Refused(416, "the range that was asked for cannot be read: expected bytes=FIRST-LAST") from None
    start = max(0, size + asked.start) if asked.start is not None and asked.start < 0 else asked.start or 0
    stop = size if asked.stop is None else min(asked.stop, size)
    if stop <= start and size:
        return trouble(416, f"the file has {size} bytes", {"Content-Range": f"bytes */{size}"})
    whole = asked.start is None and asked.stop is None
    given = {**(headers or {}), **({} if whole else {"Content-Range": f"bytes {start}-{stop - 1}/{size}"})}
    status, kind = 200 if whole else 206, "application/octet-stream"
    if data is not None:
        return web.Response(status=status, body=data[start:stop], headers=given, content_type=kind)
    out = web.StreamResponse(status=status, headers=given)
    out.content_type, out.content_length = kind, stop - start
    async with asyncio.timeout(stall):
        await out.prepare(request)
    while start < stop:
        part = await asyncio.to_thread(_read, path, start, stop)
        for at in range(0, len(part), PIECE):
            async with asyncio.timeout(stall):
                await out.write(part[at : at + PIECE])
        start += len(part)
    return out


@functools.lru_cache(maxsize=64)
def _small(path: Path) -> bytes | None:
    """The bytes of a file, where they are few: it is called by its hash, so it is read once for all who ask."""
    with open(path, "rb") as file:
        data = file.read(SMALL + 1)
    return data if len(data) <= SMALL else None


def _read(path: Path, start: int, stop: int) -> memoryview:
    with open(path, "rb") as file:
        file.seek(start)
        data = file.read(max(0, min(8 * PIECE, stop - start)))
    if not data and stop > start:
        raise DataError("a file is shorter than it was")
    return memoryview(data)
