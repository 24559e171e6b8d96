"""A table divided by columns: vertical federated learning (Yang, Liu, Chen and Tong, 2019, arXiv:1902.04885)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from hansa.core.quantities import Parties, Share
from hansa.core.registry import register
from hansa.data.dataset import Data
from hansa.data.partition import Partition, generator
from hansa.plumbing.errors import ConfigError, DataError

Rows = tuple[Tensor, Tensor | None]


@dataclass(frozen=True)
class ColumnParts:
    """A table divided by columns: (x, y) and ids of each party, y None without labels; the same of the test set."""

    parties: list[Rows]
    ids: list[np.ndarray]
    tests: list[Rows] | None
    test_ids: list[np.ndarray] | None


@register("columns")
@dataclass(frozen=True)
class Columns(Partition):
    """Vertical data: each party holds a block of columns, and the rows have ids.

    Every column is at one party. `overlap` is the share of the rows that all parties hold; each other row is at one
    party. So `overlap` = 1 gives every party all rows. Each party has its rows in an order of its own. The parties in
    `labels` hold the targets. The test set of the data set is divided in the same way. A picture with one channel is a
    row of pixels.
    """

    parties: Parties = 2
    overlap: Share = 1.0
    labels: tuple[int, ...] = (0,)
    data: ClassVar[str] = "columns"

    def __post_init__(self) -> None:
        holders = set(self.labels)
        if not holders or len(holders) < len(self.labels) or not holders <= {*range(self.parties)}:
            raise ConfigError(
                f"labels is {list(self.labels)}; it lists the parties with labels, each once, from 0 to "
                f"{self.parties - 1}"
            )

    def split(self, data: Data, seed: int) -> list[np.ndarray]:
        """Row indices of each party, in its own order."""
        return self._rows(len(data.y), seed, 0)

    def columns(self, data: Data) -> list[np.ndarray]:
        """Column indices of each party: consecutive blocks, whose sizes differ by one at most."""
        width = _table(data.x).shape[1]
        if width < self.parties:
            raise DataError(f"the data set has {width} columns, too few for {self.parties} parties")
        return np.array_split(np.arange(width), self.parties)

    def divide(self, data: Data, seed: int) -> ColumnParts:
        """The columns, labels and ids of each party. An id is the number of a row; those of test rows come last."""
        columns, n = self.columns(data), len(data.x)
        rows = self.split(data, seed)
        parties = self._parts((data.x, data.y), rows, columns)
        if data.test is None:
            return ColumnParts(parties, rows, None, None)
        test_rows = self._rows(len(data.test[1]), seed, 1)
        return ColumnParts(parties, rows, self._parts(data.test, test_rows, columns), [n + own for own in test_rows])

    def _rows(self, n: int, seed: int, stream: int) -> list[np.ndarray]:
        rng = generator(seed, stream)
        order = rng.permutation(n)
        cut = round(self.overlap * n)
        if n and not cut:
            raise DataError(f"overlap is {self.overlap}, so the parties would have no row of {n} in common; raise it")
        single = np.array_split(order[cut:], self.parties)
        return [rng.permutation(np.concatenate([order[:cut], own])) for own in single]

    def _parts(self, pair: tuple[Tensor, Tensor], rows: Sequence[np.ndarray],
               columns: Sequence[np.ndarray]) -> list[Rows]:  # fmt: skip
        x, y = _table(pair[0]), pair[1]
        parts: list[Rows] = []
        for k, (own, at) in enumerate(zip(rows, columns, strict=True)):
            index = torch.from_numpy(own)
            parts.append((x[index][:, torch.from_numpy(at)], y[index] if k in self.labels else None))
        return parts


def _table(x: Tensor) -> Tensor:
    """The features as a table; a DataError for sequences, and for pictures with several channels."""
    if x.is_floating_point() and (x.dim() == 2 or (x.dim() == 4 and x.shape[1] == 1)):
        return x.flatten(1)
    kind = f"samples of the shape {tuple(x.shape[1:])}" if x.is_floating_point() else "sequences of codes"
    raise DataError(f"the partition 'columns' divides tables, and this data set has {kind}; choose another partition")
