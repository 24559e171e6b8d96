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
from hansa.core.op import Memory
from hansa.local import SGD
from hansa.net.party import agent as party
from hansa.net.transport import client
from hansa.net.transport.wire import Receipt
from hansa.numerics.params import Params, ParamSpec
from hansa.plumbing import crash_points as points

LINGER = 0.2  # seconds
BEFORE_COMMIT = ("ledger.execute", "reply.written")


@hansa.register("wandering")
@dataclass(frozen=True)
class Wandering(SGD):
    """Each party remembers the distance it moved, and is pulled back by a tenth of it: memory for asynchronous jobs."""

    def remember(self, spec: ParamSpec, initial: Params) -> Memory:
        return {"went": torch.zeros(spec.dim, dtype=spec.dtype)}

    def start(self, ctx: Any, w: torch.Tensor, payload: Any, memory: Memory) -> Any:
        return w - 0.1 * memory["went"], {}

    def finish(self, ctx: Any, start: torch.Tensor, w: torch.Tensor, carry: Any, memory: Memory) -> Any:
        return {"w": w - start}, {"went": memory["went"] + (w - start)}


@dataclass(frozen=True)
class Doom:
    """Die when a point is reached for the n-th time, once; the marker file records the death.

    Just before a commit, the other threads of the process continue for a while: long enough to acknowledge data that
    are not on disk, if the code has that fault.
    """

    point: str
    times: int
    marker: Path

    def install(self) -> None:
        left, lock, process = [self.times], threading.Lock(), os.getpid()

        def reached(name: str) -> None:
            if name != self.point:
                return
            with lock:
                left[0] -= 1
                if left[0] == 0:
                    self.marker.touch()
                    time.sleep(LINGER if name in BEFORE_COMMIT else 0.0)
                    os.kill(process, signal.SIGKILL)
                    time.sleep(LINGER if os.getpid() == process else 60.0)  # a party's worker dies with the party

        if not self.marker.exists():
            points.install(reached)


def note_receipts(path: Path) -> None:
    """Append every receipt that arrives to a file, before the party sees it."""
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
    """Run `hansa ARGUMENTS` in this process, with its output in a file; `quick` shortens the pauses before a retry."""
    written = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(written, 1)
    os.dup2(written, 2)
    if quick:  # a killed process is back at once: long pauses are not needed
        client.LEAST, client.MOST, party.PAUSE = 0.05, 1.0, 0.05
    if receipts is not None:
        note_receipts(receipts)
    if doom is not None:
        doom.install()
    sys.argv = ["hansa", *arguments]
    from hansa.cli import main

    main()
