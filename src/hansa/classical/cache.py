"""A cache of what ops compute from a party's samples alone: sorted columns, bin numbers."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, TypeVar

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

T = TypeVar("T")
MOST = 2**31  # bytes that a process keeps


class SampleCache:
    """Results by samples and purpose, kept as long as the samples are in memory.

    An entry is found by the place of the samples in memory. The weak reference keeps that place from being used again
    for other samples, and the version counter of the tensor tells of changes.
    """

    def __init__(self) -> None:
        self._entries: OrderedDict[tuple[Any, ...], tuple[StorageWeakRef, Any, int]] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, x: Tensor, purpose: tuple[Any, ...], make: Callable[[], tuple[T, int]]) -> T:
        """The result for samples; `make` computes it, and says how many bytes it has."""
        storage = StorageWeakRef(x.untyped_storage())  # type: ignore[no-untyped-call]
        key = (storage.cdata, x.storage_offset(), tuple(x.shape), x.stride(), x.dtype, x._version, *purpose)
        with self._lock:
            if key in self._entries:
                self._entries.move_to_end(key)
                known: T = self._entries[key][1]
                return known
        made, size = make()
        with self._lock:
            self._entries[key] = storage, made, size
            gone = [old for old, (kept, _, _) in self._entries.items() if kept.expired()]  # type: ignore[no-untyped-call]
            for old in gone:
                del self._entries[old]
            while len(self._entries) > 1 and sum(held for _, _, held in self._entries.values()) > MOST:
                self._entries.popitem(last=False)
        return made


CACHE = SampleCache()
