"""Record a run while it goes on: in its run folder, at its trackers, on the screen."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from hansa.artifacts.run_folder import RunFolder
from hansa.core.task import Holdings, Task
from hansa.data.picture import table
from hansa.report.progress import Watch, watcher
from hansa.run.plan import check_same_run
from hansa.run.result import Result

if TYPE_CHECKING:
    from hansa.track import Session, Tracker

COUNTED = 5_000  # parties whose samples are counted for a tracker's picture, at most


class Recorder:
    """The run folder, the trackers and the progress bar of a run, as far as it has them.

    `progress` says whether to show a progress bar; by default in a notebook, if there is no `on_round`.
    """

    def __init__(self, folder: RunFolder | None, trackers: tuple[Tracker, ...], rounds: int, progress: bool | None,
                 on_round: Watch | None) -> None:  # fmt: skip
        self.folder, self.trackers = folder, trackers
        self.path = folder.path if folder is not None else None
        self.history: list[dict[str, Any]] = []  # shared with the training
        self._bar = watcher(rounds, False if progress is None and on_round is not None else progress)
        self._session: Session | None = None
        self._user = on_round

    @property
    def on_round(self) -> Watch | None:
        """What to call with the metrics line of each round."""
        return self._user if self._bar is None and not self.trackers else self._watch

    def _watch(self, line: dict[str, Any]) -> None:
        if self._bar is not None:
            self._bar.watch(line)
        if self._session is not None:
            self._session.follow(self.history)
        if self._user is not None:
            self._user(line)

    @contextmanager
    def recording(self, record: dict[str, Any], counts: dict[str, Any] | None, resume: bool,
                  force: bool) -> Iterator[None]:  # fmt: skip
        """Begin to record a run, or to resume it; close everything at the end, whether or not the run succeeds."""
        try:
            if self._bar is not None:
                self._bar.start()
            if self.folder is not None:
                self._open(self.folder, record, resume, force)
            if self.trackers:
                from hansa.track import begin

                self._session = begin(self.trackers, record, self.path, counts)
            yield
        except BaseException as error:
            if self._session is not None:
                reason = "interrupted" if isinstance(error, KeyboardInterrupt) else str(error) or repr(error)
                self._session.fail(reason)
            raise
        finally:
            self._close()

    def finish(self, result: Result) -> None:
        """Record the result of a run that has ended."""
        if self.folder is not None:
            result.keep_personal(self.folder.path)
            self.folder.finish(result.saved_model(), result.described(), result.summary)
        if self._session is not None:
            self._session.finish_result(result)

    def _open(self, folder: RunFolder, record: dict[str, Any], resume: bool, force: bool) -> None:
        folder.lock()  # until the whole run is written
        if resume:
            check_same_run(folder.experiment(), record, force)
        else:
            folder.create(record)

    def _close(self) -> None:
        if self._bar is not None:
            self._bar.close()
        try:
            if self._session is not None:
                self._session.close(f"{self.path}/metrics.jsonl" if self.path is not None else "result.history")
        finally:
            if self.folder is not None:
                self.folder.close()


def find_trackers(track: Any, resumed: str | Path | None) -> tuple[Tracker, ...]:
    """The trackers that `track` names; for a resumed run without any, those that it had."""
    if track is None and resumed is None:
        return ()
    from hansa.track import remembered, trackers

    return remembered(Path(resumed)) if track is None and resumed is not None else trackers(track)


def sample_counts(task: Task, holdings: Holdings) -> dict[str, Any] | None:
    """Samples per party and class, for a tracker's picture; None if there are too many parties.

    None too if the parties hold different columns: most of them have no classes.
    """
    if len(holdings) > COUNTED or holdings.layout is not None:
        return None
    y = holdings.train.y.cpu()
    classes = None if y.is_floating_point() else holdings.classes
    rows = np.split(np.arange(len(y)), holdings.train.offsets[1:-1])
    counts = table(rows, y if y.dim() == 1 else y.flatten(1)[:, 0], classes)  # of a sequence, the first target
    return {"counts": counts, "classes": classes, "names": None if task.names is None else list(task.names)}
