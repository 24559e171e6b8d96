"""Placement of the parties' samples: features lie in the cluster's object store, in blocks of consecutive rows.

The driver puts each block into the store once. The first actor of a machine that needs a block brings it there, and
all actors of the machine read that one copy. An actor with a GPU copies all blocks to its card, once.
"""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hansa.cluster.trees import PackedTensor, packed
from hansa.core.task import Holdings, PartyShards
from hansa.holdings.public import PublicSamples
from hansa.holdings.stored_rows import Features, Rows, StoredRows

BLOCK = 2**26  # bytes of features per block, at least one row


class BlockRows:
    """Rows of one block, fetched when one of them is first read (a `RowSource`)."""

    def __init__(self, ray: Any, ref: Any, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self.shape, self.dtype = shape, dtype
        self._ray, self._ref = ray, ref
        self._block: PackedTensor | None = None

    def read(self, rows: Rows) -> Tensor:
        if self._block is None:
            self._block = self._ray.get(self._ref)
        array = self._block.array
        together = len(rows) > 0 and rows[-1] - rows[0] + 1 == len(rows) and bool((np.diff(rows) == 1).all())
        return self._block._replace(array=array[rows[0] : rows[-1] + 1] if together else array[rows]).tensor()


class Placed:
    """Features in the object store: the references of their blocks, and their sizes."""

    def __init__(self, ray: Any, x: Features) -> None:
        row = max(1, torch.Size(x.shape[1:]).numel() * x.dtype.itemsize)
        self.rows, self.shape, self.dtype = max(1, BLOCK // row), tuple(x.shape), x.dtype
        self.in_memory = isinstance(x, Tensor)
        self.refs = [ray.put(packed(x[at : at + self.rows])) for at in range(0, max(1, len(x)), self.rows)]

    def features(self, ray: Any, device: str = "cpu", whole: bool = False) -> Features:
        """The features at an actor, on its device.

        A tensor if they are one block, otherwise rows that are fetched block by block. With `whole`, also a tensor if
        they were one in the driver.
        """
        if len(self.refs) == 1:
            block: PackedTensor = ray.get(self.refs[0])
            return block.tensor(device)
        if whole and self.in_memory:
            out = torch.empty(self.shape, dtype=self.dtype, device=device)
            for number, ref in enumerate(self.refs):  # one block at a time, so that the machine holds one copy
                out[number * self.rows : (number + 1) * self.rows] = ray.get(ref).tensor()
            return out
        sizes = [min(self.rows, self.shape[0] - at) for at in range(0, self.shape[0], self.rows)]
        return StoredRows([BlockRows(ray, ref, (size, *self.shape[1:]), self.dtype)
                           for ref, size in zip(self.refs, sizes, strict=True)], device=device)  # fmt: skip

    def block(self, row: int) -> int:
        """The number of the block of a row."""
        return min(row // self.rows, len(self.refs) - 1)


class PlacedShards:
    """The samples of all parties in the object store."""

    def __init__(self, ray: Any, shards: PartyShards) -> None:
        self.x = Placed(ray, shards.x)
        self.before = None if shards.before is None else Placed(ray, shards.before)
        self._light = copy.copy(shards)
        self._light.before, self._light._joined = None, None
        self._light.x = self._light.y = self._light.weights = None  # type: ignore[assignment]
        self._y = ray.put(packed(shards.y))
        self._weights = None if shards.weights is None else ray.put(packed(shards.weights))

    def shards(self, ray: Any, device: str, whole: bool) -> PartyShards:
        """The samples at an actor; see `Placed.features`."""
        out = copy.copy(self._light)
        out.x = self.x.features(ray, device, whole)
        out.before = None if self.before is None else self.before.features(ray, device, whole)
        out.y = ray.get(self._y).tensor(device)
        out.weights = None if self._weights is None else ray.get(self._weights).tensor(device)
        return out


class PlacedHoldings:
    """What actors need of a task's samples, in the object store. The aggregator's own samples are not part of it."""

    def __init__(self, ray: Any, holdings: Holdings) -> None:
        self.train = PlacedShards(ray, holdings.train)
        self._tests = None if holdings.tests is None else PlacedShards(ray, holdings.tests)
        self._public = None if holdings.public is None else [None if t is None else packed(t) for t in holdings.public]
        self._light = copy.copy(holdings)
        self._light.__dict__.pop("_numbers", None)
        self._light.train = self._light.tests = self._light.test = None  # type: ignore[assignment]
        self._light.trusted = self._light.public = self._light.models = None

    def holdings(self, ray: Any, device: str = "cpu", whole: bool = False) -> Holdings:
        """The holdings at an actor, without the models of the parties; see `Placed.features`."""
        out = copy.copy(self._light)
        out.train = self.train.shards(ray, device, whole)
        out.tests = None if self._tests is None else self._tests.shards(ray, device, whole)
        if self._public is not None:
            out.public = PublicSamples(*(None if t is None else t.tensor(device) for t in self._public))  # type: ignore[arg-type]
        return out
