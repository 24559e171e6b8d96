"""The statement of a party about its samples, `[data]` in `party.toml`: proposed from them, and checked against them.

A task is compared with the statement alone (`check_task`), before a sample is touched. Samples that contradict the
statement are an error for the owner, at the start or when files change. So a party that was built once for a task is
built for all samples that its owner's statement allows.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hansa.core.columns import ids_of
from hansa.data.cells import MISSING, missing_words
from hansa.data.party_files import aligned, differing
from hansa.data.statement import CLASSES, DataStatement
from hansa.data.table import Table
from hansa.holdings.fitting import (
    check_features,
    check_outputs,
    check_whole_features,
    clamped,
    looks_one_hot,
    output_of,
)
from hansa.holdings.gateway import StoredSamples, TableRows
from hansa.holdings.stored_rows import Features, blocks
from hansa.holdings.table_layout import TableLayout
from hansa.numerics.objective import Objective
from hansa.plumbing import disk
from hansa.plumbing.errors import DataError, NotAdmitted, before_reading
from hansa.plumbing.functions import is_function

if TYPE_CHECKING:
    from hansa.net.party.samples import PartySamples

log = logging.getLogger("hansa.net")
AGAINST = "the data contradict the table [data] of party.toml: "
SHOWN = 64  # columns that a line of the log names
OPTIONS = {"tests": "--test", "ids": "--ids", "weights": "--weights", "labels": "--labels"}
COMMENTS = {
    "shape": "numbers of a sample",
    "targets": "classes, whole (numbers that are no classes), numbers, none or empty (no samples yet)",
    "features": "real, whole (numbers) or bytes",
    "missing": "whether features may be missing",
    "words": "cells that stand for a missing value",
    "classes": "targets lie in 0..classes - 1",
    "labels": "names of the classes, where the file has texts",
    "tests": "whether there are test samples",
    "ids": "whether rows have ids",
    "weights": "whether samples have weights",
    "unit": "whether all targets lie in 0..1",
}
ALWAYS = ("shape", "targets", "features", "missing", "tests", "ids", "weights")  # fields that are written in any case
HEAD = """
[data]             # what this party states about its samples, to every job; hansa join has written it: check it. Tasks
#                  # are compared with it, never with samples. Samples that contradict it are not used
"""


# ---- from samples ----------------------------------------------------------------------------------------------------


def proposed(samples: PartySamples) -> DataStatement:
    """The statement that samples suggest; a DataError if no job could use them."""
    sets = _sets(samples)
    x, targets = sets[0].x, [rows.y for rows in sets if rows.y is not None]
    columns = dict(zip(samples.header[1:], samples.kinds or ["number"] * len(samples.header), strict=False))
    out: dict[str, Any] = {
        "shape": tuple(x.shape[1:]), "features": _kind_of(x), "columns": columns, "labels": tuple(samples.labels),
        "target": samples.header[0] if columns else "", "tests": samples.test is not None,
        "ids": all(rows.ids is not None for rows in sets), "weights": sets[0].weights is not None,
    }  # fmt: skip
    if samples.tables is not None:
        words = missing_words(MISSING)
        coded = [_coded(table, columns, words) for table in samples.tables if table is not None]
        out["missing"] = any(bool(rows.isnan().any()) for rows in coded)
    else:
        out["missing"] = any([_check_finite(rows.x) for rows in sets])  # a list: every set is checked
    return DataStatement(**out, **_targets(sets[0].y, targets, len(samples.labels)))


def _targets(own: Tensor | None, sets: list[Tensor], labels: int) -> dict[str, Any]:
    """What targets suggest, those of training samples and of all sets."""
    if own is None:
        return {"targets": "none"}
    out: dict[str, Any] = {"targets": "empty", "target_shape": tuple(own.shape[1:])}
    if labels:
        out["classes"] = labels
    known = [y for y in sets if y.numel()]
    for y in known:
        _check_targets_finite(y)
    if not known or not own.numel():
        return out
    low, high = min(float(y.min()) for y in known), max(float(y.max()) for y in known)
    whole = all(not y.is_floating_point() or torch.equal(y, y.round()) for y in known)
    out["targets"] = "numbers" if any(y.is_floating_point() for y in known) else "whole"
    out["unit"] = low >= 0 and high <= 1
    out["one_hot"] = any(y.dim() == 2 and looks_one_hot(y) for y in known)
    if whole and low >= 0 and high < CLASSES:
        out["targets"] = "classes" if out["targets"] == "whole" else "numbers"
        out["classes"], out["lowest_class"] = max(int(high) + 1, labels), int(low)
        distinct = len(torch.unique(torch.cat([y.flatten().to(torch.int64) for y in known])))
        out["occurring_classes"] = None if distinct == out["classes"] - int(low) else distinct
    return out


def stated(samples: PartySamples, statement: DataStatement | None = None) -> PartySamples:
    """The samples as the statement says, by default the one that they suggest.

    A DataError for the owner if the samples contradict it; the message may quote them.
    """
    if statement is None:
        statement = proposed(samples)
    else:
        _check(samples, statement)
    train, test = (None if rows is None else TableRows(*rows) for rows in (samples.train, samples.test))
    made = []
    tables, words = samples.tables or (None, None), missing_words(statement.words)
    for rows, table in zip((train, test), tables, strict=True):
        if rows is not None and table is not None:
            rows = rows._replace(x=_features(_coded(table, statement.columns, words), statement))
        elif rows is not None:
            rows = rows._replace(x=aligned(rows.x, samples.header, statement.header, ""))
        made.append(rows if rows is None else _as_given(rows._replace(y=_typed(rows.y, statement))))
    assert made[0] is not None
    return samples._replace(train=made[0], test=made[1], header=statement.header or samples.header,
                            kinds=statement.kinds if samples.kinds else (), statement=statement)  # fmt: skip


def _check(samples: PartySamples, statement: DataStatement) -> None:
    """Raise a DataError if samples contradict a statement."""
    sets = _sets(samples)
    x, targets = sets[0].x, [rows.y for rows in sets if rows.y is not None and rows.y.numel()]

    def differs(name: str, own: Any) -> None:
        if own != getattr(statement, name):
            raise DataError(
                f"{AGAINST}{name} is {_plain(getattr(statement, name))}, and the data have {_plain(own)}; correct the "
                f"data, {f'the option {OPTIONS[name]} of hansa join, ' if name in OPTIONS else ''}or the table"
            )

    why = differing(samples.header, statement.header) if samples.header and statement.header else None
    if why is not None:
        raise DataError(f"{AGAINST}{why.replace('of most parties', 'of the table').partition('; all parties')[0]}")
    if bool(samples.header[1:]) != bool(statement.columns):
        differs("columns", dict.fromkeys(samples.header[1:], "number"))
    for rows in sets:
        if tuple(rows.x.shape[1:]) != statement.shape:
            differs("shape", tuple(rows.x.shape[1:]))
    differs("features", _kind_of(x))
    differs("tests", samples.test is not None)
    differs("ids", all(rows.ids is not None for rows in sets))
    differs("weights", sets[0].weights is not None)
    differs("labels", tuple(samples.labels))
    if samples.tables is not None:
        words = missing_words(statement.words)
        with _contradictions():
            coded = [_coded(table, statement.columns, words) for table in samples.tables if table is not None]
        missing = any(bool(rows.isnan().any()) for rows in coded)
    else:
        with _contradictions():
            missing = any([_check_finite(rows.x) for rows in sets])
    if missing and not statement.missing:
        raise DataError(f"{AGAINST}missing is false, and some features are missing; correct the data, or the table")
    if (sets[0].y is None) != (statement.targets == "none"):
        differs("targets", "none" if sets[0].y is None else "labels")
    for y in targets:
        _check_stated_targets(y, statement)


def _check_stated_targets(y: Tensor, statement: DataStatement) -> None:
    """Raise a DataError if targets contradict a statement."""

    def wrong(stated: str, found: str) -> DataError:
        return DataError(f"{AGAINST}{stated}, and {found}; correct the data, or the table")

    with _contradictions():
        _check_targets_finite(y)
    if statement.targets == "empty":
        raise wrong("targets is 'empty'", "there are samples")
    if tuple(y.shape[1:]) != statement.target_shape:
        raise wrong(f"target_shape is {list(statement.target_shape)}", f"a target has the shape {list(y.shape[1:])}")
    whole = not y.is_floating_point() or torch.equal(y, y.round())
    if statement.targets in ("classes", "whole") and not whole:
        raise wrong(f"targets is {statement.targets!r}", "some targets are not whole numbers")
    if statement.classes is not None:
        low, high = float(y.min()), float(y.max())
        if not whole or low < statement.lowest_class or high >= statement.classes:
            numbers = f"{low:g}..{high:g}" if whole else "some that are not whole numbers"
            raise wrong(f"classes is {statement.classes} (from {statement.lowest_class})", f"the targets are {numbers}")
    if statement.unit and not bool(((y >= 0) & (y <= 1)).all()):
        raise wrong("unit is true", "some targets lie outside 0..1")
    if not statement.one_hot and statement.classes is not None and y.dim() == 2 and looks_one_hot(y):
        raise wrong("one_hot is false", "the targets look one-hot")


@contextlib.contextmanager
def _contradictions() -> Iterator[None]:
    try:
        yield
    except DataError as error:
        raise DataError(f"{AGAINST}{error}") from None


def _sets(samples: PartySamples) -> list[TableRows]:
    return [TableRows(*rows) for rows in (samples.train, samples.test) if rows is not None]


def _kind_of(x: Features) -> str:
    return "real" if x.is_floating_point() else "bytes" if x.dtype == torch.uint8 else "whole"


def _check_finite(x: Features) -> bool:
    """Whether features are missing; a DataError if some are infinite."""
    first, missing = 0, False
    for block in blocks(x) if x.is_floating_point() else ():
        check_features(block, "its samples", True, lambda row, first=first: f" of row {first + row}")  # type: ignore[misc]
        missing = missing or bool(block.isnan().any())
        first += len(block)
    return missing


def _check_targets_finite(y: Tensor) -> None:
    if y.is_floating_point() and not bool(torch.isfinite(y).all()):
        raise DataError("targets are NaN or infinite; leave those samples out")


def _coded(table: Table, columns: Mapping[str, str], words: frozenset[str]) -> Tensor:
    """A table's rows in the stated kinds; a DataError that quotes a cell of another kind."""
    kinds = {name: "number" if kind == "empty" else kind for name, kind in columns.items()}
    return table.coded(TableLayout(tuple(kinds.items())), words)[0]  # type: ignore[arg-type]


