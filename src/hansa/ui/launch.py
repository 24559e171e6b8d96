"""Start and stop the live page of a simulation, a process of its own that reads the run's folder.

The training only checks, after each round, whether somebody pressed Stop on the page.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hansa.plumbing.child import ChildEnded, ChildProcess
from hansa.plumbing.errors import ConfigError

START_SECONDS = 30.0  # in which the page must listen
END_SECONDS = 5.0  # in which it must end
Watch = Callable[[dict[str, Any]], None]


class LivePage:
    """The live page of a run's folder, on a port of this machine (0: any free port), served inside `with`.

    Leaving `with` by an error shows on the page how the run ended.
    """

    def __init__(self, folder: Path, port: int = 0, stay: bool = False) -> None:
        if not 0 <= port < 65536:
            raise ConfigError(f"--ui-port must lie in 0..65535, got {port}")
        self.folder, self.stay = folder, stay
        self._token = secrets.token_urlsafe(16)
        # In a session of its own, so that Ctrl-C reaches only the run.
        self._child = ChildProcess("hansa.ui", [str(folder.resolve()), str(port)], new_session=True)
        self._send({"token": self._token})
        reply = self._receive(START_SECONDS)
        if reply is None or "port" not in reply:
            self.close()
            raise ConfigError((reply or {}).get("error", "the live page could not be started"))
        self.port = int(reply["port"])

    @property
    def url(self) -> str:
        """The page's address. It ends with the token for Stop, in the part that a browser sends to no server."""
        return f"http://127.0.0.1:{self.port}/#token={self._token}"

    def watching(self, watch: Watch | None) -> Watch:
        """Wrap a function that is called with each round: Stop on the page raises KeyboardInterrupt after it."""

        def after_round(line: dict[str, Any]) -> None:
            if watch is not None:
                watch(line)
            message = self._receive(0.0)
            if message is not None and message.get("stop"):
                raise KeyboardInterrupt

        return after_round

    def ended(self, status: str, reason: str = "") -> None:
        """Show on the page how the run ended."""
        self._send({"status": status, "reason": reason, "stay": self.stay})

    def linger(self) -> None:
        """Keep the page until Ctrl-C, or until its process ends."""
        with contextlib.suppress(KeyboardInterrupt):
            self._child.wait()

    def close(self) -> None:
        """End the page; a browser keeps what it shows."""
        self._child.close(END_SECONDS)

    def __enter__(self) -> LivePage:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        if kind is not None:
            stopped = issubclass(kind, (KeyboardInterrupt, SystemExit))
            reason = f"continue with: hansa resume {self.folder}" if stopped else str(error)
            self.stay = False
            self.ended("stopped" if stopped else "failed", reason)
        self.close()

    def _send(self, message: dict[str, Any]) -> None:
        with contextlib.suppress(OSError):  # the page has ended: the run does not depend on it
            self._child.send(message)

    def _receive(self, seconds: float) -> dict[str, Any] | None:
        """The next message of the page, if one arrives within `seconds`."""
        with contextlib.suppress(ChildEnded):  # the run does not depend on the page
            return self._child.receive(seconds)
        return None
