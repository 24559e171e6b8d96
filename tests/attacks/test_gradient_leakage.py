"""Samples and labels from gradients: exact where theory says so, worse with noise, refused under a secure sum."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from victims import CLASSES, WIDTH, network, samples, short_run

import hansa
from hansa.attacks.gradient_leakage import (
    Prior,
    Rebuilt,
    analytic,
    batch_labels,
    dlg,
    gradient_of,
    idlg_label,
    inverting,
    matched,
    success,
    total_variation,
)
from hansa.attacks.leakage import single_leakage, sum_leakage
from hansa.attacks.updates import Protection, single_updates, summed_update
from hansa.local import DPSGD
from hansa.numerics.objective import Objective
from hansa.plumbing.errors import ConfigError
from hansa.privacy import privacy

X, Y = samples(40, 5)
PRIOR = Prior.of(X)


def objective_of(make: object, dtype: torch.dtype = torch.float64) -> Objective:
    return Objective(lambda: make().to(dtype), "cross_entropy", 0)  # type: ignore[operator]


def test_a_dense_first_layer_reveals_a_single_sample_exactly() -> None:
    objective = objective_of(network)
    for at in range(10):
        x, y = X[at : at + 1].double(), Y[at : at + 1]
        gradient = gradient_of(objective, objective.initial, x, y).detach()
        rebuilt = analytic(objective, gradient, (WIDTH,))
        assert rebuilt is not None and torch.allclose(rebuilt, x, atol=1e-9)


def test_the_label_of_a_single_sample_is_always_found() -> None:
    for seed, make in enumerate((network, lambda: nn.Linear(WIDTH, CLASSES), lambda: nn.Sequential(
        nn.Linear(WIDTH, 16), nn.ReLU(), nn.Linear(16, CLASSES)))):  # fmt: skip
        objective = Objective(make, "cross_entropy", seed)
        found = [idlg_label(objective, gradient_of(objective, objective.initial, X[k : k + 1], Y[k : k + 1]).detach(),
                            CLASSES) for k in range(len(Y))]  # fmt: skip
        assert found == Y.tolist()


def test_without_a_bias_the_label_is_found_by_the_signs_of_products_of_rows() -> None:
    objective = Objective(lambda: nn.Sequential(nn.Linear(WIDTH, 16), nn.Sigmoid(), nn.Linear(16, CLASSES, bias=False)),
                          "cross_entropy", 0)  # fmt: skip
    found = [idlg_label(objective, gradient_of(objective, objective.initial, X[k : k + 1], Y[k : k + 1]).detach(),
                        CLASSES) for k in range(len(Y))]  # fmt: skip
    assert found == Y.tolist()


def test_the_labels_of_a_batch_are_found_at_the_first_model() -> None:
    objective = objective_of(network)
    hits = 0
    for at in range(0, 40, 4):
        gradient = gradient_of(objective, objective.initial, X[at : at + 4].double(), Y[at : at + 4]).detach()
        labels = batch_labels(objective, gradient, CLASSES, 4)
        assert labels is not None
        hits += sum((torch.bincount(labels, minlength=3).minimum(torch.bincount(Y[at : at + 4], minlength=3))).tolist())
    assert hits >= 36


@pytest.mark.parametrize("known", [True, False])
def test_matching_gradients_rebuilds_a_single_sample(known: bool) -> None:
    objective = objective_of(network)
    x, y = X[:1].double(), Y[:1]
    gradient = gradient_of(objective, objective.initial, x, y).detach()
    prior = dataclasses.replace(PRIOR, mean=PRIOR.mean.double())
    rebuilt = dlg(objective, objective.initial, gradient, prior, y if known else None, CLASSES, 1, 0, 200)
    found = success(rebuilt, x, y, prior)
    assert found["error"] < 1e-3 and found["labels"] == 1.0


def test_the_cosine_attack_rebuilds_a_single_sample_from_a_gradient_of_any_length() -> None:
    objective = objective_of(network)
    x, y = X[1:2].double(), Y[1:2]
    gradient = 17.0 * gradient_of(objective, objective.initial, x, y).detach()
    prior = dataclasses.replace(PRIOR, mean=PRIOR.mean.double())
    assert success(inverting(objective, objective.initial, gradient, prior, y, 0, 300), x, y, prior)["error"] < 0.1


def test_the_gradient_of_soft_labels_is_that_of_the_class_for_a_sure_label() -> None:
    objective = objective_of(network)
    soft = F.one_hot(Y[:3], CLASSES).double()
    one, other = (gradient_of(objective, objective.initial, X[:3].double(), y) for y in (soft, Y[:3]))
    assert torch.allclose(one, other, atol=1e-12)


def test_the_order_of_a_batch_does_not_matter_to_the_error() -> None:
    assert torch.equal(matched(X[[2, 0, 1]], X[:3]), X[:3])
    found = success(Rebuilt(X[[2, 0, 1]], Y[[2, 0, 1]]), X[:3], Y[:3], PRIOR)
    assert found == {"error": 0.0, "recovered": 1.0, "labels": 1.0}


def test_a_blind_guess_has_the_error_one() -> None:
    found = success(Rebuilt(PRIOR.mean.expand(2, -1), Y[:2]), X[:2], Y[:2], PRIOR)
    assert found["error"] == pytest.approx(1.0) and found["recovered"] == 0.0


def test_a_flat_picture_has_no_total_variation() -> None:
    assert float(total_variation(torch.ones(1, 4, 4))) == 0.0
    assert float(total_variation(torch.eye(2)[None])) == 2.0


def test_more_noise_gives_a_larger_error() -> None:
    run = short_run()
    errors = []
    for sigma in (0.0, 0.0003, 0.003, 0.03):
        local = DPSGD(lr=0.5, batch=None, clip=1.0, sigma=sigma)
        found = single_leakage(run, Protection(local), Prior.of(run.others[0]), (1,), ("analytic",), repeats=8)
        errors.append(found["rows"][0]["error"])
    assert errors[0] < 1e-6 and errors == sorted(errors) and errors[-1] > 0.3


def test_a_secure_sum_leaves_nothing_to_read_of_a_single_update_and_reveals_the_sum() -> None:
    run = short_run()
    plain = Protection.of(run)
    secure = dataclasses.replace(plain, privacy=privacy({"secure": "masking"}))
    pairs = [(run.members.x[k : k + 1], run.members.y[k : k + 1]) for k in range(10)]
    with pytest.raises(ConfigError, match="sees no single update, so there is nothing to read"):
        single_updates(run, pairs, secure)
    single = single_updates(run, pairs, plain).updates
    summed = summed_update(run, pairs, secure).updates
    assert single.shape[0] == 10 and torch.allclose(single.mean(0), summed[0], atol=1e-6)
    refused = single_leakage(run, secure, Prior.of(run.others[0]), (1,))
    assert "nothing to read" in refused["refused"]


def test_a_whole_sum_of_ten_reveals_less_than_a_single_update() -> None:
    run = short_run()
    secure = dataclasses.replace(Protection.of(run), privacy=privacy({"secure": "masking"}))
    prior = Prior.of(run.others[0])
    summed = sum_leakage(run, secure, prior)
    single = single_leakage(run, Protection.of(run), prior, (1,), ("analytic",))["rows"][0]
    assert summed["parties"] == 10 and summed["recovered"] < single["recovered"] == 1.0


def test_the_aggregator_sees_updates_as_the_run_clips_and_compresses_them() -> None:
    run = short_run()
    pairs = [(run.members.x[:4], run.members.y[:4])]
    local = Protection.of(run).local
    clipped = single_updates(run, pairs, Protection(local, hansa.Clip(0.01))).updates
    bounded = single_updates(run, pairs, Protection(local, None, privacy({"bound": 0.01}))).updates
    sparse = single_updates(run, pairs, Protection(local, hansa.TopK(share=0.1))).updates
    assert float(clipped.norm()) == pytest.approx(0.01, rel=1e-5) and torch.equal(clipped, bounded)
    assert int((sparse != 0).sum()) <= 0.1 * sparse.numel() + 1
