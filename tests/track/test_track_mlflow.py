"""MLflow, with a real server: what is logged, a resumed run, a server that goes and comes back, a silent one."""

from __future__ import annotations

import itertools
import json
import logging
import socket
import sys
import time
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from mlflow_process import Process, Server
from small_runs import experiment_file, run, untimed

import hansa
from hansa.experiment.config import read
from hansa.net.local import free_port
from hansa.run.resume import execute, resume, stored_experiment
from hansa.track import RunInfo, track_folder
from hansa.track.mlflow import PATIENCE, make_database

mlflow = pytest.importorskip("mlflow", reason="the extra hansa[mlflow] is not installed")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:.*type hint:UserWarning"),
]  # MLflow's own, of its own code

WAIT = 600.0  # seconds; a busy machine may be slow


@pytest.fixture(autouse=True)
def no_telemetry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    for name, value in {**PATIENCE, "MLFLOW_HTTP_REQUEST_TIMEOUT": "600"}.items():
        monkeypatch.setenv(name, value)  # a log that is opened in this process would set it for all later tests


def only_run(uri: str, experiment: str) -> tuple[Any, Any]:
    client = mlflow.MlflowClient(uri)
    found = client.get_experiment_by_name(experiment)
    (only,) = client.search_runs([found.experiment_id])
    return client, only


def steps(client: Any, id: str, metric: str) -> list[int]:
    return [m.step for m in client.get_metric_history(id, metric)]


HEART = """
[task]
dataset = "heart"
model = "my_models:small"
prepare = "standardise"
party_test = 0.2
[algorithm]
name = "fedavg"
local = { lr = 0.5, batch = 50 }
[run]
rounds = 5
engine = "reference"
own = { 0 = { lr = 0.25 } }
"""
MODULE = """
import torch


def small():
    return torch.nn.Sequential(torch.nn.Linear(22, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2))
"""


@dataclass
class Whole:
    """A run that was interrupted after three of its five rounds, and resumed."""

    uri: str
    folder: Path
    before: Any  # as MLflow had it when it was interrupted
    steps: list[int]  # and the rounds
    result: hansa.Result


@pytest.fixture(scope="module")
def whole(mlflow_server: Server, tmp_path_factory: pytest.TempPathFactory) -> Whole:
    folder = tmp_path_factory.mktemp("whole")
    (folder / "my_models.py").write_text(MODULE)
    path = folder / "whole.toml"
    path.write_text(f'{HEART}\n[track.mlflow]\nuri = "{mlflow_server.uri}"\nwait = {WAIT}\n')

    def stop(line: dict[str, Any]) -> None:
        if line["round"] == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        execute(read(path), folder / "run", stop)  # no checkpoint yet: the rounds are done again
    client, before = only_run(mlflow_server.uri, "whole")
    found = steps(client, before.info.run_id, "loss")
    return Whole(mlflow_server.uri, folder / "run", before, found, resume(folder / "run"))


def test_a_run_that_was_interrupted_goes_on_and_repeats_no_round(whole: Whole) -> None:
    assert whole.before.info.status == "KILLED" and whole.steps == [1, 2, 3]
    assert whole.before.data.tags["hansa.failed"] == "interrupted"
    client, found = only_run(whole.uri, "whole")
    assert found.info.run_id == whole.before.info.run_id and found.info.status == "FINISHED"
    assert found.info.run_name == "run" and found.data.tags["hansa.stopped"] == "all rounds done"
    for name in ("accuracy", "loss", "train_loss", "bytes_up", "simulated_seconds", "party_accuracy_worst_tenth"):
        history = client.get_metric_history(found.info.run_id, name)
        assert [m.step for m in history] == [1, 2, 3, 4, 5], name
        assert [m.value for m in history] == [line[name] for line in whole.result.history]


