"""Estimators with scikit-learn's habits, over a simulated federation."""

from hansa.sklearn.estimators import (
    FederatedClassifier,
    FederatedRegressor,
    LinearRegression,
    LinearSVC,
    LogisticRegression,
)  # fmt: skip

__all__ = ["FederatedClassifier", "FederatedRegressor", "LinearRegression", "LinearSVC", "LogisticRegression"]
