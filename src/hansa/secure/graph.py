"""Which parties share masks and secrets: all with all, or each with a few neighbours (Bell et al. 2020).

With few neighbours the work of a sum grows as n log n. The parties stand on a circle in a random order, and the
neighbours of a party are the nearest on both sides, half of them on each (a Harary graph). The order is drawn from the
hash of all advertised keys, so parties that draw their keys as agreed cannot choose it. A lying party that sees the
other keys first could try keys of its own until it likes the order. With `active` all parties therefore share with all.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence

COLLUDING, DROPPING = 0.2, 0.1  # fractions of the parties that the default number of neighbours allows for
SECURITY, LOSS = 40, 20  # failure probabilities of a whole sum: 2^-40 that too many collude, 2^-20 that too many drop


def degree(parties: int, threshold: float) -> int:
    """The number of neighbours of each party; all other parties if there are too few for less.

    In a neighbourhood of m parties, `threshold * m` parties can open a party's masks. A random neighbourhood contains
    that many colluding parties with a probability of at most exp(-m D(threshold | COLLUDING)). It loses more parties
    than it can spare with a probability of at most exp(-m D(1 - threshold | DROPPING)). D is the relative entropy of
    two Bernoulli distributions (Hoeffding 1963, also for draws without replacement). Over all n neighbourhoods the
    first probability must stay below 2^-40 and the second below 2^-20. The honest parties that stay are then
    connected as well, except with a probability of about n (COLLUDING + DROPPING)^(k / 2) for k neighbours.
    """
    spare = 1.0 - threshold
    if spare <= DROPPING:
        return max(0, parties - 1)
    needed = max(
        (math.log(parties) + SECURITY * math.log(2)) / _entropy(threshold, COLLUDING),
        (math.log(parties) + LOSS * math.log(2)) / _entropy(spare, DROPPING),
    )
    return min(2 * math.ceil((needed - 1) / 2), max(0, parties - 1))


def _entropy(a: float, b: float) -> float:
    rest = (1 - a) * math.log((1 - a) / (1 - b)) if a < 1 else 0.0
    return a * math.log(a / b) + rest


def neighbours(parties: Sequence[int], degree: int, seed: bytes) -> dict[int, tuple[int, ...]]:
    """The neighbours of each party, in ascending order; `degree` is even, or includes all other parties."""
    n = len(parties)
    if degree >= n - 1:
        return {party: tuple(other for other in parties if other != party) for party in parties}
    circle = sorted(parties, key=lambda party: hashlib.sha256(seed + party.to_bytes(8, "little")).digest())
    reach = [step for step in range(-(degree // 2), degree // 2 + 1) if step]
    return {
        party: tuple(sorted(circle[(position + step) % n] for step in reach)) for position, party in enumerate(circle)
    }
