"""Estimators with scikit-learn's habits: `fit`, `predict`, `score`, `clone` and grid search over a federation.

`fit([(x, y), ...])` takes the samples of each party. `fit(X, y, parties=...)` takes one table and names each row's
party; without `parties` all rows belong to one. The federation is simulated on this machine.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Self

import numpy as np
import torch
from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, column_or_1d, validate_data

from hansa.classical.inference import Coefficient, coefficients
from hansa.core.algorithm import Algorithm
from hansa.core.plain_data import build
from hansa.core.task import Task
from hansa.plumbing.errors import ConfigError, DataError
from hansa.report.diagnosis import without_effect
from hansa.run.result import Result
from hansa.run.simulate import simulate

Parties = Sequence[tuple[Any, Any]]


class _Federated(BaseEstimator, ABC):  # type: ignore[misc]
    """What all estimators share. `privacy` and `run` are the tables of an experiment (`{"secure": "masking"}`)."""

    rounds: int
    seed: int
    privacy: Mapping[str, Any] | None
    run: Mapping[str, Any] | None
    result_: Result
    _finite: ClassVar[bool | str] = True  # "allow-nan" if features may be missing

    @abstractmethod
    def _algorithm(self) -> Algorithm: ...

    def _model(self) -> Callable[[], torch.nn.Module] | None:
        return None

    def fit(self, X: Any, y: Any = None, parties: Any = None) -> Self:
        """Train on the samples of all parties: a list of pairs (x, y), or one table with the party of each row."""
        x, y, owner = _pooled(X, y, parties)
        x, y = validate_data(self, x, y, dtype=np.float64, y_numeric=not isinstance(self, ClassifierMixin),
                             ensure_all_finite=self._finite)  # fmt: skip
        targets, loss, classes = self._targets(y)
        held = [(x[owner == name], targets[owner == name]) for name in dict.fromkeys(owner.tolist())]
        prepare = None if self._finite is True else build("prepare", "keep-missing")
        task = Task(self._model(), loss, held, classes=classes, prepare=prepare)
        settings = {"rounds": self.rounds, "seed": self.seed, **(self.run or {})}
        self.result_ = simulate(self._algorithm(), task, privacy=self.privacy, progress=False, **settings)
        reason = without_effect(self.result_.history)
        if reason is not None:
            raise ValueError(reason)
        if self.result_.personal:
            raise ValueError("each party gets a model of its own, so that there is no model to predict with; use "
                             "hansa.simulate, and Result.predict with a party")  # fmt: skip
        self.n_rounds_ = len(self.result_.history)
        return self

    @abstractmethod
    def _targets(self, y: Any) -> tuple[Any, str, int | None]:
        """The targets as the task takes them, the loss, and the number of classes."""

    def _scores(self, X: Any) -> Any:
        check_is_fitted(self, "result_")
        x = validate_data(self, X, dtype=np.float64, reset=False, ensure_all_finite=self._finite)
        return self.result_.predict(x).cpu().double().numpy()


class _Classifier(ClassifierMixin, _Federated):  # type: ignore[misc]
    classes_: Any

    def _targets(self, y: Any) -> tuple[Any, str, int | None]:
        check_classification_targets(y)
        self.classes_, numbers = np.unique(y, return_inverse=True)
        if len(self.classes_) < 2:
            raise ValueError(f"{type(self).__name__} needs samples of at least two classes; the data have 1 class")
        return numbers, "cross_entropy", len(self.classes_)

    def predict(self, X: Any) -> Any:
        """The class of each sample."""
        scores = self._scores(X)
        return self.classes_[scores.argmax(1)]

    def decision_function(self, X: Any) -> Any:
        """The score of each class; for two classes how much more class 1 scores than class 0."""
        scores = self._scores(X)
        return scores[:, 1] - scores[:, 0] if scores.shape[1] == 2 else scores


class _Probable(_Classifier):
    def predict_proba(self, X: Any) -> Any:
        """The probability of each class."""
        return torch.softmax(torch.as_tensor(self._scores(X)), 1).numpy()


class _Regressor(RegressorMixin, _Federated):  # type: ignore[misc]
    def _targets(self, y: Any) -> tuple[Any, str, int | None]:
        return y.astype(np.float64), "mse", None

    def predict(self, X: Any) -> Any:
        """The predicted number of each sample."""
        return self._scores(X).reshape(-1)


class _Linear(_Federated):
    """Estimators with coefficients; `name` is the algorithm's."""

    name: ClassVar[str]

    def __init__(self, *, ridge: float = 0.01, l1: float = 0.0, fit_intercept: bool = True, rounds: int = 100,
                 seed: int = 0, privacy: Mapping[str, Any] | None = None,
                 run: Mapping[str, Any] | None = None) -> None:  # fmt: skip
        self.ridge, self.l1, self.fit_intercept = ridge, l1, fit_intercept
        self.rounds, self.seed, self.privacy, self.run = rounds, seed, privacy, run

    def _algorithm(self) -> Algorithm:
        found: Algorithm = build("algorithm", self.name, ridge=self.ridge, l1=self.l1, intercept=self.fit_intercept)
        return found

    @property
    def _weights(self) -> Any:
        check_is_fitted(self, "result_")
        return self.result_.saved_model()["payload"]["w"].numpy()

    @property
    def coef_(self) -> Any:
        return self._weights[:, int(self.fit_intercept) :]

    @property
    def intercept_(self) -> Any:
        return self._weights[:, 0] if self.fit_intercept else np.zeros(len(self._weights))

    def summary(self) -> list[Coefficient]:
        """Coefficients with standard errors and p-values (without penalties), by the names of the columns."""
        check_is_fitted(self, "result_")
        return coefficients(self.result_.saved_model(), getattr(self, "feature_names_in_", None))


