"""Make the task of an experiment: load the data, divide them among the parties, make the model."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from hansa.core.plain_data import from_config
from hansa.core.registry import Part, own_function
from hansa.core.task import Pair, Task
from hansa.data.cells import MISSING
from hansa.data.column_transformer import ColumnTransformer
from hansa.data.dataset import Data, Dataset
from hansa.data.partition import Iid, Natural, Partition
from hansa.data.party_files import Header, aligned, split_column
from hansa.data.party_folders import party_paths, read_party
from hansa.data.table import Table
from hansa.data.table_files import read_table_samples, split_weights
from hansa.data.table_tasks import code_all
from hansa.holdings.augment import Augment
from hansa.holdings.fitting import tensor_of
from hansa.holdings.labels import Labels, check_numbering
from hansa.holdings.public import split_public
from hansa.holdings.stored_rows import StoredRows, whole
from hansa.holdings.table_layout import TableLayout
from hansa.numerics import rng
from hansa.plumbing.errors import ConfigError, DataError, HansaError
from hansa.plumbing.functions import double, is_function, load_function, searching

if TYPE_CHECKING:
    from hansa.experiment.config import Experiment, TaskTable

NUMERIC_LOSSES = ("mse", "mae", "bce")  # losses of targets that are numbers, not classes


def make_task(experiment: Experiment, data: Data | None = None) -> Task:
    """The task of an experiment; `data` replaces its data set, which is loaded otherwise."""
    table, seed = experiment.task, experiment.run.seed
    made = _from_files(experiment) if table.parties else _from_dataset(experiment, data)
    pairs, weights, party_tests = made.pairs, made.weights, None
    if table.party_test > 0:
        pairs, party_tests = hold_out(pairs, table.party_test, seed)
        if weights is not None:
            weights = [own for own, _ in hold_out([(own, own) for own in weights], table.party_test, seed)[0]]
    shape = next((tuple(x.shape[1:]) for x, _ in pairs if len(x)), ())
    outputs = outputs_of(made.loss, made.classes)
    model = make_model(table.model, table.dtype, experiment.folder, shape, outputs)
    return Task(model, made.loss, pairs, made.test, party_tests, made.names, made.classes, table.prepare, made.trusted,
                make_models(table, experiment.folder, shape, outputs), table.assigned, made.public, weights=weights,
                class_weight=table.class_weight, header=made.header, pooled=table.pooled, table=made.table,
                augment=make_augment(table.augment, experiment.folder))  # fmt: skip


@dataclasses.dataclass(frozen=True)
class TaskData:
    """The samples of a task: one pair per party, and the aggregator's own."""

    pairs: list[Pair]
    names: list[str] | None
    test: Pair | None
    trusted: Pair | None
    loss: str
    classes: int | None
    public: Any = None
    header: Header = ()
    table: TableLayout | None = None
    weights: list[Any] | None = None


def _from_tables(experiment: Experiment, prepare: ColumnTransformer) -> TaskData:
    """The samples of an experiment with one table per party."""
    table = experiment.task
    weights: list[Any] | None = None if table.sample_weight is None else []
    tables, names = read_tables(experiment, table.parties, weights), file_names(table.parties)
    own = [(kind, str(name)) for kind, name in (("test", table.test), ("trusted", table.trusted)) if name is not None]
    if isinstance(table.public, str) and is_function(table.public):
        raise ConfigError("task.public: with prepare = 'table' it is a file, or a number of samples of the data set")
    own += [("public", str(table.public))] if table.public is not None else []
    central = read_tables(experiment, [name for _, name in own])
    pairs, layout = code_files([*tables, *central], prepare)
    targets = [y for _, y in pairs[: len(tables)]]
    counted = len(table.labels) or table.classes or _classes(table, table.parties, targets)
    loss, classes = loss_and_classes(table.loss, counted)
    if loss == "cross_entropy" and not table.classes and not table.labels:
        check_numbering({name: Labels.of(y) for name, y in zip(names, targets, strict=True)})
    kinds = dict(zip((kind for kind, _ in own), pairs[len(tables) :], strict=True))
    header = (table.target or "", *(name for name, _ in layout.columns))
    return TaskData(pairs[: len(tables)], names, kinds.get("test"), kinds.get("trusted"), loss, classes,
                    kinds.get("public"), header, layout, weights)  # fmt: skip


