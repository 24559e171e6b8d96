"""A deployed party's access to the mailboxes of a session, which are at the aggregator."""

from __future__ import annotations

import asyncio
import concurrent.futures
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any

from hansa.core.post import Parcel, Restarted
from hansa.net.transport.client import Refusal
from hansa.net.transport.wire import CHUNK, ENVELOPE, Exchanged, Letter, SessionCall, pack, unpack
from hansa.plumbing.errors import PartyError
from hansa.plumbing.stopping import go_on

HELD = 20.0  # seconds that a response may take
LOOK = 0.5  # seconds between two checks whether the work must stop
LARGEST = 2 * CHUNK + ENVELOPE  # bytes of a response
SILENT = "the aggregator did not respond within a session"

Talk = Callable[[bytes], Coroutine[Any, Any, bytes]]  # a request to the mailboxes -> the response


class PostOffice(ABC):
    """The mailboxes of one ask, for the thread that works on it. Subclasses say how a request travels."""

    @abstractmethod
    def _sent(self, body: bytes) -> bytes:
        """Send a request (`SessionCall`); return the response (`Exchanged`)."""

    def enter(self, nonce: bytes) -> Mapping[int, bytes]:
        return self._call(SessionCall(nonce, "enter")).nonces

    def exchange(self, nonce: bytes, parcels: Sequence[Parcel], seen: Mapping[int, int],
                 sender: int | None) -> Sequence[Parcel]:  # fmt: skip
        letters = [Letter(*parcel) for parcel in parcels]
        response = self._call(SessionCall(nonce, "talk", letters, dict(seen), sender))
        return [Parcel(letter.party, letter.number, letter.data) for letter in response.letters]

    def leave(self, nonce: bytes) -> None:
        self._call(SessionCall(nonce, "leave"))

    def _call(self, request: SessionCall) -> Exchanged:
        """Send a request, and repeat it while the aggregator has nothing to say."""
        body = pack(request)
        while True:
            response = unpack(self._sent(body), Exchanged, LARGEST)
            if response.restarted:
                raise Restarted
            if not response.waiting:
                return response


class LoopPost(PostOffice):
    """Mailboxes at the aggregator; requests are sent on the agent's event loop, in the same process."""

    def __init__(self, talk: Talk, loop: asyncio.AbstractEventLoop) -> None:
        self._talk, self._loop = talk, loop

    def _sent(self, body: bytes) -> bytes:
        under_way = asyncio.run_coroutine_threadsafe(self._talk(body), self._loop)
        try:
            while True:
                go_on()
                try:
                    return under_way.result(LOOK)
                except concurrent.futures.TimeoutError:
                    if under_way.done():  # the request itself timed out
                        raise PartyError(SILENT) from None
        except Refusal as error:
            raise PartyError(str(error)) from None
        finally:
            under_way.cancel()