def _features(coded: Tensor, statement: DataStatement) -> Tensor:
    """The columns of numbers in float32, and NaN in place of texts and dates."""
    others = [k for k, kind in enumerate(statement.kinds) if kind in ("text", "date")]
    coded[:, others] = torch.nan
    return clamped(coded, torch.float32)


def _typed(y: Tensor | None, statement: DataStatement) -> Tensor | None:
    """Targets as numbers or as whole numbers, whatever the values of this file suggest."""
    if y is None or statement.targets == "empty" or y.is_floating_point() == (statement.targets == "numbers"):
        return y
    return y.float() if statement.targets == "numbers" else y.to(torch.int64)


def _as_given(rows: TableRows) -> StoredSamples | TableRows:
    """Rows with normalised ids; a plain pair if there are neither ids nor weights."""
    if rows.ids is not None:
        return rows._replace(ids=ids_of(rows.ids, len(rows.x), "the ids of its rows"))
    return rows if rows.weights is not None or rows.y is None else (rows.x, rows.y)


# ---- against a task --------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def told() -> Iterator[None]:
    """Decide from a task and from declarations alone: what is wrong may be told in full."""
    try:
        with before_reading():
            yield
    except (AttributeError, LookupError, TypeError, ValueError, ArithmeticError, RuntimeError, MemoryError) as error:
        # perhaps of the owner's own model, or one that does not fit into memory
        log.exception("the party cannot make the task")
        raise NotAdmitted(f"malformed task ({type(error).__name__}); see the party's log") from None


