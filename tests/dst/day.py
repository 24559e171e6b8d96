"""`make day`: a simulated day of one job. Parties come in the morning and leave at night, processes die, and the memory
of this process must not grow."""

from __future__ import annotations

import argparse
import asyncio
import gc
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from lives import Aggregator, Member
from world import NAMES, Weather, World

from hansa.net.transport.wire import Receipt

HOUR = 3600.0
SLEEP = 8.0  # hours that a party is away every day
SETTLED = 4  # hours after which memory must stay constant
GROWTH = 16.0  # MiB by which it may grow after that


class Day(World):
    """Twelve parties, about one round per minute, for `hours` hours."""

    hours: float = 24.0

    def __post_init__(self) -> None:
        super().__post_init__()
        self.loop.limit = (self.hours + 4.0) * HOUR
        self.samples_taken: list[tuple[float, float, int, float]] = []  # hour, MiB, rounds, MiB of the record

    def _forecast(self) -> Weather:
        run = {"rounds": 10**6, "seed": 1, "eval_parties": False, "quorum": 0.25, "deadline": 60.0}
        return Weather(
            parties=len(NAMES), algorithm="tally", rounds=10**6, asks=1, run=run, prepare=True, lost=0.02,
            doubled=0.05, delay=0.2, pause=1200.0, fragile=0.0, partition=0.1, skew=60.0, work=20.0,
            moody=0.01, power=0.0, absent_after=120.0, lease=60.0, min_parties=1,
        )  # fmt: skip

    def _database(self) -> str:
        return str(self.folder / "hansa.db")

    @property
    def stormy(self) -> bool:
        return True

    def _asleep(self, number: int) -> float:
        """The hours until a party is awake; 0 if it is."""
        hour = (self.loop.now / HOUR - 2.0 * number) % 24.0
        return max(0.0, hour - (24.0 - SLEEP)) and 24.0 - hour

    def _pause(self, life: Aggregator | Member) -> float:
        away = self._asleep(life.number) * HOUR if isinstance(life, Member) else 0.0
        return away + super()._pause(life)

    def received(self, receipt: Receipt) -> None:
        """Looked up once: there will be tens of thousands of calls."""
        row = self.db.execute(
            "SELECT blob FROM replies WHERE job = ? AND round = ? AND phase = ? AND number = ? AND party = ?",
            (receipt.job, receipt.round, receipt.phase, receipt.number, NAMES.index(receipt.party)),
        ).fetchone()
        if receipt.status == "accepted" and (row is None or row["blob"] != receipt.digest):
            self.fail(f"an acknowledged update is lost: {receipt}")

    async def _nights(self) -> None:
        while True:
            await asyncio.sleep(600.0)
            for member in list(self.members.values()):
                if self._asleep(member.number) and not member.process.dead:
                    member.process.kill()

    async def _measure(self) -> None:
        for hour in range(1, int(self.hours) + 1):
            await asyncio.sleep(hour * HOUR - self.loop.now)
            gc.collect()
            pages = int(Path("/proc/self/statm").read_text().split()[1])
            rounds = self.db.execute("SELECT count(*) FROM rounds").fetchone()[0]
            size = self.db.execute("PRAGMA page_count").fetchone()[0] * 4096 / 2**20
            self.samples_taken.append((hour, pages * 4096 / 2**20, rounds, size))

    async def _until_ended(self) -> None:
        others = [self.loop.create_task(self._nights()), self.loop.create_task(self._measure())]
        await asyncio.sleep(self.hours * HOUR + 1.0)
        while self.ended is None:
            if self.aggregator is not None:
                self.aggregator.runner.stop("job-1")
            await asyncio.sleep(30.0)
            row: Any = self.db.execute("SELECT status FROM jobs").fetchone()
            self.ended = row["status"] if row["status"] == "stopped" else None
        for task in others:
            task.cancel()


def main() -> int:
    words = argparse.ArgumentParser(description=__doc__)
    words.add_argument("--hours", type=float, default=24.0)
    words.add_argument("--seed", type=int, default=0)
    given = words.parse_args()
    if given.hours < 1:
        words.error("--hours is at least 1")
    Day.hours = given.hours
    day = Day(given.seed).run()
    print("hour  memory MiB  rounds  record MiB")
    for hour, memory, rounds, size in day.samples_taken:
        print(f"{hour:4.0f}  {memory:10.1f}  {rounds:6d}  {size:10.1f}")
    settled = [memory for hour, memory, _, _ in day.samples_taken if hour >= SETTLED]
    grown = settled[-1] - settled[0] if settled else 0.0
    if grown > GROWTH:
        day.fail(f"from hour {SETTLED} on memory grew by {grown:.1f} MiB")
    for fault in day.broken:
        print(fault)
    verdict = "broken" if day.broken else "every promise held"
    print(
        f"{given.hours:g} simulated hours, seed {given.seed}: {day.deaths} deaths, memory grew by {grown:.1f} MiB from "
        f"hour {SETTLED} on; {verdict}"
    )
    return 1 if day.broken else 0


if __name__ == "__main__":
    sys.exit(main())
