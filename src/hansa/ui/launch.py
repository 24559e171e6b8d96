"""The live page of a simulation, for as long as it runs: a process of its own that reads the run's folder.

The run itself only looks, after each round, whether somebody on the page wants it stopped.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import select
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hansa.core.errors import ConfigError

STARTS = 30.0  # seconds in which the page must be there
Watch = Callable[[dict[str, Any]], None]


class Showing:
    """The page of the run in a folder, on a port of this machine (0: any that is free). Inside `with` it is there; how
    the run ended is told it at the end."""

    def __init__(self, folder: Path, port: int = 0, stay: bool = False) -> None:
        if not 0 <= port < 65536:
            raise ConfigError(f"--ui-port must lie in 0..65535, got {port}")
        self.folder, self.stay = folder, stay
        self._heard = b""  # what the page has said and nobody has read yet
        self._token = secrets.token_urlsafe(16)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "hansa.ui", str(folder.resolve()), str(port)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True,  # Ctrl-C is for the run
        )  # fmt: skip
        self._tell({"token": self._token})
        told = self._hear(STARTS)
        if told is None or "port" not in told:
            self.close()
            raise ConfigError((told or {}).get("error", "the live page could not be started"))
        self.port = int(told["port"])

    @property
    def url(self) -> str:
        """Where the page is; with what stops the run, which no server is sent."""
        return f"http://127.0.0.1:{self.port}/#token={self._token}"

    def watching(self, watch: Watch | None) -> Watch:
        """What to call with each round: as before, and whoever wants the run stopped on the page interrupts it."""

        def each(line: dict[str, Any]) -> None:
            if watch is not None:
                watch(line)
            told = self._hear(0.0)
            if told is not None and told.get("stop"):
                raise KeyboardInterrupt

        return each

    def ended(self, status: str, reason: str = "") -> None:
        """Have the page show how the run ended."""
        self._tell({"status": status, "reason": reason, "stay": self.stay})

    def linger(self) -> None:
        """Keep the page until Ctrl-C, or until it ends by itself."""
        with contextlib.suppress(KeyboardInterrupt):
            self._process.wait()

    def close(self) -> None:
        """End the page; what a browser shows of it stays there."""
        assert self._process.stdin is not None and self._process.stdout is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        try:
            self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()

    def __enter__(self) -> Showing:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        if kind is not None:
            stopped = issubclass(kind, (KeyboardInterrupt, SystemExit))
            told = f"go on with: hansa resume {self.folder}" if stopped else str(error)
            self.stay = False
            self.ended("stopped" if stopped else "failed", told)
        self.close()

    def _tell(self, tree: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(tree).encode() + b"\n")
            self._process.stdin.flush()
        except OSError:
            pass  # the page has gone: the run does not depend on it

    def _hear(self, seconds: float) -> dict[str, Any] | None:
        """What the page says, if it says something within so many seconds."""
        assert self._process.stdout is not None
        file = self._process.stdout.fileno()
        while b"\n" not in self._heard:
            if not select.select([file], [], [], seconds)[0]:
                return None
            if not (data := os.read(file, 4096)):  # the page has gone: the run does not depend on it
                return None
            self._heard += data
        line, _, self._heard = self._heard.partition(b"\n")
        told: dict[str, Any] = json.loads(line)
        return told
