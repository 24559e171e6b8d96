"""Waiting for a job: across restarts of the aggregator, with the run's own metric, and each failure reported once."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from league import PARTIES, PATIENCE, League, samples
from typer.testing import CliRunner, Result

import hansa
from hansa.cli import network
from hansa.cli.app import app
from hansa.net import operator as operate
from hansa.net.transport.client import Unreachable
from hansa.plumbing import crash_points as points

pytestmark = pytest.mark.usefixtures("quick")
TASK = {"dataset": "heart", "model": "logistic", "dtype": "float64", "party_test": 0.25}


@pytest.fixture
def command(league: League, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    """Runs a command of the federation's operator; the port is not the one in its file."""
    monkeypatch.setattr(network, "_operator", lambda federation: league.operator)
    return lambda *words: CliRunner().invoke(app, [*words])


def experiment(folder: Path, **run: Any) -> str:
    path = folder / "heart.toml"
    lines = [f"{name} = {json.dumps(value)}" for name, value in run.items()]
    task = [f"{name} = {json.dumps(value)}" for name, value in TASK.items()]
    path.write_text("\n".join(["[task]", *task, "[algorithm]", 'name = "fedavg"', "[run]", *lines]))
    return str(path)


@pytest.mark.slow
def test_waiting_goes_on_when_the_aggregator_restarts(league: League) -> None:
    league.join_all()
    closed: list[str] = []

    def rest(name: str) -> None:
        """The job comes to rest after two rounds, as when the aggregator shuts down."""
        if name == "round.closed":
            closed.append(name)
            if len(closed) == 2:
                league.runner.closing.set()

    points.install(rest)
    job = league.submit({"task": TASK, "run": {"rounds": 40}})
    lines, news, found = list[int](), list[str](), list[Any]()

    def wait() -> None:
        found.append(league.operator.wait(job, lambda line: lines.append(line["round"]), on_news=news.append))

    waiting = threading.Thread(target=wait)
    waiting.start()
    league.until(lambda: len(lines) > 1)
    league.stop()
    points.install(None)
    while not news:  # it has noticed that the aggregator does not respond
        waiting.join(0.02)
        assert waiting.is_alive()
    league.start()
    waiting.join(PATIENCE)
    assert found[0]["status"] == "finished" and lines == list(range(1, 41))  # each round once
    assert "trying again" in news[0] and "answers again" in news[-1]


def test_an_aggregator_that_stays_away_is_given_up(league: League, monkeypatch: pytest.MonkeyPatch) -> None:
    job = league.submit({"task": TASK, "run": {"rounds": 1}})
    operator = league.operator
    assert operator.job(job)["status"] == "running"
    monkeypatch.setattr(operate, "AWAY", 0.3)
    league.stop()
    with pytest.raises(Unreachable, match=rf"`hansa wait .* {job}`"):
        operator.wait(job, known=True)
    with pytest.raises(Unreachable, match="no response"):
        operator.wait(job)  # it has never responded: its address may be wrong
    league.start()


@pytest.mark.slow
def test_a_job_is_waited_for_and_its_own_metric_is_printed(
    league: League, command: Callable[..., Result], tmp_path: Path
) -> None:
    league.join_all()
    got = command("submit", "x", experiment(tmp_path, rounds=2, metric="auc"), "--wait")
    assert got.exit_code == 0, got.output
    lines = [line for line in got.output.splitlines() if line.startswith("round ")]
    assert len(lines) == 2 and all("auc=0." in line or "auc=1." in line for line in lines)
    assert "finished: all rounds done" in got.output
    again = command("wait", "x", "heart-1")
    assert again.exit_code == 0 and again.output == got.output[got.output.index("round 1") :]
    tree = json.loads(command("wait", "x", "heart-1", "--json").output)
    assert (tree["job"], tree["status"]) == ("heart-1", "finished") and "rounds" not in tree
    unknown = command("wait", "x", "heart-9")
    assert unknown.exit_code != 0 and "there is no job 'heart-9'" in str(unknown.exception)


