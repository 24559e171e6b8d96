"""Samples larger than memory: they train to the same bits as those in memory, by every engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import hansa
from hansa.core.plain_data import build
from hansa.data import held, load_party_folder
from hansa.experiment.config import parse
from hansa.holdings.stored_rows import StoredRows
from hansa.plumbing.errors import ConfigError, DataError
from hansa.run.resume import execute

SIZES = (13, 8, 21, 5)


def net() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(12, 6), nn.Tanh(), nn.Linear(6, 3))


def conv() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 2, 2), nn.ReLU(), nn.Flatten(), nn.Linear(12, 3))


def samples(party: int) -> tuple[np.ndarray, np.ndarray]:
    made = np.random.default_rng(party)
    return made.normal(size=(SIZES[party], 1, 3, 4)).astype(np.float32), made.integers(0, 3, SIZES[party])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """One folder of arrays per subject."""
    for party in range(len(SIZES)):
        place = tmp_path / "subjects" / f"s{party}"
        place.mkdir(parents=True)
        x, y = samples(party)
        np.save(place / "x.npy", x)
        np.save(place / "y.npy", y)
    (tmp_path / "subjects" / "README.txt").write_text("Subjects.")
    return tmp_path / "subjects"


class Pairs(torch.utils.data.Dataset):
    def __init__(self, party: int) -> None:
        self.x, self.y = samples(party)

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, row: int) -> Any:
        return torch.from_numpy(self.x[row]), int(self.y[row])


def trained(parties: Any, model: Any = net, algorithm: Any = None, **settings: Any) -> dict[str, torch.Tensor]:
    names = ("prepare", "augment", "party_tests", "test", "classes")
    task = hansa.Task(model, parties=parties, **{name: settings.pop(name) for name in names if name in settings})
    method = algorithm or hansa.FedAvg(local=hansa.SGD(lr=0.1, batch=4, momentum=0.5))
    return hansa.simulate(method, task, **{"rounds": 2, "seed": 3, **settings}).params


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(tensor, other[name]) for name, tensor in one.items())


@pytest.mark.thin(2)
@pytest.mark.parametrize("model", [net, conv])
@pytest.mark.parametrize("engine", ["reference", "workers", "stacked", "auto"])
def test_files_and_data_sets_train_to_the_bits_of_samples_in_memory(folder: Path, engine: str, model: Any) -> None:
    memory = [samples(party) for party in range(len(SIZES))]
    wanted = trained(memory, model, engine=engine)
    assert not same(wanted, trained(memory, model, engine=engine, seed=4))
    files, names = load_party_folder(folder)
    assert names == ["s0", "s1", "s2", "s3"] and all(isinstance(x, StoredRows) for x, _ in files)
    mapped = [(np.load(folder / name / "x.npy", mmap_mode="r"), y) for name, (_, y) in zip(names, memory, strict=True)]
    for parties in (files, mapped, [Pairs(party) for party in range(len(SIZES))], [files[0], *memory[1:]]):
        assert same(trained(parties, model, engine=engine), wanted)


@pytest.mark.parametrize("engine", ["reference", "stacked"])
def test_one_memory_map_may_have_the_samples_of_all_parties(engine: str, tmp_path: Path) -> None:
    pairs = [samples(party) for party in range(len(SIZES))]
    x, y = (np.concatenate(arrays) for arrays in zip(*pairs, strict=True))
    np.save(tmp_path / "x.npy", x)
    np.save(tmp_path / "y.npy", y)
    mapped = [np.load(tmp_path / name, mmap_mode="r") for name in ("x.npy", "y.npy")]
    offsets = np.cumsum([0, *SIZES])
    assert same(trained((*mapped, offsets), engine=engine), trained((x, y, offsets), engine=engine))


@pytest.mark.parametrize("name", ["scaffold", "fedprox", "fsvrg", "fedsgd", "naive-bayes", "fedper"])
def test_every_kind_of_method_takes_stored_samples(folder: Path, name: str) -> None:
    algorithm, memory = build("algorithm", name), [samples(party) for party in range(len(SIZES))]
    results = [
        hansa.simulate(algorithm, hansa.Task(None if name == "naive-bayes" else net, parties=parties), rounds=2,
                       engine="reference")
        for parties in (memory, load_party_folder(folder)[0])
    ]  # fmt: skip
    x = torch.from_numpy(memory[0][0])
    party = {"party": 1} if name == "fedper" else {}
    assert torch.equal(results[0].predict(x, **party), results[1].predict(x, **party))


def test_a_preparation_is_learned_in_blocks_and_applied_to_batches(folder: Path) -> None:
    memory, files = [samples(party) for party in range(len(SIZES))], load_party_folder(folder)[0]
    wanted, found = (trained(each, prepare=hansa.Standardise(), engine="reference") for each in (memory, files))
    assert same(found, wanted)  # each party has a single block


def test_test_samples_of_parties_may_stay_in_files(folder: Path) -> None:
    memory, files = [samples(party) for party in range(len(SIZES))], load_party_folder(folder)[0]
    task = [hansa.Task(net, parties=each, party_tests=each) for each in (memory, files)]
    lines = [hansa.simulate(hansa.FedAvg(), each, rounds=1, engine="reference").history[-1] for each in task]
    assert lines[0]["accuracy"] == lines[1]["accuracy"] and lines[0]["loss"] == lines[1]["loss"]


def test_an_experiment_names_a_folder_with_one_party_per_subfolder(folder: Path, tmp_path: Path) -> None:
    def run(parties: list[str], name: str, **task: Any) -> Any:
        tree = {"task": {"parties": parties, "model": "logistic", **task}, "run": {"rounds": 2, "engine": "reference"}}
        return execute(parse(tree, str(tmp_path)), tmp_path / name)

    for name in ("s0", "s1", "s2", "s3"):
        x, y = (np.load(folder / name / f"{each}.npy") for each in "xy")
        np.savez(tmp_path / f"{name}.npz", x=x, y=y)
    archives = ["s0.npz", "s1.npz", "s2.npz", "s3.npz"]
    for at, task in enumerate(({}, {"party_test": 0.25, "prepare": "standardise"}, {"test": "subjects/s0"})):
        found, wanted = run(["subjects"], f"a{at}", **task), run(archives, f"b{at}", **task)
        assert same(found.params, wanted.params)
        assert found.summary["accuracy"] == wanted.summary["accuracy"]
        assert found.training.holdings.name(2) == "s2"
    mixed = run(["s0.npz", "subjects/s1", "subjects/s2", "s3.npz"], "mixed")
    assert same(mixed.params, run(archives, "again").params)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda place: (place / "y.npy").unlink(), "has no y.npy; a party's folder holds x.npy and y.npy"),
        (lambda place: (place / "x.npy").write_bytes(b"none"), "x.npy is not an NPY file of plain numbers"),
        (lambda place: np.save(place / "x.npy", np.array([["a"]] * 13)), "x.npy holds <U1, and numbers are needed"),
        (lambda place: np.save(place / "y.npy", np.zeros(4)), "both need one entry per sample"),
    ],
)
def test_a_damaged_folder_is_named_in_a_sentence(folder: Path, change: Any, message: str) -> None:
    change(folder / "s0")
    with pytest.raises(DataError, match=message):
        load_party_folder(folder)


def test_samples_that_do_not_fit_are_named_in_a_sentence(folder: Path, tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(DataError, match="is a folder without parties"):
        load_party_folder(empty)
    files, _ = load_party_folder(folder)
    with pytest.raises(DataError, match=r"targets must lie in 0..1, got 0..2"):
        trained(files, classes=2)
    np.save(folder / "s1" / "x.npy", np.full((8, 1, 3, 4), np.nan, dtype=np.float32))
    with pytest.raises(DataError, match=r"the features of party '1' \(row 0\) have missing values"):
        trained(load_party_folder(folder)[0])
    np.save(folder / "s1" / "x.npy", np.zeros((8, 1, 4, 4), dtype=np.float32))
    with pytest.raises(DataError, match="parties disagree on the shape of a sample"):
        trained(load_party_folder(folder)[0])
    np.save(folder / "s1" / "x.npy", np.zeros((8, 1, 3, 4)))
    with pytest.raises(DataError, match="parties disagree on the type of a sample: float32, float64"):
        trained(load_party_folder(folder)[0])
    with pytest.raises(ConfigError, match="it changes samples, and those of the parties stay in files"):
        trained(files, adversary={"name": "label-flip", "fraction": 0.5})


class Shrinking(Pairs):
    """A data set that loses a sample when training begins."""

    def __len__(self) -> int:
        return len(self.y) - (self.began and 1)

    began = False


def test_a_data_set_that_changes_during_a_run_stops_it(folder: Path) -> None:
    parties = [Shrinking(party) for party in range(2)]

    def begin(line: Any) -> None:
        parties[1].began = True

    with pytest.raises(hansa.HansaError, match=r"party 1 failed at 'sgd' in round 1: parties\[1\]: the data set has 7"):
        trained(parties, engine="reference", on_round=begin, classes=3)


def flip(sample: torch.Tensor, key: int) -> torch.Tensor:
    """A mirror image, or not, and some noise."""
    made = torch.Generator().manual_seed(key)
    changed = sample.flip(-1) if torch.rand((), generator=made) < 0.5 else sample
    return changed + 0.1 * torch.randn(sample.shape, generator=made, dtype=sample.dtype)


@pytest.mark.parametrize("engine", ["auto", "workers"])
def test_augmentation_has_the_same_bits_in_every_replay(folder: Path, engine: str) -> None:
    memory, files = [samples(party) for party in range(len(SIZES))], load_party_folder(folder)[0]
    wanted = trained(memory, augment=flip, engine="reference")
    assert not same(wanted, trained(memory, engine="reference"))
    assert same(wanted, trained(files, augment=flip, engine=engine))


def test_a_resumed_run_augments_as_one_that_was_not_stopped(folder: Path, tmp_path: Path) -> None:
    memory = [samples(party) for party in range(len(SIZES))]

    class Stop(Exception):
        pass

    def stop(line: Any) -> None:
        if line["round"] == 2:
            raise Stop

    settings = {"augment": flip, "rounds": 4, "engine": "reference"}
    with pytest.raises(Stop):
        trained(memory, **settings, run_dir=tmp_path / "run", on_round=stop, checkpoint_seconds=0.0)
    assert same(trained(memory, **settings, run_dir=tmp_path / "run", resume=True, checkpoint_seconds=0.0),
                trained(memory, **settings))  # fmt: skip


def test_every_sample_and_step_has_its_own_key() -> None:
    keys: list[int] = []

    def note(sample: torch.Tensor, key: int) -> torch.Tensor:
        keys.append(key)
        return sample

    trained([samples(party) for party in range(2)], augment=note, engine="reference", rounds=2)
    assert len(keys) == 1 + 2 * (13 + 8) and len(set(keys)) == len(keys) and min(keys) >= 0


@pytest.mark.parametrize(
    ("augment", "message"),
    [
        (3, "augment: expected a function of"),
        (lambda sample, key: sample[:, :2], r"like the sample, float32 \(1, 3, 4\); it returned float32 \(1, 2, 4\)"),
        (lambda sample, key: sample.double(), "it returned float64"),
        (lambda sample, key: None, "it returned NoneType"),
        (lambda sample: sample, "augment: the function failed: TypeError"),
    ],
)
def test_a_function_that_does_not_augment_is_refused_before_the_run(augment: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        trained([samples(0)], augment=augment)


def test_an_augmentation_that_nothing_would_use_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match="naive-bayes trains no network by batches"):
        hansa.simulate(hansa.GaussianNB(), hansa.Task(parties=[samples(0)], augment=flip))
    with pytest.raises(ConfigError, match="'stacked' trains many parties at once, and an augmentation"):
        trained([samples(0)], augment=flip, engine="stacked")
    with pytest.raises(ConfigError, match="augment must name a function"):
        parse({"task": {"dataset": "digits", "model": "cnn", "augment": "flip"}})
    tree = {"task": {"dataset": "digits", "model": "logistic", "augment": f"{__name__}:flip"},
            "run": {"rounds": 1, "cohort": 1, "engine": "reference"}}  # fmt: skip
    task = parse(tree).build_task()
    assert task.augment is flip


def test_a_partition_of_data_sets_can_be_drawn(folder: Path) -> None:
    files = load_party_folder(folder)[0]
    for parties in ([Pairs(0), Pairs(1)], files[:2]):
        rows, targets = held(hansa.Task(net, parties=parties))
        assert [len(each) for each in rows] == [13, 8] and targets.tolist()[:13] == samples(0)[1].tolist()
