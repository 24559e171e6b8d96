"""Progress of a study, shown below the notebook cell that runs it."""

from __future__ import annotations

import time
from collections.abc import Sequence

from hansa.report.progress import CellLine, clock
from hansa.study.pool import CellRun

INTERVAL = 0.2  # minimum seconds between two updates


class NotebookBoard:
    """Progress line of a study: runs done, estimated time left, runs in progress."""

    def __init__(self) -> None:
        self._line = CellLine()
        self._next = 0.0

    def begin(self, title: str, jobs: Sequence[CellRun], done: int) -> None:
        self._title, self._done, self._count = title, done, done + len(jobs)
        self._total, self._worked, self._failed = sum(job.cost for job in jobs), 0.0, 0
        self._shares: dict[CellRun, float] = {}
        self._began = time.monotonic()
        self._draw()

    def started(self, job: CellRun) -> None:
        self._shares[job] = 0.0
        self.tick()

    def paused(self, job: CellRun) -> None:
        self._shares.pop(job, None)

    def rounds(self, job: CellRun, done: int) -> None:
        self._shares[job] = job.cost * done / max(job.rounds, 1)
        self.tick()

    def finished(self, job: CellRun, failed: str | None) -> None:
        self.paused(job)
        self._worked += job.cost
        self._done += 1
        self._failed += failed is not None
        if self._done == self._count:
            self._draw()
        self.tick()

    def tick(self) -> None:
        if time.monotonic() >= self._next:
            self._draw()
            self._next = time.monotonic() + INTERVAL

    def _draw(self) -> None:
        worked, spent = self._worked + sum(self._shares.values()), time.monotonic() - self._began
        words = [f"{self._title} {self._done}/{self._count}"]
        if worked > 0 and self._done < self._count:
            words.append(f"{clock(spent * (self._total - worked) / worked)} left")
        words += [f"failed: {self._failed}"] * (self._failed > 0)
        words += [", ".join(job.label for job in self._shares)] if self._shares else []
        under_way = sum(done / job.cost for job, done in self._shares.items())
        self._line.draw(self._done + under_way, self._count, "  ".join(words))
