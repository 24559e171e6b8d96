"""PyTorch's deterministic kernels, switched without importing its compiler.

`torch.use_deterministic_algorithms` imports the compiler, which takes a second. If the compiler is not loaded, setting
the flag directly is enough.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


def set_deterministic(on: bool, warn_only: bool = False) -> None:
    """Switch deterministic kernels on or off for this process."""
    if "torch._inductor" in sys.modules or not hasattr(torch._C, "_set_deterministic_algorithms"):
        torch.use_deterministic_algorithms(on, warn_only=warn_only)
    else:
        torch._C._set_deterministic_algorithms(on, warn_only=warn_only)


_lock = threading.Lock()
_inside = 0  # how many threads are inside `deterministic`
_before = (False, False)  # the setting before the first of them


@contextmanager
def deterministic(device: str) -> Iterator[None]:
    """Use deterministic CPU kernels inside the block; otherwise sums on two threads differ between calls.

    The setting belongs to the process. With several runs at once, the first sets it and the last restores it.
    """
    global _inside, _before
    if device != "cpu":
        yield
        return
    with _lock:
        if not _inside:
            warn = torch.is_deterministic_algorithms_warn_only_enabled()
            _before = torch.are_deterministic_algorithms_enabled(), warn
            set_deterministic(True)
        _inside += 1
    try:
        yield
    finally:
        with _lock:
            _inside -= 1
            if not _inside:
                set_deterministic(*_before)


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Use `count` torch threads inside the block. Idle extra threads spin for a while and slow down other processes."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def card(device: torch.device) -> dict[str, str | None]:
    """The GPU and the version of CUDA on which the bits of a run depend; nothing for a CPU."""
    return {"gpu": torch.cuda.get_device_name(device), "cuda": torch.version.cuda} if device.type == "cuda" else {}


def unfilled_like(tensor: Tensor) -> Tensor:
    """An uninitialised tensor, for a caller that writes every element.

    With deterministic kernels, `torch.empty_like` fills the memory, which is one more pass over a large tensor.
    """
    fills = torch._C._get_deterministic_fill_uninitialized_memory()
    torch._C._set_deterministic_fill_uninitialized_memory(False)
    try:
        return torch.empty_like(tensor)
    finally:
        torch._C._set_deterministic_fill_uninitialized_memory(fills)
