"""The first question of a job: what do the parties' data look like, and do they fit together?"""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hansa.core.ask import Gathered
from hansa.core.columns import ColumnLayout
from hansa.core.driver import drive
from hansa.core.federation import Federation
from hansa.core.op import Payload
from hansa.core.round_record import Record, without_numbers
from hansa.core.runtime import Attend, Open, Request
from hansa.data.column_transformer import ColumnTransformer
from hansa.data.describe import COLUMNS, Describe, Description, agreed, agreed_columns
from hansa.data.table import agreed_layout
from hansa.experiment.config import Experiment
from hansa.holdings.table_layout import TableLayout
from hansa.net.aggregator.runtime import NetworkRuntime
from hansa.plumbing.errors import DataError, RoundAborted


@dataclass(frozen=True)
class DescribedData:
    """What the parties' data have in common, None where no party takes part; by name, why other parties do not take
    part; the numbers of the parties with test samples of their own; who holds what, over columns; and the columns of
    the parties' tables, if they are prepared as tables."""

    common: Description | None
    reasons: Mapping[str, str]
    tested: Sequence[int]
    layout: ColumnLayout | None = None
    table: TableLayout | None = None


def describe(runtime: NetworkRuntime, experiment: Experiment, loss: str | None, classes: int | None,
             header: tuple[str, ...],
             own: TableLayout | None = None) -> Generator[Request, Any, DescribedData]:  # fmt: skip
    """Ask all parties to describe their data. Parties that refuse, or whose data do not fit, are not asked again.

    The loss, the number of classes and the columns' names (`header`) are given where they are known. `own` is the
    layout of the aggregator's own table, which decides the kinds of its columns.
    """
    record, names = Record(), runtime.parties
    columns = experiment.algorithm.data == "columns"
    op = Describe(loss or ("cross_entropy" if classes else None))
    answers = yield from _answers(runtime, experiment, record, op, COLUMNS if columns else {})
    descriptions = dict[str, Description]()
    for party, reply in zip(answers.parties, answers.replies, strict=True) if answers is not None else ():
        try:
            descriptions[names[party]] = Description.of(reply)
        except DataError as error:
            record.rejected[party] = str(error)
    prepare = experiment.task.prepare
    tables = isinstance(prepare, ColumnTransformer)
    common, unfit, table = None, dict[str, str](), None
    if descriptions and columns:
        common, unfit = agreed_columns(descriptions, classes)
    elif descriptions:
        common, unfit = agreed(descriptions, classes, prepare is not None, header, tables)
    if common is not None and isinstance(prepare, ColumnTransformer):
        table, odd = _table({name: one for name, one in descriptions.items() if name not in unfit}, prepare, own)
        unfit |= odd
    record.rejected |= {party: unfit[name] for party, name in enumerate(names) if name in unfit}
    if experiment.run.min_cohort > 1:  # as in a round: no number about a single party
        record.rejected = {party: without_numbers(why) for party, why in record.rejected.items()}
    runtime.refused |= set(record.rejected)
    with_tests = {name for name, description in descriptions.items() if description.tests}
    tested = [p for p, name in enumerate(names) if p not in record.rejected and name in with_tests]
    reasons = {names[p]: why for p, why in (record.missing | record.rejected).items()}
    taking = {
        p: descriptions[name] for p, name in enumerate(names) if name in descriptions and p not in record.rejected
    }
    return DescribedData(common, reasons, tested, _layout(taking, len(names)) if columns else None, table)


def _table(descriptions: Mapping[str, Description], prepare: ColumnTransformer,
           own: TableLayout | None) -> tuple[TableLayout, dict[str, str]]:  # fmt: skip
    """The layout of the parties' tables, and why parties with other kinds of columns are left out."""
    declared, dropped = prepare.kinds()
    guesses = {name: dict(zip(one.header[1:], one.kinds, strict=True)) for name, one in descriptions.items()
               if one.kind != "none"}  # fmt: skip
    columns = list(next(iter(guesses.values())))
    kept = {*prepare.kept(columns), *dropped}
    known = {} if own is None else {name: kind for name, kind in own.columns if name in kept}
    return agreed_layout(guesses, {**known, **declared}, [*dropped, *(name for name in columns if name not in kept)])  # type: ignore[arg-type]


def _layout(descriptions: Mapping[int, Description], count: int) -> ColumnLayout:
    """Who holds what, by party number."""
    shapes = tuple(descriptions[party].shape if party in descriptions else None for party in range(count))
    return ColumnLayout(shapes, tuple(p for p, one in sorted(descriptions.items()) if one.kind != "none"))


def _answers(runtime: NetworkRuntime, experiment: Experiment, record: Record,
             op: Describe, payload: Payload) -> Generator[Request, Any, Gathered | None]:  # fmt: skip
    """Ask until a party answers; None where all refuse."""
    count = len(runtime.parties)
    fed = Federation(range(count), 0, experiment.run.seed, count, phase="describe")

    async def ask() -> Gathered:
        asked = [party for party in fed.parties if party not in runtime.refused]  # a refusal is final
        return await fed.gather(op, payload, parties=asked)

    answers: Gathered | None = None
    attempt = 0
    while True:
        attempt += 1
        yield Open(0, record)
        with contextlib.suppress(RoundAborted):
            answers = yield from drive(ask(), "describe")
        if answers is not None or len(runtime.refused | set(record.rejected)) == count:
            return answers
        record.missing.clear()  # no party answers at present: wait, as for the parties of a round
        yield Attend(0, 1, f"begin-{attempt}")
