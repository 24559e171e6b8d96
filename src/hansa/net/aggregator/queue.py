"""Who is to do what: the asks that wait for parties, who has taken which, and who has been heard of.

Parties ask for work on the event loop; jobs offer it and wait for answers in threads of their own. What is here lives
in memory only: after a restart jobs offer again what was not answered.
"""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from pathlib import Path

from hansa.net.transport.wire import Answer, Work

Key = tuple[str, int, str, int]  # an ask: job, round, phase, number
Check = Callable[[Path, Answer], str | None]  # what is wrong with an answer's blob, or None


@dataclass
class QueuedAsk:
    """An ask for one party. A lease says which instance of the party has taken it, and until when it is let alone.
    `check` says what is wrong with a reply, or nothing."""

    work: Work
    message: Path
    task: Path
    limit: int  # bytes of the answer
    check: Check
    instance: str | None = None
    until: float = 0.0
    taken: float | None = None

    @property
    def key(self) -> Key:
        return self.work.job, self.work.round, self.work.phase, self.work.number


class Poll:
    """A question for work that is held open; it belongs to a loop, and only that touches it."""

    def __init__(self, loop: asyncio.AbstractEventLoop, instance: str) -> None:
        self.loop, self.instance, self.away = loop, instance, False
        self._ready: asyncio.Future[None] | None = None

    async def look(self, seconds: float) -> None:
        """Wait until it is woken, or that long. There is one for each party, so it makes do without a task."""
        self._ready = self.loop.create_future()
        timer = self.loop.call_later(seconds, self.wake)
        try:
            await self._ready
        finally:
            timer.cancel()

    def wake(self) -> None:
        if self._ready is not None and not self._ready.done():
            self._ready.set_result(None)


def _wake(polls: Collection[Poll], away: bool = False) -> None:
    """Have those look who wait for work, all in one go; or send them away. Any thread may."""

    def wake(polls: list[Poll]) -> None:
        for poll in polls:
            poll.away = poll.away or away
            poll.wake()

    for loop in {poll.loop for poll in polls}:
        loop.call_soon_threadsafe(wake, [poll for poll in polls if poll.loop is loop])


