"""The process that serves the live page of a simulation: `python -m hansa.ui FOLDER PORT`, started by `hansa run --ui`.

Messages from the run: first the token, later how the run ended. Messages to the run: the port or an error, later that
the run is to stop.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
from pathlib import Path
from typing import Any

from aiohttp import web

from hansa.plumbing.child import ParentConnection
from hansa.ui.folder import RunFolderSource
from hansa.ui.page import BODY, Page, is_malformed


async def serve(path: Path, port: int, parent: ParentConnection) -> None:
    """Serve the page until the run closes the connection or ends."""

    def send(**message: Any) -> None:
        with contextlib.suppress(OSError):  # the run has ended
            parent.send(message)

    first = await asyncio.to_thread(parent.receive)
    if first is None:
        return
    run = RunFolderSource(path, first["token"], lambda: send(stop=True))
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
        send(error=f"the live page cannot listen on 127.0.0.1:{port}: {error.strerror}")
        await runner.cleanup()
        return
    send(port=runner.addresses[0][1])
    refreshing = asyncio.create_task(page.run())
    while (message := await asyncio.to_thread(parent.receive)) is not None:
        run.status, run.reason, run.linked = message["status"], message["reason"], message["stay"]
        await page.refresh()
    await page.close()
    refreshing.cancel()
    await runner.cleanup()


if __name__ == "__main__":
    asyncio.run(serve(Path(sys.argv[1]), int(sys.argv[2]), ParentConnection()))
