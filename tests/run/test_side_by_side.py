"""Several runs and reports in threads of one process: each has the same bits as alone."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from hansa.plumbing.determinism import deterministic
from hansa.report import plots


@pytest.mark.parametrize("before", [False, True])
def test_deterministic_kernels_stay_on_until_the_last_run_ends_and_are_then_put_back(before: bool) -> None:
    was = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(before)
    second, first_left = threading.Event(), threading.Event()

    def other() -> bool:
        with deterministic("cpu"):
            second.set()
            assert first_left.wait(600)
            return torch.are_deterministic_algorithms_enabled()

    try:
        with ThreadPoolExecutor(1) as pool:
            with deterministic("cpu"):
                inside = pool.submit(other)
                assert second.wait(600)
            first_left.set()
            assert inside.result(600)
        assert torch.are_deterministic_algorithms_enabled() == before
    finally:
        torch.use_deterministic_algorithms(was)


@pytest.mark.slow
def test_figures_drawn_at_once_have_the_bytes_of_figures_drawn_alone() -> None:
    def drawn(slope: int) -> bytes:
        figure = plots.blank(3, 2)
        figure.subplots().plot([1, slope])
        return plots.svg(figure)

    slopes = [0, 1, 2] * 10
    alone = [drawn(slope) for slope in slopes[:3]]
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(drawn, slopes))
    assert together == alone * 10
