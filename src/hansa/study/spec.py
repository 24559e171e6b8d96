"""Specification of a study: a base experiment, and the axes along which its runs differ."""

from __future__ import annotations

import dataclasses
import itertools
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hansa.adversary import named
from hansa.core.plain_data import from_config, nest, to_config
from hansa.core.registry import lookup, registered
from hansa.experiment.baselines import BASELINES, KEPT, POOLED, baseline
from hansa.experiment.config import TABLES, UNSET, VALUES, merge, read_toml, unset
from hansa.experiment.settings import measured
from hansa.plumbing.errors import ConfigError, UnsuitedError, nearest
from hansa.plumbing.functions import REFERENCE, searching
from hansa.study.cell import Cell
from hansa.track.tracker import Tracker, trackers

KEYS = ("name", "algorithms", "baselines", "partitions", "adversaries", "grid", "seeds", "target", "metric", "tune",
        "tune_seeds", "jobs", "ray")  # fmt: skip
# The field that a number after a partition's name sets, as in "dirichlet:0.1".
SHORT = {"dirichlet": "alpha", "quantity": "alpha", "shards": "per_party", "similarity": "similarity", "noise": "sigma",
         "iid": "parties"}  # fmt: skip
PARTY_TEST = 0.2  # default share of each party's samples for its own test: for the worst tenth, and for tuning
CHECKPOINT_SECONDS = 1.0  # a killed study loses at most this much of each unfinished run
TUNING_SEED = 1000  # first seed for tuning, unless the study uses it itself
IMAGES = ("digits", "mnist", "fashion-mnist")  # data sets whose default model is the 2NN
SKEWED = {"name": "dirichlet", "alpha": 0.3}


@dataclass(frozen=True)
class Choice:
    """One point of an axis: its label and table; for an algorithm its own values to tune, and if it is a baseline."""

    label: str
    table: Any  # None: no adversary
    tune: dict[str, list[Any]] | None = None
    baseline: bool = False  # whether it is a baseline of the algorithms


