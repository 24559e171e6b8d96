"""Worlds in which everything goes wrong keep every promise; and a promise that is broken is noticed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from day import Day
from lives import SimulatedLedger
from world import World

from hansa.core import codec
from hansa.net import asks, taking
from hansa.net.home import Remembered
from hansa.net.ledger import Writer
from hansa.net.runtime import Network
from hansa.run.records import JobRecords

SEEDS = range(40)


@pytest.mark.parametrize("seed", SEEDS)
def test_nothing_acknowledged_is_lost_or_counted_twice(seed: int) -> None:
    assert World(seed).run().broken == []


def test_a_seed_is_a_history() -> None:
    first, again, other = (World(seed).run() for seed in (3, 3, 4))
    assert first.trace == again.trace != other.trace
    assert first.loop.now == again.loop.now and first.deaths == again.deaths


def test_hours_of_a_job_whose_parties_come_and_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Day, "hours", 1.0)
    day = Day(5).run()
    assert day.broken == [] and day.samples_taken[-1][2] > 30


def broken_by(change: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch, most: int = 60) -> str:
    """What breaks first under a change, within so many worlds."""
    change(monkeypatch)
    for seed in range(most):
        found = World(seed).run().broken
        if found:
            return found[0]
    raise AssertionError(f"nothing broke in {most} worlds")


def test_an_answer_that_is_acknowledged_before_it_is_on_disk_is_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    def change(patch: pytest.MonkeyPatch) -> None:
        def steps(self: taking.Taking, key: Any, sent: Any, owner: str, errand: Any) -> Any:
            if errand is not None and sent.answer.blob is not None:
                self.ledger.write(asks.store_answer(key, sent, None))  # and not waited for
                self.desk.answered(key, sent.party, None)
                said, root = sent.statement, "0" * 64
                return self.ledger.notary.receipt(said, sent.answer.signature, "accepted", 0, 1, root)
            return (yield from real(self, key, sent, owner, errand))

        real = taking.Taking.steps
        patch.setattr(taking.Taking, "steps", steps)

    assert broken_by(change, monkeypatch)


def test_a_round_that_is_not_closed_in_one_transaction_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def change(patch: pytest.MonkeyPatch) -> None:
        def checkpoint(self: JobRecords, tree: dict[str, Any]) -> None:
            real(self, tree)
            self.ledger.now(lambda db: db.run("UPDATE jobs SET checkpoint = NULL").rowcount)
            keep, _ = self.blobs.put(codec.pieces(tree))
            self.ledger.now(lambda db: db.run("UPDATE jobs SET checkpoint = ?", keep).rowcount)

        real = JobRecords.checkpoint
        patch.setattr(JobRecords, "checkpoint", checkpoint)

    assert broken_by(change, monkeypatch, 200)


def test_memory_of_a_round_that_came_to_nothing_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def change(patch: pytest.MonkeyPatch) -> None:
        def recall(self: Remembered, job: str, tip: str | None, others: Any = ()) -> Any:
            staged = sorted((self.folder / job).glob("*.safetensors"), key=lambda path: path.stat().st_mtime_ns)
            return real(self, job, staged[-1].stem.replace("%2F", "/") if staged else tip, others)

        real = Remembered.recall
        patch.setattr(Remembered, "recall", recall)

    assert "the model is" in broken_by(change, monkeypatch, 200)


def test_a_decision_that_is_taken_anew_after_a_restart_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def change(patch: pytest.MonkeyPatch) -> None:
        def forgetting(self: Network, key: Any) -> Any:
            return [row for row in real(self, key) if len(self.parties) < 3 or row["party"] != 0]

        real = Network._replies
        patch.setattr(Network, "_replies", forgetting)

    assert broken_by(change, monkeypatch)


def test_a_ledger_that_loses_a_commit_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def change(patch: pytest.MonkeyPatch) -> None:
        def commit(self: SimulatedLedger, batch: Any) -> None:
            if self._process.loop.chance.random() < 0.02:
                self._db.execute("BEGIN")
                for change, future in batch:
                    future.set_result(change(Writer(self._db, self)))
                self._db.execute("ROLLBACK")
            else:
                real(self, batch)

        real = SimulatedLedger._commit
        patch.setattr(SimulatedLedger, "_commit", commit)

    assert broken_by(change, monkeypatch)
