"""Whatever an aggregator sends about a table is checked by the party before it reads a row."""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from hansa.core.entries import refuses_payload, sizes_of
from hansa.core.op import Op, Party, Reply
from hansa.data.apply_table import ApplyTable, TablePlan
from hansa.data.cells import text_code
from hansa.data.table import Table
from hansa.data.table_ops import (
    TableCategories,
    TableHistogram,
    TableMagnitudes,
    TableNames,
    TableSums,
    joined_sums,
    split_sums,
)
from hansa.holdings.gateway import SampleGateway
from hansa.holdings.table_layout import TableLayout
from hansa.numerics.objective import Objective
from hansa.plumbing.errors import ConfigError, PartyError

LAYOUT = TableLayout((("age", "number"), ("city", "text"), ("seen", "date")))
ROWS = {"age": [20.0, 30.0, None], "city": ["Riga", "Köln", None], "seen": ["2020-01-01", None, "2021-02-03"]}


def party() -> Party:
    x, texts = Table.of(ROWS).coded(LAYOUT)
    gateway = SampleGateway((x, torch.zeros(3)), table=TableLayout(LAYOUT.columns, texts))
    return Party(0, Objective(None, "mse", 0), gateway, 0)


def numbers(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def whole(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


AGE = {"features": [[0, ""]]}
SUMS = {**AGE, "centre": numbers(0), "scale": numbers(64)}
CITIES = {"column": whole(1), "prefix": whole(0)}
NAMES = {"column": whole(1, 1), "prefix": whole(*sorted(text_code(text) >> 16 for text in ("Riga", "Köln")))}


def test_valid_payloads_are_answered() -> None:
    here = party()
    for op, payload in ((TableMagnitudes(), AGE), (TableSums(), SUMS), (TableNames(), NAMES)):
        assert refuses_payload(op, payload, sizes_of(here.objective.spec, here.data, {})) is None
    assert TableMagnitudes().run(party(), AGE, {})[0].tensors["counts"].sum() == 2
    assert TableSums().run(party(), SUMS, {})[0].tensors["count"].tolist() == [2]
    assert TableCategories(40, 12).run(party(), CITIES, {})[0].tensors["counts"].sum() == 2
    assert TableNames().run(party(), NAMES, {})[0].tensors["weights"].tolist() == [1, 1]


def test_sums_of_a_table_keep_their_means_where_they_are_rescaled_to_fewer_samples() -> None:
    values = torch.tensor([[-1e-30, 1e-30], [0.3, 0.1], [-700.0, 900.0], [0.0, 0.0]], dtype=torch.float64)
    reply = {"rows": torch.tensor(900), "count": torch.tensor([900, 7, 900, 0]), **split_sums(values)}
    torch.testing.assert_close(joined_sums(reply["hi"], reply["lo"]), values, rtol=1e-9, atol=0)
    less = TableSums(squares=True).rescaled(reply, 900, 300)
    means = (joined_sums(r["hi"], r["lo"]) / r["count"].clamp(min=1)[:, None] for r in (less, reply))
    torch.testing.assert_close(*means, rtol=1e-9, atol=0)
    assert less["count"].tolist() == [300, 3, 300, 0]


def test_a_secure_sum_adds_random_digits_after_the_last_one_of_each_sum() -> None:
    """Without them the sum of many large numbers shows the last digits of one party's small number."""
    values = torch.tensor([[0.25, -(2.0**-20)], [-700.0, 3 * 2.0**-60], [0.0, 0.0]], dtype=torch.float64)
    reply = {"rows": torch.tensor(9), "count": torch.tensor([9, 9, 0]), **split_sums(values)}
    covered = [TableSums(squares=True).covered(replace(party(), id=number), reply) for number in (0, 1)]
    for tensors in covered:
        torch.testing.assert_close(joined_sums(tensors["hi"], tensors["lo"]), values, rtol=2.0**-51, atol=0)
        assert not tensors["lo"][2].any() and tensors["lo"][:2, :, -1].any()
    assert not torch.equal(covered[0]["lo"], covered[1]["lo"])


def test_sums_that_their_counts_do_not_allow_are_impossible() -> None:
    values = torch.tensor([[2e9, 3.0]], dtype=torch.float64)  # a value adds at most 2 to a sum, and 4 to the squares
    reply = Reply({"rows": torch.tensor(10**9), "count": torch.tensor([1]), **split_sums(values)}, weight=10**9)
    assert "counts do not allow" in str(TableSums(squares=True).impossible(reply, SUMS))
    honest = TableSums(squares=True).run(party(), SUMS, {})[0]
    assert TableSums(squares=True).impossible(honest, SUMS) is None


@pytest.mark.parametrize(("op", "payload"), [
    (TableMagnitudes(), {}),
    (TableMagnitudes(), {"features": [[1, ""]]}),  # a text as a number would show its code
    (TableMagnitudes(), {"features": [[2, ""]]}),
    (TableMagnitudes(), {"features": [[0, "year"]]}),
    (TableMagnitudes(), {"features": [[-1, ""]]}),
    (TableMagnitudes(), {"features": [[True, ""]]}),
    (TableMagnitudes(), {"features": [[0, ""]] * 10**5}),
    (TableSums(), {**SUMS, "scale": numbers(0)}),
    (TableSums(), {**SUMS, "scale": numbers(math.nan)}),
    (TableSums(), {**SUMS, "centre": torch.zeros(3, 1, dtype=torch.float64)}),  # one number per row
    (TableHistogram(), {**AGE, "low": numbers(1), "high": numbers(1)}),
    (TableHistogram(), {**AGE, "low": numbers(0), "high": numbers(math.inf)}),
    (TableCategories(41, 12), CITIES),  # more bits than a code has
    (TableCategories(40, 12), {"column": whole(0), "prefix": whole(0)}),
    (TableCategories(40, 12), {"column": whole(1, 1), "prefix": whole(1, 0)}),
    (TableCategories(40, 12), {"column": whole(1, 1), "prefix": whole(0, 0)}),
    (TableCategories(40, 12), {"column": whole(1), "prefix": whole(-1)}),
    (TableCategories(16, 8), {"column": whole(*[1] * 5000), "prefix": torch.arange(5000)}),
    (TableNames(), {"column": whole(1), "prefix": whole(2**62)}),
    (TableNames(), {"column": [1], "prefix": [0]}),
])  # fmt: skip
def test_a_payload_that_asks_for_more_is_refused_before_a_sample_is_read(op: Op, payload: dict[str, Any]) -> None:
    here = party()
    assert refuses_payload(op, payload, sizes_of(here.objective.spec, here.data, {})) is not None


@pytest.mark.parametrize(("shift", "bits"), [(8, 12), (16, 36), (40, 0)])  # 8: finer than the names that are asked for
def test_counts_by_other_bits_than_are_answered_are_refused(shift: int, bits: int) -> None:
    with pytest.raises(ConfigError, match=r"shift must be at least 16|bits must be at least 1 and at most 12"):
        TableCategories(shift, bits)


def plan() -> dict[str, Any]:
    return {"columns": LAYOUT.tree(), "missing": ["?"], "steps": [
        {"form": "scaled", "column": 0, "part": "", "fill": 1.0, "centre": 0.0, "scale": 1.0, "bounds": [],
         "indicator": False},
        {"form": "categories", "column": 1, "categories": ["Riga"], "other": True, "fill": None, "indicator": True},
        {"form": "binned", "column": 0, "edges": [25.0], "fill": None, "indicator": False},
        {"form": "hashed", "column": 1, "buckets": 2, "fill": None, "indicator": False},
    ]}  # fmt: skip


def test_a_valid_plan_is_applied_and_its_steps_survive_a_message() -> None:
    assert TablePlan.of(plan()).tree() == plan()
    here = party()
    ApplyTable().apply(here, plan())
    x = here.data.train("train")[0]
    assert x[:, :6].tolist() == [[20, 1, 0, 0, 1, 0], [30, 0, 1, 0, 0, 1], [1, 0, 0, 1, 0, 0]]
    with pytest.raises(PartyError, match="no table"):  # features are no coded rows
        TableMagnitudes().run(here, AGE, {})


@pytest.mark.parametrize(("at", "change"), [
    (0, {"scale": 0.0}), (0, {"scale": math.nan}), (0, {"centre": [1.0, 2.0]}), (0, {"bounds": [1.0]}),
    (0, {"bounds": 5}), (0, {"column": 1}), (0, {"column": 9}), (0, {"column": "0"}), (0, {"part": "year"}),
    (0, {"form": "other"}), (0, {"more": 1}), (0, {"indicator": 1}), (1, {"column": 0}), (1, {"categories": "Riga"}),
    (1, {"categories": [1]}), (1, {"categories": ["x"] * 10**5}), (1, {"other": 1}), (1, {"fill": 3}),
    (2, {"edges": []}), (2, {"edges": [2.0, 1.0]}), (2, {"edges": None}), (2, {"fill": "x"}),
    (3, {"buckets": 10**9}), (3, {"buckets": 2.0}), (3, {"buckets": 1}),
])  # fmt: skip
def test_a_malformed_plan_is_declined(at: int, change: dict[str, Any]) -> None:
    tree = copy.deepcopy(plan())
    tree["steps"][at] |= change
    with pytest.raises(PartyError):
        ApplyTable().apply(party(), tree)


@pytest.mark.parametrize("columns", [
    [], None, [["age", "number"]], [["age", "number"], ["age", "text"], ["seen", "date"]],
    [["city", "text"], ["age", "number"], ["seen", "date"]], [["age", "number"], ["city", "word"], ["seen", "date"]],
])  # fmt: skip
def test_a_plan_for_other_columns_is_declined(columns: Any) -> None:
    with pytest.raises(PartyError):
        ApplyTable().apply(party(), {**plan(), "columns": columns})


def test_a_plan_with_too_many_features_is_declined() -> None:
    tree = plan()
    tree["steps"] = [{**tree["steps"][3], "buckets": 4096}] * 20
    with pytest.raises(PartyError, match="at most 65536"):
        ApplyTable().apply(party(), tree)
