"""Arithmetic with large numbers in a process of its own.

Python's lock is held for as long as a single power of large numbers takes. An aggregator that adds or opens encrypted
sums in the thread of a job would not answer health checks, parties and other jobs meanwhile, so it has a child do it,
one for each job that needs one. In the main thread (a simulation) nobody else waits, and it is done at once.

The child takes functions of this package by name, with their arguments, from its parent alone, and ends with its
standard input, so that it does not outlive the aggregator, however that ended.
"""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import IO, Any, TypeVar

from hansa.core.errors import HansaError, RuntimeFailure

T = TypeVar("T")
_own = threading.local()  # the child of a thread


def run(function: Callable[..., T], *given: Any) -> T:
    """A function's result, in another process if this is not the main thread; a HansaError that it raises is raised
    here."""
    if threading.current_thread() is threading.main_thread():
        return function(*given)
    for last in (False, True):
        child = getattr(_own, "child", None)
        if child is None:
            child = _own.child = _Child()
        try:
            done, result = child.call((function, given))
            break
        except (OSError, EOFError, pickle.UnpicklingError):  # somebody ended it
            _own.child = None
            if last:
                raise RuntimeFailure("the process that computes secure sums ended twice; its log says why") from None
    if not done:
        raise result
    out: T = result
    return out


class _Child:
    """A process that computes for one thread."""

    def __init__(self) -> None:
        command = [sys.executable, "-c", "from hansa.secure.apart import serve; serve()"]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def call(self, message: Any) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        _send(self._process.stdin, message)
        return _receive(self._process.stdout)

    def __del__(self) -> None:
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()
        self._process.kill()  # it holds nothing that could be lost
        self._process.wait()


def serve() -> None:
    """Compute what standard input asks for until it ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # an interrupted aggregator ends this process itself
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what is printed must not be taken for an answer
    while True:
        try:
            function, given = _receive(sys.stdin.buffer)
        except EOFError:
            return
        try:
            result = True, function(*given)
        except HansaError as error:
            result = False, error
        _send(answers, result)


def _send(pipe: IO[bytes], message: Any) -> None:
    data = pickle.dumps(message)
    pipe.write(len(data).to_bytes(8, "little") + data)
    pipe.flush()


def _receive(pipe: IO[bytes]) -> Any:
    size = int.from_bytes(_exactly(pipe, 8), "little")
    return pickle.loads(_exactly(pipe, size))


def _exactly(pipe: IO[bytes], size: int) -> bytes:
    data = pipe.read(size)
    if len(data) < size:
        raise EOFError
    return data
