"""A party's samples, from a file or from its own function."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from hansa.core.columns import check_test_rows, ids_of
from hansa.core.op import Party
from hansa.data.column_files import read_column_file
from hansa.data.party_files import Header, aligned, differing, features_of, split_column
from hansa.data.party_folders import read_party
from hansa.data.statement import DataStatement
from hansa.data.table import Table
from hansa.data.table_files import PARQUET, is_table_file, read_table_samples, split_weights
from hansa.holdings.fitting import kept_features, tensor_of
from hansa.holdings.gateway import SampleGateway, StoredSamples, TableRows
from hansa.holdings.stored_rows import Features, is_dataset, read_dataset, stored, whole
from hansa.holdings.table_layout import TableLayout
from hansa.net.party.data_statement import stated
from hansa.net.party.task_party import make_party
from hansa.numerics.weights import sample_weights
from hansa.plumbing import codec
from hansa.plumbing.errors import ConfigError, DataError, HansaError
from hansa.plumbing.functions import load_function


class PartySamples(NamedTuple):
    """A party's samples: training set, its own test set, and the column names of a CSV file.

    With ids, the sets are `TableRows`, which may have no labels. `tables` are the features of both sets as tables; then
    columns of texts and dates are NaN in the sets, and `kinds` has the kinds of all columns. `labels` are the classes
    of targets that are texts, in order. Samples with a `statement` were compared with it (`data_statement.stated`).
    """

    train: StoredSamples | TableRows
    test: StoredSamples | TableRows | None = None
    header: Header = ()
    tables: tuple[Table, Table | None] | None = None
    kinds: tuple[str, ...] = ()
    labels: tuple[str, ...] = ()
    statement: DataStatement | None = None


NUMBERS = (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16,
           torch.int8, torch.uint8, torch.bool)  # fmt: skip


def read_samples(reference: str, target: str | None = None, test: str | None = None, ids: str | None = None,
                 labels: Sequence[str] = (), weights: str | None = None) -> PartySamples:  # fmt: skip
    """Read a party's samples from a CSV, Parquet or NPZ file, a folder of arrays, or a function: `"my_data:load"`.

    The function returns (x, y) or a map-style data set of such pairs; with a test set, two of them. With ids it returns
    (x, y, ids), where y is None without labels. `test` is a file of test samples. `labels` lists the classes of a
    file's target that is a text. `ids` names the column (in an NPZ file, the array) with the ids; then the party has
    labels only if `target` names their column (in an NPZ file, if there is an array y). `weights` names the column (in
    an NPZ file, the array) with the weight of each sample in the training loss; a function returns them as (x, y, None,
    weights).
    """
    if ids is not None and weights is not None:
        raise ConfigError("--weights: jobs over columns (--ids) do not use weights of samples; leave one of them out")
    tables = is_table_file(Path(reference)) and (test is None or is_table_file(Path(test)))
    if tables and ids is None:
        return _read_tables(reference, target, test, labels, weights)._replace(labels=tuple(labels))
    if labels:
        raise ConfigError(
            "--labels lists the classes of a table's target (CSV or Parquet, without --ids); leave it out"
        )
    if test is not None:
        train, own_test, header, *_ = read_samples(reference, target, None, ids, (), weights)
        if own_test is not None:
            raise ConfigError(f"--test: {reference!r} already returns test samples; leave --test out")
        held, names = _read_file(test, target, ids, weights)
        if weights is not None:
            held = TableRows(*held)._replace(weights=None)
        x = aligned(held[0], names, header, f"--test: {test}: ")
        held = held._replace(x=x) if isinstance(held, TableRows) else (x, held[1])
        if held[0].shape[1:] != train[0].shape[1:]:
            raise DataError(
                f"--test: the samples of {test} have the shape {tuple(held[0].shape[1:])}, those of {reference} "
                f"{tuple(train[0].shape[1:])}"
            )
        return _checked(PartySamples(train, held, header), f"--test: {test}")
    suffixes = (".csv", ".npz", ".gz", *PARQUET)
    if Path(reference).suffix in suffixes or ":" not in reference or Path(reference).is_dir():
        rows, header = _read_file(reference, target, ids, weights)
        if weights is not None and TableRows(*rows).weights is None:
            raise DataError(f"--weights: {reference} has no column or array {weights!r}")
        return PartySamples(rows, None, header)
    for option, value in (("--target", target), ("--ids", ids), ("--weights", weights)):
        if value is not None:
            raise ConfigError(f"{option} names a column of a CSV file; leave it out where --data is a function")
    function = load_function(reference, "--data", os.getcwd())
    try:
        returned = function()
    except HansaError:
        raise
    except Exception as error:  # the party's own function: quote its error
        raise ConfigError(f"--data: {reference!r} failed: {type(error).__name__}: {error}") from error
    frames = _frames(returned, reference)
    if frames is not None:
        return frames
    where = f"--data: {reference!r}"
    if is_dataset(returned):
        return PartySamples(read_dataset(returned, where))
    if not isinstance(returned, (tuple, list)) or len(returned) not in (2, 3, 4):
        raise DataError(f"{where} must return (x, y), (x, y, ids), a data set, or two of them: training and test")
    if len(returned) == 2 and all(map(is_dataset, returned)):
        return PartySamples(read_dataset(returned[0], where), read_dataset(returned[1], f"{where} (test samples)"))
    nested = isinstance(returned[0], tuple) and len(returned[0]) in (2, 3, 4) and _dimensions(returned[0][0]) >= 2
    if len(returned) == 2 and nested:
        both = PartySamples(_rows(returned[0], reference), _rows(returned[1], reference))
        return _checked(both, f"--data: the test samples of {reference!r}")
    return PartySamples(_rows(returned, reference))


def _frames(returned: Any, reference: str) -> PartySamples | None:
    """The samples of a function that returns frames: (frame, y), or two of them; None for other samples."""
    pairs = [returned] if _is_frame_pair(returned) else returned
    if not isinstance(pairs, (tuple, list)) or len(pairs) not in (1, 2) or not all(map(_is_frame_pair, pairs)):
        return None
    made = [(Table.of(x, f"--data: {reference!r}: "), _pair((np.zeros((len(x), 1)), y), reference)[1])
            for x, y in pairs]  # fmt: skip
    return _of_tables("y", made[0], made[1] if len(made) == 2 else None, f"--data: the test samples of {reference!r}")


def _is_frame_pair(values: Any) -> bool:
    return isinstance(values, (tuple, list)) and len(values) == 2 and hasattr(values[0], "columns")


def _read_tables(reference: str, target: str | None, test: str | None, labels: Sequence[str],
                 weights: str | None) -> PartySamples:  # fmt: skip
    """A party's samples from files with tables."""
    features, y, name = read_table_samples(Path(reference), target, labels)
    features, own = split_weights(features, weights, reference)
    if weights is not None and own is None:
        raise DataError(f"--weights: {reference} has no column or array {weights!r}")
    made = None
    if test is not None:
        held, held_y, held_name = read_table_samples(Path(test), target, labels)
        if held_name != name:
            raise DataError(f"--test: {test}: its target is the column {held_name!r}, not {name!r}; name it (--target)")
        made = split_weights(held, weights, test)[0], held_y
    samples = _of_tables(name, (features, y), made, f"--test: {test}")
    return samples if own is None else samples._replace(train=TableRows(*samples.train[:2], None, own))


