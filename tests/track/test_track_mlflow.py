"""MLflow, with a real server: what is logged, a resumed run, a server that goes and comes back, a silent one."""

from __future__ import annotations

import json
import logging
import socket
import subprocess
import sys
import threading
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import torch
from mlflow_process import Process, Server, free_port
from small_runs import experiment_file, run, untimed

import hansa
from hansa.run.config import read
from hansa.run.resume import execute, resume
from hansa.track import track_folder

mlflow = pytest.importorskip("mlflow", reason="the extra hansa[mlflow] is not installed")
pytestmark = pytest.mark.filterwarnings("ignore:.*type hint:UserWarning")  # MLflow's own, of its own code


@pytest.fixture(autouse=True)
def no_telemetry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)


def only_run(uri: str, experiment: str) -> tuple[Any, Any]:
    client = mlflow.MlflowClient(uri)
    found = client.get_experiment_by_name(experiment)
    (only,) = client.search_runs([found.experiment_id])
    return client, only


def steps(client: Any, id: str, metric: str) -> list[int]:
    return [m.step for m in client.get_metric_history(id, metric)]


def test_a_run_with_all_that_belongs_to_it_through_an_interruption(mlflow_server: Server, tmp_path: Path) -> None:
    long = ", ".join(["1"] * 3000)
    path = experiment_file(tmp_path, f'\n[track.mlflow]\nuri = "{mlflow_server.uri}"\nexperiment = "whole"\n')
    experiment = read(path, {"run.own.0": {"lr": 0.25}, "run.rounds": 5, "task.party_test": 0.2})

    def stop(line: dict[str, Any]) -> None:
        if line["round"] == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        execute(experiment, tmp_path / "run", stop)  # no checkpoint yet: the rounds are done again
    client, before = only_run(mlflow_server.uri, "whole")
    assert before.info.status == "KILLED" and steps(client, before.info.run_id, "loss") == [1, 2, 3]
    result = resume(tmp_path / "run")
    client, found = only_run(mlflow_server.uri, "whole")
    assert found.info.run_id == before.info.run_id and found.info.status == "FINISHED"
    assert found.info.run_name == "run" and found.data.tags["hansa.stopped"] == "all rounds done"
    for name in ("accuracy", "loss", "train_loss", "bytes_up", "simulated_seconds", "party_accuracy_worst_tenth"):
        history = client.get_metric_history(found.info.run_id, name)
        assert [m.step for m in history] == [1, 2, 3, 4, 5], name
        assert [m.value for m in history] == [line[name] for line in result.history]
    params = found.data.params
    assert params["algorithm.name"] == "fedavg" and params["algorithm.local.lr"] == "0.5"
    assert params["run.rounds"] == "5" and params["run.own.0.lr"] == "0.25" and params["partition.alpha"] == "0.5"
    tags = found.data.tags
    assert tags["hansa.algorithm"] == "fedavg" and tags["hansa.dataset"] == "digits"
    assert tags["hansa.partition"] == "dirichlet" and tags["hansa.engine"] == "reference"
    assert tags["hansa.version"] == hansa.__version__ and "torch" in tags["hansa.plan"]
    files = {f.path: f.file_size for f in client.list_artifacts(found.info.run_id)}
    assert {"report.html", "partition.png", "experiment.json", "metrics.jsonl", "model.safetensors"} <= set(files)
    assert min(files.values()) > 0
    version = client.get_model_version("whole", "1")
    assert version.run_id == found.info.run_id
    info = mlflow.models.get_model_info(_at(mlflow_server.uri, "models:/whole/1"))
    assert info.signature.inputs.inputs[0].shape == (-1, 1, 8, 8) and info.signature.outputs.inputs[0].shape == (-1, 10)
    assert long not in params.values() and track_folder(tmp_path / "run") == []  # it has all of it
    assert len(client.search_model_versions("name = 'whole'")) == 1


def _at(uri: str, model: str) -> str:
    mlflow.set_tracking_uri(uri)
    return model


