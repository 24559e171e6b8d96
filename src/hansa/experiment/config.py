"""Read experiment files: TOML tables [task], [partition], [algorithm], [adversary], [drift], [privacy], [run] ..."""

from __future__ import annotations

import dataclasses
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from msgspec import Meta

from hansa.adversary import Adversary, adversaries, named
from hansa.core.algorithm import Algorithm
from hansa.core.fields import Advice
from hansa.core.party_models import check_choice, turn_of
from hansa.core.plain_data import check_numbers, fill, from_config, nest
from hansa.core.quantities import BelowOne, Count
from hansa.core.task import Task
from hansa.data.column_transformer import ColumnTransformer
from hansa.data.dataset import Data
from hansa.data.partition import Partition
from hansa.data.prepare import Preparation
from hansa.drift import Drift, drifts
from hansa.experiment.audit import AuditTable
from hansa.experiment.column_tasks import make_column_task
from hansa.experiment.rules import Facts, check, task_facts
from hansa.experiment.settings import Run
from hansa.experiment.tasks import make_task
from hansa.metrics.function import functions
from hansa.numerics.weights import class_weights
from hansa.plumbing.errors import ConfigError, nearest
from hansa.plumbing.functions import is_function, load_function, reference_of, searching
from hansa.privacy import Privacy, privacy

if TYPE_CHECKING:
    from hansa.track import Tracker

TABLES = ("task", "partition", "algorithm", "adversary", "drift", "privacy", "audit", "run", "track")


@dataclass(frozen=True)
class TaskTable:
    """The [task] table. `dataset`, `model` and `loss` name a registered part or `"my_module:name"`; `parties` lists one
    file per party (CSV, NPZ) instead of a data set. `party_test` is the share of each party's samples that is held out
    as its own test. `trusted` is the number of samples that the aggregator keeps, for rules that judge updates by them;
    with one file per party, it is a file. `classes` is the number of classes, if no party has samples of some classes.
    `models` has several models by name instead of `model`, for algorithms whose parties may train different
    architectures; `assigned` lists the names that parties take in turn, or has the model of each party. `public` are
    samples that every party sees: a number of samples of the data set, a file, or `"my_module:function"`.
    `ids` says that the parties' files have different columns of the same people: it names the column of the ids (in an
    NPZ file, the array). A file with the column `target` (the array y) has labels. `labels` lists the classes of a
    target that is a text, in the order of their numbers; it needs the preparation `table`. `pooled` puts the training
    samples of all parties in one place, in a simulation, to compare.
    `class_weight` weighs the classes in the training loss: "balanced", a list with a weight per class, or a table.
    `sample_weight` names the column (in an NPZ file, the array) with the weight of each sample.
    An entry of `parties` may also be a folder of arrays (`x.npy` and `y.npy`), or a folder with one subfolder or file
    per party. `augment` is a function `"my_module:function"` of (sample, key) that changes training samples.
    """

    dataset: str | dict | None = None  # type: ignore[type-arg]
    model: str | dict | None = None  # type: ignore[type-arg]
    loss: str | None = None
    prepare: Preparation | None = None
    parties: tuple[str, ...] = ()
    test: str | None = None
    target: str | None = None
    party_test: BelowOne = 0.0
    trusted: Count | str | None = None
    classes: Annotated[int, Meta(ge=2), Advice("for numbers, set loss = 'mse'")] | None = None
    models: dict | None = None  # type: ignore[type-arg]
    assigned: tuple[str, ...] | dict | None = None  # type: ignore[type-arg]
    public: Count | str | None = None
    data_dir: str | None = None
    dtype: Literal["float32", "float64"] = "float32"
    ids: str | None = None
    pooled: bool = False
    labels: tuple[str, ...] = ()
    class_weight: str | tuple[float, ...] | dict | None = None  # type: ignore[type-arg]
    sample_weight: str | None = None
    augment: str | None = None

    def __post_init__(self) -> None:
        check_numbers(self)
        if (self.dataset is None) == (not self.parties):
            raise ConfigError("give either dataset, or parties as a list of CSV or NPZ files, and not both")
        if self.dataset is not None and not (self.test is None and self.target is None and self.classes is None):
            raise ConfigError(
                "test, target and classes apply to parties as files; a data set has its own: leave them out"
            )
        if self.dataset is not None and self.ids is not None:
            raise ConfigError(
                "ids applies to parties as files; the partition 'columns' numbers the rows of a data set: leave it out"
            )
        if self.labels and (self.dataset is not None or not isinstance(self.prepare, ColumnTransformer)):
            raise ConfigError("labels applies to parties as files with prepare = 'table'; leave it out")
        if self.labels and (len(set(self.labels)) < max(len(self.labels), 2) or self.classes is not None):
            raise ConfigError("labels must be at least two distinct texts, and give the number of classes themselves")
        if self.augment is not None and not is_function(self.augment):
            raise ConfigError(f"augment must name a function, as in 'my_module:function', got {self.augment!r}")
        if self.classes is not None and self.loss in ("mse", "mae", "bce"):
            raise ConfigError(
                f"classes needs the loss 'cross_entropy', and loss is {self.loss!r}; leave one of them out"
            )
        if self.class_weight is not None:
            object.__setattr__(self, "class_weight", self._numbered_weights())
            class_weights(self.class_weight)
        if self.sample_weight is not None and not self.parties:
            raise ConfigError(
                "sample_weight names a column of the parties' files; a data set has its weights in Data.weights: leave "
                "it out"
            )
        if self.trusted is not None and isinstance(self.trusted, int) != (self.dataset is not None):
            raise ConfigError("trusted must be a number of samples for a data set, and a file for parties as files")
        if isinstance(self.public, int) and self.dataset is None:
            raise ConfigError(
                "public must be a positive number of samples of the data set, a file, or a function; with parties as "
                f"files it is a file or a function; got {self.public}"
            )
        check_choice(self.model, self.models, self.assigned)
        if self.models is not None:
            turn_of(self.models, list(self.assigned.values()) if isinstance(self.assigned, dict) else self.assigned,
                    0, lambda name, where: 0)  # fmt: skip

    def _numbered_weights(self) -> Any:
        """The weights of classes, with the names that `labels` lists replaced by their numbers."""
        if not self.labels or not isinstance(self.class_weight, dict):
            return self.class_weight
        numbers = {label: str(k) for k, label in enumerate(self.labels)}
        wrong = next((name for name in self.class_weight if name not in numbers and not str(name).isdecimal()), None)
        if wrong is not None:
            raise ConfigError(f"class_weight: {wrong!r} is no class{nearest(wrong, self.labels)}")
        named = {numbers.get(name, name): weight for name, weight in self.class_weight.items()}
        if len(named) < len(self.class_weight):
            raise ConfigError("class_weight names a class twice: by its label and by its number")
        return named

    @property
    def named_models(self) -> dict[str, str | dict[str, Any]]:
        """The models by setting: `task.model`, or `task.models.NAME` for each of several."""
        if self.models is not None:
            return {f"task.models.{name}": model for name, model in self.models.items()}
        return {} if self.model is None else {"task.model": self.model}


