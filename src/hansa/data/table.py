"""Tables with named columns of numbers, texts and dates: from CSV cells, pandas or polars frames, or rows."""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from hansa.data.cells import USUAL, canonical, cell_text, is_missing, parsed_date, parsed_number, text_code
from hansa.holdings.table_layout import NAME, Kind, TableLayout
from hansa.plumbing.errors import ConfigError, DataError, nearest

Guess = Literal["number", "text", "date", "empty"]  # empty: no value is known, so that any kind fits
Array = np.ndarray[Any, Any]
WORDS = {"number": "a number", "date": "a date such as 2024-01-31"}


@dataclass(frozen=True)
class TextColumn:
    """Cells as texts: the distinct ones (None: missing), and the position of each row's cell among them."""

    distinct: tuple[str | None, ...]
    at: Array


Column = Array | TextColumn  # an array holds float64 numbers, or dates as datetime64


def column_of(values: Any) -> Column:
    """A column from an array, a series or a list of values of any types."""
    array = np.asarray(values)
    if array.ndim != 1:
        array = np.empty(len(values), dtype=object)
        array[:] = list(values)
    if array.dtype.kind in "biuf":
        return array.astype(np.float64)
    if array.dtype.kind == "M":
        return array.astype("datetime64[us]")
    return _texts(array)


def _texts(array: Array) -> TextColumn:
    positions: dict[str | None, int] = {}
    at = np.empty(len(array), dtype=np.int64)
    for row, value in enumerate(array.tolist()):
        at[row] = positions.setdefault(cell_text(value), len(positions))
    return TextColumn(tuple(positions), at)


@dataclass(frozen=True)
class Table:
    """Rows of named columns. `place(row)` says where a row comes from, for messages."""

    columns: Mapping[str, Column]
    rows: int
    place: Callable[[int], str] = lambda row: f"row {row}"

    def __len__(self) -> int:
        return self.rows

    @classmethod
    def of(cls, source: Any, where: str = "") -> Table:
        """A table from a frame (pandas, polars), a table of columns by name, or a list of rows by column name."""
        if isinstance(source, Table):
            return source
        if isinstance(source, (list, tuple)) and source and all(isinstance(row, Mapping) for row in source):
            names = list(dict.fromkeys(name for row in source for name in row))
            return cls.of({name: [row.get(name) for row in source] for name in names}, where)
        if not isinstance(source, Mapping) and not hasattr(source, "columns"):
            raise DataError(
                f"{where}expected a table with named columns (a pandas or polars frame, or columns by name), got "
                f"{type(source).__name__}; for arrays of numbers use the preparation 'standardise'"
            )
        names = [str(name) for name in (source if isinstance(source, Mapping) else source.columns)]
        check_names(names, where)
        keys = list(source if isinstance(source, Mapping) else source.columns)
        columns = {name: column_of(source[key]) for name, key in zip(names, keys, strict=True)}
        counts = {name: size(column) for name, column in columns.items()}
        if len(set(counts.values())) > 1:
            raise DataError(f"{where}the columns have different numbers of rows: {counts}")
        return cls(columns, next(iter(counts.values()), 0), lambda row: f"{where}row {row}")

    def digest(self) -> str:
        """The SHA-256 of all cells."""
        running = hashlib.sha256()
        for name, column in self.columns.items():
            texts, cells = (column.distinct, column.at) if isinstance(column, TextColumn) else ((), column)
            running.update(repr((name, texts, str(cells.dtype), len(cells))).encode())
            running.update(np.ascontiguousarray(cells).tobytes())
        return running.hexdigest()

    def take(self, name: str) -> tuple[Column, Table]:
        """The column of that name, and the table without it; a DataError if there is none."""
        self._check_has(name)
        return self.columns[name], Table({n: c for n, c in self.columns.items() if n != name}, self.rows, self.place)

    def guesses(self, words: frozenset[str] = USUAL) -> dict[str, Guess]:
        """The kind of each column, by its values."""
        return {name: guess(column, words) for name, column in self.columns.items()}

    def coded(self, layout: TableLayout, words: frozenset[str] = USUAL) -> tuple[Tensor, dict[int, str]]:
        """The rows as float64 codes in the order of a layout, and the texts of the codes.

        Columns that the layout does not name are left out. A DataError names a missing column, or the row and column
        of a value of another kind.
        """
        texts: dict[int, str] = {}
        out = np.empty((self.rows, len(layout.columns)), dtype=np.float64)
        for k, (name, kind) in enumerate(layout.columns):
            self._check_has(name)
            out[:, k] = self._codes(name, kind, words, texts)
        return torch.from_numpy(out), texts

    def _check_has(self, name: str) -> None:
        if name not in self.columns:
            raise DataError(f"{self.place(0).rpartition('row')[0]}there is no column {name!r}"
                            f"{nearest(name, self.columns)}")  # fmt: skip

    def _codes(self, name: str, kind: Kind, words: frozenset[str], texts: dict[int, str]) -> Array:
        column = self.columns[name]
        if not isinstance(column, TextColumn):
            if kind == "text":
                column = _texts(column)
            elif column.dtype.kind == "M":
                if kind == "number" and not np.isnat(column).all():
                    raise self._unlike(int(np.flatnonzero(~np.isnat(column))[0]), name, "a date", kind)
                return _days(column)
            else:
                wrong = np.isinf(column) if kind == "number" else ~np.isnan(column)
                if wrong.any():
                    row = int(np.flatnonzero(wrong)[0])
                    raise self._unlike(row, name, str(column[row]), kind)
                return column
        codes = np.array([self._code(cell, name, kind, words, texts, column, k)
                          for k, cell in enumerate(column.distinct)], dtype=np.float64)  # fmt: skip
        return codes[column.at] if len(codes) else np.empty(0)

    def _code(self, cell: str | None, name: str, kind: Kind, words: frozenset[str], texts: dict[int, str],
              column: TextColumn, position: int) -> float:  # fmt: skip
        if cell is None or is_missing(cell, words):
            return math.nan
        if kind == "text":
            text = canonical(cell)
            code = text_code(text)
            texts[code] = text
            return float(code)
        value = parsed_number(cell) if kind == "number" else parsed_date(cell)
        if value is None:
            raise self._unlike(int(np.flatnonzero(column.at == position)[0]), name, repr(cell[:40]), kind)
        return value

    def _unlike(self, row: int, name: str, value: str, kind: Kind) -> DataError:
        return DataError(f"{self.place(row)}, column {name!r}: expected {WORDS[kind]}, got {value}")


