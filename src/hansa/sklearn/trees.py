"""Boosted trees and random forests as estimators with scikit-learn's habits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from sklearn.utils.validation import check_is_fitted

from hansa.classical.trees import importances, lightgbm_model
from hansa.core.algorithm import Algorithm
from hansa.core.plain_data import build
from hansa.sklearn.estimators import _Federated, _Probable, _Regressor


class _Trees(_Federated):
    """Estimators of trees; `name` is the algorithm's, whose fields are `fields`. Missing values (NaN) are allowed."""

    name: ClassVar[str]
    fields: ClassVar[tuple[str, ...]]
    _finite: ClassVar[bool | str] = "allow-nan"

    def _algorithm(self) -> Algorithm:
        given = {name: getattr(self, name) for name in self.fields}
        if "categorical" in given:
            given["categorical"] = tuple(given["categorical"])
        found: Algorithm = build("algorithm", self.name, **given)
        return found

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.allow_nan = True
        return tags

    @property
    def feature_importances_(self) -> Any:
        """The share of each feature in the gain of all splits."""
        check_is_fitted(self, "result_")
        return importances(self.result_.saved_model())

    def to_lightgbm(self) -> str:
        """The model in LightGBM's text format, which `lightgbm.Booster(model_str=...)` reads."""
        check_is_fitted(self, "result_")
        return lightgbm_model(self.result_.saved_model(), getattr(self, "feature_names_in_", None))


class _Boosting(_Trees):
    name = "boosting"
    fields = ("lr", "max_depth", "bins", "l2", "gamma", "min_samples", "growth", "leaves", "rows", "columns",
              "categorical", "cuts", "held_out", "patience")  # fmt: skip

    def __init__(self, *, lr: float = 0.1, max_depth: int = 6, bins: int = 256, l2: float = 1.0, gamma: float = 0.0,
                 min_samples: int = 20, growth: str = "levels", leaves: int = 31, rows: float = 1.0,
                 columns: float = 1.0, categorical: Sequence[int] = (), cuts: str = "quantiles", held_out: float = 0.0,
                 patience: int | None = None, rounds: int = 100, seed: int = 0,
                 privacy: Mapping[str, Any] | None = None, run: Mapping[str, Any] | None = None) -> None:  # fmt: skip
        self.lr, self.max_depth, self.bins, self.l2, self.gamma = lr, max_depth, bins, l2, gamma
        self.min_samples, self.growth, self.leaves, self.rows, self.columns = min_samples, growth, leaves, rows, columns
        self.categorical, self.cuts, self.held_out, self.patience = categorical, cuts, held_out, patience
        self.rounds, self.seed, self.privacy, self.run = rounds, seed, privacy, run


class BoostingClassifier(_Probable, _Boosting):
    """Gradient boosted trees over all parties (`hansa.Boosting`), one more in each of `rounds` rounds."""


class BoostingRegressor(_Regressor, _Boosting):
    """Gradient boosted trees for numbers, as `BoostingClassifier`."""


class _Forest(_Trees):
    name = "random-forest"
    fields = ("trees", "max_depth", "bins", "min_samples", "columns", "bootstrap", "growth", "categorical", "cuts",
              "per_round")  # fmt: skip

    def __init__(self, *, trees: int = 100, max_depth: int = 10, bins: int = 64, min_samples: int = 1,
                 columns: float | None = None, bootstrap: bool = True, growth: str = "shared",
                 categorical: Sequence[int] = (), cuts: str = "quantiles", per_round: int = 10, seed: int = 0,
                 privacy: Mapping[str, Any] | None = None, run: Mapping[str, Any] | None = None) -> None:  # fmt: skip
        self.trees, self.max_depth, self.bins, self.min_samples = trees, max_depth, bins, min_samples
        self.columns, self.bootstrap, self.growth, self.categorical = columns, bootstrap, growth, categorical
        self.cuts, self.per_round, self.seed, self.privacy, self.run = cuts, per_round, seed, privacy, run

    @property
    def rounds(self) -> int:  # type: ignore[override]
        """Enough rounds for all trees."""
        return -(-self.trees // self.per_round)

    @property
    def oob_score_(self) -> float:
        """The share of right classes of samples at trees that did not draw them; for numbers the mean squared error."""
        check_is_fitted(self, "result_")
        error = float(self.result_.saved_model()["payload"]["oob"])
        return 1 - error if isinstance(self, _Probable) else error


class ForestClassifier(_Probable, _Forest):
    """A random forest over all parties (`hansa.RandomForest`)."""


class ForestRegressor(_Regressor, _Forest):
    """A random forest for numbers, as `ForestClassifier`."""
