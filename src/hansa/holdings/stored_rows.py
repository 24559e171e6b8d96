"""Features that stay in files: rows are read when a batch needs them.

`StoredRows` stands where a tensor of all features would: it has a shape, a type and a length, and indexing it reads
rows as a tensor. Its rows come from arrays (memory-mapped ones, for example) or from map-style data sets, such as those
of `torch.utils.data`. Targets are always in memory.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from hansa.plumbing.errors import DataError
from hansa.plumbing.stopping import go_on

BLOCK, VALUES = 1024, 2**22  # most rows and numbers that are read at once where all rows are needed in turn
Rows = np.ndarray[Any, Any]  # numbers of rows, int64
Step = Callable[[Tensor], Tensor]  # a change of rows that treats each row by itself


class RowSource(Protocol):
    """Where rows come from: `shape` is (number of rows, *shape of a row), `read` returns rows in the given order."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    def read(self, rows: Rows) -> Tensor: ...


class ArrayRows:
    """The rows of an array, in memory or memory-mapped."""

    def __init__(self, array: Any, where: str) -> None:
        self.array = np.asarray(array)  # a view; of a memory map too
        self.shape = self.array.shape
        if self.array.dtype.kind not in "fiub" or self.array.dtype.byteorder == ">":
            raise DataError(
                f"{where}: an array of {self.array.dtype}; features are numbers in the machine's byte order"
            )
        self.dtype = torch.from_numpy(np.empty(0, self.array.dtype)).dtype

    def read(self, rows: Rows) -> Tensor:
        if len(rows) and rows[-1] - rows[0] + 1 == len(rows) and bool((np.diff(rows) == 1).all()):
            return torch.from_numpy(np.array(self.array[rows[0] : rows[-1] + 1]))
        return torch.from_numpy(self.array[rows])


class DatasetRows:
    """The features of a map-style data set, whose items are pairs (features, target)."""

    def __init__(self, dataset: Any, length: int, first: Tensor, where: str) -> None:
        self.dataset, self.where = dataset, where
        self.shape, self.dtype = (length, *first.shape), first.dtype

    def read(self, rows: Rows) -> Tensor:
        """Read rows. Errors are no `HansaError`: a deployed party sends their texts, and these are about a sample."""
        if len(self.dataset) != self.shape[0]:
            raise RuntimeError(
                f"{self.where}: the data set has {len(self.dataset)} samples, and it had {self.shape[0]} when the run "
                "began; its length must not change"
            )
        out = torch.empty((len(rows), *self.shape[1:]), dtype=self.dtype)
        try:
            for at, row in enumerate(rows.tolist()):
                out[at] = alike(item_of(self.dataset, row, self.where)[0], self.shape[1:], self.dtype, row, self.where)
        except DataError as error:
            raise RuntimeError(str(error)) from None
        return out


class SelectedRows:
    """Some rows of a source."""

    def __init__(self, source: RowSource, rows: Rows) -> None:
        self.source, self.rows = source, rows
        self.shape, self.dtype = (len(rows), *source.shape[1:]), source.dtype

    def read(self, rows: Rows) -> Tensor:
        return self.source.read(self.rows[rows])


class SpanRows:
    """Consecutive rows of a source."""

    def __init__(self, source: RowSource, first: int, count: int) -> None:
        self.source, self.first = source, first
        self.shape, self.dtype = (count, *source.shape[1:]), source.dtype

    def read(self, rows: Rows) -> Tensor:
        return self.source.read(rows + self.first)


