"""Run a `hansa` command as a liar: `python liars.py MODULE:FUNCTION WORDS...` calls the function, then the command.

The function replaces the code that it lies about; everything else is the ordinary program, over real sockets. A liar
records what it learns with `note`, for the test to read. `kit.py` starts these processes.
"""

from __future__ import annotations

import copy
import importlib
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from hansa.algorithms.fedavg import FedAvg
from hansa.core.ask import Ask, op_of
from hansa.core.data_op import DataOp
from hansa.core.op import Op, Reply
from hansa.net.aggregator import reply_rules, runtime
from hansa.net.party.worker import Worker
from hansa.plumbing import codec
from hansa.replies import replies

T = TypeVar("T")
Message = dict[str, Any]


def forged(part: T, **fields: Any) -> T:
    """A copy of a part with other fields, without any check."""
    other = copy.copy(part)
    for name, value in fields.items():
        object.__setattr__(other, name, value)
    return other


def note(tree: Mapping[str, Any]) -> None:
    """Record something that the liar has learned: named tensors and plain values."""
    folder = Path(os.environ["HANSA_NOTES"])
    folder.mkdir(exist_ok=True)
    part = folder / f"{len(list(folder.iterdir())):06d}.part"
    part.write_bytes(codec.encode(dict(tree)))
    part.rename(part.with_suffix(".note"))


# Lies of an aggregator


def believe_everything() -> None:
    """Make an aggregator accept every reply."""
    reply_rules.received = replies.received = replies.received_stack = lambda reply, *_: reply  # type: ignore


def rewrite(change: Callable[[int, Message], Message]) -> None:
    """Make an aggregator send parties other messages (op, payload, round) than the job's: `change(party, message)`."""
    honest = Ask.message
    Ask.message = lambda self, number: change(number, dict(honest(self, number)))  # type: ignore[method-assign]
    runtime.NetworkRuntime._shows = lambda *_: False  # type: ignore[method-assign]
    believe_everything()


def take_over(round: Callable[..., Any], *verbs: str) -> None:
    """Replace the round of jobs that use `fedavg` at an aggregator: `async def round(algorithm, state, fed)`."""
    FedAvg.round = round  # type: ignore[assignment]
    FedAvg.verbs = frozenset(verbs)  # type: ignore[assignment,misc]
    believe_everything()


# Lies of a party


def answer(change: Callable[[Op, Mapping[str, Any], Reply], Reply | str]) -> None:
    """Make a party send other replies than its own: `change(op, payload, reply)`."""
    honest = Worker.answer

    def lie(self: Worker, work: Any, message: Message, task: Message) -> tuple[Reply | str, bool]:
        reply, staged = honest(self, work, message, task)
        op: Op = op_of(message["op"], where="ask")
        if isinstance(reply, str) or isinstance(op, DataOp):
            return reply, staged
        return change(op, message["payload"], reply), staged

    Worker.answer = lie  # type: ignore[method-assign]


if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]
    module, _, function = sys.argv.pop(1).partition(":")
    getattr(importlib.import_module(module), function)()
    from hansa.cli import main

    main()
