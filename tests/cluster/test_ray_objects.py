"""A run leaves nothing in the object store of its cluster, and does not need more of it with every round."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import hansa
from hansa.local import SGD

pytestmark = pytest.mark.slow
PARTIES, WIDE = 12, 40_000  # an update of 1.2 MB


@pytest.fixture
def ray(cluster: Any) -> Iterator[Any]:
    """A connection to the cluster, which a run uses and leaves open."""
    import logging

    import ray

    cluster.grow(2)
    ray.init(address=cluster.address, log_to_driver=False, logging_level=logging.ERROR)
    yield ray
    ray.shutdown()


def occupied(ray: Any) -> float:
    """Bytes of all object stores that are in use."""
    return float(ray.cluster_resources()["object_store_memory"] - ray.available_resources()["object_store_memory"])


def check_left(ray: Any, before: float) -> None:
    """Check that the stores soon hold no more than before."""
    for _ in range(100):
        if occupied(ray) <= before:
            break
        time.sleep(0.1)
    assert occupied(ray) <= before


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(4, WIDE), nn.ReLU(), nn.Linear(WIDE, 2))


KILLED = """
import os, signal, sys
import torch, hansa
from hansa.cluster import placement
placement.BLOCK, packed, blocks = 2**20, placement.packed, []
def counted(tensor):
    blocks.append(tensor)
    if len(blocks) == 4:
        print("three blocks are placed", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    return packed(tensor)
placement.packed = counted
task = hansa.Task(lambda: torch.nn.Linear(1000, 2), "cross_entropy",
                  [(torch.ones(1000, 1000), torch.zeros(1000, dtype=torch.int64))] * 2, classes=2)
hansa.simulate(hansa.FedAvg(), task, rounds=1, engine={"name": "ray", "address": sys.argv[1], "actors": 1})
"""


def test_objects_of_a_driver_that_is_killed_while_it_places_samples_are_deleted(ray: Any, cluster: Any) -> None:
    before = occupied(ray)
    done = subprocess.run([sys.executable, "-c", KILLED, cluster.address], capture_output=True, text=True)
    assert done.stdout == "three blocks are placed\n", done.stderr
    check_left(ray, before)


@pytest.mark.parametrize(("sums", "fusion"), [("exact", "mean"), ("ordered", "median")])
def test_objects_of_a_run_are_deleted(sums: str, fusion: str, ray: Any, cluster: Any) -> None:
    """When a round has ended, its updates and sums are deleted; only the samples and one model may be left."""
    x = torch.randn(PARTIES * 5, 4)
    task = hansa.Task(model, "cross_entropy", [(x[k::PARTIES], torch.zeros(5, dtype=torch.int64))
                                               for k in range(PARTIES)], classes=2)  # fmt: skip
    d = sum(parameter.numel() for parameter in model().parameters())
    before, after_round = occupied(ray), []

    def look(_: Any) -> None:
        time.sleep(0.5)  # machines report their use some times per second
        after_round.append(occupied(ray) - before)

    hansa.simulate(hansa.FedAvg(local=SGD(lr=0.01), fusion=hansa.build("fusion", fusion)), task, rounds=3, sums=sums,
                   engine={"name": "ray", "address": cluster.address, "actors": 2, "inner": "reference"},
                   on_round=look, eval_every=3, reply_memory=2**20)  # fmt: skip
    assert len(after_round) == 3 and max(after_round) <= 4 * d + 2**16
    check_left(ray, before)
