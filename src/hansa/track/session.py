"""All trackers of one run, from its beginning to its end; and runs that have ended, tracked from their folders."""

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
from hansa.core import disk
from hansa.core.errors import ConfigError, DataError
from hansa.core.registry import to_config
from hansa.track.delivery import Delivery
from hansa.track.tracker import Line, RunInfo, Tracker, trackers

log = logging.getLogger("hansa")
TRACKING = "tracking.json"  # in a run's folder: its trackers, and where in them the run is


def _same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether two descriptions are of the same tracker; how long it is waited for is no matter."""
    return {**one, "wait": 0} == {**other, "wait": 0}


class FinishedRun(Protocol):
    """What trackers take of a run that has ended well (`hansa.run.Result`)."""

    run_dir: Path | None

    @property
    def history(self) -> list[Line]: ...
    @property
    def summary(self) -> dict[str, Any]: ...
    def save(self, path: Path) -> Path: ...
    def keep_personal(self, folder: Path) -> None: ...


class TrackingState:
    """What trackers want remembered, in a file that only its owner can read (addresses may hold passwords)."""

    def __init__(self, path: Path | None) -> None:
        self._path, self._lock = path, threading.Lock()
        self._tree: dict[str, Any] = {"trackers": []}
        if path is not None and path.exists():
            self._tree = read_json(path)
            if not isinstance(self._tree, dict) or not isinstance(self._tree.get("trackers"), list):
                raise DataError(f"{path} is damaged; remove it to have the run tracked anew")

    @property
    def trackers(self) -> tuple[Tracker, ...]:
        return trackers([entry["tracker"] for entry in self._tree["trackers"]], where=str(self._path))

    @property
    def about(self) -> dict[str, Any]:
        """What was remembered of the run itself."""
        return dict(self._tree.get("about", {}))

    def runs(self, tracker: Tracker) -> dict[str, Any]:
        """What a tracker wants remembered of each run, by its mark."""
        entry = self._entry(tracker)
        return {} if entry is None else dict(entry["runs"])

    def _entry(self, tracker: Tracker) -> dict[str, Any] | None:
        return next((entry for entry in self._tree["trackers"] if _same(entry["tracker"], to_config(tracker))), None)

    def begin(self, about: dict[str, Any], chosen: Sequence[Tracker]) -> None:
        """Note who tracks what."""
        with self._lock:
            self._tree["about"] = about
            for tracker in chosen:
                if self._entry(tracker) is None:
                    self._tree["trackers"].append({"tracker": to_config(tracker), "runs": {}})
            self._write_if_possible()

    def keep(self, tracker: Tracker, mark: str, state: dict[str, Any], ended: str | None) -> None:
        """Note what a tracker wants remembered of a run, and whether it has its end."""
        with self._lock:
            entry = self._entry(tracker)
            assert entry is not None
            entry["runs"][mark] = {"state": state, "ended": ended}
            self._write_if_possible()

    def _write_if_possible(self) -> None:
        with contextlib.suppress(OSError):  # a full disk: the run will say so itself
            if self._path is not None and self._path.parent.exists():
                disk.put(self._path, [json.dumps(self._tree, indent=2).encode()])


class Session:
    """The trackers of one run, or of a run after another (a study's)."""

    def __init__(self, chosen: Sequence[Tracker], memory: TrackingState) -> None:
        self.trackers, self._memory = tuple(chosen), memory
        self._open: dict[Delivery, bool] = {}  # whether the run that is open is of interest to each
        self._sent = 0
        self._scratch: list[Path] = []
        self._deliveries = [self._delivery(tracker) for tracker in self.trackers]

    def _delivery(self, tracker: Tracker) -> Delivery:
        def remember(opened: dict[str, Any], state: dict[str, Any]) -> None:
            self._memory.keep(tracker, opened["about"]["mark"], state, opened["ended"])

        return Delivery(tracker, remember)

    def has(self, mark: str) -> bool:
        """Whether all trackers have the end of a run."""
        return all(self._memory.runs(t).get(mark, {}).get("ended") == "finish" for t in self.trackers)

    def open(self, about: RunInfo, again: bool = False) -> None:
        """Begin a run, or go on with one; trackers that have its end already are told nothing, unless it is to be
        opened `again`."""
        self._sent = 0
        for delivery in self._deliveries:
            before = self._memory.runs(delivery.tracker).get(about.mark, {})
            self._open[delivery] = again or before.get("ended") != "finish"
            self._tell(delivery, {"do": "open", "about": asdict(about), "state": before.get("state", {})})

    def _tell(self, delivery: Delivery, event: dict[str, Any]) -> None:
        if self._open[delivery]:
            delivery.put(event)

    def follow(self, history: Sequence[Line]) -> None:
        """Tell of the rounds that are new."""
        while self._sent < len(history):
            for delivery in self._deliveries:
                self._tell(delivery, {"do": "round", "line": history[self._sent]})
            self._sent += 1

    def finish(self, summary: dict[str, Any], folder: Path) -> None:
        """The run has ended well; its files lie in a folder."""
        for delivery in self._deliveries:
            self._tell(delivery, {"do": "finish", "summary": summary, "folder": str(folder.resolve())})

    def finish_result(self, result: FinishedRun) -> None:
        """As `finish`, for a run of this process, which may have no folder."""
        self.follow(result.history)
        try:
            folder = result.run_dir
            if folder is None:
                self._scratch.append(Path(tempfile.mkdtemp(prefix="hansa-")))
                folder = result.save(self._scratch[-1] / "run")
            result.keep_personal(folder)
        except Exception as error:  # whatever it is: the run is well all the same
            log.warning("tracking: the files of the run could not be written, so no tracker gets them: %s", error)
        else:
            self.finish(result.summary, folder)

    def fail(self, reason: str) -> None:
        """The run has ended otherwise."""
        for delivery in self._deliveries:
            self._tell(delivery, {"do": "fail", "reason": reason})

    def close(self, where: str, hurry: Callable[[], bool] = lambda: False) -> list[str]:
        """Wait, but not for ever, and not once there is a hurry, until all is delivered. What was not is said in one
        warning, and given back."""
        try:
            lost = [sentence for delivery in self._deliveries if (sentence := delivery.close(hurry)) is not None]
        except BaseException:  # whoever waits has had enough
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
          run: str = "", memory_at: Path | None = None) -> Session:  # fmt: skip
    """Track a run of this process, from its beginning or from where it goes on; `held` counts what each party holds. A
    run without a folder of its own may have a name, and a file to remember by."""
    memory = TrackingState(memory_at if folder is None else folder / TRACKING)
    name = (record.get("experiment") or {}).get("name")
    algorithm = str(record["algorithm"]["name"])
    title = folder.resolve().name if folder is not None else run or name or algorithm
    fresh = {"run": title, "experiment": name or "hansa", "mark": secrets.token_hex(16)}
    known = memory.about or fresh
    memory.begin(known, chosen)
    session = Session(chosen, memory)
    session.open(RunInfo(record=record, folder=None if folder is None else str(folder.resolve()),
                       partition=held, **known))  # fmt: skip
    return session


