"""Samples that a party loads with its own function."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hansa import DataError
from hansa.net.party.samples import preparer, read_samples
from hansa.plumbing.errors import NotAdmitted

TASK = {"model": "logistic", "dtype": "float32", "shape": [2], "outputs": 2, "loss": "cross_entropy", "classes": 2,
        "party_test": 0.0, "seed": 0, "bf16": False, "prepared": False}  # fmt: skip


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], Any]:
    """The samples that are read from a function with this return value."""

    def read(values: Any) -> Any:
        monkeypatch.setattr("hansa.net.party.samples.load_function", lambda *where: lambda: values)
        return read_samples("my_data:load")

    return read


@pytest.mark.parametrize(
    "x", [[[1.0, 2.0], [3.0, 4.0]], ((1.0, 2.0), (3.0, 4.0)), ([1.0, 2.0], [3.0, 4.0]), np.array([[1.0, 2.0], [3, 4]])]
)
def test_two_rows_are_not_taken_for_a_training_and_a_test_set(given: Callable[[Any], Any], x: Any) -> None:
    (features, targets), test, *_ = given((x, [0, 1]))
    assert features.tolist() == [[1.0, 2.0], [3.0, 4.0]] and targets.tolist() == [0, 1] and test is None


def test_a_pair_of_pairs_is_a_training_and_a_test_set(given: Callable[[Any], Any]) -> None:
    train, test, *_ = given((([[1.0], [2.0]], [0, 1]), (np.ones((3, 1)), np.zeros(3))))
    assert [tuple(v.shape) for v in (*train, *test)] == [(2, 1), (2,), (3, 1), (3,)]


@pytest.mark.parametrize("dtype", [np.uint16, np.uint32, np.uint64, np.complex64])
@pytest.mark.parametrize("name", ["x", "y"])
def test_numbers_that_nothing_can_be_learned_from_are_refused_with_one_sentence(
    given: Callable[[Any], Any], dtype: Any, name: str
) -> None:
    arrays = {"x": np.ones((2, 3)), "y": np.zeros(2)}
    arrays[name] = arrays[name].astype(dtype)
    said = f"returned {name} as {np.dtype(dtype).name}; return floats, or whole numbers as int64"
    with pytest.raises(DataError, match=said):
        given((arrays["x"], arrays["y"]))


@pytest.mark.parametrize("low", [-1, 1])
def test_class_numbers_that_there_are_not_are_refused_in_test_samples_too(low: int) -> None:
    x = torch.ones(2, 2)
    good, bad = (x, torch.tensor([0, 1])), (x, torch.tensor([low, low + 1]))
    for train, test in ((bad, None), (good, bad)):
        with pytest.raises(NotAdmitted, match=r"^its targets (must lie in 0\.\.1, and it states|are not whole class)"):
            preparer((train, test))(0, TASK, "cpu")
    assert preparer((good, good))(0, TASK, "cpu").n == 2


def test_test_samples_come_from_a_file_of_their_own(tmp_path: Path) -> None:
    for name, rows in (("train", 5), ("test", 3), ("wide", 2)):
        np.savez(tmp_path / f"{name}.npz", x=np.ones((rows, 2 + (name == "wide"))), y=np.zeros(rows, dtype=np.int64))
    train, test, *_ = read_samples(str(tmp_path / "train.npz"), test=str(tmp_path / "test.npz"))
    assert len(train[0]) == 5 and test is not None and len(test[0]) == 3
    with pytest.raises(DataError, match=r"--test: the samples of .*wide.npz have the shape \(3,\), those of .* \(2,\)"):
        read_samples(str(tmp_path / "train.npz"), test=str(tmp_path / "wide.npz"))
    with pytest.raises(DataError, match="none"):
        read_samples(str(tmp_path / "train.npz"), test=str(tmp_path / "none.npz"))
