"""Linear models: card 8.1. Equal to scikit-learn, or to the definition, on the samples of all parties together."""

from __future__ import annotations

import logging
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import special, stats
from sklearn import linear_model
from sklearn.svm import SVC, LinearSVC

import hansa
from hansa.classical import KernelSVM, LeastSquares, LinearSVM, LogisticNewton, coefficients
from hansa.classical.convex_sums import ConvexSums, Features, blocks
from hansa.classical.newton import aliased, whole_hessian

Pair = tuple[np.ndarray, np.ndarray]


def table(n: int = 120, columns: int = 4, classes: int | None = 2, seed: int = 0, at: float = 0.0) -> Pair:
    """Samples that no plane separates; the columns have different scales. Targets are kept in float32."""
    draws = np.random.default_rng(seed)
    x = draws.normal(size=(n, columns)) * np.arange(1, columns + 1) + at
    scores = (x - at) @ draws.normal(size=(columns, classes or 1)) * 0.4 + draws.normal(size=(n, classes or 1))
    return (x, scores[:, 0].astype(np.float32).astype(np.float64)) if classes is None else (x, scores.argmax(1))


def divided(x: np.ndarray, y: np.ndarray, parties: int = 3) -> list[Pair]:
    owner = np.arange(len(x)) * 7 % 11 % parties
    return [(x[owner == k], y[owner == k]) for k in range(parties)]


def fit(algorithm: hansa.Algorithm, parties: list[Pair], classes: int | None = 2, rounds: int = 60,
        **run: Any) -> hansa.Result:  # fmt: skip
    loss = "mse" if classes is None else "cross_entropy"
    return hansa.simulate(algorithm, hansa.Task(None, loss, parties, classes=classes), rounds=rounds, **run)


def weights(done: hansa.Result) -> np.ndarray:
    """W with the intercept in front."""
    found: np.ndarray = done.saved_model()["payload"]["w"].numpy()
    return found


def stacked(model: Any) -> np.ndarray:
    coef = np.atleast_2d(model.coef_)
    return np.concatenate([np.reshape(model.intercept_, (len(coef), 1)), coef], 1)


@settings(max_examples=15)
@given(st.data())
def test_least_squares_of_any_division_is_that_of_the_union(data: st.DataObject) -> None:
    n = data.draw(st.integers(12, 60))
    x, y = table(n, classes=None, seed=data.draw(st.integers(0, 99)), at=data.draw(st.sampled_from([0.0, 100.0])))
    owner = np.array(data.draw(st.lists(st.integers(0, 3), min_size=n, max_size=n)))
    parties = [(x[owner == k], y[owner == k]) for k in range(4)]
    done = fit(LeastSquares(), parties, None)
    assert weights(done) == pytest.approx(stacked(linear_model.LinearRegression().fit(x, y)), rel=1e-8, abs=1e-8)


def test_one_round_is_enough_for_least_squares() -> None:
    x, y = table(classes=None)
    once = fit(LeastSquares(), divided(x, y), None, rounds=1)
    assert weights(once) == pytest.approx(stacked(linear_model.LinearRegression().fit(x, y)), rel=1e-10)
    assert len(fit(LeastSquares(), divided(x, y), None).history) == 2


def test_ridge_and_the_elastic_net_are_scikit_learns() -> None:
    x, y = table(classes=None)
    ridge = linear_model.Ridge(alpha=0.3 * len(x), tol=1e-14).fit(x, y)
    assert weights(fit(LeastSquares(ridge=0.3), divided(x, y), None)) == pytest.approx(stacked(ridge), rel=1e-9)
    net = linear_model.ElasticNet(alpha=0.5, l1_ratio=0.6, tol=1e-14, max_iter=10**6).fit(x, y)
    done = fit(LeastSquares(ridge=0.2, l1=0.3), divided(x, y), None)
    assert weights(done) == pytest.approx(stacked(net), abs=1e-8)
    assert (stacked(net) == 0).any() and ((weights(done) == 0) == (stacked(net) == 0)).all()


@pytest.mark.parametrize("classes", [2, 3])
def test_least_squares_of_classes_are_the_ridge_classifier(classes: int) -> None:
    x, y = table(classes=classes)
    union = linear_model.RidgeClassifier(alpha=0.3 * len(x), tol=1e-14).fit(x, y)
    done = fit(LeastSquares(ridge=0.3), divided(x, y), classes)
    assert weights(done) == pytest.approx(stacked(union), rel=1e-9)
    assert (done.predict(x).argmax(1).numpy() == union.predict(x)).all()
    assert all(np.isnan(line.p) for line in coefficients(done.saved_model()))


