"""Make the task of an experiment whose parties hold different columns of the same people."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from hansa.core.columns import held_out, ids_of
from hansa.core.task import Pair, Task
from hansa.data.column_files import names_column, read_column_file
from hansa.data.column_split import Columns
from hansa.data.dataset import Data
from hansa.data.party_files import SHOWN
from hansa.experiment.tasks import file_names, load_data, loss_and_classes
from hansa.holdings.gateway import TableRows
from hansa.plumbing.errors import ConfigError, DataError

if TYPE_CHECKING:
    from hansa.experiment.config import Experiment

DTYPES = {"float32": torch.float32, "float64": torch.float64}


def make_column_task(experiment: Experiment, data: Data | None = None) -> Task:
    """The task of an experiment whose parties hold different columns of the same people."""
    table, partition = experiment.task, experiment.partition
    if table.parties:
        return _column_files(experiment)
    assert isinstance(partition, Columns)
    data = load_data(experiment) if data is None else data
    if data.table is not None:
        raise ConfigError("task.dataset: rows of a table with texts cannot be divided by columns")
    parts = partition.divide(data, experiment.run.seed)
    if table.party_test > 0 and parts.tests is not None:
        raise ConfigError(
            "task.party_test: this data set has a test set, which is divided among the parties like the rest; leave it "
            "out"
        )
    loss, tests = table.loss or data.loss, None if parts.tests is None else (parts.tests, parts.test_ids)
    return _column_task(experiment, parts.parties, parts.ids, tests, None, loss, data.classes)


def _column_files(experiment: Experiment) -> Task:
    """The task of an experiment with one file per party, each with ids."""
    table = experiment.task
    assert table.ids is not None
    rows, names = [], dict[str, None]()
    for name in table.parties:
        path = Path(experiment.folder) / name
        target = table.target if table.target is not None and names_column(path, table.target) else None
        own, header = read_column_file(path, table.ids, target)
        rows.append(own)
        names.update(dict.fromkeys(header[1:]))
    if all(own.y is None for own in rows):
        raise DataError(f"no file of task.parties has labels: {_lacking(table.target, list(names))}")
    labels = [own.y for own in rows if own.y is not None]
    counted = max(int(y.max()) for y in labels) + 1 if not any(y.is_floating_point() for y in labels) else 0
    loss, classes = loss_and_classes(table.loss, table.classes or counted)
    pairs, ids = [(own.x, own.y) for own in rows], [own.ids for own in rows]
    return _column_task(experiment, pairs, ids, None, file_names(table.parties), loss, classes)


def _lacking(target: str | None, names: list[str]) -> str:
    """Why no file has labels; `names` are the columns of the CSV files."""
    if target is not None:
        return f"none has the column {target!r} (task.target)"
    if not names:
        return "none has the array y"
    more = " ..." if len(names) > SHOWN else ""
    return f"set task.target to the column that has them, one of {', '.join(names[:SHOWN])}{more}"


def _column_task(experiment: Experiment, pairs: Sequence[Pair], ids: Sequence[Any], tests: tuple[Any, Any] | None,
                 names: list[str] | None, loss: str, classes: int | None) -> Task:  # fmt: skip
    share, seed = experiment.task.party_test, experiment.run.seed
    pairs = [(in_dtype(x, experiment.task.dtype), y) for x, y in pairs]
    if tests is not None:
        tests = [(in_dtype(x, experiment.task.dtype), y) for x, y in tests[0]], tests[1]
    if share > 0:
        both = [hold_out_people(TableRows(*pair, ids_of(own, len(pair[0]), "ids")), share, seed)
                for pair, own in zip(pairs, ids, strict=True)]  # fmt: skip
        pairs, ids = [(train.x, train.y) for train, _ in both], [train.ids for train, _ in both]
        tests = [(test.x, test.y) for _, test in both], [test.ids for _, test in both]
    party_tests, test_ids = tests or (None, None)
    return Task(None, loss, pairs, None, party_tests, names, classes, experiment.task.prepare, ids=ids,
                test_ids=test_ids)  # fmt: skip


def in_dtype(x: Tensor, dtype: str) -> Tensor:
    """Features in the type that `task.dtype` names, a DataError for any other; whole numbers stay as they are."""
    if dtype not in DTYPES:
        raise DataError(f"task.dtype must be one of {', '.join(DTYPES)}, got {dtype!r:.40}")
    return x.to(DTYPES[dtype]) if x.is_floating_point() else x


def hold_out_people(rows: TableRows, share: float, seed: int) -> tuple[TableRows, TableRows]:
    """Split the rows of one party with ids into training rows and test rows; all parties hold out the same people."""
    x, y, ids = rows[:3]
    assert ids is not None
    chosen = held_out(ids, share, seed)
    parts = []
    for mask in (~chosen, chosen):
        at = torch.from_numpy(np.flatnonzero(mask))
        parts.append(TableRows(x[at], None if y is None else y[at], ids[mask]))
    return parts[0], parts[1]
