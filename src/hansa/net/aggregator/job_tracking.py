"""The federation's experiment trackers, following one job. A tracker that fails does not disturb the job."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hansa.plumbing import disk
from hansa.run.result import Result
from hansa.track.tracker import Tracker

if TYPE_CHECKING:
    from hansa.track import Session

log = logging.getLogger("hansa.net")


class JobTracking:
    """One job as the trackers of its federation see it; without trackers nothing happens here."""

    def __init__(self, job: str, trackers: tuple[Tracker, ...], folder: Path) -> None:
        self._job, self._trackers, self._path = job, trackers, folder / "tracking" / f"{job}.json"
        self._session: Session | None = None

    def begin(self, record: dict[str, Any]) -> None:
        """Start the trackers, or go on where they stopped; `record` describes the job."""
        if not self._trackers:
            return
        from hansa.track import begin

        try:
            disk.make_folder(self._path.parent)
            self._session = begin(self._trackers, record, None, None, self._job, self._path)
        except Exception as error:  # whatever it is, the job goes on
            log.warning("the job is not tracked: %s", error, extra={"job": self._job})

    def follow(self, history: Sequence[dict[str, Any]]) -> None:
        """Report the rounds that were closed since the last call."""
        if self._session is not None:
            self._session.follow(history)

    def finish(self, result: Result) -> None:
        """Report the final result."""
        if self._session is not None:
            self._session.finish_result(result)

    def fail(self, reason: str) -> None:
        """Report that the job ended without a result."""
        if self._session is not None:
            self._session.fail(reason)

    def close(self, hurry: Callable[[], bool]) -> None:
        """Wait, but not for ever, until the trackers have everything; not at all once `hurry` says so."""
        if self._session is not None:
            self._session.close(f"the aggregator's record (job {self._job})", hurry=hurry)
