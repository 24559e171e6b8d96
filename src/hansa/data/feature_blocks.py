"""Features for predictions, read block by block: files of any length in bounded memory.

CSV files (also gzipped) and Parquet files have columns, which are found by their names where the model knows them. NPY
and NPZ files have one array with one sample along the first axis.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from hansa.data.party_files import SHOWN, Header, check_header, column_of, csv_lines, features_of, npz_arrays, numbers
from hansa.plumbing.errors import ConfigError, DataError

ROWS, VALUES = 4096, 2**22  # the most rows of a block, and about the most numbers of one
FORMATS = ".csv, .csv.gz, .npy, .npz or .parquet"
Array = np.ndarray[Any, Any]


class WantedFeatures(NamedTuple):
    """What a model takes: the shape of a sample, the columns' names (the target, then the features) if they are known,
    whether features are whole numbers, and whether they may be missing.

    With `raw` the model's own preparation reads the columns `header[1:]`, texts too; other columns are not read.
    """

    shape: tuple[int, ...]
    header: Header = ()
    whole: bool = False
    missing: bool = False
    raw: bool = False


class FeatureBlock(NamedTuple):
    """Samples of consecutive rows (raw ones as columns by name), and the columns that are copied to the predictions."""

    x: Array | dict[str, list[Any]]
    rows: int
    copied: dict[str, list[Any]]


def feature_blocks(path: str | Path, wanted: WantedFeatures, keep: Sequence[str] = ()) -> Iterator[FeatureBlock]:
    """Yield the samples of a file in the order of its rows; `keep` names columns that are copied.

    A DataError names the first place where the file does not fit the model.
    """
    path = Path(path)
    rows = max(1, min(ROWS, VALUES // max(1, math.prod(wanted.shape))))
    if not path.is_file():
        raise DataError(f"there is no file {path}; give samples as a file that ends in {FORMATS}")
    if path.name.endswith((".csv", ".csv.gz")):
        yield from _from_csv(path, wanted, keep, rows)
    elif path.suffix == ".parquet":
        yield from _from_parquet(path, wanted, keep, rows)
    elif path.suffix in (".npy", ".npz"):
        if wanted.raw:
            raise DataError(f"{path}: the model takes the columns of a table; give a CSV or Parquet file")
        if keep:
            raise DataError(f"{path}: --keep names columns of a CSV or Parquet file, and this file has an array")
        yield from _from_array(path, wanted, rows)
    else:
        raise DataError(f"{path}: samples are a file that ends in {FORMATS}")


def _from_csv(path: Path, wanted: WantedFeatures, keep: Sequence[str], rows: int) -> Iterator[FeatureBlock]:
    lines = csv_lines(path)
    header = next(lines)[1]
    check_header(header, path, "the columns", least=1)
    chosen = _chosen(header, wanted, keep, f"{path}, line 1")
    names = [header[at] for at in chosen]
    copied = [(name, column_of(name, header, path)) for name in keep]
    some = False
    while block := list(itertools.islice(lines, rows)):
        some = True
        others = {name: [row[at] for _, row in block] for name, at in copied}
        if wanted.raw:
            columns = {name: [row[at] for _, row in block] for name, at in zip(names, chosen, strict=True)}
            yield FeatureBlock(columns, len(block), others)
            continue
        cells = [(where, [row[at] for at in chosen]) for where, row in block]
        x = _checked(_single(numbers(path, cells, names, None), wanted), wanted, names, [where for where, _ in block])
        yield FeatureBlock(x, len(block), others)
    if not some:
        raise DataError(f"{path} has no rows below its header")


def _from_parquet(path: Path, wanted: WantedFeatures, keep: Sequence[str], rows: int) -> Iterator[FeatureBlock]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise ConfigError(f"{path}: Parquet files need the package pyarrow; install it, or give a CSV file") from None
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            header = list(file.schema_arrow.names)
            chosen = _chosen(header, wanted, keep, str(path))
            names = [header[at] for at in chosen]
            for name in keep:
                column_of(name, header, path)
            if file.metadata.num_rows == 0:
                raise DataError(f"{path} has no rows")
            first = 1
            for batch in file.iter_batches(rows, columns=list(dict.fromkeys([*names, *keep]))):
                copied = {name: batch.column(name).to_pylist() for name in keep}
                if wanted.raw:
                    columns = {name: batch.column(name).to_pylist() for name in names}
                    yield FeatureBlock(columns, len(batch), copied)
                    continue
                values = np.empty((len(batch), len(names)))
                for at, name in enumerate(names):
                    column = batch.column(name)
                    if not (pyarrow.types.is_integer(column.type) or pyarrow.types.is_floating(column.type)
                            or pyarrow.types.is_boolean(column.type)):  # fmt: skip
                        raise DataError(f"{path}: the column {name!r} holds {column.type}, and numbers are needed")
                    values[:, at] = column.cast(pyarrow.float64(), safe=False).to_numpy(zero_copy_only=False)
                places = [f"{path}, row {row}" for row in range(first, first + len(batch))]
                yield FeatureBlock(_checked(_single(values, wanted), wanted, names, places), len(batch), copied)
                first += len(batch)
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{path} is not a Parquet file: {str(error).splitlines()[0]}") from None


def _from_array(path: Path, wanted: WantedFeatures, rows: int) -> Iterator[FeatureBlock]:
    if path.suffix == ".npz":
        x = npz_arrays(path, ("x",), "x")["x"]
    else:
        try:
            x = np.load(path, mmap_mode="r", allow_pickle=False)
        except (ValueError, OSError, EOFError):
            raise DataError(f"{path} is not an NPY file of plain numbers; write it with numpy.save") from None
    if x.dtype.kind not in "fiub":
        raise DataError(f"{path} holds {x.dtype}, and numbers are needed")
    if x.ndim < 2 or math.prod(x.shape[1:]) != math.prod(wanted.shape) or len(x) == 0:
        raise DataError(
            f"{path}: the array has the shape {x.shape}; the model takes samples of the shape {wanted.shape}, along "
            "the first axis"
        )
    for first in range(0, len(x), rows):
        values = np.array(x[first : first + rows]).reshape(-1, math.prod(wanted.shape))
        if values.dtype.kind != "f":
            values = _single(values, wanted)
        places = [f"{path}, sample {first + at}" for at in range(len(values))]
        yield FeatureBlock(_checked(values, wanted, [], places), len(values), {})


def _chosen(header: list[str], wanted: WantedFeatures, keep: Sequence[str], where: str) -> list[int]:
    """The positions of the features in a file's header, in the order in which the model takes them."""
    others = [at for at, name in enumerate(header) if name not in keep]
    count = math.prod(wanted.shape)
    if not wanted.header:
        if len(others) != count:
            raise DataError(
                f"{where}: {len(others)} columns, and the model takes {count} numbers per sample; it does not know the "
                "names of its columns, so give exactly these, in the order of training (--keep names others)"
            )
        return others
    target, *features = wanted.header
    names = {name: at for at, name in enumerate(header)}
    lacking = [name for name in features if name not in names]
    more = [name for name in names if name not in {*features, *keep, target}]
    if lacking:
        raise DataError(f"{where}: {_listed(lacking)} missing, which the model takes")
    if more and not wanted.raw:
        raise DataError(
            f"{where}: {_listed(more)} none that the model takes; remove it, or copy it to the predictions (--keep)"
        )
    return [names[name] for name in features]


