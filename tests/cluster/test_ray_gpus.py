"""Actors that reserve GPUs: placement, refusals and the size of the crew, on machines that claim to have GPUs.

Ray reserves the GPUs that a machine is said to have, without a card. What an actor does on its card is done here on its
CPU, so only the name of the device is not tested. The last test trains on a real card (`make test-gpu`).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import hansa
from hansa.cluster import engine as running
from hansa.cluster import placement
from hansa.cluster.connection import fitting, shares
from hansa.cluster.engines import Ray
from hansa.holdings.stored_rows import StoredRows
from hansa.local import SGD
from hansa.numerics.objective import Objective
from hansa.plumbing.errors import ConfigError
from hansa.sim.engine import EngineInputs
from hansa.sim.stacked import StackedEngine
from hansa.testing.experiments import published, same_bits

PARTIES = 8


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))


def task() -> hansa.Task:
    draws = torch.Generator().manual_seed(0)
    pairs = [(torch.randn(6 + k, 3, generator=draws), torch.randint(0, 2, (6 + k,), generator=draws))
             for k in range(PARTIES)]  # fmt: skip
    return hansa.Task(net, "cross_entropy", pairs, test=pairs[0], classes=2)


def run(engine: Any, **settings: Any) -> Any:
    return hansa.simulate(hansa.FedAvg(local=SGD(lr=0.1, batch=4)), task(), engine=engine,
                          **{"rounds": 2, "seed": 1, "device": "cuda", **settings})  # fmt: skip


@pytest.mark.parametrize(
    ("machine", "cpus", "gpus", "actors"),
    [({"CPU": 8.0}, 1.0, 0.0, 8), ({"CPU": 8.0}, 1.0, 1.0, 0), ({"CPU": 8.0, "GPU": 2.0}, 1.0, 1.0, 2),
     ({"CPU": 8.0, "GPU": 2.0}, 1.0, 0.4, 4),  # two shares per card, and no share on two cards
     ({"CPU": 1.0, "GPU": 4.0}, 1.0, 1.0, 1), ({"CPU": 1.0, "GPU": 1.0}, 0.1, 0.1, 10), ({"GPU": 1.0}, 1.0, 1.0, 0)],
)  # fmt: skip
def test_a_machine_has_room_for_actors_by_its_cards(
    machine: dict[str, float], cpus: float, gpus: float, actors: int
) -> None:
    assert fitting(machine, cpus, gpus) == actors


def test_shares_are_counted_without_rounding_errors() -> None:
    assert [shares(1, part) for part in (0.1, 0.2, 0.25, 0.3, 1 / 3, 0.05)] == [10, 5, 4, 3, 3, 20]


class StoreHere:
    """An object store in this process."""

    def put(self, value: Any) -> Any:
        return [value]

    def get(self, ref: Any) -> Any:
        return ref[0]


def test_an_actor_with_a_card_holds_all_samples_as_one_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement, "BLOCK", 4 * 3 * 10)  # ten rows per block
    objective = Objective(net, "cross_entropy", 0)
    holdings = task().holdings(objective)
    placed = placement.PlacedHoldings(StoreHere(), holdings)
    assert len(placed.train.x.refs) > 3
    by_block, whole = (placed.holdings(StoreHere(), "cpu", together) for together in (False, True))
    assert isinstance(by_block.train.x, StoredRows)
    assert isinstance(whole.train.x, torch.Tensor) and isinstance(holdings.train.x, torch.Tensor)
    assert torch.equal(whole.train.x, holdings.train.x) and torch.equal(whole.train.y, holdings.train.y)
    elsewhere = placed.holdings(StoreHere(), "meta", True)
    assert elsewhere.train.x.device.type == elsewhere.train.y.device.type == "meta"


def test_samples_in_files_stay_in_blocks_on_a_card(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement, "BLOCK", 4 * 3 * 10)
    np.save(tmp_path / "x.npy", np.arange(90, dtype=np.float32).reshape(30, 3))
    stored = np.load(tmp_path / "x.npy", mmap_mode="r")
    objective = Objective(net, "cross_entropy", 0)
    files = hansa.Task(net, "cross_entropy", (stored, np.arange(30) % 2, [0, 15, 30])).holdings(objective)
    placed = placement.PlacedHoldings(StoreHere(), files).holdings(StoreHere(), "meta", True)
    assert isinstance(placed.train.x, StoredRows) and placed.train.x.device.type == "meta"


def test_a_driver_without_a_card_makes_the_chunks_of_a_card() -> None:
    objective = Objective(net, "cross_entropy", 0)
    inputs = EngineInputs(objective, task().holdings(objective), 0, device="cuda", compile="on")
    inner = StackedEngine(objective, inputs.holdings, 0, device_type="cuda")
    assert (inner.lanes, inner.chunk, inner.chain) == (1, 256, None)
    assert inner.plan()["compiled"] is False and running.compiles(inner, inputs)


def test_ray_chooses_the_card() -> None:
    with pytest.raises(ConfigError, match=r"run.device is 'cuda:1', and Ray chooses the cards of its actors"):
        run("ray", device="cuda:1")


def test_a_baseline_of_a_run_on_cards_trains_on_the_cpu_of_the_driver() -> None:
    objective = Objective(net, "cross_entropy", 0)
    inputs = EngineInputs(objective, task().holdings(objective), 0, device="cuda", alone=True)
    alone = running.started(Ray(), inputs)
    assert isinstance(alone, StackedEngine) and alone.device_type == "cpu"


@pytest.fixture(scope="module")
def cards(cluster: Any) -> Iterator[Any]:
    """An engine on a cluster with a machine that claims to have two GPUs, beside machines without."""
    with cluster.cards(2):
        yield Ray(address=cluster.address)


@pytest.mark.slow
def test_a_cluster_without_enough_gpus_is_refused(cards: Any) -> None:
    engine = {"name": "ray", "address": cards.address}
    with pytest.raises(ConfigError, match=r"3 actors of 1 CPUs and 1 GPUs each do not fit the cluster, which has \d+ "
                                          r"CPUs and 2 GPUs on \d machines; lower actors, cpus or gpus"):  # fmt: skip
        run({**engine, "actors": 3})
    with pytest.raises(ConfigError, match=r"5 actors of 1 CPUs and 0.5 GPUs each do not fit"):
        run({**engine, "actors": 5, "gpus": 0.5})


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="the cluster claims GPUs, and this machine has some")
def test_a_gpu_that_torch_cannot_use_is_named(cards: Any) -> None:
    import ray

    with pytest.raises(ConfigError, match=r"Ray gave an actor a GPU on the machine \w{8}, and torch cannot use it "
                                          r"there; install a torch with CUDA"):  # fmt: skip
        run({"name": "ray", "address": cards.address, "actors": 1})
    assert not ray.is_initialized()


@pytest.mark.slow
def test_actors_reserve_gpus_and_the_crew_follows_them(
    cards: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The path of a card, with the CPU as the device: the bits are those of one machine."""
    import ray

    monkeypatch.setattr(running, "CARD", "cpu")
    caplog.set_level("INFO", "hansa")
    left: list[float] = []
    engine = {"name": "ray", "address": cards.address, "gpus": 0.7, "inner": "reference"}
    result = run(engine, run_dir=tmp_path, on_round=lambda _: left.append(ray.available_resources().get("GPU", 0.0)))
    assert left == pytest.approx([0.6, 0.6])  # one actor per card: no actor gets shares of two cards
    assert "2 actors with 0.7 GPUs each on a Ray cluster" in caplog.text
    alone = run("reference", device="cpu")
    assert same_bits(published(result), published(alone))
    assert result.experiment["plan"]["device"] == "cuda" and result.experiment["plan"]["driver"] == "cpu"
    with pytest.raises(
        ConfigError, match=r"begun with another plan \(device was 'cuda' and is 'cpu'; driver was 'cpu'"
    ):
        run({**engine, "gpus": None}, run_dir=tmp_path, resume=True, device="cpu", rounds=3)


def test_another_card_on_one_machine_is_named() -> None:
    engine = object.__new__(running.RayEngine)
    engine._card = {"gpu": "H200", "cuda": "13.0"}
    said = {"node": "0123456789", "versions": running.versions(), "card": {"gpu": "A100", "cuda": "13.0"}}
    with pytest.raises(ConfigError, match=r"the machine 01234567 of the cluster has A100 with CUDA 13\.0, and another"):
        engine._fits(said)


@pytest.mark.slow
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU that torch can use")
@pytest.mark.parametrize("sums", ["ordered", "exact"])
def test_an_actor_trains_on_the_card_that_ray_gives_it_on_a_gpu(sums: str, short_folder: Path) -> None:
    """Two actors share a card, and their updates are added on the CPU of the driver."""
    pytest.importorskip("ray", reason="Ray is not installed (make extras)")
    on_cluster = run({"name": "ray", "gpus": 0.5, "actors": 2}, sums=sums)
    here = run("stacked", sums=sums)
    assert on_cluster.experiment["plan"]["gpu"] == torch.cuda.get_device_name()
    for name, tensor in here.params.items():
        assert on_cluster.params[name].device.type == "cpu"
        torch.testing.assert_close(on_cluster.params[name], tensor.cpu())