@dataclass(frozen=True)
class Study:
    """A parsed study.

    `tree` is the whole study as plain data, without its trackers (`track`). Relative paths in it start from `place`.
    `folder` holds the runs and results. `tune` maps dotted fields to the values that tuning tries."""

    name: str
    tree: dict[str, Any]
    algorithms: tuple[Choice, ...]
    partitions: tuple[Choice, ...]
    adversaries: tuple[Choice, ...]
    grid: dict[str, list[Any]]
    seeds: tuple[int, ...]
    target: float | None = None
    metric: str | None = None  # None: accuracy if measured, else the loss
    tune: dict[str, list[Any]] = dataclasses.field(default_factory=dict)
    tune_seeds: int = 1
    jobs: int | None = None
    ray: str | None = None  # the address of a cluster for the runs
    place: str = "."
    folder: Path | None = None
    track: tuple[Tracker, ...] = ()

    @property
    def base(self) -> dict[str, Any]:
        """The tables that all runs share, without the tracking of the study."""
        return {name: table for name, table in self.tree.items() if name not in ("study", "track")}

    def ordered_tree(self) -> dict[str, Any]:
        """The study as plain data, with tables in the order of the documentation."""
        return {name: self.tree[name] for name in ("study", *TABLES) if name in self.tree}

    def candidates(self, algorithm: str) -> list[dict[str, Any]]:
        """Tuning candidates of an algorithm: every combination of the values."""
        own = next(choice.tune for choice in self.algorithms if choice.label == algorithm)
        return _combinations(self.tune if own is None else own)

    def cells(self, tuned: Mapping[tuple[str, str], Mapping[str, Any]] | None = None) -> list[Cell]:
        """All checked runs, by setting, algorithm, seed. `tuned` has values by (algorithm, setting).

        Runs of algorithms that cannot have a setting of the study, such as `run.finetune`, are left out (`skipped`).
        """
        out, unsuited = self._cells(tuned or {})
        if not out:
            raise ConfigError(next(iter(unsuited.values())))
        return out

    @property
    def skipped(self) -> dict[str, str]:
        """Why runs of an algorithm are left out, by algorithm."""
        return self._cells({})[1]

    def _cells(self, tuned: Mapping[tuple[str, str], Mapping[str, Any]]) -> tuple[list[Cell], dict[str, str]]:
        """The checked runs, and the reason by algorithm for those that are left out."""
        out: list[Cell] = []
        unsuited: dict[str, str] = {}
        for partition, adversary, variant in itertools.product(
            self.partitions, self.adversaries, _combinations(self.grid)
        ):
            label = ", ".join(f"{name}={_shown(value)}" for name, value in variant.items())
            for algorithm, seed in itertools.product(self.algorithms, self.seeds):
                at = Cell(algorithm.label, partition.label, adversary.label, label, seed, {}, self.place)
                values = tuned.get((at.algorithm, at.setting), {})
                tree = self._tree(algorithm, partition, adversary, {**variant, **values}, seed)
                cell = dataclasses.replace(at, tree=tree)
                try:
                    _ = cell.experiment  # parsed here, so that mistakes show before any run
                except UnsuitedError as error:
                    unsuited.setdefault(at.algorithm, str(error))
                    continue
                out.append(cell)
        return out, unsuited

    def _tree(self, algorithm: Choice, partition: Choice, adversary: Choice, fields: Mapping[str, Any],
              seed: int) -> dict[str, Any]:  # fmt: skip
        tree = self.base
        for name, choice in (("algorithm", algorithm), ("partition", partition), ("adversary", adversary)):
            tree.pop(name, None)
            if choice.table is not None:
                tree[name] = choice.table
        tree = merge(tree, nest({dotted(name): value for name, value in fields.items()}))
        tree["task"] = {"party_test": PARTY_TEST, **tree["task"]}
        run = {"checkpoint_seconds": CHECKPOINT_SECONDS, **tree.get("run", {}), "seed": seed}
        run.pop("target", None)  # every run does all rounds, so that runs can be compared
        run.pop("baselines", None)  # they are runs of the study
        if algorithm.baseline:
            tree.pop("adversary", None)
            tree.pop("privacy", None)
            tree["task"] |= {"pooled": True} if algorithm.label == POOLED else {}
            run = {name: value for name, value in run.items() if name in KEPT}
        tree["run"] = run if self.metric is None else {**run, "metric": self.metric}
        return tree

    def plain(self) -> dict[str, Any]:
        """As plain data."""
        return {"name": self.name, "tree": self.tree, "place": self.place, "metric": self.metric}

    @classmethod
    def of_plain(cls, tree: dict[str, Any]) -> Study:
        study = parse_study(tree["tree"], tree["name"], tree["place"])
        return dataclasses.replace(study, metric=tree["metric"])


def read_study(path: str | Path, changes: Mapping[str, Any] | None = None) -> Study:
    """Read a study's file; `changes` are dotted names, as in `--set`, that override it."""
    path = Path(path)
    tree = read_toml(path)
    if not isinstance(tree.get("study", {}), Mapping):
        raise ConfigError(f"[study] must be a table, got {tree['study']!r}")
    return parse_study(lay(_tabled(tree), _tabled(nest(changes or {}))), path.stem, str(path.parent))


def parse_study(tree: Mapping[str, Any], name: str, place: str = ".") -> Study:
    """Check a study given as plain data: the tables of an experiment, and [study]."""
    with searching(place):
        return _parse_study(tree, name, place)