def check_task(statement: DataStatement, number: int, task: Mapping[str, Any], objective: Objective,
               dtype: torch.dtype) -> None:  # fmt: skip
    """Raise a NotAdmitted if a task does not fit the statement. `dtype` is the type of the features as they are stored.

    Only the statement and the task are read.
    """
    classes = task.get("classes")
    if classes is not None and (isinstance(classes, bool) or not isinstance(classes, int)):
        raise NotAdmitted(f"malformed task: classes must be a whole number, got {classes!r:.40}")
    if statement.weights and ("shapes" in task or task.get("weighs") is False):
        raise NotAdmitted("its samples have weights (hansa join --weights), which this job's method does not use")
    if "shapes" in task:
        _check_columns(statement, number, task)
    else:
        if statement.targets == "none":
            raise NotAdmitted("it has no labels, and this job trains on parties with the same columns and labels")
        if "table" in task:
            _check_table(statement, task["table"])
        else:
            _check_rows(statement, task)
    _check_targets(statement, task, objective)
    if "shapes" in task:
        return
    unprepared = "table" not in task and not task["prepared"]
    whole = unprepared and statement.features == "whole" and objective.module is not None
    shape = tuple(task["shape"])
    sample = torch.zeros(1, *shape, dtype=dtype if whole else objective.dtype, device=objective.device)
    if whole:
        check_whole_features(objective, sample, "data")
    check_outputs(objective, sample, classes if statement.classes is None else statement.classes)
    if statement.one_hot and objective.loss == "cross_entropy":
        output = None if objective.module is None else output_of(objective.module, sample)
        if not isinstance(output, Tensor) or output.shape[:-1].numel() != statement.target_shape[0]:
            raise NotAdmitted("its targets look one-hot, and this job needs the class number of each sample")


