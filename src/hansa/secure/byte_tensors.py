"""Conversions between bytes, integers and the uint8 tensors in which messages and memories carry them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor


def as_bytes(tensor: Tensor) -> bytes:
    """The bytes of a tensor."""
    return tensor.cpu().numpy().tobytes()


def as_tensor(data: bytes) -> Tensor:
    """Bytes as a uint8 tensor."""
    return torch.from_numpy(np.frombuffer(data, dtype=np.uint8).copy())


def to_table(pieces: Sequence[bytes], size: int) -> Tensor:
    """Pieces of `size` bytes as the rows of a tensor."""
    return as_tensor(b"".join(pieces)).view(len(pieces), size)


def split(data: bytes, size: int) -> list[bytes]:
    """Data cut into pieces of `size` bytes."""
    return [data[start : start + size] for start in range(0, len(data), size)]


def to_rows(numbers: Sequence[int], size: int) -> Tensor:
    """Non-negative integers as rows of `size` bytes, little-endian."""
    return to_table([number.to_bytes(size, "little") for number in numbers], size)


def from_rows(rows: Tensor) -> list[int]:
    """The integers that `to_rows` encoded."""
    return [int.from_bytes(row.tobytes(), "little") for row in rows.cpu().numpy()]