def check_weighed(file: str, column: str | None, weights: Any) -> None:
    """Raise a DataError for a party's file without the column of its weights."""
    if weights is None:
        raise DataError(f"{file} has no column {column!r} (task.sample_weight)")


def code_files(files: Sequence[tuple[str, Table, Any]],
               prepare: ColumnTransformer) -> tuple[list[Pair], TableLayout]:  # fmt: skip
    """The coded rows and targets of files, each with its place; a file may be listed twice."""
    by_place = {place: features for place, features, _ in files}
    rows, layout = code_all(by_place, prepare)
    coded = dict(zip(by_place, rows, strict=True))
    return [(coded[place], y) for place, _, y in files], layout


def read_tables(experiment: Experiment, files: Sequence[str],
                weights: list[Any] | None = None) -> list[tuple[str, Table, Any]]:  # fmt: skip
    """The place, features and targets of each file; `weights` gets the samples' weights, which are no feature."""
    table, out = experiment.task, []
    for name in files:
        path = Path(experiment.folder) / name
        features, y, _ = read_table_samples(path, table.target, table.labels)
        features, own = split_weights(features, table.sample_weight, str(path))
        if weights is not None:
            check_weighed(name, table.sample_weight, own)
            weights.append(own)
        out.append((str(path), features, y))
    return out


def _from_files(experiment: Experiment) -> TaskData:
    """The samples of an experiment with one file per party."""
    table, folder = experiment.task, experiment.folder
    if isinstance(table.prepare, ColumnTransformer):
        return _from_tables(experiment, table.prepare)
    files = [str(path.relative_to(folder) if path.is_relative_to(folder) else path)
             for name in table.parties for path in party_paths(Path(folder) / name)]  # fmt: skip
    weights: list[Any] | None = None if table.sample_weight is None else []
    pairs, header = read_files(folder, files, table.target, (), table.sample_weight, weights)
    test, trusted = (
        read_files(folder, (str(name),), table.target, header, table.sample_weight)[0][0] if name is not None else None
        for name in (table.test, table.trusted)
    )
    names = file_names(files)
    for name, own in zip(files, weights or (), strict=False):
        check_weighed(name, table.sample_weight, own)
    loss, classes = loss_and_classes(table.loss, table.classes or _classes(table, files, [y for _, y in pairs]))
    if loss == "cross_entropy" and table.classes is None:
        check_numbering({name: Labels.of(y) for name, (_, y) in zip(names, pairs, strict=True)})
    return TaskData(pairs, names, test, trusted, loss, classes, public_samples(experiment, header), header,
                    weights=weights)  # fmt: skip


def _from_dataset(experiment: Experiment, data: Data | None) -> TaskData:
    """The samples of an experiment with a data set, divided among the parties."""
    table, trusted = experiment.task, None
    data = load_data(experiment) if data is None else data
    if data.table is not None and isinstance(table.prepare, ColumnTransformer) and table.prepare.missing != MISSING:
        raise ConfigError(
            "task.prepare.missing: the data set has read its table with the usual words for a missing value; leave it "
            "out, or give the table as files (task.parties)"
        )
    if isinstance(table.trusted, int):
        data, trusted = set_aside(data, table.trusted, experiment.run.seed, "trusted")
    public = public_samples(experiment)
    if isinstance(table.public, int):
        data, public = set_aside(data, table.public, experiment.run.seed, "public")
    pairs, names = divide(data, experiment)
    weights = None if data.weights is None else _divided(data, torch.as_tensor(data.weights), experiment)
    return TaskData(pairs, names, data.test, trusted, table.loss or data.loss, data.classes, public, data.header,
                    data.table, weights)  # fmt: skip


