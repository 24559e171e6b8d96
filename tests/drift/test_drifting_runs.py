"""Runs with drift: equal to runs without one where nothing drifts, the same in every engine, and resumed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from small_pictures import make_task
from typer.testing import CliRunner

import hansa
from hansa.cli.app import app
from hansa.core.op import Memory, Party, Payload, Reply
from hansa.data.prepare import Standardise
from hansa.experiment.config import parse, read
from hansa.local.sgd import SGD
from hansa.sim import engine

TIMES = ("seconds",)
EXTRA = ("concepts", "forgetting", "alarms")
DRIFTS = [
    {"name": "label-shift", "start": 3, "to": [3, 1, 0], "fraction": 0.5},
    {"name": "rotation", "start": 2, "over": 3, "degrees": 60.0},
    {"name": "noise", "start": 4, "std": 0.2, "parties": ["dan"]},
    {"name": "join", "start": 3, "parties": ["ben"]},
    {"name": "leave", "start": 5, "parties": ["ada"]},
    {"name": "day-night", "start": 1, "day": 2, "night": 1, "parties": ["cleo"]},
]


def run(task: hansa.Task, drift: Any = None, algorithm: hansa.Algorithm | None = None, **settings: Any) -> hansa.Result:
    fields = {"rounds": 6, "engine": "reference", **settings}
    return hansa.simulate(algorithm or hansa.FedAvg(local=SGD(lr=0.2)), task, drift=drift, progress=False, **fields)


def plain(result: hansa.Result, *without: str) -> list[dict[str, Any]]:
    return [{k: v for k, v in line.items() if k not in (*TIMES, *without)} for line in result.history]


def same(one: hansa.Result, other: hansa.Result) -> bool:
    return torch.equal(one.state.params.w, other.state.params.w)


# --- nothing drifts ---


@pytest.mark.parametrize(
    "drift",
    [(), [{"name": "rotation", "start": 2, "degrees": 0.0}], [{"name": "noise", "start": 2, "std": 0.0}],
     [{"name": "new-classes", "start": 1, "classes": [1]}], [{"name": "join", "start": 1}],
     [{"name": "leave", "start": 2, "fraction": 0.0}]],
)  # fmt: skip
def test_a_run_in_which_nothing_drifts_is_the_run_without_drift(drift: Any, task: hansa.Task) -> None:
    wanted, made = run(task), run(task, drift)
    assert same(made, wanted)
    assert plain(made, *EXTRA) == plain(wanted)


# --- engines and resume ---


@pytest.mark.parametrize("name", ["workers", "stacked"])
def test_every_engine_trains_the_drifted_samples(name: str, task: hansa.Task) -> None:
    wanted, made = run(task, DRIFTS), run(task, DRIFTS, engine=name)
    if name == "workers":
        assert same(made, wanted)
        assert plain(made) == plain(wanted)
    assert torch.allclose(made.state.params.w, wanted.state.params.w, atol=1e-5)
    still = run(task)
    assert not torch.allclose(still.state.params.w, wanted.state.params.w, atol=1e-3)


@pytest.mark.parametrize("stop", [1, 3, 5])
def test_a_resumed_run_has_the_same_drift(stop: int, task: hansa.Task, tmp_path: Path) -> None:
    settings = {"detect": "page-hinkley"}
    wanted = run(task, DRIFTS, **settings)

    def halt(line: dict[str, Any]) -> None:
        if line["round"] == stop:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(task, DRIFTS, run_dir=tmp_path / "run", on_round=halt, **settings)
    made = run(task, DRIFTS, run_dir=tmp_path / "run", resume=True, **settings)
    assert same(made, wanted)
    assert plain(made) == plain(wanted)


def test_a_run_with_another_drift_is_not_resumed(task: hansa.Task, tmp_path: Path) -> None:
    run(task, DRIFTS[:1], run_dir=tmp_path / "run", rounds=3)
    (tmp_path / "run" / "summary.json").unlink()
    with pytest.raises(hansa.ConfigError, match="begun with another drift"):
        run(task, DRIFTS[:2], run_dir=tmp_path / "run", resume=True, rounds=6)


def test_a_drifted_run_trains_as_a_run_on_the_drifted_samples(task: hansa.Task) -> None:
    turned = [(torch.rot90(x, 1, (-2, -1)), y) for x, y in task.parties]
    test = torch.rot90(task.test[0], 1, (-2, -1)), task.test[1]  # type: ignore[index]
    tests = [(torch.rot90(x, 1, (-2, -1)), y) for x, y in task.party_tests or ()]
    wanted = run(make_task(parties=turned, test=test, party_tests=tests))
    made = run(task, {"name": "rotation", "start": 1})
    assert same(made, wanted)
    assert plain(made, *EXTRA) == plain(wanted)


# --- presence ---


def seen_by(result: hansa.Result) -> dict[int, set[str]]:
    return {line["round"]: set(line["cohort"]) for line in result.history if "cohort" in line}


def test_a_party_that_left_never_trains_again_and_one_that_joins_never_before(
    task: hansa.Task, monkeypatch: pytest.MonkeyPatch
) -> None:
    worked: list[tuple[int, int, str]] = []
    original = engine.perform

    def noted(op: Any, party: Party, payload: Payload, memory: Memory) -> tuple[Reply, Memory] | str:
        worked.append((party.id, party.round, op.name))
        return original(op, party, payload, memory)

    monkeypatch.setattr(engine, "perform", noted)
    task.prepare = Standardise()
    result = run(task, [{"name": "join", "start": 3, "parties": ["ben"]}, {"name": "leave", "start": 5,
                        "parties": ["ada"]}])  # fmt: skip
    assert seen_by(result)[2] == {"ada", "cleo", "dan"}
    assert seen_by(result)[3] == {"ada", "ben", "cleo", "dan"}
    assert seen_by(result)[5] == {"ben", "cleo", "dan"}
    assert result.history[0]["unprepared"] == {"ben": "it has not joined yet"}
    trained = {party: [r for p, r, name in worked if p == party and name == "sgd"] for party in (0, 1)}
    assert trained == {0: [0, 1, 2, 3], 1: [2, 3, 4, 5]}
    measured = [set(line["parties"]) for line in result.history]
    assert [("ben" in names, "ada" in names) for names in measured] == [
        (False, True), (False, True), (True, True), (True, True), (True, False), (True, False)]  # fmt: skip
    before = [name for party, round, name in worked if party == 1 and round < 2]
    assert not before  # not even a statistic of the preparation


def test_asynchronous_work_of_a_party_that_leaves_is_lost(task: hansa.Task) -> None:
    devices = {"compute": {"name": "constant", "value": 1.0}, "latency": {"name": "constant", "value": 0.5}}
    result = run(task, {"name": "leave", "start": 3, "parties": ["ada", "ben"]}, hansa.FedBuff(buffer=2), cohort_size=4,
                 rounds=5, devices=devices)  # fmt: skip
    lost = [line.get("missing", {}) for line in result.history]
    assert {"it has left for good"} >= {why for missing in lost for why in missing.values()}
    assert any(lost[2:]) and not any(lost[:2])


def test_day_and_night_alternate_and_an_empty_night_is_an_empty_round(task: hansa.Task) -> None:
    result = run(task, [{"name": "day-night", "start": 2, "day": 1, "night": 2}])
    assert ["empty" in line for line in result.history] == [False, False, True, True, False, True]
    assert result.history[2]["empty"] == "no party was available"


def test_parties_that_are_not_there_do_not_take_part_in_gossip(task: hansa.Task) -> None:
    result = run(
        task, {"name": "leave", "start": 2, "parties": ["ada"]}, hansa.DecentralizedSGD(), rounds=3, cohort=1.0
    )
    assert "ada" not in result.history[0].get("missing", {})
    assert result.history[1]["missing"]["ada"] == "it has left for good"


# --- forgetting ---


def test_forgetting_is_the_best_past_accuracy_less_the_present_one(task: hansa.Task) -> None:
    drift = [{"name": "rotation", "start": 3}, {"name": "rotation", "start": 5, "degrees": 90.0}]
    result = run(task, drift)
    best: dict[str, float] = {}
    for line in result.history:
        concepts, round = line["concepts"], line["round"]
        begun = [begin for begin in ("1", "3", "5") if int(begin) <= round]
        assert list(concepts) == begun
        lost = [best[begin] - concepts[begin] for begin in begun[:-1]]
        assert line["forgetting"] == pytest.approx(sum(lost) / len(lost) if lost else 0.0, abs=1e-12)
        assert concepts[begun[-1]] == line["accuracy"]
        for begin in begun:
            best[begin] = max(best.get(begin, 0.0), concepts[begin])
    assert result.history[-1]["forgetting"] > 0


def test_a_model_that_no_longer_changes_forgets_nothing(task: hansa.Task) -> None:
    result = run(task, {"name": "rotation", "start": 3}, absent=lambda party, round: True)
    assert [line["forgetting"] for line in result.history] == [0.0] * 6


def test_a_run_may_be_compared_by_what_it_forgets(task: hansa.Task) -> None:
    result = run(task, {"name": "rotation", "start": 3}, metric="forgetting")
    assert result.history[0]["forgetting"] == 0.0
    with pytest.raises(hansa.ConfigError, match="'forgetting' is measured where samples drift"):
        run(task, {"name": "leave", "start": 3, "parties": [0]}, metric="forgetting")


# --- alarms ---


def test_a_step_of_one_partys_data_first_gives_the_alarm_of_this_party(
    task: hansa.Task, caplog: pytest.LogCaptureFixture
) -> None:
    settings: dict[str, Any] = {"rounds": 30, "detect": "page-hinkley", "eval_every": 1}
    quiet = run(task, **settings)
    assert not any("alarms" in line for line in quiet.history)
    result = run(task, {"name": "rotation", "start": 20, "degrees": 180.0, "parties": ["dan"]}, **settings)
    alarms = {line["round"]: set(line["alarms"]) for line in result.history if "alarms" in line}
    first = min(alarms)  # later, the model that learns from dan may become worse for the others
    assert alarms[first] == {"dan"}
    assert 20 <= first <= 24
    assert f"drift alarm in round {first}: party dan: its loss is" in caplog.text


def test_chosen_metrics_give_the_detector_the_same_losses(task: hansa.Task) -> None:
    drift = {"name": "rotation", "start": 12, "degrees": 180.0, "parties": ["dan"]}
    settings: dict[str, Any] = {"rounds": 16, "detect": {"name": "page-hinkley", "threshold": 3.0}}
    one, other = run(task, drift, **settings), run(task, drift, metrics=["f1"], **settings)
    rung = [[(line["round"], list(line["alarms"])) for line in result.history if "alarms" in line]
            for result in (one, other)]  # fmt: skip
    assert rung[0] == rung[1] != []


# --- files, and bad input ---

TREE: dict[str, Any] = {
    "task": {"dataset": "digits", "model": "logistic", "party_test": 0.2}, "partition": {"name": "iid", "parties": 4},
    "run": {"rounds": 3},
}  # fmt: skip


def test_files_have_one_drift_or_several_and_the_command_line_changes_one(tmp_path: Path) -> None:
    path = tmp_path / "drifting.toml"
    head = '[task]\ndataset = "digits"\nmodel = "logistic"\n[run]\nrounds = 3\n'
    path.write_text(
        head + '[[drift]]\nname = "leave"\nstart = 2\nparties = [0]\n[[drift]]\nname = "noise"\nstart = 3\n'
    )
    assert read(path).drift == (hansa.Leaving(start=2, parties=(0,)), hansa.FeatureNoise(start=3))
    with pytest.raises(hansa.ConfigError, match="--set cannot change an entry of a list"):
        read(path, {"drift.start": 1})
    path.write_text(head + '[drift]\nname = "noise"\nstart = 3\n')
    assert read(path, {"drift.std": 0.5}).drift == (hansa.FeatureNoise(start=3, std=0.5),)
    out = tmp_path / "run"
    assert CliRunner().invoke(app, ["run", str(path), "--out", str(out), "--json"]).exit_code == 0
    record = json.loads((out / "experiment.json").read_text())
    assert record["drift"][0] == {"name": "noise", "start": 3, "fraction": None, "parties": [], "over": 1, "std": 1.0}


@pytest.mark.parametrize(
    ("drift", "sentence"),
    [
        ({"name": "rotation", "start": 4}, "it begins in round 4, and the run ends with round 3"),
        ({"name": "noise", "start": 2, "over": 3}, "it is complete in round 4, and the run ends with round 3"),
        ({"name": "rotation", "start": 0}, "start must be at least 1, got 0"),
        ({"name": "rotation"}, "start"),
        ({"name": "rotate", "start": 1}, "rotate"),
        ({"name": "noise", "start": 1, "std": -1.0}, "std must be at least 0, got -1"),
        ({"name": "noise", "start": 1, "fraction": 1.5}, "fraction must be at least 0 and at most 1, got 1.5"),
        ({"name": "noise", "start": 1, "over": 0}, "over must be at least 1"),
        ({"name": "label-shift", "start": 1, "to": [0.0, 0.0]}, "a share for each class, not all 0"),
        ({"name": "new-classes", "start": 2, "classes": []}, "at least one class that appears"),
        ({"name": "day-night", "start": 1, "night": 0}, "night must be at least 1"),
        ({"name": "leave", "start": 1, "fraction": 0.5, "parties": [0]}, "give fraction or parties, not both"),
    ],
)  # fmt: skip
def test_a_schedule_that_cannot_be_is_refused_when_it_is_read(drift: Any, sentence: str) -> None:
    with pytest.raises(hansa.ConfigError, match=sentence) as refused:
        parse({**TREE, "drift": drift})
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("drift", "sentence"),
    [
        ({"name": "new-classes", "start": 2, "classes": [3]}, r"there is no class 3; the classes are 0..2"),
        ({"name": "new-classes", "start": 2, "classes": [0, 1, 2]}, "all classes are new"),
        ({"name": "label-shift", "start": 2, "to": [1, 1]}, "to has 2 shares, and there are 3 classes"),
        ({"name": "leave", "start": 2, "parties": ["eve"]}, "there is no party 'eve'"),
        ({"name": "leave", "start": 2}, "no party is there in round 2"),
        ({"name": "leave", "start": 2, "fraction": 0.1}, "rounded down to no party"),
    ],
)  # fmt: skip
def test_a_drift_that_does_not_fit_the_task_is_refused_in_one_sentence(
    drift: Any, sentence: str, task: hansa.Task
) -> None:
    with pytest.raises(hansa.ConfigError, match=sentence) as refused:
        run(task, [drift])
    assert "\n" not in str(refused.value)
    assert str(refused.value).startswith("drift")


def test_a_rotation_of_tables_and_classes_of_numbers_are_refused() -> None:
    table = hansa.Task(lambda: torch.nn.Linear(2, 1), "mse", [(torch.randn(5, 2), torch.randn(5))])
    with pytest.raises(hansa.ConfigError, match=r"a rotation needs pictures .* a sample has the shape \[2\]"):
        run(table, {"name": "rotation", "start": 1})
    with pytest.raises(hansa.ConfigError, match="the targets of this task are numbers"):
        run(table, {"name": "label-shift", "start": 1})


def test_a_rotation_of_prepared_pictures_is_refused_and_noise_is_not(task: hansa.Task) -> None:
    task.prepare = Standardise()
    with pytest.raises(hansa.ConfigError, match=r"leave task\.prepare out"):
        run(task, {"name": "rotation", "start": 1})
    assert not same(run(task, {"name": "noise", "start": 1}), run(task))


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"baselines": ["local-only"]}, r"run\.baselines train on data that do not change"),
        ({"metric": "membership_auc"}, "compares training samples with test samples"),
    ],
)
def test_settings_that_do_not_go_with_drift_are_refused(settings: Any, sentence: str, task: hansa.Task) -> None:
    with pytest.raises(hansa.ConfigError, match=sentence):
        run(task, {"name": "rotation", "start": 1}, **settings)


def test_a_deployed_experiment_has_no_drift() -> None:
    experiment = parse({**TREE, "drift": {"name": "noise", "start": 1}})
    with pytest.raises(hansa.ConfigError, match=r"\[drift\]: drift exists only in a simulation"):
        experiment.check(deployed=True)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"privacy": {"secure": "masking"}}, "which a secure sum hides"),
        ({"min_cohort": 2}, r"which run\.min_cohort hides"),
        ({"eval_parties": False}, r"set task\.party_test"),
    ],
)
def test_a_detector_that_would_hear_nothing_is_refused(settings: Any, sentence: str, task: hansa.Task) -> None:
    with pytest.raises(hansa.ConfigError, match=sentence):
        run(task, detect="page-hinkley", **settings)
