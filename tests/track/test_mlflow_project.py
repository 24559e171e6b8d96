"""The file `MLproject`: `mlflow run .` runs an experiment, and logs it to the run of the project."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from mlflow_process import QUIET, Server
from small_runs import experiment_file

from hansa.track import RunInfo
from hansa.track.mlflow import MLflow

mlflow = pytest.importorskip("mlflow", reason="the extra hansa[mlflow] is not installed")
pytestmark = pytest.mark.filterwarnings("ignore:.*type hint:UserWarning")  # MLflow's own, of its own code
ROOT = Path(__file__).resolve().parents[2]


def project(uri: str, scratch: Path, *parameters: str) -> subprocess.CompletedProcess[str]:
    """`mlflow run` of the project in this repository, with parameters."""
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)))
    environment = {**os.environ, **QUIET, "PATH": path, "PYTHONPATH": str(ROOT / "src"), "MLFLOW_TRACKING_URI": uri,
                   "TMPDIR": str(scratch)}  # fmt: skip
    command = [sys.executable, "-m", "mlflow", "run", str(ROOT), "--env-manager", "local", "--experiment-name", "mine"]
    arguments = [word for parameter in parameters for word in ("-P", parameter)]
    return subprocess.run([*command, *arguments], env=environment, capture_output=True, text=True, timeout=600)


@pytest.mark.slow
def test_mlflow_runs_the_project_and_has_its_rounds_and_model(mlflow_server: Server, tmp_path: Path) -> None:
    uri = mlflow_server.uri
    client = mlflow.MlflowClient(uri)
    before = len(client.search_experiments())
    path, changed = experiment_file(tmp_path), ("rounds=2", "seed=7", "set=algorithm.local.lr=0.25")
    done = project(uri, tmp_path, f"experiment={path}", f"out={tmp_path / 'run'}", *changed)
    assert done.returncode == 0, done.stderr[-3000:]
    (only,) = client.search_runs([client.get_experiment_by_name("mine").experiment_id])
    assert only.info.status == "FINISHED"
    assert {only.data.params[name] for name in ("rounds", "run.rounds")} == {"2"}
    assert (only.data.params["run.seed"], only.data.params["algorithm.local.lr"]) == ("7", "0.25")
    assert [m.step for m in client.get_metric_history(only.info.run_id, "accuracy")] == [1, 2]
    assert "model.safetensors" in {file.path for file in client.list_artifacts(only.info.run_id)}
    assert len(client.search_experiments()) == before + 1
    failed = project(uri, tmp_path, f"experiment={path}", "rounds=0", f"out={tmp_path / 'none'}")
    assert failed.returncode != 0 and "rounds must be at least 1, got 0" in failed.stderr


@pytest.mark.slow
def test_a_second_run_in_the_same_environment_has_a_run_of_its_own(
    mlflow_server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    uri = mlflow_server.uri
    client = mlflow.MlflowClient(uri)
    begun = client.create_run(client.create_experiment("begun"))
    monkeypatch.setenv("MLFLOW_RUN_ID", begun.info.run_id)
    record: dict[str, Any] = {"hansa": "0", "algorithm": {"name": "fedavg"}, "run": {}, "experiment": None}
    logs = [MLflow(uri=uri).open(RunInfo("r", "e", record, mark), {}, lambda text: None) for mark in ("m", "n", "m")]
    ids = [log.run.info.run_id for log in logs]  # type: ignore[attr-defined]
    assert ids[0] == ids[2] == begun.info.run_id != ids[1]
    for log in logs:
        log.close()