def test_a_server_that_is_killed_and_comes_back_gets_every_round(mlflow_server: Server, tmp_path: Path) -> None:
    here = threading.Event()

    def weather(line: dict[str, Any]) -> None:
        if line["round"] == 3:
            here.wait(60)  # until the first rounds are there
            mlflow_server.kill()
        if line["round"] == 6:
            mlflow_server.start()
            mlflow_server.ready()

    def look() -> None:
        client = mlflow.MlflowClient(mlflow_server.uri)
        for _ in range(600):
            found = client.get_experiment_by_name("weather")
            runs = client.search_runs([found.experiment_id]) if found is not None else []
            if runs and "loss" in runs[0].data.metrics:
                break
            threading.Event().wait(0.05)
        here.set()

    looking = threading.Thread(target=look)
    looking.start()
    tracker = hansa.build("tracker", "mlflow", uri=mlflow_server.uri, experiment="weather", model="")
    result = run(rounds=8, track=tracker, on_round=weather)
    looking.join()
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
    result = run(track={"name": "mlflow", "uri": "nonsense://nowhere", "wait": 30.0})
    assert result.summary["rounds"] == 4
    (warning,) = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
    assert "mlflow did not get 4 rounds" in warning and "nonsense" in warning


def test_a_served_model_answers_as_the_run_itself_predicts(mlflow_server: Server, tmp_path: Path) -> None:
    """Missing values and all: the preparation that the parties learned is part of what is served."""
    path = tmp_path / "served.toml"
    path.write_text(
        '[task]\ndataset = "heart"\nmodel = "my_models:small"\nprepare = "standardise"\n'
        '[algorithm]\nname = "fedavg"\n[run]\nrounds = 2\n'
    )
    (tmp_path / "my_models.py").write_text(
        "import torch\n\n\ndef small():\n    return torch.nn.Sequential(torch.nn.Linear(INPUTS, 4), torch.nn.Tanh(), "
        "torch.nn.Linear(4, 2))\n".replace("INPUTS", "22")
    )
    given = read(path, {"track.mlflow.uri": mlflow_server.uri})
    result = execute(given, tmp_path / "run")
    state = json.loads((tmp_path / "run" / "tracking.json").read_text())["trackers"][0]["runs"]
    (remembered,) = state.values()
    assert remembered["state"]["model"] == "models:/served/1"
    port = free_port()
    command = [sys.executable, "-m", "mlflow", "models", "serve", "-m", "models:/served/1", "--env-manager", "local",
               "--port", str(port)]  # fmt: skip
    served = Process(command, tmp_path / "serve.log", MLFLOW_TRACKING_URI=mlflow_server.uri)
    try:
        served.wait_for(f"http://127.0.0.1:{port}/ping")
        x = given.build_task().parties[3][0][:7]  # as they are, before they are prepared
        body = json.dumps({"inputs": [[None if v != v else v for v in row] for row in x.tolist()]})
        request = urllib.request.Request(f"http://127.0.0.1:{port}/invocations", body.encode(),
                                         {"Content-Type": "application/json"})  # fmt: skip
        with urllib.request.urlopen(request, timeout=60) as reply:
            answer = json.loads(reply.read())["predictions"]
    finally:
        served.kill()
    assert torch.isnan(x).any()  # which a body says as null
    torch.testing.assert_close(torch.tensor(answer), result.predict(x))


def test_sqlite_is_the_default_and_a_partys_own_model_is_served_by_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = experiment_file(tmp_path)
    given = read(path, {"algorithm": "fedper", "task.model": "2nn", "task.party_test": 0.2})
    command = [sys.executable, "-m", "hansa.cli", "run", str(path), "--set", "algorithm=fedper",
               "--set", "task.model=2nn", "--set", "task.party_test=0.2", "--out", "run",
               "--set", "track.mlflow.wait=300"]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "models:/small/1" in done.stdout, done.stdout
    assert (tmp_path / "runs" / "mlflow.db").exists()
    assert not (tmp_path / "mlruns").exists() and not (tmp_path / "mlflow.db").exists()
    result = execute(given, tmp_path / "again")
    (files,) = (tmp_path / "runs" / "mlflow" / "small" / "models").glob("*/artifacts")
    model = mlflow.pyfunc.load_model(str(files))
    x = result.training.task.test[0][:5]
    for party in (0, 3):
        assert model.predict(x.numpy(), params={"party": party}) == pytest.approx(
            result.predict(x, party=party).numpy()
        )
