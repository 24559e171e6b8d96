"""A real MLflow server, which can be killed and started again, and other commands."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from hansa.net.local import free_port

QUIET = {"MLFLOW_DISABLE_TELEMETRY": "true", "DO_NOT_TRACK": "true"}


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=600) as reply:
            return bool(reply.status == 200)
    except (urllib.error.URLError, OSError):
        return False


class Process:
    """A command together with all its child processes."""

    def __init__(self, command: list[str], log: Path, **environment: str) -> None:
        self._log = log
        with open(log, "ab") as file:
            # MLflow finds the commands that it starts by the PATH of an environment that is switched on.
            path = os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)))
            given = {**os.environ, **QUIET, "PATH": path, **environment}
            self.process = subprocess.Popen(command, stdout=file, stderr=file, start_new_session=True, env=given)

    def wait_for(self, url: str) -> None:
        end = time.monotonic() + 600  # a slow machine takes its time
        while self.process.poll() is None and time.monotonic() < end:
            if answers(url):
                return
            time.sleep(0.1)
        pytest.fail(f"{url} does not answer:\n{self._log.read_text()[-2000:]}")

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


class Server:
    """`mlflow server` over SQLite."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.port = folder, free_port()
        self.uri = f"http://127.0.0.1:{self.port}"
        self._running: Process | None = None

    def start(self) -> None:
        command = [sys.executable, "-m", "mlflow", "server", "--backend-store-uri", f"sqlite:///{self.folder}/m.db",
                   "--artifacts-destination", f"{self.folder}/files", "--port", str(self.port),
                   "--workers", "1"]  # fmt: skip
        # Its own queue of jobs would be more processes, which nothing here needs.
        self._running = Process(command, self.folder / "server.log", MLFLOW_SERVER_ENABLE_JOB_EXECUTION="false")

    def ready(self) -> None:
        assert self._running is not None
        self._running.wait_for(f"{self.uri}/health")

    def kill(self) -> None:
        if self._running is not None:
            self._running.kill()
        self._running = None
