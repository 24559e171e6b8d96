"""Tracking of a study: one tracked run for the study, with one nested run per cell."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hansa.artifacts.run_folder import EXPERIMENT, RunFolder
from hansa.track.session import TRACKING, Session, TrackingState
from hansa.track.tracker import RunInfo, Tracker, trackers

if TYPE_CHECKING:
    from hansa.study.results import Outcome, Results


def track_study(results: Results, chosen: Any) -> list[str]:
    """Track a finished study with its report and all its cells; return one sentence per failed delivery.

    Cells that the trackers have already (recorded in the folder's `tracking.json`) are not sent again."""
    study = results.study
    if study.folder is None:
        raise ValueError("a study without a folder has no files to track")
    session = StudySession(study.name, study.folder, trackers(chosen), study.tree)
    for outcome in results.outcomes:
        session.cell(outcome)
    return session.finish()


class StudySession:
    """The trackers of a study. Accepts cells in any order, reused ones as well."""

    def __init__(self, name: str, folder: Path, chosen: Sequence[Tracker], tree: dict[str, Any]) -> None:
        self.name, self.folder = name, Path(folder)
        self._memory = TrackingState(self.folder / TRACKING)
        place = str(self.folder.resolve()).encode()
        mark = self._memory.about.get("mark") or hashlib.sha256(place).hexdigest()[:32]
        known: dict[str, Any] = {"run": name, "experiment": name, "mark": mark}
        self._memory.begin(known, chosen)
        self._about = RunInfo(record={"experiment": {"tree": tree}}, folder=str(self.folder.resolve()), study=True,
                            tags={"hansa.study": name}, **known)  # fmt: skip
        self._session = Session(chosen, self._memory)
        self._begun, self._cells, self._failed = False, 0, 0

    def _begin(self) -> None:
        if not self._begun:
            self._session.open(self._about, again=True)
            self._begun = True

    def cell(self, outcome: Outcome) -> None:
        """Track one cell, unless all trackers have it already."""
        cell = outcome.cell
        labels = {"algorithm": cell.algorithm, "partition": cell.partition, "adversary": cell.adversary,
                  "variant": cell.variant, "setting": cell.setting, "key": cell.key}  # fmt: skip
        self._cells += 1
        self._failed += outcome.failed is not None
        own = "\n".join((self._about.mark, *labels.values(), str(cell.seed)))
        mark = hashlib.sha256(own.encode()).hexdigest()[:32]
        if self._session.has(mark):
            return
        self._begin()
        folder = outcome.run_dir
        record = RunFolder(folder).experiment() if folder is not None and (folder / EXPERIMENT).exists() else {}
        record = {**record, "experiment": record.get("experiment") or {"tree": cell.tree}}
        self._session.open(RunInfo(
            run=f"{cell.algorithm}, {cell.setting}, seed {cell.seed}" if cell.setting else
                f"{cell.algorithm}, seed {cell.seed}",
            experiment=self.name, record=record, mark=mark, folder=None if folder is None else str(folder.resolve()),
            tags={f"hansa.cell.{k}": v for k, v in labels.items() if v} | {"hansa.study": self.name},
            parent={"mark": self._about.mark},
        ))  # fmt: skip
        self._session.follow(outcome.history)
        if outcome.failed is None and folder is not None:
            self._session.finish(outcome.summary, folder)
        else:
            self._session.fail(outcome.failed or "it left no files")

    def finish(self) -> list[str]:
        """Track the end of the study and its report; return one sentence per failed delivery."""
        if self._begun or not self._session.has(self._about.mark):
            self._session.open(self._about, again=True)
            stopped = f"{self._cells} runs done" + (f", {self._failed} of them failed" if self._failed else "")
            self._session.finish({"runs": self._cells, "failed": self._failed, "stopped": stopped}, self.folder)
        return self._session.close(str(self.folder))
