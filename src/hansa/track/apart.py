"""A tracker in a process of its own: what it imports, prints, leaks or waits for is none of the run's business.

The run's side sends an event a line (JSON) and waits for the answer; the other side keeps at most that one event, and
says now and then that it is at work on it: to import MLflow and to make its database may take a slow machine minutes,
and is not the same as to wait for a server that is silent. It ends with its standard input, so that it does not outlive
the run, however the run ended. `python -m hansa.track` is the other side.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from typing import Any

from hansa.core.registry import from_config, to_config
from hansa.track.tracker import About, Log, Say, Tracker

log = logging.getLogger("hansa")
ANSWER = 180.0  # seconds after which a process that says nothing is ended, and another begun
LONGEST = 600.0  # seconds after which that is done with one that is still at work, too
WORK = 0.1  # seconds of processor time after which a process says that it is at work
QUIET = {"MLFLOW_DISABLE_TELEMETRY": "true", "DO_NOT_TRACK": "true", "TF_CPP_MIN_LOG_LEVEL": "3"}
Event = dict[str, Any]


class Undelivered(Exception):
    """An event could not be delivered, with the reason in a sentence."""


def told(error: BaseException) -> str:
    """An error in a few words, without the password that an address may hold."""
    first = next(iter(str(error).strip().splitlines()), "")
    first = re.sub(r"//[^/@\s]*@", "//***@", first)
    return f"{type(error).__name__}: {first}"[:300]


class Here:
    """A tracker in this process."""

    def __init__(self, tracker: Tracker, say: Say) -> None:
        self.tracker, self._say = tracker, say
        self.worked = 0
        self._log: Log | None = None

    def deliver(self, event: Event) -> dict[str, Any]:
        """Have the tracker do what an event says; what it wants remembered."""
        try:
            return self.do(event)
        except Exception as error:  # whatever it is: it is the tracker's, not the run's
            raise Undelivered(told(error)) from error

    def do(self, event: Event) -> dict[str, Any]:
        """As `deliver`, but with the tracker's own error."""
        what = event["do"]
        if what == "open":
            self.close()
            self._log = self.tracker.open(About(**event["about"]), dict(event["state"]), self._say)
        assert self._log is not None
        if what == "rounds":
            self._log.rounds(event["lines"])
        elif what == "finish":
            self._log.finish(event["summary"], event["folder"])
        elif what == "fail":
            self._log.fail(event["reason"])
        return dict(self._log.state)

    def close(self) -> None:
        if self._log is not None:
            self._log.close()
        self._log = None

    def kill(self) -> None:
        """There is nothing to be done about a thread; it ends with the process."""


class Apart:
    """A tracker in another process; one that ends is begun again, with the run it had open."""

    def __init__(self, tracker: Tracker, say: Say) -> None:
        self.tracker, self._say = tracker, say
        self.worked = 0  # how often it has said that it is at work
        self._process: subprocess.Popen[bytes] | None = None
        self._errors: Any = None
        self._opened: Event | None = None
        self._buffer = b""
        self._killed = False

    def deliver(self, event: Event) -> dict[str, Any]:
        """As of `Here`."""
        try:
            if self._process is None:
                self._start()
                if self._opened is not None and event["do"] != "open":
                    self._ask(self._opened)
            state = self._ask(event)
        except OSError as error:
            self._end()
            raise Undelivered(told(error)) from error
        if event["do"] == "open":
            self._opened = event
        if self._opened is not None:
            self._opened = {**self._opened, "state": state}
        return state

    def _start(self) -> None:
        if self._killed:
            raise Undelivered("it was given up")
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 (open as long as the process)
        path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "hansa.track"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors,
            env={**os.environ, **QUIET, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        self._buffer = b""
        if self._killed:  # meanwhile
            self._process.kill()
        self._send(to_config(self.tracker))

    def _send(self, tree: Any) -> None:
        assert self._process is not None and self._process.stdin is not None
        self._process.stdin.write(json.dumps(tree).encode() + b"\n")
        self._process.stdin.flush()

    def _ask(self, event: Event) -> dict[str, Any]:
        self._send(event)
        begun = heard = time.monotonic()
        while True:
            answer = json.loads(self._line(min(heard + ANSWER, begun + LONGEST)))
            heard = time.monotonic()
            if "said" in answer:
                self._say(answer["said"])
            elif "worked" in answer:
                self.worked += 1
            elif "trouble" in answer:
                raise Undelivered(answer["trouble"])
            else:
                return dict(answer["state"])

    def _line(self, end: float) -> bytes:
        assert self._process is not None and self._process.stdout is not None
        pipe = self._process.stdout.fileno()
        while b"\n" not in self._buffer:
            ready, _, _ = select.select([pipe], [], [], max(0.0, end - time.monotonic()))
            more = os.read(pipe, 65536) if ready else b""
            if not more:
                why = f"its process ended: {self._last_words()}" if ready else "it does not answer"
                self._end()
                raise Undelivered(why)
            self._buffer += more
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line

    def _last_words(self) -> str:
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").strip().splitlines()
        return str(lines[-1])[:200] if lines else "it said nothing"

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
            for pipe in (process.stdout, self._errors, process.stdin):
                with contextlib.suppress(OSError):  # what was still to be written has nobody to read it
                    pipe.close()  # type: ignore[union-attr]

    def close(self) -> None:
        """Let it end by itself, or have it end."""
        if self._process is not None and self._process.stdin is not None:
            with contextlib.suppress(OSError, subprocess.TimeoutExpired):
                self._process.stdin.close()
                self._process.wait(2.0)
        self._end()

    def kill(self) -> None:
        """End it from another thread than the one that delivers, which is told so."""
        self._killed = True
        process = self._process
        if process is not None:
            process.kill()


def main() -> None:
    """The other side: events from standard input, answers to standard output, which nothing else can write to."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # an interrupted run tells this process what to do
    os.nice(10)  # where cores are few, they are the run's
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    sys.stdout = sys.stderr

    one = threading.Lock()  # speaks at a time

    def answer(tree: dict[str, Any]) -> None:
        with one:
            answers.write(json.dumps(tree) + "\n")
            answers.flush()

    def tell_of_work() -> None:
        told = time.process_time()
        with contextlib.suppress(OSError):  # nobody listens any more
            while True:
                time.sleep(0.5)
                if (spent := time.process_time()) - told >= WORK:
                    answer({"worked": spent})
                    told = spent

    threading.Thread(target=tell_of_work, daemon=True).start()
    desk = Here(from_config("tracker", json.loads(sys.stdin.readline()), where="track"), lambda s: answer({"said": s}))
    for line in sys.stdin:
        try:
            state = desk.deliver(json.loads(line))
        except Undelivered as error:
            answer({"trouble": str(error)})
        else:
            answer({"state": state})
    desk.close()
