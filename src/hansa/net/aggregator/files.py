"""Files as HTTP responses: whole or a range, sent in pieces; a client that stalls is cut off."""

from __future__ import annotations

import asyncio
import functools
import io
from pathlib import Path
from typing import BinaryIO

from aiohttp import web

from hansa.net.aggregator.asks import Unasked
from hansa.net.transport.http import CutOff, Refused, trouble
from hansa.net.transport.limits import PIECE
from hansa.plumbing.errors import DataError, HansaError

SMALL = 2**16  # files up to this many bytes are cached in memory


async def served(request: web.Request, path: Path, stall: float,
                 headers: dict[str, str] | None = None) -> web.StreamResponse:  # fmt: skip
    """Send a file, whole or the requested range; it may be deleted meanwhile.

    An error after the response has begun is a CutOff, since no second response is possible. So is a client that does
    not take a piece within `stall` seconds.
    """
    try:
        asked = request.http_range
        data = _small(path)
        file = open(path, "rb") if data is None else io.BytesIO(data)  # noqa: SIM115
    except FileNotFoundError:
        raise Unasked("the requested file is not here (any more)") from None
    except ValueError:
        raise Refused(416, "invalid Range header: expected bytes=FIRST-LAST") from None
    with file:
        size = file.seek(0, io.SEEK_END)
        start = max(0, size + asked.start) if asked.start is not None and asked.start < 0 else asked.start or 0
        stop = size if asked.stop is None else min(asked.stop, size)
        if stop <= start and size:
            return trouble(416, f"the file has {size} bytes", {"Content-Range": f"bytes */{size}"})
        whole = asked.start is None and asked.stop is None
        headers = {**(headers or {}), **({} if whole else {"Content-Range": f"bytes {start}-{stop - 1}/{size}"})}
        status, kind = 200 if whole else 206, "application/octet-stream"
        if data is not None:
            return web.Response(status=status, body=data[start:stop], headers=headers, content_type=kind)
        out = web.StreamResponse(status=status, headers=headers)
        out.content_type, out.content_length = kind, stop - start
        try:
            await _send(request, out, file, start, stop, stall)
        except ConnectionError:  # the client has gone
            raise
        except (OSError, HansaError) as error:
            raise CutOff(f"a response was cut off: {error or 'the client did not take it'}") from error
        return out


async def _send(request: web.Request, out: web.StreamResponse, file: BinaryIO, start: int, stop: int,
                stall: float) -> None:  # fmt: skip
    async with asyncio.timeout(stall):
        await out.prepare(request)
    while start < stop:
        part = await asyncio.to_thread(_read, file, start, stop)
        for at in range(0, len(part), PIECE):
            async with asyncio.timeout(stall):
                await out.write(part[at : at + PIECE])
        start += len(part)


@functools.lru_cache(maxsize=64)
def _small(path: Path) -> bytes | None:
    """The bytes of a small file, None for a large one. A file is named by its hash, so its bytes never change."""
    with open(path, "rb") as file:
        data = file.read(SMALL + 1)
    return data if len(data) <= SMALL else None


def _read(file: BinaryIO, start: int, stop: int) -> memoryview:
    file.seek(start)
    data = file.read(max(0, min(8 * PIECE, stop - start)))
    if not data and stop > start:
        raise DataError("a file became shorter while it was sent")
    return memoryview(data)
