"""The layout of a table with texts and dates, whose rows are coded as numbers until a preparation makes features.

A number is itself, a date is its days since 1970-01-01, a text is its code (52 bits of a hash, exact in float64), and a
missing value is NaN. Codes never leave a party.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from hansa.plumbing.errors import DataError

Kind = Literal["number", "text", "date"]
KINDS: tuple[Kind, ...] = ("number", "text", "date")
COLUMNS = 4096  # of a table, at most
NAME = 200  # characters of a column's name, at most


@dataclass(frozen=True)
class TableLayout:
    """Names and kinds of a table's columns, in order, and the texts of the codes that its rows have."""

    columns: tuple[tuple[str, Kind], ...]
    texts: Mapping[int, str] = field(default_factory=dict, compare=False, repr=False)

    def tree(self) -> list[list[str]]:
        """Names and kinds as plain data; the texts stay where they are."""
        return [[name, kind] for name, kind in self.columns]

    @classmethod
    def of(cls, tree: Any) -> TableLayout:
        """The layout of a message; a DataError if the message does not have the form of `tree`."""
        fits = isinstance(tree, list) and 0 < len(tree) <= COLUMNS
        if not fits or not all(isinstance(pair, list) and len(pair) == 2 and _named(*pair) for pair in tree):
            raise DataError("malformed table: expected the names and kinds of its columns")
        if len({name for name, _ in tree}) != len(tree):
            raise DataError("malformed table: two columns have the same name")
        return cls(tuple((name, kind) for name, kind in tree))


def _named(name: Any, kind: Any) -> bool:
    return isinstance(name, str) and 0 < len(name) <= NAME and kind in KINDS
