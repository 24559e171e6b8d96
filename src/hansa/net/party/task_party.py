"""The party that a task makes of samples: admitted by what the party states about them, then built without a refusal.

After a task was admitted, no step depends on whether a value fits: numbers that are too large are clamped.
"""

from __future__ import annotations

import functools
import logging
import os
import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from hansa.core.op import Party
from hansa.core.registry import Part
from hansa.core.task import Known
from hansa.data.cells import missing_words
from hansa.data.party_files import aligned
from hansa.data.table import Table
from hansa.experiment.column_tasks import DTYPES, hold_out_people
from hansa.experiment.tasks import hold_out_one, make_augment, make_model
from hansa.holdings.augment import Augment, check_augment
from hansa.holdings.fitting import clamped, typed_samples, typed_targets
from hansa.holdings.gateway import SampleGateway, StoredSamples, TableRows
from hansa.holdings.public import PublicSamples, public_of
from hansa.holdings.stored_rows import whole
from hansa.holdings.table_layout import TableLayout
from hansa.net.party.data_statement import check_task, told
from hansa.numerics.objective import Objective, count_numbers
from hansa.numerics.params import short
from hansa.numerics.weights import Weighting
from hansa.plumbing.errors import DataError, NotAdmitted

if TYPE_CHECKING:
    from hansa.net.party.samples import PartySamples

log = logging.getLogger("hansa.net")
Task = Mapping[str, Any]


def task_model(task: Mapping[str, Any]) -> Callable[[], nn.Module] | None:
    """The function that makes the model of a task."""
    return make_model(task["model"], task["dtype"], os.getcwd(), tuple(task["shape"]), task["outputs"])


def task_objective(task: Mapping[str, Any], device: str, parameters: int | None = None) -> Objective:
    """The objective of a task; a NotAdmitted if its model is too large, or has another base than the aggregator's."""
    model = task_model(task)
    inner = model.args[0] if isinstance(model, functools.partial) and model.args else model
    sized = isinstance(inner, Part)  # its fields are the job's choice; a function takes none from a job
    if model is not None and parameters is not None and sized:
        size = count_numbers(model)
        if size > parameters:
            raise NotAdmitted(
                f"its policy allows models of at most {parameters} parameters (limits.parameters in party.toml), "
                f"and this one has {size}"
            )
    objective, base = Objective(model, task["loss"], task["seed"], device, task["bf16"]), task.get("base")
    if base is not None and not (isinstance(base, str) and re.fullmatch("[0-9a-f]{64}", base)):
        raise DataError("malformed task: base must be the SHA-256 of the model's frozen parameters")
    if objective.base != base:
        name = task["model"]["name"] if isinstance(task["model"], dict) else task["model"]
        raise NotAdmitted(
            f"its frozen parameters of the model {name!r} have the SHA-256 {short(objective.base)}, and those of the "
            f"job {short(base)}; both must make the model from the same base"
        )
    return objective


class Admitted(NamedTuple):
    """What follows from a task alone."""

    objective: Objective
    public: PublicSamples | None = None
    augment: Augment | None = None


def make_party(samples: PartySamples, parameters: int | None, number: int, task: dict[str, Any], device: str) -> Party:
    """The party of a task; a NotAdmitted if the task does not fit what the party states about its samples."""
    if not task:  # there is no task yet: this party can only describe its data
        gateway = SampleGateway(samples.train, samples.test, samples.header, kinds=samples.kinds)
        party = Party(number, Objective(None, "mse", 0), gateway, 0)
    else:
        with told():
            objective, public, augment = _admit(samples, parameters, number, task, device)
        make = _column_gateway if "shapes" in task else _table_gateway if "table" in task else _row_gateway
        gateway = make(samples, number, task, objective)
        party = Party(number, objective, gateway, task["seed"], public=public, augment=augment)
    party.data.stated = samples.statement
    return party


def _admit(samples: PartySamples, parameters: int | None, number: int, task: Task, device: str) -> Admitted:
    """Compare a task with the statement; no sample is read."""
    statement = samples.statement
    assert statement is not None
    if "shapes" in task:
        if task["dtype"] not in DTYPES:
            raise DataError(f"task.dtype must be one of {', '.join(DTYPES)}, got {task['dtype']!r:.40}")
        objective = Objective(None, task["loss"], task["seed"], device, task["bf16"])
        check_task(statement, number, task, objective, samples.train[0].dtype)
        return Admitted(objective)
    objective = task_objective(task, device, parameters)
    if "table" in task and samples.tables is None:
        raise NotAdmitted("its samples are no table with named columns, which this job prepares")
    like = samples.train[0].dtype
    check_task(statement, number, task, objective, like)
    shape, prepared = tuple(task["shape"]), task["prepared"] and "table" not in task
    known = Known(1, None, shape, task["classes"])
    public = known.publish(*public_of(task["public"]), objective, prepared) if "public" in task else None
    augment = make_augment(task.get("augment"), os.getcwd())
    if augment is not None:
        row = torch.zeros(1, *shape, dtype=objective.dtype if "table" in task else like)
        check_augment(augment, typed_samples(row, torch.zeros(1), objective, prepared)[0])
    return Admitted(objective, public, augment)


