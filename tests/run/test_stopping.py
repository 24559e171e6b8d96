"""When a run stops, when it evaluates, and what it measures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.metrics import mean_absolute_error, r2_score, roc_auc_score
from torch import Tensor, nn

import hansa
from hansa.local import SGD
from hansa.numerics.losses import metrics
from hansa.plumbing import codec
from quadratics import Scalar


def descent(lr: float = 0.25, **settings: Any) -> hansa.Result:
    """w goes to 1 on mse; with lr = 0.25 the error halves every round: 0.5, 0.25, ..., the loss is its square."""
    x, y = torch.zeros(2, 1, dtype=torch.float64), torch.ones(2, 1, dtype=torch.float64)
    task = hansa.Task(Scalar, "mse", [(x, y)] * 2, test=(x, y))
    return hansa.simulate(hansa.FedAvg(local=SGD(lr=lr, batch=None)), task, **{"rounds": 12, **settings})


def test_a_run_takes_as_many_rounds_as_asked() -> None:
    done = descent(rounds=5)
    assert [line["round"] for line in done.history] == [1, 2, 3, 4, 5]
    assert [line["loss"] for line in done.history] == pytest.approx([0.25**r for r in range(1, 6)])
    assert done.summary["stopped"] == "all rounds done"
    assert done.summary["rounds"] == 5


def test_a_run_stops_when_its_metric_reaches_the_target() -> None:
    done = descent(target=0.02)  # 0.25, 0.0625, 0.015625: the third is the first at or below it
    assert len(done.history) == 3
    assert done.summary["stopped"] == "loss reached 0.02"
    assert len(descent(target=0.0625).history) == 2  # reaching it exactly is reaching it


def test_a_target_may_name_another_metric() -> None:
    done = descent(target=0.1, metric="rmse")  # 0.5, 0.25, 0.125, 0.0625
    assert len(done.history) == 4
    assert done.summary["stopped"] == "rmse reached 0.1"


def test_a_higher_accuracy_is_better() -> None:
    x, y = torch.eye(2).repeat(4, 1), torch.tensor([0, 1] * 4)
    task = hansa.Task(lambda: nn.Linear(2, 2), "cross_entropy", [(x, y)], test=(x, y))
    done = hansa.simulate(hansa.FedAvg(local=SGD(lr=5.0)), task, rounds=50, target=1.0)
    assert len(done.history) < 50
    assert done.history[-1]["accuracy"] == 1.0
    assert done.summary["stopped"] == "accuracy reached 1.0"


def test_a_run_stops_when_patience_is_at_an_end() -> None:
    done = descent(lr=1.0, patience=3)  # it jumps from 0 to 2 and back: the loss is 1 for ever
    assert len(done.history) == 4  # one to set the mark, three without improvement
    assert done.summary["stopped"] == "loss did not improve in 3 evaluations"
    assert len(descent(patience=3).history) == 12


def test_patience_counts_evaluations_and_not_rounds() -> None:
    assert len(descent(lr=1.0, patience=2, eval_every=3).history) == 9


def test_a_run_stops_when_its_bytes_are_spent() -> None:
    a_round = descent(rounds=1).history[0]
    cost = a_round["bytes_up"] + a_round["bytes_down"]
    assert cost > 0
    done = descent(byte_budget=3 * cost)
    assert len(done.history) == 3
    assert done.summary["stopped"] == f"the byte budget of {3 * cost} is spent"
    assert done.summary["bytes_up"] + done.summary["bytes_down"] == 3 * cost
    assert len(descent(byte_budget=3 * cost + 1).history) == 4


def test_bytes_are_those_of_the_encoded_messages() -> None:
    from hansa.core.ask import op_config
    from hansa.core.op import Reply

    line = descent(rounds=1).history[0]
    model = {"w": torch.zeros(1).double(), "stats": torch.zeros(0).double(), "counts": torch.zeros(0).long()}
    down = {"op": op_config(SGD(lr=0.25, batch=None)), "payload": {"model": model}, "round": 0}
    up = Reply({"w": torch.zeros(1).double()}, 2, metrics={"train_loss": 1.0}).tree()
    assert line["bytes_down"] == 2 * len(codec.encode(down))
    assert line["bytes_up"] == 2 * len(codec.encode(up))


def test_a_run_stops_when_its_time_is_spent() -> None:
    done = descent(rounds=100_000, time_budget=0.05, eval_every=1000)
    assert 1 <= len(done.history) < 100_000
    assert done.summary["stopped"] == "the time budget of 0.05 s is spent"


@pytest.mark.parametrize(
    ("every", "rounds", "when"), [(1, 3, [1, 2, 3]), (2, 5, [2, 4, 5]), (10, 4, [4]), (3, 6, [3, 6])]
)
def test_a_run_evaluates_every_so_many_rounds_and_at_the_end(every: int, rounds: int, when: list[int]) -> None:
    done = descent(rounds=rounds, eval_every=every)
    assert [line["round"] for line in done.history if "loss" in line] == when
    assert all("train_loss" in line for line in done.history)


def test_evaluating_changes_nothing() -> None:
    assert torch.equal(descent(eval_every=1).params["w"], descent(eval_every=5).params["w"])


def test_stopping_on_something_that_is_not_measured_is_refused() -> None:
    x, y = torch.zeros(2, 1, dtype=torch.float64), torch.ones(2, 1, dtype=torch.float64)
    with pytest.raises(hansa.ConfigError, match="target, patience and keep need a test set"):
        hansa.simulate(hansa.FedAvg(), hansa.Task(Scalar, "mse", [(x, y)]), target=0.1)
    with pytest.raises(hansa.ConfigError, match="the run stops on 'accuracy'"):
        descent(metric="accuracy")


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"rounds": 0}, "rounds must be at least 1"),
        ({"eval_every": 0}, "eval_every must be at least 1"),
        ({"cohort": 1.5}, "cohort must be above 0 and at most 1, got 1.5; for a count, set cohort_size"),
        ({"patience": 0}, "patience must be at least 1"),
        ({"byte_budget": -1}, "byte_budget must be at least 1"),
        ({"max_norm": 0.0}, "max_norm must be above 0"),
        ({"quorum": 2.5}, "quorum"),
        ({"cohort_size": 3}, "cohort_size is 3, but there are 2 parties"),
        ({"round": 3}, "unknown field 'round'; did you mean 'rounds'"),
        ({"device": "gpu"}, "unknown device 'gpu'"),
    ],
)
def test_impossible_settings_are_refused(settings: dict[str, Any], reason: str) -> None:
    with pytest.raises(hansa.ConfigError, match=reason):
        descent(**settings)


# --- what is measured ---


def labelled(parties: int, model: Any) -> hansa.Task:
    """Each party k has ten test samples, k of them of class 0; the model predicts 0."""
    x = torch.zeros(10, 1, dtype=torch.float64)
    tests = [(x, torch.tensor([0] * k + [1] * (10 - k))) for k in range(parties)]
    return hansa.Task(model, "cross_entropy", [(x, torch.tensor([0] * 10))] * parties, party_tests=tests, classes=2)


def says_zero() -> nn.Module:
    module = nn.Linear(1, 2).double()
    with torch.no_grad():
        module.weight.zero_()
        module.bias.copy_(torch.tensor([1.0, -1.0]))
    return module


def test_parties_are_measured_by_mean_worst_tenth_and_variance() -> None:
    parties = 11
    done = hansa.simulate(hansa.FedAvg(), labelled(parties, says_zero), rounds=1)
    line = done.history[0]
    accuracies = [k / 10 for k in range(parties)]
    assert [line["parties"][str(k)]["accuracy"] for k in range(parties)] == pytest.approx(accuracies)
    assert line["party_accuracy_mean"] == pytest.approx(np.mean(accuracies))
    assert line["party_accuracy_variance"] == pytest.approx(np.var(accuracies))
    assert line["party_accuracy_worst_tenth"] == pytest.approx(0.05)  # the two lowest of eleven: 0.0 and 0.1
    losses = [line["parties"][str(k)]["loss"] for k in range(parties)]
    assert line["party_loss_worst_tenth"] == pytest.approx(np.mean(sorted(losses)[-2:]))  # of a loss, the highest
    assert line["accuracy"] == pytest.approx(0.5)  # pooled over samples, there being no central test


def test_without_a_central_test_parties_count_by_their_samples() -> None:
    given = labelled(2, says_zero)
    x = torch.zeros(30, 1, dtype=torch.float64)
    given.party_tests = [(x[:10], torch.zeros(10, dtype=torch.int64)), (x, torch.ones(30, dtype=torch.int64))]
    line = hansa.simulate(hansa.FedAvg(), given, rounds=1).history[0]
    assert line["accuracy"] == pytest.approx(0.25)
    assert line["party_accuracy_mean"] == pytest.approx(0.5)


def test_a_central_test_comes_before_the_parties_own() -> None:
    given = labelled(3, says_zero)
    given.test = (torch.zeros(4, 1, dtype=torch.float64), torch.zeros(4, dtype=torch.int64))
    line = hansa.simulate(hansa.FedAvg(), given, rounds=1).history[0]
    assert line["accuracy"] == 1.0
    assert line["party_accuracy_mean"] == pytest.approx(0.1)
    silent = hansa.simulate(hansa.FedAvg(), given, rounds=1, eval_parties=False).history[0]
    assert not any(name.startswith("party") for name in silent)


def test_a_party_without_test_samples_is_left_out_of_the_mean() -> None:
    given = labelled(3, says_zero)
    tests = list(given.party_tests)  # type: ignore[arg-type]
    tests[0] = (torch.zeros(0, 1, dtype=torch.float64), torch.zeros(0, dtype=torch.int64))
    given.party_tests = tests
    line = hansa.simulate(hansa.FedAvg(), given, rounds=1).history[0]
    assert line["party_accuracy_mean"] == pytest.approx(0.15)
    assert line["replies"] == 3


def test_regression_is_measured_as_scikit_learn_measures_it() -> None:
    make = np.random.default_rng(0)
    target, output = make.normal(size=(50, 1)), make.normal(size=(50, 1))
    found = metrics("mse", torch.tensor(output), torch.tensor(target))
    assert found["r2"] == pytest.approx(r2_score(target, output))
    assert found["mae"] == pytest.approx(mean_absolute_error(target, output))
    assert found["rmse"] == pytest.approx(found["loss"] ** 0.5)
    assert found["loss"] == pytest.approx(((target - output) ** 2).mean())
    assert metrics("mae", torch.tensor(output), torch.tensor(target))["loss"] == pytest.approx(found["mae"])
    flat = metrics("mse", torch.zeros(3, 1), torch.ones(3, 1))
    assert "r2" not in flat  # nothing varies, so there is nothing to explain


def test_two_classes_are_measured_by_the_area_under_the_curve_too() -> None:
    make = np.random.default_rng(0)
    y, score = make.integers(0, 2, 60), make.integers(0, 9, 60).astype(float)  # with ties
    logits = torch.tensor(np.stack([np.zeros(60), score], 1))
    found = metrics("cross_entropy", logits, torch.tensor(y))
    assert found["auc"] == pytest.approx(roc_auc_score(y, score))
    assert found["accuracy"] == pytest.approx(float(((score > 0) == y).mean()))
    assert "auc" not in metrics("cross_entropy", logits, torch.zeros(60, dtype=torch.int64))
    binary = metrics("bce", torch.tensor(score - 4), torch.tensor(y.astype(float)))
    assert binary["auc"] == pytest.approx(roc_auc_score(y, score))


def test_a_regression_run_reports_regression_metrics() -> None:
    line = descent(rounds=1).history[0]
    assert {"loss", "rmse", "mae"} <= set(line)
    assert "accuracy" not in line
    assert line["rmse"] == pytest.approx(0.5)


# --- what is kept ---


def test_a_run_leaves_its_metrics_its_model_and_its_summary(tmp_path: Path) -> None:
    done = descent(rounds=3, run_dir=tmp_path / "run")
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert lines == done.history
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["rounds"] == 3
    assert summary["loss"] == done.history[-1]["loss"]
    saved = codec.decode((tmp_path / "run" / "model.safetensors").read_bytes())
    assert saved["predictor"] == "network"
    assert torch.equal(saved["params"]["w"], done.params["w"])
    experiment = json.loads((tmp_path / "run" / "experiment.json").read_text())
    assert experiment["algorithm"]["local"]["lr"] == 0.25
    assert experiment["run"]["rounds"] == 3
    assert experiment["plan"]["torch"] == torch.__version__


def test_a_result_can_be_saved_later_and_asked_for_its_model(tmp_path: Path) -> None:
    done = descent(rounds=3)
    path = done.save(tmp_path / "later")
    lines = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    assert lines == done.history
    module = done.model()
    assert not module.training
    x = torch.zeros(2, 1, dtype=torch.float64)
    assert torch.equal(module(x), done.predict(x))


def test_on_round_is_told_of_every_round_in_order() -> None:
    seen: list[dict[str, Any]] = []
    done = descent(rounds=4, on_round=seen.append)
    assert seen == done.history


def test_the_same_seed_gives_the_same_bits_and_another_seed_others() -> None:
    def run(seed: int) -> Tensor:
        make = torch.Generator().manual_seed(0)
        parties = [(torch.randn(6, 3, generator=make), torch.randint(2, (6,), generator=make)) for _ in range(4)]
        task = hansa.Task(lambda: nn.Linear(3, 2), "cross_entropy", parties)
        return hansa.simulate(hansa.FedAvg(local=SGD(batch=2)), task, rounds=3, seed=seed, cohort=0.5).state.params.w

    torch.manual_seed(1)
    first = run(0)
    torch.manual_seed(2)
    assert torch.equal(run(0), first)
    assert not torch.equal(run(1), first)


def test_a_run_leaves_torchs_settings_and_generator_as_they_were() -> None:
    before = torch.get_rng_state(), torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    descent(rounds=2, engine="reference")
    after = torch.get_rng_state(), torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    assert torch.equal(before[0], after[0])
    assert before[1:] == after[1:]


def test_a_party_metric_is_raised_or_lowered_as_its_name_says() -> None:
    from hansa.metrics.names import higher_is_better

    assert higher_is_better("party_accuracy_mean") and higher_is_better("party_auc_worst_tenth")
    assert not higher_is_better("party_accuracy_variance") and not higher_is_better("party_loss_mean")


def test_a_quorum_that_can_never_be_met_is_refused() -> None:
    with pytest.raises(hansa.ConfigError, match="quorum of 9 can never be met: a round asks 2 parties"):
        descent(quorum=9)


def test_a_run_stopped_by_its_budget_is_evaluated_at_its_end() -> None:
    result = descent(eval_every=50, byte_budget=1, rounds=100)
    assert result.summary["rounds"] == 1 and result.summary["loss"] is not None
