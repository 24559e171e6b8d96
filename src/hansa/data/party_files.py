"""A party's own data, from a CSV or an NPZ file."""

from __future__ import annotations

import csv
import math
import zipfile
import zlib
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from hansa.core.errors import DataError, nearest
from hansa.data.dataset import read_text

SHOWN = 5  # names of columns in a message, at most
MISSING = ("", "?")
Header = tuple[str, ...]  # the name of the target's column, then of the feature columns; () without names


def load_party_file(path: str | Path, target: str | None = None) -> tuple[Tensor, Tensor]:
    """Read the features (float32) and targets of one party.

    `.csv` (or `.csv.gz`): a header, then numbers; an empty cell or `?` is NaN. The target is the column `target`, by
    default the last one: int64 labels if all its values are whole numbers, else float32. `.npz`: the arrays `x` and
    `y`; y is int64 if it was stored as whole numbers, else float32.
    """
    x, y, _ = read_party_file(path, target)
    return x, y


def read_party_file(path: str | Path, target: str | None = None) -> tuple[Tensor, Tensor, Header]:
    """As `load_party_file`, with the names of a CSV file's columns."""
    path = Path(path)
    if not path.is_file():
        raise DataError(f"there is no file {path}; a party's data is one CSV or NPZ file")
    if path.name.endswith((".csv", ".csv.gz")):
        return _from_csv(path, target)
    if path.suffix == ".npz":
        if target is not None:
            raise DataError(
                f"{path}: a target column can be named for CSV files only; in an NPZ file it is the array y"
            )
        return *_from_npz(path), ()
    raise DataError(f"{path}: a party's data is a file that ends in .csv, .csv.gz or .npz")


def aligned(x: Tensor, header: Header, wanted: Header, where: str) -> Tensor:
    """Reorder columns of features to the header `wanted`; raise DataError if the names differ.

    Features without column names are returned unchanged.
    """
    if not header or not wanted or header == wanted:
        return x
    why = differing(header, wanted)
    if why is not None:
        raise DataError(f"{where}{why}")
    return x[:, [header.index(name) - 1 for name in wanted[1:]]]


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


def _from_csv(path: Path, target: str | None) -> tuple[Tensor, Tensor, Header]:
    lines = csv.reader(read_text(path).splitlines())
    rows: list[list[float]] = []
    try:
        header = [name.strip() for name in next(lines, [])]
        column = _target_column(header, target, path)
        for cells in lines:
            if not cells:
                continue
            where = f"{path}, line {lines.line_num}"
            if len(cells) != len(header):
                raise DataError(f"{where}: {len(cells)} values where the header names {len(header)} columns")
            named = enumerate(zip(cells, header, strict=True))
            rows.append([_number(cell, name, where, at == column) for at, (cell, name) in named])
            if math.isnan(rows[-1][column]):
                raise DataError(f"{where}: the target {header[column]!r} is missing")
    except csv.Error as error:
        raise DataError(f"{path}, line {lines.line_num}: not a CSV file ({error})") from None
    if not rows:
        raise DataError(f"{path} has no rows below its header")
    values = np.array(rows)
    with np.errstate(over="ignore"):  # too large a number becomes infinite, which the task refuses
        x = torch.from_numpy(np.delete(values, column, axis=1).astype(np.float32))
    return x, _targets(values[:, column]), (header[column], *header[:column], *header[column + 1 :])


def _target_column(header: list[str], target: str | None, path: Path) -> int:
    if len(header) < 2:
        raise DataError(f"{path}, line 1: the header should name at least one feature and the target, by commas")
    if all(_is_number(name) for name in header):
        raise DataError(f"{path}, line 1: numbers instead of column names; write a header")
    twice = next((name for name in header if header.count(name) > 1), None)
    if twice is not None and twice != target:
        raise DataError(f"{path}, line 1: two columns are called {twice!r}; give each column its own name")
    if target is None:
        return len(header) - 1
    if header.count(target) != 1:
        raise DataError(
            f"{path}, line 1: {header.count(target)} columns are called {target!r}{nearest(target, header)}"
        )
    return header.index(target)


def _is_number(cell: str) -> bool:
    try:
        return math.isfinite(float(cell))
    except ValueError:
        return False


def _number(cell: str, column: str, where: str, is_target: bool) -> float:
    cell = cell.strip()
    if cell in MISSING or cell.lower() == "nan":
        return math.nan
    if not _is_number(cell):
        if is_target:
            raise DataError(
                f"{where}: the target {column!r} is {cell[:40]!r}; give numbers, or class numbers from 0 that mean the "
                "same at every party"
            )
        raise DataError(f"{where}: {column} should be a number, or empty where it is missing, and is {cell!r}")
    return float(cell)


def _targets(values: np.ndarray) -> Tensor:
    whole = np.array_equal(values, np.round(values))
    return torch.from_numpy(values.astype(np.int64 if whole else np.float32))


def _from_npz(path: Path) -> tuple[Tensor, Tensor]:
    try:
        with np.load(path) as arrays:
            loaded = {name: arrays[name] for name in ("x", "y") if name in arrays}
    except (ValueError, OSError, EOFError, zipfile.BadZipFile, zlib.error, AttributeError, TypeError):
        raise DataError(
            f"{path} is not an NPZ file of plain numeric arrays; write it with numpy.savez(x=..., y=...)"
        ) from None
    for name in ("x", "y"):
        if name not in loaded:
            raise DataError(f"{path} has no array {name!r}; an NPZ file of a party holds the arrays x and y")
        if loaded[name].dtype.kind not in "fiub":
            raise DataError(f"{path}: the array {name!r} holds {loaded[name].dtype}, and numbers are needed")
    x, y = loaded["x"], loaded["y"]
    if x.ndim < 2 or y.ndim < 1 or len(x) != len(y) or len(x) == 0:
        raise DataError(
            f"{path}: x has the shape {x.shape} and y {y.shape}; both need one entry per sample along the first axis"
        )
    if y.dtype.kind == "f" and not np.isfinite(y).all():
        raise DataError(f"{path}: the array y has missing or infinite targets")
    whole = y.dtype.kind != "f"
    with np.errstate(over="ignore"):
        features = torch.from_numpy(x.astype(np.float32))
    return features, torch.from_numpy(y.astype(np.int64 if whole else np.float32))
