"""The content of the live page, named values and rounds, and its stream of server-sent events.

A subscriber gets a snapshot, then changes. Every change has a number; reconnecting clients resume from Last-Event-ID,
or get a new snapshot if the changes they missed are no longer kept. Everything is bounded: the changes that are kept,
the rounds of a job, the subscribers, and the events that wait for each of them. A subscriber that does not read is
dropped, and delays nobody.
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

KEPT = 256  # changes kept for clients that reconnect
WAITING = 64  # events that may wait for one subscriber
SUBSCRIBERS = 32  # at the same time
ROUNDS = 1000  # of a job; beyond that, every second one of the older rounds is dropped
RECENT = 200  # latest rounds, none of which is dropped
Line = dict[str, Any]
Look = tuple[Mapping[str, Any], Mapping[str, Sequence[Line]]]

NUMBERS = ("round", "asked", "replies", "bytes_up", "bytes_down", "simulated_seconds", "seconds", "epsilon", "delta")
METRICS = re.compile(r"(train_)?loss|accuracy|auc|rmse|mae|r2|party_(accuracy|loss)_(mean|worst_tenth|spread)|"
                     r"attack_success|forgetting")  # fmt: skip
LONGEST = 300  # characters of a reason
CHOSEN = 8  # metrics of `run.metrics` that are shown
MANY = 50  # parties of a round that are shown with a reason


class Source(Protocol):
    """What a live page shows: a simulation, or an aggregator."""

    def look(self) -> Look | None:
        """Return all current values by name, and the new rounds of each job since the last call.

        None means that everything returned before is invalid: call again to start anew. Called in a thread, one call at
        a time.
        """


def shown(line: Mapping[str, Any]) -> Line:
    """The part of a metrics line that the page shows: numbers about the whole round, and why parties are not in it,
    and which ones gave an alarm.

    Numbers about single parties (their metrics, a fusion's findings, the losses of an alarm) are left out.
    """
    out: Line = {}
    for name, value in line.items():
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if number and (name in NUMBERS or METRICS.fullmatch(name)):
            out[name] = value if math.isfinite(value) else None
    chosen = [name for name in line if f"party_{name}_mean" in line and name not in out]
    if chosen:
        out["chosen"] = {name: line[name] for name in chosen[:CHOSEN] if isinstance(line[name], float)}
    if "empty" in line:
        out["empty"] = str(line["empty"])[:LONGEST]
    for name in ("missing", "rejected"):
        if line.get(name):
            first = list(line[name].items())[:MANY]
            out[name] = {str(party): str(why)[:LONGEST] for party, why in first}
            out[f"{name}_count"] = len(line[name])
    if line.get("alarms"):
        out["alarms"] = [str(party)[:LONGEST] for party in list(line["alarms"])[:MANY]]
    return out


def thinned(lines: list[Line]) -> list[Line]:
    """The rounds, without every second one of the older rounds if there are too many."""
    return lines if len(lines) <= ROUNDS else lines[:-RECENT:2] + lines[-RECENT:]


def encoded(event: str, data: Any, id: str | None = None) -> bytes:
    """A server-sent event as bytes."""
    head = "" if id is None else f"id: {id}\n"
    return f"{head}event: {event}\ndata: {json.dumps(data, separators=(',', ':'), allow_nan=False)}\n\n".encode()


class Subscriber:
    """A client of the event stream, with the events that wait for it. `cut` is called to drop a client that is slow."""

    def __init__(self) -> None:
        self.cut: Callable[[], None] = lambda: None
        self._events: deque[bytes] = deque()
        self._news = asyncio.Event()
        self.over = False  # no more events: the stream was closed, or the client was too slow

    def put(self, event: bytes) -> None:
        """Queue an event; drop the client if too many events wait."""
        if self.over:
            return
        self._events.append(event)
        if len(self._events) > WAITING:
            self.end()
            self.cut()
        self._news.set()

    def end(self, at_once: bool = True) -> None:
        """Send no more events; those that wait are dropped too (`at_once`) or still sent."""
        self.over = True
        if at_once:
            self._events.clear()
        self._news.set()

    async def next(self, seconds: float) -> bytes | None:
        """Wait for the next event; return a `beat` event after a number of seconds, and None at the end."""
        try:
            async with asyncio.timeout(seconds):
                while not self._events and not self.over:
                    self._news.clear()
                    await self._news.wait()
        except TimeoutError:
            return encoded("beat", {"at": time.time()})
        return self._events.popleft() if self._events else None


class EventStream:
    """The values and rounds on the live page, and the subscribers to their changes. Belongs to one event loop."""

    def __init__(self) -> None:
        self._values: dict[str, Any] = {}
        self._rounds: dict[str, list[Line]] = {}
        self._subscribers: set[Subscriber] = set()
        self.watched = asyncio.Event()  # set while there are subscribers
        self.closed = False
        self._begin()

    def _begin(self) -> None:
        self._life, self._number = secrets.token_hex(4), 0
        self._changes: deque[bytes] = deque(maxlen=KEPT)  # the last change has the number `_number`
        self._encoded: str | None = None  # the whole content, encoded for snapshots

    def update(self, values: Mapping[str, Any], rounds: Mapping[str, Sequence[Line]]) -> None:
        """Replace all values, append rounds to their jobs, and send subscribers the differences.

        A job that `rounds` does not name is removed.
        """
        changed = {name: value for name, value in values.items() if self._values.get(name) != value}
        changed |= {name: None for name in self._values if name not in values}
        new = {job: list(lines) for job, lines in rounds.items() if lines or job not in self._rounds}
        gone = [job for job in self._rounds if job not in rounds]
        self._values = dict(values)
        self._rounds = {job: thinned([*self._rounds.get(job, ()), *lines]) for job, lines in rounds.items()}
        if changed or new or gone:
            sent = {job: thinned(lines) for job, lines in new.items()} | dict.fromkeys(gone)
            self._number += 1
            self._encoded = None
            event = encoded("change", {"at": time.time(), "values": changed, "rounds": sent}, self.id)
            self._changes.append(event)
            self._send(event)

    def reset(self) -> None:
        """Forget everything, and start anew with an empty snapshot."""
        self._values, self._rounds = {}, {}
        self._begin()
        self._send(self._snapshot())

    @property
    def id(self) -> str:
        """The id of the last change."""
        return f"{self._life}-{self._number}"

    @property
    def subscribers(self) -> int:
        """The number of subscribers."""
        return len(self._subscribers)

    def _snapshot(self) -> bytes:
        """The whole content as an event. It is encoded once, except for the time, however many clients come."""
        if self._encoded is None:
            tree = {"values": self._values, "rounds": self._rounds}
            self._encoded = json.dumps(tree, separators=(",", ":"), allow_nan=False)[1:]
        return f'id: {self.id}\nevent: snapshot\ndata: {{"at":{time.time()},{self._encoded}\n\n'.encode()

    def _send(self, event: bytes) -> None:
        for subscriber in self._subscribers:
            subscriber.put(event)

    def subscribe(self, last: str) -> Subscriber | None:
        """Add a client whose last event had the id `last`; None if there are too many already."""
        if self.closed or len(self._subscribers) >= SUBSCRIBERS:
            return None
        subscriber = Subscriber()
        life, _, number = last.partition("-")
        missed = self._number - int(number) if life == self._life and re.fullmatch("[0-9]{1,15}", number) else -1
        if 0 <= missed <= min(len(self._changes), WAITING - 1):
            for event in list(self._changes)[len(self._changes) - missed :]:
                subscriber.put(event)
        else:
            subscriber.put(self._snapshot())
        self._subscribers.add(subscriber)
        self.watched.set()
        return subscriber

    def unsubscribe(self, subscriber: Subscriber) -> None:
        """Remove a client."""
        self._subscribers.discard(subscriber)
        if not self._subscribers:
            self.watched.clear()

    def close(self) -> None:
        """End the stream once every subscriber has the events that wait for it."""
        self.closed = True
        for subscriber in self._subscribers:
            subscriber.end(at_once=False)
