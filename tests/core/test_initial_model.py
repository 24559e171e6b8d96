"""The initial model is a function of the seed alone, even with other threads."""

from __future__ import annotations

import contextlib
import os
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

from hansa.numerics.objective import Objective, make_module


def values(module: nn.Module) -> torch.Tensor:
    return torch.cat([parameter.detach().reshape(-1) for parameter in module.parameters()])


def layers() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))


@pytest.mark.parametrize("seeds", [(3, 3, 3), (3, 4, 5)])
def test_threads_that_make_models_at_once_draw_what_each_draws_alone(seeds: tuple[int, ...]) -> None:
    halfway = threading.Barrier(len(seeds))

    def slow() -> nn.Module:
        first = nn.Linear(3, 4)
        with contextlib.suppress(threading.BrokenBarrierError):
            halfway.wait(0.1)  # for the others, if they are let in
        return nn.Sequential(first, nn.Linear(4, 2))

    alone = [values(make_module(layers, seed)) for seed in seeds]
    before = torch.get_rng_state()
    with ThreadPoolExecutor(len(seeds)) as pool:
        together = list(pool.map(lambda seed: values(make_module(slow, seed)), seeds))
    assert all(torch.equal(one, other) for one, other in zip(alone, together, strict=True))
    assert torch.equal(torch.get_rng_state(), before)


def test_a_model_made_of_another_is_made() -> None:
    """A factory may make another model: it neither deadlocks nor disturbs its own random stream."""

    def nested() -> nn.Module:
        first = nn.Linear(3, 4)
        make_module(layers, 9)
        return nn.Sequential(first, nn.Linear(4, 2))

    assert torch.equal(values(make_module(nested, 1)), values(make_module(layers, 1)))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes are not forked here")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_process_forked_while_another_thread_makes_a_model_can_make_its_own() -> None:
    making, go = threading.Event(), threading.Event()

    def slow() -> nn.Module:
        making.set()
        assert go.wait(600)
        return layers()

    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(make_module, slow, 2)
        assert making.wait(600)
        threading.Timer(0.2, go.set).start()
        child = os.fork()
        if not child:
            same = torch.equal(Objective(layers, "cross_entropy", 1).initial.w, expected)
            os._exit(0 if same else 1)
        ended = os.waitpid(child, 0)[1]
        other.result(600)
    assert ended == 0


expected = values(make_module(layers, 1))
