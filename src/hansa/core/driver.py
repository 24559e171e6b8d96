"""The driver: steps an algorithm's coroutine with `send()` and yields its asks to a runtime.

`drive` is a generator of asks and does no I/O. A simulation loops over it; an asyncio runtime awaits between its steps.
The algorithm cannot tell the two apart.
"""

from __future__ import annotations

from collections.abc import Coroutine, Generator
from typing import Any, TypeVar

from hansa.core.ask import Ask
from hansa.plumbing.errors import AlgorithmError

T = TypeVar("T")


def drive(coroutine: Coroutine[Any, Any, T], name: str) -> Generator[Ask, Any, T]:
    """Yield the coroutine's asks, send it the answers, return its result.

    An exception thrown in at an ask is raised inside the coroutine. A BaseException (the round was aborted or
    cancelled) must not be caught there: if the coroutine continues, that is an AlgorithmError.
    """
    try:
        ask = coroutine.send(None)
        while True:
            if not isinstance(ask, Ask):
                raise _foreign(name, _describe(ask))
            try:
                answer = yield ask
            except BaseException as stop:
                ask = _throw(coroutine, stop, name)
            else:
                ask = coroutine.send(answer)
    except StopIteration as done:
        result: T = done.value
        return result
    except RuntimeError as error:
        if str(error) != "no running event loop":
            raise
        raise _foreign(name, "an asyncio primitive, which needs an event loop") from error
    finally:
        _close(coroutine)


def _foreign(name: str, awaited: str) -> AlgorithmError:
    return AlgorithmError(
        f"{name} awaited something other than the federation ({awaited}); a round may only await reduce, gather, "
        "submit, next, route, session and exchange"
    )


def _throw(coroutine: Coroutine[Any, Any, Any], stop: BaseException, name: str) -> Ask:
    """Raise `stop` inside the coroutine, which may handle only an Exception."""
    try:
        ask: Ask = coroutine.throw(stop)
    except StopIteration:
        if isinstance(stop, Exception):
            raise
    else:
        if isinstance(stop, Exception):
            return ask
    raise AlgorithmError(
        f"{name} swallowed the end of its round ({stop!r}); catch Exception, or raise it again"
    ) from stop


def _close(coroutine: Coroutine[Any, Any, Any]) -> None:
    try:
        coroutine.close()
    except RuntimeError:  # it ignored GeneratorExit; the first error is already raised
        return


def _describe(value: object) -> str:
    return (
        "a bare yield, as asyncio.sleep(0) makes"
        if value is None
        else f"a {type(value).__module__}.{type(value).__name__}"
    )
