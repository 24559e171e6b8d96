"""A task: the model, the loss, and the samples of the parties and of the aggregator."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from hansa.core.party_models import PartyModels, task_models, turn_of
from hansa.core.registry import Part
from hansa.holdings.augment import Augment, check_augment
from hansa.holdings.fitting import (
    check_outputs,
    check_pair,
    fit_samples,
    join_features,
    join_targets,
    kept_features,
    output_of,
    tensor_of,
)
from hansa.holdings.gateway import SampleGateway, TableRows
from hansa.holdings.labels import Labels, check_numbering
from hansa.holdings.public import PublicSamples, split_public
from hansa.holdings.stored_rows import Features, blocks, is_dataset, read_dataset
from hansa.holdings.table_layout import TableLayout
from hansa.numerics.losses import Loss
from hansa.numerics.objective import Objective
from hansa.numerics.weights import Weighting, sample_weights
from hansa.plumbing.errors import ConfigError, DataError, nearest

if TYPE_CHECKING:
    from hansa.core.columns import ColumnLayout

Pair = tuple[Any, Any]
FEW = 1000  # up to this many parties, class numbers are checked for each party


@dataclass(repr=False)
class Task:
    """What the parties learn together.

    `model` is a function that returns a `torch.nn.Module`, or None for methods that bring their own model. `loss` is a
    name, or a function of (output, target) that gives one value per sample. `parties` is a list of (x, y), arrays or
    tensors of any sizes; or, for very many parties, one (x, y, offsets): party k holds rows offsets[k] to
    offsets[k + 1]. `test` is the central test set. `party_tests` are the parties' own test sets, in the form of
    `parties`. `prepare` is a preparation of the features (imputation, scaling), learned by the parties before the first
    round. `trusted` are clean samples (x, y) at the aggregator, for fusions that judge updates with them. `ids` says
    that the parties hold different columns of the same people: one array per party, of whole numbers or texts, one id
    per row. Then y is None for a party without labels, and `test_ids` are the ids of `party_tests`. `header` has the
    names of the columns, where samples are rows of a table: the target, then the features; a saved model keeps them,
    and metrics may group samples by them.

    A party's samples may be larger than memory: x may be a memory-mapped array, and instead of (x, y) a party may have
    a map-style data set such as a `torch.utils.data.Dataset`, with items (x, y). `augment` is a function of (sample,
    key) that changes the samples of training batches.

    `models` are several models by name instead of one, for algorithms whose parties may train different architectures.
    `assigned` says which party trains which: a list of names that the parties take in turn, or the model of every party
    by the party's name; by default the parties take all models in turn. `public` are samples that every party sees: x,
    or (x, y). `pooled` puts the training samples of all parties in one place, for comparison: the first party trains on
    all of them, and every party is measured on its own test samples. `table` says that x are coded rows of a table
    (`hansa.data.Table.coded`), which `prepare` turns into features; with frames as x, it is made from them.

    `weights` are the weights of the training samples in the loss: one array per party, or one array for (x, y,
    offsets). `class_weight` gives each class a weight: "balanced" (from the class counts of all parties, as
    scikit-learn's), a list, or a mapping. Both multiply; test metrics are not weighted.
    """

    model: Callable[[], nn.Module] | None = None
    loss: str | Loss = "cross_entropy"
    parties: Sequence[Pair] | tuple[Any, Any, Any] = ()
    test: Pair | None = None
    party_tests: Sequence[Pair] | tuple[Any, Any, Any] | None = None
    names: Sequence[str] | None = None
    classes: int | None = None
    prepare: Part | None = None
    trusted: Pair | None = None
    models: Mapping[str, Callable[[], nn.Module]] | None = None
    assigned: Sequence[str] | Mapping[str, str] | None = None
    public: Any = None
    ids: Sequence[Any] | None = None
    test_ids: Sequence[Any] | None = None
    header: Sequence[str] = ()
    pooled: bool = False
    table: TableLayout | None = None
    weights: Any = None
    class_weight: str | Sequence[float] | Mapping[int, float] | None = None
    augment: Augment | None = None

    def __repr__(self) -> str:
        """The task without its samples."""
        data = self.parties
        joined = isinstance(data, tuple) and len(data) == 3 and not isinstance(data[0], (tuple, list))
        count = len(data[2]) - 1 if joined else len(data)
        loss = self.loss if isinstance(self.loss, str) else getattr(self.loss, "__name__", type(self.loss).__name__)
        model = getattr(self.model, "__name__", None if self.model is None else type(self.model).__name__)
        out = [f"model={model}", f"loss={loss}", f"{count} parties", f"test={_count(self.test)}"]
        if self.classes is not None:
            out.append(f"classes={self.classes}")
        if self.prepare is not None:
            out.append(f"prepare={getattr(self.prepare, 'name', self.prepare)}")
        if self.trusted is not None:
            out.append(f"trusted={_count(self.trusted)}")
        if self.models is not None:
            out.append(f"models={', '.join(self.models)}")
        if self.public is not None:
            out.append("public samples")
        if self.ids is not None:
            out.append("different columns of the same people")
        if self.pooled:
            out.append("all training samples in one place")
        return f"Task({', '.join(out)})"

    def holdings(self, objective: Objective) -> Holdings:
        """The task's samples as tensors that fit the objective, and the parties' models where there are several."""
        if self.ids is not None:
            from hansa.core.columns import ColumnHoldings

            return ColumnHoldings(self, objective)
        if self.test_ids is not None:
            raise DataError("test_ids: only parties with different columns have them; give ids too, or leave them out")
        models = task_models(self, objective)
        holdings = Holdings(self, next(iter(models.values()), objective))
        if models:
            holdings.let_train(models, self.assigned)
            for one in models.values():
                one.weighting = Weighting.of(holdings.train.y) if self.weights is not None else None
        return holdings


def _count(pair: Pair | None) -> str:
    try:
        return "none" if pair is None else f"{len(pair[0])} samples"
    except (TypeError, IndexError):  # not a pair: a run refuses it
        return "?"


class PartyShards:
    """The samples of all parties: party k has rows offsets[k] to offsets[k + 1].

    The features `x` are one tensor, or `StoredRows` if those of some party stay in files.
    """

    x: Features
    y: Tensor

    weights: Tensor | None = None  # of the samples in the training loss; None: all are 1
    _joined: tuple[Tensor, Tensor, int, Tensor] | None = None

    def __init__(self, data: Sequence[Pair] | tuple[Any, Any, Any], objective: Objective, where: str,
                 prepared: bool = False, names: Sequence[str] | None = None) -> None:  # fmt: skip
        if isinstance(data, tuple) and len(data) == 3:
            x, y = kept_features(data[0], f"{where} x"), tensor_of(data[1], f"{where} y")
            offsets = np.asarray(data[2], dtype=np.int64)
            if offsets.ndim != 1 or len(offsets) < 2 or offsets[0] != 0 or (np.diff(offsets) < 0).any():
                raise DataError(f"{where}: offsets must rise from 0, one more than there are parties")
            if offsets[-1] != len(x):
                raise DataError(f"{where}: the last offset is {offsets[-1]}, but there are {len(x)} samples")
            check_pair(x, y, where)
        else:
            if not isinstance(data, Sequence) or len(data) == 0:
                raise DataError(f"{where}: give a list of (x, y), one per party, or one (x, y, offsets)")
            xs, ys = list[Features](), list[Tensor]()
            for k, pair in enumerate(data):
                if is_dataset(pair):
                    pair = read_dataset(pair, where if len(data) == 1 else f"{where}[{k}]")
                if not isinstance(pair, (tuple, list)) or len(pair) != 2:
                    raise DataError(f"{where}[{k}]: expected a pair (x, y), or a data set of pairs")
                xs.append(kept_features(pair[0], f"{where}[{k}] x"))
                ys.append(tensor_of(pair[1], f"{where}[{k}] y"))
                check_pair(xs[-1], ys[-1], f"{where}[{k}]")
            x, y = join_features(xs, f"{where} x"), join_targets(ys, f"{where} y")
            offsets = np.concatenate([[0], np.cumsum([len(v) for v in xs])]).astype(np.int64)
        self.offsets = offsets

        def owner(row: int) -> str:
            party = int(np.searchsorted(offsets, row, side="right")) - 1
            if len(offsets) == 2:  # a deployed party: the aggregator must not learn the row
                return ""
            return f" of party {names[party] if names is not None else str(party)!r} (row {row - int(offsets[party])})"

        self.x, self.y = fit_samples(x, y, objective, where, prepared, owner)
        self.before: Features | None = None  # the features before their preparation, of test samples

    @property
    def targets(self) -> Tensor:
        """The targets as training takes them: with the samples' weights, if they have any."""
        if self.weights is None:
            return self.y
        known = self._joined
        if known is None or known[0] is not self.weights or known[1] is not self.y or known[2] != self.y._version:
            joined = Weighting.of(self.y).join(self.y, self.weights)
            self._joined = known = self.weights, self.y, self.y._version, joined
        return known[3]

    def weigh(self, weights: Any, where: str) -> None:
        """Give the samples weights: one array per party, or one for all rows."""
        if isinstance(weights, (list, tuple)) and not (weights and isinstance(weights[0], (int, float))):
            if len(weights) != len(self):
                raise DataError(f"{where}: {len(weights)} arrays of weights for {len(self)} parties")
            parts = [sample_weights(own, self.size(k), f"{where}[{k}]") for k, own in enumerate(weights)]
            self.weights = torch.cat(parts).to(self.x.device)
        else:
            self.weights = sample_weights(weights, len(self.x), where).to(self.x.device)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def size(self, party: int) -> int:
        """The number of samples of a party."""
        return int(self.offsets[party + 1] - self.offsets[party])

    def sizes(self, parties: Sequence[int] | np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """The numbers of samples of many parties."""
        ids = np.asarray(parties)
        return np.asarray(self.offsets[ids + 1] - self.offsets[ids])

    def of(self, party: int) -> tuple[Features, Tensor]:
        """The samples of a party."""
        return self._part(self.x, party), self.y[self.span(party)]

    def span(self, party: int) -> slice:
        """The rows of a party among those of all."""
        return slice(int(self.offsets[party]), int(self.offsets[party + 1]))

    def _part(self, x: Features, party: int) -> Features:
        rows = self.span(party)
        return x[rows] if isinstance(x, Tensor) else x.span(rows.start, rows.stop)

    def weights_of(self, party: int) -> Tensor | None:
        """The weights of a party's samples in the training loss; None if all are 1."""
        return None if self.weights is None else self.weights[self.span(party)]

    def features_before(self, party: int) -> Features | None:
        """The features of a party's samples before their preparation; None if it changed none."""
        return None if self.before is None else self._part(self.before, party)

    def transform(self, function: Callable[[Tensor], Tensor]) -> None:
        """Replace the features by transformed ones; the function treats each row by itself."""
        self.x = function(self.x) if isinstance(self.x, Tensor) else self.x.then(function)

    def tensors(self) -> Iterable[Tensor]:
        """All tensors of all parties, for a checksum."""
        yield from blocks(self.x)
        yield self.y
        if self.weights is not None:
            yield self.weights


class Known:
    """What an aggregator knows about a task: names of the parties, sample shape, classes, its own samples.

    `tests` is not None if parties have their own test samples, and `tested` lists these parties. `test` and `trusted`
    are the samples that no party holds.
    """

    tests: Any = None
    tested: Sequence[int] = ()
    layout: ColumnLayout | None = None  # who holds what, if the parties hold different columns
    empty: frozenset[int] = frozenset()  # parties without samples, in a simulation
    counted = False  # whether the number of classes was counted in the parties' targets, not declared
    models: PartyModels | None = None  # where the parties train several models
    table: TableLayout | None = None  # of coded rows, before a preparation makes features of them
    public: PublicSamples | None = None
    columns: tuple[str, ...] = ()  # the names of the features, if they are known
    pooled = False  # whether the first party holds the training samples of all
    augment: Augment | None = None  # the task's augmentation of training samples

    def __init__(self, count: int, names: Sequence[str] | None, shape: tuple[int, ...], classes: int | None) -> None:
        self._count, self.shape, self.classes = count, shape, classes
        self._names = list(names) if names is not None else None  # no default names: a million strings take 60 MB
        self.test: tuple[Tensor, Tensor] | None = None
        self.trusted: tuple[Tensor, Tensor] | None = None
        if self._names is not None and len(self._names) != count:
            raise DataError(f"names: {len(self._names)} names for {count} parties")
        if self._names is not None and len(set(self._names)) != len(self._names):
            twice = next(name for name in self._names if self._names.count(name) > 1)
            raise DataError(f"names: two parties are called {twice!r}")

    def hold(self, task: Task, objective: Objective) -> None:
        """Convert the samples that no party holds to tensors that fit the objective."""
        prepared = task.prepare is not None
        self.test = self._central(task.test, objective, "test", prepared)
        self.trusted = self._central(task.trusted, objective, "trusted", prepared)
        self.columns = self._named_columns(task.header)
        if task.public is not None:
            self.public = self.publish(*split_public(task.public), objective, prepared)

    def _named_columns(self, header: Sequence[str]) -> tuple[str, ...]:
        names = tuple(map(str, header[1:]))
        if names and (len(self.shape) != 1 or len(names) != self.shape[0] or len(set(names)) < len(names)):
            raise DataError(
                f"header: expected names of the target and of each feature, and a sample has the shape {self.shape}"
            )
        return names

    def publish(self, x: Any, y: Any, objective: Objective, prepared: bool) -> PublicSamples:
        """Public samples as tensors that fit the objective; a DataError if they are not like the parties' samples."""
        x = tensor_of(x, "public x")
        if x.dim() == 0 or len(x) == 0:
            raise DataError("public: there is no sample; give at least one, or leave public out")
        if y is not None:
            return PublicSamples(*self._central((x, y), objective, "public", prepared))  # type: ignore[misc]
        x, _ = self._central((x, torch.zeros(len(x))), objective.with_loss("mse"), "public", prepared)  # type: ignore[misc]
        return PublicSamples(x)

    def let_train(self, models: Mapping[str, Objective],
                  assigned: Sequence[str] | Mapping[str, str] | None = None) -> None:  # fmt: skip
        """Let the parties train several models; a DataError if one of the models does not take the samples."""
        self.models = PartyModels(models, turn_of(models, assigned, len(self), self.find))
        for name, objective in models.items():
            samples = [torch.zeros(1, *self.shape, dtype=dtype, device=objective.device)
                       for dtype in (objective.dtype, torch.int64)]  # fmt: skip
            taken = next((x for x in samples if output_of(objective.network(), x) is not None), None)
            if taken is None:
                raise DataError(f"models: {name!r} does not take samples of the shape {self.shape}")
            try:
                check_outputs(objective, taken, self.classes)
            except DataError as error:
                raise DataError(f"models: {name!r}: {error}") from None

    def _central(self, pair: Pair | None, objective: Objective, where: str,
                 prepared: bool) -> tuple[Tensor, Tensor] | None:  # fmt: skip
        if pair is None:
            return None
        if not isinstance(pair, (tuple, list)) or len(pair) != 2:
            raise DataError(f"{where}: expected a pair (x, y)")
        x, y = tensor_of(pair[0], f"{where} x"), tensor_of(pair[1], f"{where} y")
        check_pair(x, y, where)
        if tuple(x.shape[1:]) != self.shape:
            raise DataError(f"{where}: samples are {tuple(x.shape[1:])}, the parties' {self.shape}")
        x, y = fit_samples(x, y, objective, where, prepared)
        hint = "; if no party holds some class, say how many there are: Task(classes=...)" if self.counted else ""
        self.check_targets(y, f"{where}: ", hint)
        return x, y

    def check_targets(self, y: Tensor, where: str, hint: str = "", tell: bool = True) -> None:
        """Raise a DataError for invalid class numbers; with `tell`, the message has the party's numbers."""
        if self.classes is not None and not y.is_floating_point() and y.numel():
            low, high = int(y.min()), int(y.max())
            if low < 0 or high >= self.classes:
                hint = "; number the classes from 0" if low == 1 and high == self.classes else hint
                problem = f"got {low}..{high}{hint}" if tell else "and some do not"
                raise DataError(f"{where}targets must lie in 0..{self.classes - 1}, {problem}")

    def __len__(self) -> int:
        return self._count

    @property
    def names(self) -> Sequence[str] | None:
        """The names of the parties; None if they are called by their numbers."""
        return self._names

    def name(self, party: int) -> str:
        """The name of a party; without names, its number."""
        return str(party) if self._names is None else self._names[party]

    @functools.cached_property
    def _numbers(self) -> dict[str, int]:
        return {self.name(party): party for party in range(len(self))}

    def find(self, name: str, where: str) -> int:
        """The party of that name or number; `where` is the setting that names it, for the error message."""
        party = self._numbers.get(name, int(name) if name.isdecimal() else -1)
        if not 0 <= party < len(self):
            raise ConfigError(f"{where}: there is no party {name!r}{nearest(name, self._numbers)}")
        return party


class Holdings(Known):
    """All samples of a simulated task: training and test samples of the parties, and the central samples."""

    def __init__(self, task: Task, objective: Objective) -> None:
        prepared, tests = task.prepare is not None, task.party_tests
        self.table = task.table
        self.train = PartyShards(task.parties, objective, "parties", prepared, task.names)
        self.tests = PartyShards(tests, objective, "party_tests", prepared, task.names) if tests is not None else None
        if self.tests is not None and len(self.tests) != len(self.train):
            raise DataError(f"party_tests: {len(self.tests)} test sets for {len(self.train)} parties")
        if self.tests is not None:
            self.tested = np.flatnonzero(np.diff(self.tests.offsets)).tolist()
        if task.weights is not None:
            self.train.weigh(task.weights, "weights")
            objective.weighting = Weighting.of(self.train.y)
        self.pooled = task.pooled
        if task.pooled:
            self.train.offsets[1:] = self.train.offsets[-1]
        self.empty = frozenset(np.flatnonzero(np.diff(self.train.offsets) == 0).tolist())
        if self.train.offsets[-1] == 0:
            raise DataError("parties: none of them has a sample")
        y = self.train.y
        integers = not y.is_floating_point() and y.numel() > 0
        classes = task.classes if task.classes is not None else (int(y.max()) + 1 if integers else None)
        super().__init__(len(self.train), task.names, tuple(self.train.x.shape[1:]), classes)
        self.counted = task.classes is None
        self.check_targets(y, "parties: ")
        if objective.loss == "cross_entropy" and self.counted:
            offsets = self.train.offsets if len(self) <= FEW else self.train.offsets[[0, -1]]
            pieces = [y[int(first) : int(last)] for first, last in itertools.pairwise(offsets)]
            check_numbering({self.name(k): Labels.of(piece) for k, piece in enumerate(pieces) if len(piece)})
        self.hold(task, objective)
        check_outputs(objective, self.train.x[:1], classes)
        if task.augment is not None:
            check_augment(task.augment, self.train.x[:1])
            self.augment = task.augment

    def gateway(self, party: int) -> SampleGateway:
        """The gateway to the samples of a simulated party."""
        header = ("", *self.columns) if self.columns else ()
        x, y = self.train.of(party)
        rows = TableRows(x, y, None, self.train.weights_of(party))
        if self.tests is None:
            return SampleGateway(rows, None, header, table=self.table)
        before = self.tests.features_before(party)
        return SampleGateway(rows, self.tests.of(party), header, before, table=self.table)

    def weigh(self, objectives: Iterable[Objective], factors: Tensor) -> None:
        """Multiply the weights of all training samples, and let these objectives train with them."""
        train = self.train
        train.weights = factors if train.weights is None else train.weights * factors
        for objective in objectives:
            objective.weighting = Weighting.of(train.y)
