"""The bin numbers of a party's samples, computed once."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from hansa.classical.cache import CACHE
from hansa.classical.trees.bins import Bins, rows_of
from hansa.classical.trees.sketches import surrogates

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Coded:
    """The bin numbers of a party's samples, and a hash of the samples."""

    codes: Array
    digest: int


def coded(x: Tensor, bins: Bins, points: int = 0) -> Coded:
    """The bin numbers of a party's samples; with `points`, of the party's surrogates of them."""
    bins_digest = bins.digest()

    def make() -> tuple[Coded, int]:
        rows = rows_of(x)
        digest = hashlib.blake2b(np.ascontiguousarray(rows).tobytes() + bins_digest, digest_size=8).digest()
        codes = bins.codes(surrogates(rows, bins.categorical, points) if points else rows)
        return Coded(codes, int.from_bytes(digest, "little", signed=True)), codes.nbytes

    return CACHE.get(x, ("bins", bins_digest, points), make)