def _check_rows(statement: DataStatement, task: Mapping[str, Any]) -> None:
    for column, kind in statement.columns.items():
        if kind in ("text", "date"):
            raise NotAdmitted(f"its column {column[:40]!r} holds {kind}s; set task.prepare = 'table'")
    header = tuple(task.get("header", ()))
    why = differing(statement.header, header) if statement.header and header else None
    if why is not None:
        raise NotAdmitted(why)
    shape = tuple(task["shape"])
    if statement.shape != shape:
        raise NotAdmitted(f"its samples have the shape {statement.shape}, those of the job {shape}")
    _check_missing(statement, task)


def _check_missing(statement: DataStatement, task: Mapping[str, Any]) -> None:
    if statement.missing and not task["prepared"]:
        raise NotAdmitted("its features have missing values; set task.prepare = 'standardise'")


def _check_table(statement: DataStatement, tree: Any) -> None:
    if not isinstance(tree, dict) or not all(isinstance(tree.get(name), list) for name in ("missing", "labels")):
        raise NotAdmitted(
            "malformed task: expected the columns of a table, the words for a missing value, and the names of classes"
        )
    if statement.labels and tree["labels"] and tree["labels"] != list(statement.labels):
        raise NotAdmitted(
            "its classes (hansa join --labels) have other names, or another order, than task.labels of the job; both "
            "must be the same"
        )
    for name, kind in TableLayout.of(tree.get("columns")).columns:
        own = statement.columns.get(name)
        if own not in (kind, "empty") and (own is None or kind != "text"):
            why = "is missing" if own is None else f"does not hold {kind}s"
            raise NotAdmitted(f"its column {name[:40]!r} {why}, and the job's table has it")


