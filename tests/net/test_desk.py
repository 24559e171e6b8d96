"""Who is to do what: leases, absence, and questions for work that wait."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest

from hansa.net.aggregator import queue as desks
from hansa.net.aggregator.queue import Desk, Errand
from hansa.net.transport.wire import Blob, Work


class Clock:
    """Time that passes when a test says so."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr(desks.time, "monotonic", lambda: self.now)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def offer(number: int = 0, round: int = 0, job: str = "job-1") -> Errand:
    blob = Blob("ab" * 32, 1)
    return Errand(
        Work(job, "job", 0, round, "round", number, blob, blob, None, None, None, 1),
        Path(),
        Path(),
        100,
        lambda path: None,
    )


def test_work_is_given_out_in_the_order_in_which_it_was_offered() -> None:
    desk = Desk(10, 10)
    assert desk.take(0, "a") is None
    desk.offer([(0, offer(0)), (0, offer(1)), (1, offer(2))])
    assert desk.take(0, "a") == offer(0).work and desk.take(1, "b") == offer(2).work
    desk.answered(offer(0).key, 0, None)
    assert desk.take(0, "a") == offer(1).work


def test_the_same_instance_gets_its_work_again_at_once_and_another_waits_for_the_lease(clock: Clock) -> None:
    desk = Desk(100, 10)
    desk.offer([(0, offer())])
    for _ in range(3):
        assert desk.take(0, "a") == offer().work
    assert desk.take(0, "b") is None
    clock.now += 8
    desk.heard(0, "a")  # it is at it
    desk.heard(0, "b")  # which is no sign of life of the other
    clock.now += 8
    assert desk.take(0, "b") is None
    clock.now += 2.1
    assert desk.take(0, "b") == offer().work
    assert desk.take(0, "a") is None


def test_the_time_of_an_answer_counts_from_when_it_was_first_taken(clock: Clock) -> None:
    desk, made = Desk(100, 10), offer()
    desk.offer([(0, made)])
    assert desk.spent(made) == 0.0
    desk.take(0, "a")
    clock.now += 3
    desk.take(0, "a")
    clock.now += 1
    assert desk.spent(made) == pytest.approx(4)


def test_a_party_not_heard_of_is_absent_and_one_that_comes_back_is_new(clock: Clock) -> None:
    desk = Desk(5, 10)
    assert desk.present([0, 1]) == []
    assert desk.heard(0) is True and desk.heard(0) is False
    clock.now += 5
    assert desk.present([0, 1]) == [0]
    clock.now += 0.1
    assert desk.present([0, 1]) == [] and desk.heard(0) is True
    desk.gone(0)
    assert desk.present([0]) == []


def test_a_party_that_waits_for_work_is_there_however_long_it_waits(clock: Clock) -> None:
    async def main() -> None:
        desk = Desk(5, 10)
        waiting = asyncio.ensure_future(desk.wait_for_work(0, "a", 60))
        await asyncio.sleep(0)
        clock.now += 6
        assert desk.present([0]) == [0]
        desk.offer([(0, offer())])
        await waiting
        clock.now += 5.1
        assert desk.present([0]) == []

    run(main())


def test_what_a_party_was_asked_waits_for_it_when_it_was_sent_away_and_is_let_in_again() -> None:
    desk = Desk(5, 10)
    desk.offer([(0, offer())])
    desk.gone(0)
    desk.heard(0, "a")
    assert desk.take(0, "a") == offer().work


def test_an_answer_is_seen_by_who_watches_until_it_is_withdrawn() -> None:
    desk, key = Desk(10, 10), offer().key
    desk.offer([(0, offer()), (1, offer())])
    answers = desk.watch(key)
    desk.answered(key, 0, None)
    desk.answered(key, 1, "no")
    desk.answered(offer(9).key, 1, None)
    assert answers == {0: None, 1: "no"} and desk.find(0, key) is None
    desk.withdraw(key, [0, 1])
    desk.answered(key, 2, None)
    assert answers == {0: None, 1: "no"} and desk.watch(key) == {}


def test_a_party_finds_only_what_it_is_asked_itself() -> None:
    desk, made = Desk(10, 10), offer()
    desk.offer([(0, made)])
    assert desk.find(0, made.key) is made and desk.find(1, made.key) is None
    assert desk.take(1, "a") is None
    desk.withdraw(made.key, [0])
    assert desk.find(0, made.key) is None and desk.take(0, "a") is None


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(work, 10))


def test_a_question_that_waits_is_answered_when_work_is_offered() -> None:
    async def main() -> None:
        desk = Desk(10, 10)
        asked = [asyncio.ensure_future(desk.wait_for_work(party, "a", 60)) for party in (0, 1)]
        await asyncio.sleep(0)
        await asyncio.to_thread(desk.offer, [(0, offer())])
        assert await asked[0] == offer().work
        assert not asked[1].done() and list(desk._polls) == [1]
        asked[1].cancel()
        await asyncio.wait(asked)
        assert desk._polls == {}

    run(main())


def test_a_question_gives_up_in_time_and_its_party_is_there_until_then() -> None:
    async def main() -> None:
        desk = Desk(10, 10)
        assert await desk.wait_for_work(0, "a", 0.01) is None
        assert desk.present([0]) == [0] and desk._polls == {}

    run(main())


def test_another_instance_gets_the_work_as_soon_as_the_lease_has_run_out() -> None:
    async def main() -> None:
        desk = Desk(10, 0.1)
        desk.offer([(0, offer())])
        assert desk.take(0, "a") is not None
        waiting = asyncio.ensure_future(desk.wait_for_work(0, "b", 60))
        await asyncio.sleep(0)
        assert not waiting.done()
        assert await waiting == offer().work

    run(main())


def test_who_is_sent_away_is_told_at_once_and_is_not_there_any_more() -> None:
    async def main() -> None:
        desk = Desk(10, 10)
        asked = [asyncio.ensure_future(desk.wait_for_work(0, name, math.inf)) for name in "ab"]
        desk.heard(0)
        await asyncio.sleep(0)
        desk.gone(0)
        assert [await each for each in asked] == [None, None]
        assert desk.present([0]) == [] and desk._polls == {}

    run(main())


def test_an_earlier_question_of_the_same_instance_is_let_go_and_one_of_another_stays() -> None:
    async def main() -> None:
        desk = Desk(10, 10)
        first, other = (asyncio.ensure_future(desk.wait_for_work(0, name, 60)) for name in "ab")
        await asyncio.sleep(0)
        second = asyncio.ensure_future(desk.wait_for_work(0, "a", 60))
        assert await first is None and not other.done() and not second.done()
        assert desk.present([0]) == [0]
        desk.dismiss()
        assert await other is None and await second is None

    run(main())


def test_who_comes_for_work_after_everybody_was_sent_away_is_not_held() -> None:
    async def main() -> None:
        desk = Desk(10, 10)
        desk.dismiss()
        async with asyncio.timeout(5):
            assert await desk.wait_for_work(0, "a", 60) is None
        assert not desk.present([0])

    run(main())