def check_names(names: Sequence[str], where: str) -> None:
    """Raise a DataError for a table without columns, with a name twice, or with an unusable name."""
    if not names:
        raise DataError(f"{where}the table has no columns")
    twice = next((name for name, count in Counter(names).items() if count > 1), None)
    if twice is not None:
        raise DataError(f"{where}two columns are called {twice!r}; give each column its own name")
    odd = next((name for name in names if not 0 < len(name) <= NAME or "\n" in name), None)
    if odd is not None:
        raise DataError(f"{where}{odd[:40]!r} is no name of a column: names have 1 to {NAME} characters in one line")


def size(column: Column) -> int:
    """The number of rows of a column."""
    return len(column.at) if isinstance(column, TextColumn) else len(column)


def guess(column: Column, words: frozenset[str] = USUAL) -> Guess:
    """The kind of a column: numbers if all known values are, else dates if all are, else texts."""
    if not isinstance(column, TextColumn):
        empty = np.isnat(column) if column.dtype.kind == "M" else np.isnan(column)
        return "empty" if empty.all() else "date" if column.dtype.kind == "M" else "number"
    known = [cell for cell in column.distinct if cell is not None and not is_missing(cell, words)]
    if not known:
        return "empty"
    if all(parsed_number(cell) is not None for cell in known):
        return "number"
    return "date" if all(parsed_date(cell) is not None for cell in known) else "text"


def _days(column: Array) -> Array:
    days = column.astype("datetime64[us]").astype(np.int64) / 86_400e6
    return np.where(np.isnat(column), np.nan, days)


def agreed_layout(guesses: Mapping[str, Mapping[str, Guess]], declared: Mapping[str, Kind],
                  dropped: Iterable[str] = ()) -> tuple[TableLayout, dict[str, str]]:  # fmt: skip
    """The layout of tables at several places, and the reason why each place with another kind of column is left out.

    `guesses` are the kinds of each place's columns. Declared kinds win. Otherwise a column has the kind that most
    places see in it; where the numbers of two kinds are equal, texts win over dates and numbers, because a number can
    be read as a text. All places have the columns of the first one. A ConfigError if a declared column is nowhere.
    """
    first = next(iter(guesses.values()))
    unknown = next((name for name in (*declared, *dropped) if name not in first), None)
    if unknown is not None:
        raise ConfigError(f"task.prepare.columns: no party has a column {unknown!r}{nearest(unknown, first)}")
    left_out: dict[str, str] = {}
    columns: list[tuple[str, Kind]] = []
    for name in (name for name in first if name not in set(dropped)):
        kind = declared.get(name)
        if kind is None:
            seen = Counter(each[name] for each in guesses.values() if each[name] != "empty")
            ranked = sorted(seen, key=lambda one: (-seen[one], -("number", "date", "text").index(one)))
            kind = ranked[0] if ranked else "number"  # type: ignore[assignment]
            odd = [at for at, each in guesses.items() if each[name] not in ("empty", kind) and kind != "text"]
            left_out |= {at: f"its column {name[:40]!r} holds {guesses[at][name]}s, and that of most parties {kind}s; "
                             "correct it, or declare its kind in task.prepare.columns" for at in odd}  # fmt: skip
        assert kind is not None
        columns.append((name, kind))
    if not columns:
        raise ConfigError("task.prepare.columns: all columns are dropped; keep at least one")
    return TableLayout(tuple(columns)), left_out