def _row_gateway(samples: PartySamples, number: int, task: Task, objective: Objective) -> SampleGateway:
    """The samples of a party of a job over rows."""
    wanted = tuple(task.get("header", ()))

    def in_order(rows: StoredSamples | TableRows) -> TableRows:
        rows = TableRows(*rows)
        return rows._replace(x=aligned(rows.x, samples.header, wanted, ""))

    train, test = in_order(samples.train), None if samples.test is None else in_order(samples.test)
    train, test = _held_out(train, test, task, number)

    def typed(rows: TableRows) -> TableRows:
        x, y = typed_samples(rows.x, _labels(rows), objective, task["prepared"])
        return rows._replace(x=x, y=y)

    names = wanted if len(wanted) > 1 else samples.header
    return _weighted(typed(train), test and typed(test), objective, names)


def _table_gateway(samples: PartySamples, number: int, task: Task, objective: Objective) -> SampleGateway:
    """The samples of a party of a job over tables: coded rows, until they are prepared."""
    assert samples.tables is not None and samples.statement is not None
    words, test = samples.statement.words, None if samples.test is None else TableRows(*samples.test)
    train, test, layout = _coded_rows(samples.tables, TableRows(*samples.train), test, task["table"], words)
    train, test = _held_out(train, test, task, number)
    dtype = torch.float64 if objective.module is None else None  # as the features will be

    def typed(rows: TableRows) -> TableRows:
        return rows._replace(y=typed_targets(_labels(rows), objective, dtype).to(objective.device))

    out = _weighted(typed(train), test and typed(test), objective, ())
    out.table = layout
    return out


def _coded_rows(tables: tuple[Table, Table | None], train: TableRows, test: TableRows | None, tree: Mapping[str, Any],
               missing: Sequence[str]) -> tuple[TableRows, TableRows | None, TableLayout]:  # fmt: skip
    """Training and test rows with their tables as codes, and the layout with the texts of all codes.

    The owner's words stand for a missing value (`missing`), whatever the words of the job: compared with cells, words
    of the aggregator's choice would be questions about values.
    """
    layout, words = TableLayout.of(tree["columns"]), missing_words(missing)
    if missing_words(map(str, tree["missing"])) != words:
        log.info("the job has other words for a missing value than party.toml; those of party.toml count")
    texts: dict[int, str] = {}

    def coded(rows: TableRows, table: Table) -> TableRows:
        x, own = table.coded(layout, words)
        texts.update(own)
        return rows._replace(x=x)

    held = coded(train, tables[0])
    own = None if test is None or tables[1] is None else coded(test, tables[1])
    return held, own, TableLayout(layout.columns, texts)


def _column_gateway(samples: PartySamples, number: int, task: Task, objective: Objective) -> SampleGateway:
    """The samples of a party of a job over columns."""
    rows, tests = TableRows(*samples.train), None if samples.test is None else TableRows(*samples.test)
    if task["party_test"] > 0 and tests is None:
        rows, tests = hold_out_people(rows, task["party_test"], task["seed"])

    def typed(rows: TableRows) -> TableRows:
        x = whole(rows.x)
        x = clamped(x, DTYPES[task["dtype"]]) if x.is_floating_point() else x
        y = None if rows.y is None else typed_targets(rows.y, objective).to(objective.device)
        return TableRows(x.to(objective.device), y, rows.ids)

    return SampleGateway(typed(rows), None if tests is None else typed(tests))


def _held_out(train: TableRows, test: TableRows | None, task: Task,
              number: int) -> tuple[TableRows, TableRows | None]:  # fmt: skip
    """Training and test rows; without test rows, those that the task takes out of the training rows."""
    if task["party_test"] == 0 or test is not None:
        return train, test
    split = task["party_test"], task["seed"], number
    held, own = hold_out_one((train.x, _labels(train)), *split)
    weights = train.weights
    weights = None if weights is None else hold_out_one((weights, weights), *split)[0][0]
    return TableRows(*held, None, weights), TableRows(*own)


def _weighted(train: TableRows, test: TableRows | None, objective: Objective, names: tuple[str, ...]) -> SampleGateway:
    """The gateway to samples, whose weights count in the loss."""
    if train.weights is not None:
        objective.weighting = Weighting.of(_labels(train))
    weights = None if train.weights is None else train.weights.to(objective.device)
    held = TableRows(train.x, train.y, None, weights)
    return SampleGateway(held, None if test is None else TableRows(test.x, test.y), names)


def _labels(rows: TableRows) -> torch.Tensor:
    assert rows.y is not None  # `check_task` has compared the statement
    return rows.y
