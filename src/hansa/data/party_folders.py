"""Folders of arrays: a party's samples as `x.npy` and `y.npy`, and folders with one party per subfolder or file.

The features stay in the file, which is memory-mapped: only the rows of a batch are read.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from torch import Tensor

from hansa.data.party_files import NAMES_OF_FILES, Header, npz_targets, read_party_file
from hansa.holdings.stored_rows import ArrayRows, Features, StoredRows
from hansa.plumbing.errors import DataError

FEATURES, TARGETS = "x.npy", "y.npy"


def load_party_folder(folder: str | Path, target: str | None = None) -> tuple[list[tuple[Features, Tensor]], list[str]]:
    """The samples and the names of the parties in a folder, for `Task(parties=..., names=...)`.

    A party is a subfolder with `x.npy` and `y.npy`, whose features stay in the file, or a CSV or NPZ file.
    """
    paths = party_paths(Path(folder))
    return [read_party(path, target)[:2] for path in paths], [path.name.split(".")[0] for path in paths]


def party_paths(path: Path) -> list[Path]:
    """The parties at a path: the path itself, or the subfolders and files of a folder, in the order of their names."""
    if not path.is_dir() or (path / FEATURES).exists():
        return [path]
    inside = [each for each in sorted(path.iterdir())
              if (each / FEATURES).exists() or (each.is_file() and each.name.endswith(NAMES_OF_FILES))]  # fmt: skip
    if not inside:
        raise DataError(
            f"{path} is a folder without parties: it has neither {FEATURES} and {TARGETS}, nor subfolders with them, "
            "nor CSV or NPZ files"
        )
    return inside


def read_party(path: Path, target: str | None = None) -> tuple[Features, Tensor, Header]:
    """The features and targets of a party's folder or file, and the names of a CSV file's columns."""
    if not path.is_dir():
        return read_party_file(path, target)
    if target is not None:
        raise DataError(f"{path}: a target column can be named for CSV files only; in a folder it is {TARGETS}")
    x, y = (_mapped(path / name) for name in (FEATURES, TARGETS))
    return StoredRows([ArrayRows(x, str(path / FEATURES))]), npz_targets(path, x, np.array(y)), ()


def _mapped(path: Path) -> np.ndarray:
    """An array that stays in its file."""
    try:
        array: np.ndarray = np.load(path, mmap_mode="r", allow_pickle=False)
    except FileNotFoundError:
        raise DataError(f"{path.parent} has no {path.name}; a party's folder holds {FEATURES} and {TARGETS}") from None
    except (ValueError, OSError, EOFError):
        raise DataError(f"{path} is not an NPY file of plain numbers; write it with numpy.save") from None
    if array.dtype.kind not in "fiub":
        raise DataError(f"{path} holds {array.dtype}, and numbers are needed")
    return array
