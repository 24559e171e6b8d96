"""Rounds over bad connections: latency, loss, resets, silence, partitions; `make weather` does the same for longer."""

from __future__ import annotations

from pathlib import Path

import pytest
from weather import Climate, Faults, campaign

pytestmark = pytest.mark.slow


def test_rounds_over_bad_lines_close_with_those_who_answered_and_everybody_comes_back(tmp_path: Path) -> None:
    """The members of each round, and the reasons for the others, are recorded; the model is the reference's for these
    members."""
    climate = Climate(parties=6, faults=Faults(latency=0.01, jitter=0.005, loss=0.05, rto=0.02), cut_rounds=range(2, 4),
                      rounds=5, deadline=5.0, quorum=1, strangers=0, quick=True)  # fmt: skip
    campaign(tmp_path, climate, seed=1, strict=False)