def _of_tables(target: str, train: tuple[Table, Tensor], test: tuple[Table, Tensor] | None,
               where: str) -> PartySamples:  # fmt: skip
    """A party's samples from tables. Columns that are not numbers are NaN in the tensors."""
    features, y = train
    kinds: dict[str, str] = dict(features.guesses())
    header = (target, *features.columns)
    if test is None:
        return PartySamples((_numbers(features, kinds), y), None, header, (features, None), tuple(kinds.values()))
    held, held_y = test
    why = differing((target, *held.columns), header)
    if why is not None:
        raise DataError(f"{where}: {why}")
    held = Table({column: held.columns[column] for column in features.columns}, len(held), held.place)
    others = held.guesses()
    kinds = {column: kind if others[column] in (kind, "empty") else others[column] if kind == "empty" else "text"
             for column, kind in kinds.items()}  # fmt: skip
    return PartySamples((_numbers(features, kinds), y), (_numbers(held, kinds), held_y), header, (features, held),
                        tuple(kinds.values()))  # fmt: skip


def _numbers(table: Table, kinds: Mapping[str, str]) -> Tensor:
    """The columns of numbers, and NaN in place of all others."""
    numeric = [column for column, kind in kinds.items() if kind == "number"]
    out = np.full((len(table), len(kinds)), np.nan)
    if numeric:
        layout = TableLayout(tuple((column, "number") for column in numeric))
        out[:, [list(kinds).index(column) for column in numeric]] = table.coded(layout)[0].numpy()
    return features_of(out)


