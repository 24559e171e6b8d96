"""A tracker in a process of its own that misbehaves."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from hansa.core.registry import register
from hansa.track.tracker import Log, RunInfo, Tracker


@register("chatty")
@dataclass(frozen=True)
class Chatty(Tracker):
    """In a separate process: it prints, starts slowly, and at a given round it exits or hangs."""

    path: str = ""
    dies_at: int | None = None
    hangs_at: int | None = None
    starts: float = 0.0  # seconds of work
    wait: float = 600.0
    separate_process: ClassVar[bool] = True

    def open(self, about: RunInfo, state: dict[str, Any], say: Any) -> Log:
        return ChattyLog(self, about, state, say)


class ChattyLog(Log):
    def __init__(self, tracker: Chatty, about: RunInfo, state: dict[str, Any], say: Any) -> None:
        self.tracker, self.state, self.file = tracker, {"opened": state.get("opened", 0) + 1}, Path(tracker.path)
        print("this is not an answer", flush=True)
        end = time.process_time() + tracker.starts
        while time.process_time() < end:
            pass
        say("hello")

    def rounds(self, lines: list[dict[str, Any]]) -> None:
        for line in lines:
            seen = self.file.read_text().split() if self.file.exists() else []
            if str(line["round"]) in seen:
                continue
            with open(self.file, "a") as file:
                file.write(f"{line['round']}\n")
            if line["round"] == self.tracker.dies_at:
                os.kill(os.getpid(), signal.SIGKILL)
            if line["round"] == self.tracker.hangs_at:
                time.sleep(10**6)

    def finish(self, summary: dict[str, Any], folder: str) -> None:
        with open(self.file, "a") as file:
            file.write(f"finish opened={self.state['opened']}\n")

    def fail(self, reason: str) -> None: ...
