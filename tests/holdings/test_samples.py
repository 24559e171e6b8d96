"""Checks on samples: shapes of targets, class numbers, values that are not finite."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import hansa
from hansa.numerics.losses import metrics, named_loss
from hansa.plumbing.errors import ConfigError, DataError

RNG = np.random.default_rng(0)
X = [RNG.normal(size=(40, 4)).astype(np.float32) for _ in range(4)]
WEIGHTS = np.array([1.0, -2.0, 0.5, 1.0], dtype=np.float32)


def model(outputs: int = 2) -> Any:
    return lambda: nn.Linear(4, outputs)


def labels(shift: int = 0, scale: int = 1) -> list[Any]:
    return [((x @ WEIGHTS) > 0).astype(np.int64) * scale + shift for x in X]


def run(ys: list[Any], loss: Any = "cross_entropy", outputs: int = 2, **task: Any) -> hansa.run.result.Result:
    given = {"model": model(outputs), "party_tests": list(zip(X[:3], ys[:3], strict=True)), "test": (X[3], ys[3])}
    return hansa.simulate(hansa.FedAvg(), hansa.Task(loss=loss, parties=list(zip(X[:3], ys[:3], strict=True)),
                                                     **{**given, **task}), rounds=3)  # fmt: skip


COLUMN: list[Any] = [lambda y: y[:, None], lambda y: y[:, None].astype(np.float64), lambda y: y.astype(np.float32)]


@pytest.mark.parametrize("form", COLUMN, ids=["column", "float column", "float"])
@pytest.mark.parametrize("loss", ["cross_entropy", "bce", "mse", "mae"])
def test_targets_in_a_column_are_those_in_a_row(loss: str, form: Any) -> None:
    outputs = 2 if loss == "cross_entropy" else 1
    flat, column = (run([shape(y) for y in labels()], loss, outputs) for shape in (lambda y: y, form))
    assert [{k: v for k, v in line.items() if k != "seconds"} for line in flat.history] == [
        {k: v for k, v in line.items() if k != "seconds"} for line in column.history
    ]
    if loss == "cross_entropy":
        assert flat.summary["accuracy"] > 0.7 and "auc" in flat.summary


@pytest.mark.slow
def test_a_model_without_a_last_dimension_takes_targets_in_a_column() -> None:
    class Scalar(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 1)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.layer(x)
            return out.squeeze(-1)

    assert run([y[:, None].astype(np.float32) for y in labels()], "mse", model=Scalar).summary["loss"] < 1


def test_accuracy_compares_each_output_with_its_own_target() -> None:
    output, target = torch.tensor([[2.0, 1.0], [0.0, 3.0], [5.0, 1.0]]), torch.tensor([0, 1, 1])
    flat = metrics("cross_entropy", output, target)
    assert flat["accuracy"] == pytest.approx(2 / 3)
    assert metrics("cross_entropy", output, target[:, None]) == flat
    assert metrics("cross_entropy", output[:, None], target) == flat
    with pytest.raises(ConfigError, match=r"output \(3, 2\) does not fit the targets \(6,\)"):
        metrics("cross_entropy", output, torch.zeros(6, dtype=torch.int64))


def test_a_loss_function_that_broadcasts_samples_against_samples_is_refused() -> None:
    loss = named_loss(lambda output, target: (output - target) ** 2)
    with pytest.raises(ConfigError, match=r"gave \(3, 3\) for outputs \(3, 1\) and targets \(3,\)"):
        loss(torch.zeros(3, 1), torch.zeros(3))
    assert loss(torch.ones(3, 2), torch.zeros(3, 2)).tolist() == [1, 1, 1]


BAD_LABELS: list[tuple[Any, str]] = [
    (labels(shift=1), "parties: class numbers go from 1 to 2, and none is 0; number the classes from 0"),
    (labels(shift=100, scale=100), "parties: class numbers go from 100 to 200, and none is 0"),
    (labels(scale=100), "parties: class numbers reach 100, but at most 6 different ones occur"),
    ([*labels()[:2], labels(shift=1)[2], labels()[3]],
     "parties: at 'c' class numbers go from 1 to 2, those of other parties from 0 to 1; number the classes alike"),
    (labels(shift=-1), r"parties: targets must lie in 0\.\.\d, got -1\.\.0"),
    ([np.array(["no", "yes"])[y] for y in labels()], r"parties\[0\] y: the targets are strings such as '(no|yes)'"),
    ([np.array(["no", "yes"], dtype=object)[y] for y in labels()], r"parties\[0\] y: the targets are strings"),
    ([np.eye(2, dtype=np.float32)[y] for y in labels()], "parties: the targets look one-hot"),
    ([np.eye(2, dtype=np.int64)[y] for y in labels()], "parties: the targets look one-hot"),
    ([y + 0.5 for y in labels()], "parties: cross_entropy needs whole class numbers"),
    ([np.where(np.arange(40) == 3, math.inf, y) for y in labels()], "parties: targets of party 'a' .row 3. are NaN or"),
]  # fmt: skip


@pytest.mark.parametrize(("ys", "message"), BAD_LABELS, ids=[message[:50] for _, message in BAD_LABELS])
def test_labels_that_are_no_class_numbers_are_refused_before_the_first_round(ys: list[Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        run(ys, names=["a", "b", "c"], outputs=200)


def test_a_stated_number_of_classes_allows_what_looks_odd() -> None:
    run(labels(shift=1), outputs=3, classes=3)
    run([*labels()[:2], labels(shift=1)[2], labels()[3]], outputs=3, classes=3)


def test_a_party_may_hold_few_classes_and_a_class_that_nobody_else_holds() -> None:
    run([*labels()[:2], np.arange(40) % 3, labels()[3]], outputs=3)
    ys = [np.arange(40) % 2, np.arange(40) % 2 + 1, np.arange(40) % 2 + 2, labels()[3]]
    run(ys, outputs=4)


HELD: list[tuple[tuple[int, ...], ...]] = [
    ((0, 1, 2, 3, 4), (5, 6, 7, 8, 9)), ((0, 1), (0, 1), (2, 3)), ((0, 1), (0, 1), (2,)), ((0, 1), (0, 1), (1,)),
    ((0, 1, 2), (0, 2), (1,)), ((0, 1, 2), (0, 1, 2), (1, 2)), ((0,), (1,)), ((0, 1, 2), (0, 1, 2), (2, 3, 4)),
]  # fmt: skip


@pytest.mark.parametrize("held", HELD, ids=str)
def test_parties_may_divide_the_classes_among_them(held: tuple[tuple[int, ...], ...]) -> None:
    parties = [(X[k], np.resize(np.array(classes), 40)) for k, classes in enumerate(held)]
    hansa.simulate(hansa.FedAvg(), hansa.Task(model(10), parties=parties), rounds=1)


def test_whole_numbers_that_are_no_classes_are_refused_with_the_loss_that_they_need() -> None:
    prices = [(x, (250_000 + 1000 * x[:, 0]).astype(np.int64)) for x in X]
    with pytest.raises(DataError, match=r"and none is 0; .*for quantities such as prices, set the loss to 'mse'"):
        hansa.simulate(hansa.FedAvg(), hansa.Task(model(1), parties=prices), rounds=1)
    prices[0][1][0] = 0
    with pytest.raises(DataError, match=r"class numbers reach .*for quantities such as prices, set the loss to 'mse'"):
        hansa.simulate(hansa.FedAvg(), hansa.Task(model(1), parties=prices[:1]), rounds=1)


def test_two_parties_that_number_their_classes_differently_are_refused() -> None:
    parties = list(zip(X[:2], [labels()[0], labels(shift=1)[1]], strict=True))
    with pytest.raises(DataError, match="class numbers differ: at '1' class numbers go from 1 to 2"):
        hansa.simulate(hansa.FedAvg(), hansa.Task(model(3), parties=parties), rounds=1)


def test_fewer_outputs_than_classes_are_refused_with_both_numbers() -> None:
    with pytest.raises(DataError, match="the model gives 2 outputs for a sample, and there are 3 classes"):
        run([np.arange(40) % 3 for _ in X])


def spoiled(k: int, value: float) -> list[Any]:
    out = [x.copy() for x in X]
    out[k][5, 2] = value
    return out


@pytest.mark.parametrize("value", [math.inf, -math.inf])
@pytest.mark.parametrize("prepare", [None, hansa.Standardise()])
def test_infinite_features_are_refused_before_the_first_round(value: float, prepare: Any) -> None:
    for k, place in ((1, "party 'b'"), (3, "test: ")):
        x, ys = spoiled(k, value), labels()
        parties = list(zip(x[:3], ys[:3], strict=True))
        task = hansa.Task(model(), parties=parties, test=(x[3], ys[3]), names=["a", "b", "c"], prepare=prepare)
        with pytest.raises(DataError, match=f"{place}.*infinite"):
            hansa.simulate(hansa.FedAvg(), task, rounds=1)


@pytest.mark.parametrize("where", ["parties", "test", "party_tests", "trusted"])
def test_missing_features_are_refused_in_every_set_unless_they_are_prepared(where: str) -> None:
    good, bad = list(zip(X[:3], labels()[:3], strict=True)), list(zip(spoiled(0, math.nan)[:3], labels(), strict=False))
    given: dict[str, Any] = {"parties": good, "test": good[0], "party_tests": good, "trusted": good[0]}
    given[where] = bad if isinstance(given[where], list) else bad[0]
    with pytest.raises(DataError, match="missing values"):
        hansa.simulate(hansa.FedAvg(), hansa.Task(model(), **given), rounds=1)
    hansa.simulate(hansa.FedAvg(), hansa.Task(model(), prepare=hansa.Standardise(), **given), rounds=1)


def test_targets_of_a_regression_that_are_not_finite_are_refused() -> None:
    ys = [y.astype(np.float32) for y in labels()]
    ys[3][7] = math.nan
    with pytest.raises(DataError, match="test: targets are NaN or infinite"):
        run(ys, "mse", 1)