@dataclass(frozen=True)
class Experiment:
    """The content of an experiment file, checked.

    `tree` is the same as plain data, for records and messages, without the trackers (`track`).
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
    name: str = ""  # of the file, without its ending
    audit: AuditTable = AuditTable()
    drift: tuple[Drift, ...] = ()

    def build_task(self, data: Data | None = None) -> Task:
        """Load the data (unless `data` has them), divide them among the parties, make the model."""
        for reference in functions(self.run.metrics):
            load_function(reference, "run.metrics", self.folder)
        return make_column_task(self, data) if self.algorithm.data == "columns" else make_task(self, data)

    def facts(self, **known: Any) -> Facts:
        """What is known about the experiment, and what is `known` beside it."""
        return Facts(**{
            "algorithm": self.algorithm, "run": self.run, "privacy": self.privacy, "protocol": None, "table": self.task,
            "partition": self.partition, "audit": self.audit, "adversary": self.adversary, "drift": self.drift,
            **task_facts(self.task, self.by_columns),
            **({} if self.task.classes is None else {"classes": self.task.classes}),
            **({"party_tests": True} if self.task.party_test > 0 else {}), **known,
        })  # fmt: skip

    @property
    def by_columns(self) -> bool:
        """Whether the parties hold different columns of the same people."""
        return self.task.ids is not None or (self.partition is not None and self.partition.data == "columns")

    def check(self, **known: Any) -> None:
        """Raise the error of the first rule that the experiment breaks, as far as the facts are known."""
        check(self.facts(**known))

    def settings(self) -> dict[str, Any]:
        """The arguments of `simulate`, without the algorithm and the task."""
        self.check(deployed=False)
        settings = {f.name: getattr(self.run, f.name) for f in dataclasses.fields(self.run)}
        return {**settings, "adversary": self.adversary, "drift": self.drift, "privacy": self.privacy}


UNSET = object()  # a change that takes a field out of a file: `--set task.party_test=`
VALUES = frozenset({"class_weight"})  # fields that are a word or a table, where the word is no name of a part


def read_toml(path: Path) -> dict[str, Any]:
    """Read a TOML file as plain data."""
    try:
        return tomllib.loads(path.read_text())
    except FileNotFoundError:
        raise ConfigError(f"there is no file {path}; check the path") from None
    except IsADirectoryError:
        raise ConfigError(f"{path} is a folder; expected a TOML file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from None
    except (ValueError, RecursionError) as error:  # ValueError: invalid TOML, or a number with too many digits
        raise ConfigError(f"{path} is not valid TOML: {error}") from None


def read(path: str | Path, overrides: Mapping[str, Any] | None = None, checked: bool = True) -> Experiment:
    """Read an experiment file; `overrides` maps dotted names to values, as `--set` does.

    With `checked = False` its settings may exclude each other.
    """
    path = Path(path)
    tree = read_toml(path)
    changes = _named(nest(overrides or {}))
    listed, change = tree.get("adversary"), changes.get("adversary")
    if isinstance(listed, list) and isinstance(change, Mapping) and "name" not in change:
        raise ConfigError(
            f"adversary.{next(iter(change))}: the file has a list of {len(listed)} groups of attackers "
            "([[adversary]]), and --set cannot change an entry of a list; change the file, or set adversary.kind to "
            "replace all groups by one"
        )
    if isinstance(tree.get("drift"), list) and isinstance(changes.get("drift"), Mapping):
        raise ConfigError(
            f"drift.{next(iter(changes['drift']))}: the file has a list of {len(tree['drift'])} drifts ([[drift]]), "
            "and --set cannot change an entry of a list; change the file"
        )
    parsed = parse(merge(_named(tree), changes), str(path.parent), checked)
    return dataclasses.replace(parsed, name=path.stem)


def parse(tree: Mapping[str, Any], folder: str = ".", checked: bool = True) -> Experiment:
    """Check an experiment that is given as plain data; modules of the user's own parts are searched in `folder`."""
    with searching(folder):
        experiment = _parse(tree, folder)
        if checked:
            experiment.check()
        return experiment


