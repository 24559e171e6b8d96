"""The gateway to a party's samples: an op reaches them only through this object, and names its purpose."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from hansa.holdings.stored_rows import Features, StoredRows, column_of, whole
from hansa.holdings.table_layout import TableLayout
from hansa.plumbing import codec
from hansa.plumbing.errors import NotAdmitted, PartyError

Samples = tuple[Tensor, Tensor]  # features and targets, one row per sample
StoredSamples = tuple[Features, Tensor]  # the same, where features may stay in files until they are read
Ids = np.ndarray[Any, Any]  # texts, one per row
Purpose = Literal["train", "statistics", "match", "evaluate", "describe"]


class TableRows(NamedTuple):
    """Rows of a party: features; targets, None at a party without labels; ids, None where rows are not matched; weights
    in the training loss, None where all are 1."""

    x: Features
    y: Tensor | None
    ids: Ids | None = None
    weights: Tensor | None = None


def encoded(ids: Ids) -> Tensor:
    """Ids as one tensor of bytes, for hashes."""
    return torch.from_numpy(np.frombuffer("\n".join(ids.tolist()).encode(), dtype=np.uint8).copy())


class SampleGateway:
    """A party's training and test samples, and the ids of its rows if it has them.

    `train`, `statistics` and `describe` read training samples: to train a model, to answer with sums or losses, to
    describe the data. `match` reads ids. `evaluate` reads the party's own test samples. `admit` is called before every
    reading. This class admits all of them: it is the gateway of a simulated party. A deployed party has
    `net.party.gateway.OwnerGateway`. `header` has the names of the columns: the target, then the features. `before` has
    the features of the test samples before their preparation, if it changed them. `least` is the fewest samples of a
    group whose metrics the party tells. `kinds` are the kinds of a file's feature columns, where they are not all
    numbers. `table` is the layout of coded rows, which a preparation turns into features. `stated` are the facts that
    a deployed party states about its samples (`hansa.data.statement`).
    """

    least = 0
    stated: Any = None

    def __init__(self, train: StoredSamples | TableRows, test: StoredSamples | TableRows | None = None,
                 header: tuple[str, ...] = (), before: Features | None = None, kinds: tuple[str, ...] = (),
                 table: TableLayout | None = None) -> None:  # fmt: skip
        self._train = TableRows(*train)
        self._test = None if test is None else TableRows(*test)
        self.header, self.kinds, self.table = header, kinds, table
        self._before = before
        self._weighed = False

    @property
    def n(self) -> int:
        """The number of training samples."""
        return len(self._train.x)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of a sample."""
        return tuple(self._train.x.shape[1:])

    @property
    def tests(self) -> int | None:
        """The number of test samples; None if the party has no test set."""
        return None if self._test is None else len(self._test.x)

    @property
    def labelled(self) -> bool:
        """Whether the party has labels. A party that holds other columns of the same people may have none."""
        return self._train.y is not None

    @property
    def identified(self) -> bool:
        """Whether the party's rows have ids."""
        return self._train.ids is not None and (self._test is None or self._test.ids is not None)

    def admit(self, purpose: Purpose) -> None:
        """Raise a PartyError if the samples may not be read for this purpose."""

    def begin_again(self) -> None:
        """Begin an attempt at an ask whose reply depends on messages of other parties: its readings count again."""

    def train(self, purpose: Purpose) -> Samples:
        """The training samples, all in memory; a PartyError if the party has no labels."""
        x, y = self.rows(purpose)
        return whole(x), y

    def rows(self, purpose: Purpose) -> StoredSamples:
        """As `train`, for ops that read batches: features that stay in files are read when they are indexed."""
        return self._read(self._train, purpose)

    @property
    def weights(self) -> Tensor | None:
        """The weights of the training samples in the loss; None if they have none."""
        return self._train.weights

    def weigh(self, factors: Tensor) -> None:
        """Multiply the weights of the training samples; a PartyError if they were multiplied before."""
        if self._weighed:
            raise PartyError("the classes of its samples have weights already")
        own = self._train.weights
        self._train, self._weighed = self._train._replace(weights=factors if own is None else own * factors), True

    def features(self, purpose: Purpose) -> Features:
        """The features of the training samples, also at a party without labels; they may stay in files."""
        self.admit(purpose)
        return self._train.x

    def ids(self, purpose: Purpose) -> Ids:
        """The ids of the training rows, as texts; a PartyError if the rows have none."""
        return self._read_ids(self._train, purpose)

    def test(self, purpose: Purpose) -> Samples:
        """The test samples, all in memory; a PartyError if there are none, or no labels."""
        x, y = self.test_rows(purpose)
        return whole(x), y

    def test_rows(self, purpose: Purpose) -> StoredSamples:
        """As `test`; features that stay in files are read when they are indexed."""
        return self._read(self._tests(), purpose)

    def test_features(self, purpose: Purpose) -> Features:
        """The features of the test samples, also at a party without labels; a PartyError if there are none."""
        rows = self._tests()
        self.admit(purpose)
        return rows.x

    def test_column(self, column: str | int) -> Tensor:
        """A column of the test samples before their preparation, to evaluate by groups; a PartyError if it is unknown.

        `column` is a name of the header, or the number of a feature from 0.
        """
        rows = self._tests()
        self.admit("evaluate")
        x = rows.x if self._before is None else self._before
        names = self.header[1:]
        at = column if isinstance(column, int) else names.index(column) if column in names else -1
        if x.dim() != 2 or not 0 <= at < x.shape[1]:
            raise PartyError(f"its samples have no column {column!r} to group them by")
        return column_of(x, at)

    def test_ids(self, purpose: Purpose) -> Ids:
        """The ids of the test rows, as texts; none if the party has no test rows."""
        return self._read_ids(self._test, purpose) if self._test is not None else np.empty(0, dtype=np.str_)

    def _tests(self) -> TableRows:
        if self._test is None or not len(self._test.x):
            raise PartyError("it has no test samples")
        return self._test

    def _read(self, rows: TableRows, purpose: Purpose) -> StoredSamples:
        if rows.y is None:
            raise PartyError("it has no labels, and this ask needs them")
        self.admit(purpose)
        return rows.x, rows.y

    def _read_ids(self, rows: TableRows, purpose: Purpose) -> Ids:
        if rows.ids is None:
            raise PartyError("its rows have no ids, and this ask matches rows by their ids")
        self.admit(purpose)
        return rows.ids

    def transform(self, function: Callable[[Tensor], Tensor], width: int | None = None) -> None:
        """Replace the features of all samples by transformed ones (a preparation of the data).

        With `width` a sample has that many features afterwards. A PartyError if the function changes the shape of a
        sample in another way: with numbers for each row, the sender of the preparation could pick out single samples.
        Infinite results become the largest finite number of their type.
        """
        function = _finite_after(function)
        sample = self._train.x[:1]
        if function(sample).shape != (sample.shape if width is None else (len(sample), width)):
            raise NotAdmitted("the preparation has numbers of another shape than its samples have")
        self._train = _transformed(self._train, function)
        if self._test is not None:
            if width is None:  # of a table, groups are by its features
                self._before = self._test.x if self._before is None else self._before
            self._test = _transformed(self._test, function)

    def stand_in(self, classes: int | None) -> SampleGateway:
        """A gateway to one made-up row with the shapes and types of this party's rows: zeros, and the last class.

        An op that fails on this row fails because of its request and of public facts. Without a number of classes, the
        target is the largest whole number of its type.
        """
        x, y, ids, weights = self._train
        made = None if y is None else torch.zeros((1, *y.shape[1:]), dtype=y.dtype, device=y.device)
        if made is not None and not made.is_floating_point():
            most = 1 if made.dtype == torch.bool else torch.iinfo(made.dtype).max
            made.fill_(most if classes is None else min(max(classes - 1, 0), most))
        row = TableRows(
            torch.zeros((1, *x.shape[1:]), dtype=x.dtype, device=x.device),
            made,
            None if ids is None else np.array(["a"]),
            None if weights is None else torch.ones(1, dtype=weights.dtype, device=weights.device),
        )
        out = SampleGateway(row, None if self._test is None else row, self.header, table=self.table)
        out._weighed = self._weighed
        return out

    def copy(self) -> SampleGateway:
        """A gateway to copies of the same samples, so that the originals of all parties can be freed."""
        train, test = (
            rows and TableRows(rows.x.clone(), None if rows.y is None else rows.y.clone(), rows.ids, rows.weights)
            for rows in (self._train, self._test)
        )
        assert train is not None
        before = None if self._before is None else self._before.clone()
        out = SampleGateway(train, test, self.header, before, self.kinds, self.table)
        out.stated = self.stated
        return out

    def digest(self) -> str:
        """A hash of the samples, which never leaves the party."""
        tree = _hashed(self._train)
        if self._test is not None:
            tree["test"] = _hashed(self._test)
        if self._before is not None:
            tree["before"] = _content(self._before)
        return codec.digest(tree)


def _hashed(rows: TableRows) -> dict[str, Any]:
    """Rows as a tree whose digest is that of their content."""
    x, y, ids, weights = rows
    tree = {"x": _content(x), "y": y, "weights": weights, "ids": None if ids is None else encoded(ids)}
    return {name: value for name, value in tree.items() if value is not None}


def _content(x: Features) -> Any:
    return x.digest() if isinstance(x, StoredRows) else x


def _finite_after(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """The function, with the largest finite number in place of infinite results. NaN stays: a value may be missing."""

    def changed(x: Tensor) -> Tensor:
        out = function(x)
        return out.nan_to_num(torch.nan) if out.is_floating_point() else out

    return changed


def _transformed(rows: TableRows, function: Callable[[Tensor], Tensor]) -> TableRows:
    """Rows with transformed features; those in files are transformed when they are read."""
    return rows._replace(x=function(rows.x) if isinstance(rows.x, Tensor) else rows.x.then(function))
