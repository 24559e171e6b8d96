"""Learn the preparation of a simulated table before the run starts: it decides how many features the model takes."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

from hansa.core.algorithm import Algorithm
from hansa.core.federation import SumProtocol
from hansa.core.registry import Part
from hansa.core.runtime import complete
from hansa.core.task import Holdings, Task
from hansa.data.apply_table import TablePlan
from hansa.data.column_transformer import ColumnTransformer
from hansa.data.table_tasks import coded_task, column_count
from hansa.experiment.rules import Facts, check
from hansa.experiment.settings import Run
from hansa.numerics.objective import Objective
from hansa.plumbing.errors import ConfigError
from hansa.plumbing.functions import double
from hansa.privacy import Privacy
from hansa.run.exchanges import Exchanges
from hansa.run.preparation import PreparationLearner, PreparedTable
from hansa.sim.engine import ReferenceEngine
from hansa.sim.runtime import Simulation


def prepare_table(algorithm: Algorithm, task: Task, run: Run, privacy: Privacy,
                  protocol: SumProtocol | None) -> tuple[Task, PreparedTable | None]:  # fmt: skip
    """The task with features in place of a table's rows, and the preparation that was learned.

    A task without a table is returned unchanged. The parties answer as in the run, one at a time.
    """
    if not isinstance(task.prepare, ColumnTransformer):
        if task.table is not None:
            raise ConfigError("the samples are rows of a table; set task.prepare = 'table' (hansa.ColumnTransformer())")
        return task, None
    before = column_count(task)
    task = coded_task(task)
    assert task.table is not None and isinstance(task.prepare, ColumnTransformer)
    if asked := task.prepare.asks(task.table):
        check(Facts(algorithm=algorithm, run=run, privacy=privacy, sums=", ".join(asked[:5])))
    objective = Objective(None, task.loss, run.seed)
    holdings = Holdings(dataclasses.replace(task, model=None, models=None, assigned=None), objective)
    clock = run.clock(holdings)
    runtime = Simulation(ReferenceEngine(objective, holdings, run.seed), run.rules(), clock)
    exchanges = Exchanges(run, holdings, run.size(len(holdings)), protocol or privacy.protocol, b"", None)
    prepared = complete(PreparationLearner(task.prepare, exchanges).learn_table(0), runtime.answer)
    columns, width = {before, len(task.table.columns)}, holdings.train.x.shape[1]
    names = TablePlan.of(prepared.learned[1]).names
    tests, public = holdings.tests, holdings.public
    return dataclasses.replace(
        task,
        model=sized(task.model, columns, width),
        models=None if task.models is None else {n: sized(m, columns, width) for n, m in task.models.items()},
        parties=(holdings.train.x, holdings.train.y, holdings.train.offsets),
        party_tests=None if tests is None else (tests.x, tests.y, tests.offsets),
        test=prepared.samples(holdings.test),
        trusted=prepared.samples(holdings.trusted),
        public=None if public is None else public.x if public.y is None else (public.x, public.y),
        prepare=None,
        table=None,
        header=(task.header[0] if task.header else "", *names),
    ), dataclasses.replace(prepared, seconds=clock.now)


def sized(model: Any, columns: set[int], width: int) -> Any:
    """A registered model for features in place of a table's columns; any other function is returned unchanged.

    `columns` are the numbers of columns that the model may have been made for: of all, and of those that are kept.
    """
    if isinstance(model, functools.partial) and model.func is double:
        return functools.partial(double, sized(model.args[0], columns, width))
    if isinstance(model, Part) and getattr(model, "inputs", None) in {(count,) for count in columns}:
        return dataclasses.replace(model, inputs=(width,))  # type: ignore[type-var]
    return model
