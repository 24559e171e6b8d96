from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hansa.data import load_party_file
from hansa.plumbing.errors import DataError


def csv_file(folder: Path, text: str) -> Path:
    path = folder / "party.csv"
    path.write_text(text)
    return path


def test_the_last_column_of_a_csv_file_is_the_target(tmp_path: Path) -> None:
    x, y = load_party_file(csv_file(tmp_path, "age,chol,disease\n63,233,0\n67,?,1\n\n41, ,1\n"))
    assert x.dtype == torch.float32 and x.nan_to_num(-1).tolist() == [[63, 233], [67, -1], [41, -1]]
    assert y.dtype == torch.int64 and y.tolist() == [0, 1, 1]


def test_the_target_column_can_be_named(tmp_path: Path) -> None:
    x, y = load_party_file(csv_file(tmp_path, "price,rooms\n1.5,3\n2,4\n"), target="price")
    assert x.tolist() == [[3], [4]] and y.dtype == torch.float32 and y.tolist() == [1.5, 2.0]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (
            "b,a\n1,2\nfour,3\n",
            r"party\.csv, line 3: b should be a number, or empty where it is missing, and is 'four'",
        ),
        ("b,a\ninf,1\n", "line 2: b should be a number"),
        ("a,b\n1,inf\n", "line 2: the target 'b' is 'inf'; give numbers"),
        ("a,b\n1,yes\n", "line 2: the target 'b' is 'yes'; give numbers, or class numbers from 0"),
        ("a,a,b\n1,2,3\n", "two columns are called 'a'"),
        ("a,b\n1,2,3\n", "line 2: 3 values where the header names 2 columns"),
        ("a,b\n1,\n", "line 2: the target 'b' is missing"),
        ("a,b\n1,2\n\n\n3,four\n", "line 5: the target 'b' is 'four'"),
        ('a,"b\nc"\n"1\n",2\n\nx,4\n', "line 6: a should be a number"),
        ('a,b\n1,2\n"x\n\ny",4\n', "line 3: a should be a number"),
        (
            "a,b\n1,2\n\n1e39,4\n",
            "line 4: 'a' is infinite or too large for float32: 1e39, and numbers up to 3.4e.38 fit",
        ),
        ("a,b\n", "no rows below its header"),
        ("", "header"),
        ("a\n1\n", "header"),
        ("1,2\n3,4\n", "numbers instead of column names"),
        ("a,b\n1,\xff\n", "UTF-8"),
    ],
)
def test_a_wrong_csv_file_is_refused_with_its_line(tmp_path: Path, text: str, reason: str) -> None:
    path = tmp_path / "party.csv"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(DataError, match=reason):
        load_party_file(path)


def test_a_misspelt_target_gets_a_suggestion(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="did you mean 'disease'"):
        load_party_file(csv_file(tmp_path, "age,disease\n1,1\n"), target="desease")


@given(values=st.lists(st.lists(st.floats(-1e6, 1e6, width=32), min_size=3, max_size=3), min_size=1, max_size=8))
@settings(max_examples=25, deadline=None)
def test_csv_and_npz_agree(tmp_path_factory: pytest.TempPathFactory, values: list[list[float]]) -> None:
    folder = tmp_path_factory.mktemp("parties")
    table = np.array(values, dtype=np.float32)
    labels = np.arange(len(table)) % 2
    lines = [",".join(map(repr, row.tolist())) + f",{label}" for row, label in zip(table, labels, strict=True)]
    from_csv = load_party_file(csv_file(folder, "\n".join(["a,b,c,label", *lines])))
    np.savez(folder / "party.npz", x=table, y=labels)
    from_npz = load_party_file(folder / "party.npz")
    assert torch.equal(from_csv[0], from_npz[0]) and torch.equal(from_csv[1], from_npz[1])


def test_npz_files_may_hold_images_and_real_targets(tmp_path: Path) -> None:
    np.savez(tmp_path / "party.npz", x=np.zeros((4, 1, 8, 8), dtype=np.uint8), y=np.linspace(0, 1, 4))
    x, y = load_party_file(tmp_path / "party.npz")
    assert x.shape == (4, 1, 8, 8) and x.dtype == y.dtype == torch.float32


@pytest.mark.parametrize(
    ("arrays", "reason"),
    [
        ({"x": np.zeros((3, 2))}, "no array 'y'"),
        ({"x": np.zeros((3, 2)), "y": np.zeros(4)}, "one entry per sample"),
        ({"x": np.zeros((3, 2)), "y": np.array(["a", "b", "c"])}, "numbers are needed"),
        ({"x": np.array([{}, {}], dtype=object), "y": np.zeros(2)}, "plain numeric arrays"),
        ({"x": np.zeros((2, 2)), "y": np.array([1.0, np.nan])}, "missing or infinite targets"),
    ],
)
def test_a_wrong_npz_file_is_refused(tmp_path: Path, arrays: dict[str, Any], reason: str) -> None:
    np.savez(tmp_path / "party.npz", **arrays)
    with pytest.raises(DataError, match=reason):
        load_party_file(tmp_path / "party.npz")


def test_files_that_are_missing_damaged_or_of_another_kind_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="there is no file"):
        load_party_file(tmp_path / "nowhere.csv")
    (tmp_path / "party.npz").write_bytes(b"PK damaged")
    with pytest.raises(DataError, match="not an NPZ file"):
        load_party_file(tmp_path / "party.npz")
    (tmp_path / "party.xlsx").write_bytes(b"")
    with pytest.raises(DataError, match=r"\.csv, \.csv\.gz or \.npz"):
        load_party_file(tmp_path / "party.xlsx")
