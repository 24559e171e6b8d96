"""Vertical data: parties hold different columns of the same people, whose rows are matched by ids."""

from __future__ import annotations

import hashlib
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from hansa.core.task import Holdings, Known, PartyShards, Task
from hansa.holdings.fitting import ONE_HOT, check_features, fit_targets, looks_one_hot, tensor_of
from hansa.holdings.gateway import Ids, SampleGateway, TableRows, encoded
from hansa.holdings.labels import Labels, check_numbering
from hansa.holdings.stored_rows import whole
from hansa.numerics.objective import Objective
from hansa.plumbing.errors import AlgorithmError, DataError

LONGEST = 256  # characters of an id, at most
REFUSED = {  # fields of a task that parties with different columns cannot have, and why
    "model": "one model needs all columns, and each party holds others; leave it out (the algorithm brings its own)",
    "test": "a central test set would need all columns; give the parties test samples of their own",
    "trusted": "the aggregator's own samples would need all columns; leave them out",
    "models": "a model of the task needs all columns, and each party holds others; leave them out",
    "augment": "an augmentation is for parties with the same columns; leave it out",
    "public": "samples that every party sees would need all columns; leave them out",
    "class_weight": "weights of classes are for parties with the same columns; leave them out",
}


@dataclass(frozen=True)
class ColumnLayout:
    """What the aggregator knows about vertical data: the shape of a sample at each party, and who has labels.

    The shape of a party that does not take part is None.
    """

    shapes: tuple[tuple[int, ...] | None, ...]
    label_holders: tuple[int, ...]


def ids_of(values: Any, rows: int, where: str) -> Ids:
    """The ids of a party's rows as texts; a DataError if one is missing, too long or there twice.

    Whole numbers are written in decimal, so 17 at one party and "17" at another are the same person; so are ids that
    differ in case or white space (`normalised`). No message quotes an id: a deployed party sends it to the aggregator.
    """
    array = values.cpu().numpy() if isinstance(values, Tensor) else np.asarray(values)
    if array.ndim != 1:
        raise DataError(f"{where}: the ids have the shape {array.shape}; give one id per row")
    if len(array) != rows:
        raise DataError(f"{where}: {len(array)} ids for {rows} rows; give one id per row")
    if array.size == 0:
        return np.empty(0, dtype=np.str_)
    entries = array.tolist()
    if array.dtype.kind not in "iuUO" or any(isinstance(v, bool) or not isinstance(v, (int, str)) for v in entries):
        raise DataError(f"{where}: ids must be whole numbers or texts, got {array.dtype}")
    texts = [normalised(str(entry)) for entry in entries]
    if min(map(len, texts)) == 0:
        raise DataError(f"{where}: a row has no id; give every row one")
    if max(map(len, texts)) > LONGEST:
        raise DataError(f"{where}: an id has more than {LONGEST} characters; give shorter ids")
    if len(set(texts)) < len(texts):
        raise DataError(
            f"{where}: two rows have the same id; an id names one row of a party (case and white space do not count)"
        )
    return np.array(texts, dtype=np.str_)


def normalised(text: str) -> str:
    """An id as parties compare it: composed (Unicode NFC), without case, with single spaces, none at the ends.

    Two organisations that type the same name or number get the same text. A half of a surrogate pair is dropped: it is
    no text, and could not be sent or hashed.
    """
    if not text.isascii():
        text = unicodedata.normalize("NFC", text.encode(errors="ignore").decode())
    return " ".join(unicodedata.normalize("NFC", text.casefold()).split())


def id_hash(salt: str, text: str) -> str:
    """The hash by which somebody asks parties about a person; `text` is an id in the form of `normalised`."""
    return hashlib.blake2b(f"{salt} asked {text}".encode(), digest_size=16).hexdigest()


def asked_people(ids: Iterable[Any], salt: str) -> tuple[str, ...]:
    """The hashes of people by their ids, in their order; a DataError if an id is empty or there twice."""
    texts = [normalised(str(each)) for each in ids]
    if not texts:
        raise DataError("there is no id; give the ids of the people to score")
    if "" in texts:
        raise DataError(f"the id number {texts.index('') + 1} is empty; give every person an id")
    if len(set(texts)) < len(texts):
        twice = next(text for text in texts if texts.count(text) > 1)
        raise DataError(f"the id {twice!r} is there twice (case and white space do not count); ask for a person once")
    return tuple(id_hash(salt, text) for text in texts)


def held_out(ids: Ids, share: float, seed: int) -> np.ndarray[Any, Any]:
    """Which rows are test rows. The choice depends on seed and id alone, so all parties hold out the same people."""
    draws = [hashlib.blake2b(f"{seed} {text}".encode(), digest_size=8).digest() for text in ids.tolist()]
    return np.array([int.from_bytes(draw, "little") < share * 2.0**64 for draw in draws], dtype=bool)