def test_a_run_has_all_that_belongs_to_it(whole: Whole) -> None:
    client, found = only_run(whole.uri, "whole")
    params, tags = found.data.params, found.data.tags
    assert params["algorithm.name"] == "fedavg" and params["algorithm.local.lr"] == "0.5"
    assert params["run.rounds"] == "5" and params["run.own.0.lr"] == "0.25" and params["task.dataset"] == "heart"
    assert tags["hansa.algorithm"] == "fedavg" and tags["hansa.dataset"] == "heart"
    assert tags["hansa.engine"] == "reference" and tags["hansa.version"] == hansa.__version__
    assert "torch" in tags["hansa.plan"]
    files = {f.path: f.file_size for f in client.list_artifacts(found.info.run_id)}
    assert {"report.html", "partition.png", "experiment.json", "metrics.jsonl", "model.safetensors"} <= set(files)
    assert min(files.values()) > 0
    assert client.get_model_version("whole", "1").run_id == found.info.run_id
    mlflow.set_tracking_uri(whole.uri)
    info = mlflow.models.get_model_info("models:/whole/1")
    assert info.signature.inputs.inputs[0].shape == (-1, 22) and info.signature.outputs.inputs[0].shape == (-1, 2)


def test_what_mlflow_has_already_is_not_sent_again_even_where_nobody_was_told(whole: Whole) -> None:
    """The process was killed before it could report: the run is found by its mark, and its model by the run."""
    assert track_folder(whole.folder) == []
    path = whole.folder / "tracking.json"
    tree = json.loads(path.read_text())
    (mark,) = tree["trackers"][0]["runs"]
    assert tree["trackers"][0]["runs"].pop(mark)["state"]["model"] == "models:/whole/1"
    path.write_text(json.dumps(tree))
    assert track_folder(whole.folder) == []
    client, found = only_run(whole.uri, "whole")
    assert found.info.status == "FINISHED" and steps(client, found.info.run_id, "loss") == [1, 2, 3, 4, 5]
    assert [v.version for v in client.search_model_versions("name = 'whole'")] == ["1"]
    (kept,) = json.loads(path.read_text())["trackers"][0]["runs"].values()
    assert kept["ended"] == "finish" and kept["state"]["model"] == "models:/whole/1"


def test_a_served_model_answers_as_the_run_itself_predicts(whole: Whole, tmp_path: Path) -> None:
    """With missing values: the preparation that the parties learned is part of the served model."""
    port = free_port()
    command = [sys.executable, "-m", "mlflow", "models", "serve", "-m", "models:/whole/1", "--env-manager", "local",
               "--port", str(port)]  # fmt: skip
    served = Process(command, tmp_path / "serve.log", MLFLOW_TRACKING_URI=whole.uri)
    try:
        served.wait_for(f"http://127.0.0.1:{port}/ping")
        x = stored_experiment(whole.folder).build_task().parties[3][0][:7]  # as they are, before they are prepared
        body = json.dumps({"inputs": [[None if v != v else v for v in row] for row in x.tolist()]})
        request = urllib.request.Request(f"http://127.0.0.1:{port}/invocations", body.encode(),
                                         {"Content-Type": "application/json"})  # fmt: skip
        with urllib.request.urlopen(request, timeout=WAIT) as reply:
            answer = json.loads(reply.read())["predictions"]
    finally:
        served.kill()
    assert torch.isnan(x).any()  # which a body says as null
    torch.testing.assert_close(torch.tensor(answer), whole.result.predict(x))


def test_a_server_that_is_killed_and_comes_back_gets_every_round(mlflow_server: Server, tmp_path: Path) -> None:
    def weather(line: dict[str, Any]) -> None:
        if line["round"] == 3:
            until_the_first_rounds_are_there()
            mlflow_server.kill()
        if line["round"] == 6:
            mlflow_server.start()
            mlflow_server.ready()

    def until_the_first_rounds_are_there() -> None:
        client, end = mlflow.MlflowClient(mlflow_server.uri), time.monotonic() + WAIT
        while True:
            found = client.get_experiment_by_name("weather")
            runs = client.search_runs([found.experiment_id]) if found is not None else []
            if runs and "loss" in runs[0].data.metrics:
                return
            assert time.monotonic() < end, "no round is there"
            time.sleep(0.05)

    tracker = hansa.build("tracker", "mlflow", uri=mlflow_server.uri, experiment="weather", model="", wait=WAIT)
    result = run(rounds=8, track=tracker, on_round=weather)
    assert untimed(result.history) == untimed(run(rounds=8).history)
    client, found = only_run(mlflow_server.uri, "weather")
    assert found.info.status == "FINISHED" and steps(client, found.info.run_id, "loss") == list(range(1, 9))