class TaskQueue:
    """Offers by party. A party not heard of for `absent_after` seconds counts as absent; a lease lasts `lease`
    seconds from the last time that its holder was heard of."""

    def __init__(self, absent_after: float, lease: float) -> None:
        self.absent_after, self.lease = absent_after, lease
        self._offers: dict[int, dict[Key, QueuedAsk]] = {}
        self._heard: dict[int, float] = {}
        self._gone: set[int] = set()
        self._polls: dict[int, dict[Poll, None]] = {}  # in the order in which they came
        self._answers: dict[Key, dict[int, str | None]] = {}
        self._dismissed = False
        self.changed = threading.Condition()

    def offer(self, offers: Iterable[tuple[int, QueuedAsk]]) -> None:
        """Have parties asked; those that wait for work are told at once."""
        with self.changed:
            wake: list[Poll] = []
            for party, offer in offers:
                self._offers.setdefault(party, {})[offer.key] = offer
                wake += list(self._polls.get(party, ()))
        _wake(wake)

    def watch(self, key: Key) -> dict[int, str | None]:
        """From now on answers to an ask are noted here, until it is withdrawn: by party, why there is none, or None."""
        with self.changed:
            return self._answers.setdefault(key, {})

    def take_news(self, key: Key) -> list[tuple[int, str | None]]:
        """The answers that were noted since the last time."""
        with self.changed:
            news = self._answers.get(key, {})
            found = list(news.items())
            news.clear()
            return found

    def answered(self, key: Key, party: int, why: str | None) -> None:
        """A party's answer is on disk; it need not be asked again, and the job that waits for it looks."""
        with self.changed:
            self._offers.get(party, {}).pop(key, None)
            if key in self._answers:
                self._answers[key][party] = why
            self.changed.notify_all()

    def withdraw(self, key: Key, parties: Iterable[int]) -> None:
        """Nobody needs to answer this any more."""
        with self.changed:
            self._answers.pop(key, None)
            for party in parties:
                self._offers.get(party, {}).pop(key, None)

    def find(self, party: int, key: Key) -> QueuedAsk | None:
        """What a party is asked under that key; None where it is not asked."""
        with self.changed:
            return self._offers.get(party, {}).get(key)

    def take(self, party: int, instance: str) -> Work | None:
        """The first thing a party is to do, now leased to this instance of it; None where there is nothing."""
        now = time.monotonic()
        with self.changed:
            for offer in self._offers.get(party, {}).values():
                if offer.instance in (None, instance) or offer.until < now:
                    offer.instance, offer.until, offer.taken = instance, now + self.lease, offer.taken or now
                    return offer.work
        return None

    def spent(self, offer: QueuedAsk) -> float:
        """The seconds since an offer was first taken."""
        return 0.0 if offer.taken is None else time.monotonic() - offer.taken

    def heard(self, party: int, instance: str | None = None) -> bool:
        """A party is there; what this instance of it has taken stays its own. True for one that was not there. One that
        was sent away is there again only when an instance of it was let in."""
        now = time.monotonic()
        with self.changed:
            if instance is not None:
                self._gone.discard(party)
            elif party in self._gone:
                return False
            new = not self._present(party, now)
            self._heard[party] = now
            for offer in self._offers.get(party, {}).values():
                if instance is not None and offer.instance == instance:
                    offer.until = now + self.lease
            if new:
                self.changed.notify_all()
        return new

    def gone(self, party: int) -> None:
        """A party is not to be waited for (it was revoked); where it waits for work itself, it is sent away."""
        with self.changed:
            self._gone.add(party)
            self._heard.pop(party, None)  # what it was asked stays, should it be let in again
            wake = list(self._polls.pop(party, {}))
            self.changed.notify_all()
        _wake(wake, away=True)

    def _present(self, party: int, now: float) -> bool:
        heard = self._heard.get(party)
        waits = party in self._polls  # its question for work is held open
        return waits or (heard is not None and now - heard <= self.absent_after)

    def present(self, parties: Iterable[int]) -> list[int]:
        """Those of the parties that have been heard of lately."""
        now = time.monotonic()
        with self.changed:
            return [party for party in parties if self._present(party, now)]

    def heard_of(self, parties: Iterable[int]) -> dict[int, tuple[bool, float | None]]:
        """Of each of the parties, whether it is here now, and when it was last heard of (a clock that only goes
        forward); None where it never was."""
        now = time.monotonic()
        with self.changed:
            return {party: (self._present(party, now), self._heard.get(party)) for party in parties}

    def news(self) -> None:
        """Something changed: jobs that wait look again."""
        with self.changed:
            self.changed.notify_all()

    @property
    def known(self) -> int:
        """How many parties there are to reckon with."""
        return len(self._heard)

    def dismiss(self) -> None:
        """Send everybody away who waits for work, or comes to: the aggregator shuts down."""
        with self.changed:
            self._dismissed = True
            polls = [poll for party in self._polls.values() for poll in party]
        _wake(polls, away=True)

    async def wait_for_work(self, party: int, instance: str, seconds: float) -> Work | None:
        """As `take`, waiting up to that long for something to do. One question of an instance is held: an earlier one
        is of a connection that it has given up."""
        loop = asyncio.get_running_loop()
        poll, end = Poll(loop, instance), loop.time() + seconds
        with self.changed:
            if self._dismissed:
                return None
            polls = self._polls.setdefault(party, {})
            _wake([earlier for earlier in polls if earlier.instance == instance], away=True)
            polls[poll] = None
        try:
            while (work := self.take(party, instance)) is None and not poll.away:
                left = min(end - loop.time(), self._free_in(party))
                if end <= loop.time():
                    return None
                await poll.look(left)
            return None if poll.away else work
        finally:
            with self.changed:
                polls = self._polls.get(party, {})
                polls.pop(poll, None)
                if not polls:
                    self._polls.pop(party, None)
            if not poll.away:
                self.heard(party)

    def _free_in(self, party: int) -> float:
        """The seconds until the first of a party's leases runs out."""
        now = time.monotonic()
        with self.changed:
            return min((max(offer.until - now, 0.0) + 0.01 for offer in self._offers.get(party, {}).values()),
                       default=math.inf)  # fmt: skip
