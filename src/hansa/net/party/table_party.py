"""The party of a job over tables."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hansa.core.augment import check_augment
from hansa.core.errors import DataError, PartyError
from hansa.core.fitting import check_outputs, fit_targets
from hansa.core.gateway import SampleGateway, Samples, TableRows
from hansa.core.objective import Objective
from hansa.core.op import Party
from hansa.core.public import public_of
from hansa.core.table_layout import TableLayout
from hansa.core.task import Known
from hansa.core.weights import Weighting
from hansa.data.cells import missing_words
from hansa.data.table import Table
from hansa.experiment.tasks import hold_out_one, make_augment

log = logging.getLogger("hansa.net")


def table_party(number: int, task: dict[str, Any], objective: Objective, y: Tensor, test_y: Tensor | None,
                tables: tuple[Table, Table | None] | None, labels: Sequence[str],
                weights: Tensor | None = None) -> Party:  # fmt: skip
    """The party of a job over tables: its rows are coded as the job's layout says, until they are prepared.

    A PartyError names a column that is missing or of another kind, without a value of it. `labels` are the classes of
    the party's targets, if they are texts: a job that numbers other classes is refused. `weights` are those of the
    training samples in the loss.
    """
    if tables is None:
        raise PartyError("its samples are no table with named columns, which this job prepares")
    tree = task["table"]
    if not isinstance(tree, dict) or not all(isinstance(tree.get(name), list) for name in ("missing", "labels")):
        raise DataError(
            "malformed task: expected the columns of a table, the words for a missing value, and the names of classes"
        )
    if labels and tree["labels"] and tree["labels"] != list(labels):
        raise PartyError(
            "its classes (hansa join --labels) have other names, or another order, than task.labels of the job; both "
            "must be the same"
        )
    layout, words = TableLayout.of(tree.get("columns")), missing_words(map(str, tree["missing"]))
    coded = [None if table is None else _coded(table, layout, words) for table in tables]
    assert coded[0] is not None
    pair, held_out = (coded[0][0], y), None
    if coded[1] is not None and test_y is not None:
        held_out = (coded[1][0], test_y)
    elif task["party_test"] > 0:
        split = task["party_test"], task["seed"], number
        pair, held_out = hold_out_one(pair, *split)
        weights = None if weights is None else hold_out_one((weights, weights), *split)[0][0]
    known, dtype = Known(1, None, tuple(task["shape"]), task["classes"]), None
    if objective.module is None:
        dtype = torch.float64  # as the features will be

    def fitted_pair(pair: Samples, where: str, targets: str) -> Samples:
        targets_here = fit_targets(pair[1], objective, where, dtype=dtype)
        known.check_targets(targets_here, targets, tell=False)
        return pair[0], targets_here.to(objective.device)

    held = fitted_pair(pair, "data", "its ")
    own = None if held_out is None else fitted_pair(held_out, "test data", "of its test samples, the ")
    if objective.module is not None:
        sample = torch.zeros(1, *known.shape, dtype=objective.dtype, device=objective.device)
        check_outputs(objective, sample, task["classes"])
    augment = make_augment(task.get("augment"), os.getcwd())
    if augment is not None:
        check_augment(augment, torch.zeros(1, *known.shape, dtype=objective.dtype, device=objective.device))
    public = known.publish(*public_of(task["public"]), objective, False) if "public" in task else None
    texts = {code: text for one in coded if one is not None for code, text in one[1].items()}
    table = TableLayout(layout.columns, texts)
    if weights is not None:
        objective.weighting = Weighting.of(held[1])
        weights = weights.to(objective.device)
    gateway = SampleGateway(TableRows(*held, None, weights), own, table=table)
    return Party(number, objective, gateway, task["seed"], public=public, augment=augment)


def _coded(table: Table, layout: TableLayout, words: frozenset[str]) -> tuple[Tensor, dict[int, str]]:
    """The coded rows of a table; a PartyError that names the first column that does not fit, and no value."""
    try:
        return table.coded(layout, words)
    except DataError as error:
        log.warning("the job's table does not fit: %s", error)
    for name, kind in layout.columns:
        try:
            table.coded(TableLayout(((name, kind),)), words)
        except DataError:
            why = f"does not hold {kind}s" if name in table.columns else "is missing"
            raise PartyError(f"its column {name[:40]!r} {why}, and the job's table has it") from None
    raise PartyError("its table does not have the columns of the job's table")
