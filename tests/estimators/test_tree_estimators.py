"""Boosting and forests as estimators with scikit-learn's habits."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from sklearn.base import clone
from sklearn.datasets import load_breast_cancer, load_diabetes
from sklearn.ensemble import HistGradientBoostingClassifier
from sklearn.metrics import roc_auc_score
from sklearn.utils.estimator_checks import parametrize_with_checks

from hansa.sklearn import BoostingClassifier, BoostingRegressor, ForestClassifier, ForestRegressor

SMALL: list[Any] = [
    BoostingClassifier(rounds=5, bins=16, max_depth=3, min_samples=1),
    BoostingRegressor(rounds=30, bins=64, max_depth=4, lr=0.3, min_samples=1),
    ForestClassifier(trees=4, per_round=4, bins=16, max_depth=4),
    ForestRegressor(trees=8, per_round=8, bins=64, max_depth=6),
]


@pytest.mark.thin(20)
@pytest.mark.filterwarnings("ignore")
@parametrize_with_checks(SMALL)
def test_scikit_learns_own_checks_hold(estimator: Any, check: Any) -> None:
    check(estimator)


def parties_of(x: Any, y: Any) -> list[tuple[Any, Any]]:
    return [(x[k::3], y[k::3]) for k in range(3)]


@pytest.mark.slow
def test_the_auc_is_that_of_scikit_learns_boosting_on_the_pooled_samples() -> None:
    x, y = load_breast_cancer(return_X_y=True)
    apart = []
    for seed in range(5):
        order = np.random.default_rng(seed).permutation(len(y))
        train, test = order[:400], order[400:]
        settings = {"max_depth": 3, "learning_rate": 0.1, "l2_regularization": 1.0, "max_iter": 30}
        theirs = HistGradientBoostingClassifier(**settings, early_stopping=False).fit(x[train], y[train])
        ours = BoostingClassifier(max_depth=3, bins=64, rounds=30).fit(parties_of(x[train], y[train]))
        scores = (roc_auc_score(y[test], model.predict_proba(x[test])[:, 1]) for model in (ours, theirs))
        apart.append(next(scores) - next(scores))
    assert abs(np.mean(apart)) < 0.004


@pytest.mark.slow
def test_missing_values_masks_importances_and_clones() -> None:
    x, y = load_breast_cancer(return_X_y=True)
    x = np.where(np.random.default_rng(0).random(x.shape) < 0.2, np.nan, x)
    model = BoostingClassifier(rounds=5, bins=32, privacy={"secure": "masking"}).fit(parties_of(x, y))
    assert model.score(x, y) > 0.9 and model.feature_importances_.sum() == pytest.approx(1)
    assert model.to_lightgbm().startswith("tree\n")
    again = clone(model).set_params(privacy=None).fit(parties_of(x, y))
    assert np.array_equal(again.predict_proba(x), model.predict_proba(x))
    forest = ForestClassifier(trees=10, bins=32, max_depth=5).fit(parties_of(x, y))
    assert forest.oob_score_ > 0.85 and forest.score(x, y) > 0.9
    numbers = load_diabetes(return_X_y=True)
    forest = ForestRegressor(trees=10, bins=32, max_depth=5).fit(*numbers)
    assert 1000 < forest.oob_score_ < 5000 and forest.score(*numbers) > 0.5
