"""What a party remembers of a masked sum between its exchanges, under names that begin with `secure.`."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from hansa.core.op import Memory
from hansa.plumbing.errors import PartyError
from hansa.secure.byte_tensors import as_bytes, split

PREFIX = "secure."


def read(memory: Memory, name: str) -> bytes:
    """A remembered value as bytes; a PartyError if the party does not have it."""
    if f"{PREFIX}{name}" not in memory:
        raise PartyError("it has no state of this secure sum: an exchange was skipped, or the sum has ended")
    return as_bytes(memory[f"{PREFIX}{name}"])


def read_rows(memory: Memory, name: str, size: int) -> list[bytes]:
    """A remembered table, one row of `size` bytes per party."""
    return split(read(memory, name), size)


def read_ints(memory: Memory, name: str) -> list[int]:
    """Remembered integers."""
    read(memory, name)
    numbers: list[int] = memory[f"{PREFIX}{name}"].tolist()
    return numbers


def stored(values: Mapping[str, Tensor]) -> Memory:
    """Values under the names that `read` looks for."""
    return {f"{PREFIX}{name}": value for name, value in values.items()}


def cleared(memory: Memory) -> Memory:
    """A memory without anything about a secure sum."""
    return {name: value for name, value in memory.items() if not name.startswith(PREFIX)}
