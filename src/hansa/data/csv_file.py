"""One CSV file as a data set, to be divided among simulated parties."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from hansa.core.quantities import BelowOne
from hansa.core.registry import register
from hansa.data.column_transformer import ColumnTransformer
from hansa.data.dataset import Data, Dataset, stratified_split
from hansa.data.party_files import check_header, column_of, csv_lines, features_of, numbers
from hansa.data.table import Table
from hansa.data.table import column_of as as_column
from hansa.data.table_tasks import code_all
from hansa.holdings.table_layout import TableLayout
from hansa.plumbing.errors import ConfigError, DataError

SPLIT_SEED = 0


@register("csv-file")
@dataclass(frozen=True)
class CsvFile(Dataset):
    """A CSV file with a header: numbers as features, and a target of classes (any texts) or numbers.

    `file` is relative to the folder of the experiment. `predicts` says what the target is. `drop` lists columns that
    are no features. Classes are numbered in the order of their names. An empty cell or `?` is a missing feature. A
    fixed share `test` of the rows (of each class the same share) is the central test set. With `raw` features may be
    texts and dates too, for the preparation `table`.
    """

    file: str
    target: str
    predicts: Literal["classes", "numbers"] = "classes"
    drop: tuple[str, ...] = ()
    test: BelowOne = 0.2
    raw: bool = False

    def __post_init__(self) -> None:
        if self.target in self.drop:
            raise ConfigError(f"the target {self.target!r} is in drop; leave it out there")

    def beside(self, folder: str) -> CsvFile:
        return dataclasses.replace(self, file=str(Path(folder) / self.file))

    def load(self, data_dir: str | None = None) -> Data:
        path = Path(self.file)
        if not path.is_file():
            raise DataError(f"there is no file {path}; check task.dataset.file")
        lines = csv_lines(path)
        header = next(lines)[1]
        check_header(header, path, "at least one feature and the target")
        at = column_of(self.target, header, path)
        left_out = {at, *(column_of(name, header, path) for name in self.drop)}
        kept = [place for place in range(len(header)) if place not in left_out]
        if not kept:
            raise DataError(f"{path}: no column is left as a feature; shorten drop")
        rows = [(where, cells) for where, cells in lines]
        x, layout = self._features(path, rows, {header[place]: place for place in kept})
        named = [(where, cells[at].strip()) for where, cells in rows]
        missing = next((where for where, cell in named if cell in ("", "?")), None)
        if missing is not None:
            raise DataError(f"{missing}: the target {self.target!r} is missing; leave the row out")
        if self.predicts == "numbers":
            real = numbers(path, [(where, [cell]) for where, cell in named], [self.target], 0)[:, 0]
            targets = torch.from_numpy(real.astype(np.float32))
            labels, classes = np.zeros(len(real), dtype=np.int64), None
        else:
            names = sorted({cell for _, cell in named}, key=_as_number)
            if len(names) < 2:
                raise DataError(f"{path}: the target {self.target!r} has one value only, {names[0]!r}")
            places = {name: place for place, name in enumerate(names)}
            labels, classes = np.array([places[cell] for _, cell in named], dtype=np.int64), len(names)
            targets = torch.from_numpy(labels)
        train, held = stratified_split(labels, self.test, SPLIT_SEED)
        test = (x[held], targets[held]) if len(held) else None
        loss = "mse" if classes is None else "cross_entropy"
        columns = (self.target, *(header[place] for place in kept))
        return Data(x[train], targets[train], test, None, None, classes, loss, columns, layout)

    def _features(self, path: Path, rows: list[tuple[str, list[str]]],
                  kept: dict[str, int]) -> tuple[Tensor, TableLayout | None]:  # fmt: skip
        """The features of the columns that are kept, by their places; with `raw` as rows of a table."""
        if not self.raw:
            cut = [(where, [cells[place] for place in kept.values()]) for where, cells in rows]
            try:
                return features_of(numbers(path, cut, list(kept), None)), None
            except DataError as error:
                wanted = "set raw = true in task.dataset, and task.prepare"
                raise DataError(str(error).replace("set task.prepare", wanted)) from None
        if not rows:
            raise DataError(f"{path} has no rows below its header")
        columns = {name: as_column(np.array([cells[place] for _, cells in rows], dtype=object))
                   for name, place in kept.items()}  # fmt: skip
        (x,), layout = code_all({str(path): Table(columns, len(rows), lambda row: rows[row][0])}, ColumnTransformer())
        return x, layout


def _as_number(name: str) -> tuple[float, str]:
    """Numbers in their order, then other names by the alphabet."""
    try:
        return float(name), ""
    except ValueError:
        return math.inf, name
