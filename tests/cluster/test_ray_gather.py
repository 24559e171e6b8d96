"""Runs whose updates are larger than `run.reply_memory` fuse them on the cluster, with the bits of one machine."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hansa
from hansa.algorithms import Scaffold
from hansa.cluster import gather, matrix
from hansa.cluster.crew import kept_actors
from hansa.local import SGD, Controlled
from hansa.plumbing.errors import RuntimeFailure
from hansa.testing.experiments import measured, published, same_bits

pytestmark = pytest.mark.slow
PARTIES = 9


@pytest.fixture(scope="module")
def actors(cluster: Any) -> Iterator[Any]:
    """An engine whose two actors are used again by all tests of this file."""
    from hansa.cluster.engines import Ray

    cluster.grow(2)
    engine = Ray(address=cluster.address, actors=2, inner="reference")
    with kept_actors(engine):
        yield engine


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 150), nn.BatchNorm1d(150), nn.Linear(150, 2))


def plain_net() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 150), nn.ReLU(), nn.Linear(150, 2))


def task(loss: Any = "cross_entropy", model: Any = net) -> hansa.Task:
    draws = torch.Generator().manual_seed(0)
    pairs = [(torch.randn(8 + 2 * k, 3, generator=draws) + k, torch.randint(0, 2, (8 + 2 * k,), generator=draws))
             for k in range(PARTIES)]  # fmt: skip
    return hansa.Task(model, loss, pairs, classes=2)


def run(engine: Any, fusion: Any, loss: Any = "cross_entropy", algorithm: Any = None, model: Any = net,
        **settings: Any) -> Any:  # fmt: skip
    algorithm = algorithm or hansa.FedAvg(local=SGD(lr=0.1, batch=4), fusion=fusion)
    return hansa.simulate(algorithm, task(loss, model), engine=engine,
                          **{"rounds": 2, "seed": 1, "reply_memory": 4096, **settings})  # fmt: skip


def check_alike(one: Any, other: Any) -> None:
    assert same_bits(published(one), published(other))
    assert measured(one.history) == measured(other.history)
    for name in ("bytes_up", "bytes_down", "asked", "replies", "excluded", "rejected"):
        assert [line.get(name) for line in one.history] == [line.get(name) for line in other.history]
    assert same_bits(*({str(p): m for p, m in sorted(r.memories.items())} for r in (one, other)))


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The methods by which the driver used columns of actors."""
    methods: list[str] = []
    before = matrix.ColumnStore.call

    def call(self: Any, actor: int, method: str, *arguments: Any, returns: int = 1) -> Any:
        methods.append(method)
        return before(self, actor, method, *arguments, returns=returns)

    monkeypatch.setattr(matrix.ColumnStore, "call", call)
    return methods


@pytest.mark.parametrize("fusion", ["median", "trimmed-mean", "meamed", "krum", "multi-krum", "bulyan",
                                    "geometric-median", "norm-clip", "legato"])  # fmt: skip
def test_fusions_on_the_cluster_have_the_bits_of_one_machine(fusion: str, actors: Any, sent: list[str]) -> None:
    alone = run("reference", fusion)
    assert not sent
    check_alike(alone, run(actors, fusion))
    # updates and running statistics, at two actors, in two rounds
    assert sent.count("put_columns") == 2 * 2 * 2 * PARTIES and "apply" in sent


def test_other_vectors_and_memories_are_those_of_one_machine(actors: Any, sent: list[str]) -> None:
    algorithm = Scaffold(local=Controlled(batch=4), fusion=hansa.build("fusion", "median"))
    check_alike(run("reference", None, algorithm=algorithm), run(actors, None, algorithm=algorithm))
    assert sent.count("put_columns") == 3 * 2 * 2 * PARTIES  # control variates too


def test_replies_that_break_a_rule_are_rejected_with_the_same_reason(actors: Any) -> None:
    limits: dict[str, Any] = {"max_norm": 0.9, "rounds": 1, "quorum": 1}
    alone = run("reference", "median", **limits)
    (line,) = alone.history
    assert 0 < len(line["rejected"]) < PARTIES
    check_alike(alone, run(actors, "median", **limits))


def test_updates_that_fit_the_memory_go_to_the_driver(actors: Any, sent: list[str]) -> None:
    check_alike(run("reference", "median", reply_memory=2**20), run(actors, "median", reply_memory=2**20))
    assert not sent


def test_an_algorithm_that_reads_single_updates_reads_them_from_the_cluster(actors: Any, sent: list[str]) -> None:
    results = [run(engine, None, algorithm=hansa.build("algorithm", "hypcluster"), model=plain_net)
               for engine in ("reference", actors)]  # fmt: skip
    check_alike(*results)
    assert "put_columns" in sent and "read_columns" in sent


class ActorFailure:
    """A loss whose process is killed at its first call after a flag was set; else cross-entropy."""

    def __init__(self, flag: Path) -> None:
        self.flag, self.driver = flag, os.getpid()

    def __call__(self, output: Tensor, y: Tensor) -> Tensor:
        if os.getpid() != self.driver and self.flag.exists():
            self.flag.unlink()
            os.kill(os.getpid(), signal.SIGKILL)
        return nn.functional.cross_entropy(output, y, reduction="none")


@pytest.mark.parametrize("when", ["training", "fusing"])
def test_columns_of_a_lost_actor_are_trained_again(
    when: str, engine: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    flag = tmp_path / "flag"
    loss = ActorFailure(flag)
    alone = run("reference", "krum", loss)
    fills, kills = [], []
    fill, call = gather.UpdateGather._fill, matrix.ColumnStore.call

    def filled(self: Any) -> Any:
        fills.append(self)
        if when == "training" and len(fills) == 1:
            flag.touch()
        return fill(self)

    def killed(self: Any, actor: int, method: str, *arguments: Any, returns: int = 1) -> Any:
        if when == "fusing" and method == "apply" and not kills:
            kills.append(self.ray.kill(self.actors[0]))
        return call(self, actor, method, *arguments, returns=returns)

    monkeypatch.setattr(gather.UpdateGather, "_fill", filled)
    monkeypatch.setattr(matrix.ColumnStore, "call", killed)
    other = run(replace(engine, inner="reference"), "krum", loss)
    assert len(fills) == 3 and not flag.exists()  # two rounds, one of them twice
    assert "a Ray actor was lost" in caplog.text
    check_alike(alone, other)


def test_columns_that_are_lost_again_and_again_end_the_run(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    call = matrix.ColumnStore.call

    def killed(self: Any, actor: int, method: str, *arguments: Any, returns: int = 1) -> Any:
        if method == "apply":
            self.ray.kill(self.actors[0])
        return call(self, actor, method, *arguments, returns=returns)

    monkeypatch.setattr(matrix.ColumnStore, "call", killed)
    monkeypatch.setattr(gather, "LOSSES", 2)
    with pytest.raises(RuntimeFailure, match="actors that held updates were lost 2 times"):
        run(replace(engine, inner="reference"), "krum")
