"""How much an aggregator lets anybody do: the [limits] table, and token buckets that hold everybody to it."""

from __future__ import annotations

import ipaddress
import math
import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass, fields

from hansa.core.errors import ConfigError
from hansa.net.transport.pacing import spread

PIECE = 2**17  # bytes of a body that have to come, or to be taken, within `stall` seconds
MOST = 2**16  # keys that have a bucket of their own
FORGIVEN = 60.0  # seconds after which somebody may be noted again
FIRST = 20  # notes about one and the same that are taken at once
LEAST = 0.1  # seconds that anything may take, however little somebody wants to give
LATEST = 40  # seconds after which the last of them is asked to; a client adds up to half of it


@dataclass(frozen=True)
class Limits:
    """The [limits] table.

    Before authentication: `connections` in all, a quarter of them without a certificate, and `per_address`; at most
    `handshakes` at the same time, an eighth of them of one address, where others wait for their turn; each may take
    `handshake` seconds, and the head of each request `head` seconds. A connection without a certificate and the request
    on it cost its address one token each of `stranger_burst`, which come back at `stranger_rate` a second; a wrong
    enrolment token costs `wrong_token` more. Where there is no token left, a connection is closed after its handshake
    unless it showed a certificate, and all such have an eighth of the handshakes together.
    After it: a certificate has `party_connections` and `party_requests` at the same time, and `party_burst` requests
    that come back at `party_rate` a second. `bodies` are bytes of request bodies in memory at once, a quarter of them
    of one certificate.
    A body that comes, or an answer that is taken, slower than 128 KiB in `stall` seconds is cut off; a connection on
    which nothing is asked is closed after `idle` seconds, one whose other end has gone after about `stall`.
    `shutdown` are the seconds that requests under way have to end when the aggregator shuts down.
    """

    connections: int = 16384
    per_address: int = 512
    handshakes: int = 256
    handshake: float = 10.0
    head: float = 10.0
    stall: float = 30.0
    idle: float = 25.0
    stranger_rate: float = 20.0
    stranger_burst: int = 200
    wrong_token: int = 10
    party_connections: int = 16
    party_requests: int = 8
    party_rate: float = 200.0
    party_burst: int = 1000
    bodies: int = 2**29
    shutdown: float = 20.0

    def __post_init__(self) -> None:
        for spec in fields(self):
            value = getattr(self, spec.name)
            if not 0 < value < math.inf:
                raise ConfigError(f"{spec.name} must be positive, got {value}")
        for name in ("handshake", "head", "stall", "idle", "shutdown"):
            if getattr(self, name) < LEAST:
                raise ConfigError(f"{name} must be {LEAST:g} seconds at least, got {getattr(self, name):g}: nobody is "
                                  "so quick")  # fmt: skip
        for name, most in (("handshake", 60), ("head", 60), ("stall", 60)):
            if getattr(self, name) > most:
                raise ConfigError(
                    f"{name} must be {most} seconds at most, got {getattr(self, name):g}: no socket may be stuck longer"
                )


class Buckets:
    """A token bucket for each key: `burst` tokens, which come back at `rate` a second.

    Memory is bounded: a full bucket is forgotten, and where there are too many others, new keys share one.
    """

    def __init__(self, rate: float, burst: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.rate, self.burst, self._clock = rate, burst, clock
        self._levels: dict[Hashable, tuple[float, float]] = {}  # tokens, and when there were so many

    def _level(self, key: Hashable) -> tuple[Hashable, float, float]:
        now = self._clock()
        if key not in self._levels and len(self._levels) >= MOST:
            self.prune()
            if len(self._levels) >= MOST:
                key = None
        level, at = self._levels.get(key, (self.burst, now))
        return key, min(self.burst, level + (now - at) * self.rate), now

    def take(self, key: Hashable) -> float:
        """Take a token: 0, or the seconds after which there would be one."""
        key, level, now = self._level(key)
        if level < 1:
            return max((1 - level) / self.rate, 1e-9)
        self._levels[key] = (level - 1, now)
        return 0.0

    def spend(self, key: Hashable, count: float) -> None:
        """Take tokens whether they are there or not, or (`count` < 0) give them back."""
        key, level, now = self._level(key)
        self._levels[key] = (max(-self.burst, min(self.burst, level - count)), now)

    def prune(self) -> None:
        """Forget the buckets that are full."""
        now = self._clock()
        self._levels = {k: (level, at) for k, (level, at) in self._levels.items()
                        if level + (now - at) * self.rate < self.burst}  # fmt: skip

    def __len__(self) -> int:
        return len(self._levels)


class Notes:
    """What is noted about each of many, at a bounded rate: the first few, then one a minute with the number of those
    that were left out."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._buckets = Buckets(1 / FORGIVEN, FIRST, clock)
        self._left: dict[Hashable, int] = {}

    def take(self, key: Hashable) -> int | None:
        """How many were left out since the last note about this one; None where this one is to be left out too."""
        if self._buckets.take(key) > 0:
            key = key if key in self._left or len(self._left) < MOST else None
            self._left[key] = self._left.get(key, 0) + 1
            return None
        return self._left.pop(key, 0)

    def due(self) -> list[tuple[Hashable, int]]:
        """Those of whom something was left out that can be told by now, and how much."""
        self._buckets.prune()
        out = [(key, self._left[key]) for key in list(self._left) if self._buckets.take(key) == 0]
        for key, _ in out:
            del self._left[key]
        return out

    def rest(self) -> list[tuple[Hashable, int]]:
        """All that was left out and not told; nothing is left then."""
        out, self._left = list(self._left.items()), {}
        return out


def place(address: str) -> str:
    """Where somebody is, as limits see it: an IPv4 address, or the network (/64) of an IPv6 address."""
    try:
        found = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if isinstance(found, ipaddress.IPv6Address):
        return str(ipaddress.IPv6Network((found, 64), strict=False))
    return address


def come_back(connected: int, chance: float) -> int:
    """The seconds after which a party that is sent away by a shutdown is to come back: so spread (`chance` lies in
    0..1) that about 250 do in any second, and all within a minute."""
    return 1 + int(chance * min(LATEST - 1, spread(connected)))
