"""The interface of trackers, and their names: `mlflow`, `mlflow:URI`, `[track.mlflow]`, `MLflow(uri=...)`."""

from __future__ import annotations

import importlib.util
import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from hansa.core.plain_data import from_config
from hansa.core.registry import Part, lookup
from hansa.plumbing.errors import ConfigError

Say = Callable[[str], None]
Line = dict[str, Any]


@dataclass(frozen=True)
class RunInfo:
    """The description of a tracked run, as plain data.

    `record` is the run's `experiment.json`. `mark` identifies the run, also after a resume. `partition` has the number
    of samples of each party. The run of a study's cell has a `parent`: the `state` of the study's `Log`. The study
    itself is a run with `study` set.
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
    """One run at one tracker.

    Every method may raise; it is then called again with the same arguments, until it succeeds or the run is over.
    `state` is what must be remembered to continue the same run in another process.
    """

    state: dict[str, Any]

    def rounds(self, lines: list[Line]) -> None:
        """Add rounds, in order. Skip rounds that the tracker already has: a resumed run sends them again."""
        raise NotImplementedError

    def finish(self, summary: dict[str, Any], folder: str) -> None:
        """The run has finished; `folder` has its files."""
        raise NotImplementedError

    def fail(self, reason: str) -> None:
        """The run has failed or was interrupted."""
        raise NotImplementedError

    def close(self) -> None:
        """Close files and connections."""


class Tracker(Part):
    """Base class of trackers: a part that opens a `Log` for a run."""

    kind: ClassVar[str] = "tracker"
    separate_process: ClassVar[bool] = False  # True for a tracker whose imports are slow, or that may hang
    needs: ClassVar[str | None] = None  # an optional package; the extra of Hansa has the same name
    takes: ClassVar[str | None] = None  # the field given after the name, as in "mlflow:URI"
    wait: float = 10.0  # seconds after the run to deliver the remaining events

    def check(self) -> None:
        """Raise a ConfigError if a package is missing."""
        if self.needs is not None and importlib.util.find_spec(self.needs) is None:
            raise ConfigError(
                f"the tracker {self.name!r} needs a package that is not installed: pip install 'hansa[{self.needs}]'"
            )

    def open(self, info: RunInfo, state: dict[str, Any], say: Say) -> Log:
        """Begin or continue a run; `state` is empty, or that of an earlier log of this run. `say` informs the user."""
        raise TypeError(f"the tracker {self.name!r} does not implement open()")


def trackers(chosen: Any, where: str = "track") -> tuple[Tracker, ...]:
    """Build trackers, and check that their packages are installed.

    `chosen` has parts, names (`"mlflow"`, `"mlflow:URI"`) or tables, one or a list, or is a table of tables as
    `[track.mlflow]` makes it.
    """
    if isinstance(chosen, Mapping) and "name" not in chosen:
        chosen = [_named(name, table, where) for name, table in chosen.items()]
    listed = [] if chosen is None else [chosen] if isinstance(chosen, (str, Mapping, Tracker)) else chosen
    if not isinstance(listed, Iterable):
        raise ConfigError(f"{where}: expected trackers by name, as in ['mlflow', 'tensorboard'], got {chosen!r}")
    built = tuple(_build(item, where) for item in listed)
    for tracker in built:
        tracker.check()
    return tuple(dict.fromkeys(built))


def _named(name: str, table: Any, where: str) -> Any:
    if isinstance(table, Mapping):
        return {**table, "name": name}
    if isinstance(table, str):
        return f"{name}:{table}"
    raise ConfigError(f"{where}.{name}: expected a table, as in [{where}.{name}], got {table!r}")


def _build(item: Any, where: str) -> Tracker:
    if isinstance(item, str):
        name, colon, target = item.partition(":")
        cls = lookup("tracker", name, where)
        takes = getattr(cls, "takes", None)
        if colon and (takes is None or not target):
            expected = f"{name}:{takes.upper()}" if takes is not None else f"{name!r} alone"
            raise ConfigError(f"{where}: expected {expected}, got {item!r}")
        item = {"name": name, **({str(takes): target} if colon else {})}
    tracker: Tracker = from_config("tracker", item, where=where)
    return tracker


def numbers(line: Line) -> dict[str, float]:
    """The finite numbers of a metrics line, and how many parties were missing or rejected."""
    plain = {k: v for k, v in line.items() if isinstance(v, (int, float)) and not isinstance(v, bool) and k != "round"}
    out = {k: float(v) for k, v in plain.items() if math.isfinite(v)}
    out |= {name: float(len(line[name])) for name in ("missing", "rejected") if line.get(name)}
    return out | ({"empty": 1.0} if "empty" in line else {})


def flat(tree: Any, prefix: str = "") -> dict[str, str]:
    """A tree as dotted names and texts; lists of plain values stay whole."""
    if isinstance(tree, Mapping):
        out: dict[str, str] = {}
        for name, value in tree.items():
            out |= flat(value, f"{prefix}.{name}" if prefix else str(name))
        return out
    if tree is None:
        return {}
    return {prefix: tree if isinstance(tree, str) else json.dumps(tree)}


def params(info: RunInfo) -> dict[str, str]:
    """The configuration of a run by dotted names: algorithm and run with all fields, task, partition, adversary.

    Of a study, all fields of its file.
    """
    record = info.record
    tree = (record.get("experiment") or {}).get("tree") or {}
    if info.study:
        return flat(tree)
    tables = {"algorithm": record.get("algorithm"), "run": record.get("run"), "task": tree.get("task"),
             "partition": tree.get("partition")}  # fmt: skip
    for name in ("adversary", "drift"):
        if record.get(name):
            tables[name] = record[name]
    return flat({name: value for name, value in tables.items() if value})


def tags(info: RunInfo) -> dict[str, str]:
    """The tags to search runs by: version, plan, algorithm, data set, partition, engine, seed; and the run's own."""
    record = info.record
    tree = (record.get("experiment") or {}).get("tree") or {}

    def name(value: Any) -> str:
        return str(value.get("name", "")) if isinstance(value, Mapping) else str(value or "")

    plan = record.get("plan") or {}
    partition = tree.get("partition")
    out = {
        "hansa.version": str(record.get("hansa", "")),
        "hansa.plan": ", ".join(f"{k} {v}" for k, v in plan.items()),
        "hansa.algorithm": name(record.get("algorithm")),
        "hansa.dataset": name((tree.get("task") or {}).get("dataset")),
        "hansa.partition": name(partition),
        "hansa.engine": str(plan.get("engine", "")),
        "hansa.seed": str((record.get("run") or {}).get("seed", "")),
    }
    return {k: v for k, v in out.items() if v} | info.tags


def draw_partition(info: RunInfo, path: str) -> bool:
    """Draw the samples of each party to a file; False if they are unknown."""
    if info.partition is None:
        return False
    import numpy as np

    from hansa.data.picture import draw

    counts, classes = np.array(info.partition["counts"]), info.partition["classes"]
    edges = np.cumsum(counts.sum(1))
    targets = np.repeat(np.tile(np.arange(counts.shape[1]), len(counts)), counts.ravel())
    draw(np.split(np.arange(len(targets)), edges[:-1]), targets, classes, path, info.partition["names"])
    return True
