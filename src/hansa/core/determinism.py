"""PyTorch's deterministic kernels, switched without importing its compiler.

`torch.use_deterministic_algorithms` also tells the compiler, whose first import takes a second that a short run would
feel. Where the compiler is not loaded there is nobody to tell.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch


def set_deterministic(on: bool, warn_only: bool = False) -> None:
    """Deterministic kernels on or off, for this process."""
    if "torch._inductor" in sys.modules or not hasattr(torch._C, "_set_deterministic_algorithms"):
        torch.use_deterministic_algorithms(on, warn_only=warn_only)
    else:
        torch._C._set_deterministic_algorithms(on, warn_only=warn_only)


_lock = threading.Lock()
_inside = 0  # how many threads are inside `deterministic`
_before = (False, False)  # what was set before the first of them


@contextmanager
def deterministic(device: str) -> Iterator[None]:
    """Deterministic kernels on the CPU inside; two threads otherwise give another sum each time.

    The setting is the process's: the first run that enters sets it, the last of those side by side puts it back.
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
    """So many torch threads inside. Idle ones of a larger number spin for a while, which worker processes feel."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
