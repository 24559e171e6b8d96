"""Model inversion, attributes, properties, extraction and canaries."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from victims import CLASSES, WIDTH, LookupTable, make_task, overfitted_run, samples, short_run, trained, wide_task

import hansa
from hansa.attacks import attributes as attribute_inference
from hansa.attacks.canaries import WatchedRounds, _chance, along, audit_epsilon, exposures, make_canaries, plant
from hansa.attacks.extraction import extract, extraction
from hansa.attacks.gradient_leakage import Prior, gradient_of
from hansa.attacks.inversion import ascent, inversion, invert, nearest
from hansa.attacks.properties import properties
from hansa.attacks.recipe import TrainedModel, final_model, recipe_of
from hansa.attacks.updates import Protection
from hansa.local import DPSGD
from hansa.numerics.objective import Objective
from hansa.plumbing.errors import ConfigError


def linear_model() -> TrainedModel:
    objective = Objective(lambda: nn.Linear(WIDTH, CLASSES).double(), "cross_entropy", 3)
    return TrainedModel(objective, objective.initial)


def test_the_ascent_of_a_linear_softmax_model_is_its_row_minus_the_mean_row() -> None:
    model = linear_model()
    x = samples(4, 9)[0].double()
    labels = torch.tensor([0, 1, 2, 1])
    weights = model.objective.spec.named(model.params)["weight"]
    expected = weights[labels] - model.probabilities(x) @ weights
    assert torch.allclose(ascent(model, x, labels), expected, atol=1e-10)


def test_inversion_raises_the_probability_of_the_class() -> None:
    run = short_run()
    prior, labels = Prior.of(run.others[0]), torch.arange(CLASSES)
    x = invert(run.model, labels, prior)
    before = run.model.probabilities(prior.mean.expand(CLASSES, -1))[:, :].diagonal()
    assert (run.model.probabilities(x).diagonal() > before).all()
    assert float(x.min()) >= prior.low and float(x.max()) <= prior.high
    found = inversion(run, prior)
    assert found["right_class"] == 1.0 and found["pictures"] is None


def test_the_nearest_record_is_the_closest_one() -> None:
    records = torch.tensor([[0.0, 0.0], [3.0, 4.0]])
    distance, row = nearest(torch.tensor([[0.0, 1.0], [3.0, 4.0]]), records)
    assert distance.tolist() == [1.0, 0.0] and row.tolist() == [0, 1]


class Ignorant(LookupTable):
    """A model whose outputs do not depend on the sample."""

    def outputs(self, x: torch.Tensor) -> torch.Tensor:
        return torch.zeros(len(x), CLASSES)


def test_an_attribute_that_the_model_ignores_is_guessed_as_the_most_frequent_value() -> None:
    x, y = samples(300, 4)
    x[:, 0] = torch.tensor(np.random.default_rng(0).choice([0.0, 1.0, 2.0], size=300, p=[0.2, 0.5, 0.3]))
    model: Any = Ignorant(x[:0], y[:0])
    values, counts = torch.unique(x[:, 0], return_counts=True)
    guessed = values[attribute_inference.guess(model, x, y, 0, values, counts / 300)]
    assert (guessed == 1.0).all()


def test_an_attribute_that_decides_the_target_is_found() -> None:
    class Telling(LookupTable):
        def outputs(self, x: torch.Tensor) -> torch.Tensor:
            return 10.0 * nn.functional.one_hot(x[:, 2].long(), CLASSES)

    x, y = samples(100, 4)
    x[:, 2] = y.float()
    model: Any = Telling(x[:0], y[:0])
    values = torch.tensor([0.0, 1.0, 2.0])
    guessed = values[attribute_inference.guess(model, x, y, 2, values, torch.tensor([0.8, 0.1, 0.1]))]
    assert torch.equal(guessed, y.float())


def test_features_with_many_values_are_not_attacked_and_unknown_ones_are_refused() -> None:
    run = short_run()
    assert "between 2 and 20 values" in attribute_inference.attributes(run)["refused"]
    with pytest.raises(ConfigError, match="there is no feature 'age'; features have the numbers 0 to 11"):
        attribute_inference.attributes(run, ("age",))
    with pytest.raises(ConfigError, match="feature 3 has 200 values; at most 20"):
        attribute_inference.attributes(run, ("3",))


def test_without_a_property_updates_tell_nothing_and_with_it_they_do() -> None:
    run = short_run()
    nothing = properties(run, Protection.of(run), share=0.0)
    assert nothing["interval"][0] <= 0.5 <= nothing["interval"][1]
    assert properties(run, Protection.of(run), share=0.5)["interval"][0] > 0.8


def test_a_model_with_few_parameters_and_a_class_that_is_missing_have_their_answers() -> None:
    task = hansa.Task(functools.partial(nn.Linear, 2, 2), "cross_entropy",
                      [(torch.randn(30, 2), torch.arange(30) % 2) for _ in range(2)],
                      test=(torch.randn(40, 2), torch.arange(40) % 2), classes=2)  # fmt: skip
    run = recipe_of(trained(task=task))
    assert 0 <= properties(run, Protection.of(run))["accuracy"] <= 1  # 6 parameters, fewer than components
    lacking = dataclasses.replace(run, others=(run.others[0], torch.zeros(40, dtype=torch.int64)))
    assert "the test samples must have it and others" in properties(lacking, Protection.of(lacking))["refused"]


def test_more_queries_copy_a_model_more_faithfully() -> None:
    run = short_run()
    found = extraction(run)
    assert [row["queries"] for row in found["rows"]] == [12, 25, 50, 100]
    assert found["rows"][-1]["fidelity"] >= 0.9 > found["rows"][0]["fidelity"] - 0.1


def test_a_copy_is_deterministic_and_leaves_the_target_alone() -> None:
    run = short_run()
    before = run.model.params.w.clone()
    one, other = (extract(run, run.others[0][:20], "same", 5).params.w for _ in range(2))
    assert torch.equal(one, other) and torch.equal(run.model.params.w, before) and not torch.equal(one, before)


def test_canaries_have_wrong_targets_and_join_at_random_parties() -> None:
    run = short_run()
    x, y = make_canaries(run, 50)
    truth = {tuple(row.tolist()): int(label) for row, label in zip(*run.others, strict=True)}
    assert all(truth[tuple(row.tolist())] != int(label) for row, label in zip(x, y, strict=True))
    joined = np.arange(50) % 2 == 0
    planted = plant(run, x, y, joined)
    assert len(planted) == len(run.members) + 25 and len(planted.offsets) == len(run.members.offsets)
    rows = {tuple(row.tolist()) for row in planted.x}
    assert [tuple(row.tolist()) in rows for row in x] == joined.tolist()


def test_under_central_privacy_a_canary_is_a_party() -> None:
    run = short_run()
    central = dataclasses.replace(
        run, settings={**run.settings, "privacy": hansa.Privacy(dp=hansa.CentralDP(sigma=1.0))}
    )
    x, y = make_canaries(central, 10)
    planted = plant(central, x, y, np.arange(10) < 4)
    assert central.unit == "party" and len(planted.offsets) - 1 == run.parties + 4
    assert np.diff(planted.offsets)[run.parties :].tolist() == [20] * 4
    assert (planted.x[planted.offsets[run.parties] : planted.offsets[run.parties + 1]] == x[0]).all()


def test_the_exposure_is_largest_for_canaries_above_all_others_and_that_of_a_guess_in_the_mean() -> None:
    joined = np.arange(20) < 10
    assert np.allclose(exposures(np.where(joined, 5.0, np.arange(20.0) / 20), joined), math.log2(11))
    draw = np.random.default_rng(0)
    mean = np.mean([exposures(draw.random(400), np.arange(400) < 200).mean() for _ in range(20)])
    assert mean == pytest.approx(_chance(200), abs=0.1)


def test_canaries_of_an_overfitted_run_refute_a_small_epsilon_and_are_exposed() -> None:
    found = audit_epsilon(overfitted_run(), 200)
    assert found["claimed"] is None and found["epsilon"] > 0.5 and found["exposure"] > found["chance_exposure"] + 0.5


def test_the_derivative_along_a_step_is_the_product_with_each_samples_gradient() -> None:
    run = short_run()
    x, y = samples(5, 8)
    w, step = run.model.objective.initial.w, run.model.params.w - run.model.objective.initial.w
    start = run.model.params._replace(w=w)
    products = torch.stack([gradient_of(run.model.objective, start, x[k : k + 1], y[k : k + 1]).detach() @ step
                            for k in range(5)])  # fmt: skip
    assert torch.allclose(along(run.model, w, step, x, y), products.double(), atol=1e-5)


def test_who_sees_all_rounds_finds_more_canaries_and_the_scores_follow_every_round() -> None:
    run = overfitted_run()
    found = audit_epsilon(run, 200)
    assert found["all_rounds"]["epsilon"] > found["epsilon"] > 0.5
    x, y = make_canaries(run, 50)
    watched, models = WatchedRounds(x, y), []

    def note(line: Any, result: hansa.Result) -> None:
        models.append(final_model(result))

    run.train(run.members, "canaries", callbacks=(watched, note))
    weights = [models[0].objective.initial.w, *(model.params.w for model in models)]
    expected = -sum(along(model, before, after - before, x, y)
                    for model, before, after in zip(models, weights, weights[1:], strict=False))  # fmt: skip
    assert len(models) == run.settings["rounds"] and torch.allclose(watched.scores, expected)  # type: ignore[arg-type]
    assert not torch.equal(models[0].params.w, models[-1].params.w)


def test_the_empirical_epsilon_of_dp_sgd_is_at_most_the_claimed_one() -> None:
    local = DPSGD(lr=0.5, batch=8, clip=1.0, sigma=1.0, delta=1e-3)
    found = audit_epsilon(recipe_of(trained(rounds=5, local=local, task=make_task(per_party=60))), 100)
    assert found["unit"] == "sample" and 0 <= found["epsilon"] <= found["claimed"] < 50
    assert 0 <= found["all_rounds"]["epsilon"] <= found["claimed"]


@pytest.mark.slow
def test_dp_sgd_with_noise_that_is_left_out_is_refuted() -> None:
    """The audit finds a broken implementation: a run that adds nearly no noise exceeds the claim of an honest one."""
    honest = DPSGD(lr=0.3, batch=10, clip=1.0, sigma=8.0, delta=1e-6)
    broken = dataclasses.replace(honest, sigma=1e-4)
    one, other = (audit_epsilon(recipe_of(trained(rounds=10, local=local, task=wide_task())), 200)
                  for local in (honest, broken))  # fmt: skip
    assert one["epsilon"] <= one["claimed"] < other["epsilon"]
    assert one["all_rounds"]["epsilon"] <= one["claimed"] < other["all_rounds"]["epsilon"]
