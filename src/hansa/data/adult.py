"""Adult (census income): does a person earn more than 50,000 dollars a year?

Becker and Kohavi, "Adult", UCI Machine Learning Repository, 1996 (CC BY 4.0); Kohavi, "Scaling up the accuracy of
naive-Bayes classifiers: a decision-tree hybrid", KDD 1996.

The categories are those of the published description. Categories read from the data would differ between parties.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from hansa.core.registry import register
from hansa.data.dataset import Data, Dataset, locate, one_hot, read_text
from hansa.data.table import Table, column_of
from hansa.holdings.table_layout import TableLayout
from hansa.plumbing.errors import DataError

SOURCE = "the UCI Machine Learning Repository, data set 'Adult' (archive.ics.uci.edu/dataset/2/adult)"

# One entry per column of the file, in its order: () for a number, else the categories; "?" is a missing value.
COLUMNS: dict[str, tuple[str, ...]] = {
    "age": (),
    "workclass": (
        "Private", "Self-emp-not-inc", "Self-emp-inc", "Federal-gov", "Local-gov", "State-gov", "Without-pay",
        "Never-worked", "?",
    ),
    "fnlwgt": (),
    "education": (
        "Bachelors", "Some-college", "11th", "HS-grad", "Prof-school", "Assoc-acdm", "Assoc-voc", "9th", "7th-8th",
        "12th", "Masters", "1st-4th", "10th", "Doctorate", "5th-6th", "Preschool",
    ),
    "education-num": (),
    "marital-status": (
        "Married-civ-spouse", "Divorced", "Never-married", "Separated", "Widowed", "Married-spouse-absent",
        "Married-AF-spouse",
    ),
    "occupation": (
        "Tech-support", "Craft-repair", "Other-service", "Sales", "Exec-managerial", "Prof-specialty",
        "Handlers-cleaners", "Machine-op-inspct", "Adm-clerical", "Farming-fishing", "Transport-moving",
        "Priv-house-serv", "Protective-serv", "Armed-Forces", "?",
    ),
    "relationship": ("Wife", "Own-child", "Husband", "Not-in-family", "Other-relative", "Unmarried"),
    "race": ("White", "Asian-Pac-Islander", "Amer-Indian-Eskimo", "Other", "Black"),
    "sex": ("Female", "Male"),
    "capital-gain": (),
    "capital-loss": (),
    "hours-per-week": (),
    "native-country": (
        "United-States", "Cambodia", "England", "Puerto-Rico", "Canada", "Germany", "Outlying-US(Guam-USVI-etc)",
        "India", "Japan", "Greece", "South", "China", "Cuba", "Iran", "Honduras", "Philippines", "Italy", "Poland",
        "Jamaica", "Vietnam", "Mexico", "Portugal", "Ireland", "France", "Dominican-Republic", "Laos", "Ecuador",
        "Taiwan", "Haiti", "Columbia", "Hungary", "Guatemala", "Nicaragua", "Scotland", "Thailand", "Yugoslavia",
        "El-Salvador", "Trinadad&Tobago", "Peru", "Hong", "Holand-Netherlands", "?",
    ),
}  # fmt: skip
LABELS = ("<=50K", ">50K")
ADULT_FEATURES = tuple(
    f"{column}={value}" if value else column for column, values in COLUMNS.items() for value in (values or ("",))
)


@register("adult")
@dataclass(frozen=True)
class Adult(Dataset):
    """Census income: 32,561 and 16,281 people, 108 columns; more than 50,000 dollars a year or not.

    Becker and Kohavi 1996 (CC BY 4.0). The files adult.data and adult.test lie in the folder adult/, plain or gzipped.
    Categories are one-hot with a category for "missing", numbers are not scaled. Columns: ADULT_FEATURES. With `raw`
    a sample is a row of the file's 14 columns, for the preparation `table`.
    """

    raw: bool = False

    def load(self, data_dir: str | None = None) -> Data:
        train, test = (locate(data_dir, "adult", f"adult.{part}", SOURCE) for part in ("data", "test"))
        if self.raw:
            return _load_raw(train, test)
        return Data(*_read(train), _read(test), None, None, 2, "cross_entropy", ("income", *ADULT_FEATURES))


def _load_raw(train: Path, test: Path) -> Data:
    """The rows of the files as a table."""
    layout = TableLayout(tuple((name, "text" if categories else "number") for name, categories in COLUMNS.items()))
    texts: dict[int, str] = {}
    pairs = []
    for path in (train, test):
        rows, labels = [], []
        for _, cells, label in _lines(path):
            rows.append(cells)
            labels.append(label)
        columns = zip(COLUMNS, zip(*rows, strict=True), strict=True)
        table = Table({name: column_of(cells) for name, cells in columns}, len(rows), lambda row: f"{path}, row {row}")  # noqa: B023
        x, own = table.coded(layout)
        texts |= own
        pairs.append((x, torch.tensor(labels)))
    return Data(*pairs[0], pairs[1], None, None, 2, "cross_entropy", ("income", *COLUMNS),
                dataclasses.replace(layout, texts=texts))  # fmt: skip


def _lines(path: Path) -> Iterator[tuple[str, list[str], int]]:
    """The place of each line of a file, its cells without the label, and the class."""
    empty = True
    for number, line in enumerate(read_text(path).splitlines(), start=1):
        if not line.strip() or line.startswith("|"):  # the test file opens with a remark
            continue
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) != len(COLUMNS) + 1:
            raise DataError(f"{path}, line {number}: {len(cells)} values, expected {len(COLUMNS) + 1}")
        label = cells[-1].removesuffix(".")  # the labels of the test file end with a dot
        if label not in LABELS:
            raise DataError(f"{path}, line {number}: the last value is {cells[-1]!r}, not '<=50K' or '>50K'")
        empty = False
        yield f"{path}, line {number}", cells[:-1], LABELS.index(label)
    if empty:
        raise DataError(f"{path} holds no rows; fetch it again")


def _read(path: Path) -> tuple[Tensor, Tensor]:
    """The rows of a file, one-hot."""
    rows, labels = [], []
    for where, cells, label in _lines(path):
        row: list[float] = []
        for (column, categories), cell in zip(COLUMNS.items(), cells, strict=True):
            row += _cell(cell, column, categories, where)
        rows.append(row)
        labels.append(label)
    return torch.tensor(rows, dtype=torch.float32), torch.tensor(labels)


def _cell(cell: str, column: str, categories: tuple[str, ...], where: str) -> list[float]:
    if categories:
        if cell not in categories:
            raise DataError(f"{where}: {cell!r} is not a known value of {column}")
        return one_hot(cell, categories)
    try:
        return [float(cell)]
    except ValueError:
        raise DataError(f"{where}: {column} should be a number and is {cell!r}") from None
