"""How a party answers an ask: run the op, report its privacy spending, stage the memory."""

from __future__ import annotations

from collections.abc import Callable

from hansa.core.budget import EPSILON, reports_epsilon
from hansa.core.op import Memory, Op, Replies, Reply


def answer(op: Op, run: Callable[[], tuple[Reply, Memory]], spent: Callable[[], float | None],
           stage: Callable[[Memory], None]) -> tuple[Reply, bool]:  # fmt: skip
    """Answer one ask at one party. The result is the reply, and whether the party staged memory with it.

    `run` charges the privacy budget before it reads a sample: the reply counts as released, whatever becomes of it.
    `spent` gives the epsilon after that. A party declines by a PartyError from `run`.
    """
    reply, memory = run()
    report_spent(op, reply, spent())
    if memory:
        stage(memory)
    return reply, bool(memory)


def report_spent(op: Op, replies: Reply | Replies, *spent: float | None) -> None:
    """Add to a reply, or to a stack of replies, the epsilon that each party has spent, if the op reports it."""
    if op.budget is None:
        return
    reported = [epsilon for epsilon in spent if epsilon is not None and reports_epsilon(op, epsilon)]
    if len(reported) < len(spent):
        return
    if isinstance(replies, Reply):
        (replies.metrics[EPSILON],) = reported
    else:
        replies.metrics[EPSILON] = reported
