"""A world without real time: an event loop whose clock jumps to the next event, and processes that can be killed.

Everything that would block or depend on time (threads, timers, delays of disk and network) becomes an event of this
loop, at a time drawn from a seeded generator. So the same seed gives the same history.
"""

from __future__ import annotations

import asyncio
import contextvars
import random
import selectors
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from typing import Any
from unittest import mock

from hansa.plumbing import crash_points as points

STILL = 10**6  # turns of the event loop after which a clock that has not moved counts as stuck
EPOCH = 1_800_000_000.0  # the wall clock's time as a world begins
PROCESS: contextvars.ContextVar[Process | None] = contextvars.ContextVar("process", default=None)


class Crash(BaseException):
    """The process of the current event is dead: nothing that it was about to do happens."""


class Stuck(Exception):
    """No event is left, or nothing has happened for too long."""


class _NoFiles(selectors.BaseSelector):
    """A selector in which no file is ever ready; waiting moves the clock."""

    def __init__(self) -> None:
        self.loop: Clockwork | None = None

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        return selectors.SelectorKey(fileobj, 0, events, data)

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        return selectors.SelectorKey(fileobj, 0, 0, None)

    def get_map(self) -> Any:
        return {}

    def get_key(self, fileobj: Any) -> selectors.SelectorKey:
        raise KeyError(fileobj)

    def select(self, timeout: float | None = None) -> list[Any]:
        assert self.loop is not None
        if timeout is None:
            raise Stuck("every process waits for another")
        self.loop.moved(timeout)
        return []


class Clockwork(asyncio.SelectorEventLoop):
    """The event loop. Inside `running`, its time, `time.time` and `time.monotonic` are those of the world."""

    def __init__(self, seed: int, limit: float) -> None:
        self.now, self.limit, self.chance, self.turns = 0.0, limit, random.Random(seed), 0
        selector = _NoFiles()
        super().__init__(selector)
        selector.loop = self
        self.set_task_factory(self._make_task)  # type: ignore[arg-type]

    def time(self) -> float:
        return self.now

    def moved(self, seconds: float) -> None:
        self.now += seconds
        self.turns = self.turns + 1 if seconds == 0 else 0
        if self.turns > STILL:
            raise Stuck(f"the clock stands still at {self.now:g} seconds")
        if self.now > self.limit:
            raise Stuck(f"it has not ended after {self.limit:g} seconds")

    def call_soon_threadsafe(self, callback: Any, *args: Any, context: Any = None) -> asyncio.Handle:
        return self.call_soon(callback, *args, context=context)  # there are no threads

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:  # type: ignore[override]
        """Run the function of a thread at once, after a short delay, if its process is still alive by then."""
        process, done = alive(), self.create_future()

        def run() -> None:
            if done.cancelled() or (process is not None and process.dead):
                return
            try:
                result = func(*args)
            except BaseException as error:
                if not done.done():
                    done.set_exception(error if not isinstance(error, StopIteration) else RuntimeError(str(error)))
            else:
                if not done.done():
                    done.set_result(result)

        self.call_later(self.chance.random() * 0.01, run)
        return done

    def _make_task(self, loop: Any, coro: Coroutine[Any, Any, Any], **given: Any) -> asyncio.Task[Any]:
        context = given.get("context")
        process = context.get(PROCESS) if context is not None else PROCESS.get()
        task: asyncio.Task[Any] = asyncio.Task(coro, loop=self, **given)
        if process is not None:
            process.tasks[task] = None
            task.add_done_callback(process.done)
        return task

    @contextmanager
    def running(self) -> Iterator[None]:
        """Inside the block, clocks show the world's time; a process's wall clock may be off by its `skew`."""

        def wall() -> float:
            process = PROCESS.get()
            return EPOCH + self.now + (process.skew if process is not None else 0.0)

        points.install(reached)
        try:
            with mock.patch.object(time, "time", wall), mock.patch.object(time, "monotonic", lambda: self.now):
                yield
        finally:
            points.install(None)


class Process:
    """A process that lives until it is killed; the content of its memory is lost then."""

    def __init__(self, loop: Clockwork, name: str, skew: float = 0.0, fragile: float = 0.0) -> None:
        self.loop, self.name, self.skew, self.fragile = loop, name, skew, fragile
        self.dead = False
        self.tasks: dict[asyncio.Task[Any], None] = {}  # in the order in which they began
        self.on_death: list[Callable[[], None]] = []
        self.errors: list[BaseException] = []  # of its tasks
        self.context = contextvars.copy_context()
        self.context.run(PROCESS.set, self)

    def spawn(self, coro: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Start a coroutine in this process."""
        return self.loop.create_task(coro, context=self.context.copy())

    def later(self, seconds: float, call: Callable[[], Any]) -> None:
        """Schedule a call in this process, if it is still alive by then."""

        def run() -> None:
            if not self.dead:
                with suppress(Crash):
                    call()

        self.loop.call_later(seconds, run, context=self.context.copy())

    def done(self, task: asyncio.Task[Any]) -> None:
        self.tasks.pop(task, None)
        error = None if task.cancelled() else task.exception()
        if error is not None and not isinstance(error, Crash) and not self.dead:
            self.errors.append(error)

    def kill(self) -> None:
        """`kill -9`: nothing that the process was about to do happens."""
        if not self.dead:
            self.dead = True
            for task in list(self.tasks):
                task.cancel()
            for call in self.on_death:
                call()


def alive() -> Process | None:
    """The process of the current event; a Crash if it is dead."""
    process = PROCESS.get()
    if process is not None and process.dead:
        raise Crash
    return process


def reached(name: str) -> None:
    """A named point: a process may die here, and a dead process stops here."""
    process = alive()
    if process is not None and process.fragile and process.loop.chance.random() < process.fragile:
        process.kill()
        raise Crash
