"""PyTorch's deterministic kernels, switched without importing its compiler.

`torch.use_deterministic_algorithms` also tells the compiler, whose first import takes a second that a short run would
feel. Where the compiler is not loaded there is nobody to tell.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch


def set_deterministic(on: bool, warn_only: bool = False) -> None:
    """Deterministic kernels on or off, for this process."""
    if "torch._inductor" in sys.modules or not hasattr(torch._C, "_set_deterministic_algorithms"):
        torch.use_deterministic_algorithms(on, warn_only=warn_only)
    else:
        torch._C._set_deterministic_algorithms(on, warn_only=warn_only)


@contextmanager
def deterministic(device: str) -> Iterator[None]:
    """Deterministic kernels on the CPU inside; two threads otherwise give another sum each time."""
    before, warn = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    if device == "cpu":
        set_deterministic(True)
    try:
        yield
    finally:
        set_deterministic(before, warn)


@contextmanager
def threads(count: int) -> Iterator[None]:
    """So many torch threads inside. Idle ones of a larger number spin for a while, which worker processes feel."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
