"""UCI Heart Disease: patients of four hospitals, a natural federation.

Janosi, Steinbrunn, Pfisterer and Detrano, "Heart Disease", UCI Machine Learning Repository, 1989 (CC BY 4.0); first
analysed in Detrano et al., "International application of a new probability algorithm for the diagnosis of coronary
artery disease", American Journal of Cardiology 64, 1989. The file is part of the package; files/ATTRIBUTION.md says how
it was made.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources

import numpy as np
import torch

from hansa.core.registry import register
from hansa.data.dataset import Data, Dataset, one_hot

SITES = ("cleveland", "hungary", "switzerland", "va")
NUMERIC = ("age", "sex", "trestbps", "chol", "fbs", "thalach", "exang", "oldpeak", "ca")
CATEGORIES: dict[str, tuple[str, ...]] = {
    "cp": ("1", "2", "3", "4"),
    "restecg": ("0", "1", "2"),
    "slope": ("1", "2", "3"),
    "thal": ("3", "6", "7"),
}
HEART_FEATURES = NUMERIC + tuple(f"{column}={value}" for column, values in CATEGORIES.items() for value in values)
ZERO_IS_MISSING = ("chol", "trestbps")


@register("heart")
@dataclass(frozen=True)
class Heart(Dataset):
    """UCI Heart Disease: 920 patients of four hospitals; is there a narrowed vessel?

    Janosi, Steinbrunn, Pfisterer, Detrano 1989 (CC BY 4.0). Missing values are NaN: the hospitals took
    different measurements, so imputation and scaling are learned by the federation. No central test set. Columns:
    HEART_FEATURES.
    """

    def load(self, data_dir: str | None = None) -> Data:
        text = (resources.files("hansa.data") / "files" / "heart.csv").read_text(encoding="utf-8")
        patients = list(csv.DictReader(text.splitlines()))
        sites = np.array([SITES.index(patient["site"]) for patient in patients])
        return Data(
            x=torch.tensor([_features(patient) for patient in patients], dtype=torch.float32),
            y=torch.tensor([int(patient["disease"]) for patient in patients]),
            test=None,
            parties=tuple(np.flatnonzero(sites == site) for site in range(len(SITES))),
            party_names=SITES,
            classes=2,
            loss="cross_entropy",
            header=("disease", *HEART_FEATURES),
        )


def _features(patient: Mapping[str, str]) -> list[float]:
    row = [_number(column, patient[column]) for column in NUMERIC]
    for column, categories in CATEGORIES.items():
        value = patient[column]
        row += one_hot(value, categories) if value else [math.nan] * len(categories)
    return row


def _number(column: str, cell: str) -> float:
    value = float(cell) if cell else math.nan
    return math.nan if value == 0 and column in ZERO_IS_MISSING else value
