"""The group ristretto255 (RFC 9496): hashing to points, and multiplication of points by a secret.

The arithmetic is libsodium's, in constant time, by the package `rbcl` (extra `vertical`). A call releases Python's
lock, so threads use all cores. An encoding of a point that is not canonical and the neutral element are refused.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import importlib.util
import os
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hansa.plumbing.errors import ConfigError, PartyError
from hansa.plumbing.stopping import go_on
from hansa.secure.byte_tensors import as_bytes, as_tensor, split

POINT = 32  # bytes of an encoded point
ORDER = 2**252 + 27742317777372353535851937790883648493  # of the group
WIDE = 64  # bytes of a hash that is mapped to a point, or reduced to a scalar
CHUNK = 512  # items per piece of work


@functools.cache
def sodium() -> Any:
    """The module `rbcl`; a ConfigError if it is not installed."""
    if importlib.util.find_spec("rbcl") is None:
        raise ConfigError("matching people, and FedV, needs rbcl; pip install 'hansa[vertical]'")
    module = importlib.import_module("rbcl")
    # The package writes libsodium to a temporary file, loads it and leaves the file there.
    path = getattr(sys.modules.get("rbcl._sodium"), "lib_path", None)
    if os.name == "posix" and path is not None:
        Path(path).unlink(missing_ok=True)
    return module


def available() -> None:
    """Raise a ConfigError if the library is not installed."""
    sodium()


def scalar(secret: bytes) -> bytes:
    """A secret scalar from 32 secret bytes."""
    wide = hashlib.sha512(b"hansa psi scalar" + secret).digest()
    return bytes(sodium().crypto_core_ristretto255_scalar_reduce(wide))


def scalars(secret: bytes, n: int) -> list[int]:
    """n secret scalars, from 32 secret bytes."""
    wide = hashlib.shake_256(b"hansa psi scalars" + secret).digest(WIDE * n)
    return [int.from_bytes(piece, "little") % ORDER for piece in split(wide, WIDE)]


def inverses(scalars: Sequence[int]) -> list[int]:
    """The inverse of each scalar, by one inversion for all of them (Montgomery 1987)."""
    products = [1]
    for each in scalars:
        products.append(products[-1] * each % ORDER)
    rest, found = pow(products.pop(), -1, ORDER), list[int]()
    for each, before in zip(reversed(scalars), reversed(products), strict=True):
        found.append(rest * before % ORDER)
        rest = rest * each % ORDER
    return found[::-1]


def hashed(texts: Sequence[str], domain: bytes) -> Tensor:
    """Each text as a point whose discrete logarithm nobody knows: [n, 32]. Other domains give other points."""
    start = hashlib.sha512(len(domain).to_bytes(4, "big") + domain)
    point = sodium().crypto_core_ristretto255_from_hash

    def of_text(text: str) -> bytes:
        state = start.copy()
        state.update(text.encode())
        return bytes(point(state.digest()))

    return mapped(of_text, texts)


def raised(points: Tensor, secret: bytes | Sequence[int]) -> Tensor:
    """Each point times one scalar, or times its own: [n, 32]. A PartyError if a point is invalid or neutral."""
    multiply = sodium().crypto_scalarmult_ristretto255
    own = [secret] * len(points) if isinstance(secret, bytes) else [each.to_bytes(32, "little") for each in secret]

    def of_pair(pair: tuple[bytes, bytes]) -> bytes:
        try:
            return bytes(multiply(*pair))
        except (RuntimeError, ValueError):
            raise PartyError("a point that it was sent is not a valid element of ristretto255") from None

    return mapped(of_pair, list(zip(own, split(as_bytes(points), POINT), strict=True)))


def mapped(function: Callable[[Any], bytes], items: Sequence[Any], chunk: int = CHUNK) -> Tensor:
    """A function of each item, on all cores; each result is a point, or several."""

    def work(start: int) -> bytes:
        return b"".join(map(function, items[start : start + chunk]))

    starts = range(0, len(items), chunk)
    if len(starts) < 2:
        return as_tensor(b"".join(map(work, starts))).view(-1, POINT) if items else torch.empty(0, POINT).byte()
    pool = ThreadPoolExecutor(min(cores(), len(starts)))
    try:
        pieces = []
        for piece in pool.map(work, starts):
            go_on()
            pieces.append(piece)
    finally:
        pool.shutdown(cancel_futures=True)
    return as_tensor(b"".join(pieces)).view(-1, POINT)


def cores() -> int:
    """The number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def places(points: Tensor, where: str) -> dict[bytes, int]:
    """The row of each point; a PartyError if a point is there twice. `where` names the points in the message."""
    rows = {point: row for row, point in enumerate(split(as_bytes(points), POINT))}
    if len(rows) < len(points):
        raise PartyError(f"{where} has a point twice")
    return rows
