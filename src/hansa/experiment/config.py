"""Experiments as files: the TOML tables [task], [partition], [algorithm], [adversary], [privacy], [run] and [track],
checked at once."""

from __future__ import annotations

import dataclasses
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from hansa.adversary import Adversary, adversaries, named
from hansa.core.algorithm import Algorithm
from hansa.core.errors import ConfigError, nearest
from hansa.core.functions import is_function
from hansa.core.registry import fill, from_config, nest, registered
from hansa.core.task import Task
from hansa.data.dataset import Data
from hansa.data.partition import Partition
from hansa.data.prepare import Preparation
from hansa.experiment.settings import Run
from hansa.experiment.tasks import make_task
from hansa.privacy import Privacy, privacy

if TYPE_CHECKING:
    from hansa.track import Tracker

TABLES = ("task", "partition", "algorithm", "adversary", "privacy", "run", "track")


@dataclass(frozen=True)
class TaskTable:
    """The [task] table. `dataset` and `model` name a registered part or `"my_module:function"`; `parties` lists a file
    a party (CSV, NPZ) instead of a data set. `party_test` holds that share of each party's samples out as its own test.
    `trusted` keeps so many samples of a data set at the aggregator, for rules that judge updates by them; with a file a
    party it is a file. `classes` says how many classes the targets of the files have, where no party may hold some.
    """

    dataset: str | dict | None = None  # type: ignore[type-arg]
    model: str | dict | None = None  # type: ignore[type-arg]
    loss: str | None = None
    prepare: Preparation | None = None
    parties: tuple[str, ...] = ()
    test: str | None = None
    target: str | None = None
    party_test: float = 0.0
    trusted: int | str | None = None
    classes: int | None = None
    data_dir: str | None = None
    dtype: Literal["float32", "float64"] = "float32"

    def __post_init__(self) -> None:
        if (self.dataset is None) == (not self.parties):
            raise ConfigError("give either dataset, or parties as a list of CSV or NPZ files")
        if not 0.0 <= self.party_test < 1.0:
            raise ConfigError(f"party_test is a share in 0..1, got {self.party_test}")
        if self.dataset is not None and not (self.test is None and self.target is None and self.classes is None):
            raise ConfigError("test, target and classes go with parties as files; a data set brings its own")
        if self.classes is not None and self.classes < 2:
            raise ConfigError(f"classes must be at least 2, got {self.classes}; for numbers, set loss = 'mse'")
        if self.classes is not None and self.loss in ("mse", "mae", "bce"):
            raise ConfigError(f"classes goes with the loss 'cross_entropy', not with {self.loss!r}")
        if isinstance(self.trusted, int) and self.trusted < 1:
            raise ConfigError(f"trusted must be at least 1 sample, got {self.trusted}")
        if self.trusted is not None and isinstance(self.trusted, int) != (self.dataset is not None):
            raise ConfigError("trusted is a number of samples of a data set, or a file beside the parties' files")


@dataclass(frozen=True)
class Experiment:
    """What an experiment file says, read and checked. `tree` is the plain data, to record and to send; `track`, the
    trackers of a run, is no part of it.
    """

    task: TaskTable
    partition: Partition | None
    algorithm: Algorithm
    run: Run
    tree: dict[str, Any]
    folder: str
    adversary: tuple[Adversary, ...] = ()
    track: tuple[Tracker, ...] = ()
    privacy: Privacy = Privacy()
    name: str = ""  # of the file

    def build_task(self, data: Data | None = None) -> Task:
        """Load the data, unless they are given, divide them among the parties, make the model."""
        return make_task(self, data)

    def check_deployed(self) -> None:
        """Refuse what there is only in a simulation; for parties that are processes of their own."""
        if self.adversary:
            raise ConfigError(
                "adversaries are simulated: parties that run as processes of their own attack nobody; take [adversary] "
                "out of the experiment, or simulate it"
            )

    def check_networked(self) -> None:
        """As `check_deployed`, for parties across a network."""
        self.check_deployed()
        if "exchange" in self.algorithm.verbs:
            raise ConfigError(
                f"{self.algorithm.name} has parties talk to each other, and across a network they would have to do so "
                "through the aggregator, which would see all of it; simulate it, or use another algorithm"
            )
        if self.run.precision == "tf32":
            raise ConfigError("run.precision: 'tf32' is of a simulation; between organisations use 'float32' or 'bf16'")

    def settings(self) -> dict[str, Any]:
        """What `simulate` is given beside the algorithm and the task."""
        settings = {f.name: getattr(self.run, f.name) for f in dataclasses.fields(self.run)}
        return {**settings, "adversary": self.adversary, "privacy": self.privacy}


