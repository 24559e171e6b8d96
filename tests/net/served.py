"""An aggregator in its own process, as `hansa serve` runs it, and sockets for requests that no client would send."""

from __future__ import annotations

import contextlib
import http.client
import json
import re
import socket
import ssl
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from league import PATIENCE, PLENTY, Asked, League

from hansa.net.transport.tls import client_context

MIB = 2**20


class Served(League):
    """A federation whose aggregator is a process: its memory can be measured and its log read. Its limits allow many
    requests from one address and from few parties."""

    def start(self) -> None:
        config = self.folder / "federation.toml"
        text = config.read_text()
        for name, value in PLENTY.items():
            text = re.sub(rf"(?m)^# {name} = \d+", f"{name} = {value}", text)
        config.write_text(text)
        self.log = self.folder / "serve.log"
        with open(self.log, "ab") as log:
            self.process = subprocess.Popen([sys.executable, "-m", "hansa.cli", "serve", str(self.folder), "--json"],
                                            stdout=log, stderr=log)  # fmt: skip
        end = time.monotonic() + PATIENCE
        while not (found := re.search(r'"event": "serving".*"port": (\d+)', self.log.read_text())):
            assert self.process.poll() is None and time.monotonic() < end, self.log.read_text()
            time.sleep(0.02)
        self.port = int(found[1])

    def stop(self) -> None:
        for caller in self._callers:
            caller.close()
        self.process.terminate()
        assert self.process.wait(PATIENCE) == 0

    def told(self, name: str, asked: Asked) -> dict[str, Any]:
        return {}  # no party was asked anything

    def memory(self, what: str = "VmRSS") -> int:
        """Bytes of the process's memory; with VmHWM, the maximum since `forget_peak`."""
        found = re.search(rf"{what}:\s+(\d+) kB", Path(f"/proc/{self.process.pid}/status").read_text())
        assert found is not None
        return int(found[1]) * 1024

    def forget_peak(self) -> None:
        Path(f"/proc/{self.process.pid}/clear_refs").write_text("5")

    def files(self) -> set[str]:
        """The files in its state folder, except those of the ledger."""
        state = self.folder / "state"
        return {str(path.relative_to(state)) for path in state.rglob("*") if not path.name.startswith("hansa.db")}

    def lines(self) -> list[dict[str, object]]:
        """Its log; a line that is not JSON comes from a crash."""
        return [json.loads(line) for line in self.log.read_text().splitlines()]

    def check(self) -> None:
        """Check that it is alive, responds, and has no failure in its log."""
        assert self.process.poll() is None
        nobody = self.nobody()
        assert nobody.call("GET", "/v1/ca").status == 200
        nobody.close()
        bad = [line for line in self.lines() if "trace" in line or line["level"] == "error"]
        assert not bad, f"{len(bad)}, the first: {bad[0]}"


def dial(league: League, files: tuple[Path, Path] | None = None) -> ssl.SSLSocket:
    """A TLS connection to an aggregator, with a certificate or without."""
    context = client_context(league.folder / "ca.pem", *(files or (None, None)))
    raw = socket.create_connection(("127.0.0.1", league.port), timeout=PATIENCE)
    return context.wrap_socket(raw, server_hostname="127.0.0.1")


def say(stream: ssl.SSLSocket, data: bytes, step: int = 2**16) -> None:
    """Send data, as far as the other side reads it."""
    with contextlib.suppress(OSError):  # the other side has stopped reading; its response can still be read
        for at in range(0, len(data), step):
            stream.sendall(data[at : at + step])


def hear(stream: ssl.SSLSocket) -> bytes:
    """All bytes until the other side closes the connection."""
    got = b""
    with contextlib.suppress(OSError):
        while piece := stream.recv(2**16):
            got += piece
    return got


def hear_one(stream: ssl.SSLSocket, method: str) -> tuple[int, bytes]:
    """Status and body of the response to a request of that method."""
    with http.client.HTTPResponse(stream, method=method) as response:
        response.begin()
        return response.status, response.read()


def statuses(data: bytes) -> list[int]:
    """The statuses of the responses in received bytes."""
    return [int(number) for number in re.findall(rb"HTTP/[12]\.[01] (\d{3})", data)]
