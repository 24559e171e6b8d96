"""Agree on the categories of text columns over a federation of which only sums are visible.

Texts have codes (hashes). Counts of the codes' leading bits are summed in four steps of 12, 8, 8 and 8 bits; each step
prolongs only the prefixes that enough samples share. So a rare category shows at most the first 12 bits of its code,
together with all others that have them (later bits only if other texts share the prefix). At the end the frequent
categories are named: the sum of the bytes of their texts, divided by the count. Memory is bounded: at most 4096
prefixes in an ask, at most 2^20 counts.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from hansa.core.federation import Federation
from hansa.data.cells import CODE_BITS, canonical, text_code
from hansa.data.table_ops import PREFIXES, SHORTEST, TableCategories, TableNames
from hansa.holdings.table_layout import TableLayout
from hansa.plumbing.errors import ConfigError

log = logging.getLogger("hansa")
LEVELS = (12, 8, 8, 8)  # bits of codes per step
CROWD = 4096  # prefixes of a column that are prolonged, at most
Prefixes = dict[int, dict[int, int]]  # by column: counts by prefix


@dataclass(frozen=True)
class Counted:
    """The categories of a column with their counts; the numbers of known and of missing values."""

    counts: Mapping[str, int]
    known: int
    missing: int


async def learn_categories(fed: Federation, layout: TableLayout, least: Mapping[int, int], limits: Mapping[int, int],
                           forced: Mapping[int, str]) -> dict[int, Counted]:  # fmt: skip
    """The categories of text columns that at least `least` samples of the federation hold.

    `limits` has the largest number of them per column; a ConfigError names the column that has more. `forced` has a
    text per column that is counted whatever its number.
    """
    named = {column: text_code(canonical(text)) for column, text in forced.items()}
    prefixes: Prefixes = {column: {0: 0} for column in least}
    known = dict[int, int]()
    rows, shift = 0, CODE_BITS
    for bits in LEVELS:
        shift -= bits
        counted: Prefixes = {column: {} for column in least}
        for asked in _groups(prefixes):
            sums = (await fed.reduce(TableCategories(shift, bits), _payload(asked))).sums
            rows = int(sums["rows"])
            for (column, prefix), counts in zip(asked, sums["counts"], strict=True):
                if shift + bits == CODE_BITS:
                    known[column] = int(counts.sum())
                keep = (counts >= least[column]).nonzero().flatten().tolist()
                if column in named and named[column] >> (shift + bits) == prefix:
                    keep = sorted({*keep, (named[column] >> shift) & (2**bits - 1)})
                counted[column] |= {(prefix << bits) | cell: int(counts[cell]) for cell in keep}
        prefixes = counted
        for column, found in prefixes.items():
            most = CROWD if shift > SHORTEST else limits[column] + (column in named)
            if len(found) > max(most, limits[column]) and bits != LEVELS[0]:
                raise ConfigError(
                    f"task.prepare: the column {layout.columns[column][0]!r} has too many categories: more than "
                    f"{limits[column]} are held by at least {least[column]} samples, or far more by fewer; raise "
                    "min_count or limit, set hash (a number of columns) or categories for it, or drop it"
                )
    texts = await _names(fed, layout, prefixes, {column: canonical(text) for column, text in forced.items()})
    return {
        column: Counted({texts[column, prefix]: count for prefix, count in found.items() if (column, prefix) in texts},
                        known.get(column, 0),
                        max(rows - known.get(column, 0), 0))
        for column, found in prefixes.items()
    }  # fmt: skip


def _groups(prefixes: Prefixes) -> list[list[tuple[int, int]]]:
    """All columns and prefixes, in order, in groups that one ask can have."""
    pairs = sorted((column, prefix) for column, found in prefixes.items() for prefix in found)
    return [pairs[k : k + PREFIXES] for k in range(0, len(pairs), PREFIXES)]


def _payload(pairs: list[tuple[int, int]]) -> dict[str, torch.Tensor]:
    columns, prefixes = (torch.tensor([pair[k] for pair in pairs], dtype=torch.int64) for k in (0, 1))
    return {"column": columns, "prefix": prefixes}


async def _names(fed: Federation, layout: TableLayout, prefixes: Prefixes,
                 forced: Mapping[int, str]) -> dict[tuple[int, int], str]:  # fmt: skip
    """The texts of categories, by column and prefix.

    A category whose holders are missing meanwhile, or of which a party sends wrong numbers, has none.
    """
    texts = {(column, text_code(text) >> SHORTEST): text for column, text in forced.items()}
    unnamed = {c: {p: n for p, n in found.items() if (c, p) not in texts} for c, found in prefixes.items()}
    for asked in _groups(unnamed):
        sums = (await fed.reduce(TableNames(), _payload(asked))).sums
        for k, (column, prefix) in enumerate(asked):
            text = _decoded(sums["letters"][k].tolist(), int(sums["weights"][k]))
            if text is None or text_code(text) >> SHORTEST != prefix:
                log.warning(
                    "the parties' names of a category of the column %r do not fit together: it becomes 'other'; list "
                    "the categories in task.prepare.columns to be sure",
                    layout.columns[column][0],
                )
            else:
                texts[column, prefix] = text
    return texts


def _decoded(letters: list[int], weight: int) -> str | None:
    """A text from the sum of its bytes; None if the sum is not that of one text."""
    if weight < 1 or any(letter % weight or not 0 <= letter // weight < 256 for letter in letters):
        return None
    try:
        return bytes(letter // weight for letter in letters).rstrip(b"\0").decode()
    except UnicodeDecodeError:
        return None
