"""How an aggregator paces those who come to it: how long it holds a question for work, how widely parties come back.

Both grow with the number of parties, so that thousands cost it no more a second than hundreds, while few are answered
quickly. It tells them in headers of its answers; what a party believes of that is bounded.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping

POLL = 25.0  # seconds that a question for work is held open where few ask: proxies and NATs let that pass
LONGEST = 600.0  # seconds that a party waits for an answer to it, or spreads its return over, whatever it is told
MARGIN = 35.0  # seconds that a party waits longer than it asked the aggregator to hold its question
ASKING = 40  # questions for work a second that an aggregator is to answer while there is nothing to do
COMING = 250  # connections a second that it is to take when all come back at once; a handshake costs 1.2 ms of one core
HOLD, SPREAD = "Hansa-Poll", "Hansa-Spread"


def hold(parties: int, longest: float) -> float:
    """Seconds that a question for work is held open where there are so many parties."""
    return min(max(POLL, parties / ASKING), longest)


def spread(parties: int) -> float:
    """Seconds over which so many parties are to come back when all of them lost their connection."""
    return parties / COMING


def scattered(seconds: float, chance: Callable[[], float] = random.random) -> float:
    """Up to a fifth less, so that those who came together do not come together again."""
    return seconds * (0.8 + 0.2 * chance())


def told(parties: int, longest: float) -> dict[str, str]:
    """What parties are told of it, in headers."""
    return {HOLD: f"{hold(parties, longest):.0f}", SPREAD: f"{spread(parties):.0f}"}


class Pace:
    """What a party was told last."""

    def __init__(self) -> None:
        self.hold, self.spread = POLL, 0.0

    def heed(self, headers: Mapping[str, str]) -> None:
        """Take what an answer's headers say; what is missing or not a number of seconds changes nothing."""
        self.hold = max(1.0, _seconds(headers.get(HOLD), self.hold))
        self.spread = _seconds(headers.get(SPREAD), self.spread)

    def back(self, chance: Callable[[], float] = random.random) -> float:
        """Seconds, at least, before an attempt to come back when a connection was cut or there is none to be had."""
        return chance() * self.spread


def _seconds(text: str | None, otherwise: float) -> float:
    plain = text is not None and text.isascii() and text.isdecimal() and len(text) < 8
    return min(float(text or 0), LONGEST) if plain else otherwise