class StoredRows:
    """Rows of one or several sources, in their order, as a tensor of them would be indexed.

    Rows are converted to `dtype` on `device`, then changed by `steps` (preparations, which treat each row by itself).
    """

    def __init__(self, sources: Sequence[RowSource], dtype: torch.dtype | None = None,
                 device: torch.device | str = "cpu", steps: tuple[Step, ...] = ()) -> None:  # fmt: skip
        self.sources, self.steps = list(sources), steps
        self._ends = np.cumsum([source.shape[0] for source in self.sources])
        self._read_as = self.sources[0].dtype if dtype is None else dtype
        self.device = torch.device(device)
        count = int(self._ends[-1])
        like = self._changed(torch.zeros((1, *self.sources[0].shape[1:]), dtype=self._read_as, device=self.device))
        self.shape: tuple[int, ...] = (count, *like.shape[1:])
        self.dtype = like.dtype

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, index: Any) -> Tensor:
        """Read rows: those of a slice, or of a tensor of row numbers of any shape."""
        if isinstance(index, slice):
            rows = np.arange(*index.indices(len(self)))
            return self._rows(rows)
        if not isinstance(index, Tensor) or torch._C._functorch.is_batchedtensor(index):
            raise ValueError("the samples are stored in files, and are read by batches alone")
        rows = index.detach().cpu().reshape(-1).numpy()
        return self._rows(rows).reshape(*index.shape, *self.shape[1:])

    def _rows(self, rows: Rows) -> Tensor:
        if len(self.sources) == 1:
            out = self.sources[0].read(rows)
        else:
            which = np.searchsorted(self._ends, rows, side="right")
            out = torch.empty((len(rows), *self.sources[0].shape[1:]), dtype=self.sources[0].dtype)
            for number in np.unique(which):
                here = which == number
                first = self._ends[number - 1] if number else 0
                out[torch.from_numpy(here)] = self.sources[number].read(rows[here] - first)
        return self._changed(out.to(self.device, self._read_as))

    def _changed(self, rows: Tensor) -> Tensor:
        for step in self.steps:
            rows = step(rows)
        return rows

    def span(self, first: int, last: int) -> StoredRows:
        """The rows from `first` to `last`, which is excluded."""
        sources: list[RowSource] = []
        at = int(np.searchsorted(self._ends, first, side="right"))
        while first < last:
            source, end = self.sources[at], int(self._ends[at])
            begin, stop = end - source.shape[0], min(last, end)
            everything = first == begin and stop == end
            sources.append(source if everything else SpanRows(source, first - begin, stop - first))
            first, at = stop, at + 1
        return StoredRows(sources or [SpanRows(self.sources[0], 0, 0)], self._read_as, self.device, self.steps)

    def select(self, rows: Rows) -> StoredRows:
        """Some rows, in the given order; nothing is read."""
        if len(self.sources) > 1:
            raise ValueError("rows of several parties cannot be selected together")
        return StoredRows([SelectedRows(self.sources[0], rows)], self._read_as, self.device, self.steps)

    def then(self, step: Step) -> StoredRows:
        """The rows after a change that treats each row by itself."""
        return StoredRows(self.sources, self._read_as, self.device, (*self.steps, step))

    def to(self, kind: torch.dtype | torch.device) -> StoredRows:
        """The rows in another type or on another device."""
        if self.steps:
            return self.then(lambda rows: rows.to(kind))
        if isinstance(kind, torch.dtype):
            return StoredRows(self.sources, kind, self.device)
        return StoredRows(self.sources, self._read_as, kind)

    def dim(self) -> int:
        return len(self.shape)

    def is_floating_point(self) -> bool:
        return self.dtype.is_floating_point

    def clone(self) -> StoredRows:
        """The same rows: they are never written."""
        return self

    def digest(self) -> str:
        """A hash of all rows."""
        running = hashlib.sha256(repr((self.shape, self.dtype)).encode())
        for block in blocks(self):
            running.update(block.cpu().contiguous().view(torch.uint8).numpy().data if block.numel() else b"")
        return running.hexdigest()


Features = Tensor | StoredRows


def stored(values: Any) -> bool:
    """Whether features are a memory-mapped array, or rows that stay in files already."""
    mapped = isinstance(values, np.memmap) and getattr(values, "_mmap", None) is not None  # a copy has no map
    return mapped or isinstance(values, StoredRows)


def whole(x: Features) -> Tensor:
    """All features in memory."""
    return x if isinstance(x, Tensor) else x[:]


