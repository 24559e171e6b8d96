"""The process that serves the live page of a simulation: `python -m hansa.ui FOLDER PORT`, started by `hansa run --ui`.

On standard input it is given the token, then how the run ended; where that ends, so does the process. On standard
output it says where the page is, or why there is none, and later that the run is to be stopped. A line of JSON each.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import sys
from pathlib import Path
from typing import Any

from aiohttp import web

from hansa.ui.folder import RunFolder
from hansa.ui.page import BODY, Page, is_malformed


def say(**tree: Any) -> None:
    """A line to whoever started this; where nobody listens any more, nothing."""
    with contextlib.suppress(BrokenPipeError):
        print(json.dumps(tree), flush=True)


async def serve(path: Path, port: int) -> None:
    """Serve the page until standard input ends."""
    said = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(said), sys.stdin)
    token = json.loads(await said.readline())["token"]
    run = RunFolder(path, token, lambda: say(stop=True))
    page = Page(run, run)
    app = web.Application(client_max_size=BODY)
    page.routes(app)
    logger = logging.Logger("hansa.ui.http")  # aiohttp would print a traceback for any malformed request
    logger.addFilter(lambda record: not is_malformed(record))
    runner = web.AppRunner(app, access_log=None, keepalive_timeout=15, shutdown_timeout=1, auto_decompress=False,
                           logger=logger)  # fmt: skip
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", port).start()
    except OSError as error:
        say(error=f"the live page cannot listen on 127.0.0.1:{port}: {error.strerror}")
        await runner.cleanup()
        return
    say(port=runner.addresses[0][1])
    looking = asyncio.create_task(page.run())
    while line := await said.readline():
        told = json.loads(line)
        run.status, run.reason, run.linked = told["status"], told["reason"], told["stay"]
        await page.refresh()
    await page.close()
    looking.cancel()
    await runner.cleanup()


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(serve(Path(sys.argv[1]), int(sys.argv[2])))
