"""Importances of features, models in LightGBM's format, saved models."""

from __future__ import annotations

import importlib.util
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_boosting import boosted, divided, table

import hansa
from hansa.classical import importances, lightgbm_model

CATEGORIES = hansa.Boosting(max_depth=3, bins=8, categorical=(0, 2))
FOREST = hansa.RandomForest(trees=4, per_round=4, max_depth=3, bins=8, categorical=(2,))


def trained(kind: str, algorithm: Any) -> tuple[hansa.Result, Any]:
    """A model, and samples with missing values and unknown categories."""
    data = table(3, 150, kind)
    draws = np.random.default_rng(4)
    probe = np.stack([draws.integers(-1, 8, 80), draws.normal(size=80), draws.integers(-1, 5, 80), np.arange(80.0)], 1)
    probe[draws.random(probe.shape) < 0.2] = np.nan
    return boosted(divided(data, np.arange(150) % 3), 3, algorithm), probe


def predicted(text: str, probe: Any) -> Any:
    """The raw scores of a model in LightGBM's text format, by the rules of its `tree.h`, with loops."""
    head, *trees = text.split("Tree=")
    about = dict(line.split("=", 1) for line in head.splitlines() if "=" in line)
    outputs = int(about["num_tree_per_iteration"])
    scores = np.zeros((len(probe), outputs))
    for number, part in enumerate(trees):
        fields = dict(line.split("=", 1) for line in part.splitlines()[1:] if "=" in line)
        columns = {name: [float(v) for v in row.split()] for name, row in fields.items()}
        for row, score in zip(probe, scores, strict=True):
            node = 0 if columns["num_leaves"][0] > 1 else -1
            while node >= 0:
                value, kind = row[int(columns["split_feature"][node])], int(columns["decision_type"][node])
                cut = columns["threshold"][node]
                if kind & 1:
                    begin, end = (int(columns["cat_boundaries"][int(cut) + k]) for k in (0, 1))
                    words = [int(word) for word in fields["cat_threshold"].split()[begin:end]]
                    at = -1 if math.isnan(value) else int(value)
                    left = 0 <= at < 32 * len(words) and words[at // 32] >> at % 32 & 1
                else:
                    left = kind & 2 if math.isnan(value) else value <= cut
                node = int(columns["left_child" if left else "right_child"][node])
            score[number % outputs] += columns["leaf_value"][~node]
    return scores / (len(trees) / outputs) if "average_output" in head else scores


@pytest.mark.parametrize("kind", ["classes", "three classes", "numbers"])
@pytest.mark.parametrize("algorithm", [CATEGORIES, FOREST], ids=["boosting", "forest"])
def test_a_model_in_lightgbms_format_predicts_the_same(kind: str, algorithm: Any) -> None:
    result, probe = trained(kind, algorithm)
    text = lightgbm_model(result.saved_model())
    ours = result.predict(probe).numpy()
    if algorithm is FOREST and kind != "numbers":
        ours = np.exp(ours)
    ours = ours[:, 1:] if kind == "classes" else ours
    assert predicted(text, probe) == pytest.approx(ours, abs=0 if algorithm is CATEGORIES else 1e-13)
    assert "cat_threshold=" in text
    if importlib.util.find_spec("lightgbm"):
        lightgbm = importlib.import_module("lightgbm")
        theirs = lightgbm.Booster(model_str=text).predict(probe, raw_score=algorithm is CATEGORIES)
        assert theirs.reshape(ours.shape) == pytest.approx(ours, abs=1e-13)


def test_importances_are_the_shares_of_gain_and_of_splits() -> None:
    draws = np.random.default_rng(0)
    x = draws.normal(size=(300, 3))
    task = hansa.Task(None, "mse", [(x[k::3], 5 * x[k::3, 1] + x[k::3, 0]) for k in range(3)])
    saved = hansa.simulate(hansa.Boosting(max_depth=2, bins=16), task, rounds=5, progress=False).saved_model()
    gain, splits = importances(saved), importances(saved, "splits")
    assert gain.sum() == pytest.approx(1) == splits.sum()
    assert gain.argmax() == 1 and gain[1] > 0.8 and gain[1] > splits[1]
    with pytest.raises(hansa.DataError, match="'gain' or 'splits'"):
        importances(saved, "weight")
    with pytest.raises(hansa.DataError, match="not a trained model of boosting"):
        importances({"payload": {}})
    with pytest.raises(hansa.DataError, match="3 names"):
        lightgbm_model(saved, ["a", "b"])


def test_a_saved_model_predicts_the_same_after_loading(tmp_path: Path) -> None:
    for algorithm in (CATEGORIES, FOREST):
        result, probe = trained("three classes", algorithm)
        path = tmp_path / f"{algorithm.name}.safetensors"
        result.save(path)
        assert torch.equal(hansa.load(path).predict(probe), result.predict(probe))
