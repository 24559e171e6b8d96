"""Frames of polars: the same features, plan and predictions as from columns by name."""

from __future__ import annotations

from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import hansa
from hansa.data.apply_table import TablePlan
from hansa.data.table import Table
from hansa.experiment.settings import Run
from hansa.holdings.table_layout import TableLayout
from hansa.models import Logistic
from hansa.privacy import privacy
from hansa.run.simulated_table import prepare_table

pl = pytest.importorskip("polars", reason="polars is tested with: make extras")
ROWS = 60


def people(seed: int) -> dict[str, list[Any]]:
    """Columns of every type that a frame may have, with missing values."""
    draws = np.random.default_rng(seed)

    def some(values: list[Any]) -> list[Any]:
        return [None if draws.random() < 0.1 else value for value in values]

    return {
        "age": some(draws.integers(17, 90, ROWS).tolist()),
        "weight": some(draws.normal(70, 10, ROWS).tolist()),
        "city": some(draws.choice(["Köln", "Lübeck", "Riga"], ROWS).tolist()),
        "member": some((draws.random(ROWS) < 0.5).tolist()),
        "seen": some([date(2019 + int(k) % 5, 1 + int(k) % 12, 1 + int(k) % 28) for k in draws.integers(0, 999, ROWS)]),
    }


def as_frame(columns: dict[str, list[Any]]) -> Any:
    return pl.DataFrame(columns)


def as_categories(columns: dict[str, list[Any]]) -> Any:
    """A frame with a column of categories, narrow numbers, and times instead of dates."""
    return pl.DataFrame(columns).with_columns(
        pl.col("city").cast(pl.Categorical), pl.col("age").cast(pl.Int8), pl.col("seen").cast(pl.Datetime("ms"))
    )


def learned(parties: list[Any]) -> tuple[np.ndarray, TablePlan]:
    task = hansa.Task(None, parties=[(x, np.arange(ROWS) % 2) for x in parties], prepare=hansa.ColumnTransformer(),
                      classes=2)  # fmt: skip
    made, prepared = prepare_table(hansa.FedAvg(), task, Run(), privacy(None), None)
    assert prepared is not None
    return made.parties[0].numpy(), TablePlan.of(prepared.learned[1])


@pytest.mark.parametrize("framed", [as_frame, as_categories])
def test_frames_of_polars_give_the_features_of_columns_by_name(framed: Any) -> None:
    parties = [people(0), people(1)]
    expected, plan = learned(parties)
    features, same = learned([framed(party) for party in parties])
    assert same == plan
    np.testing.assert_array_equal(features, expected)
    assert {"age", "weight", "city=Riga"} <= set(plan.names)


def test_a_time_of_another_zone_is_its_date_in_utc() -> None:
    times = [datetime(2024, 1, 31, 23, 30, tzinfo=UTC), None]
    frame = pl.DataFrame({"seen": times}).with_columns(pl.col("seen").dt.convert_time_zone("Europe/Berlin"))
    layout = TableLayout((("seen", "date"),))
    days, _ = Table.of(frame).coded(layout)
    expected, _ = Table.of({"seen": [date(2024, 1, 31), None]}).coded(layout)
    assert torch.equal(days.floor().nan_to_num(-1), expected.nan_to_num(-1))


def test_a_model_predicts_rows_of_a_frame(tmp_path: Path) -> None:
    parties = [(as_frame(people(k)), np.arange(ROWS) % 2) for k in range(2)]
    task = hansa.Task(Logistic(inputs=(5,), outputs=2), parties=parties, prepare=hansa.ColumnTransformer())
    hansa.simulate(hansa.FedAvg(), task, rounds=1, run_dir=tmp_path / "run")
    model = hansa.load(tmp_path / "run")
    new = people(2)
    framed, named = model.predict(as_frame(new)), model.predict(new)
    np.testing.assert_array_equal(np.asarray(framed), np.asarray(named))
