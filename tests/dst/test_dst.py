"""Worlds with every kind of fault keep every promise, and a broken promise is noticed."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest
from day import Day
from lives import SimulatedLedger
from relayed_world import RelayedWorld
from world import World

from hansa.net.aggregator import runtime
from hansa.net.aggregator.job_records import JobRecords
from hansa.net.aggregator.ledger import Writer
from hansa.net.party.store import PartyMemory
from hansa.plumbing import codec, disk

pytestmark = pytest.mark.slow

SEEDS = range(25)


@pytest.mark.parametrize("seed", SEEDS)
def test_nothing_acknowledged_is_lost_or_counted_twice(seed: int) -> None:
    assert World(seed).run().broken == []


@pytest.mark.parametrize("seed", range(12))
def test_nothing_is_lost_or_counted_twice_behind_a_relay(seed: int) -> None:
    assert RelayedWorld(seed).run().broken == []


def test_a_seed_is_a_history() -> None:
    first, again, other = (World(seed).run() for seed in (3, 3, 4))
    assert first.trace == again.trace != other.trace
    assert first.loop.now == again.loop.now and first.deaths == again.deaths
    first, again = (RelayedWorld(3).run() for _ in range(2))
    assert first.trace == again.trace


def test_hours_of_a_job_whose_parties_come_and_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Day, "hours", 1.0)
    day = Day(5).run()
    assert day.broken == [] and day.samples_taken[-1][2] > 30


def check_found(change: Callable[[pytest.MonkeyPatch], None], patch: pytest.MonkeyPatch, what: str, first: int = 0,
                ) -> None:  # fmt: skip
    """Check that a change breaks a promise within a number of worlds (from the seed `first` on, where it is rare)."""
    change(patch)
    for seed in range(first, first + 300):
        if any(what in found for found in World(seed).run().broken):
            return
    raise AssertionError(f"{what!r} was not found")


def stores_answer(change: Any) -> bool:
    return str(change.__qualname__).startswith("store_answer")


def tried(ledger: SimulatedLedger, change: Any) -> Any:
    """The result of a change, which is undone afterwards."""
    ledger._db.execute("BEGIN")
    try:
        return change(Writer(ledger._db, ledger))
    finally:
        ledger._db.execute("ROLLBACK")


def test_an_answer_that_is_acknowledged_before_it_is_on_disk_is_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    def change(patch: pytest.MonkeyPatch) -> None:
        def write(self: SimulatedLedger, change: Any) -> Any:
            real_future = real(self, change)
            if not stores_answer(change):
                return real_future
            early: Future[Any] = Future()
            early.set_result(tried(self, change))
            return early

        real = SimulatedLedger.write
        patch.setattr(SimulatedLedger, "write", write)

    check_found(change, monkeypatch, "an acknowledged update is lost", first=220)


def test_a_round_that_is_not_closed_in_one_transaction_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def change(patch: pytest.MonkeyPatch) -> None:
        def checkpoint(self: JobRecords, tree: dict[str, Any]) -> None:
            real(self, tree)
            self.ledger.now(lambda db: db.run("UPDATE jobs SET checkpoint = NULL").rowcount)
            keep, _ = self.blobs.put(codec.pieces(tree))
            self.ledger.now(lambda db: db.run("UPDATE jobs SET checkpoint = ?", keep).rowcount)

        real = JobRecords.checkpoint
        patch.setattr(JobRecords, "checkpoint", checkpoint)

    check_found(change, monkeypatch, "")


def test_memory_of_a_round_that_came_to_nothing_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def change(patch: pytest.MonkeyPatch) -> None:
        def recall(self: PartyMemory, job: str, tip: str | None, others: Any = ()) -> Any:
            staged = sorted((self.folder / job).glob("*.safetensors"), key=lambda path: path.stat().st_mtime_ns)
            return real(self, job, staged[-1].stem.replace("%2F", "/") if staged else tip, others)

        real = PartyMemory.recall
        patch.setattr(PartyMemory, "recall", recall)

    check_found(change, monkeypatch, "the model is")


def test_a_decision_that_is_taken_anew_after_a_restart_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def change(patch: pytest.MonkeyPatch) -> None:
        patch.setattr(runtime, "decide", lambda key, found, now: lambda db: found())

    check_found(change, monkeypatch, "replay")


def test_a_ledger_that_loses_an_answer_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def change(patch: pytest.MonkeyPatch) -> None:
        def commit(self: SimulatedLedger, batch: Any) -> None:
            lost = [item for item in batch if stores_answer(item[0]) and self._process.loop.chance.random() < 0.2]
            for change, future in lost:
                future.set_result(tried(self, change))
            real(self, [item for item in batch if item not in lost])

        real = SimulatedLedger._commit
        patch.setattr(SimulatedLedger, "_commit", commit)

    check_found(change, monkeypatch, "an acknowledged update is lost")


def test_a_blob_that_is_not_flushed_is_missed_when_the_power_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def change(patch: pytest.MonkeyPatch) -> None:
        patch.setattr(disk, "flush", lambda path: None)

    check_found(change, monkeypatch, "the job failed")
