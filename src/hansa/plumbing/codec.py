"""Encode trees of tensors and plain values as bytes, for messages and checkpoints.

The format is safetensors. Each tensor is stored under its path in the tree. The tree itself (names, numbers, strings)
is a JSON value in the file's metadata. Decoding never runs code.
"""

from __future__ import annotations

import hashlib
import json
import math
import mmap
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from hansa.plumbing.errors import DataError

_SHORT = {  # in the order in which safetensors stores tensors
    torch.int64: "I64", torch.float64: "F64", torch.float32: "F32", torch.int32: "I32", torch.bfloat16: "BF16",
    torch.float16: "F16", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
_LONG = {short: dtype for dtype, short in _SHORT.items()}
_ORDER = {dtype: position for position, dtype in enumerate(_SHORT)}
_MARK = "$tensor"
_HALF = re.compile(r"(?<!\\)(?:\\\\)*\\u[dD][89a-fA-F]")  # an escaped surrogate; `encode` never escapes characters
HEADER = 10**8  # largest header in bytes, the limit of safetensors itself
DIMENSIONS = 32  # most dimensions of a tensor
ERRORS = (ValueError, KeyError, TypeError, AttributeError, IndexError, OverflowError, RecursionError, RuntimeError)


def _split(tree: Any, path: str, tensors: dict[str, Tensor]) -> Any:
    """Replace each tensor of a tree by a reference; the tensors are added to `tensors`."""
    if isinstance(tree, Tensor):
        name = path or "."
        if name in tensors or name == "__metadata__":
            raise DataError(f"cannot encode the tensor at {name}: its path is taken; use other keys")
        if tree.dtype not in _SHORT:
            raise DataError(f"cannot encode a tensor of {tree.dtype} at {name}")
        tensors[name] = tree
        return {_MARK: name}
    if hasattr(tree, "_asdict"):
        tree = tree._asdict()
    if isinstance(tree, Mapping):
        for name in tree:
            if not isinstance(name, str) or name == _MARK:
                raise DataError(f"cannot encode the key {name!r} at {path or 'the root'}: keys are strings")
        return {name: _split(value, f"{path}/{name}" if path else name, tensors) for name, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        return [_split(value, f"{path}/{i}" if path else str(i), tensors) for i, value in enumerate(tree)]
    if tree is None or isinstance(tree, (bool, int, float, str)):
        return tree
    raise DataError(f"cannot encode a {type(tree).__name__} at {path or 'the root'}: only tensors and plain values")


def _join(tree: Any, tensors: dict[str, Tensor]) -> Any:
    if isinstance(tree, dict):
        if _MARK in tree:
            return tensors[tree[_MARK]]
        return {name: _join(value, tensors) for name, value in tree.items()}
    if isinstance(tree, list):
        return [_join(value, tensors) for value in tree]
    return tree


def _metadata(tree: Any) -> dict[str, str]:
    return {"tree": json.dumps(tree, separators=(",", ":"), ensure_ascii=False)}


def pieces(tree: Any) -> Iterator[bytes | memoryview]:
    """The bytes of `encode(tree)` in pieces: the header, then each tensor's memory."""
    tensors: dict[str, Tensor] = {}
    header, order = _layout(_split(tree, "", tensors), tensors)
    yield header
    for name in order:
        flat = tensors[name].detach().cpu().contiguous()
        flat = flat.as_strided((flat.numel(),), (1,))  # `contiguous` leaves any stride to a single number
        yield flat.view(torch.uint8).numpy().data if flat.numel() else b""


def encode(tree: Any) -> bytes:
    """Encode a tree of dicts, lists, tensors, numbers, strings and None. Tuples come back as lists."""
    return b"".join(pieces(tree))


def digest(tree: Any) -> str:
    """The SHA-256 of `encode(tree)`, without a copy of the tensors in memory."""
    running = hashlib.sha256()
    for piece in pieces(tree):
        running.update(piece)
    return running.hexdigest()


def decode(data: bytes, limit: int = HEADER) -> Any:
    """Decode the bytes of `encode`. Tensors get new, aligned memory. The header may have at most `limit` bytes."""
    try:
        plain, entries = _entries(memoryview(data), limit)
        tensors = {}
        for name, entry in entries.items():
            tensor = tensors[name] = torch.empty(entry.shape, dtype=entry.dtype)
            if tensor.numel():
                bytes_ = np.frombuffer(data, np.uint8, entry.size, entry.start)
                tensor.view(-1).view(torch.uint8).numpy()[:] = bytes_
        return _tree(plain, tensors)
    except ERRORS as error:
        raise _invalid(error) from None


class TensorEntry(NamedTuple):
    """Type, shape and position of a tensor in a file."""

    dtype: torch.dtype
    shape: list[int]
    start: int
    size: int


def _entries(data: memoryview | mmap.mmap, limit: int) -> tuple[Any, dict[str, TensorEntry]]:
    """The tree of a file without its tensors, and the entries of the tensors by name.

    The tensors must follow each other in the order of `encode`, so that each is aligned. They must fill the file after
    the header: no other bytes may hide between them.
    """
    length = int.from_bytes(data[:8], "little")
    if len(data) < 8 or length > len(data) - 8:
        raise ValueError("it is truncated")
    if length > limit:
        raise ValueError(f"its header has {length} bytes; at most {limit} are allowed")
    header = _json(bytes(data[8 : 8 + length]).decode())
    metadata = header.pop("__metadata__")
    if not all(isinstance(text, str) for text in metadata.values()):
        raise ValueError("its metadata are not strings")
    plain, entries, at = _json(metadata["tree"]), dict[str, TensorEntry](), 8 + length
    declared = ((name, *_entry(name, **entry), entry["data_offsets"]) for name, entry in header.items())
    for name, dtype, shape, size, offsets in sorted(declared, key=lambda entry: entry[4]):
        begin, end = 8 + length + offsets[0], 8 + length + offsets[1]
        if len(offsets) != 2 or begin != at or end - begin != size or end > len(data) or begin % dtype.itemsize:
            raise ValueError(f"{name[:80]!r} has invalid data offsets")
        if dtype == torch.bool and size and int(np.frombuffer(data, np.uint8, size, begin).max()) > 1:
            raise ValueError(f"{name[:80]!r} has values that are neither true nor false")
        entries[name], at = TensorEntry(dtype, shape, begin, size), end
    if at != len(data):
        raise ValueError("there are bytes after the last tensor")
    return plain, entries


def _entry(name: str, dtype: str, shape: list[int], data_offsets: list[int]) -> tuple[torch.dtype, list[int], int]:
    """The type, shape and size in bytes of a tensor, from its entry in the header."""
    for numbers, most in ((shape, DIMENSIONS), (data_offsets, 2)):
        if type(numbers) is not list or len(numbers) > most:
            raise ValueError(f"{name[:80]!r} has an invalid shape or invalid data offsets")
        if not all(type(number) is int and 0 <= number < 2**48 for number in numbers):
            raise ValueError(f"{name[:80]!r} has an invalid shape or invalid data offsets")
    return _LONG[dtype], shape, math.prod(shape) * _LONG[dtype].itemsize


def _json(text: str) -> Any:
    if _HALF.search(text):
        raise ValueError("it has a string that is not valid Unicode")
    return json.loads(text, object_pairs_hook=_once)


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) != len(pairs):
        raise ValueError("it has the same name twice")
    return table


def _tree(plain: Any, tensors: dict[str, Tensor]) -> Any:
    """The tree with its tensors; each tensor is named by its path and appears once."""
    unused = dict(tensors)
    tree = _filled(plain, "", unused)
    if unused:
        raise ValueError("the names of its tensors are not their paths in its tree")
    return tree


def _filled(tree: Any, path: str, unused: dict[str, Tensor]) -> Any:
    """As `_join`, but in place: a header may hold a million values. Removes each tensor from `unused`."""
    if isinstance(tree, dict):
        if _MARK in tree:
            name = path or "."
            if tree != {_MARK: name} or name not in unused:
                raise ValueError("the names of its tensors are not their paths in its tree")
            return unused.pop(name)
        for name, value in tree.items():
            if isinstance(value, (dict, list)):
                tree[name] = _filled(value, f"{path}/{name}" if path else name, unused)
    elif isinstance(tree, list):
        for i, value in enumerate(tree):
            if isinstance(value, (dict, list)):
                tree[i] = _filled(value, f"{path}/{i}" if path else str(i), unused)
    return tree


def _invalid(error: Exception) -> DataError:
    return DataError(f"not a valid message: {str(error)[:200]}")


def devices(tree: Any) -> list[str]:
    """The device type of each tensor of a tree, in order."""
    tensors: dict[str, Tensor] = {}
    _split(tree, "", tensors)
    return [tensor.device.type for tensor in tensors.values()]


def place(tree: Any, kinds: list[str], device: torch.device) -> Any:
    """Move the tensors whose entry in `kinds` is not "cpu" to `device`."""
    tensors: dict[str, Tensor] = {}
    plain = _split(tree, "", tensors)
    moved = {n: t if kind == "cpu" else t.to(device) for (n, t), kind in zip(tensors.items(), kinds, strict=True)}
    return _join(plain, moved)


def _layout(plain: Any, tensors: dict[str, Tensor]) -> tuple[bytes, list[str]]:
    """The header of a file, and the order of the tensors after it."""
    header: dict[str, Any] = {"__metadata__": _metadata(plain)}
    at = 0
    for name, tensor in sorted(tensors.items(), key=lambda item: (_ORDER[item[1].dtype], item[0])):
        end = at + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": _SHORT[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [at, end]}
        at = end
    try:
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise DataError(f"cannot encode a string that is not valid Unicode: {error}") from None
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, [name for name in header if name != "__metadata__"]


def size(tree: Any) -> int:
    """The length of `encode(tree)`, without encoding it."""
    tensors: dict[str, Tensor] = {}
    header, _ = _layout(_split(tree, "", tensors), tensors)
    return len(header) + sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


def mapped(path: str | Path, limit: int = 2**20) -> tuple[Any, dict[str, int], mmap.mmap]:
    """Open a file without reading its tensors: the tree, the offset of each tensor, and the memory map.

    The header may have at most `limit` bytes.
    """
    try:
        with open(path, "rb") as file:
            memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        plain, entries = _entries(memory, limit)
        tensors = {}
        for name, (dtype, shape, start, size) in entries.items():
            count = size // dtype.itemsize
            values = torch.frombuffer(memory, dtype=dtype, count=count, offset=start) if count else None
            tensors[name] = (torch.zeros(0, dtype=dtype) if values is None else values).view(shape)
        return _tree(plain, tensors), {name: entry.start for name, entry in entries.items()}, memory
    except ERRORS as error:
        raise _invalid(error) from None
