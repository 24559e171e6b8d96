"""Two data sets that scikit-learn carries, for first steps and fast tests: no file has to be fetched."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from hansa.core.registry import register
from hansa.data.dataset import Data, Dataset, stratified_split

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
        from sklearn.datasets import load_digits

        digits = load_digits()
        return _with_test(digits.images[:, None] / 16, digits.target, classes=10)


@register("breast-cancer")
@dataclass(frozen=True)
class BreastCancer(Dataset):
    """Breast Cancer Wisconsin (Diagnostic): 569 tumours, 30 measures, malignant (0) or benign (1).

    Wolberg, Mangasarian, Street and Street, UCI 1995, as in scikit-learn. Features as measured, not scaled. A fixed
    fifth of each class is the central test set.
    """

    def load(self, data_dir: str | None = None) -> Data:
        from sklearn.datasets import load_breast_cancer

        tumours = load_breast_cancer()
        return _with_test(tumours.data, tumours.target, classes=2)


def _with_test(features: np.ndarray, labels: np.ndarray, classes: int) -> Data:
    x = torch.from_numpy(features.astype(np.float32))
    y = torch.from_numpy(labels.astype(np.int64))
    train, test = stratified_split(labels, TEST_FRACTION, SPLIT_SEED)
    return Data(x[train], y[train], (x[test], y[test]), None, None, classes, "cross_entropy")
