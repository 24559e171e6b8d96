from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hansa.core.plain_data import build
from hansa.core.registry import registered
from hansa.data import Data, Dirichlet, Heart, Iid, Natural, Noise, Partition, Quantity, Shards, Similarity, table
from hansa.plumbing.errors import ConfigError, DataError

SPLITS: list[Partition] = [
    Iid(7),
    Noise(7),
    Quantity(7, alpha=0.1),
    Quantity(7, alpha=5.0, min_size=4),
    Dirichlet(7, alpha=0.05),
    Dirichlet(7, alpha=1.0, min_size=3),
    Dirichlet(7, alpha=0.3, min_size=0),
    Shards(7, per_party=3),
    Similarity(7, similarity=0.0),
    Similarity(7, similarity=0.37),
    Similarity(7, similarity=1.0),
]


def labelled(y: np.ndarray, classes: int) -> Data:
    """A data set of which only the labels matter."""
    targets = torch.from_numpy(np.asarray(y, dtype=np.int64))
    return Data(torch.zeros(len(y), 2), targets, None, None, None, classes, "cross_entropy")


def holds_each_row_once(parts: list[np.ndarray], rows: int) -> bool:
    return np.array_equal(np.sort(np.concatenate(parts)), np.arange(rows))


@pytest.mark.parametrize("partition", SPLITS, ids=repr)
@given(seed=st.integers(0, 2**63), rows=st.integers(40, 300), classes=st.integers(1, 12))
@settings(max_examples=15, deadline=None)
def test_every_row_goes_to_exactly_one_party(partition: Partition, seed: int, rows: int, classes: int) -> None:
    y = np.random.default_rng(seed).integers(0, classes, rows)
    parts = partition.split(labelled(y, classes), seed)
    assert len(parts) == 7
    assert holds_each_row_once(parts, rows)
    assert all(np.all(np.diff(part) > 0) for part in parts)
    least = getattr(partition, "min_size", 1)
    assert min(len(part) for part in parts) >= least


@pytest.mark.parametrize("partition", SPLITS, ids=repr)
def test_a_seed_gives_the_same_split_twice_and_another_seed_another(partition: Partition) -> None:
    data = labelled(np.arange(500) % 10, 10)
    first, again, other = (partition.split(data, seed) for seed in (3, 3, 4))
    assert all(np.array_equal(a, b) for a, b in zip(first, again, strict=True))
    assert any(not np.array_equal(a, b) for a, b in zip(first, other, strict=True))


def test_every_registered_partition_is_tested_here_or_needs_no_seed() -> None:
    assert set(registered("partition")) == {p.name for p in SPLITS} | {"natural", "columns"}  # test_column_split.py
    assert build("partition", "dirichlet", alpha=2).alpha == 2.0


def test_iid_sizes_differ_by_one_at_most() -> None:
    sizes = [len(part) for part in Iid(7).split(labelled(np.zeros(100), 1), 0)]
    assert max(sizes) - min(sizes) <= 1


def test_as_many_parties_as_rows_give_each_party_one_row() -> None:
    for partition in (Iid(20), Quantity(20), Dirichlet(20), Shards(10, 2), Similarity(20)):
        parts = partition.split(labelled(np.arange(20) % 3, 3), 0)
        assert {len(part) for part in parts} == {20 // partition.parties}


def test_shards_give_a_party_few_labels() -> None:
    y = np.repeat(np.arange(10), 600)  # 200 shards of 30 rows: no shard crosses a label
    counts = np.array(table(Shards(100, 2).split(labelled(y, 10), 0), y, 10))
    assert ((counts > 0).sum(axis=1) <= 2).all()
    uneven = np.sort(np.random.default_rng(0).integers(0, 10, 6000))  # a shard may cross one border
    counts = np.array(table(Shards(100, 2).split(labelled(uneven, 10), 0), uneven, 10))
    assert ((counts > 0).sum(axis=1) <= 4).all()
    assert np.median((counts > 0).sum(axis=1)) <= 2


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 1.0])
def test_similarity_is_the_share_of_rows_that_are_drawn_at_random(share: float) -> None:
    y = np.random.default_rng(1).permutation(np.repeat(np.arange(10), 2000))  # 20 parties, two for each label
    parts = Similarity(20, similarity=share).split(labelled(y, 10), 0)
    assert {len(part) for part in parts} == {1000}
    counts = np.array(table(parts, y, 10)) / 1000
    sorted_by_label = np.kron(np.eye(10), np.ones((2, 1)))  # what the parties hold of the rows sorted by label
    assert np.abs(counts - (share * 0.1 + (1 - share) * sorted_by_label)).max() < 0.08


