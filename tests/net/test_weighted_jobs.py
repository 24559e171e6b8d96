"""Jobs with weights of classes and samples: the bits of the simulation, and the limits of a party's policy."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from league import PARTIES, League

import hansa
from hansa.experiment.config import parse
from hansa.holdings.gateway import TableRows
from hansa.net.party.samples import PartySamples, read_samples
from hansa.plumbing import codec
from hansa.plumbing.errors import ConfigError, DataError

DRAWS = torch.Generator().manual_seed(2)
X = torch.randn(36, 3, generator=DRAWS)
Y = torch.tensor([0, 0, 0, 0, 1, 2] * 6)
W = torch.rand(36, generator=DRAWS, dtype=torch.float64) + 0.5
ROWS = torch.split(torch.arange(36), [10, 12, 14])
LOCAL = {"name": "sgd", "lr": 0.2, "batch": 5}


def tree(**task: Any) -> dict[str, Any]:
    return {
        "task": {"parties": ["x"], "model": "logistic", "classes": 3, **task},
        "algorithm": {"name": "fedavg", "local": LOCAL},
        "run": {"rounds": 2, "seed": 3, "eval_parties": False},
    }


def reference(parties: tuple[int, ...] = (0, 1, 2), weights: bool = False, **task: Any) -> hansa.Result:
    model = hansa.experiment.tasks.make_model("logistic", "float32", ".", (3,), 3)
    made = hansa.Task(model, "cross_entropy", [(X[ROWS[k]], Y[ROWS[k]]) for k in parties], classes=3,
                      weights=[W[ROWS[k]] for k in parties] if weights else None, **task)  # fmt: skip
    settings = parse(tree()).settings()
    return hansa.simulate(parse(tree()).algorithm, made, **{**settings, "engine": "reference"})


def join(league: League, weights: bool = False, **policies: str) -> None:
    for k, name in enumerate(PARTIES):
        rows = TableRows(X[ROWS[k]], Y[ROWS[k]], None, W[ROWS[k]]) if weights else (X[ROWS[k]], Y[ROWS[k]])
        league.join(name, PartySamples(rows), policies.get(name, ""))


@pytest.mark.thin(2)
@pytest.mark.parametrize(("weights", "classes"), [(False, "balanced"), (True, "balanced"), (True, None),
                                                  (False, {"2": 4.0})])  # fmt: skip
def test_a_job_with_weights_has_the_bits_of_the_simulation(league: League, weights: bool, classes: Any) -> None:
    join(league, weights)
    given = {} if classes is None else {"class_weight": classes}
    ended = league.ended(job := league.submit(tree(**given)))
    assert ended["status"] == "finished", ended["reason"]
    wanted = reference(weights=weights, **given)
    assert codec.encode(league.model(job)) == codec.encode(wanted.saved_model())
    assert codec.encode(league.model(job)) != codec.encode(reference().saved_model())


@pytest.mark.slow
def test_a_party_refuses_weights_of_classes_beyond_its_limit_and_the_job_says_so(league: League) -> None:
    join(league, cid="class_weights = 2.0", bob='ops = ["sgd", "describe", "weigh-classes"]')
    ended = league.ended(league.submit(tree(class_weight=[1.0, 1.0, 3.0])))
    assert ended["status"] == "finished", ended["reason"]
    why = "its policy allows class weights from 0.5 to 2 (class_weights in party.toml)"
    assert ended["rounds"][0]["members"] == ["ann", "bob"] and ended["rounds"][0]["unprepared"] == {"cid": why}
    ended = league.ended(league.submit(tree(class_weight="balanced")))
    assert "does not accept the op 'class-counts'" in ended["rounds"][0]["unprepared"]["bob"]


def test_a_party_with_weights_declines_a_method_that_would_ignore_them(found: Callable[..., League]) -> None:
    league = found()
    for k, name in enumerate(PARTIES):
        rows = TableRows(X[ROWS[k]], Y[ROWS[k]], None, W[ROWS[k]] if name == "cid" else None)
        league.join(name, PartySamples(rows))
    plan = {**tree(), "algorithm": "naive-bayes", "run": {"rounds": 1}}
    del plan["task"]["model"]
    ended = league.ended(league.submit(plan))
    assert ended["rounds"][0]["missing"] == {
        "cid": "its samples have weights (hansa join --weights), which this job's method does not use"
    }


def test_a_party_reads_weights_from_its_file_or_function(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own.csv").write_text("a,w,b,y\n1,0.5,2,0\n3,2,4,1\n")
    (tmp_path / "test.csv").write_text("b,a,y\n1,0,1\n")
    train, test, header, *_ = read_samples(str(tmp_path / "own.csv"), None, str(tmp_path / "test.csv"), weights="w")
    assert TableRows(*train).weights.tolist() == [0.5, 2.0] and header == ("y", "a", "b")  # type: ignore[union-attr]
    assert test is not None and test[0].tolist() == [[0.0, 1.0]]
    np.savez(tmp_path / "own.npz", x=np.ones((2, 3)), y=np.array([0, 1]), w=np.array([1.0, 3.0]))
    assert TableRows(*read_samples(str(tmp_path / "own.npz"), weights="w").train).weights.tolist() == [1.0, 3.0]  # type: ignore[union-attr]
    with pytest.raises(DataError, match=r"--weights: .* has no column or array 'v'"):
        read_samples(str(tmp_path / "own.csv"), weights="v")
    with pytest.raises(ConfigError, match="leave one of them out"):
        read_samples(str(tmp_path / "own.csv"), ids="a", weights="w")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "weighted_rows_of_tests.py").write_text(
        "import torch\ndef rows():\n    return torch.ones(2, 3), torch.tensor([0, 1]), None, [1.0, 2.0]\n"
    )
    assert TableRows(*read_samples("weighted_rows_of_tests:rows").train).weights.tolist() == [1.0, 2.0]  # type: ignore[union-attr]
