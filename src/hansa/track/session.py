"""All trackers of one run, from start to end; and finished runs, tracked from their folders."""

from __future__ import annotations

import contextlib
import json
import logging
import secrets
import shutil
import tempfile
import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

from hansa.artifacts.run_folder import SUMMARY, RunFolder, read_json
from hansa.core.plain_data import to_config
from hansa.plumbing import disk
from hansa.plumbing.errors import ConfigError, DataError
from hansa.track.delivery import Delivery
from hansa.track.tracker import Line, RunInfo, Tracker, trackers

log = logging.getLogger("hansa")
TRACKING = "tracking.json"  # in a run folder: its trackers, and the run's state at each


def _same(first: dict[str, Any], second: dict[str, Any]) -> bool:
    """Whether two configurations are of the same tracker; `wait` may differ."""
    return {**first, "wait": 0} == {**second, "wait": 0}


class FinishedRun(Protocol):
    """What trackers need of a finished run (`hansa.run.Result`)."""

    run_dir: Path | None

    @property
    def history(self) -> list[Line]: ...
    @property
    def summary(self) -> dict[str, Any]: ...
    def save(self, path: Path) -> Path: ...
    def keep_personal(self, folder: Path) -> None: ...


class TrackingState:
    """The state of a run at its trackers, in a file that only its owner can read (URLs may hold passwords)."""

    def __init__(self, path: Path | None) -> None:
        self._path, self._lock = path, threading.Lock()
        self._tree: dict[str, Any] = {"trackers": []}
        if path is not None and path.exists():
            self._tree = read_json(path)
            if not isinstance(self._tree, dict) or not isinstance(self._tree.get("trackers"), list):
                raise DataError(f"{path} is damaged; remove it to track the run from the start")

    @property
    def trackers(self) -> tuple[Tracker, ...]:
        """The trackers of the run."""
        return trackers([entry["tracker"] for entry in self._tree["trackers"]], where=str(self._path))

    @property
    def about(self) -> dict[str, Any]:
        """Name, experiment and mark of the run; empty if it was not tracked before."""
        return dict(self._tree.get("about", {}))

    def runs(self, tracker: Tracker) -> dict[str, Any]:
        """The state of each run at a tracker, by the run's mark."""
        entry = self._entry(tracker)
        return {} if entry is None else dict(entry["runs"])

    def _entry(self, tracker: Tracker) -> dict[str, Any] | None:
        return next((entry for entry in self._tree["trackers"] if _same(entry["tracker"], to_config(tracker))), None)

    def begin(self, about: dict[str, Any], chosen: Sequence[Tracker]) -> None:
        """Store the run and its trackers."""
        with self._lock:
            self._tree["about"] = about
            for tracker in chosen:
                if self._entry(tracker) is None:
                    self._tree["trackers"].append({"tracker": to_config(tracker), "runs": {}})
            self._write_if_possible()

    def keep(self, tracker: Tracker, mark: str, state: dict[str, Any], ended: str | None) -> None:
        """Store the state of a run at a tracker, and whether the tracker has its end."""
        with self._lock:
            entry = self._entry(tracker)
            assert entry is not None
            entry["runs"][mark] = {"state": state, "ended": ended}
            self._write_if_possible()

    def _write_if_possible(self) -> None:
        with contextlib.suppress(OSError):  # a full disk: the run itself reports it
            if self._path is not None and self._path.parent.exists():
                disk.put(self._path, [json.dumps(self._tree, indent=2).encode()])


