"""Where the events of a tracker go: to the tracker in this process, or to a process of its own.

A process of its own keeps the run safe from what a tracker imports, prints, leaks or waits for. The run's side sends
one event at a time and waits for the reply. Meanwhile the tracker's process reports now and then that it is busy: a
slow machine may need minutes to import MLflow and to create its database. A silent server is another matter.
"""

from __future__ import annotations

import re
import time
from typing import Any

from hansa.core.plain_data import to_config
from hansa.plumbing.child import ChildEnded, ChildProcess
from hansa.track.tracker import Log, RunInfo, Say, Tracker

REPLY_SECONDS = 180.0  # a process that sends nothing for this long is replaced
EVENT_SECONDS = 600.0  # a process that is still busy with one event after this long is replaced, too
QUIET = {"MLFLOW_DISABLE_TELEMETRY": "true", "DO_NOT_TRACK": "true", "TF_CPP_MIN_LOG_LEVEL": "3"}
Event = dict[str, Any]


class Undelivered(Exception):
    """An event could not be delivered; the text is the reason."""


def short(error: BaseException) -> str:
    """The class and first line of an error, without the password that a URL may hold."""
    first = next(iter(str(error).strip().splitlines()), "")
    first = re.sub(r"//[^/@\s]*@", "//***@", first)
    return f"{type(error).__name__}: {first}"[:300]


class LocalSink:
    """A tracker in this process."""

    def __init__(self, tracker: Tracker, say: Say) -> None:
        self.tracker, self._say = tracker, say
        self.busy_reports = 0
        self._log: Log | None = None

    def deliver(self, event: Event) -> dict[str, Any]:
        """Pass an event to the tracker; return the state that the tracker wants remembered."""
        try:
            return self._deliver(event)
        except Exception as error:  # any error is the tracker's own and must not stop the run
            raise Undelivered(short(error)) from error

    def _deliver(self, event: Event) -> dict[str, Any]:
        do = event["do"]
        if do == "open":
            self.close()
            self._log = self.tracker.open(RunInfo(**event["about"]), dict(event["state"]), self._say)
        assert self._log is not None
        if do == "rounds":
            self._log.rounds(event["lines"])
        elif do == "finish":
            self._log.finish(event["summary"], event["folder"])
        elif do == "fail":
            self._log.fail(event["reason"])
        return dict(self._log.state)

    def close(self) -> None:
        """Close the tracker's files and connections."""
        if self._log is not None:
            self._log.close()
        self._log = None

    def kill(self) -> None:
        """Do nothing: a thread cannot be killed; it ends with this process."""


class ProcessSink:
    """A tracker in a process of its own. A process that ended is replaced, and its run is opened again."""

    def __init__(self, tracker: Tracker, say: Say) -> None:
        self.tracker, self._say = tracker, say
        self.busy_reports = 0  # how often the process has reported that it is busy
        self._child: ChildProcess | None = None
        self._opened: Event | None = None
        self._killed = False

    def deliver(self, event: Event) -> dict[str, Any]:
        """As `LocalSink.deliver`."""
        try:
            if self._child is None:
                child = self._start()
                child.send(to_config(self.tracker))
                if self._opened is not None and event["do"] != "open":
                    self._request(child, self._opened)
            else:
                child = self._child
            state = self._request(child, event)
        except ChildEnded as ended:
            self._end()
            raise Undelivered(f"its process ended: {str(ended) or 'without an error message'}") from ended
        except TimeoutError as error:
            self._end()
            raise Undelivered("it does not answer") from error
        except OSError as error:
            self._end()
            raise Undelivered(short(error)) from error
        if event["do"] == "open":
            self._opened = event
        if self._opened is not None:
            self._opened = {**self._opened, "state": state}
        return state

    def _start(self) -> ChildProcess:
        if self._killed:
            raise Undelivered("the run no longer waits for it")
        child = ChildProcess("hansa.track", environment={**QUIET, "OMP_NUM_THREADS": "1"}, keep_errors=True)
        self._child = child
        if self._killed:  # by another thread in the meantime
            child.kill()
        return child

    def _request(self, child: ChildProcess, event: Event) -> dict[str, Any]:
        """Send an event and wait for the reply; a TimeoutError if it does not come in time."""
        child.send(event)
        began = heard = time.monotonic()
        while True:
            deadline = min(heard + REPLY_SECONDS, began + EVENT_SECONDS)
            reply = child.receive(max(0.0, deadline - time.monotonic()))
            if reply is None:
                raise TimeoutError
            heard = time.monotonic()
            if "said" in reply:
                self._say(reply["said"])
            elif "busy" in reply:
                self.busy_reports += 1
            elif "trouble" in reply:
                raise Undelivered(reply["trouble"])
            else:
                return dict(reply["state"])

    def _end(self, seconds: float = 0.0) -> None:
        child, self._child = self._child, None
        if child is not None:
            child.close(seconds)

    def close(self) -> None:
        """Let the process end by itself, or kill it after two seconds."""
        self._end(2.0)

    def kill(self) -> None:
        """End the process, from any thread; the thread that delivers sees that it ended."""
        self._killed = True
        child = self._child
        if child is not None:
            child.kill()