def public_samples(experiment: Experiment, header: Header = ()) -> Any:
    """The public samples of a file or of a function: x, or (x, y); None if the experiment names neither."""
    public = experiment.task.public
    if not isinstance(public, str):
        return None
    function = own_function(public, "task.public", experiment.folder) if is_function(public) else None
    if function is not None:
        x, y = split_public(_called(function, public, "task.public"))
        x = tensor_of(x, "public x")
        return x if y is None else (x, tensor_of(y, "public y"))
    table = experiment.task
    x, y = read_files(experiment.folder, (public,), table.target, header, table.sample_weight)[0][0]
    return whole(x), y


def _called(function: Callable[[], Any], setting: Any, where: str) -> Any:
    """What a function of the user returns; `setting` names it."""
    try:
        return function()
    except HansaError:
        raise
    except Exception as error:  # the user's own function: quote its error
        raise ConfigError(f"{where}: {setting!r} failed: {type(error).__name__}: {error}") from error


def read_files(folder: str, files: Sequence[str], target: str | None, header: Header = (), column: str | None = None,
               found: list[Any] | None = None) -> tuple[list[Pair], Header]:  # fmt: skip
    """Samples of files with their columns in the order of `header` (by default the first file's), and the header.

    `column` names a column that is no feature; each file's is added to `found`.
    """
    pairs = []
    for name in files:
        x, y, own = read_party(Path(folder) / name, target)
        if column is not None:
            x, own, values = split_column(whole(x), own, column, Path(folder) / name)
            if found is not None:
                found.append(values)
        pairs.append((aligned(x, own, header, f"{Path(folder) / name}: "), y))
        header = header or own
    return pairs, header


def aggregator_samples(own: Mapping[str, Any], kind: str, header: Header) -> Pair | None:
    """The aggregator's own samples of a kind, if any, with their columns in the order of the parties' header."""
    if own.get(kind) is None:
        return None
    x, y = split_public(own[kind])
    return aligned(x, tuple(own.get("header", ())), header, f"the aggregator's {kind} samples: "), y


def _classes(table: TaskTable, files: Sequence[str], targets: Sequence[Any]) -> int:
    """The number of classes in the files; 0 if their targets are real numbers."""
    whole = {name: not y.is_floating_point() for name, y in zip(files, targets, strict=True)}
    if table.loss is None and len(set(whole.values())) > 1:
        names = [next(name for name, is_whole in whole.items() if is_whole == kind) for kind in (True, False)]
        raise DataError(
            f"the targets of {names[0]} are whole numbers and those of {names[1]} are not; set task.loss to "
            "'cross_entropy' for classes, or to 'mse' for numbers"
        )
    return max(int(y.max()) for y in targets) + 1 if all(whole.values()) else 0


def loss_and_classes(loss: str | None, classes: int) -> tuple[str, int | None]:
    """Loss and number of classes, from the loss that is set, if any, and the classes in the data (0: real numbers)."""
    classifies = classes > 0 and loss not in NUMERIC_LOSSES
    return loss or ("cross_entropy" if classifies else "mse"), classes if classifies else None


def outputs_of(loss: str, classes: int | None) -> int:
    """How many numbers a model outputs per sample."""
    return 1 if loss in NUMERIC_LOSSES else (classes or 1)


def file_names(files: Sequence[str]) -> list[str]:
    """The names of parties with one file each: those of the files, or their paths if two have the same name."""
    names = [Path(name).name.split(".")[0] for name in files]
    return names if len(set(names)) == len(files) else list(files)  # a/data.csv and b/data.csv


def load_data(experiment: Experiment) -> Data:
    """Load the data set of an experiment."""
    table = experiment.task
    function = own_function(table.dataset, "task.dataset", experiment.folder)
    if function is not None:
        data = _called(function, table.dataset, "task.dataset")
        if not isinstance(data, Data):
            raise ConfigError(
                f"task.dataset: {table.dataset!r} must return a hansa.data.Data, got {type(data).__name__}"
            )
        return data
    with searching(experiment.folder):
        dataset: Dataset = from_config("dataset", table.dataset, where="task.dataset")
    return dataset.beside(experiment.folder).load(table.data_dir)


