"""Models that stay with deployed parties: fine-tuned and personal models, and their export at the party."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from league import PARTIES, League, samples
from typer.testing import CliRunner

import hansa
from hansa.cli import predict as commands
from hansa.core.op import Party
from hansa.core.plain_data import build
from hansa.holdings.gateway import SampleGateway
from hansa.local import SGD
from hansa.local.finetune import PREFIX
from hansa.net.party import own_models
from hansa.net.party.samples import PartySamples
from hansa.net.party.store import PartyMemory
from hansa.net.party.task_party import task_objective
from hansa.numerics.params import Params
from hansa.plumbing import codec
from hansa.plumbing import crash_points as points
from hansa.plumbing.errors import ConfigError, DataError

TUNING = {"epochs": 2, "lr": 0.2, "batch": 5}
SETTINGS: dict[str, Any] = {"rounds": 2, "seed": 3}
X = torch.randn(4, 3, generator=torch.Generator().manual_seed(8), dtype=torch.float64)


def pair(party: int) -> PartySamples:
    """A party's training samples, and test samples of its own."""
    return PartySamples(samples(party)[0], samples(party + 10)[0])


def tree(algorithm: str = "fedavg", tuning: dict[str, Any] | None = None, **run: Any) -> dict[str, Any]:
    task = {"parties": ["x"], "model": "logistic", "dtype": "float64", "prepare": "standardise"}
    local = {"lr": 0.1, "batch": 6}
    run = {**SETTINGS, **({} if tuning is None else {"finetune": tuning}), **run}
    return {"task": task, "algorithm": {"name": algorithm, "local": local}, "run": run}


def simulated(algorithm: str = "fedavg", tuning: dict[str, Any] | None = None, **run: Any) -> hansa.Result:
    model = build("model", "logistic", inputs=(3,), outputs=2)
    task = hansa.Task(lambda: model().double(), "cross_entropy", [pair(k).train for k in range(3)],
                      party_tests=[pair(k).test for k in range(3)], classes=2, names=PARTIES,
                      prepare=hansa.Standardise())  # fmt: skip
    method = build("algorithm", algorithm, local=SGD(lr=0.1, batch=6))
    return hansa.simulate(method, task, engine="reference", finetune=tuning or {}, **{**SETTINGS, **run})


def joined(league: League, **policies: str) -> None:
    for number, name in enumerate(PARTIES):
        league.join(name, pair(number), policies.get(name, ""))


def home(league: League, name: str) -> Path:
    return league.folder / "homes" / name


