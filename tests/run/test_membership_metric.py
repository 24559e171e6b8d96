"""`membership_auc` as the metric of runs and studies: the AUC of the loss attack; refused where it has no meaning."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import hansa
from hansa.experiment.config import parse
from hansa.numerics.losses import auc
from hansa.plumbing.errors import ConfigError
from hansa.report.study_report import pictures
from hansa.study import compare

TREE = {"task": {"dataset": "digits", "model": "logistic"}, "partition": {"name": "iid", "parties": 3},
        "run": {"rounds": 2, "metric": "membership_auc"}}  # fmt: skip


def make_task(test: bool = True) -> hansa.Task:
    x, y = torch.randn(90, 4, generator=torch.Generator().manual_seed(0)), torch.arange(90) % 2
    held = (x[60:], y[60:]) if test else None
    return hansa.Task(lambda: nn.Linear(4, 2), "cross_entropy", [(x[:30], y[:30]), (x[30:60], y[30:60])], test=held)


def test_the_metric_is_the_auc_of_the_losses_of_training_and_test_samples() -> None:
    task = make_task()
    result = hansa.simulate(hansa.FedAvg(), task, rounds=2, metric="membership_auc", progress=False)
    losses = []
    for pair in [*task.parties, task.test]:
        x, y = pair  # type: ignore[misc]
        losses.append(nn.functional.cross_entropy(result.predict(x), y, reduction="none"))
    expected = auc(-torch.cat(losses).double(), torch.arange(90) < 60)
    assert [line["membership_auc"] for line in result.history][-1] == pytest.approx(expected)
    assert "membership_auc" not in hansa.simulate(hansa.FedAvg(), task, rounds=1, progress=False).history[0]


def test_it_is_refused_without_a_test_set_and_in_a_deployment() -> None:
    with pytest.raises(ConfigError, match="needs a simulation, a test set"):
        hansa.simulate(hansa.FedAvg(), make_task(test=False), rounds=1, metric="membership_auc", progress=False)
    with pytest.raises(ConfigError, match="exists only in a simulation"):
        parse(TREE).check(deployed=True)
    with pytest.raises(ConfigError, match="unknown metric 'party_membership_auc_mean'"):
        parse({**TREE, "run": {"metric": "party_membership_auc_mean"}})


@pytest.mark.slow
def test_a_study_plots_accuracy_against_membership(tmp_path: Path) -> None:
    results = compare(["fedavg", "fedprox"], dataset="digits", model="logistic", rounds=2, seeds=1,
                      metric="membership_auc", folder=tmp_path / "study")  # fmt: skip
    assert results.metric == "membership_auc"
    assert "privacy" in [picture.name for picture in pictures(results)]
