"""The cost of a run does not grow with the number of idle parties."""

from __future__ import annotations

import tracemalloc
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import hansa

PARTIES = 200_000


@pytest.mark.parametrize("algorithm", [hansa.FedAvg(), hansa.FedBuff(buffer=20)], ids=lambda a: a.name)
def test_an_idle_party_costs_few_bytes_and_nothing_in_a_round(algorithm: hansa.Algorithm) -> None:
    data = (torch.ones(PARTIES, 2), torch.ones(PARTIES, 1), np.arange(PARTIES + 1))
    task = hansa.Task(lambda: nn.Linear(2, 1), "mse", data)
    peaks: list[int] = []

    def watch(line: dict[str, Any]) -> None:
        now, peak = tracemalloc.get_traced_memory()
        peaks.append(peak - (now if peaks else 0))
        tracemalloc.reset_peak()

    tracemalloc.start()
    try:
        hansa.simulate(algorithm, task, rounds=3, cohort_size=50, engine="stacked", on_round=watch)
    finally:
        tracemalloc.stop()
    assert peaks[0] < 40 * PARTIES + 4e6  # all that is made before the first round's end, imports and all
    assert max(peaks[1:]) < PARTIES
