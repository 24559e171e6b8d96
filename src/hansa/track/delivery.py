"""Events on their way to one tracker, in order, in a thread of their own that a run never waits for.

Rounds on their way are the very entries of the run's history, so that a tracker that cannot be reached costs a
reference a round, and gets all of them when it is back.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from hansa.track.apart import LONGEST, Apart, Event, Here, Undelivered
from hansa.track.tracker import Line, Tracker

log = logging.getLogger("hansa")
BATCH = 200  # rounds in one event, at most
PAUSES = (0.5, 1.0, 2.0, 5.0)  # seconds before an event is tried again
GRACE = 5.0  # seconds after the run for a tracker that was in trouble at its end
SAID = 3.0  # seconds after the run when it is said what is waited for


class Delivery:
    """The events of one tracker. `remember` is called with what the tracker wants remembered, when that changes."""

    def __init__(self, tracker: Tracker, remember: Callable[[Event, dict[str, Any]], None]) -> None:
        self.tracker, self._remember = tracker, remember
        self._waiting = deque[Event]()
        self._news = threading.Condition()
        self._closing = self._given_up = False
        self._trouble: str | None = None  # why the last attempt failed
        self._tried = 0  # attempts so far
        self._opened: Event = {}
        self._states: dict[str, dict[str, Any]] = {}  # what was remembered of each run, by its mark
        self._sink = (Apart if tracker.apart else Here)(tracker, self._say)
        self._thread = threading.Thread(target=self._work, name=f"track {tracker.name}", daemon=True)
        self._thread.start()

    def put(self, event: Event) -> None:
        """Have an event delivered: {"do": "open" | "round" | "finish" | "fail", ...}."""
        with self._news:
            self._waiting.append(event)
            self._news.notify()

    def _say(self, sentence: str) -> None:
        log.info("%s: %s", self.tracker.name, sentence)

    def _work(self) -> None:
        try:
            while (found := self._next()) is not None:
                event, count = found
                if not self._delivered(event):
                    return
                with self._news:
                    for _ in range(count):
                        self._waiting.popleft()
        finally:
            self._sink.close()

    def _next(self) -> tuple[Event, int] | None:
        """The next event, several rounds as one, and of how many it is made; None when there will be none."""
        with self._news:
            while not self._waiting and not self._closing:
                self._news.wait()
            if not self._waiting:
                return None
            first = self._waiting[0]
            if first["do"] == "open":
                parent = first["about"]["parent"]
                if parent is not None:  # a study's own run is opened before those in it
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
        """Deliver an event, however often it takes; whether that was done before it was given up."""
        for attempt in range(10**9):
            if self._given_up:
                return False
            try:
                state = self._sink.deliver(event)
            except Undelivered as error:
                if self._trouble is None:
                    log.info("%s: for now nothing can be delivered, the run goes on: %s", self.tracker.name, error)
                self._trouble = str(error)
                self._tried += 1
                with self._news:
                    self._news.wait_for(lambda: self._given_up, PAUSES[min(attempt, len(PAUSES) - 1)])
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
        """Wait until all is delivered, but not for ever, and not once there is a hurry; what was not, in a sentence.
        A tracker that works on is waited for, but not one that is idle: it waits for what does not come."""
        with self._news:
            self._closing = True
            self._news.notify()
        why = self._wait(hurry)
        if not self._thread.is_alive() and not self._waiting:
            return None
        with self._news:
            left = self._lost(list(self._waiting), self._trouble or why) if self._waiting else None
        self.give_up()
        self._thread.join(1.0)
        return left

    def _wait(self, hurry: Callable[[], bool]) -> str:
        """Wait for the thread; why it was not waited for any longer, where it was not."""
        begun = moved = heard = time.monotonic()
        tried, still, worked, said = self._tried, len(self._waiting), self._sink.worked, False
        while self._thread.is_alive():
            self._thread.join(0.02)
            now = time.monotonic()
            if hurry():
                self._thread.join(0.5)
                return "there was no time left"
            if len(self._waiting) < still:  # it gets on: a study's many runs may take their time
                moved = heard = now
                tried, still = self._tried, len(self._waiting)
            elif self._trouble is not None and self._tried > tried + 1 and now - moved > GRACE:
                return self._trouble
            if self._sink.worked > worked:
                heard, worked = now, self._sink.worked
            if now - heard > self.tracker.wait:
                return f"it took longer than {self.tracker.wait:g} s"
            if now - moved > max(LONGEST, self.tracker.wait):
                return f"it took longer than {now - moved:.0f} s"
            if now - begun > SAID and not said:
                said = True
                self._say("the run is over; what has not been delivered is waited for")
        return ""

    def give_up(self) -> None:
        """Deliver nothing more."""
        with self._news:
            self._given_up = True
            self._news.notify()
        self._sink.kill()

    def _lost(self, left: list[Event], why: str) -> str:
        rounds = [event["line"]["round"] for event in left if event["do"] == "round"]
        what = f"{len(rounds)} rounds (the first is round {rounds[0]})" if rounds else ""
        ends = "the end of the run with its files" if any(e["do"] in ("finish", "fail") for e in left) else ""
        begun = "the run's beginning" if any(e["do"] == "open" for e in left) and not (what or ends) else ""
        return f"{self.tracker.name} did not get {' and '.join(filter(None, (what, ends, begun)))}: {why}"
