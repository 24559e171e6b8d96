"""Run an experiment, and resume a run that was stopped."""

from __future__ import annotations

import dataclasses
from datetime import datetime
from pathlib import Path
from typing import Any

from hansa.artifacts.run_folder import SUMMARY, RunFolder
from hansa.experiment.config import Experiment, parse
from hansa.plumbing.errors import ConfigError
from hansa.report.progress import Watch
from hansa.run.result import Result
from hansa.run.simulate import simulate


def new_folder(name: str, under: str = "runs") -> Path:
    """The path of a new run folder, named after the experiment and the time."""
    stamp = f"{name}-{datetime.now():%Y%m%d-%H%M%S}"
    path, number = Path(under) / stamp, 1
    while path.exists():
        number += 1
        path = Path(under) / f"{stamp}-{number}"
    return path


def execute(experiment: Experiment, run_dir: Path, on_round: Watch | None = None) -> Result:
    """Simulate an experiment, with metrics and checkpoints in `run_dir`."""
    record = {"tree": experiment.tree, "folder": str(Path(experiment.folder).resolve()), "name": experiment.name}
    return simulate(experiment.algorithm, experiment.build_task(), run_dir=run_dir, on_round=on_round,
                    track=experiment.track or None, experiment=record, progress=False,
                    **experiment.settings())  # fmt: skip


def stored_experiment(run_dir: str | Path) -> Experiment:
    """The experiment of a run folder."""
    record: dict[str, Any] | None = RunFolder(run_dir).experiment()["experiment"]
    if record is None:
        raise ConfigError(
            f"{run_dir} was made from Python, so its task is not stored; resume it with hansa.simulate(..., "
            "run_dir=..., resume=True) and the same task"
        )
    return dataclasses.replace(parse(record["tree"], record["folder"]), name=record.get("name", ""))


def resume(run_dir: str | Path, force: bool = False, on_round: Watch | None = None, track: Any = None) -> Result:
    """Continue a run from its last checkpoint; under the same plan the final model has the same bits.

    The run keeps its trackers, unless `track` names others.
    """
    experiment = stored_experiment(run_dir)
    if (Path(run_dir) / SUMMARY).exists():
        raise ConfigError(f"the run {run_dir} has finished; `hansa show {run_dir}` prints it")
    record = {"tree": experiment.tree, "folder": experiment.folder, "name": experiment.name}
    return simulate(experiment.algorithm, experiment.build_task(), run_dir=run_dir, resume=True, force=force,
                    on_round=on_round, track=track, experiment=record, **experiment.settings())  # fmt: skip
