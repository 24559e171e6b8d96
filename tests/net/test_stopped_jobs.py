"""Deployed jobs that stop early and keep the best model: the bits of the simulation, also after a restart."""

from __future__ import annotations

import json

import pytest
from league import League, logistic_task, samples

import hansa
from hansa.experiment.config import parse
from hansa.plumbing import codec
from hansa.plumbing.errors import ConfigError

TASK = {"dataset": "heart", "model": "logistic", "dtype": "float64", "party_test": 0.25}
RUN = {"rounds": 6, "seed": 4, "metric": "loss", "patience": 2, "min_delta": 0.001, "keep": "best"}
LOCAL = {"name": "sgd", "lr": 3.0}


def test_a_job_stops_early_and_keeps_the_best_model_as_the_simulation_does(league: League) -> None:
    league.join_all()
    tree = {"task": TASK, "run": RUN, "algorithm": {"name": "fedavg", "local": LOCAL}}
    ended = league.ended(job := league.submit(tree))
    assert ended["status"] == "finished", ended["reason"]
    experiment = parse(tree)
    pairs = hansa.experiment.tasks.hold_out([samples(k)[0] for k in range(3)], 0.25, 4)
    task = logistic_task(pairs[0], party_tests=pairs[1])
    wanted = hansa.simulate(experiment.algorithm, task, **{**experiment.settings(), "engine": "reference"})
    assert codec.encode(league.model(job)) == codec.encode(wanted.saved_model())
    assert json.loads(ended["summary"])["kept_round"] == wanted.summary["kept_round"] < wanted.summary["rounds"]
    assert ended["reason"] == wanted.summary["stopped"]


def test_a_job_without_evaluations_may_not_keep_the_best_model(league: League) -> None:
    with pytest.raises(ConfigError, match="target, patience and keep need a test set"):
        league.submit({"task": TASK, "run": {"keep": "best", "eval_parties": False}})
