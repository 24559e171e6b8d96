"""Tables from files: CSV (also gzipped) and Parquet."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from torch import Tensor

from hansa.data.party_files import check_header, column_of, csv_lines
from hansa.data.table import Table, check_names
from hansa.data.table import column_of as as_column
from hansa.data.table_tasks import targets
from hansa.holdings.table_layout import TableLayout
from hansa.numerics.weights import sample_weights
from hansa.plumbing.errors import DataError

PARQUET = (".parquet", ".pq")


def is_table_file(path: Path) -> bool:
    """Whether a file's name says that it is a table."""
    return path.name.endswith((".csv", ".csv.gz", *PARQUET))


def read_table(path: Path) -> Table:
    """The table of a CSV or Parquet file."""
    if not path.is_file():
        raise DataError(f"there is no file {path}; a table is one CSV or Parquet file")
    if path.suffix in PARQUET:
        return _from_parquet(path)
    if not is_table_file(path):
        raise DataError(f"{path}: a table is a file that ends in .csv, .csv.gz or .parquet")
    lines = csv_lines(path)
    header = next(lines)[1]
    check_header(header, path, "the columns")
    check_names(header, f"{path}, line 1: ")
    numbers, rows = [], []
    for where, cells in lines:
        numbers.append(int(where.rpartition(" ")[2]))
        rows.append(cells)
    if not rows:
        raise DataError(f"{path} has no rows below its header")
    columns = {name: as_column(np.array(cells, dtype=object))
               for name, cells in zip(header, zip(*rows, strict=True), strict=True)}  # fmt: skip
    return Table(columns, len(rows), lambda row: f"{path}, line {numbers[row]}")


def _from_parquet(path: Path) -> Table:
    try:
        from pyarrow import ArrowException, parquet
    except ImportError:
        raise DataError(
            f"{path}: Parquet files are read by pyarrow, which is not installed: pip install 'hansa[parquet]'"
        ) from None
    try:
        frame = parquet.read_table(path)
    except (ArrowException, OSError) as error:
        raise DataError(f"{path} is not a Parquet file ({str(error).splitlines()[0]})") from None
    check_names(frame.column_names, f"{path}: ")
    if frame.num_rows == 0:
        raise DataError(f"{path} has no rows")
    columns = {name: as_column(frame.column(name).to_numpy()) for name in frame.column_names}
    return Table(columns, frame.num_rows, lambda row: f"{path}, row {row}")


def split_weights(features: Table, name: str | None, where: str) -> tuple[Table, Tensor | None]:
    """Features without the column of the samples' weights, and the weights; None if the table has no such column."""
    if name is None or name not in features.columns:
        return features, None
    weights, _ = features.coded(TableLayout(((name, "number"),)))
    return features.take(name)[1], sample_weights(weights[:, 0], len(features), f"{where}: {name}")


def read_table_samples(path: Path, target: str | None = None, labels: Sequence[str] = ()) -> tuple[Table, Tensor, str]:
    """The features and targets of a file, and the name of the target's column, by default the last one.

    `labels` lists the classes of targets that are texts.
    """
    table = read_table(path)
    names = list(table.columns)
    if len(names) < 2:
        raise DataError(f"{path}: a table needs at least one feature and the target")
    name = names[-1] if target is None else names[column_of(target, names, path)]
    column, features = table.take(name)
    return features, targets(column, name, labels, table.place), name
