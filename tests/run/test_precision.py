"""The precision of matrix products: float32 by default."""

import pytest
import torch
from torch import nn

import hansa
from hansa.local import SGD


def task() -> hansa.Task:
    draws = torch.Generator().manual_seed(0)
    x = torch.randn(240, 1, 6, 6, generator=draws)
    y = (x.mean((1, 2, 3)) > 0).long()

    def model() -> nn.Module:
        return nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(144, 2))

    return hansa.Task(model, "cross_entropy", [(x[k::4], y[k::4]) for k in range(4)], test=(x, y))


@pytest.mark.parametrize("engine", ["reference", "stacked"])
def test_bf16_learns_the_same_with_coarser_products_and_keeps_the_parameters_type(engine: str) -> None:
    full, coarse = (
        hansa.simulate(hansa.FedAvg(local=SGD(lr=0.3, batch=20)), task(), rounds=6, engine=engine, precision=precision)
        for precision in ("float32", "bf16")
    )
    assert all(value.dtype == torch.float32 for value in coarse.params.values())
    difference = (full.state.params.w - coarse.state.params.w).norm() / full.state.params.w.norm()
    assert 1e-5 < difference < 0.05
    assert coarse.summary["accuracy"] > 0.8


def test_tf32_is_refused_on_a_cpu() -> None:
    with pytest.raises(hansa.ConfigError, match="'tf32' needs a GPU; on a CPU use 'float32' or 'bf16'"):
        hansa.simulate(hansa.FedAvg(), task(), rounds=1, precision="tf32")


def test_a_run_leaves_the_precision_and_the_threads_of_the_process_as_they_were() -> None:
    before = torch.get_float32_matmul_precision(), torch.get_num_threads()
    hansa.simulate(hansa.FedAvg(), task(), rounds=1)
    assert (torch.get_float32_matmul_precision(), torch.get_num_threads()) == before
