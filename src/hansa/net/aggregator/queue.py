"""In-memory task queue: asks offered to parties, their leases, and which parties are present.

Parties poll for work on the event loop. Jobs offer asks and wait for answers in threads of their own. Nothing here is
on disk: after a restart, jobs offer their unanswered asks again.
"""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from hansa.core.ask import Ask
from hansa.net.aggregator.sessions import Mailboxes
from hansa.net.transport.wire import Answer, Work
from hansa.replies.reply_checks import Rules

Key = tuple[str, int, str, int]  # of an ask: job, round, phase, number
Check = Callable[[Path, Answer], str | None]  # why an answer's blob must be rejected, or None


@dataclass(frozen=True)
class RelayTerms:
    """What a relay needs to pass an ask on: the ask itself (without an op if this is a relay that passes single replies
    on), the rules of its replies, whether it sends their sum, the monotonic time `until` which it may wait, and the
    number of parties for whose owners' approval it waits."""

    ask: Ask
    rules: Rules
    sums: bool
    until: float | None = None
    patient: int = 0
    numbers: Mapping[int, int] | None = None  # of a relay: its own number of each party of the ask

    def own_number(self, party: int) -> int:
        """The number of a party of the ask in this process; at the aggregator of the job they are the same."""
        return party if self.numbers is None else self.numbers[party]

    def behind(self, leaves: Collection[int]) -> set[int]:
        """The parties of the ask that are among those with these numbers. A relay may not know every party."""
        known = self.ask.parties if self.numbers is None else self.numbers
        return {party for party in known if self.own_number(party) in leaves}


@dataclass
class QueuedAsk:
    """An ask offered to one party, with its lease: the `instance` of the party that has taken it, `until` when no other
    instance gets it, and when it was first `taken`. `message`, `task`, `public` and `manifest` are files for the party
    to fetch.
    """

    work: Work
    message: Path
    task: Path
    limit: int  # most bytes of the answer
    check: Check
    instance: str | None = None
    until: float = 0.0
    taken: float | None = None
    public: Path | None = None
    manifest: Path | None = None
    session: Mailboxes | None = None  # that all parties of the ask share, if they exchange messages meanwhile
    terms: RelayTerms | None = None  # for a party behind a relay

    @property
    def key(self) -> Key:
        return self.work.job, self.work.round, self.work.phase, self.work.number


class Poll:
    """A long poll for work, held open. Only its own event loop touches it. `away` ends it without work."""

    def __init__(self, loop: asyncio.AbstractEventLoop, instance: str) -> None:
        self.loop, self.instance, self.away = loop, instance, False
        self._ready: asyncio.Future[None] | None = None

    async def look(self, seconds: float) -> None:
        """Wait until `wake`, at most that many seconds. There is one poll per party, so it creates no asyncio task."""
        self._ready = self.loop.create_future()
        timer = self.loop.call_later(seconds, self.wake)
        try:
            await self._ready
        finally:
            timer.cancel()

    def wake(self) -> None:
        if self._ready is not None and not self._ready.done():
            self._ready.set_result(None)


def _wake(polls: Iterable[Poll], away: bool = False) -> None:
    """Wake polls from any thread, all of one loop at once; `away` ends them without work."""

    def wake(polls: list[Poll]) -> None:
        for poll in polls:
            poll.away = poll.away or away
            poll.wake()

    polls = list(polls)
    for loop in {poll.loop for poll in polls}:
        loop.call_soon_threadsafe(wake, [poll for poll in polls if poll.loop is loop])


class News(threading.Condition):
    """A condition that coroutines can wait for too, in their event loop."""

    def __init__(self) -> None:
        super().__init__()
        self._polls: dict[Poll, None] = {}

    def notify_all(self) -> None:
        super().notify_all()
        _wake(list(self._polls))

    async def wait_async(self, seconds: float) -> None:
        """Wait until `notify_all`, at most that many seconds."""
        poll = Poll(asyncio.get_running_loop(), "")
        self._polls[poll] = None
        try:
            await poll.look(seconds)
        finally:
            self._polls.pop(poll, None)


