"""A federation of processes on this machine, for demonstrations and tests."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path

from hansa.plumbing.errors import RuntimeFailure

HELD = 256
_held: deque[int] = deque()  # file descriptors of bound sockets


def free_port() -> int:
    """A port that is free, for a server that starts later.

    The system gives the port to nobody who asks for any port: a socket of this process stays bound to it (for the last
    256 ports). That socket does not listen, so a server that asks for this very port gets it (SO_REUSEADDR, as servers
    do), also when it starts again. It is bound to all addresses: a connection from another address of this machine that
    had the port already would keep a server from listening on all of them.
    """
    holder = socket.socket()
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    holder.bind(("", 0))
    port: int = holder.getsockname()[1]
    _held.append(holder.detach())
    if len(_held) > HELD:
        os.close(_held.popleft())
    return port


@contextlib.contextmanager
def processes(commands: Sequence[tuple[str, Sequence[str], dict[str, str]]],
              folder: Path) -> Iterator[list[subprocess.Popen[bytes]]]:  # fmt: skip
    """Run `hansa` commands as processes: each with a name, its arguments, and extra environment variables. Their logs
    are files in the folder. On exit the processes get SIGTERM and are waited for."""
    started: list[subprocess.Popen[bytes]] = []
    try:
        for name, arguments, variables in commands:
            with open(folder / f"{name}.log", "wb") as log:
                command = [sys.executable, "-m", "hansa.cli", *arguments]
                env = {**os.environ, "OMP_NUM_THREADS": "1", **variables}
                started.append(subprocess.Popen(command, stdout=log, stderr=log, env=env))
        yield started
    finally:
        for process in started:
            process.send_signal(signal.SIGTERM)
        for process in started:
            try:
                process.wait(timeout=20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def all_run(started: Sequence[subprocess.Popen[bytes]], folder: Path) -> None:
    """Raise a RuntimeFailure if one of the processes has ended."""
    for process in started:
        if process.poll() is not None:
            raise RuntimeFailure(f"a process ended with exit code {process.returncode}; see the logs in {folder}")
