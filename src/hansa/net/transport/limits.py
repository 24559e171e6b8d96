"""The aggregator's limits on clients: the [limits] table, token buckets, a throttle for the log."""

from __future__ import annotations

import ipaddress
import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta

from hansa.core.fields import Advice
from hansa.core.plain_data import check_numbers
from hansa.core.quantities import Count, PerSecond
from hansa.net.transport.pacing import reconnect_window

PIECE = 2**17  # bytes of a body that must arrive, or be read, within `stall` seconds
MOST = 2**16  # keys with a bucket of their own
FORGIVEN = 60.0  # seconds after which one more line per key is logged
FIRST = 20  # lines per key that are logged at once
LEAST = 0.1  # seconds: the smallest timeout
LATEST = 40  # seconds: the longest Retry-After at shutdown; a client adds up to half of it
Waiting = Annotated[float, Meta(ge=LEAST, description="seconds"), Advice("no client is faster")]
Stuck = Annotated[float, Meta(ge=LEAST, le=60, description="seconds"),
                  Advice("no client is faster, and no socket may be stuck longer")]  # fmt: skip


@dataclass(frozen=True)
class Limits:
    """The [limits] table.

    Before authentication. At most `connections` in total, a quarter of them without a certificate, and `per_address`
    from one address. At most `handshakes` at the same time, an eighth of them from one address; others wait. A
    handshake may take `handshake` seconds, the head of a request `head` seconds. A stranger (a client without a
    certificate) pays one token per connection and one per request; a wrong enrolment token costs `wrong_token` more.
    An address has `stranger_burst` tokens, which return at `stranger_rate` per second. Without a token left, its
    connections share an eighth of the handshakes with other such addresses, and stay open only with a certificate.

    After authentication. A certificate may have `party_connections` connections and `party_requests` requests at the
    same time. It may make `party_burst` requests at once, which return at `party_rate` per second. `bodies` bounds the
    bytes of request bodies in memory; one certificate may use a quarter of them.

    A transfer slower than 128 KiB per `stall` seconds is dropped, in both directions. An idle connection is closed
    after `idle` seconds, one whose peer is gone after about `stall`. At shutdown, requests have `shutdown` seconds to
    complete.
    """

    connections: Count = 16384
    per_address: Count = 512
    handshakes: Count = 256
    handshake: Stuck = 10.0
    head: Stuck = 10.0
    stall: Stuck = 30.0
    idle: Waiting = 25.0
    stranger_rate: PerSecond = 20.0
    stranger_burst: Count = 200
    wrong_token: Count = 10
    party_connections: Count = 16
    party_requests: Count = 8
    party_rate: PerSecond = 200.0
    party_burst: Count = 1000
    bodies: Count = 2**29
    shutdown: Waiting = 20.0

    def __post_init__(self) -> None:
        check_numbers(self)


class TokenBuckets:
    """A token bucket per key: `burst` tokens, which return at `rate` per second.

    Memory is bounded: full buckets are removed, and if there are too many others, new keys share one bucket.
    """

    def __init__(self, rate: float, burst: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.rate, self.burst, self._clock = rate, burst, clock
        self._levels: dict[Hashable, tuple[float, float]] = {}  # tokens, and at which time

    def _level(self, key: Hashable) -> tuple[Hashable, float, float]:
        now = self._clock()
        if key not in self._levels and len(self._levels) >= MOST:
            self.prune()
            if len(self._levels) >= MOST:
                key = None
        level, at = self._levels.get(key, (self.burst, now))
        return key, min(self.burst, level + (now - at) * self.rate), now

    def take(self, key: Hashable) -> float:
        """Take a token: 0.0, or the seconds until there is one."""
        key, level, now = self._level(key)
        if level < 1:
            return max((1 - level) / self.rate, 1e-9)
        self._levels[key] = (level - 1, now)
        return 0.0

    def spend(self, key: Hashable, count: float) -> None:
        """Take tokens, even into debt, or give them back (`count` < 0)."""
        key, level, now = self._level(key)
        self._levels[key] = (max(-self.burst, min(self.burst, level - count)), now)

    def prune(self) -> None:
        """Remove the full buckets."""
        now = self._clock()
        self._levels = {k: (level, at) for k, (level, at) in self._levels.items()
                        if level + (now - at) * self.rate < self.burst}  # fmt: skip

    def __len__(self) -> int:
        return len(self._levels)


class LogThrottle:
    """Bounds the rate of log lines per key: the first FIRST, then one per minute with the number suppressed."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._buckets = TokenBuckets(1 / FORGIVEN, FIRST, clock)
        self._suppressed: dict[Hashable, int] = {}

    def take(self, key: Hashable) -> int | None:
        """Return the number of lines suppressed since the last one, or None if this one is suppressed too."""
        if self._buckets.take(key) > 0:
            key = key if key in self._suppressed or len(self._suppressed) < MOST else None
            self._suppressed[key] = self._suppressed.get(key, 0) + 1
            return None
        return self._suppressed.pop(key, 0)

    def due(self) -> list[tuple[Hashable, int]]:
        """Return the keys whose suppressed lines may be summed up by now, with the counts."""
        self._buckets.prune()
        out = [(key, self._suppressed[key]) for key in list(self._suppressed) if self._buckets.take(key) == 0]
        for key, _ in out:
            del self._suppressed[key]
        return out

    def rest(self) -> list[tuple[Hashable, int]]:
        """Return all suppressed counts and reset them."""
        out, self._suppressed = list(self._suppressed.items()), {}
        return out


def address_key(address: str) -> str:
    """The unit to which limits apply: an IPv4 address, or the /64 network of an IPv6 address."""
    try:
        parsed = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if isinstance(parsed, ipaddress.IPv6Address):
        return str(ipaddress.IPv6Network((parsed, 64), strict=False))
    return address


def retry_after(connected: int, chance: float) -> int:
    """Seconds for Retry-After at shutdown (`chance` lies in 0..1): about 250 parties per second, all in a minute."""
    return 1 + int(chance * min(LATEST - 1, reconnect_window(connected)))
