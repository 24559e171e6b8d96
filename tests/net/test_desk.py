"""The task queue: leases, absence, and polls for work that wait."""

from __future__ import annotations

import asyncio
import math
from pathlib import Path

import pytest

from hansa.net.aggregator import queue as queue_module
from hansa.net.aggregator.queue import QueuedAsk, TaskQueue
from hansa.net.transport.wire import Blob, Work
from in_loop import in_loop


class Clock:
    """A clock that advances when a test says so."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr(queue_module.time, "monotonic", lambda: self.now)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def offer(number: int = 0, round: int = 0, job: str = "job-1") -> QueuedAsk:
    blob = Blob("ab" * 32, 1)
    return QueuedAsk(
        Work(job, "job", 0, round, "round", number, blob, blob, None, None, None, 1),
        Path(),
        Path(),
        100,
        lambda path: None,
    )


def test_work_is_given_out_in_the_order_in_which_it_was_offered() -> None:
    queue = TaskQueue(10, 10)
    assert queue.take(0, "a") is None
    queue.offer([(0, offer(0)), (0, offer(1)), (1, offer(2))])
    assert queue.take(0, "a") == offer(0).work and queue.take(1, "b") == offer(2).work
    queue.answered(offer(0).key, 0, None)
    assert queue.take(0, "a") == offer(1).work


def test_the_same_instance_gets_its_work_again_at_once_and_another_waits_for_the_lease(clock: Clock) -> None:
    queue = TaskQueue(100, 10)
    queue.offer([(0, offer())])
    for _ in range(3):
        assert queue.take(0, "a") == offer().work
    assert queue.take(0, "b") is None
    clock.now += 8
    queue.heard(0, "a")  # it is working on the ask
    queue.heard(0, "b")  # a contact of one instance is none of the other
    clock.now += 8
    assert queue.take(0, "b") is None
    clock.now += 2.1
    assert queue.take(0, "b") == offer().work
    assert queue.take(0, "a") is None


def test_the_time_of_an_answer_counts_from_when_it_was_first_taken(clock: Clock) -> None:
    queue, made = TaskQueue(100, 10), offer()
    queue.offer([(0, made)])
    assert queue.spent(made) == 0.0
    queue.take(0, "a")
    clock.now += 3
    queue.take(0, "a")
    clock.now += 1
    assert queue.spent(made) == pytest.approx(4)


def test_a_party_not_heard_of_is_absent_and_one_that_comes_back_is_new(clock: Clock) -> None:
    queue = TaskQueue(5, 10)
    assert queue.present([0, 1]) == []
    assert queue.heard(0) is True and queue.heard(0) is False
    clock.now += 5
    assert queue.present([0, 1]) == [0]
    clock.now += 0.1
    assert queue.present([0, 1]) == [] and queue.heard(0) is True
    queue.gone(0)
    assert queue.present([0]) == []


@in_loop
async def test_a_party_that_waits_for_work_is_there_however_long_it_waits(clock: Clock) -> None:
    queue = TaskQueue(5, 10)
    waiting = asyncio.ensure_future(queue.wait_for_work(0, "a", 60))
    await asyncio.sleep(0)
    clock.now += 6
    assert queue.present([0]) == [0]
    queue.offer([(0, offer())])
    await waiting
    clock.now += 5.1
    assert queue.present([0]) == []


def test_what_a_party_was_asked_waits_for_it_when_it_was_sent_away_and_is_let_in_again() -> None:
    queue = TaskQueue(5, 10)
    queue.offer([(0, offer())])
    queue.gone(0)
    queue.heard(0, "a")
    assert queue.take(0, "a") == offer().work


def test_an_answer_is_seen_by_who_watches_until_it_is_withdrawn() -> None:
    queue, key = TaskQueue(10, 10), offer().key
    queue.offer([(0, offer()), (1, offer())])
    answers = queue.watch(key)
    queue.answered(key, 0, None)
    queue.answered(key, 1, "no")
    queue.answered(offer(9).key, 1, None)
    assert answers == {0: None, 1: "no"} and queue.find(0, key) is None
    queue.withdraw(key, [0, 1])
    queue.answered(key, 2, None)
    assert answers == {0: None, 1: "no"} and queue.watch(key) == {}


def test_a_party_finds_only_what_it_is_asked_itself() -> None:
    queue, made = TaskQueue(10, 10), offer()
    queue.offer([(0, made)])
    assert queue.find(0, made.key) is made and queue.find(1, made.key) is None
    assert queue.take(1, "a") is None
    queue.withdraw(made.key, [0])
    assert queue.find(0, made.key) is None and queue.take(0, "a") is None


@in_loop
async def test_a_question_that_waits_is_answered_when_work_is_offered() -> None:
    queue = TaskQueue(10, 10)
    asked = [asyncio.ensure_future(queue.wait_for_work(party, "a", 60)) for party in (0, 1)]
    await asyncio.sleep(0)
    await asyncio.to_thread(queue.offer, [(0, offer())])
    assert await asked[0] == offer().work
    assert not asked[1].done() and list(queue._polls) == [1]
    asked[1].cancel()
    await asyncio.wait(asked)
    assert queue._polls == {}


@in_loop
async def test_a_question_gives_up_in_time_and_its_party_is_there_until_then() -> None:
    queue = TaskQueue(10, 10)
    assert await queue.wait_for_work(0, "a", 0.01) is None
    assert queue.present([0]) == [0] and queue._polls == {}


@in_loop
async def test_another_instance_gets_the_work_as_soon_as_the_lease_has_run_out() -> None:
    queue = TaskQueue(10, 0.1)
    queue.offer([(0, offer())])
    assert queue.take(0, "a") is not None
    waiting = asyncio.ensure_future(queue.wait_for_work(0, "b", 60))
    await asyncio.sleep(0)
    assert not waiting.done()
    assert await waiting == offer().work


@in_loop
async def test_who_is_sent_away_is_told_at_once_and_is_not_there_any_more() -> None:
    queue = TaskQueue(10, 10)
    asked = [asyncio.ensure_future(queue.wait_for_work(0, name, math.inf)) for name in "ab"]
    queue.heard(0)
    await asyncio.sleep(0)
    queue.gone(0)
    assert [await each for each in asked] == [None, None]
    assert queue.present([0]) == [] and queue._polls == {}


@in_loop
async def test_an_earlier_question_of_the_same_instance_is_let_go_and_one_of_another_stays() -> None:
    queue = TaskQueue(10, 10)
    first, other = (asyncio.ensure_future(queue.wait_for_work(0, name, 60)) for name in "ab")
    await asyncio.sleep(0)
    second = asyncio.ensure_future(queue.wait_for_work(0, "a", 60))
    assert await first is None and not other.done() and not second.done()
    assert queue.present([0]) == [0]
    queue.dismiss()
    assert await other is None and await second is None


@in_loop
async def test_who_comes_for_work_after_everybody_was_sent_away_is_not_held() -> None:
    queue = TaskQueue(10, 10)
    queue.dismiss()
    async with asyncio.timeout(600):
        assert await queue.wait_for_work(0, "a", math.inf) is None
    assert not queue.present([0])
