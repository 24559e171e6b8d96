"""Arithmetic with large numbers in a process of its own.

Python's lock is held for as long as a single power of large numbers takes. An aggregator that adds or opens encrypted
sums in the thread of a job would not answer health checks, parties and other jobs meanwhile, so it has a child process
compute them, one for each job that needs one. In the main thread (a simulation) nobody else waits, and the function is
called directly.

The child runs the functions of `FUNCTIONS` and no others. Arguments and results travel as trees of tensors and plain
values (`codec`), so nothing that is read can run code. The child ends with its standard input, so that it does not
outlive the aggregator, however that ended.
"""

from __future__ import annotations

import importlib
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from typing import IO, Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from hansa.plumbing import codec, errors
from hansa.plumbing.child import protected_output
from hansa.plumbing.errors import DataError, HansaError, RuntimeFailure
from hansa.secure.byte_tensors import as_bytes, as_tensor
from hansa.secure.paillier import PublicKey
from hansa.secure.threshold import Dealing

T = TypeVar("T")
COMMAND = [sys.executable, "-c", "from hansa.secure.child_process import serve; serve()"]
FUNCTIONS = {
    f"hansa.secure.{name}"
    for name in ("paillier_sum.made_key", "paillier_sum.added", "threshold_sum.received", "threshold_sum.opened",
                 "functional_sum.opened", "ckks.added")
}  # fmt: skip
_own = threading.local()  # the child of a thread


def run(function: Callable[..., T], *arguments: Any) -> T:
    """A function's result, from another process if this is not the main thread; a HansaError that it raises is raised
    here."""
    if threading.current_thread() is threading.main_thread():
        return function(*arguments)
    name = f"{function.__module__}.{function.__name__}"
    if name not in FUNCTIONS:
        raise TypeError(f"{name} is not one of the functions that a child process runs")
    message = codec.encode({"function": name, "arguments": _packed(arguments)})
    for last in (False, True):
        child = getattr(_own, "child", None)
        if child is None:
            child = _own.child = _Child()
        try:
            answer = codec.decode(child.call(message))
            break
        except (OSError, EOFError, DataError):  # somebody ended it
            _own.child = None
            if last:
                raise RuntimeFailure("the process that computes secure sums ended twice; its log says why") from None
    if "error" in answer:
        raise getattr(errors, answer["error"])(answer["text"])
    out: T = _unpacked(answer["result"])
    return out


class _Child:
    """A process that computes for one thread."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(COMMAND, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def call(self, message: bytes) -> bytes:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        _send(self._process.stdin, message)
        return _receive(self._process.stdout)

    def __del__(self) -> None:
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()
        self._process.kill()  # it holds nothing that could be lost
        self._process.wait()


def serve() -> None:
    """Serve the requests of standard input until its end."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # an interrupted aggregator ends this process itself
    answers = protected_output()  # printed text must not be mistaken for an answer
    while True:
        try:
            message = codec.decode(_receive(sys.stdin.buffer))
        except EOFError:
            return
        try:
            answer = {"result": _packed(_function(message["function"])(*_unpacked(message["arguments"])))}
        except HansaError as error:
            answer = {"error": _class(error), "text": str(error)}
        _send(answers, codec.encode(answer))


def _function(name: str) -> Callable[..., Any]:
    if name not in FUNCTIONS:
        raise TypeError(f"{name} is not one of the functions that a child process runs")
    module, _, function = name.rpartition(".")
    target: Callable[..., Any] = getattr(importlib.import_module(module), function)
    return target


def _class(error: HansaError) -> str:
    """The name of the nearest class of an error that `plumbing.errors` has."""
    name: str = next(cls.__name__ for cls in type(error).__mro__ if getattr(errors, cls.__name__, None) is cls)
    return name


def _packed(value: Any) -> Any:
    """A value as a tree that `codec` can encode; values of other types are stored with their type's name."""
    if value is None or isinstance(value, (bool, float, str, Tensor)):
        return value
    if isinstance(value, int):
        return {"int": hex(value)}
    if isinstance(value, bytes):
        return {"bytes": as_tensor(value) if value else torch.zeros(0, dtype=torch.uint8)}
    if isinstance(value, np.ndarray):
        return {"array": torch.from_numpy(value)}
    if isinstance(value, Mapping):
        return {"map": [[_packed(name), _packed(item)] for name, item in value.items()]}
    if isinstance(value, (list, tuple)):
        return {type(value).__name__: [_packed(item) for item in value]}
    if isinstance(value, PublicKey):
        return {"key": _packed(value.n)}
    if isinstance(value, Dealing):
        return {"dealing": [_packed(item) for item in (value.key, value.needed, value.owners, value.checks)]}
    raise TypeError(f"a {type(value).__name__} cannot be sent to a child process")


_MAKE: dict[str, Callable[[Any], Any]] = {
    "int": lambda text: int(text, 16),
    "bytes": as_bytes,
    "array": lambda tensor: tensor.numpy(),
    "map": lambda pairs: {_unpacked(name): _unpacked(item) for name, item in pairs},
    "list": lambda items: [_unpacked(item) for item in items],
    "tuple": lambda items: tuple(_unpacked(item) for item in items),
    "key": lambda n: PublicKey(_unpacked(n)),
    "dealing": lambda fields: Dealing(*map(_unpacked, fields)),
}


def _unpacked(tree: Any) -> Any:
    """The inverse of `_packed`."""
    if not isinstance(tree, dict):
        return tree
    ((kind, inside),) = tree.items()
    return _MAKE[kind](inside)


def _send(pipe: IO[bytes], data: bytes) -> None:
    pipe.write(len(data).to_bytes(8, "little") + data)
    pipe.flush()


def _receive(pipe: IO[bytes]) -> bytes:
    return _exactly(pipe, int.from_bytes(_exactly(pipe, 8), "little"))


def _exactly(pipe: IO[bytes], size: int) -> bytes:
    data = pipe.read(size)
    if len(data) < size:
        raise EOFError
    return data
