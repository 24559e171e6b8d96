"""Base of data sets, and functions that find and read their files.

A data set is a registered part: its fields say how to read it, `load` returns a `Data`. A `Partition` divides the rows
among parties.
"""

from __future__ import annotations

import gzip
import io
import os
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
from torch import Tensor

from hansa.core.registry import Part
from hansa.holdings.table_layout import TableLayout
from hansa.plumbing.errors import DataError


@dataclass(frozen=True)
class Data:
    """The samples of a data set, before they are divided among parties.

    `x` are the training samples: float32 features, or int64 characters. `y` are int64 labels, or float32 targets when
    `classes` is None. `test` is the central test set. `parties` is the natural partition, row indices into `x`, one
    array per party. `loss` is "cross_entropy" or "mse". `header` has the names of the target and of the features, if
    `x` is a table with named columns. `table` says that x are coded rows of a table (`Table.coded`), for the
    preparation `table`. `weights` are the weights of the training samples in the loss, one per row of `x`; None gives
    all the same weight.
    """

    x: Tensor
    y: Tensor
    test: tuple[Tensor, Tensor] | None
    parties: tuple[np.ndarray, ...] | None
    party_names: tuple[str, ...] | None
    classes: int | None
    loss: str
    header: tuple[str, ...] = ()
    table: TableLayout | None = None
    weights: Tensor | None = None


class Dataset(Part):
    """A source of samples."""

    kind: ClassVar[str] = "dataset"

    def beside(self, folder: str) -> Dataset:
        """The data set with its files relative to this folder, which is that of the experiment."""
        return self

    def load(self, data_dir: str | None = None) -> Data:
        """Read the data set; its files lie in its own folder of `data_dir`, by default $HANSA_DATA."""
        raise TypeError(f"the {self.kind} {self.name!r} does not define load()")


def data_folder(data_dir: str | None, dataset: str, source: str) -> Path:
    """The folder of a data set's files within `data_dir`, or within $HANSA_DATA."""
    root = data_dir or os.environ.get("HANSA_DATA")
    if not root:
        raise DataError(
            f"the data set {dataset!r} is read from files, and no data folder is set: give data_dir or set HANSA_DATA "
            f"to the folder that holds {dataset}/; get the files from {source}"
        )
    return Path(root).expanduser() / dataset


def locate(data_dir: str | None, dataset: str, name: str, source: str) -> Path:
    """The file `name` of a data set, plain or with `.gz`; DataError names the folder and a source of the file."""
    folder = data_folder(data_dir, dataset, source)
    for candidate in (folder / name, folder / f"{name}.gz"):
        if candidate.is_file():
            return candidate
    raise DataError(
        f"the data set {dataset!r} needs the file {name} or {name}.gz in the folder {folder}, and it is not there; "
        f"get it from {source}"
    )


def read_bytes(path: Path) -> bytes:
    """The whole content of a file, unpacked when its name ends in `.gz`."""
    try:
        raw = path.read_bytes()
        return gzip.decompress(raw) if path.suffix == ".gz" else raw
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise DataError(f"{path} is not a whole gzip file ({error}); fetch it again") from None
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from None


def read_text(path: Path) -> str:
    """The whole content of a UTF-8 text file, unpacked when its name ends in `.gz`."""
    try:
        return read_bytes(path).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 text: byte {error.start} cannot be decoded") from None


def text_lines(path: Path) -> Iterator[str]:
    """The lines of a UTF-8 text file, one at a time, unpacked when its name ends in `.gz`."""
    try:
        opened = gzip.open if path.suffix == ".gz" else open
        with opened(path, "rb") as packed, io.TextIOWrapper(packed, encoding="utf-8-sig") as lines:
            yield from lines
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 text: byte {error.start} cannot be decoded") from None
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise DataError(f"{path} is not a whole gzip file ({error}); fetch it again") from None
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from None


def one_hot(value: str, categories: Sequence[str]) -> list[float]:
    """One-hot code: 1 at the position of `value` among the categories, 0 elsewhere."""
    return [float(value == category) for category in categories]


def stratified_split(y: np.ndarray, fraction: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Row indices of a training and a test set; the test set takes the same fraction of each class."""
    rng = np.random.Generator(np.random.Philox(seed))
    test = np.zeros(len(y), dtype=bool)
    for label in np.unique(y):
        rows = rng.permutation(np.flatnonzero(y == label))
        test[rows[: round(fraction * len(rows))]] = True
    return np.flatnonzero(~test), np.flatnonzero(test)
