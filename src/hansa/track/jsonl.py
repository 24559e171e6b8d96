"""A tracker that writes events as JSON lines to a file."""

from __future__ import annotations

import json
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from hansa.core.registry import register
from hansa.track.tracker import Line, Log, RunInfo, Say, Tracker, params, tags

DEFAULT = "runs/events.jsonl"


@register("jsonl")
@dataclass(frozen=True)
class JsonLines(Tracker):
    """One JSON object per line for every start, round, finish and failure, by default in runs/events.jsonl.

    Each has the run's name and mark, so that several runs can share a file. A line is written whole or not at all.
    """

    path: str = DEFAULT
    takes: ClassVar[str | None] = "path"

    def open(self, info: RunInfo, state: dict[str, Any], say: Say) -> Log:
        return JsonLinesLog(Path(state.get("path") or Path(self.path).resolve()), info)


class JsonLinesLog(Log):
    """A run in a file of JSON lines."""

    def __init__(self, path: Path, info: RunInfo) -> None:
        self.path, self.info, self.state = path, info, {"path": str(path)}
        path.parent.mkdir(parents=True, exist_ok=True)
        self._last = -1
        for event in self._written():
            if event.get("mark") == info.mark:
                self._last = max(self._last, event.get("round", 0))
        if self._last < 0:
            self._write({"event": "start", "params": params(info), "tags": tags(info)})
            self._last = 0

    def _written(self) -> list[dict[str, Any]]:
        """The events in the file; removes an incomplete last line, which a killed process left."""
        if not self.path.exists():
            return []
        events, whole = [], 0
        with open(self.path, "rb") as file:
            for line in file:
                if not line.endswith(b"\n"):
                    os.truncate(self.path, whole)
                    break
                whole += len(line)
                events.append(json.loads(line))
        return events

    def _write(self, *events: dict[str, Any]) -> None:
        common = {"run": self.info.run, "mark": self.info.mark, "time": round(time.time(), 3)}
        data = b"".join(json.dumps({**common, **event}).encode() + b"\n" for event in events)
        with open(self.path, "ab", buffering=0) as file:
            size = file.tell()
            try:
                if file.write(data) != len(data):
                    raise OSError("the disk is full")
            except BaseException:
                file.truncate(size)
                raise

    def rounds(self, lines: list[Line]) -> None:
        new = [line for line in lines if line["round"] > self._last]
        if new:
            self._write(*({"event": "round", **line} for line in new))
            self._last = new[-1]["round"]

    def finish(self, summary: dict[str, Any], folder: str) -> None:
        self._write({"event": "finish", "summary": summary})

    def fail(self, reason: str) -> None:
        self._write({"event": "fail", "reason": reason})
