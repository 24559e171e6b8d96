"""Messages of the cluster: trees whose tensors are arrays, which Ray moves and shares without a copy."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor


class PackedTensor(NamedTuple):
    """A tensor as an array. NumPy has no bfloat16, so its numbers travel as 16-bit integers."""

    array: np.ndarray[Any, Any]
    half: bool = False

    def tensor(self, device: str = "cpu") -> Tensor:
        """The tensor on a device, copied: arrays of Ray's object store cannot be written."""
        tensor = torch.from_numpy(np.array(self.array))
        return (tensor.view(torch.bfloat16) if self.half else tensor).to(device)


def packed(tensor: Tensor) -> PackedTensor:
    """A tensor as an array of its own numbers alone: a view would bring all that it is a view of."""
    tensor = tensor.detach().cpu().contiguous()
    half = tensor.dtype == torch.bfloat16
    return PackedTensor((tensor.view(torch.int16) if half else tensor).numpy(), half)


def pack(tree: Any) -> Any:
    """A tree with arrays instead of tensors."""
    if isinstance(tree, Tensor):
        return packed(tree)
    if isinstance(tree, dict):
        return {name: pack(value) for name, value in tree.items()}
    if isinstance(tree, (list, tuple)) and any(isinstance(value, (Tensor, dict, list, tuple)) for value in tree):
        return type(tree)([pack(value) for value in tree])
    return tree


def unpack(tree: Any, device: str = "cpu") -> Any:
    """The tree of `pack`, with tensors on a device."""
    if isinstance(tree, PackedTensor):
        return tree.tensor(device)
    if isinstance(tree, dict):
        return {name: unpack(value, device) for name, value in tree.items()}
    if isinstance(tree, (list, tuple)) and any(isinstance(value, (PackedTensor, dict, list, tuple)) for value in tree):
        return type(tree)([unpack(value, device) for value in tree])
    return tree
