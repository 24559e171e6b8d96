"""Partitions in which parties differ in the labels they hold."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hansa.core.quantities import AnyCount, Count, Fraction, Parties
from hansa.core.registry import register
from hansa.data.dataset import Data
from hansa.data.partition import (
    Concentration,
    Partition,
    check_rows,
    cut,
    draw_until,
    generator,
)
from hansa.plumbing.errors import DataError


@register("dirichlet")
@dataclass(frozen=True)
class Dirichlet(Partition):
    """Label skew: each class is divided among the parties by shares from a Dirichlet distribution.

    The form of Yurochkin et al. 2019 and Li et al. 2022 (NIID-Bench): for each class, shares ~ Dir(alpha) over the
    parties, and a party that already holds its even share of all rows gets no more. Hsu, Qi and Brown 2019
    (arXiv:1909.06335) draw a class mixture for each party instead and keep all sizes equal; here sizes vary. A small
    alpha gives each party few classes, a large one approaches IID. Splits are drawn again until each party has
    `min_size` rows; if that does not happen within 100 draws, the largest parties give rows to those that lack them.
    Only min_size = 0 allows empty parties.
    """

    parties: Parties = 10
    alpha: Concentration = 0.5
    min_size: AnyCount = 1

    def split(self, data: Data, seed: int) -> list[np.ndarray]:
        y = labels(data, self.name)
        check_rows(len(y), self.parties, self.min_size)
        rng = generator(seed)
        by_class = [np.flatnonzero(y == label) for label in np.unique(y)]

        def draw() -> list[np.ndarray]:
            sizes = np.zeros(self.parties, dtype=np.int64)
            pieces: list[list[np.ndarray]] = []
            for rows in by_class:
                shares = rng.dirichlet(np.full(self.parties, self.alpha))
                wanting = sizes < len(y) / self.parties
                shares = shares * wanting
                shares = shares / shares.sum() if shares.sum() > 0 else wanting / wanting.sum()
                pieces.append(cut(rng.permutation(rows), shares))
                sizes += [len(piece) for piece in pieces[-1]]
            return [rng.permutation(np.concatenate(mine)) for mine in zip(*pieces, strict=True)]

        return draw_until(draw, self.min_size)


@register("shards")
@dataclass(frozen=True)
class Shards(Partition):
    """Label skew: sort the rows by label, cut them into shards, give each party a few random shards.

    McMahan et al. 2017: MNIST, 100 parties, 2 of 200 shards of 300 rows each, so that most parties see two digits.
    """

    parties: Parties = 100
    per_party: Count = 2

    def split(self, data: Data, seed: int) -> list[np.ndarray]:
        y = labels(data, self.name)
        check_rows(len(y), self.parties, self.per_party)
        rng = generator(seed)
        shuffled = rng.permutation(len(y))
        order = shuffled[np.argsort(y[shuffled], kind="stable")]
        shards = np.array_split(order, self.parties * self.per_party)
        dealt = rng.permutation(len(shards)).reshape(self.parties, self.per_party)
        return [np.sort(np.concatenate([shards[i] for i in mine])) for mine in dealt]


@register("similarity")
@dataclass(frozen=True)
class Similarity(Partition):
    """Label skew: a share of each party's rows is random, the rest comes from rows sorted by label.

    Hsu, Qi and Brown 2019 and Karimireddy et al. 2020 (SCAFFOLD): with `similarity` = s a party's rows are 100 s %
    IID; the others are sorted by label and cut into one piece per party. 0 gives most parties a single label, 1 is IID.
    Sizes differ by one at most.
    """

    parties: Parties = 100
    similarity: Fraction = 0.1

    def split(self, data: Data, seed: int) -> list[np.ndarray]:
        y = labels(data, self.name)
        check_rows(len(y), self.parties, 1)
        shuffled = generator(seed).permutation(len(y))
        ends = len(y) * np.arange(self.parties + 1) // self.parties
        mixed = (self.similarity * ends).astype(np.int64)
        alike, apart = np.split(shuffled, [mixed[-1]])
        apart = apart[np.argsort(y[apart], kind="stable")]
        pieces = zip(np.split(alike, mixed[1:-1]), np.split(apart, (ends - mixed)[1:-1]), strict=True)
        return [np.sort(np.concatenate(mine)) for mine in pieces]


def labels(data: Data, partition: str) -> np.ndarray:
    """One class label per row; raise DataError if the data set has none."""
    if data.classes is None:
        raise DataError(
            f"the partition {partition!r} divides rows by their class label and this data set has numbers as targets "
            "(regression); choose 'iid', 'quantity', 'noise' or 'natural'"
        )
    if data.y.ndim != 1:
        raise DataError(
            f"the partition {partition!r} divides rows by their class label and the samples of this data set have one "
            "target per position (sequences); choose 'iid', 'quantity' or 'natural'"
        )
    return data.y.numpy()
