"""Updates as the rows of a matrix [K, d], read in blocks of columns: in memory, or in a memory-mapped file.

Whatever looks at single updates reads the matrix through `Rows`, a block of columns at a time, so that K * d may be
larger than memory. Blocks depend on K and d alone, and what is summed over blocks is summed in their order: the result
depends neither on the number of cores nor on where the matrix lies.
"""

from __future__ import annotations

import mmap
import os
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from hansa.core.determinism import threads
from hansa.core.errors import DataError

T = TypeVar("T")
BLOCK = {"cpu": 2**18, "cuda": 2**28}  # numbers in a block: what a core's cache holds, what a card's memory does


class Rows:
    """K vectors of d numbers, in memory. `block` gives some columns of all of them, for reading only."""

    def __init__(self, data: Tensor) -> None:
        if data.dim() != 2:
            raise DataError(f"updates are the rows of a matrix [K, d], got the shape {tuple(data.shape)}")
        self.data = data
        self.index, self._whole = list(range(len(data))), True

    def __len__(self) -> int:
        return len(self.index)

    @property
    def dim(self) -> int:
        return self.data.shape[1]

    @property
    def dtype(self) -> torch.dtype:
        return self.data.dtype

    @property
    def device(self) -> torch.device:
        return self.data.device

    def block(self, at: int, end: int) -> Tensor:
        """Columns `at` to `end` of all rows."""
        columns = self.data[:, at:end]
        return columns if self._whole else columns[self.index]

    def row(self, k: int) -> Tensor:
        """One row."""
        return self.data[self.index[k]]

    def sample(self, count: int) -> Tensor:
        """About so many columns, evenly spaced, of all rows."""
        return self.data[:, :: max(1, self.dim // count)][self.index]

    def write(self, k: int, row: Tensor) -> Tensor:
        """Set a row, and give it as it lies here."""
        self.data[k] = row
        return self.data[k]

    def take(self, keep: Sequence[int]) -> Rows:
        """Some of the rows, without copying them."""
        other: Rows = object.__new__(type(self))
        other.__dict__.update(self.__dict__)
        other.index = [self.index[k] for k in keep]
        other._whole = other.index == list(range(len(self.data)))
        return other

    def spans(self, numbers: int | None = None) -> list[tuple[int, int]]:
        """The blocks of columns, by default as many as a core's cache holds."""
        size = BLOCK["cuda"] if self.device.type == "cuda" else numbers or BLOCK["cpu"]
        width = max(256, size // max(1, len(self)))
        return [(at, min(at + width, self.dim)) for at in range(0, self.dim, width)] or [(0, 0)]

    def map(self, work: Callable[[int, int, Tensor], T], numbers: int | None = None,
            dtype: torch.dtype | None = None) -> Iterator[T]:  # fmt: skip
        """`work` at each block, on all cores of a CPU; the results in the order of the blocks.

        With `dtype` it is given a copy in that type, which it may overwrite. A thread's copies lie in one place: new
        memory for each would be scattered among the results that wait for their turn.
        """
        spans = self.spans(numbers)
        place = threading.local()

        def at_block(span: tuple[int, int]) -> T:
            block = self.block(*span)
            if dtype is not None:
                if not hasattr(place, "memory"):
                    place.memory = torch.empty(len(self) * (spans[0][1] - spans[0][0]), dtype=dtype, device=self.device)
                block = place.memory[: block.numel()].view(block.shape).copy_(block)
            return work(*span, block)

        cores = len(os.sched_getaffinity(0)) if self.device.type == "cpu" and len(spans) > 1 else 1
        with threads(1):
            if cores == 1:
                yield from map(at_block, spans)
                return
            with ThreadPoolExecutor(cores) as pool:
                ahead: deque[Future[T]] = deque()  # few, so that results do not pile up
                for span in spans:
                    ahead.append(pool.submit(at_block, span))
                    if len(ahead) > 2 * cores:
                        yield ahead.popleft().result()
                while ahead:
                    yield ahead.popleft().result()


class ReadRows(Rows):
    """Rows that are not in memory: whatever is wanted of them is read."""

    def row(self, k: int) -> Tensor:
        return self.take([k]).block(0, self.dim)[0]

    def sample(self, count: int) -> Tensor:
        step = max(1, self.dim // count)
        return torch.cat([self.block(at, at + 1) for at in range(0, self.dim, step)], dim=1)


class MappedRows(ReadRows):
    """Rows in a file, one after another from its beginning.

    `data` is the file mapped into memory, for single rows as they come and go. Blocks are read past the mapping: a page
    that is touched brings its neighbours along, and those of blocks long done would stay.
    """

    def __init__(self, file: int, count: int, dim: int, dtype: torch.dtype, access: int = mmap.ACCESS_COPY) -> None:
        size = count * dim * dtype.itemsize
        if not 0 < size <= os.fstat(file).st_size:
            raise DataError(f"{count} rows of {dim} numbers take {size} bytes, the file has {os.fstat(file).st_size}")
        self._map, self._writes = mmap.mmap(file, size, access=access), access == mmap.ACCESS_WRITE
        self._file = _File(file)
        super().__init__(torch.frombuffer(self._map, dtype=dtype).view(count, dim))

    @classmethod
    def open(cls, path: str | Path, count: int, dim: int, dtype: torch.dtype = torch.float32) -> MappedRows:
        """The rows of a file."""
        with open(path, "rb") as file:
            return cls(file.fileno(), count, dim, dtype)

    @classmethod
    def temporary(cls, count: int, dim: int, dtype: torch.dtype, folder: Path | None = None) -> MappedRows:
        """Rows to be written, in a file that goes when they do. The disk's space is taken first: a full disk would
        otherwise end the process."""
        size = count * dim * dtype.itemsize
        with tempfile.TemporaryFile(dir=folder) as file:
            try:
                os.posix_fallocate(file.fileno(), 0, size)
            except OSError as error:
                raise DataError(f"no place on disk for {size:,} bytes of updates: {error.strerror}") from None
            return cls(file.fileno(), count, dim, dtype, mmap.ACCESS_WRITE)

    def write(self, k: int, row: Tensor) -> Tensor:
        if not self._writes:
            raise DataError("rows of a file that was opened to be read cannot be set")
        placed = super().write(k, row)
        size = self.dim * self.dtype.itemsize
        first = k * size // mmap.PAGESIZE * mmap.PAGESIZE
        self._map.madvise(mmap.MADV_DONTNEED, first, (k + 1) * size - first)  # the pages are the file's now
        return placed

    def block(self, at: int, end: int) -> Tensor:
        columns = torch.empty(len(self), end - at, dtype=self.dtype)
        for k, part in zip(self.index, columns, strict=True):
            self._file.read(part, (k * self.dim + at) * self.dtype.itemsize)
        return columns


class FileRows(ReadRows):
    """Rows that lie each in a file of its own, from a byte of it on; for reading only."""

    def __init__(self, places: Sequence[tuple[str | Path, int]], dim: int, dtype: torch.dtype) -> None:
        super().__init__(torch.empty(0, dim, dtype=dtype))
        self._places = []
        for path, at in places:
            with open(path, "rb") as file:
                self._places.append((_File(file.fileno()), at))
        self.index = list(range(len(places)))

    def block(self, at: int, end: int) -> Tensor:
        columns = torch.empty(len(self), end - at, dtype=self.dtype)
        for k, part in zip(self.index, columns, strict=True):
            file, begin = self._places[k]
            file.read(part, begin + at * self.dtype.itemsize)
        return columns


def room(count: int, like: Tensor, memory: int, folder: Path | None = None) -> Rows:
    """Rows to be written for so many vectors: on disk where on a CPU they would take over `memory` bytes."""
    if like.device.type == "cpu" and count * like.nbytes > memory:
        return MappedRows.temporary(count, len(like), like.dtype, folder)
    return Rows(torch.empty(count, len(like), dtype=like.dtype, device=like.device))


class _File:
    """A file that is open as long as somebody has it."""

    def __init__(self, number: int) -> None:
        self.number = os.dup(number)

    def __del__(self) -> None:
        os.close(self.number)

    def read(self, into: Tensor, at: int) -> None:
        """Fill a vector from this byte on."""
        left = into.view(torch.uint8).numpy().data
        while len(left):
            done = os.preadv(self.number, [left], at)
            if not done:
                raise DataError("a file of updates has become shorter than it was")
            left, at = left[done:], at + done


def total(parts: Iterator[Any]) -> Any:
    """The sum of what blocks give, in their order."""
    first = next(parts)
    for part in parts:
        first = first + part
    return first