def _parse_study(tree: Mapping[str, Any], name: str, place: str) -> Study:
    tree = _tabled(tree)
    for table in tree:
        if table not in (*TABLES, "study"):
            raise ConfigError(f"unknown table [{table}]{nearest(table, (*TABLES, 'study'))}")
        listed = table in ("adversary", "track") and isinstance(tree[table], list)
        if not isinstance(tree[table], Mapping) and not listed:
            raise ConfigError(f"[{table}] must be a table, got {tree[table]!r}")
    track = trackers(tree.pop("track", None))
    options: Mapping[str, Any] = tree.get("study", {})
    for key in options:
        if key not in KEYS:
            raise ConfigError(f"[study]: unknown key {key!r}{nearest(key, KEYS)}")
    tree = _with_task(tree, divided="partitions" in options)
    run = tree.get("run", {})
    target = _number(options.get("target", run.get("target")), "target")
    metric = options.get("metric", run.get("metric"))
    if metric is not None:
        measured(run.get("metrics", ()), str(metric), "study.")
    algorithms = _axis("algorithm", options.get("algorithms"), tree.get("algorithm"))
    algorithms += _baselines(options.get("baselines", run.get("baselines", ())), algorithms)
    study = Study(
        str(options.get("name", name)), {**tree, "study": dict(options)}, algorithms,
        _axis("partition", options.get("partitions"), tree.get("partition"),
              "parties' own files" if tree["task"].get("parties") else "default partition"),
        _axis("adversary", options.get("adversaries"), tree.get("adversary")),
        _fields(options.get("grid", {}), "grid"), _seeds(options.get("seeds", 1), run.get("seed", 0)), target, metric,
        _fields(options.get("tune", {}), "tune"), _count(options.get("tune_seeds", 1), "tune_seeds"),
        None if options.get("jobs") is None else _count(options["jobs"], "jobs"),
        _address(options.get("ray")), place, track=track,
    )  # fmt: skip
    sizes = {choice.label: len(study.candidates(choice.label)) for choice in algorithms}
    if len(set(sizes.values())) > 1:
        counts = ", ".join(f"{label} {size}" for label, size in sizes.items())
        raise ConfigError(
            f"study.tune: every algorithm gets the same number of candidates, so that tuning is fair ({counts})"
        )
    return study


def _address(value: Any) -> str | None:
    if value is not None and not (isinstance(value, str) and value):
        raise ConfigError(
            f"study.ray must be the address of a Ray cluster: 'auto', 'local' or HOST:PORT; got {value!r}"
        )
    return value


def _with_task(tree: dict[str, Any], divided: bool) -> dict[str, Any]:
    """Add the default data set and model: digits, with skewed labels unless a partition is given."""
    task = dict(tree.get("task", {}))
    if "dataset" not in task and "parties" not in task:
        task["dataset"] = "digits"
        tree = tree if divided else lay({"partition": SKEWED}, tree)
        tree = lay({"run": {"rounds": 30}}, tree)
    if "model" not in task and task.get("dataset") in IMAGES:
        task["model"] = "2nn"
    return {**tree, "task": task}


