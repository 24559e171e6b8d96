"""Sensitivity as a test: one record changes the sum of every op with a budget by at most what the op books.

Requests are random, within the declarations; neighbouring data lack a record, or have another one in its place; the
noise is off.
"""

from __future__ import annotations

from typing import Any

import pytest
from interfere import UNSENDABLE, Case, Pair, names
from releases import BUDGETED, Watch, watched
from twin_requests import PURE, Request, make, seeds, with_solver

from hansa.core.ask import op_config, op_of
from hansa.local import DPSGD
from hansa.plumbing.errors import HansaError

NEIGHBOURS = (("removed", 1), ("x1e3", 2), ("label", 2), ("x1e300", 2), ("x0", 2))  # and records that differ
EVERY = DPSGD(lr=0.5, steps=2, batch=None, sigma=1.0)  # of all samples: then a record that is missing changes no draw


def budgeted(name: str) -> dict[str, Any] | None:
    """A valid op of this name with a budget; None if the op has none, even around a private solver."""
    for config, _ in seeds()[name]:
        try:
            op = op_of(with_solver(config, op_config(EVERY)), where="test")
        except HansaError:  # it has another kind of op inside
            continue
        if op.name == name and op.budget is not None and not op.name.startswith("secure-"):
            return op_config(op)
    return None


def moved(name: str, numbers: range) -> tuple[int, float]:
    """The sums that were released, and the most by which a record changed one, in units of what the op books."""
    sums, most = 0, 0.0
    for number in numbers:
        variant, records = NEIGHBOURS[number % len(NEIGHBOURS)]
        request: Request = make(name, "dp", PURE + number if number else 0)
        request.op = request.op if name in BUDGETED and number else budgeted(name) or request.op
        request.variant, request.again, request.sum = variant, [], ""
        with watched(), Pair("dp", request.kind, variant, records) as pair:
            try:
                pair.send(request, Case(request), "job-1")
            except UNSENDABLE:
                continue
        sums += len(Watch.tape.sums)
        most = max(most, Watch.tape.moved / records)
    return sums, most


@pytest.fixture(scope="module")
def private() -> list[str]:
    return [name for name in names() if budgeted(name) is not None]


def test_no_record_changes_a_sum_by_more_than_its_sensitivity(private: list[str]) -> None:
    assert {"dp-sgd", "private-histograms", "ditto"} <= set(private)
    for name in private:
        sums, most = moved(name, range(3))
        assert sums and most <= 1 + 1e-9, (name, sums, most)


@pytest.mark.slow
def test_no_record_changes_a_sum_by_more_than_its_sensitivity_in_many_requests(private: list[str]) -> None:
    for name in private:
        sums, most = moved(name, range(20))
        assert sums and most <= 1 + 1e-9, (name, sums, most)