class LinearRegression(_Regressor, _Linear):
    """Least squares over all parties; with `ridge` and `l1` ridge regression, the lasso and the elastic net."""

    name = "least-squares"

    def __init__(self, *, ridge: float = 0.0, l1: float = 0.0, fit_intercept: bool = True, rounds: int = 10,
                 seed: int = 0, privacy: Mapping[str, Any] | None = None,
                 run: Mapping[str, Any] | None = None) -> None:  # fmt: skip
        super().__init__(ridge=ridge, l1=l1, fit_intercept=fit_intercept, rounds=rounds, seed=seed, privacy=privacy,
                         run=run)  # fmt: skip

    @property
    def coef_(self) -> Any:
        return super().coef_[0]

    @property
    def intercept_(self) -> Any:
        return float(super().intercept_[0])


class LogisticRegression(_Probable, _Linear):
    """Logistic regression over all parties, binary and multinomial."""

    name = "logistic-regression"


class LinearSVC(_Classifier, _Linear):
    """A linear support vector machine over all parties, with the squared hinge loss."""

    name = "linear-svm"


class _AnyAlgorithm(_Federated):
    """Estimators of any algorithm; `FederatedClassifier` says what the parameters are."""

    def __init__(self, algorithm: str | Mapping[str, Any] | Algorithm = "naive-bayes", *,
                 model: Callable[[], torch.nn.Module] | None = None, rounds: int = 30, seed: int = 0,
                 privacy: Mapping[str, Any] | None = None, run: Mapping[str, Any] | None = None) -> None:  # fmt: skip
        self.algorithm, self.model = algorithm, model
        self.rounds, self.seed, self.privacy, self.run = rounds, seed, privacy, run

    def _algorithm(self) -> Algorithm:
        return _algorithm(self.algorithm)

    def _model(self) -> Callable[[], torch.nn.Module] | None:
        return self.model


class FederatedClassifier(_Probable, _AnyAlgorithm):
    """Any algorithm on classes: a name, a table (`{"name": "fedavg", "local": {"lr": 0.1}}`) or an object.

    `model` makes a torch module with a score per class (`lambda: nn.Linear(4, 3)`); None for algorithms with a model of
    their own (`naive-bayes`, `id3`, `kernel-svm`).
    """


class FederatedRegressor(_Regressor, _AnyAlgorithm):
    """Any algorithm on numbers, as `FederatedClassifier`; the module has one output."""

    def __init__(self, algorithm: str | Mapping[str, Any] | Algorithm = "least-squares", *,
                 model: Callable[[], torch.nn.Module] | None = None, rounds: int = 30, seed: int = 0,
                 privacy: Mapping[str, Any] | None = None, run: Mapping[str, Any] | None = None) -> None:  # fmt: skip
        super().__init__(algorithm, model=model, rounds=rounds, seed=seed, privacy=privacy, run=run)


def _algorithm(given: str | Mapping[str, Any] | Algorithm) -> Algorithm:
    if isinstance(given, Algorithm):
        return given
    fields: Any = {"name": given} if isinstance(given, str) else given
    if not isinstance(fields, Mapping) or "name" not in fields:
        raise ConfigError(f"algorithm: {given!r} has no name; give it one, as in {{'name': 'fedavg'}}")
    found: Algorithm = build("algorithm", **fields)
    return found


def _pooled(X: Any, y: Any, parties: Any) -> tuple[Any, Any, Any]:
    """One table, its targets, and the party of each row."""
    if y is None and isinstance(X, (list, tuple)) and X and all(isinstance(p, tuple) and len(p) == 2 for p in X):
        if parties is not None:
            raise DataError("parties is for one table with its targets; here X is a list of parties already")
        pairs = [(np.asarray(x), np.asarray(target)) for x, target in X]
        for party, (x, target) in enumerate(pairs):
            if x.ndim < 1 or target.ndim < 1 or len(x) != len(target):
                raise DataError(f"party {party} has samples of the shape {x.shape} and targets of {target.shape}")
        owner = np.repeat(np.arange(len(X)), [len(target) for _, target in pairs])
        return np.concatenate([x for x, _ in pairs]), np.concatenate([target for _, target in pairs]), owner
    if parties is None:
        return X, y, np.zeros(0 if y is None else len(np.asarray(y)), dtype=int)
    owner = column_or_1d(parties)
    if y is not None and len(owner) != len(np.asarray(y)):
        raise DataError(f"parties names the party of {len(owner)} rows, and there are {len(np.asarray(y))} targets")
    if any(name is None or name != name for name in owner.tolist()):
        raise DataError("parties has missing names (None or NaN); name the party of every row")
    return X, y, owner