class PartyColumns(PartyShards):
    """The samples of parties with different columns: features of any shape, ids, and targets at the label holders.

    They are not joined in one tensor, so the engines that stack parties cannot use them.
    """

    def __init__(self, data: Any, ids: Any, objective: Objective, where: str, prepared: bool = False) -> None:
        ids_where = "ids" if where == "parties" else "test_ids"
        if isinstance(data, tuple) or not isinstance(data, Sequence) or len(data) == 0:
            raise DataError(f"{where}: give a list of (x, y), or (x, None) for a party without labels")
        if not isinstance(ids, Sequence) or len(ids) != len(data):
            count = len(ids) if isinstance(ids, Sequence) else "no list"
            raise DataError(f"{ids_where}: expected one array of ids per party, {len(data)} in all; got {count}")
        self.xs, self.ys, self.ids = list[Tensor](), list[Tensor | None](), list[Ids]()
        for k, (pair, own) in enumerate(zip(data, ids, strict=True)):
            if not isinstance(pair, (tuple, list)) or len(pair) != 2:
                raise DataError(f"{where}[{k}]: expected a pair (x, y), with y None for a party without labels")
            x, y = fitted(pair[0], pair[1], objective, f"{where}[{k}]", prepared)
            self.xs.append(x)
            self.ys.append(y)
            self.ids.append(ids_of(own, len(x), f"{ids_where}[{k}]"))
        self.offsets = np.concatenate([[0], np.cumsum([len(x) for x in self.xs])]).astype(np.int64)

    def __getattr__(self, name: str) -> Any:
        if name in ("x", "y"):
            raise AlgorithmError("parties with different columns have no joined samples; only ops can read them")
        raise AttributeError(name)

    def rows(self, party: int) -> TableRows:
        """The rows of a party: features, targets (None without labels) and ids."""
        return TableRows(self.xs[party], self.ys[party], self.ids[party])

    def tensors(self) -> list[Tensor]:
        return [*self.xs, *(y for y in self.ys if y is not None), *map(encoded, self.ids)]


def fitted(x: Any, y: Any, objective: Objective, where: str, prepared: bool) -> tuple[Tensor, Tensor | None]:
    """Features and targets (None without labels) of one party on the objective's device; a DataError if invalid."""
    x, y = tensor_of(x, f"{where} x"), None if y is None else tensor_of(y, f"{where} y")
    if x.dim() < 2 or 0 in x.shape[1:] or (y is not None and (y.dim() == 0 or len(x) != len(y))):
        targets = "" if y is None else f" and y {tuple(y.shape)}"
        raise DataError(f"{where}: x has shape {tuple(x.shape)}{targets}; expected one row of features per person")
    if x.is_floating_point():
        check_features(x, where, prepared, lambda row: "")
    if y is not None:
        y = fit_targets(y, objective, where)
        if objective.loss == "cross_entropy" and y.dim() == 2 and len(y) and looks_one_hot(y):
            raise DataError(f"{where}: the targets {ONE_HOT}")
    return x.to(objective.device), None if y is None else y.to(objective.device)


class ColumnHoldings(Holdings):
    """All samples of a simulated task whose parties hold different columns of the same people."""

    train: PartyColumns
    tests: PartyColumns | None

    def __init__(self, task: Task, objective: Objective) -> None:
        for name, why in REFUSED.items():
            if getattr(task, name) is not None:
                raise DataError(f"{name}: {why}")
        if (task.party_tests is None) != (task.test_ids is None):
            raise DataError("party_tests and test_ids belong together: give both, or neither")
        prepared = task.prepare is not None
        self.train = PartyColumns(task.parties, task.ids, objective, "parties", prepared)
        self.tests = None
        if task.party_tests is not None:
            self.tests = PartyColumns(task.party_tests, task.test_ids, objective, "party_tests", prepared)
            _check_tests(self.train, self.tests)
            self.tested = np.flatnonzero(np.diff(self.tests.offsets)).tolist()
        targets = {k: y for k, y in enumerate(self.train.ys) if y is not None}
        if not any(len(y) for y in targets.values()):
            raise DataError("parties: none of them has labels; give y to the label holder")
        whole = all(not y.is_floating_point() for y in targets.values())
        classes = task.classes
        if classes is None and whole:
            classes = max(int(y.max()) for y in targets.values() if len(y)) + 1
        Known.__init__(self, len(self.train), task.names, (), classes)
        self.counted = task.classes is None
        for k, y in targets.items():
            self.check_targets(y, f"parties: of party {self.name(k)!r}, the ")
        if objective.loss == "cross_entropy" and self.counted:
            check_numbering({self.name(k): Labels.of(y) for k, y in targets.items() if len(y)})
        self.layout = ColumnLayout(tuple(tuple(x.shape[1:]) for x in self.train.xs), tuple(targets))

    def gateway(self, party: int) -> SampleGateway:
        tests = self.tests.rows(party) if self.tests is not None else None
        return SampleGateway(self.train.rows(party), tests)

    def replace(self, party: int, data: SampleGateway) -> None:
        """Store the features of a party that an op has prepared."""
        self.train.xs[party] = whole(data.features("statistics"))
        if self.tests is not None and len(self.tests.xs[party]):
            self.tests.xs[party] = whole(data.test_features("evaluate"))


def _check_tests(train: PartyColumns, tests: PartyColumns) -> None:
    """Raise a DataError if the test rows of a party do not fit its training rows."""
    if len(tests) != len(train):
        raise DataError(f"party_tests: {len(tests)} test sets for {len(train)} parties")
    for k in range(len(train)):
        check_test_rows(train.rows(k), tests.rows(k), f"party_tests[{k}]")


def check_test_rows(train: TableRows, test: TableRows, where: str) -> None:
    """Raise a DataError if the test rows of a party do not fit its training rows."""
    shapes = [tuple(rows.x.shape[1:]) for rows in (test, train)]
    if shapes[0] != shapes[1]:
        raise DataError(f"{where}: test samples are {shapes[0]}, the party's training samples {shapes[1]}")
    if (test.y is None) != (train.y is None):
        raise DataError(f"{where}: the party must have labels for its training rows and its test rows, or for none")
    if test.ids is not None and train.ids is not None and set(test.ids.tolist()) & set(train.ids.tolist()):
        raise DataError(f"{where}: a test row has the id of a training row; a person is in one of the two sets")
