"""Fine-tuning after the last round: card 10.1 of the specification."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hansa
from hansa.core.plain_data import build
from hansa.core.registry import registered
from hansa.experiment.config import parse
from hansa.local import DPSGD, SGD
from hansa.local.finetune import PREFIX
from hansa.plumbing.errors import ConfigError, HansaError
from hansa.testing import TREE
from quadratics import ENGINES
from small_tasks import net

TUNING = {"epochs": 3, "lr": 0.2, "batch": None}
SIZES = [5, 9, 4]


def samples(sizes: list[int], seed: int = 0) -> list[tuple[Tensor, Tensor]]:
    draws, n = torch.Generator().manual_seed(seed), sum(sizes)
    x = torch.randn(n, 4, generator=draws, dtype=torch.float64)
    return list(zip(x.split(sizes), torch.randint(0, 3, (n,), generator=draws).split(sizes), strict=True))


def task(sizes: list[int] = SIZES, tests: list[int] | None = None, **more: Any) -> hansa.Task:
    return hansa.Task(net, "cross_entropy", samples(sizes), party_tests=samples(tests or [6] * len(sizes), 1),
                      classes=3, **more)  # fmt: skip


METHOD = hansa.FedAvg(local=SGD(lr=0.3, batch=3))


def descended(module: nn.Module, x: Tensor, y: Tensor, epochs: int, lr: float) -> nn.Module:
    """The module after full-batch gradient steps, written out."""
    for _ in range(epochs):
        module.zero_grad()
        nn.functional.cross_entropy(module(x), y).backward()
        with torch.no_grad():
            for parameter in module.parameters():
                assert parameter.grad is not None
                parameter -= lr * parameter.grad
    return module


@pytest.mark.parametrize("engine", ENGINES)
def test_a_party_whose_fine_tuning_diverges_keeps_its_model(engine: str) -> None:
    done = hansa.simulate(METHOD, task(), rounds=1, engine=engine, finetune={"epochs": 9, "lr": 1e308, "batch": 2})
    assert done.summary["finetuned"]["parties"] == 3 and "untuned" not in done.summary["finetuned"]
    plain = hansa.simulate(METHOD, task(), rounds=1, engine=engine)
    assert all(torch.equal(done.memories[k][f"{PREFIX}w"], plain.state.params.w) for k in range(3))
    x = samples([4], 2)[0][0]
    assert torch.equal(done.predict(x), plain.predict(x))


@pytest.mark.parametrize("engine", ENGINES)
def test_no_epochs_are_the_identity_to_the_bit(engine: str) -> None:
    plain = hansa.simulate(METHOD, task(), rounds=2, engine=engine)
    none = hansa.simulate(METHOD, task(), rounds=2, engine=engine, finetune={"epochs": 0})
    assert all(torch.equal(none.params[name], value) for name, value in plain.params.items())
    assert not none.memories.get(0) and "finetuned" not in none.summary and not none.personal


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("method", [METHOD, hansa.FedPer(local=SGD(lr=0.3, batch=3))], ids=["fedavg", "fedper"])
def test_every_party_descends_from_its_final_model_at_the_rate_of_the_fine_tuning(method: Any, engine: str) -> None:
    plain = hansa.simulate(method, task(), rounds=2, engine=engine)
    tuned = hansa.simulate(method, task(), rounds=2, engine=engine, finetune=TUNING)
    torch.testing.assert_close(tuned.state.params.w, plain.state.params.w, rtol=0, atol=0)  # the global model stays
    for party, (x, y) in enumerate(samples(SIZES)):
        expected = descended(plain.model(party if plain.personal else None), x, y, 3, 0.2)
        for name, value in tuned.model(party).state_dict().items():
            torch.testing.assert_close(value, expected.state_dict()[name], rtol=0, atol=1e-12)


def test_the_summary_has_each_party_s_metrics_before_and_after() -> None:
    plain = hansa.simulate(METHOD, task(), rounds=2)
    tuned = hansa.simulate(METHOD, task(), rounds=2, finetune=TUNING)
    assert tuned.history[-1]["parties"] == plain.history[-1]["parties"]  # the rounds are the same
    summary = tuned.summary["finetuned"]
    assert summary["before"]["parties"] == plain.history[-1]["parties"]
    for party, (x, y) in enumerate(samples([6] * 3, 1)):
        loss = float(nn.functional.cross_entropy(tuned.predict(x, party), y))
        assert summary["after"]["parties"][str(party)]["loss"] == pytest.approx(loss, abs=1e-12)
    losses = [metrics["loss"] for metrics in summary["after"]["parties"].values()]
    assert summary["after"]["party_loss_mean"] == pytest.approx(sum(losses) / 3)
    assert summary["after"]["party_loss_mean"] != summary["before"]["party_loss_mean"]
    assert (summary["parties"], summary["epochs"], summary["lr"]) == (3, 3, 0.2)
    assert json.loads(json.dumps(summary)) == summary


def test_a_run_that_stops_early_is_fine_tuned_too() -> None:
    done = hansa.simulate(METHOD, task(), rounds=50, target=100.0, metric="loss", finetune=TUNING)
    assert len(done.history) == 1 and done.summary["finetuned"]["parties"] == 3


def test_workers_give_the_bits_of_the_reference() -> None:
    one, other = (
        hansa.simulate(METHOD, task(), rounds=1, engine=engine, finetune={"epochs": 2, "batch": 2})
        for engine in ("reference", "workers")
    )
    for party in range(3):
        assert torch.equal(one.memories[party][f"{PREFIX}w"], other.memories[party][f"{PREFIX}w"])


TRAINED = [
    name
    for name, part in registered("algorithm").items()
    if part.__module__.startswith("hansa.") and part.trains  # type: ignore[attr-defined]
]


@pytest.mark.thin(4)
@pytest.mark.parametrize("name", TRAINED)
def test_it_follows_every_algorithm_that_trains_a_network(name: str) -> None:
    method: Any = build("algorithm", name)
    more = {"trusted": samples([6], 2)[0]} if method.trusts else {}
    done = hansa.simulate(method, task(**more), rounds=2, finetune={"epochs": 1})
    assert done.summary["finetuned"]["parties"] == 3
    assert done.summary["finetuned"]["after"]["loss"] != done.summary["finetuned"]["before"]["loss"]


def test_it_is_refused_where_no_party_has_a_network() -> None:
    tree = {**TREE, "run": {**TREE["run"], "finetune": {"epochs": 1}}, "algorithm": {"name": "naive-bayes"}}
    with pytest.raises(ConfigError, match=r"run\.finetune: naive-bayes trains no network"):
        parse(tree)
    with pytest.raises(ConfigError, match=r"run\.finetune: id3 trains no network"):
        hansa.simulate(build("algorithm", "id3"), task(), rounds=1, finetune={"epochs": 1})


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"epochs": -1}, "epochs must be at least 0, got -1; 0 means no fine-tuning"),
        ({"epochs": 1, "lr": 0}, "lr must be above 0, got 0"),
        ({"epoch": 1}, "unknown field 'epoch'; did you mean 'epochs'"),
        ({"epochs": 1, "momentum": 2}, "momentum must be at least 0"),
    ],
)
def test_bad_settings_are_refused_in_one_sentence(settings: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        hansa.simulate(METHOD, task(), rounds=1, finetune=settings)


def test_with_differential_privacy_no_metric_of_a_fine_tuned_model_leaves_its_party() -> None:
    private = DPSGD(lr=0.3, batch=3, sigma=1.0, clip=1.0)
    for method, privacy in (
        (hansa.FedAvg(local=private), None),
        (METHOD, {"dp": {"kind": "central", "sigma": 1.0, "clip": 1.0}}),
    ):
        eval_parties = privacy is None  # central differential privacy does not allow it
        done = hansa.simulate(method, task(), rounds=1, finetune=TUNING, privacy=privacy, eval_parties=eval_parties)
        summary = done.summary["finetuned"]
        assert summary["parties"] == 3 and "after" not in summary and "before" not in summary
        assert "differential privacy does not cover" in summary["unmeasured"]
        assert f"{PREFIX}w" in done.memories[0]


def test_behind_a_secure_sum_only_means_are_known() -> None:
    done = hansa.simulate(METHOD, task(), rounds=1, finetune=TUNING, privacy={"secure": "masking"})
    summary = done.summary["finetuned"]
    for when in ("before", "after"):
        assert "loss" in summary[when] and "parties" not in summary[when] and "party_loss_mean" not in summary[when]
    assert summary["after"]["loss"] < summary["before"]["loss"] + 10


def test_parties_without_samples_are_named() -> None:
    done = hansa.simulate(METHOD, task([5, 0, 4], [6, 6, 0]), rounds=1, finetune=TUNING)
    summary = done.summary["finetuned"]
    assert summary["untuned"] == {"1": "it has no samples"} and summary["parties"] == 2
    assert summary["untested"] == ["2"]
    assert list(summary["before"]["parties"]) == list(summary["after"]["parties"]) == ["0"]


def test_without_test_samples_of_the_parties_the_summary_says_so() -> None:
    bare = hansa.Task(net, "cross_entropy", samples(SIZES), classes=3)
    done = hansa.simulate(METHOD, bare, rounds=1, finetune=TUNING)
    sentence = "no party measures the model on test samples of its own; set task.party_test"
    assert done.summary["finetuned"]["unmeasured"] == sentence


def test_evaluation_that_is_off_is_named_as_the_cause() -> None:
    done = hansa.simulate(METHOD, task(), rounds=1, eval_parties=False, finetune=TUNING)
    assert done.summary["finetuned"]["unmeasured"].endswith("run.eval_parties is false")


@pytest.mark.parametrize("engine", ENGINES)
def test_a_single_sample_in_the_last_batch_cannot_train_batch_norm_unless_it_is_left_out(engine: str) -> None:
    def normed() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)).double()

    given = hansa.Task(normed, "cross_entropy", samples(SIZES), classes=3)
    whole = hansa.FedAvg(local=SGD(lr=0.3, batch=None))
    with pytest.raises(HansaError, match=r"drop_last \(of the local solver, or of run\.finetune\)"):
        hansa.simulate(whole, given, rounds=1, engine=engine, finetune={"epochs": 1, "batch": 4})
    done = hansa.simulate(whole, given, rounds=1, engine=engine, finetune={"epochs": 1, "batch": 4, "drop_last": True})
    assert done.summary["finetuned"]["parties"] == 3


def test_a_run_folder_has_the_global_model_and_each_party_s_own(tmp_path: Path) -> None:
    make = build("model", "logistic", inputs=(4,), outputs=3)
    wanted = hansa.Task(make, "cross_entropy", samples(SIZES), classes=3, prepare=hansa.Standardise())
    done = hansa.simulate(METHOD, wanted, rounds=2, finetune=TUNING, run_dir=tmp_path / "run")
    stored, x = hansa.load(tmp_path / "run"), samples([4], 3)[0][0]
    assert torch.equal(stored.predict(x), done.predict(x))
    assert all(torch.equal(stored.params[name], value) for name, value in done.params.items())
    for party in range(3):
        assert torch.equal(stored.predict(x, party=party), done.predict(x, party))
        assert not torch.equal(stored.predict(x, party=party), done.predict(x))
        assert torch.equal(stored.model(party=party).state_dict()["1.weight"],
                           done.model(party).state_dict()["1.weight"])  # fmt: skip


def test_a_run_with_more_rounds_goes_on_from_the_model_before_the_fine_tuning(tmp_path: Path) -> None:
    whole = hansa.simulate(METHOD, task(), rounds=4, finetune=TUNING)
    hansa.simulate(METHOD, task(), rounds=2, finetune=TUNING, run_dir=tmp_path / "run")
    (tmp_path / "run" / "summary.json").unlink()
    more = hansa.simulate(METHOD, task(), rounds=4, finetune=TUNING, run_dir=tmp_path / "run", resume=True)
    assert torch.equal(more.state.params.w, whole.state.params.w)
    assert all(torch.equal(more.memories[k][f"{PREFIX}w"], whole.memories[k][f"{PREFIX}w"]) for k in range(3))