def set_aside(data: Data, count: int, seed: int, purpose: str) -> tuple[Data, Pair]:
    """Take `count` random samples out of a data set, for task.trusted or task.public: the rest, and those samples."""
    n = len(data.x)
    if count >= n:
        raise ConfigError(
            f"task.{purpose}: cannot keep {count} samples of a data set that has {n}; set a smaller number"
        )
    order = rng.generator(seed, purpose).permutation(n)
    trusted, rest = np.sort(order[:count]), np.sort(order[count:])
    parties = None
    if data.parties is not None:
        new_row = np.full(n, -1)
        new_row[rest] = np.arange(len(rest))
        parties = tuple(rows[rows >= 0] for rows in (new_row[old] for old in data.parties))
    at, left = torch.from_numpy(trusted), torch.from_numpy(rest)
    weights = None if data.weights is None else torch.as_tensor(data.weights)[left]
    rest_of = dataclasses.replace(data, x=data.x[left], y=data.y[left], parties=parties, weights=weights)
    return rest_of, (data.x[at], data.y[at])


def _divided(data: Data, values: Tensor, experiment: Experiment) -> list[Tensor]:
    """Numbers of the samples, one per row, divided as the samples are."""
    return [values[rows] for rows in _partition(data, experiment).split(data, experiment.run.seed)]


def _partition(data: Data, experiment: Experiment) -> Partition:
    return experiment.partition or (Natural() if data.parties is not None else Iid())


def divide(data: Data, experiment: Experiment) -> tuple[list[Pair], list[str] | None]:
    """Each party's samples, by the partition or by the data set's own parties, and the parties' names."""
    partition, seed = _partition(data, experiment), experiment.run.seed
    if data.table is not None and partition.changes:
        raise ConfigError(
            f"partition: {partition.name!r} changes numbers, and the samples are rows of a table with texts"
        )
    rows = partition.split(data, seed)
    pairs = [(partition.features(data.x[r], k, seed), data.y[r]) for k, r in enumerate(rows)]
    natural = isinstance(partition, Natural) and data.party_names is not None
    return pairs, list(data.party_names or ()) if natural else None


def hold_out(pairs: list[Pair], share: float, seed: int) -> tuple[list[Pair], list[Pair]]:
    """Split each party's samples into training samples and test samples."""
    both = [hold_out_one(pair, share, seed, party) for party, pair in enumerate(pairs)]
    return [train for train, _ in both], [test for _, test in both]


def hold_out_one(pair: Pair, share: float, seed: int, party: int) -> tuple[Pair, Pair]:
    """Split one party's samples into training samples and test samples."""
    x, y = pair
    order = rng.generator(seed, "holdout", party).permutation(len(x))
    cut = round(share * len(x))
    train, test = (
        (x.select(rows) if isinstance(x, StoredRows) else x[torch.from_numpy(rows)], y[torch.from_numpy(rows)])
        for rows in (np.sort(order[cut:]), np.sort(order[:cut]))
    )
    return train, test


def make_augment(reference: str | None, folder: str) -> Augment | None:
    """The function that augments training samples, if there is one."""
    return None if reference is None else load_function(reference, "task.augment", folder)


def make_models(table: TaskTable, folder: str, shape: tuple[int, ...],
                outputs: int) -> dict[str, Callable[[], nn.Module]] | None:  # fmt: skip
    """The functions that make the models of an experiment with several; None if it has one."""
    if table.models is None:
        return None
    made = {name: make_model(model, table.dtype, folder, shape, outputs, f"task.models.{name}")
            for name, model in table.models.items()}  # fmt: skip
    return {name: factory for name, factory in made.items() if factory is not None}


def make_model(model: str | dict[str, Any] | None, dtype: str, folder: str, shape: tuple[int, ...],
               outputs: int, where: str = "task.model") -> Callable[[], nn.Module] | None:  # fmt: skip
    """The function that makes the model; inputs and outputs that the user leaves out come from the data."""
    if model is None:
        return None
    factory: Callable[[], nn.Module] | None = own_function(model, where, folder)
    if factory is None:
        fields = {"name": model} if isinstance(model, str) else dict(model)
        with searching(folder):
            part: Part = from_config("model", {"inputs": list(shape), "outputs": outputs, **fields}, where=where)
        factory = part  # type: ignore[assignment]
    assert factory is not None
    return functools.partial(double, factory) if dtype == "float64" else factory
