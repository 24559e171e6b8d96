"""Process setup shared by aggregator and party: logging, event loop, signals."""

from __future__ import annotations

import asyncio
import ctypes
import json
import logging
import os
import signal
import sys
import time
from collections.abc import Coroutine
from typing import Any

log = logging.getLogger("hansa.net")
MALLOC = {-3: 2**23, -1: 2**24}  # bytes: M_MMAP_THRESHOLD, M_TRIM_THRESHOLD of glibc


class Structured(logging.Formatter):
    """Formats log lines with job, round and party, as JSON or as text."""

    party: str | None = None  # the party of this process, if it is a party's

    def __init__(self, as_json: bool) -> None:
        super().__init__()
        self._json = as_json

    def format(self, record: logging.LogRecord) -> str:
        context = {"job": None, "round": None, "party": self.party}
        context |= {name: getattr(record, name) for name in context if hasattr(record, name)}
        detail = dict(getattr(record, "detail", None) or {})
        fields = {k: v for k, v in {**context, **detail}.items() if v is not None}
        at = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z"
        trace = self.formatException(record.exc_info) if record.exc_info else ""
        if self._json:
            tree = {"at": at, "level": record.levelname.lower(), "event": record.getMessage(), **fields}
            return json.dumps(tree | ({"trace": trace} if trace else {}), default=str)
        text = " ".join(f"{name}={value if isinstance(value, (int, float)) else json.dumps(value, default=str)}"
                        for name, value in fields.items())  # fmt: skip
        return f"{at} {record.levelname.lower():7} {record.getMessage()}{'  ' + text if text else ''}" + (
            f"\n{trace}" if trace else ""
        )


def log_to_stderr(as_json: bool) -> Structured:
    """Send Hansa's log to standard error."""
    handler, lines = logging.StreamHandler(sys.stderr), Structured(as_json)
    handler.setFormatter(lines)
    root = logging.getLogger("hansa")
    root.handlers, root.propagate = [handler], False
    root.setLevel(logging.INFO)
    return lines


def return_freed_memory() -> None:
    """Let the C library return large freed buffers, as of a model, to the system at once.

    By default glibc keeps up to 64 MiB of freed memory per thread for later, once buffers of up to 32 MiB were freed.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        for option, size in MALLOC.items():
            mallopt(option, size)


def run_loop(main: Coroutine[Any, Any, None]) -> None:
    """Run a coroutine, on uvloop where it is installed."""
    try:
        import uvloop
    except ImportError:
        asyncio.run(main)
    else:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(main)


def end_on_signal(done: asyncio.Event) -> None:
    """Set `done` on the first signal; exit at once on the second: everything that matters is on disk."""
    loop = asyncio.get_running_loop()

    def on_signal(signum: int) -> None:
        if done.is_set():
            log.warning("second signal: exiting at once")
            os._exit(128 + signum)
        done.set()

    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signum, on_signal, signum)
