"""What a party is told by an aggregator that may lie, and what it remembers of a secure sum, read and checked."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from hansa.core.errors import PartyError
from hansa.core.op import Memory, Party, Payload

SESSION = 100  # characters of a sum's name
OWN = "secure."  # how the names begin under which a party remembers its secrets


def check_cohort(party: Party, parties: int, meaning: str, hint: str = "raise privacy.min_parties") -> None:
    """At a party: decline a sum of fewer parties than its own policy asks for. `meaning` says what `parties` counts;
    where the party cannot count them itself, the number is the aggregator's word."""
    if parties < party.min_cohort:
        raise PartyError(
            f"its policy asks for a cohort of at least {party.min_cohort}, and {parties} {meaning}; ask more parties, "
            f"or {hint}"
        )


def ids(payload: Payload, name: str) -> list[int]:
    """A list of parties, in order, each once."""
    given = payload.get(name)
    if not isinstance(given, Tensor) or given.dtype != torch.int64 or given.dim() != 1:
        raise PartyError(f"the aggregator sends no list of parties ({name})")
    found: list[int] = given.tolist()
    if any(a >= b for a, b in itertools.pairwise(found)):
        raise PartyError(f"the aggregator lists a party twice, or out of order ({name})")
    if found and found[0] < 0:
        raise PartyError(f"the aggregator lists a party that cannot be ({name})")
    return found


def rows(payload: Payload, name: str, count: int, size: int) -> list[bytes]:
    """What the aggregator says of each of some parties."""
    given = payload.get(name)
    if not isinstance(given, Tensor) or given.dtype != torch.uint8 or tuple(given.shape) != (count, size):
        raise PartyError(f"the aggregator sends no {name} of {count} parties with {size} bytes each")
    return split(raw(given), size)


def matrix(payload: Payload, name: str, size: int) -> Tensor:
    """Rows of so many bytes that the aggregator sends, however many."""
    given = payload.get(name)
    if not isinstance(given, Tensor) or given.dtype != torch.uint8 or given.dim() != 2 or given.shape[1] != size:
        raise PartyError(f"the aggregator sends no {name} in rows of {size} bytes")
    return given


def row(payload: Payload, name: str, size: int) -> Tensor:
    """So many bytes that the aggregator sends."""
    given = payload.get(name)
    if not isinstance(given, Tensor) or given.dtype != torch.uint8 or tuple(given.shape) != (size,):
        raise PartyError(f"the aggregator sends no {name} of {size} bytes")
    return given


def session(payload: Payload) -> str:
    """What the aggregator calls a sum within its round: a short text, for the party keeps it for good."""
    given = payload.get("session")
    if not isinstance(given, str) or not 0 < len(given) <= SESSION:
        raise PartyError(f"the aggregator names no secure sum: expected a session of 1 to {SESSION} characters")
    return given


def kept(memory: Memory, name: str) -> bytes:
    """Something that the party remembers of this sum."""
    if f"{OWN}{name}" not in memory:
        raise PartyError("it knows nothing of this secure sum: an exchange was left out, or it is over")
    return raw(memory[f"{OWN}{name}"])


def kept_rows(memory: Memory, name: str, size: int) -> list[bytes]:
    """The same, where it is about each of some parties."""
    return split(kept(memory, name), size)


def numbers(memory: Memory, name: str) -> list[int]:
    """Whole numbers that the party remembers of this sum."""
    kept(memory, name)
    found: list[int] = memory[f"{OWN}{name}"].tolist()
    return found


def raw(values: Tensor) -> bytes:
    """A tensor's bytes."""
    return values.cpu().contiguous().numpy().tobytes()


def split(data: bytes, size: int) -> list[bytes]:
    """Data in pieces of one size."""
    return [data[at : at + size] for at in range(0, len(data), size)]


def tensor(data: bytes) -> Tensor:
    """Data as a tensor, as it travels and is remembered."""
    return torch.from_numpy(np.frombuffer(data, dtype=np.uint8).copy())


def table(pieces: Sequence[bytes], size: int) -> Tensor:
    """Pieces of one size as the rows of a tensor."""
    return tensor(b"".join(pieces)).view(len(pieces), size)


def forgotten(memory: Memory) -> Memory:
    """A memory without the secrets of a sum."""
    return {name: value for name, value in memory.items() if not name.startswith(OWN)}
