"""A file of a party that holds some columns of people whom other parties know too: rows with ids, perhaps labels."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from hansa.core.columns import ids_of
from hansa.data.party_files import (
    Header,
    check_header,
    column_of,
    csv_lines,
    features_of,
    is_csv,
    npz_arrays,
    npz_targets,
    numbers,
    targets_of,
)
from hansa.holdings.gateway import TableRows
from hansa.plumbing.errors import DataError


def read_column_file(path: str | Path, ids: str, target: str | None = None) -> tuple[TableRows, Header]:
    """Read the rows of a party and the names of a CSV file's columns (the target, then the features).

    `.csv`: `ids` and `target` name columns; without `target` the party has no labels, and all other columns are
    features. `.npz`: the array x, the ids in the array `ids`, and labels if there is an array y.
    """
    path = Path(path)
    return _from_csv(path, ids, target) if is_csv(path, target) else (_from_npz(path, ids), ())


def names_column(path: str | Path, name: str) -> bool:
    """Whether a CSV file has a column of that name; False for an NPZ file."""
    path = Path(path)
    return is_csv(path, None) and name in next(csv_lines(path))[1]


def _from_csv(path: Path, ids: str, target: str | None) -> tuple[TableRows, Header]:
    lines = csv_lines(path)
    header = next(lines)[1]
    check_header(header, path, "the ids and at least one feature")
    at = column_of(ids, header, path)
    names = [*header[:at], *header[at + 1 :]]
    if target == ids:
        raise DataError(f"{path}: the column {ids!r} cannot be both the ids and the target")
    column = None if target is None else column_of(target, names, path)
    if len(names) == (column is not None):
        raise DataError(f"{path}, line 1: there is no column of features beside the ids and the target")
    texts: list[str] = []

    def others() -> Iterator[tuple[str, list[str]]]:
        for where, cells in lines:
            texts.append(cells[at])
            yield where, [*cells[:at], *cells[at + 1 :]]

    values = numbers(path, others(), names, column)
    found = ids_of(np.array(texts), len(values), f"{path}: the column {ids!r}")
    if column is None:
        return TableRows(features_of(values), None, found), ("", *names)
    rows = TableRows(features_of(np.delete(values, column, axis=1)), targets_of(values[:, column]), found)
    return rows, (names[column], *names[:column], *names[column + 1 :])


def _from_npz(path: Path, ids: str) -> TableRows:
    loaded = npz_arrays(path, ("x", ids), f"x and {ids}, and y if it has labels", ("y",))
    x = loaded["x"]
    if x.ndim < 2 or len(x) == 0:
        raise DataError(f"{path}: x has the shape {x.shape}; it needs one row of features per person")
    y = npz_targets(path, x, loaded["y"]) if "y" in loaded else None
    return TableRows(features_of(x), y, ids_of(loaded[ids], len(x), f"{path}: the array {ids!r}"))