def _parse(tree: Mapping[str, Any], folder: str) -> Experiment:
    for name, table in tree.items():
        if name not in TABLES:
            raise ConfigError(f"unknown table [{name}]{nearest(name, TABLES)}")
        if not isinstance(table, (Mapping, str)) and not (
            name in ("adversary", "drift", "track") and isinstance(table, list)
        ):
            raise ConfigError(f"[{name}] must be a table, got {table!r}")
    if "task" not in tree:
        raise ConfigError("the experiment has no [task] table; add one that names the data set and the model")
    task: TaskTable = fill(TaskTable, _table(tree, "task"), where="task")
    partition = from_config("partition", tree["partition"], where="partition") if "partition" in tree else None
    algorithm = from_config("algorithm", tree.get("algorithm", "fedavg"), where="algorithm")
    run: Run = fill(Run, _table(tree, "run"), where="run")
    if task.dataset is not None and reference_of(task.dataset) is None:
        from_config("dataset", task.dataset, where="task.dataset")
    if task.models is not None and not task.models:
        raise ConfigError("task.models: name at least one model, as in small = 'logistic'")
    for where, model in task.named_models.items():
        if reference_of(model) is None:
            from_config("model", model, where=where)
    protection = privacy(tree.get("privacy"))
    audit: AuditTable = fill(AuditTable, _table(tree, "audit"), where="audit")
    drifting = drifts(tree.get("drift"), run.rounds)
    track: tuple[Tracker, ...] = ()
    if "track" in tree:
        from hansa.track import trackers

        track = trackers(tree["track"])
    recorded = {name: table for name, table in tree.items() if name != "track"}
    return Experiment(task, partition, algorithm, run, recorded, folder, adversaries(tree.get("adversary")), track,
                      protection, audit=audit, drift=drifting)  # fmt: skip


def _table(tree: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    table = tree.get(name, {})
    if not isinstance(table, Mapping):
        raise ConfigError(f"[{name}] must be a table, got {table!r}")
    return table


def _named(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Rename the adversary's `kind` to `name`, so that another kind drops the fields of the old one."""
    return {**tree, "adversary": named(tree["adversary"])} if "adversary" in tree else dict(tree)


def merge(tree: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Apply changes to a tree; a new name for a part drops the fields of the old part.

    A table merges into the part that a word names, and replaces a word that is a value (`VALUES`).
    """
    out = dict(tree)
    for name, change in changes.items():
        old = out.get(name)
        if change is UNSET:
            unset(out, name)
        elif isinstance(change, Mapping):
            old = {"name": old} if isinstance(old, str) and name not in VALUES else old
            renamed = isinstance(old, Mapping) and "name" in change and old.get("name") != change["name"]
            out[name] = merge(old if isinstance(old, Mapping) and not renamed else {}, change)
        elif isinstance(change, str) and isinstance(old, Mapping) and "name" in old:
            out[name] = old if old["name"] == change else {"name": change}
        else:
            out[name] = change
    return out


def unset(table: dict[str, Any], name: str) -> None:
    """Take a field out of a table; a ConfigError if it is not there."""
    if name not in table:
        raise ConfigError(f"--set {name}= takes a field out of the file, and the file does not set it"
                          f"{nearest(name, table)}")  # fmt: skip
    del table[name]


def parse_set(items: list[str]) -> dict[str, Any]:
    """Parse the `NAME=VALUE` pairs of `--set`; values are TOML, plain words are texts, and `NAME=` unsets a field."""
    out: dict[str, Any] = {}
    for item in items:
        name, equals, text = item.partition("=")
        if not equals or not name:
            raise ConfigError(f"--set takes NAME=VALUE, as in --set algorithm.local.lr=0.05; got {item!r}")
        if not text.strip():
            out[name.strip()] = UNSET
            continue
        try:
            out[name.strip()] = tomllib.loads(f"v = {text}")["v"]
        except tomllib.TOMLDecodeError:
            out[name.strip()] = text
    return out
