"""Two data sets of scikit-learn, for first steps and fast tests without downloads.

Their files are read directly, because importing scikit-learn takes longer than a short run.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch

from hansa.core.registry import register
from hansa.data.dataset import Data, Dataset, stratified_split
from hansa.plumbing.errors import DataError

TEST_FRACTION = 0.2
SPLIT_SEED = 0


@register("digits")
@dataclass(frozen=True)
class Digits(Dataset):
    """Handwritten digits, 8 by 8 pixels: 1,797 images of 10 classes.

    Alpaydin and Kaynak, "Optical Recognition of Handwritten Digits", UCI 1998, the part in scikit-learn. Images
    [1, 8, 8], pixels in 0..1. A fixed fifth of each class is the central test set.
    """

    def load(self, data_dir: str | None = None) -> Data:
        digits = _table("digits.csv.gz")
        return _with_test(digits[:, :-1].reshape(-1, 1, 8, 8) / 16, digits[:, -1], classes=10)


@register("breast-cancer")
@dataclass(frozen=True)
class BreastCancer(Dataset):
    """Breast Cancer Wisconsin (Diagnostic): 569 tumours, 30 measures, malignant (0) or benign (1).

    Wolberg, Mangasarian, Street and Street, UCI 1995, as in scikit-learn. Features as measured, not scaled. A fixed
    fifth of each class is the central test set.
    """

    def load(self, data_dir: str | None = None) -> Data:
        tumours = _table("breast_cancer.csv", header=1)
        return _with_test(tumours[:, :-1], tumours[:, -1], classes=2)


def _table(name: str, header: int = 0) -> np.ndarray:
    """Read the numbers of a scikit-learn data file, labels last."""
    spec = find_spec("sklearn")
    for folder in spec.submodule_search_locations or () if spec is not None else ():
        path = Path(folder, "datasets", "data", name)
        if path.is_file():
            return np.loadtxt(path, delimiter=",", skiprows=header)
    raise DataError(f"{name}: not found in scikit-learn; install scikit-learn 1.5 or newer")


def _with_test(features: np.ndarray, numbers: np.ndarray, classes: int) -> Data:
    labels = numbers.astype(np.int64)
    x, y = torch.from_numpy(features.astype(np.float32)), torch.from_numpy(labels)
    train, test = stratified_split(labels, TEST_FRACTION, SPLIT_SEED)
    return Data(x[train], y[train], (x[test], y[test]), None, None, classes, "cross_entropy")