def read_toml(path: Path) -> dict[str, Any]:
    """A file's tables, as plain data."""
    try:
        return tomllib.loads(path.read_text())
    except FileNotFoundError:
        raise ConfigError(f"there is no file {path}") from None
    except IsADirectoryError:
        raise ConfigError(f"{path} is a folder; expected a TOML file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from None
    except (ValueError, RecursionError) as error:  # ValueError: no TOML, or a number too long
        raise ConfigError(f"{path} is not valid TOML: {error}") from None


def read(path: str | Path, overrides: Mapping[str, Any] | None = None) -> Experiment:
    """Read an experiment file; `overrides` are dotted names, as in `--set`."""
    path = Path(path)
    tree = read_toml(path)
    changes = _named(nest(overrides or {}))
    listed, change = tree.get("adversary"), changes.get("adversary")
    if isinstance(listed, list) and isinstance(change, Mapping) and "name" not in change:
        raise ConfigError(
            f"adversary.{next(iter(change))}: the file lists its groups of attackers ([[adversary]], {len(listed)} of "
            "them), and --set cannot reach into the list; change the file, or set adversary.kind for one group in "
            "place of all"
        )
    return dataclasses.replace(parse(merge(_named(tree), changes), folder=str(path.parent)), name=path.stem)


def parse(tree: Mapping[str, Any], folder: str = ".") -> Experiment:
    """Check an experiment given as plain data."""
    for name, table in tree.items():
        if name not in TABLES:
            raise ConfigError(f"unknown table [{name}]{nearest(name, TABLES)}")
        if not isinstance(table, (Mapping, str)) and not (name in ("adversary", "track") and isinstance(table, list)):
            raise ConfigError(f"[{name}] must be a table, got {table!r}")
    if "task" not in tree:
        raise ConfigError("the experiment has no [task] table; it names the data set and the model")
    task: TaskTable = fill(TaskTable, _table(tree, "task"), where="task")
    partition = from_config("partition", tree["partition"], where="partition") if "partition" in tree else None
    algorithm = from_config("algorithm", tree.get("algorithm", "fedavg"), where="algorithm")
    run: Run = fill(Run, _table(tree, "run"), where="run")
    for kind, value in (("dataset", task.dataset), ("model", task.model)):
        if value is not None and not is_function(value):
            from_config(kind, value, where=f"task.{kind}")
    if algorithm.trains and task.model is None:
        raise ConfigError(f"{algorithm.name} trains a model: set task.model, one of {', '.join(registered('model'))}")
    if task.parties and partition is not None:
        raise ConfigError("[partition] divides a data set; with a file a party there is nothing to divide")
    track: tuple[Tracker, ...] = ()
    if "track" in tree:
        from hansa.track import trackers

        track = trackers(tree["track"])
    own = {name: table for name, table in tree.items() if name != "track"}
    return Experiment(task, partition, algorithm, run, own, folder, adversaries(tree.get("adversary")), track,
                      privacy(tree.get("privacy")))  # fmt: skip


def _table(tree: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    table = tree.get(name, {})
    if not isinstance(table, Mapping):
        raise ConfigError(f"[{name}] must be a table, got {table!r}")
    return table


def _named(tree: Mapping[str, Any]) -> dict[str, Any]:
    """The tree with the adversary's `kind` under `name`, so that another kind drops the fields of the old one."""
    return {**tree, "adversary": named(tree["adversary"])} if "adversary" in tree else dict(tree)


def merge(tree: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """The tree with changes laid over it; a new name for a part drops the old part's fields."""
    out = dict(tree)
    for name, change in changes.items():
        old = out.get(name)
        if isinstance(change, Mapping):
            old = {"name": old} if isinstance(old, str) else old
            renamed = isinstance(old, Mapping) and "name" in change and old.get("name") != change["name"]
            out[name] = merge(old if isinstance(old, Mapping) and not renamed else {}, change)
        elif isinstance(change, str) and isinstance(old, Mapping) and "name" in old:
            out[name] = old if old["name"] == change else {"name": change}
        else:
            out[name] = change
    return out


def parse_set(items: list[str]) -> dict[str, Any]:
    """`NAME=VALUE` pairs of `--set`; values are TOML, plain words pass as texts."""
    out: dict[str, Any] = {}
    for item in items:
        name, equals, text = item.partition("=")
        if not equals or not name:
            raise ConfigError(f"--set takes NAME=VALUE, as in --set algorithm.local.lr=0.05; got {item!r}")
        try:
            out[name.strip()] = tomllib.loads(f"v = {text}")["v"]
        except tomllib.TOMLDecodeError:
            out[name.strip()] = text
    return out
