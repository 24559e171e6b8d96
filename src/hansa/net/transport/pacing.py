"""Pacing of parties: how long the aggregator holds a poll for work, over how long parties reconnect.

Both times grow with the number of parties. So thousands of parties cost no more per second than hundreds, and few
parties get quick responses. The aggregator sends both times in response headers; a party bounds what it accepts.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping

POLL = 25.0  # seconds that a poll for work is held open with few parties: proxies and NATs allow that
LONGEST = 600.0  # seconds: the most that a party accepts for either time
MARGIN = 35.0  # seconds that a party waits beyond the time for which it asked to hold its poll
POLLS = 40  # polls per second that an idle aggregator should answer
RECONNECTS = 250  # connections per second when all parties reconnect; a handshake costs 1.2 ms of one core
POLL_HEADER, SPREAD_HEADER = "Hansa-Poll", "Hansa-Spread"


def poll_seconds(parties: int, longest: float) -> float:
    """Seconds that a poll for work is held open, for this number of parties."""
    return min(max(POLL, parties / POLLS), longest)


def reconnect_window(parties: int) -> float:
    """Seconds over which this number of parties should reconnect after all lost their connection."""
    return parties / RECONNECTS


def jittered(seconds: float, chance: Callable[[], float] = random.random) -> float:
    """A time shortened at random by up to a fifth, so that polls that arrived together drift apart."""
    return seconds * (0.8 + 0.2 * chance())


def pacing_headers(parties: int, longest: float) -> dict[str, str]:
    """The response headers with both times."""
    return {POLL_HEADER: f"{poll_seconds(parties, longest):.0f}", SPREAD_HEADER: f"{reconnect_window(parties):.0f}"}


class PollPace:
    """The times that the aggregator last sent to a party."""

    def __init__(self) -> None:
        self.poll, self.window = POLL, 0.0

    def update(self, headers: Mapping[str, str]) -> None:
        """Take both times from a response's headers; a missing or invalid header changes nothing."""
        self.poll = max(1.0, _seconds(headers.get(POLL_HEADER), self.poll))
        self.window = _seconds(headers.get(SPREAD_HEADER), self.window)

    def reconnect_delay(self, chance: Callable[[], float] = random.random) -> float:
        """The least seconds to wait before reconnecting after a lost or failed connection."""
        return chance() * self.window


def _seconds(text: str | None, default: float) -> float:
    valid = text is not None and text.isascii() and text.isdecimal() and len(text) < 8
    return min(float(text or 0), LONGEST) if valid else default