def remembered(folder: Path | None) -> tuple[Tracker, ...]:
    """The trackers of a run that goes on."""
    return () if folder is None else TrackingState(folder / TRACKING).trackers


def track_folder(folder: str | Path, chosen: Any = None) -> list[str]:
    """Track a run that has ended, from its folder: what trackers have of it already is not sent again. Gives what could
    not be delivered, a sentence each."""
    folder = Path(folder)
    store = RunFolder(folder)
    record, history = store.experiment(), store.history()
    if not (folder / SUMMARY).exists():
        raise ConfigError(f"{folder} has not finished; `hansa resume {folder}` goes on, and tracks it")
    memory = TrackingState(folder / TRACKING)
    picked = trackers(chosen) or memory.trackers
    if not picked:
        raise ConfigError(f"say where {folder} is to be tracked, as in --track mlflow")
    name = (record.get("experiment") or {}).get("name") or "hansa"
    known = memory.about or {"run": folder.resolve().name, "experiment": name, "mark": secrets.token_hex(16)}
    memory.begin(known, picked)
    session = Session(picked, memory)
    session.open(RunInfo(record=record, folder=str(folder.resolve()), **known))
    session.follow(history)
    session.finish(read_json(folder / SUMMARY), folder)
    return session.close(f"{folder}/metrics.jsonl")
