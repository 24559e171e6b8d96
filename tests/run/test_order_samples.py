"""The samples that come with an order, where a data set cannot be loaded; folders and experiments of runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import hansa
from hansa.experiment.config import parse
from hansa.experiment.deployed import own_samples
from hansa.metrics.names import possible_values
from hansa.plumbing.errors import ConfigError, DataError, PartyError
from hansa.run.resume import new_folder, stored_experiment
from hansa.secure.envelopes import agreed


def missing(folder: Path, **task: Any) -> Any:
    return parse({"task": {"dataset": "mnist", "model": "logistic", "data_dir": str(folder), **task}})


def test_an_order_without_the_data_set_has_no_test_set_and_says_so(tmp_path: Path) -> None:
    own, (note,) = own_samples(missing(tmp_path))
    assert own == {}
    assert note.startswith("task.dataset: each party brings its own data instead; there is no central test set")
    with pytest.raises(DataError, match=r"task\.trusted: its samples cannot be loaded"):
        own_samples(missing(tmp_path, trusted=20))


def test_folders_of_runs_that_begin_in_one_second_have_different_names(tmp_path: Path) -> None:
    made = []
    for _ in range(3):
        made.append(new_folder("digits", str(tmp_path)))
        made[-1].mkdir()
    assert len(set(made)) == 3


def test_a_run_from_python_is_not_resumed_from_its_folder(tmp_path: Path) -> None:
    x = torch.randn(8, 2)
    task = hansa.Task(lambda: torch.nn.Linear(2, 2), "cross_entropy", [(x, torch.arange(8) % 2)] * 2)
    hansa.simulate(hansa.FedAvg(), task, rounds=1, run_dir=tmp_path / "run")
    with pytest.raises(ConfigError, match="made from Python, so its task is not stored"):
        stored_experiment(tmp_path / "run")


def test_a_variance_over_parties_has_no_largest_value() -> None:
    assert possible_values("accuracy_variance") == (0.0, float("inf"))
    assert possible_values("accuracy") == (0.0, 1.0)


def test_a_public_key_that_agrees_on_nothing_is_refused() -> None:
    with pytest.raises(PartyError, match="invalid public key"):
        agreed(bytes(range(32)), bytes(32), b"a purpose")
