"""Mailboxes of sessions: sealed messages between parties that work on the same ask, in memory alone.

A session lasts as long as its ask. Every request of a party names the nonce with which it entered. A party that enters
with another nonce was restarted: all mailboxes are emptied, and the other parties are told to begin again. A party may
repeat any request, for example after a lost connection. The mailboxes live on the aggregator's event loop; only `gone`
is written by other threads.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict, deque
from collections.abc import Callable, Mapping
from typing import Any

from hansa.core.ask import Ask
from hansa.core.post import AHEAD
from hansa.core.relay import message_size
from hansa.core.session_op import SessionOp, left
from hansa.net.transport.wire import CHUNK, Exchanged, Letter, SessionCall
from hansa.plumbing.errors import DataError, HansaError

HELD = 10.0  # seconds that a request is held open
LOOK = 0.25  # seconds between two looks at the parties that are gone
SEALED = 64  # bytes by which a sealed message may be longer than its content


class SessionOver(HansaError):
    """A session that cannot go on: a party left it, or it has ended."""


class Mailboxes:
    """The mailboxes of one session. `limits` has the most bytes of a message, by (sender, receiver)."""

    def __init__(self, limits: Mapping[tuple[int, int], int]) -> None:
        self._limits = limits
        self.parties = frozenset(party for pair in limits for party in pair)
        self.gone: dict[int, None] = {}  # who has answered the ask, or is no longer asked, in this order
        self._nonces: dict[int, bytes] = {}
        self._done: set[int] = set()
        self._waiting: set[asyncio.Future[None]] = set()
        self._empty()

    @classmethod
    def of(cls, ask: Ask) -> Mailboxes:
        """The mailboxes for the ask of a session, whose op is around a `SessionOp`."""
        op: Any = getattr(ask.op, "inner", None)
        assert isinstance(op, SessionOp)
        limits = {}
        for receiver in ask.parties:
            for sender in ask.parties:
                if sender != receiver:
                    announced = op.expects_messages(ask.payload_of(receiver), sender, receiver)
                    limits[sender, receiver] = max(map(message_size, announced), default=-SEALED) + SEALED
        return cls(limits)

    def _empty(self) -> None:
        self._boxes: defaultdict[tuple[int, int], deque[bytes]] = defaultdict(deque)
        self._first: defaultdict[tuple[int, int], int] = defaultdict(int)  # the number of the first message in a box
        self._done.clear()

    async def serve(self, party: int, request: SessionCall) -> Exchanged:
        """Answer one request of a party; `waiting` says that the party should repeat it."""
        if request.step == "enter":
            self._enter(party, request.nonce)
        elif self._nonces.get(party) != request.nonce:
            return Exchanged(restarted=True)
        if request.step == "enter":
            ready: Callable[[], bool] = lambda: len(self._nonces) == len(self.parties)  # noqa: E731
        elif request.step == "talk":
            self._acknowledge(party, request.seen)
            ready = lambda: self._put(party, request) and self._ready(party, request.sender)  # noqa: E731
        else:
            self._done.add(party)
            ready = lambda: self._done == self.parties  # noqa: E731
        self._wake()
        loop = asyncio.get_running_loop()
        end = loop.time() + HELD
        while self._nonces.get(party) == request.nonce and not ready():
            first = next((other for other in self.gone if other != party), None)  # others left because it did
            if first is not None:
                raise SessionOver(left(first))
            if loop.time() >= end:
                return Exchanged(waiting=True)
            await self._change()
        if self._nonces.get(party) != request.nonce:
            return Exchanged(restarted=True)
        if request.step == "enter":
            return Exchanged(nonces=dict(self._nonces))
        return Exchanged(letters=self._letters(party) if request.sender is not None else [])

    def _enter(self, party: int, nonce: bytes) -> None:
        if self._nonces.get(party) == nonce:
            return
        if self._done == self.parties:
            raise SessionOver("the session has ended, and this party's reply to it was lost")
        if party in self._nonces:
            self._nonces.clear()
            self._empty()
        self._nonces[party] = nonce

    def _acknowledge(self, party: int, seen: Mapping[int, int]) -> None:
        """Delete the messages that a party has received."""
        for sender, count in seen.items():
            pair = sender, party
            while self._boxes.get(pair) and self._first[pair] < count:
                self._boxes[pair].popleft()
                self._first[pair] += 1

    def _put(self, party: int, request: SessionCall) -> bool:
        """Put a party's messages into the mailboxes; whether all of them had room. Repeated ones change nothing."""
        for letter in request.letters:
            pair, size = (party, letter.party), len(letter.data)
            limit = self._limits.get(pair, 0)
            if size > limit or not limit:
                raise DataError(f"a message of {size} bytes to party {letter.party}; the op announces {limit}")
            box = self._boxes[pair]
            place = letter.number - self._first[pair] - len(box)
            if place < 0:
                continue
            if place > 0:
                raise DataError(f"message {letter.number} to party {letter.party} comes before earlier ones")
            if len(box) >= AHEAD:
                return False
            box.append(letter.data)
            self._wake()
        return True

    def _ready(self, party: int, sender: int | None) -> bool:
        return sender is None or bool(self._boxes.get((sender, party)))

    def _letters(self, party: int) -> list[Letter]:
        """The messages for a party, as many as fit into one response."""
        out: list[Letter] = []
        size = 0
        for (sender, receiver), box in self._boxes.items():
            for place, data in enumerate(box if receiver == party else ()):
                size += len(data)
                if out and size > CHUNK:
                    return out
                out.append(Letter(sender, self._first[sender, receiver] + place, data))
        return out

    def _wake(self) -> None:
        for future in self._waiting:
            if not future.done():
                future.set_result(None)
        self._waiting.clear()

    async def _change(self) -> None:
        """Wait for the next change, or a moment."""
        future = asyncio.get_running_loop().create_future()
        self._waiting.add(future)
        await asyncio.wait((future,), timeout=LOOK)
        self._waiting.discard(future)
