"""Tasks whose samples are tables: frames become coded rows with one layout for all parties."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hansa.core.task import Pair, Task
from hansa.data.cells import is_missing, missing_words
from hansa.data.column_transformer import ColumnTransformer
from hansa.data.party_files import differing, targets_of
from hansa.data.table import Column, Table, TextColumn, agreed_layout
from hansa.holdings.public import split_public
from hansa.holdings.table_layout import TableLayout
from hansa.plumbing.errors import DataError, nearest


def common_layout(tables: Mapping[str, Table], prepare: ColumnTransformer) -> TableLayout:
    """The layout of tables by place; a DataError names a place whose columns differ, or hold another kind of value."""
    words = missing_words(prepare.missing)
    place, first = next(iter(tables.items()))
    for name, table in tables.items():
        why = differing(("", *table.columns), ("", *first.columns))
        if why is not None:
            raise DataError(f"{name}: {why.replace('most parties', place)}")
    declared, dropped = prepare.kinds()
    guesses = {name: {column: table.guesses(words)[column] for column in first.columns}
               for name, table in tables.items()}  # fmt: skip
    kept = {*prepare.kept(list(first.columns)), *dropped}
    layout, odd = agreed_layout(guesses, declared, [*dropped, *(name for name in first.columns if name not in kept)])
    if odd:
        name, why = next(iter(odd.items()))
        raise DataError(f"{name}: {why}")
    return layout


def code_all(tables: Mapping[str, Table], prepare: ColumnTransformer) -> tuple[list[Tensor], TableLayout]:
    """The coded rows of tables, and their common layout with the texts of all of them."""
    layout, words = common_layout(tables, prepare), missing_words(prepare.missing)
    rows, texts = [], dict[int, str]()
    for table in tables.values():
        x, own = table.coded(layout, words)
        rows.append(x)
        texts |= own
    return rows, dataclasses.replace(layout, texts=texts)


def column_count(task: Task) -> int:
    """The number of columns of a task's tables, before any is dropped."""
    if task.table is not None:
        return len(task.table.columns)
    first = task.parties[0][0] if len(task.parties) else ()
    return len(getattr(first, "columns", first))


def coded_task(task: Task) -> Task:
    """The task with coded rows in place of frames; a task with coded rows is returned unchanged.

    A DataError for samples without named columns.
    """
    prepare = task.prepare
    assert isinstance(prepare, ColumnTransformer)
    if task.table is not None:
        kept = prepare.kept([name for name, _ in task.table.columns])
        return _with_columns(task, prepare, kept)
    parties = task.parties
    if isinstance(parties, tuple) and len(parties) == 3 and not isinstance(parties[0], (tuple, list)):
        raise DataError("parties: a table needs named columns; give one (frame, y) per party")
    names = list(task.names or map(str, range(len(parties))))
    sources: dict[str, Any] = {f"parties[{name}]": pair[0] for name, pair in zip(names, parties, strict=True)}
    for k, pair in enumerate(task.party_tests or ()):
        sources[f"party_tests[{names[k]}]"] = pair[0]
    public, public_y = split_public(task.public) if task.public is not None else (None, None)
    own: dict[str, Any] = {"test": task.test and task.test[0], "trusted": task.trusted and task.trusted[0],
                           "public": public}  # fmt: skip
    sources |= {name: x for name, x in own.items() if x is not None}
    tables = {where: Table.of(x, f"{where}: ") for where, x in sources.items()}
    rows, layout = code_all(tables, prepare)
    coded = dict(zip(tables, rows, strict=True))

    def central(where: str, before: Pair | None) -> Pair | None:
        return None if before is None else (coded[where], before[1])

    return dataclasses.replace(
        task, table=layout, header=task.header[:1],
        parties=[(coded[f"parties[{name}]"], y) for name, (_, y) in zip(names, parties, strict=True)],
        party_tests=None if task.party_tests is None
        else [(coded[f"party_tests[{name}]"], y) for name, (_, y) in zip(names, task.party_tests, strict=True)],
        test=central("test", task.test), trusted=central("trusted", task.trusted),
        public=None if task.public is None else coded["public"] if public_y is None else (coded["public"], public_y),
    )  # fmt: skip


def _with_columns(task: Task, prepare: ColumnTransformer, kept: Sequence[str]) -> Task:
    """A task of coded rows with some of its columns; the options must name columns that exist."""
    assert task.table is not None
    declared, dropped = prepare.kinds()
    others = [name for name, _ in task.table.columns if name not in {*kept, *dropped}]
    layout, _ = agreed_layout({"data": dict(task.table.columns)}, declared, [*dropped, *others])
    for (name, kind), (_, before) in zip(layout.columns, [c for c in task.table.columns if c[0] in kept], strict=True):
        if kind != before:
            raise DataError(f"the column {name!r} holds {before}s, and task.prepare.columns wants {kind}s")
    at = [k for k, (name, _) in enumerate(task.table.columns) if name in kept]
    if len(at) == len(task.table.columns):
        return task

    def chosen(pair: Any) -> Any:
        return None if pair is None else (pair[0][:, at], pair[1])

    def several(data: Any) -> Any:
        if data is None:
            return None
        whole = isinstance(data, tuple) and len(data) == 3 and not isinstance(data[0], tuple)
        return (data[0][:, at], *data[1:]) if whole else [chosen(pair) for pair in data]

    public, y = split_public(task.public) if task.public is not None else (None, None)
    return dataclasses.replace(
        task, table=TableLayout(layout.columns, task.table.texts), header=task.header[:1],
        parties=several(task.parties),
        party_tests=several(task.party_tests), test=chosen(task.test), trusted=chosen(task.trusted),
        public=None if public is None else public[:, at] if y is None else (public[:, at], y),
    )  # fmt: skip


def targets(column: Column, name: str, labels: Sequence[str], place: Any) -> Tensor:
    """Targets from a column: class numbers of `labels`, or numbers. A DataError names a row without a target."""
    if labels:
        texts = column if isinstance(column, TextColumn) else None
        if texts is None:
            raise DataError(f"the target {name!r} holds numbers, and task.labels lists texts; leave labels out")
        numbers = {label: k for k, label in enumerate(labels)}
        codes = np.array([numbers.get(cell or "", -1) for cell in texts.distinct])[texts.at]
        if (codes < 0).any():
            row = int(np.flatnonzero(codes < 0)[0])
            cell = texts.distinct[texts.at[row]] or ""
            raise DataError(f"{place(row)}: the target {name!r} is {cell[:40]!r}{nearest(cell, labels)}")
        return torch.from_numpy(codes)
    if isinstance(column, TextColumn):
        missing = [k for k, cell in enumerate(column.distinct) if cell is None or is_missing(cell)]
        rows = np.flatnonzero(np.isin(column.at, missing))
        if len(rows):
            raise DataError(f"{place(int(rows[0]))}: the target {name!r} is missing")
    table = Table({name: column}, len(column.at) if isinstance(column, TextColumn) else len(column), place)
    try:
        values = table.coded(TableLayout(((name, "number"),)))[0][:, 0].numpy()
    except DataError as error:
        raise DataError(
            f"{error}; targets are numbers, or class numbers from 0; list the classes of texts in task.labels "
            "(a party: hansa join --labels)"
        ) from None
    return targets_of(values)
