"""Who shares masks and secrets with whom: everybody with everybody, or each with a few, so that the work of a sum grows
as n log n (Bell et al. 2020).

The few are those next to a party on a circle in a random order, half of them on each side (a Harary graph). The order
is drawn from the hash of all advertised keys. Nobody who draws keys as agreed can choose it; a party that sees the
others' keys first could try its own until it likes the order, so sums against those who lie are among all.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence

COLLUDING, DROPPING = 0.2, 0.1  # shares of the parties that a default number of neighbours reckons with
SECURITY, LOSS = 40, 20  # bits: the odds, for a whole sum, that the former are too many somewhere, and the latter


def degree(parties: int, threshold: float) -> int:
    """How many neighbours each party needs, all others where there are too few parties for less.

    In a neighbourhood of m parties, `threshold * m` can open a party's masks. Drawn at random, one has that many
    colluding parties among them with probability exp(-m D(threshold | COLLUDING)) at most, and loses more than it can
    spare with exp(-m D(1 - threshold | DROPPING)), D being the relative entropy of two coins (Hoeffding 1963, who
    shows it for draws without replacement too). Over all n neighbourhoods the one is to stay below 2^-40, the other
    below 2^-20. The honest who stay are then connected too, but for about n (COLLUDING + DROPPING)^(k / 2).
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
    """The neighbours of each party, in order; `degree` is even, or all the others."""
    n = len(parties)
    if degree >= n - 1:
        return {party: tuple(other for other in parties if other != party) for party in parties}
    circle = sorted(parties, key=lambda party: hashlib.sha256(seed + party.to_bytes(8, "little")).digest())
    reach = [step for step in range(-(degree // 2), degree // 2 + 1) if step]
    return {party: tuple(sorted(circle[(place + step) % n] for step in reach)) for place, party in enumerate(circle)}
