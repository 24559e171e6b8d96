"""Estimators with scikit-learn's habits."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from sklearn import linear_model
from sklearn.base import clone
from sklearn.datasets import load_breast_cancer, load_diabetes, load_iris
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import parametrize_with_checks

import hansa
from hansa.sklearn import FederatedClassifier, FederatedRegressor, LinearRegression, LinearSVC, LogisticRegression


@pytest.mark.filterwarnings("ignore")
@parametrize_with_checks([LinearRegression(ridge=1e-6), LogisticRegression(), LinearSVC(), FederatedClassifier()])
def test_scikit_learns_own_checks_hold(estimator: Any, check: Any) -> None:
    check(estimator)


def parties_of(x: Any, y: Any, count: int = 3) -> list[tuple[Any, Any]]:
    return [(x[k::count], y[k::count]) for k in range(count)]


def test_a_list_of_parties_and_one_table_with_the_party_of_each_row_give_the_same_model() -> None:
    data = load_diabetes()
    x, y = data.data, data.target + 1 / 3
    listed = LinearRegression().fit(parties_of(x, y))
    rows = LinearRegression().fit(x, y, parties=[f"site {k % 3}" for k in range(len(x))])
    union = linear_model.LinearRegression().fit(x, y)
    assert listed.coef_ == pytest.approx(union.coef_, rel=1e-7) == rows.coef_
    assert listed.intercept_ == pytest.approx(union.intercept_, rel=1e-9)
    assert listed.score(x, y) == pytest.approx(union.score(x, y), abs=1e-12)
    assert listed.n_rounds_ == 2
    assert [line.name for line in listed.summary()][:2] == ["intercept", "x0"]
    assert sum(line.p < 0.05 for line in listed.summary()) == 5  # as every textbook on these data has it


def test_targets_keep_all_their_digits() -> None:
    draws = np.random.default_rng(0)
    x = draws.normal(size=(200, 2))
    y = 1e8 + x @ [1.0, 2.0] + 0.1 * draws.normal(size=200)
    assert LinearRegression().fit(parties_of(x, y)).coef_ == pytest.approx(
        linear_model.LinearRegression().fit(x, y).coef_, rel=1e-6
    )


def test_rows_that_do_not_fit_together_are_refused_in_one_sentence() -> None:
    x, y = np.random.default_rng(0).normal(size=(8, 2)), np.arange(8.0)
    with pytest.raises(hansa.DataError, match=r"party 0 has samples of the shape \(7, 2\) and targets of \(8,\)"):
        LinearRegression().fit([(x[:-1], y), (x, y[:-1])])  # as many samples as targets in all
    for missing in (None, np.nan):
        with pytest.raises(hansa.DataError, match="parties has missing names"):
            LinearRegression().fit(x, y, parties=[0, 1, missing, 1, 0, 0, 1, 1])
    with pytest.raises(hansa.ConfigError, match="algorithm: 3 has no name"):
        FederatedClassifier(3).fit(x, y > 3)  # type: ignore[arg-type]


def test_clone_and_grid_search_divide_the_parties_with_the_rows() -> None:
    x, y = load_breast_cancer(return_X_y=True)
    owner = np.arange(len(x)) % 4
    scaled = StandardScaler().fit_transform(x)
    search = GridSearchCV(LogisticRegression(), {"ridge": [0.001, 10.0]}, cv=3).fit(scaled, y, parties=owner)
    assert search.best_params_ == {"ridge": 0.001}
    assert clone(search.best_estimator_).get_params()["ridge"] == 0.001
    pipeline = make_pipeline(StandardScaler(), LogisticRegression(ridge=0.01))
    whole = make_pipeline(StandardScaler(), linear_model.LogisticRegression(C=1 / (0.01 * len(x) * 2 / 3)))
    assert cross_val_score(pipeline, x, y, cv=3).mean() == pytest.approx(
        cross_val_score(whole, x, y, cv=3).mean(), abs=0.006
    )


@pytest.mark.slow
def test_any_torch_task_and_any_algorithm_is_an_estimator() -> None:
    x, y = load_iris(return_X_y=True)
    x, names = StandardScaler().fit_transform(x), np.array(["setosa", "versicolor", "virginica"])[y]
    table = {"name": "fedavg", "local": {"name": "sgd", "lr": 0.3, "epochs": 3, "batch": 16}}
    net = FederatedClassifier(table, model=lambda: torch.nn.Linear(4, 3), rounds=20).fit(parties_of(x, names))
    assert net.score(x, names) > 0.9 and set(net.predict(x)) == set(names)
    assert net.predict_proba(x).sum(1) == pytest.approx(1)
    bayes = FederatedClassifier("naive-bayes", privacy={"secure": "masking"}).fit(parties_of(x, names))
    assert bayes.score(x, names) > 0.9
    target = x[:, 0] * 2 + 1
    table = {"name": "fedavg", "local": {"name": "sgd", "lr": 0.1, "epochs": 5, "batch": 16}}
    line = FederatedRegressor(table, model=lambda: torch.nn.Linear(4, 1), rounds=20).fit(parties_of(x, target))
    assert line.score(x, target) > 0.9 and line.predict(x).shape == target.shape


def test_bad_input_gets_a_sentence() -> None:
    x, y = load_iris(return_X_y=True)
    with pytest.raises(hansa.DataError, match="parties names the party of 3 rows, and there are 150 targets"):
        LogisticRegression().fit(x, y, parties=[0, 1, 2])
    with pytest.raises(hansa.DataError, match="here X is a list of parties already"):
        LogisticRegression().fit(parties_of(x, y), parties=y)
    with pytest.raises(hansa.ConfigError, match="has no name"):
        FederatedClassifier({"local": "sgd"}).fit(x, y)
    with pytest.raises(ValueError, match="each party gets a model of its own"):
        FederatedClassifier("ditto", model=lambda: torch.nn.Linear(4, 3), rounds=1).fit(x, y)
    for estimator in (LinearRegression(), LogisticRegression(), LinearSVC()):
        with pytest.raises(ValueError, match="sums of squares overflow: standardise the data"):
            estimator.fit(x * np.array([1, 1, 1e200, 1]), y)