def _check_columns(statement: DataStatement, number: int, task: Mapping[str, Any]) -> None:
    shapes = task["shapes"]
    if not isinstance(shapes, list) or not 0 <= number < len(shapes):
        raise NotAdmitted("malformed task: expected the shape of the samples of each party")
    if not statement.ids:
        raise NotAdmitted("its rows have no ids, and this job matches parties with different columns by them")
    if shapes[number] is None:
        raise NotAdmitted("it had not described its columns when the job began, so it cannot take part")
    if shapes[number] != list(statement.shape):
        raise NotAdmitted(f"its samples have the shape {statement.shape}, and it described others to the job")
    _check_missing(statement, task)


def _check_targets(statement: DataStatement, task: Mapping[str, Any], objective: Objective) -> None:
    why = statement.refuses_loss(objective.loss) if isinstance(objective.loss, str) else None
    if why is not None:
        raise NotAdmitted(why)
    classes, known = task.get("classes"), statement.classes
    whole = statement.targets in ("classes", "whole")
    numbered = objective.loss == "cross_entropy" or (whole and is_function(objective.loss))
    if classes is None or statement.targets in ("none", "empty") or not numbered:
        return
    if known is None or known > classes:
        others = "whole numbers that are no classes" if known is None else f"{known} classes"
        raise NotAdmitted(f"its targets must lie in 0..{classes - 1}, and it states {others} (classes in party.toml)")


# ---- party.toml ------------------------------------------------------------------------------------------------------


def add_table(path: Path, statement: DataStatement) -> None:
    """Add a statement to `party.toml`, for the owner to check."""
    try:
        disk.append(path, table_of(statement).encode())
        disk.flush(path)
    except OSError as error:
        log.warning(
            "cannot add the table [data] to %s: %s; without it, each start derives from the data what is told of them",
            path, error.strerror,
        )  # fmt: skip
    else:
        log.info("party.toml has a new table [data], which states what is told of the data; please check it")


def table_of(statement: DataStatement) -> str:
    """The statement as the table `[data]` of a TOML file."""
    lines, fresh = [], DataStatement(statement.shape, "none" if statement.targets != "none" else "empty")
    for field in dataclasses.fields(statement):
        value = getattr(statement, field.name)
        if field.name == "columns" or value is None:
            continue
        needed = field.name in ALWAYS or value != getattr(fresh, field.name)
        if needed or (field.name == "words" and statement.columns):
            comment = f"  # {COMMENTS[field.name]}" if field.name in COMMENTS else ""
            lines.append(f"{field.name} = {_plain(value)}{comment}")
    if statement.columns:
        lines += ["", "[data.columns]     # number, text, date, or empty (no value is known)"]
        lines += [f"{_text(name)} = {_text(kind)}" for name, kind in statement.columns.items()]
    return HEAD + "\n".join(lines) + "\n"


def facts(statement: DataStatement) -> dict[str, Any]:
    """The statement as fields of a log line, for the owner."""
    tree = {field.name: getattr(statement, field.name) for field in dataclasses.fields(statement)}
    if len(statement.columns) > SHOWN:
        tree["columns"] = f"the names and kinds of {len(statement.columns)} columns"
    return {name: value for name, value in tree.items() if value not in (None, "", (), {}, False)}


def _plain(value: Any) -> str:
    """A value as TOML has it."""
    if isinstance(value, (tuple, list)):
        return f"[{', '.join(map(_plain, value))}]"
    if isinstance(value, Mapping):
        return f"{{ {', '.join(f'{_text(k)} = {_plain(v)}' for k, v in value.items())} }}"
    return str(value).lower() if isinstance(value, bool) else str(value) if isinstance(value, int) else _text(value)


def _text(value: Any) -> str:
    """A string as TOML has it."""
    text = str(value).encode("utf-8", "replace").decode()
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