def _checked(samples: PartySamples, where: str) -> PartySamples:
    """The samples; a DataError if those with ids have test rows that do not fit."""
    train, test = samples.train, samples.test
    if isinstance(train, TableRows) and isinstance(test, TableRows):
        check_test_rows(train, test, where)
    return samples


def _read_file(path: str, target: str | None, ids: str | None,
               weights: str | None = None) -> tuple[StoredSamples | TableRows, Header]:  # fmt: skip
    if ids is not None:
        return read_column_file(path, ids, target)
    x, y, header = read_party(Path(path), target)
    if weights is None:
        return (x, y), header
    x, header, own = split_column(whole(x), header, weights, Path(path))
    return TableRows(x, y, None, None if own is None else sample_weights(own, len(x), f"{path}: {weights}")), header


def _rows(returned: Any, reference: str) -> StoredSamples | TableRows:
    """The samples that a function returned: (x, y), (x, y, ids), or (x, y, None, weights)."""
    if len(returned) == 2:
        return _pair(returned, reference)
    if len(returned) == 4:
        x, y = _pair(returned[:2], reference)
        if returned[2] is not None:
            raise DataError(f"--data: {reference!r} returned ids and weights; jobs over columns do not use weights")
        return TableRows(x, y, None, sample_weights(returned[3], len(x), f"--data: {reference!r} weights"))
    x, y, ids = returned
    features = _pair((x, np.zeros(len(x)) if y is None else y), reference)
    return TableRows(features[0], None if y is None else features[1], ids_of(ids, len(x), f"--data: {reference!r} ids"))


def _dimensions(values: Any) -> int:
    """The number of dimensions of an array; 0 for anything else."""
    try:
        return torch.as_tensor(values).dim()
    except (TypeError, ValueError, RuntimeError):
        return 0


def _pair(pair: Any, reference: str) -> StoredSamples:
    x: Features
    try:
        x = kept_features(pair[0], f"--data: {reference!r} x") if stored(pair[0]) else torch.as_tensor(pair[0])
        y = torch.as_tensor(np.array(pair[1]) if isinstance(pair[1], np.memmap) else pair[1])
    except (TypeError, ValueError, RuntimeError) as error:
        tensor_of(pair[1], f"--data: {reference!r} y")  # raises a better message for texts
        raise DataError(f"--data: {reference!r} did not return two arrays: {error}") from None
    if x.dim() < 2 or y.dim() < 1 or len(x) != len(y):
        raise DataError(
            f"--data: {reference!r} returned x {tuple(x.shape)} and y {tuple(y.shape)}; both need one row per sample"
        )
    for name, dtype in (("x", x.dtype), ("y", y.dtype)):
        if dtype not in NUMBERS:
            kind = str(dtype).removeprefix("torch.")
            raise DataError(
                f"--data: {reference!r} returned {name} as {kind}; return floats, or whole numbers as int64"
            )
    return x, y


def samples_digest(samples: PartySamples) -> str:
    """The SHA-256 of a party's training and test samples, with their names, which never leaves the party."""
    sets = [None if rows is None else SampleGateway(rows).digest() for rows in samples[:2]]
    tables = [None if table is None else table.digest() for table in samples.tables or ()]
    return codec.digest({"sets": sets, "header": list(samples.header), "tables": tables})


def preparer(samples: PartySamples, parameters: int | None = None) -> Callable[[int, dict[str, Any], str], Party]:
    """Return a function that makes the party of a task from these samples (`task_party.make_party`).

    Samples without a statement get the one that they suggest, here. Each task starts from the original samples.
    `parameters` is the largest size of a registered model, whose fields the job chooses: a larger one is refused before
    it takes memory.
    """
    samples = PartySamples(*samples)
    samples = stated(samples) if samples.statement is None else samples
    return functools.partial(make_party, samples, parameters)