def test_a_server_that_accepts_and_never_answers_does_not_stop_the_run(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "1")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        uri = f"http://me:secret@127.0.0.1:{silent.getsockname()[1]}"
        result = run(track={"name": "mlflow", "uri": uri, "wait": 4.0}, run_dir=tmp_path / "run")
    assert result.summary["rounds"] == 4
    (warning,) = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
    assert "mlflow did not get 4 rounds" in warning and f"{tmp_path}/run/metrics.jsonl" in warning
    assert "secret" not in caplog.text


def test_a_wrong_uri_costs_a_warning_and_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    result = run(track={"name": "mlflow", "uri": "nonsense://nowhere", "wait": WAIT})
    assert result.summary["rounds"] == 4
    (warning,) = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
    assert "mlflow did not get 4 rounds" in warning and "nonsense" in warning


def test_a_database_is_there_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Killed:
        def __init__(self, uri: str) -> None:
            Path(uri.removeprefix("sqlite:///")).write_text("half of it")

        def search_experiments(self, max_results: int) -> None:
            raise KeyboardInterrupt

    class Second(Killed):
        def search_experiments(self, max_results: int) -> None:
            (tmp_path / "m.db").write_text("of the first")

    monkeypatch.setattr(mlflow, "MlflowClient", Killed)
    with pytest.raises(KeyboardInterrupt):
        make_database(tmp_path / "m.db")
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setattr(mlflow, "MlflowClient", Second)
    make_database(tmp_path / "m.db")
    assert (tmp_path / "m.db").read_text() == "of the first"


def opened(server: Server, mark: str, **record: Any) -> tuple[Any, list[str]]:
    """A log in this process, and its messages."""
    said: list[str] = []
    tracker = hansa.build("tracker", "mlflow", uri=server.uri)
    return tracker.open(RunInfo("r", "direct", record, mark), {}, said.append), said


def test_steps_and_times_are_the_rounds_own_and_an_event_that_comes_twice_is_there_once(mlflow_server: Server) -> None:
    log, said = opened(mlflow_server, "twice")
    assert said == [f"run r of experiment direct: {log.run.info.run_id}"]
    lines = [{"round": n, "seconds": 1.5 * n, "loss": 1.0 / n, "replies": 2} for n in range(1, 6)]
    lines[2]["loss"] = float("nan")
    log.rounds(lines[:3])
    log.rounds(lines[2:4])  # an answer was lost
    assert log._last == 4
    id, client, log = (
        log.run.info.run_id,
        log._client,
        opened(mlflow_server, "twice")[0],
    )  # another process, that knows nothing
    assert log.run.info.run_id == id
    log._last = 2  # as if it had been asked before the third was there
    log.rounds(lines)
    began = log.run.info.start_time
    history = client.get_metric_history(id, "replies")
    assert [(m.step, m.timestamp - began) for m in history] == [(n, 1500 * n) for n in range(1, 6)]
    assert [(m.step, m.value) for m in client.get_metric_history(id, "loss")] == [
        (1, 1.0),
        (2, 0.5),
        (4, 0.25),
        (5, 0.2),
    ]


def test_the_last_round_of_a_run_that_goes_on_is_the_one_that_is_there_whole(mlflow_server: Server) -> None:
    first = opened(mlflow_server, "goes on")[0]
    first.rounds([{"round": n, "loss": 0.5, "replies": 1} for n in range(1, 13)])
    again = opened(mlflow_server, "goes on")[0]
    assert again._last == 12 and opened(mlflow_server, "another")[0]._last == 0
    again.rounds([{"round": n, "loss": 0.25, "replies": 1} for n in (11, 12, 13)])  # done again, with other numbers
    history = again._client.get_metric_history(again.run.info.run_id, "loss")
    assert [(m.step, m.value) for m in history] == [*((n, 0.5) for n in range(1, 13)), (13, 0.25)]


