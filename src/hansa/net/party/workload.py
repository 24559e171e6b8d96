"""Limits on the work per ask at a party: the table `[limits]` of `party.toml`.

The aggregator chooses every number in an ask: epochs, steps, widths of layers, lengths of vectors. A party checks them
before it starts. What cannot be known in advance is bounded during the work: time by a brake that is checked between
steps (`plumbing.stopping`), memory by the operating system; and a worker process that passes a limit is killed
(`worker_process`). A party runs one ask at a time, on one core, so many asks load the machine no more than one.
"""

from __future__ import annotations

import math
import os
import re
import resource
from dataclasses import dataclass
from pathlib import Path

import torch

from hansa.core.op import Op, Payload
from hansa.core.plain_data import check_numbers
from hansa.core.quantities import Count, Seconds
from hansa.core.shapes import Shape, largest_shape
from hansa.plumbing.errors import ConfigError

COPIES = 3  # of a message or reply in memory: bytes, tensors, and results
SPARE = 2**27  # bytes that a party needs beyond its process at the start: threads, connections
FULL = "can't allocate memory"  # torch's message when memory is exhausted


@dataclass(frozen=True)
class Workload:
    """The table `[limits]`: the most that one ask may take. `memory`, in bytes, defaults to the machine's.

    `jobs` is the number of jobs whose memory the party keeps; beyond it, the oldest ones are deleted. `public` is the
    most bytes of public samples that the party stores, for all jobs together. `people` is the most people that a party
    may bring to a matching with this party's people.
    """

    epochs: Count = 10_000
    steps: Count = 1_000_000
    seconds: Seconds = 86_400.0
    parameters: Count = 1_000_000_000
    participants: Count = 10_000
    people: Count = 10_000_000
    jobs: Count = 1000
    public: Count = 2**30
    memory: Count | None = None

    def __post_init__(self) -> None:
        check_numbers(self)

    @property
    def bytes(self) -> int:
        """The memory that the party may use."""
        return machine_memory() if self.memory is None else self.memory

    def refuses(self, op: Op, n: int, payload: Payload) -> str | None:
        """Why an ask would be too much work for a party with n samples, or None."""
        for name, amount in op.demands(n, payload).items():
            limit = getattr(self, name)
            if amount > limit:
                return f"{_most(limit, name)}, and this one requests {amount}"
        return self.refuses_bytes(sum(map(_bytes, (op.expects(payload) | op.expects_maxima(payload)).values())))

    def refuses_bytes(self, size: int) -> str | None:
        """Why a message or reply of this size does not fit into memory, or None."""
        if COPIES * size <= self.bytes:
            return None
        return f"{_most(self.bytes, 'bytes', 'memory')}, and a message or reply of {size} bytes takes {COPIES * size}"

    def exhausted(self, error: BaseException) -> str | None:
        """The reason to return for an out-of-memory error; None for other errors."""
        if not isinstance(error, MemoryError) and FULL not in str(error):
            return None
        return f"{_most(self.bytes, 'bytes', 'memory')}, and this one takes more"

    def confine(self) -> None:
        """Limit the memory of this process by the operating system.

        An allocation beyond the limit fails, and with it only the ask. Without a limit the system would kill the whole
        process, or another one. A ConfigError if the policy allows less than the process needs.
        """
        least = _used() + SPARE
        if self.memory is not None and self.memory < least:
            raise ConfigError(f"limits.memory is {self.memory} bytes, but the party needs at least {least} to start")
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        limit = self.bytes if hard == resource.RLIM_INFINITY else min(self.bytes, hard)
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


def _most(limit: int, unit: str, name: str | None = None) -> str:
    return f"its policy gives an ask at most {limit} {unit} (limits.{name or unit} in party.toml)"


def _used() -> int:
    """The bytes of this process that count towards the limit; 0 if the system does not report them."""
    try:
        match = re.search(r"^VmData:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    except OSError:
        return 0
    return 1024 * int(match[1]) if match else 0


def machine_memory() -> int:
    """The bytes of memory of this machine, or of the container."""
    size = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        return min(size, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    except (OSError, ValueError):  # no container, or one without a limit ("max")
        return size


def _bytes(shape: Shape) -> int:
    sizes, dtype = shape
    return math.prod(largest_shape(sizes)) * torch.empty(0, dtype=dtype).element_size()