def finished(league: League, order: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    job = league.submit(order)
    ended = league.ended(job)
    assert ended["status"] == "finished", ended["reason"]
    return job, json.loads(ended["summary"])


def check_exports(league: League, job: str, wanted: hansa.Result, folder: Path) -> None:
    """Each party exports the model that the simulation has for it, to the bit."""
    for number, name in enumerate(PARTIES):
        path = own_models.export(home(league, name), job, folder / f"{name}.safetensors")
        own = hansa.load(path)
        assert torch.equal(own.predict(X), wanted.predict(X, number))
        exported, expected = own.model().state_dict(), wanted.model(number).state_dict()
        assert all(torch.equal(exported[name], value) for name, value in expected.items())
        assert path.stat().st_mode & 0o077 == 0


@pytest.mark.thin(1)
@pytest.mark.parametrize(("algorithm", "tuning"), [("fedavg", TUNING), ("fedper", None), ("fedper", TUNING)])
def test_parties_export_the_models_that_the_simulation_has_for_them(
    algorithm: str, tuning: dict[str, Any] | None, league: League, tmp_path: Path
) -> None:
    joined(league)
    job, summary = finished(league, tree(algorithm, tuning))
    wanted = simulated(algorithm, tuning)
    assert codec.encode(league.model(job)) == codec.encode(wanted.saved_model())
    assert summary.get("finetuned") == wanted.summary.get("finetuned")
    if tuning is not None:
        assert summary["finetuned"]["before"]["parties"].keys() == summary["finetuned"]["after"]["parties"].keys()
    check_exports(league, job, wanted, tmp_path)
    pulled = hansa.load(league.operator.pull(job, tmp_path / "pulled.safetensors"))
    if algorithm == "fedavg":
        assert torch.equal(pulled.predict(X), wanted.predict(X))  # the common model
    with pytest.raises(ConfigError, match="deployed parties keep their own"):
        pulled.predict(X, party=1)


@pytest.mark.slow
def test_no_answer_to_a_fine_tuning_has_content(league: League, monkeypatch: pytest.MonkeyPatch) -> None:
    answers: dict[str, list[bytes]] = {}
    for number, name in enumerate(PARTIES):
        member = league.join(name, pair(number))
        honest = member.agent.client.upload_and_post

        async def read(path: str, blob: Any, data: Any, *rest: Any, honest: Any = honest) -> bytes:
            answers.setdefault(path.split("/")[6], []).append(bytes(data))
            return await honest(path, blob, data, *rest)

        monkeypatch.setattr(member.agent.client, "upload_and_post", read)
    job, _ = finished(league, tree(tuning=TUNING))
    assert {"round", "finetune", "evaluate", "evaluate-finetuned", "deliver"} <= set(answers)
    memories = [own_models._read(home(league, name), job)["memory"] for name in PARTIES]
    tuned = [memory[f"{PREFIX}w"].numpy().tobytes() for memory in memories]
    for phase in ("finetune", "deliver"):
        for data in answers[phase]:
            reply = codec.decode(data)
            assert not reply["tensors"] and not reply["metrics"] and not reply["maxima"] and int(reply["weight"]) == 1
    for data in (data for each in answers.values() for data in each):
        assert not any(vector in data for vector in tuned)


@pytest.mark.thin(1)
@pytest.mark.parametrize("point", ["ask.opened", "ask.closed", "round.fused", "job.model"])
def test_an_aggregator_that_crashes_during_the_fine_tuning_ends_with_the_same_bits(
    point: str, league: League, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    joined(league)
    crashed: list[str] = []
    reach = points.reach

    def crash(name: str) -> None:
        running = league.runner._running
        last = any(len(league.shown(job)["rounds"]) == 2 for job in running)
        if name == point and last and not crashed:
            crashed.append(name)
            raise OSError(28, "the disk is full")  # the job is interrupted, and resumed
        reach(name)

    for module in ("job", "runtime", "collecting"):
        monkeypatch.setattr(f"hansa.net.aggregator.{module}.reach", crash)
    monkeypatch.setattr("hansa.net.aggregator.job.PAUSE", 0.05)
    job = league.submit(tree(tuning=TUNING))
    ended = league.ended_after_all(job)
    assert ended["status"] == "finished" and crashed, ended["reason"]
    wanted = simulated(tuning=TUNING)
    assert json.loads(ended["summary"])["finetuned"] == wanted.summary["finetuned"]
    check_exports(league, job, wanted, tmp_path)


@pytest.mark.parametrize(
    ("predictor", "payload"),
    [
        ("network", {}),
        ("network", {"model": {"w": torch.zeros(8)}}),
        ("network", {"model": Params.none()._asdict()}),
        ("clustered", {"model": {"w": torch.zeros(1, 8)}, "usual": 9}),
        ("mixed", {"model": 3}),
    ],
)
def test_an_export_of_what_no_honest_aggregator_delivers_is_refused_in_one_sentence(
    predictor: str, payload: dict[str, Any], tmp_path: Path
) -> None:
    (tmp_path / "party.toml").touch()
    task = {"model": {"name": "logistic"}, "dtype": "float64", "shape": [3], "outputs": 2, "loss": "cross_entropy",
            "classes": 2, "seed": 0, "bf16": False}  # fmt: skip
    party = Party(0, task_objective(task, "cpu"), SampleGateway(samples(0)[0]), 0)
    own_models.keep(PartyMemory(tmp_path / "memory"), "heart-1", party, predictor, payload, {}, task, [])
    with pytest.raises(DataError, match="the aggregator has delivered no valid model of this job's task"):
        own_models.export(tmp_path, None, tmp_path / "own.safetensors")


@pytest.mark.slow
def test_a_party_with_a_privacy_floor_fine_tunes_and_keeps_the_metrics(league: League, tmp_path: Path) -> None:
    order = tree(tuning=TUNING)
    order["task"].pop("prepare")
    order["algorithm"]["local"] = {"name": "dp-sgd", "lr": 0.1, "sigma": 1.0, "batch": 6}
    joined(league, bob="[privacy]\ndp = true\n[evaluate]\nmin_samples = 1\n")
    job, summary = finished(league, order)
    assert summary["finetuned"]["parties"] == 3 and "after" not in summary["finetuned"]
    assert hansa.load(own_models.export(home(league, "bob"), job, tmp_path / "own.safetensors")).predict(X).shape == (
        4,
        2,
    )


@pytest.mark.slow
def test_a_party_s_policy_may_refuse_fine_tuning_and_the_others_go_on(league: League, tmp_path: Path) -> None:
    joined(league, bob='ops = ["sgd", "evaluate", "describe", "*standardise*", "column-moments", "deliver"]\n')
    job, summary = finished(league, tree(tuning=TUNING))
    assert summary["finetuned"]["untuned"] == {"bob": "its policy does not accept the op 'finetune'"}
    assert list(summary["finetuned"]["before"]["parties"]) == ["ann", "cid"]
    untuned = hansa.load(own_models.export(home(league, "bob"), job, tmp_path / "bob.safetensors"))
    assert torch.equal(untuned.predict(X), simulated().predict(X))  # it has the global model


@pytest.mark.slow
def test_what_cannot_be_exported_is_refused_in_one_sentence(league: League, tmp_path: Path) -> None:
    joined(league)
    job, _ = finished(league, tree())
    out = tmp_path / "own.safetensors"
    with pytest.raises(ConfigError, match="has models of its own of no job yet"):
        own_models.export(home(league, "ann"), None, out)
    with pytest.raises(ConfigError, match=f"has no model of its own of the job '{job}': .*hansa pull"):
        own_models.export(home(league, "ann"), job, out)
    with pytest.raises(ConfigError, match="is not the folder of a party"):
        own_models.export(tmp_path, job, out)
    job, _ = finished(league, tree(tuning=TUNING))
    with pytest.raises(ConfigError, match=r"ends with \.json"):
        own_models.export(home(league, "ann"), job, tmp_path / "own.json")
    file = home(league, "ann") / "memory" / job / own_models.FILE
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(DataError, match="the file is damaged"):
        own_models.export(home(league, "ann"), None, out)


@pytest.mark.slow
def test_the_command_exports_at_the_party(league: League, tmp_path: Path) -> None:
    joined(league)
    job, _ = finished(league, tree(tuning=TUNING))
    out = tmp_path / "own.safetensors"
    call = ["export", "--state", str(home(league, "cid")), "--job", job, "--out", str(out), "--json"]
    done = CliRunner().invoke(commands.app, call)
    assert done.exit_code == 0, done.output
    assert json.loads(done.output) == {"job": job, "model": str(out)}
    assert torch.equal(hansa.load(out).predict(X), simulated(tuning=TUNING).predict(X, 2))


@pytest.mark.slow
def test_a_delivered_model_is_forgotten_with_its_job(found: Callable[..., League]) -> None:
    league = found()
    joined(league, ann="[limits]\njobs = 1\n")
    first, _ = finished(league, tree(tuning=TUNING))
    second, _ = finished(league, tree(tuning=TUNING))
    assert own_models.jobs(home(league, "ann")) == [second]
    assert own_models.jobs(home(league, "bob")) == [first, second]
