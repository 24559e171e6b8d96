"""Files of parties that hold different columns of the same people."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from hansa.data.column_files import read_column_file
from hansa.plumbing.errors import DataError


@pytest.fixture
def bank(tmp_path: Path) -> Path:
    path = tmp_path / "bank.csv"
    path.write_text("income,customer,default\n1.5, ann ,0\n?,bob,1\n2,017,0\n")
    return path


def test_a_csv_file_has_ids_features_and_labels(bank: Path) -> None:
    rows, header = read_column_file(bank, "customer", "default")
    assert rows.ids is not None and rows.ids.tolist() == ["ann", "bob", "017"]
    assert rows.x[:, 0].isnan().tolist() == [False, True, False]
    assert rows.y is not None and rows.y.tolist() == [0, 1, 0]
    assert header == ("default", "income")


def test_without_a_target_a_party_has_no_labels_and_all_other_columns_are_features(bank: Path) -> None:
    rows, header = read_column_file(bank, "customer")
    assert rows.y is None and rows.x.shape == (3, 2) and header == ("", "income", "default")


def test_an_npz_file_has_its_ids_in_the_array_that_is_named(tmp_path: Path) -> None:
    np.savez(tmp_path / "shop.npz", x=np.ones((2, 3)), who=np.array([7, 17]))
    rows, _ = read_column_file(tmp_path / "shop.npz", "who")
    assert rows.ids is not None and rows.ids.tolist() == ["7", "17"] and rows.y is None
    np.savez(tmp_path / "bank.npz", x=np.ones((2, 3)), ids=np.array(["a", "b"]), y=np.array([0, 1]))
    rows, _ = read_column_file(tmp_path / "bank.npz", "ids")
    assert rows.y is not None and torch.equal(rows.y, torch.tensor([0, 1]))


@pytest.mark.parametrize(
    ("text", "reason"),
    [("who,a\nx,1\nx,2\n", "two rows have the same id"), ("who,a\nx,1\n ,2\n", "a row has no id"),
     ("who,a\n", "no rows below its header"), ("name,a\nx,1\n", "0 columns are called 'who'"),
     ("who,a\nx,b\n", "a should be a number"), ("who,y\nx,1\n", "no column of features"),
     ("who,a,y\nx,1,?\n", "the target 'y' is missing"), (f"who,a\n{'x' * 300},1\n", "more than 256 characters")],
)  # fmt: skip
def test_bad_files_get_one_sentence(tmp_path: Path, text: str, reason: str) -> None:
    path = tmp_path / "data.csv"
    path.write_text(text)
    with pytest.raises(DataError, match=reason):
        read_column_file(path, "who", "y" if ",y\n" in text else None)


def test_bad_arrays_get_one_sentence(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", x=np.ones((2, 3)))
    with pytest.raises(DataError, match="no array 'ids'; an NPZ file of a party holds the arrays x and ids"):
        read_column_file(tmp_path / "a.npz", "ids")
    np.savez(tmp_path / "b.npz", x=np.ones((2, 3)), ids=np.array([1.5, 2.5]))
    with pytest.raises(DataError, match="ids must be whole numbers or texts, got float64"):
        read_column_file(tmp_path / "b.npz", "ids")
    np.savez(tmp_path / "c.npz", x=np.ones((2, 3)), ids=np.array([1, 2, 3]))
    with pytest.raises(DataError, match="3 ids for 2 rows"):
        read_column_file(tmp_path / "c.npz", "ids")
    with pytest.raises(DataError, match="a target column can be named for CSV files only"):
        read_column_file(tmp_path / "c.npz", "ids", "y")
