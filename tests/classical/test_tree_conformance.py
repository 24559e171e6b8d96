"""Trees with other settings than the default pass the conformance suite."""

from __future__ import annotations

from typing import Any

import pytest

import hansa
from hansa.testing import check_algorithm


@pytest.mark.slow
@pytest.mark.parametrize(
    "algorithm",
    [
        hansa.Boosting(max_depth=2, bins=8, cuts="sketch", error=0.1, held_out=0.2, rows=0.8, columns=0.5),
        pytest.param(
            hansa.Boosting(max_depth=2, cuts="pax", error=0.2, growth="leaves", leaves=3, min_rows=3),
            marks=pytest.mark.night,
        ),
        hansa.RandomForest(max_depth=2, bins=8, trees=2, per_round=1, growth="local"),
    ],
    ids=["sketch", "pax", "local forest"],
)
def test_trees_with_other_settings_keep_the_promises(algorithm: Any) -> None:
    check_algorithm(algorithm)
