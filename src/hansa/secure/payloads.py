"""Checked reads of a secure sum's payload at a party. The aggregator, which sends it, may lie."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from hansa.core.entries import BYTES, WHOLE, Shaped, Text
from hansa.core.op import Party, Payload
from hansa.plumbing.errors import PartyError
from hansa.secure.byte_tensors import as_bytes, split

SESSION = 100  # characters of a session's name
IN_SESSION = Text(longest=SESSION)
IDS = Shaped(types=WHOLE, shape=(None,), least=0, rising=True)  # of parties
MATRIX = Shaped(types=BYTES, shape=(None, None))
ROW = Shaped(types=BYTES, shape=(None,))


def rows_of_bytes(size: int, optional: bool = False) -> Shaped:
    """The statement of any number of rows of `size` bytes."""
    return Shaped(types=BYTES, shape=(None, size), optional=optional)


def check_cohort(party: Party, parties: int, meaning: str, hint: str = "raise privacy.min_parties") -> None:
    """Decline a sum of fewer parties than the party's policy requires.

    `meaning` says what `parties` counts. Where the party cannot count them itself, the number is the aggregator's
    claim.
    """
    if parties < party.min_cohort:
        raise PartyError(
            f"its policy asks for a cohort of at least {party.min_cohort}, and {parties} {meaning}; ask more parties, "
            f"or {hint}"
        )


def ids(payload: Payload, name: str) -> list[int]:
    """A list of party ids: non-negative, in ascending order, without repetition."""
    value = payload.get(name)
    if not isinstance(value, Tensor) or value.dtype != torch.int64 or value.dim() != 1:
        raise PartyError(f"the aggregator sent no list of party ids in {name!r}")
    parties: list[int] = value.tolist()
    if any(a >= b for a, b in itertools.pairwise(parties)):
        raise PartyError(f"the aggregator lists a party twice, or out of order, in {name!r}")
    if parties and parties[0] < 0:
        raise PartyError(f"the aggregator lists a negative party id in {name!r}")
    return parties


def rows(payload: Payload, name: str, count: int, size: int) -> list[bytes]:
    """One row of `size` bytes for each of `count` parties."""
    value = payload.get(name)
    if not isinstance(value, Tensor) or value.dtype != torch.uint8 or tuple(value.shape) != (count, size):
        raise PartyError(f"the aggregator sent no {name!r} of {count} parties with {size} bytes each")
    return split(as_bytes(value), size)


def matrix(payload: Payload, name: str, size: int) -> Tensor:
    """Any number of rows of `size` bytes."""
    value = payload.get(name)
    if not isinstance(value, Tensor) or value.dtype != torch.uint8 or value.dim() != 2 or value.shape[1] != size:
        raise PartyError(f"the aggregator sent no {name!r} in rows of {size} bytes")
    return value


def row(payload: Payload, name: str, size: int) -> Tensor:
    """A vector of `size` bytes."""
    value = payload.get(name)
    if not isinstance(value, Tensor) or value.dtype != torch.uint8 or tuple(value.shape) != (size,):
        raise PartyError(f"the aggregator sent no {name!r} of {size} bytes")
    return value


def session(payload: Payload) -> str:
    """The name of the sum within its round. It is bounded, because the party stores it for good."""
    value = payload.get("session")
    if not isinstance(value, str) or not 0 < len(value) <= SESSION:
        raise PartyError(f"the aggregator sent no session name of 1 to {SESSION} characters")
    return value