def test_masked_sums_give_the_same_models() -> None:
    x, y = table(90)
    x[:, 0] *= 1e-8
    for algorithm in (LeastSquares(), LogisticNewton(), LinearSVM(), KernelSVM(features=16)):
        clear = fit(algorithm, divided(x, y))
        masked = fit(algorithm, divided(x, y), privacy={"secure": "masking"})
        assert weights(masked) == pytest.approx(weights(clear), rel=1e-8), algorithm.name
        assert len(masked.history) == len(clear.history)
        both = zip(coefficients(masked.saved_model()), coefficients(clear.saved_model()), strict=True)
        assert all(one.error == pytest.approx(other.error, rel=1e-9, nan_ok=True) for one, other in both)


def test_standard_errors_and_p_values_of_least_squares_are_those_of_the_textbook() -> None:
    x, y = table(40, classes=None)
    lines = coefficients(fit(LeastSquares(), divided(x, y), None).saved_model(), list("abcd"))
    design = np.concatenate([np.ones((40, 1)), x], 1)
    beta = np.linalg.lstsq(design, y)[0]
    errors = np.sqrt(((y - design @ beta) ** 2).sum() / 35 * np.linalg.inv(design.T @ design).diagonal())
    assert [line.name for line in lines] == ["intercept", *"abcd"]
    assert [line.value for line in lines] == pytest.approx(beta.tolist(), rel=1e-9)
    assert [line.error for line in lines] == pytest.approx(errors.tolist(), rel=1e-9)
    assert [line.p for line in lines] == pytest.approx((2 * stats.t.sf(np.abs(beta / errors), 35)).tolist(), rel=1e-7)


@pytest.mark.parametrize("classes", [2, 3])
@pytest.mark.parametrize("ridge", [0.0, 0.05])
def test_logistic_regression_is_that_of_the_union(classes: int, ridge: float) -> None:
    x, y = table(150, classes=classes)
    penalty: dict[str, Any] = {"C": 1 / (ridge * len(x))} if ridge else {"C": np.inf}
    union = linear_model.LogisticRegression(tol=1e-12, solver="newton-cg", max_iter=10**4, **penalty).fit(x, y)
    ours, theirs = weights(fit(LogisticNewton(ridge=ridge), divided(x, y), classes)), stacked(union)
    assert ours - ours.mean(0) * (classes > 2) == pytest.approx(theirs - theirs.mean(0) * (classes > 2), abs=1e-6)
    if classes > 2:
        assert ours.mean(0) == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize("classes", [2, 3])
def test_the_gradient_is_zero_where_logistic_regression_ends(classes: int) -> None:
    x, y = table(150, classes=classes)
    done = fit(LogisticNewton(ridge=0.02), divided(x, y), classes)
    w = torch.tensor(weights(done), requires_grad=True)
    scores = torch.cat([torch.ones(150, 1), torch.as_tensor(x)], 1).double() @ w.T
    scores = torch.cat([torch.zeros_like(scores), scores], 1) if classes == 2 else scores
    value = torch.nn.functional.cross_entropy(scores, torch.as_tensor(y)) + 0.01 * (w[:, 1:] ** 2).sum()
    value.backward()
    assert w.grad is not None and float(w.grad.abs().max()) < 1e-10
    assert len(done.history) < 12


def test_standard_errors_of_logistic_regression_follow_from_the_information() -> None:
    """For three classes: of the differences to class 0, from the information of that coding."""
    x, y = table(150, columns=2, classes=3)
    lines = coefficients(fit(LogisticNewton(), divided(x, y), 3).saved_model())
    design = np.concatenate([np.ones((150, 1)), x], 1)
    beta = np.array([line.value for line in lines]).reshape(2, 3)
    p = np.exp(np.concatenate([np.zeros((150, 1)), design @ beta.T], 1))
    p = (p / p.sum(1, keepdims=True))[:, 1:]
    information = np.block([
        [(design * (p[:, [a]] * ((a == b) - p[:, [b]]))).T @ design for b in range(2)] for a in range(2)
    ])  # fmt: skip
    errors = np.sqrt(np.linalg.inv(information).diagonal())
    assert [line.error for line in lines] == pytest.approx(errors.tolist(), rel=1e-7)
    assert [line.outcome for line in lines] == [1, 1, 1, 2, 2, 2]
    expected = 2 * stats.norm.sf(np.abs(beta.flatten() / errors))
    assert [line.p for line in lines] == pytest.approx(expected.tolist(), rel=1e-6)


