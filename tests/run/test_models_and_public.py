"""Parties with different architectures, and public samples, in every engine and in experiment files."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import hansa
from hansa.artifacts import saved_model
from hansa.experiment.config import parse, read
from hansa.experiment.deployed import own_samples
from hansa.experiment.tasks import load_data
from hansa.holdings.public import PublicSamples
from hansa.plumbing import codec
from hansa.plumbing.errors import ConfigError
from hansa.study.inputs import functions_of, inputs

DRAWS = torch.Generator().manual_seed(1)
LINE = torch.tensor([1.0, -2.0, 0.5])
X = torch.randn(120, 3, generator=DRAWS)
Y = (X @ LINE > 0).long()
PUBLIC = torch.randn(30, 3, generator=DRAWS)
PAIRS = [(X[k * 6 : k * 6 + 6], Y[k * 6 : k * 6 + 6]) for k in range(4)]
TESTS = [(X[40 + k * 20 : 60 + k * 20], Y[40 + k * 20 : 60 + k * 20]) for k in range(4)]


def small() -> nn.Module:
    return nn.Linear(3, 2)


def large() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 2))


def frozen() -> nn.Module:
    module = nn.Sequential(nn.Linear(3, 6), nn.ReLU(), nn.Linear(6, 2))
    module[0].requires_grad_(False)
    return module


MODELS = {"small": small, "large": large, "frozen": frozen}


def task(**fields: Any) -> hansa.Task:
    given = {"models": MODELS, "parties": PAIRS, "party_tests": TESTS, "public": PUBLIC, "classes": 2, **fields}
    return hansa.Task(**given)


METHOD = hansa.FedMD(local=hansa.SGD(lr=0.2, epochs=4, batch=6), align=20, private_epochs=2)


def test_parties_of_different_architectures_learn_and_keep_models_of_their_own(tmp_path: Path) -> None:
    result = hansa.simulate(METHOD, task(), rounds=6)
    assert result.history[-1]["accuracy"] > 0.75
    sizes = [len(result.memories[k]["own/w"]) for k in range(4)]
    assert sizes == [8, 66, 14, 8]
    assert not torch.equal(result.memories[0]["own/w"], result.memories[3]["own/w"])  # the same model, other values
    loaded = saved_model.load(result.save(tmp_path / "run"))
    for party, (x, _) in enumerate(TESTS):
        scores = result.predict(x, party)
        assert torch.equal(scores, loaded.predict(x, party)) and torch.equal(scores, result.model(party)(x).detach())
        assert torch.equal(loaded.model(party)(x).detach(), scores)
        assert torch.equal(hansa.load(tmp_path / "run").predict(x, party=party), scores)
    found = [float((result.predict(x, k).argmax(1) == y).double().mean()) for k, (x, y) in enumerate(TESTS)]
    assert sum(found) / 4 == pytest.approx(result.history[-1]["accuracy"])


def test_a_single_model_for_all_parties_works_too() -> None:
    runs = [hansa.simulate(METHOD, task(**models), rounds=2).memories[2]["own/w"]
            for models in ({"models": {"small": small}}, {"models": None, "model": small})]  # fmt: skip
    assert torch.equal(*runs)


@pytest.mark.parametrize("engine", ["reference", "workers", "stacked", "auto"])
def test_every_engine_trains_one_party_at_a_time_and_says_why(engine: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "hansa"):
        result = hansa.simulate(METHOD, task(), rounds=1, engine=engine)
    assert "engine reference: one party at a time, because the parties train several models" in caplog.text
    assert result.experiment["plan"]["engine"] == "reference"


def test_a_party_that_misses_a_round_keeps_its_model() -> None:
    result = hansa.simulate(METHOD, task(), rounds=1, absent=lambda party, round: party == 1)
    assert 1 not in result.memories or "own/w" not in result.memories[1]
    assert "own/w" in result.memories[0]


@pytest.mark.parametrize(
    ("assigned", "names"),
    [(None, ["small", "large", "frozen", "small"]), (["large"], ["large"] * 4),
     (["large", "small"], ["large", "small"] * 2),
     ({"a": "small", "b": "small", "c": "large", "d": "frozen"}, ["small", "small", "large", "frozen"])],
)  # fmt: skip
def test_the_task_says_which_party_trains_which_model(assigned: Any, names: list[str]) -> None:
    result = hansa.simulate(METHOD, task(assigned=assigned, names=list("abcd")), rounds=1)
    models = result.training.holdings.models
    assert models is not None and [models.name(k) for k in range(4)] == names
    assert [len(result.memories[k]["own/w"]) for k in range(4)] == [models.of(k).spec.dim for k in range(4)]


def test_public_samples_are_counted_once_and_prepared_as_the_parties_samples_are() -> None:
    plain, longer = (hansa.simulate(METHOD, task(public=PUBLIC[:n]), rounds=1, eval_every=5) for n in (20, 30))
    sizes = [codec.size(PublicSamples(PUBLIC[:n]).tree()) for n in (20, 30)]
    assert longer.summary["bytes_down"] - plain.summary["bytes_down"] == 4 * (sizes[1] - sizes[0]) > 0
    twice = hansa.simulate(METHOD, task(public=PUBLIC[:20]), rounds=2, eval_every=5)
    rounds = [line["bytes_down"] for line in twice.history]
    assert twice.summary["bytes_down"] == sum(rounds) + 4 * sizes[0]
    prepared = hansa.simulate(METHOD, task(prepare=hansa.Standardise()), rounds=1)
    holdings = prepared.training.holdings
    assert holdings.public is not None and not torch.equal(holdings.public.x, PUBLIC)
    op, learned = prepared.training.preparation or (None, {})
    assert op is not None and torch.equal(holdings.public.x, op.transform(PUBLIC, learned))


REFUSED = [
    ({"model": small}, "one model for all parties, or several by name; leave one out"),
    ({"models": {}}, "expected at least one model"),
    ({"models": {"a": 7}}, "models: 'a': model: expected a function"),
    ({"models": {"a": small, "b": lambda: nn.Linear(3, 2).double()}}, "several types"),
    ({"models": {"a": small, "b": lambda: nn.Linear(4, 2)}}, r"models: 'b' does not take samples of the shape \(3,\)"),
    ({"models": {"a": small, "b": lambda: nn.Linear(3, 1)}}, "models: 'b': the model gives 1 outputs"),
    ({"assigned": ["smal"]}, "assigned: there is no model 'smal'; did you mean 'small'"),
    ({"assigned": "small"}, "assigned: expected a list of models"),
    ({"assigned": {"0": "small"}}, "assigned: it has a model for 1 of 4 parties"),
    ({"assigned": {"9": "small"}}, "assigned: there is no party '9'"),
    ({"models": None, "model": small, "assigned": ["small"]}, "there is no models"),
    ({"models": None}, "its parties train models of their own, and the task has none"),
    ({"public": None}, "needs samples that every party sees"),
    ({"public": torch.zeros(4, 5)}, r"public: samples are \(5,\), the parties' \(3,\)"),
    ({"public": torch.zeros(0, 3)}, "public: there is no sample"),
    ({"public": (torch.zeros(4, 3), torch.tensor([0, 1, 2, 0]))}, r"public: targets must lie in 0\.\.1"),
    ({"public": (torch.zeros(4, 3), torch.zeros(3))}, "both need one row per sample"),
    ({"public": (torch.zeros(4, 3), torch.zeros(4), 1)}, r"public: expected x, or a pair \(x, y\)"),
    ({"public": torch.full((2, 3), torch.nan)}, "public: the features have missing values"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "sentence"), REFUSED, ids=[text[:40] for _, text in REFUSED])
def test_a_task_that_does_not_fit_is_refused_in_one_sentence(fields: dict[str, Any], sentence: str) -> None:
    with pytest.raises(hansa.HansaError, match=sentence) as refused:
        hansa.simulate(METHOD, task(**fields), rounds=1)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("algorithm", ["fedavg", "fedper", "scaffold", "fedbuff", "d-psgd", "naive-bayes"])
def test_an_algorithm_of_one_model_refuses_several_and_public_samples(algorithm: str) -> None:
    method = hansa.build("algorithm", algorithm)
    with pytest.raises(ConfigError, match=r"combines updates of one model, and task\.models has 3 \(small, large"):
        hansa.simulate(method, task(public=None), rounds=1)
    with pytest.raises(ConfigError, match=r"uses no public samples; leave task\.public out"):
        hansa.simulate(method, task(models=None, model=small), rounds=1)


def test_a_run_resumes_to_the_same_bits_and_is_refused_with_other_models(tmp_path: Path) -> None:
    whole = hansa.simulate(METHOD, task(), rounds=4)
    hansa.simulate(METHOD, task(), rounds=2, run_dir=tmp_path / "run", checkpoint_seconds=0.0)
    for other in ({"assigned": ["large", "small"]}, {"public": PUBLIC + 1}):
        with pytest.raises(ConfigError, match="begun with"):
            hansa.simulate(METHOD, task(**other), rounds=4, run_dir=tmp_path / "run", resume=True)
    done = hansa.simulate(METHOD, task(), rounds=4, run_dir=tmp_path / "run", resume=True)
    assert all(torch.equal(done.memories[k]["own/w"], whole.memories[k]["own/w"]) for k in range(4))
    assert done.summary["bytes_down"] == whole.summary["bytes_down"]


TOML = """
[task]
dataset = "heart"
prepare = "standardise"
{task}

