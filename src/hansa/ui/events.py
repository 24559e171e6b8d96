"""What the live page shows, and those who look at it: a board of named values and of rounds, and server-sent events.

Who looks gets a snapshot, then changes. Every change has a number; who comes back and names the last one that he saw
gets what he missed, or a new snapshot where that is not kept any more. All of it is bounded: the changes that are kept,
the rounds of a job, those who look and what waits for each of them. Who does not take what is there for him is let go,
and nobody waits for him.
"""

from __future__ import annotations

import asyncio
import json
import math
import re
import secrets
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

KEPT = 256  # changes for those who come back
WAITING = 64  # events that wait for one who looks
SUBSCRIBERS = 32  # who look at the same time
ROUNDS = 1000  # of a job; of more, every second of the older ones goes
RECENT = 200  # rounds that are kept whole
Line = dict[str, Any]
Look = tuple[Mapping[str, Any], Mapping[str, Sequence[Line]]]

NUMBERS = ("round", "asked", "replies", "bytes_up", "bytes_down", "simulated_seconds", "seconds", "epsilon", "delta")
METRICS = re.compile(r"(train_)?loss|accuracy|auc|rmse|mae|r2|party_(accuracy|loss)_worst_tenth|attack_success")
LONGEST = 300  # letters of a reason
MANY = 50  # parties of a round that are named with a reason


class Source(Protocol):
    """Whoever has something to show."""

    def look(self) -> Look | None:
        """Everything there is to show now, by name, and of each job the rounds since the last look; None where all
        that was shown before does not hold any more, and is to be looked at anew. It is called in a thread, by one at a
        time."""


def shown(line: Mapping[str, Any]) -> Line:
    """What is shown of a round: numbers about all of it, and why parties are not in it. Numbers about single parties
    (their metrics, what a fusion found about them) are not."""
    out: Line = {}
    for name, value in line.items():
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if number and (name in NUMBERS or METRICS.fullmatch(name)):
            out[name] = value if math.isfinite(value) else None
    if "empty" in line:
        out["empty"] = str(line["empty"])[:LONGEST]
    for name in ("missing", "rejected"):
        if line.get(name):
            told = list(line[name].items())[:MANY]
            out[name] = {str(party): str(why)[:LONGEST] for party, why in told}
            out[f"{name}_count"] = len(line[name])
    return out


def thinned(lines: list[Line]) -> list[Line]:
    """The rounds, fewer of the older ones where there are too many."""
    return lines if len(lines) <= ROUNDS else lines[:-RECENT:2] + lines[-RECENT:]


def written(event: str, data: Any, id: str | None = None) -> bytes:
    """An event as it goes over the line."""
    head = "" if id is None else f"id: {id}\n"
    return f"{head}event: {event}\ndata: {json.dumps(data, separators=(',', ':'), allow_nan=False)}\n\n".encode()


class Subscriber:
    """One who looks: what waits for him. `cut` is called when he is let go because he takes nothing."""

    def __init__(self) -> None:
        self.cut: Callable[[], None] = lambda: None
        self._events: deque[bytes] = deque()
        self._news = asyncio.Event()
        self.over = False  # nothing more comes: the end, or he was too slow

    def tell(self, event: bytes) -> None:
        """Have an event wait for him; one for whom too many wait is let go."""
        if self.over:
            return
        self._events.append(event)
        if len(self._events) > WAITING:
            self.end()
            self.cut()
        self._news.set()

    def end(self, at_once: bool = True) -> None:
        """Nothing more comes; what waits is dropped as well, or still taken."""
        self.over = True
        if at_once:
            self._events.clear()
        self._news.set()

    async def next(self, seconds: float) -> bytes | None:
        """The next event, or a sign of life after so many seconds; None at the end."""
        try:
            async with asyncio.timeout(seconds):
                while not self._events and not self.over:
                    self._news.clear()
                    await self._news.wait()
        except TimeoutError:
            return written("beat", {"at": time.time()})
        return self._events.popleft() if self._events else None


class EventStream:
    """What is shown. It belongs to one event loop."""

    def __init__(self) -> None:
        self._values: dict[str, Any] = {}
        self._rounds: dict[str, list[Line]] = {}
        self._listeners: set[Subscriber] = set()
        self.watched = asyncio.Event()  # somebody looks
        self.closed = False
        self._begin()

    def _begin(self) -> None:
        self._life, self._number = secrets.token_hex(4), 0
        self._changes: deque[bytes] = deque(maxlen=KEPT)  # the last of them has the board's number
        self._whole: str | None = None  # all that is shown, as it is sent

    def update(self, values: Mapping[str, Any], rounds: Mapping[str, Sequence[Line]]) -> None:
        """Show these values, and no others; and of each job named here these rounds after the ones that are shown.
        Those who look are told what has changed."""
        changed = {name: value for name, value in values.items() if self._values.get(name) != value}
        changed |= {name: None for name in self._values if name not in values}
        new = {job: list(lines) for job, lines in rounds.items() if lines or job not in self._rounds}
        gone = [job for job in self._rounds if job not in rounds]
        self._values = dict(values)
        self._rounds = {job: thinned([*self._rounds.get(job, ()), *lines]) for job, lines in rounds.items()}
        if changed or new or gone:
            told = {job: thinned(lines) for job, lines in new.items()} | dict.fromkeys(gone)
            self._number += 1
            self._whole = None
            event = written("change", {"at": time.time(), "values": changed, "rounds": told}, self.id)
            self._changes.append(event)
            self._tell(event)

    def reset(self) -> None:
        """What was shown does not hold any more; all begins anew."""
        self._values, self._rounds = {}, {}
        self._begin()
        self._tell(self._snapshot())

    @property
    def id(self) -> str:
        """The last change."""
        return f"{self._life}-{self._number}"

    @property
    def looking(self) -> int:
        """How many look."""
        return len(self._listeners)

    def _snapshot(self) -> bytes:
        """Everything; but for the time it is written once, however many come."""
        if self._whole is None:
            tree = {"values": self._values, "rounds": self._rounds}
            self._whole = json.dumps(tree, separators=(",", ":"), allow_nan=False)[1:]
        return f'id: {self.id}\nevent: snapshot\ndata: {{"at":{time.time()},{self._whole}\n\n'.encode()

    def _tell(self, event: bytes) -> None:
        for listener in self._listeners:
            listener.tell(event)

    def join(self, last: str) -> Subscriber | None:
        """Somebody looks, who has seen the change of that id as the last; None where there are too many already."""
        if self.closed or len(self._listeners) >= SUBSCRIBERS:
            return None
        listener = Subscriber()
        life, _, number = last.partition("-")
        missed = self._number - int(number) if life == self._life and re.fullmatch("[0-9]{1,15}", number) else -1
        if 0 <= missed <= min(len(self._changes), WAITING - 1):
            for event in list(self._changes)[len(self._changes) - missed :]:
                listener.tell(event)
        else:
            listener.tell(self._snapshot())
        self._listeners.add(listener)
        self.watched.set()
        return listener

    def leave(self, listener: Subscriber) -> None:
        self._listeners.discard(listener)
        if not self._listeners:
            self.watched.clear()

    def close(self) -> None:
        """The end: those who look are let go once they have what waits for them."""
        self.closed = True
        for listener in self._listeners:
            listener.end(at_once=False)