@pytest.mark.slow
def test_who_does_not_take_part_or_counts_for_less_is_said_once_with_the_reason(
    found: Callable[..., League], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    place = found(parties=(*PARTIES, "dora", "eve"))
    for number, name in enumerate((*PARTIES, "dora", "eve")):
        own = samples(number, 400 if name == "ann" else 12, features=4 if name == "dora" else 3)
        place.join(name, own, 'ops = ["describe", "evaluate"]' if name == "bob" else "")
    monkeypatch.setattr(network, "_operator", lambda federation: place.operator)
    got = CliRunner().invoke(app, ["submit", "x", experiment(tmp_path, rounds=2), "--wait"])
    assert got.exit_code == 0, got.output
    assert got.output.count("  not taking part: dora: its samples are (4,), those of most parties (3,)\n") == 1
    assert got.output.count("  missing: bob: ") == 1 and "accept the op 'sgd'" in got.output
    assert got.output.count("  capped: ann: its weight 300 counts as 90, 10 times the median of the replies") == 1
    tree = json.loads(CliRunner().invoke(app, ["wait", "x", "heart-1", "--json"]).output)
    assert list(tree["absent"]) == ["dora"]


def test_a_failure_is_said_once_and_is_the_exit_code_1(
    league: League, command: Callable[..., Result], tmp_path: Path
) -> None:
    league.join_all(**dict.fromkeys(PARTIES, 'jobs = ["other"]'))
    got = command("submit", "x", experiment(tmp_path, rounds=2), "--wait")
    assert got.exit_code == 1, got.output
    assert got.output.count("does not accept the job 'heart'") == 1 and "heart-1 failed: " in got.stderr
    as_json = command("wait", "x", "heart-1", "--json")
    assert as_json.exit_code == 1 and json.loads(as_json.output)["status"] == "failed" and as_json.stderr == ""
    league.operator.stop("heart-1")


def test_who_waits_no_longer_is_told_that_the_job_goes_on(
    league: League, command: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    job = league.submit({"task": TASK, "run": {"rounds": 1}})

    def interrupted(*given: Any, **named: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(operate.Operator, "wait", interrupted)
        got = command("wait", "x", job)
    assert got.exit_code == 130 and f"{job} continues; wait for it with: hansa wait x {job}" in got.stderr


def test_a_model_that_was_pulled_can_be_loaded_and_predicts(
    league: League, command: Callable[..., Result], tmp_path: Path
) -> None:
    league.join_all()
    job = league.submit({"task": {**TASK, "prepare": "standardise"}, "run": {"rounds": 1}})
    assert league.ended(job)["status"] == "finished"
    out = tmp_path / "heart.safetensors"
    got = command("pull", "x", job, "--out", str(out))
    assert got.exit_code == 0 and "hansa.load(" in got.output, got.output
    x = samples(0)[0][0]
    loaded = hansa.load(out)
    first = loaded.predict(x)
    assert first.shape == (12, 2) and set(loaded.params) == set(loaded.model().state_dict())
    assert "StoredModel" in repr(loaded) and loaded.history == []
    folder = tmp_path / "folder"
    folder.mkdir()
    assert command("pull", "x", job, "--out", str(folder / "model.safetensors")).exit_code == 0
    assert torch.equal(hansa.load(folder).predict(x), first)
    out.with_suffix(".json").unlink()  # as version 0.1.0 left it
    with pytest.raises(hansa.ConfigError, match=r"has no heart\.json next to it.*hansa pull"):
        hansa.load(out).predict(x)
    with pytest.raises(hansa.ConfigError, match=r"ends with \.json"):
        league.operator.pull(job, tmp_path / "model.json")
    for path in (Path("."), Path(""), folder):
        for write in (
            lambda path=path: league.operator.pull(job, path),
            lambda path=path: league.operator.export(path),
        ):
            with pytest.raises(hansa.ConfigError, match="is a folder; expected the name of a file"):
                write()
    (tmp_path / "other.bin").write_bytes(b"nothing")
    with pytest.raises(hansa.DataError, match=r"other\.bin is damaged"):
        hansa.load(tmp_path / "other.bin")
