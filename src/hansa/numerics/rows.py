"""Updates as the rows of a matrix [K, d], in memory or in files, read in blocks of columns.

Code that inspects single updates reads `Rows` one block of columns at a time, so K * d may be larger than memory. The
blocks depend on K and d alone, and sums over blocks are in an order that depends on the blocks alone. So the result
depends neither on the number of cores nor on where the matrix is stored, which may be a cluster (`cluster.matrix`).
"""

from __future__ import annotations

import functools
import itertools
import mmap
import operator
import os
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from hansa.plumbing.determinism import threads
from hansa.plumbing.errors import DataError

T = TypeVar("T")
STEP = 64  # columns; vector instructions treat fewer at a time, so they treat the parts of a divided block alike
SEGMENTS = 64  # at most this many sums of consecutive blocks, which may be computed apart
BLOCK = {"cpu": 2**18, "cuda": 2**28}  # numbers per block: they fit a core's cache, or a GPU's memory


class Rows:
    """K vectors of d numbers, in memory. `block` gives columns of all rows, read-only."""

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
        """About `count` evenly spaced columns of all rows."""
        return self.data[:, :: max(1, self.dim // count)][self.index]

    def write(self, k: int, row: Tensor) -> Tensor:
        """Set a row, and return the stored row."""
        self.data[k] = row
        return self.data[k]

    def take(self, keep: Sequence[int]) -> Rows:
        """A selection of the rows, without a copy."""
        other: Rows = object.__new__(type(self))
        other.__dict__.update(self.__dict__)
        other.index = [self.index[k] for k in keep]
        other._whole = other.index == list(range(len(self.data)))
        return other

    def spans(self, numbers: int | None = None) -> list[tuple[int, int]]:
        """The blocks of columns as (start, stop), each with about `numbers` numbers."""
        size = BLOCK["cuda"] if self.device.type == "cuda" else numbers or BLOCK["cpu"]
        width = max(256, size // max(1, len(self)))
        return [(at, min(at + width, self.dim)) for at in range(0, self.dim, width)] or [(0, 0)]

    def map(self, work: Callable[[int, int, Tensor], T], numbers: int | None = None,
            dtype: torch.dtype | None = None) -> Iterator[T]:  # fmt: skip
        """Call `work(start, stop, block)` for each block, on all CPU cores; yield the results in order.

        With `dtype`, `work` gets a copy in that type, which it may overwrite. Each thread reuses one buffer for its
        copies: separate copies would fragment the memory.
        """
        spans = self.spans(numbers)
        buffer = threading.local()

        def at_block(span: tuple[int, int]) -> T:
            block = self.block(*span)
            if dtype is not None:
                if not hasattr(buffer, "memory"):
                    size = len(self) * (spans[0][1] - spans[0][0])
                    buffer.memory = torch.empty(size, dtype=dtype, device=self.device)
                block = buffer.memory[: block.numel()].view(block.shape).copy_(block)
            return work(*span, block)

        cores = len(os.sched_getaffinity(0)) if self.device.type == "cpu" and len(spans) > 1 else 1
        with threads(1):
            if cores == 1:
                yield from map(at_block, spans)
                return
            with ThreadPoolExecutor(cores) as pool:
                ahead: deque[Future[T]] = deque()  # bounded, so that results do not pile up
                for span in spans:
                    ahead.append(pool.submit(at_block, span))
                    if len(ahead) > 2 * cores:
                        yield ahead.popleft().result()
                while ahead:
                    yield ahead.popleft().result()

    def total(self, work: Callable[..., Tensor], *vectors: Tensor, into: Tensor | None = None, single: bool = False,
              numbers: int | None = None, dtype: torch.dtype | None = None) -> Tensor:  # fmt: skip
        """The sum of `work(start, stop, block, *columns)` over the blocks; `columns` are those of the `vectors`.

        `work` may change its columns of `into`, which come last; they are changed in `into` when all blocks are done.
        As blocks may be on other machines, `work` must not use other vectors of d numbers, nor keep anything. `single`
        says that `work` treats every column by itself, so that a block may be divided at a multiple of `STEP`.
        """
        lists = vectors if into is None else (*vectors, into)

        def at_block(at: int, end: int, block: Tensor) -> Tensor:
            return work(at, end, block, *(vector[at:end] for vector in lists))

        groups = segments(self.spans(numbers))
        parts = self.map(at_block, numbers, dtype)
        return added(added(itertools.islice(parts, len(group))) for group in groups)


class ReadRows(Rows):
    """Base of rows in files: every access reads from the files."""

    def row(self, k: int) -> Tensor:
        return self.take([k]).block(0, self.dim)[0]

    def sample(self, count: int) -> Tensor:
        step = max(1, self.dim // count)
        return torch.cat([self.block(at, at + 1) for at in range(0, self.dim, step)], dim=1)


class MappedRows(ReadRows):
    """Rows in one file, stored one after another.

    `data` is the file's memory map, for access to single rows. Blocks are read without the map: touching a mapped page
    loads its neighbours too, and all of them would stay in memory.
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
        """Open a file of rows for reading."""
        with open(path, "rb") as file:
            return cls(file.fileno(), count, dim, dtype)

    @classmethod
    def temporary(cls, count: int, dim: int, dtype: torch.dtype, folder: Path | None = None) -> MappedRows:
        """Writable rows in a temporary file. Disk space is allocated first: else a full disk would kill the process."""
        size = count * dim * dtype.itemsize
        with tempfile.TemporaryFile(dir=folder) as file:
            try:
                os.posix_fallocate(file.fileno(), 0, size)
            except OSError as error:
                raise DataError(f"no place on disk for {size:,} bytes of updates: {error.strerror}") from None
            return cls(file.fileno(), count, dim, dtype, mmap.ACCESS_WRITE)

    def write(self, k: int, row: Tensor) -> Tensor:
        if not self._writes:
            raise DataError("the rows of this file are read-only")
        stored = super().write(k, row)
        size = self.dim * self.dtype.itemsize
        first = k * size // mmap.PAGESIZE * mmap.PAGESIZE
        self._map.madvise(mmap.MADV_DONTNEED, first, (k + 1) * size - first)  # the pages are in the file now
        return stored

    def block(self, at: int, end: int) -> Tensor:
        columns = torch.empty(len(self), end - at, dtype=self.dtype)
        for k, part in zip(self.index, columns, strict=True):
            self._file.read(part, (k * self.dim + at) * self.dtype.itemsize)
        return columns


class FileRows(ReadRows):
    """Rows in separate files, each at an offset; read-only."""

    def __init__(self, rows: Sequence[tuple[str | Path, int]], dim: int, dtype: torch.dtype) -> None:
        super().__init__(torch.empty(0, dim, dtype=dtype))
        self._files = []
        for path, offset in rows:
            with open(path, "rb") as file:
                self._files.append((_File(file.fileno()), offset))
        self.index = list(range(len(rows)))

    def block(self, at: int, end: int) -> Tensor:
        columns = torch.empty(len(self), end - at, dtype=self.dtype)
        for k, part in zip(self.index, columns, strict=True):
            file, offset = self._files[k]
            file.read(part, offset + at * self.dtype.itemsize)
        return columns


def room(count: int, like: Tensor, memory: int, folder: Path | None = None) -> Rows:
    """Writable rows for `count` vectors; on a CPU, in a file if they need more than `memory` bytes."""
    if like.device.type == "cpu" and count * like.nbytes > memory:
        return MappedRows.temporary(count, len(like), like.dtype, folder)
    return Rows(torch.empty(count, len(like), dtype=like.dtype, device=like.device))


class _File:
    """An open file that is closed with its last reference."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = os.dup(descriptor)

    def __del__(self) -> None:
        os.close(self.descriptor)

    def read(self, into: Tensor, offset: int) -> None:
        """Fill a vector with the bytes at an offset."""
        rest = into.view(torch.uint8).numpy().data
        while len(rest):
            count = os.preadv(self.descriptor, [rest], offset)
            if not count:
                raise DataError("a file of updates is shorter than when it was opened")
            rest, offset = rest[count:], offset + count


def segments(spans: list[tuple[int, int]]) -> list[list[tuple[int, int]]]:
    """Blocks in at most `SEGMENTS` groups of consecutive ones. The sums of the groups are added, in their order."""
    size = -(-len(spans) // SEGMENTS)
    return [spans[at : at + size] for at in range(0, len(spans), size)]


def added(parts: Iterable[Tensor]) -> Tensor:
    """The sum of tensors, in their order."""
    return functools.reduce(operator.add, parts)