def test_no_request_is_larger_than_mlflow_takes(mlflow_server: Server) -> None:
    """1,000 metrics and 100 parameters at once; a value of 6,000 characters, and names that are part of a path."""
    own = {f"p{n}": n for n in range(230)} | {"long": "x" * 7000, "a:1": "first", "a?1": "second", "../up//": 1}
    log, _ = opened(mlflow_server, "large", run={"own": own})
    params = log._client.get_run(log.run.info.run_id).data.params
    assert len(params) == 233 and params["run.own.p229"] == "229" and len(params["run.own.long"]) == 6000
    assert params["run.own.a_1"] == "first" and params["run.own..._up__"] == "1"
    names = [f"m{n}" for n in range(30)]
    requests: list[list[int]] = []  # the rounds in each
    plain = log._client.log_batch

    def log_batch(id: str, metrics: Any) -> None:
        requests.append([m.step for m in metrics])
        plain(id, metrics=metrics)

    log._client.log_batch = log_batch
    log.rounds([{"round": n, "replies": 1, **dict.fromkeys(names, 1.0)} for n in range(1, 201)])
    assert max(len(rounds) for rounds in requests) <= 1000
    assert all(set(one).isdisjoint(other) for one, other in itertools.combinations(requests, 2))  # no round in two
    for name in ("m0", "m29", "replies"):
        assert steps(log._client, log.run.info.run_id, name) == list(range(1, 201))


def test_a_model_that_cannot_be_served_is_said_and_a_server_that_fails_is_tried_again(
    mlflow_server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mlflow.exceptions import MlflowException

    log, said = opened(mlflow_server, "no model")
    (tmp_path / "report.html").write_text("<!DOCTYPE html>")

    def failing(code: str) -> Any:
        def registered(folder: Path, name: str) -> str:
            raise MlflowException(f"because of {code}", error_code=code_of(code))

        return registered

    def code_of(code: str) -> int:
        from mlflow.protos.databricks_pb2 import ErrorCode

        return int(ErrorCode.Value(code))

    monkeypatch.setattr(log, "_registered", failing("TEMPORARILY_UNAVAILABLE"))
    with pytest.raises(MlflowException):
        log.finish({"stopped": "done"}, str(tmp_path))
    assert log._client.get_run(log.run.info.run_id).info.status == "RUNNING" and len(said) == 1
    monkeypatch.setattr(log, "_registered", failing("PERMISSION_DENIED"))
    log.finish({"stopped": "done"}, str(tmp_path))
    assert said[1:] == ["the model is not registered (its file is with the run): because of PERMISSION_DENIED"]
    assert log._client.get_run(log.run.info.run_id).info.status == "FINISHED" and "model" not in log.state


def test_sqlite_is_the_default_and_a_partys_own_model_is_served_by_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    path = experiment_file(tmp_path)
    given = read(path, {"algorithm": "fedper", "task.model": "2nn", "task.party_test": 0.2, "track.mlflow.wait": WAIT})
    with caplog.at_level(logging.INFO, "hansa"):
        result = execute(given, tmp_path / "run")
    assert "mlflow: the model is registered as models:/small/1" in caplog.text
    assert sorted(p.name for p in (tmp_path / "runs").iterdir()) == ["mlflow", "mlflow.db"]
    assert not (tmp_path / "mlruns").exists() and not (tmp_path / "mlflow.db").exists()
    (files,) = (tmp_path / "runs" / "mlflow" / "small" / "models").glob("*/artifacts")
    model = mlflow.pyfunc.load_model(str(files))
    x = result.training.task.test[0][:5]
    for party in (0, 3):
        assert model.predict(x.numpy(), params={"party": party}) == pytest.approx(
            result.predict(x, party=party).numpy()
        )
