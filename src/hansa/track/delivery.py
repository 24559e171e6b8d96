"""Deliver the events of a run to one tracker, in order, in a thread that the run never waits for.

Waiting rounds are the very entries of the run's history: a tracker that cannot be reached costs one reference per
round, and gets all rounds when it is back.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from hansa.track.sinks import EVENT_SECONDS, Event, LocalSink, ProcessSink, Undelivered
from hansa.track.tracker import Line, Tracker

log = logging.getLogger("hansa")
BATCH = 200  # rounds in one event, at most
PAUSES = (0.5, 1.0, 2.0, 5.0)  # seconds before an event is tried again
GRACE = 5.0  # seconds after the run for a tracker that fails
NOTICE_SECONDS = 3.0  # of waiting after the run, before a log line says so


class Delivery:
    """The events of one tracker. `remember` is called when the state that the tracker wants remembered changes."""

    def __init__(self, tracker: Tracker, remember: Callable[[Event, dict[str, Any]], None]) -> None:
        self.tracker, self._remember = tracker, remember
        self._waiting = deque[Event]()
        self._changed = threading.Condition()
        self._closing = self._given_up = False
        self._trouble: str | None = None  # why the last attempt failed
        self._failures = 0  # failed attempts so far
        self._opened: Event = {}
        self._states: dict[str, dict[str, Any]] = {}  # the state of each run, by its mark
        self._sink = (ProcessSink if tracker.separate_process else LocalSink)(tracker, self._say)
        self._thread = threading.Thread(target=self._work, name=f"track {tracker.name}", daemon=True)
        self._thread.start()

    def put(self, event: Event) -> None:
        """Queue an event: {"do": "open" | "round" | "finish" | "fail", ...}."""
        with self._changed:
            self._waiting.append(event)
            self._changed.notify()

    def _say(self, sentence: str) -> None:
        log.info("%s: %s", self.tracker.name, sentence)

    def _work(self) -> None:
        try:
            while (batch := self._next()) is not None:
                event, count = batch
                if not self._delivered(event):
                    return
                with self._changed:
                    for _ in range(count):
                        self._waiting.popleft()
        finally:
            self._sink.close()

    def _next(self) -> tuple[Event, int] | None:
        """Wait for the next event, and the number of queued events it covers; None when no more will come.

        Rounds that wait together become one event.
        """
        with self._changed:
            while not self._waiting and not self._closing:
                self._changed.wait()
            if not self._waiting:
                return None
            first = self._waiting[0]
            if first["do"] == "open":
                parent = first["about"]["parent"]
                if parent is not None:  # the run of a study is opened before the runs of its cells
                    first = {**first, "about": {**first["about"], "parent": self._states[parent["mark"]]}}
                if first["about"]["mark"] in self._states:  # opened again
                    first = {**first, "state": self._states[first["about"]["mark"]]}
                return first, 1
            if first["do"] != "round":
                return first, 1
            lines: list[Line] = []
            for event in self._waiting:
                if event["do"] != "round" or len(lines) == BATCH:
                    break
                lines.append(event["line"])
            return {"do": "rounds", "lines": lines}, len(lines)

    def _delivered(self, event: Event) -> bool:
        """Try to deliver an event until it succeeds; False if the tracker was given up before."""
        for attempt in range(10**9):
            if self._given_up:
                return False
            try:
                state = self._sink.deliver(event)
            except Undelivered as error:
                if self._trouble is None:
                    log.info("%s: delivery failed and is tried again, the run continues: %s", self.tracker.name, error)
                self._trouble = str(error)
                self._failures += 1
                with self._changed:
                    self._changed.wait_for(lambda: self._given_up, PAUSES[min(attempt, len(PAUSES) - 1)])
            else:
                self._trouble = None
                self._keep(event, state)
                return True
        return False

    def _keep(self, event: Event, state: dict[str, Any]) -> None:
        if event["do"] == "open":
            self._opened = event
        mark = self._opened["about"]["mark"]
        ended = event["do"] in ("finish", "fail")
        if self._states.get(mark) != state or ended:
            self._states[mark] = state
            self._remember({**self._opened, "ended": event["do"] if ended else None}, state)

    def close(self, hurry: Callable[[], bool] = lambda: False) -> str | None:
        """Wait until all events are delivered; return a sentence about those that were not.

        The wait is bounded, and ends when `hurry` returns True. A tracker that is busy is waited for longer than an
        idle one, which waits for a reply that does not come.
        """
        with self._changed:
            self._closing = True
            self._changed.notify()
        reason = self._wait(hurry)
        if not self._thread.is_alive() and not self._waiting:
            return None
        with self._changed:
            lost = self._lost(list(self._waiting), self._trouble or reason) if self._waiting else None
        self.give_up()
        self._thread.join(1.0)
        return lost

    def _wait(self, hurry: Callable[[], bool]) -> str:
        """Wait for the thread to end; return why the wait ended before, or ""."""
        began = progressed = heard = looked = time.monotonic()
        failures, left, reports, noticed = self._failures, len(self._waiting), self._sink.busy_reports, False
        while self._thread.is_alive():
            self._thread.join(0.02)
            now = time.monotonic()
            if (stopped := now - looked) > self.tracker.wait / 2:  # this process did not run, nor did the thread
                began, progressed, heard = began + stopped, progressed + stopped, heard + stopped
            looked = now
            if hurry():
                self._thread.join(0.5)
                return "there was no time left"
            if len(self._waiting) < left:  # it makes progress: the many runs of a study may take long
                progressed = heard = now
                failures, left = self._failures, len(self._waiting)
            elif self._trouble is not None and self._failures > failures + 1 and now - progressed > GRACE:
                return self._trouble
            if self._sink.busy_reports > reports:
                heard, reports = now, self._sink.busy_reports
            if now - heard > self.tracker.wait:
                return f"it took longer than {self.tracker.wait:g} s"
            if now - progressed > max(EVENT_SECONDS, self.tracker.wait):
                return f"it took longer than {now - progressed:.0f} s"
            if now - began > NOTICE_SECONDS and not noticed:
                noticed = True
                self._say("the run is over; waiting until its last events are delivered")
        return ""

    def give_up(self) -> None:
        """Deliver nothing more."""
        with self._changed:
            self._given_up = True
            self._changed.notify()
        self._sink.kill()

    def _lost(self, events: list[Event], reason: str) -> str:
        """The sentence about events that were not delivered."""
        numbers = [event["line"]["round"] for event in events if event["do"] == "round"]
        rounds = f"{len(numbers)} rounds (the first is round {numbers[0]})" if numbers else ""
        end = "the end of the run with its files" if any(e["do"] in ("finish", "fail") for e in events) else ""
        start = "the start of the run" if any(e["do"] == "open" for e in events) and not (rounds or end) else ""
        return f"{self.tracker.name} did not get {' and '.join(filter(None, (rounds, end, start)))}: {reason}"
