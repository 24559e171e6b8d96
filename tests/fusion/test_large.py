"""Updates larger than memory: rows in files, read in blocks, give the same result as in memory."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rules import RULES, draw, known, names
from torch import Tensor

from hansa.fusion import Fusion, Krum, distances
from hansa.fusion.distances import squared_distances
from hansa.numerics import rows as rows_module
from hansa.numerics.rows import MappedRows, Rows
from hansa.plumbing.errors import DataError


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of 256 columns, so that a small matrix has many."""
    monkeypatch.setitem(rows_module.BLOCK, "cpu", 256)
    for name in ("COLUMNS", "PRODUCTS", "WIDE"):
        monkeypatch.setattr(distances, name, 256)


def on_disk(data: Tensor, folder: Path) -> MappedRows:
    path = folder / "rows"
    path.write_bytes(data.numpy().tobytes())
    return MappedRows.open(path, *data.shape, data.dtype)


@pytest.mark.thin(4)
@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("rule", RULES, ids=names)
@pytest.mark.parametrize("direct", [True, False])
def test_rules_give_the_same_bits_from_a_file_as_from_memory(
    rule: Fusion, direct: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(distances, "DIRECT", 2**30 if direct else 0)
    data = draw(4, 13, 3001, torch.float32)
    told = known(rule, data)
    seen, again = rule.examine(data, **told), rule.examine(on_disk(data, tmp_path), **told)
    assert torch.equal(seen.w, again.w)
    assert seen.shares == again.shares
    assert seen.scores == again.scores
    assert torch.equal(rule(data, **told), seen.w)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("rule", RULES, ids=names)
def test_the_number_of_cores_does_not_matter(rule: Fusion, monkeypatch: pytest.MonkeyPatch) -> None:
    data = draw(5, 13, 3001, torch.float32)
    told, found = known(rule, data), []
    for cores in ({0}, {0, 1}, {0, 1, 2, 3}):
        monkeypatch.setattr(os, "sched_getaffinity", lambda _, cores=cores: cores)
        found.append(rule(data, **told))
    assert all(torch.equal(found[0], other) for other in found[1:])


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("rule", RULES, ids=names)
def test_bad_rows_in_a_file_are_left_out(rule: Fusion, tmp_path: Path) -> None:
    data = draw(6, 13, 1000, torch.float32)
    told = known(rule, data)
    spoilt = torch.cat([data[:3], torch.full((1, 1000), torch.nan), data[3:]])
    assert torch.equal(rule(on_disk(spoilt, tmp_path), **told), rule(data, **told))


def pairwise(data: Tensor) -> Tensor:
    wide = data.double().numpy()
    return torch.from_numpy(np.square(wide[:, None, :] - wide[None, :, :]).sum(2))


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    "kind", ["plain", "far from the origin", "huge ones", "colluders", "near twins", "one huge column", "all alike"]
)
def test_products_give_the_distances_that_differences_give(
    kind: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(distances, "DIRECT", 0)
    data = draw(7, 12, 2000, dtype)
    if kind == "far from the origin":
        data = data + 1e4
    elif kind == "huge ones":
        data[[2, 7]] = data[[2, 7]] * 1e25
        data[9] = 3e37
    elif kind == "colluders":
        data[[1, 4, 6, 8]] = 1e15
        data[4, 3] = 2e15
    elif kind == "near twins":
        data[5] = data[3] + 1e-3 * data[2]
    elif kind == "one huge column":
        data[:, 17] = data[:, 17] * 1e20
    elif kind == "all alike":
        data = data[:1].repeat(12, 1)
    expected = pairwise(data)
    torch.testing.assert_close(squared_distances(Rows(data)), expected, rtol=1e-4, atol=0)


def test_a_distance_that_is_larger_than_a_number_can_be_is_infinite_and_never_chosen() -> None:
    data = draw(8, 9)
    data[0], data[1] = 1e200, -1e200
    apart = squared_distances(Rows(data))
    assert bool(torch.isinf(apart[0, 1:]).all())
    assert bool(torch.isfinite(apart[2:, 2:]).all())
    assert any(torch.equal(Krum(f=2)(data), row) for row in data[2:])


def test_a_file_that_is_too_short_or_missing_is_one_sentence(tmp_path: Path) -> None:
    path = tmp_path / "rows"
    path.write_bytes(bytes(100))
    with pytest.raises(DataError, match="4 rows of 9 numbers take 144 bytes, the file has 100"):
        MappedRows.open(path, 4, 9)


def test_rows_that_find_no_place_on_disk_are_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(DataError, match=r"no place on disk for 400 bytes of updates: No space left"):
        MappedRows.temporary(10, 10, torch.float32, tmp_path)


def test_rows_written_to_disk_are_read_back_and_leave_nothing_behind(tmp_path: Path) -> None:
    data = draw(9, 6, 5000, torch.float32)
    rows = MappedRows.temporary(6, 5000, torch.float32, tmp_path)
    for k, row in enumerate(data):
        assert torch.equal(rows.write(k, row), row)
    assert torch.equal(rows.block(100, 4000), data[:, 100:4000])
    assert torch.equal(rows.take([4, 1]).block(0, 5000), data[[4, 1]])
    assert torch.equal(rows.take([4, 1]).row(0), data[4])
    assert torch.equal(Rows(data).take([5, 4, 3, 2, 1, 0]).block(0, 9), data.flip(0)[:, :9])
    opened = on_disk(data, tmp_path)
    with pytest.raises(DataError, match="rows of this file are read-only"):
        opened.write(0, data[1])
    (tmp_path / "rows").unlink()
    assert list(tmp_path.iterdir()) == []


def resident() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGESIZE")


def test_a_file_that_was_read_does_not_stay_in_memory(tmp_path: Path) -> None:
    path, count, dim = tmp_path / "rows", 16, 2**20
    with open(path, "wb") as file:
        for seed in range(count):
            file.write(draw(seed, 1, dim, torch.float32).numpy().tobytes())
    rows = MappedRows.open(path, count, dim)
    before = resident()
    for at, end in rows.spans():
        rows.block(at, end)
    for k in range(count):
        rows.row(k)
    assert resident() - before < count * dim * 4 / 2  # of 64 MiB
