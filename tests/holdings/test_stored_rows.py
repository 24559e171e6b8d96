"""Features that stay in files behave as a tensor of them, and data sets that do not fit are refused in a sentence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hansa.holdings.gateway import SampleGateway
from hansa.holdings.stored_rows import (
    BLOCK,
    ArrayRows,
    StoredRows,
    blocks,
    column_of,
    is_dataset,
    joined,
    read_dataset,
    stored,
    whole,
)
from hansa.plumbing.errors import DataError


def mapped(folder: Path, array: np.ndarray) -> np.ndarray:
    np.save(folder / "x.npy", array)
    return np.load(folder / "x.npy", mmap_mode="r")


class Pairs(torch.utils.data.Dataset):
    """A map-style data set that counts what is read."""

    def __init__(self, x: Any, y: Any) -> None:
        self.x, self.y, self.read = x, y, 0

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, row: int) -> Any:
        self.read += 1
        return self.x[row], self.y[row]


def test_rows_are_indexed_as_those_of_a_tensor(tmp_path: Path) -> None:
    array = np.arange(60, dtype=np.uint8).reshape(10, 2, 3)
    rows, wanted = StoredRows([ArrayRows(mapped(tmp_path, array), "x")]).to(torch.float32), torch.tensor(array).float()
    assert rows.shape == (10, 2, 3) and len(rows) == 10 and rows.dim() == 3 and rows.is_floating_point()
    for index in (slice(None), slice(2, 5), slice(0, 0), torch.tensor([3, 1, 1]), torch.tensor([[0, 9], [4, 4]])):
        assert torch.equal(rows[index], wanted[index])
    assert torch.equal(rows.span(2, 7)[torch.tensor([0, 4])], wanted[[2, 6]])
    assert torch.equal(rows.select(np.array([5, 2]))[:], wanted[[5, 2]])
    assert torch.equal(rows.then(lambda x: x * 2)[1:3], wanted[1:3] * 2)
    assert torch.equal(whole(rows), wanted) and rows.clone() is rows
    assert torch.equal(column_of(rows.then(lambda x: x.flatten(1)), 4), wanted.flatten(1)[:, 4])
    with pytest.raises(ValueError, match="read by batches alone"):
        torch.func.vmap(lambda at: rows[at])(torch.arange(3))


def test_rows_of_several_parties_are_one_after_another(tmp_path: Path) -> None:
    array = np.random.default_rng(1).normal(size=(7, 3)).astype(np.float32)
    parts = [
        StoredRows([ArrayRows(array[:2], "a")]),
        torch.from_numpy(array[2:3]),
        StoredRows([ArrayRows(array[3:], "b")]),
    ]
    rows = joined(parts, "parties x")
    wanted = torch.from_numpy(array)
    assert torch.equal(rows[:], wanted) and torch.equal(rows[torch.tensor([6, 0, 2, 1])], wanted[[6, 0, 2, 1]])
    for first, last in ((0, 2), (1, 5), (2, 3), (3, 7), (4, 4)):
        assert torch.equal(rows.span(first, last)[:], wanted[first:last])
    with pytest.raises(DataError, match="disagree on the type of a sample: float32, float64"):
        joined([parts[0], torch.zeros(1, 3, dtype=torch.float64)], "parties x")
    assert rows.digest() == joined([torch.from_numpy(array), parts[0].span(0, 0)], "x").digest()
    assert rows.digest() != rows.then(lambda x: x + 1).digest()


def test_blocks_have_all_rows_and_few_at_a_time() -> None:
    rows = StoredRows([ArrayRows(np.arange(2.0 * BLOCK + 3)[:, None], "x")])
    assert [len(block) for block in blocks(rows)] == [BLOCK, BLOCK, 3]
    large = StoredRows([ArrayRows(np.zeros((3, 2**22), dtype=np.uint8), "x")])
    assert [len(block) for block in blocks(large)] == [1, 1, 1]
    tensor = torch.zeros(5 * BLOCK)
    assert [block is tensor for block in blocks(tensor)] == [True]


def test_memory_maps_stay_in_files_and_their_copies_do_not(tmp_path: Path) -> None:
    array = mapped(tmp_path, np.ones((3, 2)))
    assert stored(array) and stored(array[1:]) and not stored(np.array(array)) and not stored(torch.ones(2))
    assert is_dataset(Pairs([1], [1])) and not any(map(is_dataset, ([], (1, 2), array, torch.ones(2), "x", {})))


def test_a_gateway_reads_stored_features_where_an_op_wants_them_all(tmp_path: Path) -> None:
    x, y = np.arange(8.0).reshape(4, 2), torch.arange(4)
    data = SampleGateway((StoredRows([ArrayRows(mapped(tmp_path, x), "x")]), y))
    assert isinstance(data.rows("train")[0], StoredRows) and torch.equal(data.train("train")[0], torch.tensor(x))
    before = data.digest()
    data.transform(lambda rows: rows * 2)
    assert torch.equal(data.train("train")[0], torch.tensor(x) * 2) and data.digest() != before
    assert data.copy().n == 4


def test_a_data_set_is_read_once_for_its_targets(tmp_path: Path) -> None:
    pairs = Pairs(torch.randn(5, 3), np.array([0, 1, 2, 1, 0]))
    x, y = read_dataset(pairs, "parties[0]")
    assert pairs.read == 6 and y.tolist() == [0, 1, 2, 1, 0] and y.dtype == torch.int64
    assert torch.equal(x[torch.tensor([4, 0])], pairs.x[[4, 0]]) and pairs.read == 8
    x, y = read_dataset(Pairs(np.ones((2, 3)), [0.5, 1.5]), "parties[0]")
    assert y.dtype == torch.float64 and x.dtype == torch.float64


class Broken(Pairs):
    def __getitem__(self, row: int) -> Any:
        if row == 2:
            raise OSError("disk gone")
        return super().__getitem__(row)


@pytest.mark.parametrize(
    ("pairs", "message"),
    [
        (Pairs([], []), r"^p: the data set has no samples"),
        (Pairs([torch.ones(3), torch.ones(4)], [0, 1]), r"^p: sample 1 is float32 \(4,\), and sample 0 is .* \(3,\)"),
        (Pairs([torch.ones(3), torch.ones(3).double()], [0, 1]), r"^p: sample 1 is float64 \(3,\), and .* float32"),
        (Pairs([torch.ones(3)] * 2, [0, 0.5]), r"^p: the target of sample 1 is float64 .* int64"),
        (Pairs([torch.ones(3), object()], [0, 0]), r"^p: sample 1 is a pair of object and int; expected arrays"),
        (Broken([torch.ones(3)] * 4, [0] * 4), r"^p: sample 2 cannot be read: OSError: disk gone"),
        ([torch.ones(3)], r"^p: sample 0 is a Tensor; expected a pair"),
    ],
)  # fmt: skip
def test_a_data_set_that_does_not_fit_is_refused_in_a_sentence(pairs: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        read_dataset(pairs, "p")


def test_a_data_set_that_changes_is_noticed() -> None:
    pairs = Pairs([torch.ones(3)] * 3, [0] * 3)
    x, _ = read_dataset(pairs, "p")
    pairs.x[1] = torch.ones(4)
    with pytest.raises(RuntimeError, match=r"p: sample 1 is float32 \(4,\)"):
        x[:]
    pairs.x.append(torch.ones(3))
    with pytest.raises(RuntimeError, match="the data set has 4 samples, and it had 3 when the run began"):
        x[:1]


def test_arrays_of_other_things_than_numbers_are_refused() -> None:
    for array in (np.array(["a"]), np.ones(2, dtype=">f4"), np.ones(2, dtype=complex)):
        with pytest.raises(DataError, match="features are numbers in the machine's byte order"):
            ArrayRows(array, "x")
