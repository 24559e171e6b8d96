"""Memories of simulated parties, on disk: a million memories fit, and a resumed run finds those of its checkpoint.

Memories are stored in an append-only log. A committed round appends the rows of the parties that it changed. RAM holds
only the position of each party's last row (12 bytes per party). Large memories (whole models) stay in RAM, or on the
GPU where they were made, up to a limit; they are written at checkpoints, and when the limit is reached. A checkpoint
names the log and its length once all of it is on disk. A resumed run truncates the log to that length and reads it
again, which discards everything after the checkpoint. When more than half of a log is out of date, its valid rows move
to a new log; the old log is deleted as soon as a checkpoint names the new one. Without a run folder the log is an
unnamed temporary file.

A log is a sequence of blocks: a head (kind, number of a layout, count), then either a layout (names, types and shapes
of a memory's tensors, as JSON) or the ids of some parties and one row per party. Everything begins at a multiple of 64
bytes, as torch's own tensors do, because the rounding of a matrix product may depend on alignment. Rows are read, not
mapped: mapped pages would count as memory of the process.
"""

from __future__ import annotations

import json
import os
import struct
import tempfile
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hansa.core.op import Memory
from hansa.plumbing.errors import AlgorithmError, DataError

ALIGN = 64
CHUNK = 2**25  # bytes that are packed, or moved to a new log, at a time
SLACK = 2**26  # bytes up to which a log is not rewritten
LARGE = 2**14  # bytes from which a memory stays in RAM
WARM = 2**30  # limit of the bytes of memories in RAM
WARM_GPU = 2**33  # limit of the bytes of memories on a GPU
_HEAD = struct.Struct("<8sqq40x")
_LAYOUT, _ROWS = b"layout", b"rows"

Array = np.ndarray[Any, np.dtype[Any]]


