"""Estimators with scikit-learn's habits, over a simulated federation."""

from hansa.sklearn.estimators import (
    FederatedClassifier,
    FederatedRegressor,
    LinearRegression,
    LinearSVC,
    LogisticRegression,
)  # fmt: skip
from hansa.sklearn.trees import BoostingClassifier, BoostingRegressor, ForestClassifier, ForestRegressor

__all__ = [
    "BoostingClassifier", "BoostingRegressor", "FederatedClassifier", "FederatedRegressor", "ForestClassifier",
    "ForestRegressor", "LinearRegression", "LinearSVC", "LogisticRegression",
]  # fmt: skip
