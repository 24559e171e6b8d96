"""What a tracker is, and how one is named: `mlflow`, `mlflow:URI`, `[track.mlflow]`, `MLflow(uri=...)`."""

from __future__ import annotations

import importlib.util
import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from hansa.core.errors import ConfigError
from hansa.core.registry import Part, from_config, lookup

Say = Callable[[str], None]
Line = dict[str, Any]


@dataclass(frozen=True)
class RunInfo:
    """A run that is tracked, as plain data. `record` is its `experiment.json`; `mark` is its own and stays when it goes
    on; `partition` counts what each party holds. A run of a study names its `parent` (what a `Log` remembers of it);
    the study itself is a run with `study` set.
    """

    run: str
    experiment: str
    record: dict[str, Any]
    mark: str
    folder: str | None = None
    tags: dict[str, str] = field(default_factory=dict)
    partition: dict[str, Any] | None = None
    parent: dict[str, Any] | None = None
    study: bool = False


class Log:
    """One run at one tracker. Every method may raise: it is then called again with the same, until it succeeds or the
    run is over. `state` is what must be remembered to go on with the same run in another process.
    """

    state: dict[str, Any]

    def rounds(self, lines: list[Line]) -> None:
        """Take in rounds, in order. Those of a run that went on may have been there before: they are left out."""
        raise NotImplementedError

    def finish(self, summary: dict[str, Any], folder: str) -> None:
        """The run has ended well; its files lie in a folder."""
        raise NotImplementedError

    def fail(self, reason: str) -> None:
        """The run has ended otherwise."""
        raise NotImplementedError

    def close(self) -> None:
        """Let go of files and connections."""


class Tracker(Part):
    """Base of trackers: a part that opens a log for a run."""

    kind: ClassVar[str] = "tracker"
    separate_process: ClassVar[bool] = False  # True for a tracker whose imports are slow, or that may hang
    needs: ClassVar[str | None] = None  # a package that is not always there, by the name of the extra as well
    takes: ClassVar[str | None] = None  # the field that may follow the name, as in "mlflow:URI"
    wait: float = 10.0  # seconds after the run for what has not been delivered

    def check(self) -> None:
        """Refuse, with what would help, where a package is missing."""
        if self.needs is not None and importlib.util.find_spec(self.needs) is None:
            raise ConfigError(f"the tracker {self.name!r} needs a package: pip install 'hansa[{self.needs}]'")

    def open(self, about: RunInfo, state: dict[str, Any], say: Say) -> Log:
        """Begin, or go on with, a run: `state` is empty, or what a log of it remembered. `say` tells the user."""
        raise TypeError(f"the tracker {self.name!r} tracks nothing")


def trackers(given: Any, where: str = "track") -> tuple[Tracker, ...]:
    """Trackers as they are given: parts, names (`"mlflow"`, `"mlflow:URI"`), tables, lists of these, or a table with a
    table for each as in `[track.mlflow]`. What a tracker needs is checked."""
    if isinstance(given, Mapping) and "name" not in given:
        given = [_titled(name, table, where) for name, table in given.items()]
    listed = [] if given is None else [given] if isinstance(given, (str, Mapping, Tracker)) else given
    if not isinstance(listed, Iterable):
        raise ConfigError(f"{where}: expected trackers by name, as in ['mlflow', 'tensorboard'], got {given!r}")
    found = tuple(_one(each, where) for each in listed)
    for tracker in found:
        tracker.check()
    return tuple(dict.fromkeys(found))


def _titled(name: str, table: Any, where: str) -> Any:
    if isinstance(table, Mapping):
        return {**table, "name": name}
    if isinstance(table, str):
        return f"{name}:{table}"
    raise ConfigError(f"{where}.{name}: expected a table, as in [{where}.{name}], got {table!r}")


def _one(given: Any, where: str) -> Tracker:
    if isinstance(given, str):
        name, colon, target = given.partition(":")
        cls = lookup("tracker", name, where)
        takes = getattr(cls, "takes", None)
        if colon and (takes is None or not target):
            more = f"{name}:{takes.upper()}" if takes is not None else f"{name!r} alone"
            raise ConfigError(f"{where}: expected {more}, got {given!r}")
        given = {"name": name, **({str(takes): target} if colon else {})}
    tracker: Tracker = from_config("tracker", given, where=where)
    return tracker


def numbers(line: Line) -> dict[str, float]:
    """What of a round is a number; of who was missing or rejected, how many."""
    plain = {k: v for k, v in line.items() if isinstance(v, (int, float)) and not isinstance(v, bool) and k != "round"}
    found = {k: float(v) for k, v in plain.items() if math.isfinite(v)}
    found |= {name: float(len(line[name])) for name in ("missing", "rejected") if line.get(name)}
    return found | ({"empty": 1.0} if "empty" in line else {})


def flat(tree: Any, at: str = "") -> dict[str, str]:
    """A tree as dotted names and texts; lists of plain values stay whole."""
    if isinstance(tree, Mapping):
        out: dict[str, str] = {}
        for name, value in tree.items():
            out |= flat(value, f"{at}.{name}" if at else str(name))
        return out
    if tree is None:
        return {}
    return {at: tree if isinstance(tree, str) else json.dumps(tree)}


def params(about: RunInfo) -> dict[str, str]:
    """A run's configuration as dotted names: the algorithm and the run with all their fields, the task, the partition;
    of a study, all that its file says."""
    record = about.record
    tree = (record.get("experiment") or {}).get("tree") or {}
    if about.study:
        return flat(tree)
    found = {"algorithm": record.get("algorithm"), "run": record.get("run"), "task": tree.get("task"),
             "partition": tree.get("partition")}  # fmt: skip
    if record.get("adversary"):
        found["adversary"] = record["adversary"]
    return flat({name: value for name, value in found.items() if value})


def tags(about: RunInfo) -> dict[str, str]:
    """What runs are found by: version, plan, algorithm, data set, partition, engine; and the run's own tags."""
    record = about.record
    tree = (record.get("experiment") or {}).get("tree") or {}

    def name(value: Any) -> str:
        return str(value.get("name", "")) if isinstance(value, Mapping) else str(value or "")

    plan = record.get("plan") or {}
    partition = tree.get("partition")
    found = {
        "hansa.version": str(record.get("hansa", "")),
        "hansa.plan": ", ".join(f"{k} {v}" for k, v in plan.items()),
        "hansa.algorithm": name(record.get("algorithm")),
        "hansa.dataset": name((tree.get("task") or {}).get("dataset")),
        "hansa.partition": name(partition),
        "hansa.engine": str(plan.get("engine", "")),
        "hansa.seed": str((record.get("run") or {}).get("seed", "")),
    }
    return {k: v for k, v in found.items() if v} | about.tags


def draw_partition(about: RunInfo, path: str) -> bool:
    """Draw what each party holds, if that is known; whether it is."""
    if about.partition is None:
        return False
    import numpy as np

    from hansa.data.picture import draw

    counts, classes = np.array(about.partition["counts"]), about.partition["classes"]
    edges = np.cumsum(counts.sum(1))
    targets = np.repeat(np.tile(np.arange(counts.shape[1]), len(counts)), counts.ravel())
    draw(np.split(np.arange(len(targets)), edges[:-1]), targets, classes, path, about.partition["names"])
    return True
