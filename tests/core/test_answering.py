"""A party's answer: it reports what was spent only where the op reports it, and stages its memory last."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch

from hansa.core.answering import answer, report_spent
from hansa.core.budget import EPSILON, Budget
from hansa.core.op import Memory, Op, Replies, Reply
from hansa.plumbing.errors import PartyError


@dataclass(frozen=True)
class Private(Op):
    """An op whose replies are differentially private."""

    budget: ClassVar[Budget | None] = Budget(8.0, 1e-5)
    measures: ClassVar[frozenset[str] | None] = None


@dataclass(frozen=True)
class Silent(Private):
    """An op that does not report what was spent."""

    measures: ClassVar[frozenset[str] | None] = frozenset({"loss"})


def test_the_spending_is_read_after_the_op_ran_and_the_memory_is_staged_last() -> None:
    steps: list[str] = []

    def run() -> tuple[Reply, Memory]:
        steps.append("run")
        return Reply({}), {"m": torch.ones(1)}

    def spent() -> float:
        steps.append("spent")
        return 0.5

    reply, staged = answer(Private(), run, spent, lambda memory: steps.append("stage"))
    assert steps == ["run", "spent", "stage"] and staged and reply.metrics == {EPSILON: 0.5}


def test_a_party_that_declines_stages_nothing() -> None:
    def run() -> tuple[Reply, Memory]:
        raise PartyError("its privacy budget is spent")

    with pytest.raises(PartyError, match="spent"):
        answer(Private(), run, lambda: pytest.fail("read"), lambda memory: pytest.fail("staged"))


def test_nothing_is_staged_where_there_is_nothing_to_remember() -> None:
    reply, staged = answer(Private(), lambda: (Reply({}), {}), lambda: None, lambda memory: pytest.fail("staged"))
    assert not staged and reply.metrics == {}


@pytest.mark.parametrize("spent", [(0.5, None), (0.5, float("inf"))])
def test_a_stack_reports_the_spending_of_all_its_parties_or_of_none(spent: tuple[float | None, ...]) -> None:
    replies = Replies([0, 1], {}, [1, 1])
    report_spent(Private(), replies, *spent)
    assert replies.metrics == {}
    report_spent(Private(), replies, 0.5, 0.25)
    assert replies.metrics == {EPSILON: [0.5, 0.25]}


def test_an_op_that_measures_other_things_reports_no_spending() -> None:
    reply = Reply({})
    report_spent(Silent(), reply, 0.5)
    assert reply.metrics == {}
