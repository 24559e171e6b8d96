"""A saved model gives the predictions of its run, in any process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from small_runs import experiment_file, linear, run, task

import hansa
from hansa.artifacts.saved_model import load
from hansa.experiment.config import read
from hansa.experiment.deployed import replaced
from hansa.net.aggregator.order import check_order
from hansa.net.transport.wire import Order
from hansa.plumbing.errors import ConfigError
from hansa.run.resume import execute
from hansa.track.tracker import RunInfo, flat, numbers, params, tags


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"task.dtype": "float64"},
        {"task.model": "cnn", "run.rounds": 1},
        {"task.prepare": "standardise", "task.model": "2nn"},
        {"algorithm": "naive-bayes"},
        {"algorithm": "id3", "algorithm.max_depth": 3},
        {"algorithm": "scaffold"},
        {"task.dataset": "heart", "task.prepare": "standardise", "partition": "natural"},
    ],
    ids=str,
)
def test_what_was_saved_predicts_the_same_bits(changes: dict[str, Any], tmp_path: Path) -> None:
    result = execute(read(experiment_file(tmp_path), changes), tmp_path / "run")
    saved = load(tmp_path / "run")
    x = result.training.holdings.train.x[:9]
    assert torch.equal(saved.predict(x), result.predict(x)) and not saved.personal
    assert torch.equal(hansa.load(tmp_path / "run").predict(x), result.predict(x))
    assert saved.about["shape"] == list(x.shape[1:])


def test_every_party_has_its_own_saved_model_where_it_has_one(tmp_path: Path) -> None:
    changes = {"algorithm": "fedper", "task.model": "2nn"}
    result = execute(read(experiment_file(tmp_path), changes), tmp_path / "run")
    x = result.training.holdings.train.x[:9]
    assert torch.equal(hansa.load(tmp_path / "run").predict(x, party=0), result.predict(x, party=0))
    (tmp_path / "run" / "personal.safetensors").unlink()
    with pytest.raises(ConfigError, match="these models are not saved here"):
        hansa.load(tmp_path / "run").predict(x, party=0)
    saved = load(result.save(tmp_path / "saved"))
    found = [saved.predict(x, party=party) for party in range(4)]
    assert all(torch.equal(out, result.predict(x, party=party)) for party, out in enumerate(found))
    assert not torch.equal(found[0], found[1])
    stored, own = hansa.load(tmp_path / "saved"), result.model(party=2).state_dict()
    assert torch.equal(stored.predict(x, party=2), found[2])
    assert all(torch.equal(tensor, own[name]) for name, tensor in stored.model(party=2).state_dict().items())
    with pytest.raises(ConfigError, match="set party, from party=0 to party=3"):
        saved.predict(x)


def test_a_function_of_a_module_is_found_again_and_a_lambda_is_refused(tmp_path: Path) -> None:
    result = run(run_dir=tmp_path / "named")
    x = torch.ones(2, 3)
    assert load(tmp_path / "named").about["model"] == f"{linear.__module__}:linear"
    assert torch.equal(load(tmp_path / "named").predict(x), result.predict(x))
    hansa.simulate(hansa.FedAvg(), task(lambda: torch.nn.Linear(3, 2)), rounds=1, run_dir=tmp_path / "lambda")
    with pytest.raises(ConfigError, match="define it in a module"):
        load(tmp_path / "lambda")


def test_trackers_are_not_sent_to_an_aggregator(tmp_path: Path) -> None:
    experiment = read(experiment_file(tmp_path, "[track.jsonl]\n"))
    assert "track" not in experiment.tree
    assert [note for note in replaced(experiment) if note.startswith("track: does not apply")]
    order = Order("job", {**experiment.tree, "track": {"jsonl": {"path": "/etc/passwd"}}}, None, None, "")
    with pytest.raises(ConfigError, match=r"\[track\]: the aggregator's own configuration decides"):
        check_order(order, (), ["a", "b"])


def test_a_round_as_numbers_and_a_configuration_as_names() -> None:
    line = {
        "round": 3,
        "loss": 0.5,
        "accuracy": None,
        "on": True,
        "missing": {"a": "late"},
        "empty": "none",
        "t": 1e400,
    }
    assert numbers(line) == {"loss": 0.5, "missing": 1.0, "empty": 1.0}
    assert flat({"a": {"b": 1, "c": [1, 2]}, "d": None, "e": "x"}) == {"a.b": "1", "a.c": "[1, 2]", "e": "x"}
    record = {"algorithm": {"name": "fedavg", "local": {"lr": 0.1}}, "run": {"rounds": 2}, "hansa": "0",
              "experiment": {"tree": {"task": {"dataset": {"name": "digits"}}, "partition": "iid"}}}  # fmt: skip
    about = RunInfo("r", "e", record, "m", tags={"mine": "1"})
    assert params(about) == {"algorithm.name": "fedavg", "algorithm.local.lr": "0.1", "run.rounds": "2",
                             "task.dataset.name": "digits", "partition": "iid"}  # fmt: skip
    assert tags(about) == {"hansa.version": "0", "hansa.algorithm": "fedavg", "hansa.dataset": "digits",
                           "hansa.partition": "iid", "mine": "1"}  # fmt: skip
