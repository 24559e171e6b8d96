"""A party's own data, from a CSV or an NPZ file."""

from __future__ import annotations

import csv
import math
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from hansa.data.cells import is_missing, is_number
from hansa.data.dataset import text_lines
from hansa.holdings.stored_rows import Features, whole
from hansa.plumbing.errors import DataError, nearest

SHOWN = 5  # names of columns in a message, at most
NAMES_OF_FILES = (".csv", ".csv.gz", ".npz")  # how the names of parties' files end
LARGEST = float(np.finfo(np.float32).max)  # of a number in a party's file, in absolute terms
Header = tuple[str, ...]  # the name of the target's column, then of the feature columns; () without names


def load_party_file(path: str | Path, target: str | None = None) -> tuple[Tensor, Tensor]:
    """Read the features (float32) and targets of one party.

    `.csv` (or `.csv.gz`): a header, then numbers; an empty cell, `?`, `NA` and the like are NaN. The target is the
    column `target`, by default the last one: int64 labels if all its values are whole numbers, else float32. `.npz`:
    the arrays `x` and `y`; y is int64 if it was stored as whole numbers, else float32.
    """
    x, y, _ = read_party_file(path, target)
    return x, y


def read_party_file(path: str | Path, target: str | None = None) -> tuple[Tensor, Tensor, Header]:
    """As `load_party_file`, with the names of a CSV file's columns."""
    path = Path(path)
    if is_csv(path, target):
        return _from_csv(path, target)
    return *_from_npz(path), ()


def is_csv(path: Path, target: str | None) -> bool:
    """Whether a party's file is a CSV file; False for an NPZ file, and a DataError for any other."""
    if not path.is_file():
        raise DataError(
            f"there is no file {path}; a party's data is one CSV or NPZ file, or a folder with x.npy and y.npy"
        )
    if path.name.endswith(NAMES_OF_FILES[:2]):
        return True
    if path.suffix != ".npz":
        raise DataError(f"{path}: a party's data is a file that ends in .csv, .csv.gz or .npz")
    if target is not None:
        raise DataError(f"{path}: a target column can be named for CSV files only; in an NPZ file it is the array y")
    return False


def aligned(x: Features, header: Header, wanted: Header, where: str) -> Features:
    """Reorder columns of features to the header `wanted`; raise DataError if the names differ.

    Features without column names are returned unchanged.
    """
    if not header or not wanted or header == wanted:
        return x
    why = differing(header, wanted)
    if why is not None:
        raise DataError(f"{where}{why}")
    return whole(x)[:, [header.index(name) - 1 for name in wanted[1:]]]


def split_column(x: Tensor, header: Header, name: str, path: Path) -> tuple[Tensor, Header, Tensor | None]:
    """Features without the column `name`, their header, and the column; of an NPZ file, the array of that name.

    The column is None in a CSV file that does not have it.
    """
    if not header:
        array = npz_arrays(path, ("x",), "x, y", (name,)).get(name)
        return x, header, None if array is None else torch.from_numpy(array)
    if name not in header[1:]:
        return x, header, None
    at = header.index(name) - 1
    return torch.cat([x[:, :at], x[:, at + 1 :]], 1), (*header[: at + 1], *header[at + 2 :]), x[:, at]


def differing(header: Header, wanted: Header) -> str | None:
    """Describe how column names differ, regardless of their order; None if they are the same."""
    if header != wanted and 1 in (len(header), len(wanted)):  # hashes of long headers
        return "the names of its columns, or their order, are not those of most parties"
    if header[0] != wanted[0]:
        return f"its target is the column {header[0][:40]!r}, not {wanted[0][:40]!r}; name the target (--target)"
    lacking, more = (sorted(set(a[1:]) - set(b[1:])) for a, b in ((wanted, header), (header, wanted)))
    words = [f"{verb} {', '.join(repr(name[:40]) for name in names[:SHOWN])}{' ...' if len(names) > SHOWN else ''}"
             for verb, names in (("lack", lacking), ("have besides", more)) if names]  # fmt: skip
    return f"its columns {' and '.join(words)}; all parties need the same columns, in any order" if words else None


def csv_lines(path: Path) -> Iterator[tuple[str, list[str]]]:
    """Yield the place of each line of a CSV file and its cells, as many as the header has; first the header."""
    lines = csv.reader(text_lines(path))
    try:
        header = [name.strip() for name in next(lines, [])]
        yield f"{path}, line 1", header
        read = lines.line_num
        for cells in lines:
            first, read = read + 1, lines.line_num  # a row with line breaks in quotes has several lines
            if not cells:
                continue
            where = f"{path}, line {first}"
            if len(cells) != len(header):
                raise DataError(f"{where}: {len(cells)} values where the header names {len(header)} columns")
            yield where, cells
    except csv.Error as error:
        raise DataError(f"{path}, line {lines.line_num}: not a CSV file ({error})") from None