[task.models]
small = "logistic"
large = {{ name = "2nn", hidden = 4 }}

[partition]
name = "iid"
parties = 3

[algorithm]
name = "fedmd"

[run]
rounds = 1
"""


def public_rows() -> tuple[Any, Any]:
    return load_data(parse({"task": {"dataset": "heart", "model": "logistic"}})).x[:12].numpy(), [0, 1] * 6


@pytest.mark.slow
@pytest.mark.parametrize(
    "public", ["20", '"public.npz"', '"test_models_and_public:public_rows"'], ids=["number", "file", "function"]
)
def test_an_experiment_file_names_models_and_public_samples(public: str, tmp_path: Path) -> None:
    x = load_data(parse({"task": {"dataset": "heart", "model": "logistic"}})).x
    np.savez(tmp_path / "public.npz", x=x[:20].numpy(), y=np.arange(20) % 2)
    path = tmp_path / "experiment.toml"
    path.write_text(TOML.format(task=f'assigned = ["large", "small"]\npublic = {public}'))
    experiment = read(path)
    task = experiment.build_task()
    result = hansa.simulate(experiment.algorithm, task, **experiment.settings())
    holdings = result.training.holdings
    assert holdings.models is not None and holdings.models.turn == ("large", "small") and holdings.public is not None
    assert len(holdings.public.x) == (12 if "rows" in public else 20) and holdings.public.y is not None
    assert sum(len(pair[0]) for pair in task.parties) == len(x) - (20 if public == "20" else 0)
    own, _ = own_samples(experiment)
    sent = own["public"][0] if isinstance(own["public"], tuple) else own["public"]
    torch.testing.assert_close(sent, task.public[0], rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    ("task", "sentence"),
    [('model = "logistic"', "one model for all parties, or several by name"),
     ('assigned = ["tiny"]', "assigned: there is no model 'tiny'"), ("public = 0", "public must be at least 1, got 0"),
     ('assigned = "small"', "assigned"), ('public = "nowhere.npz"', "nowhere.npz"),
     ('public = "test_models_and_public:nothing"', "has no 'nothing'"),
     ("public = 100000", "task.public: cannot keep")],
)  # fmt: skip
def test_an_experiment_file_that_does_not_fit_is_refused(task: str, sentence: str, tmp_path: Path) -> None:
    path = tmp_path / "experiment.toml"
    path.write_text(TOML.format(task=task))
    with pytest.raises(hansa.HansaError, match=sentence):
        read(path).build_task()


def test_the_key_of_a_run_covers_public_samples_and_the_functions_of_models(tmp_path: Path) -> None:
    (tmp_path / "public.csv").write_text("a,y\n1,0\n")
    task = {
        "dataset": "heart",
        "models": {"a": "logistic", "b": "test_models_and_public:small"},
        "public": "public.csv",
    }
    found = inputs(parse({"task": task, "algorithm": "fedmd"}, str(tmp_path)))
    assert "test_models_and_public" in found["code"] and set(found["files"]) == {"public.csv"}
    called = parse({"task": {**task, "public": "test_models_and_public:public_rows"}, "algorithm": "fedmd"})
    assert inputs(called)["files"] == {} and "test_models_and_public:public_rows" in functions_of(called)


def test_an_unknown_model_is_named_with_its_setting(tmp_path: Path) -> None:
    tree = {"task": {"dataset": "heart", "models": {"a": "logistik"}}, "algorithm": "fedmd"}
    with pytest.raises(ConfigError, match=r"task\.models\.a: .*'logistik'.*'logistic'"):
        parse(tree)
    with pytest.raises(ConfigError, match=r"set task\.model, or task\.models"):
        parse({"task": {"dataset": "heart"}, "algorithm": "fedmd"})