def column_of(x: Features, at: int) -> Tensor:
    """One column of features of two dimensions."""
    return torch.cat([block[:, at] for block in blocks(x)])


def blocks(x: Features) -> Iterator[Tensor]:
    """The features in blocks of rows; those that are in memory, as one block."""
    if isinstance(x, Tensor):
        yield x
        return
    rows = max(1, min(BLOCK, VALUES // max(1, math.prod(x.shape[1:]))))
    for first in range(0, max(1, len(x)), rows):
        go_on()
        yield x[first : first + rows]


def joined(parts: Sequence[Features], where: str) -> StoredRows:
    """Rows of several parties one after another; a DataError if the parties' types differ."""
    sources: list[RowSource] = []
    for part in parts:
        if isinstance(part, StoredRows) and part.steps:
            raise ValueError("prepared rows cannot be joined")
        sources += part.sources if isinstance(part, StoredRows) else [ArrayRows(part.numpy(), where)]
    kinds = sorted({str(source.dtype).removeprefix("torch.") for source in sources})
    if len(kinds) > 1:
        raise DataError(f"{where}: parties disagree on the type of a sample: {', '.join(kinds)}; store one type")
    return StoredRows(sources)


def is_dataset(value: Any) -> bool:
    """Whether a party's samples are a map-style data set: items by number, and a length."""
    return not isinstance(value, (tuple, list, Tensor, np.ndarray, str, dict, StoredRows)) and all(
        hasattr(value, name) for name in ("__getitem__", "__len__")
    )


def read_dataset(dataset: Any, where: str) -> tuple[StoredRows, Tensor]:
    """The features of a data set, which stay where they are, and its targets, which are read in one pass.

    A DataError names the first sample whose shape or type is not that of the first one.
    """
    length = len(dataset)
    if length == 0:
        raise DataError(f"{where}: the data set has no samples; leave the party out")
    first, target = item_of(dataset, 0, where)
    targets = torch.empty((length, *target.shape), dtype=target.dtype)
    for row in range(length):
        if row % BLOCK == 0:
            go_on()
        x, y = item_of(dataset, row, where)
        alike(x, tuple(first.shape), first.dtype, row, where)
        if y.shape != target.shape or y.dtype != target.dtype:
            raise DataError(
                f"{where}: the target of sample {row} is {type_and_shape(y)}, and that of sample 0 is "
                f"{type_and_shape(target)}; all must be alike"
            )
        targets[row] = y
    return StoredRows([DatasetRows(dataset, length, first, where)]), targets


def item_of(dataset: Any, row: int, where: str) -> tuple[Tensor, Tensor]:
    """One sample of a data set: its features and its target."""
    try:
        item = dataset[row]
    except Exception as error:  # the user's own code: quote its error
        raise DataError(f"{where}: sample {row} cannot be read: {type(error).__name__}: {error}") from None
    if not isinstance(item, (tuple, list)) or len(item) != 2:
        raise DataError(f"{where}: sample {row} is a {type(item).__name__}; expected a pair (features, target)")
    try:
        x, y = (value if isinstance(value, Tensor) else torch.as_tensor(np.asarray(value)) for value in item)
    except (TypeError, ValueError):
        raise DataError(
            f"{where}: sample {row} is a pair of {type(item[0]).__name__} and {type(item[1]).__name__}; expected "
            "arrays of numbers (turn pictures into tensors in the data set)"
        ) from None
    return x, y


def alike(x: Tensor, shape: Sequence[int], dtype: torch.dtype, row: int, where: str) -> Tensor:
    """A sample; a DataError if its shape or type is not that of the other samples."""
    if tuple(x.shape) != tuple(shape) or x.dtype != dtype:
        raise DataError(
            f"{where}: sample {row} is {type_and_shape(x)}, and sample 0 is {str(dtype)[6:]} {tuple(shape)}; all must "
            "be alike"
        )
    return x


def type_and_shape(value: Tensor) -> str:
    """The type and the shape of a tensor, for messages."""
    return f"{str(value.dtype)[6:]} {tuple(value.shape)}"