def test_a_sparse_logistic_regression_is_scikit_learns() -> None:
    x, y = table(200, columns=6)
    union = linear_model.LogisticRegression(
        l1_ratio=1.0, C=1 / (0.05 * len(x)), solver="saga", tol=1e-12, max_iter=10**5
    ).fit(x, y)
    ours = weights(fit(LogisticNewton(l1=0.05), divided(x, y)))
    assert ours == pytest.approx(stacked(union), abs=1e-5)
    assert (ours == 0).any()


@pytest.mark.parametrize("classes", [2, 3])
def test_the_squared_hinge_machine_is_linear_svc(classes: int) -> None:
    x, y = table(120, classes=classes)
    union = LinearSVC(C=1 / (0.05 * len(x)), dual=False, tol=1e-12, max_iter=10**5).fit(x, y)
    assert weights(fit(LinearSVM(ridge=0.05), divided(x, y), classes)) == pytest.approx(stacked(union), abs=1e-7)


@pytest.mark.slow
def test_the_hinge_machine_approaches_its_minimum_and_does_not_depend_on_the_division() -> None:
    x, y = table(120)
    done = fit(LinearSVM(ridge=0.1, loss="hinge"), divided(x, y), rounds=300)
    whole = fit(LinearSVM(ridge=0.1, loss="hinge"), [(x, y)], rounds=300)
    assert weights(done) == pytest.approx(weights(whole), abs=1e-10)
    union = LinearSVC(C=1 / (0.1 * len(x)), loss="hinge", tol=1e-10, max_iter=10**6).fit(x, y)

    def value(w: np.ndarray) -> float:
        margin = (w[:, 0] + x @ w[0, 1:]) * (2 * y - 1)
        return float(np.maximum(0, 1 - margin).mean() + 0.05 * (w**2).sum())

    assert value(stacked(union)) - 1e-9 <= value(weights(done)) < value(stacked(union)) + 5e-3


def test_random_features_estimate_the_kernel_and_learn_what_no_plane_can() -> None:
    draws = np.random.default_rng(0)
    x = draws.normal(size=(200, 2))
    y = (np.linalg.norm(x, axis=1) > 1.2).astype(np.int64)
    f = Features(False, 4096, 0.5, 7).of(torch.as_tensor(x[:50])).numpy()
    apart = ((x[:50, None] - x[None, :50]) ** 2).sum(-1)
    assert np.abs(f @ f.T - np.exp(-0.5 * apart)).max() < 0.08
    done = fit(KernelSVM(ridge=0.005, features=128, gamma=0.5), divided(x, y))
    exact = SVC(gamma=0.5).fit(x, y)
    assert (done.predict(x).argmax(1).numpy() == exact.predict(x)).mean() > 0.95
    assert (fit(LinearSVM(), divided(x, y)).predict(x).argmax(1).numpy() == y).mean() < 0.8


@pytest.mark.parametrize("loss", ["squared", "logistic", "squared-hinge"])
@pytest.mark.parametrize("rows", [1, 3])
def test_sums_are_the_derivatives_of_their_loss(loss: str, rows: int) -> None:
    op, draws = ConvexSums(loss), torch.Generator().manual_seed(0)
    f = torch.cat([torch.ones(30, 1), torch.randn(30, 2, generator=draws)], 1).double()
    y = torch.randint(0, max(2, rows), (30,), generator=draws)
    y = torch.randn(30, rows, generator=draws).double() if loss == "squared" else y
    w = torch.randn(rows, 3, generator=draws).double()
    got = op.part(w, f, y)
    gradient = torch.autograd.functional.jacobian(lambda v: op.part(v, f, y)["loss"], w)
    hessian = torch.autograd.functional.hessian(lambda v: op.part(v, f, y)["loss"], w).view(3 * rows, 3 * rows)
    assert torch.allclose(got["gradient"], gradient, atol=1e-10)
    assert got["hessian"].shape == (blocks(loss, rows), 3, 3)
    assert torch.allclose(whole_hessian(got["hessian"], rows), hessian, atol=1e-10)