def test_dirichlet_approaches_iid_for_a_large_alpha_and_one_label_for_a_small_one() -> None:
    y = np.arange(5000) % 10
    data = labelled(y, 10)

    def shares(alpha: float) -> np.ndarray:
        counts = np.array(table(Dirichlet(10, alpha).split(data, 1), y, 10))
        return counts / counts.sum(axis=1, keepdims=True)

    assert np.abs(shares(1e6) - 0.1).max() < 0.01
    assert np.median(shares(0.01).max(axis=1)) > 0.6
    assert shares(0.1).max(axis=1).mean() > shares(1.0).max(axis=1).mean() > shares(100.0).max(axis=1).mean()


def test_dirichlet_fills_up_parties_when_drawing_again_does_not_help() -> None:
    y = np.arange(300) % 2
    parts = Dirichlet(50, alpha=1e-3, min_size=5).split(labelled(y, 2), 0)
    assert min(len(part) for part in parts) >= 5
    assert holds_each_row_once(parts, 300)


def test_quantity_sizes_spread_more_for_a_small_alpha() -> None:
    data = labelled(np.zeros(2000), 1)
    spread = [np.std([len(part) for part in Quantity(20, alpha).split(data, 0)]) for alpha in (0.1, 1.0, 1000.0)]
    assert spread[0] > spread[1] > spread[2]
    assert spread[2] < 10


def test_noise_grows_from_party_to_party_and_repeats() -> None:
    partition = Noise(parties=4, sigma=2.0)
    x = torch.zeros(4000, 3)
    deviations = [partition.features(x, party, 0).std().item() for party in range(4)]
    assert deviations == pytest.approx([0.5, 1.0, 1.5, 2.0], rel=0.05)
    assert torch.equal(partition.features(x, 2, 5), partition.features(x, 2, 5))
    assert not torch.equal(partition.features(x, 2, 5), partition.features(x, 2, 6))
    assert partition.features(x, 0, 0).dtype == x.dtype


def test_other_partitions_leave_features_alone() -> None:
    x = torch.randn(5, 3)
    assert Iid().features(x, 0, 0) is x


def test_noise_refuses_characters() -> None:
    with pytest.raises(DataError, match="codes"):
        Noise().features(torch.zeros(3, 8, dtype=torch.int64), 0, 0)


def test_natural_is_what_the_data_set_says() -> None:
    heart = Heart().load()
    parts = Natural().split(heart, 0)
    assert [len(part) for part in parts] == [303, 294, 123, 200]


def test_natural_refuses_a_data_set_without_parties() -> None:
    with pytest.raises(DataError, match="no natural parties"):
        Natural().split(labelled(np.zeros(10), 1), 0)


@pytest.mark.parametrize("partition", [Dirichlet(2), Shards(2), Similarity(2)], ids=repr)
def test_partitions_by_label_refuse_regression_and_sequences(partition: Partition) -> None:
    data = labelled(np.zeros(20), 1)
    with pytest.raises(DataError, match="regression"):
        partition.split(replace(data, y=torch.randn(20), classes=None, loss="mse"), 0)
    with pytest.raises(DataError, match="sequences"):
        partition.split(replace(data, y=torch.zeros(20, 5, dtype=torch.int64)), 0)


@pytest.mark.parametrize("partition", [Iid(11), Quantity(11), Dirichlet(6, min_size=2), Shards(6, 2)], ids=repr)
def test_too_few_rows_for_the_parties_are_refused(partition: Partition) -> None:
    with pytest.raises(DataError, match="10 rows are too few"):
        partition.split(labelled(np.zeros(10), 1), 0)


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("iid", {"parties": 0}),
        ("dirichlet", {"alpha": 0.0}),
        ("dirichlet", {"alpha": float("nan")}),
        ("quantity", {"min_size": -1}),
        ("shards", {"per_party": 0}),
        ("noise", {"sigma": -1.0}),
        ("similarity", {"similarity": 1.1}),
    ],
)
def test_impossible_settings_are_refused(name: str, fields: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=next(iter(fields))):
        build("partition", name, **fields)