def _padded(size: int) -> int:
    return -(-size // ALIGN) * ALIGN


@dataclass(frozen=True)
class RowLayout:
    """Names, types and shapes of a memory's tensors, and which of them are on the run's device (not the CPU)."""

    entries: tuple[tuple[str, torch.dtype, tuple[int, ...], bool], ...]

    @classmethod
    def of(cls, memory: Memory) -> RowLayout:
        for name, value in memory.items():
            if not isinstance(value, Tensor):
                raise AlgorithmError(
                    f"a party's memory must hold named tensors, but {name!r} is a {type(value).__name__}"
                )
        return cls(tuple((n, t.dtype, tuple(t.shape), t.device.type != "cpu") for n, t in memory.items()))

    @classmethod
    def of_json(cls, text: bytes) -> RowLayout:
        return cls(tuple((n, getattr(torch, d), tuple(shape), away) for n, d, shape, away in json.loads(text)))

    def json(self) -> bytes:
        return json.dumps([(n, str(d).removeprefix("torch."), s, away) for n, d, s, away in self.entries]).encode()

    @cached_property
    def spans(self) -> list[tuple[int, int]]:
        """The first and last byte of each tensor in a row."""
        out, at = [], 0
        for _, dtype, shape, _ in self.entries:
            size = dtype.itemsize * int(np.prod(shape, dtype=np.int64))
            out.append((at, at + size))
            at += _padded(size)
        return out

    @cached_property
    def stride(self) -> int:
        """The bytes of a row."""
        return _padded(self.spans[-1][1]) if self.spans else 0

    @torch.no_grad()
    def pack(self, memories: Sequence[Memory]) -> Tensor:
        """Pack memories into rows of bytes."""
        rows = torch.zeros(len(memories), self.stride, dtype=torch.uint8)
        for (name, *_), (begin, end) in zip(self.entries, self.spans, strict=True):
            values = torch.stack([memory[name] for memory in memories]).cpu()
            rows[:, begin:end] = values.reshape(len(memories), -1).view(torch.uint8)
        return rows

    def unpack(self, rows: Tensor, device: torch.device) -> list[Memory]:
        """Unpack memories; each tensor returns to the device that it was on."""
        columns: list[Sequence[Tensor]] = []
        for (_, dtype, shape, away), (begin, end) in zip(self.entries, self.spans, strict=True):
            column = rows[:, begin:end].view(dtype) if begin < end else torch.empty(0, dtype=dtype)
            values = column.view(len(rows), *shape)
            columns.append((values.to(device) if away else values).unbind())
        names = [name for name, *_ in self.entries]
        return [dict(zip(names, values, strict=True)) for values in zip(*columns, strict=True)] or [{} for _ in rows]


class MemoryLog:
    """An append-only file; an unnamed temporary file if no path is given."""

    def __init__(self, path: Path | None, keep: int = 0) -> None:
        if path is None:
            self._file, name = tempfile.mkstemp(prefix="hansa-memories-")
            os.unlink(name)  # nothing to clean up, however the process ends
        else:
            self._file = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        weakref.finalize(self, os.close, self._file)
        self.path, self.end, self._named = path, keep, keep > 0
        if os.fstat(self._file).st_size < keep:
            raise DataError(f"{path} is shorter than when the checkpoint was made; restore it, or begin a new run")
        os.ftruncate(self._file, keep)

    def append(self, *parts: Any) -> None:
        """Append parts, each padded to the alignment."""
        for part in parts:
            view, at = memoryview(part), self.end
            view = view.cast("B") if view.nbytes else view[:0]
            while view:
                written = os.pwrite(self._file, view, at)
                view, at = view[written:], at + written
            self.end += _padded(memoryview(part).nbytes)

    def rows(self, at: Array, size: int) -> Tensor:
        """Read the rows of `size` bytes at the given positions; adjacent rows are read together."""
        rows = torch.empty(len(at), size, dtype=torch.uint8)
        if not rows.numel():
            return rows
        first, span = int(at.min()), int(at.max() - at.min()) + size
        if len(at) > 1 and span <= 4 * rows.numel():
            whole = torch.from_numpy(self.read(first, span)).view(-1, ALIGN)
            units = torch.from_numpy((at - first) // ALIGN)[:, None] + torch.arange(size // ALIGN)
            return torch.index_select(whole, 0, units.view(-1), out=rows.view(-1, ALIGN)).view(len(at), size)
        for row, place in zip(rows.numpy(), at.tolist(), strict=True):
            self._read_into(row, place)
        return rows

    def read(self, at: int, size: int) -> Array:
        into = np.empty(size, dtype=np.uint8)
        self._read_into(into, at)
        return into

    def _read_into(self, into: Array, at: int) -> None:
        view: Any = into  # for mypy an array is not a buffer
        done = os.preadv(self._file, (view,), at)
        while done < into.nbytes:  # the system may return long reads in parts
            more = os.preadv(self._file, (view[done:],), at + done)
            if more == 0:
                raise DataError(f"{self.path} is damaged: it ends in the middle of a block")
            done += more

    def sync(self) -> None:
        """Write the file and its directory entry to disk before returning."""
        os.ftruncate(self._file, self.end)
        os.fsync(self._file)
        if self.path is not None and not self._named:
            folder = os.open(self.path.parent, os.O_RDONLY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)
        self._named = True


def _bytes(memory: Memory) -> int:
    """The size of a memory's tensors."""
    return sum(value.numel() * value.element_size() for value in memory.values() if isinstance(value, Tensor))


class Memories(Mapping[int, Memory]):
    """Mapping of party to memory. Tensors that were not on the CPU return to `device`."""

    def __init__(self, parties: int, device: torch.device | None = None, folder: Path | None = None) -> None:
        self._parties, self._folder, self._device = parties, folder, device or torch.device("cpu")
        self._forget()

    def _forget(self) -> None:
        self._generation = -1
        self._log: MemoryLog | None = None
        self._layouts: list[RowLayout] = []  # numbers begin at 1
        self._numbers: dict[RowLayout, int] = {}
        self._layout = np.zeros(self._parties, dtype=np.int32)  # layout number per party; 0: no memory
        self._at = np.zeros(self._parties, dtype=np.int64)  # the position of each party's row in the log
        self._limit = SLACK  # length at which a log is checked for rows out of date
        self._warm: dict[int, Memory] = {}  # memories in RAM
        self._size = 0  # bytes of the memories in RAM
        self._new: set[int] = set()  # parties whose memory in RAM is not in the log yet

    def __getitem__(self, party: int) -> Memory:
        if party not in self:
            raise KeyError(party)
        return {name: value.clone() for name, value in self.recall([party])[0].items()}

    def __contains__(self, party: object) -> bool:
        if not isinstance(party, int) or not 0 <= party < self._parties:
            return False
        return party in self._warm or bool(self._layout[party])

    def __iter__(self) -> Iterator[int]:
        return iter(sorted({*self._new, *np.flatnonzero(self._layout).tolist()}))

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def recall(self, parties: Sequence[int]) -> list[Memory]:
        """The memory of each party, read-only; empty for a party without one."""
        out: list[Memory] = [self._warm.get(party, {}) for party in parties]
        if self._log is None or not out:
            return out
        ids = np.asarray(parties, dtype=np.int64)
        numbers, at = self._layout[ids], self._at[ids]
        numbers[[party in self._warm for party in parties]] = 0
        for number in sorted(set(numbers.tolist()) - {0}):
            layout, where = self._layouts[number - 1], np.flatnonzero(numbers == number)
            unpacked = layout.unpack(self._log.rows(at[where], layout.stride), self._device)
            for place, memory in zip(where.tolist(), unpacked, strict=True):
                out[place] = memory
        return out

    def keep(self, memories: Mapping[int, Memory]) -> None:
        """Set the memories of parties."""
        small = {}
        for party, memory in memories.items():
            size = _bytes(memory)
            self._size -= _bytes(self._warm.pop(party, {}))
            self._new.discard(party)
            if size < LARGE:
                small[party] = memory
            else:
                self._size += size
                self._warm[party] = memory
                self._new.add(party)
        self._write(small)
        if self._size > (WARM if self._device.type == "cpu" else WARM_GPU):
            self._write_new()
            self._warm, self._size = {}, 0
        if self._folder is None:
            self._tidy()

    def _write_new(self) -> None:
        """Append the memories in RAM that are not in the log yet."""
        self._write({party: self._warm[party] for party in self._new})
        self._new = set()

    def _write(self, memories: Mapping[int, Memory]) -> None:
        """Append memories to the log."""
        alike: dict[RowLayout, list[int]] = {}
        for party in sorted(memories):
            alike.setdefault(RowLayout.of(memories[party]), []).append(party)
        if alike and self._log is None:
            self._begin()
        for layout, parties in alike.items():
            if layout not in self._numbers:
                self._number(layout)
                self._declare(layout)
            step = max(1, CHUNK // max(1, layout.stride))
            for group in (parties[at : at + step] for at in range(0, len(parties), step)):
                rows = layout.pack([memories[party] for party in group])
                self._append(np.array(group, dtype=np.int64), self._numbers[layout], rows)

    def snapshot(self) -> dict[str, int]:
        """Write all memories to disk; return their location for a checkpoint (empty if there are none)."""
        self._write_new()
        self._tidy()
        if self._log is None:
            return {}
        self._log.sync()
        return {"generation": self._generation, "length": self._log.end}

    def saved(self) -> None:
        """Delete old logs: the checkpoint with the last snapshot is on disk."""
        if self._folder is not None:
            for path in self._folder.glob("memories-*.log"):
                if self._log is None or path != self._log.path:
                    path.unlink()

    def restore(self, snapshot: Mapping[str, Any]) -> None:
        """Restore the memories of a snapshot and discard all later ones."""
        self._forget()
        if not snapshot:
            return
        if set(snapshot) != {"generation", "length"}:
            raise DataError(
                "the checkpoint was written by an earlier version of hansa; begin a new run, or continue the run with "
                "that version"
            )
        self._begin(snapshot["generation"], snapshot["length"])
        log, at = self._log, 0
        assert log is not None
        try:
            while at < log.end:
                at = self._take_in(log, at)
        except (ValueError, IndexError, AttributeError) as error:
            raise DataError(f"{log.path} is damaged: {error}") from None

    def _take_in(self, log: MemoryLog, at: int) -> int:
        """Read the block at a position; return the position of the next block."""
        kind, number, count = _HEAD.unpack(log.read(at, ALIGN).tobytes())
        at += ALIGN
        if kind.rstrip(b"\0") == _LAYOUT:
            self._number(RowLayout.of_json(log.read(at, count).tobytes()))
            return at + _padded(count)
        if kind.rstrip(b"\0") != _ROWS:
            raise ValueError("a block of an unknown kind")
        ids = log.read(at, 8 * count).view(np.int64)
        at += _padded(8 * count)
        stride = self._layouts[number - 1].stride
        self._place(ids, number, at, stride)
        return int(at + count * stride)

    def _begin(self, generation: int = 0, keep: int = 0) -> None:
        self._generation = generation
        self._log = MemoryLog(None if self._folder is None else self._folder / f"memories-{generation}.log", keep)

    def _number(self, layout: RowLayout) -> None:
        self._layouts.append(layout)
        self._numbers[layout] = len(self._layouts)

    def _declare(self, layout: RowLayout) -> None:
        assert self._log is not None
        text = layout.json()
        self._log.append(_HEAD.pack(_LAYOUT, self._numbers[layout], len(text)), text)

    def _append(self, parties: Array, number: int, rows: Tensor) -> None:
        assert self._log is not None
        self._log.append(_HEAD.pack(_ROWS, number, len(parties)), parties)
        at = self._log.end
        self._log.append(rows.numpy())
        self._place(parties, number, at, rows.shape[1])

    def _place(self, parties: Array, number: int, at: int, stride: int) -> None:
        self._layout[parties] = number
        self._at[parties] = at + stride * np.arange(len(parties))

    def _tidy(self) -> None:
        """Move the valid rows to a new log if more than half of this log is out of date."""
        if self._log is None or self._log.end < self._limit:
            return
        strides = np.array([0, *(layout.stride for layout in self._layouts)])
        self._limit = 2 * int(strides[self._layout].sum()) + SLACK
        if self._log.end < self._limit:
            return
        old, live = self._log, np.flatnonzero(self._layout)
        self._begin(self._generation + 1)
        for layout in self._layouts:
            self._declare(layout)
        live = live[np.lexsort((self._at[live], self._layout[live]))]  # by layout, then by position
        for same in np.split(live, np.flatnonzero(np.diff(self._layout[live])) + 1):
            number = int(self._layout[same[0]])
            stride = self._layouts[number - 1].stride
            step = max(1, CHUNK // max(1, stride))
            for group in (same[at : at + step] for at in range(0, len(same), step)):
                self._append(group, number, old.rows(self._at[group], stride))
