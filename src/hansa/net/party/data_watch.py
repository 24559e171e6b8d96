"""A party's watch over its own data: files that change, and a loss that rises.

A party reads its data when it starts. The first ask of a round looks whether the files have changed since, and reads
them again. Nothing of this is told to the aggregator: changes and alarms are in the party's log and in the file
`data.log` of its folder.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from hansa.core.op import Op, Reply
from hansa.core.predictor import Evaluate
from hansa.data.statement import DataStatement
from hansa.drift.detector import PageHinkley, Watch
from hansa.metrics.evaluate import EvaluateMetrics
from hansa.net.party.data_statement import stated
from hansa.net.party.samples import PartySamples, samples_digest
from hansa.net.transport.wire import Work
from hansa.plumbing import disk
from hansa.plumbing.errors import DataError, HansaError, PartyError

log = logging.getLogger("hansa.net")
FILE = "data.log"  # in the party's folder: one JSON object per line
JOBS = 64  # jobs whose losses are remembered
Signature = tuple[tuple[str, int, int, int], ...]


class WatchedSamples:
    """A party's samples, which are read again if their files have changed.

    `read` reads them from `paths`: files, and folders of files. Without paths nothing is watched: a function may return
    other samples each time, and the rows of jobs over columns are matched once.
    """

    def __init__(self, read: Callable[[], PartySamples], paths: Sequence[Path], folder: Path) -> None:
        self._read, self._paths, self.notes = read, tuple(paths), DataLog(folder)
        self._seen, self._boundary = signature(self._paths), ("", -1)
        self._statement: DataStatement | None = None
        self.samples = read()
        if signature(self._paths) != self._seen:
            raise DataError("the party's data changed while they were read; start it again")

    def hold_to(self, statement: DataStatement | None) -> DataStatement:
        """Compare the samples, and all that are read later, with the owner's statement; return the statement.

        Without one, the statement that the samples suggest. A DataError for the owner if the samples contradict it.
        """
        self.samples = stated(self.samples, statement)
        assert self.samples.statement is not None
        self._statement = self.samples.statement
        return self._statement

    def look(self, work: Work) -> bool:
        """At the first ask of a round: read the samples again if their files have changed; return whether they are
        others. A PartyError if they cannot be read, or contradict the owner's statement: they are not used.

        Samples that stay in files are looked at before every ask: they change with the files, and the noise of an ask
        that is repeated must not cover other samples.
        """
        held = isinstance(self.samples.train[0], Tensor)
        if not self._paths or (held and (work.job, work.round) == self._boundary):
            return False
        try:
            now = signature(self._paths)
            changed = now != self._seen and self._changed(work, now)
        except (HansaError, OSError) as error:
            self.notes.add("data unreadable", work, why=str(error))
            log.error("the party's data cannot be read: %s", error, extra=about(work))
            raise PartyError("its data cannot be read at present; see the party's log") from None
        self._boundary = (work.job, work.round)
        return changed

    def _changed(self, work: Work, now: Signature) -> bool:
        samples = self._read()
        if self._statement is not None:
            samples = stated(samples, self._statement)
        if signature(self._paths) != now:
            raise DataError("the files changed while they were read; replace a file as a whole (mv)")
        in_memory = isinstance(self.samples.train[0], Tensor)  # a memory-mapped file shows its new content already
        before, after = samples_digest(self.samples) if in_memory else None, samples_digest(samples)
        self._seen = now
        if before == after:
            return False
        self.samples = samples
        rows = len(samples.train[0])
        self.notes.add("data changed", work, before=before, sha256=after, rows=rows)
        log.warning("the party's data have changed: training goes on with the new ones", extra=about(work, rows=rows))
        return True


class LossWatch:
    """A detector on the losses that a party measures on its own test samples, by job.

    The past of a job is in memory: a party that starts again begins a new one. A loss behind a secure sum is not heard.
    """

    def __init__(self, folder: Path) -> None:
        self._detector, self._notes = PageHinkley(), DataLog(folder)
        self._past: dict[str, tuple[int, Watch]] = {}

    def hear(self, work: Work, op: Op, reply: Reply | str) -> None:
        """Compare the loss of an evaluation with those before it."""
        loss = None if isinstance(reply, str) else loss_of(op, reply)
        round, watch = self._past.pop(work.job, (-1, Watch()))
        if loss is not None and work.round > round:  # the same ask again counts once
            round = work.round
            watch, why = self._detector.hear(watch, loss)
            if why is not None:
                self._notes.add("drift alarm", work, why=why)
                log.warning("drift alarm: %s", why, extra=about(work))
        if round >= 0:
            self._past[work.job] = (round, watch)
            if len(self._past) > JOBS:
                del self._past[next(iter(self._past))]


class DataLog:
    """The file `data.log`."""

    def __init__(self, folder: Path) -> None:
        self._lines, self._begun = disk.LineLog(folder / FILE), False

    def add(self, event: str, work: Work, **more: Any) -> None:
        """Add a line; a disk that is full must not stop the party."""
        line = {"at": time.time(), "event": event, "job": work.job, "round": work.round, **more}
        try:
            if not self._begun:
                self._lines.read()  # completes a line that a crash truncated
                self._begun = True
            self._lines.add(json.dumps(line).encode())
        except OSError as error:
            log.error("cannot write %s: %s", FILE, error)


def loss_of(op: Op, reply: Reply) -> float | None:
    """The loss of an evaluation on the party's test samples; None for other asks."""
    if isinstance(op, EvaluateMetrics):
        counts = op.stacked([reply])
        return op.numbers(counts)[0].get("loss") if op.faults(counts)[0] is None else None
    return reply.metrics.get("loss") if isinstance(op, Evaluate) else None


def signature(paths: Sequence[Path]) -> Signature:
    """What the system says of files, and of all files in folders: name, time of the last change, size, number."""
    out = []
    for path in paths:
        files = sorted(Path(place) / name for place, _, names in os.walk(path) for name in names) or [path]
        for file in files:
            state = file.stat()
            out.append((str(file), state.st_mtime_ns, state.st_size, state.st_ino))
    return tuple(out)


def data_paths(data: str, test: str | None, ids: str | None) -> list[Path]:
    """The files of a party's data that are watched; none for a function, and for rows with ids."""
    named = [Path(name) for name in (data, test) if name is not None]
    return named if ids is None and all(path.exists() for path in named) else []


def about(work: Work, **detail: Any) -> dict[str, Any]:
    return {"job": work.job, "round": work.round, "detail": detail}