def _from_csv(path: Path, target: str | None) -> tuple[Tensor, Tensor, Header]:
    lines = csv_lines(path)
    header = next(lines)[1]
    column = _target_column(header, target, path)
    values = numbers(path, lines, header, column)
    others = (*header[:column], *header[column + 1 :])
    return features_of(np.delete(values, column, axis=1)), targets_of(values[:, column]), (header[column], *others)


def numbers(path: Path, lines: Iterable[tuple[str, list[str]]], names: list[str], target: int | None) -> np.ndarray:
    """The cells of a file's lines as numbers, NaN where one is missing; a DataError if the target is missing."""
    rows: list[list[float]] = []
    for where, cells in lines:
        named = enumerate(zip(cells, names, strict=True))
        rows.append([_number(cell, name, where, at == target) for at, (cell, name) in named])
        if target is not None and math.isnan(rows[-1][target]):
            raise DataError(f"{where}: the target {names[target]!r} is missing")
    if not rows:
        raise DataError(f"{path} has no rows below its header")
    return np.array(rows)


def features_of(values: np.ndarray) -> Tensor:
    """Features as float32; too large a number becomes infinite, which the task refuses."""
    with np.errstate(over="ignore"):
        return torch.from_numpy(values.astype(np.float32))


def _target_column(header: list[str], target: str | None, path: Path) -> int:
    check_header(header, path, "at least one feature and the target", target)
    return len(header) - 1 if target is None else column_of(target, header, path)


def check_header(header: list[str], path: Path, needed: str, target: str | None = None, least: int = 2) -> None:
    """Raise a DataError for a header without names, or with a name twice."""
    if len(header) < least:
        raise DataError(f"{path}, line 1: the header should name {needed}, by commas")
    if all(is_number(name) for name in header):
        raise DataError(f"{path}, line 1: numbers instead of column names; write a header")
    twice = next((name for name in header if header.count(name) > 1), None)
    if twice is not None and twice != target:
        raise DataError(f"{path}, line 1: two columns are called {twice!r}; give each column its own name")


def column_of(name: str, header: list[str], path: Path) -> int:
    """The position of the one column of that name; a DataError if there is none."""
    if header.count(name) != 1:
        raise DataError(f"{path}, line 1: {header.count(name)} columns are called {name!r}{nearest(name, header)}")
    return header.index(name)


def _number(cell: str, column: str, where: str, is_target: bool) -> float:
    cell = cell.strip()
    if is_missing(cell):
        return math.nan
    if not is_number(cell):
        if is_target:
            raise DataError(
                f"{where}: the target {column!r} is {cell[:40]!r}; give numbers, or class numbers from 0 that mean the "
                "same at every party"
            )
        raise DataError(
            f"{where}: {column} should be a number, or empty where it is missing, and is {cell!r}; for texts and dates "
            "set task.prepare = 'table'"
        )
    value = float(cell)
    if abs(value) > LARGEST:
        raise DataError(
            f"{where}: {column!r} is infinite or too large for float32: {cell}, and numbers up to {LARGEST:.2g} fit; "
            "correct it, or leave it empty"
        )
    return value


def targets_of(values: np.ndarray) -> Tensor:
    """Targets as int64 if all are whole numbers, else as float32."""
    whole = np.array_equal(values, np.round(values))
    return torch.from_numpy(values.astype(np.int64 if whole else np.float32))


def _from_npz(path: Path) -> tuple[Tensor, Tensor]:
    loaded = npz_arrays(path, ("x", "y"), "x and y")
    y = npz_targets(path, loaded["x"], loaded["y"])
    return features_of(loaded["x"]), y


def npz_arrays(path: Path, names: Sequence[str], needed: str, optional: Sequence[str] = ()) -> dict[str, np.ndarray]:
    """Arrays of an NPZ file by name; a DataError if one is missing, or if x or y does not hold numbers."""
    try:
        with np.load(path) as arrays:
            loaded = {name: arrays[name] for name in (*names, *optional) if name in arrays}
    except (ValueError, OSError, EOFError, zipfile.BadZipFile, zlib.error, AttributeError, TypeError):
        raise DataError(
            f"{path} is not an NPZ file of plain numeric arrays; write it with numpy.savez(x=..., y=...)"
        ) from None
    for name in names:
        if name not in loaded:
            raise DataError(f"{path} has no array {name!r}; an NPZ file of a party holds the arrays {needed}")
    for name, values in loaded.items():
        if name in ("x", "y") and values.dtype.kind not in "fiub":
            raise DataError(f"{path}: the array {name!r} holds {values.dtype}, and numbers are needed")
    return loaded


def npz_targets(path: Path, x: np.ndarray, y: np.ndarray) -> Tensor:
    """The array y as targets; a DataError if it does not fit x."""
    if x.ndim < 2 or y.ndim < 1 or len(x) != len(y) or len(x) == 0:
        raise DataError(
            f"{path}: x has the shape {x.shape} and y {y.shape}; both need one entry per sample along the first axis"
        )
    if y.dtype.kind == "f" and not np.isfinite(y).all():
        raise DataError(f"{path}: the array y has missing or infinite targets")
    return torch.from_numpy(y.astype(np.int64 if y.dtype.kind != "f" else np.float32))