def _listed(names: list[str]) -> str:
    shown = f"{', '.join(repr(name[:40]) for name in names[:SHOWN])}{' ...' if len(names) > SHOWN else ''}"
    return f"the column {shown} is" if len(names) == 1 else f"the columns {shown} are"


def _single(values: Array, wanted: WantedFeatures) -> Array:
    """Numbers of a table in the precision in which parties read theirs (`features_of`)."""
    return values if wanted.whole else features_of(values).numpy()


def _checked(values: Array, wanted: WantedFeatures, names: list[str], places: list[str]) -> Array:
    """Samples in the model's shape; a DataError at the first value that the model does not take."""
    bad = np.isinf(values) | (False if wanted.missing else np.isnan(values))
    if wanted.whole:
        bad |= values != np.round(values)
    if bad.any():
        row, at = (int(index[0]) for index in bad.nonzero())
        value, name = values[row, at], repr(names[at]) if names else f"the value {at}"
        if np.isnan(value):
            why = "is missing, and the model was trained without a preparation that fills in missing values"
        else:
            why = "must be a whole number" if np.isfinite(value) else "is infinite or too large"
        raise DataError(f"{places[row]}: {name} {why}")
    return (values.astype(np.int64) if wanted.whole else values).reshape(-1, *wanted.shape)