def _tabled(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Replace part names by tables, and store the adversary's kind under `name`."""
    out = {name: {"name": table} if isinstance(table, str) and name != "track" else table
           for name, table in tree.items()}  # fmt: skip
    return {**out, "adversary": named(out["adversary"])} if "adversary" in out else out


def lay(tree: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Override a table with another. Fields of a table without a name are common to all named tables."""
    out = dict(tree)
    for name, change in over.items():
        old = out.get(name)
        if change is UNSET:
            unset(out, name)
            continue
        if name not in VALUES and isinstance(old, str) and isinstance(change, Mapping):
            old = {"name": old}
        if name not in {"name", *VALUES} and isinstance(old, Mapping) and isinstance(change, str):
            change = {"name": change}
        if isinstance(change, Mapping):
            old = old if isinstance(old, Mapping) else {}
            renamed = "name" in old and "name" in change and old["name"] != change["name"]
            out[name] = lay({} if renamed else old, change)
        else:
            out[name] = change
    return out


def _axis(kind: str, entries: Any, base: Any, undivided: str = "") -> tuple[Choice, ...]:
    """The choices of an axis; by default the base's table.

    A base table without a name is common to all choices. `undivided` is the label of a partition without a name."""
    plural = {"algorithm": "algorithms", "partition": "partitions", "adversary": "adversaries"}[kind]
    if entries is None:
        if base is None:
            return (Choice("fedavg", {"name": "fedavg"}) if kind == "algorithm" else
                    Choice(undivided if kind == "partition" else "", None),)  # fmt: skip
        if isinstance(base, list):
            return (Choice("+".join(_label(kind, group) for group in base), base),)
        if "name" not in base:
            default = {"algorithm": "fedavg", "partition": "iid"}.get(kind)
            if default is None:
                raise ConfigError("[adversary] needs a kind, or study.adversaries a list of them")
            base = {"name": default, **base}
        return (Choice(_label(kind, base), base),)
    if isinstance(entries, (str, Mapping)) or not isinstance(entries, Sequence) or not entries:
        raise ConfigError(f"study.{plural} must be a list of {plural} by name or as tables, got {entries!r}")
    common = base if isinstance(base, Mapping) and "name" not in base else {}
    choices = [_choice(kind, entry, common, f"study.{plural}[{i}]") for i, entry in enumerate(entries)]
    labels = [choice.label for choice in choices]
    for label in labels:
        if labels.count(label) > 1:
            raise ConfigError(f"study.{plural}: two entries have the label {label!r}; give one of them another label")
    return tuple(choices)


def _baselines(names: Any, algorithms: Sequence[Choice]) -> tuple[Choice, ...]:
    """The baselines of a study, with the local solver of its first algorithm."""
    if isinstance(names, str) or not isinstance(names, Sequence):
        raise ConfigError(f"study.baselines must be a list of {' and '.join(BASELINES)}, got {names!r}")
    out: list[Choice] = []
    for name in names:
        if name not in BASELINES:
            raise ConfigError(f"study.baselines: unknown baseline {name!r}{nearest(str(name), BASELINES)}")
        if name in [choice.label for choice in (*algorithms, *out)]:
            raise ConfigError(f"study.baselines: two entries have the label {name!r}; give one of them another label")
        first = from_config("algorithm", algorithms[0].table, where="study.algorithms[0]")
        tune = algorithms[0].tune
        out.append(Choice(name, to_config(baseline(name, first)), tune, baseline=True))
    return tuple(out)


def _choice(kind: str, entry: Any, common: Mapping[str, Any], where: str) -> Choice:
    if kind == "adversary":
        if entry in ("", "none"):
            return Choice("", None)
        if isinstance(entry, list):
            groups = [_choice(kind, group, common, f"{where}[{i}]") for i, group in enumerate(entry)]
            return Choice("+".join(group.label for group in groups), [group.table for group in groups])
        entry = named(entry)
    label, tune = None, None
    if isinstance(entry, str):
        entry = _short(kind, entry, where)
    if not isinstance(entry, Mapping):
        raise ConfigError(f"{where}: expected a name or a table, got {entry!r}")
    table = dict(entry)
    label = table.pop("label", None)
    if kind == "algorithm" and "tune" in table:
        tune = _fields(table.pop("tune"), f"algorithms: tune of {table.get('name')}")
    table = nest(table)
    if label is not None and (not isinstance(label, str) or not label.strip()):
        raise ConfigError(f"{where}: a label must be a string, got {label!r}")
    if not isinstance(table.get("name"), str):
        raise ConfigError(f"{where}: the {kind} needs a name, one of {', '.join(registered(kind))}")
    lookup(kind, table["name"], where)
    return Choice(label or _label(kind, table), lay(common, table), tune)


def _short(kind: str, text: str, where: str) -> dict[str, Any]:
    """Parse a short form such as `dirichlet:0.1`; an adversary's number is its fraction of the parties."""
    name, colon, value = text.strip().partition(":")
    if not colon or kind == "algorithm":
        return {"name": text.strip()}
    if REFERENCE.fullmatch(text.strip()) and name not in registered(kind):
        return {"name": text.strip()}
    field = "fraction" if kind == "adversary" else SHORT.get(name)
    lookup(kind, name, where)
    if field is None:
        raise ConfigError(f"{where}: {name!r} takes no number after a colon, got {text!r}")
    try:
        return {"name": name, field: int(value)}
    except ValueError:
        pass
    try:
        return {"name": name, field: float(value)}
    except ValueError:
        raise ConfigError(f"{where}: expected a number after the colon, the {field} of {name}, got {text!r}") from None


def _label(kind: str, table: Mapping[str, Any]) -> str:
    """Default label of an entry: its name and its fields, without the number of parties."""
    name = str(table.get("name"))
    fields = {key: value for key, value in table.items() if key not in ("name", "kind", "parties")}
    short = "fraction" if kind == "adversary" else SHORT.get(name) if kind == "partition" else None
    text = f"{name}:{_shown(fields.pop(short))}" if short in fields else name
    listed = ", ".join(f"{key}={_shown(value)}" for key, value in _flat(fields).items())
    return f"{text} ({listed})" if listed else text


def _flat(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    out: dict[str, Any] = {}
    for key, value in table.items():
        out |= _flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {prefix + key: value}
    return out


def _shown(value: Any) -> str:
    """A value as shown in a label: a part by its name and fields, a list by its entries."""
    if isinstance(value, Mapping):
        return _label("", value) if "name" in value else ", ".join(f"{k}={_shown(v)}" for k, v in value.items())
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(_shown, value)) + "]"
    return f"{value:g}" if isinstance(value, float) else str(value)


def dotted(name: str) -> str:
    """Full name of a field: `local.lr` is short for `algorithm.local.lr`."""
    first, *rest = name.split(".")
    return name if first in TABLES and rest else f"algorithm.{name}"


def _fields(table: Any, where: str) -> dict[str, list[Any]]:
    if not isinstance(table, Mapping):
        raise ConfigError(
            f'study.{where} must be a table of fields and their values, as in {{ "local.lr" = [0.1, 0.3] }}'
        )
    out = {}
    for name, values in _lists(table).items():
        if not isinstance(values, list) or not values:
            raise ConfigError(f"study.{where}: {name!r} needs a list of values, got {values!r}")
        if dotted(name) in ("run.seed", "run.target", "run.metric"):
            plain = name.rpartition(".")[2]
            raise ConfigError(f"study.{where}: use study.{'seeds' if plain == 'seed' else plain} instead of {name!r}")
        if any(values.count(value) > 1 for value in values):
            raise ConfigError(f"study.{where}: {name!r} has a value twice: {values!r}")
        out[name] = values
    return out


def _lists(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Dotted names and their lists; TOML reads `local.lr = [...]` as a table in a table."""
    out: dict[str, Any] = {}
    for name, values in table.items():
        out |= _lists(values, f"{prefix}{name}.") if isinstance(values, Mapping) else {prefix + name: values}
    return out


def _combinations(fields: Mapping[str, list[Any]]) -> list[dict[str, Any]]:
    return [dict(zip(fields, values, strict=True)) for values in itertools.product(*fields.values())]


def _seeds(seeds: Any, first: Any) -> tuple[int, ...]:
    def whole(value: Any) -> bool:
        return isinstance(value, int) and not isinstance(value, bool) and value >= 0

    if whole(seeds) and whole(first) and seeds > 0:
        return tuple(range(first, first + seeds))
    if isinstance(seeds, (list, tuple)) and seeds and all(map(whole, seeds)) and len(set(seeds)) == len(seeds):
        return tuple(seeds)
    raise ConfigError(f"study.seeds must be a number of seeds, at least 1, or a list of different seeds, got {seeds!r}")


def _number(value: Any, name: str) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise ConfigError(f"study.{name} must be a number, got {value!r}")
    return float(value)


def _count(value: Any, name: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"study.{name} must be a whole number, at least 1, got {value!r}")
    return value


def cores() -> int:
    """Number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
