"""Claims of common people: a leader proves that it named these people before it saw an answer.

With its points H(x)^a a leader sends a commitment to each person: a hash of a random nonce and of H(x) (binding and
hiding in the random oracle model). To claim that a row of another party is common, the leader opens the commitment by
its nonce, and the party compares it with H(y) of this row. So a leader cannot claim a person whose id it did not know
when it sent its points, and not more people than it announced.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

from hansa.plumbing.errors import PartyError
from hansa.secure.byte_tensors import as_bytes, as_tensor, split, to_table
from hansa.vertical.psi_group import POINT

NONCE, COMMITMENT = 16, 32  # bytes


def nonces(secret: bytes, n: int) -> Tensor:
    """The nonces of n commitments: [n, 16]."""
    return as_tensor(hashlib.shake_256(b"hansa psi nonces" + secret).digest(NONCE * n)).view(n, NONCE)


def commitments(points: Tensor, nonces: Tensor) -> Tensor:
    """The commitment to each point under its nonce: [n, 32]."""
    pieces = zip(split(as_bytes(nonces), NONCE), split(as_bytes(points), POINT), strict=True)
    made = [hashlib.blake2b(nonce + point, digest_size=COMMITMENT, person=b"hansa psi").digest()
            for nonce, point in pieces]  # fmt: skip
    return to_table(made, COMMITMENT)


def opened(places: Tensor, nonces: Tensor, committed: Tensor, points: Tensor, leader: int) -> Tensor:
    """Which of the points a leader claims; a PartyError unless it opens a commitment to each of them.

    `places` has the number of the commitment to each point, -1 for a point that is not claimed. `committed` are the
    commitments that the leader sent first.
    """
    claimed = places >= 0
    valid = bool((places >= -1).all()) and bool((places < len(committed)).all())
    if not valid or not torch.equal(commitments(points[claimed], nonces[claimed]), committed[places[claimed]]):
        raise PartyError(f"party {leader} claims people whom it did not name before it saw the answer")
    return claimed
