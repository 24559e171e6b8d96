"""Child processes that exchange lines of JSON with their parent over standard input and output.

The parent holds a `ChildProcess`, the child a `ParentConnection`. Prints of the child go to its standard error, so they
are never mistaken for a message. The child's standard input closes when the parent ends, however the parent ended, and
the child then ends too.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

Message = dict[str, Any]


class ChildEnded(Exception):
    """A child process closed its standard output. The text is the last line of its standard error, where kept."""


class ChildProcess:
    """A child that runs `python -m MODULE ARGUMENTS`, imports from the same folders, and talks in lines of JSON.

    Its standard error goes to the end of the file `log`, or is kept for `last_error` (`keep_errors`), or is this
    process's own. One thread at a time may call the methods; only `kill` may be called from any thread.
    """

    def __init__(self, module: str, arguments: Sequence[str] = (), *, environment: Mapping[str, str] | None = None,
                 log: Path | None = None, keep_errors: bool = False, new_session: bool = False,
                 pass_fds: Sequence[int] = ()) -> None:  # fmt: skip
        path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
        self._errors = tempfile.TemporaryFile() if keep_errors else None  # noqa: SIM115 (open as long as the process)
        with contextlib.nullcontext(self._errors) if log is None else open(log, "ab") as errors:
            self._process = subprocess.Popen(
                [sys.executable, "-m", module, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                stderr=errors, env={**os.environ, "PYTHONPATH": path, **(environment or {})},
                start_new_session=new_session, pass_fds=tuple(pass_fds),
            )  # fmt: skip
        assert self._process.stdin is not None and self._process.stdout is not None
        self._stdin, self._stdout = self._process.stdin, self._process.stdout
        self._received = b""  # bytes that were read and not yet returned
        self._reader: threading.Thread | None = None

    def send(self, message: Message) -> None:
        """Send a message. Raises an OSError (a broken pipe) if the child has ended."""
        self._stdin.write(json.dumps(message).encode() + b"\n")
        self._stdin.flush()

    def receive(self, seconds: float | None = None) -> Message | None:
        """Return the next message, or None if none arrives within `seconds`; raise ChildEnded if the child ended."""
        deadline = None if seconds is None else time.monotonic() + seconds
        pipe = self._stdout.fileno()
        while b"\n" not in self._received:
            if deadline is not None and not select.select([pipe], [], [], max(0.0, deadline - time.monotonic()))[0]:
                return None
            data = os.read(pipe, 65536)
            if not data:
                raise ChildEnded(self.last_error())
            self._received += data
        line, _, self._received = self._received.partition(b"\n")
        message: Message = json.loads(line)
        return message

    def forward(self, put: Callable[[Message | None], None]) -> None:
        """Pass each message to `put` from a thread, and None once the child has ended. Replaces `receive`."""

        def read() -> None:
            with contextlib.suppress(ChildEnded):
                while True:
                    put(self.receive())
            put(None)

        self._reader = threading.Thread(target=read, daemon=True)
        self._reader.start()

    def last_error(self) -> str:
        """The last line that the child wrote to its standard error, or "" if unknown."""
        if self._errors is None:
            return ""
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").strip().splitlines()
        return str(lines[-1])[:200] if lines else ""

    def wait(self) -> int:
        """Wait until the child ends by itself; return its exit status."""
        return self._process.wait()

    def kill(self) -> None:
        """End the child at once."""
        self._process.kill()

    def close(self, seconds: float = 0.0) -> int:
        """Tell the child to end, give it a number of seconds, then kill it; return its exit status."""
        if seconds <= 0:
            self._process.kill()
        with contextlib.suppress(OSError):  # nobody reads what was still to be written
            self._stdin.close()
        try:
            status = self._process.wait(seconds if seconds > 0 else None)
        except subprocess.TimeoutExpired:
            self._process.kill()
            status = self._process.wait()
        if self._reader is not None:
            self._reader.join(1.0)
        if self._reader is None or not self._reader.is_alive():  # never close a pipe that a thread reads
            self._stdout.close()
        if self._errors is not None:
            self._errors.close()
        return status


class ParentConnection:
    """The child's end: messages from the parent, and messages to the parent. Ctrl-C is left to the parent."""

    def __init__(self) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        self._output = protected_output()
        self._lock = threading.Lock()  # one thread sends at a time

    def send(self, message: Message) -> None:
        """Send a message. Raises an OSError if the parent has ended."""
        with self._lock:
            self._output.write(json.dumps(message).encode() + b"\n")
            self._output.flush()

    def receive(self) -> Message | None:
        """Wait for the next message; None once the parent has closed the connection or has ended."""
        line = sys.stdin.readline()
        return json.loads(line) if line else None

    def __iter__(self) -> Iterator[Message]:
        """Messages until the parent closes the connection or ends."""
        while (message := self.receive()) is not None:
            yield message

    def until_parent_ends(self) -> Iterator[Message]:
        """Messages without end. When the parent is gone, this process exits at once, even in the middle of work."""
        waiting: queue.SimpleQueue[Message] = queue.SimpleQueue()

        def read() -> None:
            for message in self:
                waiting.put(message)
            os._exit(0)

        threading.Thread(target=read, daemon=True).start()
        while True:
            yield waiting.get()


def protected_output() -> BinaryIO:
    """Return standard output as a file of its own, and send all prints to standard error from now on."""
    output = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    sys.stdout = sys.stderr
    return output
