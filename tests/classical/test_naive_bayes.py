"""Gaussian naive Bayes: card 8.2 of the specification."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.naive_bayes import GaussianNB

import hansa

Party = tuple[np.ndarray, np.ndarray]


def classes(n: int, features: int = 3, labels: int = 3, seed: int = 0, at: float = 0.0) -> Party:
    make = np.random.default_rng(seed)
    y = make.integers(0, labels, n)
    return make.normal(y[:, None] * np.arange(1, features + 1) * 0.7 + at, 1 + y[:, None], (n, features)), y


def divided(x: np.ndarray, y: np.ndarray, owner: np.ndarray, parties: int) -> list[Party]:
    return [(x[owner == k], y[owner == k]) for k in range(parties)]


def learned(parties: list[Party], labels: int, rounds: int = 2, **fields: float) -> hansa.Result:
    task = hansa.Task(None, "cross_entropy", parties, classes=labels)
    return hansa.simulate(hansa.GaussianNB(**fields), task, rounds=rounds)


def compare(parties: list[Party], labels: int, rounds: int = 2, rel: float = 1e-9, **fields: float) -> None:
    """Equal to scikit-learn on the union: parameters, scores, predictions."""
    x, y = np.concatenate([p[0] for p in parties]), np.concatenate([p[1] for p in parties])
    union = GaussianNB(**fields).fit(x, y)
    done = learned(parties, labels, rounds, **fields)
    slots, seen = done.state.slots, union.classes_
    assert slots["mean"].numpy()[seen] == pytest.approx(union.theta_, rel=rel, abs=rel)
    assert slots["var"].numpy()[seen] == pytest.approx(union.var_, rel=rel, abs=rel)
    assert slots["prior"].numpy()[seen] == pytest.approx(union.class_prior_, abs=1e-15)
    scores = done.predict(x).numpy()
    assert np.array_equal(scores.argmax(1), union.predict(x))
    assert scores[:, seen] == pytest.approx(union._joint_log_likelihood(x), rel=1e-7, abs=1e-7)


@settings(max_examples=25)
@given(st.data())
def test_any_division_of_the_samples_gives_scikit_learns_model_of_the_union(data: st.DataObject) -> None:
    labels = data.draw(st.integers(2, 4))
    n = data.draw(st.integers(10, 40))
    x, y = classes(n, labels=labels, seed=data.draw(st.integers(0, 99)))
    y[:labels] = np.arange(labels)
    y[labels : 2 * labels] = np.arange(labels)  # two of each class at least, so that every variance is one
    owner = np.array(data.draw(st.lists(st.integers(0, 3), min_size=n, max_size=n)))
    for rounds in (1, 2):
        compare(divided(x, y, owner, 4), labels, rounds, rel=1e-9)


def test_a_class_that_some_parties_lack_and_a_party_without_samples_are_no_trouble() -> None:
    x, y = classes(60)
    owner = np.where(y == 2, 1, np.arange(60) % 2)  # class 2 is at party 1 alone; party 2 is empty
    parties = divided(x, y, owner, 3)
    assert not (parties[0][1] == 2).any()
    assert len(parties[2][1]) == 0
    compare(parties, 3)
    assert learned(parties, 3).history[0]["missing"] == {"2": "it has no samples"}


def test_a_class_that_nobody_has_is_never_predicted() -> None:
    x, y = classes(40, labels=2)
    done = learned([(x, y)], labels=4)
    scores = done.predict(x)
    assert scores.shape == (40, 4)
    assert int(scores.argmax(1).max()) < 2
    assert bool(torch.isfinite(scores).all())
    assert np.array_equal(scores.argmax(1).numpy(), GaussianNB().fit(x, y).predict(x))
    # An absent class has mean 0 and next to no variance: a sample at 0 would be its own, were it not left out.
    x, y = classes(40, features=300, labels=2)
    assert int(learned([(x, y)], labels=4).predict(np.zeros((1, 300))).argmax(1)) < 2


def test_data_far_from_zero_need_the_second_round_and_get_it() -> None:
    x, y = classes(200, at=1e8)
    parties = divided(x, y, np.arange(200) % 5, 5)
    compare(parties, 3, rounds=2, rel=1e-6)
    union = GaussianNB().fit(x, y)
    # 1e8 squared has 16 digits before the point, as many as a double holds: one round leaves nothing of the variance.
    once = learned(parties, 3, rounds=1).state.slots["var"].numpy()
    assert np.abs(once - union.var_).max() > 1e-2
    assert np.abs(learned(parties, 3, rounds=2).state.slots["var"].numpy() - union.var_).max() < 1e-6


@pytest.mark.parametrize("sums", [{}, {"sums": "exact"}, {"privacy": {"secure": "masking"}}], ids=str)
@pytest.mark.parametrize(("scale", "at"), [(1e-12, 0.0), (1e-4, 1e6), (1.0, 1e6), (1e12, 0.0), (1e12, 1e6)])
def test_moments_keep_nine_digits_at_every_scale(scale: float, at: float, sums: dict[str, Any]) -> None:
    x, y = classes(60, features=2, labels=2)
    x = (x + at) * scale
    task = hansa.Task(None, "cross_entropy", divided(x, y, np.arange(60) % 3, 3), classes=2)
    done = hansa.simulate(hansa.GaussianNB(var_smoothing=0.0), task, rounds=2, **sums)
    pooled = [x[y == label].astype(np.longdouble) for label in (0, 1)]
    assert done.state.slots["mean"].numpy() == pytest.approx(np.stack([one.mean(0) for one in pooled]), rel=1e-9)
    assert done.state.slots["var"].numpy() == pytest.approx(np.stack([one.var(0) for one in pooled]), rel=1e-9, abs=0)


@pytest.mark.parametrize("smoothing", [0.0, 1e-9, 0.1, 10.0])
def test_smoothing_is_a_share_of_the_largest_variance_of_all_data_added_once(smoothing: float) -> None:
    x, y = classes(50)
    x[:, 2] *= 30
    compare(divided(x, y, np.arange(50) % 3, 3), 3, var_smoothing=smoothing)


def test_a_missing_party_leaves_the_model_of_the_others() -> None:
    x, y = classes(60)
    parties = divided(x, y, np.arange(60) % 3, 3)
    task = hansa.Task(None, "cross_entropy", parties, classes=3)
    done = hansa.simulate(hansa.GaussianNB(), task, rounds=2, absent=lambda party, round: party == 1)
    rest = learned([parties[0], parties[2]], 3)
    for name in ("mean", "var", "prior"):
        assert torch.allclose(done.state.slots[name], rest.state.slots[name], rtol=1e-12)


def test_it_stops_by_itself_after_two_rounds() -> None:
    x, y = classes(30)
    done = learned([(x, y)], 3, rounds=10)
    assert len(done.history) == 2
    assert done.summary["stopped"] == "the algorithm has finished"


def test_only_sums_leave_a_party() -> None:
    from hansa.classical.naive_bayes import ClassMoments

    x, y = classes(1000, features=7)
    centre = torch.zeros(3, 7, dtype=torch.float64)
    shapes = ClassMoments().expects({"centre": centre})
    assert {name: shape for name, (shape, _) in shapes.items()} == {"count": (3,), "sum": (3, 7), "square": (3, 7)}
    small, large = (learned([(x[:n], y[:n])], 3, rounds=1).history[0]["bytes_up"] for n in (20, 1000))
    assert small == large


def test_it_refuses_targets_that_are_no_classes() -> None:
    x, _ = classes(10)
    with pytest.raises(hansa.ConfigError, match="naive-bayes is a classifier"):
        hansa.simulate(hansa.GaussianNB(), hansa.Task(None, "mse", [(x, np.linspace(0, 1, 10))]))
