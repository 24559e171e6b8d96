"""Deployed parties whose samples stay in files, or are data sets, and are augmented: the bits of the simulation."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from league import PARTIES, League, samples

import hansa
from hansa.core.plain_data import build
from hansa.holdings.stored_rows import StoredRows
from hansa.local import SGD
from hansa.net.party.samples import read_samples
from hansa.plumbing import codec
from hansa.plumbing.errors import DataError

SHIFT = """
import numpy as np
import torch

def shift(sample, key):
    return sample + 0.1 * torch.randn(sample.shape, generator=torch.Generator().manual_seed(key), dtype=sample.dtype)

class Rows(torch.utils.data.Dataset):
    def __init__(self, first=0):
        self.first = first
    def __len__(self):
        return 4
    def __getitem__(self, row):
        return np.arange(3.0) + self.first + row, row % 2

def data():
    return Rows()

def both():
    return Rows(), Rows(9)

def mapped():
    return np.load("big/x.npy", mmap_mode="r"), np.load("big/y.npy", mmap_mode="r")
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A module with functions of a party, in the working folder."""
    (tmp_path / "large_parts.py").write_text(SHIFT)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    sys.modules.pop("large_parts", None)


def folder_of(party: int, place: Path) -> Path:
    (x, y), _ = samples(party)
    place.mkdir(parents=True)
    np.save(place / "x.npy", x.numpy())
    np.save(place / "y.npy", y.numpy())
    return place


def order(**task: Any) -> dict[str, Any]:
    task = {"parties": ["x"], "model": "logistic", "dtype": "float64", "prepare": "standardise", **task}
    return {"task": task, "algorithm": {"name": "fedavg", "local": {"lr": 0.1, "batch": 5}},
            "run": {"rounds": 2, "seed": 3}}  # fmt: skip


def simulated(augment: Any = None) -> hansa.Result:
    model = build("model", "logistic", inputs=(3,), outputs=2)
    task = hansa.Task(lambda: model().double(), "cross_entropy", [samples(k)[0] for k in range(3)], classes=2,
                      names=PARTIES, prepare=hansa.Standardise(), augment=augment)  # fmt: skip
    return hansa.simulate(hansa.FedAvg(local=SGD(lr=0.1, batch=5)), task, engine="reference", rounds=2, seed=3)


def test_parties_with_stored_and_augmented_samples_have_the_bits_of_the_simulation(
    league: League, module: Path
) -> None:
    for number, name in enumerate(PARTIES):
        held = read_samples(str(folder_of(number, module / name)))
        assert isinstance(held.train[0], StoredRows)
        league.join(name, held, 'functions = ["large_parts:shift"]')
    job = league.submit(order(augment="large_parts:shift"))
    ended = league.ended(job)
    assert ended["status"] == "finished", ended["reason"]
    from large_parts import shift

    wanted = simulated(shift)
    assert codec.encode(league.model(job)) == codec.encode(wanted.saved_model())
    assert not all(torch.equal(tensor, wanted.params[name]) for name, tensor in simulated().params.items())


def test_a_party_refuses_an_augmentation_that_its_owner_did_not_allow(league: League, module: Path) -> None:
    for number, name in enumerate(PARTIES):
        league.join(name, samples(number), "")
    ended = league.ended(league.submit(order(augment="os:system")))
    assert ended["status"] == "failed"
    assert "its policy does not allow the function 'os:system' (functions in party.toml)" in ended["reason"]


def test_a_party_reads_folders_memory_maps_and_data_sets(module: Path) -> None:
    folder_of(0, module / "big")
    (x, y), _ = samples(0)
    for reference in ("big", "large_parts:mapped"):
        train, test, header, *_ = read_samples(reference)
        assert isinstance(train[0], StoredRows) and torch.equal(train[0][:], x) and torch.equal(train[1], y)
        assert test is None and header == ()
    train, test, *_ = read_samples("large_parts:both")
    assert test is not None and train[0][:1].tolist() == [[0, 1, 2]] and test[0][:1].tolist() == [[9, 10, 11]]
    assert train[1].tolist() == [0, 1, 0, 1] and read_samples("large_parts:data").test is None
    with pytest.raises(DataError, match="a target column can be named for CSV files only"):
        read_samples("big", "y")