class Session:
    """The trackers of one run, or of the runs of a study, one after another."""

    def __init__(self, chosen: Sequence[Tracker], stored: TrackingState) -> None:
        self.trackers, self._stored = tuple(chosen), stored
        self._open: dict[Delivery, bool] = {}  # whether each tracker needs the open run
        self._sent = 0
        self._scratch: list[Path] = []
        self._deliveries = [self._delivery(tracker) for tracker in self.trackers]

    def _delivery(self, tracker: Tracker) -> Delivery:
        def remember(opened: dict[str, Any], state: dict[str, Any]) -> None:
            self._stored.keep(tracker, opened["about"]["mark"], state, opened["ended"])

        return Delivery(tracker, remember)

    def has(self, mark: str) -> bool:
        """Whether all trackers have the end of a run."""
        return all(self._stored.runs(t).get(mark, {}).get("ended") == "finish" for t in self.trackers)

    def open(self, info: RunInfo, again: bool = False) -> None:
        """Begin or continue a run. Trackers that have its end get nothing, unless it is opened `again`."""
        self._sent = 0
        for delivery in self._deliveries:
            known = self._stored.runs(delivery.tracker).get(info.mark, {})
            self._open[delivery] = again or known.get("ended") != "finish"
            self._put(delivery, {"do": "open", "about": asdict(info), "state": known.get("state", {})})

    def _put(self, delivery: Delivery, event: dict[str, Any]) -> None:
        if self._open[delivery]:
            delivery.put(event)

    def follow(self, history: Sequence[Line]) -> None:
        """Send the rounds of the history that are new."""
        while self._sent < len(history):
            for delivery in self._deliveries:
                self._put(delivery, {"do": "round", "line": history[self._sent]})
            self._sent += 1

    def finish(self, summary: dict[str, Any], folder: Path) -> None:
        """The run has finished; `folder` has its files."""
        for delivery in self._deliveries:
            self._put(delivery, {"do": "finish", "summary": summary, "folder": str(folder.resolve())})

    def finish_result(self, result: FinishedRun) -> None:
        """As `finish`, for a run of this process, which may have no folder."""
        self.follow(result.history)
        try:
            folder = result.run_dir
            if folder is None:
                self._scratch.append(Path(tempfile.mkdtemp(prefix="hansa-")))
                folder = result.save(self._scratch[-1] / "run")
            result.keep_personal(folder)
        except Exception as error:  # any error: the run itself has finished
            log.warning("tracking: the files of the run could not be written, so no tracker gets them: %s", error)
        else:
            self.finish(result.summary, folder)

    def fail(self, reason: str) -> None:
        """The run has failed or was interrupted."""
        for delivery in self._deliveries:
            self._put(delivery, {"do": "fail", "reason": reason})

    def close(self, where: str, hurry: Callable[[], bool] = lambda: False) -> list[str]:
        """Wait until all events are delivered, for a bounded time and not once `hurry` returns True.

        Return a sentence per tracker that missed something; one warning has them all.
        """
        try:
            lost = [sentence for delivery in self._deliveries if (sentence := delivery.close(hurry)) is not None]
        except BaseException:  # such as Ctrl-C during the wait
            for delivery in self._deliveries:
                delivery.give_up()
            raise
        finally:
            for folder in self._scratch:
                shutil.rmtree(folder, ignore_errors=True)
        if lost:
            log.warning("tracking: %s; all rounds are in %s", "; ".join(lost), where)
        return lost


def begin(chosen: Sequence[Tracker], record: dict[str, Any], folder: Path | None, held: dict[str, Any] | None,
          run: str = "", state_file: Path | None = None) -> Session:  # fmt: skip
    """Track a run of this process, new or resumed; `held` has the number of samples of each party.

    A run without a folder may have a name (`run`) and a file for its tracking state (`state_file`).
    """
    stored = TrackingState(state_file if folder is None else folder / TRACKING)
    name = (record.get("experiment") or {}).get("name")
    algorithm = str(record["algorithm"]["name"])
    title = folder.resolve().name if folder is not None else run or name or algorithm
    fresh = {"run": title, "experiment": name or "hansa", "mark": secrets.token_hex(16)}
    known = stored.about or fresh
    stored.begin(known, chosen)
    session = Session(chosen, stored)
    session.open(RunInfo(record=record, folder=None if folder is None else str(folder.resolve()),
                       partition=held, **known))  # fmt: skip
    return session


def remembered(folder: Path | None) -> tuple[Tracker, ...]:
    """The trackers of a run that is resumed."""
    return () if folder is None else TrackingState(folder / TRACKING).trackers


def track_folder(folder: str | Path, chosen: Any = None) -> list[str]:
    """Track a finished run from its folder; trackers get only what they do not have.

    Return a sentence per tracker that missed something.
    """
    folder = Path(folder)
    store = RunFolder(folder)
    record, history = store.experiment(), store.history()
    if not (folder / SUMMARY).exists():
        raise ConfigError(f"the run in {folder} has not finished; `hansa resume {folder}` continues and tracks it")
    stored = TrackingState(folder / TRACKING)
    picked = trackers(chosen) or stored.trackers
    if not picked:
        raise ConfigError(f"no tracker is given for {folder}; give one, as in --track mlflow")
    name = (record.get("experiment") or {}).get("name") or "hansa"
    known = stored.about or {"run": folder.resolve().name, "experiment": name, "mark": secrets.token_hex(16)}
    stored.begin(known, picked)
    session = Session(picked, stored)
    session.open(RunInfo(record=record, folder=str(folder.resolve()), **known))
    session.follow(history)
    session.finish(read_json(folder / SUMMARY), folder)
    return session.close(f"{folder}/metrics.jsonl")
