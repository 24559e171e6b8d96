"""Clusters of parties by round: a table for the report, and a short text for the terminal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

LISTED = 200  # up to this many parties, the table lists all parties
History = Sequence[Mapping[str, Any]]


def table(history: History) -> list[tuple[str, str, str, str]]:
    """One row per party: its last cluster, how often it moved, and the round of its last move."""
    last: dict[str, int] = {}
    moves, moved = Counter[str](), dict[str, int]()
    for line in history:
        found = line.get("clusters", {})
        last |= found.get("parties", {})
        for party in found.get("moved", {}):
            moves[party] += 1
            moved[party] = line["round"]
    order = sorted(last, key=lambda party: (last[party], int(party) if party.isdigit() else -1, party))
    return [(party, str(last[party]), f"{moves[party]:,}", str(moved.get(party, "-"))) for party in order[:LISTED]]


def sizes_text(line: Mapping[str, Any]) -> str:
    """The sizes of a round's clusters, and how many parties moved; the weights where sizes are not known."""
    found = line.get("clusters")
    if found is None:
        return ""
    numbers = "+".join(f"{size:g}" for size in found.get("sizes", found["weights"]))
    return f"{numbers}, {found['moves']} moved" if found.get("moves") else numbers