class TaskQueue:
    """Offered asks by party. A party is absent after `absent_after` seconds without contact. A lease lasts `lease`
    seconds from the last contact with the instance that holds it."""

    def __init__(self, absent_after: float, lease: float) -> None:
        self.absent_after, self.lease = absent_after, lease
        self._offers: dict[int, dict[Key, QueuedAsk]] = {}
        self._heard: dict[int, float] = {}
        self._gone: set[int] = set()
        self._unapproved: dict[int, frozenset[str]] = {}  # by party: jobs that its owner has not approved yet
        self._polls: dict[int, dict[Poll, None]] = {}  # in the order of arrival
        self._answers: dict[Key, dict[int, str | None]] = {}
        self._dismissed = False
        self.leaves: dict[int, tuple[int, ...]] = {}  # by relay: the parties behind it
        self.behind: dict[int, int] = {}  # of parties behind a relay: the number of their relay
        self._reported: dict[int, frozenset[int]] = {}  # by relay: the parties that were connected to it lately
        self.changed = News()

    def offer(self, offers: Iterable[tuple[int, QueuedAsk]]) -> None:
        """Offer asks to parties; polls that are held open get them at once."""
        with self.changed:
            wake: list[Poll] = []
            for party, offer in offers:
                self._offers.setdefault(party, {})[offer.key] = offer
                wake += list(self._polls.get(self.behind.get(party, party), ()))
        _wake(dict.fromkeys(wake))

    def watch(self, key: Key) -> dict[int, str | None]:
        """Collect the answers to an ask until it is withdrawn: by party, the reason of a refusal, None for a reply."""
        with self.changed:
            return self._answers.setdefault(key, {})

    def take_news(self, key: Key) -> list[tuple[int, str | None]]:
        """The answers to an ask since the last call."""
        with self.changed:
            news = self._answers.get(key, {})
            items = list(news.items())
            news.clear()
            return items

    def answered(self, key: Key, party: int, why: str | None) -> None:
        """Note that a party's answer is on disk: remove the offer and wake the job that waits for it."""
        with self.changed:
            self._remove(party, key)
            if key in self._answers:
                self._answers[key][party] = why
            self.changed.notify_all()

    def withdraw(self, key: Key, parties: Iterable[int]) -> None:
        """Stop offering an ask to these parties."""
        with self.changed:
            self._answers.pop(key, None)
            wake: list[Poll] = []
            for party in parties:
                self._remove(party, key)
                if party in self.behind:
                    wake += list(self._polls.get(self.behind[party], ()))
        _wake(dict.fromkeys(wake))  # a relay learns that it need not wait any more

    def _remove(self, party: int, key: Key) -> None:
        offer = self._offers.get(party, {}).pop(key, None)
        if offer is not None and offer.session is not None:
            offer.session.gone.setdefault(party)

    def find(self, party: int, key: Key) -> QueuedAsk | None:
        """The ask under that key as it is offered to a party, or None."""
        with self.changed:
            return self._offers.get(party, {}).get(key)

    def take(self, party: int, instance: str) -> Work | None:
        """Lease the first free ask of a party to this instance of the party; None where there is none."""
        now = time.monotonic()
        with self.changed:
            unapproved = self._unapproved.get(party, frozenset())
            for offer in self._offers.get(party, {}).values():
                if offer.work.job in unapproved:
                    continue
                if offer.instance in (None, instance) or offer.until < now:
                    offer.instance, offer.until, offer.taken = instance, now + self.lease, offer.taken or now
                    return offer.work
        return None

    def spent(self, offer: QueuedAsk) -> float:
        """Seconds since an ask was first taken."""
        return 0.0 if offer.taken is None else time.monotonic() - offer.taken

    def heard(self, party: int, instance: str | None = None) -> bool:
        """Note a contact with a party, and renew the leases of this instance. True where the party was absent before.
        A party that was sent away (`gone`) is present again only after a contact that names an instance."""
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
        """Do not wait for a party any more (it was revoked), and end its polls."""
        with self.changed:
            self._gone.add(party)
            self._unapproved.pop(party, None)
            self._heard.pop(party, None)  # its offers stay, in case it is admitted again
            wake = list(self._polls.pop(party, {}))
            self.changed.notify_all()
        _wake(wake, away=True)

    def _present(self, party: int, now: float) -> bool:
        relay = self.behind.get(party)
        if relay is not None:  # after a restart, until the relay reports again, its parties count as connected to it
            return party not in self._gone and self._present(relay, now) and party in self._reported.get(relay, {party})
        heard = self._heard.get(party)
        polls = party in self._polls
        return polls or (heard is not None and now - heard <= self.absent_after)

    def present(self, parties: Iterable[int]) -> list[int]:
        """Those of the parties that are present: they poll now, or had contact within `absent_after` seconds."""
        now = time.monotonic()
        with self.changed:
            return [party for party in parties if self._present(party, now)]

    def reachable(self, parties: Iterable[int]) -> list[int]:
        """Those of the parties that can be sent an ask: they are present, or their relay is, which knows more."""
        now = time.monotonic()
        with self.changed:
            return [party for party in parties if self._present(self.behind.get(party, party), now)]

    def set_relays(self, leaves: Mapping[int, Iterable[int]]) -> None:
        """Set which parties are behind which relay."""
        self.leaves = {relay: tuple(sorted(parties)) for relay, parties in leaves.items()}
        self.behind = {party: relay for relay, parties in self.leaves.items() for party in parties}

    def report(self, relay: int, connected: Iterable[int], unapproved: Mapping[int, frozenset[str]]) -> None:
        """Note which parties are connected to a relay, and which jobs their owners have not approved yet."""
        with self.changed:
            before = self._reported.get(relay)
            self._reported[relay] = frozenset(connected)
            waiting = {party: jobs for party, jobs in self._unapproved.items() if self.behind.get(party) == relay}
            for party in waiting:
                self._unapproved.pop(party)
            self._unapproved |= unapproved
            if before != self._reported[relay] or waiting != unapproved:
                self.changed.notify_all()

    def find_relayed(self, relay: int, key: Key) -> dict[int, QueuedAsk]:
        """The ask under that key as it is offered to the parties behind a relay, in the order of their numbers."""
        with self.changed:
            offers = ((leaf, self._offers.get(leaf, {}).get(key)) for leaf in self.leaves[relay])
            return {leaf: offer for leaf, offer in offers if offer is not None}

    def relayed(self, relay: int, busy: Collection[Key]) -> Key | None:
        """The first ask for parties behind a relay that the relay does not work on; None where there is none."""
        with self.changed:
            keys = (key for leaf in self.leaves[relay] for key in self._offers.get(leaf, {}))
            return next((key for key in keys if key not in busy), None)

    async def wait_for_relayed(self, relay: int, instance: str, seconds: float, busy: Collection[Key],
                               unwanted: Callable[[], bool]) -> Key | None:  # fmt: skip
        """As `relayed`, waiting at most that many seconds for an ask, or until an ask that the relay works on is
        `unwanted`. A relay has no leases: it names the asks that it works on."""
        loop = asyncio.get_running_loop()
        poll, end = Poll(loop, instance), loop.time() + seconds
        with self.changed:
            if self._dismissed:
                return None
            polls = self._polls.setdefault(relay, {})
            _wake(list(polls), away=True)  # an earlier poll is of a connection that the relay has given up
            polls[poll] = None
        try:
            while (key := self.relayed(relay, busy)) is None and not poll.away and not unwanted():
                if end <= loop.time():
                    return None
                await poll.look(end - loop.time())
            return None if poll.away else key
        finally:
            with self.changed:
                polls = self._polls.get(relay, {})
                polls.pop(poll, None)
                if not polls:
                    self._polls.pop(relay, None)
            if not poll.away:
                self.heard(relay)

    def unapproved(self, job: str) -> frozenset[int]:
        """The parties whose owners have not approved a job yet."""
        with self.changed:
            return frozenset(party for party, jobs in self._unapproved.items() if job in jobs)

    def held(self) -> dict[int, frozenset[str]]:
        """By party: the jobs that its owner has not approved yet."""
        with self.changed:
            return dict(self._unapproved)

    def heard_of(self, parties: Iterable[int]) -> dict[int, tuple[bool, float | None]]:
        """For each party: whether it is present, and the monotonic time of the last contact, None if there was none."""
        now = time.monotonic()
        with self.changed:
            return {party: (self._present(party, now), self._heard.get(party)) for party in parties}

    def news(self) -> None:
        """Wake the jobs that wait: something changed."""
        with self.changed:
            self.changed.notify_all()

    @property
    def known(self) -> int:
        """The number of parties that had contact since the start."""
        return len(self._heard)

    def dismiss(self) -> None:
        """End all polls, and refuse new ones: the aggregator shuts down."""
        with self.changed:
            self._dismissed = True
            polls = [poll for party in self._polls.values() for poll in party]
        _wake(polls, away=True)

    async def wait_for_work(self, party: int, instance: str, seconds: float,
                            unapproved: frozenset[str] = frozenset()) -> Work | None:  # fmt: skip
        """As `take`, waiting at most that many seconds for an ask. Only the last poll of an instance is held: an
        earlier one is of a connection that the instance has given up. The party gets no asks of jobs that its owner has
        not approved yet."""
        loop = asyncio.get_running_loop()
        poll, end = Poll(loop, instance), loop.time() + seconds
        with self.changed:
            if self._dismissed:
                return None
            if unapproved != self._unapproved.pop(party, frozenset()):
                self.changed.notify_all()
            if unapproved:
                self._unapproved[party] = unapproved
            polls = self._polls.setdefault(party, {})
            _wake([earlier for earlier in polls if earlier.instance == instance], away=True)
            polls[poll] = None
        try:
            while (work := self.take(party, instance)) is None and not poll.away:
                left = min(end - loop.time(), self._free_in(party, unapproved))
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

    def _free_in(self, party: int, unapproved: frozenset[str]) -> float:
        """Seconds until the first lease of a party expires, without leases of jobs that its owner has not approved."""
        now = time.monotonic()
        with self.changed:
            offers = [offer for offer in self._offers.get(party, {}).values() if offer.work.job not in unapproved]
            return min((max(offer.until - now, 0.0) + 0.01 for offer in offers), default=math.inf)
