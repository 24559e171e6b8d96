"""A federation of processes on this machine, for demonstrations and tests."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from hansa.core.errors import RuntimeFailure


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@contextlib.contextmanager
def processes(commands: Sequence[tuple[str, Sequence[str], dict[str, str]]],
              folder: Path) -> Iterator[list[subprocess.Popen[bytes]]]:  # fmt: skip
    """`hansa` commands, each with its name, its words and what it finds in its environment, as processes. Their logs
    are files of the folder. At the end they are told to end, and waited for."""
    started: list[subprocess.Popen[bytes]] = []
    try:
        for name, words, given in commands:
            with open(folder / f"{name}.log", "wb") as log:
                command = [sys.executable, "-m", "hansa.cli", *words]
                env = {**os.environ, "OMP_NUM_THREADS": "1", **given}
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
    """Say so if one of the processes has ended by itself."""
    for process in started:
        if process.poll() is not None:
            raise RuntimeFailure(f"a process ended by itself ({process.returncode}); the logs in {folder} say why")
