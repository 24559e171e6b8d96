"""MLflow: parameters, metrics per round, tags, files, and the final model, registered so that it can be served."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, ClassVar

from hansa.core.quantities import Seconds
from hansa.core.registry import register
from hansa.plumbing.errors import ConfigError, HansaError
from hansa.track.tracker import Line, Log, RunInfo, Say, Tracker, draw_partition, numbers, params, tags

DATABASE = "runs/mlflow.db"
MARK = "replies"  # a metric that every round has
KEY, VALUE, TAG = 250, 6000, 5000  # maximal characters of a parameter name, a parameter value and a tag value
STUDY = (".html", ".md", ".csv", ".toml", ".png", ".svg")  # suffixes of the files of a study that are logged
METRICS = 900  # per request: MLflow accepts 1,000, and would split a longer list in the middle of a round
MODEL = ("model.safetensors", "model.json", "personal.safetensors")  # as named in a run folder
FILES = ("report.html", "experiment.json", "metrics.jsonl", "summary.json", *MODEL[:2])
# A busy server may be slow; a request that fails is repeated with its whole event.
PATIENCE = {"MLFLOW_HTTP_REQUEST_TIMEOUT": "30", "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0"}
# Errors that another attempt cannot fix.
FINAL = ("INVALID_PARAMETER_VALUE", "BAD_REQUEST", "PERMISSION_DENIED", "UNAUTHENTICATED", "ENDPOINT_NOT_FOUND",
         "RESOURCE_ALREADY_EXISTS", "FEATURE_DISABLED", "NOT_IMPLEMENTED")  # fmt: skip


@register("mlflow")
@dataclass(frozen=True)
class MLflow(Tracker):
    """A run of an MLflow experiment, at any tracking URI.

    `uri` is by default MLFLOW_TRACKING_URI, or else the SQLite database runs/mlflow.db with the files beside it.
    `experiment` is by default the experiment's name. The final model is registered as `model`, by default under the
    experiment's name; with `model = ""` it is not registered. After the run, events that wait are given up when MLflow
    was idle for `wait` seconds. Within `mlflow run` the run of the project is used.
    """

    uri: str | None = None
    experiment: str | None = None
    model: str | None = None
    wait: Seconds = 60.0
    separate_process: ClassVar[bool] = True
    needs: ClassVar[str | None] = "mlflow"
    takes: ClassVar[str | None] = "uri"

    def open(self, info: RunInfo, state: dict[str, Any], say: Say) -> Log:
        uri = state.get("uri") or self.uri or os.environ.get("MLFLOW_TRACKING_URI")
        return MLflowLog(self, uri or f"sqlite:///{Path(DATABASE).resolve()}", info, state, say)


class MLflowLog(Log):
    """A run at MLflow."""

    def __init__(self, tracker: MLflow, uri: str, info: RunInfo, state: dict[str, Any], say: Say) -> None:
        for name, value in PATIENCE.items():
            os.environ.setdefault(name, value)
        import mlflow
        from mlflow import MlflowClient

        self.tracker, self.info, self._say = tracker, info, say
        self.experiment = _plain(tracker.experiment or info.experiment)
        self._uri = uri
        path = re.fullmatch(r"sqlite:///(?!:memory:)([^?]+)", uri)
        database = Path(path[1]).resolve() if path else None
        if database is not None:
            make_database(database)
        mlflow.set_tracking_uri(uri)
        self._client = MlflowClient(uri)
        files = None if database is None else database.with_suffix("").as_uri()
        self.run = self._client.get_run(state["run"]) if "run" in state else self._find_or_create(files)
        self.state = {**state, "uri": uri, "run": self.run.info.run_id}
        self._last = self._last_round()
        self._log_params()
        self._client.update_run(self.run.info.run_id, status="RUNNING")

    def _find_or_create(self, files: str | None) -> Any:
        """The MLflow run. If it was created but the reply was lost, it is found by its mark."""
        client, info = self._client, self.info
        project = self._of_project()
        if project is not None:
            return project
        experiment = client.get_experiment_by_name(self.experiment)
        if experiment is None:
            location = None if files is None else f"{files}/{re.sub(r'[^A-Za-z0-9_.-]', '_', self.experiment)}"
            id = client.create_experiment(self.experiment, artifact_location=location)
        else:
            id = experiment.experiment_id
        created = client.search_runs([id], f"tags.`hansa.mark` = '{info.mark}'", max_results=1)
        if created:
            return created[0]
        labels = {k: v[:TAG] for k, v in tags(info).items()} | {"hansa.mark": info.mark}
        if info.parent is not None:
            labels["mlflow.parentRunId"] = info.parent["run"]
        run = client.create_run(id, start_time=int(time.time() * 1000), tags=labels, run_name=info.run)
        self._say(f"run {info.run} of experiment {self.experiment}: {run.info.run_id}")
        return run

    def _of_project(self) -> Any | None:
        """The run that `mlflow run` has begun for this process (MLFLOW_RUN_ID), unless another run has taken it."""
        id, info = os.environ.get("MLFLOW_RUN_ID"), self.info
        if id is None or info.parent is not None:
            return None
        run = self._client.get_run(id)
        if run.data.tags.get("hansa.mark", info.mark) != info.mark:
            return None
        for name, value in {**tags(info), "hansa.mark": info.mark}.items():
            self._client.set_tag(id, name, value[:TAG])
        self._say(f"run {run.info.run_name} of the project: {id}")
        return run

    def _last_round(self) -> int:
        """The last round that MLflow has."""
        if MARK not in self.run.data.metrics:
            return 0
        history = self._client.get_metric_history(self.run.info.run_id, MARK)
        return int(max(metric.step for metric in history))

    def _log_params(self) -> None:
        """Log the parameters that MLflow does not have. If MLflow takes two names for the same, the first wins."""
        from mlflow.entities import Param

        values: dict[str, str] = {}
        for name, value in params(self.info).items():
            values.setdefault(_key(name), value[:VALUE])
        listed = [Param(name, value) for name, value in values.items() if value and name not in self.run.data.params]
        if listed:
            self._client.log_batch(self.run.info.run_id, params=listed)

    def rounds(self, lines: list[Line]) -> None:
        from mlflow.entities import Metric

        began = self.run.info.start_time  # times are relative to the run's start: a repeated event is identical
        batch: list[Metric] = []
        for line in lines:
            if line["round"] <= self._last:
                continue
            metrics, at = numbers(line), began + int(1000 * line.get("seconds", 0.0))
            if len(batch) + len(metrics) > METRICS:
                self._client.log_batch(self.run.info.run_id, metrics=batch)
                batch = []
            batch += [Metric(_key(name), value, at, line["round"]) for name, value in metrics.items()]
        if batch:
            self._client.log_batch(self.run.info.run_id, metrics=batch)
        self._last = max(self._last, lines[-1]["round"])

    def finish(self, summary: dict[str, Any], folder: str) -> None:
        id, path = self.run.info.run_id, Path(folder)
        with tempfile.TemporaryDirectory() as scratch:
            for file in self._files(path, Path(scratch)):
                self._client.log_artifact(id, str(file))
        if self.info.study and (path / "plots").is_dir():
            self._client.log_artifacts(id, str(path / "plots"), "plots")
        if summary.get("stopped"):
            self._client.set_tag(id, "hansa.stopped", str(summary["stopped"])[:TAG])
        if self.info.parent is None and not self.info.study and self.tracker.model != "":
            self._log_model(path)
        self._client.set_terminated(id, "FINISHED")

    def _files(self, folder: Path, scratch: Path) -> Iterator[Path]:
        """The files to log of a run, or of a study."""
        if self.info.study:
            yield from sorted(path for path in folder.iterdir() if path.is_file() and path.suffix in STUDY)
            return
        if self.info.parent is None and not (folder / "report.html").exists():
            from hansa.report.run_report import run_report

            run_report(folder)
        yield from (folder / name for name in FILES if (folder / name).exists())
        picture = scratch / "partition.png"
        if draw_partition(self.info, str(picture)):
            yield picture

    def _log_model(self, folder: Path) -> None:
        """Log and register the model. If it cannot be served, say why; its file is logged in any case."""
        if "model" in self.state:
            return
        from mlflow.exceptions import MlflowException

        name = _plain(self.tracker.model or self.experiment)
        try:
            self.state["model"] = self._registered_before(name) or self._registered(folder, name)
        except (HansaError, MlflowException) as error:
            if isinstance(error, MlflowException) and error.error_code not in FINAL:
                raise
            first = str(error).splitlines()[0]
            self._say(f"the model is not registered (its file is with the run): {first}")
            return
        self._say(f"the model is registered as {self.state['model']}")

    def _registered_before(self, name: str) -> str | None:
        """The model, if it was registered but the reply was lost."""
        quoted = name.replace("'", "\\'")
        versions = self._client.search_model_versions(f"name = '{quoted}' and run_id = '{self.run.info.run_id}'")
        return f"models:/{name}/{min(int(each.version) for each in versions)}" if versions else None

    def _registered(self, folder: Path, name: str) -> str:
        import mlflow

        from hansa.artifacts.saved_model import load
        from hansa.track import served

        beside = (self.info.record.get("experiment") or {}).get("folder") or "."
        with tempfile.TemporaryDirectory() as scratch:
            files = Path(scratch) / "hansa"
            files.mkdir()
            for file in MODEL:
                if (folder / file).exists():
                    shutil.copy(folder / file, files / file)
            model = load(files, beside)
            if model.personal and not model.memories:
                raise ConfigError(
                    "each party has its own model, and these models are not in the run folder, or are too large"
                )
            example = served.example(model.about)
            signature = served.signature(model, example)
            with mlflow.start_run(run_id=self.run.info.run_id):
                logged = mlflow.pyfunc.log_model(
                    name="model", python_model=str(Path(served.__file__).with_name("pyfunc.py")),
                    artifacts={"hansa": str(files)}, signature=signature, input_example=example,
                    code_paths=served.code_of(model.about, beside), registered_model_name=name,
                    pip_requirements=[f"{package}=={version(package)}" for package in ("mlflow", "torch", "numpy")]
                    + [f"hansa=={served.VERSION}"],
                )  # fmt: skip
        return f"models:/{name}/{logged.registered_model_version}"

    def fail(self, reason: str) -> None:
        id = self.run.info.run_id
        self._client.set_tag(id, "hansa.failed", reason[:TAG])
        self._client.set_terminated(id, "KILLED" if reason == "interrupted" else "FAILED")

    def close(self) -> None:
        import mlflow

        with contextlib.suppress(Exception):
            mlflow.end_run()


def make_database(path: Path) -> None:
    """Create a database if there is none, as a whole or not at all.

    MLflow creates it step by step. It can neither continue where it was killed, nor create it together with another
    process.
    """
    if path.exists():
        return
    from mlflow import MlflowClient

    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".mlflow-") as scratch:
        new = Path(scratch, "new.db")
        MlflowClient(f"sqlite:///{new}").search_experiments(max_results=1)
        with contextlib.suppress(FileExistsError):  # another process was first
            os.link(new, path)


def _key(name: str) -> str:
    """A name that MLflow accepts: it becomes part of a path."""
    return re.sub(r"[^\w\-. ]", "_", name)[:KEY]


def _plain(name: str) -> str:
    """A name that can be part of a models:/ URI."""
    return re.sub(r"[/:\\]", "_", name)