def test_a_constant_column_and_a_column_twice_keep_the_coefficient_zero(caplog: pytest.LogCaptureFixture) -> None:
    x, y = table(60, columns=3, classes=None)
    wide = np.concatenate([x[:, :1], np.full((60, 1), 5.0), x[:, 1:], 2 * x[:, :1] - x[:, 1:2]], 1)
    with caplog.at_level(logging.WARNING, logger="hansa"):
        done = fit(LeastSquares(), divided(wide, y), None)
    assert "constant, or a combination of other columns: column 1, column 4;" in caplog.text
    found = weights(done)[0]
    assert found[2] == 0 and found[5] == 0
    assert found[[0, 1, 3, 4]] == pytest.approx(stacked(linear_model.LinearRegression().fit(x, y))[0], rel=1e-9)
    lines = coefficients(done.saved_model())
    assert np.isnan(lines[2].error) and np.isnan(lines[2].p) and lines[1].error > 0
    zeros = torch.zeros(2, 2, dtype=torch.float64)
    assert aliased(zeros, zeros[0]).all()


def exact_fit(x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Coefficients of least squares and their errors, with columns about exact means."""
    means = [sum(map(Fraction, column)) / len(x) for column in x.T]
    apart = np.array([[float(Fraction(value) - mean) for value, mean in zip(row, means, strict=True)] for row in x])
    q, r = np.linalg.qr(np.concatenate([np.ones((len(x), 1)), apart], 1))
    beta, back = np.linalg.solve(r, q.T @ y), np.eye(len(r))
    back[0, 1:] = [-float(mean) for mean in means]
    left, root = y - q @ (q.T @ y), back @ np.linalg.inv(r)
    return back @ beta, np.sqrt((root**2).sum(1) * (left @ left) / (len(x) - len(r)))


@pytest.mark.parametrize("far", [0.0, 1e3, 1e6, 1e9])
@pytest.mark.parametrize("apart", [1e-6, 1.0])
def test_columns_far_from_zero_keep_their_coefficient(far: float, apart: float, caplog: Any) -> None:
    x, y = table(90, columns=3, classes=None)
    x = (x + np.array([far, 0, -far])) * apart
    parties = divided(x, y)
    values, errors = exact_fit(x, y)
    for rounds in (1, 9):
        lines = coefficients(fit(LeastSquares(), parties, None, rounds=rounds).saved_model())
        assert [line.value for line in lines] == pytest.approx(values.tolist(), rel=1e-8), rounds
        assert [line.error for line in lines] == pytest.approx(errors.tolist(), rel=1e-8), rounds
    assert "constant" not in caplog.text


@pytest.mark.parametrize("classes", [2, 3])
def test_a_shift_of_the_columns_moves_the_intercept_of_a_logistic_regression_only(classes: int) -> None:
    x, y = table(150, columns=3, classes=classes)
    x = np.round(x * 2**10) / 2**10  # the shifted columns have the same deviations
    near, far = (coefficients(fit(LogisticNewton(), divided(x + at, y), classes).saved_model()) for at in (0, 2.0**22))
    for here, there in zip(near, far, strict=True):
        if here.name != "intercept":
            assert (there.value, there.error) == pytest.approx((here.value, here.error), rel=1e-8)
    beta = np.array([line.value for line in near]).reshape(classes - 1, 4)
    moved = np.array([line.value for line in far]).reshape(classes - 1, 4)
    assert moved[:, 0] == pytest.approx(beta[:, 0] - 2.0**22 * beta[:, 1:].sum(1), rel=1e-8)


def test_a_column_that_nearly_depends_on_others_keeps_its_coefficient_as_in_r(caplog: Any) -> None:
    """R's `lm` leaves out columns whose part outside the others is below 1e-7 of them."""
    x, y = table(90, columns=2, classes=None)
    draws = np.random.default_rng(1).normal(size=(90, 1))
    for part, digits in ((1e-4, 1e-7), (1e-6, 1e-2), (1e-9, None)):  # digits of errors are lost with the part's square
        caplog.clear()
        wide = np.concatenate([x, x.sum(1, keepdims=True) + part * draws], 1)
        line = coefficients(fit(LeastSquares(), divided(wide, y), None).saved_model())[3]
        assert ("column 2;" in caplog.text) == (digits is None)
        if digits is not None:
            values, errors = exact_fit(wide, y)
            assert line.value == pytest.approx(values[3], rel=1e-8)
            assert line.error == pytest.approx(errors[3], rel=digits)


def test_classes_that_a_column_separates_are_refused_by_its_name_or_number() -> None:
    x, y = table(60, columns=2)
    wide = np.concatenate([x, (y[:, None] - 0.5) * np.linspace(1, 2, 60)[:, None]], 1)
    with pytest.raises(hansa.DataError, match=r"the classes are separated by column 2,.*ridge above 0"):
        fit(LogisticNewton(), divided(wide, y), rounds=100)
    named = hansa.Task(None, "cross_entropy", divided(wide, y), classes=2, header=["sick", "age", "chol", "thal"])
    with pytest.raises(hansa.DataError, match=r"the classes are separated by column 'thal',.*ridge above 0"):
        hansa.simulate(LogisticNewton(), named, rounds=100)
    assert fit(LogisticNewton(ridge=0.01), divided(wide, y)).state.slots["done"]


@pytest.mark.parametrize("protection", [None, {"secure": "masking"}])
@pytest.mark.parametrize(("classes", "held"), [(2, [0]), (2, [1]), (3, [0, 2])])
def test_a_class_without_samples_is_refused(protection: Any, classes: int, held: list[int]) -> None:
    x, y = table(60)
    (absent,) = {0, 1, 2}.intersection(range(classes)) - {*held}
    with pytest.raises(hansa.DataError, match=f"no sample has the class {absent}, so .* set ridge above 0"):
        fit(LogisticNewton(), divided(x, np.array(held)[y % len(held)]), classes, privacy=protection)


def test_standard_errors_are_those_at_the_solution_not_before_the_last_step() -> None:
    for seed in (12, 46):  # the last steps change errors by 1e-9
        x, y = table(60, columns=3, seed=seed)
        lines = coefficients(fit(LogisticNewton(), divided(x, y)).saved_model())
        design = np.concatenate([np.ones((60, 1)), x], 1)
        p = special.expit(design @ [line.value for line in lines])
        errors = np.sqrt(np.linalg.inv((design * (p * (1 - p))[:, None]).T @ design).diagonal())
        assert [line.error for line in lines] == pytest.approx(errors.tolist(), rel=1e-12), seed


@pytest.mark.parametrize("classes", [2, 3])
def test_a_fit_that_ends_before_it_converged_says_so_and_has_no_p_values(classes: int, caplog: Any) -> None:
    parties = divided(*table(150, columns=2, classes=classes))
    assert "problem" not in fit(LogisticNewton(), parties, classes).summary
    assert not caplog.text
    early = fit(LogisticNewton(), parties, classes, rounds=3)
    why = "logistic-regression has not converged: its coefficients are not final and have no standard errors"
    assert why in caplog.text and why in early.summary["problem"]
    assert all(np.isnan([line.error, line.p]).all() for line in coefficients(early.saved_model()))
    assert "problem" not in fit(LeastSquares(), parties, classes, rounds=1).summary  # exact in a round
    ridge = fit(LogisticNewton(ridge=0.1), parties, classes, rounds=2).summary["problem"]
    assert ridge.endswith("its coefficients are not final; raise run.rounds")


def test_a_party_with_one_class_or_without_samples_changes_nothing() -> None:
    x, y = table(90, classes=3)
    parties = [(x[y == 0], y[y == 0]), (x[y != 0], y[y != 0])]
    whole = weights(fit(LogisticNewton(ridge=0.01), [(x, y)], 3))
    assert weights(fit(LogisticNewton(ridge=0.01), parties, 3)) == pytest.approx(whole, abs=1e-10)
    empty = [*parties, (x[:0], y[:0])]
    assert weights(fit(LogisticNewton(ridge=0.01), empty, 3)) == pytest.approx(whole, abs=1e-10)


def test_settings_that_cannot_be_are_refused_in_one_sentence() -> None:
    with pytest.raises(hansa.ConfigError, match="ridge must be at least 0, got -1"):
        LeastSquares(ridge=-1)
    with pytest.raises(hansa.ConfigError, match="ridge must be above 0, got 0; it sets the width of the margin"):
        LinearSVM(ridge=0)
    with pytest.raises(hansa.ConfigError, match="loss must be 'squared-hinge' or 'hinge', got 'log'"):
        LinearSVM(loss="log")
    with pytest.raises(hansa.ConfigError, match="features must be at least 1 and at most 8192"):
        KernelSVM(features=10**6)
    with pytest.raises(hansa.ConfigError, match="logistic-regression is a classifier"):
        fit(LogisticNewton(), [table(classes=None)], None)
