"""Bloom filters of names and dates, which are alike where the texts are alike (Schnell, Bachteler and Reiher 2009).

A record is one text with fields between bars: "ann smith|1980-02-01". Each pair of neighbouring characters of a field
sets a few bits of the record's filter, at places that a secret key decides (HMAC). The places are independent, not of
the form h1 + i h2, which is easier to break (Niedermeyer, Steinmetzer, Kroll and Schnell 2014).
"""

from __future__ import annotations

import hmac
from collections.abc import Sequence
from typing import Annotated, Any

import numpy as np
import torch
from msgspec import Meta
from torch import Tensor

from hansa.core.quantities import CHECKED
from hansa.plumbing.stopping import go_on

BITS = 1024  # of a filter; a power of 2 up to 2^16
MOST_HASHES = 32  # places per pair of characters: a hash has 64 bytes, and a place takes two
Hashes = Annotated[int, Meta(ge=1, le=MOST_HASHES), CHECKED]
BLOCK = 1024  # rows that are compared at once
Array = np.ndarray[Any, Any]


def pairs(record: str) -> list[str]:
    """The pairs of neighbouring characters of a record's fields, each with the number of its field."""
    out = []
    for number, field in enumerate(record.split("|")):
        text = f" {field.strip()} "
        out += [f"{number}:{text[at : at + 2]}" for at in range(len(text) - 1)]
    return out


def filters(records: Sequence[str], key: bytes, hashes: int) -> Tensor:
    """The filter of each record, packed: [n, BITS / 8]."""
    places: dict[str, Array] = {}
    bits = np.zeros((len(records), BITS), dtype=bool)
    for row, record in enumerate(records):
        for pair in pairs(record):
            if pair not in places:
                digest = hmac.digest(key, pair.encode(), "sha512")
                places[pair] = np.frombuffer(digest, dtype="<u2")[:hashes] % BITS
            bits[row, places[pair]] = True
        if row % BLOCK == 0:
            go_on()
    return torch.from_numpy(np.packbits(bits, axis=1))


def alike(first: Tensor, second: Tensor, threshold: float) -> list[tuple[int, int]]:
    """Pairs of rows whose filters are alike, each row in one pair at most; the most alike pairs are taken first.

    The likeness is Dice's: twice the number of common bits, divided by the number of bits of both. Equally alike pairs
    are taken in the order of the rows.
    """
    ours, theirs = (torch.from_numpy(np.unpackbits(rows.cpu().numpy(), axis=1)).float() for rows in (first, second))
    sizes = theirs.sum(1)
    rows, columns, scores = [], [], []
    for start in range(0, len(ours), BLOCK):
        block = ours[start : start + BLOCK]
        likeness = 2 * (block @ theirs.T) / (block.sum(1)[:, None] + sizes).clamp(min=1)
        at = (likeness >= threshold).nonzero()
        rows.append(at[:, 0] + start)
        columns.append(at[:, 1])
        scores.append(likeness[at[:, 0], at[:, 1]])
        go_on()
    if not rows:
        return []
    found = torch.cat(rows).numpy(), torch.cat(columns).numpy(), torch.cat(scores).numpy()
    taken: tuple[set[int], set[int]] = set(), set()
    out = []
    for candidate in np.lexsort((found[1], found[0], -found[2])).tolist():
        row, column = int(found[0][candidate]), int(found[1][candidate])
        if row not in taken[0] and column not in taken[1]:
            taken[0].add(row)
            taken[1].add(column)
            out.append((row, column))
    return sorted(out)
