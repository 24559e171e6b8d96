"""The `hansa` command in a process that dies by SIGKILL when it reaches a chosen point; see chaos_kit.py."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import hansa
from hansa.core import crash_points as points
from hansa.core.op import Memory
from hansa.core.params import ParamSpec
from hansa.local import SGD
from hansa.net.party import agent as party
from hansa.net.transport import client
from hansa.net.transport.wire import Receipt

LINGER = 0.2  # seconds
BEFORE_COMMIT = ("ledger.execute", "reply.written")


@hansa.register("wandering")
@dataclass(frozen=True)
class Wandering(SGD):
    """Each party remembers how far it went, and is drawn back by a tenth of that: memory for asynchronous jobs."""

    def remember(self, spec: ParamSpec) -> Memory:
        return {"went": torch.zeros(spec.dim, dtype=spec.dtype)}

    def start(self, ctx: Any, w: torch.Tensor, payload: Any, memory: Memory) -> Any:
        return w - 0.1 * memory["went"], {}

    def finish(self, ctx: Any, start: torch.Tensor, w: torch.Tensor, carry: Any, memory: Memory) -> Any:
        return {"w": w - start}, {"went": memory["went"] + (w - start)}


@dataclass(frozen=True)
class Doom:
    """Death at the n-th time that a point is reached, once: the marker says that it has happened.

    Just before a commit the process's other threads go on for a while: time enough to acknowledge what is not on disk.
    """

    point: str
    times: int
    marker: Path

    def install(self) -> None:
        left, lock = [self.times], threading.Lock()

        def reached(name: str) -> None:
            if name != self.point:
                return
            with lock:
                left[0] -= 1
                if left[0] == 0:
                    self.marker.touch()
                    time.sleep(LINGER if name in BEFORE_COMMIT else 0.0)
                    os.kill(os.getpid(), signal.SIGKILL)

        if not self.marker.exists():
            points.install(reached)


def note_receipts(path: Path) -> None:
    """Append every receipt that comes in to a file, before the party sees it."""
    unpack = party.unpack

    def noting(data: bytes, kind: type[Any]) -> Any:
        value = unpack(data, kind)
        if kind is Receipt:
            with open(path, "a") as file:
                file.write(json.dumps({name: getattr(value, name) for name in value.__struct_fields__}) + "\n")
        return value

    party.unpack = noting  # type: ignore[assignment]


def live(arguments: list[str], log: Path, doom: Doom | None = None, receipts: Path | None = None,
         quick: bool = True) -> None:  # fmt: skip
    """`hansa ARGUMENTS`, in this process, with what it prints in a file; `quick` to come back after short pauses."""
    written = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(written, 1)
    os.dup2(written, 2)
    if quick:  # who was killed is back at once: no need to wait for long
        client.LEAST, client.MOST, party.PAUSE = 0.05, 1.0, 0.05
    if receipts is not None:
        note_receipts(receipts)
    if doom is not None:
        doom.install()
    sys.argv = ["hansa", *arguments]
    from hansa.cli import main

    main()
