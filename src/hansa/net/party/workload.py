"""Limits on the work that one ask may make for a party: the table `[limits]` of `party.toml`.

The aggregator chooses every number in an ask: epochs, steps, widths of layers, lengths of vectors. A party checks them
before it works. What cannot be known before is bounded while it works: time by a brake that the work looks at between
its steps (`core.stopping`), memory by the operating system. A party does one ask at a time, on one core, so many asks
take no more of the machine at once than one.
"""

from __future__ import annotations

import math
import os
import re
import resource
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch

from hansa.core.errors import ConfigError
from hansa.core.op import Op, Party, Payload, Shape
from hansa.local.solver import WORK

COPIES = 3  # of a message or a reply that are held at once: as bytes, as tensors, and what is computed from them
SPARE = 2**27  # bytes that a party needs to start, beside what its process has: threads, connections
FULL = "can't allocate memory"  # what torch says where there is none left


@dataclass(frozen=True)
class Workload:
    """The table `[limits]`: the most that one ask may take; `memory`, in bytes, is by default that of the machine.

    `jobs` is how many jobs the party remembers: where there are more, it forgets those that trained longest ago.
    """

    epochs: int = 10_000
    steps: int = 1_000_000
    seconds: float = 86_400.0
    parameters: int = 1_000_000_000
    participants: int = 10_000
    jobs: int = 1000
    memory: int | None = None

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if value is not None and not value > 0:
                raise ConfigError(f"limits.{field.name} must be positive, got {value}")

    @property
    def bytes(self) -> int:
        """The memory that the party may use."""
        return machine_memory() if self.memory is None else self.memory

    def refuses(self, op: Op, party: Party, payload: Payload) -> str | None:
        """Why an ask would make too much work, or None."""
        problem = _malformed_work(payload.get("work"))
        if problem is not None:
            return problem
        for name, amount in op.demands(party.n, payload).items():
            limit = getattr(self, name)
            if amount > limit:
                return f"{_most(limit, name)}, and this one wants {amount}"
        return self.refuses_bytes(sum(map(_bytes, (op.expects(payload) | op.expects_maxima(payload)).values())))

    def refuses_bytes(self, size: int) -> str | None:
        """Why a message or a reply of so many bytes has no room, or None."""
        if COPIES * size <= self.bytes:
            return None
        return f"{_most(self.bytes, 'bytes', 'memory')}, and a message or reply of {size} takes {COPIES * size}"

    def exhausted(self, error: BaseException) -> str | None:
        """What to say of work that found no memory left; None for another error."""
        if not isinstance(error, MemoryError) and FULL not in str(error):
            return None
        return f"{_most(self.bytes, 'bytes', 'memory')}, and this one takes more"

    def confine(self) -> None:
        """Have the operating system refuse this process more memory than that. Allocations then fail, and with them
        the ask that made them; without a limit the system would end the whole process, or another one. A ConfigError
        where the policy gives less than the process already has."""
        least = _used() + SPARE
        if self.memory is not None and self.memory < least:
            raise ConfigError(f"limits.memory is {self.memory} bytes, and the party needs at least {least} to start")
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        limit = self.bytes if hard == resource.RLIM_INFINITY else min(self.bytes, hard)
        resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))


def _most(limit: int, unit: str, name: str | None = None) -> str:
    return f"its policy gives an ask at most {limit} {unit} (limits.{name or unit} in party.toml)"


def _used() -> int:
    """The bytes of this process that count towards its limit; 0 where the system does not say."""
    try:
        found = re.search(r"^VmData:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    except OSError:
        return 0
    return 1024 * int(found[1]) if found else 0


def machine_memory() -> int:
    """The bytes of memory that this machine, or the container around the process, has."""
    size = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        return min(size, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    except (OSError, ValueError):  # no container, or one without a limit ("max")
        return size


def _bytes(shape: Shape) -> int:
    sizes, dtype = shape
    return math.prod(sizes) * torch.empty(0, dtype=dtype).element_size()


def _malformed_work(work: Any) -> str | None:
    """Why a party cannot be told such fields of its local solver, or None."""
    if work is None:
        return None
    if not isinstance(work, Mapping) or not set(work) <= set(WORK):
        return f"malformed ask: work may set {', '.join(WORK)}"
    for name, value in work.items():
        if value is None and name in ("batch", "steps"):
            continue
        kinds = (int, float) if name == "lr" else (int,)
        if isinstance(value, bool) or not isinstance(value, kinds) or not 0 < value < math.inf:
            return f"malformed ask: work.{name} must be a positive {'number' if name == 'lr' else 'whole number'}"
    return None
