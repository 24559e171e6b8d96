"""The partition `columns`: every column is at one party, and rows are matched by ids."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hansa.core.plain_data import build
from hansa.data import BreastCancer, Columns, Data, Digits, Heart
from hansa.plumbing.errors import ConfigError, DataError


def table(rows: int = 30, columns: int = 7, test: int = 0) -> Data:
    x = torch.arange(rows * columns, dtype=torch.float32).reshape(rows, columns)
    held = (x[:test] + 0.5, torch.arange(test) % 2) if test else None
    return Data(x, torch.arange(rows) % 3, held, None, None, 3, "cross_entropy")


def common(ids: list[np.ndarray]) -> set[int]:
    return set.intersection(*(set(own.tolist()) for own in ids))


@given(seed=st.integers(0, 2**63), rows=st.integers(1, 60), parties=st.integers(1, 7))
@settings(max_examples=40, deadline=None)
def test_columns_joined_by_id_are_the_table(seed: int, rows: int, parties: int) -> None:
    data = table(rows)
    parts = Columns(parties).divide(data, seed)
    order = [np.argsort(ids) for ids in parts.ids]
    assert all(np.array_equal(ids[at], np.arange(rows)) for ids, at in zip(parts.ids, order, strict=True))
    joined = torch.cat([x[torch.from_numpy(at)] for (x, _), at in zip(parts.parties, order, strict=True)], 1)
    assert torch.equal(joined, data.x)
    y = parts.parties[0][1]
    assert y is not None and torch.equal(y[torch.from_numpy(order[0])], data.y)
    assert all(other is None for _, other in parts.parties[1:])


@given(seed=st.integers(0, 2**63), overlap=st.floats(0.1, 1.0), parties=st.integers(2, 5))
@settings(max_examples=40, deadline=None)
def test_the_share_of_common_rows_is_the_overlap_and_any_two_parties_share_no_others(
    seed: int, overlap: float, parties: int
) -> None:
    ids = Columns(parties, overlap).divide(table(101), seed).ids
    shared = common(ids)
    assert len(shared) == round(overlap * 101)
    assert set().union(*(own.tolist() for own in ids)) == set(range(101))  # no row is lost
    assert all(common([ids[a], ids[b]]) == shared for a in range(parties) for b in range(a))
    assert all(len(set(own.tolist())) == len(own) for own in ids)


def test_every_column_is_at_one_party_and_blocks_differ_by_one_at_most() -> None:
    blocks = Columns(3).columns(table(columns=8))
    assert np.array_equal(np.concatenate(blocks), np.arange(8)) and [len(block) for block in blocks] == [3, 3, 2]


def test_parties_have_rows_in_orders_of_their_own_and_the_seed_decides() -> None:
    first, again, other = (Columns(2).divide(table(), seed).ids for seed in (1, 1, 2))
    assert all(np.array_equal(a, b) for a, b in zip(first, again, strict=True))
    assert not np.array_equal(first[0], first[1]) and not np.array_equal(first[0], other[0])


def test_test_rows_are_divided_alike_and_their_ids_are_new() -> None:
    parts = Columns(2, 0.5, labels=(1,)).divide(table(30, test=20), 3)
    assert parts.tests is not None and parts.test_ids is not None
    assert len(common(parts.test_ids)) == 10 and not common(parts.ids) & common(parts.test_ids)
    assert [y is None for _, y in parts.tests] == [y is None for _, y in parts.parties] == [True, False]
    x, ids = parts.tests[1][0], torch.from_numpy(parts.test_ids[1] - 30)
    assert torch.equal(x, table(30, test=20).test[0][ids][:, 4:])  # type: ignore[index]


def test_tables_and_pictures_with_one_channel_are_divided() -> None:
    for dataset in (BreastCancer(), Digits(), Heart()):
        data = dataset.load()
        parts = Columns(3).divide(data, 0)
        assert sum(x.shape[1] for x, _ in parts.parties) == data.x[0].numel()
        assert (parts.tests is None) == (data.test is None)


@pytest.mark.parametrize(
    ("x", "reason"),
    [(torch.zeros(4, 3, 8, 8), r"samples of the shape \(3, 8, 8\)"), (torch.zeros(4, 80).long(), "sequences of codes")],
)
def test_other_samples_are_refused(x: Any, reason: str) -> None:
    with pytest.raises(DataError, match=f"divides tables, and this data set has {reason}"):
        Columns(2).divide(replace(table(4), x=x), 0)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [({"overlap": 0.0}, "overlap must be above 0 and at most 1, got 0"),
     ({"overlap": 1.5}, "overlap must be above 0 and at most 1, got 1.5"), ({"labels": ()}, "with labels"),
     ({"labels": (2,)}, "from 0 to 1"), ({"labels": (0, 0)}, "each once"),
     ({"parties": 0}, "parties must be at least 1")],
)  # fmt: skip
def test_bad_fields_are_refused(fields: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        build("partition", "columns", **fields)


def test_too_many_parties_or_too_small_an_overlap_are_refused() -> None:
    with pytest.raises(DataError, match="7 columns, too few for 8 parties"):
        Columns(8).divide(table(), 0)
    with pytest.raises(DataError, match="no row of 30 in common"):
        Columns(2, 0.01).divide(table(), 0)
